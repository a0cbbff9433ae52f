"""What modules and training loops do, with torch alone as the reference: the same bits.

SPDX-License-Identifier: Apache-2.0
"""

import contextlib
import copy
import re
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import libgemini.torch as gm
from conftest import (
    alike,
    batch,
    far_apart,
    leave_where_nobody_holds,
    off_the_device,
    same_bits,
    sgd,
    tiny,
    train,
    values,
)
from libgemini.manager import parse_bytes
from libgemini.torch import arenas
from libgemini.torch.optim import Optimizer
from libgemini.torch.tensors import ManagedTensor

SIZE = 96


def mlp(depth=4):
    return nn.Sequential(*(nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh()) for _ in range(depth)))


def data(step=0, rows=5):
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize(
    "memory, cuda, chunk_size",
    [
        (1 << 30, False, 1 << 20),
        (1 << 29, True, 2 << 20),
        (1 << 30, True, 4 << 20),
        (2 << 30, True, 8 << 20),
        (15 << 30, True, 8 << 20),
        (100, False, 64 << 10),
        (100, True, 2 << 20),
        (24 << 30, True, 16 << 20),
        (24 * 10**9, True, 16 << 20),
        (1 << 40, True, 32 << 20),
    ],
)
def test_chunks_are_a_share_of_the_budget_within_bounds(memory, cuda, chunk_size):
    """A GPU maps 2 MiB at least, and copies chunks of 8 MiB in less time than four times that of 2 MiB."""
    assert sys.modules["libgemini.torch.arenas"].chunk_bytes(memory, cuda) == chunk_size


def square(model, step):
    return model(data(step)).square().mean()


def trained(model, optimizer, steps=4, loss_of=square, before_step=None):
    """As train(), with everything off the device between forward, backward and step."""
    leave = off_the_device if isinstance(optimizer, Optimizer) else lambda: None

    def loss_then_leave(model, step):
        loss = loss_of(model, step)
        leave()
        return loss

    def leave_then_step(model):
        if before_step:
            before_step(model)
        leave()

    return train(model, optimizer, steps, loss_then_leave, leave_then_step)


@pytest.mark.parametrize("inside", [False, True])
def test_a_model_that_was_built_in_inference_mode(session, inside):
    """Torch alone cannot train it: it trains as one that was built outside. inside: within init(), too."""
    torch.manual_seed(0)
    plain = mlp(2)
    wanted = trained(plain, sgd(plain.parameters()))
    building = session("512KiB")
    torch.manual_seed(0)
    with building if inside else contextlib.nullcontext(), torch.inference_mode():
        model = mlp(2)
        model[0][0].register_buffer("part", model[0][0].weight.data[:2])
    model, optimizer = gm.prepare(model, sgd(model.parameters()))
    same_bits(trained(model, optimizer), wanted)
    same_bits([model[0][0].part], [plain[0][0].weight[:2]])


# ---- modules
class Tied(nn.Module):
    """An embedding that is also the head, a module used several times, a parameter used directly."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(200, SIZE)
        self.body = nn.Linear(SIZE, SIZE)
        self.head = nn.Linear(SIZE, 200, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(SIZE))

    def forward(self, ids):
        x = self.embed(ids)
        for _ in range(3):
            x = torch.tanh(self.body(x)) * self.scale
        return self.head(x + self.body.weight[0])


def ids(step):
    return torch.randint(200, (3, 7), generator=torch.Generator().manual_seed(step))


def test_tied_weights_and_shared_modules(session):
    def loss_of(model, step):
        return F.cross_entropy(model(ids(step)).flatten(0, 1), ids(step).flatten())

    model = alike(session, Tied, lambda model, optimizer: trained(model, optimizer, loss_of=loss_of))
    assert model.head.weight is model.embed.weight


class Normed(nn.Module):
    """Buffers that a forward pass writes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16)
        )
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.layers(x).mean((2, 3))


def test_buffers(session):
    def run(model, optimizer):
        images = torch.randn(4, 3, 10, 10)
        losses = trained(model, optimizer, loss_of=lambda model, step: model(images).square().mean())
        model.eval()
        with torch.no_grad():
            return [*losses, model(images)]

    model = alike(session, Normed, run)
    assert model.seen == 5 and model.layers[1].num_batches_tracked == 4


@pytest.mark.parametrize("make", (lambda: nn.LSTM(SIZE, SIZE, 2), lambda: nn.GRU(SIZE, SIZE, bidirectional=True)))
def test_recurrent(session, make):
    alike(
        session,
        make,
        lambda model, optimizer: trained(
            model, optimizer, loss_of=lambda model, step: model(data(step))[0].square().mean()
        ),
        budget="2MiB",
    )


def test_torch_transformer(session):
    alike(
        session,
        lambda: nn.TransformerEncoderLayer(SIZE, 4, SIZE, batch_first=True),  # with dropout
        lambda model, optimizer: trained(
            model, optimizer, loss_of=lambda model, step: model(data(step)[None]).square().mean()
        ),
    )


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(SIZE, 3 * SIZE)
        self.bias = nn.Parameter(torch.randn(4, 5, 5))

    def forward(self, x):
        q, k, v = self.qkv(x).view(1, -1, 3, 4, SIZE // 4).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias) + F.scaled_dot_product_attention(
            q, k, v, is_causal=True
        )


def test_scaled_dot_product_attention(session):
    alike(session, Attention, lambda model, optimizer: trained(model, optimizer))


class Dynamic(nn.Module):
    """Which layers run is drawn at random, and looked up in what has been computed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            if torch.rand(()) < 0.5:
                x = torch.tanh(layer(x))
            elif x.sum() > 0:
                x = x - layer.bias
        return x


def test_dynamic_control_flow(session):
    alike(
        session,
        Dynamic,
        lambda model, optimizer: trained(
            model, optimizer, 8, lambda model, step: (model(data(step)) + 0 * model.layers[0].bias).square().mean()
        ),
    )


def test_parametrizations(session):
    alike(
        session,
        lambda: nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(SIZE, SIZE)),
            nn.utils.parametrizations.spectral_norm(nn.Linear(SIZE, SIZE)),
        ),
        lambda model, optimizer: trained(model, optimizer),
    )


# ---- frozen parameters, adapters
def test_frozen_parameters(session):
    def make():
        model = mlp()
        model[0].requires_grad_(False)
        return model

    def run(model, optimizer):
        losses = trained(model, optimizer)
        assert model[0][0].weight.grad is None
        return losses

    alike(session, make, run)


@pytest.mark.parametrize("optimizer", (sgd, lambda params: torch.optim.AdamW(params, 1e-3)))
def test_freezing_and_thawing(session, optimizer):
    def make():
        model = mlp()
        model[0].requires_grad_(False)
        return model

    def run(model, optimizer):
        before = model[0][0].weight.detach().clone()
        losses = trained(model, optimizer, 2)
        assert torch.equal(model[0][0].weight, before)
        model[0].requires_grad_(True)
        model[1].requires_grad_(False)
        frozen = model[1][0].weight.detach().clone()
        losses += trained(model, optimizer, 2)
        assert not torch.equal(model[0][0].weight, before) and torch.equal(model[1][0].weight, frozen)
        return losses

    if optimizer is sgd:
        alike(session, make, run)
    else:
        session("768KiB")
        run(*gm.prepare(*(lambda model: (model, optimizer(model.parameters())))(make())))


class Lora(nn.Module):
    """A linear layer that is frozen, and what it learns in a product of two small matrices."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


def test_lora(session):
    def make():
        return nn.Sequential(*(Lora(nn.Linear(SIZE, SIZE)) for _ in range(4)))

    model = alike(
        session,
        make,
        lambda model, optimizer: trained(model, optimizer),
        lambda params: sgd([param for param in params if param.requires_grad]),
    )
    kept = {
        kind: gm.session().manager.arena_info(arena).size_bytes
        for (kind, *_), arena in gm.session().arenas.handles.items()
    }
    assert kept["frozen"] > 4 * SIZE * SIZE * 4  # the bases
    trainable = sum(param.numel() for param in model.parameters() if param.requires_grad) * 4
    assert kept["grad"] < 2 * trainable and kept["state"] < 2 * trainable


def test_peft(session):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_dropout=0.0)

    def run(model, optimizer):
        return trained(model, optimizer, 3, lambda model, step: model(**batch("llama", step)).loss)

    alike(session, lambda: peft.get_peft_model(tiny("llama"), config), run)


# ---- mixture of experts
def acquired_bytes(monkeypatch, session):
    """Records the bytes of each acquire of a range of the place, by its address."""
    seen = []
    acquire = session.holds.acquire_use

    def record(use, stream):
        seen.extend((at.object, at.offset_bytes, at.size_bytes) for at in use.accesses)
        acquire(use, stream)

    monkeypatch.setattr(session.holds, "acquire_use", record)
    return seen


def test_only_the_chosen_experts_come(session, monkeypatch):
    session("1MiB")
    model = tiny("mixtral")
    model.set_experts_implementation("eager")  # a loop over the experts that were chosen
    model = gm.prepare(model)
    experts = [layer.mlp.experts for layer in model.model.layers]
    chosen = [set() for _ in experts]
    for own, layer in zip(chosen, experts):
        layer.register_forward_pre_hook(lambda _, args, own=own: own.update(args[1].flatten().tolist()))
    seen = acquired_bytes(monkeypatch, gm.session())
    loss = model(input_ids=torch.tensor([[5]]), labels=torch.tensor([[5]]), logits_to_keep=1).logits.sum()
    off_the_device()
    loss.backward()
    for own, layer in zip(chosen, experts):
        assert len(own) == 2  # of 4
        for param in (layer.gate_up_proj, layer.down_proj):
            place = param._gm_place
            size = place.size_bytes // len(param)
            ranges = {(offset - place.base, length) for at, offset, length in seen if at == place.object}
            assert ranges == {(expert * size, size) for expert in own}


# ---- loops
def test_evaluation_and_generation_between_steps(session):
    def run(model, optimizer):
        out = []
        prompt = batch("gpt2", 0)["input_ids"][:, :4]
        for step in range(3):
            out += trained(model, optimizer, 2, lambda model, step: model(**batch("gpt2", step)).loss)
            model.eval()
            with torch.no_grad():
                out.append(model(**batch("gpt2", 9)).loss)
            out.append(model.generate(prompt, max_new_tokens=5, do_sample=step == 1, use_cache=True, pad_token_id=0))
            with torch.inference_mode():
                out.append(model(**batch("gpt2", 9)).logits.clone())
            model.train()
        return out

    alike(session, lambda: tiny("gpt2"), run)


def test_gradient_accumulation(session):
    def run(model, optimizer):
        losses = []
        for step in range(3):
            for micro in range(4):
                loss = square(model, 4 * step + micro) / 4
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    alike(session, mlp, run)


@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("name", ("llama", "t5"))
def test_activation_checkpointing(session, name, reentrant):
    def make():
        model = tiny(name)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        return model

    def run(model, optimizer):
        return trained(model, optimizer, 3, lambda model, step: model(**batch(name, step)).loss)

    alike(session, make, run)


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpoint_of_the_whole_model(session, reentrant):
    """Its forward pass runs again in the middle of the backward pass."""

    def run(model, optimizer):
        return trained(
            model,
            optimizer,
            loss_of=lambda model, step: (
                (model[0].bias * checkpoint(model, data(step).requires_grad_(), use_reentrant=reentrant))
                .square()
                .mean()
            ),
        )

    alike(session, lambda: nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(8))), run)
    assert reentrant or gm.stats()["iterations"] == 4  # it is no step of its own


@pytest.mark.parametrize(
    "context",
    (
        torch.autograd.graph.save_on_cpu,
        lambda: torch.autograd.set_detect_anomaly(True),
        lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone),
    ),
)
def test_hooks_of_saved_tensors(session, context):
    def run(model, optimizer):
        with context():
            return trained(model, optimizer)

    alike(session, mlp, run)


def test_several_backward_passes(session):
    def run(model, optimizer):
        x = data().requires_grad_()
        y = model(x)
        y.square().mean().backward(retain_graph=True)
        (y.sum() + model[0][0].weight[3, 4:9].sum()).backward(retain_graph=True)
        model[1][0].weight[0, 0].backward()
        kept = [x.grad.clone(), *(param.grad.clone() for param in model.parameters())]
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        return kept

    alike(session, mlp, run)


def test_gradients_by_autograd_grad(session):
    def run(model, optimizer):
        x = data().requires_grad_()
        params = list(model.parameters())
        loss = checkpoint(model, x, use_reentrant=False).square().mean()
        if isinstance(optimizer, Optimizer):
            off_the_device()
        got = torch.autograd.grad(loss, [x, *params[:3]], retain_graph=True)
        assert all(param.grad is None for param in params)
        loss.backward(inputs=params[:2])
        assert params[2].grad is None
        row = params[0][2]
        got += torch.autograd.grad(row.square().sum(), [row, params[1]], materialize_grads=True)
        return [*got, params[0].grad.clone(), params[1].grad.clone()]

    alike(session, mlp, run)


# ---- numbers
@pytest.mark.parametrize("foreach", (None, False, True))
@pytest.mark.parametrize(
    "clip",
    (
        lambda params, foreach: nn.utils.clip_grad_norm_(params, 1e-3, foreach=foreach),
        lambda params, foreach: nn.utils.clip_grad_norm_(params, 1e-3, norm_type=float("inf"), foreach=foreach),
        lambda params, foreach: nn.utils.clip_grad_value_(params, 1e-4, foreach=foreach),
    ),
)
def test_clipping(session, clip, foreach):
    norms = []

    def run(model, optimizer):
        norms.append([])
        return trained(model, optimizer, before_step=lambda model: norms[-1].append(clip(model.parameters(), foreach)))

    alike(session, mlp, run)
    if norms[0][0] is not None:
        same_bits(norms[1], norms[0])
        assert norms[0][0] > 1e-3


def test_clipping_refuses_what_is_no_number(session):
    session("768KiB")
    model = gm.prepare(mlp())
    (square(model, 0) * float("inf")).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def test_gradients_are_tensors(session):
    """Read, changed whole and in part, set, cleared."""

    def run(model, optimizer):
        weight = model[0][0].weight
        square(model, 0).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        weight.grad[3] += 1
        weight.grad[:, 2].mul_(3)
        out = [weight.grad.norm(), nn.utils.get_total_norm([weight.grad])]
        weight.grad *= 2
        weight.grad.t().div_(3)
        weight.grad = weight.grad
        model[1][0].weight.grad = weight.grad * 0.5
        model[2][0].bias.grad = None
        for param in model[3].parameters():
            param.grad.data.add_(torch.ones_like(param), alpha=0.1)
        out += [param.grad.clone() for param in model.parameters() if param.grad is not None]
        assert model[2][0].bias.grad is None
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        model.zero_grad()
        assert weight.grad is None
        return out

    alike(session, mlp, run)


@pytest.mark.parametrize(
    "write",
    (
        lambda grad: grad[0].zero_(),
        lambda grad: grad[:3].fill_(2.0),
        lambda grad: grad.narrow(0, 1, 2).copy_(torch.ones(2, SIZE)),
        lambda grad: nn.init.zeros_(grad[1]),
        lambda grad: grad.data[0].zero_(),
        lambda grad: grad.as_strided((3,), (1,)).zero_(),
        lambda grad: torch._foreach_zero_([grad[0]]),
        lambda grad: grad.view(-1).zero_(),  # all of it
    ),
)
@pytest.mark.parametrize("scale", (lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01), None))
def test_gradients_that_are_overwritten_in_part_keep_their_factor(session, write, scale):
    """What clipping puts off applies to the part that is not overwritten."""

    def run(model, optimizer):
        square(model, 0).backward()
        weight = model[1][0].weight
        if scale:
            scale(model)
        else:
            weight.grad.mul_(0.125)
        write(weight.grad)
        optimizer.step()
        return [param.detach().clone() for param in model.parameters()]

    alike(session, mlp, run)


def test_gradients_that_are_set_are_operators_of_their_own(session):
    """All of them are set in a row: by hand, and as PCGrad does (Yu et al., Gradient Surgery for Multi-Task Learning,
    2020). The device holds a part of them."""

    def surgery(model, step):
        """Gradients of two losses; each loses what points against the other."""
        found = []
        for task in range(2):
            square(model, 2 * step + task).backward()
            found.append([param.grad.clone() for param in model.parameters()])
            model.zero_grad()
        against = sum((one * other).sum() for one, other in zip(*found))
        sizes = [sum(one.square().sum() for one in grads) for grads in found]
        for param, one, other in zip(model.parameters(), *found):
            param.grad = (
                one + other if against >= 0 else one * (1 - against / sizes[0]) + other * (1 - against / sizes[1])
            )

    def run(model, optimizer):
        for step in range(4):
            surgery(model, step)
            optimizer.step()
            optimizer.zero_grad()
        kept = [torch.zeros_like(param) for param in model.parameters()]
        for step in range(4):  # accumulated by hand
            square(model, step).backward()
            for sum_, param in zip(kept, model.parameters()):
                sum_.add_(param.grad)
                param.grad = None
        for sum_, param in zip(kept, model.parameters()):
            param.grad = sum_
        optimizer.step()
        return kept

    model = alike(session, lambda: mlp(12), run, budget="320KiB")
    assert sum(param.nbytes for param in model.parameters()) > 320 << 10
    stats = gm.stats()
    assert stats["planned_iterations"] > 0 and stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_autocast(session, dtype):
    def run(model, optimizer):
        def loss_of(model, step):
            with torch.autocast("cpu", dtype):
                return (model(data(step)) + model(data(step + 1))).float().square().mean()

        return trained(model, optimizer, loss_of=loss_of)

    alike(session, mlp, run)


@pytest.mark.parametrize("unscale", (False, True))
def test_loss_scaling(session, unscale):
    """Scales are powers of two; one step's gradients are not finite, and it is left out."""

    def run(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        out = []
        for step in range(5):
            with torch.autocast("cpu", torch.float16):
                loss = model(data(step) * (1e30 if step == 2 else 1)).float().square().mean()
            scaler.scale(loss * (float("inf") if step == 2 else 1)).backward()
            if unscale:
                scaler.unscale_(optimizer)
                out.append(nn.utils.clip_grad_norm_(model.parameters(), 1e6))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            out += [loss.detach(), torch.tensor(scaler.get_scale())]
        return [value for value in out if torch.isfinite(value)]

    alike(session, mlp, run)


def test_loss_scaling_of_halves(session):
    """Parameters of fp16 have masters: gradients that would vanish in fp16 once they are unscaled arrive."""
    session("768KiB")
    model = nn.Linear(SIZE, SIZE).half()
    nn.init.zeros_(model.weight)
    model, optimizer = gm.prepare(model, sgd(model.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    for _ in range(2):
        scaler.scale((model.weight * 1e-4).sum() * 1e-4).backward()  # 1e-8 each: below the smallest half
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    got = gm.session().records[0].states["master"].read()
    assert torch.allclose(got, torch.full_like(got, -1e-8 * 0.05 * (1 + 1.9)), rtol=2**-10, atol=0)


def test_a_grad_scaler_refuses_a_step_without_gradients(session):
    def run(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scaler.scale(torch.ones(1))  # begins
        with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
            scaler.step(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        loss = model(data()).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        return [loss.detach()]

    alike(session, mlp, run)


def lamb(params):
    """You et al., Large Batch Optimization for Deep Learning, ICLR 2020: a step of a length that depends on norms."""
    return Lamb(params, {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01})


class Lamb(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(param), square=torch.zeros_like(param))
                state["step"] += 1
                mean, square = state["mean"], state["square"]
                mean.mul_(beta1).add_(param.grad, alpha=1 - beta1)
                square.mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                update = (mean / (1 - beta1 ** state["step"])) / (
                    (square / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
                )
                update += group["weight_decay"] * param
                size, length = param.norm(), update.norm()
                trust = torch.where((size > 0) & (length > 0), size / length, torch.ones_like(size))
                param.add_(update * trust, alpha=-group["lr"])


def adagrad(params):
    """Has states before its first step."""
    optimizer = torch.optim.Adagrad(params, 1e-2)
    for state in optimizer.state.values():
        state["sum"].fill_(0.1)
    assert optimizer.state
    return optimizer


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, 0.05),
    "nesterov": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "foreach": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9, foreach=True),
    "maximize": lambda params: torch.optim.AdamW(params, 1e-3, maximize=True),
    "amsgrad": lambda params: torch.optim.Adam(params, 1e-3, amsgrad=True),
    "adagrad": adagrad,
    "adadelta": lambda params: torch.optim.Adadelta(params, 1e-2),
    "adamax": lambda params: torch.optim.Adamax(params, 1e-3),
    "nadam": lambda params: torch.optim.NAdam(params, 1e-3),
    "radam": lambda params: torch.optim.RAdam(params, 1e-2),
    "rmsprop": lambda params: torch.optim.RMSprop(params, 1e-3, momentum=0.9, centered=True),
    "rprop": lambda params: torch.optim.Rprop(params, 1e-3),
    "asgd": lambda params: torch.optim.ASGD(params, 1e-2),
    "adafactor": lambda params: torch.optim.Adafactor(params, 1e-2),
    "lamb": lamb,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(session, name):
    alike(session, lambda: mlp(3), lambda model, optimizer: trained(model, optimizer, 6), OPTIMIZERS[name])


@pytest.mark.parametrize("name", ("adam", "adamw"))
def test_optimizers_in_c(session, name):
    """Their arithmetic is not torch's to the bit (docs/update.md); the same whether they are offloaded or not."""

    def optimizer(params):
        kind = torch.optim.Adam if name == "adam" else torch.optim.AdamW
        return kind([{"params": params, "weight_decay": 0.125}], 2.0**-10, eps=1e-6)

    def refuses(model, chosen):
        loss = square(model, 0)
        loss.backward(retain_graph=True)
        chosen.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def outcome(budget):
        torch.manual_seed(0)
        model = mlp(3)
        chosen = optimizer(list(model.parameters()))
        if budget:
            session(budget)
            model, chosen = gm.prepare(model, chosen)
        losses = train(model, chosen, 6, square)
        found = dict(enumerate(losses)), values(model)
        refuses(model, chosen)
        gm.close()
        return found

    plain, small, large = outcome(None), outcome("320KiB"), outcome("64MiB")
    for one in (0, 1):
        same_bits(small[one], large[one])
        assert far_apart(small[one], plain[one]) <= 1e-6


@pytest.mark.parametrize("outer", (False, True))
def test_groups_and_schedulers(session, outer):
    """A scheduler may have been made for the optimizer before it was prepared, or for the one that prepare() gave."""
    outcomes = []
    for managed in (False, True):
        if managed:
            session("768KiB")
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.SGD(
            [
                {"params": model[:2].parameters(), "lr": 0.1, "weight_decay": 0.01},
                {"params": model[2:].parameters(), "momentum": 0.5},
            ],
            0.02,
        )
        given = optimizer
        if managed:
            model, optimizer = gm.prepare(model, optimizer)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer if outer else given, [0.3, 0.2], total_steps=8)
        rates = []
        for step in range(6):
            square(model, step).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates += [torch.tensor(group["lr"]) for group in optimizer.param_groups]
        outcomes.append((rates, values(model)))
    same_bits(outcomes[1][0], outcomes[0][0])
    same_bits(outcomes[1][1], outcomes[0][1])


@pytest.mark.parametrize("optimizer", (sgd, lambda params: torch.optim.AdamW(params, 1e-3)))
def test_groups_that_come_later(session, optimizer):
    session("768KiB")
    model = mlp()
    model, chosen = gm.prepare(model, optimizer(model[:2].parameters()))
    chosen.add_param_group({"params": list(model[2:].parameters())})
    before = values(model)
    trained(model, chosen, 1)
    assert all(not torch.equal(param, before[name]) for name, param in model.named_parameters())


# ---- what functions do not say
def test_writes_that_functions_do_not_say(session):
    def run(model, optimizer):
        model(torch.arange(20)).sum().backward()  # normalizes rows of the table
        if isinstance(optimizer, Optimizer):
            off_the_device()
        with torch.no_grad():
            F.relu(model.weight[:50], inplace=True)
            torch.mul(model.weight, 2, out=model.weight)
            rows = list(model.weight[60:70])
            if isinstance(optimizer, Optimizer):
                off_the_device()
            for row in rows:
                row += 1
        return [model.weight.grad.clone()]

    alike(session, lambda: nn.Embedding(300, SIZE, max_norm=0.5), run)


def test_views_that_are_written_in_place(session):
    """The backward pass then goes by way of the base's node."""

    def run(model, optimizer):
        x = data().requires_grad_()
        y = x * 2
        y[1:3].mul_(model[0][0].bias)
        y[:, 3:] += model[1][0].weight[0, 3:]
        y[0] = model[2][0].bias
        z = y.t()
        z[2:4] *= model[3][0].weight[:2, :5]
        if isinstance(optimizer, Optimizer):
            off_the_device()
        y.square().sum().backward()
        return [x.grad, *(param.grad.clone() for param in model.parameters() if param.grad is not None)]

    alike(session, mlp, run)


def test_view_that_is_written_in_place_alone(session):
    """Nothing else brings what its backward pass reads."""

    def run(model, optimizer):
        x = data().requires_grad_()
        y = x * 2
        view = y[1:3]
        view.mul_(model.bias)
        if isinstance(optimizer, Optimizer):
            off_the_device()
        y.square().sum().backward()
        return [x.grad, model.bias.grad.clone()]

    alike(session, lambda: nn.Linear(SIZE, SIZE), run)


class Raw(torch.autograd.Function):
    """A custom function, with kernels of its own that torch functions do not see."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        with torch._C.DisableTorchFunctionSubclass():
            return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        with torch._C.DisableTorchFunctionSubclass():
            return grad @ weight.t(), x.t() @ grad


def test_custom_functions(session):
    def run(model, optimizer):
        return trained(
            model,
            optimizer,
            loss_of=lambda model, step: Raw.apply(model(data(step)), model[1][0].weight).square().mean(),
        )

    alike(session, mlp, run)


def test_what_is_copied_onto_itself_stays(session):
    """By a view of all of it, as load_state_dict() does with the model's own state dict. Weights of more than a
    chunk."""

    def run(model, optimizer):
        weight, out = model[1].weight, []
        with torch.no_grad():
            for copy_onto_itself in (
                lambda: model.load_state_dict(model.state_dict()),
                lambda: weight.copy_(weight.detach()),
                lambda: weight[:].copy_(weight.view(-1).view_as(weight)),
                lambda: weight.data.copy_(weight.data),
                lambda: weight[2:].copy_(weight[2:]),
            ):
                if isinstance(optimizer, Optimizer):
                    off_the_device()
                copy_onto_itself()
                out.append(weight.clone())
            return out

    alike(session, lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), run)


# ---- several models, copies, exceptions
def test_teacher_and_student(session):
    def run(model, optimizer):
        torch.manual_seed(7)
        teacher = mlp(2).requires_grad_(False)
        if isinstance(optimizer, Optimizer):
            teacher = gm.prepare(teacher)

        def loss_of(model, step):
            guess = model(data(step))
            with torch.no_grad():
                wanted = teacher(data(step))
            return F.mse_loss(guess, wanted)

        return trained(model, optimizer, loss_of=loss_of)

    alike(session, mlp, run)


def test_averages_of_weights(session):
    """A deep copy is a plain module."""

    def run(model, optimizer):
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        for _ in range(2):
            trained(model, optimizer, 2)
            average.update_parameters(model)
        other = copy.deepcopy(model)
        with torch.no_grad():
            other[0][0].weight.zero_()
        return [average(data()).detach(), other(data()).detach(), model(data()).detach()]

    alike(session, mlp, run)


class Stop(Exception):
    pass


def test_exceptions_in_the_middle(session):
    """In the forward and in the backward pass; what comes after is as if they had been torch's alone."""

    def run(model, optimizer):
        def stop(*_):
            raise Stop

        out = trained(model, optimizer, 2)
        for register in (
            model[2].register_forward_hook,
            model[1].register_forward_pre_hook,
            model.register_forward_pre_hook,
            model[2].register_full_backward_hook,
        ):
            hook = register(stop)
            for _ in range(2):
                with pytest.raises(Stop):
                    square(model, 0).backward()
            hook.remove()
            if register == model[2].register_full_backward_hook:
                model[2][0].bias.grad = model[2][0].weight.grad = None
                model[3][0].bias.grad = None
            out += [param.grad.clone() for param in model.parameters() if param.grad is not None]
            model.zero_grad()
            out += trained(model, optimizer, 1)
        return out

    alike(session, mlp, run)


@pytest.mark.parametrize("then", ("prepare", "load", "load_state_dict", "load_weights", "save", "read", "resident"))
def test_n19_what_comes_after_a_backward_pass_that_an_exception_has_ended(session, tmp_path, then):
    """The chunk of the function that it stopped at is on the device, with the new parameters beside others."""
    session()
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE))
    model, optimizer = gm.prepare(model, sgd(model.parameters()))
    loss = square(model, 0)
    loss.backward(retain_graph=True)
    optimizer.step()
    gm.save(tmp_path / "checkpoint", model, optimizer)
    wanted, states = values(model), copy.deepcopy(optimizer.state_dict())
    with torch.no_grad():
        model[0].bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    if then == "prepare":
        model[1] = nn.LayerNorm(SIZE)
        model, optimizer = gm.prepare(model, sgd(model.parameters()))
    elif then == "load":
        gm.load(tmp_path / "checkpoint", model, optimizer)
        same_bits(values(model), wanted)
    elif then == "load_state_dict":
        optimizer.load_state_dict(states)
    elif then == "load_weights":
        other = nn.Sequential(*model)
        gm.load_weights(other, tmp_path / "checkpoint")
        same_bits(values(other), wanted)
    elif then == "save":
        gm.save(tmp_path / "checkpoint", model, optimizer)
    elif then == "read":
        assert torch.equal(model[0].bias.detach().cpu(), wanted["0.bias"] + 1)
    else:
        with gm.resident(model[0]):
            model[0](data())
    trained(model, optimizer, 2)


def test_hooks_of_gradients(session):
    """Of the tensor, and of what has been accumulated, which may be used up at once."""

    def run(model, optimizer):
        out = []
        first, second = model[3][0].weight, model[1][0].weight
        first.register_hook(lambda grad: grad * 2)
        first.register_post_accumulate_grad_hook(lambda param: out.append(param.grad.clone()))

        def use(param):
            with torch.no_grad():
                param.sub_(param.grad, alpha=0.1)
            param.grad = None

        second.register_post_accumulate_grad_hook(use)
        return trained(model, optimizer, 2) + out

    alike(session, mlp, run)


class ManyNodes(nn.Module):
    """Whose functions have several nodes each, between which hooks of parameters run."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.GRU(SIZE, SIZE, 2, bidirectional=True, batch_first=True)
        self.last = nn.Linear(2 * SIZE, SIZE)

    def forward(self, x):
        return self.last(torch.tanh(self.layers(x[:, None].expand(-1, 3, -1))[0]))


@pytest.mark.parametrize("call", ("state_dict", "save"))
def test_calls_of_hooks_leave_the_backward_pass_what_it_holds(session, tmp_path, call):
    """Of those that store gradients first; what nobody holds leaves the device after them."""

    def run(model, optimizer):
        def of_hook(param):
            if not isinstance(optimizer, Optimizer):
                return
            if call == "state_dict":
                optimizer.state_dict()
            else:
                gm.save(tmp_path / "saved", model)
            assert 0 < leave_where_nobody_holds() < len(gm.session().records)

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(of_hook)
        return trained(model, optimizer, 2)

    alike(session, ManyNodes, run, budget="4MiB")


def test_a_backward_pass_that_a_hook_calls_leaves_the_other_one_what_it_holds(session):
    def run(model, optimizer):
        def of_hook(param):
            with torch.enable_grad():
                model.last.weight.square().sum().backward()
            if isinstance(optimizer, Optimizer):
                assert 0 < leave_where_nobody_holds() < len(gm.session().records)

        for param in model.layers.parameters():
            param.register_post_accumulate_grad_hook(of_hook)
        return trained(model, optimizer, 2)

    alike(session, ManyNodes, run, budget="4MiB")


class Passing(nn.Module):
    """Gives a result to a function that returns it as it is, or a view of it, and takes a parameter, too."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        wide = 2 * SIZE  # whose weights have chunks of their own
        self.first = nn.Linear(SIZE, wide)
        self.second, self.third = (nn.Linear(wide, wide) for _ in range(2))

    def forward(self, x):
        out = self.second(torch.tanh(self.first(x)))
        node = out.grad_fn
        out = self.function(out, self.third.weight)
        if isinstance(self.third.weight, ManagedTensor):  # the last hook: the node runs after it
            node.register_prehook(lambda _: self.leave())
        return self.third(out)

    @staticmethod
    def leave():
        assert 0 < leave_where_nobody_holds() < len(gm.session().records)


@pytest.mark.parametrize(
    "function",
    (
        lambda out, weight: out.type_as(weight),
        lambda out, weight: out.reshape_as(weight),
        lambda out, weight: torch.broadcast_tensors(out, weight)[0],
        lambda out, weight: torch.broadcast_tensors(weight, out)[1].mul_(2),
        lambda out, weight: out.add_(weight),
    ),
)
def test_functions_that_return_an_argument_leave_its_function_what_it_needs(session, function):
    def run(model, optimizer):
        return train(model, optimizer, 2, lambda model, step: model(data(step, 2 * SIZE)).square().mean())

    alike(session, lambda: Passing(function), run, budget="2MiB", units="never")


def test_norms_of_gradients_may_be_changed(session):
    def run(model, optimizer):
        model(data()).square().mean().backward()
        for param in model.parameters():
            norm = torch.linalg.vector_norm(param.grad)
            norm /= param.numel() ** 0.5
        return [torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)]

    alike(session, mlp, run)


@pytest.mark.parametrize("kind", (torch.optim.AdamW, torch.optim.SGD))
def test_a_step_within_the_backward_pass_is_refused(session, kind):
    session("4MiB")
    model = ManyNodes()
    model, optimizer = gm.prepare(model, kind(model.parameters(), 1e-2))
    before = values(model)
    hook = model.layers.weight_hh_l0.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(gm.GeminiError, match="within a backward pass, by a hook: .*step_in_backward=True"):
        model(data(0)).square().mean().backward()
    same_bits(values(model), before)
    hook.remove()
    optimizer.zero_grad()
    trained(model, optimizer, 1)


@pytest.mark.parametrize("early", (False, True))
@pytest.mark.parametrize("kind", (torch.optim.AdamW, torch.optim.SGD))
def test_writes_to_parameters_of_16_bits_are_not_taken_back(session, kind, early):
    """By the next step, which makes them anew from their master copies."""
    if early and kind is torch.optim.SGD:
        pytest.skip("for AdamW only")
    session("1MiB")
    model = mlp().to(torch.bfloat16)
    model, optimizer = gm.prepare(model, kind(model.parameters(), 1e-2), step_in_backward=early)

    def loss_of(model, step):
        return model(data(step).to(torch.bfloat16)).square().mean()

    train(model, optimizer, 2, loss_of)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    wanted = {name: torch.full_like(value, 0.5) for name, value in values(model).items()}
    model.load_state_dict(wanted)
    train(model, optimizer, 1, loss_of)
    same_bits(values(model), wanted)
    with torch.no_grad():
        model[0][0].weight.data[1:3].mul_(3)  # a view of a view
        wanted["0.0.weight"][1:3].mul_(3)
    train(model, optimizer, 1, loss_of)
    same_bits(values(model), wanted)


@pytest.mark.parametrize("masters", ("fp32", "split16"))
@pytest.mark.parametrize("early", (False, True))
def test_writes_of_the_forward_pass_to_parameters_of_16_bits_are_not_taken_back(session, early, masters):
    session("2MiB")
    model = nn.Sequential(nn.Embedding(512, SIZE, max_norm=1.0), nn.Linear(SIZE, SIZE)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), 0.0, weight_decay=0.0)
    model, optimizer = gm.prepare(model, optimizer, step_in_backward=early, masters=masters)
    assert model[0].weight.detach().float().norm(dim=1).min() > 5
    for _ in range(2):
        model(torch.arange(512)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert model[0].weight.detach().float().norm(dim=1).max() < 1.02


def test_a_process_may_end_with_its_session_open():
    script = (
        "import atexit\natexit.register(lambda: print('open' if gm._current else 'closed'))\n"
        "import torch\nimport libgemini.torch as gm\n"
        "gm.init(device='cpu', device_memory='4MiB', host_memory='64MiB')\n"
        "model = torch.nn.Linear(64, 64)\n"
        "model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters()))\n"
        "model(torch.ones(2, 64)).sum().backward()\noptimizer.step()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


def test_gradients_from_before(session):
    """They come along when a model is prepared."""
    outcomes = []
    for managed in (False, True):
        torch.manual_seed(0)
        model = mlp()
        optimizer = sgd(model.parameters())
        square(model, 0).backward()
        if managed:
            session("768KiB")
            model, optimizer = gm.prepare(model, optimizer)
        outcomes.append([param.grad.clone() for param in model.parameters()])
        optimizer.step()
        outcomes[-1] += values(model).values()
    same_bits(outcomes[1], outcomes[0])


@pytest.mark.parametrize("early", (False, True))
def test_a_small_parameter_without_a_gradient_is_left_alone(session, early):
    """Between two that have one, within what aligns these."""
    session("768KiB")
    model = nn.ParameterList(torch.ones(size) for size in (256, 256, 512, 7, 1))
    model, optimizer = gm.prepare(
        model, torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5), step_in_backward=early
    )
    before = values(model)
    sum(model[i].square().sum() for i in (0, 2, 4)).backward()
    optimizer.step()
    assert [torch.equal(param, before[name]) for name, param in model.named_parameters()] == [False, True] * 2 + [False]


def test_slices_that_are_always_others_are_forgotten(session, monkeypatch):
    monkeypatch.setattr(sys.modules["libgemini.torch.holds"], "MOST_USES", 20)

    def run(model, optimizer):
        return trained(
            model,
            optimizer,
            4,
            lambda model, step: sum(model[1][0].weight[8 * step + i : 8 * step + 8].square().sum() for i in range(8)),
        )

    alike(session, mlp, run)
    assert len(gm.session().holds.uses) <= 20


@pytest.mark.parametrize("early", (False, True))
@pytest.mark.parametrize("optimizer", (sgd, lambda params: torch.optim.AdamW(params, 1e-3)))
def test_parameters_without_elements(session, optimizer, early):
    if early and optimizer is sgd:
        pytest.skip("for AdamW only")

    class WithEmpty(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(SIZE, SIZE)
            self.rows = nn.Parameter(torch.ones(0, SIZE))
            self.second = nn.Linear(SIZE, SIZE)

        def forward(self, x):
            return self.second(torch.cat((self.first.weight, self.rows)) @ x.t())

    def run(managed):
        torch.manual_seed(0)
        model = WithEmpty()
        chosen = optimizer(model.parameters())
        if managed:
            model, chosen = gm.prepare(model, chosen, step_in_backward=early)
        clip = None if early else lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for _ in range(2):
            train(model, chosen, 2, lambda model, step: model(data(step, SIZE)).square().mean(), clip)
            chosen.load_state_dict(chosen.state_dict())
        return values(model)

    wanted = run(False)
    session("1MiB")
    ours = run(True)
    assert ours.pop("rows").shape == wanted.pop("rows").shape == (0, SIZE)
    assert far_apart(ours, wanted) <= 1e-6


def test_an_update_that_is_refused_counts_as_no_step(session, monkeypatch):
    session("1MiB")
    outcomes = []
    for refused in (False, True):
        torch.manual_seed(0)
        model = mlp()
        model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
        for step in range(2):
            square(model, step).backward()
            if refused:
                with monkeypatch.context() as patch:
                    patch.setattr(
                        gm.session().lib,
                        "update",
                        lambda *_: (_ for _ in ()).throw(gm.GeminiError("no room", "OOM_HOST")),
                    )
                    with pytest.raises(gm.GeminiError, match="no room"):
                        optimizer.step()
            optimizer.step()
            optimizer.zero_grad()
        outcomes.append(values(model))
    same_bits(outcomes[1], outcomes[0])


# ---- gradients that are assigned
def test_n1_an_assigned_gradient_is_the_tensor_itself(session):
    """Whoever has it writes to the gradient, and backward passes, clipping and steps write to what he has."""

    def run(model, optimizer):
        weight, bias, other = model[0][0].weight, model[0][0].bias, model[1][0].weight
        out, kept = [], torch.ones(SIZE, SIZE)
        weight.grad = kept
        kept.mul_(2)
        assert weight.grad is kept
        other.grad = kept[:, :]  # of the same bytes
        square(model, 0).backward()
        out += [kept.clone(), other.grad.clone(), nn.utils.clip_grad_norm_(model.parameters(), 0.5), kept.clone()]
        optimizer.step()
        kept.sub_(1)
        optimizer.step()  # with the same gradients
        out += [weight.detach().clone(), weight.grad.clone()]
        optimizer.zero_grad(set_to_none=False)
        assert not kept.any()
        kept += 1
        weight.grad.mul_(3)
        assert (kept == 3).all() and other.grad is not None
        optimizer.step()
        optimizer.zero_grad()
        assert weight.grad is None and (kept == 3).all()
        weight.grad = kept  # once more
        bias.grad = kept[0]
        optimizer.step()
        model.zero_grad()
        square(model, 1).backward()
        optimizer.step()
        return [*out, kept]

    for optimizer in (sgd, torch.optim.Adagrad):
        alike(session, mlp, run, optimizer)
        gm.close()


def test_n1_an_assigned_gradient_that_is_nobody_elses_may_leave_the_device(session):
    """Others of its tensor, its bytes or its attributes keep it where it is."""
    session("768KiB")
    model = gm.prepare(mlp())
    params = list(model.parameters())
    kept, attributes = torch.ones_like(params[1]), torch.ones_like(params[2])
    attributes.tag = 1
    part = torch.ones(3, *params[3].shape)
    grads = [torch.ones_like(params[0]), kept, attributes, part[1], torch.ones_like(params[4]).t().contiguous().t()]
    del attributes
    for param in params[:5]:
        param.grad = grads.pop(0)
    params[5].grad = None
    model(torch.ones(1, SIZE))
    assert [param._gm_record.given for param in params[:6]] == [False, True, True, True, True, False]
    assert params[2].grad.tag == 1 and params[4].grad.stride() == (1, SIZE)
    part.mul_(2)
    assert (params[0].grad == 1).all() and (params[3].grad == 2).all()


def test_n15_a_gradient_of_two_parameters_stays_one(session):
    """Also when nobody has it but they."""

    def run(model, optimizer):
        one, other = (model[i][0].weight for i in range(2))
        square(model, 0).backward()
        other.grad = one.grad
        outside = nn.Parameter(torch.ones(SIZE))  # which no session knows
        model[2][0].bias.grad = outside.grad = torch.ones(SIZE)
        square(model, 1).backward()
        assert one.grad is other.grad and model[2][0].bias.grad is outside.grad
        out = [one.grad.clone(), outside.grad.clone()]
        optimizer.step()
        return out

    alike(session, mlp, run)


def test_n15_parameters_that_have_one_gradient(session):
    """What is written to one is written to the other."""

    def run(model, optimizer):
        one, other, third = (model[i][0].weight for i in range(3))
        square(model, 0).backward()
        before = one.grad
        other.grad = one.grad
        assert one.grad is other.grad is before
        third.grad = other.grad[:].t()
        out = [one.grad.clone()]
        before.add_(1)
        one.grad[2].zero_()
        out += [one.grad.clone(), other.grad.clone(), third.grad.clone()]
        square(model, 1).backward()  # adds to it three times
        out += [one.grad.clone(), nn.utils.clip_grad_norm_(model.parameters(), 0.5)]
        optimizer.step()
        optimizer.zero_grad()
        square(model, 0).backward()
        assert one.grad is not other.grad
        one.grad = one.grad.t()  # of its own bytes
        whole = one.grad
        other.grad = one.grad.t()
        one.grad.zero_()
        assert not other.grad.any()
        optimizer.step()
        return [*out, whole]

    alike(session, mlp, run)


def test_n15_a_gradient_cannot_share_bytes_with_a_parameter(session):
    session()
    model = gm.prepare(mlp())
    square(model, 0).backward()
    before = model[0][0].weight.grad.clone()
    with pytest.raises(
        gm.GeminiError, match=r"0.0.weight.grad is set to a tensor that shares its bytes with 1.0.weight: set .*clone"
    ):
        model[0][0].weight.grad = model[1][0].weight.detach()
    assert torch.equal(model[0][0].weight.grad, before)


def test_n1_gradients_from_before_prepare(session):
    """They stay the tensors that they are, until a step with them."""
    outcomes = []
    for managed in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(SIZE, SIZE)
        optimizer = sgd(model.parameters())
        model(torch.ones(1, SIZE)).square().sum().backward()
        kept = model.weight.grad
        if managed:
            session()
            model, optimizer = gm.prepare(model, optimizer)
        kept.mul_(2)
        model(torch.ones(1, SIZE)).square().sum().backward()
        optimizer.step()
        outcomes.append([kept, *values(model).values()])
    same_bits(outcomes[1], outcomes[0])


def test_n8_gradients_are_deleted(session):
    def run(model, optimizer):
        weight = model[0][0].weight
        square(model, 0).backward()
        del weight.grad
        assert weight.grad is None
        square(model, 1).backward()
        weight.grad = weight.grad + 1
        out = [weight.grad.clone()]
        del weight.grad, model[1][0].weight.grad
        assert weight.grad is None
        optimizer.step()
        return out

    alike(session, mlp, run)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("optimizer", (torch.optim.AdamW, sgd))
def test_n17_a_gradient_of_a_frozen_parameter(session, optimizer, dtype):
    """torch's optimizers look at gradients, not at requires_grad."""
    session()
    torch.manual_seed(0)
    model = nn.Linear(SIZE, SIZE).to(dtype).requires_grad_(False)
    model.bias.grad = torch.ones_like(model.bias)  # one from before
    plain = nn.Linear(SIZE, SIZE)
    plain.load_state_dict(model.state_dict())
    plain.requires_grad_(False)
    plain.bias.grad = torch.ones_like(plain.bias)
    own = optimizer(plain.parameters())
    model, optimizer = gm.prepare(model, optimizer(model.parameters()))
    for step in range(3):
        for one in model, plain:
            one.weight.grad = torch.full_like(one.weight, 0.25) if step < 2 else None
        optimizer.step()
        own.step()
    close = [
        torch.allclose(one.detach().float(), other, rtol=0 if dtype == torch.float32 else 2**-7, atol=1e-6)
        for one, other in zip(model.parameters(), plain.parameters())
    ]
    assert close == [True, True]
    for one in model, plain:
        one.requires_grad_(True)
        one.zero_grad()
        one(torch.ones(1, SIZE, dtype=next(one.parameters()).dtype)).sum().backward()
    assert torch.equal(model.weight.grad.float(), plain.weight.grad)


def test_n17_a_gradient_from_before_a_parameter_was_frozen(session):
    """It was made within init(), where nobody looks at gradients yet; and one after the parameter was thawed unseen."""
    outcomes = []
    for managed in (False, True):
        torch.manual_seed(0)
        with session() if managed else contextlib.nullcontext():
            model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
        square(model, 0).backward()
        model[0].requires_grad_(False)
        optimizer = sgd(model.parameters())
        if managed:
            model, optimizer = gm.prepare(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        model[0].requires_grad_(True)
        for set_to_none in (True, False):
            model[0](data()).square().mean().backward()  # not by the model
            optimizer.zero_grad(set_to_none)
        model[0](data()).square().mean().backward()
        optimizer.step()
        outcomes.append(values(model))
    same_bits(outcomes[1], outcomes[0])


def test_n14_attributes_of_gradients(session):
    session()
    model, optimizer = gm.prepare(*(lambda model: (model, sgd(model.parameters())))(mlp()))
    weight = model[0][0].weight
    square(model, 0).backward()
    weight.grad.tag = 3
    assert weight.grad is weight.grad and weight.grad.tag == 3
    off_the_device()
    square(model, 1).backward()  # which adds to it
    assert weight.grad.tag == 3
    optimizer.zero_grad(set_to_none=False)
    assert weight.grad.tag == 3
    optimizer.zero_grad()
    square(model, 1).backward()
    assert not hasattr(weight.grad, "tag")


# ---- gradients that are scaled
@pytest.mark.parametrize("first, second", ((2.0**-20, 1e6), (1e6, 2.0**-20), (0.3, 2.0**-12)))
def test_float16_gradients_are_rounded_between_two_factors(session, first, second):
    """A value between the two is too small or too large for the type."""

    def gradient(prepare):
        torch.manual_seed(0)
        model = prepare(nn.Linear(8, 8).half())
        model(torch.ones(1, 8, dtype=torch.float16)).float().sum().backward()
        model.weight.grad.fill_(1e-3)
        model.weight.grad.mul_(first)
        model.weight.grad.mul_(second)
        return model.weight.grad.clone()

    session()
    ours, theirs = gradient(gm.prepare), gradient(lambda model: model)
    assert torch.equal(ours, theirs), (ours, theirs)


def test_n9_gradients_are_rounded_after_each_factor(session):
    """So are norms of them. A step that comes after one factor reads no byte more for it."""

    def run(model, optimizer):
        one, other, third, fourth = (model[i][0].weight for i in range(4))
        square(model, 0).backward()
        one.grad.mul_(0.3)
        one.grad.mul_(0.7)
        other.grad.mul_(0.3)
        out = [other.grad.norm(), nn.utils.get_total_norm([other.grad]), torch.linalg.vector_norm(other.grad)]
        third.grad.mul_(torch.tensor(0.3))
        third.grad.mul_(2.0**-3)
        third.grad.mul_(2.0**-4)
        fourth.grad.mul_(torch.tensor([0.1], dtype=torch.float64))  # which torch multiplies in fp64
        for _ in range(3):
            out.append(nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
        out += [nn.utils.clip_grad_norm_(model.parameters(), 1e-4)]
        optimizer.step()
        return [*out, *(param.grad.clone() for param in model.parameters())]

    alike(session, mlp, run)


def test_n9_norms_of_16_bits(session):
    """Are of 16 bits, as torch has them."""

    def run(model, optimizer):
        model(data().bfloat16()).square().mean().backward()
        out = [nn.utils.clip_grad_norm_(model.parameters(), 1e-3)]
        return out + [param.grad.clone() for param in model.parameters()]

    alike(session, lambda: mlp().bfloat16(), run)


def test_n9_a_graph_notices_that_a_gradient_was_scaled(session):
    session()
    model = gm.prepare(mlp())
    square(model, 0).backward()
    x = torch.ones(SIZE, SIZE, requires_grad=True)
    loss = (x * model[0][0].weight.grad).sum()
    model[0][0].weight.grad.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("clip", (False, True))
@pytest.mark.parametrize("factor", (1e25, 3e34, float("inf"), 1e-22, 1.0))
@pytest.mark.parametrize("scale", (1024.0, 1000.0))
def test_n18_loss_scaling_looks_at_elements(session, scale, factor, clip):
    """Squares of finite ones may be infinite, or vanish. What a step that was left out had is unscaled, too."""

    def run(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        out = []
        for step in range(3):
            scaler.scale(model(data(step)).sum() * (factor if step == 1 else 1)).backward()
            if clip:
                scaler.unscale_(optimizer)
                out += [
                    nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
                    nn.utils.clip_grad_norm_(model.parameters(), 1e-4),
                ]
            scaler.step(optimizer)
            scaler.update()
            out += [torch.tensor(scaler.get_scale()), *(param.grad.clone() for param in model.parameters())]
            out += [param.detach().clone() for param in model.parameters()]
            optimizer.zero_grad()
        return [torch.nan_to_num(value, 1.25) for value in out]

    alike(session, lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)), run)


def test_n18_some_gradients_were_assigned(session):
    """The scaler is given tensors of torch's and of the session's at once."""

    def run(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
        kept = torch.ones(SIZE, SIZE)
        out = []
        for step in range(3):
            model[1].weight.grad = kept
            scaler.scale(square(model, step)).backward()
            scaler.step(optimizer)
            scaler.update()
            out.append(kept.clone())
            optimizer.zero_grad()
        return out

    alike(session, lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)), run)


# ---- steps that cannot be planned
class Recurrent(nn.Module):
    """One function reads all parameters of a layer, and makes gradients of all of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.LSTM(96 if i else 48, 48, bidirectional=True, batch_first=True) for i in range(6)]
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)[0]
        return x


def test_a_step_that_cannot_be_planned_is_made(session):
    """So nobody is told that it has failed, but once that there is no plan."""
    outcomes = []
    for managed in (False, True):
        torch.manual_seed(0)
        model = Recurrent()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if managed:
            session("384KiB")
            model, optimizer = gm.prepare(model, optimizer)
        losses = []
        for step in range(4):
            losses.append(model(data(step)[None, :, :48]).square().sum())
            losses[-1].backward()
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                optimizer.step()
            assert bool(told) == (managed and not step)
            if told:
                (one,) = told
                assert re.search(
                    r"^this step was made, but there is no plan.*its chunks and non-model memory need \d+",
                    str(one.message),
                )
            optimizer.zero_grad()
        outcomes.append(([loss.detach() for loss in losses], values(model)))
    same_bits(outcomes[1][0], outcomes[0][0])
    same_bits(outcomes[1][1], outcomes[0][1])
    assert gm.stats()["planned_iterations"] == 0


@pytest.mark.parametrize("status, raised", (("OOM_HOST", False), ("OOM_DEVICE", False), ("DEVICE", True)))
def test_errors_when_an_iteration_ends(session, monkeypatch, status, raised):
    """Only plans are made after the step; other errors are not hidden."""
    session()
    model = gm.prepare(mlp())
    lib, end = gm.session().lib, gm.session().lib.iteration_end

    def failing(handle):
        end(handle)
        raise gm.GeminiError("of the end", status)

    monkeypatch.setattr(lib, "iteration_end", failing)
    with (
        torch.no_grad(),
        pytest.raises(gm.GeminiError, match="of the end")
        if raised
        else pytest.warns(UserWarning, match="this step was made.*of the end"),
    ):
        assert model(data()).shape == (5, SIZE)


@pytest.mark.parametrize("device, host", [("9MiB", "5MiB"), ("7MiB", "3MiB"), ("5MiB", "4MiB")])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_device_and_host_memory_add_up(session, device, host, clip):
    """Parameters, gradients and states take 8.3 MiB, more than the host has, and in two of three cases more than the
    device has. States are read and loaded on the way, which moves them all."""

    def run(device, host):
        torch.manual_seed(1)
        with session(device, host_memory=host):
            model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)))
        model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        losses, sums, generator = [], [], torch.Generator().manual_seed(2)
        for step in range(6):
            x = torch.randn(16, 256, generator=generator)
            loss = (model(x) - x.roll(1, 1)).pow(2).mean()
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step in (0, 3):  # without a plan, and with one
                states = optimizer.state_dict()
                sums.append([float(state["exp_avg_sq"].double().sum()) for state in states["state"].values()])
                optimizer.load_state_dict(states)
        stats = gm.stats()
        gm.close()
        return losses, sums, stats

    *ample, _ = run("64MiB", "256MiB")
    *short, stats = run(device, host)
    assert short == ample
    assert stats["model_bytes"] > parse_bytes(host) and stats["planned_iterations"]
    assert stats["peak_bytes"]["host"] <= parse_bytes(host)


def test_a_process_that_an_exception_ends_with_its_session_open_says_no_more_than_that():
    script = (
        "import torch\nimport libgemini.torch as gm\n"
        "class Net(torch.nn.Module):\n"  # its class, and it with that, lives until Python takes its modules apart
        "  def __init__(self):\n    super().__init__(); self.layer = torch.nn.Linear(64, 64)\n"
        "  def forward(self, x):\n    return self.layer(x)\n"
        "with gm.init(device='cpu', device_memory='4MiB', host_memory='64MiB'):\n"
        "  model = Net()\n  model(torch.ones(2, 65))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Exception ignored" not in done.stderr
    assert "mat1 and mat2" in done.stderr.splitlines()[-1]


# ---- fp32 copies, when they are made
@pytest.mark.parametrize("fails", (False, True))
def test_fp32_copies_are_made_on_the_device_and_leave_it(session, monkeypatch, fails):
    """Where the device has no room for a piece, they are made on the host."""
    session("64MiB")
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Linear(1536, 1536) for _ in range(4))).to(torch.bfloat16)  # of 4.5 MiB each
    want = [param.detach().float() for param in model.parameters()]
    on_device, on_host, acquired = [], [], gm.session().holds.acquired

    def counted(accesses, count, stream):
        if count == 2:
            on_device.append(stream)
            if fails and len(on_device) % 3 == 0:
                raise gm.GeminiError("there is no room", "OOM_DEVICE")
        return acquired(accesses, count, stream)

    monkeypatch.setattr(arenas, "PIECE_BYTES", 4 << 20)  # several for each copy
    monkeypatch.setattr(gm.session().holds, "acquired", counted)
    write = arenas.Place.write
    monkeypatch.setattr(arenas.Place, "write", lambda place, value: on_host.append(write(place, value)))
    model, _ = gm.prepare(model, torch.optim.AdamW(model.parameters()))
    monkeypatch.undo()
    assert gm.stats()["used_bytes"]["device"] < 24 << 20  # of 18 MiB of parameters and 36 of copies
    assert len(on_device) >= 8 and bool(len(on_host) > len(want)) == fails
    for param, value in zip(model.parameters(), want):
        assert torch.equal(param._gm_record.states["master"].read(), value)
