"""What ranks do for the oracle: they save objects of the zoo in one form and load them in another.

Functions that tests run on a cluster. Each handles many objects in one job.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

import ckpt
from sharding import FullyShardedDataParallel, fully_shard
from tests.oracle.optimizers import Training
from tests.oracle.ways import Refused, attempt, by_torch, compare, state_dict, whole
from tests.oracle.zoo import ENTRIES

CPU = torch.device("cpu")


def _by_torch(module: nn.Module) -> nn.Module:
    torch_fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return module


def _by_ours(module: nn.Module) -> nn.Module:
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return module


FORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "replicas": lambda module: module,
    "DDP": lambda module: DistributedDataParallel(module),
    "torch fully_shard": _by_torch,
    "fully_shard": _by_ours,
    "torch FSDP": lambda module: TorchFSDP(module, device_id=CPU, use_orig_params=True),
    "FSDP": lambda module: FullyShardedDataParallel(module, use_orig_params=True),
    "FSDP, flat": lambda module: FullyShardedDataParallel(module),
}
"""The forms in which a job may hold a module."""
BY_TORCH = ("torch fully_shard", "torch FSDP")
"""Forms that torch itself refuses for some objects: neither a save nor a load can be compared."""
CRASH_TORCH = ("compiled with own entries", "names of an older release")
"""Objects that torch's FSDP1 loads by reading freed memory: their names differ from its own."""


def formed(name: str, form: str, seed: int) -> Any:
    """The object in this form; Refused if torch does not make it or cannot load it itself."""

    def make(seed: int) -> Any:
        return FORMS[form](ENTRIES[name].build(seed))

    def works() -> Any:
        make(2).load_state_dict(make(1).state_dict())

    if form == "torch FSDP" and name in CRASH_TORCH:
        return Refused("torch", "its load_state_dict ends the process")

    if form in BY_TORCH and isinstance(refused := attempt(works), Refused):
        return refused
    return attempt(lambda: make(seed))


def save_objects(folder: str, names: Sequence[str], form: str) -> dict[str, str]:
    """Save each object by itself; returns the refusals by name."""
    refused = {}
    for number, name in enumerate(names):
        made = formed(name, form, 1)
        if isinstance(made, Refused):
            refused[name] = f"no such form: {made.by}"
            continue
        done = attempt(lambda n=number, m=made: ckpt.save(f"{folder}/{n}", {"m": m}))
        if isinstance(done, Refused):
            refused[name] = f"refused by {done.by}: {done.text[:200]}"
    return refused


def load_objects(folder: str, names: Sequence[str], form: str) -> dict[str, list[str]]:
    """What differs from torch by name, of the objects that were saved and that have this form."""
    found: dict[str, list[str]] = {}
    for number, name in enumerate(names):
        if not Path(f"{folder}/{number}/manifest.json").exists():
            continue
        made = formed(name, form, 2)
        if isinstance(made, Refused):
            continue
        plain = ENTRIES[name]
        want = attempt(lambda p=plain: by_torch(p.build(1), p.build(2)))

        def load(number: int = number, made: nn.Module = made) -> Any:
            ckpt.load(f"{folder}/{number}", {"m": made})
            inner = made.module if isinstance(made, DistributedDataParallel) else made
            return state_dict(inner)

        found[name] = list(compare(attempt(load), want))
    return found


def meet(optimizer: str, form: str, seed: int) -> Any:
    """A training whose module has this form, or how the form was refused."""
    return attempt(lambda: Training(optimizer, "one group", seed, FORMS[form]))


def save_trainings(folder: str, names: Sequence[str], form: str) -> list[str]:
    """Save a trained module and optimizer each, and what they contain; returns their names."""
    kept: list[str] = []
    for number, name in enumerate(names):
        training = meet(name, form, 1)
        if isinstance(training, Refused):
            continue
        trained = attempt(lambda t=training: (t.step(1), t.step(2)))
        if isinstance(trained, Refused):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            done = attempt(lambda n=number, t=training: ckpt.save(f"{folder}/{n}", t.state))
        content_ = done if isinstance(done, Refused) else content(training)
        if dist.get_rank() == 0:  # a file: tensors in an answer would travel by shared memory
            torch.save(content_, f"{folder}/{number}.pt")
        kept.append(name)
    return kept


def content(training: Training) -> Any:
    """The weights and the state of the optimizer, whole, by the parameters' positions."""
    state = training.optim.state
    return {
        "weights": [whole(p) for p in training.parameters],
        "state": [whole(dict(state[p])) for p in training.parameters],
        "options": [
            {k: v for k, v in whole(group).items() if k not in ("params", "foreach")}
            for group in training.optim.param_groups
        ],
    }


def load_trainings(folder: str, names: Sequence[str], form: str) -> dict[str, list[str]]:
    """What differs from the saved training, by name."""
    found = {}
    for number, name in enumerate(names):
        if not Path(f"{folder}/{number}.pt").exists():
            continue
        training = meet(name, form, 2)
        if isinstance(training, Refused):
            continue

        def load(number: int = number, training: Training = training) -> Any:
            ckpt.load(f"{folder}/{number}", training.state)
            return content(training)

        want = torch.load(f"{folder}/{number}.pt", weights_only=False)
        found[name] = list(compare(attempt(load), want))
    return found
