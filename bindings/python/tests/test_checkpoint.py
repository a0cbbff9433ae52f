"""Checkpoints: to transformers and back, resumed to the bit, whole after a kill at any point, damage noticed.

SPDX-License-Identifier: Apache-2.0
"""

import ctypes
import json
import os
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import libgemini.torch as gm
from again import again
from libgemini import abi
from libgemini.torch import checkpoint, tensorfile
from libgemini.torch.arenas import Place
from libgemini.torch.progress import Progress
from libgemini.torch.tensors import ManagedParameter

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def closed():
    yield
    gm.close()


def open_session(**more):
    gm.close()
    return gm.init(
        **{
            "device": "cpu",
            "strict": True,
            "chunk_size": "64KiB",
            "device_memory": "32MiB",
            "host_memory": "128MiB",
            **more,
        }
    )


class Net(nn.Module):
    """Two tied layers, a layer without gradient, a saved buffer and one that is not."""

    def __init__(self, width=96):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.tied = nn.Linear(width, width)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.drop = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("passing", torch.ones(3), persistent=False)

    def forward(self, x):
        return self.norm(self.frozen(self.drop(torch.tanh(self.tied(torch.tanh(self.first(x)))))))


def make(seed, kind="adamw", dtype=torch.float32):
    torch.manual_seed(seed)
    model = Net().to(dtype)
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0}]

    def adamw():
        return torch.optim.AdamW(groups, lr=1e-2)

    optimizer = {
        "adamw": adamw,
        "early": adamw,
        "sgd": lambda: torch.optim.SGD(groups, lr=1e-1),
        "momentum": lambda: torch.optim.SGD(groups, lr=1e-1, momentum=0.9),
        "amsgrad": lambda: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True),
        "adafactor": lambda: torch.optim.Adafactor(groups, lr=1e-2),
    }[kind]()
    return gm.prepare(model, optimizer, step_in_backward=kind == "early")


def train(model, optimizer, steps, scheduler=None):
    losses = []
    dtype = next(model.parameters()).dtype
    for step in steps:
        x = torch.randn(4, 96, generator=torch.Generator().manual_seed(step)).to(dtype)
        loss = (model(x).float() - x.float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
        losses.append(loss.item())
    return losses


def values(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(ours, theirs):
    assert ours.keys() == theirs.keys() and ours
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype and torch.equal(value, theirs[name]), name


# ---- resumed to the bit
WHOLE = 96 * 96 * 3 * 16  # bytes: roughly, of what AdamW needs
BUDGETS = {
    "host": {"device_memory": WHOLE * 2 // 5 + (1 << 18), "host_memory": WHOLE + (1 << 20)},
    "file": {"device_memory": WHOLE // 5 + (1 << 18), "host_memory": WHOLE // 5 + (1 << 18), "file_memory": "64MiB"},
}
KINDS = [
    ("adamw", torch.float32),
    ("adamw", torch.bfloat16),
    ("early", torch.float32),
    ("early", torch.bfloat16),
    ("sgd", torch.float32),
    ("momentum", torch.bfloat16),
    ("amsgrad", torch.float32),
    ("adafactor", torch.float32),
]


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind, dtype", KINDS, ids=[f"{kind}-{str(dtype)[6:]}" for kind, dtype in KINDS])
def test_resume_gives_same_losses_and_parameters(tmp_path, budget, kind, dtype):
    config = dict(BUDGETS[budget], file=str(tmp_path) if budget == "file" else None)
    folder = tmp_path / "checkpoint"

    def schedulers(optimizer):
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5)

    open_session(**config)
    model, optimizer = make(1, kind, dtype)
    scheduler = schedulers(optimizer)
    train(model, optimizer, range(3), scheduler)
    gm.save(folder, model, optimizer, extra={"step": 3, "scheduler": scheduler.state_dict()})
    wanted = train(model, optimizer, range(3, 6), scheduler)
    after = values(model)

    open_session(**config)
    model, optimizer = make(2, kind, dtype)
    scheduler = schedulers(optimizer)
    extra = gm.load(folder, model, optimizer)
    scheduler.load_state_dict(extra["scheduler"])
    assert train(model, optimizer, range(extra["step"], 6), scheduler) == wanted
    same(values(model), after)
    assert wanted[0] != wanted[1] != wanted[2]


def test_resume_where_device_and_host_hold_the_model_only_together(tmp_path, monkeypatch):
    """36 chunks of parameters, gradients and momentum on 34 of the device and 14 of the host, part of which is
    taken."""
    modes = []
    by_device = Place.device_pieces
    monkeypatch.setattr(
        Place, "device_pieces", lambda place, mode, *size: modes.append(mode) or by_device(place, mode, *size)
    )
    monkeypatch.setattr(tensorfile, "PIECE_BYTES", 1 << 14)

    def start(seed):
        open_session(device_memory=34 << 16, host_memory=14 << 16, placement="cuda")
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(127, 128) if number % 2 else nn.Linear(128, 127) for number in range(12)))
        return gm.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def run(model, optimizer, steps):
        losses = []
        for step in steps:
            loss = model(torch.randn(2, 128, generator=torch.Generator().manual_seed(step))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer = start(1)
    run(model, optimizer, range(4))
    lib, handle, blocks = gm.session().lib, gm.session().handle, []
    with pytest.raises(gm.GeminiError, match="host memory"):
        while True:  # until there is nothing on the host that is not there alone
            block = ctypes.c_void_p()
            lib.host_alloc(handle, 1 << 16, 0, block)
            blocks.append(block)
    gm.save(tmp_path / "a", model, optimizer)
    assert set(modes) == {abi.READ}
    for block in blocks:
        lib.host_free(handle, block)
    wanted = run(model, optimizer, range(4, 8))
    model, optimizer = start(2)
    run(model, optimizer, range(2))
    gm.load(tmp_path / "a", model, optimizer)
    assert set(modes) == {abi.READ, abi.WRITE}
    assert run(model, optimizer, range(4, 8)) == wanted


@pytest.mark.parametrize("loads", (gm.load, lambda folder, model: gm.load_weights(model, folder)))
def test_backward_pass_over_what_load_has_replaced_is_refused(tmp_path, loads):
    """As it is after load_state_dict()."""
    gm.init(device="cpu", strict=True, chunk_size="64KiB", device_memory="1MiB", host_memory="16MiB")
    model = gm.prepare(nn.Sequential(nn.Linear(96, 96), nn.Linear(96, 96)))
    gm.save(tmp_path / "c", model)
    loss = model(torch.ones(2, 96)).sum()
    loads(tmp_path / "c", model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model(torch.ones(2, 96)).sum().backward()


def test_load_into_optimizer_that_has_stepped_takes_it_back(tmp_path):
    open_session()
    for kind in ("adamw", "momentum"):
        model, optimizer = make(1, kind)
        gm.save(tmp_path / "fresh", model, optimizer)
        first = train(model, optimizer, range(2))
        gm.save(tmp_path / "later", model, optimizer)
        second = train(model, optimizer, range(2, 4))
        gm.load(tmp_path / "fresh", model, optimizer)
        assert train(model, optimizer, range(2)) == first
        gm.load(tmp_path / "later", model, optimizer)
        assert train(model, optimizer, range(2, 4)) == second


def test_states_that_an_optimizer_makes_by_itself_live_in_arenas():
    """SGD's momentum begins as a copy of a gradient."""
    open_session()
    torch.manual_seed(1)
    model = nn.Linear(64, 64)
    plain = nn.Linear(64, 64)
    plain.load_state_dict(model.state_dict())
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = gm.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    x = torch.randn(4, 64)
    for _ in range(3):
        for one, other in ((model, optimizer), (plain, theirs)):
            one(x).square().mean().backward()
            other.step()
            other.zero_grad()
        same(values(model), values(plain))
    places = [optimizer.rule.states(record)["momentum_buffer"] for record in optimizer.records]
    assert all(isinstance(place, Place) for place in places) and places[0].read().any()
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    assert not places[0].read().any() and not any(map(optimizer.rule.states, optimizer.records))


def test_weights_alone_renew_masters(tmp_path):
    open_session()
    model, optimizer = make(1, "adamw", torch.bfloat16)
    gm.save(tmp_path / "a", model)
    weights = values(model)
    train(model, optimizer, range(3))
    gm.load(tmp_path / "a", model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, range(1))
    now = values(model)
    same(
        {name: now[name] for name, _ in model.named_parameters()},
        {name: weights[name] for name, _ in model.named_parameters()},
    )


def test_caller_extra_that_cannot_be_read_safely_is_refused(tmp_path):
    open_session()
    model, optimizer = make(1)
    with pytest.raises(gm.GeminiError, match="extra"):
        gm.save(tmp_path / "a", model, optimizer, extra={"function": test_weights_alone_renew_masters})
    assert os.listdir(tmp_path) == []


# ---- torch's own layout
@pytest.mark.parametrize("kind", ["adamw", "momentum", "amsgrad"])
def test_state_dict_goes_to_torch_and_back(kind):
    open_session()
    model, optimizer = make(1, kind)
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    assert all(
        not value.is_shared() and type(value) is torch.Tensor
        for part in state["state"].values()
        for value in part.values()
    )
    plain = Net()
    params = [param for param in plain.parameters() if param.requires_grad]
    theirs = {
        "adamw": torch.optim.AdamW,
        "amsgrad": lambda groups: torch.optim.AdamW(groups, amsgrad=True),
        "momentum": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    }[kind]([{"params": params[:2]}, {"params": params[2:]}])
    theirs.load_state_dict(state)
    weights, rng = values(model), torch.get_rng_state()
    wanted = train(model, optimizer, range(2, 4))

    open_session()
    model, optimizer = make(2, kind)
    model.load_state_dict(weights)
    optimizer.load_state_dict(theirs.state_dict())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    torch.set_rng_state(rng)
    assert train(model, optimizer, range(2, 4)) == wanted
    with pytest.raises(gm.GeminiError, match=r"groups of \[1, 4\] parameters"):
        state["param_groups"][0]["params"], state["param_groups"][1]["params"] = [0], [1, 2, 3, 4]
        optimizer.load_state_dict(state)


# ---- transformers
def causal(name, dtype=torch.float32):
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=160, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32)
    if name == "opt":
        config = transformers.OPTConfig(**sizes, ffn_dim=128, word_embed_proj_dim=64, dropout=0.0)
    elif name == "llama":
        config = transformers.LlamaConfig(**sizes, intermediate_size=128, num_key_value_heads=2)
    else:
        config = transformers.MixtralConfig(
            **sizes, intermediate_size=128, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
        )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


IDS = torch.randint(3, 160, (2, 12), generator=torch.Generator().manual_seed(0))


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.clone()


@pytest.mark.parametrize("name, dtype", [("opt", torch.float32), ("llama", torch.bfloat16), ("mixtral", torch.float32)])
def test_saved_model_is_plain_transformers_to_the_bit(tmp_path, name, dtype):
    open_session()
    torch.manual_seed(1)
    model = causal(name, dtype)
    model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    gm.save(tmp_path / "a", model, optimizer, max_shard="100KB")
    wanted = logits(model)
    gm.close()
    plain, info = type(model).from_pretrained(tmp_path / "a", output_loading_info=True)
    assert not any(info.values()), info
    assert plain.dtype == dtype and torch.equal(logits(plain), wanted)
    with open(tmp_path / "a" / "model.safetensors.index.json") as file:
        index = json.load(file)
    assert len(set(index["weight_map"].values())) > 1
    assert ("lm_head.weight" in index["weight_map"]) == (not plain.config.tie_word_embeddings)
    assert plain.config.architectures == [type(model).__name__]


def test_files_are_what_safetensors_reads(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    open_session()
    model = nn.Module()
    for number, dtype in enumerate(tensorfile.NAMES):
        model.register_buffer(f"of{number}", torch.arange(7).view(1, 7).to(dtype))
    model.register_buffer("empty", torch.empty(0, 3))
    model.register_buffer("scalar", torch.tensor(True))
    model.register_buffer("transposed", torch.arange(6.0).view(2, 3).t())
    model.managed = nn.Parameter(torch.arange(3, dtype=torch.bfloat16))
    model = gm.prepare(model)
    wanted = values(model)
    gm.save(tmp_path / "a", model)
    same(library.load_file(tmp_path / "a" / "model.safetensors"), wanted)
    for entry in tensorfile.read_header(tmp_path / "a" / "model.safetensors").values():
        assert entry.offset % entry.dtype.itemsize == 0
    library.save_file(
        {name: value.contiguous() for name, value in wanted.items()}, tmp_path / "a" / "model.safetensors"
    )
    for value in model.state_dict().values():
        value.zero_()
    gm.load(tmp_path / "a", model, verify=False)
    same(values(model), wanted)


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_model_saved_by_transformers_loads(tmp_path, name):
    plain = causal(name)
    wanted = logits(plain)
    plain.save_pretrained(tmp_path / "a", max_shard_size="100KB")
    plain.base_model.save_pretrained(tmp_path / "base")
    open_session()
    model = gm.prepare(causal(name))
    assert not torch.equal(logits(model), wanted)
    assert gm.load(tmp_path / "a", model) is None
    assert torch.equal(logits(model), wanted)
    if name == "opt":  # all of it is in the base model, whose names lack a prefix
        other = gm.prepare(causal(name))
        gm.load(tmp_path / "base", other)
        assert torch.equal(logits(other), wanted)


@pytest.mark.parametrize("name", ["opt", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("buffers", ["meta", "real"])
def test_model_on_meta_is_loaded_from_file(tmp_path, name, dtype, buffers):
    plain = causal(name)
    plain.save_pretrained(tmp_path / "a", max_shard_size="100KB")
    plain = type(plain).from_pretrained(tmp_path / "a", dtype=dtype)
    wanted = logits(plain)
    open_session(device_memory="192KiB", host_memory="128KiB", file_memory="16MiB", file=str(tmp_path))
    with (
        torch.device("meta")
        if buffers == "meta"
        else pytest.importorskip("accelerate").init_empty_weights(include_buffers=False)
    ):
        model = causal(name, dtype)
    gm.load_weights(model, tmp_path / "a")
    gm.prepare(model)
    assert all(type(param) is ManagedParameter for param in model.parameters())
    assert torch.equal(logits(model), wanted)
    if name == "llama":
        same(dict(model.named_buffers()), dict(plain.named_buffers()))
    stats = gm.stats()
    assert stats["peak_bytes"]["file"] > 0 and stats["peak_bytes"]["host"] <= 128 << 10


def test_parameters_of_a_meta_model_lie_in_its_order(tmp_path):
    """And not in that of the file, where 10 comes before 2: ranks add gradients from the last place to the first."""
    library = pytest.importorskip("safetensors.torch")
    saved = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
    library.save_file(saved.state_dict(), tmp_path / "model.safetensors")
    open_session()
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
    gm.load_weights(model, tmp_path)
    places = [param._gm_record.place.offset for param in model.parameters()]
    assert places == sorted(places)
    for param, other in zip(model.parameters(), saved.parameters()):
        assert torch.equal(param, other)


def test_optimizer_made_from_meta_parameters_keeps_them(tmp_path):
    open_session()
    model, optimizer = make(1)
    gm.save(tmp_path / "a", model)
    weights = values(model)
    wanted = train(model, optimizer, range(2))
    with torch.device("meta"):
        model = Net()
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(
        [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0}], lr=1e-2
    )
    with pytest.raises(gm.GeminiError, match="buffer passing is on the meta device"):
        gm.load_weights(model, tmp_path / "a")
    model.passing = torch.ones(3)
    model.first.weight.note = "mine"
    gm.load_weights(model, tmp_path / "a")
    assert model.first.weight.note == "mine" and model.tied.weight is model.first.weight
    same(values(model), weights)
    model, optimizer = gm.prepare(model, optimizer)
    torch.manual_seed(1)
    Net()
    assert train(model, optimizer, range(2)) == wanted


def test_from_pretrained_within_init_brings_in_tensor_by_tensor(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    plain = causal("mixtral")
    plain.save_pretrained(tmp_path / "a")
    wanted = logits(plain)
    original = transformers.PreTrainedModel.__dict__["from_pretrained"]
    loading = sys.modules["transformers.core_model_loading"]
    monkeypatch.setattr(loading, "ThreadPoolExecutor", lambda *_, **__: pytest.fail("tensors are read ahead"))
    with open_session() as session:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
        assert all(type(param) is ManagedParameter for param in model.parameters())
        assert len(session.records) == len(list(model.parameters()))
    gm.prepare(model)
    assert torch.equal(logits(model), wanted)
    assert transformers.PreTrainedModel.__dict__["from_pretrained"] is original
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ


def test_from_pretrained_on_cpu_is_prepared(tmp_path):
    plain = causal("opt")
    plain.save_pretrained(tmp_path / "a")
    wanted = logits(plain)
    open_session()
    model = gm.prepare(type(plain).from_pretrained(tmp_path / "a"))
    assert type(model.lm_head.weight) is ManagedParameter
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert torch.equal(logits(model), wanted)


# ---- damage
def _flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        file.write(bytes([byte ^ 1]))


def _rewrite(path, change):
    """Changes a safetensors file's header."""
    with open(path, "rb") as file:
        data = file.read()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data[8 + length :])


def _rename(header, old, new):
    header[new] = header.pop(old)


def _shape(header, name):
    header[name]["shape"] = [48, 192]


DAMAGES = {
    "a bit of a weight": (lambda f: _flip(f / "model.safetensors", -1), r"model.safetensors: \S+ is damaged"),
    "a bit of a state": (lambda f: _flip(f / "optimizer.safetensors", -5), r"optimizer.safetensors: \S+ is damaged"),
    "the last byte is gone": (
        lambda f: os.truncate(f / "model.safetensors", os.path.getsize(f / "model.safetensors") - 1),
        r"model.safetensors is not a complete safetensors file: it has \d+ bytes",
    ),
    "more bytes than tensors": (lambda f: open(f / "model.safetensors", "ab").write(b"more"), "its tensors end at"),
    "only a header": (lambda f: os.truncate(f / "optimizer.safetensors", 200), "its first 8 say that the header"),
    "an empty file": (lambda f: os.truncate(f / "model.safetensors", 0), "it has 0 bytes"),
    "a bit of the header's length": (lambda f: _flip(f / "model.safetensors", 5), "its first 8 say that the header"),
    "a bit of the header": (lambda f: _flip(f / "model.safetensors", 8), "its header is damaged"),
    "no weights": (lambda f: os.unlink(f / "model.safetensors"), "holds neither model.safetensors nor"),
    "no states": (lambda f: os.unlink(f / "optimizer.safetensors"), "holds neither optimizer.safetensors nor"),
    "no groups": (lambda f: os.unlink(f / "training.pt"), "holds no state of an optimizer"),
    "a bit of the groups": (lambda f: _flip(f / "training.pt", 700), "training.pt is damaged: its checksum"),
    "the mark": (lambda f: _flip(f / "libgemini.json", 0), "libgemini.json is damaged"),
    "a weight that is missing": (
        lambda f: _rewrite(f / "model.safetensors", lambda h: _rename(h, "frozen.weight", "other")),
        "lacks 1 of the model's tensors, first frozen.weight",
    ),
    "a state that is missing": (
        lambda f: _rewrite(f / "optimizer.safetensors", lambda h: _rename(h, "first.weight.exp_avg", "other")),
        "lack first.weight.exp_avg",
    ),
    "a weight of another shape": (
        lambda f: _rewrite(f / "model.safetensors", lambda h: _shape(h, "first.weight")),
        r"first.weight has shape \(48, 192\), in the model it has \(96, 96\)",
    ),
    "a state of another shape": (
        lambda f: _rewrite(f / "optimizer.safetensors", lambda h: _shape(h, "first.weight.exp_avg")),
        r"first.weight.exp_avg has shape \(48, 192\), the parameter has \(96, 96\)",
    ),
    "a weight of no float": (
        lambda f: _rewrite(f / "model.safetensors", lambda h: h["first.weight"].update(dtype="I32")),
        "first.weight is of torch.int32, in the model it is of torch.float32",
    ),
    "a state of another dtype": (
        lambda f: _rewrite(f / "optimizer.safetensors", lambda h: h["first.weight.exp_avg"].update(dtype="I32")),
        "exp_avg to be loaded is of torch.int32",
    ),
    "a dtype nobody knows": (
        lambda f: _rewrite(f / "model.safetensors", lambda h: h["first.weight"].update(dtype="X")),
        "first.weight is of dtype X",
    ),
    "offsets beyond the end": (
        lambda f: _rewrite(
            f / "model.safetensors",
            lambda h: h["first.weight"].update(data_offsets=[n + (1 << 40) for n in h["first.weight"]["data_offsets"]]),
        ),
        "first.weight ends at",
    ),
}


@pytest.fixture
def whole(tmp_path):
    """A checkpoint, and the model and optimizer it is of, which have gone on since."""
    open_session()
    model, optimizer = make(1)
    train(model, optimizer, range(2))
    gm.save(tmp_path / "a", model, optimizer)
    train(model, optimizer, range(2, 3))
    return tmp_path / "a", model, optimizer


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_an_error_and_changes_nothing(whole, damage):
    folder, model, optimizer = whole
    before, states = values(model), optimizer.state_dict()["state"]
    spoil, message = DAMAGES[damage]
    spoil(folder)
    with pytest.raises(gm.GeminiError, match=message):
        gm.load(folder, model, optimizer)
    same(values(model), before)
    for number, state in optimizer.state_dict()["state"].items():
        same(state, states[number])


@pytest.mark.parametrize("asks", [True, False])
def test_the_system_is_asked_for_what_is_read_next(tmp_path, monkeypatch, asks):
    values = {name: torch.randn(256) for name in "abcde"}
    pytest.importorskip("safetensors.torch").save_file(values, tmp_path / "one")
    entries = tensorfile.read_header(tmp_path / "one")
    events, read, found = [], tensorfile.read, {name: torch.zeros(256) for name in values}
    names = {entry.offset: entry.name for entry in entries.values()}
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, at, size, advice: events.append(f"ask {names[at]} {size}"))
    monkeypatch.setattr(
        tensorfile, "read", lambda entry, *more: (events.append(f"read {entry.name}"), read(entry, *more))
    )
    monkeypatch.setattr(checkpoint, "AHEAD_BYTES", 2 * 1024)
    jobs = [(entry, lambda name=name: found[name], lambda: None) for name, entry in sorted(entries.items())]
    with Progress("reading", 5 * 1024, False) as bar:
        checkpoint._read_all(jobs, bar, False, asks)
    assert all(torch.equal(found[name], values[name]) for name in values)
    reads = [f"read {name}" for name in "abcde"]
    wanted = "ask a,ask b,read a,ask c,read b,ask d,read c,ask e,read d,read e".split(",") if asks else reads
    assert events == [f"{event} 1024" if event.startswith("ask") else event for event in wanted]


def test_shard_that_is_missing_is_named(tmp_path):
    open_session()
    model = gm.prepare(Net())
    gm.save(tmp_path / "a", model, max_shard=20000)
    (second,) = (tmp_path / "a").glob("model-00002-of-*")
    second.unlink()
    with pytest.raises(
        gm.GeminiError, match="model-00002-of-0000..safetensors, which .*index.json names, is not there"
    ):
        gm.load(tmp_path / "a", model)


def test_models_and_optimizers_of_other_makes_are_refused(whole):
    folder, model, optimizer = whole
    _, other = make(1, "momentum")
    with pytest.raises(gm.GeminiError, match="the optimizer has a parameter, first.weight, that is not in the model"):
        gm.load(folder, model, other)
    model, other = make(1, "adamw", torch.bfloat16)
    with pytest.raises(gm.GeminiError, match="parameter first.weight: the state to be loaded has .* want .*master"):
        gm.load(folder, model, other)
    with pytest.raises(TypeError, match="the optimizer is a AdamW"):
        gm.load(folder, model, other.inner)
    small = gm.prepare(Net(width=64))
    with pytest.raises(gm.GeminiError, match=r"shape \(96, 96\), in the model it has \(64, 64\)"):
        gm.load(folder, small)
    with pytest.raises(gm.GeminiError, match="tensors that the model has not, first"):
        gm.load(folder, gm.prepare(nn.ModuleDict({"first": nn.Linear(96, 96)})))
    with pytest.raises(gm.GeminiError, match="there is no checkpoint"):
        gm.load(folder / "nowhere", model)


# ---- what is at the folder
def test_other_files_stay_and_shards_of_before_go(tmp_path):
    open_session()
    model, optimizer = make(1)
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("mine")
    gm.save(folder, model, optimizer, max_shard=20000)
    assert (folder / "model.safetensors.index.json").exists() and (folder / "optimizer.safetensors").exists()
    gm.save(folder, model)
    assert sorted(os.listdir(folder)) == ["libgemini.json", "model.safetensors", "tokenizer.json", "training.pt"]
    assert (folder / "tokenizer.json").read_text() == "mine"
    assert os.listdir(tmp_path) == ["a"]


def write(path, text):
    """As most programs do: a file of its own that takes the name."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


@pytest.mark.parametrize("exchange", (True, False))
@pytest.mark.parametrize("links", (True, False))
def test_files_that_others_put_into_the_folder_meanwhile_stay(tmp_path, monkeypatch, exchange, links):
    """New ones, changed ones, folders, while it is written; what is put there after the folders have changed places."""
    open_session()
    model, optimizer = make(1)
    folder, count = tmp_path / "a", []
    gm.save(folder, model, optimizer)
    for name in ("same.txt", "written.txt", "replaced.txt", "both.txt", "removed.txt", "config.json"):
        (folder / name).write_text("before")
    if not links:
        monkeypatch.setattr(os, "link", lambda *_, **__: (_ for _ in ()).throw(OSError(95, "no links")))
    exchanged = checkpoint._exchange
    monkeypatch.setattr(checkpoint, "_exchange", lambda *names: exchange and exchanged(*names))
    sync = checkpoint._sync

    def others(path):
        sync(path)
        if not count:  # all is written, and files of others were taken over
            count.append(path)
            (folder / "late.txt").write_text("late")
            (folder / "written.txt").write_text("late")
            write(folder / "replaced.txt", "late")
            write(folder / "both.txt", "late")
            (folder / "removed.txt").unlink()
            (folder / "logs").mkdir()
            (folder / "logs" / "0").write_text("late")
        elif path == str(tmp_path):  # the new folder has its name
            write(folder / "both.txt", "later")
            (folder / "later.txt").write_text("later")

    monkeypatch.setattr(checkpoint, "_sync", others)
    gm.save(folder, model, optimizer)
    assert {path.name: path.read_text() for path in folder.glob("*.txt") if path.name != "removed.txt"} == {
        "same.txt": "before",
        "written.txt": "late",
        "replaced.txt": "late",
        "both.txt": "later",
        "late.txt": "late",
        "later.txt": "later",
    }
    assert (folder / "logs" / "0").read_text() == "late" and (folder / "config.json").read_text() == "before"
    assert os.listdir(tmp_path) == ["a"]
    gm.load(folder, model, optimizer)


def test_what_a_killed_save_has_left_goes_and_files_of_others_stay(tmp_path):
    open_session()
    model, optimizer = make(1)
    folder = tmp_path / "a"
    gm.save(folder, model, optimizer)
    for left in (tmp_path / "a.saving", tmp_path / "a.previous"):
        left.mkdir()
        (left / "model.safetensors").write_text("half")
        (left / "config.json").write_text("half")
        (left / f"late{left.suffix}").write_text("mine")
    (tmp_path / "a.saving.lock").touch()
    gm.save(folder, model, optimizer)
    assert sorted(os.listdir(folder)) == [
        "late.previous",
        "late.saving",
        "libgemini.json",
        "model.safetensors",
        "optimizer.safetensors",
        "training.pt",
    ]
    assert os.listdir(tmp_path) == ["a"]
    gm.load(folder, model, optimizer)


TWO = '''
import os, sys
import torch
import libgemini.torch as gm
from libgemini.torch import checkpoint, tensorfile

folder, where = sys.argv[1], sys.argv[2]
if where == "renames":
  checkpoint._exchange = lambda *_: False


def save(number):
  gm.init(device="cpu", chunk_size="64KiB", device_memory="1MiB", host_memory="8MiB")
  model = gm.prepare(torch.nn.Linear(64, 64))
  with torch.no_grad():
    model.weight.fill_(float(number))
  gm.save(folder, model, extra=number)


def child(function):
  pid = os.fork()
  if pid == 0:
    try:
      function()
      os._exit(0)
    except gm.GeminiError as error:
      print(error.status, error, flush=True)
      os._exit(1)
    except BaseException as error:
      print(repr(error), flush=True)
      os._exit(2)
  return pid


def ended(pid):
  return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


there, go = os.pipe(), os.pipe()


def first():
  """Saves, and stops in the middle: before it writes, when all is written, when the folders have changed places."""
  def stopping(function, before):
    def run(*args):
      out = None if before else function(*args)
      if not stopped and (where != "renames" or args[0] == os.path.dirname(folder)):
        stopped.append(args)
        os.write(there[1], b"x")
        os.read(go[0], 1)
      return function(*args) if before else out
    return run

  stopped = []
  if where == "written":
    tensorfile._store = stopping(tensorfile._store, True)
  elif where == "whole":
    checkpoint._exchange = stopping(checkpoint._exchange, True)
  elif where == "exchanged":
    checkpoint._exchange = stopping(checkpoint._exchange, False)
  else:
    checkpoint._sync = stopping(checkpoint._sync, True)
  save(1)


assert ended(child(lambda: save(0))) == 0
pid = child(first)
os.read(there[0], 1)
listing = {name: sorted(os.listdir(os.path.join(os.path.dirname(folder), name)))
           for name in os.listdir(os.path.dirname(folder)) if not name.endswith(".lock")}
second = ended(child(lambda: save(2)))
assert listing == {name: sorted(os.listdir(os.path.join(os.path.dirname(folder), name)))
                   for name in os.listdir(os.path.dirname(folder)) if not name.endswith(".lock")}
os.write(go[1], b"x")
assert ended(pid) == 0
assert second == 1, second


def look(number):
  gm.init(device="cpu", chunk_size="64KiB", device_memory="1MiB", host_memory="8MiB")
  model = gm.prepare(torch.nn.Linear(64, 64))
  assert gm.load(folder, model) == number and (model.weight == number).all()


assert ended(child(lambda: look(1))) == 0
assert ended(child(lambda: save(3))) == 0 and ended(child(lambda: look(3))) == 0
assert os.listdir(os.path.dirname(folder)) == [os.path.basename(folder)]
'''


@pytest.mark.parametrize("where", ("written", "whole", "exchanged", "renames"))
def test_a_second_process_that_saves_into_the_folder_is_refused(tmp_path, where):
    """Wherever the first one is; that one goes on as if nobody else had come."""
    done = subprocess.run(
        [sys.executable, "-c", TWO, str(tmp_path / "a"), where], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"BUSY another process is saving to {tmp_path / 'a'}\n"


def test_a_folder_that_cannot_be_is_said(tmp_path, monkeypatch):
    open_session()
    model = gm.prepare(Net())
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match=r"file/inner, where the checkpoint a is to be, cannot be made"):
        gm.save(tmp_path / "file" / "inner" / "a", model)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint can be written to /proc: No such file"):
        gm.save("/proc/gemini-checkpoint", model)


def test_folder_that_is_no_checkpoint_is_left_alone(tmp_path):
    open_session()
    model = gm.prepare(Net())
    (tmp_path / "work" / "inner").mkdir(parents=True)
    with pytest.raises(gm.GeminiError, match="holds a folder, inner"):
        gm.save(tmp_path / "work", model)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(gm.GeminiError, match="is no folder"):
        gm.save(tmp_path / "file", model)
    assert sorted(os.listdir(tmp_path)) == ["file", "work"] and os.listdir(tmp_path / "work") == ["inner"]


def test_save_that_fails_leaves_what_was(whole, monkeypatch):
    folder, model, optimizer = whole
    listing = {name: os.stat(folder / name).st_ino for name in os.listdir(folder)}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensorfile, "_store", full)
    with pytest.raises(gm.GeminiError, match=r"a.saving/model.safetensors: \S+ was not written: .*No space"):
        gm.save(folder, model, optimizer)
    assert {name: os.stat(folder / name).st_ino for name in os.listdir(folder)} == listing
    assert os.listdir(folder.parent) == ["a"]


def test_progress_is_told(whole, monkeypatch, capsys):
    folder, model, optimizer = whole
    monkeypatch.setattr("libgemini.torch.progress.QUIET_S", 0)
    monkeypatch.setattr("libgemini.torch.progress.LINES_S", 0)
    gm.save(folder, model, optimizer, progress=True)
    gm.load(folder, model, optimizer, progress=True)
    lines = capsys.readouterr().err.splitlines()
    for what in ("saving", "checking", "loading"):
        told = [line for line in lines if line.startswith(f"{what} {folder}: ")]
        assert len(told) > 10 and " left" in told[0] and " of " in told[-2]
        size = told[-2].split(" of ")[1].split(",")[0]
        assert told[-1].startswith(f"{what} {folder}: {size} in ")
    gm.save(folder, model, optimizer, progress=False)
    assert not capsys.readouterr().err


# ---- kills
KILLS = '''
import itertools, os, random, signal, sys, time
import torch
import libgemini.torch as gm
from libgemini.torch import checkpoint, tensorfile

folder, mode = sys.argv[1], sys.argv[2]
if mode == "renames":
  checkpoint._exchange = lambda *_: False


files = {}
if mode == "files":  # what does not fit on the host, in two directories, with each engine in turn
  places = [f"{folder}.files.{number}" for number in range(2)]
  for place in places:
    os.mkdir(place)
  files = {"file": ":".join(places), "file_memory": "16MiB"}
random.seed(int(os.environ["GEMINI_STRESS_SEED"]))


def start(number=0):
  if files:
    files["file_engine"] = "threads" if number % 2 else "auto"
  gm.init(device="cpu", strict=True, chunk_size="64KiB", device_memory="192KiB" if files else "1MiB",
          host_memory="128KiB" if files else "8MiB", **files)
  model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(24 if files else 2)))
  return gm.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def save(model, optimizer, number):
  with torch.no_grad():
    for param in model.parameters():
      param.fill_(float(number))
  assert not files or gm.stats()["used_bytes"]["file"], gm.stats()
  gm.save(folder, model, optimizer, extra=number, max_shard="20KB")


def forked(function):
  pid = os.fork()
  if pid == 0:
    try:
      os._exit(function() or 0)
    except BaseException as error:
      print(repr(error), flush=True)
    os._exit(9)
  return pid


def loaded():
  """The number of the checkpoint that is there, which all of its parameters must have."""
  read, write = os.pipe()

  def child():
    model, optimizer = start()
    number = gm.load(folder, model, optimizer)
    for param in model.parameters():
      assert (param == number).all(), number
    os.write(write, str(number).encode())

  status = os.waitpid(forked(child), 0)[1]
  os.close(write)
  text = os.read(read, 20)
  os.close(read)
  assert status == 0, status
  return int(text)


def first():
  save(*start(), 0)


def saving_until_call(call):
  """Dies at the call-th call of what changes files, before or after it."""
  def child():
    count = itertools.count()

    def dying(function):
      def wrapped(*args, **kwargs):
        if next(count) == call:
          os.kill(os.getpid(), signal.SIGKILL)
        out = function(*args, **kwargs)
        if next(count) == call:
          os.kill(os.getpid(), signal.SIGKILL)
        return out
      return wrapped

    model, optimizer = start()
    tensorfile._write = dying(tensorfile._write)
    tensorfile._store = dying(tensorfile._store)
    for name in ("_sync", "_exchange", "_clear", "_write_json"):
      setattr(checkpoint, name, dying(getattr(checkpoint, name)))
    os.rename, os.unlink = dying(os.rename), dying(os.unlink)
    save(model, optimizer, call + 1)
  return os.waitpid(forked(child), 0)[1] == signal.SIGKILL


def saving_for_ever(start_number):
  model, optimizer = start(kill)
  for number in itertools.count(start_number):
    save(model, optimizer, number)


torch.optim.SGD([torch.zeros(1)])  # imports more of torch, here and not in each child
assert os.waitpid(forked(first), 0)[1] == 0
number = old = new = saved = kill = 0
kills = int(os.environ.get("GEMINI_KILLS") or 8)
longest = 0.4  # seconds until a kill; longer where that is too short for a save
if mode in ("random", "files"):
  while kill < kills or not saved:  # a machine on which no save ever ends runs into the test's timeout
    pid = forked(lambda: saving_for_ever(number + 1))
    time.sleep(random.uniform(0.03, longest))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    before, number = number, loaded()
    assert number >= before, (before, number)
    saved += number > before
    kill += 1
    longest *= 1 if saved else 1.5
else:
  call = 0
  while saving_until_call(call):
    before, number = number, loaded()
    assert number in (before, call + 1), (before, number, call)
    new += number == call + 1
    old += number == before
    call += 1 if call > 30 else 3
  assert old > 4 and new > 4, (call, old, new)
  assert loaded() == call + 1
left = sorted(os.listdir(os.path.dirname(folder)))
assert mode in ("random", "files") or left == ["checkpoint"], left
assert not files or not any(os.listdir(place) for place in places)  # files of the file tier have no names
'''


@pytest.mark.parametrize("mode", ["exchange", "renames", "random", "files"])
def test_kill_leaves_a_whole_checkpoint(tmp_path, mode):
    """GEMINI_KILLS: how often processes are killed at random, 8 times by default; GEMINI_STRESS_SEED: when."""
    seed = os.environ.get("GEMINI_STRESS_SEED") or str(time.time_ns() % 10**9)
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path / "checkpoint"), mode],
        capture_output=True,
        text=True,
        timeout=900 + 10 * int(os.environ.get("GEMINI_KILLS") or 8),
        env={**os.environ, "GEMINI_STRESS_SEED": seed},
    )
    test = f"{__file__}::test_kill_leaves_a_whole_checkpoint[{mode}]"
    assert done.returncode == 0, f"{again('-m', 'pytest', test, GEMINI_STRESS_SEED=seed)}\n{done.stdout}{done.stderr}"


# ---- memory
MEMORY = '''
import os, sys
import torch
from torch import nn
import libgemini.torch as gm

folder, what = sys.argv[1], sys.argv[2]
MIB = 1 << 20


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


def model_of(layers):
  return nn.Sequential(*(nn.Linear(1023, 1024) for _ in range(layers)))


if what == "same":
  with gm.init(device="cpu", strict=True, chunk_size="1MiB", device_memory="40MiB", host_memory="400MiB"):
    model = model_of(50)
  gm.prepare(model)
  gm.save(folder, model)
  assert peak(lambda: [param.clone() for param in model.parameters()]) > 190
  print(peak(lambda: gm.save(folder, model, max_shard="100MB")))
  print(peak(lambda: gm.load(folder, model)))
else:
  gm.init(device="cpu", strict=True, chunk_size="1MiB", device_memory="24MiB", host_memory="24MiB",
          file_memory="400MiB", file=os.path.dirname(folder))
  with torch.device("meta"):
    model = model_of(50)
  print(peak(lambda: gm.load_weights(model, folder)))
  print(peak(lambda: gm.save(folder, model)))
  assert all((param == param).all() for param in model.parameters())
'''


def test_no_second_copy_is_made(tmp_path):
    """200 MB of parameters; then the same under 48 MiB of device and host memory together."""
    for what, most in (("same", 32), ("beyond memory", 48 + 32)):
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(tmp_path / "checkpoint"), what],
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        grown = list(map(int, done.stdout.split()))
        assert len(grown) == 2 and all(mib < most for mib in grown), (what, grown)
