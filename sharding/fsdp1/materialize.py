"""Makes a module's own parameters real and equal on all ranks, on the device that computes.

The texts of warnings and errors about devices are torch's. Without an accelerator the CPU is the
compute device, without a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Set
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from sharding.engine.composition import HybridGroups
from sharding.engine.order_check import Row, check_same
from sharding.errors import ArgumentError, ArgumentTypeError, MisuseError
from sharding.torch_versions import current_accelerator

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


CPU = torch.device("cpu")


def device_given(device_id: int | str | torch.device | None, rank: int) -> torch.device | None:
    """Returns the device that `device_id` means. Warns if it lacks an index.

    Raises MisuseError if there is no such device.
    """
    if device_id is None:
        return None
    if isinstance(device_id, str):
        try:
            device_id = torch.device(device_id)
        except RuntimeError as error:
            raise ArgumentError(f"device_id={device_id!r} is no device: {error}") from error
    accelerator = current_accelerator()
    if not isinstance(device_id, torch.device):
        if accelerator is None:
            raise MisuseError(
                f"device_id={device_id} names an accelerator, but this machine has none; pass "
                'torch.device("cpu") or nothing'
            )
        device = torch.device(accelerator.type, device_id)
    else:
        device = device_id
    if device.type in ("cpu", "meta"):
        return device
    if accelerator is None or device.type != accelerator.type:
        raise MisuseError(f"device_id={device_id} is not a device of this machine")
    index: int | None = device.index
    if index is None:
        current = torch.device(device.type, torch.accelerator.current_device_index())
        warnings.warn(
            f"FSDP got the argument `device_id` {device_id} on rank {rank}, which does not have an "
            f"explicit index. FSDP will use the current device {current}. If this is incorrect, "
            "please explicitly set the current device before FSDP initialization or pass in the "
            "explicit device index as the `device_id` argument.",
            stacklevel=4,
        )
        return current
    if index >= torch.accelerator.device_count():
        raise MisuseError(
            f"device_id={device_id} does not exist: this machine has "
            f"{torch.accelerator.device_count()} devices of type {device.type}"
        )
    return device


def compute_device(parameters: Iterable[nn.Parameter], given: torch.device | None) -> torch.device:
    """Returns the device of a module's computation: the given one, or that of its parameters.

    For parameters in host memory it is the accelerator, if there is one. Raises ArgumentError if
    the parameters are on another device than the given one.
    """
    found = next((p.device for p in parameters if p.device.type not in ("cpu", "meta")), None)
    if given is not None and given.type != "meta":
        if found is not None and found != given:
            raise ArgumentError(f"Inconsistent compute device and `device_id`: {found} vs {given}")
        return given
    if found is not None:
        return found
    accelerator = current_accelerator()
    if accelerator is None:
        return CPU
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def check_one_device(tensors: Iterable[torch.Tensor], given: torch.device | None) -> None:
    """Raises MisuseError if a module is on several devices and none is given."""
    devices = {tensor.device for tensor in tensors}
    real = {device for device in devices if device.type not in ("cpu", "meta")}
    if len(real) > 1:
        raise MisuseError(
            f"FSDP only supports single device modules but got params on {sorted(map(str, real))}"
        )
    if len(devices) > 1 and given is None:
        raise MisuseError(
            f"The module has parameters on {sorted(map(str, devices))}; please pass in device_id "
            "to have it on one device"
        )


def warn_of_host_memory(parameters: Iterable[nn.Parameter], compute: torch.device) -> None:
    """Warns a user whose module is not on the machine's accelerator."""
    if compute.type != "cpu" and any(p.device.type == "cpu" for p in parameters):
        warnings.warn(
            "The passed-in `module` is on CPU and will thus have FSDP's sharding initialization "
            "run on CPU, which may be slower than on GPU. We recommend passing in the `device_id` "
            "argument for FSDP to move `module` to GPU for the sharding initialization. `module` "
            "must also be on GPU device to work with the `sync_module_states=True` flag since "
            "that requires GPU communication.",
            stacklevel=4,
        )


def check_trainable_on(device: torch.device, compute: torch.device, offload: bool) -> None:
    """Raises MisuseError if parameters have moved to another device since they were sharded."""
    if offload and device.type != "cpu":
        raise MisuseError(
            "An FSDP-managed module with parameter CPU offloading enabled has parameters on "
            f"{device}. Make sure to not move the module from CPU when offloading parameters."
        )
    if not offload and device != compute:
        raise MisuseError(
            f"An FSDP-managed module unexpectedly has parameters on {device}. Make sure to move "
            f"the module to {compute} before training."
        )
