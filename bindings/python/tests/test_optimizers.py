"""Optimizers of other classes than torch.optim's, hooks of steps, and states: as with torch alone, to the bit.

SPDX-License-Identifier: Apache-2.0
"""

import collections
import gc
import pathlib
import re
import time
import types

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import libgemini.torch as gm
from conftest import alike, far_apart, off_the_device, same_bits, sgd, values
from libgemini.torch import memory
from libgemini.torch.adamw import DECOUPLED_BY_GROUP
from libgemini.torch.tensors import managed_view

SIZE = 96


def mlp(depth=5):
    return nn.Sequential(*(nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh()) for _ in range(depth)))


def loss_of(model, step):
    x = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(step))
    return model(x.to(next(model.parameters()).dtype)).float().square().mean()


def managed(optimizer):
    return hasattr(optimizer, "rule")


def run(model, optimizer, steps=range(5), closures=False):
    """Trains; everything is off the device before each step."""
    losses = []
    for step in steps:

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            losses.append(loss.detach().clone())
            if managed(optimizer):
                off_the_device()
            return loss

        if closures:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return losses


class Own(torch.optim.Optimizer):
    """An optimizer of a user's: update(param, grad, state, group) for each parameter, after begin(params) for all."""

    def __init__(self, params, lr=0.05, **more):
        super().__init__(params, {"lr": lr, **more})

    def begin(self, params):
        pass

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.begin([param for group in self.param_groups for param in group["params"] if param.grad is not None])
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, self.state[param], group)
        return loss

    def update(self, param, grad, state, group):
        param.add_(grad, alpha=-group["lr"])


# ---- a step that looks beyond one parameter
class GlobalNorm(Own):
    """Clips by the norm of all gradients, in place."""

    def begin(self, params):
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            param.grad.mul_(0.01 / norm)


class Counter(Own):
    """A rate by the number of steps, which the optimizer counts itself."""

    count = 0

    def begin(self, params):
        self.count += 1

    def update(self, param, grad, state, group):
        param.add_(grad, alpha=-group["lr"] * min(1.0, self.count / 3))


class OneState(Own):
    """Of all parameters together: an average of the loss's scale, under a key that is no parameter."""

    def begin(self, params):
        scale = sum(param.grad.square().sum() for param in params)
        self.state["all"] = 0.9 * self.state.get("all", 0.0) + 0.1 * scale

    def update(self, param, grad, state, group):
        param.add_(grad / (self.state["all"].sqrt() + 1e-6), alpha=-group["lr"] * 0.01)


class Neighbours(Own):
    """Each update depends on the parameter before."""

    def begin(self, params):
        self.before = torch.zeros(())

    def update(self, param, grad, state, group):
        param.add_(grad, alpha=-group["lr"]).add_(self.before, alpha=1e-3)
        self.before = param.mean()


# ---- a step for each parameter, written in many ways
class Lars(Own):
    """You et al., Large Batch Training of Convolutional Networks, 2017."""

    def update(self, param, grad, state, group):
        size, length = param.norm(), grad.norm()
        trust = torch.where((size > 0) & (length > 0), 0.02 * size / (length + 1e-4 * size), torch.ones_like(size))
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(param)
        state["momentum"].mul_(0.9).add_((grad + 1e-4 * param) * trust, alpha=group["lr"])
        param.sub_(state["momentum"])


class Lion(Own):
    """Chen et al., Symbolic Discovery of Optimization Algorithms, 2023. The state is another tensor after each step."""

    def update(self, param, grad, state, group):
        momentum = state.get("momentum", torch.zeros_like(param))
        param.sub_(torch.sign(0.9 * momentum + 0.1 * grad), alpha=1e-3)
        state["momentum"] = 0.99 * momentum + 0.01 * grad


class Aliases(Own):
    """Keeps its states in lists of its own, too, and makes tensors like parameters for the moment."""

    def __init__(self, params):
        super().__init__(params)
        self.averages = {}

    def update(self, param, grad, state, group):
        moment = torch.zeros_like(param)
        moment.add_(grad, alpha=0.5)
        if not state:
            state["average"] = grad.clone()
            self.averages[param] = state["average"]
        self.averages[param].mul_(0.9).add_(moment)
        param.sub_(state["average"], alpha=group["lr"])


class Flat(Own):
    """The state of a parameter is a part of one tensor for all."""

    def begin(self, params):
        if not hasattr(self, "flat"):
            self.flat = torch.zeros(sum(param.numel() for param in params))
            at = 0
            for param in params:
                self.state[param]["momentum"] = self.flat[at : at + param.numel()].view_as(param)
                at += param.numel()
        self.flat.mul_(0.9)

    def update(self, param, grad, state, group):
        state["momentum"].add_(grad)
        param.sub_(state["momentum"], alpha=group["lr"])


class Foreach(Own):
    """By torch's functions for lists."""

    def begin(self, params):
        for param in params:
            if not self.state[param]:
                self.state[param]["momentum"] = torch.zeros_like(param)
        momenta, grads = [self.state[param]["momentum"] for param in params], [param.grad for param in params]
        torch._foreach_mul_(momenta, 0.9)
        torch._foreach_add_(momenta, grads)
        norms = torch._foreach_norm(momenta)
        torch._foreach_add_(params, torch._foreach_div(momenta, norms), alpha=-self.param_groups[0]["lr"])

    def update(self, *_):
        pass


class Data(Own):
    """As it was done before torch.no_grad()."""

    def update(self, param, grad, state, group):
        update = grad.data
        if group["decay"]:
            update = update.add(param.data, alpha=group["decay"])
        param.data.add_(update, alpha=-group["lr"])


# ---- subclasses of torch's, and optimizers around others
class Clipping(torch.optim.SGD):
    def step(self, closure=None):
        nn.utils.clip_grad_norm_([param for group in self.param_groups for param in group["params"]], 0.01)
        return super().step(closure)


class Decayed(torch.optim.AdamW):
    """Overrides nothing that a step looks at."""

    def __init__(self, params):
        super().__init__(params, lr=1e-3, weight_decay=0.1, foreach=True)


class Lookahead(torch.optim.Optimizer):
    """Zhang et al., Lookahead Optimizer, 2019: around another optimizer."""

    def __init__(self, params):
        self.inside = torch.optim.SGD(params, 0.05, momentum=0.9)
        super().__init__(self.inside.param_groups, {})
        self.param_groups = self.inside.param_groups
        self.count = 0
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["slow"] = param.detach().clone()

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.inside.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            for group in self.param_groups:
                for param in group["params"]:
                    slow = self.state[param]["slow"]
                    slow.lerp_(param, 0.5)
                    param.copy_(slow)
        return loss


def patched(params):
    """A step of this object's own."""
    optimizer = torch.optim.SGD(params, 0.05)
    step, count = optimizer.step, [0]

    def half_as_often(self, closure=None):
        count[0] += 1
        return step(closure) if count[0] % 2 else None

    optimizer.step = types.MethodType(half_as_often, optimizer)
    return optimizer


def two_groups(params):
    params = list(params)
    return GlobalNorm([{"params": params[:4], "lr": 0.1}, {"params": params[4:]}])


OPTIMIZERS = {
    "global norm": GlobalNorm,
    "counter": Counter,
    "one state": OneState,
    "neighbours": Neighbours,
    "lars": Lars,
    "lion": Lion,
    "aliases": Aliases,
    "flat": Flat,
    "foreach": Foreach,
    "data": lambda params: Data(params, decay=0.1),
    "clipping": lambda params: Clipping(params, 0.05, momentum=0.9),
    "decayed": Decayed,
    "lookahead": Lookahead,
    "patched": patched,
    "two groups": two_groups,
}


@pytest.mark.parametrize("closures", (False, True), ids=("", "closures"))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_other_classes_make_their_own_step_once(session, name, closures):
    alike(session, mlp, lambda model, optimizer: run(model, optimizer, closures=closures), OPTIMIZERS[name], "448KiB")


@pytest.mark.parametrize("name", ("global norm", "lion", "decayed", "lookahead"))
def test_other_classes_update_parameters_of_16_bits_themselves(session, name):
    """As they do with torch alone; no fp32 copy is kept."""
    alike(session, lambda: mlp().bfloat16(), run, OPTIMIZERS[name], "448KiB")
    assert not any("master" in record.states for record in gm.session().records)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon since 2.9")
def test_muon(session):
    """One of torch's that updates each parameter by itself."""

    def make(params):
        return torch.optim.Muon([param for param in params if param.dim() == 2], lr=0.01)

    model = alike(session, mlp, run, make, "512KiB")
    assert model[0][0].weight._gm_record.rule.by_parameter


def test_states_of_other_classes_live_in_arenas(session):
    """Whether they are made like a parameter, or otherwise; what a step makes for the moment takes no room for good."""
    for make in (Lars, Lion, Aliases):
        session("448KiB")
        torch.manual_seed(0)
        model, optimizer = gm.prepare(*(lambda model: (model, make(model.parameters())))(mlp()))
        run(model, optimizer, range(2))
        arena = gm.session().arenas.handles["state", torch.float32, 0]
        size = gm.session().manager.arena_info(arena).size_bytes
        bytes_ = sum(param.nbytes for param in model.parameters())
        assert bytes_ <= size < 2.5 * bytes_
        run(model, optimizer, range(8))
        assert gm.session().manager.arena_info(arena).size_bytes <= size * 1.05
        gm.close()


def test_states_have_the_strides_of_their_parameters(session):
    """Also where one that is gone had the same shape and others: what a step makes for the moment is made like
    torch's."""

    class Strides(Own):
        def update(self, param, grad, state, group):
            for moment in torch.zeros_like(param), torch.ones_like(param):
                self.seen.append(moment.stride())
                param.add_(moment, alpha=-1e-3)
            del moment  # so that its place is spare
            state["momentum"] = state["momentum"].mul(0.9).add_(grad) if state else grad.clone()
            param.sub_(state["momentum"], alpha=group["lr"])

    def make():
        return nn.Sequential(
            *(
                nn.Conv2d(4, 4, 3).to(memory_format=layout)
                for layout in (torch.contiguous_format, torch.channels_last, torch.contiguous_format)
            )
        )

    def run(model, optimizer):
        inner = getattr(optimizer, "inner", optimizer)
        inner.seen = []
        for step in range(3):
            model(torch.randn(2, 4, 9, 9, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert {stride for stride in inner.seen if len(stride) == 4} == {(36, 9, 3, 1), (36, 1, 12, 4)}
        strides = [torch.tensor(stride) for stride in inner.seen]
        return strides + [optimizer.state[param]["momentum"].clone() for param in model.parameters()]

    alike(session, make, run, lambda params: Strides(list(params)), "448KiB")


@pytest.mark.parametrize(
    "keep",
    (torch.Tensor.detach, lambda state: state[1:3], lambda state: state._gm_place.tensor.t()),
    ids=("all", "part", "plain"),
)
def test_a_state_that_somebody_has_keeps_its_place(session, keep):
    """Whoever has it: a managed tensor, or one of torch's own. When that is gone, the place is used again."""
    session()
    model = mlp(2)
    model, optimizer = gm.prepare(model, Lars(model.parameters()))
    run(model, optimizer, range(2))
    state = optimizer.state[model[0][0].weight]["momentum"]
    place, before = state._gm_place, state.clone()
    kept = keep(state)
    del state
    optimizer.state.clear()
    run(model, optimizer, range(2))
    assert torch.equal(managed_view(place), before)
    assert optimizer.state[model[0][0].weight]["momentum"]._gm_place is not place
    del kept
    optimizer.state.clear()
    run(model, optimizer, range(2))
    assert any(optimizer.state[param]["momentum"].data_ptr() == place.address for param in model.parameters())


@pytest.mark.parametrize("name", ("lion", "aliases", "lookahead"))
def test_states_where_torch_does_not_tell_who_shares_memory(session, monkeypatch, name):
    """Nothing is used again, and all is right."""
    monkeypatch.setattr(memory, "_ALONE", None)
    alike(session, mlp, run, OPTIMIZERS[name], "448KiB")


def test_what_a_step_says_goes_through(session):
    """Its arguments, what it returns, what it raises; what only the class has."""

    class Asking(Own):
        evaluating = False

        @torch.no_grad()
        def step(self, closure=None, scale=1.0):
            for group in self.param_groups:
                for param in group["params"]:
                    param.add_(param.grad, alpha=-group["lr"] * scale)
            if scale > 10:
                raise ValueError("too much")
            return "stepped"

        @torch.no_grad()
        def eval(self):
            self.evaluating = True
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param]["kept"] = torch.zeros_like(param).copy_(param)
                    param.zero_()

    def steps(model, optimizer):
        loss_of(model, 0).backward()
        assert optimizer.step(scale=0.5) == "stepped" and optimizer.step(None, 0.25) == "stepped"
        with pytest.raises(ValueError, match="too much"):
            optimizer.step(scale=11)
        assert not optimizer.evaluating
        optimizer.eval()
        assert optimizer.evaluating and not hasattr(optimizer, "train")
        return [optimizer.state[param]["kept"].clone() for param in model.parameters()]

    alike(session, mlp, steps, Asking)
    model = mlp()
    model, optimizer = gm.prepare(model, sgd(model.parameters()))
    with pytest.raises(TypeError, match="step.. of SGD takes a closure and nothing else"):
        optimizer.step(scale=2)


def test_scaled_losses_with_a_class_of_ones_own(session):
    """torch.amp.GradScaler: a step is skipped, the others see gradients without the scale."""

    def steps(model, optimizer):
        scaler, seen = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2), []
        for step in range(4):
            loss = loss_of(model, step) * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append(torch.tensor(scaler.get_scale()))
        return seen

    alike(session, mlp, steps, GlobalNorm)


def test_groups_that_come_later_to_a_class_of_ones_own(session):
    def steps(model, optimizer):
        found = run(model, optimizer, range(2))
        optimizer.add_param_group({"params": list(model[2:].parameters()), "lr": 0.01})
        return found + run(model, optimizer, range(2, 5))

    alike(session, mlp, steps, lambda params: GlobalNorm(list(params)[:4]))


def adamw(params):
    return torch.optim.AdamW(params, 0.05)


@pytest.mark.parametrize("make", (sgd, adamw, lambda params: GlobalNorm(list(params))))
def test_parameters_that_take_the_place_of_as_many_others(session, make):
    """As where blocks are trained in turns: the new ones are updated, and their gradients cleared."""

    def steps(model, optimizer):
        found = run(model, optimizer, range(2))
        optimizer.param_groups.clear()
        for param in model.parameters():
            param.grad = None
        optimizer.add_param_group({"params": list(model.parameters())[2:4]})
        return found + run(model, optimizer, range(2, 5))

    if make is not adamw:
        alike(session, mlp, steps, lambda params: make(list(params)[:2]))
        return
    outcomes = []  # the library's arithmetic is not torch's, to the bit
    for managed_ in (False, True):
        torch.manual_seed(0)
        model = mlp()
        optimizer = make(list(model.parameters())[:2])
        if managed_:
            session()
            model, optimizer = gm.prepare(model, optimizer)
        steps(model, optimizer)
        outcomes.append(values(model))
    assert far_apart(*outcomes) < 0.01


def test_norms_of_lists_have_the_type_that_is_asked_for(session):
    session()
    model = mlp(2).bfloat16()
    model, _ = gm.prepare(model, adamw(model.parameters()))
    loss_of(model, 0).backward()
    grads = [param.grad for param in model.parameters()]
    plain = [grad.clone() for grad in grads]
    for args, more in (((), {}), ((1,), {}), ((2, torch.float32), {}), ((), {"ord": 1, "dtype": torch.float64})):
        same_bits(torch._foreach_norm(grads, *args, **more), list(torch._foreach_norm(plain, *args, **more)))


@pytest.mark.parametrize("make", (adamw, torch.optim.Adagrad))
def test_states_follow_parameters_that_change_places(session, make):
    session()
    model = mlp(2)
    model, optimizer = gm.prepare(model, make(model.parameters()))
    run(model, optimizer, range(2))
    before = optimizer.state_dict()["state"]
    optimizer.param_groups[0]["params"].reverse()
    after = optimizer.state_dict()["state"]
    for number, states in before.items():
        same_bits(after[len(before) - 1 - number], states)
    optimizer.load_state_dict(optimizer.state_dict())
    for number, states in before.items():
        same_bits(optimizer.state_dict()["state"][len(before) - 1 - number], states)


def test_optimizers_one_after_the_other_leave_nothing(session):
    """Their states' places end with them, and so does what these need while torch has tensors of them."""
    session()
    model, optimizer = gm.prepare(*(lambda model: (model, adamw(model.parameters())))(nn.Linear(32, 32)))
    counts = []
    for _ in range(8):
        model(torch.ones(2, 32)).sum().backward()
        optimizer.step()
        model, optimizer = gm.prepare(model, adamw(model.parameters()))
        gc.collect()
        counts.append(len(model.weight._gm_place.storages))
    assert max(counts) <= counts[1] + 4


@pytest.mark.parametrize("make, more", ((sgd, {}), (adamw, {}), (adamw, {"step_in_backward": True}), (GlobalNorm, {})))
@pytest.mark.parametrize("whole", (True, False))
def test_options_of_groups_that_the_program_has_replaced(session, make, more, whole):
    """The list of groups, or one of them."""
    outcomes = []
    for managed_ in (False, True):
        torch.manual_seed(0)
        model = mlp()
        optimizer = make(model.parameters())
        if managed_:
            session()
            model, optimizer = gm.prepare(model, optimizer, **more)
        run(model, optimizer, range(2))
        for lr in (0.0, 0.1):
            groups = [{**group, "lr": lr} for group in optimizer.param_groups]
            if whole:
                optimizer.param_groups = groups
            else:
                optimizer.param_groups[:] = groups
            before = values(model)
            run(model, optimizer, range(1))
            if not lr and make is not GlobalNorm:
                assert all(torch.equal(now, before[name]) for name, now in values(model).items())
        outcomes.append(values(model))
    assert far_apart(*outcomes) < (0.01 if make is adamw else 1e-9)


# ---- hooks
@pytest.mark.parametrize("make", (sgd, lambda params: torch.optim.AdamW(params, 1e-3), GlobalNorm))
@pytest.mark.parametrize("when", ("before", "after", "both"))
def test_hooks_of_steps_are_called_once_a_step(session, make, when):
    """Those of the optimizer before it was prepared, of the prepared one, of all optimizers."""
    session("512KiB")
    model = mlp()
    optimizer, calls = make(model.parameters()), collections.Counter()

    def pre(given, args, kwargs):
        calls["pre"] += 1
        given.param_groups[0]["params"][0].grad.zero_()

    def post(given, args, kwargs):
        calls["post"] += 1
        calls["states"] += len(given.state)

    def register(optimizer):
        optimizer.register_step_pre_hook(pre)
        optimizer.register_step_post_hook(post)

    of_all = register_optimizer_step_pre_hook(lambda *_: calls.update(["pre all"]))
    if when != "after":
        register(optimizer)
    model, optimizer = gm.prepare(model, optimizer)
    if when != "before":
        register(optimizer)
    run(model, optimizer, range(3))
    of_all.remove()
    times = 2 if when == "both" else 1
    assert (calls["pre"], calls["post"], calls["pre all"]) == (3 * times, 3 * times, 3)
    assert calls["states"] == 30 * times  # of ten parameters after each of three steps


def test_hooks_of_steps_change_what_a_step_does(session):
    def steps(model, optimizer):
        def pre(given, args, kwargs):
            for group in given.param_groups:
                group["lr"] *= 0.5
                for param in group["params"]:
                    param.grad.clamp_(-1e-3, 1e-3)

        optimizer.register_step_pre_hook(pre)
        return run(model, optimizer)

    for make in (sgd, GlobalNorm):
        alike(session, mlp, steps, make)
        gm.close()


def test_hooks_of_state_dicts(session):
    session()
    model = mlp()
    optimizer, seen = sgd(model.parameters()), []
    optimizer.register_state_dict_post_hook(lambda optimizer, state: {**state, "more": 7})
    optimizer.register_load_state_dict_pre_hook(lambda optimizer, state: seen.append(state.pop("more")))
    optimizer.register_load_state_dict_post_hook(lambda optimizer: seen.append("loaded"))
    model, optimizer = gm.prepare(model, optimizer)
    run(model, optimizer, range(1))
    state = optimizer.state_dict()
    assert state["more"] == 7
    optimizer.load_state_dict(state)
    assert seen == [7, "loaded"] and state["more"] == 7


def options(optimizer):
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


@pytest.mark.parametrize("kind", (sgd, torch.optim.AdamW, torch.optim.Adagrad, GlobalNorm))
def test_groups_that_are_loaded_take_the_place_of_the_old_ones(session, kind):
    """What a scheduler has added since is gone; what is too new for the saved ones has its default."""
    outcomes = []
    for managed_ in (False, True):
        torch.manual_seed(0)
        model = mlp(2)
        optimizer = kind(model.parameters())
        if managed_:
            session()
            model, optimizer = gm.prepare(model, optimizer)
        state = optimizer.state_dict()
        state["param_groups"][0].pop("maximize", None)  # of a torch that had none
        state["param_groups"][0]["more"] = [1]
        optimizer.param_groups[0]["param_names"] = ["a"]
        before = optimizer.param_groups[0]
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        assert "initial_lr" in before
        optimizer.load_state_dict(state)
        state["param_groups"][0]["more"].append(2)  # which is not the optimizer's
        before["lr"] = 7.0  # nor is this any more
        outcomes.append(options(optimizer))
        run(model, optimizer, range(1))
    assert outcomes[1] == outcomes[0] and "initial_lr" not in outcomes[0][0]


def test_a_learning_rate_is_loaded_where_updates_are_in_the_backward_pass(session):
    session()
    model = mlp(2)
    model, optimizer = gm.prepare(
        model, torch.optim.AdamW(model.parameters(), 0.0, weight_decay=0.0), step_in_backward=True
    )
    state, before = optimizer.state_dict(), values(model)
    state["param_groups"][0]["lr"] = 0.1
    run(model, optimizer, range(1))
    same_bits(values(model), before)
    optimizer.load_state_dict(state)
    run(model, optimizer, range(1))
    assert all((value != before[name]).any() for name, value in values(model).items())


@pytest.mark.parametrize("option", ("amsgrad", "maximize"))
def test_options_that_the_library_has_not(session, option):
    """They come too late: by hand, and with a state that is loaded."""
    session()
    model = mlp(2)
    model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters()))
    state = optimizer.state_dict()
    state["param_groups"][0][option] = True
    with pytest.raises(gm.GeminiError, match=f"group 0 of the optimizer has {option}=True, which was not set when"):
        optimizer.load_state_dict(state)
    assert not optimizer.param_groups[0][option]
    before = values(model)
    optimizer.param_groups[0][option] = True
    with pytest.raises(gm.GeminiError, match=f"group 0 of the optimizer has {option}=True"):
        run(model, optimizer, range(1))
    same_bits(values(model), before)
    optimizer.param_groups[0][option] = False
    run(model, optimizer, range(1))


# ---- checkpoints
class Halves(Own):
    """A state of 16 bits, and one of another shape."""

    def update(self, param, grad, state, group):
        if not state:
            state["half"] = torch.zeros_like(param, dtype=torch.bfloat16)
            state["row"] = torch.zeros(param.shape[-1])
        state["half"].mul_(0.9).add_(grad)
        state["row"].add_(grad.sum(tuple(range(grad.dim() - 1))))
        param.sub_(state["half"] + state["row"], alpha=group["lr"])


class Averaging(Own):
    """Has more to save than torch's state_dict() takes."""

    rate = 1.0

    def update(self, param, grad, state, group):
        if not state:
            state["average"] = torch.zeros_like(param)
        state["average"].mul_(0.9).add_(grad)
        param.sub_(state["average"], alpha=self.rate * group["lr"])

    def begin(self, params):
        self.rate *= 0.9

    def state_dict(self):
        return {**super().state_dict(), "rate": self.rate}

    def load_state_dict(self, state_dict):
        state_dict = dict(state_dict)
        self.rate = state_dict.pop("rate")
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("make", (Lars, Lion, OneState, Averaging))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_state_dicts_of_other_classes_resume_to_the_bit(session, make, dtype):
    outcomes = []
    for resumed in (False, True):
        session("448KiB")
        torch.manual_seed(0)
        model, optimizer = gm.prepare(*(lambda model: (model, make(model.parameters())))(mlp().to(dtype)))
        run(model, optimizer, range(3))
        if resumed:
            weights, state = {name: value.clone() for name, value in model.state_dict().items()}, optimizer.state_dict()
            gm.close()
            session("448KiB")
            model, optimizer = gm.prepare(*(lambda model: (model, make(model.parameters())))(mlp().to(dtype)))
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            plain = mlp().to(dtype)
            other = make(plain.parameters())
            other.load_state_dict(state)  # torch's own takes it, too
        losses = run(model, optimizer, range(3, 6))
        outcomes.append((losses, values(model)))
        gm.close()
    same_bits(outcomes[1][0], outcomes[0][0])
    same_bits(outcomes[1][1], outcomes[0][1])


@pytest.mark.parametrize("make", (Lars, Lion, OneState, Halves))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_checkpoints_of_other_classes_resume_to_the_bit(session, tmp_path, make, dtype):
    outcomes = []
    for resumed in (False, True):
        session("448KiB")
        torch.manual_seed(0)
        model, optimizer = gm.prepare(*(lambda model: (model, make(model.parameters())))(mlp().to(dtype)))
        if resumed:
            gm.load(tmp_path / "a", model, optimizer)
        else:
            run(model, optimizer, range(3))
            gm.save(tmp_path / "a", model, optimizer)
        losses = run(model, optimizer, range(3, 6))
        outcomes.append((losses, values(model)))
        gm.close()
    same_bits(outcomes[1][0], outcomes[0][0])
    same_bits(outcomes[1][1], outcomes[0][1])


@pytest.mark.parametrize(
    "make, match",
    (
        (Averaging, r"Averaging overrides state_dict\(\).*extra="),
        (Lookahead, "Lookahead holds another optimizer, inside"),
    ),
)
def test_checkpoints_that_would_lack_states_are_refused(session, tmp_path, make, match):
    session()
    model, optimizer = gm.prepare(*(lambda model: (model, make(model.parameters())))(mlp()))
    run(model, optimizer, range(2))
    with pytest.raises(gm.GeminiError, match=match):
        gm.save(tmp_path / "a", model, optimizer)
    assert not (tmp_path / "a").exists()
    gm.save(tmp_path / "a", model, extra={"optimizer": optimizer.state_dict()})
    optimizer.load_state_dict(gm.load(tmp_path / "a", model)["optimizer"])


@pytest.mark.skipif(not DECOUPLED_BY_GROUP, reason="this version of torch has no such option of Adam")
@pytest.mark.parametrize("kind", (torch.optim.Adam, torch.optim.AdamW))
def test_decoupled_weight_decay_is_an_option_of_each_group(session, kind):
    """In the constructor's groups, and set later."""

    def trained(prepare):
        torch.manual_seed(0)
        model = mlp(2)
        first, *rest = model.parameters()
        groups = [{"params": [first], "decoupled_weight_decay": kind is torch.optim.Adam}, {"params": rest}]
        model, optimizer = prepare(model, kind(groups, lr=1e-2, weight_decay=0.5))
        run(model, optimizer, range(2))
        optimizer.param_groups[1]["decoupled_weight_decay"] = False
        run(model, optimizer, range(2))
        return values(model)

    session()
    ours, theirs = trained(gm.prepare), trained(lambda *both: both)
    for name, value in theirs.items():
        assert torch.allclose(ours[name], value, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("make", (sgd, adamw, lambda params: GlobalNorm(list(params))))
def test_an_optimizer_that_follows_takes_the_memory_of_the_one_before(session, make):
    session()
    model = mlp(2)
    taken = []
    for _ in range(6):
        optimizer = None
        model, optimizer = gm.prepare(model, make(model.parameters()))
        run(model, optimizer, range(2))
        taken.append(gm.stats()["model_bytes"])
    assert taken[1:] == taken[:1] * 5
    assert gm.session().rules == [optimizer.rule]


def test_a_rule_ends_with_nothing_lent(session):
    """What late updates read of it would be freed with it."""
    session()
    model = mlp(4)
    model, optimizer = gm.prepare(model, adamw(model.parameters()))
    run(model, optimizer, range(2))
    rule = optimizer.rule
    assert rule.walks
    optimizer = None
    model, optimizer = gm.prepare(model, sgd(model.parameters()))
    assert rule not in gm.session().rules and not rule.walks
    assert gm.stats()["pending_updates"] == 0


def test_gradients_that_are_cleared_do_not_go_to_the_host(session, monkeypatch):
    """Another model takes their frames behind each step."""

    def copied(cleared):
        torch.manual_seed(0)
        session("2MiB")
        if not cleared:
            monkeypatch.setattr(gm.session().arenas, "gradients_discard", lambda: None)
        model, other = mlp(24), gm.prepare(mlp(24).requires_grad_(False))
        model, optimizer = gm.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for step in range(6):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                loss_of(other, step)
        copies = gm.stats()["moved_chunks"]["device to host"]
        trained = values(model)
        gm.close()
        return sum(copies.values()), trained

    (some, ours), (more, theirs) = copied(True), copied(False)
    same_bits(ours, theirs)
    assert some < more, (some, more)


# ---- states as the user sees them
def adam(params):
    return torch.optim.AdamW(params, 1e-3)


def amsgrad(params):
    return torch.optim.AdamW(params, 1e-3, amsgrad=True)


KINDS = {"momentum": sgd, "adamw": adam, "amsgrad": amsgrad, "lars": Lars}


def states(optimizer, model):
    """Copies of all states, by parameter and name."""
    return {
        f"{name}.{key}": torch.as_tensor(value).clone()
        for name, param in model.named_parameters()
        for key, value in optimizer.state[param].items()
    }


def close(ours, theirs, exact):
    assert ours.keys() == theirs.keys() and ours
    for name, value in theirs.items():
        assert ours[name].shape == value.shape and ours[name].dtype == value.dtype, name
        assert torch.equal(ours[name], value) if exact else torch.allclose(ours[name], value, rtol=1e-5, atol=1e-7), (
            name
        )


def zero(optimizer, model):
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()


def clear(optimizer, model):
    optimizer.state.clear()
    assert len(optimizer.state) == 0 and list(optimizer.state) == []


def renew(optimizer, model):
    optimizer.state = collections.defaultdict(dict)


def clear_some(optimizer, model):
    for param in list(model.parameters())[:3]:
        assert param in optimizer.state
        del optimizer.state[param]
        assert param not in optimizer.state and optimizer.state.get(param) is None


def swap(optimizer, model):
    """Of two parameters of the same shape."""
    one, other = model[0][0].weight, model[1][0].weight
    first, second = optimizer.state.pop(one), optimizer.state.pop(other)
    optimizer.state[one], optimizer.state[other] = second, first


def assign(optimizer, model):
    state = optimizer.state[model[2][0].bias]
    for name in list(state):
        if isinstance(state[name], torch.Tensor):
            state[name] = torch.full_like(state[name], 2.0)


def count(optimizer, model):
    """As who goes on from a step whose number is known."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] += 10


def move(optimizer, model):
    """As trainers do, to where the states are."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = value.to("cpu")


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("change", (zero, clear, renew, clear_some, swap, assign, count, move))
@pytest.mark.parametrize("kind", KINDS)
def test_states_are_the_ones_that_steps_use(session, kind, change, dtype):
    """What is written to them, set and cleared is what the next step begins with. torch's classes in a session update
    fp32 copies of 16-bit parameters, so that these are compared with a model of fp32."""
    outcomes = []
    make = KINDS[kind]
    own = dtype == torch.float32 or kind == "lars"
    for managed_ in (False, True):
        torch.manual_seed(0)
        model = mlp(3).bfloat16().to(dtype if own or managed_ else torch.float32)
        grads = [
            torch.randn(param.shape, generator=torch.Generator().manual_seed(7)).bfloat16()
            for param in model.parameters()
        ]
        optimizer = make(model.parameters())
        if managed_:
            session("448KiB")
            model, optimizer = gm.prepare(model, optimizer)
        found = []
        for step in range(4):
            for param, grad in zip(model.parameters(), grads):
                param.grad = (grad * (step + 1)).to(param.dtype)
            if step == 2:
                assert len(optimizer.state) == 6
                change(optimizer, model)
                if managed_:
                    off_the_device()
            optimizer.step()
            optimizer.zero_grad()
            if step:
                found.append(states(optimizer, model))
        outcomes.append((found, values(model)))
    for theirs, ours in zip(outcomes[0][0], outcomes[1][0]):
        close(ours, theirs, own and kind != "adamw")
    for name, value in outcomes[0][1].items():
        assert torch.allclose(
            outcomes[1][1][name].float(),
            value.float(),
            rtol=0 if own and kind != "adamw" else 2**-7,
            atol=0 if own and kind != "adamw" else 1e-6,
        ), name


def test_states_are_empty_before_the_first_step(session):
    session()
    for make in KINDS.values():
        model = mlp(2)
        model, optimizer = gm.prepare(model, make(model.parameters()))
        assert len(optimizer.state) == 0 and dict(optimizer.state.items()) == {}
        assert dict(optimizer.state[model[0][0].weight]) == {}
        with pytest.raises(KeyError):
            optimizer.state[torch.zeros(3)]


def test_states_that_cannot_be_are_refused(session):
    """And change nothing."""
    session()
    model = mlp(2)
    model, optimizer = gm.prepare(model, adam(model.parameters()))
    weight = model[0][0].weight
    with pytest.raises(gm.GeminiError, match="'step' is set in a state that has nothing: set step, exp_avg and"):
        optimizer.state[weight]["step"] = torch.tensor(3.0)
    run(model, optimizer, range(2))
    before = states(optimizer, model)
    state = optimizer.state[weight]
    for wrong, match in (
        (
            lambda: state.__setitem__("momentum", torch.zeros(3)),
            "0.0.weight: 'momentum' is set in a state that has step",
        ),
        (lambda: state.__setitem__("exp_avg", torch.zeros(3)), r"a tensor of \(3,\): want \(96, 96\)"),
        (lambda: state.pop("step"), r"step\(\) needs step: clear\(\) the whole state"),
        (lambda: state.__setitem__("step", 2.5), "0.0.weight: step is 2.5, want a whole number of steps from 0 on"),
        (lambda: state.__setitem__("step", torch.tensor(-1.0)), "step is -1, want"),
        (lambda: state.__setitem__("step", float("nan")), "step is nan, want"),
        (lambda: optimizer.state.update({weight: {"exp_avg": torch.zeros(96, 96)}}), "want exp_avg, exp_avg_sq, step"),
        (lambda: optimizer.state.update(all=3), "AdamW has states of its parameters only, and no 'all'"),
    ):
        with pytest.raises(gm.GeminiError, match=match):
            wrong()
    loaded = optimizer.state_dict()
    loaded["state"][0]["step"] = torch.tensor(0.5)
    with pytest.raises(gm.GeminiError, match="step is 0.5, want"):
        optimizer.load_state_dict(loaded)
    close(states(optimizer, model), before, True)
    state["step"].sub_(0.5)
    with pytest.raises(gm.GeminiError, match="0.0.weight: step is 1.5, want"):
        run(model, optimizer, range(1))
    state["step"].add_(0.5)
    optimizer.zero_grad()
    close(states(optimizer, model), before, True)
    run(model, optimizer, range(1))


def test_states_that_are_cleared_cost_nothing_and_are_saved_so(session, tmp_path):
    session()
    for make in (adam, sgd, Lars):
        model = mlp(2)
        model, optimizer = gm.prepare(model, make(model.parameters()))
        run(model, optimizer, range(2))
        optimizer.state.clear()
        assert optimizer.state_dict()["state"] == {}
        gm.save(tmp_path / "a", model, optimizer)
        wanted = run(model, optimizer, range(2, 5)), values(model)
        gm.load(tmp_path / "a", model, optimizer)
        found = run(model, optimizer, range(2, 5)), values(model)
        same_bits(found[0], wanted[0])
        same_bits(found[1], wanted[1])


# ---- steps that are not those of a prepared optimizer
def test_a_step_of_an_optimizer_that_was_not_prepared_is_refused(session):
    """Of one that was made of a prepared model, and of the one that prepare() was given; others go on as ever."""
    session("448KiB")
    model = mlp()
    given = sgd(model.parameters())
    model, optimizer = gm.prepare(model, given)
    own, before = nn.Parameter(torch.ones(3)), values(model)
    for make in (sgd, adam, GlobalNorm, lambda params: sgd([{"params": [own]}, {"params": params}])):
        other = make(list(model.parameters()))
        loss_of(model, 0).backward()
        for wrong in (other, given):
            with pytest.raises(
                gm.GeminiError,
                match=r"this \w+ was not prepared, but parameter 0 of its group \d, 0.0.weight, "
                r"is in a session: make steps with the optimizer that libgemini.torch.prepare\(model, opt",
            ):
                wrong.step()
        optimizer.zero_grad()
    same_bits(values(model), before)
    own.grad = torch.ones(3)
    sgd([own]).step()
    assert (own < 1).all()
    run(model, optimizer, range(2))
    gm.close()
    plain = mlp()
    run(plain, sgd(plain.parameters()), range(1))


def test_an_optimizer_around_a_prepared_one_makes_steps(session):
    class Around(torch.optim.Optimizer):
        def __init__(self, inside):
            super().__init__(inside.param_groups, {})
            self.inside, self.count = inside, 0

        def step(self, closure=None):
            self.count += 1
            return self.inside.step(closure)

    session()
    model = mlp()
    model, inside = gm.prepare(model, sgd(model.parameters()))
    optimizer, before = Around(inside), values(model)
    run(model, optimizer, range(2))
    assert optimizer.count == 2
    assert not any(torch.equal(value, before[name]) for name, value in values(model).items())


class Sam(torch.optim.Optimizer):
    """Foret et al., Sharpness-Aware Minimization, ICLR 2021: around another optimizer, with a closure that it calls
    itself."""

    def __init__(self, params, inside):
        super().__init__(params, {"rho": 0.05})
        self.inside = inside(self.param_groups)
        self.param_groups = self.inside.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        grads = [param.grad for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["old"] = param.data.clone()
                    param.add_(param.grad * (group["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.copy_(self.state[param]["old"])
        self.inside.step()

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "it wants a closure"
        closure = torch.enable_grad()(closure)
        loss = closure()
        self.first_step(True)
        closure()
        self.second_step()
        return loss


def sams(params):
    return Sam(params, lambda groups: torch.optim.SGD(groups, 0.05, momentum=0.9))


@pytest.mark.parametrize("closures", (False, True))
def test_a_closure_arrives_at_a_step_that_calls_it(session, closures):
    """It is called when and as often as the step wants; a step is one iteration with all of its passes."""

    def steps(model, optimizer):
        if closures:
            return run(model, optimizer, closures=True)
        losses = []
        for step in range(5):
            for half in (lambda: optimizer.first_step(zero_grad=True), optimizer.second_step):
                loss = loss_of(model, step)
                loss.backward()
                losses.append(loss.detach().clone())
                half()
            optimizer.zero_grad()
        return losses

    model = alike(session, mlp, steps, sams, "448KiB")
    stats = gm.stats()
    if closures:
        assert stats["iterations"] == 5 and stats["planned_iterations"] >= 3
    arena = gm.session().arenas.handles["state", torch.float32, 0]
    size = gm.session().manager.arena_info(arena).size_bytes
    assert size < 3.5 * sum(param.nbytes for param in model.parameters())  # old and momentum, and what is being made


def test_a_closure_of_torchs_own_classes_is_called_once(session):
    for make in (sgd, adam):
        session("512KiB")
        model = mlp()
        model, optimizer = gm.prepare(model, make(model.parameters()))
        loss = loss_of(model, 0)
        assert len(run(model, optimizer, range(3), closures=True)) == 3
        before = values(model)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        assert optimizer.step(closure) != loss
        assert not any(torch.equal(value, before[name]) for name, value in values(model).items())
        gm.close()


@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
@pytest.mark.parametrize("make", (sgd, adam, GlobalNorm))
@pytest.mark.parametrize("how", ("step", "around", "before", "given"))
def test_a_compiled_step_is_the_step(session, how, make, backend):
    """torch.compile() of the prepared optimizer's step, of a function that calls it, of the step of the one that
    prepare() is given: nothing of it is traced, and it is right."""
    torch._dynamo.reset()
    outcomes = []
    for compiled in (False, True):
        session("512KiB")
        torch.manual_seed(0)
        model = mlp()
        given = make(model.parameters())
        if compiled and how == "before":
            given.step = torch.compile(given.step, backend=backend)
        model, optimizer = gm.prepare(model, given)
        step = optimizer.step
        if compiled and how == "step":
            step = torch.compile(optimizer.step, backend=backend)
        if compiled and how == "around":
            step = torch.compile(lambda optimizer=optimizer: optimizer.step(), backend=backend)
        if compiled and how == "given":
            refused = torch.compile(given.step, backend=backend)
        losses = []
        for number in range(3):
            loss = loss_of(model, number)
            loss.backward()
            if compiled and how == "given":
                with pytest.raises(gm.GeminiError, match=f"{type(given).__name__} was not prepared"):
                    refused()
            off_the_device()
            step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
        outcomes.append((losses, values(model)))
        gm.close()
    same_bits(outcomes[1][0], outcomes[0][0])
    same_bits(outcomes[1][1], outcomes[0][1])
    assert len(set(map(float, losses))) == 3


def test_the_optimizer_that_was_prepared_hands_out_no_empty_state(session):
    session()
    model = nn.Linear(96, 96)
    given = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer = gm.prepare(model, given)
    model(torch.ones(2, 96)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    assert len(saved["state"]) == 2
    for call in given.state_dict, lambda: given.load_state_dict(saved):
        with pytest.raises(gm.GeminiError, match="of this AdamW are in the session: call state_dict"):
            call()
    optimizer.load_state_dict(saved)
    same_bits(optimizer.state_dict()["state"][0], saved["state"][0])
    gm.close()
    given.state_dict()


# ---- states and gradients that are kept while others take their place
def deleted_and_set(model, optimizer, step, name):
    param = model[0].weight
    kept = optimizer.state.get(param)
    del optimizer.state[param]
    optimizer.state[param] = kept


def cleared_and_set(model, optimizer, step, name):
    param = model[0].weight
    kept = dict(optimizer.state[param])
    optimizer.state.clear()
    optimizer.state[param] = kept


def put_aside(model, optimizer, step, name):
    kept = optimizer.state
    optimizer.state = collections.defaultdict(dict)
    step()
    optimizer.state = kept


def exchanged(model, optimizer, step, name):
    one, two = model[0].weight, model[2].weight
    optimizer.state[one], optimizer.state[two] = optimizer.state[two], optimizer.state[one]


def tensor_put_aside(model, optimizer, step, name):
    state = optimizer.state[model[0].weight]
    kept = state[name]
    state[name] = torch.zeros_like(kept)
    step()
    optimizer.state[model[0].weight][name] = kept


def tensors_exchanged(model, optimizer, step, name):
    one, two = optimizer.state[model[0].weight], optimizer.state[model[2].weight]
    one[name], two[name] = two[name], one[name]


def cleared_and_updated(model, optimizer, step, name):
    state = optimizer.state[model[0].weight]
    kept = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
    state.clear()
    state.update(kept)


@pytest.mark.parametrize(
    "change",
    (
        deleted_and_set,
        cleared_and_set,
        put_aside,
        exchanged,
        tensor_put_aside,
        tensors_exchanged,
        cleared_and_updated,
    ),
)
@pytest.mark.parametrize("kind", ("AdamW", "SGD"))
def test_states_that_are_kept_are_what_they_were(session, kind, change):
    def run(prepared):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
        options = {"lr": 1e-2} if kind == "AdamW" else {"lr": 1e-4, "momentum": 0.9}
        optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
        if prepared:
            session("1MiB")
            model, optimizer = gm.prepare(model, optimizer)

        def step():
            model(torch.ones(4, 64)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            step()
        name = "exp_avg" if kind == "AdamW" else "momentum_buffer"
        change(model, optimizer, step, name)
        seen = []
        for param in model[0].weight, model[2].weight:
            state = optimizer.state[param] if param in optimizer.state else {}
            seen.append({key: torch.as_tensor(value).clone() for key, value in state.items() if value is not None})
        step()
        return seen, [param.detach().clone() for param in model.parameters()]

    (theirs, after), (ours, ours_after) = run(False), run(True)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours_after, after, rtol=1e-4, atol=1e-5)


def gradients(session):
    """A model with gradients, in a session; and these, as torch has them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session("1MiB")
    model, optimizer = gm.prepare(model, optimizer)
    model(torch.randn(4, 64)).pow(2).sum().backward()
    return model, optimizer, [param.grad.clone() for param in model.parameters()]


def test_gradients_can_be_exchanged(session):
    model, optimizer, grads = gradients(session)
    one, two = model[0].weight, model[1].weight
    one.grad, two.grad = two.grad, one.grad
    assert torch.equal(one.grad, grads[2]) and torch.equal(two.grad, grads[0])
    before = one.detach().clone()
    optimizer.step()
    assert torch.equal(one.detach(), before.add(grads[2], alpha=-0.1))


def test_views_of_a_gradient_are_not_the_gradient(session):
    """Views with as many elements: repeated ones, and other numbers of the same bytes."""
    model, _, (weight, bias, *_) = gradients(session)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)  # the norms of gradients are known now
    assert norm > 0
    first = model[0].weight.grad[:1].expand(64, 64)
    assert torch.equal(torch.linalg.vector_norm(first), torch.linalg.vector_norm(weight[:1].expand(64, 64)))
    with pytest.raises(RuntimeError, match="single memory location"):
        model[0].bias.grad[:1].expand(64).mul_(3.0)
    assert torch.equal(model[0].bias.grad, bias)
    model[0].bias.grad.view(torch.int32).mul_(2)
    assert torch.equal(model[0].bias.grad.view(torch.int32), bias.view(torch.int32).mul(2))
    assert torch.equal(model[0].weight.grad.t().mul_(2.0).t(), weight * 2)


def resident():
    return int(re.search(r"VmRSS:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) * 1024


@pytest.mark.parametrize(
    "device_memory, later, ahead",
    [("10MiB", None, True), ("160MiB", None, False), ("10MiB", "160MiB", False), ("160MiB", "10MiB", True)],
)
def test_the_memory_of_states_comes_ahead_of_the_first_step_where_the_device_has_no_room(
    session, device_memory, later, ahead
):
    with session(device_memory):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(6)))
    if later:
        gm.session().manager.budget_set("device", later)
    states = 2 * sum(param.nbytes for param in model.parameters())
    model(torch.randn(1, 1024)).sum().backward()  # the parameters have their places
    model.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before, deadline = resident(), time.monotonic() + (20 if ahead else 0.5)
    model, optimizer = gm.prepare(model, optimizer)
    while resident() - before < states * 0.9 and time.monotonic() < deadline:
        time.sleep(0.02)
    grown = resident() - before
    assert grown > states * 0.9 if ahead else grown < states * 0.3
    assert gm.stats()["used_bytes"]["host"] <= gm.stats()["model_bytes"] - states  # the states have no contents yet


@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
def test_parameters_without_elements_have_no_memory_to_wait_for(session, states):
    class Holes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(1024, 1024)
            self.hole = nn.Parameter(torch.empty(0, 7))
            self.last = nn.Linear(1024, 1024)

        def forward(self, x):
            return self.last(self.first(x)) + self.hole.sum()

    with session("10MiB"):
        model = Holes()
    model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), states=states)
    assert gm.stats()["model_bytes"] > 10 << 20
    before = model.last.weight.detach().clone()
    model(torch.randn(1, 1024)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.last.weight, before)
