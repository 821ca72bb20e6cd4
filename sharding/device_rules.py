"""The devices that a wrapped module's parameters may be on, with warnings and errors.

The texts are torch's. Without an accelerator the CPU is the compute device, without a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import nn

from sharding.errors import ArgumentError, MisuseError
from sharding.torch_versions import current_accelerator

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
