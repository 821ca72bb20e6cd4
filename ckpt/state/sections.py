"""Descriptions that differ between ranks, told by each to all, in parts.

A description is cut into sections: runs of a state's top entries. Equal sections are told once,
whoever has them, so a rank with one entry of its own tells that entry and not the whole model.

Two exchanges, whatever the number of ranks: the hashes of all sections; then each section by the
lowest rank that has it.
"""

from __future__ import annotations

import json
import marshal
import zlib
from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import Any, TypeAlias

import xxhash

from ckpt.state.nests import is_node, outline
from ckpt.state.saved import leaves
from ckpt.state.state_spec import StateSpec, merged
from formats.catalog import Key, TensorRef, Tree
from formats.native.manifest import Manifest, dump
from formats.native.manifest_loader import load
from sharding.agreement.ranks import HASH_BITS, Ranks

RUN_KEYS = 16
"""How many top entries that are tensors or values stand in a section, about."""
_SIZE = Struct("!I")
_HASH = Struct("!q")


def fingerprints(described: StateSpec) -> tuple[int, int]:
    """A hash of names, types, layouts, ties and keys; and one of these and the plain values."""
    values: list[object] = []
    keys = outline(described.tree, values)
    kinds: dict[str, int] = {}
    kind_of: dict[int, int] = {}
    """By the id of a description: many tensors share one."""
    numbers: list[int] = []
    for tensor in described.tensors.values():
        kind = kind_of.get(id(tensor))
        if kind is None:
            text = repr((tensor.dtype.name, tensor.layout))
            kind = kind_of[id(tensor)] = kinds.setdefault(text, len(kinds))
        numbers.append(kind)
    aliases = sorted(described.aliases.items())
    structure = _hash((list(described.tensors), numbers, list(kinds), aliases, keys))
    return structure, _hash((structure, values))


def _hash(values: Any) -> int:
    try:
        # Version 2 of marshal's format has no references: equal values give equal bytes.
        return short_hash(marshal.dumps(values, 2))
    except ValueError:  # a key of a class of the user's
        return short_hash(repr(values).encode("utf-8", "surrogatepass"))


def short_hash(data: bytes) -> int:
    """A hash that ranks can compare."""
    return xxhash.xxh3_64_intdigest(data) >> (64 - HASH_BITS)


def summary(described: StateSpec) -> bytes:
    """A description as bytes that another rank can read back."""
    return dump(Manifest(described.tensors, described.aliases, described.tree, ()))


def unpacked_summary(text: bytes) -> StateSpec:
    """A description that another rank has given."""
    manifest = load(text, "another rank's summary", stored=False)
    return StateSpec(manifest.tensors, manifest.aliases, manifest.tree)


def merge(ranks: Ranks, mine: StateSpec) -> Callable[[], StateSpec]:
    """The states of all ranks in one: as a function, the same on all, that may raise StateError.

    Called by all ranks.
    """
    own = {fingerprints(section)[1]: section for section in sections(mine)}
    table = _table(ranks, list(own))
    told = [own[fingerprint] for fingerprint, holders in table if holders[0] == ranks.rank]
    record = zlib.compress(b"".join(map(_sized, map(summary, told))), 1)
    answer = ranks.joined("telling what ranks have", record, lambda r: b"".join(map(_sized, r)))
    world = ranks.mesh
    members: dict[tuple[int, ...], list[int]] = {}
    """Many sections are of the same ranks: one list for all."""

    def uniting() -> StateSpec:
        found: list[tuple[Sequence[int], StateSpec]] = []
        texts = (text for packed in _parts(answer) for text in _parts(zlib.decompress(packed)))
        for (fingerprint, holders), text in zip(table, texts, strict=True):
            if holders not in members:
                members[holders] = [world.rank((rank,)) for rank in holders]
            section = own[fingerprint] if fingerprint in own else unpacked_summary(text)
            found.append((members[holders], section))
        return merged(found, world)

    return uniting


def sections(described: StateSpec) -> Iterator[StateSpec]:
    """The description in parts, which together are the whole of it.

    Equal top entries are in equal sections on nearly all ranks, whatever stands between them. The
    first section of every state that is a dict is an empty one.
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
    return StateSpec(tensors, aliases, tree)


_Table: TypeAlias = list[tuple[int, tuple[int, ...]]]
"""The fingerprint of each distinct section and the ranks that have it, in the order of sending."""


def _table(ranks: Ranks, mine: Sequence[int]) -> _Table:
    """The sections of all ranks."""

    def join(records: Sequence[bytes]) -> bytes:
        holders: dict[int, list[int]] = {}
        for rank, record in enumerate(records):
            for (fingerprint,) in _HASH.iter_unpack(record):
                holders.setdefault(fingerprint, []).append(rank)
        runs = [[fingerprint, *_runs(having)] for fingerprint, having in holders.items()]
        return zlib.compress(json.dumps(runs, separators=(",", ":")).encode(), 1)

    record = b"".join(map(_HASH.pack, mine))
    answer = ranks.joined("comparing descriptions", record, join)
    return [
        (fingerprint, tuple(rank for first, end in _pairs(runs) for rank in range(first, end)))
        for fingerprint, *runs in json.loads(zlib.decompress(answer))
    ]


def _runs(numbers: Sequence[int]) -> list[int]:
    """Ascending numbers as the bounds of their runs, first and end in turn.

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


def _sized(data: bytes) -> bytes:
    return _SIZE.pack(len(data)) + data


def _parts(data: bytes) -> Iterator[bytes]:
    """What was made one after the other by `_sized`."""
    at = 0
    while at < len(data):
        (size,) = _SIZE.unpack_from(data, at)
        yield data[at + _SIZE.size : at + _SIZE.size + size]
        at += _SIZE.size + size
