"""Events of ckpt as curves of TensorBoard.

from torch.utils.tensorboard import SummaryWriter
from ckpt.integrations.tensorboard import scalars

end = scalars(SummaryWriter("runs/gpt/board"))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from ckpt.events import Event, subscribe

__all__ = ["scalars"]


class Writer(Protocol):
    """The part of a SummaryWriter that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Adds a point to a curve."""


def scalars(writer: Writer) -> Callable[[], None]:
    """Adds a point for each call to the curves `ckpt/CALL/seconds`, `.../waited` and others.

    The steps of a curve count the calls. A background save is two calls, and the second, `a save in
    the background`, has the bytes. Give a writer to one rank, or one with a folder of its own to
    each. Returns a function to stop it.
    """
    calls: Counter[str] = Counter()

    def add(event: Event) -> None:
        if event.stage or event.error:
            return
        calls[event.call] += 1
        points = {"seconds": event.seconds, "waited": event.waited}
        points |= {f"requests/{name}": number for name, number in event.numbers().items()}
        if event.nbytes:
            points["bytes_per_second"] = event.nbytes / event.seconds
        for name, value in points.items():
            writer.add_scalar(f"ckpt/{event.call}/{name}", value, calls[event.call])

    return subscribe(add)
