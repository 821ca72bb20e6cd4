"""The parts of objects that a checkpoint's tree shows, although nothing makes the objects.

Rules, in this order. An object that fits none is an opaque value of the tree.

1. An object that was filled with items is a dict or list of them: a subclass of dict or list.
2. A module, which has `_parameters`, `_buffers` and `_modules`, is its state dict: a flat dict from
   FQNs to parameters and persistent buffers.
3. An optimizer, which has `param_groups` and `state`, is its state dict, with parameters numbered.
4. An object of a TorchScript program is a dict of its attributes, or, if its class is one of C++,
   such as the packed parameters of a quantised layer, the state that the class gave.
5. An object of which an argument is a tensor, such as a namedtuple, is the tuple of its arguments.
   An object of which an attribute is a tensor is the dict of its attributes.

6. A file in memory is its bytes.

Nothing is copied here. A walk counts the parts that it takes, so objects may repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from formats.pickle_numpy import NumpyArray
from formats.pickle_records import Opaque, Storage, StoredTensor

_MODULE = ("_parameters", "_buffers", "_modules")
_OPTIMIZER = ("param_groups", "state")
FILE = "_io.BytesIO"
SCRIPT = "__torch__."
"""The beginning of the names of classes in TorchScript programs."""


Count = Callable[[int], None]
"""Counts parts that are looked at, and raises an error if they are too many."""


@dataclass(frozen=True, slots=True)
class Entries:
    """The keys and parts of an object that a tree shows as a dict. A part may be an `Entries`."""

    items: Iterator[tuple[object, object]]
    is_merged: bool = False
    """Whether the entries belong to the dict around, with the key and a dot before their names."""


def parts_of(value: Opaque, count: Count) -> object:
    """Returns the list, tuple, dict, `Entries` or bytes in a tree; None for an opaque value."""
    if value.items:
        return value.items
    if value.type == FILE and isinstance(value.state, tuple) and value.state:
        content = value.state[0]
        return content if isinstance(content, bytes) else None
    state = attributes(value)
    if is_module(value):
        return Entries(_module(value))
    if all(name in state for name in _OPTIMIZER) and isinstance(state["param_groups"], list):
        return Entries(_optimizer(state, count))
    if value.type.startswith(SCRIPT):
        return state if value.state is None or state else value.state
    several = value.state if isinstance(value.state, tuple) else ()
    for part in (value.arguments, several, state, several[1] if len(several) == 2 else None):
        members = part.values() if isinstance(part, dict) else part
        if isinstance(part, dict | tuple):
            count(len(part))
            if any(map(_is_tensor, members or ())):
                return part
    return None


def attributes(value: Opaque) -> dict[object, object]:
    """Returns the `__dict__` of an object; empty without one."""
    state = value.state
    if state is None and value.arguments:
        state = value.arguments[0]  # a module of torch.fx is made of its attributes
    if isinstance(state, tuple) and state:
        state = state[0]
    return state if isinstance(state, dict) else {}


def is_module(value: object) -> bool:
    """Whether an object has the attributes of a `torch.nn.Module`."""
    if not isinstance(value, Opaque):
        return False
    state = attributes(value)
    return all(isinstance(state.get(name), dict) for name in _MODULE)


def _module(value: Opaque) -> Iterator[tuple[object, object]]:
    """Yields the entries of a module's state dict, and those of modules in it as `Entries`."""
    state = attributes(value)
    passing = state.get("_non_persistent_buffers_set")
    passing = passing if isinstance(passing, set | frozenset) else ()
    for kind in _MODULE:
        parts = state[kind]
        for name, part in parts.items() if isinstance(parts, dict) else ():
            if part is None or (kind == "_buffers" and name in passing):
                continue
            yield name, Entries(_module(part), is_merged=True) if is_module(part) else part


def _optimizer(state: dict[object, object], count: Count) -> Iterator[tuple[object, object]]:
    """Yields the entries of an optimizer's state dict."""
    numbers: dict[int, int] = {}
    groups, entries = state["param_groups"], state["state"]
    assert isinstance(groups, list)
    count(len(groups))
    for group in groups:
        parameters = _parameters_of(group)
        count(len(parameters))
        for parameter in parameters:
            numbers.setdefault(id(parameter), len(numbers))
    if isinstance(entries, dict):
        pairs = ((numbers.get(id(key), key), entry) for key, entry in entries.items())
        yield "state", Entries(pairs)
    yield "param_groups", [Entries(_group(group, numbers)) for group in groups]


def _group(group: object, numbers: dict[int, int]) -> Iterator[tuple[object, object]]:
    for key, part in group.items() if isinstance(group, dict) else ():
        if key != "params":
            yield key, part
    yield "params", [numbers[id(parameter)] for parameter in _parameters_of(group)]


def _parameters_of(group: object) -> list[object]:
    found = group.get("params") if isinstance(group, dict) else None
    return found if isinstance(found, list) else []


def _is_tensor(value: object) -> bool:
    return isinstance(value, StoredTensor | Storage) or (
        isinstance(value, NumpyArray) and value.dtype is not None
    )
