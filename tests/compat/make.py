"""Writes the checkpoints of a format version that are kept here, and opened by every later ckpt.

    torchrun --nproc-per-node 2 tests/compat/make.py v1 tests/compat/v1
    torchrun --nproc-per-node 2 tests/compat/make.py v2 tests/compat/v2
    torchrun --nproc-per-node 2 tests/compat/make.py v3 tests/compat/v3

Run it once per version of the format, commit what it wrote, and never again: what is kept is what
that version's code wrote, also where it was wrong. tests/formats/test_compat.py has the values.
"""

import sys
from collections import deque
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath
from typing import Any
from uuid import UUID

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckpt


def ramp(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """0, 1/8, 2/8, ...: exact in every floating-point type that it is used with."""
    return (torch.arange(torch.Size(shape).numel()) / 8).reshape(shape).to(dtype)


class Model(nn.Module):
    """Sharded, replicated and tied parameters."""

    def __init__(self) -> None:
        super().__init__()
        dp = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        self.embed = nn.Parameter(distribute_tensor(ramp(5, 4), dp, [Shard(0)]))
        self.head = self.embed
        self.wide = nn.Parameter(distribute_tensor(ramp(2, 3), grid, [Replicate(), Shard(1)]))
        self.norm = nn.Parameter(ramp(4, dtype=torch.bfloat16))
        self.register_buffer("large", ramp(258, 256))


def state() -> dict[str, object]:
    """What both ranks save."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for number, (_, entries) in enumerate(optimizer.state.items()):
        entries["exp_avg"].fill_(number + 0.25)
    with torch.no_grad():
        for parameter in model.parameters():  # the weight decay of the step is undone
            parameter.mul_(0).add_(1.5)
    return {
        "model": model,
        "optim": optimizer,
        "types": dict(typed()),
        "values": {
            "step": 100,
            "big": 2**70,
            "floats": [0.1, float("inf"), float("-inf"), -0.0],
            "nothing": None,
            "truth": (True, False),
            "text": "é\n",
            "bytes": b"\x00\xff",
            "complex": 1 - 2j,
            "dtype": torch.bfloat16,
            "numbered": {1: "one", None: "none"},
            "like a tag": {"$tensor": 1},
        },
    }


def typed() -> Iterator[tuple[str, torch.Tensor]]:
    """One small tensor of most types."""
    for name in ("float64", "float32", "float16", "bfloat16", "complex64", "complex128"):
        yield name, ramp(3, dtype=getattr(torch, name))
    for name in ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"):
        yield name, torch.tensor([0, 1, 2]).to(getattr(torch, name))
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"):
        yield name, torch.tensor([0.5, 1.0, 2.0]).to(getattr(torch, name))
    yield "scalar", torch.tensor(7)
    yield "empty", torch.zeros(0, 3)


def at_step(step: int) -> dict[str, object]:
    """What both ranks save at step 1, 2 or 3 of a run: most of it never changes."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    long = ramp(400, 100)  # two chunks on each rank
    long[-1] = step
    near = ramp(900).bfloat16()
    near[:50] += step
    return {
        "frozen": distribute_tensor(ramp(40, 9), mesh, [Shard(0)]),
        "long": distribute_tensor(long, mesh, [Shard(0)]),
        "near": near,
        "step": step,
    }


def version_1(folder: Path) -> None:
    """A raw and a compressed checkpoint."""
    for name, compress in (("raw", False), ("zstd", True)):
        ckpt.save(folder / name, state(), compress=compress, metadata={"run": "compat"})


def version_2(folder: Path) -> None:
    """Chains of three, each borrowing from the one before: raw, compressed, with deltas."""
    chains: tuple[tuple[str, Any, Any], ...] = (
        ("raw", False, False),
        ("zstd", True, True),
        ("delta", True, "delta"),
    )
    for name, first, later in chains:
        ckpt.save(folder / f"{name}-1", at_step(1), compress=first)
        for step in (2, 3):
            base = folder / f"{name}-{step - 1}"
            ckpt.save(folder / f"{name}-{step}", at_step(step), base=base, compress=later)


def typed_values() -> dict[str, object]:
    """A value of every kind that version 3 has a word for."""
    zone = timezone(timedelta(hours=-5, minutes=-30), "here")
    return {
        "sets": [{3, "a", (1, None)}, frozenset({1.5, b"x"}), {frozenset()}],
        "queues": [deque([1, {"a": {2}}]), deque([1], maxlen=3)],
        "bytes": bytearray(b"a\0"),
        "bounds": (range(1, 9, 2), slice(None, 3), ...),
        "paths": [PosixPath("/a/b"), PurePosixPath("c"), PureWindowsPath("d:\\e")],
        "moments": [datetime(2024, 2, 29, 1, 2, 3, 4, zone, fold=1), datetime(1, 1, 1)],
        "days": [date(2024, 2, 29), time(1, 2, 3, 4, timezone.utc), timedelta(-1, 2, 3), zone],
        "numbers": [Decimal("1.10"), Fraction(-1, 3), UUID(int=7)],
        "devices": [torch.device("cpu"), torch.device("cuda", 1)],
    }


def version_3(folder: Path) -> None:
    """Typed values, without bases and with one."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for step, base in ((1, None), (2, folder / "typed-1")):
        whole = distribute_tensor(ramp(40, 9), mesh, [Shard(0)])
        saved = {"w": whole, "values": typed_values(), "step": step}
        ckpt.save(folder / f"typed-{step}", saved, base=base)


def main() -> None:
    """Write what the command line says."""
    version, folder = sys.argv[1:]
    dist.init_process_group("gloo")
    {"v1": version_1, "v2": version_2, "v3": version_3}[version](Path(folder))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
