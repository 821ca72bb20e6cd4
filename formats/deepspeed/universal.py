"""Reads the states of a Universal checkpoint of DeepSpeed, which has a file for each.

    zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt    a dict with the whole tensor at `param`
    zero/optimizer_state.pt                               options of groups and other values

The whole tensor may also be the content of the file, and may be flat: then the model's file has its
shape. Other entries of the dict tell DeepSpeed how to divide the tensor for tensor-parallel ranks.
The layout is that of deepspeed/checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from formats.catalog import Tree
from formats.deepspeed.zero import (
    STATES,
    File,
    Shapes,
    States,
    belongs_to_all,
    opened,
    option_groups,
    other_values,
)
from formats.errors import CorruptError, HostileError
from formats.limits import applied, current
from formats.pickles.records import StoredTensor
from formats.pickles.tree import Nest
from formats.storage import Reader
from formats.threads import Pool
from sharding.layout import row_major

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
    shared: Mapping[object, object],
) -> tuple[States, dict[str, int]]:
    """Returns the states, and the sizes of their files.

    `models` has the groups of parameters in each file of a model. `shared` has the names of
    parameters that are stored under another one; DeepSpeed also stores them as they compute.

    Raises:
        CorruptError: the weights of a parameter are missing.
        FormatError: a file has another content.
    """
    shapes = {name: shape for groups in models for group in groups for name, shape in group.items()}
    entries = [entry.removesuffix("/") for entry in reader.entries(FOLDER) if entry.endswith("/")]
    names = [name for name in dict.fromkeys((*shapes, *entries)) if name not in shared]
    if lost := set(shapes) - set(entries):
        raise CorruptError(
            f"{reader.url}/{FOLDER}: there is no folder of the parameter {min(lost)!r:.200}, and "
            f"{len(lost) - 1} others are missing; copy them too"
        )
    found, sizes, limits = States(), {}, current()

    def opened_files(name: str) -> dict[str, File]:
        with applied(limits):  # a thread has none of its own
            return _files(reader, name)

    with Pool(THREADS) as pool:
        for name, files in zip(names, pool.map(opened_files, names), strict=True):
            found.state[name] = {}
            for key, file in files.items():
                sizes[file.name] = file.size
                _add(nest, file, name, key, shapes.get(name), found)
            if name not in found.fp32:
                raise CorruptError(f"{FOLDER}/{name}: the file {WEIGHTS}.pt is missing")
    if GROUPS.partition("/")[2] in reader.entries(FOLDER):
        file = opened(reader, GROUPS)
        nest.grow(file.pickle_bytes)
        sizes[file.name] = file.size
        members = [
            [name for groups in models for name in (groups[at] if at < len(groups) else ())]
            for at in range(max(map(len, models)))
        ]
        options = file.items(file.part(), "param_groups")
        found.groups.extend(option_groups(nest, file, options, members))
        found.values.update(other_values(nest, file, file.part()))
        _add_common_state(nest, file, members, found)
        found.own_steps()
    return found, sizes


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


def _files(reader: Reader, name: str) -> dict[str, File]:
    """Opens the files of one parameter, by the keys of their states."""
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable():
        raise HostileError(f"{FOLDER}: {name!r:.200} is no name of a folder")
    folder = f"{FOLDER}/{name}"
    return {
        entry.removesuffix(".pt"): opened(reader, f"{folder}/{entry}")
        for entry in reader.entries(folder)
        if entry.endswith(".pt")
    }


def _add(
    nest: Nest, file: File, name: str, key: str, shape: tuple[int, ...] | None, found: States
) -> None:
    """Adds one state of a parameter."""
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
