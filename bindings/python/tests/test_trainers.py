"""The examples of trainers, on a device that holds 40 % of the model's data, beside themselves without libgemini.

SPDX-License-Identifier: Apache-2.0
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import warnings

import pytest
import torch

import libgemini.torch as gm

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
NAMES = ["trainer", "sft", "accelerate", "lightning", "loop"]
LIBRARIES = {"trainer": "transformers", "sft": "trl", "loop": "transformers"}
OURS = re.compile(r"\bgm\b|[Gg]emini")


@pytest.fixture(autouse=True)
def closed(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    yield
    gm.close()


def source_of(name, optimizer):
    pytest.importorskip(LIBRARIES.get(name, name))
    title, code = (EXAMPLES / f"with_{name}.py").read_text().split('"""\n', 1)
    return code.replace("torch.optim.AdamW(", f"torch.optim.{optimizer}(")


def without(code):
    """The script as it was before somebody added libgemini: the lines that name it are gone."""
    lines = code.splitlines()
    kept = [line for line in lines if not OURS.search(line)]
    assert 3 <= len(lines) - len(kept) <= 5, "a few lines"
    return "\n".join(kept)


def execute(code):
    names = {"__name__": "example"}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")  # schedulers see that optimizers step
        exec(compile(code, "example", "exec"), names)
    return names


def values(model):
    return {name: param.detach().clone().cpu() for name, param in model.named_parameters()}


def plain(code):
    names = execute(without(code))
    for file in pathlib.Path().glob("*.pt"):
        file.unlink()  # ours begins anew
    return names["losses"], values(names["model"])


def ours(code, monkeypatch, size):
    """Runs an example with a budget for this machine in the place of the example's."""
    init = gm.init
    options = {
        "device": "cpu",
        "strict": True,
        "chunk_size": "64KiB",
        "device_memory": size * 2 // 5,
        "host_memory": "64MiB",
    }
    if torch.cuda.is_available():
        options = {
            "chunk_size": "2MiB",
            "device_memory": max(size * 2 // 5, 32 << 20),
            "host_memory": "256MiB",
            "allocator": "torch",
        }
    with monkeypatch.context() as patch:
        patch.setattr(gm, "init", lambda **_: init(**options))
        return execute(code)


def data_bytes(weights):
    """Of parameters, gradients and AdamW's states, in fp32."""
    return sum(value.numel() for value in weights.values()) * 16


@pytest.mark.parametrize("name", NAMES)
def test_example_trains_to_the_bit_like_the_script_without_libgemini(name, monkeypatch):
    code = source_of(name, "SGD")
    losses, weights = plain(code)
    assert len(set(losses)) >= 8
    names = ours(code, monkeypatch, data_bytes(weights))
    assert names["losses"] == losses
    for key, value in values(names["model"]).items():
        assert torch.equal(value, weights[key]), key


@pytest.mark.parametrize("name", NAMES)
def test_example_trains_within_the_budget_and_rounding(name, monkeypatch):
    code = source_of(name, "AdamW")
    losses, weights = plain(code)
    names = ours(code, monkeypatch, data_bytes(weights))
    stats = gm.stats()
    assert stats["planned_iterations"] > 0
    assert all(record.step == 6 for record in gm.session().records), "the C library's AdamW makes the steps"
    if not torch.cuda.is_available():
        assert stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"] <= 0.4 * stats["model_bytes"]
    # Each step rounds a weight a few times, by half a unit in its last place; a wrong rate of 1 % would be 1e-5 a step.
    largest = max(value.abs().max().item() for value in weights.values())
    bound = 4 * len(losses) * torch.finfo(torch.float32).eps * largest
    for key, value in values(names["model"]).items():
        assert (value - weights[key]).abs().max() <= bound, key


def again(code, before, after, monkeypatch, size):
    """Runs an example, changed, in a session of its own; returns its weights and losses."""
    assert before in code
    names = ours(code.replace(before, after), monkeypatch, size)
    out = values(names["model"]), names["losses"]
    gm.close()
    return out


def test_trainer_goes_on_from_a_checkpoint_to_the_bit(monkeypatch):
    code, size = source_of("trainer", "AdamW"), 4 << 20
    whole, losses = again(code, "trainer.train()", "trainer.train()", monkeypatch, size)
    assert sorted(os.listdir("checkpoints")) == ["checkpoint-3", "checkpoint-6"]
    assert not os.path.exists("checkpoints/checkpoint-3/optimizer.pt"), "Trainer wrote one of its own"
    resumed, more = again(
        code, "trainer.train()", "trainer.train(resume_from_checkpoint='checkpoints/checkpoint-3')", monkeypatch, size
    )
    assert more[-4:] == losses[-4:]  # steps 4 to 6, and the evaluation
    for key, value in whole.items():
        assert torch.equal(resumed[key], value), key


def test_lightning_goes_on_from_a_checkpoint_of_its_own_to_the_bit(monkeypatch):
    code, size = source_of("lightning", "AdamW"), 3 << 20
    whole, losses = again(code, "max_epochs=2", "max_epochs=2", monkeypatch, size)
    again(code, "max_epochs=2", "max_epochs=1", monkeypatch, size)
    (file,) = pathlib.Path("checkpoints").glob("epoch=0*.ckpt")
    resumed, more = again(
        code,
        "trainer.fit(model, loader, loader)",
        f"trainer.fit(model, loader, loader, ckpt_path={str(file)!r})",
        monkeypatch,
        size,
    )
    for key, value in whole.items():
        assert torch.equal(resumed[key], value), key


def test_a_loop_goes_on_from_a_checkpoint_to_the_bit(monkeypatch):
    """torch.save() has written it. A training without libgemini goes on from it as well."""
    code, size, begin = (
        source_of("loop", "AdamW").replace("total = EPOCHS", "total = 2"),
        4 << 20,
        "first, losses = 0, []",
    )
    whole, losses = again(code, begin, begin, monkeypatch, size)
    os.unlink("checkpoint.pt")
    _, first = again(code, begin, f"{begin}; EPOCHS = 1", monkeypatch, size)
    assert first == losses[:4]
    shutil.copy("checkpoint.pt", "kept.pt")
    resumed, second = again(code, begin, begin, monkeypatch, size)
    assert second == losses[4:]
    for key, value in whole.items():
        assert torch.equal(resumed[key], value), key
    shutil.copy("kept.pt", "checkpoint.pt")
    assert execute(without(code))["losses"] == pytest.approx(second, rel=1e-5)


def test_moving_a_model_to_where_it_is_moves_nothing():
    gm.init(device="cpu", strict=True, chunk_size="64KiB", device_memory="1MiB", host_memory="4MiB")
    model = gm.prepare(torch.nn.Linear(64, 64))
    weight = model.weight
    assert model.to("cpu:0") is model and model.weight is weight
    assert weight.to("cpu") is weight and weight.to(torch.float32) is weight and weight.to(torch.zeros(1)) is weight
    assert gm.stats()["acquire_hits"] + gm.stats()["acquire_misses"] == 0
    for copy in weight.to("cpu", torch.float32, False, True), weight.to("cpu", copy=True), weight.to(torch.float64):
        assert copy is not weight and torch.equal(copy.float(), weight)
    with pytest.raises(gm.GeminiError, match="weight would be moved"):
        model.to(torch.float16)


SCRIPT = """
import os, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import libgemini.torch as gm
if "RANK" in os.environ:
  dist.init_process_group("gloo")
torch.manual_seed(0)
gm.init(device="cpu", strict=True, chunk_size="64KiB", device_memory="512KiB", host_memory="16MiB")
model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(6)))
model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
if dist.is_initialized():
  model = DistributedDataParallel(model)
  assert model.module[0].weight is next(model.parameters())
for step in range(4):
  loss = model(torch.randn(8, 128)).square().mean()
  loss.backward()
  optimizer.step()
  optimizer.zero_grad()
  total = loss.detach().clone()
  if dist.is_initialized():
    dist.all_reduce(total)
  print("loss", total.item().hex())
gm.close()
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def run_script(path, *command):
    done = subprocess.run([sys.executable, *command, str(path)], capture_output=True, text=True, timeout=900)
    return done.returncode, done.stdout + done.stderr


def test_script_is_the_same_under_torchrun(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    runs = []
    for command in [], [*TORCHRUN, "1"]:
        status, said = run_script(script, *command)
        assert status == 0, said
        runs.append([line for line in said.splitlines() if line.startswith("loss")])
    assert len(runs[0]) == 4 and runs[0] == runs[1]


def test_several_processes_around_a_model_of_one_are_refused(tmp_path):
    script = tmp_path / "script.py"
    alone = "[dist.new_group([rank]) for rank in range(2)][dist.get_rank()]"
    script.write_text(SCRIPT.replace("gm.init(", f"gm.init(process_group={alone}, "))
    status, said = run_script(script, *TORCHRUN, "2")
    assert status != 0 and "DistributedDataParallel of 2 processes around a model whose session has 1" in said


def test_accelerate_is_the_same_under_torchrun(tmp_path, monkeypatch):
    """It wraps the model in DistributedDataParallel there, also of one process."""
    code = source_of("accelerate", "SGD")
    losses, weights = plain(code)
    budget = 'device="cpu", strict=True, chunk_size="64KiB", host_memory="64MiB", device_memory='
    script = tmp_path / "script.py"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    script.write_text(code.replace("device_memory=", budget).replace('"20GiB"', str(data_bytes(weights) * 2 // 5)))
    status, said = run_script(script, *TORCHRUN, "1")
    assert status == 0, said
    assert str(losses) in said
