"""Encodes and decodes the nested state as JSON: the value of `state` in the manifest.

Rules (docs/format.md, section "State"):

1. null, booleans, integers, finite floats, strings and arrays stand for themselves. An object is a
   dict with string keys, in order.
2. An object with exactly one key that begins with `$` is a tagged node: `$tensor`, `$alias`,
   `$tuple`, `$dict`, `$float`, `$bytes`, `$complex`, `$dtype`, `$typed`. A dict of this form is
   written as `$dict`.
3. A tensor's name is its key path joined by dots; `tensor` for a state that is one tensor. Names
   are unique.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import TypeAlias

from formats.catalog import Key, OpaqueValue, TensorRef, Tree, TypedValue, join
from formats.dtypes import BY_NAME
from formats.errors import FormatError, HostileError
from formats.limits import DEPTH, KeysApart, Names

Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"

ROOT = "tensor"
"""The name of a tensor without a nest."""

TYPED = frozenset(
    (
        *("set", "frozenset", "deque", "bytearray", "range", "slice", "ellipsis"),
        *("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
        *("datetime", "date", "time", "timedelta", "timezone"),
        *("Decimal", "Fraction", "UUID", "device"),
    )
)
"""The kinds of typed values (docs/format.md, section "Typed values")."""

_BITS = re.compile(r"[0-9a-f]{16}")
NAN_BITS = "7ff8000000000000"
"""The bits of the NaN that has the node `$float`, and that most programs make."""

Entry: TypeAlias = "tuple[str, str, Json]"
"""A tensor or alias of a tree: its name, the tag of its node and the node's value."""


def _not_finite(number: float) -> Json:
    bits = struct.pack(">d", number).hex()
    if math.isnan(number) and bits != NAN_BITS:
        return {"$typed": ["float", bits]}
    return {"$float": str(number)}


def _nan(bits: Json, path: str) -> float:
    """Returns the NaN with these bits, as 16 hex digits."""
    if isinstance(bits, str) and _BITS.fullmatch(bits):
        number: float = struct.unpack(">d", bytes.fromhex(bits))[0]
        if math.isnan(number):
            return number
    raise FormatError(f"manifest: {path}: $typed with a float of bits {str(bits)[:80]!r} is no NaN")


def encode(tree: Tree, tensor: Callable[[str, TensorRef], Json], path: str = "") -> Json:
    """Returns the JSON of a tree. `tensor(name, ref)` returns the node of each tensor.

    `name` is the tensor's name at its place, `ref.name` its stored name.
    """
    if isinstance(tree, TensorRef):
        return tensor(path or ROOT, tree)
    if tree is None or isinstance(tree, bool | int | str):
        return tree
    if isinstance(tree, float):
        return tree if math.isfinite(tree) else _not_finite(tree)
    if isinstance(tree, list):
        return [encode(item, tensor, join(path, i)) for i, item in enumerate(tree)]
    if isinstance(tree, tuple):
        return {"$tuple": [encode(item, tensor, join(path, i)) for i, item in enumerate(tree)]}
    if isinstance(tree, dict):
        if all(isinstance(key, str) for key in tree) and not _looks_tagged(tree):
            prefix = f"{path}." if path else ""
            return {str(k): encode(item, tensor, f"{prefix}{k}") for k, item in tree.items()}
        pairs: list[Json] = [
            [encode_value(k), encode(item, tensor, join(path, k))] for k, item in tree.items()
        ]
        return {"$dict": pairs}
    if isinstance(tree, bytes):
        return {"$bytes": base64.b64encode(tree).decode("ascii")}
    if isinstance(tree, complex):
        return {"$complex": [encode_value(tree.real), encode_value(tree.imag)]}
    if isinstance(tree, TypedValue):
        return {"$typed": [tree.kind, *map(encode_value, tree.parts)]}
    if isinstance(tree, OpaqueValue):
        raise FormatError(f"{path}: {tree} is no value that can be stored")
    return {"$dtype": tree.name}


def _looks_tagged(tree: Mapping[Key, Tree]) -> bool:
    return len(tree) == 1 and str(next(iter(tree))).startswith("$")


def encode_value(value: object) -> Json:
    """Returns the JSON of a value without tensors, such as a dict key or a part of a value."""
    return encode(value, _no_tensor)  # type: ignore[arg-type]


def _no_tensor(name: str, ref: TensorRef) -> Json:
    raise FormatError(f"{ref.name}: a tensor cannot be a key or a part of a value")


def decode(node: Json, names: Names) -> tuple[Tree, list[Entry]]:
    """Returns the tree of a JSON node, and the tensors and aliases in it, in order.

    `names` limits the length of the names above those of tensors, which the caller counts. Raises
    HostileError for absurd names or nests, and FormatError for an unknown node.
    """
    entries: list[Entry] = []
    return _Decoder(entries, names, KeysApart("manifest")).tree(node, "", 0), entries


@dataclass(frozen=True, slots=True)
class _Decoder:
    """The state of the decoding of a tree."""

    entries: list[Entry] | None
    """The tensors and aliases so far; None where none may be."""
    names: Names
    keys: KeysApart

    def tree(self, node: Json, path: str, depth: int) -> Tree:
        if isinstance(node, dict):
            if len(node) == 1:
                ((tag, value),) = node.items()
                if tag in ("$tensor", "$alias"):
                    if self.entries is None:
                        raise FormatError(
                            f"manifest: {path or ROOT}: a tensor cannot be a key or a part of a "
                            "value"
                        )
                    self.entries.append((path or ROOT, tag, value))
                    return TensorRef(str(value) if tag == "$alias" else path or ROOT)
                if tag.startswith("$"):
                    return self._decode_tagged(tag, value, path, depth)
            self._check_size(node, path, depth)
            prefix = f"{path}." if path else ""
            tree = self.tree
            return {
                key: tree(item, prefix + key, depth + 1) if isinstance(item, dict | list) else item
                for key, item in node.items()
            }
        return self._items(node, path, depth) if isinstance(node, list) else node

    def _items(self, nodes: list[Json], path: str, depth: int) -> list[Tree]:
        self._check_size(nodes, path, depth)
        prefix = f"{path}." if path else ""
        return [self.tree(item, f"{prefix}{i}", depth + 1) for i, item in enumerate(nodes)]

    def _check_size(self, node: Sized, path: str, depth: int) -> None:
        """Raises HostileError if the entries of a container are too deep or have absurd names."""
        if depth >= DEPTH and len(node):
            raise HostileError(f"manifest: {path[:80]}... nests deeper than {DEPTH}")
        self.names.values(len(path), len(node))

    def _decode_tagged(self, tag: str, value: Json, path: str, depth: int) -> Tree:
        if tag == "$tuple" and isinstance(value, list):
            return tuple(self._items(value, path, depth))
        if tag == "$dict" and isinstance(value, list):
            return dict(self._pairs(value, path, depth))
        if tag == "$float" and value in ("nan", "inf", "-inf"):
            return float(str(value))
        if tag == "$bytes" and isinstance(value, str):
            try:
                return base64.b64decode(value, validate=True)
            except ValueError as error:
                raise FormatError(f"manifest: {path}: $bytes is not base64: {error}") from error
        if tag == "$complex" and isinstance(value, list) and len(value) == 2:
            real, imag = (self.tree(part, path, depth) for part in value)
            if isinstance(real, float) and isinstance(imag, float):
                return complex(real, imag)
        if tag == "$dtype" and isinstance(value, str) and value in BY_NAME:
            return BY_NAME[value]
        if tag == "$typed" and isinstance(value, list) and value:
            kind, *parts = value
            if kind == "float" and len(parts) == 1:
                return _nan(parts[0], path)
            if isinstance(kind, str) and kind in TYPED:
                plain = _Decoder(None, self.names, self.keys)
                return TypedValue(kind, tuple(plain._items(parts, path, depth)))
        raise FormatError(f"manifest: {path}: {tag} with {str(value)[:80]!r} is not a known node")

    def _pairs(self, pairs: list[Json], path: str, depth: int) -> Iterator[tuple[Key, Tree]]:
        self._check_size(pairs, path, depth)
        keys = _Decoder(None, self.names, self.keys)
        seen: set[Key] = set()
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2:
                raise FormatError(f"manifest: {path}: a $dict is a list of [key, value] pairs")
            key = keys.tree(pair[0], path, depth + 1)
            if not isinstance(key, str | int | float | bool | tuple) and key is not None:
                raise FormatError(f"manifest: {path}: {str(key)[:80]!r} cannot be a key")
            try:
                self.keys.check(key, seen)
                duplicate = key in seen
            except TypeError as error:  # a list inside a tuple
                raise FormatError(f"manifest: {path}: {str(key)[:80]!r} cannot be a key") from error
            if duplicate:
                raise HostileError(f"manifest: {path}: the key {key!r:.80} occurs twice")
            seen.add(key)
            yield key, self.tree(pair[1], join(path, key), depth + 1)
