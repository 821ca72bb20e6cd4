"""Matches saved quantised state of a parameter that is divided among ranks (`ckpt.state.blocks`).

Rules:

1. If every cut of the target lies between two blocks, each rank gets the codes and scales of its
   part, bit by bit, and makes a tensor of the saved class of them.
2. A cut inside a block is a difference. `dtype="target"` allows a cast: then the ranks get plain
   tensors of the values that the codes stand for. Each rank reads all codes for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ckpt.match.match_builder import Installer, MatchBuilder, whole_tensor
from ckpt.state.blocks import CODES, FOLLOWING, SCALE, Cut
from ckpt.state.memory import torch_dtype
from ckpt.state.subclass_state import CLASS, layout_of, of_shape, put_together
from formats.catalog import TensorRecord, TensorRef, Tree, join
from sharding.describe.local_part import LocalPart
from sharding.reshard.kinds import dtensor_like

INNER = "tensors"


Like = Callable[[str, TensorRecord], torch.Tensor]
"""Returns the memory for a tensor, by its name and record."""


def match_with_blocks(
    builder: MatchBuilder, parameter: torch.Tensor, saved: Tree, path: str, like: Like
) -> Installer:
    """Matches the saved state of one parameter, of which any entry may be quantised."""
    if not isinstance(saved, dict) or not hasattr(parameter, "_local_tensor"):
        return builder.whole(saved, path, like)
    blocks = {
        key: _Blocks(builder, parameter, entry, join(path, key)).run()
        for key, entry in saved.items()
        if isinstance(entry, dict) and CLASS in entry and builder.chooses(join(path, key))
    }
    rest = {key: entry for key, entry in saved.items() if key not in blocks}
    step = builder.whole(rest, path, like)

    def install() -> object:
        plain: Any = step()
        return plain | {key: found() for key, found in blocks.items()}

    return install


@dataclass(frozen=True, slots=True)
class _Blocks:
    builder: MatchBuilder
    parameter: Any
    """A DTensor."""
    saved: Mapping[Any, Tree]
    path: str

    def run(self) -> Installer:
        shape, records = tuple(self.parameter.shape), dict(self._records())
        saved = self.saved.get("shape")
        is_alike = isinstance(saved, list | tuple) and tuple(saved) == shape
        if not is_alike or not set(records) >= FOLLOWING:
            self.builder.differ(
                self.path,
                "shape",
                f"has the shape {saved!r} and the tensors {', '.join(records)} in the "
                f"checkpoint, the target's parameter has {shape} and is divided among ranks; "
                "load into a model that is not sharded, or leave the entry out with exclude=",
            )
            return lambda: None
        block = prod(shape) // max(1, prod(records[SCALE].shape))
        cut = Cut.of(layout_of(self.parameter, self.path))
        if cut is not None and cut.is_between(max(1, block)):
            return self._by_parts(records, cut)
        if not self.builder.allows_casts:
            self.builder.differ(
                self.path,
                "dtype",
                f"is quantised in blocks of {block} elements in the checkpoint, and the target's "
                f"placements {tuple(self.parameter.placements)} cut inside of blocks; load on a "
                f"number of ranks that divides the rows of {shape} into whole blocks, or pass "
                "dtype='target' for plain tensors of the values that the codes stand for",
            )
            return lambda: None
        return self._plain(records)

    def _records(self) -> Iterator[tuple[str, TensorRecord]]:
        inner = self.saved.get(INNER)
        for name, ref in inner.items() if isinstance(inner, dict) else ():
            if isinstance(ref, TensorRef):
                yield str(name), self.builder.saved.catalog.tensors[ref.name]

    def _by_parts(self, records: Mapping[str, TensorRecord], cut: Cut) -> Installer:
        """Fills the inner tensors of this rank's part (rule 1)."""
        local = self.parameter._local_tensor
        parts = {name: self._part(name, record, local, cut) for name, record in records.items()}

        def install() -> object:
            shape, stride = tuple(local.shape), tuple(local.stride())
            return dtensor_like(self.parameter, self._made(parts, shape, stride))

        return install

    def _part(self, name: str, record: TensorRecord, local: torch.Tensor, cut: Cut) -> torch.Tensor:
        """Returns the memory of an inner tensor of this rank's part, which the load fills."""
        path = join(join(self.path, INNER), name)
        if name not in FOLLOWING:
            tensor = whole_tensor(record).to(local.device)
            self.builder.fill(path, record, tensor)
            return tensor
        dtype = torch_dtype(record.dtype.torch_name)
        if name == CODES and record.shape == cut.layout.shape:
            tensor = torch.zeros(local.shape, dtype=dtype, device=local.device)
            self.builder.fill(path, record, LocalPart(tensor, cut.layout))
            return tensor
        elements = cut.layout.numel // max(1, prod(record.shape))
        tensor = torch.zeros(local.numel() // max(1, elements), dtype=dtype, device=local.device)
        self.builder.fill(path, record, LocalPart(tensor, cut.entries(elements)))
        return tensor

    def _plain(self, records: Mapping[str, TensorRecord]) -> Installer:
        """Fills whole inner tensors, and takes this rank's part of their values (rule 2)."""
        whole = {name: whole_tensor(record) for name, record in records.items()}
        for name, record in records.items():
            self.builder.fill(join(join(self.path, INNER), name), record, whole[name])
        shape, local = tuple(self.parameter.shape), self.parameter._local_tensor
        layout = layout_of(self.parameter, self.path)
        rank = self.parameter.device_mesh.get_rank()

        def install() -> object:
            values = self._made(whole, shape, self.parameter.stride()).dequantize().flatten()
            found = torch.zeros(local.numel(), dtype=values.dtype)
            for piece in layout.pieces(rank):
                box, strides = piece.box.shape, torch.empty(shape, device="meta").stride()
                at = sum(lo * step for lo, step in zip(piece.box.lo, strides, strict=True))
                found.as_strided(box, piece.strides, piece.at).copy_(
                    values.as_strided(box, strides, at)
                )
            return dtensor_like(self.parameter, found.view(local.shape).to(local.device))

        return install

    def _made(self, tensors: Mapping[str, Any], shape: Any, stride: Any) -> Any:
        """Returns a tensor of the saved class with these inner tensors."""
        step = self.builder.whole(self.saved["context"], join(self.path, "context"))
        context = of_shape(step(), tuple(self.parameter.shape), tuple(shape))
        nest = {CLASS: self.saved[CLASS], "context": context, "shape": shape, "stride": stride}
        return put_together({**nest, INNER: dict(tensors)})
