"""Inference: weights only, planned apart from training, with torch's own tokens at any budget.

SPDX-License-Identifier: Apache-2.0
"""

import contextlib
import json
import pathlib
import subprocess
import sys

import pytest
import safetensors.torch
import torch

import libgemini.torch as gm
from conftest import overwrite_the_device, same_bits, tiny

transformers = pytest.importorskip("transformers")
CHUNK = 64 << 10
TOKENS = 8


def llama(seed=0, layers=4, hidden=128, **more):
    """A LLaMA of random weights that never ends a text by itself."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 256,
        "hidden_size": hidden,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **more})).eval()


def prompt(rows, length, seed=0):
    return torch.randint(3, 256, (rows, length), generator=torch.Generator().manual_seed(seed))


def generate(model, ids, **more):
    """The tokens of a text, greedily if nothing else is said."""
    torch.manual_seed(3)
    options = {"max_new_tokens": TOKENS, "do_sample": False, "attention_mask": torch.ones_like(ids), **more}
    return model.generate(ids, **options)


def weights(model):
    return sum(param.nbytes for param in model.parameters())


def share_of(model, share):
    return int(weights(model) * share) // CHUNK * CHUNK


@contextlib.contextmanager
def departures(model):
    """A context manager: gives a list that gets the departures so far after each call of the model."""
    seen = []
    hook = model.register_forward_hook(lambda *_: seen.append(gm.stats()["departures"]))
    yield seen
    hook.remove()


def moved(link):
    return sum(gm.stats()["moved_bytes"][link].values())


TEXTS = {
    "cache that grows": (prompt(1, 16), {}),
    "longer prompt": (prompt(1, 40), {}),
    "batch": (prompt(3, 12), {}),
    "static cache": (prompt(1, 16), {"cache_implementation": "static"}),
    "beams": (prompt(1, 16), {"num_beams": 3}),
    "samples": (prompt(2, 9), {"do_sample": True, "top_k": 20}),
    "no cache": (prompt(1, 9), {"use_cache": False}),
}


# ---- what is generated
@pytest.mark.parametrize("share", [1.3, 0.3, 0.1])
def test_tokens_are_torchs(session, share):
    """Whatever part of the weights the device holds: torch's tokens, weights that are only read, no gradients, and no
    departure, whichever way a text is generated."""
    model = llama()
    want = {name: generate(model, ids, **more) for name, (ids, more) in TEXTS.items()}
    session(share_of(model, share))
    model = gm.infer(llama())
    for name, (ids, more) in TEXTS.items():
        gm.stats_reset()
        with departures(model) as seen:
            assert torch.equal(generate(model, ids, **more), want[name]), name
        assert len(seen) == TOKENS and seen[-1] == 0, name
    assert moved("device to host") == moved("host to file") == 0
    assert [kind for kind, *_ in gm.session().arenas.handles] == ["frozen"]
    stats = gm.stats()
    assert stats["planned_iterations"] >= stats["iterations"] - 4
    moves = stats["moved_bytes"]["host to device"]
    if share > 1:
        assert not sum(moves.values())
    else:  # all that comes, comes ahead of its use
        assert moves["plan"] and not moves["demand"]


def growing(model, bytes_of):
    """Has each layer allocate device memory in each pass, as a cache on a GPU does: bytes_of(pass, rows). Returns a
    function that frees it all."""
    manager, held, passes = gm.session().manager, [], [0]

    def grow(_, args, kwargs, out):
        hidden = args[0] if args else kwargs["hidden_states"]
        held.append(manager.alloc(bytes_of(passes[0], hidden.shape[0] * hidden.shape[1])))

    def count(*_):
        passes[0] += 1

    model.register_forward_hook(count)
    for layer in model.model.layers:
        layer.register_forward_hook(grow, with_kwargs=True)

    def free():
        passes[0] = 0
        while held:
            manager.free(held.pop())

    return free


def test_a_cache_on_the_device_grows_without_departures(session):
    """The cache takes two thirds of the device in the end. From the third token of each text on nothing departs, nor
    is anything fetched when it is wanted, but for the frames by which the cache has grown."""
    model = llama()
    budget = share_of(model, 0.5)
    session(budget)
    model = gm.infer(llama())
    free = growing(model, lambda step, tokens: 512 * tokens)
    want = generate(llama(), prompt(4, 8), max_new_tokens=100)
    for ids, tokens in ((prompt(4, 8), 100), (prompt(1, 8), 20), (prompt(4, 8), 100)):
        gm.stats_reset()
        with departures(model) as seen:
            out = generate(model, ids, max_new_tokens=tokens)
        if len(ids) == 4:
            assert torch.equal(out, want)
            assert gm.stats()["nonmodel_peak_bytes"] > budget // 2
        assert seen[-1] == seen[1] <= 2  # another batch is another variant
        assert moved("device to host") == 0
        free()
    moves = gm.stats()["moved_bytes"]["host to device"]
    assert moves["demand"] < moves["plan"] // 20
    assert gm.stats()["plans"] < 40


# ---- what a token fetches
WIDE = {"vocab_size": 4096, "layers": 6}  # a table of 2 MiB of 5.6 MiB


def table_of(model):
    return model.get_input_embeddings().weight


@pytest.mark.parametrize("share", [0.75, 0.45])
def test_a_token_fetches_what_has_no_room(session, share):
    """From the third token on, what does not fit of all that a token reads, which is one row of the table; and beside
    that at most a twentieth, and the chunks that operators share or in which others take turns."""
    model = llama(**WIDE)
    read = weights(model) - table_of(model).nbytes
    want, largest = generate(model, prompt(1, 8)), model.lm_head.weight.nbytes
    budget = max(int(read * share), largest + 8 * CHUNK) // CHUNK * CHUNK
    session(budget)
    model = gm.infer(llama(**WIDE))
    for _ in range(2):
        with departures(model) as seen:
            fetched = []
            hook = model.register_forward_hook(lambda *_, all=fetched: all.append(moved("host to device")))
            assert torch.equal(generate(model, prompt(1, 8)), want)
            hook.remove()
        assert seen[-1] == seen[1]
    token = (fetched[-1] - fetched[2]) / (len(fetched) - 3)
    assert read - budget <= token <= 1.05 * (read - budget) + 4 * CHUNK
    assert moved("device to host") == 0


@pytest.mark.parametrize("more", [{}, {"tie_word_embeddings": True}])
def test_rows_of_the_table_are_read_on_the_host(session, more):
    """The table stays where it is for a prompt that needs few of its rows, and comes for one that needs many. New
    values of it are seen."""
    few, many, more = prompt(1, 8), prompt(128, 17), {**WIDE, "layers": 1, **more}

    @torch.no_grad()
    def texts(model):
        return [model(input_ids=ids, use_cache=False, logits_to_keep=1).logits for ids in (few, many) for _ in range(3)]

    other = llama(1, **more)
    want = texts(llama(**more)) + texts(other)
    names = []
    session(table_of(other).nbytes + 8 * CHUNK)
    model = gm.infer(llama(**more))
    started = gm.session().brackets.op_begin
    gm.session().brackets.op_begin = lambda name, *more: (names.append(name), started(name, *more))
    got = texts(model)
    model.load_state_dict(other.state_dict())
    # Products of many rows depend on the alignment of memory, in their last bits.
    torch.testing.assert_close(got + texts(model), want, rtol=1e-5, atol=1e-5)
    served = [kind for _, kind in (name.split(b":") for name in names) if kind in (b"rows", b"embedding")]
    assert served == 2 * ([b"rows"] * 3 + [b"embedding"] * 3)


def test_rows_are_not_read_on_the_host_where_that_cannot_be(session, tmp_path, monkeypatch):
    """Where all fits on the device, where the host has no room for the table, and where the embedding changes it."""

    def made():
        torch.manual_seed(0)
        table = torch.nn.Embedding(4096, 128, max_norm=1.0)
        return torch.nn.Sequential(table, torch.nn.Linear(128, 4096), torch.nn.Linear(4096, 128)).eval()

    ids = prompt(1, 8)
    with torch.no_grad():
        want = made()(ids)
    session("5MiB")
    same_bits(gm.infer(made())(ids).clone(), want)
    gm.close()
    want, whole = generate(llama(**WIDE), ids), weights(llama(**WIDE))
    session(2 * whole)
    assert torch.equal(generate(gm.infer(llama(**WIDE)), ids), want)
    gm.close()
    llama(**WIDE).save_pretrained(tmp_path)
    for share in (gm.rows.HOST_SHARE, 0):  # 0: the host refuses
        monkeypatch.setattr(gm.rows, "HOST_SHARE", share)
        session(3 << 20, host_memory=1 << 20)
        model = gm.infer(tmp_path)
        assert torch.equal(generate(model, ids), want)
        assert table_of(model)._gm_place.has_rows == (share > 0)
        gm.close()


@pytest.mark.parametrize("grows", (False, True))
def test_rows_are_read_on_the_host_where_the_budget_of_now_has_no_room_for_all(session, grows):
    ids, plain, names = prompt(1, 8), llama(**WIDE), []
    want, budgets = generate(plain, ids), [2 * weights(plain), table_of(plain).nbytes + 8 * CHUNK]
    begin, later = reversed(budgets) if grows else budgets
    session(begin)
    model = gm.infer(llama(**WIDE))
    gm.session().manager.budget_set("device", later)
    started = gm.session().brackets.op_begin
    gm.session().brackets.op_begin = lambda name, *more: (names.append(name), started(name, *more))
    assert torch.equal(generate(model, ids), want)
    assert any(name.endswith(b":rows") for name in names) != grows


def test_models_take_turns(session):
    """Two models in one session, texts of both by turns, one that drafts for the other, and an encoder with a
    decoder."""
    draft, model, t5 = llama(1, layers=2), llama(0), tiny("t5").eval()
    t5.config.use_cache = True
    ids = prompt(1, 12)

    def texts(model, draft, t5):
        for _ in range(2):
            yield generate(model, ids)
            yield generate(draft, ids)
        yield generate(model, ids, assistant_model=draft)
        for _ in range(3):
            yield generate(t5, prompt(2, 7).remainder(160))

    want = list(texts(model, draft, t5))
    session(share_of(model, 0.3))
    model, draft, t5 = gm.infer(llama(0)), gm.infer(llama(1, layers=2)), gm.infer(tiny("t5").eval())
    t5.config.use_cache = True
    seen, got = [], []
    for one in texts(model, draft, t5):
        got.append(one)
        seen.append(gm.stats()["departures"])
    same_bits(got, want)
    assert seen[4] == 0  # each has its label
    # A decoder's first pass also reads what its cache of the encoder's results is made with.
    assert seen[-1] - seen[4] <= 4
    assert moved("device to host") == 0


def test_a_model_that_teaches_another_one(session):
    """A model for inference beside one that is trained: passes of it within training steps and between them."""

    def run(teacher, student, optimizer):
        losses = []
        for step in range(6):
            ids = prompt(2, 8, seed=step)
            logits = student(input_ids=ids).logits
            wanted = teacher(input_ids=ids).logits.detach()
            loss = torch.nn.functional.mse_loss(logits, wanted)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
            if step % 2:
                losses.append(teacher(input_ids=ids[:1]).logits.clone().detach())
        return losses

    small = {"layers": 2, "hidden": 64}
    student = llama(1, **small)
    want = run(llama(0, **small), student, torch.optim.SGD(student.parameters(), 0.1))
    session("768KiB")
    teacher, student = gm.infer(llama(0, **small)), llama(1, **small)
    student, optimizer = gm.prepare(student, torch.optim.SGD(student.parameters(), 0.1))
    same_bits(run(teacher, student, optimizer), want)
    assert gm.stats()["departures"] == 0
    assert all(param.grad is None for param in teacher.parameters())


def test_pipelines(session):
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(256)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w2"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w2", pad_token="w0")

    def texts(model):
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
        options = {"max_new_tokens": TOKENS, "do_sample": False}
        return [pipe("w5 w9 w17", **options), *pipe(["w7 w7", "w30 w31 w32 w33"], batch_size=2, **options)]

    want = texts(llama())
    session(share_of(llama(), 0.3))
    assert texts(gm.infer(llama())) == want
    assert gm.stats()["departures"] == 0


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_compiled_blocks(session, cache):
    def made():
        model = llama(layers=3)
        for layer in model.model.layers:
            layer.compile(backend="eager")
        return model

    options = {"cache_implementation": "static"} if cache == "static" else {}
    want = generate(llama(layers=3), prompt(1, 8), **options)
    session(share_of(llama(layers=3), 0.6))
    model = gm.infer(made())
    for _ in range(2):
        with departures(model) as seen:
            assert torch.equal(generate(model, prompt(1, 8), disable_compile=True, **options), want)
        assert seen[-1] == 0
    assert moved("device to host") == 0


def test_nothing_is_read_that_is_not_there(session):
    model = llama()
    want = generate(model, prompt(1, 8))
    session(share_of(model, 0.3))
    model = gm.infer(llama())
    model.register_forward_hook(lambda *_: overwrite_the_device())
    assert torch.equal(generate(model, prompt(1, 8)), want)


def mixture(**more):
    """A Mixtral of random weights whose experts are read one by one: of 1.6 MB, an expert of each block has 96 KB."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**sizes, **more})).eval()
    model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize(
    ("share", "policy"), [(1.3, "lru"), (0.5, "lru"), (0.5, "frequent"), (0.5, "least-stale"), (0.3, "lru")]
)
def test_experts_come_as_the_router_chooses(session, share, policy):
    """Each token chooses other experts, which are in no plan: one plan serves all tokens, and they are torch's."""
    ids, more = prompt(1, 8), {"do_sample": True, "max_new_tokens": 24}
    want = generate(mixture(), ids, **more)
    model = mixture()
    session(share_of(model, share), units="never", cache_policy=policy)
    model = gm.infer(model)
    for _ in range(2):
        gm.stats_reset()
        with departures(model) as seen:
            assert torch.equal(generate(model, ids, **more), want)
        assert seen[-1] == 0
    assert (moved("host to device") > 0) == (share < 1)
    stats = gm.stats()
    assert stats["plans"] <= 4 and stats["planned_iterations"] >= stats["iterations"] - 2
    assert moved("device to host") == 0


def test_experts_that_are_predicted_come_ahead(session):
    """A prediction that is right leaves nothing to be fetched on demand, is no departure, and changes no token."""
    ids, more = prompt(1, 8), {"do_sample": True, "max_new_tokens": 12}
    chosen: list[list[int]] = []  # by block and pass, in order
    model = mixture()
    for block in model.model.layers:
        block.mlp.experts.register_forward_pre_hook(lambda _, args: chosen.append(args[1].unique().tolist()))
    want = generate(model, ids, **more)
    model = mixture()
    session(share_of(model, 0.5), units="never")
    model = gm.infer(model)
    assert torch.equal(generate(model, ids, **more), want)

    def predict(block, args):
        numbers = chosen[predicted[0]]
        predicted[0] += 1
        gm.hint(*(weight[number] for number in numbers for weight in (block.gate_up_proj, block.down_proj)))

    for block in model.model.layers:
        block.register_forward_pre_hook(lambda layer, args: predict(layer.mlp.experts, args))
    predicted = [0]
    with departures(model) as seen:
        moves = []
        model.register_forward_hook(lambda *_: moves.append(dict(gm.stats()["moved_bytes"]["host to device"])))
        assert torch.equal(generate(model, ids, **more), want)
    assert predicted[0] == len(chosen) and seen[-1] == seen[0]
    after = {reason: moves[-1][reason] - moves[0][reason] for reason in moves[0]}  # from the second token on
    assert after["caller"] and not after["demand"] and not after["plan"]
    with pytest.raises(gm.GeminiError, match="tensor 0 of 1 is not in the session"):
        gm.hint(torch.zeros(3))


def test_experts_of_a_list(session):
    """Experts that are modules of their own, with shared ones beside them that all passes use."""

    class Mixture(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.gate = torch.nn.Linear(128, 8, bias=False)
            self.shared_experts = torch.nn.Linear(128, 128)
            self.experts = torch.nn.ModuleList(torch.nn.Linear(128, 128) for _ in range(8))

        def forward(self, x):
            out = self.shared_experts(x)
            for number in self.gate(x).softmax(-1).topk(2)[1].unique().tolist():
                out = out + self.experts[number](x)
            return out

    inputs = [torch.randn(1, 128, generator=torch.Generator().manual_seed(seed)) for seed in range(20)]
    with torch.no_grad():
        want = [Mixture()(x) for x in inputs]
    session(6 * CHUNK)
    model = gm.infer(Mixture())
    same_bits([model(x) for x in inputs], want)
    stats = gm.stats()
    assert stats["departures"] == 0 and stats["planned_iterations"] >= 18 and stats["plans"] <= 3


def test_a_stack_of_experts_that_is_read_whole_is_planned(session):
    """Experts that are read together, as transformers' batched implementations do, come ahead of their use."""
    ids = prompt(1, 8)
    model = mixture()
    model.set_experts_implementation("batched_mm")
    want = generate(model, ids)
    session(share_of(model, 0.8), units="never")
    model = gm.infer(mixture())
    model.set_experts_implementation("batched_mm")
    for _ in range(2):
        gm.stats_reset()
        assert torch.equal(generate(model, ids), want)
    moves = gm.stats()["moved_bytes"]["host to device"]
    assert gm.stats()["departures"] == 0 and moves["plan"] and not moves["demand"]


def test_weights_can_be_loaded_anew(session, tmp_path):
    first, second = llama(0), llama(1)
    second.save_pretrained(tmp_path)
    want = [generate(one, prompt(1, 8)) for one in (first, second)]
    session(share_of(first, 0.3))
    model = gm.infer(llama(0))
    texts = [generate(model, prompt(1, 8))]
    model.load_state_dict(second.state_dict())
    texts.append(generate(model, prompt(1, 8)))
    model.load_state_dict(first.state_dict())
    texts.append(generate(model, prompt(1, 8)))
    gm.load_weights(model, tmp_path)
    texts.append(generate(model, prompt(1, 8)))
    same_bits(texts, want + want)


# ---- where weights come from
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folders(session, tmp_path, dtype):
    """A folder of transformers is a model: its class, its dtype, its tied weights, its settings for generation."""
    model = llama(tie_word_embeddings=True).to(dtype)
    model.generation_config.max_new_tokens = TOKENS
    model.generation_config.pad_token_id = 0
    model.save_pretrained(tmp_path, max_shard_size="1MB")
    ids = prompt(1, 8)
    want = model.generate(ids, attention_mask=torch.ones_like(ids))
    assert want.shape[1] == 8 + TOKENS
    session(share_of(model, 0.4), host_memory=weights(model) + 2 * CHUNK)  # there is no room for two
    loaded = gm.infer(tmp_path)
    assert type(loaded) is type(model) and loaded.dtype == dtype and not loaded.training
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.generate(ids, attention_mask=torch.ones_like(ids)), want)
    assert moved("device to host") == 0


def test_a_model_that_was_built_in_the_session(session):
    want = generate(llama(), prompt(1, 8))
    with session(share_of(llama(), 0.3)):
        model = llama()
    model = gm.infer(gm.infer(model))  # the second time nothing happens
    for _ in range(2):
        assert torch.equal(generate(model, prompt(1, 8)), want)
        back = moved("device to host")
        gm.stats_reset()
    assert back == 0  # what was initialized on the device has left it during the first text
    assert [kind for kind, *_ in gm.session().arenas.handles] == ["param"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("host", [0.4, 1.2])
def test_weights_stay_in_their_files(session, tmp_path, host, dtype):
    """With less host memory than weights these are read where they lie, again and again; with more they are read once.
    Nothing is written, and there is no file tier. In 16 bits, a weight of another dtype is converted, and stays on the
    host, or comes back there."""
    model = llama(layers=6).to(dtype)
    converts = dtype == torch.bfloat16
    if converts:
        model.lm_head.double()
    model.save_pretrained(tmp_path, max_shard_size="700KB")
    model.lm_head.to(dtype)
    want = generate(model, prompt(1, 8))
    session(share_of(model, 0.2), host_memory=share_of(model, host))
    model = gm.infer(tmp_path, in_place=True)
    assert moved("file to host") <= (CHUNK if converts else 0)  # which it shares with another weight
    reads = []
    for _ in range(4):
        before = moved("file to host")
        assert torch.equal(generate(model, prompt(1, 8)), want)
        reads.append(moved("file to host") - before)
    first, later = reads[0], min(reads[1:])  # on a busy machine, one that comes late may be made twice
    if host < 1:
        # For each token what has no room, and less than if the host did not keep what it has room for, beside what was
        # converted, which lies in two chunks.
        kept = share_of(model, host) - (2 * CHUNK if converts else 0)
        assert weights(model) - kept - share_of(model, 0.2) < later / TOKENS < weights(model) - kept
    else:
        assert 0 < first <= weights(model) + CHUNK and not any(reads[1:])
    assert moved("host to file") == 0 and (converts or moved("device to host") == 0)
    assert gm.stats()["departures"] == 0
    for file in tmp_path.glob("*.safetensors"):
        file.write_bytes(b"")  # as a program that writes into the file does
    if host < 1:
        with pytest.raises(gm.GeminiError, match="was changed since a range of it was borrowed"):
            generate(model, prompt(1, 8))
    else:
        assert torch.equal(generate(model, prompt(1, 8)), want)


@pytest.mark.parametrize("built", ["in place", "meta"])
def test_weights_that_no_memory_can_have_are_refused_before_any_is_read(session, tmp_path, built):
    """A model whose weights lie in files may be larger than the session's memory; what is read into it may not."""
    model, other = llama(), llama(seed=5)
    model.save_pretrained(tmp_path / "first")
    other.save_pretrained(tmp_path / "second")
    want = generate(model, prompt(1, 8))
    session(share_of(model, 0.4), host_memory=share_of(model, 0.4))
    if built == "in place":
        managed = gm.infer(tmp_path / "first", in_place=True)
    else:
        with torch.device("meta"):
            managed = llama()
    with pytest.raises(gm.GeminiError, match=f"{weights(model)} bytes of weights are to be read.*want more in all"):
        gm.load_weights(managed, tmp_path / "second")
    if built == "in place":
        assert torch.equal(generate(managed, prompt(1, 8)), want)
    else:
        assert all(param.is_meta for param in managed.parameters())


def test_weights_in_files_are_written_once(session, tmp_path):
    """Weights that come from elsewhere, with less host memory than they have, lie in the session's files: written once,
    then only read."""
    model = llama()
    want = generate(model, prompt(1, 8))
    model.save_pretrained(tmp_path / "weights")
    session(
        share_of(model, 0.3), host_memory=share_of(model, 0.4), file=tmp_path, file_memory=weights(model) + 8 * CHUNK
    )
    model = gm.infer(tmp_path / "weights", in_place=False)
    assert weights(model) <= moved("host to file") <= weights(model) + CHUNK
    gm.stats_reset()
    for _ in range(2):
        assert torch.equal(generate(model, prompt(1, 8)), want)
    assert moved("file to host")
    assert moved("device to host") == moved("host to file") == 0


@pytest.mark.parametrize("host", [0.4, 1.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_a_folder_are_read_at_once(session, tmp_path, host, dtype):
    """In the background, as many as the host has room for; those that come first in the model come first."""
    model = llama(layers=6).to(dtype)
    model.save_pretrained(tmp_path, max_shard_size="700KB")
    want = generate(model, prompt(1, 8))
    session(share_of(model, 0.2), host_memory=share_of(model, host))
    model = gm.infer(tmp_path)
    read, size = moved("file to host"), weights(model)
    if host < 1:
        assert share_of(model, host) - CHUNK <= read <= share_of(model, host)
        before = gm.stats()["moved_bytes"]["file to host"]["demand"]
        model.model.embed_tokens(prompt(1, 8))
        assert gm.stats()["moved_bytes"]["file to host"]["demand"] == before
    else:
        assert size <= read <= size + CHUNK
    assert torch.equal(generate(model, prompt(1, 8)), want)
    if host > 1:
        for file in tmp_path.glob("*.safetensors"):
            file.write_bytes(b"")  # which nobody needs any more
        assert torch.equal(generate(model, prompt(1, 8)), want)
        assert moved("file to host") == read
    assert moved("host to file") == moved("device to host") == 0


@pytest.mark.parametrize("within", ["building", "infer", "texts", "all"])
def test_inference_mode(session, within):
    """What is made in inference mode has no versions, by which torch tells writes: weights are only read, even so."""

    def mode(what):
        return torch.inference_mode(within in (what, "all"))

    def quantized():
        model = llama(layers=2)
        model.register_buffer("codes", torch.arange(CHUNK, dtype=torch.int32).remainder(7))  # managed, as GPTQ's are
        model.register_forward_pre_hook(lambda module, _: None if module.codes.any() else None)
        return model

    want = generate(quantized(), prompt(1, 8))
    session(share_of(llama(layers=2), 0.4))
    with mode("building"):
        model = quantized()
    with mode("infer"):
        model = gm.infer(model)
    with mode("texts"):
        texts = [generate(model, prompt(1, 8)) for _ in range(2)]
    assert all(torch.equal(text, want) for text in texts)
    assert moved("device to host") == 0
    assert not any(weight.is_inference() for weight in (*model.parameters(), model.codes))


# ---- what is refused
def test_training_is_refused(session):
    session("2MiB")
    model = gm.infer(llama(layers=2, hidden=64))
    ids = prompt(1, 8)
    assert not any(param.requires_grad for param in model.parameters()) and not model.training
    loss = model(input_ids=ids, labels=ids).loss
    assert not loss.requires_grad
    with pytest.raises(gm.GeminiError, match=r"infer\(\) keeps the weights of LlamaForCausalLM only.*call prepare\(\)"):
        loss.backward()
    states = torch.zeros(1, 8, 64, requires_grad=True)
    assert not model(inputs_embeds=states).logits.requires_grad
    with pytest.raises(gm.GeminiError, match=r"given to infer\(\), which keeps weights only"):
        gm.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(gm.GeminiError, match="has a module that was"):
        gm.prepare(torch.nn.Sequential(model))
    model.lm_head.weight.requires_grad_(True)
    with pytest.raises(gm.GeminiError, match=r"lm_head.weight needs gradients.*infer\(\) keeps weights only"):
        model(input_ids=ids)
    model.requires_grad_(False)
    again = model(input_ids=ids, labels=ids).loss
    assert torch.equal(again, loss)
    trained = torch.nn.Linear(4, 4)
    trained = gm.prepare(trained)
    with pytest.raises(gm.GeminiError, match=r"was given to prepare\(\), so it may have gradients"):
        gm.infer(trained)
    trained(torch.ones(4)).sum().backward()  # others can be trained beside it


def test_a_parameter_that_is_trained_is_not_frozen(session):
    """infer() of another model with that parameter, or of a part of the model that has it."""
    session()
    trained = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    trained[1].requires_grad_(False)
    trained = gm.prepare(trained)
    for other, name in (torch.nn.Sequential(trained[0]), "0.weight"), (trained[0], "weight"):
        with pytest.raises(gm.GeminiError, match=rf"parameter {name} belongs to a model that was given to prepare\(\)"):
            gm.infer(other)
    assert trained[0].weight.requires_grad and trained.training
    gm.infer(torch.nn.Sequential(trained[1]))  # which is frozen already


def test_folders_that_are_refused(session, tmp_path):
    session("2MiB")
    with pytest.raises(gm.GeminiError, match="in_place is for folders"):
        gm.infer(llama(layers=1, hidden=64), in_place=True)
    with pytest.raises(gm.GeminiError, match="no checkpoint"):
        gm.infer(tmp_path / "none")
    model = llama(layers=2, hidden=64)
    model.config.architectures = ["NoSuchModel"]
    model.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text().replace("LlamaForCausalLM", "NoSuchModel")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(gm.GeminiError, match="NoSuchModel, which transformers does not have"):
        gm.infer(tmp_path)


def rewrite(path, change):
    """Writes model.safetensors anew, with what change(tensors) makes of its tensors."""
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def reconfigure(path, **values):
    """Sets values of config.json; None: takes them out."""
    config = {**json.loads((path / "config.json").read_text()), **values}
    (path / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def test_what_transformers_makes_of_weights_is_not_guessed(session, tmp_path):
    """Weights with scales, an adapter, and tied weights that differ: transformers reads more than the tensors."""

    def quantize(tensors):
        name = "model.layers.0.mlp.up_proj.weight"
        scale = tensors[name].abs().max() / 448
        tensors[name + "_scale_inv"] = scale.reshape(1, 1)
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)

    def refused(words):
        with pytest.raises(gm.GeminiError, match=words):
            gm.infer(str(tmp_path))

    llama().save_pretrained(tmp_path)
    session("1MiB")
    config = (tmp_path / "config.json").read_text()
    reconfigure(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    refused("has a quantization_config")
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "adapter_config.json").write_text("{}")
    refused("holds an adapter of PEFT")
    (tmp_path / "adapter_config.json").unlink()
    reconfigure(tmp_path, tie_word_embeddings=True)
    refused("are one tensor in the model .tied., and differ")
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    model = gm.infer(str(tmp_path))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    reconfigure(tmp_path, tie_word_embeddings=False)
    rewrite(tmp_path, quantize)
    refused("is of torch.float8_e4m3fn, the numbers of a quantized weight")


def test_the_dtype_of_a_folder_is_transformers(session, tmp_path):
    """That of the files where config.json names none; and fp32 for what transformers keeps in it."""
    llama().bfloat16().save_pretrained(tmp_path / "a")
    reconfigure(tmp_path / "a", dtype=None)
    experts = {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 2,
        "topk_group": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 160,
    }
    torch.manual_seed(0)
    router = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**experts))
    bias = torch.tensor([9.0, 9.02, 9.025, 9.03])  # one value in bf16
    router.model.layers[1].mlp.gate.e_score_correction_bias.copy_(bias)
    router.save_pretrained(tmp_path / "b")
    narrow = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.bfloat16)
    session("4MiB")
    assert gm.infer(str(tmp_path / "a")).dtype == torch.bfloat16
    gm.save(tmp_path / "c", gm.infer(narrow))
    model = gm.infer(str(tmp_path / "c"))
    assert model.dtype == torch.bfloat16
    kept = model.model.layers[1].mlp.gate.e_score_correction_bias
    assert kept.dtype == torch.float32
    same_bits(kept, bias)


def test_tensors_of_a_file_that_overlap_are_refused(session, tmp_path):
    llama().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    first, second = (f"model.layers.{i}.mlp.up_proj.weight" for i in range(2))
    header[first]["data_offsets"] = header[second]["data_offsets"]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    session("1MiB")
    with pytest.raises(gm.GeminiError, match=r"begins at \d+, what is before it ends at \d+"):
        gm.infer(str(tmp_path))


def test_a_parameter_that_was_added_is_told(session):
    session("1MiB")
    model = gm.infer(torch.nn.Sequential(torch.nn.Linear(8, 8)))
    model.append(torch.nn.Linear(8, 8).requires_grad_(False))
    with torch.no_grad(), pytest.raises(gm.GeminiError, match=r"was added after libgemini.torch.infer.*call infer\(\)"):
        model(torch.ones(1, 8))
    gm.infer(model)
    with torch.no_grad():
        model(torch.ones(1, 8))


def test_a_parameter_that_does_not_fit_is_told(session):
    model = llama(layers=1)
    session("64KiB")
    with pytest.warns(UserWarning, match=r"device_memory leaves 65536 bytes: a pass that uses all of parameter"):
        gm.infer(model)


# ---- its bench
def test_the_bench_runs_from_a_folder(tmp_path):
    """bench/peers/generate_torch.py --folder, which no other test runs: the start, and tokens read from files."""
    bench = pathlib.Path(__file__).parents[3] / "bench" / "peers" / "generate_torch.py"
    size = "--device cpu --size tiny --vocabulary 512 --tokens 3 --system gemini --device-mem 256KiB --host-mem 256KiB"
    command = [sys.executable, str(bench), *size.split(), "--folder", str(tmp_path / "weights")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    row = json.loads(done.stdout.splitlines()[-1].removeprefix("ROW "))
    assert row["case"] == "gemini tiny 256KiB batch 1 prompt 128" and row["departures"] == 0
    assert row["start_seconds"] > 0 and row["reading_seconds"] > 0 and row["missing_bytes"] > 0
