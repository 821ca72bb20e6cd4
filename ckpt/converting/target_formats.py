"""The formats that a conversion writes: by which names, and the weights that each would lose.

Rules, which hold before a byte is written:

1. A weight is lost if the target lacks it, or if other readers of the target see another dtype.
   Plain values, which flat formats lack, are no weights: `omissions` names them.
2. A caller who names tensors or a part has chosen the others away.
3. A Hugging Face folder with a `config.json` has the names that `from_pretrained` looks for. Names
   below a wrapper's key are an error with the option that removes it. The names to expect are those
   of the weights beside the configuration, if there are any. Other names than these are no loss:
   transformers renames weights when it reads them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from enum import Enum

from ckpt.errors import CkptError, NotACheckpointError
from ckpt.mapping.changes import Changes, place_of_model, place_of_module, weights_beside
from ckpt.mapping.model_files import CONFIG, ModelFiles, config_of, folder_of
from ckpt.opening.sources import Source, open_source
from formats.catalog import (
    Catalog,
    OpaqueValue,
    Outgoing,
    Tree,
    TypedValue,
    iter_leaves,
    join,
    plain_names,
)
from formats.detect import ENDINGS, WRITTEN
from formats.errors import FormatError, UnsupportedError
from formats.safetensors.file import is_carried
from sharding.errors import ArgumentError, without_secrets


class Format(str, Enum):
    """The formats that a conversion writes."""

    CKPT = "ckpt"
    SAFETENSORS = "safetensors"
    HUGGINGFACE = "hf"
    TORCH = "torch"
    DCP = "dcp"
    GGUF = "gguf"
    NPZ = "npz"

    @property
    def is_file(self) -> bool:
        """Whether a checkpoint of this format is one file, not a folder."""
        return self in (Format.SAFETENSORS, Format.TORCH, Format.GGUF, Format.NPZ)

    @property
    def is_of_weights(self) -> bool:
        """Whether a checkpoint of this format is the weights of a model, by its flat names.

        Of a training's folder, a conversion writes the weights alone unless `select` is given.
        """
        return self in (Format.SAFETENSORS, Format.HUGGINGFACE, Format.GGUF, Format.NPZ)


def format_of(target: str, to: str | None) -> Format:
    """Returns the format to write: `to`, or the format of the target's name."""
    if to is not None:
        try:
            return Format(to)
        except ValueError:
            known = ", ".join(f.value for f in Format)
            raise ArgumentError(f"cannot write {to!r}; known formats are {known}") from None
    ending = os.path.splitext(target.rstrip("/"))[1].lower()
    if ending in WRITTEN:
        return Format(WRITTEN[ending])
    if _ENDING.fullmatch(ending):
        kind = ENDINGS.get(ending)
        what = f"{kind}, and no such file is written" if kind else "no format that is known"
        raise ArgumentError(
            f"{without_secrets(target)} ends with {ending}, which is {what}; end it with "
            f"{', '.join(WRITTEN)}, or name the folder's format (to='ckpt')"
        )
    return Format.CKPT


_ENDING = re.compile(r"\.[a-z][a-z0-9_]*")
"""What may be the ending of a file: `.onnx`, and not the `.5` of `step-1.5`."""


def of_weights(changes: Changes, source: Source, chosen: Format) -> tuple[Changes, tuple[str, ...]]:
    """Returns the changes with the place of the weights, and the keys beside it.

    They are unchanged if the caller named a part, or the format holds more than weights. A Hugging
    Face folder gets one model alone, unless the caller named tensors (`place_of_module`).
    """
    weights = source.catalog.weights
    is_named = changes.select is not None or changes.part is not None
    if chosen is Format.HUGGINGFACE and not weights and not is_named and not changes.names_tensors:
        weights = place_of_module(source.catalog, without_secrets(source.url))
    if is_named or not chosen.is_of_weights or not weights:
        return changes, ()
    beside = tuple(_beside(source.catalog.tree, weights))
    return replace(changes, select=weights, module=weights), beside


def prefix_of_model(changes: Changes, source: Source, chosen: Format, state: Outgoing) -> str:
    """Returns the key path with which the names of the model begin; empty in a format of states."""
    place = place_of_model(source.catalog)
    is_named = changes.select is not None or changes.part is not None
    if is_named or not chosen.is_of_weights or not place:
        return ""
    return place if any(name.startswith(f"{place}.") for name in state.tensors) else ""


def _beside(tree: Tree, place: str, path: str = "") -> Iterator[str]:
    """Yields the key paths of the outermost entries that neither are nor hold the place."""
    entries = tree.items() if isinstance(tree, dict) else ()
    for key, item in entries:
        name = join(path, key)
        if place.startswith(f"{name}."):
            yield from _beside(item, place, name)
        elif name != place:
            yield name


def omissions(chosen: Format, state: Outgoing) -> tuple[str, ...]:
    """Returns the key paths of values that a format cannot hold, and its metadata."""
    if chosen is Format.CKPT:
        return ()
    if chosen in (Format.SAFETENSORS, Format.HUGGINGFACE):
        return plain_names(state.tree)
    lacking: Iterable[str] = ()
    known: Collection[str] = ()
    if chosen is Format.NPZ:
        lacking = (*plain_names(state.tree), *state.aliases)
    elif chosen is Format.GGUF:
        from formats import gguf  # start-up: few conversions need it

        lacking, known = gguf.omissions(state), gguf.METADATA
    elif chosen is Format.DCP:
        lacking = (name for name, is_empty in _changed_by_dcp(state) if is_empty)
    metadata = (f"metadata[{key!r}]" for key in sorted(state.metadata) if key not in known)
    return (*lacking, *metadata)


def check_values(chosen: Format, state: Outgoing) -> None:
    """Raises UnsupportedError for a value that only ckpt's own format can hold."""
    if chosen in (Format.TORCH, Format.DCP):
        for name, value in iter_leaves(state.tree):
            if isinstance(value, TypedValue):
                raise UnsupportedError(
                    f"{name} is {value!s:.80}, and {chosen.value} has no {value.kind} that torch "
                    "loads without running code: leave it out (exclude=), store plain "
                    "values in its place, or convert to ckpt's own format"
                )


def became_text(chosen: Format, state: Outgoing) -> tuple[str, ...]:
    """Returns the names of dicts with keys that are text in the target, and were numbers."""
    changed = _changed_by_dcp(state) if chosen is Format.DCP else ()
    return tuple(name or "the outermost" for name, is_empty in changed if not is_empty)


def _changed_by_dcp(state: Outgoing) -> Iterator[tuple[str, bool]]:
    from formats.dcp.nest import lost

    return lost(state.tree)


SHOWN_NAMES = 200
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_forward_module")
"""Names that DDP, torch.compile, FSDP and Lightning put before those of a module."""
_HEADS = frozenset(("lm_head", "classifier", "score", "cls", "qa_outputs"))
"""Modules that transformers puts beside a base model, never into it."""
_MADE_ANEW = ("position_ids", "inv_freq", "masked_bias", "num_batches_tracked")
"""Endings of buffers that older files have and a model makes itself."""


def check_names(
    source: Source, changes: Changes, state: Outgoing, files: ModelFiles
) -> tuple[str, ...]:
    """Returns a line for each weight that `from_pretrained` would not find and make anew (rule 3).

    Raises ArgumentError if it would not find any, because all names begin with a wrapper's key.
    """
    is_same = changes.config is None and source.catalog.format == "huggingface"
    if is_same or CONFIG not in files.content or changes.select == "":
        return ()
    expected = _names_beside(changes.config)
    names = {*state.tensors, *state.aliases}
    key = "" if changes.select or changes.part else place_of_model(source.catalog)
    prefix = _wrapper_of(names, expected, key, config_of(files, "config="))
    if prefix:
        raise ArgumentError(
            f"{without_secrets(source.url)}: all names would begin with {prefix!r}, a key around "
            "the model, so that from_pretrained would find none of them and make random weights: "
            f"take the key off with rename={{'{prefix.removesuffix('.')}': ''}}, take the model "
            "alone with part='model', or keep the names as they are with select=''"
        )
    is_chosen = bool(changes.include or changes.exclude or changes.mapping)
    lacking = () if is_chosen else _lacking(names, expected)
    return tuple(
        f"{name} is among the weights beside config=, and from_pretrained would make it anew"
        for name in lacking
    )


def losses(
    catalog: Catalog, changes: Changes, tree: Tree, state: Outgoing, chosen: Format
) -> Iterator[str]:
    """Yields a line for each weight that would be lost (rule 1).

    `changes` have the place of the weights, and `tree` is the one of `catalog` after them, with its
    opaque values. `state` is what is written.
    """
    is_named = bool(changes.include or changes.exclude or changes.part)
    for name, leaf in iter_leaves(tree):
        if isinstance(leaf, OpaqueValue) and leaf.tensors:
            yield f"{name or 'the whole state'} is {leaf.type}, which is shown and never made"
    if changes.module is not None:
        for name in weights_beside(catalog, changes.module):
            yield f"{name} lies beside {changes.module}, which alone is taken (select=)"
    if not is_named and changes.select in (None, "", changes.module):
        for name in catalog.unread:
            kind = "folder" if name.endswith("/") else "file"
            yield f"{name} is a {kind} of weights that is not read: convert it by itself"
    if chosen in (Format.SAFETENSORS, Format.HUGGINGFACE):
        for name, tensor in state.tensors.items():
            if is_carried(tensor.dtype, tensor.shape):
                yield f"{name} is {tensor.dtype}, which others would see as {tensor.dtype.carrier}"
    if chosen.is_of_weights:
        yield from _broken_up(state.tree)
    was_gguf = any(key.startswith("gguf.") for key in catalog.metadata)
    if chosen not in (Format.GGUF, Format.CKPT) and was_gguf:
        from formats import gguf

        for name, kind in json.loads(catalog.metadata.get(gguf.QUANTISED, "{}")).items():
            if name in state.tensors:
                yield f"{name} is {kind}, which others would see as bytes"


def _broken_up(tree: Tree, path: str = "") -> Iterator[str]:
    """Yields the tensors that a flat format would hold without the numbers that belong to them."""
    if not isinstance(tree, dict | list | tuple):
        return
    entries = tree if isinstance(tree, dict) else dict(enumerate(tree))
    if "qscheme" in entries and ("int_repr" in entries or "packed" in entries):
        yield f"{path} is quantised, and its scale and zero point are no tensors"
    elif "layout" in entries and "values" in entries and "size" in entries:
        yield f"{path} is sparse, and its shape is no tensor"
    else:
        for key, item in entries.items():
            if isinstance(item, dict | list | tuple):
                yield from _broken_up(item, join(path, key))


def _names_beside(config: str | os.PathLike[str] | None) -> frozenset[str]:
    """Returns the names of the weights beside a configuration; none without weights."""
    if config is None:
        return frozenset()
    try:
        with open_source(folder_of(config), with_advice=False) as source:
            if source.catalog.format != "huggingface":
                return frozenset()
            return frozenset((*source.catalog.tensors, *source.catalog.aliases))
    except (NotACheckpointError, FormatError, CkptError):
        return frozenset()


def _wrapper_of(
    names: Collection[str], expected: Collection[str], key: str, config: Mapping[str, object]
) -> str:
    """Returns the beginning of all names, with its dot, that is the key of a wrapper; else ""."""
    prefix, left = "", set(names)
    while len(firsts := {name.partition(".")[0] for name in left}) == 1:
        (first,) = firsts
        if not _is_wrapper(first, left, expected, key if not prefix else "", config):
            break
        prefix += f"{first}."
        left = {name.partition(".")[2] for name in left}
    return prefix


def _is_wrapper(
    first: str,
    names: Collection[str],
    expected: Collection[str],
    key: str,
    config: Mapping[str, object],
) -> bool:
    """Whether the first part of all names is no part of a model that transformers makes."""
    inner = {name.partition(".")[2] for name in names}
    if "" in inner:
        return False
    if first in _WRAPPERS or first == key:
        return True
    if expected:
        return len(inner & set(expected)) > len(set(names) & set(expected))
    seconds = {name.partition(".")[0] for name in inner}
    kind = str(config.get("model_type", "")).replace("-", "_")
    bases = {kind, kind.rpartition("_")[2]} - {"", first}
    return bool(seconds & (_HEADS | bases))


def _lacking(names: Collection[str], expected: Collection[str]) -> tuple[str, ...]:
    """Returns the expected names that are not there, if all others are expected ones.

    transformers also finds names with, or without, the one key of the base model.
    """
    keys = {name.partition(".")[0] for name in expected}
    forms = [set(names)]
    forms += [{f"{key}.{name}" for name in names} for key in keys]
    forms += [{name.removeprefix(f"{key}.") for name in names} for key in keys]
    fitting = [form for form in forms if form <= set(expected)]
    if not fitting:
        return ()
    prefix = max(fitting, key=len)
    return tuple(n for n in expected if n not in prefix and not n.endswith(_MADE_ANEW))
