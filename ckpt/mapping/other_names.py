"""Other names and shapes under which a checkpoint may fill a module in memory.

`ckpt.loading` tries them in turn where the names of the checkpoint do not fit. Rules:

1. The names that transformers has for the class of the module (`from_pretrained` uses them) come
   first: its tables of renames and conversions, and the prefix of its base models.
2. Names that fit but for one prefix lose it, or get it. This is for folders of Hugging Face. Those
   of sentence-transformers have further modules in sub-folders.
3. A mapping that ships has the `model_type`s whose folders it reads. The one in `config.json`
   chooses.
4. transformers declares tensors that old files hold and its class has not. They stay behind, and
   so do the heads of other tasks, if `config.json` is of the same model. A head is a module that
   the target lacks, outside of numbered layers. A weight for a module that it has is none.
5. Conversions of transformers run on tensors without memory. Their operations become views; one
   that computes values has none, and then its names are no candidate.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt.mapping.apply import Mapped, map_catalog
from ckpt.mapping.changes import Changes, mappings_for
from ckpt.mapping.model_files import config_in
from ckpt.mapping.views import (
    Flattened,
    Joined,
    Narrowed,
    Permuted,
    Stored,
    Unflattened,
    View,
)
from ckpt.opening.sources import Source
from ckpt.state.memory import torch_dtype
from ckpt.state.patterns import renamer
from ckpt.state.saved import leaves
from formats.catalog import Catalog, Key, TensorRecord, TensorRef, Tree
from formats.dtypes import DType
from formats.joined import Part, join_catalogs
from formats.safetensors import huggingface
from sharding.describe.describing import state_dict_keys
from sharding.describe.wrappers import child_of_wrapper
from sharding.errors import ArgumentError
from sharding.layout import Shape

_log = logging.getLogger("ckpt.load")


@dataclass(frozen=True, slots=True)
class OtherNames:
    """A checkpoint under other names."""

    catalog: Catalog
    title: str
    """The origin of the names, for messages."""
    argument: str | None = None
    """The argument to advise where they do not fit wholly; None to use them for that error too."""
    left: tuple[str, ...] = ()
    """Names of the checkpoint that belong to other tasks and stay behind (rule 4)."""
    own: frozenset[str] = frozenset()
    """Names of the target that no file of its class has."""


def other_names(source: Source, state: object) -> Iterator[OtherNames]:
    """Yields a checkpoint under other names that may fit a module, the likeliest first.

    The module may be the one entry of a dict.
    """
    if not isinstance(state, Mapping):
        yield from _of_module(source, state)
    elif len(state) == 1 and isinstance(key := next(iter(state)), str):
        plain = OtherNames(source.catalog, f"its own names below {key!r}", argument="")
        is_plain = isinstance(state[key], nn.Module) and source.catalog.format == "huggingface"
        for names in (*([plain] if is_plain else []), *_of_module(source, state[key])):
            catalog = join_catalogs(names.catalog.format, [Part((key,), names.catalog)])
            own = frozenset(f"{key}.{name}" for name in names.own)
            advice = names.argument and ""  # a mapping by itself has no names below the key
            yield replace(names, catalog=catalog, own=own, argument=advice)


def _of_module(source: Source, module: object) -> Iterator[OtherNames]:
    if not isinstance(module, nn.Module):
        return
    names = frozenset(state_dict_keys(module))
    config = config_in(source.store) if source.catalog.format == "huggingface" else {}
    found = _of_transformers(source.catalog, module, names, config)
    if found is not None:
        yield found
    if source.catalog.format == "huggingface":
        yield from _with_prefix(source.catalog, names)
        yield from _with_modules(source, names)
        for name in mappings_for(str(config.get("model_type"))):
            with suppress(ArgumentError):  # a rule names nothing here, or a size is unknown
                mapped = Changes(mapping=name).apply(source).catalog
                yield OtherNames(mapped, f"mapping={name!r}", f"mapping={name!r}")


def _with_modules(source: Source, names: Set[str]) -> Iterator[OtherNames]:
    """Yields the names of a folder of sentence-transformers with those of its further modules."""
    whole = huggingface.with_modules(source.store, source.catalog)
    if whole is not source.catalog and huggingface.MODULES in source.store.names():
        rename = huggingface.module_names(source.store)
        found = {folder: rename.get(folder, folder) for folder, _ in whole.parts if folder}
        mapping = Changes(rename=found).mappings[0]
        yield from _with_prefix(map_catalog(Mapped.identity(whole), mapping, {}).catalog, names)


def _with_prefix(catalog: Catalog, names: Set[str]) -> Iterator[OtherNames]:
    """Yields the names with the one prefix that makes all of them names of the target (rule 2)."""
    saved = [name for name, _ in leaves(catalog.tree)]
    missing = sorted({*names} - {*saved})[:6]  # the rest has the same prefix
    more = {old.removesuffix(f".{first}") for first in missing for old in saved} - {*saved}
    less = {first.removesuffix(f".{old}") for first in missing for old in saved} - {*missing}
    fitting = {old: old for old in saved if old in names}
    for rename in [*({old: ""} for old in sorted(more)), *({"": old} for old in sorted(less))]:
        changes = Changes(rename=rename | (fitting if "" in rename else {}))
        if names >= {*map(renamer(changes.rename), saved)}:
            with suppress(ArgumentError):  # two tensors get one name
                renamed = map_catalog(Mapped.identity(catalog), changes.mappings[0], {}).catalog
                yield OtherNames(renamed, f"the names by rename={rename}", argument="")


def _of_transformers(
    catalog: Catalog, module: nn.Module, names: Set[str], config: Mapping[str, object]
) -> OtherNames | None:
    """Returns the names that transformers has for the class of a module (rule 1)."""
    library: Any = sys.modules.get("transformers")
    model: Any = _without_wrappers(module)
    if library is None or not isinstance(model, library.PreTrainedModel):
        return None
    try:
        records, left = _converted(catalog, model, dict.fromkeys(names, True))
    except Exception:  # another version of private functions: the caller has an error of its own
        _log.debug("the names of transformers were not found", exc_info=True)
        return None
    declared = re.compile("|".join(model._keys_to_ignore_on_load_unexpected or ["(?!)"]))
    buffers = {_last_two(name) for name, _ in model.named_buffers()} - {*map(_last_two, names)}
    stale = {old for old, new in left.items() if declared.search(new) or _last_two(new) in buffers}
    rest = {name: new for name, new in left.items() if name not in stale}
    is_its_own = config.get("model_type") == model.config.model_type
    heads = tuple(_heads(rest.items(), names)) if is_its_own else ()
    for name, leaf in leaves(catalog.tree):
        if isinstance(leaf, TensorRef) and name in rest and name not in heads:
            records[name] = catalog.tensors[leaf.name]._replace(name=name)
    tree: dict[Key, Tree] = {name: TensorRef(name) for name in records}
    renamed = replace(catalog, tensors=records, tree=tree, aliases={}, optimizers={})
    title = f"the names of transformers {library.__version__} for {type(model).__name__}"
    own = frozenset(model._keys_to_ignore_on_save or ())
    return OtherNames(renamed, title, left=heads, own=own)


def _last_two(name: str) -> tuple[str, ...]:
    return tuple(name.split(".")[-2:])


def _ancestors(name: str) -> list[str]:
    """Returns the paths of the modules that a name lies in, the outermost first."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _heads(names: Iterable[tuple[str, str]], own: Iterable[str]) -> Iterator[str]:
    """Yields the names whose new ones lie in a module that the target lacks (rule 4)."""
    every = [_ancestors(name) for name in own]
    modules = {path for paths in every for path in paths}
    owners = {paths[-1] for paths in every if paths}
    for name, new in names:
        paths = _ancestors(new)
        is_numbered = any(map(str.isdecimal, new.split(".")))
        if paths and paths[-1] not in modules and owners.isdisjoint(paths) and not is_numbered:
            yield name


def _without_wrappers(module: nn.Module) -> nn.Module:
    """Returns a module with the classes that it had before it was wrapped; tensors are shared.

    `fully_shard` changes the class of a module, DDP and others put one around it.
    """
    while (child := child_of_wrapper(module)) is not None:
        module = module._modules[child]  # type: ignore[assignment]
    children = {
        name: None if one is None else _without_wrappers(one)
        for name, one in module._modules.items()
    }
    kinds = (
        one
        for one in type(module).__mro__
        if getattr(sys.modules.get(one.__module__), one.__name__, None) is one
        and issubclass(one, nn.Module)
    )
    kind = type(module) if "<locals>" in type(module).__qualname__ else next(kinds)
    if kind is type(module) and all(one is module._modules[n] for n, one in children.items()):
        return module
    twin: nn.Module = object.__new__(kind)
    twin.__dict__.update(module.__dict__, _modules=children)
    return twin


def _converted(
    catalog: Catalog, model: Any, names: Mapping[str, bool]
) -> tuple[dict[str, TensorRecord], dict[str, str]]:
    """Returns the tensors by the names of the model, and the other names with their new ones.

    Follows `convert_and_load_state_dict_in_model` of transformers 5.
    """
    conversions: list[Any] = []
    rename: Callable[..., tuple[str, str | None]] = _rename_of_4(model)
    order: Callable[[str], Any] = str
    if find_spec("transformers.conversion_mapping") is not None:
        core: Any = import_module("transformers.core_model_loading")
        tables: Any = import_module("transformers.conversion_mapping")
        conversions = tables.get_model_conversion_mapping(model)
        rename, order = core.rename_source_key, core.dot_natural_key
    converters = [conversion for conversion in conversions if hasattr(conversion, "operations")]
    renamings = [conversion for conversion in conversions if not hasattr(conversion, "operations")]
    by_pattern = {
        pattern: conversion for conversion in converters for pattern in conversion.source_patterns
    }
    prefix = model.base_model_prefix
    records: dict[str, TensorRecord] = {}
    left: dict[str, str] = {}
    groups: dict[str, Any] = {}
    saved = {n: leaf for n, leaf in leaves(catalog.tree) if isinstance(leaf, TensorRef)}
    with _Recorder() as recorder:
        for name in sorted(saved, key=order):
            record = catalog.tensors[saved[name].name]
            new, pattern = rename(name, renamings, converters, prefix, names)
            if new not in names and name in names:
                new, pattern = rename(name, [], [], prefix, names)
            if new not in names:
                left[name] = new
            elif pattern is None:
                if new in records:
                    raise ValueError(f"two tensors get the name {new}")
                records[new] = record._replace(name=new)
            else:
                group = groups.setdefault(new, deepcopy(by_pattern[pattern]))
                group.add_tensor(new, name, pattern, recorder.tensor(record))
        for new, group in groups.items():
            made = group.convert(new, model=model, config=model.config)
            made = made[0] if isinstance(made, tuple) else made  # transformers 5.0 adds errors
            for target, tensor in made.items():
                found = tensor[0] if isinstance(tensor, list) else tensor
                view, dtype = recorder.of(found)
                records[target] = TensorRecord(target, view.shape, dtype, view)
    return records, left


def _rename_of_4(model: Any) -> Callable[..., tuple[str, None]]:
    """Returns the function in transformers 4 in the place of `rename_source_key`."""
    table = (getattr(model, "_checkpoint_conversion_mapping", None) or {}).items()

    def rename(
        name: str, renamings: object, converters: object, prefix: str, names: Mapping[str, bool]
    ) -> tuple[str, None]:
        changed = (re.sub(key, new, name) for key, new in table if re.search(key, name))
        name = next(changed, name).replace("LayerNorm.gamma", "LayerNorm.weight")
        name = name.replace("LayerNorm.beta", "LayerNorm.bias")
        around = (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."))
        return next((new_name for new_name in around if new_name in names), name), None

    return rename


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes the views of tensors without memory, by the operations that run in the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._views: dict[int, tuple[torch.Tensor, View, DType]] = {}
        """By the identity of a tensor, which is kept so that no other tensor gets it."""

    def tensor(self, record: TensorRecord) -> torch.Tensor:
        dtype = torch_dtype(record.dtype.torch_name)
        made = torch.empty(record.shape, dtype=dtype, device="meta")
        self._views[id(made)] = made, Stored(record), record.dtype
        return made

    def of(self, tensor: torch.Tensor) -> tuple[View, DType]:
        """Returns the view that a tensor has become, and its dtype. Raises KeyError for values."""
        return self._views[id(tensor)][1:]

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Runs an operation and records its results; those of an unknown one get no views."""
        if func._schema.is_mutable:
            raise ValueError(f"{func} changes values")
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        several = args[0] if name in ("cat", "stack") else args[:1]
        inputs = [self._views[id(tensor)] for tensor in several if id(tensor) in self._views]
        if len(inputs) == len(several) and len({dtype for *_, dtype in inputs}) == 1:
            results = [result] if isinstance(result, torch.Tensor) else [*result]
            dtype = inputs[0][2]
            made = _views_of(name, [view for _, view, _ in inputs], args, kwargs or {}, results)
            for tensor, view in zip(results, made, strict=False):
                self._views[id(tensor)] = tensor, view, dtype
        return result


_SAME_ORDER = frozenset(
    ("view", "_unsafe_view", "_reshape_alias", "squeeze", "unsqueeze", "clone", "detach", "alias")
)
"""Operations that keep the elements in their order."""


def _views_of(
    name: str,
    inputs: Sequence[View],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Sequence[torch.Tensor],
) -> list[View]:
    """Returns the view of each result of an operation of torch; none for unknown operations."""
    view, rank = inputs[0], len(inputs[0].shape)

    def number(place: int, key: str) -> int:
        return int(args[place] if len(args) > place else kwargs.get(key, 0))

    if name in _SAME_ORDER:
        return [_reshape(view, tuple(results[0].shape))]
    if name in ("cat", "stack"):
        dim = number(1, "dim") % (rank + (name == "stack"))
        parts = [Flattened(one, dim, 0) for one in inputs] if name == "stack" else inputs
        return [Joined(tuple(parts), dim) if len(parts) > 1 else parts[0]]
    if name == "permute":
        return [Permuted(view, tuple(dim % rank for dim in args[1]))]
    if name == "transpose":
        order, one, other = [*range(rank)], number(1, "dim0"), number(2, "dim1")
        order[one], order[other] = order[other], order[one]
        return [Permuted(view, tuple(order))]
    if name in ("split", "split_with_sizes"):
        dim = number(2, "dim") % rank
        ends = accumulate((one.shape[dim] for one in results), initial=0)
        return [Narrowed(view, dim, lo, hi) for lo, hi in pairwise(ends)]
    return []


def _reshape(view: View, shape: Shape) -> View:
    """Returns a view in another shape, with the same order of elements.

    Merges and divides the smallest runs of dimensions that have as many elements on both sides.
    """
    if 0 in shape:
        raise ValueError(f"no elements in {shape}")
    left, right, at = [*view.shape], [*shape], 0
    while left or right:
        here, there = min(1, len(left)), min(1, len(right))  # 0: sizes of 1 at the other's end
        while prod(left[:here]) != prod(right[:there]):
            if prod(left[:here]) < prod(right[:there]):
                here += 1
            else:
                there += 1
        if here != 1:
            view = Flattened(view, at, here)
        if there != 1:
            view = Unflattened(view, at, tuple(right[:there]))
        left, right, at = left[here:], right[there:], at + there
    return view
