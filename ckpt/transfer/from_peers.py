"""Plans and moves tensors in the memory of ranks, for `ckpt.state_dict.load`.

A state in memory is a catalog whose tensors lie in the memory of ranks (`PeerPieces`), so that
`plan_load` plans it and `LoadRun` executes it. All ranks plan the tensors of all ranks, because a
rank also sends tensors that it does not want itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch

from ckpt.match.match_builder import Target
from ckpt.match.overlaps import Placed
from ckpt.plan.load_plan import LoadItem, LoadPlan, LoadPolicy, PeerPieces, plan_load
from ckpt.plan.read_plan import NOWHERE
from ckpt.state.memory import torch_dtype, will_change
from ckpt.state.merged_state import MergedState, fingerprints, merge
from ckpt.state.saved import Saved
from ckpt.state.state_spec import StateSpec
from ckpt.transfer.run import LoadRun, half_loaded
from formats.catalog import Catalog, TensorRecord, TensorRef
from formats.native.manifest import StoredTensor
from sharding.agreement.ranks import Ranks


def catalog_of(whole: StateSpec) -> Catalog:
    """Returns the state of all ranks as a catalog without files."""
    records = {
        name: TensorRecord(
            name,
            tensor.shape,
            tensor.dtype,
            PeerPieces(tensor.layout),
            tensor.layout,
            whole.strides.get(name),
        )
        for name, tensor in whole.tensors.items()
    }
    return Catalog(
        "memory",
        records,
        whole.tree,
        (),
        whole.aliases,
        optimizers=whole.optimizers,
        versions=whole.versions,
    )


def fill_from_peers(
    items: Sequence[LoadItem],
    run: LoadRun,
    held: MergedState,
    saved: Saved,
    ranks: Ranks,
    budget: int,
    is_final: bool,
) -> None:
    """Fills the targets of items from the state `held` by the ranks.

    Called by all ranks, each with its own items; communicates, within `budget` bytes at a time.
    `is_final` tells whether the targets are the user's, not memory of the load.

    Raises:
        PartialLoadError: the move failed; names all targets, if `is_final`.
        HoleError: no rank has elements of a tensor. Nothing was touched.
        RankError: another rank failed.
    """
    wanted, agreed = ranks.run_and_compare(
        "planning to load",
        lambda: _spec_of_items(items, saved),
        lambda found: {"structure": fingerprints(found)[0]},
    )
    if not agreed.same["structure"]:
        wanted = ranks.run_on_all("planning to load", merge(ranks, wanted))
    plan = ranks.run_on_all("planning to load", lambda: _plan(items, wanted, saved, ranks, budget))
    kept = _copy_overlapping(items, run.targets, held)
    sources = {
        name: kept[name] if name in kept else local_part(held, _source(saved, name))
        for name in wanted.tensors
    }

    def moving() -> None:
        names = [item.name for item in items]
        with half_loaded(names, reads=False) if is_final else nullcontext():
            for item in items:
                will_change(run.targets[item.target].given)
            run.move(plan, sources, budget)

    ranks.run_on_all("moving tensors", moving)


def beside(
    groups: Iterable[Sequence[LoadItem]], targets: list[Target]
) -> list[list[tuple[LoadItem, Placed]]]:
    """Returns items like those of targets that share memory, each with new memory as its target."""
    found = []
    for group in groups:
        apart = []
        for item in group:
            local = targets[item.target].local
            values = torch.empty(local.shape, dtype=local.dtype, device="cpu")
            apart.append((item._replace(target=len(targets)), Placed(item.name, local, values)))
            targets.append(Target(values, values))
        found.append(apart)
    return found


def _spec_of_items(items: Iterable[LoadItem], saved: Saved) -> StateSpec:
    """Returns this rank's items as a state spec, which ranks can merge."""
    records = saved.catalog.tensors
    tensors = {
        item.name: StoredTensor(item.layout.shape, records[item.source].dtype, item.layout)
        for item in items
    }
    return StateSpec(tensors, {}, {name: TensorRef(name) for name in tensors})


def _plan(
    items: Sequence[LoadItem], wanted: StateSpec, saved: Saved, ranks: Ranks, budget: int
) -> LoadPlan:
    """Returns the plan for the tensors that all ranks want."""
    own = {item.name: item.target for item in items}
    every = [
        LoadItem(name, _source(saved, name), own.get(name, NOWHERE), tensor.layout, (), False)
        for name, tensor in wanted.tensors.items()
    ]
    policy = LoadPolicy(stage_bytes=budget, move_bytes=budget)
    return plan_load(every, saved.catalog, ranks.mesh, ranks.global_rank, policy)


def _source(saved: Saved, name: str) -> str:
    """Returns the name of a wanted tensor in the state."""
    ref = saved.leaves[name]
    return ref.name if isinstance(ref, TensorRef) else name


def _copy_overlapping(
    items: Sequence[LoadItem], targets: Sequence[Target], held: MergedState
) -> dict[str, torch.Tensor]:
    """Returns copies of sources that lie in the memory of targets of other tensors."""
    locals_ = [targets[item.target].local for item in items]
    filled = {_memory(local) for local in locals_ if local.numel()}
    found = {}
    for item, target in zip(items, locals_, strict=True):
        source = local_part(held, item.source)
        is_itself = source.data_ptr() == target.data_ptr()
        if source.numel() and _memory(source) in filled and not is_itself:
            found[item.name] = source.clone()
    return found


def _memory(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def local_part(held: MergedState, name: str) -> torch.Tensor:
    """Returns this rank's part of a tensor; empty if the rank has none."""
    leaf = held.flat.leaves.get(name)
    if leaf is not None:
        return leaf.local
    dtype = torch_dtype(held.whole.tensors[name].dtype.torch_name)
    return torch.empty(0, dtype=dtype, device="cpu")
