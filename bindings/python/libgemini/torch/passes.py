"""Where backward passes begin, and where one fails.

A unit's results have hooks, by which the backward pass asks for its parameters. What leaves a unit beside its results,
such as a loss that its module keeps, has none. torch numbers the nodes of graphs in the order in which a thread makes
them. So each call of a unit notes the numbers of its nodes, and before a backward pass the graph is searched for ways
into a call that have no hook.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import bisect
import threading
import typing
import weakref

import torch

from . import internals, patches
from .tensors import hook_nodes

if typing.TYPE_CHECKING:
    from .session import Session
    from .tensors import Use

MOST_CALLS = 1 << 15  # how many calls of units are remembered, of each thread
_HOOKED = "libgemini"  # in the metadata of nodes

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


class Passes:
    """What a session has to know before a backward pass begins, and when one fails."""

    def __init__(self, session: Session) -> None:
        self.session = session
        # .calls: calls of units that have made nodes, of each thread: threads count their nodes by themselves. They go
        # with the thread, whose number another one may get.
        self.of_thread = threading.local()
        self.threads = 0  # how many of the program's own have called units
        self.calls: list[Call] = []  # of the first one of these
        _all.add(self)

    def note_call(self, use: Use, first: int) -> None:
        """Notes a call of a unit that has ended.

        Args:
            use: What it has used.
            first: What internals.next_node_number() was before it.
        """
        end = internals.next_node_number()
        if end == first:
            return
        calls: list[Call] | None = getattr(self.of_thread, "calls", None)
        if calls is None:
            calls = self.of_thread.calls = []
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

    def begins(self, outputs: typing.Iterable[typing.Any]) -> None:
        """A backward pass is about to begin: has it ask for units wherever it comes to one.

        If several threads of the program have called units, nothing tells whose nodes the graph has: then only results
        of units ask. A thread that has called none may have made the nodes itself, with numbers that others have.

        Args:
            outputs: What autograd begins at: tensors or GradientEdges.
        """
        if self.threads > 1:
            return
        others: list[Call] = [] if internals.is_of_autograd() else self.calls
        calls: list[Call] = getattr(self.of_thread, "calls", others)
        if not calls:
            return
        made = [output.grad_fn if isinstance(output, torch.Tensor) else output.node for output in outputs]
        nodes = [node for node in made if node is not None]
        if calls is others and internals.next_node_number() and not self.has_parameters(nodes):
            return
        ways: list[tuple[typing.Any, Call | None]] = [(node, None) for node in nodes]
        begin, done = calls[0].first, set()
        while ways:
            node, origin = ways.pop()
            number = internals.node_number(node)
            if number < begin:
                continue
            call = find_call(calls, number)
            if call is not None and call is not origin and _HOOKED not in node.metadata:
                node.metadata[_HOOKED] = True
                hook_nodes(self.session, call.use, [node], call.within)
            if node not in done:
                done.add(node)
                ways += [(one, call) for one, _ in node.next_functions if one is not None]

    def has_parameters(self, nodes: list[typing.Any]) -> bool:
        """Whether the graph behind nodes leads to a parameter of the session."""
        ways, done = list(nodes), set()
        while ways:
            node = ways.pop()
            if node in done:
                continue
            done.add(node)
            place = getattr(getattr(node, "variable", None), "_gm_place", None)
            if place is not None and place.session is self.session:
                return True
            ways += [one for one, _ in node.next_functions if one is not None]
        return False


def _run_backward(outputs: typing.Any, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
    """Replaces what torch.autograd calls its engine by."""
    with internals.plain():
        for passes in list(_all):
            passes.begins(outputs)
    try:
        return patches.run_backward.original(outputs, *args, **kwargs)
    except BaseException:
        for passes in list(_all):
            passes.session.backward.failed()
        raise


def replacements() -> dict[patches.Replaced, typing.Any]:
    """See patches.py: backward passes, where they begin and where they fail."""
    return {patches.run_backward: _run_backward}
