"""How much this rank receives from others while tensors go from layout to layout."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from sharding.reshard import redistribute

T = TypeVar("T")


def received_while(action: Callable[[], T]) -> tuple[T, int]:
    """What an action returns, and the bytes of tensors in the messages that arrived meanwhile."""
    sizes: list[int] = []
    before = redistribute._unpack

    def counting(message: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        sizes.extend(part.numel() * part.itemsize for part in parts)
        before(message, parts)

    redistribute._unpack = counting
    try:
        return action(), sum(sizes)
    finally:
        redistribute._unpack = before
