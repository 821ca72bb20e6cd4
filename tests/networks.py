"""Layers that the small networks of tests are built from: units to be sharded by themselves.

The networks themselves stay with the tests, which differ in what they have to stumble over.
"""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """Two layers around a bend, added to what came in."""

    def __init__(self, inner: int, width: int = 6) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def added(self, x: torch.Tensor) -> torch.Tensor:
        """What the layers make of an input."""
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.added(x)


class ScaledBlock(Block):
    """A block with a buffer, by which the input of its layers is scaled."""

    def __init__(self, inner: int, width: int = 6) -> None:
        super().__init__(inner, width)
        self.register_buffer("scale", torch.linspace(0.5, 1.0, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.added(x * self.scale)


class Frozen(nn.Module):
    """A layer that is not trained: a module of its own, since torch flattens no mixed ones."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.turn = nn.Linear(width, width).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.turn(x)
