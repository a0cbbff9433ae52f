"""AdamW with narrow states: momentum and variance in bf16, and split masters. What is kept does not depend on where,
when and in which pieces it is updated, and everything outside of the session sees fp32.

SPDX-License-Identifier: Apache-2.0
"""

import pytest
import torch
from torch import nn

import bits
import libgemini.torch as gm
from libgemini.torch import arenas, narrow, speculate, tensorfile

WIDTH, LAYERS = 256, 3
NARROW = [("bf16", "fp32"), ("fp32", "split16"), ("bf16", "split16"), ("8bit", "fp32"), ("8bit", "split16")]
IDS = ["-".join(pair) for pair in NARROW]


@pytest.fixture(autouse=True)
def small_parameters_too(monkeypatch):
    monkeypatch.setattr(speculate, "LEAST_ELEMENTS", 1)


def net(dtype=torch.bfloat16):
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10)).to(dtype)  # a bias shorter than a block's scale


ELEMENTS = sum(param.numel() for param in net().parameters())


class Loop:
    """A training loop, step by step."""

    def __init__(self, session, states="fp32", masters="fp32", dtype=torch.bfloat16, early=False, kind=None, **more):
        self.session = session("1MiB", **more)
        model, self.number = net(dtype), 0
        optimizer = (kind or torch.optim.AdamW)(model.parameters(), lr=1e-2)
        self.model, self.optimizer = gm.prepare(
            model, optimizer, step_in_backward=early, states=states, masters=masters
        )
        self.dtype = dtype

    def steps(self, count, clip=None):
        for _ in range(count):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(self.number)).to(self.dtype)
            (self.model(x).float() ** 2).mean().backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.number += 1

    def state(self):
        """By parameter, exp_avg and so on, as copies."""
        return self.optimizer.state_dict()["state"]

    def params(self):
        return [param.detach().clone() for param in self.model.parameters()]

    def result(self):
        return bits.described({"params": self.params(), "state": self.state()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("states", "masters"), NARROW, ids=IDS)
def test_results_depend_on_nothing_but_the_steps(session, states, masters, dtype):
    """Ahead of the step or not, in the backward pass, in other chunks, with everything on the device or next to none:
    the same bits."""
    results = []
    for more, clip in (
        ({"speculate": False}, None),
        ({}, 1e9),
        ({"early": True}, None),
        ({"chunk_size": "128KiB", "device_memory": "16MiB", "placement": "cuda"}, None),
    ):
        device = more.pop("device_memory", "1MiB")
        loop = Loop(lambda _, device=device, **rest: session(device, **rest), states, masters, dtype, **more)
        loop.steps(5, clip)
        results.append(loop.result())
        if clip:  # it was computed ahead, in the units of the library: chunks of the smallest elements
            assert gm.stats()["committed_elements"] > 0
            smallest = min(dtype.itemsize, 2 if "split16" in masters and dtype.itemsize == 2 else 4)
            smallest = min(smallest, narrow.STATES[states].itemsize)
            for units in loop.optimizer.rule.speculation.units.values():
                assert units.elements * smallest == 64 << 10
        gm.close()
    assert all(result == results[0] for result in results)


def around(variances):
    """The two values that a step chooses from for each variance in blocks, as random bits say."""
    flat = variances.reshape(-1)
    blocks = nn.functional.pad(flat, (0, -flat.numel() % 256)).view(-1, 256)
    bits = (narrow.encoded(blocks, 7)[:, :16] & 1).to(torch.int32) << torch.arange(16, dtype=torch.int32)
    scale = (bits.sum(1, dtype=torch.int32) << 16).view(torch.float32)[:, None]
    both = torch.zeros(2, *blocks.shape)
    for part, levels in (slice(0, 16), narrow._COARSE[7][2::2]), (slice(16, 256), narrow._FINE[7][2:]):
        values = levels * scale
        high = torch.searchsorted(values, blocks[:, part].contiguous()).clamp(1, len(levels) - 1)
        for side in 0, 1:
            both[side][:, part] = torch.where(blocks[:, part] > 0, values.gather(1, high - 1 + side), 0)
    return both.view(2, -1)[:, : flat.numel()].view(2, *variances.shape)


@pytest.mark.parametrize(("states", "masters"), NARROW, ids=IDS)
def test_a_step_computes_what_fp32_does(session, states, masters):
    """The first step has the same parameters, so its master is the same to the bit, and so are momentum and variance
    before they are rounded: up as often as it should be."""
    whole = Loop(session)
    whole.steps(1)
    want = whole.state()
    gm.close()
    loop = Loop(session, states, masters)
    loop.steps(1)
    found, surplus, spread = loop.state(), 0.0, 0.0
    for number, param in enumerate(loop.params()):
        assert torch.equal(found[number]["master"], want[number]["master"])
        if masters == "split16":
            assert torch.equal(param, narrow.halves(want[number]["master"].reshape(-1))[0].view(param.shape))
        for name in ("exp_avg", "exp_avg_sq"):
            one, other = found[number][name], want[number][name]
            assert one.dtype == torch.float32
            if states == "fp32":
                assert torch.equal(one, other)
                continue
            if states == "8bit" and name == "exp_avg":  # the codes that narrow.py computes, too
                blocks = nn.functional.pad(other.reshape(-1), (0, -other.numel() % 256)).view(-1, 256)
                want_codes = narrow.decoded(narrow.encoded(blocks, 6), 6).reshape(-1)[: other.numel()]
                assert torch.equal(one.reshape(-1), want_codes)
                assert (one - other).abs().max() < 0.02 * other.abs().max()
                continue
            if states == "8bit":
                low, high = around(other)
                assert ((one - other).abs() <= 0.03 * other.max()).all()
            else:
                low = (other.view(torch.int32) & ~0xFFFF).view(torch.float32)
                high = torch.where(low == other, low, (low.view(torch.int32) + 0x10000).view(torch.float32))
            assert ((one == low) | (one == high)).all()
            wide = low != high
            share = ((other - low) / (high - low))[wide].clamp(0, 1).double()  # of ups
            surplus += float((one == high)[wide].sum() - share.sum())
            spread += float((share * (1 - share)).sum())
    assert states == "fp32" or abs(surplus) < 5 * spread**0.5


def test_halves_and_joined_are_inverse():
    generator = torch.Generator().manual_seed(1)
    masters = torch.randint(-(2**31), 2**31, (1 << 16,), generator=generator).to(torch.int32)
    masters[:8] = torch.tensor([0, -(2**31), 0x7F7FFFFF, 0x7F800000, 0x3F808000, 0x3F818000, 0x3F817FFF, 1])
    masters = masters.view(torch.float32)
    upper, lower = narrow.halves(masters)
    back = narrow.joined(upper, lower)
    finite = ~masters.isnan()
    assert (
        torch.equal(back[finite].view(torch.int32), masters[finite].view(torch.int32)) and back[~finite].isnan().all()
    )
    assert upper[4] == 1.0078125 and upper[5] == 1.015625 and upper[6] == 1.0078125  # ties away from zero
    ties = masters.view(torch.int16).view(-1, 2)[:, 0] == -0x8000
    assert torch.equal(upper[finite & ~ties], masters[finite & ~ties].to(torch.bfloat16))


@pytest.mark.parametrize(("states", "masters"), NARROW, ids=IDS)
@pytest.mark.parametrize("early", [False, True])
def test_checkpoints_have_fp32_and_go_on_to_the_bit(session, tmp_path, states, masters, early):
    loop = Loop(session, states, masters, early=early)
    loop.steps(3)
    gm.save(tmp_path / "saved", loop.model, loop.optimizer)
    saved, kept = loop.state(), loop.params()
    loop.steps(3)
    want = loop.result()
    gm.close()
    entries = tensorfile.read_header(tmp_path / "saved" / "optimizer.safetensors")
    assert {entry.dtype for entry in entries.values()} == {torch.float32} and len(entries) == 3 * (4 * LAYERS + 2)

    loop = Loop(session, states, masters, early=early)
    gm.load(tmp_path / "saved", loop.model, loop.optimizer)
    assert bits.described(loop.state()) == bits.described(saved)
    loop.number = 3
    loop.steps(3)
    assert loop.result() == want
    gm.close()

    loop = Loop(session, states, masters, early=early)  # by torch's dicts
    with torch.no_grad():
        for param, value in zip(loop.model.parameters(), kept):
            param.copy_(value)
    loop.steps(1)
    with torch.no_grad():
        for param, value in zip(loop.model.parameters(), kept):
            param.copy_(value)
    loop.optimizer.state_dict()
    loop.model(torch.zeros(4, WIDTH, dtype=loop.dtype))  # takes over what was written
    loop.optimizer.load_state_dict({**loop.optimizer.state_dict(), "state": saved})
    loop.number = 3
    loop.steps(3)
    assert loop.result() == want


def test_checkpoints_fit_other_options(session, tmp_path):
    """fp32 masters and states become narrow ones, and the other way round; what fits is kept to the bit."""
    loop = Loop(session, "bf16", "split16")
    loop.steps(3)
    saved = loop.state()
    gm.save(tmp_path / "narrow", loop.model, loop.optimizer)
    gm.close()
    loop = Loop(session)
    gm.load(tmp_path / "narrow", loop.model, loop.optimizer)
    assert bits.described(loop.state()) == bits.described(saved)
    loop.steps(1)
    saved, params = loop.state(), loop.params()
    gm.save(tmp_path / "wide", loop.model, loop.optimizer)
    gm.close()
    loop = Loop(session, "bf16", "split16")
    gm.load(tmp_path / "wide", loop.model, loop.optimizer)
    for number, (param, value) in enumerate(zip(loop.params(), params)):
        state = loop.state()[number]
        assert torch.equal(state["master"], saved[number]["master"])
        tie = param != value  # fp32 masters round these to even
        assert (param[tie].float().abs() > value[tie].float().abs()).all() and tie.sum() <= 4
        assert torch.equal(state["exp_avg"], saved[number]["exp_avg"].bfloat16().float())
    loop.steps(1)


def test_a_parameter_that_is_written_is_its_master(session):
    loop = Loop(session, masters="split16")
    loop.steps(2)
    assert any((state["master"] != param).any() for state, param in zip(loop.state().values(), loop.params()))
    with torch.no_grad():
        for param in loop.model.parameters():
            param.mul_(0.3)
    loop.model(torch.zeros(4, WIDTH, dtype=loop.dtype))
    for state, param in zip(loop.state().values(), loop.params()):
        assert torch.equal(state["master"], param.float())


def test_states_can_be_read_and_written(session):
    loop = Loop(session, "bf16", "split16")
    loop.steps(1)
    for param in loop.model.parameters():
        state = loop.optimizer.state[param]
        assert state["exp_avg"].dtype == torch.bfloat16 and state["exp_avg_sq"].shape == param.shape
        state["exp_avg"].zero_()
        loop.optimizer.state[param] = {**state, "exp_avg_sq": torch.ones(param.shape)}
    for state in loop.state().values():
        assert not state["exp_avg"].any() and (state["exp_avg_sq"] == 1).all()
    loop.steps(1)


def test_states_in_blocks_are_read_and_written_as_fp32(session):
    loop = Loop(session, "8bit")
    loop.steps(1)
    for param in loop.model.parameters():
        state = loop.optimizer.state[param]
        assert state["exp_avg"].dtype == torch.float32 and state["exp_avg_sq"].shape == param.shape
        state["exp_avg"] = torch.zeros(param.shape)
        loop.optimizer.state[param] = {**state, "exp_avg_sq": torch.full(param.shape, 0.25)}
    for state in loop.state().values():
        assert not state["exp_avg"].any() and ((state["exp_avg_sq"] - 0.25).abs() < 0.01).all()
    loop.steps(1)


def test_codes_are_read_back_as_they_were():
    generator = torch.Generator().manual_seed(2)
    for top in 6, 7:
        codes = torch.randint(0, 256, (2000, 256), generator=generator, dtype=torch.uint8)
        codes[:, :16] &= 0xFE
        if top == 6:
            codes[:, :16][codes[:, :16] == 0x80] = 0
        codes[:, 100] = 127  # what a block with a scale that fits it has at least
        if top == 7:  # or somewhat less, as random bits said, and of some blocks it has a coarse code
            codes[codes == 1] = 2  # no variance has it
            for first, (fine, coarse) in enumerate([(255, 254), (254, 252), (253, 252), (252, 254), (251, 252)]):
                some = codes[first::5]
                some[:, 16:].clamp_(max=fine)
                some[:, :16].clamp_(max=coarse)
                some[:, 100], some[:, 8] = fine, coarse
        scale = (torch.rand(2000, generator=generator) * 3 + 0.01).bfloat16()
        scale[:3] = torch.tensor([0.0, 1e-30, 1e30]).bfloat16()
        bits = scale.view(torch.int16).to(torch.int32) & 0xFFFF
        codes[:, :16] |= ((bits[:, None] >> torch.arange(16)) & 1).to(torch.uint8)
        values = narrow.decoded(codes, top)
        again = narrow.encoded(values, top)
        assert torch.equal(narrow.decoded(again, top), values)
        assert torch.equal(again[1:, 16:], codes[1:, 16:]) and torch.equal(again[1:, :16], codes[1:, :16])


def gradients_of_many_magnitudes(elements):
    """With zeros, some whose squares are below the lowest code of their block, some whose squares are subnormal."""
    generator = torch.Generator().manual_seed(4)
    out = 10 ** (-20 * torch.rand(elements, generator=generator)) * torch.randn(elements, generator=generator).sign()
    out[3::10] = 0
    return out


@pytest.mark.parametrize("elements", [10, 1000, 1024])
def test_small_variances_are_kept_and_zeros_stay(session, tmp_path, elements):
    """The library's codes are those of narrow.py, also of a block at the end; and files bring them back."""
    gradients = gradients_of_many_magnitudes(elements)

    def trained(states, gradients, steps=1, load=None):
        session("1MiB")
        model = nn.Module()
        model.weight = nn.Parameter(torch.zeros(elements))
        model.forward = lambda x: (model.weight * x).sum()
        model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), states=states)
        if load:
            gm.load(load, model, optimizer)
        for _ in range(steps):
            model(gradients).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    _, optimizer = trained("fp32", gradients)
    want = optimizer.state_dict()["state"][0]["exp_avg_sq"]
    gm.close()
    model, optimizer = trained("8bit", gradients)
    found = optimizer.state_dict()["state"][0]["exp_avg_sq"]
    place = optimizer.records[0].states["variance"]
    codes = torch.empty(place.elements, dtype=torch.uint8)
    place.read_to(codes, 0)
    padded = nn.functional.pad(want, (0, -elements % 256)).view(-1, 256)
    scales = narrow.encoded(padded, 7)
    assert torch.equal(codes.view(-1, 256)[:, :16] & 1, scales[:, :16] & 1)
    low, high = around(want)
    assert ((found == low) | (found == high)).all()
    assert torch.equal(found > 0, want > 0) and (want > 0).any() and (want == 0).any()
    assert (found >= 0.169 * want).all()  # 0.364, of those that are not among the first 16 of their block
    codes.view(-1, 256)[:, :16] &= 0xFE  # bits of the scale
    assert not codes[elements:].any()

    gm.save(tmp_path / "saved", model, optimizer)
    model(gradients).backward()
    optimizer.step()
    want = bits.described([optimizer.state_dict()["state"], model.weight.detach().clone()])
    gm.close()
    model, optimizer = trained("8bit", gradients, load=tmp_path / "saved")
    assert bits.described([optimizer.state_dict()["state"], model.weight.detach().clone()]) == want


def test_blocks_with_a_nan_have_no_codes_and_subnormal_scales_do():
    values = torch.full((4, 256), 1e-30)
    values[0, 3], values[1, 3], values[2, :], values[3, :] = float("nan"), float("inf"), 2.0**-149, 0.0
    codes = narrow.encoded(values, 7)
    assert not (codes[:2, 16:] > 0).any() and not (codes[:2, :16] & 0xFE).any() and not codes[3].any()
    assert narrow.decoded(codes, 7)[:2].isnan().all() and (codes[2] & 0xFE > 0).all()


def test_rows_that_are_seldom_used_do_not_run_away(session):
    """Beside row 0, which is in half of each batch, the variances of the others are below the lowest code of their
    block: as zeros they made steps of thousands of learning rates."""
    wanted = torch.randn(16, 16, generator=torch.Generator().manual_seed(5))
    found = {}
    for states in "fp32", "8bit":
        session("1MiB")
        model = nn.Embedding(16, 16)
        nn.init.zeros_(model.weight)
        model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), states=states)
        generator = torch.Generator().manual_seed(6)
        for _ in range(100):
            rows = torch.randint(1, 16, (8,), generator=generator)
            rows = torch.cat([rows, torch.zeros(512, dtype=torch.int64)])
            noise = torch.zeros(rows.numel(), 16)
            noise[8:] = torch.randn(16, generator=generator)
            ((model(rows) - wanted[rows] - noise) ** 2).sum().div(1024).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[states] = model.weight.detach().clone()
        gm.close()
    assert (found["8bit"] - found["fp32"]).abs().max() < 1
    assert (found["8bit"] - wanted)[1:].abs().mean() < 0.8 * wanted[1:].abs().mean()


def test_another_optimizer_gets_the_masters_whole(session):
    loop = Loop(session, "bf16", "split16")
    loop.steps(2)
    masters = [state["master"] for state in loop.state().values()]
    for options in ({}, {"masters": "split16"}, {"states": "bf16"}):
        _, loop.optimizer = gm.prepare(loop.model, torch.optim.AdamW(loop.model.parameters(), lr=1e-2), **options)
        records = loop.optimizer.records
        for record, master in zip(records, masters):
            assert torch.equal(narrow.seen(record, "master").read(), master)
    loop.steps(1)


def test_bytes_are_those_that_are_promised(session):
    sizes = {}
    for states, masters in [("fp32", "fp32"), *NARROW]:
        loop = Loop(session, states, masters)
        loop.steps(1)
        sizes[states, masters] = gm.stats()["model_bytes"]
        gm.close()
    padding = 0.02 * sizes["fp32", "fp32"]
    for pair, wanted in zip(sizes, (16, 12, 14, 10, 10, 8)):  # parameter, gradient, master, momentum, variance
        assert abs(sizes[pair] - wanted * ELEMENTS) < padding


def test_what_cannot_be_narrow_is_refused_in_words(session):
    with pytest.raises(ValueError, match="states is 'bf17': want 'fp32' or 'bf16' or '8bit'"):
        Loop(session, "bf17")
    with pytest.raises(ValueError, match="masters is 16: want 'fp32' or 'split16'"):
        gm.prepare(net(), masters=16)
    with pytest.raises(ValueError, match="give the optimizer, too"):
        gm.prepare(net(), states="bf16")
    gm.close()
    with pytest.raises(
        gm.GeminiError, match="states='bf16' and masters='fp32' are for torch.optim.AdamW and Adam, .*SGD"
    ):
        Loop(session, "bf16", kind=torch.optim.SGD)
    gm.close()
    with pytest.raises(gm.GeminiError, match=r"parameter 0\.0\.weight is of float16.*masters='split16' wants bfloat16"):
        Loop(session, masters="split16", dtype=torch.float16)
    gm.close()


@pytest.mark.parametrize("masters", ["fp32", "split16"])
def test_a_written_parameter_is_saved_as_it_is(session, masters):
    loop = Loop(session, masters=masters)
    loop.steps(2)
    with torch.no_grad():
        loop.model[0][0].weight.zero_()  # and no pass comes before the state is read
    assert not loop.state()[0]["master"].any()


@pytest.mark.parametrize("last", ["states", "parameters"])
@pytest.mark.parametrize("masters", ["fp32", "split16"])
def test_masters_that_are_loaded_stay(session, masters, last):
    """Whether they are loaded after the parameters or before."""
    loop = Loop(session, masters=masters)
    loop.steps(2)
    parameters = {name: value.detach().clone() for name, value in loop.model.state_dict().items()}
    states = loop.optimizer.state_dict()
    loop.steps(2)
    want = [param.detach().clone() for param in loop.model.parameters()]
    gm.close()
    other = Loop(session, masters=masters)
    other.number = 2
    if last == "states":
        other.model.load_state_dict(parameters)
    other.optimizer.load_state_dict(states)
    if last == "parameters":
        other.model.load_state_dict(parameters)
    other.steps(2)
    assert all(torch.equal(have, one) for have, one in zip(other.model.parameters(), want))


def test_codes_need_an_eps(session):
    loop = Loop(session, states="8bit")
    loop.optimizer.param_groups[0]["eps"] = 0.0
    with pytest.raises(gm.GeminiError, match="eps is 0, want more than 0 where moments are in blocks"):
        loop.steps(1)


def test_bytes_to_be_written_keep_their_tensor():
    values = torch.arange(1 << 16).view(256, 256).t()
    data = tensorfile._bytes_of(values.contiguous())
    others = [torch.zeros(1 << 16, dtype=torch.int64) for _ in range(3)]  # get its memory if it is free
    assert bytes(data) == values.contiguous().numpy().tobytes() and not any(one.any() for one in others)


def test_new_split_masters_are_not_compared_with_the_parameters(session, monkeypatch):
    """They are zeros, as masters are the parameters; to compare them would read every parameter on the host."""
    renewed = []
    monkeypatch.setattr(narrow, "renew", lambda *places: renewed.append(places))
    with session("1MiB"):
        model = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        nn.init.normal_(model.weight)  # when it is managed already
    values = [param.detach().float().clone() for param in model.parameters()]
    model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.0), masters="split16")
    (model(torch.ones(4, WIDTH, dtype=torch.bfloat16)).float() ** 2).mean().backward()
    optimizer.step()
    assert not renewed
    for param, value in zip(model.parameters(), values):
        assert torch.equal(narrow.seen(param._gm_record, "master").read().view_as(value), value)


def failing_seventh(inner):
    """A function of which the seventh call finds no room."""
    calls = []

    def call(*given, **more):
        calls.append(given)
        if len(calls) == 7:
            raise gm.GeminiError("there is no room", "OOM_HOST")
        return inner(*given, **more)

    return call


@pytest.mark.parametrize("former, in_backward", ((False, False), (True, False), (False, True)))
@pytest.mark.parametrize("states, masters", [("fp32", "fp32"), *NARROW])
def test_prepare_can_be_tried_again(session, monkeypatch, states, masters, former, in_backward):
    """When there was no room for all states, those that were made are gone; and a former optimizer's copies are not."""
    fail_in = [(narrow, "state_place")]
    if masters == "fp32" and not former:  # fp32 copies are made, too
        fail_in.append((arenas.Place, "copy_from"))
    results = []
    for places in [], fail_in:
        loop = Loop(session)
        if former:
            loop.steps(2)
            model = loop.model
        else:
            gm.close(force=True)
            session("1MiB")
            model = net()
        for where, name in places:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            with monkeypatch.context() as patch, pytest.raises(gm.GeminiError, match="there is no room"):
                patch.setattr(where, name, failing_seventh(getattr(where, name)))
                gm.prepare(model, optimizer, step_in_backward=in_backward, states=states, masters=masters)
            for record in () if former else gm.session().records:
                assert not record.states and record.rule is None
                assert not gm.session().arenas.counterpart(record.place, "master", torch.float32).read().any()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if places and in_backward:
            with pytest.raises(gm.GeminiError, match="set step_in_backward in this one, too"):
                gm.prepare(model, optimizer, states=states, masters=masters)
        loop.model, loop.optimizer = gm.prepare(
            model, optimizer, step_in_backward=in_backward, states=states, masters=masters
        )
        loop.number = 0
        loop.steps(3)
        results.append((loop.state(), [param.detach().clone() for param in loop.model.parameters()]))
        gm.close(force=True)
    (state, params), (again, params_again) = results
    for one, other in zip(params, params_again):
        assert torch.equal(one, other)
    for number, values in state.items():
        for name, value in values.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(again[number][name])), (number, name)
