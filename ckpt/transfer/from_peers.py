"""Tensors of a target, filled from a state that the ranks have in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ckpt.match.match_builder import Want
from ckpt.match.overlaps import Placed
from ckpt.state.memory import is_lazy, torch_dtype, will_change
from ckpt.state.merged_state import MergedState
from ckpt.state.saved import Saved
from ckpt.state.sections import marks, merge
from ckpt.state.state_spec import StateSpec
from formats.catalog import TensorRef
from formats.native.manifest import StoredTensor
from sharding.agreement.ranks import Ranks
from sharding.describe.describing import describe
from sharding.describe.local_part import LocalPart
from sharding.layout import Layout
from sharding.layout.exchange import exchange
from sharding.reshard.redistribute import Move, redistribute

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class Filling:
    """Wants, filled from a state in memory."""

    held: MergedState
    saved: Saved
    ranks: Ranks
    group: ProcessGroup | None
    budget: int

    def fill(self, wants: Sequence[Want]) -> None:
        """All are filled on all ranks, which may want different ones."""

        def planning() -> dict[str, _Fill]:
            return {want.name: self._fill(want) for want in wants}

        fills, agreed = self.ranks.run_and_compare(
            "planning to load", planning, lambda fills: (marks(_described(fills))[0],), 1
        )
        wanted = _described(fills)
        if not agreed.same[0]:
            wanted = self.ranks.run_on_all("planning to load", merge(self.ranks, wanted))
        apart = self._apart(fills)
        batches = self.ranks.run_on_all("planning to load", lambda: list(self._batches(wanted)))

        def moving() -> None:
            for want in wants:
                will_change(want.tensor)
            for batch in batches:
                moves = (self._move(name, wanted, fills.get(name), apart) for name in batch)
                redistribute(moves, group=self.group, budget=self.budget)
                for name in batch:
                    if name in fills:
                        fills[name].finish()

        self.ranks.run_on_all("moving tensors", moving)

    def beside(self, groups: Sequence[Sequence[Want]]) -> list[list[tuple[Want, Placed]]]:
        """Wants like those of targets that share memory, each for memory of its own."""
        found = []
        for group in groups:
            wants = []
            for want in group:
                local, layout = describe(want.tensor, want.name, self.ranks.mesh)
                values = torch.empty(local.shape, dtype=local.dtype, device="cpu")
                apart = Want(want.name, want.record, LocalPart(values, layout))
                wants.append((apart, Placed(want.name, local, values)))
            found.append(wants)
        return found

    def _fill(self, want: Want) -> _Fill:
        local, layout = describe(want.tensor, want.name, self.ranks.mesh)
        return _Fill(local, StoredTensor(layout.shape, want.record.dtype, layout))

    def _source(self, name: str) -> str:
        """The name that a wanted tensor has in the state."""
        ref = self.saved.leaves[name]
        return ref.name if isinstance(ref, TensorRef) else name

    def _batches(self, wanted: StateSpec) -> Iterator[list[str]]:
        """Names whose tensors may be staged together; what nobody holds is found here."""
        batch: list[str] = []
        nbytes = 0
        for name, tensor in wanted.tensors.items():
            exchange(self._have(name), tensor.layout, self.ranks.global_rank)
            if batch and nbytes + tensor.dtype.nbytes(tensor.shape) > self.budget:
                yield batch
                batch, nbytes = [], 0
            batch.append(name)
            nbytes += tensor.dtype.nbytes(tensor.shape)
        if batch:
            yield batch

    def _have(self, name: str) -> Layout:
        return self.held.whole.tensors[self._source(name)].layout

    def _apart(self, fills: Mapping[str, _Fill]) -> dict[str, torch.Tensor]:
        """Copies of what is in the memory of targets that something else is to fill."""
        targets = {_memory(fill.target) for fill in fills.values() if fill.target.numel()}
        found = {}
        for name, fill in fills.items():
            source = held_locally(self.held, self._source(name))
            is_itself = source.data_ptr() == fill.target.data_ptr()
            if source.numel() and _memory(source) in targets and not is_itself:
                found[name] = source.clone()
        return found

    def _move(
        self,
        name: str,
        wanted: StateSpec,
        fill: _Fill | None,
        apart: Mapping[str, torch.Tensor],
    ) -> Move:
        source = apart.get(name)
        if source is None:
            source = held_locally(self.held, self._source(name))
        into = source.new_empty(0) if fill is None else fill.stage(source.dtype)
        return Move(name, source, self._have(name), into, wanted.tensors[name].layout)


@dataclass(slots=True, eq=False)
class _Fill:
    """One tensor of the target on this rank."""

    target: torch.Tensor
    wanted: StoredTensor
    staged: torch.Tensor | None = None

    def stage(self, dtype: torch.dtype) -> torch.Tensor:
        """What is filled: the target itself, or memory of its own where that cannot be."""
        if self.target.dtype == dtype and self.target.is_contiguous() and not is_lazy(self.target):
            return self.target
        self.staged = torch.empty(self.target.shape, dtype=dtype, device=self.target.device)
        return self.staged

    def finish(self) -> None:
        """The target has what was staged for it."""
        if self.staged is not None:
            self.target.copy_(self.staged)
            self.staged = None


def _memory(tensor: torch.Tensor) -> int:
    """Where a tensor's storage begins."""
    return tensor.untyped_storage().data_ptr()


def _described(fills: Mapping[str, _Fill]) -> StateSpec:
    tensors = {name: fill.wanted for name, fill in fills.items()}
    return StateSpec(tensors, {}, {name: TensorRef(name) for name in fills})


def held_locally(held: MergedState, name: str) -> torch.Tensor:
    """What this rank has of a tensor: perhaps nothing."""
    leaf = held.flat.leaves.get(name)
    if leaf is not None:
        return leaf.local
    dtype = torch_dtype(held.whole.tensors[name].dtype.torch_name)
    return torch.empty(0, dtype=dtype, device="cpu")
