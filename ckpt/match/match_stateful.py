"""An object with `state_dict()` and `load_state_dict()` as the target, as torch's DCP treats it.

Rules:

1. `state_dict()` is called. A tensor in it is filled where it lies, from the record of its name: of
   a sharded tensor each rank reads its own part. Then `load_state_dict` gets the nest.
2. Everything else in the nest is what was saved under the object's name: values, and tensors that
   the object does not have, whole and on the CPU. So an object may be empty before its first load.
   An ordinary tensor of another shape counts as one that the object does not have.
3. A tensor of another dtype, a sharded tensor of another shape and a tensor that the checkpoint
   lacks are differences, as in a dict. With `strict=False` the nest has the object's own tensor.
4. Entries that are not selected are in the nest as `state_dict()` gave them.
5. Where one dict of plain values was saved and all of it is selected, `state_dict()` is not called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.match.match_builder import Installer, MatchBuilder
from ckpt.state.flatten import DICTS, SPREAD
from ckpt.state.local_states import by_parameters
from ckpt.state.saved import Missing, holds_tensor, join
from ckpt.state.stateful import Stateful, call_of
from formats.catalog import Key, TensorRef, Tree
from formats.native.tree import ROOT
from sharding.describe.describing import TensorLike
from sharding.describe.local_part import LocalPart
from sharding.describe.sharded_tensor import is_sharded

Fill = Callable[[TensorLike, str], None]
"""Matches a tensor of the target with what was saved under its name."""


def match_stateful(builder: MatchBuilder, fill: Fill, node: Stateful, path: str) -> Installer:
    """Match an object with what was saved at a path."""
    if not builder.selects(path):
        return lambda: node
    saved = builder.saved.node(path)
    if isinstance(saved, Missing):
        builder.differ(path, "missing", "is in the target and not in the checkpoint")
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
            node.load_state_dict(loaded)  # type: ignore[arg-type]
        return node

    return install


@dataclass(frozen=True, slots=True)
class _Matching:
    builder: MatchBuilder
    fill: Fill

    def walk(self, own: object, saved: Tree, path: str) -> Installer:
        """What takes the place of `own`, which `state_dict()` has at a path."""
        if isinstance(own, Mapping) and isinstance(saved, dict):
            named = by_parameters(own)
            if named is own:
                return self._dict(own, saved, path)
            for name, tensor in _tensors(named, path):
                self.fill(tensor, name)
            return lambda: own  # its flat parameters have got what belongs to their parts
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
        keys = {str(key): key for key in own}  # DCP has made text of all keys
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
                tensors = list(_tensors(item, where))
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
        """Whether a tensor is filled where it lies, or refused: rules 2 and 3."""
        if isinstance(own, LocalPart) or is_sharded(own) or hasattr(own, "_local_tensor"):
            return True
        if not isinstance(saved, TensorRef):
            return False
        shape = self.builder.saved.catalog.tensors[saved.name].shape
        is_dense = own.layout is torch.strided and not (own.is_nested or own.is_quantized)
        return is_dense and tuple(own.shape) == shape


def _always(item: object) -> Installer:
    return lambda: item


def _tensors(nest: object, path: str) -> Iterator[tuple[str, TensorLike]]:
    """The tensors of a nest with their names."""
    if isinstance(nest, SPREAD):
        yield path, nest
    elif isinstance(nest, Mapping):
        for key, item in nest.items():
            yield from _tensors(item, join(path, key))
    elif isinstance(nest, list | tuple):
        for index, item in enumerate(nest):
            yield from _tensors(item, join(path, index))


def _is_plain_dict(tree: Tree) -> bool:
    """Whether a tree is one dict without tensors, or dicts, in it."""
    return isinstance(tree, dict) and not any(
        holds_tensor(item) or _holds_dict(item) for item in tree.values()
    )


def _holds_dict(tree: object) -> bool:
    return isinstance(tree, dict) or (isinstance(tree, list) and any(map(_holds_dict, tree)))


def _as_dicts_of(state: object, loaded: object) -> object:
    """A nest whose dicts are Counters and such, where those of a state are: files have dicts."""
    if isinstance(loaded, list) and isinstance(state, list) and len(loaded) == len(state):
        return [_as_dicts_of(*pair) for pair in zip(state, loaded, strict=True)]
    if not isinstance(loaded, dict) or not isinstance(state, dict) or loaded is state:
        return loaded
    items = {key: _as_dicts_of(state.get(key), item) for key, item in loaded.items()}
    if type(state) not in DICTS or type(state) is dict:
        return items
    empty = copy(state)
    empty.clear()
    return filled(empty, items)


def filled(node: MutableMapping[object, object], items: Mapping[Any, object]) -> object:
    """A mapping with these items in it; one by one, because a Counter's `update` adds them up."""
    for key, item in items.items():
        node[key] = item
    return node
