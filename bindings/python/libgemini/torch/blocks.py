"""Repeated blocks, whose parameters are acquired together where all fits on the device, or blocks are small beside it.

There nothing has to come and go, or there is room for what does, so what a use of a parameter costs is the calling
thread's time alone: an operator, an acquire and a release for each function. A block has these once, in its forward and
in its backward pass. Its parameters stay managed: a function that only reads them (tensors._PURE) is called at once, as
long as the block runs; all other functions do what they always do. In the backward pass each node that such a function
has made asks for the block, so that parts of it whose backward pass does not begin at the block's results find their
parameters, too.

Ranks have to acquire the same, so they agree where a model is prepared, on whether its blocks are small, and stay with
that.

A block is a module in an nn.ModuleList, nn.ModuleDict or nn.Sequential that has another one of its class beside it, and
at least LEAST parameters.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import collections
import hashlib
import typing

from torch import nn

from .. import abi
from ..abi import GeminiError
from . import internals
from .tensors import ManagedParameter, ManagedTensor, Use, blocks, run_with
from .unit import find, optimized, scripted

if typing.TYPE_CHECKING:
    from .arenas import Place
    from .ranks import Ranks
    from .session import Session

LEAST = 3  # parameters of a block: with fewer, there is nothing to save
# Of the device budget: the most that one block's parameters may take. Gradients, states and what is fetched ahead have
# to have room beside it.
SHARE = 8
SHARE_BESIDE = 32  # the same, where not all fits: while one block runs, others come and go
WANTED = "auto", "always", "never"


class Call:
    """The call that a block's module gets. A copy of the module gets none, as it has parameters of its own.

    nn.Module leaves such a call out of copies by itself, but not all modules leave that to nn.Module.
    """

    _torchdynamo_disable = True  # as of a function that is not traced

    def __init__(self, run: typing.Callable[..., typing.Any]) -> None:
        self.run = run

    def __call__(self, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        return self.run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, typing.Any]) -> None:
        return None

    def __reduce__(self) -> tuple[typing.Any, ...]:
        return type(None), ()


def no_hook(_: typing.Any) -> None:
    """What a block has while no call of it is running."""


class Block:
    """A module whose parameters are acquired together.

    Attributes:
        module: The module.
        places: Where its parameters are.
        hook: Called before each node of the autograd graph that the running call makes; keeps the graph's mark alive.
        stream: On which the running call has acquired the parameters; see Holds.native_stream().
        call: The call that the module has got.
    """

    graphed = nests = False  # as Unit's; it need not stay, as each of its functions acquires it again
    keeper = None  # as Unit's

    def __init__(self, session: Session, module: nn.Module) -> None:
        self.session = session
        self.module = module
        self.places: dict[Place, None] = dict.fromkeys(
            typing.cast(ManagedTensor, param)._gm_place for param in module.parameters() if param.numel()
        )
        self.param = next(module.parameters())
        ranges = tuple((place, 0, place.size_bytes, abi.READ) for place in self.places)
        # Checkpoints within a block call its functions again while the backward pass holds it.
        self.forward_use, self.backward_use = Use(ranges, "block", self), Use(ranges, "block", self)
        self.hook: typing.Callable[[typing.Any], None] = no_hook
        self.stream: int | None = None
        self.call: typing.Any = None

    def enter(self) -> None:
        """Its parameters have been acquired."""
        graph = self.session.brackets.graph
        within = self.session.running[-1] if self.session.running else None  # the unit whose forward pass calls it

        def hook(_: typing.Any, graph: typing.Any = graph) -> None:
            self.reach(within)

        self.hook, self.stream = hook, self.session.holds.native_stream()
        blocks.append(self)

    def leave(self) -> None:
        """Its parameters are about to be released. Blocks that began to run since then no longer run as blocks."""
        for i in range(len(blocks) - 1, -1, -1):
            if blocks[i] is self:
                del blocks[i:]
                break
        if all(block is not self for block in blocks):
            self.hook = no_hook  # the graph's nodes keep the mark; when they are gone, so is the mark

    reset = leave

    def reach(self, within: Use | None) -> None:
        """The backward pass has reached a function of the block.

        within: what the unit has used whose forward pass has called the block, or None.
        """
        backward = self.session.backward
        if not backward.holds(self.backward_use):
            backward.operator(self.backward_use, within)


class Blocks:
    """The repeated blocks of a prepared model.

    Attributes:
        found: The blocks by the names of their modules.
        active: Whether parameters of a block are acquired together now.
        stopped: Whether that has ended for good.
    """

    def __init__(self, session: Session, module: nn.Module) -> None:
        self.session = session
        self.active = self.stopped = False
        self.found: dict[str, Block] = {}
        if session.units != "never":
            self.search(module, "")
        # Whether one has experts of which a pass reads some: it would fetch all of them.
        self.with_experts = any(
            not block.forward_use.chosen and any(place.chosen_below for place in block.places)
            for block in self.found.values()
        )
        self.largest = max(
            (sum(place.size_bytes for place in block.places) for block in self.found.values()), default=0
        )
        if session.ranks:
            self.stopped = not self.agree(session.ranks)

    def search(self, module: nn.Module, name: str) -> None:
        """Finds blocks within a module, the outermost ones."""
        if scripted(module) or optimized(module) or find(module):
            return
        children = list(module.named_children())
        kinds = collections.Counter(type(child) for _, child in children)
        repeats = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        for path, child in children:
            inner = f"{name}.{path}" if name else path
            if repeats and kinds[type(child)] > 1 and self.suits(child):
                self.found[inner] = self.wrap(child)
            else:
                self.search(child, inner)

    def suits(self, module: nn.Module) -> bool:
        """Whether a module can be a block."""
        params = list(module.parameters())
        return (
            len(params) >= LEAST
            and all(type(param) is ManagedParameter and not param.is_inference() for param in params)
            # Compiled modules, and those of another model, have a call that is not torch's.
            and all(
                not scripted(one) and not optimized(one) and internals.compiled_call_of(one) is None
                for one in module.modules()
            )
            and sum(param.nbytes for param in params) * SHARE <= self.session.manager.config.device_bytes
        )

    def wrap(self, module: nn.Module) -> Block:
        """Gives a module a call that acquires its parameters."""
        block, call = Block(self.session, module), internals.call_of(module)

        @internals.not_traced
        def call_block(*args, **kwargs):
            if (
                not self.active
                or type(block.param) is not ManagedParameter  # the whole model has acquired it
                or not self.session.manager.handle
                or internals.transform_level() is not None
                or internals.is_tracing()
            ):
                return call(*args, **kwargs)
            begun = False

            def begin(*args, **kwargs):
                nonlocal begun
                begun = True
                return call(*args, **kwargs)

            try:
                return run_with(self.session, block.forward_use, begin, args, kwargs)
            except GeminiError as error:
                if begun or error.status != "OOM_DEVICE" or self.session.ranks:  # others have acquired it
                    raise
            self.stop()  # nothing was done
            return call(*args, **kwargs)

        block.call = Call(call_block)
        internals.set_call(module, block.call)
        return block

    def agree(self, ranks: Ranks) -> bool:
        """Whether all ranks have found the same blocks, and want to acquire them together. All ranks call it."""
        wanted = self.session.units == "always" or self.are_small(self.room())
        text = "\n".join(self.found) if wanted else ""
        theirs = ranks.exchange(hashlib.sha256(text.encode()).digest())
        return bool(text) and len(set(theirs)) == 1

    def decide(self, fits: bool) -> None:
        """Called where an iteration begins: whether parameters of blocks are acquired together in it.

        Args:
            fits: Whether all is known to have room on the device.
        """
        if self.found and not self.stopped:
            if self.session.ranks or self.session.units == "always" or fits or self.fits():
                self.active = True
            else:
                self.stop()

    def room(self) -> int:
        """The bytes of the device budget without its margin."""
        return self.session.arenas.device_budget() - self.session.manager.config.device_margin_bytes

    def are_small(self, room: int) -> bool:
        """Whether the blocks are small beside so many bytes, and a pass reads all of them."""
        return self.largest * SHARE_BESIDE <= room and not self.with_experts

    def fits(self) -> bool:
        """Whether the blocks are small, or all of the session's tensors and what is allocated beside them have room."""
        stats, room = abi.Stats(), self.room()
        self.session.lib.stats(self.session.handle, stats)
        return self.are_small(room) or bool(stats.model_bytes + stats.nonmodel_peak_bytes <= room)

    def stop(self) -> None:
        """Ends it for good: a loop that has it in some steps only would leave its plan again and again."""
        self.active, self.stopped = False, True

    def unwrap(self, module: nn.Module | None = None) -> None:
        """Gives modules their calls back.

        Args:
            module: Blocks within it, around it, and itself. None: all.
        """
        for name, block in list(self.found.items()):
            if module is None or block.module in module.modules() or module in block.module.modules():
                if internals.compiled_call_of(block.module) is block.call:
                    internals.set_call(block.module, None)
                del self.found[name]
