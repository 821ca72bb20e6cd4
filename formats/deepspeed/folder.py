"""Reads the folders of DeepSpeed's ZeRO (stages 0 to 3) and its Universal checkpoints.

    latest                                            the name of the newest folder
    global_step5/mp_rank_00_model_states.pt           stages 0 to 2: the module, and values
    global_step5/zero_pp_rank_1_mp_rank_00_model_states.pt    stage 3: the part of rank 1
    global_step5/zero_pp_rank_1_mp_rank_00_optim_states.pt    the optimizer of rank 1
    global_step5_universal/zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt     Universal
    global_step5_universal/zero/optimizer_state.pt    options of groups and other values

Rules:

1. A catalog has the tensors by the names of their parameters. `module` is the whole model,
   `optimizer` the state as of a torch optimizer, `fp32` the model with the trained parameters in
   the precision of the optimizer. Parameters that only `module` or only `fp32` stores are tied.
   A conversion to a format of weights, and a load into a module, take `fp32`.
2. Other values of the model's file stand beside them; those of the optimizer's file are in `zero`.
3. Each tensor-parallel rank (`mp_rank`) stores parts of tensors, and no file says how they join.
   Only Universal checkpoints, which DeepSpeed joins, are read then.

4. A file of Universal is a dict with the whole tensor at `param`, or the tensor. The tensor may be
   flat: then the model's file has its shape. Other entries of the dict tell DeepSpeed how to divide
   it for tensor-parallel ranks.

The layout is that of deepspeed/runtime/engine.py, deepspeed/utils/zero_to_fp32.py and
deepspeed/checkpoint/ds_to_universal.py. Old names of
files, and the prefixes `bf16_` and `fp16_`, are read too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from math import prod

from formats.catalog import Catalog, FileRecord, TensorRecord, TensorRef, Tree
from formats.deepspeed.zero import (
    STATES,
    File,
    FlatPieces,
    Line,
    Nested,
    Shapes,
    States,
    belongs_to_all,
    dict_of,
    groups_of,
    open_file,
    option_groups,
    other_values,
    segment,
    shapes_of,
    zero_states,
)
from formats.errors import CorruptError, FormatError, HostileError, UnsupportedError
from formats.joined import below
from formats.limits import apply_limits, current
from formats.pickles.records import StoredTensor
from formats.pickles.tree import Nest
from formats.storage import Pool, Reader
from sharding.layout import row_major

LATEST = ("latest", "latest_universal")
"""Files with the name of the newest folder."""
LATEST_BYTES = 4096

_MODEL = re.compile(r"(?:zero_pp_rank_([0-9]{1,9})_)?mp_rank_([0-9]{1,9})_model_states\.pt")
_OPTIMIZER = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]{1,9})_mp_rank_([0-9]{1,9})_?optim_states\.pt"
)
_IN_PARTS = (
    (re.compile(r"(layer_[0-9]+_)?expert_[0-9]+_.*\.pt|expp_rank_.*\.pt"), "experts"),
    (re.compile(r"layer_[0-9]+-.*model_states\.pt"), "the layers of a pipeline"),
)
"""Files of parts of a model that no file of the checkpoint says how to join."""
_OF_PARALLEL_RANKS = "the parts of tensor-parallel ranks"
_REPLACED = frozenset(
    {"module", "buffer_names", "param_shapes", "shared_params"}
    | {"frozen_param_shapes", "frozen_param_fragments"}
)
"""Keys of a model's file that are represented by tensors and their names."""


def read(reader: Reader) -> Catalog:
    """Reads the catalog of a step's folder, or of the step that `latest` names: no tensor.

    Raises:
        UnsupportedError: the model is in parts that the files do not say how to join (rule 3).
        CorruptError: a rank's file is missing, truncated or damaged.
        FormatError: the files do not belong together, or are invalid in another way.
    """
    entries = reader.entries()
    if any(map(_MODEL.fullmatch, entries)):
        return _Step(reader, _files(reader)).catalog()
    name = next(filter(entries.__contains__, LATEST))
    latest = reader.read_whole(name, LATEST_BYTES).decode("utf-8", "replace").strip()
    if f"{latest}/" not in entries or not any(map(_MODEL.fullmatch, reader.entries(latest))):
        raise UnsupportedError(
            f"{reader.url}: its file {name} names the folder {latest!r:.200}, in which there is no "
            "checkpoint of DeepSpeed; open the folder of a step by its name"
        )
    return below(reader, latest, read)


@dataclass(frozen=True, slots=True)
class _Names:
    """The files of a step's folder, by tensor-parallel rank (`mp_rank`), then by rank."""

    models: dict[int, dict[int, str]] = field(default_factory=dict)
    optimizers: dict[int, dict[int, str]] = field(default_factory=dict)
    is_universal: bool = False


def _files(reader: Reader) -> _Names:
    """Returns the names of the files. Raises UnsupportedError for parts of a model."""
    entries = reader.entries()
    names = _Names(is_universal="zero/" in entries)
    for name in entries:
        for pattern, table in ((_MODEL, names.models), (_OPTIMIZER, names.optimizers)):
            if (match := pattern.fullmatch(name)) is not None:
                rank, parallel = int(match[1] or 0), int(match[2])
                other = table.setdefault(parallel, {}).setdefault(rank, name)
                if other != name:
                    raise FormatError(f"{other} and {name} are both of rank {rank}; remove one")
    _check_whole(reader, entries, names)
    return names


def _check_whole(reader: Reader, entries: Iterable[str], found: _Names) -> None:
    """Raises UnsupportedError for parts of a model, CorruptError if a rank's file is missing."""
    if not found.is_universal:
        parts = [what for pattern, what in _IN_PARTS if any(map(pattern.fullmatch, entries))]
        parts += [_OF_PARALLEL_RANKS] * (len({*found.models, *found.optimizers}) > 1)
        if parts:
            raise _cannot_join(reader, " and ".join(parts))
    for table in (found.models, found.optimizers):
        for files in table.values():
            if missing := set(range(len(files))) - set(files):
                first = files[min(files)]
                raise CorruptError(
                    f"{reader.url}: there is a file {first}, and none of rank {min(missing)}; copy "
                    "the files of all ranks"
                )


def _cannot_join(reader: Reader, parts: str) -> UnsupportedError:
    return UnsupportedError(
        f"{reader.url}: it has {parts}, which its files do not say how to join; convert it with "
        "deepspeed/checkpoint/ds_to_universal.py and open the result"
    )


class _Step:
    """The catalog of one step's folder, in the making."""

    def __init__(self, reader: Reader, names: _Names) -> None:
        self._reader, self._names = reader, names
        self._nest = Nest(reader.url, 0)
        self._parallel = min(names.models)
        self._model = self._open(names.models[self._parallel][0])
        self._files = {
            name: reader.size(name)
            for table in (names.models, names.optimizers)
            for ranks in table.values()
            for name in ranks.values()
        }

    def catalog(self) -> Catalog:
        model = self._model.part()
        parallel = model.get("mp_world_size")
        if isinstance(parallel, int) and parallel > 1 and not self._names.is_universal:
            raise _cannot_join(self._reader, f"{_OF_PARALLEL_RANKS} ({parallel} saved it)")
        states = self._states()
        tree: Nested = {}
        if len(self._names.models) == 1:
            self._add_module(tree, states)
        else:  # the module of each file is a part, of which `fp32` is the whole
            tree["fp32"] = dict(states.fp32)
        tree |= self._values(model, {*_REPLACED, "optimizer"} if states.fp32 else _REPLACED)
        if states.fp32 and states.groups:
            state: Nested = {name: each for name, each in states.state.items() if each}
            groups: list[Tree] = [*states.groups]
            tree["optimizer"] = {"state": state, "param_groups": groups}
        if states.values:
            tree["zero"] = states.values
        version = model.get("ds_version")
        files = tuple(FileRecord(name, size) for name, size in self._files.items())
        return Catalog(
            format="deepspeed",
            tensors=self._nest.tensors,
            tree=tree,
            files=files,
            aliases=self._nest.aliases,
            metadata={"ds_version": version} if isinstance(version, str) else {},
            weights="fp32" if "fp32" in tree else "module",
            parts=tuple(("", Catalog("torch", {}, None, (file,))) for file in files),
        )

    def _values(self, model: Mapping[object, object], left_out: Set[str]) -> Nested:
        """Returns the values of the model's file that describe no tensor."""
        if twice := {"fp32", "zero"} & set(model):
            raise UnsupportedError(
                f"{self._model.name}: it has a value {min(twice)!r}, a key that this reader gives "
                "to parts of the optimizer; save the value under another key"
            )
        rest = {key: value for key, value in model.items() if key not in left_out}
        return dict_of(self._model, self._nest.tree(rest, (), self._model.archive))

    def _open(self, name: str) -> File:
        file = open_file(self._reader, name)
        self._nest.grow(file.pickle_bytes)
        return file

    def _states(self) -> States:
        """Returns the trained parameters in the precision of the optimizer, with its state."""
        if self._names.is_universal:
            others = [
                self._open(files[0])
                for parallel, files in sorted(self._names.models.items())
                if parallel != self._parallel
            ]
            models = [groups_of(file) for file in (self._model, *others)]
            elsewhere = {*self._shared_names()}
            if not others:  # the module has the buffers, in dtypes of their own
                stored = self._model.part().get("module")
                elsewhere |= {*self._buffers()} & {*(stored if isinstance(stored, dict) else ())}
            states, sizes = universal_states(self._reader, self._nest, models, elsewhere)
            self._files.update(sizes)
            return states
        groups = groups_of(self._model)
        ranks = self._names.optimizers.get(self._parallel, {})
        if not groups or not ranks:
            return States()
        files = [self._open(ranks[rank]) for rank in sorted(ranks)]
        return zero_states(self._nest, files, groups)

    # The module.

    def _add_module(self, tree: Nested, states: States) -> None:
        """Adds the whole model twice: as it computes, and in the precision of the optimizer."""
        content = self._model.part()
        stored = content.get("module")
        if not isinstance(stored, dict):
            tree["module"] = self._nest.tree(stored, ("module",), self._model.archive)
            if states.fp32:
                tree["fp32"] = states.fp32
            return
        shared = self._shared_names()
        frozen = self._frozen()
        # In stage 3 a parameter without elements stands for its parts, a buffer for itself.
        whole = self._buffers() if self._in_parts else stored
        module: Nested = {}
        fp32: Nested = dict(states.fp32)
        for name in dict.fromkeys((*stored, *frozen, *states.fp32)):
            if not isinstance(name, str):
                raise self._model.unlike("name", name, "module")
            other = shared.get(name, name)
            weights = states.fp32.get(other) if isinstance(other, str) else None
            is_stored = name in stored and (name in whole or not _is_empty(stored[name]))
            if is_stored:
                module[name] = self._nest.tree(stored[name], ("module", name), self._model.archive)
            elif name in frozen:
                module[name] = frozen[name]
            else:
                module[name] = self._tie("module", name, weights)
            if states.fp32 and name not in fp32 and isinstance(module[name], TensorRef):
                fp32[name] = self._tie("fp32", name, weights or module[name])
        tree["module"] = module
        if fp32:
            tree["fp32"] = fp32

    @property
    def _in_parts(self) -> bool:
        """Whether each rank has a part of each parameter: stage 3."""
        return self._model.name.startswith("zero_pp_rank_")

    def _tie(self, section: str, name: str, tensor: Tree) -> TensorRef:
        """Returns the reference of a second name of a tensor."""
        if not isinstance(tensor, TensorRef):
            raise CorruptError(
                f"{self._reader.url}: no file has the data of the parameter {name!r:.200}: the "
                "files of the optimizer have it; copy them too"
            )
        self._nest.aliases[self._nest.claim((section, name))] = tensor.name
        return tensor

    def _shared_names(self) -> Mapping[object, object]:
        """Returns the names of parameters that are stored under another name, with that name."""
        shared = self._model.part().get("shared_params") or {}
        if not isinstance(shared, dict):
            raise self._model.unlike("dict", shared, "shared_params")
        return shared

    def _buffers(self) -> list[object]:
        names: Mapping[object, object] = {"": self._model.part().get("buffer_names") or []}
        return self._model.items(names, "")

    def _frozen(self) -> Nested:
        """Returns the frozen parameters in stage 3, whose parts are in the files of all ranks."""
        shapes = self._model.part().get("frozen_param_shapes") if self._in_parts else None
        if not shapes:
            return {}
        names = self._names.models[self._parallel]
        files = [self._model, *(self._open(names[rank]) for rank in sorted(names)[1:])]
        parts = [file.part("frozen_param_fragments") for file in files]
        frozen: Nested = {}
        for name, shape in shapes_of(self._model, shapes, "frozen_param_shapes").items():
            each = zip(files, parts, strict=True)
            lines = [
                Line([segment(file.archive, part.get(name), f"the part of {name!r:.200}")])
                for file, part in each
            ]
            share = -(-prod(shape) // len(lines))
            if any(line.numel != share for line in lines):
                raise FormatError(
                    f"{self._model.name}: the ranks have {[line.numel for line in lines]} elements "
                    f"of {name!r:.200}, which has {prod(shape)}; copy the files of all ranks"
                )
            pieces = FlatPieces(shape, lines, 0, share)
            record = TensorRecord(self._nest.claim(("module", name)), shape, lines[0].dtype, pieces)
            frozen[name] = self._nest.place(record.name, record)
        return frozen


def _is_empty(value: object) -> bool:
    """Whether a value stands for a parameter that the ranks have in parts."""
    return isinstance(value, StoredTensor) and value.shape == (0,)


FOLDER = "zero"
STATE_OF_RANK = STATES[1]
WEIGHTS = "fp32"
GROUPS = f"{FOLDER}/optimizer_state.pt"
THREADS = 16
"""Files that are opened at once: on a server each takes a few requests."""


def universal_states(
    reader: Reader,
    nest: Nest,
    models: Sequence[Sequence[Shapes]],
    elsewhere: Set[object],
) -> tuple[States, dict[str, int]]:
    """Returns the states, and the sizes of their files.

    `models` has the groups of parameters in each file of a model. `elsewhere` has the names of
    parameters that are stored under another one, and of buffers: DeepSpeed stores them in float32.

    Raises:
        CorruptError: the weights of a parameter are missing.
        FormatError: a file has another content.
    """
    shapes = {name: shape for groups in models for group in groups for name, shape in group.items()}
    entries = [entry.removesuffix("/") for entry in reader.entries(FOLDER) if entry.endswith("/")]
    names = [name for name in dict.fromkeys((*shapes, *entries)) if name not in elsewhere]
    if lost := set(shapes) - set(entries):
        raise CorruptError(
            f"{reader.url}/{FOLDER}: there is no folder of the parameter {min(lost)!r:.200}, and "
            f"{len(lost) - 1} others are missing; copy them too"
        )
    states, sizes, limits = States(), {}, current()

    def open_files(name: str) -> dict[str, File]:
        with apply_limits(limits):  # a thread has none of its own
            return _parameter_files(reader, name)

    with Pool(THREADS) as pool:
        for name, files in zip(names, pool.map(open_files, names), strict=True):
            states.state[name] = {}
            for key, file in files.items():
                sizes[file.name] = file.size
                _add(nest, file, name, key, shapes.get(name), states)
            if name not in states.fp32:
                raise CorruptError(
                    f"{FOLDER}/{name}: the file {WEIGHTS}.pt is missing; copy it too"
                )
    if GROUPS.partition("/")[2] in reader.entries(FOLDER):
        file = open_file(reader, GROUPS)
        nest.grow(file.pickle_bytes)
        sizes[file.name] = file.size
        members = [
            [name for groups in models for name in (groups[at] if at < len(groups) else ())]
            for at in range(max(map(len, models)))
        ]
        options = file.items(file.part(), "param_groups")
        states.groups.extend(option_groups(nest, file, options, members))
        states.values.update(other_values(nest, file, file.part()))
        _add_common_state(nest, file, members, states)
        states.own_steps()
    return states, sizes


def _add_common_state(
    nest: Nest, file: File, members: Sequence[Sequence[str]], found: States
) -> None:
    """Adds the state that all parameters of a group share, such as the step.

    Of ZeRO-3 it lies in the optimizer's state of rank 0, by the numbers of the groups. The tensors
    beside it there are rank 0's partitions, which the files of the parameters have as a whole.
    """
    base = file.part().get(STATE_OF_RANK)
    if not isinstance(base, dict):
        return
    groups = [each for each in file.items(base, "param_groups") if isinstance(each, dict)]
    numbers = [number for group in groups for number in file.items(group, "params")]
    states = base.get("state")
    for names, number in zip(members, numbers, strict=False):
        state = states.get(number) if isinstance(states, dict) and type(number) is int else None
        for key, value in state.items() if isinstance(state, dict) else ():
            if not belongs_to_all([value]):
                continue
            for name in names:
                if found.state.get(name) and key not in found.state[name]:
                    path = ("optimizer", "state", name, key)
                    found.state[name][key] = nest.tree(value, path, file.archive)


def _parameter_files(reader: Reader, name: str) -> dict[str, File]:
    """Opens the files of one parameter, by the keys of their states."""
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable():
        raise HostileError(f"{FOLDER}: {name!r:.200} is no name of a folder")
    folder = f"{FOLDER}/{name}"
    return {
        entry.removesuffix(".pt"): open_file(reader, f"{folder}/{entry}")
        for entry in reader.entries(folder)
        if entry.endswith(".pt")
    }


def _add(
    nest: Nest, file: File, name: str, key: str, shape: tuple[int, ...] | None, found: States
) -> None:
    nest.grow(file.pickle_bytes)
    value = file.content
    if isinstance(value, dict):
        value = value.get("param")
    if isinstance(value, StoredTensor) and shape is not None and len(value.shape) == 1:
        is_flat = value.shape == (prod(shape),) and value.strides == (1,)
        value = replace(value, shape=shape, strides=row_major(shape)) if is_flat else value
    path = ("fp32", name) if key == WEIGHTS else ("optimizer", "state", name, key)
    tree: Tree = nest.tree(value, path, file.archive)
    if key == WEIGHTS:
        found.fp32[name] = tree
    else:
        found.state[name][key] = tree
