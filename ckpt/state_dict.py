"""Converts state dicts in memory between kinds, and loads them into models.

    full = ckpt.state_dict.convert({"model": model, "optim": optim}, to="full", rank0_only=True)
    ckpt.state_dict.load(full, {"model": other_model, "optim": other_optim})

`convert` describes the state of the ranks as `ckpt.save` does. `load` matches it with a target as
`ckpt.load` does. `sharding.reshard.redistribute` moves the elements between ranks; no file is
involved. A user gives modules, optimizers, or state dicts of any kind and of any runtime.

A state in memory is a catalog whose tensors lie in the memory of ranks (`PeerPieces`), so that
`plan_load` plans it and `LoadRun` executes it. All ranks plan the tensors of all ranks, because a
rank also sends tensors that it does not want itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar
from warnings import warn

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from ckpt.arguments import CastingRule, KindName, memory_budget
from ckpt.errors import ReplicasWarning, StateError
from ckpt.loading.load import Patterns
from ckpt.match.match import match
from ckpt.match.match_builder import Fit, Match, Target, casting_of
from ckpt.match.overlaps import (
    Placed,
    check_fits,
    check_preflight_scalars,
    differences,
    fingerprints,
)
from ckpt.plan.load_plan import LoadItem, LoadPlan, LoadPolicy, PeerPieces, plan_load
from ckpt.plan.read_plan import NOWHERE
from ckpt.state.flatten import FlatState, flatten
from ckpt.state.memory import torch_dtype, will_change
from ckpt.state.merged_state import (
    MergedState,
    agree_on_state,
    conflict,
    merge,
    spec_of,
    state_hashes,
    with_values_of_first,
)
from ckpt.state.patterns import Rename, Selection
from ckpt.state.saved import Saved
from ckpt.state.state_spec import StateSpec, check_members
from ckpt.state.stateful import with_names
from ckpt.state.typed_values import restore_values, with_versions
from ckpt.transfer.replica_hashes import ReplicaHashes, format_names
from ckpt.transfer.run import LoadRun, half_loaded, name_touched
from formats.catalog import Catalog, TensorRecord, TensorRef, Tree
from formats.native.manifest import StoredTensor
from sharding.agreement.channel import TIMEOUT_SECONDS
from sharding.agreement.ranks import HASH_BITS, Ranks
from sharding.describe.describing import TensorLike
from sharding.describe.dtensor import dtensor_like
from sharding.describe.members import LocalPart
from sharding.errors import ArgumentError
from sharding.kind import Kind
from sharding.reshard.kinds import convert_kind

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["convert", "load"]

S = TypeVar("S")
SOURCE = "the state"
"""The name of the source of a load in messages."""


def convert(
    state: object,
    to: KindName,
    *,
    mesh: DeviceMesh | None = None,
    model: nn.Module | None = None,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    group: ProcessGroup | None = None,
    budget: int | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> dict[object, object]:
    """Returns the state dict of a state, of the kind `to`: `full`, `sharded` or `local`.

    All ranks of `group` call this (by default of the default process group; one process needs
    none). Communicates. A module becomes a dict from parameter names, without the prefixes of
    wrappers, to tensors. An optimizer becomes `{"state": {name: {...}}, "param_groups": [...,
    "params": names]}`.

    The tensors are whole plain ones if `full`, DTensors if `sharded`, and `LocalPart`s if `local`:
    this rank's part with its layout. A tensor that already has the requested layout shares its
    memory with the source. A local state dict thus copies and sends nothing, unless `mesh` asks for
    another division.

    Args:
        state: a module, an optimizer, a state dict, or a nest of these. The modules beside an
            optimizer name its parameters. Ranks may have different entries, even none: an entry of
            one rank reaches the others. (But a DTensor that keeps its layout stays on its ranks.)
            Of plain values that differ between ranks, such as a counter of steps, all get that of
            the lowest rank, and the other ranks warn, as in `ckpt.save`.
        to: the kind of state dict.
        mesh: divides sharded tensors by rows and local tensors by elements over its last
            dimension. Tensors are replicated along its other dimensions, and along those of the
            mesh of which it is a slice. Without `mesh`, a divided tensor keeps its division, and
            any other tensor is divided over the group.
        model: the module of a state dict that only the module can name: torch's LOCAL_STATE_DICT
            has flat parameters without names.
        rank0_only: only the first rank gets full tensors; the others get an empty dict.
        offload_to_cpu: the tensors of the result are in host memory.
        budget: bytes of tensors that travel at the same time; a larger tensor travels in parts. The
            default is CKPT_MEMORY_BUDGET.
        timeout: a rank waits at most so many seconds for another. Then all raise a RankError that
            names the missing ranks.

    Raises:
        ArgumentError: the kind or the budget has another value.
        StateError: a state dict cannot hold a value, the ranks have contradicting states, or they
            were called with different arguments. (The first rank's budget counts for all.)
        LocalShapeError: a local tensor has another shape than its layout says: a truncated shard.
        RankError: another rank failed; nothing has moved.

    >>> import ckpt, torch
    >>> part = ckpt.state_dict.convert({"w": torch.arange(6).reshape(2, 3)}, to="local")["w"]
    >>> part.local.tolist(), part.shape
    ([0, 1, 2, 3, 4, 5], (2, 3))
    """
    ranks = Ranks(group, timeout)
    with ranks.call("ckpt.state_dict.convert"):

        def reading() -> tuple[Kind, bytes]:
            _check_budget(budget)
            kind = Kind.from_name(to)
            return kind, repr((kind, mesh is None, rank0_only)).encode()

        (kind, _), agreed = ranks.run_and_compare(
            "reading the arguments", reading, _fingerprint_of, number=_count(budget)
        )
        _check_same_arguments(agreed.same["arguments"])
        budget = agreed.number
        merged = _merge_state(ranks, f"describing the state to be made {to}", state, model)
        kept = {}
        if kind is Kind.SHARDED and mesh is None:
            kept = _dtensors_as_they_are(merged, ranks, offload_to_cpu)
        tensors = kept | convert_kind(
            {name: tensor for name, tensor in _parts(merged) if name not in kept},
            kind,
            mesh=mesh,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            group=group,
            budget=budget,
        )
        if kind is Kind.FULL and rank0_only and ranks.rank != 0:
            return {}
        built = _build(merged.whole.tree, {name: t for name, t in tensors.items() if t is not None})
        built = with_versions(built, merged.whole.versions)
        return built if isinstance(built, dict) else {"": built}


def load(
    state: object,
    target: S,
    *,
    strict: bool = True,
    rename: Rename | None = None,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    dtype: Literal["target"] | None = None,
    casting: CastingRule = "same_kind",
    model: nn.Module | None = None,
    group: ProcessGroup | None = None,
    budget: int | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> S:
    """Fills `target` from a state of any kind in the memory of the ranks, and returns it.

    All ranks of `group` call this. Communicates. `state` is as for `convert`; all other arguments
    are as for `ckpt.load`, and optimizers need no first step either. The state of one rank, with
    empty states on the others, fills the targets of all. Each rank receives the tensors of its
    target from ranks that have them, within `budget`.

    Raises:
        ArgumentError: an option has another value, or a pattern matches no name.
        MismatchError: the state does not match the target; all differences are listed. The target
            is unchanged.
        StateError: as for `convert`.
        LocalShapeError: a local tensor has another shape than its layout says. The target is
            unchanged.
        PartialLoadError: the move of a tensor, or an object's own `load_state_dict`, failed
            half-way.
        RankError: another rank failed.

    >>> import ckpt, torch
    >>> ckpt.state_dict.load({"w": torch.ones(2), "step": 3}, {"w": torch.zeros(2), "step": 0})
    {'w': tensor([1., 1.]), 'step': 3}
    """
    ranks = Ranks(group, timeout)
    with ranks.call("ckpt.state_dict.load"):

        def reading() -> tuple[Fit, bytes]:
            _check_budget(budget)
            allowed = casting_of(dtype, casting)
            fit = Fit(strict, rename, Selection.of(include, exclude), allowed)
            return fit, repr(allowed).encode()

        (fit, _), agreed = ranks.run_and_compare(
            "reading the arguments", reading, _fingerprint_of, number=_count(budget)
        )
        _check_same_arguments(agreed.same["arguments"])
        budget = agreed.number
        merged = _merge_state(ranks, "describing the state to be loaded", state, model)

        def matching() -> tuple[Saved, Match]:
            saved = Saved(catalog_of(merged.whole), fit.rename)
            return saved, match(saved, target, fit, ranks.mesh)

        (saved, matched), agreed = ranks.run_and_compare(
            "matching the state with the target",
            matching,
            lambda found: fingerprints(found[1])._asdict(),
        )
        same = agreed.same
        found = differences(ranks, matched, same["unexpected"], same["idle"])
        warns = ranks.rank == 0 or not same["differing"]
        ranks.run_on_all(
            "comparing the state with the target",
            lambda: check_fits(SOURCE, found, fit.strict, warns=warns),
        )
        run = LoadRun(matched.targets, group, fit.casting)
        shared = beside(matched.shared, matched.targets)
        apart = [item for group in shared for item, _ in group]
        fill = partial(
            fill_from_peers, run=run, merged=merged, saved=saved, ranks=ranks, budget=budget
        )
        fill([*matched.preflight_scalars, *apart], is_final=False)
        placed = [[member for _, member in group] for group in shared]
        ranks.run_on_all(
            "comparing the numbers of the state",
            partial(check_preflight_scalars, SOURCE, matched, placed),
        )
        names = [item.name for item in matched.items]

        def installing() -> object:
            with half_loaded(names, reads=False):
                return matched.install()

        with name_touched(names):
            fill(matched.items, is_final=True)
            return ranks.run_on_all("installing the loaded state", installing)  # type: ignore[return-value]


def _check_budget(budget: int | None) -> None:
    """Raises ArgumentError unless a budget is a number of bytes or None."""
    if budget is None:
        memory_budget()
    elif not _count(budget):
        raise ArgumentError(f"budget is {budget!r}; give a number of bytes, at least 1")


def _count(budget: object) -> int:
    """Returns the bytes of a budget, limited to a number that ranks can exchange; 0 if invalid."""
    if budget is None:
        with suppress(ValueError):
            budget = memory_budget()
    return min(budget, 1 << 61) if isinstance(budget, int) and budget > 0 else 0


def _check_same_arguments(same: bool) -> None:
    """Raises StateError if the ranks were called with different arguments."""
    if not same:
        raise StateError(
            "the ranks were called with different arguments; pass the same arguments on all ranks"
        )


def _fingerprint_of(read: tuple[object, bytes]) -> dict[str, int]:
    return {"arguments": xxhash.xxh3_64_intdigest(read[1]) >> (64 - HASH_BITS)}


def _merge_state(ranks: Ranks, stage: str, state: object, model: nn.Module | None) -> MergedState:
    """Returns the merged state of all ranks. All ranks call this."""

    def flatten_named() -> FlatState:
        flat = flatten(with_names(state, model), ranks.mesh)
        check_members(spec_of(flat).tensors, ranks.mesh)
        return flat

    hashes = ReplicaHashes("sample", ranks.global_rank)
    merged = agree_on_state(ranks, stage, flatten_named, weigh=hashes.weigh)
    if not merged.same_values:
        merged = with_values_of_first(ranks, merged)
    if merged.conflicting_values:
        warn(conflict(ranks, merged.conflicting_values), stacklevel=3)
    differing = [] if merged.balanced else hashes.differing(ranks, merged.whole.tensors)
    if differing and ranks.rank == 0:
        warn(
            ReplicasWarning(
                f"not the same on all ranks that have them: {format_names(differing)}; each "
                "rank uses its "
                "own replica, so the result mixes them; make the replicas equal before this call",
                [each.name for each in differing],
            ),
            stacklevel=3,
        )
    return merged


def _parts(merged: MergedState) -> Iterator[tuple[str, TensorLike]]:
    """Yields the tensors of all ranks by name, each with this rank's part."""
    for name, tensor in merged.whole.tensors.items():
        leaf = merged.flat.leaves.get(name)
        if leaf is not None and leaf.layout == tensor.layout:
            yield name, leaf.given
        else:
            yield name, LocalPart(local_part(merged, name), tensor.layout)


def _dtensors_as_they_are(
    merged: MergedState, ranks: Ranks, to_cpu: bool
) -> dict[str, DTensor | None]:
    """Returns the tensors that are DTensors on all their ranks; None without a part on this one."""
    names, leaves = list(merged.whole.tensors), merged.flat.leaves
    stays = bytes(name not in leaves or isinstance(leaves[name].given, DTensor) for name in names)
    kept: dict[str, DTensor | None] = {}
    for name, flag in zip(names, ranks.common(stays), strict=True):
        if flag:
            leaf = leaves.get(name)
            kept[name] = None
            if leaf is not None and isinstance(leaf.given, DTensor):
                local = leaf.local.cpu() if to_cpu else leaf.local
                kept[name] = dtensor_like(leaf.given, local)
    return kept


def _build(tree: Tree, tensors: Mapping[str, TensorLike]) -> object:
    """Returns the nest with these tensors. A dict lacks entries whose tensor this rank lacks."""
    if isinstance(tree, TensorRef):
        return tensors.get(tree.name)
    if isinstance(tree, dict):
        return {
            key: _build(item, tensors)
            for key, item in tree.items()
            if not isinstance(item, TensorRef) or item.name in tensors
        }
    if isinstance(tree, list):
        return [_build(item, tensors) for item in tree]
    if isinstance(tree, tuple):
        return tuple(_build(item, tensors) for item in tree)
    return restore_values(tree)


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
    merged: MergedState,
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
        lambda found: {"structure": state_hashes(found)[0]},
    )
    if not agreed.same["structure"]:
        wanted = ranks.run_on_all("planning to load", merge(ranks, wanted))
    plan = ranks.run_on_all("planning to load", lambda: _plan(items, wanted, saved, ranks, budget))
    kept = _copy_overlapping(items, run.targets, merged)
    sources = {
        name: kept[name] if name in kept else local_part(merged, _source(saved, name))
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
    items: Sequence[LoadItem], targets: Sequence[Target], merged: MergedState
) -> dict[str, torch.Tensor]:
    """Returns copies of sources that lie in the memory of targets of other tensors."""
    locals_ = [targets[item.target].local for item in items]
    filled = {_memory(local) for local in locals_ if local.numel()}
    found = {}
    for item, target in zip(items, locals_, strict=True):
        source = local_part(merged, item.source)
        is_itself = source.data_ptr() == target.data_ptr()
        if source.numel() and _memory(source) in filled and not is_itself:
            found[item.name] = source.clone()
    return found


def _memory(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def local_part(merged: MergedState, name: str) -> torch.Tensor:
    """Returns this rank's part of a tensor; empty if the rank has none."""
    leaf = merged.flat.leaves.get(name)
    if leaf is not None:
        return leaf.local
    dtype = torch_dtype(merged.whole.tensors[name].dtype.torch_name)
    return torch.empty(0, dtype=dtype, device="cpu")
