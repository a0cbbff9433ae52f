"""What random programs are made of: a model, and operations that add lines to a program; those that are known to fail.

An operation is a function with @op(). It is given a Writer and adds one line or more. A line is one statement that
changes something, so that it can be left out if the library refuses it. To add an operation, write the function. While
it fails, its name is in KNOWN, and test_programs.py has a program that shows how.

SPDX-License-Identifier: Apache-2.0
"""

import dataclasses
import itertools
import math
import random
import string
from collections.abc import Callable, Iterable

import torch
from torch import nn

SIZE = 96  # of a layer: a weight is 36 KiB, so that some share a chunk of 64 KiB with others, and some span two
ROWS = 160  # of the wide layer, whose forward pass takes any number
TOKENS = 64
BATCH, LENGTH = 4, 6

# Operations that fail on this code, by the point of the list of defects that says why. Random programs leave them out,
# and test_programs.py has for each a program that fails. Whoever mends a point takes its operations out here.
KNOWN: dict[str, str] = {
    name: point
    for point, names in (("P7: what numpy and DLPack are given is a copy, as the docs say", "plain_write plain_alias"),)
    for name in names.split()
}


# ---- the model, and optimizers of users
class Net(nn.Module):
    """Layers of the common kinds. The forward pass uses all of them, and some parameters directly."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, SIZE)
        self.first = nn.Linear(SIZE, SIZE)
        self.second = nn.Linear(SIZE, SIZE)
        self.blocks = nn.ModuleList(nn.Linear(SIZE, SIZE, bias=False) for _ in range(4))
        self.wide = nn.Linear(SIZE, ROWS, bias=False)
        self.norm = nn.LayerNorm(SIZE)
        self.batch = nn.BatchNorm1d(SIZE)
        self.conv = nn.Conv1d(LENGTH, LENGTH, 3, padding=1)
        self.drop = nn.Dropout(0.1)
        self.memory = nn.GRU(SIZE, SIZE // 2, bidirectional=True, batch_first=True)  # its functions have several nodes
        self.table = nn.Parameter(torch.randn(4, SIZE, SIZE) / 10)  # three chunks or four
        self.scale = nn.Parameter(torch.ones(SIZE))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(SIZE, TOKENS, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + torch.tanh(self.first(x)) * self.scale
        x = self.batch(x.flatten(0, 1)).view_as(x)
        for i, block in enumerate(self.blocks):
            x = x + torch.tanh(block(x)) @ self.table[i]
        x = self.conv(self.drop(self.norm(x)))
        x = x + self.memory(x)[0]
        x = x + self.wide(x).square().mean(-1, keepdim=True)
        if "extra" in self._buffers:
            x = x + self.extra.flatten()[:SIZE].sum()
        return self.head(self.second(x)) * self.gain + self.nothing.sum()


SHAPES = {
    "model.embed.weight": (TOKENS, SIZE),
    "model.first.weight": (SIZE, SIZE),
    "model.first.bias": (SIZE,),
    "model.second.weight": (SIZE, SIZE),
    "model.second.bias": (SIZE,),
    "model.wide.weight": (ROWS, SIZE),
    "model.norm.weight": (SIZE,),
    "model.batch.bias": (SIZE,),
    "model.conv.weight": (LENGTH, LENGTH, 3),
    "model.memory.weight_ih_l0": (3 * (SIZE // 2), SIZE),
    "model.memory.weight_hh_l0": (3 * (SIZE // 2), SIZE // 2),
    "model.table": (4, SIZE, SIZE),
    "model.scale": (SIZE,),
    "model.head.weight": (TOKENS, SIZE),
    **{f"model.blocks[{i}].weight": (SIZE, SIZE) for i in range(4)},
}


class GlobalNorm(torch.optim.Optimizer):
    """Divides by the norm of all gradients together, as LARS and Adafactor's relatives do."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = sum(param.grad.square().sum() for param in params) ** 0.5 + 1e-6
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad / norm, alpha=group["lr"])


class Counting(torch.optim.Optimizer):
    """Its rate falls with the steps it has made."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / self.steps)


class Sam(torch.optim.Optimizer):
    """Takes the gradient at a point uphill (sharpness-aware minimization), so that it calls its closure twice."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            closure()
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        moves = [param.grad * 0.1 for param in params]
        for param, move in zip(params, moves):
            param.add_(move)
        with torch.enable_grad():
            loss = closure()
        for param, move in zip(params, moves):
            param.sub_(move).sub_(param.grad, alpha=self.defaults["lr"])
        return loss


class Sub(torch.Tensor):
    """A user's class of tensors."""


@torch.library.custom_op("gemini_tests::halve", mutates_args={"x"})
def halve(x: torch.Tensor) -> None:
    """An operator of the user's, which changes its argument."""
    x.mul_(0.5)


# ---- programs
@dataclasses.dataclass(frozen=True)
class Line:
    """A statement. after: what both sides do if the library refuses it in the middle; "stop": nothing more."""

    text: str
    after: str = ""
    op: str = ""


@dataclasses.dataclass(frozen=True)
class Program:
    """Lines, and the session they are run in. inside: the model is built within gm.init()."""

    seed: int
    lines: tuple[Line, ...]
    strict: bool = True
    inside: bool = True
    memory: str = "832KiB"
    placement: str = "auto"
    every: int = 1  # lines between two looks

    def __str__(self):
        settings = (field.name for field in dataclasses.fields(self) if field.name != "lines")
        head = "# " + " ".join(f"{name}={getattr(self, name)}" for name in settings)
        after = (f"  # if refused: {line.after}" if line.after else "" for line in self.lines)
        return "\n".join([head, *(line.text + more for line, more in zip(self.lines, after))])


def parse(text: str) -> Program:
    """The program that was printed."""
    head, *lines = [line for line in text.strip().splitlines() if line.strip()]
    types = {field.name: type(field.default) for field in dataclasses.fields(Program)}
    settings = dict(part.split("=") for part in head[2:].split())
    settings = {
        name: value == "True" if types[name] is bool else int(value) if name in ("seed", "every") else value
        for name, value in settings.items()
    }
    return Program(lines=tuple(Line(*line.split("  # if refused: ")) for line in lines), **settings)


class Writer:
    """Writes a program: knows which names there are and what they stand for, but runs nothing."""

    def __init__(self, seed: int, allowed: set[str]):
        self.dice = random.Random(seed)
        self.inside = self.dice.random() < 0.5  # whether the model is built within gm.init()
        self.allowed = allowed  # names of operations
        self.lines = []
        self.names = {}  # that lines have made: (kind, shape)
        self.numbers = itertools.count(1)
        self.shapes = dict(SHAPES)  # of parameters that lines may name
        self.op = ""  # whose lines are written
        self.prepared = False
        self.loss = "none"  # or "fresh", "spent"
        self.grads = False
        self.lasting = False  # gradients have a factor that rounds, since they were made
        self.saved = False

    def call(self, name: str):
        before, self.op = self.op, name
        OPS[name].write(self)
        self.op = before

    def some(self, *names: str):
        """One of these operations, if it is not left out."""
        names = [name for name in names if name in self.allowed]
        if names:
            self.call(self.dice.choice(names))

    def add(self, text: str, after: str = ""):
        self.lines.append(Line(text, after, self.op))

    def chance(self, share: float) -> bool:
        return self.dice.random() < share

    def pick(self, texts: str, **values: object) -> str:
        """One of the texts between ;; with $p, a parameter's name, $s, its shape, $k, a number, and values filled
        in."""
        name = self.param()
        values = {"p": name, "s": self.shapes[name], "k": self.number(), "size": SIZE, **values}
        text = self.dice.choice([text.strip() for text in texts.split(";;")])
        return " ".join(string.Template(text).substitute(values).split())

    def new(self, letter: str, kind: str, shape: tuple = ()) -> str:
        name = f"{letter}{next(self.numbers)}"
        self.names[name] = kind, tuple(shape)
        return name

    def number(self) -> int:
        return self.dice.randrange(1000)

    def having(self, *kinds: str) -> list[str]:
        return [name for name, (kind, _) in self.names.items() if kind in kinds]

    def param(self, dims: int | None = None) -> str:
        return self.dice.choice([name for name, shape in self.shapes.items() if dims in (None, len(shape))])

    def square(self) -> list[str]:
        """Parameters that can take each other's place."""
        return [name for name, shape in self.shapes.items() if shape == (SIZE, SIZE)]

    def target(self) -> tuple[str, tuple]:
        """Expression and shape of bytes of a parameter, however somebody came by them."""
        views = self.having("view")
        if views and self.chance(0.5):
            name = self.dice.choice(views)
            return name, self.names[name][1]
        name = self.param()
        return self.pick("$x ;; $x.data ;; $x.detach()", x=name), self.shapes[name]

    def part(self, expression: str, shape: tuple) -> tuple[str, tuple]:
        """Expression and shape of a view of a tensor. What gives several views has them of a tensor without a graph."""
        if not shape:
            return f"{expression}.view(1)", (1,)
        n, rest, flat = shape[0], shape[1:], (math.prod(shape),)
        i = self.dice.randrange(n)
        j = self.dice.randint(i + 1, n)
        choices = [
            (f"[{i}]", rest),
            (f"[{i}:{j}]", (j - i, *rest)),
            ("[::3]", ((n + 2) // 3, *rest)),
            ("[None]", (1, *shape)),
            (f".narrow(0, {i}, {j - i})", (j - i, *rest)),
            (f".select(0, {i})", rest),
            (".reshape(-1)", flat),
            (".flatten()", flat),
            (".unsqueeze(1)", (n, 1, *rest)),
            (".detach()", shape),
            (".data", shape),
            (f".detach().unbind()[{i}]", rest),
            (".detach().split(5)[0]", (min(5, n), *rest)),
            (".contiguous()", shape),
            (".to(torch.float32)", shape),
            (".cpu()", shape),
            (".float()", shape),
            (f".expand(2, *{shape})", (2, *shape)),
            (f".view_as(rand(0, *{shape}))", shape),
            (".detach().tensor_split(2)[0]", ((n + 1) // 2, *rest)),
            (".positive()", shape),
            (f".unflatten(0, (1, {n}))", (1, *shape)),
            (".type(torch.float32)", shape),
            (".requires_grad_()", shape),
            (".as_strided((2, 2), (1, 2))", (2, 2)),
            (".ravel()", flat),
        ]
        if len(shape) > 1:
            m, last = shape[1], shape[2:]
            choices += [
                (".transpose(0, 1)", (m, n, *last)),
                (".swapaxes(0, 1)", (m, n, *last)),
                (".movedim(0, 1)", (m, n, *last)),
                (f"[:, {self.dice.randrange(m)}]", (n, *last)),
                (".diagonal()", (*last, min(n, m))),
                ("[..., ::2]", (*shape[:-1], (shape[-1] + 1) // 2)),
                (".mT", (*shape[:-2], shape[-1], shape[-2])),
            ]
            choices += [(".detach().chunk(2, 1)[1]", (n, m // 2, *last))] if m > 3 else []
            choices += [(".unfold(0, 2, 1)", (n - 1, m, *last, 2))] if n > 1 else []
        text, result = self.dice.choice(choices)
        return expression + text, result

    def other(self, than: str, shape: tuple) -> str:
        """An expression of numbers of a shape, in other bytes than an expression's; views may be of any parameter."""
        same = [f"{name}.clone()" for name, (kind, of) in self.names.items() if kind == "view" and of == tuple(shape)]
        for name, of in self.shapes.items():
            if of == tuple(shape):
                others = than.startswith("model.") and not than.startswith(name)
                same.append(f"{name}.detach()" if others else f"{name}.detach().clone()")
        if same and self.chance(0.5):
            return self.dice.choice(same)
        return f"rand({self.number()}, *{tuple(shape)})"

    def gradient(self) -> str:
        """A parameter; after this there are gradients."""
        if not self.grads:
            backward(self)
        return self.param()


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation: how often it is chosen, where, and what adds its lines."""

    weight: float
    section: str
    write: Callable[[Writer], None]


OPS: dict[str, Op] = {}


def op(weight: float = 1.0, section: str = "steps") -> Callable:
    """Registers what adds lines to a program; section: "build", before prepare(), or "steps", after it."""

    def register(function):
        OPS[function.__name__] = Op(weight, section, function)
        return function

    return register


# ---- before prepare(); within gm.init() in half of the programs
@op(section="build")
def halve_weight(w):
    if "model.wide.weight" in w.shapes:
        rows = w.shapes["model.wide.weight"][0] * 3 // 4
        w.shapes["model.wide.weight"] = rows, SIZE
        w.add(
            w.pick(
                """model.wide.weight = nn.Parameter(model.wide.weight.data[:$r])
        ;; model.wide.weight = nn.Parameter(model.wide.weight.detach()[:$r])
        ;; model.wide.weight = nn.Parameter(model.wide.weight[:$r].detach())
        ;; model.wide.weight = nn.Parameter(model.wide.weight.data.split($r)[0])""",
                r=rows,
            )
        )


@op(section="build")
def swap_data(w):
    one, other = w.dice.sample(w.square(), 2)
    w.add(f"{one}.data, {other}.data = {other}.data, {one}.data")


@op(section="build")
def keep_detached(w):
    name = w.param()
    kept = w.new("v", "view", w.shapes[name])
    w.add(w.pick("$v = $x.detach() ;; $v = $x.data", v=kept, x=name))
    if w.chance(0.7):
        w.add(f"{name} = nn.Parameter(rand({w.number()}, *{w.shapes[name]}))")


@op(section="build")
def set_data(w):
    w.add(
        w.pick("""$p.data = rand($k, *$s) ;; $p.data = $p.data * 2 ;; $p.data = $p.data.clone() ;; $p.data = $p.detach()
      ;; $p.data = $p.to(torch.bfloat16).float()""")
    )


@op(section="build")
def aliasing_buffer(w):
    if not w.inside:
        w.add(
            w.pick(
                """model.register_buffer('extra', $x.data) ;; model.register_buffer('extra', $x.detach())
        ;; model.register_buffer('extra', $x.data[2:4])
        ;; model.register_buffer('extra', $x.detach()[1])""",
                x=w.param(2),
            )
        )


@op(section="build")
def buffer_of_replaced(w):
    """Of a parameter that another one takes the place of."""
    name = w.param(2)
    w.add(w.pick("model.register_buffer('extra', $x.data) ;; model.register_buffer('extra', $x.detach()[2:4])", x=name))
    w.add(f"{name} = nn.Parameter(rand({w.number()}, *{w.shapes[name]}))")


@op(section="build")
def copied_buffer(w):
    w.add(
        w.pick(
            """model.register_buffer('extra', $x.detach().clone())
      ;; model.register_buffer('extra', $x.detach()[2:4].clone())""",
            x=w.param(2),
        )
    )


@op(section="build")
def same_parameter(w):
    w.add(w.pick("$p = nn.Parameter($p)"))


@op(section="build")
def fresh_parameter(w):
    w.add(
        w.pick("""$p = nn.Parameter($p.detach().clone()) ;; $p = nn.Parameter(rand($k, *$s))
      ;; $p = nn.Parameter($p.data * 0.5)""")
    )


@op(section="build")
def parameter_of_another(w):
    """Two parameters over the same bytes."""
    one, other = w.dice.sample(w.square(), 2)
    first = w.dice.randrange(ROWS - SIZE + 1)
    w.add(
        w.pick(
            """$a = nn.Parameter($b.data) ;; $a = nn.Parameter($b.detach())
      ;; $a = nn.Parameter(model.wide.weight.data[$i:$j])""",
            a=one,
            b=other,
            i=first,
            j=first + SIZE,
        )
    )


@op(section="build")
def parametrize_early(w):
    parametrize(w)


@op(section="build")
def weight_norm_early(w):
    parametrize(w, WEIGHT_NORMS)


@op(section="build")
def remove_parametrization_early(w):
    parametrize_and_remove(w)


@op(section="build")
def tie(w):
    w.add("model.head.weight = model.embed.weight")
    w.shapes.pop("model.head.weight", None)


@op(section="build")
def round_trip_of_types(w):
    w.add(
        w.pick("""model.to(torch.bfloat16).to(torch.float32) ;; model.second.half().float() ;; model.double().float()
      ;; model.float()""")
    )


@op(section="build")
def initialise(w):
    w.add(
        w.pick(
            """nn.init.orthogonal_($x) ;; nn.init.trunc_normal_($x, std=0.1) ;; nn.init.zeros_($x)
      ;; nn.init.kaiming_uniform_($x)
      ;; model.apply(lambda m: m.reset_parameters() if hasattr(m, 'reset_parameters') else None)""",
            x=w.param(2),
        )
    )


@op(section="build")
def deep_copy_early(w):
    w.add(
        w.pick("""model.second = copy.deepcopy(model.first) ;; model = copy.deepcopy(model)
      ;; model.blocks = nn.ModuleList(copy.deepcopy(model.blocks[0]) for _ in range(4))""")
    )


@op(section="build")
def load_early(w):
    w.add(
        w.pick("""model.load_state_dict({n: v.clone() * 0.5 for n, v in model.state_dict().items()}, assign=True)
      ;; model.load_state_dict({n: v.clone() * 0.5 for n, v in model.state_dict().items()})
      ;; model.first.load_state_dict(model.second.state_dict())
      ;; model.first.load_state_dict({n: v.clone() for n, v in model.second.state_dict().items()}, assign=True)""")
    )


@op(0.5, section="build")
def load_assign_early(w):
    """Two modules have parameters over the same bytes then."""
    w.add("model.first.load_state_dict(model.second.state_dict(), assign=True)")


@op(section="build")
def vector_of_parameters(w):
    w.add("nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 0.5, model.parameters())")
    # Else torch's begin anywhere, and its kernels round accordingly.
    w.add("for p in model.parameters(): p.data = p.data.clone()")


@op(section="build")
def new_module(w):
    w.add(
        w.pick("""model.second = nn.Linear($size, $size) ;; model.blocks[2] = nn.Linear($size, $size, bias=False)
      ;; model.norm = nn.LayerNorm($size)""")
    )


@op(section="build")
def freeze_early(w):
    w.add(
        w.pick("""$p.requires_grad_(False) ;; model.first.requires_grad_(False) ;; model.blocks.requires_grad_(False)
      ;; model.requires_grad_(False).head.requires_grad_(True)""")
    )


@op(section="build")
def gradient_of_frozen(w):
    """Torch's optimizers look at gradients, not at requires_grad."""
    name = w.param()
    w.add(f"{name}.requires_grad_(False)")
    prepare(w)
    w.add(f"{name}.grad = rand({w.number()}, *{w.shapes[name]})")
    w.add("opt.step()", "stop")


@op(0.7, section="build")
def train_early(w):
    """Before prepare()."""
    w.add(f"loss = model(inp({w.number()})).square().mean()", "calm()")
    if w.chance(0.5):
        w.add("loss.backward()", "calm()")
        w.loss, w.grads = "spent", True


# ---- prepare()
PARAMS = """model.parameters() ;; model.parameters()
    ;; [{'params': [p for p in model.parameters() if p.dim() > 1]},
        {'params': [p for p in model.parameters() if p.dim() <= 1], 'lr': 0.01}]"""
OPTIMIZERS = """torch.optim.SGD($all, 0.05) ;; torch.optim.SGD($all, 0.05, momentum=0.9)
;; torch.optim.SGD($all, 0.05, momentum=0.9)
    ;; torch.optim.SGD($all, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01) ;; torch.optim.Adagrad($all, 0.01)
    ;; torch.optim.RMSprop($all, 0.001, momentum=0.5)
    ;; torch.optim.SGD($all, 0.05, momentum=0.5, dampening=0.1, maximize=True)"""


def prepare(w, optimizers=OPTIMIZERS, leaves=True):
    """As .to() of another device does, it moves parameters into the session, but not who else sees their bytes."""
    if w.prepared and leaves:
        w.add("leave()")  # which ends a backward pass that an exception has stopped
    if not w.prepared and not w.inside:
        for name in w.having("view"):
            w.add(f"{name} = None")
            del w.names[name]
    if not w.prepared and not w.inside:
        w.loss = "spent"  # the graph of a pass before is refused
    w.prepared, w.saved = True, False
    w.add(f"opt = prepare(model, {w.pick(optimizers, all=w.pick(PARAMS))})", "stop")


def prepare_again(w):
    """After parameters have come or gone."""
    prepare(w)
    w.grads = False


# ---- training
def loss(w):
    w.loss = "fresh"
    w.add(
        w.pick(
            """loss = model(inp($k)).square().mean() ;; loss = model(inp($k)).square().mean()
      ;; loss = F.cross_entropy(model(inp($k)).flatten(0, 1), inp($j).flatten())
      ;; loss = F.cross_entropy(model(inp($k)).flatten(0, 1), inp($j).flatten())
      ;; loss = checkpoint(model, inp($k), use_reentrant=False).square().mean()
      ;; loss = model(inp($k)).square().mean() + $p.square().sum()
      ;; with torch.autocast('cpu', torch.bfloat16): loss = model(inp($k)).float().square().mean()""",
            j=w.number(),
        ),
        "calm()",
    )


def backward(w):
    if w.loss != "fresh":
        loss(w)
    again = w.chance(0.1)
    w.add("loss.backward(retain_graph=True)" if again else "loss.backward()", "calm()")
    if again and w.chance(0.5):
        w.add("loss.backward()", "calm()")
        again = False
    w.loss = "fresh" if again else "spent"
    w.grads, w.lasting = True, False


@op(6)
def train(w):
    loss(w)
    if w.chance(0.2):
        w.some("views", "observe", "leave", "hook", "freeze", "copies", "evaluate", "autograd_grad", "submodule")
    backward(w)
    if w.chance(0.3):
        w.add("leave()")
    for _ in range(w.dice.choice((0, 0, 1, 1, 2))):
        w.some(
            "clip",
            "change_gradient",
            "keep_gradient",
            "assign_gradient",
            "observe",
            "assign_all_gradients",
            "views",
            "change_in_place",
        )
    w.add("opt.step()", "stop")
    if w.chance(0.85):
        w.call("zero_grad")


@op()
def leave(w):
    w.add("leave()")


@op()
def forward_backward(w):
    backward(w)


@op(0.7)
def step(w):
    w.add("opt.step()", "stop")


@op(0.5)
def step_with_closure(w):
    w.add(w.pick("obs(opt.step(lambda: closure($k)))"), "stop")
    w.grads, w.lasting = True, False


@op(0.7)
def zero_grad(w):
    w.add(
        w.pick("""opt.zero_grad() ;; opt.zero_grad() ;; model.zero_grad() ;; opt.zero_grad(set_to_none=False)
      ;; model.zero_grad(set_to_none=False)""")
    )
    w.grads = False


@op()
def evaluate(w):
    w.add("model.eval()")
    w.add(
        w.pick("""with torch.no_grad(): obs(model(inp($k))) ;; with torch.inference_mode(): obs(model(inp($k)))
      ;; obs(model(inp($k)))"""),
        "calm()",
    )
    if w.chance(0.8):
        w.add("model.train()")


@op(0.5)
def train_or_eval(w):
    w.add(w.pick("model.train() ;; model.eval() ;; model.batch.eval() ;; model.drop.eval()"))


@op(0.7)
def autograd_grad(w):
    names = ", ".join(w.dice.sample(sorted(w.shapes), 2))
    w.add(
        w.pick("obs(torch.autograd.grad(model(inp($k)).square().mean(), [$n], allow_unused=True))", n=names), "calm()"
    )


@op(0.5)
def own_graph(w):
    """A backward pass that the model's forward pass has no part in."""
    name = w.param(2)
    view = w.part(name, w.shapes[name])[0]
    w.add(w.pick("loss = ($v * 2).sum() + $p.square().mean()", v=view), "calm()")
    w.loss = "fresh"
    if w.chance(0.7):
        backward(w)


@op(0.4)
def second_derivative(w):
    w.add(w.pick("loss = model(inp($k)).square().mean()"), "calm()")  # by itself: hooks of it run in both processes
    w.add("obs(torch.autograd.grad(loss, [model.scale], create_graph=True))", "calm()")
    w.loss = "spent"


@op(0.3)
def backward_of_some(w):
    loss(w)
    w.add(f"loss.backward(inputs=[{', '.join(w.dice.sample(sorted(w.shapes), 2))}])", "calm()")
    w.loss, w.grads, w.lasting = "spent", True, False


@op(0.3)
def backward_too_late(w):
    """Torch refuses it: the step has changed what the backward pass wants."""
    loss(w)
    w.add("loss.backward(retain_graph=True)", "calm()")
    w.add("opt.step()", "stop")
    w.add("loss.backward()", "calm()")
    w.loss, w.grads, w.lasting = "spent", True, False


@op(0.3)
def backward_that_stops(w):
    """In its middle, by an exception of the user's."""
    handle = w.new("h", "hook")
    w.add(
        w.pick(
            """$h = model.first.register_full_backward_hook(lambda *_: 1 / 0)
      ;; $h = model.norm.register_full_backward_hook(lambda *_: 1 / 0)
      ;; $h = model.blocks[1].register_full_backward_hook(lambda *_: 1 / 0)""",
            h=handle,
        )
    )
    loss(w)
    w.add("loss.backward()", "calm()")
    w.add(f"{handle}.remove()")
    w.loss, w.grads, w.lasting = "spent", True, False


@op(0.2)
def prepare_after_stop(w):
    """The chunk of the function that the backward pass has stopped at is that of the new parameters, too."""
    w.add(w.pick("loss = model.head(model.second(rand($k, 2, $size))).square().sum()"), "calm()")
    w.add("loss.backward(retain_graph=True)", "calm()")
    w.add("opt.step()", "stop")
    w.add("loss.backward()", "calm()")
    w.add("model.norm = nn.LayerNorm(96)")
    prepare(w, leaves=False)
    w.grads = False


@op(0.3)
def saved_elsewhere(w):
    """What autograd saves goes through hooks."""
    how = w.pick("""torch.autograd.graph.save_on_cpu()
      ;; torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x)
      ;; torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().numpy().copy(), torch.from_numpy)""")
    w.add(f"with {how}: loss = model(inp({w.number()})).square().mean()", "calm()")
    w.loss = "fresh"
    backward(w)


@op(0.3)
def scaled_loss(w, factors="1 ;; 1 ;; float('inf')"):
    """torch.amp.GradScaler, by a power of two; some losses are infinite."""
    w.add("model.zero_grad()")
    w.add("scaler = torch.amp.GradScaler('cpu', init_scale=2.0 ** 10)")
    w.add(w.pick("scaler.scale(model(inp($k)).square().mean() * $f).backward()", f=w.pick(factors)), "calm()")
    w.add("scaler.step(opt)", "stop")
    w.add("scaler.update()")
    w.add("model.zero_grad()")
    w.loss, w.grads = "spent", False


@op(0.3)
def scaled_far(w):
    """Gradients are finite, their squares are not."""
    scaled_loss(w, "1e25 ;; 1e27")


@op(0.5)
def checkpointed(w):
    w.add(
        w.pick("""loss = checkpoint(lambda x: model(x).square().mean(), inp($k), use_reentrant=False)
      ;; loss = checkpoint(model.first, rand($k, 3, $size).requires_grad_(), use_reentrant=True).sum()
      ;; loss = checkpoint(lambda x: model.first(x) @ model.table[0], rand($k, 3, 96), use_reentrant=False).sum()"""),
        "calm()",
    )
    w.loss = "fresh"
    if w.chance(0.8):
        backward(w)


@op(0.3)
def offloaded(w):
    w.add(w.pick("with offload(): loss = model(inp($k)).square().mean()"), "calm()")
    w.loss = "fresh"
    backward(w)


@op(0.3)
def submodule(w):
    w.add(
        w.pick("""obs(model.first(rand($k, 3, $size))) ;; obs(model.forward(inp($k)))
      ;; obs(model.norm(rand($k, $size)))"""),
        "calm()",
    )


# ---- views, copies, and what changes bytes
@op(3)
def views(w):
    expression, shape = w.target()
    for _ in range(w.dice.choice((1, 1, 2))):
        expression, shape = w.part(expression, shape)
    w.add(f"{w.new('v', 'view', shape)} = {expression}")


@op(0.3)
def view_without_gradient(w):
    """Of which torch asks for no gradient function, as long as nobody computes with it."""
    name = w.param()
    expression, shape = w.part(name, w.shapes[name])
    kept = w.new("v", "without gradient", shape)
    w.add(f"with torch.no_grad(): {kept} = {expression}")
    w.call("train")
    w.add(w.pick("obs($v.cpu()) ;; obs($v.detach()) ;; obs($v.contiguous()) ;; obs($v.float())", v=kept))


@op(1.5)
def copies(w):
    expression, shape = w.target()
    w.add(
        w.new("c", "copy")
        + " = "
        + w.pick(
            """
      $x.clone() ;; $x.detach().clone() ;; $x * 2 ;; $x.detach() + 1 ;; torch.zeros_like($x) ;; $x.double() ;; $x.exp()
      ;; torch.stack([$x, $x])[0] ;; $x.new_ones(*$of) ;; copy.deepcopy($x.detach()) ;; $x.to(torch.bfloat16)
      ;; $x.sum()
      ;; torch.cat([$x.reshape(-1), $x.reshape(-1)]).detach() ;; torch.empty_like($x).copy_($x) ;; torch.ones_like($x)
      ;; torch.tensor($x.detach().tolist()) ;; $x.to('cpu', copy=True) ;; $x.sort(-1)[0] ;; torch.rand_like($x)
      ;; pickle.loads(pickle.dumps($x.detach())) ;; F.pad($x, (1, 1))
      ;; $x.clone().detach()""",
            x=expression,
            of=shape,
        )
    )


@op(4)
def change_in_place(w):
    expression, shape = w.target()
    if w.chance(0.3):
        expression, shape = w.part(expression, shape)
    if w.loss == "fresh" and w.chance(0.7):
        backward(w)
    w.add(
        "with torch.no_grad(): "
        + w.pick(
            """
      $x.mul_(0.5) ;; $x.add_(0.25) ;; $x.copy_($y) ;; $x.fill_(0.5) ;; $x.zero_() ;; $x[...] = 0.125
      ;; $x.clamp_(-0.1, 0.1)
      ;; $x.neg_() ;; $x.masked_fill_($x > 0, 0.25) ;; torch.add($x, 1, out=$x) ;; torch.mul($y, 2, out=$x)
      ;; $x.sub_($y)
      ;; $x.addcmul_($y, $y) ;; torch._foreach_mul_([$x], 0.5) ;; torch._foreach_add_([$x], [$y]) ;; $x.lerp_($y, 0.5)
      ;; nn.init.normal_($x) ;; nn.init.uniform_($x) ;; F.relu($x, inplace=True) ;; torch.ops.aten.mul_($x, 2)
      ;; $x.exp_()
      ;; torch.ops.aten.add_.Tensor($x, $y) ;; $x.bernoulli_(0.5) ;; $x.cumsum_(0) ;; $x.__imul__(2)
      ;; torch.neg($y, out=$x)
      ;; $x.copy_($x.flip(0)) ;; $x.copy_($x * 2) ;; $x.index_fill_(0, torch.tensor([0]), 0.5) ;; $x[0] = $x[-1]
      ;; $x.index_add_(0, torch.tensor([0, 0]), $x[:1].repeat(2, *[1] * ($x.dim() - 1))) ;; $x[$x > 0] = 0.5
      ;; $x.apply_(lambda x: x / 2) if $x.numel() < 100 else None ;; $x.random_(0, 3) ;; $x.div_($y.abs() + 1)
      ;; $x.normal_(generator=torch.Generator().manual_seed(3)) ;; torch.where($x > 0, $x, $y, out=$x)
      ;; torch.clamp($x, -0.5, 0.5, out=$x) ;; $x.flatten()[0:1].add_(1) ;; $x.round_(decimals=2) ;; $x.data.mul_(0.5)
      ;; $x.data.copy_($y) ;; $x.detach().add_(0.5) ;; $x.view(-1)[:3].zero_() ;; $x.pow_(2) ;; $x.sqrt_().nan_to_num_()
      ;; $x.resize_(3) ;; $x.t_() if $x.dim() == 2 and $x.shape[0] == $x.shape[1] else None
      ;; $x.erfinv_().nan_to_num_(0, 1, -1)
      ;; $x.scatter_(0, torch.zeros_like($x, dtype=torch.int64), 0.5) ;; torch.cat([$x.detach().clone()], out=$x)
      ;; $x.put_(torch.tensor([0]), torch.tensor([0.5]))
      ;; torch.sum($y, 0, out=$x[0])""",
            x=expression,
            y=w.other(expression, shape),
        )
    )


@op(0.4)
def overwrite_by_itself(w):
    if w.chance(0.2):
        w.add("model.load_state_dict(model.state_dict())")
        return
    w.add(
        "with torch.no_grad(): "
        + w.pick(
            """
      $x.copy_($x) ;; $x.copy_($x.detach()) ;; $x.fill_($x.flatten()[0]) ;; $x.copy_($x[:1]) ;; $x.copy_($x.view_as($x))
      ;; torch.ops.aten.copy_($x, $x) ;; $x[...] = $x ;; $x.data = $x.data
      ;; torch._foreach_copy_([$x], [$x])""",
            x=w.target()[0],
        )
    )


@op(0.6)
def refused_by_torch(w):
    """Nothing has changed then."""
    if w.chance(0.2):  # a leaf that needs a gradient
        w.add(w.pick("$p.zero_() ;; $p.copy_(rand(0, 1)) ;; $p.normal_() ;; $p.fill_(3)"))
        return
    w.add(
        "with torch.no_grad(): "
        + w.pick(
            """
      $x.copy_(rand(0, 3, 5, 7)) ;; $x.uniform_(2, 1) ;; $x.normal_(0, -1) ;; $x.fill_(rand(0, 3))
      ;; $x.add_(rand(0, 3, 5, 7))
      ;; $x.bernoulli_(2.0) ;; $x.exponential_(-1) ;; torch.add($x, rand(0, 3, 5, 7), out=$x) ;; $x[10**6] = 1
      ;; $x.zero_(1)
      ;; $x.index_fill_(9, torch.tensor([0]), 1) ;; $x.grad.copy_(rand(0, 3, 5, 7)) ;; $x.geometric_(2.0)
      ;; $x.random_(5, 2)
      ;; $x.log_normal_(0, -1) ;; $x.copy_('no')""",
            x=w.target()[0],
        )
    )


@op(0.4)
def change_leaf(w):
    """Which torch refuses: it needs a gradient."""
    w.add(w.pick("$p.mul_(2) ;; $p.add_(1) ;; $p.clamp_(0, 1) ;; $p.__setitem__(0, 1) ;; $p.exp_()"))


@op(0.8)
def foreach(w):
    names = w.dice.sample(sorted(w.shapes), w.dice.choice((2, 5)))
    group = "[" + ", ".join(f"{name}.data" for name in names) + "]"
    w.add(
        w.pick(
            """torch._foreach_mul_($g, 0.5) ;; torch._foreach_add_($g, $g, alpha=0.5) ;; obs(torch._foreach_norm($g))
      ;; obs(torch._foreach_mul($g, 2.0)) ;; torch._foreach_copy_($g, [one * 2 for one in $g])
      ;; torch._foreach_zero_($g)
      ;; torch._foreach_lerp_($g, [torch.ones_like(one) for one in $g], 0.25)""",
            g=group,
        )
    )


@op(1.5)
def observe(w):
    w.add(
        "obs("
        + w.pick(
            """
      $x.sum() ;; $x.tolist() ;; str($x) ;; repr($x) ;; $x.flatten()[0].item() ;; bool($x.any())
      ;; float($x.detach().norm())
      ;; $x.detach().numpy() ;; numpy.asarray($x.detach()) ;; $x.argmax() ;; len($x) ;; torch.equal($x, $x.clone())
      ;; $x.mean()
      ;; sum(one.sum() for one in $x.detach().reshape(-1)[:5]) ;; $x is $x
      ;; torch.from_dlpack($x.detach()).clone() ;; $x.max()
      ;; $x.std(unbiased=False) ;; $x.detach().cpu().numpy().sum() ;; $x.requires_grad ;; $x.is_leaf ;; $x.dtype
      ;; $x.shape
      ;; torch.as_tensor($x) ;; $x.__len__() ;; f'{$x.flatten()[0]:.3f}' ;; $x.new_tensor([1.0])
      ;; torch.isfinite($x).all()
      ;; $x.equal($x) ;; $x.nonzero().shape ;; torch.unique($x.detach()).shape ;; $x.histc(4)
      ;; numpy.array($x.detach().tolist())
      ;; [one.sum() for one in torch.unbind($x.detach())][:3] ;; torch.save($x.detach(), io.BytesIO()) ;; $x.type()
      ;; memoryview($x.detach().numpy()).nbytes ;; torch.utils._pytree.tree_map(torch.sum, [$x.detach()])
      ;; torch.ops.aten.sum($x) ;; torch.ops.aten.alias($x.detach()) ;; torch.ops.aten.view($x.detach(), [-1])
      ;; $x.detach().view(torch.int32)""",
            x=w.target()[0],
        )
        + ")"
    )


@op(0.6)
def plain_write(w):
    """Through memory that torch shares with numpy or DLPack."""
    w.add(
        w.pick(
            """$x.detach().numpy()[...] = 1 ;; numpy.asarray($x.detach()).fill(2)
      ;; torch.from_dlpack($x.detach()).fill_(3)
      ;; torch.from_numpy($x.detach().numpy()).mul_(2) ;; torch.as_tensor($x.detach().numpy()).zero_()
      ;; torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack($x.detach())).fill_(3)
      ;; torch.asarray($x.detach().numpy()).add_(1)""",
            x=w.target()[0],
        )
    )


@op(0.4)
def plain_alias(w):
    """Memory that torch shares with numpy, which is read later."""
    w.add(w.pick("$n = $p.detach().numpy()", n=w.new("n", "numpy")))


@op(0.5)
def storage(w):
    w.add(
        w.pick(
            """obs(bytes($x.untyped_storage().tolist()[:64])) ;; obs($x.untyped_storage().nbytes() > 0)
      ;; obs(torch.tensor([], dtype=torch.float32).set_($x.untyped_storage()).sum())""",
            x=w.target()[0],
        )
    )


@op(0.3)
def storage_write(w):
    w.add(w.pick("$p.untyped_storage().fill_(0)"))


@op(0.3)
def other_class(w):
    """Torch's views of another class share the bytes."""
    w.add(
        "obs("
        + w.pick(
            """
      $x.as_subclass(torch.Tensor).sum() ;; $x.detach().as_subclass(Sub).sum() ;; torch.empty(0).set_($x.detach()).sum()
      ;; torch.Tensor._make_subclass(torch.Tensor, $x.detach()).sum()
      ;; torch.nested.nested_tensor([$x.detach(), $x.detach()]).to_padded_tensor(0).sum()""",
            x=w.target()[0],
        )
        + ")"
    )


@op(0.3)
def shallow_copy(w):
    name = w.param()
    w.add(f"{w.new('v', 'view', w.shapes[name])} = copy.copy({name})")


@op(0.3)
def custom_op(w):
    """An operator of the user's that changes its argument."""
    w.add(f"with torch.no_grad(): torch.ops.gemini_tests.halve({w.target()[0]})")


# ---- parameters that are replaced, data that is swapped
@op(0.5)
def set_data_late(w):
    w.add(
        w.pick("""$p.data = rand($k, *$s) ;; $p.data = $p.data * 2 ;; $p.data = $p.data ;; $p.data = $p.detach()[:1]
      ;; $p.data = $p.data.clone()""")
    )


@op(0.4)
def move(w):
    w.add(
        w.pick("""model.half() ;; model.to(torch.bfloat16) ;; model.cpu() ;; model.float() ;; model.to('cpu')
      ;; model.double()
      ;; model.first.to(torch.float16) ;; model.to(torch.float32) ;; model.share_memory()
      ;; model.requires_grad_(True)""")
    )


@op(0.5)
def replace_parameter(w):
    w.add(
        w.pick("""$p = nn.Parameter(rand($k, *$s)) ;; $p = nn.Parameter($p.detach().clone())
      ;; $p = nn.Parameter($p.data * 0.5)""")
    )
    prepare_again(w)


@op(0.3)
def parameter_of_itself(w):
    """Of the bytes of the one that it takes the place of."""
    w.add(w.pick("$p = nn.Parameter($p.data) ;; $p = nn.Parameter($p.detach())"))
    prepare_again(w)


@op(0.4)
def replace_module(w):
    w.add(
        w.pick("""model.second = nn.Linear($size, $size) ;; model.second = copy.deepcopy(model.first)
      ;; model.blocks[2] = nn.Linear($size, $size, bias=False) ;; model.norm = nn.LayerNorm($size)
      ;; model.blocks = nn.ModuleList(copy.deepcopy(model.blocks[0]) for _ in range(4))""")
    )
    prepare_again(w)


@op(0.3)
def exchange_parameters(w):
    """Or let two modules have one, or one have none, or its own again."""
    one, other = w.dice.sample(w.square(), 2)
    w.add(
        w.pick(
            """$a, $b = $b, $a ;; $a = $b ;; model.head.weight = model.embed.weight ;; model.first.bias = None
      ;; model.second.bias = None""",
            a=one,
            b=other,
        )
    )
    w.shapes.pop("model.first.bias", None), w.shapes.pop("model.second.bias", None)
    if w.chance(0.5):
        w.add(f"{one} = nn.Parameter({one}.detach().clone())")
        prepare_again(w)


@op(0.3)
def load_assign(w):
    w.add(
        w.pick("""model.load_state_dict({n: v.clone() * 0.5 for n, v in model.state_dict().items()}, assign=True)
      ;; model.load_state_dict(through_file({n: value.clone() for n, value in model.state_dict().items()}), assign=True)
      ;; model.first.load_state_dict({n: v.clone() for n, v in model.second.state_dict().items()}, assign=True)""")
    )
    prepare_again(w)


@op(0.2)
def load_assign_of_tied(w):
    """Torch's copies of what shares bytes share bytes, too."""
    w.add("model.head.weight = model.embed.weight")
    prepare(w)
    w.add("model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)")
    prepare_again(w)
    w.shapes.pop("model.head.weight", None)
    w.call("train")


@op(0.2)
def load_assign_uncopied(w):
    w.add("model.load_state_dict(model.state_dict(), assign=True)")
    prepare_again(w)


PARAMETRIZATIONS = """nn.utils.parametrizations.spectral_norm(model.$l)
    ;; nn.utils.prune.random_unstructured(model.$l, 'weight', amount=0.3)"""
WEIGHT_NORMS = """nn.utils.parametrizations.orthogonal(model.$l) ;; nn.utils.parametrizations.weight_norm(model.$l)
    ;; nn.utils.weight_norm(model.$l) ;; nn.utils.spectral_norm(model.$l)"""


def parametrize(w, names=PARAMETRIZATIONS):
    layer = w.dice.choice(("first", "second", "wide"))
    w.add(w.pick(names, l=layer))
    w.shapes.pop(f"model.{layer}.weight", None)


def parametrize_and_remove(w):
    layer = w.dice.choice(("first", "second", "wide"))
    w.add(
        w.pick(
            """nn.utils.parametrizations.weight_norm(model.$l) ;; nn.utils.parametrizations.spectral_norm(model.$l)
      ;; nn.utils.parametrizations.orthogonal(model.$l)""",
            l=layer,
        )
    )
    # Where the library refuses what torch does in it, torch has computed the weight before, which changes buffers of
    # some.
    w.add(f"nn.utils.parametrize.remove_parametrizations(model.{layer}, 'weight')", "stop")
    w.shapes.pop(f"model.{layer}.weight", None)


@op(0.4)
def parametrize_late(w):
    parametrize(w)
    prepare_again(w)


@op(0.4)
def weight_norm_late(w):
    parametrize(w, WEIGHT_NORMS)
    prepare_again(w)


@op(0.4)
def remove_parametrization_late(w):
    parametrize_and_remove(w)
    prepare_again(w)


# ---- buffers
@op(0.4)
def buffer_of_a_parameter(w):
    """Torch shares its bytes with the parameter."""
    w.add(
        w.pick(
            """model.register_buffer('extra', $x.data) ;; model.register_buffer('extra', $x.detach())
      ;; model.register_buffer('extra', $x.data[2:4])""",
            x=w.param(2),
        )
    )


@op(0.4)
def buffers(w):
    w.add(
        w.pick(
            """model.register_buffer('extra', $x.detach()[:3].clone()) ;; model.batch.running_mean.add_(0.5)
      ;; model.batch.running_var.mul_(2) ;; model.batch.reset_running_stats()
      ;; model.batch.running_mean = torch.ones($size)""",
            x=w.param(2),
        )
    )


# ---- gradients
@op(0.8)
def clip(w):
    """Once: the second time the norm would be that of gradients that have been rounded."""
    w.gradient()
    if not w.lasting:
        w.lasting = True
        w.add(
            w.pick("""obs(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        ;; obs(nn.utils.clip_grad_norm_(model.parameters(), 1e6))
        ;; nn.utils.clip_grad_value_(model.parameters(), 0.01)
        ;; obs(nn.utils.clip_grad_norm_(list(model.parameters())[:3], 0.1))
        ;; obs(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        ;; obs(nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=1))
        ;; obs(nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=float('inf')))
        ;; obs(nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False))"""),
            "calm()",
        )


@op()
def change_gradient(w):
    w.add(
        w.pick(
            """$g.mul_(0.5) ;; $g.add_(0.125) ;; $g *= 0.25 ;; $g[1:3] *= 0.5 ;; $g.data.mul_(2) ;; $g.zero_()
      ;; $g.neg_()
      ;; $g.clamp_(-0.01, 0.01) ;; $g.copy_($g * 2) ;; $g.detach_() ;; $g.data = $g.data * 2
      ;; torch._foreach_mul_([$g], 0.5)
      ;; torch._foreach_mul_([$g], [torch.tensor(0.5)]) ;; $g.mul_(torch.tensor(0.5)) ;; $g.div_(2) ;; $g.mul_($g)
      ;; $g.normal_()""",
            g=f"{w.gradient()}.grad",
        )
    )


@op(0.3)
def scale_gradient_often(w):
    """By what is no power of two, so that each multiplication rounds."""
    gradient = f"{w.gradient()}.grad"
    w.add(f"{gradient}.mul_(0.3)")
    w.add(
        w.pick(
            """$g.mul_(0.7) ;; obs(nn.utils.clip_grad_norm_(model.parameters(), 0.1)) ;; obs($g.norm())
      ;; obs(torch.linalg.vector_norm($g))
      ;; obs(torch._foreach_norm([p.grad for p in model.parameters() if p.grad is not None]))""",
            g=gradient,
        ),
        "calm()",
    )


@op(0.4)
def scale_gradient_by_changed_factor(w):
    name, factor = w.gradient(), w.new("f", "factor")
    w.add(f"{factor} = torch.tensor(0.5)")
    w.add(f"{name}.grad.mul_({factor})")
    w.add(
        w.pick(
            """$f.data.fill_(0.25) ;; $f.data = torch.tensor(0.125) ;; $f.fill_(0.25)
      ;; $f.numpy().fill(4)""",
            f=factor,
        )
    )
    w.add(f"{w.param() if w.chance(0.3) else name}.grad.mul_({factor})")


@op(0.3)
def delete_gradient(w):
    w.add(f"del {w.gradient()}.grad")


@op(0.3)
def gradient_of_another(w):
    """Two parameters have one gradient then."""
    backward(w)
    one, other = w.dice.sample(w.square(), 2)
    w.add(f"{one}.grad = {other}.grad")
    w.add(w.pick("$b.grad.mul_(2) ;; $a.grad.zero_()", a=one, b=other))


@op(0.3)
def gradient_of_another_layout(w):
    name = w.dice.choice(w.square())
    w.add(w.pick("if $x.requires_grad: $x.grad = rand($k, $size, $size).t()", x=name))
    w.add("obs(nn.utils.clip_grad_norm_(model.parameters(), 1e6))", "calm()")


@op(0.7)
def keep_gradient(w):
    name = w.gradient()
    w.add(
        w.pick(
            """$g = $x.grad ;; $g = $x.grad ;; $g = $x.grad[1:] ;; $g = $x.grad.detach() ;; $g = $x.grad.view(-1)
      ;; $g = $x.grad.data""",
            g=w.new("g", "gradient", w.shapes[name]),
            x=name,
        )
    )


@op(0.5)
def change_kept_gradient(w):
    kept = w.having("gradient")
    if kept:
        w.add(w.pick("$g.mul_(0.5) ;; $g.add_(1) ;; $g.zero_() ;; $g.copy_(rand(3, 1))", g=w.dice.choice(kept)))


@op(0.8)
def assign_gradient(w):
    own = " ;; $p.grad * 0.5 ;; $p.grad.clone() ;; $p.grad ;; $p.grad.detach()" if w.grads else ""
    name = w.param()
    value = w.pick(
        """rand($k, *$s) ;; None ;; torch.zeros_like($p) ;; $p.detach() * 0.1
  ;; torch.ones_like($p)"""
        + own,
        p=name,
        s=w.shapes[name],
    )
    w.add(f"if {name}.requires_grad: {name}.grad = {value}")


@op(0.3)
def assign_gradient_that_changes(w):
    """The tensor that was assigned is the gradient, also for who changes it afterwards."""
    name = w.param()
    kept = w.new("g", "assigned", w.shapes[name])
    w.add(f"{kept} = rand({w.number()}, *{w.shapes[name]})")
    w.add(f"if {name}.requires_grad: {name}.grad = {kept}")
    w.add(w.pick("$g.mul_(2) ;; $g.zero_() ;; $g.add_(1)", g=kept))


@op(0.5)
def assign_all_gradients(w):
    w.gradient()
    w.add(
        w.pick("""for p in model.parameters(): p.grad = torch.ones_like(p) if p.requires_grad else None
      ;; for p in model.parameters(): p.grad = None if p.grad is None else p.grad.clone()
      ;; for p in model.parameters(): p.grad = torch.full_like(p, 0.01) if p.requires_grad else None
      ;; kept = [p.grad.clone() for p in model.parameters() if p.grad is not None]
      ;; for p in model.parameters(): p.grad = p.detach() * 0.01 if p.requires_grad else None"""),
        "calm()",
    )


@op(0.3)
def assign_kept_gradients(w):
    """Of all parameters, one after another, as PCGrad does."""
    w.gradient()
    w.add("kept = [None if p.grad is None else p.grad.clone() for p in model.parameters()]")
    # Copies, as kept would change with them in torch alone, which is what assign_gradient_that_changes is for.
    w.add("for p, g in zip(model.parameters(), kept): p.grad = None if g is None else g.clone()", "calm()")


# ---- freezing, hooks
@op()
def freeze(w):
    w.add(
        w.pick("""$p.requires_grad_(False) ;; model.first.requires_grad_(False) ;; $p.requires_grad = False
      ;; model.requires_grad_(True) ;; model.first.requires_grad_(True) ;; model.blocks.requires_grad_(False)
      ;; $p.requires_grad_(True)""")
    )


@op(0.8)
def hook(w):
    w.add(
        w.new("h", "hook")
        + " = "
        + w.pick("""
      $p.register_hook(lambda g: g * 0.5) ;; $p.register_hook(lambda g: obs(g))
      ;; $p.register_post_accumulate_grad_hook(lambda p: obs(p.grad.mul_(0.5)))
      ;; $p.register_post_accumulate_grad_hook(lambda p: obs(p.grad))
      ;; $p.register_post_accumulate_grad_hook(lambda p: obs(opt.state_dict()['state']))
      ;; model.memory.weight_hh_l0.register_post_accumulate_grad_hook(lambda p: obs(opt.state_dict()['state']))
      ;; model.memory.weight_hh_l0.register_post_accumulate_grad_hook(lambda p: obs(p.sum() + model.head.weight.sum()))
      ;; model.memory.weight_ih_l0.register_hook(lambda g: obs(g.sum() + model.table.sum()))
      ;; model.first.register_forward_hook(lambda m, i, o: o * 2)
      ;; model.norm.register_forward_pre_hook(lambda m, i: (i[0] * 0.5,))
      ;; model.second.register_full_backward_hook(lambda m, i, o: obs(o[0]))
      ;; model.register_forward_hook(lambda m, i, o: o + m.scale.sum())
      ;; model.first.register_forward_pre_hook(lambda m, i: obs(m.weight.sum()))
      ;; model.blocks[0].register_full_backward_pre_hook(lambda m, o: obs(m.weight))
      ;; model.register_state_dict_post_hook(lambda m, d, *_: None)""")
    )


@op(0.4)
def unhook(w):
    hooks = w.having("hook")
    if hooks:
        w.add(f"{w.dice.choice(hooks)}.remove()")


# ---- optimizers
@op(0.7)
def new_optimizer(w):
    prepare(w)


@op(0.3)
def optimizer_over_all(w):
    prepare(w, "GlobalNorm($all) ;; Counting($all)")


@op(0.3)
def optimizer_with_closure(w):
    prepare(w, "Sam($all)")
    w.call("step_with_closure")
    prepare(w)


@op(0.3)
def optimizer_hook(w):
    w.add("raw = torch.optim.SGD(model.parameters(), 0.05)")
    w.add(
        w.pick("""h0 = raw.register_step_pre_hook(lambda *_: obs('step'))
      ;; h0 = raw.register_step_post_hook(lambda *_: obs('step'))""")
    )
    w.add("opt = prepare(model, raw)", "stop")


@op(0.5)
def rate(w):
    w.add(
        w.pick("""opt.param_groups[0]['lr'] *= 0.5 ;; opt.param_groups[-1]['lr'] = 0.02
      ;; opt.param_groups[0]['weight_decay'] = 0.01
      ;; sched = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5) ;; for g in opt.param_groups: g['lr'] = g['lr'] / 2""")
    )
    if any(line.text.startswith("sched = ") for line in w.lines) and w.chance(0.5):
        w.add("sched.step()")


@op(0.5)
def optimizer_state(w):
    """By state_dict()."""
    w.add(
        w.pick("""opt.load_state_dict(opt.state_dict())
      ;; opt.load_state_dict(pickle.loads(pickle.dumps(opt.state_dict())))
      ;; saved = copy.deepcopy(opt.state_dict())""")
    )
    if any(line.text.startswith("saved = ") for line in w.lines) and w.chance(0.5):
        w.add("opt.load_state_dict(copy.deepcopy(saved))")  # torch's optimizer takes these tensors themselves


@op(0.3)
def optimizer_state_of_a_parameter(w):
    # Of a parameter without a state, torch makes an empty one when it is looked at, and we do not save that.
    p = w.param()
    w.add(
        f"if {p} in opt.state: "
        + w.pick(
            """obs(sorted(opt.state[$p])) ;; opt.state.clear()
      ;; obs(opt.state[$p].get('momentum_buffer')) ;; obs(len(opt.state))
      ;; opt.state[$p]['momentum_buffer'].mul_(0.5) ;; opt.state.pop($p)""",
            p=p,
        )
    )


@op(0.3)
def unprepared_optimizer(w):
    w.gradient()
    w.add("torch.optim.SGD(model.parameters(), 0.01).step()", "stop")


@op(0.3)
def two_optimizers(w):
    """Each for a part of the parameters."""
    w.add("some = list(model.first.parameters()) + [model.scale]")
    w.add("opt = prepare(model, torch.optim.SGD(some, 0.05, momentum=0.9))", "stop")
    w.add("others = [p for p in model.parameters() if all(p is not q for g in opt.param_groups for q in g['params'])]")
    w.add("rest = prepare(model, torch.optim.SGD(others, 0.01))", "stop")
    backward(w)
    w.add("rest.step()", "stop")
    if w.chance(0.5):
        w.add("rest.zero_grad()")


@op(0.3)
def add_group(w):
    w.add("others = [p for p in model.parameters() if all(p is not q for g in opt.param_groups for q in g['params'])]")
    w.add("opt.add_param_group({'params': others})", "stop")


# ---- copies of the model, saves and loads
@op(1.2)
def deep_copy(w):
    w.add(
        w.pick(
            """$m = copy.deepcopy(model) ;; $m = copy.deepcopy(model) ;; $m = pickle.loads(pickle.dumps(model))
      ;; $m = AveragedModel(model).module""",
            m=w.new("m", "module"),
        )
    )


@op(0.6)
def use_copy(w):
    copies = w.having("module")
    if copies:
        w.add(
            w.pick(
                """obs($m(inp(3))) ;; $m(inp(4)).square().mean().backward() ;; model.load_state_dict($m.state_dict())
        ;; $m.load_state_dict(model.state_dict())
        ;; for a, b in zip($m.parameters(), model.parameters()): a.data.lerp_(b.data, 0.5)
        ;; for a, b in zip($m.state_dict().values(), model.state_dict().values()): a.copy_(b)""",
                m=w.dice.choice(copies),
            ),
            "calm()",
        )


@op(0.3)
def average(w):
    """Of the parameters after each step."""
    w.add("swa = AveragedModel(model)")
    for _ in range(2):
        w.call("train")
        w.add("swa.update_parameters(model)")


@op(0.3)
def second_model(w):
    """Beside the first one, in the same session."""
    name = w.new("m", "module")
    w.add(f"{name} = Net()")
    w.add(f"{name}_opt = prepare({name}, torch.optim.SGD({name}.parameters(), 0.05, momentum=0.5))", "stop")
    w.add(w.pick("loss = ($m(inp($k)) - model(inp($k))).square().mean()", m=name), "calm()")
    w.add("loss.backward()", "calm()")
    w.add(f"{name}_opt.step()", "stop")
    w.add(f"{name}_opt.zero_grad()")
    w.loss, w.grads, w.lasting = "spent", True, False


@op(0.8)
def keep_state(w):
    w.add(
        w.new("s", "state")
        + " = "
        + w.pick("""
      {name: value.clone() for name, value in model.state_dict().items()} ;; copy.deepcopy(model.state_dict())
      ;; {name: value.detach().cpu().clone() for name, value in model.named_parameters()}
      ;; through_file(model.state_dict())
      ;; pickle.loads(pickle.dumps(model.state_dict())) ;; through_file(model).state_dict()""")
    )


@op(0.4)
def safetensors_state(w):
    w.add(f"{w.new('s', 'state')} = through_safetensors(model.state_dict())")


@op(0.3)
def keep_state_uncopied(w):
    """Torch's are the parameters' bytes, which go on changing."""
    w.add(f"{w.new('s', 'uncopied')} = model.state_dict()")


@op(0.3)
def change_by_state(w):
    w.add(
        w.pick("""for value in model.state_dict().values(): value.mul_(2) ;; model.state_dict()['scale'].fill_(0.5)
      ;; for value in model.first.state_dict().values(): value.zero_()"""),
        "stop",
    )


@op(0.7)
def load_state(w):
    kept = w.having("state")
    if kept:
        w.add(f"model.load_state_dict({w.dice.choice(kept)}, strict=False)")


@op(0.5)
def save_and_load(w):
    """By gm.save() and gm.load(), which know no gradients; torch alone keeps copies."""
    w.add("model.zero_grad()")
    w.add("store(model, opt)")
    w.grads, w.saved = False, True


@op(0.5)
def load_saved(w):
    if w.saved:
        w.add("model.zero_grad()")
        w.add("fetch(model, opt)")
        w.grads = False


# ---- torch.func, modes, units
@op(0.5)
def functional(w):
    layer = w.dice.choice([name[: -len(".weight")] for name in w.square() if name.endswith(".weight")])
    w.add(
        "obs("
        + w.pick(
            """
      torch.func.functional_call(model, {n: v.detach().clone() for n, v in model.named_parameters()}, inp($k))
      ;; torch.func.grad(lambda x: F.linear(rand($k, 3, $size), x).sum())($x.detach().clone())
      ;; torch.func.vmap(lambda x: x @ $x.detach())(rand($k, 3, 2, $size))
      ;; torch.func.grad(lambda x: x.square().sum())($x)
      ;; torch.vmap(lambda x: x * 2)($x.detach())
      ;; torch.func.functional_call($l, {'weight': $x.detach().clone()}, rand($k, 3, $size))
      ;; torch.func.functional_call($l, {'weight': $x * 2}, rand($k, 3, $size))""",
            l=layer,
            x=w.dice.choice(w.square()),
        )
        + ")",
        "calm()",
    )


@op(0.4)
def transform_over_closure(w):
    w.add(
        "obs("
        + w.pick(
            """
      torch.func.grad(lambda x: (x @ $x).sum())(rand($k, 3, $size))
      ;; torch.func.jacfwd(lambda x: x @ $x.detach())(rand($k, $size))
      ;; torch.func.jvp(lambda x: x @ $x, (rand($k, 3, $size),), (rand(0, 3, $size),))[1]
      ;; torch.func.vjp(lambda x: x @ $x, rand($k, 3, $size))[0]
      ;; torch.func.jacrev(lambda x: x @ $x.detach())(rand($k, $size))
      ;; torch.func.grad(lambda x: model.first(x).sum())(rand($k, 3, $size))
      ;; torch.func.hessian(lambda x: (x @ $x.detach()).square().sum())(rand($k, $size))[:2]""",
            x=w.dice.choice(w.square()),
        )
        + ")",
        "calm()",
    )


@op(0.4)
def forward_mode(w):
    w.add(
        w.pick(
            """with forward_ad.dual_level(): obs(forward_ad.unpack_dual(
      forward_ad.make_dual(rand(1, 2, $size), rand(2, 2, $size)) @ $x.detach()).tangent)""",
            x=w.dice.choice(w.square()),
        )
    )


@op(0.4)
def inference(w):
    expression, shape = w.target()
    w.add(f"with torch.inference_mode(): {w.new('v', 'inference', shape)} = {expression}[:1]")


@op(0.4)
def unit(w):
    """Parameters that come and go together."""
    w.add(
        w.pick("""unit(model.first) ;; unit(model.blocks[0]) ;; unit(model.blocks[1]) ;; unit(model.norm)
      ;; unit(model.wide)
      ;; unit(model.embed)""")
    )


@op(0.3)
def write_in_unit(w):
    layer = w.dice.choice(("first", "blocks[0]", "second"))
    w.add(f"unit(model.{layer})")
    w.add(
        w.pick(
            """$h = model.$l.register_forward_pre_hook(lambda m, i: obs(m.weight.data.clamp_(-0.05, 0.05)))
      ;; $h = model.$l.register_forward_pre_hook(lambda m, i: obs(m.weight.data.mul_(0.5)))
      ;; $h = model.$l.register_forward_pre_hook(lambda m, i: obs(nn.init.constant_(m.weight, 0.25)))""",
            l=layer,
            h=w.new("h", "hook"),
        )
    )
    loss(w)
    w.add("leave()")


@op(0.3)
def keep_of_unit(w):
    layer, kept = w.dice.choice(("first", "blocks[0]", "second")), w.new("k", "list")
    hook = w.new("h", "hook")
    w.add(f"{kept} = []")
    w.add(f"unit(model.{layer})")
    w.add(f"{hook} = model.{layer}.register_forward_hook(lambda m, i, o: {kept}.append(m.weight.detach()))")
    loss(w)
    w.add(f"{hook}.remove()")  # so that a line that is refused halfway keeps nothing
    w.add("leave()")


@op(0.3)
def forget(w):
    names = [name for name in w.names if name[0] in "vcgsm"]
    if names:
        name = w.dice.choice(names)
        del w.names[name]
        w.add(f"{name} = None")


def write(seed: int, *, known: bool = False, only: Iterable[str] = (), without: Iterable[str] = ()) -> Program:
    """The program of a seed.

    Args:
      seed: any number.
      known: whether operations that are known to fail may be in it.
      only: names of operations; beside these there are training steps, and what takes everything off the device.
      without: names of operations to leave out.

    Returns:
      The program, the same whenever it is written.
    """
    only, without = set(only), set(without)
    unknown = (only | without) - OPS.keys()
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))}: no operation is named so")
    allowed = {
        name
        for name in OPS
        if (known or name not in KNOWN or name in only)
        and name not in without
        and (not only or name in only | {"train", "leave", "zero_grad"})
    }
    w = Writer(seed, allowed)
    dice = w.dice
    settings = {
        "strict": w.chance(0.7),
        "inside": w.inside,
        "memory": dice.choice(("832KiB", "832KiB", "1280KiB", "64MiB")),
        "placement": dice.choice(("auto", "auto", "cuda", "cpu")),
        "every": dice.choice((1, 1, 1, 4)),
    }
    names = {
        section: [name for name in OPS if OPS[name].section == section and name in allowed]
        for section in ("build", "steps")
    }
    weights = {section: [OPS[name].weight for name in names[section]] for section in names}
    for _ in range(dice.choice((0, 0, 1, 2)) if names["build"] else 0):
        w.call(*dice.choices(names["build"], weights["build"]))
    w.op = "prepare"
    prepare(w)
    length = len(w.lines) + dice.randint(10, 30)
    while len(w.lines) < length:
        w.call(*dice.choices(names["steps"], weights["steps"]))
        if w.chance(0.25):
            w.add("leave()")
    return Program(seed, tuple(w.lines), **settings)
