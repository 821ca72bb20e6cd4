"""Sound checkpoints of every format, by our writers and by others': what the fuzzers start from."""

from __future__ import annotations

import argparse
import collections
import json
import pickle
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter, filesystem

import ckpt
from tests import dcp_alone
from tests.faults.readers import KINDS, tiny_chunks, written
from tests.fuzz.folders import Files

DATA = Path(__file__).parents[1] / "data"
"""Files that other libraries wrote."""


class Seed(NamedTuple):
    """A sound checkpoint."""

    kind: str
    """`native`, `safetensors`, `hf`, `torch`, `dcp`, `row` of pickles, `npz`, `npy` or `gguf`;
    `folder` for several files of these."""
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
            for seed in (*_by_us(), *_by_others(), *_folders())
        )


def _by_us() -> list[Seed]:
    found = []
    with tiny_chunks() as folder:
        for kind in KINDS:
            case = written(folder / kind, kind)
            found.append(Seed("native", files_of(case.folder)))
        ckpt.save(folder / "state", state())
        found.append(Seed("native", files_of(folder / "state")))
        ckpt.convert(folder / "state", folder / "ours.safetensors", allow_loss=True)
        found.append(Seed("safetensors", files_of(folder), "ours.safetensors"))
        ckpt.convert(
            folder / "state",
            folder / "hf",
            to="hf",
            select="",
            max_shard_bytes=200,
            allow_loss=True,
        )
        found.append(Seed("hf", files_of(folder / "hf")))
        ckpt.convert(folder / "state", folder / "ours.pt")
        found.append(Seed("torch", files_of(folder), "ours.pt"))
        ckpt.convert(folder / "state", folder / "dcp", to="dcp")
        found.append(Seed("dcp", files_of(folder / "dcp")))
        for kind in ("gguf", "npz"):
            model = {"dtype": "float32", "select": "model"}
            ckpt.convert(folder / "state", folder / f"ours.{kind}", **model)  # type: ignore[arg-type]
            found.append(Seed(kind, files_of(folder), f"ours.{kind}"))
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
            "objects": [argparse.Namespace(w=torch.ones(2)), module, optimizer, nn.Linear],
            "numpy": {"array": np.arange(6.0).reshape(2, 3), "number": np.int64(3)},
            "sparse": torch.eye(3).to_sparse(),
            "quantised": torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.qint8),
        }
        for protocol in (2, 4):
            name = f"protocol-{protocol}.pt"
            torch.save(all_of_it, folder / name, pickle_protocol=protocol)
            found.append(Seed("torch", files_of(folder), name))
        torch.save(all_of_it, folder / "legacy.pt", _use_new_zipfile_serialization=False)
        found.append(Seed("row", files_of(folder), "legacy.pt"))
        plain = {"w": torch.ones(2), "n": np.arange(3), "args": argparse.Namespace(lr=1)}
        (folder / "plain.pkl").write_bytes(pickle.dumps(plain, 4))
        found.append(Seed("row", files_of(folder), "plain.pkl"))
        arrays = {
            "w": np.arange(6.0).reshape(2, 3),
            "text": np.array("a"),
            "f": np.ones((2, 3), "f2", "F"),
        }
        np.savez(folder / "a.npz", **arrays)
        np.savez_compressed(folder / "b.npz", **arrays)
        np.save(folder / "c.npy", arrays["f"])
        for name in ("a.npz", "b.npz", "c.npy"):
            found.append(Seed(name[2:], files_of(folder), name))
        small = Path(__file__).parents[1] / "data" / "gguf" / "small.gguf"
        found.append(Seed("gguf", {"small.gguf": small.read_bytes()}, "small.gguf"))
        dcp_alone.save({"module": module.state_dict(), **state()}, folder / "dcp")
        found.append(Seed("dcp", files_of(folder / "dcp")))
    return found


def _folders() -> list[Seed]:
    """Folders with files of several formats, and folders by other writers."""
    kept = (
        *("trainer/checkpoint-2", "accelerate/plain", "accelerate/fsdp2", "lightning/sharded"),
        *(f"deepspeed/{name}/global_step1" for name in ("stage0", "stage1", "stage2", "bf16")),
        *("deepspeed/stage3", "deepspeed/stage1/global_step1_universal"),
        *("megatron/iter_0000005", "torch_checkpointing/step-5"),
        *("orbax/zarr", "orbax/manager/5"),
    )
    found = [Seed("folder", _all_of(DATA / name)) for name in kept]
    tensors = {"w": torch.arange(12.0).reshape(4, 3), "n": torch.tensor(3)}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in ("bin", "shards", "llama", "distributed"):
            (folder / name).mkdir()
        for number in (1, 2):
            shard = f"-0000{number}-of-00002"
            part = {f"{name}{number}": tensor for name, tensor in tensors.items()}
            torch.save(part, folder / "bin" / f"pytorch_model{shard}.bin")
            safetensors.torch.save_file(part, folder / "shards" / f"model{shard}.safetensors")
            cut = {"output.weight": tensors["w"], "norm.weight": torch.ones(3)}
            torch.save(cut, folder / "llama" / f"consolidated.0{number - 1}.pth")
            rows = {"w": {"saved_offsets": [4 * number - 4, 0]}}
            safetensors.torch.save_file(
                {"w": tensors["w"]},
                folder / "distributed" / f"shard-0000{number}-model-00001-of-00001.safetensors",
                {"DCP_SHARDING_INFO": json.dumps(rows), "DCP_VERSION": "1.0"},
            )
        index = {f"{name}1": "pytorch_model-00001-of-00002.bin" for name in tensors}
        index |= {f"{name}2": "pytorch_model-00002-of-00002.bin" for name in tensors}
        text = json.dumps({"weight_map": index})
        (folder / "bin" / "pytorch_model.bin.index.json").write_text(text)
        formats: Any = getattr(filesystem, "SerializationFormat", None)  # torch 2.6 has none
        if formats is not None:
            writer = FileSystemWriter(folder / "mixed", serialization_format=formats.SAFETENSORS)
            dcp.save({"model": tensors, "step": 3}, storage_writer=writer, no_dist=True)
        found += [Seed("folder", _all_of(each)) for each in sorted(folder.iterdir())]
    return found


def _all_of(folder: Path) -> Files:
    """The files of a folder and of its sub-folders."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def files_of(folder: Path) -> Files:
    """The files of a folder, and of the one beside it that it may borrow from."""
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    base = folder.parent / "step-1"
    if folder.name == "step-2" and base.is_dir():
        found |= {f"../step-1/{path.name}": path.read_bytes() for path in base.iterdir()}
    return found
