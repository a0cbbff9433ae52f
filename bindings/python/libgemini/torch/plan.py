"""A plan before a run: python -m libgemini plan. Says whether a training step fits, how long it takes, and what helps.

The library's own planner makes the plan (forecast.py), from the trace of a step that a model without bytes makes
(steptrace.py) and from the rates of a machine (rates.py).

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import pathlib
import sys
import tempfile
import typing

import torch

from .. import abi
from ..abi import GeminiError
from ..forecast import Forecast, forecast
from ..manager import bytes_text, parse_bytes
from . import rates as _rates, steptrace
from .arenas import chunk_bytes
from .rates import Rates

ACTIVATIONS = ("keep", "checkpoint", "offload", "checkpoint+offload")
RESOURCES = {
    "compute": "compute",
    "fetches": "the link to the device",
    "evicts": "the link from the device",
    "updates": "updates on the host (its cores and its memory)",
    "files": "files",
}
TITLES = {"device": "device", "host": "host", "file": "files"}


@dataclasses.dataclass(frozen=True)
class Request:
    """What is planned.

    Attributes:
        model: A directory with a config.json of transformers.
        device_memory, host_memory, file_memory, margin: Bytes.
        batch, seq: Sequences of a forward pass, and tokens of each.
        dtype: Of the parameters, as in torch.
        accumulation: Forward and backward passes before an update.
        activations: One of ACTIVATIONS.
        cuda: Whether the plan is for a GPU; otherwise for the simulated device.
        placement: As of init().
        chunk_size: Bytes. 0: as init() chooses.
    """

    model: str
    device_memory: int
    host_memory: int
    batch: int
    seq: int
    file_memory: int = 0
    margin: int = 0
    dtype: str = "bfloat16"
    accumulation: int = 1
    activations: str = "keep"
    cuda: bool = True
    placement: str = "auto"
    chunk_size: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.seq * self.accumulation


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of a request: the forecast, and the step that it is made from."""

    request: Request
    step: steptrace.Step
    forecast: Forecast

    @property
    def tokens_per_second(self) -> float:
        """Tokens that are trained each second; 0 where the step does not fit."""
        return self.request.tokens / self.forecast.seconds if self.forecast.fits and self.forecast.seconds else 0.0


def build(request: Request) -> tuple[torch.nn.Module, typing.Callable[[], torch.Tensor]]:
    """Builds a model on the meta device.

    Returns:
        The model, and a function that makes its forward pass and returns the loss.

    Raises:
        GeminiError: There is no such model, or none that takes tokens and labels.
    """
    import transformers

    path = pathlib.Path(request.model)
    if not (path / "config.json").is_file():
        raise GeminiError(f"{path} has no config.json: want a directory of transformers", "NOT_FOUND")
    config = transformers.AutoConfig.from_pretrained(path)
    config.use_cache = False
    most = getattr(config, "max_position_embeddings", None)
    if most and request.seq > most:
        raise GeminiError(
            f"seq is {request.seq}, but the model has {most} positions (max_position_embeddings)", "INVALID"
        )
    names = getattr(config, "architectures", None) or ["AutoModelForCausalLM"]
    kind = getattr(transformers, names[0], transformers.AutoModelForCausalLM)
    kind = kind if hasattr(kind, "_from_config") else transformers.AutoModelForCausalLM
    make = getattr(kind, "_from_config", None) or kind.from_config
    with torch.device("meta"):
        try:
            model = make(config, dtype=getattr(torch, request.dtype))
        except TypeError:  # transformers before 4.56
            model = make(config, torch_dtype=getattr(torch, request.dtype))
    model.train()
    if not {"input_ids", "labels"} <= set(inspect.signature(model.forward).parameters):
        raise GeminiError(
            f"{type(model).__name__} does not take input_ids and labels: it cannot be planned", "UNSUPPORTED"
        )
    ids = torch.zeros(request.batch, request.seq, dtype=torch.long, device="meta")
    return model, lambda: model(input_ids=ids, labels=ids).loss


class Planner:
    """Plans requests that differ in few values; the steps that they share are recorded once."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.steps: dict[tuple[typing.Any, ...], steptrace.Step] = {}

    def plan(self, request: Request) -> Plan:
        """Makes a plan.

        Raises:
            GeminiError: The model cannot be planned, or a value is refused.
        """
        chunk_size = request.chunk_size or chunk_bytes(request.device_memory, request.cuda)
        offload = "offload" in request.activations
        key = (
            request.model,
            request.batch,
            request.seq,
            request.dtype,
            request.accumulation,
            request.activations,
            (request.device_memory, chunk_size) if offload else None,
        )
        if key not in self.steps:
            model, loss = build(request)
            self.steps[key] = steptrace.record(
                model,
                loss,
                self.rates,
                request.device_memory,
                chunk_size,
                request.accumulation,
                "checkpoint" in request.activations,
                offload,
            )
        step = self.steps[key]
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace")
            step.write(path, self.rates, request.device_memory, chunk_size, request.cuda)
            made = forecast(
                path,
                device_memory=request.device_memory,
                host_memory=request.host_memory,
                file_memory=request.file_memory,
                device_margin=request.margin,
                placement=request.placement,
                cuda=request.cuda,
                chunk_size=chunk_size,
                update_threads=self.rates.update_threads,
            )
        return Plan(request, step, made)

    def changes(self, plan: Plan) -> list[tuple[str, Plan]]:
        """Plans with one value changed, each of which fits; where none does, with more host memory besides.

        Args:
            plan: The plan that they are compared with.

        Returns:
            Each change in words and its plan, those that train most tokens a second first.
        """
        request, made = plan.request, plan.forecast
        candidates: list[tuple[str, Request]] = []

        def change(text: str, **values: typing.Any) -> None:
            candidates.append((text, dataclasses.replace(request, **values)))

        needed = made.needed_bytes
        if made.lacks == ("device",) or not made.lacks:
            more = needed["device"] if made.lacks else request.device_memory + request.device_memory // 4
            more = -(-more // (1 << 20)) << 20
            change(f"device memory of {bytes_text(more)} (--device-memory {more >> 20}MiB)", device_memory=more)
        if "host" in made.lacks or request.file_memory:
            more = needed["host"] if "host" in made.lacks else made.model_bytes
            more = -(-max(more, request.host_memory) // (1 << 20)) << 20
            extra = bytes_text(more - request.host_memory)
            if more > request.host_memory:
                change(f"{extra} more host memory (--host-memory {more >> 20}MiB)", host_memory=more)
        if {"host", "file"} & set(made.lacks):
            below = made.model_bytes - request.host_memory
            more = -(-max(below, request.file_memory) // (1 << 20)) << 20
            if more > request.file_memory:
                change(f"{bytes_text(more)} in files (--file-memory {more >> 20}MiB)", file_memory=more)
        for activations in ACTIVATIONS:
            if activations != request.activations:
                change(f"activations: {activations} (--activations {activations})", activations=activations)
        if request.batch > 1 and made.lacks:
            change(f"a batch of {request.batch // 2} (--batch {request.batch // 2})", batch=request.batch // 2)
            change("a batch of 1 (--batch 1)", batch=1)
        if not made.lacks:
            change(f"a batch of {2 * request.batch} (--batch {2 * request.batch})", batch=2 * request.batch)
            passes = 2 * request.accumulation
            change(f"{passes} passes before an update (--accumulation {passes})", accumulation=passes)
        return sorted(self._fitting(candidates), key=lambda pair: -pair[1].tokens_per_second)

    def _fitting(self, candidates: list[tuple[str, Request]]) -> list[tuple[str, Plan]]:
        """Of the candidates those that fit; where none does, those that do with more host memory besides."""
        found, others = [], []
        for text, one in candidates:
            try:
                changed = self.plan(one)
            except GeminiError:  # such as a model without checkpointing
                continue
            if changed.forecast.fits:
                found.append((text, changed))
            elif changed.forecast.lacks == ("host",):
                more = -(-changed.forecast.needed_bytes["host"] // (1 << 20))
                besides = f"{text}, and {bytes_text(more << 20)} of host memory (--host-memory {more}MiB)"
                others.append((besides, dataclasses.replace(one, host_memory=more << 20)))
        return found or [(text, self.plan(one)) for text, one in others]


def report(plan: Plan, changes: list[tuple[str, Plan]], rates: Rates) -> str:
    """The plan in words, for people."""
    request, step, made = plan.request, plan.step, plan.forecast
    lines = [
        f"model: {step.parameters / 1e9:.3g} billion parameters in {request.dtype}; a step of "
        f"{request.accumulation} x {request.batch} x {request.seq} tokens, activations: {request.activations}"
    ]
    budgets = dict(zip(abi.TIERS, (request.device_memory, request.host_memory, request.file_memory)))
    if made.fits:
        lines.append("fits: yes")
    else:
        lacks = [
            f"{TITLES[tier]} memory lacks {bytes_text(made.needed_bytes[tier] - budgets[tier])}" for tier in made.lacks
        ]
        lines.append(f"fits: no; {', '.join(lacks)}")
    lines.append(f"{'memory':8}{'budget':>12}{'needed':>12}{'used':>12}")
    for tier in abi.TIERS:
        values = budgets[tier], made.needed_bytes[tier], made.used_bytes[tier]
        lines.append(f"{TITLES[tier]:8}" + "".join(f"{bytes_text(value) if value else '-':>12}" for value in values))
    lines.append(
        f"activations and other tensors of torch: {bytes_text(step.peak_bytes)} at most"
        + ("" if request.cuda else ", beside the simulated device")
    )
    if made.seconds:
        lines.append(f"a step: {made.seconds:.3g} s, {request.tokens / made.seconds:.4g} tokens a second")
        least = max(made.busy_seconds.values())
        if least < 0.98 * made.seconds and not request.file_memory:
            lines[-1] += f"; not below {least:.3g} s, where updates are computed ahead of the step (speculate)"
        lines.append(f"binds: {RESOURCES.get(made.binds, made.binds)}")
        busy = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in made.busy_seconds.items() if seconds)
        lines.append(f"busy: {busy}")
        lines.append(
            f"moved a step: {bytes_text(made.fetch_bytes)} to the device, {bytes_text(made.evict_bytes)} back"
            + (f", {bytes_text(made.read_bytes)} read from files and written" if made.read_bytes else "")
            + f"; {bytes_text(made.stays_bytes)} of {bytes_text(made.model_bytes)} stay on the device"
        )
    if made.fits:
        better = [pair for pair in changes if pair[1].tokens_per_second > 1.02 * plan.tokens_per_second]
        for text, changed in better[:3]:
            lines.append(
                f"{'helps most' if changed is better[0][1] else 'helps'}: {text}: "
                f"{changed.tokens_per_second / plan.tokens_per_second:.2f} times the tokens a second"
            )
        if not better:
            lines.append("helps most: no single change that was tried gains more than 2 %")
    else:
        for text, changed in changes[:4]:
            seconds = changed.forecast.seconds
            lines.append(f"fits with {text}: {seconds:.3g} s, {changed.tokens_per_second:.4g} tokens a second")
        if not changes:
            lines.append("no change that was tried makes it fit")
    assumed = made.read_bytes and not rates.file_read
    lines.append(f"rates: {rates.source}" + ("; of files 1 GB/s, as none was measured (--file)" if assumed else ""))
    return "\n".join(lines)


def _arguments(argv: typing.Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m libgemini plan",
        description="Says before a run whether a training step fits, how long it takes, what limits it, and which "
        "single change helps most. Exit status: 0 if it fits, 1 if it does not, 2 for an error.",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="a directory with a config.json of transformers")
    add("--device-memory", required=True, metavar="SIZE", help='such as "24GiB", as of gm.init()')
    add("--host-memory", required=True, metavar="SIZE")
    add("--file-memory", default="0", metavar="SIZE")
    add("--margin", default="0", metavar="SIZE", help="of the device memory, left unused")
    add("--batch", type=int, required=True, help="sequences of a forward pass")
    add("--seq", type=int, required=True, help="tokens of a sequence")
    add("--dtype", default="bfloat16", choices=["bf16", "bfloat16", "f16", "float16", "f32", "float32"])
    add("--accumulation", type=int, default=1, metavar="N", help="forward and backward passes before an update")
    add("--activations", default="keep", choices=ACTIVATIONS)
    add("--placement", default="auto", choices=["auto", "cuda", "cpu"])
    add("--chunk-size", default="0", metavar="SIZE")
    add("--device", choices=["gpu", "simulated"], help="default: gpu where there is one, or rates of one are given")
    add("--file", metavar="DIR", help="a directory on the disk whose rates are measured, for --file-memory")
    add("--measure", action="store_true", help="measure rates again, although they are known")
    add("--rates", metavar="FILE", help="rates of another machine, which --save-rates has written there")
    add("--save-rates", metavar="FILE", help="write the rates that are used")
    add("--device-flops", type=float, metavar="N", help="operations a second of matrix products of the dtype")
    add("--device-bandwidth", type=float, metavar="N", help="bytes a second of device memory")
    add("--link", type=float, metavar="N", help="bytes a second between host and device, each way")
    add("--host-updates", type=float, metavar="N", help="parameters that AdamW updates a second on the host")
    add("--file-rate", type=float, metavar="N", help="bytes a second of the disk, each way")
    add("--json", action="store_true", help="print the plan as JSON")
    add("--no-advice", action="store_true", help="plan this one only, and look for nothing that helps")
    return parser.parse_args(argv)


def _rates_of(options: argparse.Namespace, cuda: bool, dtype: str) -> Rates:
    """The rates that the options name; otherwise those of this machine."""
    own = [options.device_flops, options.device_bandwidth, options.link, options.host_updates]
    for name in ("device_flops", "device_bandwidth", "link", "host_updates", "file_rate"):
        value = getattr(options, name)
        if value is not None and not 0 < value < 1e18:
            raise ValueError(f"--{name.replace('_', '-')} is {value}: want a number greater than 0 and below 1e18")
    if options.rates:
        rates = Rates.load(options.rates)
    elif all(own):
        rates = Rates({"float32": own[0]}, own[1], 5e-6, own[2], own[2], own[3], 1, own[1] / 28, source="")
    elif cuda and not torch.cuda.is_available():
        raise GeminiError(
            "this machine has no GPU to measure: give --rates FILE, which --save-rates has written on a machine with "
            "one, or --device-flops, --device-bandwidth, --link and --host-updates",
            "UNSUPPORTED",
        )
    else:
        device = torch.device("cuda" if cuda else "cpu")
        rates = _rates.of_machine(
            device, options.file, options.measure, lambda text: print(f"measuring: {text}", file=sys.stderr)
        )
    if options.device_flops:
        rates.flops = {**rates.flops, dtype: options.device_flops}
    rates.device_memory = options.device_bandwidth or rates.device_memory
    rates.to_device = options.link or rates.to_device
    rates.from_device = options.link or rates.from_device
    rates.host_update = options.host_updates or rates.host_update
    rates.file_read = options.file_rate or rates.file_read
    rates.file_write = options.file_rate or rates.file_write
    if any(own) or options.file_rate:
        rates.source = f"{rates.source}; " * bool(rates.source) + "as given by options"
    return rates


def main(argv: typing.Sequence[str]) -> int:
    """Runs the command. Returns its exit status."""
    options = _arguments(argv)
    names = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
    dtype = names.get(options.dtype, options.dtype)
    cuda = options.device == "gpu" or (
        options.device is None
        and bool(torch.cuda.is_available() or options.rates or options.device_flops or options.link)
    )
    try:
        if min(options.batch, options.seq, options.accumulation) < 1:
            raise ValueError("--batch, --seq and --accumulation are at least 1")
        request = Request(
            model=options.model,
            device_memory=parse_bytes(options.device_memory, "--device-memory"),
            host_memory=parse_bytes(options.host_memory, "--host-memory"),
            file_memory=parse_bytes(options.file_memory, "--file-memory"),
            margin=parse_bytes(options.margin, "--margin"),
            batch=options.batch,
            seq=options.seq,
            dtype=dtype,
            accumulation=options.accumulation,
            activations=options.activations,
            cuda=cuda,
            placement=options.placement,
            chunk_size=parse_bytes(options.chunk_size, "--chunk-size"),
        )
        if not request.host_memory:
            raise ValueError("--host-memory is 0: say how much the run will have")
        rates = _rates_of(options, cuda, dtype)
        if options.save_rates:
            rates.save(options.save_rates)
        planner = Planner(rates)
        plan = planner.plan(request)
        changes = [] if options.no_advice else planner.changes(plan)
    except (GeminiError, ValueError, OSError) as error:
        print(f"python -m libgemini plan: {error}", file=sys.stderr)
        return 2
    if options.json:
        figures = {
            **{key: value for key, value in dataclasses.asdict(plan.forecast).items()},
            "fits": plan.forecast.fits,
            "tokens_per_second": plan.tokens_per_second,
            "changes": [
                {"change": text, "seconds": one.forecast.seconds, "tokens_per_second": one.tokens_per_second}
                for text, one in changes
            ],
        }
        print(json.dumps(figures, indent=2))
    else:
        print(report(plan, changes, rates))
    return 0 if plan.forecast.fits else 1
