"""A plan of the modules to wrap, made from a policy before any module is wrapped.

Rules:

1. `plan_wraps` changes nothing. It asks the policy all questions and raises all errors before
   `auto_wrap` changes the first module.
2. Children come before parents, siblings in the order of registration: a wrapper takes the
   parameters that the wrappers below it have not taken.
3. A module in several places is wrapped once, and the wrapper is put into all of them.
4. Under mixed precision, modules of certain classes (BatchNorm by default) are kept apart: they are
   units without mixed precision, which compute in the dtype of their parameters and return the
   dtype of their inputs. They are found even in modules that a policy does not visit.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from sharding.errors import ArgumentError
from sharding.wrap import CallablePolicy


@runtime_checkable
class TreePolicy(Protocol):
    """A policy that names its modules at once, like torch's own policies."""

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class WrapPlan:
    """The modules to wrap, in order, with the arguments of the wrapper."""

    kwargs: Mapping[nn.Module, dict[str, Any]]
    """For each module to wrap, children before parents: the arguments of its wrapper."""
    kept_apart: tuple[nn.Module, ...] = ()
    """The modules that compute without mixed precision; ignored ones are not wrapped."""


def plan_wraps(
    root: nn.Module,
    policy: TreePolicy | CallablePolicy,
    *,
    root_kwargs: Mapping[str, Any],
    ignored_modules: Set[nn.Module] = frozenset(),
    ignored_params: Set[nn.Parameter] = frozenset(),
    include_root: bool = False,
    is_wrapped: Callable[[nn.Module], bool] = lambda module: False,
) -> WrapPlan:
    """Returns the plan of a policy for the modules below a root.

    `root_kwargs` are the arguments of each wrapper unless the policy overrides them; their
    `mixed_precision` has the classes that are kept apart. `ignored_modules`, which must hold whole
    subtrees, are not wrapped, and `ignored_params` do not count. With `include_root` the policy
    decides about the root too. Changes no module, and does not communicate.

    Raises ValueError if `is_wrapped` is true of a module.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    >>> from sharding.wrap import ModuleWrapPolicy
    >>> plan = plan_wraps(model, ModuleWrapPolicy({nn.Sequential}), root_kwargs={"device_id": None})
    >>> plan.kwargs == {model[1]: {"device_id": None}}
    True
    """
    for name, module in root.named_modules():
        if is_wrapped(module):
            raise ArgumentError(
                "FSDP auto wrapping requires modules to not already have "
                f"FSDP applied but found {name} in\n{root}"
            )
    precision = root_kwargs.get("mixed_precision")
    classes = () if precision is None else tuple(precision._module_classes_to_ignore)
    kept_apart = [m for m in root.modules() if m is not root and isinstance(m, classes)]
    alone = [module for module in kept_apart if module not in ignored_modules]
    if isinstance(policy, TreePolicy):
        chosen = policy._run_policy(root, set(ignored_modules), dict(root_kwargs))
    else:
        walk = _Walk(policy, ignored_modules, ignored_params, frozenset(alone))
        walk.visit(root, may_wrap=include_root)
        chosen = {module: dict(root_kwargs) for module in walk.chosen}
    for module in alone:
        chosen[module] = {**chosen.get(module, root_kwargs), "mixed_precision": None}
    if not include_root:
        chosen.pop(root, None)
    ordered = {module: chosen[module] for module in _post_order(root, set()) if module in chosen}
    return WrapPlan(ordered, tuple(kept_apart))


def auto_wrap(
    root: nn.Module, plan: WrapPlan, wrap_fn: Callable[..., nn.Module | None]
) -> nn.Module:
    """Carries out a plan; returns the root, or its wrapper if the plan wraps the root.

    `wrap_fn(module, **kwargs)` returns the replacement for the module in all its places; None or
    the module itself if it stays. A UserWarning names the modules that are kept apart.
    """
    if plan.kept_apart:
        classes = sorted({repr(type(module)) for module in plan.kept_apart})
        warnings.warn(
            "Both mixed precision and an auto_wrap_policy were specified to FSDP, "
            f"where the wrapped module has submodules of type:\n{{{', '.join(classes)}}}\n"
            "These modules will be wrapped as separate FSDP instances with mixed "
            "precision disabled.",
            stacklevel=4,
        )
    for module in plan.kept_apart:
        _compute_in_own_dtype(module)
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = defaultdict(list)
    for parent in root.modules():
        for name, child in parent._modules.items():  # named_children() leaves out second names
            if child is not None:
                places[child].append((parent, name))
    for module, kwargs in plan.kwargs.items():
        wrapper = wrap_fn(module, **kwargs)
        if wrapper is None or wrapper is module:
            continue
        for parent, name in places[module]:
            setattr(parent, name, wrapper)
        if module is root:
            root = wrapper
    return root


def _post_order(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Yields the module and its descendants that are not in `seen`, children before parents."""
    seen.add(module)
    for child in module.children():
        if child not in seen:
            yield from _post_order(child, seen)
    yield module


@dataclass(frozen=True, slots=True)
class _Walk:
    """One walk down and up a tree; asks a policy about each module."""

    policy: CallablePolicy
    ignored_modules: Set[nn.Module]
    ignored_params: Set[nn.Parameter]
    alone: Set[nn.Module]
    """Modules that are wrapped regardless of the policy."""
    chosen: list[nn.Module] = field(default_factory=list)
    seen: set[nn.Module] = field(default_factory=set)
    wrapped: set[nn.Parameter] = field(default_factory=set)
    """The parameters of the modules that are wrapped so far."""

    def visit(self, module: nn.Module, may_wrap: bool = True) -> None:
        """Asks about a module and those below it; adds the answers to `chosen`."""
        self.seen.add(module)
        parameters = self.parameters(module)
        wanted = module in self.alone
        if self.ask(module, True, parameters):
            for child in module.children():
                if child not in self.seen and child not in self.ignored_modules:
                    self.visit(child)
            if may_wrap:
                wanted |= self.ask(module, False, parameters - self.wrapped)
        else:
            for descendant in module.modules():
                if descendant in self.alone:
                    self.wrapped.update(self.parameters(descendant))
        if wanted:
            self.chosen.append(module)
            self.wrapped.update(parameters)

    def ask(self, module: nn.Module, recurse: bool, parameters: set[nn.Parameter]) -> bool:
        numel = sum(parameter.numel() for parameter in parameters)
        return bool(self.policy(module=module, recurse=recurse, nonwrapped_numel=numel))

    def parameters(self, module: nn.Module) -> set[nn.Parameter]:
        return {p for p in module.parameters() if p not in self.ignored_params}


@dataclass(slots=True)
class _OwnDtype:
    """Two hooks: they cast inputs to the dtype of a module's computation, and outputs back."""

    dtype: torch.dtype
    given: torch.dtype | None = None
    """The dtype of the running call's inputs before a cast; None without a cast."""

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.given = None
        cast: tuple[tuple[Any, ...], dict[str, Any]]
        cast = tree_map_only(torch.Tensor, self.enter, (args, kwargs))
        return cast

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return output if self.given is None else tree_map_only(torch.Tensor, self.leave, output)

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dtype == self.dtype:
            return tensor
        self.given = tensor.dtype
        return tensor.to(self.dtype)

    def leave(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.given) if tensor.is_floating_point() else tensor


def _compute_in_own_dtype(module: nn.Module) -> None:
    """Casts a module's floating-point inputs to its parameters' dtype, and outputs back."""
    tensors = chain(module.parameters(), module.buffers())
    dtypes = (tensor.dtype for tensor in tensors if tensor.is_floating_point())
    casts = _OwnDtype(next(dtypes, torch.float32))
    module.register_forward_pre_hook(casts.before, with_kwargs=True)
    module.register_forward_hook(casts.after)
