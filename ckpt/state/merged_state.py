"""Merges the states of all ranks into one.

The ranks usually have equal state specs, and one exchange of hashes proves it. If they differ, for
example between pipeline stages, the ranks exchange their specs (`ckpt.state.merged_state`), and all
merge them alike.

Merges state specs that differ between ranks, section by section.

A section is a run of a state's top entries. Equal sections are sent once, so a rank with one entry
of its own sends this entry and not the whole model.

Any number of ranks needs two exchanges: of the state_hashes of all sections, and of the sections,
each sent by the lowest rank that has it.
"""

from __future__ import annotations

import json
import marshal
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from struct import Struct
from typing import Any, TypeAlias

import xxhash

from ckpt.errors import StateError, ValuesWarning
from ckpt.plan.save_plan import keeps_last
from ckpt.state.flatten import FlatState
from ckpt.state.saved import leaves
from ckpt.state.state_spec import (
    StateSpec,
    conflicting_values,
    is_node,
    merge_specs,
    outline,
    without_tensors,
)
from formats.catalog import Key, TensorRef, Tree
from formats.dtypes import DType
from formats.native.manifest import Manifest, StoredTensor, dump, load
from sharding.agreement.ranks import HASH_BITS, Ranks
from sharding.errors import format_names
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

    def balance(flat: FlatState, merged: StateSpec) -> int:
        return 0 if weigh is None or ranks.is_single_process else weigh(flat, merged.tensors)

    def describing() -> _LocalState:
        flat = flatten()
        described = spec_of(flat)
        if ranks.is_single_process:
            return _LocalState(flat, described, 0, 0, 0)
        return _LocalState(flat, described, *state_hashes(described), balance(flat, described))

    arguments_hash = short_hash(repr(arguments).encode())
    mine, agreed = ranks.run_and_compare(
        stage,
        describing,
        lambda each: {
            "structure": each.structure,
            "values": each.values,
            "arguments": arguments_hash,
        },
        number=attempt_id,
        balance=lambda each: each.balance,
        note=note,
    )
    if not agreed.same["arguments"]:
        arguments_text = ", ".join(
            f"{name}={value!r:.80}" for name, value in (arguments or {}).items()
        )
        raise StateError(
            "the ranks were called with different arguments, this rank with "
            f"{arguments_text}; call all of them alike"
        )
    number_and_note = agreed.number, agreed.note
    if agreed.same["structure"]:
        merged, same = mine.described, agreed.same["values"]
        return MergedState(mine.flat, merged, same, (), agreed.balanced, *number_and_note)

    def merging() -> tuple[StateSpec, int]:
        merged = united()
        return merged, balance(mine.flat, merged)

    united = merge(ranks, mine.described)
    (merged, _), weighed = ranks.run_and_compare(
        "merging the ranks' states", merging, lambda _: {}, balance=lambda made: made[1]
    )
    lost = tuple(dict.fromkeys(conflicting_values(mine.described.tree, merged.tree)))
    return MergedState(mine.flat, merged, True, lost, weighed.balanced, *number_and_note)


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


def other_than_first(ranks: Ranks, merged: MergedState) -> tuple[str, ...]:
    """Returns the names of this rank's plain values that differ from rank 0's.

    All ranks call this if their structures are equal and their values are not. Communicates.
    """
    mine = summary(StateSpec({}, {}, without_tensors(merged.whole.tree)))
    first = ranks.broadcast(mine)
    found = conflicting_values(unpack_spec(mine).tree, unpack_spec(first).tree)
    return tuple(dict.fromkeys(found))


def with_values_of_first(ranks: Ranks, merged: MergedState) -> MergedState:
    """Returns the state with rank 0's plain values, and the names of those that this rank loses.

    All ranks call this if their structures are equal and their values are not. Communicates.
    """
    mine = summary(merged.whole)
    own, first = (unpack_spec(text).tree for text in (mine, ranks.broadcast(mine)))
    lost = tuple(dict.fromkeys(conflicting_values(own, first)))
    whole = replace(merged.whole, tree=first)
    return replace(merged, whole=whole, same_values=True, conflicting_values=lost)


def conflict(ranks: Ranks, names: Sequence[str]) -> ValuesWarning:
    """Returns the warning of a rank whose values of these names are not stored."""
    return ValuesWarning(
        f"rank {ranks.rank} has other values in the state than the lowest rank that has them, "
        f"whose values are taken: {format_names([*map(repr, names)], SHOWN)}; give values "
        "that differ "
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


RUN_KEYS = 16
"""The average number of top entries in a section of tensors and values."""
_SIZE = Struct("!I")
_HASH = Struct("!q")


def state_hashes(described: StateSpec) -> tuple[int, int]:
    """Returns a hash of names, dtypes, layouts, ties and keys, and one that includes the values."""
    values: list[object] = []
    keys = outline(described.tree, values)
    aliases = sorted(described.aliases.items())
    optimizers = sorted(described.optimizers.items())
    structure = _hash((_last_tensors_hash(described.tensors), aliases, keys, optimizers))
    return structure, _hash((structure, values))


def _tensors_hash(tensors: Mapping[str, StoredTensor]) -> int:
    """Returns a hash of names, dtypes and layouts."""
    kinds: dict[str, int] = {}
    kind_of: dict[int, int] = {}
    """By the id of a `StoredTensor`, which many tensors share."""
    kind_numbers: list[int] = []
    for tensor in tensors.values():
        kind = kind_of.get(id(tensor))
        if kind is None:
            text = repr((tensor.dtype.name, tensor.layout))
            kind = kind_of[id(tensor)] = kinds.setdefault(text, len(kinds))
        kind_numbers.append(kind)
    return _hash((list(tensors), kind_numbers, list(kinds)))


_last_tensors_hash = keeps_last(_tensors_hash)


def _hash(values: Any) -> int:
    try:
        # Version 2 of marshal's format has no references: equal values give equal bytes.
        return short_hash(marshal.dumps(values, 2))
    except ValueError:  # a key of a user's class
        return short_hash(repr(values).encode("utf-8", "surrogatepass"))


def short_hash(data: bytes) -> int:
    """Returns a hash that ranks can compare."""
    return xxhash.xxh3_64_intdigest(data) >> (64 - HASH_BITS)


def summary(described: StateSpec) -> bytes:
    d = described
    return dump(
        Manifest(
            d.tensors,
            d.aliases,
            d.tree,
            (),
            strides=d.strides,
            optimizers=d.optimizers,
            versions=d.versions,
        )
    )


def unpack_spec(text: bytes) -> StateSpec:
    manifest = load(text, "another rank's summary", stored=False)
    m = manifest
    return StateSpec(m.tensors, m.aliases, m.tree, m.strides, m.optimizers, m.versions)


def merge(ranks: Ranks, mine: StateSpec) -> Callable[[], StateSpec]:
    """Exchanges the sections. Returns a function that merges them, equal on all ranks.

    All ranks call this. Communicates. The function raises StateError for contradicting sections.
    """
    own_sections = {state_hashes(section)[1]: section for section in sections(mine)}
    table = _table(ranks, list(own_sections))
    sent = [own_sections[fingerprint] for fingerprint, holders in table if holders[0] == ranks.rank]
    record = zlib.compress(b"".join(map(_with_size, map(summary, sent))), 1)
    answer = ranks.merge_records(
        "exchanging the states", record, lambda r: b"".join(map(_with_size, r))
    )
    world = ranks.mesh
    members: dict[tuple[int, ...], list[int]] = {}
    """Sections of the same ranks share one list."""

    def uniting() -> StateSpec:
        collected: list[tuple[Sequence[int], StateSpec]] = []
        texts = (text for packed in _parts(answer) for text in _parts(zlib.decompress(packed)))
        for (fingerprint, holders), text in zip(table, texts, strict=True):
            if holders not in members:
                members[holders] = [world.rank((rank,)) for rank in holders]
            section = (
                own_sections[fingerprint] if fingerprint in own_sections else unpack_spec(text)
            )
            collected.append((members[holders], section))
        return merge_specs(collected, world)

    return uniting


def sections(described: StateSpec) -> Iterator[StateSpec]:
    """Yields the sections of a state spec, in order.

    Equal top entries are in equal sections on nearly all ranks, even with other entries in between.
    The first section of a dict is empty.
    """
    tree = described.tree
    if not isinstance(tree, dict):
        yield described
        return
    yield StateSpec({}, {}, {})
    run: dict[Key, Tree] = {}
    for key, item in tree.items():
        is_nest = is_node(item) and not isinstance(item, TensorRef)
        if run and (
            is_nest or short_hash(repr(key).encode("utf-8", "surrogatepass")) % RUN_KEYS == 0
        ):
            yield _section(described, run)
            run = {}
        run[key] = item
        if is_nest:
            yield _section(described, run)
            run = {}
    if run:
        yield _section(described, run)


def _section(described: StateSpec, tree: dict[Key, Tree]) -> StateSpec:
    places = [(name, leaf.name) for name, leaf in leaves(tree) if isinstance(leaf, TensorRef)]
    tensors = {name: described.tensors[name] for name, stored in places if name == stored}
    aliases = {name: stored for name, stored in places if name != stored}
    strides = {name: described.strides[name] for name in tensors if name in described.strides}
    keys = tuple(f"{key}." for key in tree)
    optimizers = {p: m for p, m in described.optimizers.items() if f"{p}.".startswith(keys)}
    # A module that is the whole state has its entries in all sections.
    versions = {p: v for p, v in described.versions.items() if not p or f"{p}.".startswith(keys)}
    return StateSpec(tensors, aliases, tree, strides, optimizers, versions)


_Table: TypeAlias = list[tuple[int, tuple[int, ...]]]
"""The fingerprint of each distinct section and the ranks that have it, in the order of sending."""


def _table(ranks: Ranks, mine: Sequence[int]) -> _Table:
    """Exchanges the state_hashes of the sections of all ranks. Communicates."""

    def join(records: Sequence[bytes]) -> bytes:
        holders: dict[int, list[int]] = {}
        for rank, record in enumerate(records):
            for (fingerprint,) in _HASH.iter_unpack(record):
                holders.setdefault(fingerprint, []).append(rank)
        runs = [[fingerprint, *_runs(having)] for fingerprint, having in holders.items()]
        return zlib.compress(json.dumps(runs, separators=(",", ":")).encode(), 1)

    record = b"".join(map(_HASH.pack, mine))
    answer = ranks.merge_records("comparing descriptions", record, join)
    return [
        (fingerprint, tuple(rank for first, end in _pairs(runs) for rank in range(first, end)))
        for fingerprint, *runs in json.loads(zlib.decompress(answer))
    ]


def _runs(numbers: Sequence[int]) -> list[int]:
    """Returns ascending numbers as the bounds of their runs, first and end in turn.

    >>> _runs([0, 1, 2, 5])
    [0, 3, 5, 6]
    """
    bounds: list[int] = []
    for number in numbers:
        if bounds and bounds[-1] == number:
            bounds[-1] += 1
        else:
            bounds += (number, number + 1)
    return bounds


def _pairs(bounds: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(bounds[::2], bounds[1::2], strict=True)


def _with_size(data: bytes) -> bytes:
    return _SIZE.pack(len(data)) + data


def _parts(data: bytes) -> Iterator[bytes]:
    """Yields the parts of data that `_with_size` has made, one after the other."""
    at = 0
    while at < len(data):
        (size,) = _SIZE.unpack_from(data, at)
        yield data[at + _SIZE.size : at + _SIZE.size + size]
        at += _SIZE.size + size
