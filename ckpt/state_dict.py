"""State dicts in memory: of any kind into any other, and from any kind into a model.

    full = ckpt.state_dict.convert({"model": model, "optim": optim}, to="full", rank0_only=True)
    ckpt.state_dict.load(full, {"model": other_model, "optim": other_optim})

`convert` describes what the ranks have as `ckpt.save` does, and `load` matches it with a target as
`ckpt.load` does; what lies between the two is no file, but `sharding.reshard.redistribute`. A user
gives modules, optimizers, or state dicts of any kind and of any runtime.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar
from warnings import warn

import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from ckpt.arguments import CastingRule, KindName
from ckpt.budget import memory_budget
from ckpt.errors import ReplicasWarning, StateError
from ckpt.loading import Patterns
from ckpt.match.casting import Casting, casting_of
from ckpt.match.fitting import check_fits, check_preflight_scalars, differences, marks
from ckpt.match.match import match
from ckpt.match.match_builder import Match
from ckpt.match.selection import Selection
from ckpt.state.flatten import FlatState, flatten
from ckpt.state.local_states import with_names
from ckpt.state.merged_state import MergedState, agree_on_state, conflict_message, spec_of
from ckpt.state.saved import Rename, Saved
from ckpt.state.state_spec import check_members
from ckpt.state.typed_values import opened
from ckpt.transfer.from_peers import beside, catalog_of, fill_from_peers, held_locally
from ckpt.transfer.replica_hashes import ReplicaHashes, named
from ckpt.transfer.run import LoadRun
from formats.catalog import TensorRef, Tree
from sharding.agreement.channel import TIMEOUT_SECONDS
from sharding.agreement.ranks import HASH_BITS, Ranks
from sharding.describe.describing import TensorLike
from sharding.describe.local_part import LocalPart
from sharding.errors import ArgumentError
from sharding.kind import Kind
from sharding.reshard.kinds import converted, dtensor_like

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["convert", "load"]

S = TypeVar("S")
SOURCE = "the state"
"""What messages call what a target is loaded from."""


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
    """The state dict of a state, of the kind `to`: `full`, `sharded` or `local`.

    To be called by all ranks of `group` (by default of the default process group; one process
    needs none). Modules are in it as dicts from parameter names, without what wrappers add, to
    tensors; optimizers as `{"state": {name: {...}}, "param_groups": [..., "params": names]}`.

    `full` has whole plain tensors, `sharded` DTensors, `local` a `LocalPart` for every tensor: what
    this rank has and the layout it is part of. What already lies as it is wanted shares its memory
    with the source; so does all of a local state dict, for which nothing is copied or sent, unless
    `mesh` asks for another division.

    Args:
        state: a module, an optimizer, a state dict, or a nest of these. An optimizer is named by
            the modules beside it. Ranks may have different entries, even none: what one rank alone
            has reaches the others. (But a DTensor that is to stay as it is, stays where it is.)
        to: the kind.
        mesh: what sharded and local tensors are divided over: by rows, or by elements, over its
            last dimension, and replicated along the others, and along those of the mesh that it is
            a slice of. Without it what is divided stays as it
            is divided, and the rest is divided over the group.
        model: the module that a state dict is of, where only it knows what is in it: torch's
            LOCAL_STATE_DICT has flat parameters without names.
        rank0_only: full tensors on the first rank only; the others get an empty dict.
        offload_to_cpu: the tensors of the result are in host memory.
        budget: bytes of tensors that travel at once; a larger tensor travels in parts. By default
            what CKPT_MEMORY_BUDGET says.
        timeout: seconds that a rank waits for another at most. Then all raise a RankError that
            names who has not come.

    Raises:
        ArgumentError: no such kind, or no such budget.
        StateError: what no state dict holds, or ranks contradict each other, in what they have or
            in their arguments (of budgets the first rank's counts).
        LocalShapeError: a local tensor is not what its layout says: a truncated shard.
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
            kind = Kind.named(to)
            return kind, repr((kind, mesh is None, rank0_only)).encode()

        (kind, _), agreed = ranks.run_and_compare(
            "reading the arguments", reading, _mark_of, 1, _count(budget)
        )
        _check_same_arguments(agreed.same[0])
        budget = agreed.number
        held = _merged_state(ranks, f"describing the state to be made {to}", state, model)
        kept = {}
        if kind is Kind.SHARDED and mesh is None:
            kept = _dtensors_as_they_are(held, ranks, offload_to_cpu)
        tensors = kept | converted(
            {name: tensor for name, tensor in _parts(held) if name not in kept},
            kind,
            mesh=mesh,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            group=group,
            budget=budget,
        )
        if kind is Kind.FULL and rank0_only and ranks.rank != 0:
            return {}
        built = _built(held.whole.tree, {name: t for name, t in tensors.items() if t is not None})
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
    """`target`, filled from a state of any kind that the ranks have in memory.

    To be called by all ranks of `group`. As `ckpt.load`, with what `convert` takes in the place of
    a checkpoint: names, optimizers without a step, `strict`, `rename`, `include`, `exclude`,
    `dtype` and `casting` mean the same, and so do the errors. The state of one rank alone, with
    nothing on the others, fills the targets of all. Tensors travel from who has them to who wants
    them, within `budget`.

    Raises:
        MismatchError: the two do not fit; all differences are listed. Nothing was touched.
        LocalShapeError: a local tensor is not what its layout says. Nothing was touched.
        RankError: another rank failed.

    >>> import ckpt, torch
    >>> ckpt.state_dict.load({"w": torch.ones(2), "step": 3}, {"w": torch.zeros(2), "step": 0})
    {'w': tensor([1., 1.]), 'step': 3}
    """
    ranks = Ranks(group, timeout)
    with ranks.call("ckpt.state_dict.load"):

        def reading() -> tuple[tuple[Selection, Casting | None], bytes]:
            _check_budget(budget)
            allowed = casting_of(dtype, casting)
            return (Selection.of(include, exclude), allowed), repr(allowed).encode()

        ((selection, allowed), _), agreed = ranks.run_and_compare(
            "reading the arguments", reading, _mark_of, 1, _count(budget)
        )
        _check_same_arguments(agreed.same[0])
        budget = agreed.number
        held = _merged_state(ranks, "describing the state to be loaded", state, model)

        def matching() -> tuple[Saved, Match]:
            saved = Saved(catalog_of(held.whole), rename)
            return saved, match(saved, target, selection, ranks.mesh, allowed)

        (saved, matched), agreed = ranks.run_and_compare(
            "matching the state with the target", matching, lambda found: marks(found[1]), 2
        )
        found = differences(ranks, matched, *agreed.same)
        ranks.run_on_all(
            "comparing the state with the target",
            lambda: check_fits(SOURCE, found, strict, warns=ranks.rank == 0),
        )
        run = LoadRun(matched.targets, group)
        shared = beside(matched.shared, matched.targets)
        apart = [item for group in shared for item, _ in group]
        fill = partial(fill_from_peers, run=run, held=held, saved=saved, ranks=ranks, budget=budget)
        fill([*matched.preflight_scalars, *apart])
        placed = [[one for _, one in group] for group in shared]
        ranks.run_on_all(
            "comparing the numbers of the state",
            partial(check_preflight_scalars, SOURCE, matched, placed),
        )
        fill(matched.items)
        return ranks.run_on_all("installing the loaded state", matched.install)  # type: ignore[return-value]


def _check_budget(budget: int | None) -> None:
    """Raise ArgumentError for what is no number of bytes."""
    if budget is None:
        memory_budget()
    elif not _count(budget):
        raise ArgumentError(f"a budget of {budget!r}: it is a number of bytes, at least 1")


def _count(budget: object) -> int:
    """The number of bytes, or as many as ranks can tell one another; 0 for what is none."""
    if budget is None:
        with suppress(ValueError):
            budget = memory_budget()
    return min(budget, 1 << 61) if isinstance(budget, int) and budget > 0 else 0


def _check_same_arguments(same: bool) -> None:
    """Raise StateError where the ranks were not called alike."""
    if not same:
        raise StateError("the ranks were called with different arguments; call all of them alike")


def _mark_of(read: tuple[object, bytes]) -> tuple[int]:
    return (xxhash.xxh3_64_intdigest(read[1]) >> (64 - HASH_BITS),)


def _merged_state(ranks: Ranks, stage: str, state: object, model: nn.Module | None) -> MergedState:
    """The state of all ranks."""

    def flattened() -> FlatState:
        flat = flatten(with_names(state, model), ranks.mesh)
        check_members(spec_of(flat).tensors, ranks.mesh)
        return flat

    hashes = ReplicaHashes("sample", ranks.global_rank)
    held = agree_on_state(ranks, stage, flattened, weigh=hashes.weigh)
    if held.conflicting_values:
        warn(conflict_message(ranks, held.conflicting_values), stacklevel=3)
    differing = [] if held.balanced else hashes.differing(ranks, held.whole.tensors)
    if differing and ranks.rank == 0:
        warn(
            f"not the same on all ranks that have them: {named(differing)}; each rank goes on with "
            "its own, so what they then divide or send is a mix; make them equal before",
            ReplicasWarning,
            stacklevel=3,
        )
    return held


def _parts(held: MergedState) -> Iterator[tuple[str, TensorLike]]:
    """All ranks' tensors by name, each as this rank has it."""
    for name, tensor in held.whole.tensors.items():
        leaf = held.flat.leaves.get(name)
        if leaf is not None and leaf.layout == tensor.layout:
            yield name, leaf.given
        else:
            yield name, LocalPart(held_locally(held, name), tensor.layout)


def _dtensors_as_they_are(
    held: MergedState, ranks: Ranks, to_cpu: bool
) -> dict[str, DTensor | None]:
    """What is a DTensor wherever there is some of it; None where this rank has none of it."""
    names, leaves = list(held.whole.tensors), held.flat.leaves
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


def _built(tree: Tree, tensors: Mapping[str, TensorLike]) -> object:
    """The nest, with these tensors in it."""
    if isinstance(tree, TensorRef):
        return tensors.get(tree.name)
    if isinstance(tree, dict):
        return {
            key: _built(item, tensors)
            for key, item in tree.items()
            if not isinstance(item, TensorRef) or item.name in tensors
        }
    if isinstance(tree, list):
        return [_built(item, tensors) for item in tree]
    if isinstance(tree, tuple):
        return tuple(_built(item, tensors) for item in tree)
    return opened(tree)
