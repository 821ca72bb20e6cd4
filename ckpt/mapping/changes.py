"""The changes that a conversion or comparison makes to names and shapes, in one order.

Rules:

1. The order is: the part (`select`, or the place of the model or optimizer), include and exclude,
   mappings, renames, prefix. Each takes the names that the last one gave.
2. The model is the weights of a training's folder, the first of the top entries `MODEL_KEYS` that
   is there, the one item of a list `models`, in a checkpoint without an optimizer everything, or
   the one such key in a top entry, as `app.model` of DCP's own recipe.
   An optimizer is a dict with `state` and `param_groups`, as torch's `state_dict()` of an
   optimizer; a checkpoint with several has no one place of it.
3. A Hugging Face folder gets the state dict of one module, by its own names (`place_of_module`).
   Two entries that may be the model are an error: `from_pretrained` would not find names below a
   key of the training's state, and would make random weights.
4. A parameter of a mapping that the caller does not give comes from the model's `config.json`: the
   one at `config`, or else the one beside the checkpoint, if it is there.
5. The mappings that ship are the files of `ckpt/mapping/families`, `MODEL-FROM-TO`, each read in
   both directions.
6. `auto`, or `auto-FROM-TO`, stands for the one of them that is for the `model_type` in the model's
   `config.json` and fits all names and shapes. Until then it is a mapping without rules.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Literal, TypeGuard

from ckpt.arguments import check_word
from ckpt.mapping.apply import Mapped, map_catalog
from ckpt.mapping.model_files import (
    ModelFiles,
    config_in,
    config_of,
    model_files_in,
    read_configs,
    read_model_files,
)
from ckpt.mapping.rules import Rule, TensorMapping, parse_mapping, read_mapping_file
from ckpt.opening.sources import Source
from ckpt.state.patterns import Selection, is_selected, map_selected
from ckpt.state.saved import Missing, Saved, holds_tensor, names_of, nodes_in
from formats.catalog import Catalog, Key, TensorRef, Tree, join
from formats.errors import UnsupportedError
from sharding.errors import ArgumentError, without_secrets

__all__ = ["read_mapping"]

Part = Literal["model", "optimizer"]
MappingName = str | os.PathLike[str] | TensorMapping
"""The name of a mapping that ships, `auto`, the path of a mapping file, or a mapping."""

MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
"""Top entries that are a state dict of a model: DCP's, Lightning's, torch's, DeepSpeed's."""
MODEL_LIST = "models"
"""The top entry that lists the models of an Accelerator."""
SHOWN_NAMES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The changes as a value, by the arguments of `ckpt.convert` with these names.

    Raises:
        ArgumentError: an argument has no meaning, or no mapping has such a name.
    """

    select: str | None = None
    part: Part | None = None
    include: str | Sequence[str] | None = None
    exclude: str | Sequence[str] | None = None
    mapping: MappingName | Sequence[MappingName] = ()
    rename: Mapping[str, str] | None = None
    prefix: str = ""
    parameters: Mapping[str, int] | None = None
    config: str | os.PathLike[str] | None = None
    module: str | None = None
    """The place that `place_of_module` gave to `select`, if the caller named no part."""
    selection: Selection = field(init=False)
    """The names to include and exclude."""
    mappings: tuple[TensorMapping, ...] = field(init=False)
    """Mappings, and the renames and the prefix as mappings."""

    def __post_init__(self) -> None:
        if self.part is not None:
            check_word("part", self.part, ("model", "optimizer"))
            if self.select is not None:
                raise ArgumentError(
                    f"select={self.select!r} and part={self.part!r}: give one of the two"
                )
        mapping = self.mapping
        named = [mapping] if isinstance(mapping, (str, os.PathLike, TensorMapping)) else mapping
        mappings = [named_mapping(one) for one in named]
        object.__setattr__(self, "mapping", tuple(mappings))
        if all(one.rules for one in mappings):
            _check_used(self.parameters or {}, mappings)
        if self.rename:
            mappings.append(_renames(self.rename, "rename"))
        if self.prefix:
            mappings.append(_renames({"": self.prefix}, "prefix"))
        object.__setattr__(self, "selection", Selection.of(self.include, self.exclude))
        object.__setattr__(self, "mappings", tuple(mappings))

    @property
    def names_tensors(self) -> bool:
        """Whether an argument has names of tensors of the checkpoint."""
        return any((self.include, self.exclude, self.mapping, self.rename))

    def check_config_is_used(self) -> None:
        """Raises ArgumentError for a `config` from which no mapping takes a size (rule 4)."""
        if self.config is not None and all(
            mapping.rules and not mapping.parameters for mapping in self.mappings
        ):
            raise ArgumentError(
                f"config={without_secrets(os.fspath(self.config))!r} has no effect: no mapping "
                "takes a size from a config.json, and only a folder that is written as hf gets "
                "a model's files; leave it out, or give a mapping"
            )

    def apply(self, source: Source) -> Mapped:
        """Returns the catalog of a checkpoint after the changes.

        Raises:
            ArgumentError: the checkpoint has no entry at `select`, or no such part, a pattern or a
                rule matches no name, or a mapping does not fit.
            UnsupportedError: a top entry has an empty name.
        """
        changes = self.resolved(source)
        return changes._mapped(source, changes.mappings)

    def resolved(self, source: Source) -> Changes:
        """Returns the changes with the mappings in the place of `auto` (rule 6).

        Raises ArgumentError, also as `apply` does.
        """
        if all(mapping.rules for mapping in self.mappings):
            return self
        used: list[TensorMapping] = []
        for mapping in self.mappings[: len(self.mappings) - bool(self.rename) - bool(self.prefix)]:
            used.append(mapping if mapping.rules else self._find(mapping.name, used, source))
        return replace(self, mapping=tuple(used))

    def _mapped(self, source: Source, mappings: Sequence[TensorMapping]) -> Mapped:
        place = self.select or "" if self.part is None else _place(source, self.part)
        mapped = _chosen(source, place, self.selection)
        config = self._config_if_used(source)
        for mapping in mappings:
            mapped = map_catalog(mapped, mapping, self._parameters(mapping, config))
        return mapped

    def _find(self, name: str, before: list[TensorMapping], source: Source) -> TensorMapping:
        """Returns the mapping that a name stands for, after others (rule 6)."""
        ways = [way for way in mapping_names() if way.endswith(name.removeprefix("auto"))]
        config = self._config_if_used(source)
        kind = config.get("model_type")
        known = [way for way in map(find_mapping, ways) if kind in way.model_types]
        where = f"{without_secrets(source.url)}: {name!r}"
        if not known:
            raise ArgumentError(
                f"{where} is chosen by the model_type in a config.json, "
                + (
                    f"and no mapping is for {kind!r}"
                    if kind
                    else "and none is beside the checkpoint"
                )
                + ("" if kind else "; give config=, the folder of the model")
                + f"; or name a mapping: {', '.join(ways)}"
            )
        if len(known) == 1:
            return known[0]
        catalog, fitting, unfit = self._mapped(source, before), list[TensorMapping](), list[str]()
        for mapping in known:
            try:
                map_catalog(catalog, mapping, self._parameters(mapping, config))
                fitting.append(mapping)
            except ArgumentError as error:
                unfit.append(str(error))
        if not fitting:
            raise ArgumentError(f"{where}: no mapping for {kind!r} fits:\n" + "\n".join(unfit))
        if len(fitting) > 1:
            names = ", ".join(mapping.name for mapping in fitting)
            raise ArgumentError(f"{where}: several mappings for {kind!r} fit; name one: {names}")
        return fitting[0]

    def parameters_of(self, source: Source) -> tuple[Mapping[str, int], ...]:
        """Returns the parameters of each mapping (rule 4). The caller's count first."""
        config = self._config_if_used(source)
        return tuple(self._parameters(mapping, config) for mapping in self.mappings)

    def _parameters(self, mapping: TensorMapping, config: Mapping[str, object]) -> dict[str, int]:
        return {**_config_parameters(mapping, config), **(self.parameters or {})}

    def model_files(self, source: Source) -> ModelFiles:
        """Returns the configuration and tokenizer for a new folder (`ckpt.mapping.model_files`)."""
        if self.config is not None:
            return read_model_files(self.config)
        return (
            model_files_in(source.store, source.catalog)
            if self.keeps_model(source)
            else ModelFiles()
        )

    def keeps_model(self, source: Source) -> bool:
        """Whether the result is the source's model, under the names that its files describe."""
        places = (None, "", place_of_model(source.catalog), self.module)
        return self.select in places and self.part != "optimizer" and not self.mappings

    def _config_if_used(self, source: Source) -> Mapping[str, object]:
        """Returns the configuration of the model; empty if there is none or none is needed."""
        parameters = set(self.parameters or ())
        if all(
            mapping.rules and parameters >= set(mapping.parameters) for mapping in self.mappings
        ):
            return {}
        if self.config is not None:
            return config_of(read_configs(self.config), "config=")
        return config_in(source.store)


def changes_of(
    mapping: MappingName | Sequence[MappingName], parameters: Mapping[str, int] | None
) -> Changes | None:
    """Returns the changes of a load, checked; None without a mapping. Raises as `Changes`."""
    if mapping == () and parameters is None:
        return None
    changes = Changes(mapping=mapping, parameters=parameters)
    return changes if changes.mappings else None


def read_mapping(mapping: MappingName) -> TensorMapping:
    """Returns the mapping that ships under a name, or that is in a file (docs/converting.md).

    A path has a slash, or ends in `.toml` or `.json`.

    Raises:
        ArgumentError: no mapping has this name, no file is there, or its text is no mapping.
    """
    if isinstance(mapping, TensorMapping):
        return mapping
    name = os.fspath(mapping)
    is_path = isinstance(mapping, os.PathLike) or Path(name).suffix in (".toml", ".json")
    return read_mapping_file(name) if is_path or os.sep in name else find_mapping(name)


def named_mapping(mapping: MappingName) -> TensorMapping:
    """Returns `read_mapping(mapping)`, or for `auto` a mapping without rules (rule 6)."""
    if isinstance(mapping, str) and mapping in _auto_names():
        return TensorMapping(mapping, ())
    return read_mapping(mapping)


def _auto_names() -> set[str]:
    ways = (name.partition("-")[2] for name in mapping_names() if not name.startswith("any-"))
    return {"auto", *(f"auto-{way}" for way in ways if "hf" in way)}


def _check_used(parameters: Mapping[str, int], mappings: Sequence[TensorMapping]) -> None:
    """Raises ArgumentError for a parameter that no mapping has."""
    known = sorted({name for mapping in mappings for name in mapping.size_names})
    for name, size in parameters.items():
        if name not in known:
            there = (
                f"the mappings have {', '.join(known)}" if known else "no mapping has parameters"
            )
            raise ArgumentError(f"parameters={{{name!r}: {size}}}: {there}")
        if type(size) is not int or size < 1:
            raise ArgumentError(f"parameters: {name} is {size!r:.80}; give a number of at least 1")


def _renames(rename: Mapping[str, str], where: str) -> TensorMapping:
    rules = tuple(Rule((old,), (new,), where=where) for old, new in rename.items())
    return TensorMapping(where, rules)


def _config_parameters(mapping: TensorMapping, config: Mapping[str, object]) -> dict[str, int]:
    """Returns the parameters of a mapping that a model's configuration has, or its text model's."""
    text = config.get("text_config")
    config = {**text, **config} if isinstance(text, dict) else config
    sizes: dict[str, int] = {}
    for name, keys in mapping.parameters.items():
        values = [config[key] for key in keys if config.get(key) is not None]
        if values and isinstance(values[0], int) and not isinstance(values[0], bool):
            sizes[name] = values[0]
    return sizes


def _chosen(source: Source, select: str, selection: Selection) -> Mapped:
    """Returns the selected part of a catalog, under names without `select`."""
    url, catalog = without_secrets(source.url), source.catalog
    tree = _below(catalog, select, url)
    if isinstance(tree, dict) and "" in tree and is_selected(tree[""], "", selection):
        raise UnsupportedError(
            f"{url}: the name of a top entry is empty; save the entry under another name, or leave "
            "it out (exclude='')"
        )
    if not selection.is_all:
        selection.check_chooses(set(names_of(tree)), url)
        tree = map_selected(tree, selection, lambda leaf, _: leaf)
    mapped = Mapped.identity(replace(catalog, tree=tree))
    if not select:
        return mapped
    mapped = replace(mapped, catalog=replace(mapped.catalog, optimizers={}))  # by other paths
    origins = {name: (join(select, name),) for name in mapped.origins}
    if len(origins) == 1 and isinstance(Saved(catalog).node(select), TensorRef):
        origins = dict.fromkeys(origins, (select,))
    return replace(mapped, origins=origins)


def _below(catalog: Catalog, select: str, url: str) -> Tree:
    found = Saved(catalog).node(select) if select else catalog.tree
    if isinstance(found, Missing):
        raise _no_part(url, f"select={select!r} names no entry of the checkpoint", catalog.tree)
    return {"tensor": found} if isinstance(found, TensorRef) else found


def _no_part(url: str, problem: str, tree: Tree) -> ArgumentError:
    top = list(tree) if isinstance(tree, dict) else []
    entries = ", ".join(str(key) for key in top[:SHOWN_NAMES])
    return ArgumentError(f"{url}: {problem}; its top entries are {entries}")


def _place(source: Source, part: Part) -> str:
    """Returns the key path of the model or the optimizer (rule 2); empty if it is everything."""
    url, tree = without_secrets(source.url), source.catalog.tree
    optimizers = [path for path, _ in nodes_in(tree, _is_optimizer)]
    if part == "optimizer":
        if len(optimizers) == 1:
            return optimizers[0]
        listed = f"{len(optimizers)} optimizers: {', '.join(optimizers)}" if optimizers else "none"
        raise _no_part(
            url,
            "an optimizer is a dict with `state` and `param_groups`, and the checkpoint has "
            f"{listed}; name it with select=",
            tree,
        )
    if place := place_of_model(source.catalog):
        return place
    several = list(_models(tree))
    if not several and not optimizers:
        return ""
    below = list(_models_below(tree))
    if len(below) == 1 and not several:
        return below[0]
    problem = (
        f"a model is one of the top entries {', '.join(MODEL_KEYS)}, and the checkpoint has none "
        f"of them; name its model with select={below[0] if below else ''}"
    )
    if several:
        problem = f"it has {len(several)} models; name one with select='{several[0]}'"
    raise _no_part(url, problem, tree)


def place_of_model(catalog: Catalog) -> str:
    """Returns the key path of the entry that is the model (rule 2); empty without such an entry."""
    if catalog.weights:
        return catalog.weights
    top = catalog.tree if isinstance(catalog.tree, dict) else {}
    for key in MODEL_KEYS:
        if isinstance(top.get(key), dict) and holds_tensor(top[key]):
            return key
    several = list(_models(top))
    return several[0] if len(several) == 1 else ""


def place_of_module(catalog: Catalog, url: str) -> str:
    """Returns the key path of the one state dict of a module (rule 3); empty for the whole state.

    Raises ArgumentError if an entry is a model by its key, and others beside it hold weights too.
    """
    tree, path, is_named = catalog.tree, "", False
    while isinstance(tree, dict | list | tuple):
        entries: Mapping[Key, Tree] = tree if isinstance(tree, dict) else dict(enumerate(tree))
        places = [
            key
            for key, item in entries.items()
            if not is_of_training(key) and next(weights_in(catalog, item), None) is not None
        ]
        models = [
            key for key in places if _is_model(key, entries[key]) or not isinstance(tree, dict)
        ]
        if len(places) > 1 and models:
            named = ", ".join(join(path, key) for key in places[:SHOWN_NAMES])
            raise ArgumentError(
                f"{url}: several entries hold weights ({named}), and a Hugging Face folder has "
                f"one model: name it with select='{join(path, models[0])}', or take everything, "
                "under its full names, with select=''"
            )
        if (
            len(places) != 1
            or isinstance(entries[places[0]], TensorRef)
            or (is_named and not models)
        ):
            return path
        path, tree, is_named = join(path, places[0]), entries[places[0]], True
        if isinstance(tree, list | tuple) and places[0] != MODEL_LIST:
            return path.rpartition(".")[0]
    return path


def _is_model(key: object, item: Tree) -> bool:
    """Whether an entry is by its key a model, or the list of the models."""
    is_list = key == MODEL_LIST and isinstance(item, list | tuple)
    return is_list or (key in MODEL_KEYS and isinstance(item, dict))


def weights_in(catalog: Catalog, tree: Tree, path: str = "") -> Iterator[str]:
    """Yields the names of weights: floats with dimensions that belong to no optimizer."""
    if isinstance(tree, TensorRef):
        record = catalog.tensors[tree.name]
        if record.shape and record.dtype.torch_name.startswith(("float", "bfloat", "complex")):
            yield path
    elif isinstance(tree, dict) and not _is_optimizer(tree):
        for key, item in tree.items():
            yield from weights_in(catalog, item, join(path, key))
    elif isinstance(tree, list | tuple):
        for index, item in enumerate(tree):
            yield from weights_in(catalog, item, join(path, index))


def parameters_in(catalog: Catalog) -> int:
    """Returns the number of elements in the weights of the model; tied names count once.

    Buffers of floats are among them: a checkpoint does not tell them from parameters. Without an
    entry that is the model, all weights count that belong to no optimizer.
    """
    place = place_of_model(catalog)
    found = Saved(catalog).node(place) if place else catalog.tree
    tree: Tree = {} if isinstance(found, Missing) else found
    if isinstance(tree, dict) and not place:
        tree = {key: item for key, item in tree.items() if not is_of_training(key)}
    tied = catalog.aliases
    names = {tied.get(name, name) for name in weights_in(catalog, tree, place)}
    return sum(prod(catalog.tensors[name].shape) for name in names if name in catalog.tensors)


def weights_beside(catalog: Catalog, place: str) -> tuple[str, ...]:
    """Returns the names of weights that do not lie below a place, nor repeat those there.

    DeepSpeed has a model twice: as it computes, and in the precision of the optimizer.
    """
    above = place.rpartition("fp32")[0] if place.endswith("fp32") else "deepspeed."
    twins = (f"{above}module.", f"{above}fp32.", f"{above}zero.")
    own = (f"{place}.", *twins)
    found = weights_in(catalog, catalog.tree)
    return tuple(name for name in found if not name.startswith(own) and not is_of_training(name))


def is_of_training(key: object) -> bool:
    """Whether a top entry is by its key a state of the training and no model."""
    return isinstance(key, str) and key.startswith(_OF_TRAINING)


_OF_TRAINING = ("optim", "lr_sched", "sched", "scaler", "grad_scaler", "rng", "random", "sampler")


def _models(tree: Tree) -> Iterator[str]:
    """Yields the key path of each model of an Accelerator."""
    listed = tree.get(MODEL_LIST) if isinstance(tree, dict) else None
    for index, model in enumerate(listed if isinstance(listed, list | tuple) else ()):
        if isinstance(model, dict) and holds_tensor(model):
            yield join(MODEL_LIST, index)


def _models_below(tree: Tree) -> Iterator[str]:
    """Yields the key path of each model in a top entry, such as `app.model`."""
    for outer, entry in tree.items() if isinstance(tree, dict) else ():
        for key, item in entry.items() if isinstance(entry, dict) else ():
            if key in MODEL_KEYS and isinstance(item, dict) and holds_tensor(item):
                yield join(join("", outer), key)


def _is_optimizer(tree: object) -> TypeGuard[dict[Key, Tree]]:
    """Whether a tree is the state dict of an optimizer (rule 2)."""
    return isinstance(tree, dict) and "state" in tree and "param_groups" in tree


FAMILIES = files(__package__).joinpath("families")


def mapping_names() -> tuple[str, ...]:
    """Returns the names of the mappings, both directions of each, sorted."""
    return tuple(sorted(_names()))


def find_mapping(name: str) -> TensorMapping:
    """Returns the mapping with this name.

    Raises:
        ArgumentError: no mapping has this name; the message lists them.
    """
    shipped = _names().get(name)
    if shipped is None:
        raise ArgumentError(
            f"{name!r} is neither a mapping nor a file; the mappings are "
            f"{', '.join(mapping_names())}; mapping= also takes "
            f"{', '.join(sorted(_auto_names()))}, chosen by a config.json"
        )
    file, is_inverse = shipped
    text = FAMILIES.joinpath(file).read_text(encoding="utf-8")
    mapping = parse_mapping(text, file.removesuffix(".toml"))
    return mapping.inverse(name) if is_inverse else mapping


def mappings_for(model_type: str) -> list[str]:
    """Returns the names of the mappings that read Hugging Face folders of this `model_type`."""
    names = (name for name, (_, is_inverse) in _names().items() if not is_inverse)
    return sorted(name for name in names if model_type in find_mapping(name).model_types)


def _names() -> dict[str, tuple[str, bool]]:
    """Returns the file of each name, and whether the name is that of the inverse.

    `llama-hf-megatron.toml` is also `llama-megatron-hf`.
    """
    files_by_name: dict[str, tuple[str, bool]] = {}
    for place in FAMILIES.iterdir():
        stem, ending = place.name.rpartition(".")[::2]
        if ending == "toml":
            model, source, target = stem.split("-")
            files_by_name[stem] = place.name, False
            files_by_name[f"{model}-{target}-{source}"] = place.name, True
    return files_by_name
