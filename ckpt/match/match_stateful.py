"""Matches an object with `state_dict()` and `load_state_dict()`, as torch's DCP treats it.

Rules:

1. The match calls `state_dict()`. The load fills each tensor of the result in place, from the
   record of its name. Each rank reads its own part of a sharded tensor. `load_state_dict` then gets
   the nest.
2. All other entries of the nest come from the checkpoint: values, and tensors that the object does
   not have, whole and on the CPU. An object may therefore be empty before its first load. An
   ordinary tensor of another shape counts as a tensor that the object does not have.
3. A tensor of another dtype, a sharded tensor of another shape and a tensor that the checkpoint
   lacks are differences, as in a dict. With `strict=False` the nest has the object's own tensor.
4. Unselected entries stay in the nest as `state_dict()` returned them.
5. If the saved state is one dict of plain values and all of it is selected, the match does not call
   `state_dict()`.

Matches an object of one rank (`ckpt.state.per_rank`): it gets the state of its rank.

The state is loaded whole, into new memory on the CPU, or not at all if no name of it is selected.
The match does not call `state_dict()` of the target's object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from ckpt.match.match_builder import NOT_SAVED, Installer, MatchBuilder, fill_mapping
from ckpt.state.flatten import DICTS, SPREAD
from ckpt.state.per_rank import PerRank, ranks_in
from ckpt.state.saved import Missing, holds_tensor, kind_of, nodes_in
from ckpt.state.stateful import Stateful, by_parameters, call_of
from formats.catalog import Key, TensorRef, Tree, join
from formats.native.tree import ROOT
from sharding.describe.describing import TensorLike
from sharding.describe.dtensor import is_sharded
from sharding.describe.members import LocalPart

Fill = Callable[[TensorLike, str], None]
"""Matches a tensor of the target with the saved tensor of its name."""


def match_stateful(builder: MatchBuilder, fill: Fill, node: Stateful, path: str) -> Installer:
    """Matches an object with the saved state at a path."""
    if not builder.selects(path):
        return lambda: node
    saved = builder.saved.node(path)
    if isinstance(saved, Missing):
        builder.differ(path, "missing", NOT_SAVED)
        return lambda: node
    names = builder.saved.under(path)
    builder.used.update(names)
    own: object = {}
    if not _is_plain_dict(saved) or not all(name in builder.selection for name in names):
        with call_of("state_dict", path):
            own = node.state_dict()
    step = _Matching(builder, fill).walk(own, saved, path)

    def install() -> object:
        loaded = _as_dicts_of(own, step())
        with call_of("load_state_dict", path):
            node.load_state_dict(loaded)
        return node

    return install


@dataclass(frozen=True, slots=True)
class _Matching:
    builder: MatchBuilder
    fill: Fill

    def walk(self, own: object, saved: Tree, path: str) -> Installer:
        """Installs the replacement of `own`, the entry of `state_dict()` at a path."""
        if isinstance(own, Mapping) and isinstance(saved, dict):
            named = by_parameters(own)
            if named is own:
                return self._dict(own, saved, path)
            for name, tensor in nodes_in(named, _is_tensor, path):
                self.fill(tensor, name)
            return lambda: own  # the reads have filled its flat parameters
        if (
            isinstance(own, list | tuple)
            and isinstance(saved, list | tuple)
            and len(own) == len(saved)
            and holds_tensor(saved)
        ):
            return self._items(own, saved, path)
        if isinstance(own, SPREAD) and self._is_filled(own, saved):
            self.fill(own, path or ROOT)
            return lambda: own
        if not self.builder.chooses(path):
            return lambda: own
        return self.builder.whole(saved, path)

    def _dict(self, own: Mapping[Any, object], saved: Mapping[Key, Tree], path: str) -> Installer:
        steps: dict[Any, Installer] = {}
        keys = {str(key): key for key in own}  # DCP stores all keys as text
        for key, tree in saved.items():
            there = key if key in own else keys.get(str(key), key)
            where = join(path, key)
            if there in own:
                steps[there] = self.walk(own[there], tree, where)
            elif self.builder.chooses(where):
                steps[there] = self.builder.whole(tree, where)
        for key, item in own.items():
            if key not in steps:
                where = join(path, key)
                tensors = list(nodes_in(item, _is_tensor, where))
                for name, tensor in tensors:
                    self.fill(tensor, name)
                if tensors or not self.builder.chooses(where):
                    steps[key] = _always(item)
        return lambda: {key: step() for key, step in steps.items()}

    def _items(
        self,
        own: list[object] | tuple[object, ...],
        saved: list[Tree] | tuple[Tree, ...],
        path: str,
    ) -> Installer:
        steps = [
            self.walk(mine, tree, join(path, index))
            for index, (mine, tree) in enumerate(zip(own, saved, strict=True))
        ]
        if isinstance(saved, tuple):
            return lambda: tuple(step() for step in steps)
        return lambda: [step() for step in steps]

    def _is_filled(self, own: TensorLike, saved: Tree) -> bool:
        """Whether the load fills a tensor in place or refuses it; False if it makes a new one."""
        if isinstance(own, LocalPart) or is_sharded(own) or hasattr(own, "_local_tensor"):
            return True
        if not isinstance(saved, TensorRef):
            return False
        shape = self.builder.saved.catalog.tensors[saved.name].shape
        is_dense = own.layout is torch.strided and not (own.is_nested or own.is_quantized)
        return is_dense and tuple(own.shape) == shape


def _always(item: object) -> Installer:
    return lambda: item


def _is_plain_dict(tree: Tree) -> bool:
    """Whether a tree is one dict that contains neither tensors nor dicts."""
    return isinstance(tree, dict) and not any(
        holds_tensor(item) or _holds_dict(item) for item in tree.values()
    )


def _holds_dict(tree: object) -> bool:
    return isinstance(tree, dict) or (isinstance(tree, list) and any(map(_holds_dict, tree)))


def _as_dicts_of(state: object, loaded: object) -> object:
    """Returns a nest with the dict classes of a state, such as Counter: files have plain dicts."""
    if isinstance(loaded, list) and isinstance(state, list) and len(loaded) == len(state):
        return [_as_dicts_of(*pair) for pair in zip(state, loaded, strict=True)]
    if not isinstance(loaded, dict) or not isinstance(state, dict) or loaded is state:
        return loaded
    items = {key: _as_dicts_of(state.get(key), item) for key, item in loaded.items()}
    if type(state) not in DICTS or type(state) is dict:
        return items
    empty = copy(state)
    empty.clear()
    return fill_mapping(empty, items)


def _is_tensor(node: object) -> TypeGuard[TensorLike]:
    return isinstance(node, SPREAD)


def match_per_rank(builder: MatchBuilder, node: PerRank, path: str) -> Installer:
    """Matches an object of this rank with the states that ranks have saved at a path."""
    if not builder.selects(path):
        return lambda: node
    saved = builder.saved.node(path)
    if isinstance(saved, Missing):
        builder.differ(path, "missing", "is in the target and not in the checkpoint")
        return lambda: node
    builder.used.update(builder.saved.under(path))
    keys, here = ranks_in(saved), list(builder.world.ranks())
    if not keys or not isinstance(saved, dict):
        builder.differ(
            path,
            "structure",
            f"is {kind_of(saved)} in the checkpoint, and a state for each rank in the target",
        )
        return lambda: node
    problem = node.problem(keys, here)
    if problem is not None:
        builder.differ(path, "structure", problem)
        return lambda: node
    steps = {
        rank: builder.whole(saved[keys[rank]], join(path, keys[rank]), is_one=True)
        for rank in node.ranks_to_read(keys, here)
    }

    def install() -> object:
        states = {rank: step() for rank, step in steps.items()}
        with call_of("load_state_dict", path):
            node.install(states, here if set(keys) != set(here) else ())
        return node

    return install
