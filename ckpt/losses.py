"""The weights that a conversion would lose, each with the reason, before a byte is written.

Rules:

1. A weight is lost if the target lacks it, or if other readers of the target see another dtype.
   Plain values, which flat formats lack, are no weights: `target_formats.left_out` names them.
2. A caller who names tensors or a part has chosen the others away.
3. A Hugging Face folder with a `config.json` has the names that `from_pretrained` looks for. Names
   below a wrapper's key are an error with the option that removes it. The names to expect are those
   of the weights beside the configuration, if there are any. Other names than these are no loss:
   transformers renames weights when it reads them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence

from ckpt.errors import CkptError, NotACheckpointError
from ckpt.mapping.changes import Changes, place_of_model, weights_beside
from ckpt.model_files import CONFIG, ModelFiles, config_of, folder_of
from ckpt.sources import Source, open_source
from ckpt.target_formats import Format
from formats import gguf
from formats.catalog import Catalog, OpaqueValue, Tree, join, named_leaves
from formats.errors import FormatError, UnsupportedError
from formats.outgoing import Outgoing
from formats.safetensors.file import is_carried
from sharding.errors import ArgumentError
from sharding.url_secrets import without_secrets

SHOWN_NAMES = 200
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_forward_module")
"""Names that DDP, torch.compile, FSDP and Lightning put before those of a module."""
_HEADS = frozenset(("lm_head", "classifier", "score", "cls", "qa_outputs"))
"""Modules that transformers puts beside a base model, never into it."""
_MADE_ANEW = ("position_ids", "inv_freq", "masked_bias", "num_batches_tracked")
"""Endings of buffers that older files have and a model makes itself."""


def losses(
    source: Source, changes: Changes, tree: Tree, state: Outgoing, chosen: Format
) -> tuple[str, ...]:
    """Returns a line for each weight that would be lost (rule 1).

    `changes` have the place of the weights, and `tree` is the source's after them, with its opaque
    values. `state` is what is written.
    """
    return tuple(_losses(source.catalog, changes, tree, state, chosen))


def check_nothing_is_lost(source: str, lost: Sequence[str]) -> None:
    """Raises UnsupportedError with all losses."""
    if lost:
        more = f"; and {len(lost) - SHOWN_NAMES} more" if len(lost) > SHOWN_NAMES else ""
        named = "; ".join(lost[:SHOWN_NAMES])
        raise UnsupportedError(
            f"{without_secrets(source)}: {len(lost)} of its weights would be lost: {named}{more}. "
            "Nothing was written: name the part to convert (select=, include=, exclude=), or pass "
            "allow_loss=True to convert the rest"
        )


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


def _losses(
    catalog: Catalog, changes: Changes, tree: Tree, state: Outgoing, chosen: Format
) -> Iterator[str]:
    is_named = bool(changes.include or changes.exclude or changes.part)
    for name, leaf in named_leaves(tree):
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
    if chosen not in (Format.GGUF, Format.CKPT):
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
    there = max(fitting, key=len)
    return tuple(n for n in expected if n not in there and not n.endswith(_MADE_ANEW))
