"""Sound checkpoints of every format, by our writers and by others': what the fuzzers start from."""

from __future__ import annotations

import collections
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import nn

import ckpt
from tests import dcp_alone
from tests.faults.readers import KINDS, tiny_chunks, written
from tests.fuzz.folders import Files


class Seed(NamedTuple):
    """A sound checkpoint."""

    kind: str
    """`native`, `safetensors`, `hf`, `torch` or `dcp`."""
    files: Files
    file: str | None = None
    """The file to open; None for the folder."""


def state() -> dict[str, Any]:
    """A little of everything that a state may hold."""
    base = torch.arange(24.0)
    return {
        "model": {"w": base.reshape(6, 4), "t": base.reshape(6, 4).t(), "z": torch.zeros(0, 3)},
        "c": torch.tensor([1 + 2j, 3j], dtype=torch.complex128),
        "half": torch.ones(3, 5).bfloat16(),
        "list": [1, (2.5, None), torch.tensor(7), {"x": torch.ones(2)}],
        "values": {1: "one", None: b"bytes", "inf": float("inf"), "big": 2**80, "c": 1j},
    }


@cache
def seeds() -> tuple[Seed, ...]:
    """All of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of what it is asked to write
        return tuple(
            seed if seed.file is None else seed._replace(files={seed.file: seed.files[seed.file]})
            for seed in (*_by_us(), *_by_others())
        )


def _by_us() -> list[Seed]:
    found = []
    with tiny_chunks() as folder:
        for kind in KINDS:
            case = written(folder / kind, kind)
            found.append(Seed("native", files_of(case.folder)))
        ckpt.save(folder / "state", state())
        found.append(Seed("native", files_of(folder / "state")))
        ckpt.convert(folder / "state", folder / "ours.safetensors")
        found.append(Seed("safetensors", files_of(folder), "ours.safetensors"))
        ckpt.convert(folder / "state", folder / "hf", to="hf", max_shard_bytes=200)
        found.append(Seed("hf", files_of(folder / "hf")))
        ckpt.convert(folder / "state", folder / "ours.pt")
        found.append(Seed("torch", files_of(folder), "ours.pt"))
        ckpt.convert(folder / "state", folder / "dcp", to="dcp")
        found.append(Seed("dcp", files_of(folder / "dcp")))
    return found


def _by_others() -> list[Seed]:
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tied = nn.Linear(3, 3)
        module = nn.ModuleDict({"a": tied, "b": tied, "norm": nn.BatchNorm1d(4)})
        optimizer = torch.optim.Adam(module.parameters())
        safetensors.torch.save_model(module, str(folder / "theirs.safetensors"))
        found.append(Seed("safetensors", files_of(folder), "theirs.safetensors"))
        all_of_it = {
            **state(),
            "module": module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "set": {1, 2},
            "keys": {(2, "b"): 1, 1.5: 2},
            "ordered": collections.OrderedDict(a=1),
            "size": torch.Size([2, 3]),
            "default": collections.defaultdict(list, a=[1]),
            "dtype": torch.float16,
            "device": torch.device("cpu"),
            "parameter": nn.Parameter(torch.ones(2)),
        }
        for protocol in (2, 4):
            name = f"protocol-{protocol}.pt"
            torch.save(all_of_it, folder / name, pickle_protocol=protocol)
            found.append(Seed("torch", files_of(folder), name))
        dcp_alone.save({"module": module.state_dict(), **state()}, folder / "dcp")
        found.append(Seed("dcp", files_of(folder / "dcp")))
    return found


def files_of(folder: Path) -> Files:
    """The files of a folder, and of the one beside it that it may borrow from."""
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    base = folder.parent / "step-1"
    if folder.name == "step-2" and base.is_dir():
        found |= {f"../step-1/{path.name}": path.read_bytes() for path in base.iterdir()}
    return found
