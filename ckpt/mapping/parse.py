"""Reads mapping files: TOML, or JSON with the same keys.

    strict = true
    exclude = ["*.rotary_emb.inv_freq"]
    tied = { "lm_head.weight" = "model.embed_tokens.weight" }

    [parameters]
    heads = "num_attention_heads"

    [[rule]]
    from = "model.layers.*.self_attn.q_proj.weight"
    to = "layers.*.attention.wq.weight"
    rearrange = "(heads two half) ... -> (heads half two) ..."
    sizes = { two = 2 }

docs/converting.md has every key. Unknown keys are errors.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from ckpt.mapping.rearrange import Rearrange
from ckpt.mapping.rules import Rule, Size, TensorMapping
from formats.errors import FormatError
from formats.strict_json import decode_object
from sharding.errors import ArgumentError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_KEYS = ("about", "strict", "exclude", "tied", "parameters", "rule")
_RULE_KEYS = ("from", "to", "rearrange", "sizes", "parts", "optional")


def read_mapping_file(path: str | os.PathLike[str]) -> TensorMapping:
    """Returns the mapping in a file.

    Raises:
        ArgumentError: no file is there, or its text is no mapping. The message names the rule.
    """
    place = Path(path)
    try:
        text = place.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{place}: no mapping file: {error}") from error
    return parse_mapping(text, str(place), is_json=place.suffix == ".json")


def parse_mapping(text: str, name: str, is_json: bool = False) -> TensorMapping:
    """Returns the mapping in a text. Raises ArgumentError as `read_mapping_file` does."""
    try:
        found = decode_object(text, name) if is_json else tomllib.loads(text)
    except (FormatError, tomllib.TOMLDecodeError) as error:
        raise ArgumentError(f"{name}: {error}") from error
    top = _Table(found, name, _KEYS)
    rules = top.tables("rule")
    if not rules:
        raise ArgumentError(f"{name}: a mapping has at least one [[rule]]")
    parameters, tied = top.table("parameters"), top.table("tied")
    return TensorMapping(
        name,
        tuple(_rule(rule, f"{name}: rule {number}") for number, rule in enumerate(rules, 1)),
        top.texts("exclude"),
        top.flag("strict"),
        {key: _Table(tied, f"{name}: tied", ()).text(key) for key in tied},
        {key: _Table(parameters, f"{name}: parameters", ()).texts(key) for key in parameters},
    )


def _rule(found: Mapping[str, object], where: str) -> Rule:
    table = _Table(found, where, _RULE_KEYS)
    for key in ("from", "to"):
        if key not in found:
            raise ArgumentError(f"{where}: `{key}` is missing")
    pattern = table.text("rearrange") if "rearrange" in found else ""
    return Rule(
        table.texts("from"),
        table.texts("to"),
        Rearrange.parse(pattern, where) if pattern else None,
        {key: _size(size, f"{where}: sizes") for key, size in table.table("sizes").items()},
        tuple(_size(size, f"{where}: parts") for size in table.items("parts")),
        table.flag("optional"),
        where,
    )


class _Table:
    """The values of a table, checked."""

    def __init__(self, found: Mapping[str, object], where: str, keys: tuple[str, ...]) -> None:
        self._found = found
        self._where = where
        unknown = sorted(set(found) - set(keys)) if keys else []
        if unknown:
            raise ArgumentError(
                f"{where}: {', '.join(unknown)}: unknown; the keys are {', '.join(keys)}"
            )

    def texts(self, key: str) -> tuple[str, ...]:
        """Returns one text or a list of them."""
        value = self._found.get(key, [])
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise self._wrong(key, "a text or a list of texts")
        if key in self._found and not items:
            raise self._wrong(key, "at least one text")
        return tuple(items)

    def text(self, key: str) -> str:
        """Returns one text."""
        value = self._found.get(key)
        if not isinstance(value, str):
            raise self._wrong(key, "a text")
        return value

    def flag(self, key: str) -> bool:
        """Returns a truth value; False if the key is missing."""
        value = self._found.get(key, False)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def items(self, key: str) -> list[object]:
        """Returns a list."""
        value = self._found.get(key, [])
        if not isinstance(value, list):
            raise self._wrong(key, "a list")
        return value

    def table(self, key: str) -> Mapping[str, object]:
        """Returns a table."""
        value = self._found.get(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, "a table")
        return value

    def tables(self, key: str) -> list[Mapping[str, object]]:
        """Returns a list of tables."""
        tables: list[Mapping[str, object]] = []
        for item in self.items(key):
            if not isinstance(item, dict):
                raise self._wrong(key, "a list of tables: [[rule]]")
            tables.append(item)
        return tables

    def _wrong(self, key: str, wanted: str) -> ArgumentError:
        value = self._found.get(key)
        return ArgumentError(f"{self._where}: `{key}` is {value!r:.80}; it is {wanted}")


def _size(value: object, where: str) -> Size:
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ArgumentError(f"{where}: {value!r:.80} is no number and no text such as 'heads / 2'")
