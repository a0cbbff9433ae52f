"""Where backward passes begin, and where one fails.

A unit's results have hooks, by which the backward pass asks for its parameters. What leaves a unit beside its results,
such as a loss that its module keeps, has none. torch numbers the nodes of graphs in the order in which a thread makes
them. So each call of a unit notes the numbers of its nodes, and before a backward pass the graph is searched for ways
into a call that have no hook. Threads count for themselves, so results also say which thread's calls those are.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import bisect
import contextlib
import threading
import typing
import weakref

import torch

from . import internals, patches
from .arenas import in_backward
from .tensors import hook_nodes

if typing.TYPE_CHECKING:
    from .session import Session
    from .tensors import Use
    from .whole import Keeper

MOST_CALLS = 1 << 15  # how many calls of units are remembered, of each thread
_HOOKED = "libgemini"  # in the metadata of nodes with a hook: the Calls of the thread that made them

_all: weakref.WeakSet[Passes] = weakref.WeakSet()


class Call:
    """A call of a unit.

    Attributes:
        use: What the unit has used.
        within: What the unit has used whose forward pass has called this one, or None.
        first: The number of the first node that the call has made.
        end: The number after that of its last node.
        inner: The calls of units within this one.
    """

    __slots__ = ("use", "within", "first", "end", "inner")

    def __init__(self, use: Use, within: Use | None, first: int, end: int, inner: list[Call]) -> None:
        self.use, self.within, self.first, self.end, self.inner = use, within, first, end, inner

    def __gt__(self, number: int) -> bool:
        """Whether it ended after the node of a number was made; bisect compares by this."""
        return self.end > number


class Calls(list[Call]):
    """The calls that one thread has made, one after another."""

    __slots__ = ("passes",)

    def __init__(self, passes: Passes) -> None:
        super().__init__()
        self.passes = passes


def find_call(calls: list[Call], number: int) -> Call | None:
    """The innermost call that has made the node of a number, or None.

    Args:
        calls: One after another, in their order.
        number: Of the node.
    """
    at = bisect.bisect_right(calls, number)  # type: ignore[type-var]
    if at == len(calls) or calls[at].first > number:
        return None
    return find_call(calls[at].inner, number) or calls[at]


def reachable(nodes: typing.Iterable[typing.Any]) -> typing.Iterator[typing.Any]:
    """The nodes of a graph, each once. nodes: where it begins."""
    ways, done = list(nodes), set()
    while ways:
        node = ways.pop()
        if node not in done:
            done.add(node)
            yield node
            ways += [one for one, _ in node.next_functions if one is not None]


class Passes:
    """What a session has to know before a backward pass begins, and when one fails."""

    def __init__(self, session: Session) -> None:
        self.session = session
        # .calls: the Calls of each thread. They go with the thread, whose number another one may get.
        self.of_thread = threading.local()
        self.threads = 0  # how many of the program's own have called units
        self.calls = Calls(self)  # of the first one of these
        _all.add(self)

    def note_call(self, use: Use, first: int, nodes: set[typing.Any]) -> None:
        """Notes a call of a unit that has ended.

        Args:
            use: What it has used.
            first: What internals.next_node_number() was before it.
            nodes: Those of its results, which have hooks.
        """
        end = internals.next_node_number()
        if end == first:
            return
        calls: Calls | None = getattr(self.of_thread, "calls", None)
        if calls is None:
            calls = self.of_thread.calls = Calls(self)
            if not internals.is_of_autograd():
                self.threads += 1
                self.calls = self.calls or calls
        inner: list[Call] = []
        while calls and calls[-1].first >= first:
            inner.insert(0, calls.pop())
        running = self.session.running
        calls.append(Call(use, running[-1] if running else None, first, end, inner))
        if len(calls) > MOST_CALLS:
            del calls[: MOST_CALLS // 2]
        for node in nodes:
            node.metadata[_HOOKED] = calls

    def keeper(self) -> Keeper | None:
        """What acquires a whole model for graphs of the calling thread, or None."""
        for model in self.session.models if self.session.manager.handle else ():
            if model.whole.unit is not None and model.whole.thread == threading.get_ident():
                return model.whole.unit.keeper
        return None

    def has_blocks(self) -> bool:
        """Whether the calling thread's time is what parameters cost; see blocks.py."""
        return bool(self.session.manager.handle) and any(model.blocks.active for model in self.session.models)

    def begins(self, outputs: typing.Iterable[typing.Any]) -> bool:
        """A backward pass is about to begin: has it ask for units wherever it comes to one.

        Args:
            outputs: What autograd begins at: tensors or GradientEdges.

        Returns:
            Whether it is one of a whole model; see whole.py.
        """
        if not self.session.manager.handle:  # other models' graphs may have the numbers of its calls
            return False
        made = [output.grad_fn if isinstance(output, torch.Tensor) else output.node for output in outputs]
        nodes = [node for node in made if node is not None]
        calls = self.calls_of(nodes)
        if not calls:
            return False
        if calls[-1].use.unit.keeper:
            return self.begins_whole(nodes, calls)
        ways: list[tuple[typing.Any, Call | None]] = [(node, None) for node in nodes]
        done = set()
        while ways:
            node, origin = ways.pop()
            call = find_call(calls, internals.node_number(node))
            if call is not None and call is not origin and _HOOKED not in node.metadata:
                node.metadata[_HOOKED] = calls
                hook_nodes(self.session, call.use, [node], call.within)
            if node not in done:
                done.add(node)
                ways += [(one, call) for one, _ in node.next_functions if one is not None]
        return False

    def begins_whole(self, nodes: list[typing.Any], calls: Calls) -> bool:
        """As begins(), for a model that is one unit: if the graph leads into its calls, the pass asks for it where it
        begins, and has it until it ends.

        Args:
            nodes: Where the graph begins.
            calls: All calls of the model.

        Returns:
            Whether the graph does.
        """
        for node in reachable(nodes):
            call = find_call(calls, internals.node_number(node))
            if call is not None or node.metadata.get(_HOOKED) is calls:
                use = (call or calls[-1]).use
                hook_nodes(self.session, use, [one for one in nodes if _HOOKED not in one.metadata])
                for one in nodes:
                    one.metadata[_HOOKED] = calls
                return True
        return False

    def calls_of(self, nodes: list[typing.Any]) -> Calls | None:
        """The calls of the thread that has made a graph, or None if nothing tells which one has: then only results ask.

        Args:
            nodes: Where the graph begins.
        """
        own: Calls | None = getattr(self.of_thread, "calls", None)
        if own is not None and self.threads <= 1:
            return own
        if not self.threads or internals.is_of_autograd():
            return None
        if self.threads == 1 and not internals.next_node_number():  # this thread has made no graph
            return self.calls
        found, parameters = self.search(nodes)
        if found:
            return found[0] if len(found) == 1 else None
        return self.calls if self.threads == 1 and parameters else None

    def search(self, nodes: list[typing.Any]) -> tuple[list[Calls], bool]:
        """Whose calls the results in a graph are of, and whether it leads to a parameter of the session.

        Args:
            nodes: Where the graph begins.
        """
        found: list[Calls] = []
        parameters = False
        for node in reachable(nodes):
            calls = node.metadata.get(_HOOKED)
            if calls is not None and calls.passes is self and not any(calls is one for one in found):
                found.append(calls)
            place = getattr(getattr(node, "variable", None), "_gm_place", None)
            parameters = parameters or (place is not None and place.session is self.session)
        return found, parameters


def _run_backward(outputs: typing.Any, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
    """Replaces what torch.autograd calls its engine by."""
    with internals.plain():
        here = any([passes.begins(outputs) or passes.has_blocks() for passes in list(_all)])
    keepers = [] if in_backward() else [keeper for passes in list(_all) if (keeper := passes.keeper()) is not None]
    for keeper in keepers:
        keeper.acquire_for_graphs()
    try:
        # A thread of autograd's is on another core, which has none of Python's objects in its cache.
        with torch.autograd.set_multithreading_enabled(False) if here else contextlib.nullcontext():
            return patches.run_backward.original(outputs, *args, **kwargs)
    except BaseException as error:
        for passes in list(_all):
            passes.session.backward.failed()
            if isinstance(error, torch.OutOfMemoryError):
                for model in passes.session.models:
                    model.whole.stop()
        raise
    finally:
        for keeper in keepers:
            keeper.settle()


def replacements() -> dict[patches.Replaced, typing.Any]:
    """See patches.py: backward passes, where they begin and where they fail."""
    return {patches.run_backward: _run_backward}
