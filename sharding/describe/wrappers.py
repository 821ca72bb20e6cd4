"""The wrappers around modules, and the names of a module's state without the parts that they add.

A new wrapper is a row in the tables below: names, keys of state dicts and the names of optimizers'
parameters follow from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch import nn

KEY_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Parts of names that FSDP's class and activation checkpointing add; state dicts lack them."""

WRAPPERS = (*KEY_WRAPPERS, "_orig_mod.")
"""All parts that wrappers add. The keys of state dicts keep the part of torch.compile."""

WRAPPED = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": (
        "_checkpoint_wrapped_module"
    ),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "_fsdp_wrapped_module"
    ),
    f"{__name__.removesuffix('describe.wrappers')}fsdp1.wrapper.FullyShardedDataParallel": (
        "_fsdp_wrapped_module"
    ),
}
"""The classes of wrappers, and the attribute that each has for the module that it wraps.

A module of another class may have a child of the same name: its name belongs to the child's."""


def clean_name(name: str) -> str:
    """Returns a name without the parts that wrappers add.

    >>> clean_name("_fsdp_wrapped_module.layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def child_of_wrapper(module: nn.Module) -> str | None:
    """Returns the attribute of a wrapper for the module that it wraps; None for another module.

    >>> child_of_wrapper(nn.DataParallel(nn.Linear(2, 2))), child_of_wrapper(nn.Linear(2, 2))
    ('module', None)
    """
    return _child_of_class(type(module))  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def _child_of_class(kind: type[nn.Module]) -> str | None:
    names = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return next((WRAPPED[name] for name in names if name in WRAPPED), None)


class CleanNames:
    """The names of a module's state without the parts that wrappers add.

    The class of the module that has a child decides whether the child's name is such a part.

    >>> net = nn.Sequential(nn.Module(), nn.DataParallel(nn.Linear(2, 2)))
    >>> net[0].module = nn.Linear(2, 2)
    >>> [CleanNames(net).of(key) for key in ("0.module.bias", "1.module.bias")]
    ['0.module.bias', '1.bias']
    """

    def __init__(self, module: nn.Module) -> None:
        self.has_wrappers = any(map(child_of_wrapper, module.modules()))
        self._known: dict[str, tuple[str, nn.Module | None]] = {"": ("", module)}
        """The names and modules by their paths; None where a path leads to no module."""

    def of(self, key: str) -> str:
        """Returns the name of a path, or of a key of the state dict."""
        if not self.has_wrappers:
            return key
        path, dot, last = key.rpartition(".")
        return self.prefix(path) + last if dot else key

    def prefix(self, path: str) -> str:
        """Returns the prefix of a module's path for the names inside the module."""
        if not self.has_wrappers:
            return f"{path}." if path else ""
        return self._at(path)[0]

    def _at(self, path: str) -> tuple[str, nn.Module | None]:
        found = self._known.get(path)
        if found is None:
            above, _, child = path.rpartition(".")
            prefix, owner = self._at(above)
            wrapped = None if owner is None else child_of_wrapper(owner)
            while owner is not None and wrapped is not None and child not in owner._modules:
                owner = owner._modules[wrapped]  # the hooks of a wrapper take its part off keys
                wrapped = None if owner is None else child_of_wrapper(owner)
            has_child = owner is not None and child in owner._modules
            below = owner._modules[child] if owner is not None and has_child else None
            found = self._known[path] = (
                prefix if child == wrapped else f"{prefix}{child}.",
                below,
            )
        return found


def state_key(path: str) -> str:
    """Returns the state dict's key of a parameter or buffer with this path."""
    for wrapper in KEY_WRAPPERS:
        path = path.replace(wrapper, "")
    return path


def key_prefix(path: str) -> str:
    """Returns the prefix of a module's path for the keys of its state dict.

    >>> key_prefix("layers.0._fsdp_wrapped_module"), key_prefix("")
    ('layers.0.', '')
    """
    return state_key(f"{path}.") if path else ""


Places = Sequence[tuple[nn.Module, str]]
"""The modules that a parameter is in, and the attribute it is there."""


def names_in(module: nn.Module, parameters: Sequence[Places]) -> list[tuple[str, ...]]:
    """Returns each parameter's names in a module, in the order of the modules; perhaps none."""
    if not parameters:
        return []
    places: dict[nn.Module, list[tuple[str, int]]] = {}
    for index, parameter in enumerate(parameters):
        for owner, attribute in parameter:
            places.setdefault(owner, []).append((attribute, index))
    clean = CleanNames(module)
    found: list[dict[str, None]] = [{} for _ in parameters]
    for path, part in module.named_modules(remove_duplicate=False):
        for attribute, index in places.get(part, ()):
            found[index][clean.prefix(path) + attribute] = None
    return [tuple(names) for names in found]
