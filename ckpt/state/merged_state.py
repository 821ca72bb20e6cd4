"""Merges the states of all ranks into one.

The ranks usually have equal state specs, and one exchange of hashes proves it. If they differ, for
example between pipeline stages, the ranks exchange their specs (`ckpt.state.sections`), and all
merge them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt.errors import StateError, ValuesWarning
from ckpt.state.flatten import FlatState
from ckpt.state.nests import conflicting_values, without_tensors
from ckpt.state.sections import fingerprints, merge, short_hash, summary, unpacked_summary
from ckpt.state.state_spec import StateSpec
from formats.dtypes import DType
from formats.native.manifest import StoredTensor
from sharding.agreement.ranks import Ranks
from sharding.errors import listed
from sharding.layout import Layout

SHOWN = 8
"""A warning names at most so many values."""
Weigh = Callable[[FlatState, Mapping[str, StoredTensor]], int]
"""Returns a rank's sum for the bytes of its replicas of these tensors.

The sums of all ranks add up to zero modulo 2**64 if all replicas are equal.
"""


@dataclass(frozen=True, slots=True)
class MergedState:
    """A rank's state and the merged state of all ranks."""

    flat: FlatState
    """This rank's state."""
    whole: StateSpec
    """The merged state; equal on all ranks, except for plain values."""
    same_values: bool
    """Whether the plain values are equal on all ranks too; True if the structures differ."""
    conflicting_values: tuple[str, ...]
    """If the structures differ: names of plain values on which this rank lost to a lower rank."""
    balanced: bool
    """Whether the sums for the replicas' bytes add up to zero."""
    attempt_id: int
    """The `attempt_id` of rank 0."""
    note: bytes
    """The note of rank 0."""


def agree_on_state(
    ranks: Ranks,
    stage: str,
    flatten: Callable[[], FlatState],
    attempt_id: int = 0,
    arguments: Mapping[str, object] | None = None,
    weigh: Weigh | None = None,
    note: Callable[[], bytes] = bytes,
) -> MergedState:
    """Returns the states that `flatten` returns on all ranks, as one.

    All ranks call this. Communicates. Rank 0 makes its `note` first.

    Raises:
        StateError: the states contradict each other, or the ranks have different `arguments`.
        RankError: another rank failed; the message has `stage`.
    """

    def balance(flat: FlatState, whole: StateSpec) -> int:
        return 0 if weigh is None or ranks.is_single_process else weigh(flat, whole.tensors)

    def describing() -> _LocalState:
        flat = flatten()
        described = spec_of(flat)
        if ranks.is_single_process:
            return _LocalState(flat, described, 0, 0, 0)
        return _LocalState(flat, described, *fingerprints(described), balance(flat, described))

    given = short_hash(repr(arguments).encode())
    found, agreed = ranks.run_and_compare(
        stage,
        describing,
        lambda found: (found.structure, found.values, given),
        3,
        attempt_id,
        lambda found: found.balance,
        note,
    )
    same_structure, same_values, same_arguments = agreed.same
    if not same_arguments:
        shown = ", ".join(f"{name}={value!r:.80}" for name, value in (arguments or {}).items())
        raise StateError(
            f"the ranks were called with different arguments, this rank with {shown}; call all of "
            "them alike"
        )
    told = agreed.number, agreed.note
    if same_structure:
        whole = found.described
        return MergedState(found.flat, whole, same_values, (), agreed.balanced, *told)

    def merging() -> tuple[StateSpec, int]:
        whole = united()
        return whole, balance(found.flat, whole)

    united = merge(ranks, found.described)
    (whole, _), weighed = ranks.run_and_compare(
        "merging the ranks' states", merging, lambda _: (), 0, 0, lambda made: made[1]
    )
    lost = tuple(dict.fromkeys(conflicting_values(found.described.tree, whole.tree)))
    return MergedState(found.flat, whole, True, lost, weighed.balanced, *told)


def spec_of(flat: FlatState) -> StateSpec:
    """Returns a rank's state without its bytes. Tensors of one layout and dtype share an object.

    Two calls in a row with equal names, layouts and dtypes return the same `tensors` object.
    """
    global _last_spec
    names, leaves = list(flat.leaves), flat.leaves.values()
    layouts, dtypes = [leaf.layout for leaf in leaves], [leaf.dtype for leaf in leaves]
    *last, tensors = _last_spec
    if last != [names, layouts, dtypes]:
        tensors = _tensors_of(flat)
        _last_spec = names, layouts, dtypes, tensors
    strides, optimizers = flat.strides, flat.optimizers
    return StateSpec(tensors, flat.aliases, flat.tree, strides, optimizers, flat.versions)


_last_spec: tuple[list[str], list[Layout], list[DType], dict[str, StoredTensor]] = [], [], [], {}


def _tensors_of(flat: FlatState) -> dict[str, StoredTensor]:
    alike: dict[tuple[int, str], StoredTensor] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, leaf in flat.leaves.items():
        key = (id(leaf.layout), leaf.dtype.name)
        stored = alike.get(key)
        if stored is None:
            stored = alike[key] = StoredTensor(leaf.layout.shape, leaf.dtype, leaf.layout)
        tensors[name] = stored
    return tensors


def other_than_first(ranks: Ranks, held: MergedState) -> tuple[str, ...]:
    """Returns the names of this rank's plain values that differ from rank 0's.

    All ranks call this if their structures are equal and their values are not. Communicates.
    """
    mine = summary(StateSpec({}, {}, without_tensors(held.whole.tree)))
    first = ranks.broadcast(mine)
    found = conflicting_values(unpacked_summary(mine).tree, unpacked_summary(first).tree)
    return tuple(dict.fromkeys(found))


def with_values_of_first(ranks: Ranks, held: MergedState) -> MergedState:
    """Returns the state with rank 0's plain values, and the names of those that this rank loses.

    All ranks call this if their structures are equal and their values are not. Communicates.
    """
    mine = summary(held.whole)
    own, first = (unpacked_summary(text).tree for text in (mine, ranks.broadcast(mine)))
    lost = tuple(dict.fromkeys(conflicting_values(own, first)))
    whole = replace(held.whole, tree=first)
    return replace(held, whole=whole, same_values=True, conflicting_values=lost)


def conflict(ranks: Ranks, names: Sequence[str]) -> ValuesWarning:
    """Returns the warning of a rank whose values of these names are not stored."""
    return ValuesWarning(
        f"rank {ranks.rank} has other values in the state than the lowest rank that has them, "
        f"whose values are taken: {listed([*map(repr, names)], SHOWN)}; give values that differ "
        "between ranks names of their own",
        names,
    )


@dataclass(frozen=True, slots=True)
class _LocalState:
    """A state on one rank, with hashes to compare it with the other ranks' states."""

    flat: FlatState
    described: StateSpec
    structure: int
    values: int
    """The hash of the structure and the plain values."""
    balance: int
