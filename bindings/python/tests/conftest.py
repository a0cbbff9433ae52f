"""Shared by the tests of libgemini.torch: sessions that are always closed, tiny models of random weights, a train loop.

All of it runs on the host-simulated device, where bytes that are not resident are not mapped.
SPDX-License-Identifier: Apache-2.0
"""

import contextlib
import ctypes
import os
import weakref

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch

import libgemini.torch as gm
from libgemini import abi

collect_ignore = ["test_load.py", "test_hook_torch.py"]  # scripts of CTest
torch.set_num_threads(1)

VOCAB, LENGTH, BATCH = 160, 12, 2


@pytest.fixture
def session():
    """session(device_memory, **more) is libgemini.torch.init() with what suits tests; closed afterwards."""

    def start(device_memory="64MiB", **more):
        return gm.init(
            **{
                "device": "cpu",
                "strict": True,
                "chunk_size": "64KiB",
                "host_memory": "256MiB",
                "device_memory": device_memory,
                **more,
            }
        )

    yield start
    gm.close()


def model_data_bytes(model, bytes_per_element=16):
    """Parameters, gradients and states; 16 bytes an element are those of AdamW in fp32."""
    return sum(param.numel() for param in model.parameters()) * bytes_per_element


# ---- models
def _text(seed):
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def _labelled_text(seed):
    return {**_text(seed), "labels": torch.tensor([seed % 2, 1])}


def _image(seed):
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator), "labels": torch.tensor([seed % 2, 1])}


def _make(transformers, name):
    t = transformers
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
    if name == "gpt2":
        return t.GPT2LMHeadModel(
            t.GPT2Config(
                vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2
            )
        )
    if name == "opt":
        return t.OPTForCausalLM(
            t.OPTConfig(
                vocab_size=VOCAB,
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                ffn_dim=128,
                max_position_embeddings=32,
                word_embed_proj_dim=64,
            )
        )
    if name == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=32))
    if name == "bloom":
        return t.BloomForCausalLM(t.BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4))
    if name == "bert":
        return t.BertForSequenceClassification(t.BertConfig(**sizes, max_position_embeddings=32, num_labels=2))
    if name == "t5":
        return t.T5ForConditionalGeneration(
            t.T5Config(
                vocab_size=VOCAB,
                d_model=64,
                d_kv=16,
                d_ff=128,
                num_layers=2,
                num_heads=4,
                decoder_start_token_id=0,
                initializer_factor=0.1,
            )
        )
    if name == "vit":
        return t.ViTForImageClassification(
            t.ViTConfig(
                **{k: v for k, v in sizes.items() if k != "vocab_size"}, image_size=16, patch_size=4, num_labels=2
            )
        )
    if name == "mixtral":
        return t.MixtralForCausalLM(
            t.MixtralConfig(
                **sizes, num_key_value_heads=2, max_position_embeddings=32, num_local_experts=4, num_experts_per_tok=2
            )
        )
    raise ValueError(name)


_BATCHES = {"bert": _labelled_text, "vit": _image}
MODELS = ("gpt2", "opt", "llama", "bloom", "bert", "t5", "vit", "mixtral")


def tiny(name, dtype=torch.float32, seed=0):
    """A model of a family of transformers, random weights, without dropout."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    model = _make(transformers, name).to(dtype)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.config.use_cache = False
    return model.train()


def batch(name, step, dtype=torch.float32):
    out = _BATCHES.get(name, _text)(step)
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in out.items()}


# ---- training
def train(model, optimizer, steps, loss_of, before_step=None):
    """Trains and returns the losses; loss_of(model, step) is a step's."""
    losses = []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        if before_step:
            before_step(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def values(model):
    """Copies of all parameters and buffers, by name."""
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def same_bits(ours, theirs):
    """Asserts that two lists or dicts of tensors are equal to the bit."""
    keys = theirs.keys() if isinstance(theirs, dict) else range(len(theirs))
    assert len(ours) == len(theirs) > 0
    for key in keys:
        assert ours[key].dtype == theirs[key].dtype
        assert torch.equal(ours[key], theirs[key]), f"{key} differs by {(ours[key] - theirs[key]).abs().max()}"


def far_apart(ours, theirs):
    """The largest difference of any element of two dicts of tensors."""
    assert len(ours) == len(theirs) > 0
    return max((ours[key].double() - theirs[key].double()).abs().max().item() for key in theirs)


def sgd(params):
    return torch.optim.SGD(params, 0.05, momentum=0.9)


def alike(session, make, run, optimizer=sgd, budget="768KiB", **more):
    """Asserts that run(model, optimizer), which returns tensors, gives the same bits and leaves the same parameters
    with torch alone and in a session. Optimizers other than AdamW and Adam run torch's own arithmetic. Returns the
    model."""
    outcomes = []
    for managed in (False, True):
        if managed:
            session(budget, **more)
        torch.manual_seed(0)
        model = make()
        chosen = optimizer(model.parameters())
        if managed:
            model, chosen = gm.prepare(model, chosen)
        torch.manual_seed(1)
        outcomes.append((run(model, chosen), values(model)))
    same_bits(outcomes[1][0], outcomes[0][0])
    same_bits(outcomes[1][1], outcomes[0][1])
    return model


def off_the_device():
    """Everything leaves the device: whoever reads it without asking for it dies of it."""
    session = gm.session()
    session.backward.settle()  # what a backward pass held that an exception has ended
    session.let_models_go()  # what graphs may still read
    for arena in session.arenas.handles.values():
        access = abi.Access(arena, 0, 0, abi.READ, abi.TIER_HOST, None)
        session.lib.move(session.handle, ctypes.byref(access), 1)


def leave_where_nobody_holds():
    """All parameters leave the device that may; the number of those that do."""
    session, left = gm.session(), 0
    for record in session.records:
        with contextlib.suppress(gm.GeminiError):  # it is held
            access = ctypes.byref(record.place.access(abi.READ, abi.TIER_HOST))
            session.lib.move(session.handle, access, 1)
            left += 1
    return left


_scratch = weakref.WeakKeyDictionary()  # of a session: as many bytes as its device has, SCRATCH_BYTES at most
SCRATCH_BYTES = 2 << 20


def overwrite_the_device():
    """Everything leaves the device, and what it leaves behind there is overwritten: whoever reads it without asking
    gets no number, or dies of it."""
    session = gm.session()
    if session not in _scratch:
        elements = min(gm.stats()["budget_bytes"]["device"], SCRATCH_BYTES) // 4
        _scratch[session] = session.arenas.place("scratch", (elements,), torch.float32, "scratch")
    off_the_device()
    for _, piece in _scratch[session].device_pieces(abi.WRITE, 64 << 10):
        piece.fill_(float("nan"))
    off_the_device()
