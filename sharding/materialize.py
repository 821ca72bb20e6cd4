"""Makes a module's own parameters real and equal on all ranks before they are sharded."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Set
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from sharding.engine.composition import HybridGroups
from sharding.engine.order_check import Row, check_same
from sharding.errors import ArgumentError, ArgumentTypeError

_MADE = "_sharding_made"
"""The attribute of a parameter on the meta device for the parameter that has taken its place."""


def own_modules(
    root: nn.Module, ignored: Set[nn.Module], inner: Set[nn.Module]
) -> Iterator[nn.Module]:
    """Yields the modules that are neither ignored nor in an inner unit, parents first."""
    if root in ignored or root in inner:
        return
    yield root
    for child in root.children():
        yield from own_modules(child, ignored, inner)


def materialize(
    modules: list[nn.Module], device: torch.device, init: Callable[[nn.Module], None] | None
) -> None:
    """Moves parameters and buffers from the meta device to `device`, with values.

    Calls `init` with each of the modules, in order. Without `init`, modules with tensors on the
    meta device get memory, and their `reset_parameters()` is called. Tied parameters stay tied.
    Raises ArgumentTypeError if such a module lacks this method, and RuntimeError if a tensor is
    still on the meta device.
    """
    if init is not None and not callable(init):
        raise ArgumentError(f"Expected param_init_fn={init} to be callable but got {type(init)}")
    for module in modules:
        before = {name: p for name, p in module._parameters.items() if p is not None and p.is_meta}
        own = list(chain(module.parameters(recurse=False), module.buffers(recurse=False)))
        if init is not None:
            init(module)
        elif any(tensor.is_meta for tensor in own):
            reset = getattr(module, "reset_parameters", None)
            if reset is None:
                raise ArgumentTypeError(
                    f"{type(module).__name__} has parameters on the meta device and no "
                    "reset_parameters(); pass param_init_fn to say how it gets its values"
                )
            module.to_empty(device=device, recurse=False)
            with torch.no_grad():
                reset()
        for name, given in before.items():
            _tie(module, name, given)


def _tie(module: nn.Module, name: str, given: nn.Parameter) -> None:
    """Puts the parameter that was first made for a tied one into its other places too."""
    made = module._parameters.get(name)
    if made is None or made.is_meta:
        return
    first = vars(given).setdefault(_MADE, made)
    if first is not made:
        setattr(module, name, first)


def broadcast_states(tensors: list[torch.Tensor], groups: HybridGroups) -> None:
    """Copies the first rank's tensors to all ranks of the shard and the replicate group.

    All ranks call this, with tensors of the same shapes. Waits.
    """
    # Tensor parallelism gives the ranks of both groups the same part of a DTensor.
    parts = [t.to_local() if isinstance(t, DTensor) else t for t in (t.detach() for t in tensors)]
    for group in (groups.shard.group, groups.replicate.group):
        if group is None:
            continue
        first = dist.get_global_rank(group, 0)
        works = [dist.broadcast(part, first, group=group, async_op=True) for part in parts]
        for work in works:
            if work is not None:
                work.wait()


def check_states(
    module: nn.Module,
    tensors: Iterable[torch.Tensor],
    units: Container[nn.Module],
    groups: HybridGroups,
    device: torch.device,
) -> None:
    """Raises MisuseError on all ranks if they would broadcast other tensors of a module, or units.

    All ranks of both groups call this, before the broadcast; `device` is that of messages. Waits.
    """
    names = {id(t): n for n, t in chain(module.named_parameters(), module.named_buffers())}
    rows: list[Row] = [
        (names[id(tensor)], {"shape": tuple(tensor.shape), "dtype": str(tensor.dtype)})
        for tensor in tensors
    ]
    rows += [(f"the unit {path}", {}) for path, part in module.named_modules() if part in units]
    among = [each for each in (groups.shard, groups.replicate) if each.size > 1]
    check_same("states to synchronize", rows, among, device)


def check_reachable(tensors: list[torch.Tensor], groups: HybridGroups) -> None:
    """Raises ArgumentError if the process group cannot send tensors in host memory."""
    if str(dist.get_backend(groups.group)) == "nccl" and any(
        t.device.type == "cpu" for t in tensors
    ):
        raise ArgumentError(
            "The module has CPU parameters or buffers when `sync_module_states=True`, which "
            "requires them to be on GPU. Please specify the `device_id` argument or move the "
            "module to GPU before passing it to FSDP."
        )
