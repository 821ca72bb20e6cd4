"""Policies that choose the submodules to wrap as units, and functions to wrap by hand.

A policy has one of two forms, and every function that takes a policy accepts both:

* an object with a method `_run_policy`, which looks at the whole tree at once and may give each
  module its own keyword arguments (`ModuleWrapPolicy`, `CustomPolicy`);
* a callable `policy(module=, recurse=, nonwrapped_numel=)`. From the root downwards its answers
  decide whether to visit a module's children (`recurse=True`), and on the way back up whether to
  wrap the module (`recurse=False`). `nonwrapped_numel` counts the elements of its parameters: on
  the way down all of them, on the way up those that no wrapped submodule has.

Names, arguments and answers are those of `torch.distributed.fsdp.wrap`. This file does not know the
runtime: `sharding.fsdp1.preparation` applies a policy to a module tree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from sharding.errors import ArgumentError

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

ModuleClasses = Iterable[type[nn.Module]]


class CallablePolicy(Protocol):
    """A policy that decides about one module at a time."""

    def __call__(self, *, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        """Returns whether to visit the module's children (`recurse`), or to wrap the module."""


# --- Policies that see the whole tree ------------------------------------------------------------


class _Policy(ABC):
    """The base of policies that name their modules, each with its keyword arguments."""

    @abstractmethod
    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        """Returns the modules to wrap, perhaps with the root, and each wrapper's arguments.

        `root_kwargs` are the arguments for the root; the dict is neither changed nor returned.
        """


class ModuleWrapPolicy(_Policy):
    """Wraps every module of the given classes, with the root's keyword arguments.

    An instance is also callable, as the other form of policy.
    """

    def __init__(self, module_classes: ModuleClasses) -> None:
        self._module_classes = frozenset(module_classes)

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        classes = tuple(self._module_classes)
        return {
            module: dict(root_kwargs)
            for module in root_module.modules()
            if module not in ignored_modules and isinstance(module, classes)
        }

    def __call__(self, module: nn.Module, recurse: bool, *args: object, **kwargs: object) -> bool:
        """Visits every module; wraps those of the classes."""
        return recurse or isinstance(module, tuple(self._module_classes))

    def __repr__(self) -> str:
        names = sorted(c.__qualname__ for c in self._module_classes)
        return f"{type(self).__name__}({{{', '.join(names)}}})"


class CustomPolicy(_Policy):
    """Wraps the modules for which a function returns True, or a dict of arguments to change.

    A dict overrides the root's keyword arguments one by one; an empty dict counts as False.

    >>> policy = CustomPolicy(lambda module: {"forward_prefetch": True})
    >>> relu = nn.ReLU()
    >>> policy._run_policy(relu, set(), {"device_id": None}) == {
    ...     relu: {"device_id": None, "forward_prefetch": True}
    ... }
    True
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn = lambda_fn

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        wrapped: dict[nn.Module, dict[str, Any]] = {}
        for module in root_module.modules():
            if module in ignored_modules:
                continue
            answer = self._lambda_fn(module)
            if not isinstance(answer, bool | dict):
                raise ArgumentError(
                    "The lambda_fn passed to CustomPolicy should return "
                    f"False/True or a kwarg dict, but it returned {answer}"
                )
            if answer:
                wrapped[module] = {**root_kwargs, **(answer if isinstance(answer, dict) else {})}
        return wrapped


# --- Policies that decide about one module at a time ---------------------------------------------


def always_wrap_policy(*args: object, **kwargs: object) -> bool:
    """Returns True: every submodule is visited and wrapped."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Wraps the modules for which `lambda_fn` is true; bind it with `functools.partial`."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: ModuleClasses
) -> bool:
    """Wraps the modules of the given classes; bind them with `functools.partial`.

    Parameters shared between layers outside those classes, such as tied embeddings, then stay
    together in the unit around them.
    """
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def _or_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[CallablePolicy]
) -> bool:
    """Returns True if one of the policies does; calls them in order until one does."""
    return any(
        policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
        for policy in policies
    )


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = 100_000_000,
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Wraps a module once the parameters left to it have `min_num_params` elements or more.

    Modules inside those of `force_leaf_modules` are not wrapped, and neither are those of
    `exclude_wrap_modules`. None means this function's attributes of the same names in capitals:
    attention, whose parts are not called as modules, and containers, which have no forward.
    """
    barred = force_leaf_modules if recurse else exclude_wrap_modules
    if barred is None:
        defaults = "FORCE_LEAF_MODULES" if recurse else "EXCLUDE_WRAP_MODULES"
        barred = getattr(size_based_auto_wrap_policy, defaults)
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(barred))


size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {  # type: ignore[attr-defined]
    nn.ModuleList,
    nn.ModuleDict,
}


# --- Wrapping by hand ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Wrapping:
    """The wrapper and arguments that `wrap` uses now."""

    wrapper_cls: Callable[..., nn.Module]
    kwargs: dict[str, Any]


_wrapping: ContextVar[_Wrapping | None] = ContextVar("wrapping", default=None)
"""The wrapper in force. Each thread has its own, so that ranks can be threads of one process."""


@contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """Makes `wrap(module)` return `wrapper_cls(module, **wrapper_kwargs)` in the block.

    Applies to this thread only. Of nested blocks, the innermost applies.

    >>> def wrapper(module, **kwargs):
    ...     return nn.Sequential(module)
    >>> with enable_wrap(wrapper_cls=wrapper):
    ...     wrap(nn.ReLU())
    Sequential(
      (0): ReLU()
    )
    >>> wrap(nn.ReLU())
    ReLU()
    """
    token = _wrapping.set(_Wrapping(wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _wrapping.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Returns the module, wrapped by the `enable_wrap` around this call; outside, unchanged.

    A layer whose code calls this can be built wrapped or not. A keyword argument of this call
    replaces the one of `enable_wrap`.
    """
    wrapping = _wrapping.get()
    if wrapping is None:
        return module
    return wrapping.wrapper_cls(module, **{**wrapping.kwargs, **wrap_overrides})
