"""Plans before a run: the trace of a step without bytes is that of a session, the command's figures are what a run then
measures, and what does not fit does not run. On the simulated device.

SPDX-License-Identifier: Apache-2.0
"""

import dataclasses
import importlib
import json
import re
import subprocess
import sys
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")

import libgemini.torch as gm  # noqa: E402
from libgemini.abi import GeminiError  # noqa: E402
from libgemini.forecast import forecast  # noqa: E402
from libgemini.torch import plan, rates as rates_module, steptrace  # noqa: E402
from libgemini.torch.rates import Rates  # noqa: E402
from libgemini.torch.session import device_default, simulated_default  # noqa: E402

CHUNK = 64 << 10
BATCH, SEQ = 2, 32
RATES = Rates({"float32": 2e10, "bfloat16": 1e10}, 1e10, 2e-5, 5e9, 4e9, 1e9, 1, 3e8, source="a test")
ALL = 232 * CHUNK  # parameters, gradients and states of the model below


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with the configuration of a small LLaMA and with rates."""
    path = tmp_path_factory.mktemp("model")
    transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(path)
    RATES.save(path / "rates.json")
    return path


def request(folder, **values):
    values = {"device_memory": 1 << 20, "host_memory": 64 << 20, "batch": BATCH, "seq": SEQ, "cuda": False, **values}
    return plan.Request(model=str(folder), **values)


def train(folder, trace=None, steps=4, dtype=torch.bfloat16, passes=1, checkpoint=False, offload=False, **options):
    """Trains the model. Returns statistics of the last two steps."""
    options = {"device": "cpu", "host_memory": "64MiB", "update_threads": 1, "speculate": False, **options}
    config = transformers.AutoConfig.from_pretrained(folder)
    try:
        with gm.init(units="never", **options):
            model = transformers.LlamaForCausalLM._from_config(config, dtype=dtype)
        if checkpoint:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters()), offload_activations=offload)
        model.train()
        ids = torch.randint(0, 512, (BATCH, SEQ))
        for step in range(steps):
            if step == steps - 2:
                gm.stats_reset()
            for _ in range(passes):
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if trace:
            gm.session().manager.trace_save(trace)
        return gm.stats()
    finally:
        gm.close(force=True)


def operators(path):
    """What a trace says of operators and updates, without times, names of arenas and their order."""
    kinds, out = {}, []
    for line in path.read_text().splitlines():
        word, *rest = line.split()
        if word == "arena":
            kinds[rest[0]] = ".".join((*rest[1:3], rest[5]))
        elif word == "op":
            out.append(["op", rest[0], rest[4]])
        elif word == "use":
            out.append(["use", kinds[rest[0]], *rest[1:]])
        elif word == "update":
            out.append(["update", *rest[:2], *sorted(kinds[part.split(":")[0]] + part[-1] for part in rest[2:])])
    return out


@pytest.mark.parametrize(
    ("dtype", "passes", "checkpoint"),
    [("bfloat16", 1, False), ("float32", 2, False), ("bfloat16", 1, True)],
)
def test_the_trace_is_that_of_a_session(folder, tmp_path, dtype, passes, checkpoint):
    train(
        folder,
        tmp_path / "real",
        steps=2,
        dtype=getattr(torch, dtype),
        passes=passes,
        checkpoint=checkpoint,
        device_memory="2MiB",
        chunk_size=CHUNK,
    )
    values = {"dtype": dtype, "accumulation": passes, "activations": "checkpoint" if checkpoint else "keep"}
    step = plan.Planner(RATES).plan(request(folder, **values)).step
    step.write(tmp_path / "made", RATES, 2 << 20, CHUNK, False)
    assert operators(tmp_path / "made") == operators(tmp_path / "real")
    assert step.flops == pytest.approx(
        6 * step.parameters * BATCH * SEQ * passes * (4 / 3 if checkpoint else 1), rel=0.1
    )


def near(value, wanted):
    return value == pytest.approx(wanted, rel=0.15, abs=2 * CHUNK)


@pytest.mark.parametrize(
    ("placement", "device_memory"), [("cpu", 1 << 20), ("cuda", 512 << 10), ("cuda", 3 << 20), ("cuda", 24 << 20)]
)
def test_the_figures_are_those_of_a_run(folder, capsys, placement, device_memory):
    assert plan.main(options(folder, "--device-memory", str(device_memory), "--placement", placement, "--json")) == 0
    made = json.loads(capsys.readouterr().out)
    stats = train(folder, placement=placement, device_memory=device_memory, chunk_size=CHUNK)
    assert stats["planned_iterations"] == 3
    assert made["needed_bytes"]["host"] == ALL
    used, peak = made["used_bytes"]["device"], stats["peak_bytes"]["device"]
    # Chunks that leave after each operator keep their frames until they are copied, which takes as long as it takes.
    assert used - 2 * CHUNK <= peak <= device_memory if placement == "cpu" else near(used, peak)
    assert near(made["used_bytes"]["host"], stats["peak_bytes"]["host"])
    assert near(made["fetch_bytes"], sum(stats["moved_bytes"]["host to device"].values()) / 2)
    assert near(made["evict_bytes"], sum(stats["moved_bytes"]["device to host"].values()) / 2)


def options(folder, *more):
    known = {"--device-memory": "1MiB", "--host-memory": "64MiB", "--chunk-size": str(CHUNK), "--device": "simulated"}
    known.update(
        {"--model": str(folder), "--rates": str(folder / "rates.json"), "--batch": str(BATCH), "--seq": str(SEQ)}
    )
    flags = [one for one in more if one in ("--json", "--no-advice")]
    pairs = [one for one in more if one not in flags]
    known.update(zip(pairs[::2], pairs[1::2]))
    return [*(part for pair in known.items() for part in pair), *flags]


def test_what_does_not_fit_on_the_device_has_no_plan(folder, capsys):
    assert plan.main(options(folder, "--device-memory", "64KiB")) == 1
    assert "device memory lacks 320.0 KiB" in capsys.readouterr().out
    for memory, status in (6 * CHUNK, 0), (6 * CHUNK - 1, 1):
        assert plan.main(options(folder, "--device-memory", str(memory), "--no-advice")) == status
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            stats = train(folder, steps=3, device_memory=memory, chunk_size=CHUNK)
        assert stats["planned_iterations"] == (2 if status == 0 else 0)
        assert any("there is no plan" in str(one.message) for one in caught) == (status == 1)


def test_what_does_not_fit_on_the_host_does_not_run(folder, capsys):
    assert plan.main(options(folder, "--host-memory", str(ALL), "--no-advice")) == 0
    train(folder, steps=2, host_memory=ALL, device_memory="1MiB", chunk_size=CHUNK)
    assert plan.main(options(folder, "--host-memory", str(ALL - CHUNK))) == 1
    text = capsys.readouterr().out
    assert "fits: no; host memory lacks 64.0 KiB" in text and "fits with" in text
    with pytest.raises(GeminiError) as error:
        train(folder, steps=2, host_memory=ALL - CHUNK, device_memory="1MiB", chunk_size=CHUNK)
    assert error.value.status == "OOM_HOST"


def test_files_take_the_rest(folder, tmp_path, capsys):
    room = {"host_memory": 64 * CHUNK, "device_memory": "2MiB", "chunk_size": CHUNK, "file": tmp_path}
    below = ["--host-memory", str(64 * CHUNK), "--device-memory", "2MiB"]
    assert plan.main(options(folder, *below, "--file-memory", str(ALL - 65 * CHUNK))) == 1
    assert "files memory lacks" in capsys.readouterr().out
    assert plan.main(options(folder, *below, "--file-memory", str(ALL - 64 * CHUNK), "--json", "--no-advice")) == 0
    made = json.loads(capsys.readouterr().out)
    stats = train(folder, file_memory=ALL - 64 * CHUNK, **room)
    assert near(made["used_bytes"]["file"], stats["used_bytes"]["file"])
    assert made["read_bytes"] > 0 and "files" in made["busy_seconds"]
    with pytest.raises(GeminiError) as error:
        train(folder, file_memory=100 * CHUNK, **room)
    assert error.value.status == "OOM_FILE"


def test_activations_in_the_session_take_its_memory(folder):
    kept = plan.Planner(RATES).plan(request(folder, batch=64, device_memory=32 << 20))
    moved = plan.Planner(RATES).plan(request(folder, batch=64, device_memory=32 << 20, activations="offload"))
    assert kept.step.activation_bytes == 0 and moved.step.activation_bytes > 8 << 20
    assert moved.forecast.model_bytes == pytest.approx(
        kept.forecast.model_bytes + moved.step.activation_bytes, abs=CHUNK
    )
    assert moved.step.peak_bytes < kept.step.peak_bytes
    again = plan.Planner(RATES).plan(request(folder, batch=64, activations="checkpoint"))
    assert again.step.peak_bytes < kept.step.peak_bytes / 2


def test_on_a_gpu_tensors_of_torch_take_device_memory(folder):
    planner = plan.Planner(RATES)
    here = planner.plan(request(folder, device_memory=64 << 20, chunk_size=CHUNK))
    there = planner.plan(request(folder, device_memory=64 << 20, chunk_size=CHUNK, cuda=True))
    more = there.forecast.needed_bytes["device"] - here.forecast.needed_bytes["device"]
    assert more == pytest.approx(here.step.peak_bytes, abs=CHUNK) and more > 1 << 20


def test_changes_are_plans_that_fit_and_help(folder, capsys):
    planner = plan.Planner(dataclasses.replace(RATES, host_update=5e5))  # so that updates bind
    one = planner.plan(request(folder, placement="cpu"))
    assert one.forecast.binds == "updates"
    changes = planner.changes(one)
    assert [pair[1].tokens_per_second for pair in changes] == sorted(
        (pair[1].tokens_per_second for pair in changes), reverse=True
    )
    text = plan.report(one, changes, RATES)
    assert re.search(r"helps most: (a batch of 4|2 passes) .*: 1\.[5-9]\d times", text), text
    both = planner.plan(
        request(folder, cuda=True, chunk_size=CHUNK, host_memory=1 << 20, batch=16, device_memory=4 << 20)
    )
    assert both.forecast.lacks == ("device", "host")
    found = planner.changes(both)
    assert found and all(pair[1].forecast.fits and "--host-memory" in pair[0] for pair in found)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--model", "/nowhere"], "/nowhere has no config.json"),
        (["--seq", "4096"], "seq is 4096, but the model has 2048 positions"),
        (["--device-memory", "24 gigs"], "--device-memory is '24 gigs': want"),
        (["--host-memory", "0"], "--host-memory is 0"),
        (["--batch", "0"], "--batch, --seq and --accumulation are at least 1"),
        (["--link", "-1"], "--link is -1.0: want"),
        (["--rates", "/nowhere/rates"], "/nowhere/rates"),
        (["--chunk-size", "3MiB"], "chunk_bytes is 3145728"),
    ],
)
def test_errors_say_what_is_wrong(folder, capsys, more, says):
    assert plan.main(options(folder, *more)) == 2
    assert says in capsys.readouterr().err


def test_models_that_cannot_be_planned_are_refused(folder):
    class Router(torch.nn.Linear):
        def forward(self, x):
            return (super().forward(x) * float(x.sum())).sum()

    model = Router(8, 8, device="meta")
    with pytest.raises(GeminiError, match="without data"):
        steptrace.record(model, lambda: model(torch.empty(2, 8, device="meta")), RATES, 1 << 20, CHUNK)


def test_rates_are_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calls = []
    monkeypatch.setattr(rates_module, "measure", lambda *_: calls.append(1) or RATES)
    device = torch.device("cpu")
    assert rates_module.of_machine(device) == rates_module.of_machine(device) == RATES and len(calls) == 1
    rates_module.of_machine(device, again=True)
    assert len(calls) == 2
    (kept,) = (tmp_path / "cache").rglob("*.json")
    for wrong in "", "{}", '{"version": 1}', kept.read_text().replace('"to_device": 5', '"to_device": -5'):
        kept.write_text(wrong)
        with pytest.raises(ValueError, match=re.escape(str(kept))):
            Rates.load(kept)
        rates_module.of_machine(device)
    assert len(calls) == 6 and Rates.load(kept) == RATES
    assert rates_module.digest(device, None) != rates_module.digest(device, "/proc")


def test_rates_of_this_machine():
    measured = rates_module.measure(torch.device("cpu"))
    assert measured.flops.keys() == {"float32", "bfloat16", "float16"}
    assert all(1e6 < rate < 1e15 for rate in measured.flops.values())
    for rate in measured.device_memory, measured.to_device, measured.from_device, measured.host_update:
        assert 1e6 < rate < 1e13
    assert 1e-7 < measured.operator_seconds < 1e-2


def test_the_command_is_one_of_the_package(folder, capsys, monkeypatch):
    command = [sys.executable, "-m", "libgemini"]
    assert subprocess.run(command, capture_output=True).returncode == 2  # without torch
    monkeypatch.setattr(sys, "argv", ["libgemini", "plan", *options(folder, "--no-advice")])
    assert importlib.import_module("libgemini.__main__").main() == 0
    out = capsys.readouterr().out
    for words in "fits: yes", "binds: compute", "a step: ", "rates: a test", "0.000935 billion parameters":
        assert words in out


# ---- gm.init() without sizes
def test_init_takes_what_is_there():
    with gm.init(device="cpu"):
        pass
    try:
        budgets = gm.stats()["budget_bytes"]
        assert budgets["device"] == simulated_default(budgets["host"]) and budgets["host"] > 1 << 28
    finally:
        gm.close()


def test_a_margin_of_the_gpu_is_left():
    gib = 1 << 30
    assert device_default(24 * gib) == 23 * gib
    assert device_default(128 * gib) == 124 * gib
    with pytest.raises(GeminiError, match="set device_memory"):
        device_default(2 * gib - 1)
    assert simulated_default(1 << 40) == 8 * gib


def test_a_trace_of_a_run_can_be_planned_for_other_budgets(folder, tmp_path):
    train(folder, tmp_path / "trace", device_memory="1MiB", chunk_size=CHUNK)
    made = forecast(tmp_path / "trace", device_memory="24GiB", host_memory="256GiB", placement="cuda")
    assert made.fits and made.stays_bytes == made.model_bytes and not made.fetch_bytes
    with pytest.raises(GeminiError) as error:
        forecast("/nowhere/trace", device_memory="1MiB")
    assert error.value.status == "IO"
