"""Updates that are computed ahead of the step have its bits, whatever comes in between; and they happen.

SPDX-License-Identifier: Apache-2.0
"""

import pytest
import torch
from torch import nn

import bits
import libgemini.torch as gm
from libgemini.torch import speculate as module
from libgemini.torch.speculate import Trials, Units, is_of_clipping, is_power_of_two

WIDTH, LAYERS = 256, 4


@pytest.fixture(autouse=True)
def small_parameters_too(monkeypatch):
    monkeypatch.setattr(module, "LEAST_ELEMENTS", 1)


def net(dtype):
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)) for _ in range(LAYERS)]
    return nn.Sequential(*layers).to(dtype)


def batch(step, dtype):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)


class Loop:
    """A training loop whose steps are told one by one what is special about them."""

    def __init__(self, session, dtype=torch.bfloat16, speculate=True, micro=1, device_memory="1MiB", **more):
        self.session = session(device_memory, speculate=speculate, **more)
        model = net(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer = gm.prepare(model, optimizer)
        self.dtype, self.micro, self.number, self.norms = dtype, micro, 0, []

    def backward(self, micro=None):
        for _ in range(micro or self.micro):
            self.number += 1
            (self.model(batch(self.number, self.dtype)).float() ** 2).mean().backward()

    def clip(self, most):
        self.norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), most)))

    def step(self, most=None):
        if most:
            self.clip(most)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def result(self):
        state = self.optimizer.state_dict()
        params = {name: param.detach().clone() for name, param in self.model.named_parameters()}
        return bits.described({"params": params, "state": state["state"], "norms": self.norms})


def counts():
    stats = gm.stats()
    return [stats[name + "_elements"] for name in ("speculated", "committed", "dropped")]


def same_twice(session, program, **more):
    """Runs a program with and without; returns the counts of the first run."""
    results, found = [], None
    for speculate in (True, False):
        loop = Loop(session, speculate=speculate, **more)
        program(loop)
        results.append(loop.result())
        if speculate:
            found = counts()
        else:
            assert counts() == [0, 0, 0]
        gm.close()
    assert results[0] == results[1]
    return found


@pytest.mark.parametrize("every", [1, 2])
def test_a_step_takes_over_nothing_of_another_optimizer(session, every):
    """Whose parameters lie between its own; nor is anything of them updated when only the first one steps."""
    results = []
    for speculate in (True, False):
        session("2MiB", speculate=speculate)
        model = net(torch.float32)
        inner = [param for layer in list(model)[1:-1] for param in layer.parameters()]
        outer = [*model[0].parameters(), *model[-1].parameters()]
        optimizers = [torch.optim.AdamW(params, lr=1e-2) for params in (outer, inner)]
        for i, optimizer in enumerate(optimizers):
            model, optimizers[i] = gm.prepare(model, optimizer)
        for number in range(7):
            model(batch(number, torch.float32)).square().mean().backward()
            for optimizer in optimizers if number % every == 0 else optimizers[:1]:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        results.append(bits.described({name: param.detach().clone() for name, param in model.named_parameters()}))
        assert (counts()[0] > 0) == speculate
        gm.close()
    assert results[0] == results[1]


ELEMENTS = sum(param.numel() for param in net(torch.float32).parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("micro", [1, 3])
def test_steps_that_are_not_clipped_take_over_all_of_it(session, dtype, micro):
    def program(loop):
        for _ in range(6):
            loop.backward()
            loop.step(1e9)

    # Where a plan may choose, how much it leaves to the host depends on the times that it has measured.
    speculated, committed, dropped = same_twice(session, program, dtype=dtype, micro=micro, placement="cpu")
    # The first step is watched; from the second one on all is computed ahead, as far as states are on the host.
    assert committed > 2 * ELEMENTS and committed <= 5 * ELEMENTS
    assert dropped <= speculated - committed


@pytest.mark.parametrize("fraction", [0, 0.5, 1])
def test_what_the_plan_updates_on_the_device_is_left_to_it(session, fraction):
    """Its states stay there: they neither come to the host nor go back."""
    computed = []

    def program(loop):
        for _ in range(8):
            before = counts()[0]
            loop.backward()
            loop.step(1e9)
            computed.append(counts()[0] - before)

    options = {"placement": "static", "static_param_fraction": 1, "static_optim_fraction": fraction}
    same_twice(session, program, device_memory="16MiB", **options)
    for elements in computed[3:8]:
        assert abs(elements - (1 - fraction) * ELEMENTS) <= ELEMENTS / 8
    assert not any(computed[8:])


def test_models_of_small_parameters_are_left_alone(session, monkeypatch):
    """Their calling thread would lose more time than overlap wins."""

    def program(loop):
        for _ in range(4):
            loop.backward()
            loop.step(1e9)

    small = WIDTH * (WIDTH + 3) // 4  # elements of a parameter of the net, on average
    for least, any_computed in ((small, True), (small + 1, False)):
        monkeypatch.setattr(module, "LEAST_ELEMENTS", least)
        assert (same_twice(session, program)[0] > 0) == any_computed


def test_steps_that_are_always_clipped_compute_nothing_ahead(session):
    def program(loop):
        for _ in range(5):
            loop.backward()
            loop.step(1e-3)

    assert same_twice(session, program) == [0, 0, 0]


@pytest.mark.parametrize("factors", [(0.75, 0.25, 0.75, 0.5, 0.25, 0.5), (0.25, 0.25, 0.25, 0.25)])
def test_a_power_of_two_is_that_of_a_loss_scale_if_it_comes_twice(session, factors):
    """Of clipping, a factor is one only by chance."""
    computed = []

    def program(loop):
        for factor in factors:
            before = counts()[0]
            loop.backward()
            computed.append(counts()[0] > before)
            for param in loop.model.parameters():
                param.grad.mul_(factor)
            loop.step()

    same_twice(session, program, placement="cpu")
    assert computed[: len(factors)] == [False] * 2 + [factors[1] == factors[0]] * (len(factors) - 2)


def test_clipped_and_not_by_turns(session):
    def program(loop):
        for step in range(12):
            loop.backward()
            loop.step(1e-3 if step % 2 else 1e9)

    speculated, committed, dropped = same_twice(session, program)
    assert speculated == dropped > 0 and committed == 0
    assert dropped <= ELEMENTS  # once, and not again


def test_clipped_now_and_then(session):
    def program(loop):
        for step in range(14):
            loop.backward()
            loop.step(1e-3 if step in (4, 5) else 1e9)

    speculated, committed, dropped = same_twice(session, program, placement="cpu")
    assert dropped > 0 and committed > 3 * ELEMENTS


def edit_gradient(loop):
    next(loop.model.parameters()).grad.view(-1)[5] = 3.0


def edit_all_gradients(loop):
    for param in loop.model.parameters():
        param.grad.add_(0.5)


def halve_gradients(loop):
    for param in loop.model.parameters():
        param.grad.mul_(0.5)


def assign_gradient(loop):
    param = list(loop.model.parameters())[5]
    param.grad = torch.ones_like(param.grad)


def drop_gradient(loop):
    list(loop.model.parameters())[5].grad = None


def edit_parameter(loop):
    with torch.no_grad():
        next(loop.model.parameters()).mul_(0.5)


def edit_state(loop):
    param = next(loop.model.parameters())
    loop.optimizer.state[param]["exp_avg"].add_(0.01)


def edit_step(loop):
    param = next(loop.model.parameters())
    loop.optimizer.state[param]["step"].add_(3)


def change_rate(loop):
    loop.optimizer.param_groups[0]["lr"] *= 0.5


def change_betas(loop):
    loop.optimizer.param_groups[0]["betas"] = (0.8, 0.99)


def load_states(loop):
    loop.optimizer.load_state_dict(loop.optimizer.state_dict())


def one_more_pass(loop):
    loop.backward(1)


def no_step_after_all(loop):
    loop.optimizer.zero_grad()
    loop.backward()


def less_memory(loop):
    manager = gm.session().manager
    manager.lib.budget_set(manager.handle, 1, 6 << 20)
    manager.lib.budget_set(manager.handle, 1, 256 << 20)


def evaluate(loop):
    with torch.no_grad():
        loop.norms.append(float(loop.model(batch(99, loop.dtype)).float().sum()))


BETWEEN = [
    edit_gradient,
    edit_all_gradients,
    halve_gradients,
    assign_gradient,
    drop_gradient,
    edit_parameter,
    edit_state,
    edit_step,
    change_rate,
    change_betas,
    load_states,
    one_more_pass,
    no_step_after_all,
    less_memory,
    evaluate,
]


@pytest.mark.parametrize("between", BETWEEN, ids=lambda between: between.__name__)
def test_what_comes_between_is_seen(session, between):
    def program(loop):
        for step in range(5):
            loop.backward()
            if step == 3:
                between(loop)
            loop.step(1e9)

    _, committed, dropped = same_twice(session, program, placement="cpu")
    assert committed > ELEMENTS
    if between not in (evaluate, load_states):
        assert dropped > 0


@pytest.mark.parametrize("between", [drop_gradient, edit_parameter, edit_gradient, one_more_pass])
def test_what_comes_between_is_seen_in_fp32(session, between):
    def program(loop):
        for step in range(5):
            loop.backward()
            if step == 3:
                between(loop)
            loop.step(1e9)

    _, committed, dropped = same_twice(session, program, dtype=torch.float32, placement="cpu")
    assert committed > ELEMENTS and dropped > 0


def test_little_memory(session):
    """As much host memory as the model takes, and a little: a part is computed ahead."""

    def program(loop):
        for _ in range(6):
            loop.backward()
            loop.step(1e9)

    needed = 16 * ELEMENTS + (1 << 20)
    _, committed, _ = same_twice(session, program, host_memory=needed + (2 << 20))
    assert 0 < committed < 4 * ELEMENTS


def test_loss_scaling(session):
    """A power of two is no clipping; an infinity drops what was computed ahead."""

    def program(loop):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
        for step in range(10):
            loss = (loop.model(batch(step, loop.dtype)).float() ** 2).mean()
            if step == 5:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(loop.optimizer)
                loop.clip(1e9)
            scaler.step(loop.optimizer)
            scaler.update()
            loop.optimizer.zero_grad()

    _, committed, dropped = same_twice(session, program, placement="cpu")
    assert committed > 2 * ELEMENTS and dropped > 0


def test_a_scheduler_and_groups(session):
    def program(loop):
        params = list(loop.model.parameters())
        loop.optimizer.param_groups[0]["params"] = params[:7]
        loop.optimizer.add_param_group({"params": params[7:], "lr": 1e-3, "weight_decay": 0.3})
        scheduler = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda step: 0.9**step)
        for _ in range(5):
            loop.backward()
            loop.step(1e9)
            scheduler.step()

    _, committed, dropped = same_twice(session, program, placement="cpu")
    assert committed > 2 * ELEMENTS and dropped == 0


def test_a_frozen_layer_in_the_middle(session):
    def program(loop):
        for step in range(6):
            for param in loop.model[1].parameters():
                param.requires_grad_(step not in (2, 3))
            loop.backward()
            loop.step(1e9)

    _, committed, _ = same_twice(session, program)
    assert committed > 0


class Clock:
    """A step takes as long as it is told: longer or shorter when it is computed ahead."""

    def __init__(self, monkeypatch, ahead=0.02, alone=0.01):
        self.now, self.ahead, self.alone = 0.0, ahead, alone
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)

    def step(self, trials, tried, elements=1000):
        self.now += self.ahead if trials.ahead else self.alone
        trials.step_ends(elements, tried)


def test_small_models_are_computed_ahead_only_if_steps_are_shorter(monkeypatch):
    clock, trials = Clock(monkeypatch), Trials()
    ahead = []
    for _ in range(module.FIRST_TRIAL + 400):
        ahead.append(trials.ahead)
        clock.step(trials, trials.ahead)
    first = module.FIRST_TRIAL
    assert ahead[:first] == [True] * first
    assert ahead[first : first + 12] == [True] * 3 + [False] * 3 + [True] * 3 + [False] * 3
    assert ahead[first + 12 : first + 12 + 256] == [False] * 256
    assert True in ahead[first + 12 + 256 :] and not trials.wanted  # tried again, in vain
    clock.ahead = 0.005
    for _ in range(1000):
        clock.step(trials, trials.ahead)
    assert trials.wanted


@pytest.mark.parametrize(
    "elements, seconds, tried",
    ((module.TRIED_ELEMENTS, 0.02, True), (1000, module.TRIED_SECONDS, True), (1000, 0.02, False)),
)
def test_large_models_and_steps_that_tell_nothing_are_not_tried(monkeypatch, elements, seconds, tried):
    clock, trials = Clock(monkeypatch, ahead=seconds), Trials()
    for _ in range(200):
        assert trials.ahead and trials.at is None
        clock.step(trials, tried, elements)


def test_a_trial_whose_steps_are_clipped_is_put_off(monkeypatch):
    clock, trials = Clock(monkeypatch), Trials()
    for _ in range(module.FIRST_TRIAL + 4):
        clock.step(trials, trials.ahead)
    assert trials.at == 4
    clock.step(trials, True)  # it was computed ahead, and should not have been
    assert trials.at is None and trials.ahead
    for _ in range(module.FIRST_TRIAL + 13):
        clock.step(trials, trials.ahead)
    assert not trials.wanted


def test_a_loop_that_is_slower_with_updates_ahead_goes_on_without(session, monkeypatch):
    monkeypatch.setattr(module, "FIRST_TRIAL", 4)

    def program(loop):
        clock, seen = Clock(monkeypatch), []
        trials = loop.optimizer.rule.speculation.trials if loop.session.session.speculate else Trials()
        for _ in range(24):
            before = counts()[0]
            loop.backward()
            clock.now += 0.02 if trials.ahead else 0.01
            loop.step()
            seen.append(counts()[0] > before)
        return seen

    loop = Loop(session, speculate=False)
    program(loop)
    plain = loop.result()
    gm.close()
    loop = Loop(session)
    seen = program(loop)
    assert seen[2:7] == [True] * 5 and seen[8:10] == [False] * 2 and not any(seen[17:])
    assert loop.result() == plain


def test_powers_of_two():
    assert all(map(is_power_of_two, (1.0, 0.5, 2.0**-16, 2.0**20)))
    assert not any(map(is_power_of_two, (0.0, -1.0, 0.75, 3.0, float("inf"), float("nan"), 0.9999999999999999)))


def test_factors_of_clipping():
    assert all(is_of_clipping(*one) for one in ((0.3, 0.3), (0.5, None), (0.5, 1.0), (0.5, 0.25), (0.75, None)))
    assert not any(is_of_clipping(*one) for one in ((1.0, None), (1.0, 0.3), (0.5, 0.5), (2.0**-16, 2.0**-16)))


def test_units_are_those_of_the_library():
    class Thing:
        def __init__(self, first, elements):
            self.place = self
            self.offset, self.elements, self.dtype = first * 2, elements, torch.bfloat16

    records = [Thing(0, 1000), Thing(1024, 512), Thing(2048, 100), Thing(2304, 3000)]
    units = Units(records, 1024, 5376)
    assert units.records_of == {0: 1, 2: 2, 3: 1, 4: 1, 5: 1}  # 1 has a gap
    assert units.within(2048, 3072) == records[2:] and units.within(0, 1024) == records[:1]
    assert Units(records[1:2], 1024, 1536).records_of == {1: 1}
    assert Units([Thing(256, 5000)], 1024, 5376).records_of == {1: 1, 2: 1, 3: 1, 4: 1, 5: 1}


# ---- what a reader of this code found
class Halves(nn.Module):
    """Two layers, each with a loss of its own, whose parameters share a chunk."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(777, 777, bias=False) for _ in range(2))

    def forward(self, x, which):
        return self.layers[which](x)


def test_options_that_change_between_two_backward_passes(session):
    found = []
    for speculate in (True, False):
        session("64MiB", speculate=speculate, placement="cpu")  # states on the host
        model = Halves()
        model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        for number in range(6):
            x = torch.randn(4, 777, generator=torch.Generator().manual_seed(number))
            optimizer.param_groups[0]["lr"] = 1e-2
            (model(x, 0) ** 2).mean().backward()
            if number == 4:
                optimizer.param_groups[0]["lr"] = 3e-2
            (model(x, 1) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert (counts()[0] > 0) == speculate
        found.append(bits.described({name: param.detach().clone() for name, param in model.named_parameters()}))
        gm.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("lr", [None, float("nan")])
def test_options_that_are_set_just_before_the_step(session, lr):
    """The backward pass does not fail for what only the step needs."""

    def program(loop):
        for number in range(6):
            for group in loop.optimizer.param_groups:
                group["lr"] = lr if number > 3 else 1e-2
            loop.backward()
            for group in loop.optimizer.param_groups:
                group["lr"] = 1e-2
            loop.step(1e9)

    assert same_twice(session, program)[0] > 0


def test_groups_that_are_replaced_before_the_backward_pass(session):
    def program(loop):
        params = list(loop.model.parameters())
        loop.optimizer.param_groups[0]["params"] = params[:7]
        loop.optimizer.add_param_group({"params": params[7:], "lr": 1e-3})
        for number in range(6):
            if number == 4:
                loop.optimizer.param_groups.pop()
                loop.optimizer.load_state_dict(loop.optimizer.state_dict())
            loop.backward()
            loop.step(1e9)

    assert same_twice(session, program)[0] > 0
