"""Architectures of many kinds, tiny and of random weights: the table of test_architectures.py.

A new one is a new function with @architecture() or its kin. It returns the model, and makes it of tensors of at most
about 64 KiB each, and of 280,000 parameters or more: 12 % of its data have to hold what one operator, and the update of
one parameter, need.

SPDX-License-Identifier: Apache-2.0
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, LENGTH, BATCH, CLASSES = 128, 8, 2, 5
WIDTH, INNER, LAYERS, HEADS = 64, 128, 7, 4


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What the tests need to know of one.

    Attributes:
      build: makes the model; within gm.init(), too.
      batch: the keyword arguments of a forward pass, of a step's number.
      loss: of what the forward pass returns.
      output: tensors of what it returns, of which evaluation must give the same bits.
      generate: arguments of model.generate(), as a function of a batch; None if there is no such method.
      library: that it comes from; "" for those below.
      inference: whether torch alone can evaluate it in inference mode after it was trained.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], dict]
    loss: Callable
    output: Callable
    generate: Callable | None
    library: str
    inference: bool = True


ARCHITECTURES: dict[str, Architecture] = {}


def generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def text(step: int) -> dict:
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator(step))
    return {"input_ids": ids, "labels": ids}


def labelled_text(step: int) -> dict:
    return {**text(step), "labels": torch.tensor([step % CLASSES, 1])}


def images(size: int, channels: int = 3) -> Callable[[int], dict]:
    return lambda step: {
        "pixel_values": torch.randn(BATCH, channels, size, size, generator=generator(step)),
        "labels": torch.tensor([step % CLASSES, 1]),
    }


def plain_images(step: int) -> dict:
    return {"x": torch.randn(BATCH, 3, 16, 16, generator=generator(step))}


def numbers(step: int) -> dict:
    return {"x": torch.randn(BATCH, LENGTH, WIDTH, generator=generator(step))}


def ids(step: int) -> dict:
    return {"x": torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator(step))}


def tensors_of(out: object) -> list[torch.Tensor]:
    """All tensors in what a forward pass has returned."""
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, dict):
        out = list(out.values())
    return [one for value in out for one in tensors_of(value)] if isinstance(out, (list, tuple)) else []


def squares(out: object) -> torch.Tensor:
    return sum(one.square().mean() for one in tensors_of(out) if one.is_floating_point())


def greedy(batch: dict) -> dict:
    return {"input_ids": batch["input_ids"][:, :4], "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}


def architecture(
    batch: Callable = text,
    loss: Callable = lambda out: out.loss,
    output: Callable = tensors_of,
    generate: Callable | None = None,
    library: str = "transformers",
    inference: bool = True,
) -> Callable:
    """Puts what a function builds into the table, under the function's name."""

    def register(build):
        ARCHITECTURES[build.__name__] = Architecture(build, batch, loss, output, generate, library, inference)
        return build

    return register


def _transformers(name, config, **options):
    import transformers

    return getattr(transformers, name)(getattr(transformers, config)(**options))


own = functools.partial(architecture, loss=squares, library="")
diffuser = functools.partial(architecture, loss=squares, library="diffusers")
causal = functools.partial(architecture, generate=greedy)
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "max_position_embeddings": 64,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**SIZES, "num_key_value_heads": 2, **TOKENS}
VISION = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 9,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": CLASSES,
}


# ---- transformers: decoders
@causal()
def gpt2():
    return _transformers(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=VOCAB,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=64,
        **TOKENS,
    )


@causal()
def gpt_neox():
    return _transformers("GPTNeoXForCausalLM", "GPTNeoXConfig", **SIZES, **TOKENS)


@causal()
def gptj():
    return _transformers(
        "GPTJForCausalLM",
        "GPTJConfig",
        vocab_size=VOCAB,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=64,
        rotary_dim=8,
        **TOKENS,
    )


@causal()
def opt():
    return _transformers(
        "OPTForCausalLM",
        "OPTConfig",
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        ffn_dim=INNER,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
        layerdrop=0.0,
        **TOKENS,
    )


@causal()
def bloom():
    return _transformers(
        "BloomForCausalLM", "BloomConfig", vocab_size=VOCAB, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS, **TOKENS
    )


@causal()
def falcon():
    return _transformers(
        "FalconForCausalLM",
        "FalconConfig",
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        ffn_hidden_size=INNER,
        new_decoder_architecture=True,
        num_kv_heads=2,
        **TOKENS,
    )


@causal()
def llama():
    return _transformers("LlamaForCausalLM", "LlamaConfig", **GROUPED)


@causal()
def qwen2():
    return _transformers("Qwen2ForCausalLM", "Qwen2Config", **GROUPED, tie_word_embeddings=True)


@causal()
def qwen3():
    return _transformers("Qwen3ForCausalLM", "Qwen3Config", **GROUPED, head_dim=16)


@causal()
def phi3():
    return _transformers("Phi3ForCausalLM", "Phi3Config", **{**GROUPED, "intermediate_size": 96})


@causal()
def gemma2():
    return _transformers(
        "Gemma2ForCausalLM", "Gemma2Config", **GROUPED, head_dim=16, sliding_window=4, query_pre_attn_scalar=16
    )


@causal()
def gemma3():
    return _transformers(
        "Gemma3ForCausalLM", "Gemma3TextConfig", **GROUPED, head_dim=16, sliding_window=4, query_pre_attn_scalar=16
    )


@causal()
def olmo2():
    return _transformers("Olmo2ForCausalLM", "Olmo2Config", **GROUPED)


@causal()
def stablelm():
    return _transformers(
        "StableLmForCausalLM", "StableLmConfig", **GROUPED, qk_layernorm=True, use_parallel_residual=True
    )


@causal()
def mixtral():
    return _transformers(
        "MixtralForCausalLM",
        "MixtralConfig",
        **{**GROUPED, "intermediate_size": 48, "num_hidden_layers": 5},
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
    )


@causal()
def qwen2_moe():
    return _transformers(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        **{**GROUPED, "num_hidden_layers": 6},
        moe_intermediate_size=24,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
    )


@causal()
def qwen3_moe():
    return _transformers(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        **{**GROUPED, "num_hidden_layers": 6},
        head_dim=16,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
    )


@causal()
def deepseek_v3():
    return _transformers(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        **{**GROUPED, "num_key_value_heads": HEADS},
        moe_intermediate_size=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    )


@causal()
def gpt_oss():
    return _transformers(
        "GptOssForCausalLM",
        "GptOssConfig",
        **{**GROUPED, "intermediate_size": 24},
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
    )


@causal()
def mamba():
    return _transformers(
        "MambaForCausalLM",
        "MambaConfig",
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=9,
        state_size=8,
        **TOKENS,
    )


@causal()
def mamba2():
    return _transformers(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=12,
        head_dim=16,
        num_heads=8,
        state_size=8,
        n_groups=1,
        chunk_size=8,
        **TOKENS,
    )


@causal()
def rwkv():
    return _transformers(
        "RwkvForCausalLM",
        "RwkvConfig",
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        attention_hidden_size=WIDTH,
        intermediate_size=INNER,
        context_length=32,
        **TOKENS,
    )


@causal()
def recurrent_gemma():
    return _transformers(
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        lru_width=WIDTH,
        attention_window_size=8,
        **TOKENS,
    )


# ---- transformers: encoders
@architecture(labelled_text)
def bert():
    return _transformers("BertForSequenceClassification", "BertConfig", **SIZES, num_labels=CLASSES)


@architecture()
def roberta():
    return _transformers("RobertaForMaskedLM", "RobertaConfig", **SIZES, **TOKENS)


@architecture()
def deberta_v2():
    return _transformers(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        **SIZES,
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        conv_kernel_size=3,
    )


@architecture(labelled_text)
def albert():
    """One layer, seven times."""
    return _transformers(
        "AlbertForSequenceClassification",
        "AlbertConfig",
        **{**SIZES, "num_hidden_groups": 6, "num_hidden_layers": 12},
        embedding_size=32,
        num_labels=CLASSES,
    )


@architecture(labelled_text)
def electra():
    return _transformers(
        "ElectraForSequenceClassification", "ElectraConfig", **SIZES, embedding_size=32, num_labels=CLASSES
    )


@architecture(labelled_text)
def xlnet():
    return _transformers(
        "XLNetForSequenceClassification",
        "XLNetConfig",
        vocab_size=VOCAB,
        d_model=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        d_inner=INNER,
        num_labels=CLASSES,
    )


@architecture()
def modernbert():
    return _transformers(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        **{**SIZES, "num_hidden_layers": 8},
        **TOKENS,
        cls_token_id=1,
        sep_token_id=2,
        local_attention=8,
    )


# ---- transformers: encoders with decoders
def _from_text(batch):
    return {"input_ids": batch["input_ids"], "max_new_tokens": 3, "do_sample": False, "num_beams": 2}


@architecture(generate=_from_text)
def t5():
    return _transformers(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=VOCAB,
        d_model=WIDTH,
        d_kv=16,
        d_ff=INNER,
        num_layers=4,
        num_heads=HEADS,
        decoder_start_token_id=0,
        initializer_factor=0.1,
    )


@architecture(generate=_from_text)
def bart():
    return _transformers(
        "BartForConditionalGeneration",
        "BartConfig",
        vocab_size=VOCAB,
        d_model=WIDTH,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=INNER,
        decoder_ffn_dim=INNER,
        max_position_embeddings=64,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
        **TOKENS,
    )


def _sound_and_text(step):
    labels = torch.randint(3, VOCAB, (BATCH, 6), generator=generator(step))
    return {"input_features": torch.randn(BATCH, 8, 24, generator=generator(step + 50)), "labels": labels}


@architecture(
    _sound_and_text,
    generate=lambda batch: {"input_features": batch["input_features"], "max_new_tokens": 3, "do_sample": False},
)
def whisper():
    return _transformers(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        vocab_size=VOCAB,
        d_model=WIDTH,
        encoder_layers=4,
        decoder_layers=3,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=INNER,
        decoder_ffn_dim=INNER,
        num_mel_bins=8,
        max_source_positions=12,
        max_target_positions=16,
        decoder_start_token_id=1,
        suppress_tokens=[],
        begin_suppress_tokens=[],
        **TOKENS,
    )


# ---- transformers: vision, sound, both
@architecture(images(16))
def vit():
    return _transformers("ViTForImageClassification", "ViTConfig", **VISION)


@architecture(images(16))
def deit():
    return _transformers("DeiTForImageClassification", "DeiTConfig", **VISION)


@architecture(images(16))
def dinov2():
    return _transformers("Dinov2ForImageClassification", "Dinov2Config", **{**VISION, "mlp_ratio": 2})


@architecture(images(32))
def swin():
    return _transformers(
        "SwinForImageClassification",
        "SwinConfig",
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 4, 5],
        num_heads=[1, 2, 4],
        window_size=4,
        mlp_ratio=2.0,
        num_labels=CLASSES,
    )


@architecture(images(32))
def convnextv2():
    return _transformers(
        "ConvNextV2ForImageClassification",
        "ConvNextV2Config",
        num_stages=3,
        hidden_sizes=[16, 32, 56],
        depths=[2, 3, 10],
        patch_size=2,
        num_labels=CLASSES,
    )


@architecture(
    lambda step: {
        "pixel_values": torch.randn(BATCH, 3, 32, 32, generator=generator(step)),
        "labels": torch.randint(0, CLASSES, (BATCH, 8, 8), generator=generator(step)),
    }
)
def segformer():
    return _transformers(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        num_encoder_blocks=3,
        depths=[2, 3, 4],
        sr_ratios=[2, 2, 1],
        hidden_sizes=[16, 32, 64],
        patch_sizes=[3, 3, 3],
        strides=[4, 2, 2],
        num_attention_heads=[1, 2, 4],
        mlp_ratios=[2, 2, 2],
        decoder_hidden_size=64,
        num_labels=CLASSES,
    )


def _image_and_text(step):
    return {"pixel_values": images(16)(step)["pixel_values"], "input_ids": text(step)["input_ids"], "return_loss": True}


@architecture(_image_and_text, output=lambda out: [out.logits_per_image, out.text_embeds, out.image_embeds])
def clip():
    part = {
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_hidden_layers": 5,
        "projection_dim": 32,
    }
    return _transformers(
        "CLIPModel",
        "CLIPConfig",
        text_config={**part, "vocab_size": VOCAB, "max_position_embeddings": 16, "eos_token_id": 2},
        vision_config={**part, "image_size": 16, "patch_size": 4},
        projection_dim=32,
    )


def _llava_batch(step):
    # Of 16 patches; the language model sees them where the text has this token.
    tokens = torch.cat(
        [torch.full((BATCH, 16), 3), torch.randint(4, VOCAB, (BATCH, LENGTH), generator=generator(step))], 1
    )
    return {"input_ids": tokens, "labels": tokens, "pixel_values": images(16)(step)["pixel_values"]}


@architecture(_llava_batch, output=lambda out: [out.logits])
def llava():
    import transformers as t

    return t.LlavaForConditionalGeneration(
        t.LlavaConfig(
            text_config=t.LlamaConfig(**{**GROUPED, "num_hidden_layers": 5}),
            vision_config=t.CLIPVisionConfig(
                hidden_size=WIDTH,
                intermediate_size=INNER,
                num_attention_heads=HEADS,
                num_hidden_layers=4,
                image_size=16,
                patch_size=4,
            ),
            image_token_index=3,
            image_seq_length=16,
            vision_feature_select_strategy="default",
        )
    )


def _sound(step):
    return {
        "input_values": torch.randn(BATCH, 400, generator=generator(step)),
        "labels": torch.tensor([step % CLASSES, 1]),
    }


@architecture(_sound)
def wav2vec2():
    """With a convolution whose weight is parametrized."""
    return _transformers(
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        **{**SIZES, "num_hidden_layers": 8},
        conv_dim=(16, 32),
        conv_kernel=(8, 4),
        conv_stride=(4, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
        mask_time_prob=0.0,
        num_labels=CLASSES,
        layerdrop=0.0,
        classifier_proj_size=32,
    )


# ---- diffusers
def _noise(size, channels=4, **more):
    return lambda step: {
        "sample": torch.randn(BATCH, channels, size, size, generator=generator(step)),
        **{key: of(step) for key, of in more.items()},
    }


def _states(length, width):
    return lambda step: torch.randn(BATCH, length, width, generator=generator(step + 100))


def _times(step):
    return torch.tensor([3, step])


@diffuser(_noise(16, 3, timestep=_times))
def unet_2d():
    import diffusers

    return diffusers.UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 32, 32),
        norm_num_groups=4,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    )


@diffuser(_noise(8, 4, timestep=_times, encoder_hidden_states=_states(5, 16)))
def unet_2d_condition():
    import diffusers

    return diffusers.UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=4,
        cross_attention_dim=16,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    )


@diffuser(_noise(16, 3))
def autoencoder_kl():
    import diffusers

    return diffusers.AutoencoderKL(
        block_out_channels=(16, 32, 32),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
    )


@diffuser(
    lambda step: {
        "hidden_states": torch.randn(BATCH, 4, 8, 8, generator=generator(step)),
        "timestep": _times(step),
        "class_labels": torch.tensor([1, 2]),
    }
)
def dit():
    import diffusers

    return diffusers.DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        num_layers=6,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_num_groups=4,
    )


@diffuser(
    lambda step: {
        "hidden_states": torch.randn(BATCH, 4, 8, 8, generator=generator(step)),
        "timestep": _times(step),
        "encoder_hidden_states": _states(5, 16)(step),
        "pooled_projections": _states(1, 16)(step)[:, 0],
    }
)
def sd3():
    import diffusers

    return diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=6,
        joint_attention_dim=16,
        caption_projection_dim=48,
        pooled_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=8,
    )


# ---- convolutions
class Residual(nn.Module):
    """x + inner(x), or of a shortcut's."""

    def __init__(self, inner, shortcut=None, after=None):
        super().__init__()
        self.inner, self.shortcut, self.after = inner, shortcut or nn.Identity(), after or nn.Identity()

    def forward(self, x):
        return self.after(self.inner(x) + self.shortcut(x))


@own(plain_images)
def resnet():
    layers, width = [nn.Conv2d(3, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU(inplace=True)], 24
    for to, stride in (
        (24, 1),
        (32, 2),
        (32, 1),
        (32, 1),
        (40, 2),
        (40, 1),
        (40, 1),
        (40, 1),
        (40, 1),
        (40, 1),
        (40, 1),
    ):
        shortcut = (
            nn.Sequential(nn.Conv2d(width, to, 1, stride, bias=False), nn.BatchNorm2d(to))
            if (width, stride) != (to, 1)
            else None
        )
        inner = nn.Sequential(
            nn.Conv2d(width, to, 3, stride, 1, bias=False),
            nn.BatchNorm2d(to),
            nn.ReLU(inplace=True),
            nn.Conv2d(to, to, 3, padding=1, bias=False),
            nn.BatchNorm2d(to),
        )
        layers.append(Residual(inner, shortcut, nn.ReLU(inplace=True)))
        width = to
    return Named(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)))


class Named(nn.Module):
    """Has its input under a name, as models of transformers do."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(x)


class LayerNorm2d(nn.LayerNorm):
    """Over channels."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class LayerScale(nn.Module):
    """Multiplies channels with a small parameter; leaves out a sample now and then (stochastic depth)."""

    def __init__(self, width, drop=0.1):
        super().__init__()
        self.gamma, self.drop = nn.Parameter(torch.full((width, 1, 1), 0.1)), drop

    def forward(self, x):
        if self.training:
            x = x * (torch.rand(x.shape[0], 1, 1, 1) >= self.drop)
        return x * self.gamma


@own(plain_images)
def convnext():
    layers, width = [nn.Conv2d(3, 32, 2, 2), LayerNorm2d(32)], 32
    for to, depth in ((32, 2), (48, 3), (64, 8)):
        if to != width:
            layers += [LayerNorm2d(width), nn.Conv2d(width, to, 2, 2)]
            width = to
        layers += [
            Residual(
                nn.Sequential(
                    nn.Conv2d(to, to, 7, padding=3, groups=to),
                    LayerNorm2d(to),
                    nn.Conv2d(to, 4 * to, 1),
                    nn.GELU(),
                    nn.Conv2d(4 * to, to, 1),
                    LayerScale(to),
                )
            )
            for _ in range(depth)
        ]
    return Named(
        nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(width), nn.Linear(width, CLASSES))
    )


class SqueezeExcite(nn.Module):
    """Multiplies each channel with what all channels' means say."""

    def __init__(self, width, inner):
        super().__init__()
        self.down, self.up = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, width, 1)

    def forward(self, x):
        return x * self.up(F.silu(self.down(x.mean((2, 3), keepdim=True)))).sigmoid()


@own(plain_images)
def efficientnet():
    def block(width, to, expand, stride):
        inner = width * expand
        body = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.SiLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            nn.SiLU(inplace=True),
            SqueezeExcite(inner, width // 4),
            nn.Conv2d(inner, to, 1, bias=False),
            nn.BatchNorm2d(to),
            nn.Dropout2d(0.1),
        )
        return Residual(body) if (width, stride) == (to, 1) else body

    layers, width = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.SiLU(inplace=True)], 16
    for to, expand, stride, depth in ((16, 4, 1, 2), (32, 4, 2, 3), (48, 4, 2, 9)):
        for i in range(depth):
            layers.append(block(width, to, expand, 1 if i else stride))
            width = to
    return Named(
        nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(width, CLASSES))
    )


@own(plain_images)
def densenet():
    """Every layer's input is what all before it gave."""

    class Dense(nn.Module):
        def __init__(self, width, growth, depth):
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(
                    nn.BatchNorm2d(width + i * growth),
                    nn.ReLU(),
                    nn.Conv2d(width + i * growth, growth, 3, padding=1, bias=False),
                )
                for i in range(depth)
            )

        def forward(self, x):
            for layer in self.layers:
                x = torch.cat([x, layer(x)], 1)
            return x

    return Named(
        nn.Sequential(
            nn.Conv2d(3, 24, 3, padding=1),
            Dense(24, 12, 10),
            nn.Conv2d(144, 48, 1),
            nn.AvgPool2d(2),
            Dense(48, 12, 12),
            nn.BatchNorm2d(192),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(192, CLASSES),
        )
    )


@own(plain_images)
def conv_autoencoder():
    """Transposed convolutions, instance and group norms."""
    return Named(
        nn.Sequential(
            nn.Conv2d(3, 24, 4, 2, 1),
            nn.InstanceNorm2d(24, affine=True),
            nn.PReLU(24),
            nn.Conv2d(24, 40, 3, 2, 1),
            nn.GroupNorm(4, 40),
            nn.LeakyReLU(0.1),
            *(nn.Sequential(nn.Conv2d(40, 40, 3, padding=1), nn.GroupNorm(5, 40), nn.ELU()) for _ in range(16)),
            nn.ConvTranspose2d(40, 24, 4, 2, 1),
            nn.InstanceNorm2d(24, affine=True),
            nn.Softplus(),
            nn.ConvTranspose2d(24, 3, 4, 2, 1),
        )
    )


# ---- attention and mixing
class TimmAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.proj, self.drop = (
            heads,
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            nn.Dropout(0.1),
        )

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        return self.drop(self.proj(x.transpose(1, 2).reshape(b, n, c)))


@own(plain_images)
def timm_vit():

    class Vit(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch = nn.Conv2d(3, WIDTH, 4, 4)
            self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
            self.positions = nn.Parameter(torch.randn(1, 17, WIDTH) / 50)
            self.blocks = nn.Sequential(
                *(
                    nn.Sequential(
                        Residual(nn.Sequential(nn.LayerNorm(WIDTH), TimmAttention(WIDTH, HEADS))),
                        Residual(
                            nn.Sequential(
                                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)
                            )
                        ),
                    )
                    for _ in range(9)
                )
            )
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            x = self.patch(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
            return self.head(self.norm(self.blocks(x))[:, 0])

    return Vit()


@own(plain_images)
def mlp_mixer():

    class Mix(nn.Module):
        def __init__(self, patches):
            super().__init__()
            self.norm1, self.tokens = (
                nn.LayerNorm(WIDTH),
                nn.Sequential(nn.Linear(patches, 64), nn.GELU(), nn.Linear(64, patches)),
            )
            self.norm2, self.channels = (
                nn.LayerNorm(WIDTH),
                nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)),
            )

        def forward(self, x):
            x = x + self.tokens(self.norm1(x).mT).mT
            return x + self.channels(self.norm2(x))

    return Named(
        nn.Sequential(
            nn.Conv2d(3, WIDTH, 4, 4),
            nn.Flatten(2),
            Transposed(),
            *(Mix(16) for _ in range(16)),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )
    )


class Transposed(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


@own(lambda step: {"x": numbers(step)["x"], "y": numbers(step + 1)["x"]})
def torch_transformer():
    """nn.Transformer, without its fast path, which torch takes in evaluation of plain parameters, and which rounds
    otherwise."""
    torch.backends.mha.set_fastpath_enabled(False)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Transformer(WIDTH, HEADS, 4, 4, INNER, batch_first=True)

        def forward(self, x, y):
            return self.body(x, y, tgt_mask=nn.Transformer.generate_square_subsequent_mask(y.shape[1]))

    return Both()


# ---- recurrent
class Recurrent(nn.Module):
    """Recurrent layers, one after another: all weights of one come to the device together."""

    def __init__(self, make, layers):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)[0][..., :WIDTH]
        return self.head(x)


@own(numbers)
def lstm():
    return Recurrent(lambda: nn.LSTM(WIDTH, 48, batch_first=True, bidirectional=True), 9)


@own(numbers)
def gru():
    return Recurrent(lambda: nn.GRU(WIDTH, WIDTH, 2, batch_first=True, dropout=0.1), 8)


@own(numbers)
def lstm_cells():
    """A cell for each position, packed sequences, a projection."""

    class Cells(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = nn.ModuleList(nn.LSTMCell(WIDTH, WIDTH) for _ in range(10))
            self.packed = nn.LSTM(WIDTH, WIDTH, proj_size=32, batch_first=True)

        def forward(self, x):
            state, out = None, []
            for i in range(x.shape[1]):
                state = self.cells[i % len(self.cells)](x[:, i], state)
                out.append(state[0])
            packed = nn.utils.rnn.pack_padded_sequence(
                torch.stack(out, 1), torch.tensor([LENGTH, LENGTH - 3]), batch_first=True
            )
            return nn.utils.rnn.pad_packed_sequence(self.packed(packed)[0], batch_first=True)[0]

    return Cells()


# ---- embeddings
@own(ids)
def embedding_bag():

    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.bags = nn.ModuleList(
                nn.EmbeddingBag(200, 48, mode=mode, padding_idx=0 if mode == "mean" else None)
                for mode in ("sum", "mean", "max") * 8
            )
            self.limited = nn.Embedding(VOCAB, 48, max_norm=1.0)
            self.sparse = nn.EmbeddingBag(VOCAB, 48, mode="sum")
            self.top = nn.Sequential(nn.Linear(48, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

        def forward(self, x):
            out = sum(bag(x) for bag in self.bags) + self.limited(x).mean(1)
            out = out + self.sparse(
                x.flatten(), torch.arange(0, x.numel(), x.shape[1]), per_sample_weights=torch.ones(x.numel())
            )
            return self.top(out)

    return Bags()


@own(ids)
def tied():
    """An embedding that is the head, too, and layers that are the same."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(64))
            for i in range(0, 64, 8):
                self.layers[i + 1].weight = self.layers[i].weight
                self.layers[i + 2] = self.layers[i]
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers:
                x = x + torch.tanh(layer(x)) / 8
            return self.head(x) + self.embed.weight[0, 0]

    return Tied()


# ---- parametrizations
def _parametrized(how):
    layers = [how(nn.Linear(WIDTH, WIDTH)) for _ in range(72)]
    return Named(
        nn.Sequential(*(Residual(nn.Sequential(nn.Tanh(), layer)) for layer in layers), how(nn.Linear(WIDTH, CLASSES)))
    )


@own(numbers)
def weight_norm():
    return _parametrized(nn.utils.parametrizations.weight_norm)


@own(numbers)
def old_weight_norm():
    """Deprecated; forward pre-hooks make the weight."""
    return _parametrized(nn.utils.weight_norm)


@own(numbers)
def spectral_norm():
    return _parametrized(nn.utils.parametrizations.spectral_norm)


@own(numbers)
def orthogonal():
    return _parametrized(nn.utils.parametrizations.orthogonal)


class Symmetric(nn.Module):
    """A parametrization as users write them."""

    def forward(self, x):
        return x.triu() + x.triu(1).mT


@own(numbers)
def symmetric():
    def how(layer):
        if layer.in_features == layer.out_features:
            nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
        return layer

    return _parametrized(how)


@own(numbers)
def pruned():
    return _parametrized(lambda layer: nn.utils.prune.random_unstructured(layer, "weight", 0.3))


class Lora(nn.Module):
    """A frozen layer, and two small matrices that are trained."""

    def __init__(self, base, rank=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.randn(base.out_features, rank) / 10)

    def forward(self, x):
        return self.base(x) + (x @ self.down.mT) @ self.up.mT * 0.5


@own(numbers)
def lora():
    return Named(
        nn.Sequential(
            *(
                Residual(
                    nn.Sequential(
                        nn.Tanh(), Lora(nn.Linear(WIDTH, 2 * WIDTH)), nn.GELU(), Lora(nn.Linear(2 * WIDTH, WIDTH))
                    )
                )
                for _ in range(26)
            )
        )
    )


# ---- experts, scripts, custom functions
@own(numbers)
def experts():
    """Of which a batch uses some, by indexing: others have no gradient."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(WIDTH, 24, bias=False)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, INNER), nn.SiLU(), nn.Linear(INNER, WIDTH)) for _ in range(24)
            )

        def forward(self, x):
            flat = x.flatten(0, 1)
            weights, chosen = self.gate(flat).softmax(-1).topk(2)
            out = torch.zeros_like(flat)
            for number in chosen.unique().tolist():
                rows, place = (chosen == number).nonzero(as_tuple=True)
                out = out.index_add(0, rows, self.experts[number](flat[rows]) * weights[rows, place, None])
            return out.view_as(x)

    return Experts()


@own(numbers)
def checkpointed():
    """Activation checkpointing of both kinds, and of segments."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Dropout(0.1), nn.Linear(INNER, WIDTH))
                for _ in range(18)
            )

        def forward(self, x):
            x = x.clone().requires_grad_()
            for i, block in enumerate(self.blocks):
                x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=i % 2 == 0) / 4
            return x

    return Checkpointed()


@own(numbers)
def custom_function():
    """torch.autograd.Function that saves a parameter; einsum, an outer parameter list, a complex detour."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad @ weight.mT, x.flatten(0, -2).mT @ grad.flatten(0, -2)

    class Custom(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 10 for _ in range(40))
            self.more = nn.ParameterDict({str(i): torch.randn(WIDTH, WIDTH) / 10 for i in range(40)})
            self.bilinear = nn.Bilinear(8, 8, WIDTH)

        def forward(self, x):
            for i, weight in enumerate(self.weights):
                x = x + torch.tanh(Scaled.apply(x, weight)) / 4
                x = x + torch.einsum("bli,ij->blj", x.cos(), self.more[str(i)]) / 8
            x = x + torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(self.weights[0][0]), n=WIDTH) / WIDTH
            return x + self.bilinear(x[..., :8], x[..., 8:16])

    return Custom()


@own(numbers, inference=False)
def scripted():
    """Submodules of torch.jit.script(), which no torch function sees."""
    layers = [torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())) for _ in range(24)]
    return Named(nn.Sequential(*(Residual(layer) for layer in layers), *(nn.Linear(WIDTH, WIDTH) for _ in range(48))))


@own(numbers)
def traced():
    """Submodules of torch.jit.trace()."""
    layers = [
        torch.jit.trace(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), torch.ones(2, WIDTH)) for _ in range(24)
    ]
    return Named(nn.Sequential(*(Residual(layer) for layer in layers), *(nn.Linear(WIDTH, WIDTH) for _ in range(48))))


def table() -> str:
    """The table of docs/architectures.md: what test_architectures.py does with each architecture."""
    done = ("train", "clip", "accumulate", "evaluate", "save", "load", "generate")
    rows = [("architecture", "of", *done), ("---",) * (2 + len(done))]
    for name, one in ARCHITECTURES.items():
        marks = ("yes",) * (len(done) - 1) + ("yes" if one.generate else "",)
        rows.append((f"`{name}`", one.library or "the tests", *marks))
    return "".join(f"| {' | '.join(row)} |\n".replace("|  |", "| |") for row in rows)


if __name__ == "__main__":
    print(table(), end="")
