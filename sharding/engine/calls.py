"""The calls of units in a forward, in the order of their ends: backward visits them in reverse.

[Note: order of backward]
Autograd's engine runs the ready node that was made last, and the node made last is always ready.
The engine thus visits the nodes of a graph in the exact reverse of their creation. When backward
reaches the output of a call, each later call has begun its backward or never will, and each call
that began after the end of this one is done. The order is the same on all ranks that ran the same
forward, although autograd may skip calls without a part in the loss on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sharding.engine.unit import Unit


class UnitCall:
    """One run of a unit's forward."""

    __slots__ = (
        "__weakref__",
        "begun",
        "comes_back",
        "end",
        "given",
        "imminent",
        "index",
        "kept",
        "recomputed",
        "run",
        "served",
        "start",
        "unit",
        "versions",
        "visible",
    )

    def __init__(self, unit: Unit, run: ForwardPass, start: int) -> None:
        self.unit = unit
        self.run = run
        self.start = start
        self.end = start
        """The times at which its forward began and ended, by the count of the runtime."""
        self.index = -1
        """Its place in `run.calls`; -1 for a call that backward recomputes."""
        self.visible = False
        """Whether autograd will tell when backward reaches it."""
        self.comes_back = False
        """Whether backward is expected to reach its outputs or its recomputation."""
        self.recomputed = False
        """Whether a checkpoint runs it in backward, perhaps not to its end."""
        self.imminent = False
        """Whether it is a reentrant checkpoint's recomputation, whose backward follows at once."""
        self.begun = False
        """Whether backward has reached it."""
        self.kept = False
        """Whether its parameters stay unsharded after forward."""
        self.versions: list[list[int]] = []
        """The version counters of its shards in forward."""
        self.served: list[tuple[UnitCall, bool]] = []
        """Calls of other ranks, gathered with this one, and whether those ranks train them."""
        self.given: dict[int, tuple[torch.Tensor, int]] = {}
        """Its input tensors and their versions, by id, while it runs: an output that is an input
        unchanged is passed on, not made."""


class ForwardPass:
    """One run of the root's forward."""

    __slots__ = ("calls", "cursor", "differentiable", "open", "started")

    def __init__(self, differentiable: bool) -> None:
        self.differentiable = differentiable
        """Whether the root ran with gradients enabled."""
        self.calls: list[UnitCall] = []
        """The calls that backward may reach, in the order of their ends."""
        self.started: list[Unit] = []
        """The units in the order of their begins; the next forward prefetches by this order."""
        self.cursor = -1
        """The index of the last call that backward has reached."""
        self.open: list[UnitCall] = []
        """Calls that backward has reached and not yet left."""

    def ended(self, call: UnitCall) -> None:
        """Adds a call that has ended and that backward may reach."""
        call.index = len(self.calls)
        self.calls.append(call)
        self.cursor = len(self.calls)

    def skipped(self, index: int) -> list[UnitCall]:
        """Returns the visible calls that backward has skipped between the last one and this one."""
        between = self.calls[index + 1 : self.cursor]
        return [call for call in reversed(between) if call.visible and not call.begun]

    def before(self, call: UnitCall) -> Iterator[UnitCall]:
        """Yields the calls that backward reaches next, in order."""
        for index in range(call.index - 1, -1, -1):
            if self.calls[index].visible:
                yield self.calls[index]

    def rewind(self) -> None:
        """Prepares for another backward, of a retained graph or of another loss."""
        self.cursor = len(self.calls)
        self.open.clear()
        for call in self.calls:
            call.begun = False
