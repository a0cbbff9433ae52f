"""gm.Cache: keys and values in arenas, for generate() with contexts that the device has no room for.

SPDX-License-Identifier: Apache-2.0
"""

import copy
import gc
import importlib
import subprocess
import sys

import pytest
import torch

import libgemini.torch as gm
from conftest import same_bits, tiny
from libgemini import GeminiError
from test_infer import CHUNK, departures, generate, llama, moved, prompt, weights

transformers = pytest.importorskip("transformers")
cache_module = importlib.import_module("libgemini.torch.cache")
LONG = {"max_position_embeddings": 4096}


def texts(model, cache, length):
    """Texts made in each way. cache(): what the model gets as past_key_values. length: of a long prompt."""
    yield generate(model, prompt(1, 16), past_key_values=cache())
    yield generate(model, prompt(3, 12), past_key_values=cache())
    yield generate(model, prompt(2, 16), past_key_values=cache(), num_beams=3)
    yield generate(model, prompt(2, 9), past_key_values=cache(), do_sample=True, top_k=20, num_return_sequences=2)
    for piece in {"max_new_tokens": 4}, {"max_new_tokens": 2, "prefill_chunk_size": length // 3}:
        yield generate(model, prompt(1, length), past_key_values=cache(), **piece)


def used():
    return gm.stats()["used_bytes"]


def in_use(cache):
    return sum(layer.place.used for layer in cache.layers)


# ---- what is generated
@pytest.mark.parametrize(
    "attention, layers, length, budget",
    [("sdpa", 2, 2500, "2560KiB"), ("sdpa", 4, 200, "64MiB"), ("eager", 4, 200, "2MiB")],
)
def test_tokens_are_torchs(session, attention, layers, length, budget):
    """With room for all, and with room for a part: torch's tokens, whichever way a text is generated. Keys and values
    of heads that queries share, and texts that torch.inference_mode() is around."""
    more = {**LONG, "layers": layers, "num_key_value_heads": 2, "attn_implementation": attention}
    want = list(texts(llama(**more), lambda: None, length))
    session(budget)
    model = gm.infer(llama(**more))
    same_bits(list(texts(model, lambda: gm.Cache(model), length)), want)
    with torch.inference_mode():
        cache = gm.Cache(model)
        assert torch.equal(next(texts(model, lambda: cache, length)), want[0])
    assert not cache.layers[0].keys.is_inference()  # of such a tensor, a read counts as a write


def test_a_process_that_an_exception_ends_with_a_cache_says_no_more_than_that():
    script = (
        "import torch, transformers\nimport libgemini.torch as gm\n"
        "gm.init(device='cpu', device_memory='4MiB', host_memory='64MiB', progress=False)\n"
        "config = transformers.LlamaConfig(vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2,"
        " num_attention_heads=4)\n"
        "model = gm.infer(transformers.LlamaForCausalLM(config))\n"
        "def run(cache):\n"
        "  model(input_ids=torch.tensor([[1, 2]]), past_key_values=cache, use_cache=True)\n"
        "  raise RuntimeError('of the program')\n"
        "cache = gm.Cache(model)\n"  # it, and with it the places of its layers, lives until Python takes modules apart
        "run(cache)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Exception ignored" not in done.stderr
    assert done.stderr.splitlines()[-1] == "RuntimeError: of the program"


def test_a_draft_is_taken_back(session):
    """Assisted generation, which crops the cache; and a context that goes on in the cache of the one before."""
    draft, model, ids = llama(1, layers=2), llama(), prompt(1, 12)

    def both(model, draft, cache):
        first = generate(model, ids, assistant_model=draft, past_key_values=cache, max_new_tokens=24)
        longer = torch.cat([first, prompt(1, 5, seed=4)], dim=1)
        return first, generate(model, longer, past_key_values=cache)

    want = both(model, draft, transformers.DynamicCache(config=model.config))
    session(2 << 20)
    model, draft = gm.infer(llama()), gm.infer(llama(1, layers=2))
    cache = gm.Cache(model)
    same_bits(both(model, draft, cache), want)
    assert cache.get_seq_length() == want[1].shape[1] - 1


def test_layers_have_the_bits_of_transformers_layers(session):
    """Positions appended and removed, texts chosen, repeated and reordered, over chunks and pieces of chunks."""
    session("2MiB")
    model = gm.infer(llama())
    generator = torch.Generator().manual_seed(5)

    def drawn(batch, count):
        return [torch.randn(batch, 4, count, 32, generator=generator) for _ in range(2)]

    ours, theirs = gm.Cache(model), transformers.DynamicCache(config=model.config)

    def both(name, *args):
        for cache in ours, theirs:
            getattr(cache.layers[1], name)(*args)
        for part in "keys", "values":
            same_bits(getattr(ours.layers[1], part).clone(), getattr(theirs.layers[1], part))
        assert ours.layers[1].get_seq_length() == theirs.layers[1].get_seq_length()

    both("update", *drawn(2, 70))
    both("update", *drawn(2, 1))
    both("batch_repeat_interleave", 3)
    both("update", *drawn(6, 90))
    both("reorder_cache", torch.tensor([5, 0, 0, 3, 2, 1]))
    both("crop", -50)
    both("update", *drawn(6, 3))
    both("batch_select_indices", torch.tensor([True, False, True, True, False, False]))
    both("update", *drawn(3, 64))
    both("batch_select_indices", torch.tensor([2]))
    both("update", *drawn(1, 300))
    both("crop", 0)
    with pytest.raises(IndexError):
        ours.layers[1].reorder_cache(torch.tensor([1]))
    both("update", *drawn(1, 1))  # nothing was written before
    ours.layers[1].reset()
    theirs.layers[1].reset()
    assert ours.layers[1].place.used == 0
    both("update", *drawn(5, 2))


# ---- what it takes
def test_a_long_context_stays_within_the_budget(session):
    """The cache alone is larger than the device. It grows without a departure, plans follow it, and what a token moves
    is what has no room of weights and cache; back moves the last chunk of each layer, which is written."""
    tokens, ids, budget = 60, prompt(4, 130), 2 << 20
    want = generate(llama(**LONG), ids, max_new_tokens=tokens)
    session(budget, units="always")
    model = gm.infer(llama(**LONG))
    read = weights(model) - model.get_input_embeddings().weight.nbytes
    for text in range(2):
        gm.stats_reset()
        cache, after = gm.Cache(model), []

        def note(*_, cache=cache, after=after):
            after.append((moved("host to device"), moved("device to host"), in_use(cache), gm.stats()["plans"]))

        hook = model.register_forward_hook(note)
        plans = gm.stats()["plans"]
        with departures(model) as seen:
            assert torch.equal(generate(model, ids, max_new_tokens=tokens, past_key_values=cache), want)
        hook.remove()
        assert seen[-1] == 0
        # What operators access is the same object from token to token.
        assert len(gm.session().holds.uses) < 2 * tokens * (text + 1)
        stats = gm.stats()
        assert stats["peak_bytes"]["device"] <= budget < in_use(cache)
        assert stats["planned_iterations"] >= (text + 1) * (tokens - 2)
        grown = [now[2] - before[2] for before, now in zip(after[1:], after[2:])]
        assert grown.count(0) > len(grown) * 3 // 4 and any(grown)
        # A plan for each growth, of the prompt and of a token at first, and again with measured times.
        assert stats["plans"] - plans <= len(grown) - grown.count(0) + 6
        settled, more_went, later = 0, 0, list(zip(after, after[1:], after[2:], grown))[8:]
        for before, (came, went, size, plan), (then, out, _, now), more in later:
            missing = read + size - budget
            # Later times may suggest another plan, whose first token brings what the one before had not kept.
            if not more and before[3] == plan == now:
                settled += 1
                most = missing + size // len(cache.layers)  # a layer whose attention runs has these frames alone
                assert missing <= then - came <= 1.1 * most + 4 * CHUNK
            more_went += out - went > (2 if not more else 4) * len(cache.layers) * CHUNK
        assert settled > len(grown) // 2
        assert more_went <= len(later) // 10  # a copy that comes late, as on a busy machine, has another chunk leave
        # The first prompt and the first token have no plan.
        demand = stats["moved_bytes"]["host to device"]["demand"] - (0 if text else after[1][0])
        assert demand < (after[-1][0] - after[1][0]) // 20
        del cache, hook, note


def test_memory_comes_back(session):
    """A cache that is gone, or reset, leaves its memory, and its arenas to the next one."""
    session("2MiB")
    model = gm.infer(llama(**LONG))
    generate(model, prompt(1, 8))
    before = used()
    arenas = None
    for _ in range(3):
        cache = gm.Cache(model)
        generate(model, prompt(4, 300), past_key_values=cache)
        size = in_use(cache)
        assert size > 4 << 20 and used()["host"] > before["host"] + size - (2 << 20)
        arenas = arenas or gm.session().caches.count
        views = cache.layers[0].keys
        del cache
        gc.collect()
        gm.session().caches.drain()
        assert len(gm.session().caches.free[torch.float32]) == 3  # the fourth has views
        del views
        generate(model, prompt(1, 8))
        assert len(gm.session().caches.free[torch.float32]) == 4
        assert used()["host"] <= before["host"] + (1 << 20) and not gm.session().caches.left
        assert gm.session().caches.count == arenas == 4
    cache = gm.Cache(model)
    generate(model, prompt(4, 300), past_key_values=cache)
    cache.crop(-250)
    assert 0 < in_use(cache) < 2 << 20
    cache.reset()
    assert in_use(cache) == 0 and used()["host"] <= before["host"] + (1 << 20)
    generate(model, prompt(2, 10), past_key_values=cache)


def test_blocks_are_not_acquired_together_beside_a_cache(session):
    session("64MiB", units="always")
    model = gm.infer(llama())
    blocks = gm.session().model.blocks
    generate(model, prompt(1, 8))
    assert blocks.active
    generate(model, prompt(1, 8), past_key_values=gm.Cache(model))
    assert not blocks.active


def test_files_take_what_the_host_has_no_room_for(session, tmp_path):
    """Device and host together have less room than weights and cache."""
    ids = prompt(4, 300)
    want = generate(llama(**LONG), ids)
    session("2MiB", host_memory="4MiB", file=str(tmp_path), file_memory="32MiB")
    model = gm.infer(llama(**LONG))
    cache = gm.Cache(model)
    assert torch.equal(generate(model, ids, past_key_values=cache), want)
    assert weights(model) + in_use(cache) > 6 << 20 and moved("host to file") and moved("file to host")


def test_caches_take_turns(session):
    """Two models, three texts whose tokens are made by turns, and a prompt's cache that texts begin with."""
    one, other = llama(0), llama(1, layers=2)

    @torch.no_grad()
    def steps(models, cache):
        ids = [prompt(1, 40), prompt(2, 30, seed=1), prompt(1, 50, seed=2)]
        caches = [cache(model) for model in models]
        out = [[], [], []]
        for _ in range(5):
            for i, model in enumerate(models):
                logits = model(input_ids=ids[i], past_key_values=caches[i], use_cache=True).logits
                ids[i] = logits[:, -1:].argmax(-1)
                out[i].append(ids[i])
        fork = copy.deepcopy(caches[0])
        for cache in caches[0], fork, caches[0]:
            ids[0] = models[0](input_ids=ids[0], past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            out[0].append(ids[0])
        return [torch.cat(tokens, dim=1) for tokens in out]

    want = steps((one, other, one), lambda model: transformers.DynamicCache(config=model.config))
    session("2MiB")
    one, other = gm.infer(llama(0)), gm.infer(llama(1, layers=2))
    same_bits(steps((one, other, one), gm.Cache), want)
    gc.collect()
    assert gm.session().caches.numbers == set()


# ---- what goes wrong
@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("where", ["append", "scaled_dot_product_attention", "index_select"])
def test_an_exception_ends_a_text_and_no_more(session, monkeypatch, kind, where):
    """Between any steps of a pass, or of a reorder: what was held is released, and the next text is torch's."""
    ids = prompt(1, 60)
    want = generate(llama(), ids, num_beams=2)
    session("2MiB")
    model = gm.infer(llama())
    cache, calls = gm.Cache(model), []
    owner, name = {
        "append": (cache_module, "_copy_all"),
        "scaled_dot_product_attention": (torch.nn.functional, where),
        "index_select": (torch.Tensor, where),
    }[where]
    function = getattr(owner, name)

    def fails(*args, **kwargs):
        calls.append(1)
        if len(calls) == 15:
            raise kind("on purpose")
        return function(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        with pytest.raises(kind, match="on purpose"):
            generate(model, ids, num_beams=2, past_key_values=cache)
    if where == "index_select":
        with pytest.raises(GeminiError, match="lost: reset"):
            for layer in cache.layers:
                layer.update(*[torch.zeros(layer.rows.batch, 4, 1, 32)] * 2)
    cache.reset()
    assert torch.equal(generate(model, ids, num_beams=2, past_key_values=cache), want)
    assert not gm.session().holds.noted


def test_no_room_is_an_error(session):
    """A layer that the device has no room for, and a cache for which host and device have none."""
    session("2MiB", host_memory="8MiB")
    model = gm.infer(llama(**LONG))
    cache = gm.Cache(model)
    with pytest.raises(GeminiError, match="cache 0.0:.*device memory"):
        generate(model, prompt(2, 1100), past_key_values=cache)
    with pytest.raises(GeminiError, match="cache 1.3:.*host memory"):
        generate(model, prompt(4, 500), past_key_values=gm.Cache(model))
    del cache
    want = generate(llama(**LONG), prompt(1, 8))
    assert torch.equal(generate(model, prompt(1, 8), past_key_values=gm.Cache(model)), want)


def test_what_is_not_supported_is_refused(session):
    model = llama()
    with pytest.raises(GeminiError, match="no session"):
        gm.Cache(model)
    session()
    model = gm.infer(model)
    cache = gm.Cache(model.config)
    states = [torch.zeros(2, 4, 3, 32)] * 2
    with pytest.raises(TypeError, match="Linear"):
        gm.Cache(torch.nn.Linear(2, 2))
    with pytest.raises(GeminiError, match="DynamicSlidingWindowLayer"):
        gm.Cache(transformers.MistralConfig(sliding_window=8))
    with pytest.raises(GeminiError, match="LinearAttention"):
        gm.Cache(transformers.Qwen3NextConfig())
    with pytest.raises(GeminiError, match="encoder with a decoder"):
        gm.Cache(tiny("t5"))
    with pytest.raises(GeminiError, match="flex_attention"):
        gm.Cache(transformers.LlamaConfig(attn_implementation="flex_attention"))
    with pytest.raises(GeminiError, match="need gradients"):
        cache.update(states[0].requires_grad_(), states[1], 0)
    states = [torch.zeros(2, 4, 3, 32)] * 2
    cache.update(*states, 0)
    for wrong in ([torch.zeros(1, 4, 3, 32)] * 2, [torch.zeros(2, 4, 3, 32, dtype=torch.float64)] * 2):
        with pytest.raises(GeminiError, match="do not fit"):
            cache.update(*wrong, 0)
    with pytest.raises(GeminiError, match="positions, width"):
        cache.update(states[0], states[1][:, :, :2], 0)
    with pytest.raises(GeminiError, match="cannot be pickled"):
        copy.copy(cache.layers[0])
    with pytest.raises(GeminiError, match="torch.compile"):
        torch.compile(lambda: cache.update(*states, 0), backend="eager")()
    assert cache.get_seq_length() == 3
    gm.close()
    with pytest.raises(GeminiError, match="session was closed"):
        cache.update(*states, 0)


@pytest.mark.parametrize("name", ("keys", "values"))
def test_keys_that_are_replaced_are_refused(session, name):
    """transformers' layers take what is put in the place of their keys; these have an arena."""
    session("1MiB")
    model = gm.infer(llama())
    cache = gm.Cache(model)
    with torch.no_grad():
        model(input_ids=prompt(1, 20), past_key_values=cache)
        kept = getattr(cache.layers[0], name)
        setattr(cache.layers[0], name, kept[:, :, :10])
        with pytest.raises(gm.GeminiError, match="have been replaced by another tensor"):
            model(input_ids=prompt(1, 4), past_key_values=cache)
        with pytest.raises(gm.GeminiError, match="have been replaced by another tensor"):
            cache.crop(-2)
        setattr(cache.layers[0], name, kept)
        cache.crop(-10)
        model(input_ids=prompt(1, 4), past_key_values=cache)
        assert cache.get_seq_length() == 14
