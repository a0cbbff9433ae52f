"""Quantized weights: integers and 8-bit floats, packed or not, as parameters and as buffers, are managed as bytes.

SPDX-License-Identifier: Apache-2.0
"""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import libgemini.torch as gm
from conftest import alike, overwrite_the_device, same_bits, values

WIDTH, LAYERS, GROUP = 256, 6, 32
CHUNK = 64 << 10


def scales(rows, columns):
    return torch.rand(rows, columns) * 0.02 + 0.01


class Int8(nn.Module):
    """As of bitsandbytes' 8 bits: an int8 parameter that needs no gradient, and a scale for each row."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-127, 128, (width, width), dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scales(width, 1).half(), requires_grad=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


class Gptq(nn.Module):
    """As of GPTQ: buffers, 8 weights of 4 bits in an int32, zeros packed likewise, fp16 scales, an index of groups."""

    def __init__(self, width=WIDTH):
        super().__init__()
        groups, most = width // GROUP, 2**31
        self.register_buffer("qweight", torch.randint(-most, most, (width // 8, width), dtype=torch.int32))
        self.register_buffer("qzeros", torch.randint(-most, most, (groups, width // 8), dtype=torch.int32))
        self.register_buffer("scales", scales(groups, width).half())
        self.register_buffer("g_idx", torch.arange(width, dtype=torch.int32) // GROUP)
        self.register_buffer("shifts", torch.arange(0, 32, 4, dtype=torch.int32), persistent=False)

    def forward(self, x):
        packed = self.qweight.unsqueeze(1) >> self.shifts.view(1, -1, 1)
        weight = (packed & 15).reshape(-1, self.qweight.shape[1])
        zeros = ((self.qzeros.unsqueeze(2) >> self.shifts) & 15).reshape(self.scales.shape)
        return x @ (self.scales[self.g_idx.long()].to(x.dtype) * (weight - zeros[self.g_idx.long()]).to(x.dtype))


class Nibbles(nn.Module):
    """As of bitsandbytes' 4 bits: two indices into a code in a byte, fp32 scales of blocks, a code of 16 values."""

    def __init__(self, width=WIDTH):
        super().__init__()
        packed = torch.randint(0, 256, (width * width // 2, 1), dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("absmax", scales(width * width // GROUP, 1))
        self.register_buffer("code", torch.linspace(-1, 1, 16))
        self.width = width

    def forward(self, x):
        high, low = (self.weight >> 4).int(), (self.weight & 15).int()
        codes = self.code[torch.cat((high, low), 1).reshape(-1, GROUP)]
        return F.linear(x, (codes * self.absmax).view(self.width, self.width).to(x.dtype))


class Float8(nn.Module):
    """8-bit floats with one scale, as newer checkpoints have."""

    def __init__(self, width=WIDTH, dtype=torch.float8_e4m3fn):
        super().__init__()
        self.weight = nn.Parameter((torch.randn(width, width) * 8).to(dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(0.01), requires_grad=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


class Lora(nn.Module):
    """A quantized layer that is frozen, and a trained one of low rank beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Stack(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = self.norm(x + layer(x))
        return x


KINDS = {"int8": Int8, "gptq": Gptq, "nibbles": Nibbles, "float8": Float8}


def stack(kind, wrap=lambda layer: layer):
    torch.manual_seed(0)
    return Stack(lambda: wrap(KINDS[kind]()))


def weights(model):
    packed = [
        one for one in model.buffers() if one.itemsize == 1 or not one.is_floating_point()
    ]  # scales stay with torch
    return sum(tensor.nbytes for tensor in (*model.parameters(), *packed))


def inputs(step):
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))


def moved(link):
    return sum(gm.stats()["moved_bytes"][link].values())


@pytest.mark.parametrize("kind", KINDS)
def test_inference_has_torchs_bits_within_less_than_the_weights(session, kind):
    model = stack(kind).eval()
    with torch.no_grad():
        want = [model(inputs(step)) for step in range(5)]
    size = weights(model)
    budget = size * 6 // 10 // CHUNK * CHUNK
    session(budget)
    model = gm.infer(stack(kind))
    stats = gm.stats()
    assert 0.94 * size <= stats["model_bytes"] <= 1.05 * size, "all but what is small"
    got = [model(inputs(step)) for step in range(2)]
    gm.stats_reset()
    got += [model(inputs(step)) for step in range(2, 4)]
    stats = gm.stats()
    assert stats["departures"] == 0 and stats["planned_iterations"] == stats["iterations"] - 1 == 3
    assert moved("host to device") and moved("device to host") == 0
    assert stats["peak_bytes"]["device"] <= budget < size
    overwrite_the_device()
    same_bits([*got, model(inputs(4))], want)


def train(model, optimizer):
    """Steps with accumulation; what each step's loss is, and what an evaluation gives."""
    out = []
    for step in range(4):
        for part in range(2):
            loss = model(inputs(2 * step + part)).square().mean()
            loss.backward()
            out.append(loss.detach().clone())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        out.append(model(inputs(99)).clone())
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_base_beside_trained_layers_has_torchs_bits(session, kind):
    """The optimizer gets all parameters, those that need no gradient as well."""
    size = weights(stack(kind, Lora))
    model = alike(session, lambda: stack(kind, Lora), train, budget=size * 6 // 10 // CHUNK * CHUNK)
    assert gm.stats()["model_bytes"] >= 0.94 * size
    assert gm.stats()["departures"] == 0 and moved("host to device")
    assert model.layers[0].a.weight.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_adamw_trains_beside_a_frozen_base(session, kind):
    losses = []
    for managed in (False, True):
        model = stack(kind, Lora)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if managed:
            session(weights(model) * 6 // 10 // CHUNK * CHUNK)
            model, optimizer = gm.prepare(model, optimizer)
        losses.append(torch.stack(train(model, optimizer)[:-1]))
    assert losses[1][-1] < losses[1][0]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_weights_are_saved_and_loaded(session, tmp_path, kind):
    """By gm.save() and state_dict(); into a model elsewhere, one in a session, and one on the meta device."""
    with torch.no_grad():
        want = values(stack(kind)), stack(kind)(inputs(0))
    session("192KiB")
    model = gm.infer(stack(kind))
    gm.save(tmp_path / "saved", model)
    plain = KINDS[kind]()
    torch.save(model.layers[2].state_dict(), tmp_path / "layer.pt")
    plain.load_state_dict(torch.load(tmp_path / "layer.pt"))
    same_bits(values(plain), values(model.layers[2]))
    gm.close()
    session("192KiB")
    with torch.no_grad():
        for param in (other := stack(kind)).parameters():
            param.zero_()
    other = gm.infer(other)
    gm.load_weights(other, tmp_path / "saved")
    same_bits(values(other), want[0])
    same_bits([other(inputs(0))], want[1:])
    with torch.device("meta"):
        other = stack(kind)
    for layer in other.layers:
        if kind == "gptq":
            layer.shifts = torch.arange(0, 32, 4, dtype=torch.int32)  # in no file
    gm.load_weights(other, tmp_path / "saved")
    assert other.norm.weight._gm_place is not None
    other = gm.infer(other)
    same_bits(values(other), want[0])
    same_bits([other(inputs(0))], want[1:])


# ---- classes of parameters
class Packed(nn.Parameter):
    """As bitsandbytes' Params4bit: a class with attributes, whose __torch_function__ calls the next one's."""

    def __new__(cls, data=None, quant_state=None):
        self = torch.Tensor._make_subclass(cls, torch.empty(0) if data is None else data, False)
        self.quant_state = quant_state
        return self

    @property
    def absmax(self):
        return self.quant_state["absmax"]


class Params4bit(Packed):
    __module__ = "bitsandbytes.nn.modules"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Stranger(Packed):
    """One that libgemini cannot know to call the next one's."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Made(torch.Tensor):
    """As torchao's: a tensor that is made of others."""

    @staticmethod
    def __new__(cls, data, scale):
        self = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype)
        self.data_, self.scale_ = data, scale
        return self

    def __tensor_flatten__(self):
        return ["data_", "scale_"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data_, args[0].scale_)
        if func is torch.ops.aten.linear.default or func is torch.ops.aten.t.default:
            raise NotImplementedError(func)
        plain = [one.data_.to(one.scale_.dtype) * one.scale_ if isinstance(one, cls) else one for one in args]
        return func(*plain, **(kwargs or {}))


class OfClass(Nibbles):
    def __init__(self, kind):
        super().__init__()
        self.weight = kind(self.weight.data.clone(), {"absmax": self.absmax})


@pytest.mark.parametrize("kind", [Packed, Params4bit])
def test_a_parameter_keeps_its_class(session, kind):
    def make():
        torch.manual_seed(0)
        return Stack(lambda: Lora(OfClass(kind)))

    size = weights(make())
    model = alike(session, make, train, budget=size * 6 // 10 // CHUNK * CHUNK)
    assert gm.stats()["model_bytes"] >= 0.9 * size and moved("host to device")
    weight = model.layers[0].base.weight
    assert isinstance(weight, kind) and type(weight).__name__ == kind.__name__
    assert weight.absmax is weight.quant_state["absmax"] and model.to("cpu").layers[0].base.weight is weight
    overwrite_the_device()
    copied = copy.deepcopy(model.layers[0].base)
    assert type(copied.weight) is kind and copied.weight.quant_state["absmax"] is copied.absmax is not weight.absmax
    same_bits([copied.weight.data, copied(inputs(0))], [weight.data.clone(), model.layers[0].base(inputs(0)).clone()])
    with pytest.raises(gm.GeminiError, match="over its bytes would not know when these are elsewhere"):
        copy.copy(weight)
    file = io.BytesIO()
    torch.save(model.layers[0].base.state_dict(), file)
    same_bits(torch.load(io.BytesIO(file.getvalue())), copied.state_dict())


def test_a_class_is_kept_within_units(session):
    def make():
        torch.manual_seed(0)
        return Stack(lambda: OfClass(Params4bit)).eval()

    with torch.no_grad():
        want = make()(inputs(0))
    session("256KiB")
    model = gm.infer(make())
    seen = []
    model.layers[2].register_forward_hook(lambda layer, *_: seen.append(type(layer.weight)))
    gm.unit(model.layers[2])
    same_bits([model(inputs(0)), model(inputs(0))], [want, want])
    assert seen == [Params4bit] * 2 and type(model.layers[2].weight) is not Params4bit


class OfTensors(nn.Module):
    def __init__(self):
        super().__init__()
        made = Made(torch.randint(-127, 128, (WIDTH, WIDTH), dtype=torch.int8), scales(WIDTH, 1))
        self.weight = nn.Parameter(made, requires_grad=False)

    def forward(self, x):
        return torch.mm(x, self.weight)


class Aliased(OfClass):
    """As bitsandbytes' Linear8bitLt, whose weight has another tensor over its bytes."""

    def __init__(self):
        super().__init__(Packed)
        self.weight.alias = self.weight.data


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (OfTensors, "a Made, stays in torch's memory, where it is, as it is made of other tensors; 6 of 8"),
        (lambda: OfClass(Stranger), "a Stranger, stays .* it is of a class that serves functions of torch itself"),
        (Aliased, "a Packed, stays .* it is over bytes that another tensor has, too"),
    ],
)
def test_what_stays_with_torch_is_said(session, layer, why):
    def make():
        torch.manual_seed(0)
        return Stack(layer).eval()

    with torch.no_grad():
        want = make()(inputs(0))
    session("1MiB")
    with pytest.warns(UserWarning, match=f"frozen parameter layers.0.weight, {why}") as warned:
        model = gm.infer(make())
    assert [one.filename for one in warned] == [__file__]
    same_bits([model(inputs(0))], [want])
    assert type(model.layers[0].weight).__name__ in why


def test_an_optimizer_of_what_stays_with_torch_is_told_what_to_do(session):
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    model.other = OfTensors()
    session("1MiB")
    with pytest.raises(gm.GeminiError, match=r"parameter 2 .* needs no gradient.*if p\.requires_grad"):
        gm.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    trained = [param for param in model.parameters() if param.requires_grad]
    model, optimizer = gm.prepare(model, torch.optim.SGD(trained, lr=0.1))
    before = model.bias.detach().clone()
    model(inputs(0)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.bias, before)


def test_bitsandbytes(session):
    """4 bits are managed, 8 bits stay with torch."""
    bnb = pytest.importorskip("bitsandbytes")

    def make(kind, **options):
        torch.manual_seed(0)
        model = nn.Sequential(*(kind(WIDTH, WIDTH, bias=False, **options) for _ in range(LAYERS))).to("cpu")
        for layer in model:
            layer.support_avx512bf16_for_cpu = False  # which would exchange the weight in its first evaluation
        return model.eval()

    for kind, options in (
        (bnb.nn.Linear4bit, {"quant_type": "nf4", "compute_dtype": torch.float32}),
        (bnb.nn.Linear8bitLt, {"has_fp16_weights": False}),
    ):
        with torch.no_grad():
            want = make(kind, **options)(inputs(0))
        session("128KiB")
        model = gm.infer(make(kind, **options))
        same_bits([model(inputs(0)) for _ in range(3)], [want] * 3)
        managed = gm.stats()["model_bytes"]
        assert managed == (LAYERS * WIDTH * WIDTH // 2 if kind is bnb.nn.Linear4bit else 0)
        assert gm.stats()["departures"] == 0
        gm.close()


# ---- what cannot be, and what is left alone
def test_buffers_that_are_no_weights_stay(session):
    """Small ones, those of int64 and floats alone, and those that share bytes."""

    class Others(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("few", torch.ones(8, dtype=torch.int8))
            self.inner = nn.Linear(8, 8)
            self.inner.register_buffer("large", torch.ones(4096))
            self.inner.register_buffer("numbers", torch.arange(4096))
            self.shared = nn.Module()
            self.shared.register_buffer("whole", torch.ones(8192, dtype=torch.int8))
            self.shared.register_buffer("part", self.shared.whole[:4096])

    session()
    model = gm.prepare(Others())
    assert all(type(buffer) is torch.Tensor for buffer in model.buffers())
    model.shared.part.zero_()
    assert model.shared.whole.sum() == 4096


def test_managed_buffers_are_written_in_place_and_replaced(session):
    session("192KiB")
    model = gm.infer(stack("gptq"))
    layer = model.layers[0]
    with torch.no_grad():
        layer.qweight.fill_(0x11111111)
        layer.scales[1] = 0.5
    overwrite_the_device()
    assert (layer.qweight == 0x11111111).all() and (layer.scales[1] == 0.5).all() and layer.scales[0].max() < 0.5
    layer.qweight = torch.zeros_like(layer.qweight)
    assert type(layer.qweight) is torch.Tensor
    same_bits([model(inputs(0))], [model(inputs(0)).clone()])


def test_what_cannot_be_trained_is_refused(session):
    session()
    model = nn.Linear(4, 4, dtype=torch.float64).requires_grad_(False)
    model = gm.prepare(model)
    want = model(torch.ones(2, 4, dtype=torch.float64)).clone()
    model.weight.requires_grad_()
    with pytest.raises(gm.GeminiError, match="parameter weight is of torch.float64: want .* that needs no gradient"):
        model(torch.ones(2, 4, dtype=torch.float64))
    model.weight.requires_grad_(False)
    same_bits([model(torch.ones(2, 4, dtype=torch.float64))], [want])


def test_statistics_beside_packed_buffers_are_torchs(session):
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(2048), nn.Linear(2048, 512), nn.Linear(512, 2048))
        model[0].register_buffer("packed", torch.ones(8192, dtype=torch.int8))
        return model

    def train(model):
        for step in range(4):
            model(torch.randn(8, 2048, generator=torch.Generator().manual_seed(step))).sum().backward()
        return [model[0].running_mean.clone(), model[0].running_var.clone()]

    want = train(make())
    session(5 << 20)
    same_bits(train(gm.prepare(make())), want)


def test_small_counters_may_be_replaced(session):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.calls = nn.Parameter(torch.zeros((), dtype=torch.int64), requires_grad=False)

        def forward(self, x):
            self.calls.data = self.calls.data + 1
            return self.layer(x)

    session()
    model = gm.prepare(Counter())
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
    assert int(model.calls) == 3
