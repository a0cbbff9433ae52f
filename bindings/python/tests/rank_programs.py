"""What each rank does in test_ranks.py: `python rank_programs.py PROGRAM OUT ARGUMENTS`, in torchrun's environment.

A program returns tensors and numbers, or raises; both go to OUT.

SPDX-License-Identifier: Apache-2.0
"""

import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import pathlib
import re
import resource
import signal
import sys
import tempfile
import time

import torch
import torch.distributed
import torch.distributed.device_mesh
import torch.distributed.tensor.parallel
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import libgemini.torch as gm
from conftest import VOCAB, tiny
from expert_parallel import Mixture
from libgemini.torch import (
    checkpoint,
    ranks as ranks_of_torch,
    slicerule,
    tensorfile,
    transport as transport_of_torch,
)

ROWS, LENGTH, WIDTH = 4, 12, 96
# "cuda": all ranks on GPUs, over NCCL; the GPU is that of LOCAL_RANK. "cpu": the simulated device.
DEVICE = os.environ.get("RANK_PROGRAMS_DEVICE", "cpu")
SECONDS = int(
    os.environ.get("RANK_PROGRAMS_SECONDS", "0")
)  # after which a rank says where it hangs, and ends; 0: never
SIZES = {
    "cpu": {"chunk_size": "64KiB", "host_memory": "64MiB", "device_memory": "1MiB"},
    "dry": {"chunk_size": "64KiB", "host_memory": "256MiB", "device_memory": "40MiB"},  # of models for a GPU
    "cuda": {"chunk_size": "2MiB", "host_memory": "512MiB", "device_memory": "320MiB"},
}[os.environ.get("RANK_PROGRAMS_SIZES", DEVICE)]


class Choice(nn.ModuleList):
    """Layers of which a batch uses some."""

    def forward(self, x, branches):
        for branch in branches:
            x = torch.tanh(self[branch](x))
        return x


class Copied(torch.autograd.Function):
    """The values on all ranks of a tensor-parallel group, whose gradients are added."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Added(torch.autograd.Function):
    """The sum of the values of all ranks of a tensor-parallel group."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        torch.distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Parallel(nn.Module):
    """Layers of which each of `parts` ranks has a part: columns of the first matrix, rows of the second one."""

    def __init__(self, group=None, part=0, parts=1):
        super().__init__()
        torch.manual_seed(0)
        self.group = group
        self.up = nn.ParameterList(torch.randn(2 * WIDTH, WIDTH).chunk(parts, 0)[part] * 0.1 for _ in range(3))
        self.down = nn.ParameterList(torch.randn(WIDTH, 2 * WIDTH).chunk(parts, 1)[part] * 0.1 for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, input_ids, labels):
        x = input_ids
        for up, down in zip(self.up, self.down):
            if self.group is None:
                x = x + torch.tanh(x @ up.T) @ down.T
            else:
                x = x + Added.apply(torch.tanh(Copied.apply(x, self.group) @ up.T) @ down.T, self.group)
        return {"loss": (self.last(x).squeeze(-1) - labels).square().mean()}


class Branches(nn.Module):
    def __init__(self, count=4):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.choice = Choice(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, input_ids, labels, branches=(0, 1)):
        x = self.choice(torch.tanh(self.first(input_ids)), branches)
        return {"loss": (self.last(x).squeeze(-1) - labels).square().mean()}


class Quantized(Branches):
    """Branches of an input that a frozen matrix of int8 has multiplied."""

    def __init__(self):
        super().__init__(2)
        self.base = nn.Parameter(torch.randint(-127, 128, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False)

    def forward(self, input_ids, labels):
        return super().forward(input_ids @ (self.base.to(input_ids.dtype) / 1000), labels)


class Gpt(nn.Module):
    """A small GPT of several chunks of a GPU, whose head is its embedding."""

    def __init__(self, width=256, heads=4, blocks=4):
        super().__init__()
        torch.manual_seed(0)
        self.heads = heads
        self.tokens, self.places = nn.Embedding(VOCAB, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm_1": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "norm_2": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)
        for param in (self.tokens.weight, self.places.weight):
            nn.init.normal_(param, std=0.02)

    def forward(self, input_ids, labels):
        x = self.tokens(input_ids) + self.places.weight[: input_ids.shape[1]]
        mask = torch.ones(input_ids.shape[1], input_ids.shape[1], dtype=torch.bool, device=x.device).tril()
        for block in self.blocks:
            q, k, v = (
                part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for part in block["qkv"](block["norm_1"](x)).chunk(3, -1)
            )
            scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
            x = x + block["out"]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
            x = x + block["down"](nn.functional.gelu(block["up"](block["norm_2"](x))))
        logits = nn.functional.linear(self.norm(x), self.tokens.weight)[:, :-1]
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten())}


def build(name, dtype="float32"):
    if name == "gpt":
        return Gpt().to(getattr(torch, dtype))
    if name.endswith("branches"):  # 4, or another number before the word
        torch.manual_seed(0)
        return Branches(int(name.removesuffix("branches") or 4)).to(getattr(torch, dtype))
    if name == "quantized":
        torch.manual_seed(0)
        return Quantized()
    if name == "lora":
        import peft

        config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
        return peft.get_peft_model(tiny("gpt2"), config)
    made = tiny(name, getattr(torch, dtype))
    for module in made.modules():
        if isinstance(getattr(module, "dropout", None), float):  # T5's attention has a number, not a module
            module.dropout = 0.0
    return made


def rows(name, step, begin, end, length=LENGTH, dtype=torch.float32):
    """Rows of the batch of a step, and the first `length` columns of a text."""
    generator = torch.Generator().manual_seed(step)
    if name.endswith("branches") or name in ("parallel", "quantized"):
        ids = torch.randn(ROWS, WIDTH, generator=generator).to(DEVICE, dtype)
        return {"input_ids": ids[begin:end], "labels": ids.sum(1)[begin:end]}
    ids = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=generator)[begin:end, :length].to(DEVICE)
    return {"input_ids": ids, "labels": ids}


def adamw(model, **more):
    # A large eps: with a small one, AdamW makes a step of a gradient that consists of rounding errors.
    return torch.optim.AdamW(model.parameters(), **{"lr": 3e-3, "eps": 1e-3, "weight_decay": 0.1, **more})


def optimizer_of(model, name=None, **options):
    """An optimizer of torch, whose options differ between matrices and vectors. Without a name: AdamW for all."""
    if name is None:
        return adamw(model)
    params = list(model.parameters())
    vectors = {"params": [param for param in params if param.dim() < 2], "lr": 0.5 * options["lr"]}
    matrices = {"params": [param for param in params if param.dim() > 1]}
    if name != "Rprop":
        matrices["weight_decay"] = 0.1
    return getattr(torch.optim, name)([matrices, vectors], **options)


def steps(
    model,
    optimizer,
    name,
    *,
    begin,
    end,
    count=4,
    clip=0.0,
    micro=1,
    batches=1,
    columns=LENGTH,
    dtype=torch.float32,
    **inputs,
):
    """Trains on rows begin to end of each batch, in `micro` parts, within no_sync() of a wrapper but for the last one.

    A step is of so many batches. Returns losses, and norms before and after clipping.
    """
    losses, norms, after = [], [], []
    for step in range(count):
        total, length = 0.0, (end - begin) // micro
        parts = [(step + 100 * batch, first) for batch in range(batches) for first in range(begin, end, length)]
        for number, first in parts:
            last = (number, first) == parts[-1]
            with contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
                loss = model(**rows(name, number, first, first + length, columns, dtype), **inputs)["loss"]
                loss = loss / (micro * batches)
                loss.backward()
            total += loss.item()
        losses.append(total)
        if clip:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
            after.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.8 * clip)))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "after": after}


def share(ranks, rank):
    return {"begin": ROWS // ranks * rank, "end": ROWS // ranks * (rank + 1)}


def rank_and_count():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@contextlib.contextmanager
def session(zero=3, memory=None, **more):
    if memory:
        more["device_memory"] = memory
    device = None if DEVICE == "cuda" else "cpu"
    gm.init(device=device, zero=zero, **{"strict": True, "deadline": 30.0, **SIZES, **more})
    try:
        yield gm.session()
    finally:
        gm.close(force=DEVICE == "cuda")  # gradients and losses of torch may be left on a GPU


def state(model, optimizer):
    """All parameters, states and buffers, which all ranks copy together."""
    out = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for number, values in optimizer.state_dict()["state"].items():
        out.update({f"{number}.{name}": value for name, value in values.items()})
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in out.items()}


def parts_before_the_end(optimizer):
    """A list that gets, for each backward pass, the first elements of the parts that are updated before its end."""
    firsts, parts = [], optimizer.rule.parts
    begin, submit, end = parts.begin, parts.submit, parts.end

    def begin_pass():
        firsts.append([])
        begin()

    def note_submit(arena, part, records, first):
        submit(arena, part, records, first)
        firsts[-1].append(first)

    def end_pass():
        parts.submit = submit
        end()
        parts.submit = note_submit

    parts.begin, parts.submit, parts.end = begin_pass, note_submit, end_pass
    return firsts


def names_of_tied(model):
    """The names of each parameter that has several, in the model as it is."""
    by_parameter = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(param, []).append(name)
    return [names for names in by_parameter.values() if len(names) > 1]


def tokens_of_experts(model):
    """A list that gets, for each pass of each layer of experts, how many tokens every expert has."""
    counts = []

    def count(router, _, outputs):
        counts.append(torch.bincount(outputs[-1].flatten(), minlength=router.num_experts).tolist())

    for module in model.modules():
        if type(module).__name__ == "MixtralTopKRouter":
            module.register_forward_hook(count)
    return counts


def files_open_in(folder):
    """The files of a folder that this process has open, by their names or those of files without one."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the list
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [link for link in links if os.path.dirname(link) == folder]


# ---- programs
def training(
    *,
    model,
    zero=3,
    memory=None,
    dtype="float32",
    frozen=(),
    wrapped=False,
    branches=None,
    unit=None,
    optimizer=None,
    adapters=None,
    rank_order=False,
    early=False,
    strict=True,
    kept=None,
    shard_size=None,
    mesh=False,
    units=None,
    files=None,
    transport="auto",
    **more,
):
    """Trains a model; returns losses, norms, statistics, tokens of experts, and, in the end, ties and the state.

    adapters: a folder in which each rank saves those of PEFT, in a folder of its own.
    files: the folder of a file tier, the same on all ranks; then also how many bytes are there, and the files that this
        process has open in it.
    kept: how AdamW keeps its states and masters, as prepare() has it.
    early: whether the backward pass updates; then also the parts that it updates before its end, in each step.
    mesh: whether init() gets a mesh in the place of shard_size.
    units: of init(), of each rank.
    """
    rank, count = rank_and_count()
    more_of_session = {"transport": transport, **({} if units is None else {"units": units[rank]})}
    if files:
        os.makedirs(files, exist_ok=True)
        more_of_session.update(file=files, file_memory="8MiB", host_memory="512KiB")
    inputs = {} if branches is None else {"branches": branches[rank]}
    replicas = {"shard_size": shard_size}
    if mesh:
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        shape, names = (count // shard_size, shard_size), ("replicate", "shard")
        made = torch.distributed.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
        replicas = {"process_group": made}
    with session(zero, memory, rank_order=rank_order, strict=strict, **replicas, **more_of_session) as opened:
        torch.manual_seed(100 + rank)
        made = build(model, dtype)
        for name, param in made.named_parameters():
            param.requires_grad_(not any(part in name for part in frozen))
        made, optimizer = gm.prepare(
            made, optimizer_of(made, **(optimizer or {})), step_in_backward=early, **(kept or {})
        )
        parts, experts = parts_before_the_end(optimizer) if early else [], tokens_of_experts(made)
        if unit:
            gm.unit(made.get_submodule(unit))
        called = nn.parallel.DistributedDataParallel(made) if wrapped else made
        dtype = getattr(torch, dtype)
        out = steps(called, optimizer, model, **share(count, rank), dtype=dtype, **inputs, **more)
        if opened.ranks:
            out["stats"] = opened.manager.group_stats(opened.ranks.group)
        if adapters:
            made.save_pretrained(os.path.join(adapters, str(rank)))
        out["host"] = opened.manager.stats()["used_bytes"]["host"]
        if files:
            out["files"] = files_open_in(files)
            out["filed"] = opened.manager.stats()["used_bytes"]["file"]
        out["blocks"] = [len(one.blocks.found) for one in opened.models if one.blocks.active]
        out.update(parts=parts, experts=experts, tied=names_of_tied(made))
        return {**out, "state": state(made, optimizer), "adapters": adapters}


def joined(*, model, counts, spare, early=False, dtype="float32", kept=None, **more):
    """Trains on so many batches, another number on each rank, with branches, spare, that only repeated ones use.
    Returns also which batches were repeated, and what is said of no batch at all on rank 1 and of a wrapper's join().
    """
    rank, count = rank_and_count()
    out = {"losses": [], "idle": [], "norms": []}
    with session(strict=not early, **more):  # with parts, a strict rank would wait for an idle one
        made = build(model, dtype)
        made, optimizer = gm.prepare(made, adamw(made), step_in_backward=early, **(kept or {}))
        gm.unit(made.choice)
        texts = [rows(model, step, **share(count, rank), dtype=getattr(torch, dtype)) for step in range(counts[rank])]
        batches = gm.join(texts)
        for batch in batches:
            loss = made(**batch, branches=spare if batches.idle else [0, 1])["loss"]
            loss.backward()
            out["losses"].append(loss.item())
            out["idle"].append(batches.idle)
            if not early:
                out["norms"].append(float(nn.utils.clip_grad_norm_(made.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        out["left"] = batches.idle
        out["state"] = state(made, optimizer)
        try:
            list(gm.join([] if rank == 1 else [0]))
        except gm.GeminiError as error:
            out["empty"] = str(error)
        try:
            nn.parallel.DistributedDataParallel(made).join()
        except gm.GeminiError as error:
            out["wrapper"] = str(error)
        return out


def columns(*, model, lengths):
    """Trains on texts of another length on each rank."""
    rank, _ = rank_and_count()
    return training(model=model, columns=lengths[rank])


def clip_over_parts(model, group, most):
    """Clips by the norm over all parts of a tensor-parallel model, and returns it."""
    own = [param.grad for name, param in model.named_parameters() if "last" not in name]
    squares = nn.utils.get_total_norm(own).square()
    torch.distributed.all_reduce(squares, group=group)
    norm = (squares + nn.utils.get_total_norm([param.grad for param in model.last.parameters()]).square()).sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), most, norm)
    return float(norm)


def tensor_parallel(*, parts, clip, count=4, transport="auto"):
    """Trains a model of which each of `parts` processes has a part, and divides each part among the others by ZeRO 2.

    The batch is divided among those that have the same part.
    """
    rank, processes = rank_and_count()
    torch.distributed.init_process_group("gloo")
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh(
            "cpu", (processes // parts, parts), mesh_dim_names=("data", "tensor")
        )
        data, tensor = mesh.get_group("data"), mesh.get_group("tensor")
        with session(zero=2, process_group=data, transport=transport):
            made, norms = Parallel(tensor, rank % parts, parts), []
            made, optimizer = gm.prepare(made, adamw(made))
            optimizer.register_step_pre_hook(lambda *_: norms.append(clip_over_parts(made, tensor, clip)))
            out = steps(made, optimizer, "parallel", **share(processes // parts, rank // parts), count=count)
            return {**out, "norms": norms, "state": state(made, optimizer)}
    finally:
        torch.distributed.destroy_process_group()


class Divided(nn.Module):
    """Blocks for all parallel styles of torch: an embedding, norms of sequences, columns and rows; the last layer is no
    part of them.
    """

    def __init__(self, blocks=2):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(WIDTH),
                    "up": nn.Linear(WIDTH, 2 * WIDTH),
                    "down": nn.Linear(2 * WIDTH, WIDTH),
                }
            )
            for _ in range(blocks)
        )
        self.last = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids, labels):
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = x + block["down"](torch.tanh(block["up"](block["norm"](x))))
        return {"loss": nn.functional.cross_entropy(self.last(x).flatten(0, 1), labels.flatten())}


def divide(model, mesh):
    """Divides a Divided as torch's parallel styles do."""
    from torch.distributed.tensor import Replicate, Shard

    parallel = torch.distributed.tensor.parallel
    plan = {"tokens": parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())}
    for number in range(len(model.blocks)):
        plan[f"blocks.{number}.norm"] = parallel.SequenceParallel()
        plan[f"blocks.{number}.up"] = parallel.ColwiseParallel(input_layouts=Shard(1))
        plan[f"blocks.{number}.down"] = parallel.RowwiseParallel()
    for number in range(len(model.blocks)):  # what a norm of sequences takes: this process's part of the text
        model.blocks[number]["norm"].register_forward_pre_hook(
            lambda _, inputs: (
                torch.distributed.tensor.DTensor.from_local(
                    inputs[0], mesh, [Replicate()], run_check=False
                ).redistribute(placements=[Shard(1)]),
            )
        )
    return parallel.parallelize_module(model, mesh, plan)


def whole(values):
    """A state whose DTensors are put together, by all processes of their mesh."""
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in values.items()}


def refusals_of_dtensors(mesh, data):
    """What prepare() and functions say of what is not supported."""
    parallel, said = torch.distributed.tensor.parallel, {}

    def note(name, function):
        try:
            function()
        except (gm.GeminiError, RuntimeError) as error:
            said[name] = f"{type(error).__name__}: {error}"

    def linear(columns=8, over=mesh["tensor"]):
        made = nn.Sequential(nn.Linear(8, columns))
        return parallel.parallelize_module(made, over, {"0": parallel.ColwiseParallel()})

    note("uneven", lambda: gm.prepare(linear(columns=7)))
    note("ranks", lambda: gm.prepare(linear(over=mesh["data"])))
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    made = nn.Linear(8, 8)
    made.weight = nn.Parameter(distribute_tensor(made.weight.detach(), mesh, [Shard(0), Replicate()]))
    note("two dimensions", lambda: gm.prepare(made))
    made = linear()
    made(torch.ones(2, 8)).sum().backward()
    note("gradient", lambda: gm.prepare(made))
    made = linear()
    if data.size() == 1:
        note("sgd", lambda: gm.prepare(made, torch.optim.SGD(made.parameters(), lr=0.1)))
    gm.prepare(made, adamw(made))
    weight = made[0].weight
    note("view", lambda: weight.t())
    note("unit", lambda: gm.unit(made[0]))
    scale, own = torch.arange(64.0).view(8, 8), mesh["tensor"].get_local_rank()
    (weight.full_tensor() * scale).sum().backward()
    said["full_tensor()"] = f"{float(torch.linalg.vector_norm(weight.grad)):.2f}"
    made.zero_grad()
    (weight.to_local() * scale.chunk(2)[own]).sum().backward()
    said["to_local()"] = f"{float(torch.linalg.vector_norm(weight.grad)):.2f}"
    made.zero_grad()
    note("other gradients", lambda: weight.to_local(grad_placements=[Replicate()]))
    note("mixed", lambda: weight @ torch.ones(8))
    note("tensor()", lambda: torch.tensor(weight))
    made(torch.ones(2, 8)).sum().backward()
    note("other norm", lambda: torch.linalg.vector_norm(weight.grad, 1))
    note("elements", lambda: weight.grad.abs().max().full_tensor())
    note(
        "scaler",
        lambda: torch.amp.GradScaler("cpu")._unscale_grads_(
            torch.optim.SGD([weight]), torch.ones(()), torch.zeros(1), True
        ),
    )
    made.zero_grad()
    return said


def by_torch_alone(mesh, clip, **more):
    """What torch alone makes of a Divided, over the same processes."""
    data, made, norms = mesh.get_group("data"), divide(Divided(), mesh["tensor"]), []

    def gradients():
        return [getattr(param.grad, "_local_tensor", param.grad) for param in made.parameters()]

    def mean(*_):
        for grad in gradients():
            torch.distributed.all_reduce(grad, group=data)
            grad.div_(data.size())

    def clip_all(*_):
        for most in (clip, 0.8 * clip) if clip else ():
            # torch's clip_grad_norm_() does not take DTensors and other tensors together, and the square of a DTensor's
            # norm is wrong in torch 2.6.
            entire = [getattr(param.grad, "full_tensor", lambda grad=param.grad: grad)() for param in made.parameters()]
            norm = sum(torch.linalg.vector_norm(one).square() for one in entire).sqrt()
            norms.append(float(norm))
            for grad in gradients():
                grad.mul_((most / (norm + 1e-6)).clamp(max=1.0))

    optimizer = adamw(made, foreach=False)
    optimizer.register_step_pre_hook(mean)
    optimizer.register_step_pre_hook(clip_all)
    out = steps(made, optimizer, "tokens", **more)
    return {**out, "norms": norms[::2], "after": norms[1::2], "state": whole(state(made, optimizer))}


# Torch 2.6 by itself fails where a process divides an nn.Embedding of a second dtype (an assertion of its own).
DIVIDES_TWO_DTYPES = not torch.__version__.startswith("2.6.")
KEPT_BY_DTENSORS = (("fp32", {}), ("narrow", {"states": "8bit", "masters": "split16"})) * DIVIDES_TWO_DTYPES


def divided(*, parts, folder, clip=0.1, **more):
    """Trains a model that torch divides into `parts`, and what torch alone makes of the same. Saves, and loads into
    another model.
    """
    rank, processes = rank_and_count()
    torch.distributed.init_process_group("gloo")
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh(
            "cpu", (processes // parts, parts), mesh_dim_names=("data", "tensor")
        )
        data, more = mesh.get_group("data"), {**share(processes // parts, rank // parts), **more}
        out = {"wanted": by_torch_alone(mesh, clip, **more), "unclipped": by_torch_alone(mesh, 0.0, **more)}
        with session(zero=2, process_group=data):
            made = divide(Divided(), mesh["tensor"])
            made, optimizer = gm.prepare(made, adamw(made))
            out["made"] = steps(made, optimizer, "tokens", **more, clip=clip)
            gm.save(folder, made, optimizer, extra={"step": 4})
            out["files"] = sorted(os.listdir(folder))
            out["made"]["state"] = whole(state(made, optimizer))
            out["shape"] = tuple(made.tokens.weight.shape), made.tokens.weight.numel()
            divided = made.blocks[0]["up"].weight.detach()  # of which torch 2.6 makes no mean over gloo
            out["mean"] = float(divided.sum().full_tensor()) / divided.numel()
        if "micro" not in more:
            with session(process_group=data):
                made = divide(Divided(), mesh["tensor"])
                made, optimizer = gm.prepare(made, adamw(made), step_in_backward=True)
                out["early"] = steps(made, optimizer, "tokens", **more)
                out["early"]["state"] = whole(state(made, optimizer))
        for name, options in KEPT_BY_DTENSORS:
            with session(zero=2, process_group=data):
                made = divide(Divided().bfloat16(), mesh["tensor"])
                made, optimizer = gm.prepare(made, adamw(made), **options)
                of_kind = steps(made, optimizer, "tokens", **more, clip=clip)
                of_kind["state"] = whole(state(made, optimizer))
                if options:
                    gm.save(f"{folder}-{name}", made, optimizer)
            if options:
                with session(process_group=data):
                    other = divide(Divided().bfloat16(), mesh["tensor"])
                    other, optimizer = gm.prepare(other, adamw(other), **options)
                    gm.load(f"{folder}-{name}", other, optimizer)
                    of_kind["loaded"] = whole(state(other, optimizer))
            out.setdefault("kept", {})[name] = of_kind
        with session(process_group=data):
            other = divide(Divided(), mesh["tensor"])
            other, optimizer = gm.prepare(other, adamw(other))
            out["extra"] = gm.load(folder, other, optimizer)
            out["loaded"] = whole(state(other, optimizer))
            values, states = other.state_dict(), optimizer.state_dict()
            kept = {name: value.clone() for name, value in values.items()}
            with torch.no_grad():
                for param in other.parameters():
                    param.zero_()
            out["zero"] = {name: value for name, value in whole(state(other, optimizer)).items() if name in kept}
            other.load_state_dict(kept)
            optimizer.load_state_dict(states)
            out["again"] = whole(state(other, optimizer))
        with session(process_group=data):
            undivided = Divided()
            undivided, _ = gm.prepare(undivided, adamw(undivided))
            try:
                gm.load(folder, undivided)
            except gm.GeminiError as error:
                out["undivided"] = str(error)
        with session(process_group=data):
            out["refused"] = refusals_of_dtensors(mesh, data)
        return out
    finally:
        torch.distributed.destroy_process_group()


def expert_mesh(parts, rows=None):
    """Of all processes, in rows of `parts`, each of which has all experts; or in these rows."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
    rows = rows or torch.arange(torch.distributed.get_world_size()).view(-1, parts).tolist()
    return torch.distributed.device_mesh.DeviceMesh(DEVICE, rows, mesh_dim_names=("copies", "experts"))["experts"]


def expert_parallel(
    *,
    parts,
    zero=3,
    early=False,
    optimizer=None,
    kept=None,
    dtype="float32",
    saved=None,
    loaded=None,
    options=None,
    rows=None,
    **more,
):
    """Trains a mixture of which each of `parts` ranks has some experts, and saves it.

    saved: a folder that it is saved into in the end.
    loaded: a folder that it is loaded from before; then it is not trained.
    options: of init().
    rows: of the mesh.
    """
    rank, count = rank_and_count()
    mesh = expert_mesh(parts, rows)
    with session(zero, expert_mesh=mesh, **(options or {})) as opened:
        made = Mixture(VOCAB, WIDTH, mesh).to(getattr(torch, dtype))
        made, optimizer = gm.prepare(
            made, optimizer_of(made, **(optimizer or {})), step_in_backward=early, **(kept or {})
        )
        out = {"parts": parts_before_the_end(optimizer) if early else []}
        if loaded:
            out["extra"] = gm.load(loaded, made, optimizer)
        else:
            out.update(steps(made, optimizer, "tokens", **share(count, rank), **more))
            gathered = [opened.manager.group_stats(one.group)["gathered_bytes"] for one in opened.ranks.owners.values()]
            out.update(gathered=gathered, host=opened.manager.stats()["used_bytes"]["host"])
        if saved:
            gm.save(saved, made, optimizer, extra={"step": 4})
        out["counts"] = [layer.counts for layer in made.layers]
        return {**out, "state": whole(state(made, optimizer))}


def expert_ends():
    """Rank 3 is killed in the second layer of experts."""
    rank, count = rank_and_count()
    mesh = expert_mesh(2)
    with session(expert_mesh=mesh, deadline=4.0):
        made = Mixture(VOCAB, WIDTH, mesh)
        made, optimizer = gm.prepare(made, adamw(made))
        steps(made, optimizer, "tokens", **share(count, rank), count=2)
        if rank == 3:
            made.layers[1].router.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        began["ns"] = time.monotonic_ns()
        try:
            steps(made, optimizer, "tokens", **share(count, rank), count=1)
        except RuntimeError:  # of torch, whose processes exchange tokens, or of the library
            gm.session().ranks.exchange(b"x")


def refused_experts():
    """What init() and prepare() say of meshes and DTensors over ranks of the session that they do not take."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    said, mesh, count = {}, expert_mesh(2), torch.distributed.get_world_size()

    def note(name, function):
        try:
            function()
        except gm.GeminiError as error:
            said[name] = str(error)

    def prepare(placement):
        made = nn.Linear(8, 8)
        made.weight = nn.Parameter(distribute_tensor(made.weight.detach(), mesh, [placement]))
        gm.prepare(made)

    with session(expert_mesh=mesh, device_memory="2MiB"):
        made = Mixture(VOCAB, WIDTH, mesh)
        made, optimizer = gm.prepare(made, adamw(made))
        rank, _ = rank_and_count()
        made(**rows("tokens", 0, **share(count, rank)))["loss"].backward()
        gradients = [param.grad for param in made.parameters()]
        norms = [float(nn.utils.get_total_norm(gradients, foreach=foreach)) for foreach in (None, False, True)]
        said["foreach"] = f"{len(set(norms))} norm"
        optimizer.zero_grad()
    with session(expert_mesh=mesh):
        note("join", lambda: gm.join([0]))
        note("columns", lambda: prepare(Shard(1)))
        note("whole", lambda: prepare(Replicate()))
    with session():
        note("no experts", lambda: prepare(Shard(0)))
    both = torch.distributed.device_mesh.init_device_mesh("cpu", (count // 2, 2), mesh_dim_names=("copies", "experts"))
    note("two dimensions", lambda: gm.init(device="cpu", expert_mesh=both, **SIZES))
    note("some ranks", lambda: gm.init(device="cpu", expert_mesh=mesh, process_group=both.get_group("copies"), **SIZES))
    note(
        "other rows",
        lambda: gm.init(device="cpu", expert_mesh=(mesh, both["copies"])[rank_and_count()[0] % 2], **SIZES),
    )
    note("only one", lambda: gm.init(device="cpu", expert_mesh=None if rank_and_count()[0] else mesh, **SIZES))
    return {"said": said}


def goes_on(*, model):
    """Trains after a backward pass that an exception has ended, on all ranks."""
    rank, count = rank_and_count()
    with session():
        made = build(model)
        made, optimizer = gm.prepare(made, adamw(made))

        def fail(*_):
            raise ArithmeticError("no gradient")

        hook = made.transformer.h[0].register_full_backward_hook(fail)
        try:
            steps(made, optimizer, model, **share(count, rank), count=1)
        except ArithmeticError:
            hook.remove()
        optimizer.zero_grad()
        return {**steps(made, optimizer, model, **share(count, rank)), "state": state(made, optimizer)}


def full_disk(*, folder):
    """Saves a checkpoint, another one while rank 1 may write only some kilobytes, and one without that limit."""
    rank, count = rank_and_count()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with session():
        made = build("branches")
        made, optimizer = gm.prepare(made, adamw(made))
        steps(made, optimizer, "branches", **share(count, rank), count=1)
        gm.save(folder, made, optimizer)
        saved = state(made, optimizer)
        steps(made, optimizer, "branches", **share(count, rank), count=1)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 10, limits[1]))
        began_ns = time.monotonic_ns()
        try:
            gm.save(folder, made, optimizer)
            error = ""
        except (gm.GeminiError, OSError) as raised:
            error = str(raised)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        seconds = (time.monotonic_ns() - began_ns) / 1e9
        torch.distributed.barrier()
        left = sorted(os.listdir(os.path.dirname(folder)))
        newer = state(made, optimizer)
        gm.load(folder, made, optimizer)
        older = state(made, optimizer)
        made.load_state_dict({name: value for name, value in newer.items() if name in made.state_dict()})
        gm.save(folder, made, optimizer)
        out = {"error": error, "seconds": seconds, "left": left, "again": sorted(os.listdir(folder))}
        return {**out, "saved": saved, "older": older}


began = {}  # when the step began in which a rank fails


def watched():
    """Rank 1 does other things for longer than the watchdog waits, before a pass and before ranks tell each other
    something. Returns what each rank's log says of either.
    """
    rank, count = rank_and_count()
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("libgemini").addHandler(handler)
    try:
        with session(watchdog=0.4) as opened:
            made, optimizer = gm.prepare(*(lambda made: (made, adamw(made)))(build("branches")))
            steps(made, optimizer, "branches", **share(count, rank), count=1)
            out = {}
            for what, call in (
                ("pass", lambda: steps(made, optimizer, "branches", **share(count, rank), count=1)),
                ("exchange", lambda: opened.ranks.exchange(b"1")),
            ):
                said.clear()
                time.sleep(1.0 if rank == 1 else 0.0)
                call()
                out[what] = list(said)
            return out
    finally:
        logging.getLogger("libgemini").removeHandler(handler)


def skips(*, what, transport="auto", deadline=4.0):
    """Rank 1 leaves out a call that the other one makes. Then both make the same ones."""
    rank, count = rank_and_count()
    with session(deadline=deadline, transport=transport):
        made, optimizer = gm.prepare(*(lambda made: (made, adamw(made)))(build("branches")))
        steps(made, optimizer, "branches", **share(count, rank), count=2)
        began["ns"] = time.monotonic_ns()
        loss = made(**rows("branches", 2, **share(count, rank)))["loss"]
        if rank == 0 or what != "backward":
            loss.backward()
        if rank == 0 or what != "step":
            optimizer.step()
        optimizer.zero_grad()
        steps(made, optimizer, "branches", **share(count, rank), count=1)


def ends_at_start(*, point, who=1, deadline=0.0):
    """Rank `who` is killed once torch's group exists: before init(), within it when all have come, or before it where
    torch's connections are not watched, as those of NCCL.
    """
    rank, _ = rank_and_count()
    torch.distributed.init_process_group("gloo")
    share_of = ranks_of_torch.Share.of

    def come_and_end(start=None, *more):
        if start:
            torch.distributed.barrier()
        if rank == who:
            os.kill(os.getpid(), signal.SIGKILL)
        return share_of(start, *more)

    ranks_of_torch.Share.of = come_and_end
    if point == "unwatched":
        torch.distributed.get_backend_config = lambda _: "cuda:nccl"
    began["ns"] = time.monotonic_ns()
    if point != "within" and rank == who:
        come_and_end()
    with session(deadline=deadline):
        raise AssertionError(f"rank {who} has ended")


def late():
    """Rank 1 comes to init() when the others have given up; then within their time; and then it opens no session.

    Returns what the first and the last one raise, after how many seconds.
    """
    rank, _ = rank_and_count()
    out = {}
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")

    def refused(name, **more):
        start = time.monotonic()
        try:
            with session(**more):
                pass
        except gm.GeminiError as error:
            out[name] = str(error), error.status, time.monotonic() - start

    time.sleep(3.0 if rank == 1 else 0.0)
    refused("late", deadline=1.0)
    time.sleep(1.0 if rank == 1 else 0.0)
    with session(deadline=0.0):
        pass
    refused("alone", deadline=0.0, **({"file": "/proc/nowhere", "file_memory": "1MiB"} if rank == 1 else {}))
    return out


def several(*, cases):
    """The outcomes of several programs, one after the other: [name, arguments]."""
    out = []
    for name, arguments in cases:
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # one rank may have failed long before another one
        out.append(outcome_of(name, arguments))
    return out


def built_in(*, model, zero=3):
    """Builds the model in the session, from one seed, and trains it."""
    rank, count = rank_and_count()
    context = gm.init(
        device="cpu", strict=True, chunk_size="64KiB", host_memory="64MiB", device_memory="1MiB", zero=zero
    )
    try:
        with context:
            made = build(model)
        made, optimizer = gm.prepare(made, adamw(made))
        return {**steps(made, optimizer, model, **share(count, rank)), "state": state(made, optimizer)}
    finally:
        gm.close()


def shares():
    """What init() takes by itself where torchrun has started 4 processes on 12 cores. Returns bytes and threads."""
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    cores, os.sched_getaffinity = os.sched_getaffinity, lambda _: {*range(12)}
    try:
        gm.init(device="cpu", device_memory="1MiB")
        budget = gm.stats()["budget_bytes"]["host"]
        return {"host": budget / ranks_of_torch.host_default(), "threads": gm.session().manager.config.update_threads}
    finally:
        os.sched_getaffinity = cores
        del os.environ["LOCAL_WORLD_SIZE"]
        gm.close()


def large():
    """A model of 13 MB in bfloat16."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def of_process(file, field):
    """A number that the system knows of this process."""
    with open(f"/proc/self/{file}") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field))


def resident_anew():
    """The resident set of this process, in KiB. VmHWM, the most that it has been, begins anew."""
    ctypes.CDLL(None).malloc_trim(0)  # so that what was freed is not used again unseen
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return of_process("status", "VmRSS")


class ReadFromFiles(TorchDispatchMode):
    """Counts the bytes that torch's functions read from mapped files of weights.

    Attributes:
        read: So far. Functions that make views, or set_(), read nothing.
    """

    def __init__(self):
        super().__init__()
        self.read = 0
        self.ranges = []

    def look(self):
        """Looks for files that have been mapped."""
        with open("/proc/self/maps") as lines:
            mapped = [line.split() for line in lines if line.rstrip().endswith(".safetensors")]
        self.ranges = [[int(end, 16) for end in line[0].split("-")] for line in mapped]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func._schema.name != "aten::set_":
            for one in args[1:] if func is torch.ops.aten.copy_.default else args:
                if isinstance(one, torch.Tensor) and one.device.type == "cpu":
                    self.read += one.nbytes * any(begin <= one.data_ptr() < end for begin, end in self.ranges)
        return out


def load_large(opened, folder, way):
    """The model of a folder, in the session, by from_pretrained() or load_weights(); and the bytes that its loading
    read from the files, and by how many bytes it grew the process at most.
    """
    import transformers

    counted = ReadFromFiles()
    if way == "from_pretrained":
        take = gm._model.adopt

        def adopt(*args):
            counted.look()
            return take(*args)

        gm._model.adopt = adopt  # the files stay mapped while their tensors are taken over
        try:
            with gm._Init(opened), counted:
                made = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        finally:
            gm._model.adopt = take
        return made, counted.read, 0
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    grown, read = resident_anew(), of_process("io", "rchar")
    gm.load_weights(made, folder, verify=False)
    return made, of_process("io", "rchar") - read, (of_process("status", "VmHWM") - grown) << 10


def pretrained(*, folder):
    """Fills the model of a folder in two ways. Returns logits, the host memory that each took, and bytes read."""
    out, ids = {"folder": folder}, torch.arange(LENGTH)[None]
    for way in "from_pretrained", "load_weights":
        with session() as opened:
            made, out[way, "read"], out[way, "grown"] = load_large(opened, folder, way)
            out[way, "host"] = opened.manager.stats()["peak_bytes"]["host"]
            made = gm.prepare(made.eval())
            with torch.no_grad():
                out[way, "logits"] = made(input_ids=ids).logits.clone()
    return out


def in_all(*, folder, kept):
    """Trains the model of a folder, with clipping or updates in the backward pass. Returns, by way of loading, the most
    host memory until the model was loaded, and until it was trained, and by how many bytes the process grew at most.
    """
    rank, count = rank_and_count()
    out = {"parameters": 0}
    # Twice: modules of Python, and pages of libraries, come at the first time.
    for way, early in 2 * (("from_pretrained", False), ("load_weights", True)):
        before = resident_anew(), of_process("status", "RssShmem")
        with session(memory="4MiB", strict=False) as opened:
            made, _, _ = load_large(opened, folder, way)
            loaded = opened.manager.stats()["peak_bytes"]["host"]
            made, optimizer = gm.prepare(made, adamw(made), step_in_backward=early, **kept)
            more = {} if early else {"clip": 0.5}
            steps(made, optimizer, "llama", **share(count, rank), count=2, **more)
            # The simulated device's memory, which is shared, counts once for each address that it has had.
            grown, shared = of_process("status", "VmHWM") - before[0], of_process("status", "RssShmem") - before[1]
            out[way] = loaded, opened.manager.stats()["peak_bytes"]["host"], (grown - shared) << 10
            out["parameters"] = sum(param.numel() for param in made.parameters())
    return out


def resumed(*, model, zero=3, dtype="float32", kept=None, replaced=None):
    """Trains, loads the state anew into another model and optimizer, and goes on, as the first ones do. Returns also
    the states as saved and as loaded, that of the first ones in the end, and that after weights alone were loaded.

    kept, replaced: how AdamW keeps its states and masters, before and after loading.
    """
    rank, count = rank_and_count()
    with session(zero):
        made = build(model, dtype)
        made, optimizer = gm.prepare(made, adamw(made), **(kept or {}))
        steps(made, optimizer, model, **share(count, rank), count=2)
        saved = state(made, optimizer)
        # On the CPU: the device memory of a session ends with it.
        weights = {name: value.cpu().clone() for name, value in made.state_dict().items()}
        states = optimizer.state_dict()
        for state_of in states["state"].values():
            state_of.update({name: value.cpu() for name, value in state_of.items() if torch.is_tensor(value)})
        steps(made, optimizer, model, **share(count, rank), count=2)
        first = state(made, optimizer)
    with session(zero):
        made = build(model, dtype)
        with torch.no_grad():
            for param in made.parameters():
                param.fill_(float("nan"))
        made, optimizer = gm.prepare(made, adamw(made), **((replaced if replaced is not None else kept) or {}))
        made.load_state_dict(weights)
        optimizer.load_state_dict(states)
        loaded = state(made, optimizer)
        out = steps(made, optimizer, model, **share(count, rank), count=2)
        out.update(state=state(made, optimizer), saved=saved, loaded=loaded, first=first)
        made.load_state_dict(weights)
        return {**out, "renewed": state(made, optimizer)}


def written(*, zero=3, kept=None):
    """Writes some elements of parameters of 16 bits, and loads states before parameters. Returns the states before and
    after a write, after the parameters were loaded, and in the end.
    """
    rank, count = rank_and_count()
    out = {}
    with session(zero):
        made = build("branches", "bfloat16")
        made, optimizer = gm.prepare(made, adamw(made), **(kept or {}))
        steps(made, optimizer, "branches", **share(count, rank), count=2, dtype=torch.bfloat16)
        out["before"] = state(made, optimizer)
        with torch.no_grad():
            made.first.weight[3, 4] = 1
            made.last.weight.clamp_(-0.05, 0.05)
            made.last.bias.copy_(made.last.bias.clone())
        out["after"] = state(made, optimizer)
        weights = {name: value.cpu().clone() for name, value in made.state_dict().items()}
        states = optimizer.state_dict()
        steps(made, optimizer, "branches", **share(count, rank), count=1, dtype=torch.bfloat16)
        optimizer.load_state_dict(states)
        made.load_state_dict(weights)
        out["loaded"] = state(made, optimizer)
    return out


def clamped(*, kept=None):
    """Trains parameters of 16 bits, which hooks of the forward pass clamp, in the backward pass and by step(). Returns
    the states in the end.
    """
    rank, count = rank_and_count()
    out = {}
    for early in False, True:
        with session():
            made = build("branches", "bfloat16")
            made, optimizer = gm.prepare(made, adamw(made, lr=3e-2), step_in_backward=early, **(kept or {}))

            def clamp(layer, _):
                with torch.no_grad():
                    layer.weight.clamp_(-0.05, 0.05)

            for layer in made.first, made.last:
                layer.register_forward_pre_hook(clamp)
            steps(made, optimizer, "branches", **share(count, rank), dtype=torch.bfloat16)
            out["early" if early else "at the end"] = state(made, optimizer)
    return out


def saving(*, folder, model, count, dies=False, optimizer=None, dtype="float32", kept=None, shard_size=None):
    """Trains and saves a checkpoint. dies: rank 1 is killed while it writes its slices of the second one."""
    rank, ranks = rank_and_count()
    with session(deadline=4.0 if dies else 60.0, shard_size=shard_size):
        made = build(model, dtype)
        made, optimizer = gm.prepare(made, optimizer_of(made, **(optimizer or {})), **(kept or {}))
        out = steps(made, optimizer, model, **share(ranks, rank), count=count, dtype=getattr(torch, dtype))
        gm.save(folder, made, optimizer, extra={"step": count})
        if dies:
            steps(made, optimizer, model, **share(ranks, rank), count=1)
            if rank == 1:
                tensorfile._store = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            began["ns"] = time.monotonic_ns()
            gm.save(folder, made, optimizer)
        return {**out, "state": state(made, optimizer), "folder": folder}


def loading(*, folder, model, count, optimizer=None, dtype="float32", kept=None, shard_size=None):
    """Loads a checkpoint into a model of other values, and goes on for `count` steps."""
    rank, ranks = rank_and_count()
    with session(shard_size=shard_size):
        made = build(model, dtype)
        with torch.no_grad():
            for param in made.parameters():
                param.fill_(float("nan"))
        made, optimizer = gm.prepare(made, optimizer_of(made, **(optimizer or {})), **(kept or {}))
        extra = gm.load(folder, made, optimizer)
        loaded = state(made, optimizer)
        out = steps(made, optimizer, model, **share(ranks, rank), count=count, dtype=getattr(torch, dtype))
        return {**out, "state": loaded, "extra": extra}


def alone_for_long(*, folder):
    """One rank after the other works alone for longer than the deadline: before prepare() and save(), and in load()."""
    rank, count = rank_and_count()
    alone, verify = 6.0, checkpoint.Folder.verify
    with session(deadline=5.0):
        time.sleep(alone if rank == 0 else 0.0)
        made = build("branches")
        made, optimizer = gm.prepare(made, adamw(made))
        time.sleep(alone if rank == 1 else 0.0)
        gm.save(folder, made, optimizer)
        checkpoint.Folder.verify = lambda *arguments: (time.sleep(alone), verify(*arguments))
        try:
            gm.load(folder, made, optimizer)
        finally:
            checkpoint.Folder.verify = verify
        return {"state": state(made, optimizer)}


def example(*, code, folder):
    """Runs a trainer's example, with a budget for this machine in the place of the example's."""
    os.chdir(folder)
    init = gm.init
    gm.init = lambda **_: init(device="cpu", strict=True, chunk_size="64KiB", device_memory="2MiB")
    names = {"__name__": "example"}
    try:
        exec(compile(code, "example", "exec"), names)
        model = getattr(names["model"], "module", names["model"])
        return {
            "losses": names["losses"],
            "values": {name: param.detach().clone() for name, param in model.named_parameters()},
        }
    finally:
        gm.init = init
        gm.close()


def left_out():
    """Steps on one batch, of an optimizer that changes nothing and lacks one parameter, which has an arena of its own.

    Returns the norms over all parameters.
    """
    rank, count = rank_and_count()
    with session():
        made, norms = build("branches"), []
        optimizer = adamw(made, lr=0.0, weight_decay=0.0)
        made.gain = nn.Parameter(torch.ones(1, WIDTH, dtype=torch.bfloat16))
        made.first.register_forward_hook(lambda _module, _inputs, x: x * made.gain.float())
        made, optimizer = gm.prepare(made, optimizer)
        for _ in range(4):
            made(**rows("branches", 0, **share(count, rank)))["loss"].backward()
            norms.append([float(nn.utils.clip_grad_norm_(some, 1e9)) for some in (made.parameters(), [made.gain])])
            optimizer.step()
            made.zero_grad()
        return {"norms": norms}


def full_tier(*, folder):
    """On rank 1 alone, the file tier finds no room when it is made; then it is too small for what has to go there.

    Returns what each raises, after how many seconds, and what is left in the folder.
    """
    rank, count = rank_and_count()
    os.makedirs(folder, exist_ok=True)
    out = {}

    def refused(name, call):
        began_ns = time.monotonic_ns()
        try:
            call()
        except gm.GeminiError as error:
            out[name] = str(error), error.status, (time.monotonic_ns() - began_ns) / 1e9

    def opens():
        with session(file=folder, file_memory="1MiB"):
            pass

    def trains():
        files = "128KiB" if rank == 1 else "8MiB"
        with session(placement="cpu", file=folder, file_memory=files, host_memory="512KiB"):
            made = build("gpt2")
            made, optimizer = gm.prepare(made, adamw(made))
            steps(made, optimizer, "gpt2", **share(count, rank), count=2)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 10, limits[1]))
    refused("made", opens)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    torch.distributed.barrier()
    refused("full", trains)
    torch.distributed.barrier()
    return {**out, "left": os.listdir(folder)}


def another_model():
    """Rank 1 makes a layer of another size."""
    rank, _ = rank_and_count()
    with session():
        began["ns"] = time.monotonic_ns()
        gm.prepare(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 9 if rank else 10)))


def ends(*, point, how, deadline=4.0, early=False, **more):
    """Rank 1 is killed, or raises, in the forward pass, the backward pass, before the step or, over torch's transport,
    where the others are in one of its functions.

    early: the backward pass updates, and has begun to.
    """
    rank, count = rank_and_count()
    inputs = {**share(count, rank), "branches": list(range(8))}
    with session(deadline=deadline, **more):
        made = build("8 branches")
        made, optimizer = gm.prepare(made, adamw(made), step_in_backward=early)
        parts = parts_before_the_end(optimizer) if early else []
        steps(made, optimizer, "8 branches", **inputs, count=2)
        assert all(parts)

        def end(*_):
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("rank 1 gives up")

        if rank == 1 and point == "forward":
            made.last.register_forward_pre_hook(end)
        if rank == 1 and point == "backward":
            made.choice[0].register_full_backward_hook(end)
        if rank == 1 and point in ("all_gather", "reduce_scatter"):
            agree = transport_of_torch.Team.agree
            transport_of_torch.Team.agree = lambda team, call: (agree(team, call), call.startswith(point) and end())
        began["ns"] = time.monotonic_ns()
        loss = made(**rows("8 branches", 2, **share(count, rank)), branches=inputs["branches"])["loss"]
        loss.backward()
        if rank == 1 and point == "step":
            end()
        optimizer.step()
        steps(made, optimizer, "8 branches", **inputs, count=1)


class Lines(logging.Handler):
    """The lines of the log. When the watchdog has told its state, and of a wait for other ranks, a process goes on."""

    def __init__(self, pid):
        super().__init__()
        self.pid, self.lines = pid, []
        self.missing = ["watchdog: state: waits: ", "watchdog: thread .* for the other ranks of its group, as rank "]

    def emit(self, record):
        self.lines.append(record.getMessage())
        if not self.missing:
            return
        self.missing = [part for part in self.missing if not re.match(part, self.lines[-1])]
        if not self.missing:
            os.kill(self.pid, signal.SIGCONT)


def stops():
    """Rank 1 is stopped before its second step, until rank 0 has logged what it waits for. Returns lines and losses."""
    rank, count = rank_and_count()
    with session(deadline=120.0, watchdog=0.0 if rank else 0.2):
        pids = [0] * count
        torch.distributed.all_gather_object(pids, os.getpid())
        made = build("branches")
        made, optimizer = gm.prepare(made, adamw(made))
        losses = steps(made, optimizer, "branches", **share(count, rank), count=1)["losses"]
        log = Lines(pids[1])
        if rank:
            os.kill(pids[1], signal.SIGSTOP)
        else:
            while pathlib.Path(f"/proc/{pids[1]}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.01)
            logging.getLogger("libgemini").addHandler(log)
        losses += steps(made, optimizer, "branches", **share(count, rank), count=1)["losses"]
        logging.getLogger("libgemini").removeHandler(log)
        return {"lines": log.lines, "losses": losses, "state": state(made, optimizer)}


def early(*, model):
    """What is refused where the backward pass updates, and that it goes on after it. Returns messages and states."""
    rank, count = rank_and_count()
    out = {}

    def refused(name, function):
        try:
            function()
        except (gm.GeminiError, ArithmeticError) as error:
            out[name] = str(error)

    def loss_of(step):
        return made(**rows(model, step, **share(count, rank)))["loss"]

    with session():
        made = build(model)
        made, optimizer = gm.prepare(made, adamw(made), step_in_backward=True)
        steps(made, optimizer, model, **share(count, rank), count=1)
        out["before"] = state(made, optimizer)
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 + rank)
        refused("options", loss_of(1).backward)
        out["after"] = state(made, optimizer)
        optimizer.param_groups[0]["lr"] = 3e-3
        loss_of(1).backward()
        refused("clip", lambda: nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5))
        refused("second", loss_of(2).backward)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = torch.tensor(3e-3)
        steps(made, optimizer, model, **share(count, rank), count=2)
        out["state"] = state(made, optimizer)

        def give_up(*_):
            raise ArithmeticError("all give up")

        hook = next(made.parameters()).register_post_accumulate_grad_hook(give_up)  # the last one of the pass
        refused("raises", loss_of(3).backward)
        hook.remove()
        optimizer.step()
        steps(made, optimizer, model, **share(count, rank), count=1)
        out["after raising"] = state(made, optimizer)
    with session():
        made = build("branches")
        optimizer = torch.optim.AdamW([made.first.weight, made.last.weight])
        made, optimizer = gm.prepare(made, optimizer, step_in_backward=True)
        optimizer.add_param_group({"params": [made.last.bias]})
        refused("added", lambda: steps(made, optimizer, "branches", **share(count, rank), count=1))
        return out


def refusals():
    """What is refused on several ranks. Returns the messages."""
    rank, count = rank_and_count()
    out = {}

    def refused(name, function):
        try:
            function()
        except gm.GeminiError as error:
            out[name] = str(error)

    small = {"device": "cpu", "device_memory": "1MiB", "host_memory": "1MiB"}
    refused("zero", lambda: gm.init(zero=4, **small))
    refused("shard_size", lambda: gm.init(shard_size=3, **small))
    refused("shard_sizes", lambda: gm.init(shard_size=1 + rank, **small))
    refused("transport", lambda: gm.init(transport="gloo", **small))
    refused("transports", lambda: gm.init(transport=("auto", "torch")[rank], **small))
    line = torch.distributed.device_mesh.init_device_mesh("cpu", (count,))
    refused("mesh", lambda: gm.init(process_group=line, **small))
    with session():
        made = build("gpt2")
        made.transformer.wpe.weight.grad = torch.ones_like(made.transformer.wpe.weight)
        refused("gradient before", lambda: gm.prepare(made, adamw(made)))
        made.zero_grad()
        refused("adafactor", lambda: gm.prepare(made, torch.optim.Adafactor(made.parameters())))
        refused("another class", lambda: gm.prepare(made, type("Mine", (torch.optim.SGD,), {})(made.parameters())))
        sgd = torch.optim.SGD(made.parameters())
        refused("early", lambda: gm.prepare(made, sgd, step_in_backward=True))
        kept = ("fp32", "split16")[rank]
        refused("kept", lambda: gm.prepare(made, adamw(made), masters=kept))
        made, optimizer = gm.prepare(made, adamw(made))
        refused("second", lambda: gm.prepare(made, adamw(made)))
        weight = made.transformer.wte.weight
        made(**rows("gpt2", 0, **share(count, rank)))["loss"].backward()
        refused("read", lambda: weight.grad[0, 0].item())
        refused("write", lambda: weight.grad.add_(1.0))
        refused("assign", lambda: setattr(weight, "grad", torch.zeros(weight.shape)))
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 + rank)
        refused("options", optimizer.step)
        optimizer.param_groups[0]["lr"] = 1e-3
        optimizer.step()
        refused("state", lambda: optimizer.state[weight]["exp_avg"])
    with session():
        made = build("branches")
        made, optimizer = gm.prepare(made, optimizer_of(made, "NAdam", lr=1e-3))
        steps(made, optimizer, "branches", **share(count, rank), count=1)
        state = optimizer.state[made.last.weight]
        assert sorted(state) == ["exp_avg", "exp_avg_sq", "mu_product", "step"] and state["step"] == 1.0
        refused("sliced state", lambda: state["exp_avg"])
        refused("set state", lambda: optimizer.state.update({made.last.weight: {"step": 1.0}}))
        optimizer.state.clear()
        assert not optimizer.state and not optimizer.state_dict()["state"]
        if rank == 1:
            optimizer.rule.call = None
        try:
            steps(made, optimizer, "branches", **share(count, rank), count=1)
        except (gm.GeminiError, TypeError) as error:
            out["failed"] = str(error)
    return out


def outcome_of(program, arguments):
    try:
        return globals()[program](**arguments)
    except BaseException as error:
        seconds = (time.monotonic_ns() - began.get("ns", 0)) / 1e9
        return {
            "type": type(error).__name__,
            "text": str(error),
            "status": getattr(error, "status", ""),
            "seconds": seconds,
        }


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "RANK_PROGRAMS_FOLDER" in os.environ:  # of temporary files, where all that this process starts works, too
        tempfile.tempdir = os.environ["TMPDIR"] = os.environ["RANK_PROGRAMS_FOLDER"]
        os.chdir(tempfile.tempdir)
    if SECONDS:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
    slicerule.PIECE_ELEMENTS = 1000  # so that parameters are updated in several parts
    program, path, arguments = sys.argv[1:]
    torch.save(outcome_of(program, json.loads(arguments)), path)
    os._exit(0)  # another rank may have ended: nothing is said to it
