"""A tensor of 8-bit codes and scales, in a module that all ranks import by one name."""

from __future__ import annotations

from typing import Any

import torch


class Quantized(torch.Tensor):
    """Codes of 8 bits and a scale for every block of a row."""

    codes: torch.Tensor
    scale: torch.Tensor
    signed: bool

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> None:
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self) -> tuple[list[str], list[object]]:
        return ["codes", "scale"], [self.signed]

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: list[Any], size: object, stride: object
    ) -> Quantized:
        return cls(inner["codes"], inner["scale"], *context)

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any, kwargs: Any = None
    ) -> Quantized:
        self, *_ = args  # detach, view of the same shape and the like: no arithmetic is needed here
        return cls(self.codes, self.scale, self.signed)

    @property
    def block_size(self) -> int:
        return self.codes.numel() // self.scale.numel()

    def dequantize(self) -> torch.Tensor:
        values = self.codes.float().view(-1, self.block_size) * self.scale[:, None]
        return values.view(self.codes.shape)
