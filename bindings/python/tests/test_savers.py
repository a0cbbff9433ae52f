"""Weights that leave a session through other libraries' savers, which read tensors at their addresses, are the weights.

SPDX-License-Identifier: Apache-2.0
"""

import os
import pathlib
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from torch import nn

import libgemini.torch as gm
from conftest import off_the_device, same_bits, sgd
from libgemini.torch import savers

WIDTH, DEPTH = 96, 12  # 442 KiB of parameters
BUDGET = "320KiB"


@pytest.fixture(params=(False, True), ids=("default", "strict"))
def strict(request):
    return request.param


def of_files(folder, suffix=".safetensors"):
    """All tensors of a folder's files."""
    out = {}
    for file in sorted(pathlib.Path(folder).rglob(f"*{suffix}")):
        out.update(safetensors.torch.load_file(file))
    return out


def plain_and_managed(session, make, strict, budget=BUDGET):
    """The state dict of a plain model, as copies, and the same model in a session that cannot hold it, off the
    device."""
    wanted = {name: value.clone() for name, value in make().state_dict().items()}
    assert sum(value.nbytes for value in wanted.values()) > 1.2 * gm._parse_bytes(budget)
    session(budget, strict=strict)
    model = make()
    model, optimizer = gm.prepare(model, sgd(param for param in model.parameters() if param.requires_grad))
    off_the_device()
    return wanted, model, optimizer


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=160,
            hidden_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=128,
            max_position_embeddings=32,
            use_cache=False,
        )
    )


# ---- safetensors
SAVES = {
    "state dict": lambda model, path: safetensors.torch.save_file(model.state_dict(), path),
    "parameters": lambda model, path: safetensors.torch.save_file(dict(model.named_parameters()), path),
    "bytes": lambda model, path: path.write_bytes(safetensors.torch.save(model.state_dict())),
    "save_model": lambda model, path: safetensors.torch.save_model(model, path),
    "cpu": lambda model, path: safetensors.torch.save_file(
        {name: value.detach().cpu().contiguous() for name, value in model.named_parameters()}, path
    ),
    "torch.save": lambda model, path: safetensors.torch.save_file(saved_by_torch(model, path), path),
}


def saved_by_torch(model, path):
    torch.save(model.state_dict(), path.with_suffix(".pt"))
    return torch.load(path.with_suffix(".pt"))


@pytest.mark.parametrize("save", SAVES)
def test_files_of_safetensors_hold_the_weights(session, tmp_path, strict, save):
    wanted, model, _ = plain_and_managed(session, mlp, strict)
    SAVES[save](model, tmp_path / "model.safetensors")
    same_bits(of_files(tmp_path), wanted)


def test_parts_and_gradients_in_files_of_safetensors(session, tmp_path, strict):
    """A part of a weight, a gradient that is scaled when it is read, and plain tensors beside them."""
    wanted, model, _ = plain_and_managed(session, mlp, strict)
    loss = model(torch.ones(2, WIDTH)).square().sum()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    grad = model[0].weight.grad.clone()
    tensors = {
        "part": model[3].weight.detach()[5:9],
        "grad": model[0].weight.grad,
        "plain": torch.arange(4),
        "double": model[1].bias.double(),
    }
    off_the_device()
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors")
    same_bits(
        of_files(tmp_path),
        {"part": wanted["3.weight"][5:9], "grad": grad, "plain": torch.arange(4), "double": wanted["1.bias"].double()},
    )
    assert 0 < grad.norm() <= 1e-2


def test_saving_moves_nothing_to_the_device(session, tmp_path):
    """What is saved is read where it is; a state dict is no copy."""
    _, model, _ = plain_and_managed(session, mlp, True)
    gm.stats_reset()
    state = model.state_dict()
    assert not any(map(sum, (link.values() for link in gm.stats()["moved_bytes"].values())))
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    torch.save(state, tmp_path / "model.pt")
    moved = gm.stats()["moved_bytes"]
    assert not any(moved["host to device"].values()), moved
    with torch.no_grad():
        state["0.weight"].fill_(3.0)
    assert (model[0].weight == 3.0).all(), "writing to a state dict writes to the model"


def test_saving_in_the_middle_of_a_step(session, tmp_path, strict):
    """In hooks of the forward and the backward pass, and before a step that comes of them; the step is as ever."""
    outcomes = []
    for managed in (False, True):
        model = mlp()
        optimizer = sgd(model.parameters())
        if managed:
            session(BUDGET, strict=strict)
            model, optimizer = gm.prepare(model, optimizer)
        files = []

        def save(*_, files=files, model=model):
            files.append(safetensors.torch.save({name: value for name, value in model.state_dict().items()}))

        for _ in range(3):
            handles = [model[4].register_forward_hook(save), model[7].weight.register_hook(save)]
            loss = model(torch.ones(2, WIDTH)).square().sum()
            loss.backward()
            for handle in handles:
                handle.remove()
            save()
            optimizer.step()
            optimizer.zero_grad()
        outcomes.append(files)
    assert len(outcomes[1]) == 9 and outcomes[0] == outcomes[1]
    assert len(set(outcomes[0])) == 3


def test_safetensors_is_as_it_was_without_a_session(session):
    names = [
        name for name in ("_tobytes", "_to_ndarray", "serialize", "serialize_file") if hasattr(safetensors.torch, name)
    ]
    before = [getattr(safetensors.torch, name) for name in names], torch.utils.dlpack.to_dlpack
    session()
    assert before != ([getattr(safetensors.torch, name) for name in names], torch.utils.dlpack.to_dlpack)
    gm.close()
    assert before == ([getattr(safetensors.torch, name) for name in names], torch.utils.dlpack.to_dlpack)


def test_safetensors_of_an_unknown_make_is_refused(session, tmp_path, monkeypatch):
    """A version that reads tensors by other functions: it is asked to save nothing."""
    monkeypatch.setattr(savers, "_READERS", ("_function_of_another_version",))
    _, model, _ = plain_and_managed(session, mlp, False)
    for save in (
        lambda: safetensors.torch.save_file(model.state_dict(), tmp_path / "a"),
        lambda: safetensors.torch.save(dict(model.named_parameters())),
    ):
        with pytest.raises(gm.GeminiError, match=r"safetensors [0-9.]+ reads .* save with libgemini.torch.save\(\)"):
            save()
    assert not os.path.exists(tmp_path / "a")


# ---- DLPack
@pytest.mark.parametrize(
    "leave",
    (
        lambda tensor: torch.to_dlpack(tensor),
        lambda tensor: tensor,
        lambda tensor: torch.utils.dlpack.to_dlpack(tensor),
    ),
)
def test_capsules_of_dlpack_hold_the_weights(session, strict, leave):
    wanted, model, _ = plain_and_managed(session, mlp, strict)
    taken = {name: torch.from_dlpack(leave(value)) for name, value in model.state_dict().items()}
    off_the_device()
    same_bits(taken, wanted)


# ---- what is built on safetensors
@pytest.mark.parametrize("most", ("5GB", "200KB"), ids=("one", "shards"))
def test_save_pretrained_writes_the_weights(session, tmp_path, strict, most):
    wanted, model, _ = plain_and_managed(session, llama, strict, "256KiB")
    model.save_pretrained(tmp_path, max_shard_size=most)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (most == "200KB")
    same_bits(of_files(tmp_path), wanted)
    other = type(model).from_pretrained(tmp_path)
    same_bits(other.state_dict(), wanted)


def test_trainer_writes_the_weights(session, tmp_path, strict):
    transformers = pytest.importorskip("transformers")
    wanted, model, optimizer = plain_and_managed(session, llama, strict, "512KiB")
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    data = [{"input_ids": torch.arange(3, 15), "labels": torch.arange(3, 15)} for _ in range(4)]
    options = transformers.TrainingArguments(
        tmp_path,
        max_steps=2,
        save_steps=1,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        max_grad_norm=0.0,
    )
    trainer = transformers.Trainer(
        model=model,
        args=options,
        train_dataset=data,
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
    )
    trainer.train()
    for step in (1, 2):
        same_bits(of_files(tmp_path / f"checkpoint-{step}"), wanted)
    off_the_device()
    trainer.save_model(tmp_path / "last")
    same_bits(of_files(tmp_path / "last"), wanted)


@pytest.mark.parametrize(
    "save",
    (
        lambda accelerator, model, folder: accelerator.save_model(model, folder),
        lambda accelerator, model, folder: accelerator.save_model(model, folder, "150KB"),
        lambda accelerator, model, folder: accelerator.save_state(folder),
    ),
)
def test_accelerate_writes_the_weights(session, tmp_path, strict, save):
    accelerate = pytest.importorskip("accelerate")
    wanted, model, optimizer = plain_and_managed(session, mlp, strict)
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    off_the_device()
    save(accelerator, model, tmp_path)
    same_bits(of_files(tmp_path), wanted)


@pytest.mark.parametrize("merged", (False, True))
def test_peft_writes_the_weights(session, tmp_path, strict, merged):
    peft = pytest.importorskip("peft")

    def make():
        return peft.get_peft_model(llama(), peft.LoraConfig(target_modules="all-linear", r=8, init_lora_weights=False))

    if merged:
        wanted = {name: value.clone() for name, value in make().merge_and_unload().state_dict().items()}
    else:
        wanted = {name: value.clone() for name, value in peft.get_peft_model_state_dict(make()).items()}
    _, model, _ = plain_and_managed(session, make, strict, "256KiB")
    if merged:
        model = model.merge_and_unload()
        off_the_device()
    model.save_pretrained(tmp_path)
    same_bits(of_files(tmp_path), wanted)


# ---- memory
MEMORY = '''
import sys
import safetensors.torch
import torch
from torch import nn
import libgemini.torch as gm


def peak(function):
  """MiB by which the process grew at most while it ran."""
  def resident(field):
    with open("/proc/self/status") as file:
      return next(int(line.split()[1]) for line in file if line.startswith(field)) // 1024
  with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
  before = resident("VmRSS")
  function()
  return resident("VmHWM") - before


with gm.init(device="cpu", chunk_size="1MiB", device_memory="40MiB", host_memory="300MiB"):
  model = nn.Sequential(*(nn.Linear(1023, 1024) for _ in range(32)))
gm.prepare(model)
state = model.state_dict()
[value.norm() for value in state.values()]
safetensors.torch.save_file({"0.bias": state["0.bias"]}, sys.argv[1])
print(peak(model.state_dict))
print(peak(lambda: safetensors.torch.save_file({name: state[name] for name in list(state)[:16]}, sys.argv[1])))
print(peak(lambda: safetensors.torch.save_file(state, sys.argv[1])))
'''


def test_a_file_takes_memory_for_its_own_tensors_once(tmp_path):
    """128 MB of parameters in 32 layers: a state dict takes none, a file what its tensors take."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "a")], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    state, quarter, whole = map(int, done.stdout.split())
    assert state < 4 and quarter < 32 + 16 and whole < 128 + 16, (state, quarter, whole)
