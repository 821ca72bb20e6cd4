"""One state that several ranks hold together: each describes its part, and they compare.

Usually all say the same, and one exchange of hashes shows it. Only where they do not, as when
pipeline stages hold other names, the ranks tell one another their descriptions
(`ckpt.state.sections`), and all merge them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckpt.errors import StateError
from ckpt.state.flatten import FlatState
from ckpt.state.nests import conflicting_values, without_tensors
from ckpt.state.sections import fingerprints, merge, short_hash, summary, unpacked_summary
from ckpt.state.state_spec import StateSpec
from formats.native.manifest import StoredTensor
from sharding.agreement.ranks import Ranks

SHOWN = 8
"""How many values a warning names."""
Weigh = Callable[[FlatState, Mapping[str, StoredTensor]], int]
"""A rank's number for the bytes of its replicas of these tensors.

Where all replicas are equal, the ranks' numbers add up to zero, modulo 2**64.
"""


@dataclass(frozen=True, slots=True)
class MergedState:
    """A state on one rank, and what it is part of."""

    flat: FlatState
    """As this rank has it."""
    whole: StateSpec
    """As all ranks have it together; the same on every rank, but for plain values."""
    same_values: bool
    """Whether the plain values are the same on all ranks too; True where the structures differ."""
    conflicting_values: tuple[str, ...]
    """There, the names of this rank's plain values in whose place `whole` has another rank's."""
    balanced: bool
    """Whether the numbers for the replicas' bytes add up to zero."""
    number: int
    """Rank 0's."""


def agree_on_state(
    ranks: Ranks,
    stage: str,
    flatten: Callable[[], FlatState],
    number: int = 0,
    arguments: bytes = b"",
    weigh: Weigh | None = None,
) -> MergedState:
    """What `flatten` describes on every rank, as one state.

    Called by all ranks. An error of any of them is raised on all, with `stage` in it. Raises
    StateError where descriptions contradict each other, or `arguments` differ.
    """

    def balance(flat: FlatState, whole: StateSpec) -> int:
        return 0 if weigh is None or ranks.is_single_process else weigh(flat, whole.tensors)

    def describing() -> _LocalState:
        flat = flatten()
        described = spec_of(flat)
        if ranks.is_single_process:
            return _LocalState(flat, described, 0, 0, 0)
        return _LocalState(flat, described, *fingerprints(described), balance(flat, described))

    given = short_hash(arguments)
    found, agreed = ranks.run_and_compare(
        stage,
        describing,
        lambda found: (found.structure, found.values, given),
        3,
        number,
        lambda found: found.balance,
    )
    same_structure, same_values, same_arguments = agreed.same
    if not same_arguments:
        raise StateError("the ranks were called with different arguments; call all of them alike")
    if same_structure:
        whole = found.described
        return MergedState(found.flat, whole, same_values, (), agreed.balanced, agreed.number)

    def merging() -> tuple[StateSpec, int]:
        whole = united()
        return whole, balance(found.flat, whole)

    united = merge(ranks, found.described)
    (whole, _), weighed = ranks.run_and_compare(
        "merging the ranks' states", merging, lambda _: (), 0, 0, lambda made: made[1]
    )
    lost = tuple(dict.fromkeys(conflicting_values(found.described.tree, whole.tree)))
    return MergedState(found.flat, whole, True, lost, weighed.balanced, agreed.number)


def spec_of(flat: FlatState) -> StateSpec:
    """A rank's state without its bytes. What is described alike is the same object."""
    alike: dict[tuple[int, str], StoredTensor] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, leaf in flat.leaves.items():
        key = (id(leaf.layout), leaf.dtype.name)
        stored = alike.get(key)
        if stored is None:
            stored = alike[key] = StoredTensor(leaf.layout.shape, leaf.dtype, leaf.layout)
        tensors[name] = stored
    return StateSpec(tensors, flat.aliases, flat.tree)


def other_than_first(ranks: Ranks, held: MergedState) -> tuple[str, ...]:
    """The names of this rank's plain values that are not rank 0's.

    Called by all ranks, where structures are the same and values are not.
    """
    mine = summary(StateSpec({}, {}, without_tensors(held.whole.tree)))
    first = ranks.broadcast(mine)
    found = conflicting_values(unpacked_summary(mine).tree, unpacked_summary(first).tree)
    return tuple(dict.fromkeys(found))


def conflict_message(ranks: Ranks, names: Sequence[str]) -> str:
    """A warning's text on a rank whose values of these names are not those of the whole state."""
    shown, more = ", ".join(map(repr, names[:SHOWN])), len(names) - SHOWN
    return (
        f"rank {ranks.rank} has other values in the state than the lowest rank that has them, "
        f"whose values are taken: {shown}{f' and {more} more' if more > 0 else ''}; give what "
        "differs between ranks a name of its own"
    )


@dataclass(frozen=True, slots=True)
class _LocalState:
    """A state on one rank, with hashes that say whether the other ranks' is the same."""

    flat: FlatState
    described: StateSpec
    structure: int
    values: int
    """Of the structure and the plain values."""
    balance: int
