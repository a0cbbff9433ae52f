"""The examples of trainers, on a device that holds 40 % of the model's data, beside themselves without libgemini.

SPDX-License-Identifier: Apache-2.0
"""
import os
import pathlib
import re
import subprocess
import sys
import warnings

import pytest
import torch

import libgemini.torch as gm

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
NAMES = ["trainer", "accelerate", "lightning"]
OURS = re.compile(r"\bgm\b|[Gg]emini")


@pytest.fixture(autouse=True)
def closed(monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  yield
  gm.close()


def source_of(name, optimizer):
  pytest.importorskip({"trainer": "transformers"}.get(name, name))
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
  return names["losses"], values(names["model"])


def ours(code, monkeypatch, size):
  """Runs an example with a budget for this machine in the place of the example's."""
  init = gm.init
  options = {"device": "cpu", "strict": True, "window": "64KiB", "device_memory": size * 2 // 5, "host_memory": "64MiB"}
  if torch.cuda.is_available():
    options = {"window": "2MiB", "device_memory": max(size * 2 // 5, 32 << 20), "host_memory": "256MiB",
               "allocator": "torch"}
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
  resumed, more = again(code, "trainer.train()", "trainer.train(resume_from_checkpoint='checkpoints/checkpoint-3')",
                        monkeypatch, size)
  assert more[-4:] == losses[-4:]  # steps 4 to 6, and the evaluation
  for key, value in whole.items():
    assert torch.equal(resumed[key], value), key


def test_lightning_goes_on_from_a_checkpoint_of_its_own_to_the_bit(monkeypatch):
  code, size = source_of("lightning", "AdamW"), 3 << 20
  whole, losses = again(code, "max_epochs=2", "max_epochs=2", monkeypatch, size)
  again(code, "max_epochs=2", "max_epochs=1", monkeypatch, size)
  file, = pathlib.Path("checkpoints").glob("epoch=0*.ckpt")
  resumed, more = again(code, "trainer.fit(model, loader, loader)",
                        f"trainer.fit(model, loader, loader, ckpt_path={str(file)!r})", monkeypatch, size)
  for key, value in whole.items():
    assert torch.equal(resumed[key], value), key


SCRIPT = """
import os, sys, torch
import torch.distributed as dist
import libgemini.torch as gm
if "RANK" in os.environ:
  dist.init_process_group("gloo")
  assert dist.get_world_size() == 1 and dist.get_rank() == int(os.environ["RANK"]) == 0
torch.manual_seed(0)
gm.init(device="cpu", strict=True, window="64KiB", device_memory="512KiB", host_memory="16MiB")
model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(6)))
model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
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


def test_script_is_the_same_under_torchrun(tmp_path):
  script = tmp_path / "script.py"
  script.write_text(SCRIPT)
  lines = []
  torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
  for command in [[sys.executable], [sys.executable, *torchrun]]:
    done = subprocess.run(command + [str(script)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines.append([line for line in done.stdout.splitlines() if line.startswith("loss")])
  assert len(lines[0]) == 4 and lines[0] == lines[1]
