"""What forward leaves for backward to find its way: the calls of units, in the order they ended.

[Note: what backward has passed]
Autograd's engine runs what is ready latest-made first, and what was made last is always ready. So
it goes through a graph in the exact reverse of its making. When it comes to the output of a call,
every call that ended later has begun its backward already, or never will in this one; and every
call that began after this one ended is done. This holds on every rank: two that ran the same
forward go the same way back, though autograd may skip other calls on each, which had no part in the
loss there.
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
        """When its forward began and ended, by the runtime's count."""
        self.index = -1
        """Its place in `run.calls`; -1 for what is recomputed in backward."""
        self.visible = False
        """Whether autograd will tell when backward comes to it."""
        self.comes_back = False
        """Whether backward is expected to come to it: to what it made, or to its repetition."""
        self.recomputed = False
        """Whether it is a checkpoint that runs it, in backward: perhaps not to its end."""
        self.imminent = False
        """Whether it is a reentrant checkpoint's recomputation, whose backward follows at once."""
        self.begun = False
        """Whether backward has come to it."""
        self.kept = False
        """Whether its parameters stay unsharded after forward."""
        self.versions: list[list[int]] = []
        """The version counters of its shards in forward."""
        self.served: list[tuple[UnitCall, bool]] = []
        """Calls of other ranks that were gathered with this one; whether they are trained there."""
        self.given: dict[int, tuple[torch.Tensor, int]] = {}
        """By id, the tensors it was given and their versions, while it runs: to tell what it made
        from what it handed on."""


class ForwardPass:
    """One run of the root's forward."""

    __slots__ = ("calls", "cursor", "differentiable", "open", "started")

    def __init__(self, differentiable: bool) -> None:
        self.differentiable = differentiable
        """Whether the root ran with gradients enabled."""
        self.calls: list[UnitCall] = []
        """Those that backward may come to, in the order in which they ended."""
        self.started: list[Unit] = []
        """The units in the order in which they began: what to gather ahead the next time."""
        self.cursor = -1
        """The index of the last call that backward has come to."""
        self.open: list[UnitCall] = []
        """Calls that backward has come to and not yet left."""

    def ended(self, call: UnitCall) -> None:
        """A call has ended that backward may come to."""
        call.index = len(self.calls)
        self.calls.append(call)
        self.cursor = len(self.calls)

    def skipped(self, index: int) -> list[UnitCall]:
        """The visible calls that backward would have come to between the last one and this."""
        between = self.calls[index + 1 : self.cursor]
        return [call for call in reversed(between) if call.visible and not call.begun]

    def before(self, call: UnitCall) -> Iterator[UnitCall]:
        """The calls that backward comes to next, in order."""
        for index in range(call.index - 1, -1, -1):
            if self.calls[index].visible:
                yield self.calls[index]

    def rewind(self) -> None:
        """Another backward may come: the graph was retained, or there is another loss."""
        self.cursor = len(self.calls)
        self.open.clear()
        for call in self.calls:
            call.begun = False
