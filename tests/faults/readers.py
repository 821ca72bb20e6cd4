"""Tiny checkpoints of every kind, and every way in which one is read: for the tests of damage.

Their chunks have 64 bytes, so that a random bit is as likely to be in a manifest, a header, its
padding, a chunk table or a list of borrowed chunks as in a tensor.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import ckpt
from formats.native import shard

KINDS = ("whole", "sharded", "zstd", "borrowed", "delta")
SENTINEL = -5.0


@contextmanager
def tiny_chunks() -> Iterator[Path]:
    """A folder, in memory where there is a tmpfs; what is saved meanwhile has tiny chunks."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "CHUNK_BYTES", 64)
        patch.setattr(shard, "COMPRESSED_CHUNK_BYTES", 64)
        yield Path(folder)


def state(seed: int = 0, is_tied: bool = True) -> dict[str, Any]:
    """Tensors of several chunks and of less than one, tied, empty, of several types; values."""
    generator = torch.Generator().manual_seed(seed)
    tied = torch.arange(24, dtype=torch.int64)
    return {
        "model": {
            "w": torch.randn(12, 7, generator=generator),
            "half": torch.randn(90, generator=generator).bfloat16(),
            "head": tied,
            "embed": tied if is_tied else tied + 1,
            "empty": torch.zeros(0, 3),
            "zeros": torch.zeros(50),
        },
        "flag": torch.tensor(True),
        "step": 12,
        "text": "some text",
    }


def later() -> dict[str, Any]:
    """The same some steps later: most of it unchanged, some of it by a little."""
    changed = state()
    changed["model"]["half"][:40] += torch.tensor(2.0**-6).bfloat16()
    changed["model"]["w"][3] += 1
    changed["step"] = 13
    return changed


class Case(NamedTuple):
    """A checkpoint and what it borrows from, in one folder."""

    root: Path
    folder: Path
    """The checkpoint."""
    sound: Path
    """A copy of it that is left alone."""
    values: dict[str, torch.Tensor]
    """What it holds, by name."""
    base: Path | None
    is_tied: bool = True
    """Whether two of its names are of one tensor."""


def written(root: Path, kind: str, seed: int = 0) -> Case:
    """One of the checkpoints."""
    folder, base, values = root / "step-2", None, state(seed)
    if kind in ("borrowed", "delta"):
        base, values = root / "step-1", later()
        packed: Any = "delta" if kind == "delta" else False
        ckpt.save(base, state(), compress=bool(packed))
        ckpt.save(folder, values, base=base, compress=packed)
    elif kind == "whole":
        ckpt.save(folder, values)
    else:
        ckpt.save(root / "first", values)
        ckpt.convert(root / "first", folder, kind="sharded", world_size=2, compress=kind == "zstd")
        shutil.rmtree(root / "first")
    shutil.copytree(root, root.with_suffix(".sound"))
    return Case(root, folder, root.with_suffix(".sound") / "step-2", tensors_of(values), base)


def tensors_of(nest: Any, path: str = "") -> dict[str, torch.Tensor]:
    """The tensors in a nest by their names, tied ones under each."""
    if isinstance(nest, torch.Tensor):
        return {path: nest}
    if not isinstance(nest, dict):
        return {}
    return {
        name: tensor
        for key, item in nest.items()
        for name, tensor in tensors_of(item, f"{path}.{key}".lstrip(".")).items()
    }


# Every reader: the tensors it gives, by name; CorruptError where it met damage.


def by_read(case: Case) -> dict[str, torch.Tensor]:
    return tensors_of(ckpt.read(case.folder))


def by_load(case: Case) -> dict[str, torch.Tensor]:
    """What is loaded; of a load that failed, only what it says it touched was changed."""
    target = state(1, case.is_tied)
    for tensor in tensors_of(target).values():
        tensor.fill_(SENTINEL)
    untouched = {name: tensor.clone() for name, tensor in tensors_of(target).items()}
    try:
        return tensors_of(ckpt.load(case.folder, target))
    except ckpt.CorruptError as error:
        touched = error.touched if isinstance(error, ckpt.PartialLoadError) else ()
        tied = {"model.embed", "model.head"}
        for name, tensor in tensors_of(target).items():
            known = name in touched or (case.is_tied and name in tied and tied & set(touched))
            assert known or torch.equal(tensor, untouched[name]), name
        raise


def by_lazy(case: Case) -> dict[str, torch.Tensor]:
    with ckpt.open(case.folder) as checkpoint:
        return {name: handle[...] for name, handle in checkpoint.items()}


def by_convert(case: Case) -> dict[str, torch.Tensor]:
    """What another format holds afterwards; nothing appears where it failed."""
    target = case.root / "converted.safetensors"
    try:
        ckpt.convert(case.folder, target)
        found = load_file(target)
        target.unlink()
    except ckpt.FormatError:
        assert not target.exists()
        raise
    if not case.is_tied:
        return found
    tied = "model.embed" if "model.head" in found else "model.head"
    return {**found, tied: found.get("model.head", found.get("model.embed"))}  # type: ignore[dict-item]


def by_diff(case: Case) -> dict[str, torch.Tensor]:
    found = ckpt.diff(case.folder, case.sound, read_all=True)
    assert found.equal
    return case.values


READERS: tuple[Callable[[Case], dict[str, torch.Tensor]], ...] = (
    by_read,
    by_load,
    by_lazy,
    by_convert,
    by_diff,
)


def outcome(
    reader: Callable[[Case], dict[str, torch.Tensor]],
    case: Case,
    error: type[Exception] | tuple[type[Exception], ...] = ckpt.CorruptError,
) -> tuple[dict[str, torch.Tensor] | None, str]:
    """What a reader gives, or None and what its error says."""
    try:
        return reader(case), ""
    except error as raised:
        return None, str(raised)


def is_exact(found: dict[str, torch.Tensor], case: Case) -> bool:
    """Whether these are the checkpoint's tensors, all of them, to the bit."""
    return found.keys() == case.values.keys() and all(
        torch.equal(found[name], tensor) for name, tensor in case.values.items()
    )


class Held(NamedTuple):
    """Bytes of a file that a chunk of a tensor is stored in."""

    file: str
    lo: int
    hi: int
    tensor: str


def chunks_of(folder: Path) -> list[Held]:
    """Where the checkpoint's own description says that chunks lie."""
    found = []
    with ckpt.open(folder) as checkpoint:
        for name, record in checkpoint.catalog.tensors.items():
            for piece in record.pieces:
                chunks = piece.extent.chunks
                assert chunks is not None
                for number in range(len(chunks)):
                    chunk = chunks[number]
                    end = chunk.offset + chunk.stored_bytes
                    file = os.path.normpath(folder / piece.extent.file)
                    found.append(Held(file, chunk.offset, end, name))
    return found
