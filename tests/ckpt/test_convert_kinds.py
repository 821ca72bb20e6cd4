"""Checkpoints laid out anew as N ranks would have saved them: every kind at every world size.

What real processes save is the measure: a conversion has to give the very bytes of their files.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW

import ckpt
import sharding
from ckpt.converting.convert import convert
from ckpt.converting.layouts import layout_of, run_of
from ckpt.stores.local_store import LocalStore
from ckpt.transfer import copy_files
from formats.dtypes import DTYPES
from formats.errors import CorruptError, FormatError
from formats.native.manifest import Manifest, dump, load
from formats.native.shard import TABLE, open_shard
from sharding import FullyShardedDataParallel
from sharding.describe.members import LocalPart
from sharding.kind import Kind
from sharding.layout import Layout, Mesh, Piece
from sharding.layout import Shard as Rows
from sharding.reshard.kinds import convert_kind
from tests.selection import examples
from tools.main import main

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

KINDS = ("full", "sharded", "local")
LARGE = (97, 701)
"""Of float32, as many bytes as replicas divide among themselves and no number of ranks evenly."""
SHAPES = ((), (0,), (1,), (7,), (5, 3), (0, 4), (3, 0, 2), (2, 1, 9), (1, 13), (11, 2, 3))
DTYPE_NAMES = tuple(d.torch_name for d in DTYPES if hasattr(torch, d.torch_name))


def filled(torch_name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor of random bits; booleans are 0 or 1."""
    dtype = getattr(torch, torch_name)
    data = random.Random(seed).randbytes(prod(shape) * dtype.itemsize)
    if dtype == torch.bool:
        data = bytes(byte & 1 for byte in data)
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)


def training_state() -> dict[str, Any]:
    """Tensors large and small, of many element sizes, tied, empty and without dimensions."""
    tied = filled("float32", LARGE, 0)
    names = ("bfloat16", "complex128", "bool", "float8_e5m2", "int64", "float64")
    model = {
        "embed": tied,
        **{f"layers.{i}": filled(name, SHAPES[4 + i], i) for i, name in enumerate(names)},
        "head": tied,
        "norm": filled("float32", (5,), 7),
        "scale": filled("float32", (), 8),
    }
    moments = {
        name: {
            "step": torch.tensor(3.0),
            "exp_avg": filled("float32", tuple(tensor.shape), 100 + index),
        }
        for index, (name, tensor) in enumerate(model.items())
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.99), "params": list(model)}]
    return {"model": model, "optim": {"state": moments, "param_groups": groups}, "step": 3}


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    flat = tensor.contiguous().reshape(-1)
    raw = bytes(flat.view(torch.uint8).numpy()) if tensor.numel() else b""
    return tensor.dtype, tuple(tensor.shape), raw


def exact(nest: Any) -> Any:
    """A nest with the bits of every tensor in its place."""
    if isinstance(nest, torch.Tensor):
        return bits(nest)
    if isinstance(nest, dict):
        return {key: exact(item) for key, item in nest.items()}
    return type(nest)(map(exact, nest)) if isinstance(nest, list | tuple) else nest


def manifest_of(folder: Path) -> Manifest:
    return load((folder / "manifest.json").read_bytes())


def content(folder: Path) -> tuple[bytes, dict[int, bytes], str]:
    """All that a checkpoint says besides the names of its files and the writer's; and who wrote."""
    manifest = manifest_of(folder)
    files = {file.rank: (folder / file.name).read_bytes() for file in manifest.files}
    described = dump(replace(manifest, files=(), writer={}))
    return described, files, manifest.writer["world_size"]


# --- The same bytes as real ranks write ----------------------------------------------------------


def as_kind(nest: Any, kind: str, made: dict[int, Any]) -> Any:
    """A nest of whole tensors as this rank has it in a state of a kind; ties stay ties."""
    if isinstance(nest, dict):
        return {key: as_kind(item, kind, made) for key, item in nest.items()}
    if not isinstance(nest, torch.Tensor) or kind == "full" or nest.ndim == 0:
        return nest
    if id(nest) not in made:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        if kind == "sharded":
            mesh = init_device_mesh("cpu", (ranks,))
            chunks = nest.chunk(ranks)
            local = chunks[rank] if rank < len(chunks) else nest[:0]
            made[id(nest)] = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=nest.shape, stride=nest.stride()
            )
        else:
            layout = layout_of(Kind.LOCAL, tuple(nest.shape), ranks)
            lo, hi = layout.span(rank)
            made[id(nest)] = LocalPart(nest.reshape(-1)[lo:hi], layout)
    return made[id(nest)]


def save_as(kind: str, folder: str, compress: bool) -> None:
    ckpt.save(folder, as_kind(training_state(), kind, {}), compress=compress)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state as one process saves it; not to be changed."""
    folder = tmp_path_factory.mktemp("whole") / "c"
    ckpt.save(folder, training_state())
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "ranks", "compress"),
    [*product(KINDS, (1, 2, 3), (False,)), *product(KINDS, (2,), (True,))],
)
def test_the_files_are_those_that_real_ranks_write(
    clusters: Callable[[int], Any],
    whole: Path,
    tmp_path: Path,
    kind: str,
    ranks: int,
    compress: bool,
) -> None:
    clusters(ranks).run(save_as, kind, str(tmp_path / "saved"), compress)
    report = convert(whole, tmp_path / "made", kind=kind, world_size=ranks, compress=compress)
    saved, made = content(tmp_path / "saved"), content(tmp_path / "made")
    assert made[0] == saved[0]
    assert made[1].keys() == saved[1].keys() == set(range(ranks))
    assert [rank for rank in range(ranks) if made[1][rank] != saved[1][rank]] == []
    assert made[2] == saved[2] == str(ranks)
    assert (report.kind, report.world_size) == (kind, ranks)


def save_converted(kind: str, folder: str) -> None:
    tensors = {name: t for name, t in training_state()["model"].items() if name != "head"}
    ckpt.save(folder, convert_kind(tensors, Kind(kind)))


@pytest.mark.parametrize("kind", KINDS)
def test_converting_on_disk_is_converting_in_memory(
    clusters: Callable[[int], Any], whole: Path, tmp_path: Path, kind: str
) -> None:
    clusters(3).run(save_converted, kind, str(tmp_path / "saved"))
    arguments: dict[str, Any] = {"select": "model", "exclude": "head"}
    convert(whole, tmp_path / "made", kind=kind, world_size=3, **arguments)
    assert content(tmp_path / "made") == content(tmp_path / "saved")


def test_full_tensors_of_one_rank_are_what_is_meant_where_no_number_is_given(
    whole: Path, tmp_path: Path
) -> None:
    report = convert(whole, tmp_path / "made", kind="full")
    assert (report.kind, report.world_size) == ("full", 1)
    assert content(tmp_path / "made") == content(whole)


# --- Any kind at any world size into any kind at any world size ----------------------------------

tensors = st.lists(
    st.tuples(st.sampled_from(DTYPE_NAMES), st.lists(st.integers(0, 7), max_size=4).map(tuple)),
    max_size=6,
)
kinds_at_sizes = st.tuples(st.sampled_from(KINDS), st.integers(1, 5))


def times_stored(manifest: Manifest, folder: Path) -> dict[str, set[int]]:
    """How often elements of each tensor are stored, by what the files' own headers say is there."""
    store, parts = LocalStore(folder), dict[int, Any]()
    for file in manifest.files:
        parts[file.rank] = open_shard(store, file).header.entries
    found: dict[str, set[int]] = {}
    for name, stored in manifest.tensors.items():
        counts = np.zeros(stored.shape, dtype=np.int64)
        for rank in range(stored.layout.mesh.size):
            pieces = stored.layout.pieces(rank)
            held = sum(piece.box.numel for piece in pieces)
            entry = parts.get(rank, {}).get(name)
            assert (0 if entry is None else entry.end - entry.begin) == held * stored.dtype.itemsize
            for piece in pieces:
                counts[tuple(map(slice, piece.box.lo, piece.box.hi))] += 1
        found[name] = set(counts.reshape(-1).tolist())
    names = {name for entries in parts.values() for name in entries} - {TABLE}
    assert names == {name for name, counts in found.items() if counts}
    return found


@pytest.mark.thorough
@settings(max_examples=examples(80))
@given(tensors, kinds_at_sizes, kinds_at_sizes, st.sampled_from([32, 16 << 20]), st.booleans())
def test_any_kind_becomes_any_kind_at_any_world_size_to_the_bit(
    given_tensors: list[tuple[str, tuple[int, ...]]],
    first: tuple[str, int],
    second: tuple[str, int],
    block_bytes: int,
    compress: bool,
) -> None:
    state = {f"t{i}": filled(*given, i) for i, given in enumerate(given_tensors)} | {"step": 1}
    with TemporaryDirectory() as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_files, "UNIT_BYTES", block_bytes)
        root = Path(made)
        ckpt.save(root / "whole", state)
        convert(root / "whole", root / "a", kind=first[0], world_size=first[1], compress=compress)
        read: list[int] = []
        convert(root / "a", root / "b", kind=second[0], world_size=second[1], progress=read.append)
        assert exact(ckpt.read(root / "b")) == exact(state)
        for folder in (root / "a", root / "b"):
            assert ckpt.verify(folder).sound
            assert all(n <= {1} for n in times_stored(manifest_of(folder), folder).values())
        nbytes = sum(t.nbytes for t in state.values() if isinstance(t, torch.Tensor))
        assert sum(read) == nbytes
        convert(root / "whole", root / "direct", kind=second[0], world_size=second[1])
        assert content(root / "direct") == content(root / "b")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", ["dcp", "hf", "torch", "safetensors"])
def test_other_formats_become_the_files_of_ranks_too(
    tmp_path: Path, whole: Path, source: str, kind: str
) -> None:
    there = tmp_path / {"safetensors": "m.safetensors", "torch": "m.pt"}.get(source, source)
    convert(whole, there, to=source, select="model", kind="full", allow_loss=True)
    convert(there, tmp_path / "made", kind=kind, world_size=3)
    convert(whole, tmp_path / "direct", select="model", kind=kind, world_size=3)
    assert exact(ckpt.read(tmp_path / "made")) == exact(training_state()["model"])
    if source in ("dcp", "torch"):
        assert content(tmp_path / "made") == content(tmp_path / "direct")


def save_columns(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = filled("float32", (6, 11), 0)
    local = whole.chunk(2, dim=1)[dist.get_rank()].contiguous()
    ckpt.save(
        folder,
        {"w": DTensor.from_local(local, mesh, [Shard(1)], shape=whole.shape, stride=(11, 1))},
    )


def test_columns_of_tensor_parallelism_become_rows_and_runs(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    clusters(2).run(save_columns, str(tmp_path / "columns"))
    ckpt.save(tmp_path / "whole", {"w": filled("float32", (6, 11), 0)})
    for kind in KINDS:
        for source in ("columns", "whole"):
            convert(tmp_path / source, tmp_path / f"{source}-{kind}", kind=kind, world_size=4)
        assert content(tmp_path / f"columns-{kind}") == content(tmp_path / f"whole-{kind}")


def test_casts_selections_and_kinds_go_together(whole: Path, tmp_path: Path) -> None:
    convert(
        *(whole, tmp_path / "c"),
        kind="local",
        world_size=3,
        select="model",
        exclude="layers.*",
        dtype="float64",
        compress=True,
    )
    found: Any = ckpt.read(tmp_path / "c")
    model = training_state()["model"]
    expected = {name: model[name].double() for name in model if "layers" not in name}
    assert exact(found) == exact(expected)
    assert found["embed"] is found["head"]


def test_overwriting_leaves_no_file_of_more_ranks(whole: Path, tmp_path: Path) -> None:
    for ranks in (4, 2):
        convert(whole, tmp_path / "c", kind="local", world_size=ranks, overwrite=True)
    assert len(list((tmp_path / "c").iterdir())) == 3
    assert ckpt.verify(tmp_path / "c").sound


# --- Layouts and runs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "shape", "ranks", "runs"),
    [
        ("full", (5, 2), 2, [(0, 10, (5, 2)), (0, 10, (5, 2))]),
        ("sharded", (5, 2), 2, [(0, 6, (3, 2)), (6, 10, (2, 2))]),
        ("sharded", (1, 4), 3, [(0, 4, (1, 4)), (0, 0, (0, 4)), (0, 0, (0, 4))]),
        ("sharded", (), 2, [(0, 1, ()), (0, 1, ())]),
        ("local", (5, 2), 3, [(0, 4, (4,)), (4, 8, (4,)), (8, 10, (2,))]),
        ("local", (5, 2), 1, [(0, 10, (5, 2))]),
        ("local", (), 2, [(0, 1, ()), (0, 1, ())]),
        ("local", (0, 3), 2, [(0, 0, (0, 3)), (0, 0, (0, 3))]),
    ],
)
def test_a_rank_of_a_kind_has_one_run_of_every_tensor(
    kind: str, shape: tuple[int, ...], ranks: int, runs: list[tuple[int, int, tuple[int, ...]]]
) -> None:
    layout = layout_of(Kind(kind), shape, ranks)
    found = [run_of(layout, rank) for rank in range(ranks)]
    assert [(first, first + prod(local), local) for first, local in found] == runs
    for rank, (first, end, _) in enumerate(runs):
        elements = [
            index
            for piece in layout.pieces(rank)
            for index in range(prod(shape))
            if all(
                lo <= at < hi
                for lo, at, hi in zip(
                    piece.box.lo, np.unravel_index(index, shape), piece.box.hi, strict=True
                )
            )
        ]
        assert sorted(elements) == list(range(first, end))


def test_columns_are_no_run_and_say_so() -> None:
    layout = Layout((4, 6), Mesh.grid(("tp",), (2,)), (Rows(1),))
    assert isinstance(layout.pieces(0)[0], Piece)
    with pytest.raises(ValueError, match=r"tp:2=S\(1\): the elements of rank 1 are not one run"):
        run_of(layout, 1)


# --- What cannot be done -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 2}, "a world size of 2 needs a kind.*full, sharded, local"),
        ({"kind": "sharded"}, "sharded needs a number of ranks.*world_size="),
        ({"kind": "local"}, "local needs a number of ranks.*world_size="),
        ({"kind": "flat", "world_size": 2}, "'flat' is not a kind.*full, sharded, local"),
        ({"kind": "full", "world_size": 0}, "the world size is 0; give a whole number"),
        ({"kind": "full", "world_size": -1}, "the world size is -1"),
        ({"kind": "full", "world_size": 1.5}, "the world size is 1.5"),
        ({"kind": "full", "world_size": True}, "the world size is True"),
        ({"kind": "full", "world_size": 1 << 40}, "the world size is 1099511627776"),
        ({"kind": "sharded", "world_size": 1, "to": "hf"}, "as hf, which has whole.*to='ckpt'"),
        ({"kind": "local", "world_size": 2, "to": "torch"}, "as torch, which has whole"),
        ({"kind": "full", "world_size": 2, "to": "safetensors"}, "as safetensors, which has"),
        ({"kind": "full", "world_size": 2, "to": "dcp"}, "as dcp, which has whole"),
    ],
)
def test_a_division_that_cannot_be_is_refused_before_anything_is_read(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "absent", tmp_path / "made", **arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["safetensors", "hf", "torch", "dcp"])
def test_what_belongs_to_no_rank_is_full_already(whole: Path, tmp_path: Path, to: str) -> None:
    for name, arguments in (("a", {}), ("b", {"kind": "full"})):
        convert(whole, tmp_path / name, to=to, select="model", allow_loss=True, **arguments)
    assert exact(ckpt.read(tmp_path / "a")) == exact(ckpt.read(tmp_path / "b"))


def truncate(folder: Path, shards: list[Path]) -> None:
    shards[-1].write_bytes(shards[-1].read_bytes()[:-1])


def append(folder: Path, shards: list[Path]) -> None:
    shards[-1].write_bytes(shards[-1].read_bytes() + b"\0")


def take_away(folder: Path, shards: list[Path]) -> None:
    shards[-1].unlink()


def flip_header(folder: Path, shards: list[Path]) -> None:
    data = bytearray(shards[-1].read_bytes())
    data[20] ^= 1
    shards[-1].write_bytes(data)


def swap(folder: Path, shards: list[Path]) -> None:
    contents = [shard.read_bytes() for shard in shards]
    for shard, data in zip(shards, reversed(contents), strict=True):
        shard.write_bytes(data)


def relabel(ranks: int) -> Callable[[Path, list[Path]], None]:
    """What damages a checkpoint to say that so many ranks wrote its files, and signs that."""

    def damage(folder: Path, shards: list[Path]) -> None:
        manifest = manifest_of(folder)
        tensors = {
            name: replace(stored, layout=layout_of(Kind.LOCAL, stored.shape, ranks))
            for name, stored in manifest.tensors.items()
        }
        (folder / "manifest.json").write_bytes(dump(replace(manifest, tensors=tensors)))

    return damage


def unlist(folder: Path, shards: list[Path]) -> None:
    manifest = manifest_of(folder)
    (folder / "manifest.json").write_bytes(dump(replace(manifest, files=manifest.files[:-1])))


DAMAGES: dict[str, tuple[Callable[[Path, list[Path]], None], str]] = {
    "truncated": (truncate, "it was truncated; restore"),
    "appended to": (append, "it was appended to; restore"),
    "missing": (take_away, "the file is missing: rank 2 wrote it"),
    "another header": (flip_header, "do not have the digest"),
    "exchanged": (swap, "the file has|do not have the digest"),
    "of two ranks": (relabel(2), "the manifest says F32"),
    "of four ranks": (relabel(4), "more ranks|which is not listed|the manifest says F32"),
    "unlisted": (unlist, "more ranks|which is not listed"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("damage", list(DAMAGES))
@pytest.mark.parametrize("target", ["sharded", "local", "full", "hf", "m.safetensors"])
def test_a_source_that_is_not_whole_is_a_named_error_and_nothing_appears(
    tmp_path: Path, damage: str, target: str
) -> None:
    source = tmp_path / "source"
    state = {"a": filled("float32", (7, 3), 0), "b": filled("float32", (30,), 1)}
    ckpt.save(tmp_path / "whole", state)
    convert(tmp_path / "whole", source, kind="local", world_size=3)
    apply, message = DAMAGES[damage]
    apply(source, sorted(source.glob("*.safetensors")))
    before = sorted(tmp_path.rglob("*"))
    arguments: dict[str, Any] = {"kind": target, "world_size": 2}
    if target not in KINDS:
        arguments = {"to": "hf"} if target == "hf" else {}
    with pytest.raises(FormatError, match=message) as caught:
        convert(source, tmp_path / "deep" / target, **arguments)
    assert str(source) in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_bit_that_changed_ends_the_conversion_without_a_checkpoint(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "whole", {"w": filled("float32", (40_000,), 0)})
    convert(tmp_path / "whole", tmp_path / "source", kind="local", world_size=3)
    last = sorted((tmp_path / "source").glob("*.safetensors"))[-1]
    data = bytearray(last.read_bytes())
    data[len(data) // 2] ^= 1
    last.write_bytes(data)
    with pytest.raises(CorruptError, match="w: bytes"):
        convert(tmp_path / "source", tmp_path / "made", kind="sharded", world_size=2)
    assert [path for path in (tmp_path / "made").rglob("*") if path.is_file()] == []


# --- A training run, through the command line ----------------------------------------------------


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False), nn.LayerNorm(3))


def sharded_run(how: str, seed: int) -> dict[str, Any]:
    model = network(seed)
    if how == "fully_shard":
        sharding.fully_shard(model[0])
        sharding.fully_shard(model)
    else:
        model = FullyShardedDataParallel(model, use_orig_params=how == "original")
    return {"model": model, "optim": AdamW(model.parameters(), lr=0.01, weight_decay=0.1)}


def train(state: dict[str, Any], first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
        loss = state["model"](inputs).square().mean()
        state["optim"].zero_grad()
        loss.backward()
        state["optim"].step()
        losses.append(loss.item())
    return losses


def train_and_save(how: str, folder: str) -> list[float]:
    state = sharded_run(how, 0)
    train(state, 0, 2)
    ckpt.save(folder, state)
    return train(state, 2, 2)


def resume(how: str, folder: str, again: str) -> list[float]:
    state = sharded_run(how, 1)
    ckpt.load(folder, state)
    ckpt.save(again, state)
    return train(state, 2, 2)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_two_ranks_is_converted_by_the_command_and_goes_on_with_three(
    clusters: Callable[[int], Any], tmp_path: Path, kind: str
) -> None:
    saved, made = str(tmp_path / "saved"), str(tmp_path / "made")
    (expected, _) = clusters(2).run(train_and_save, "fully_shard", saved)
    assert main(["convert", saved, made, "--kind", kind, "--world-size", "3"]) == 0
    assert exact(ckpt.read(made)) == exact(ckpt.read(saved))
    for how in ("fully_shard", "flat", "original"):
        losses = clusters(3).run(resume, how, made, str(tmp_path / how))
        assert np.allclose(losses, [expected] * 3, rtol=1e-5)
        assert exact(ckpt.read(tmp_path / how)) == exact(ckpt.read(saved))
