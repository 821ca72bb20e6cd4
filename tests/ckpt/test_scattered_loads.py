"""Whatever a few ranks save, more ranks load from a server bit for bit, by scatter reads.

A case is drawn and described as data; every rank builds its part of it from the description.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import ckpt
from ckpt.arguments import LEAST_BYTES, VARIABLE
from ckpt.stores.store import open_store
from formats.dtypes import DTYPES
from formats.errors import FormatError
from tests.stores.server import Server

Options = Mapping[str, Any]
Axis = tuple[str, int]
"""One axis of a mesh: R, or S or SS with the dimension that it cuts."""
SHAPES = (
    (7, 5),
    (8, 4),
    (3,),
    (1, 3),
    (0, 4),
    (),
    (2, 3, 4),
    (301, 257),
    (40_000,),
    (5, 1, 90_000),
)
LARGE = (1100, 1024)
"""More than a lot of the least budget, for as many as one rank that saved."""
KNOWN = [dtype.torch_name for dtype in DTYPES if hasattr(torch, dtype.torch_name)]
UNCUT = "float4_e2m1fn_x2"
"""torch cannot cut it."""
COMPRESS: dict[str, bool | Literal["delta"]] = {"raw": False, "zstd": True, "delta": "delta"}
"""How a checkpoint that borrows is saved; what it borrows from is compressed, but for `raw`."""
MESHES: dict[int, tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]] = {
    1: (((1,), (0,)),),
    2: (((2,), (0, 1)), ((1, 2), (0, 1)), ((1,), (1,))),
    3: (((3,), (0, 1, 2)), ((2,), (0, 2))),
    4: (
        *(((4,), (0, 1, 2, 3)), ((2, 2), (0, 1, 2, 3)), ((2, 2), (0, 2, 1, 3))),
        *(((2,), (1, 3)), ((1, 4), (0, 1, 2, 3))),
    ),
}
"""By world size: the sizes of a mesh, and its ranks, which ascend in each group of the mesh.

Over other meshes torch cuts in several orders: tests/oracle/test_meshes.py has those.
"""


@dataclass(frozen=True)
class How:
    """How ranks hold a DTensor."""

    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    axes: tuple[Axis, ...]


@dataclass(frozen=True)
class Described:
    """One tensor of a case."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    saved: How | None
    """None: a plain tensor, which every rank has."""
    loaded: How | None
    loaded_dtype: str


@dataclass(frozen=True)
class Case:
    """What is saved and loaded, by how many ranks, and what goes wrong."""

    saved: int
    loaded: int
    tensors: tuple[Described, ...]
    is_tied: bool
    """Whether the first tensor has a second name."""
    compress: bool
    base: str
    """A key of COMPRESS: this one borrows from an earlier checkpoint; empty for none."""
    changed: frozenset[int]
    """Tensors, by number, that differ from that one's."""
    missing: Mapping[int, tuple[str, ...]]
    """By rank: what its target lacks."""
    include: tuple[str, ...] | None
    is_reversed: bool
    """Whether the targets of all ranks but the first are in the other order."""
    verify: bool
    harm: str
    """`damage` in a file, or the `failure` of a rank; empty for none."""
    where: int
    """The thousandth of the file that is damaged; the rank that fails."""
    tight: frozenset[int]
    """Ranks that have the least memory budget."""

    def selects(self, name: str) -> bool:
        return self.include is None or name == "t2" or name.startswith("t1")


@st.composite
def hows(draw: st.DrawFn, world_size: int, shape: tuple[int, ...]) -> How | None:
    if not shape or draw(st.integers(0, 3)) == 0:
        return None
    sizes, ranks = draw(st.sampled_from(MESHES[world_size]))
    kinds = st.sampled_from(("S", "S", "R"))
    axes = tuple((draw(kinds), draw(st.integers(0, len(shape) - 1))) for _ in sizes)
    if sizes == (2, 2) and shape[0] % 4 == 0 and draw(st.booleans()):
        axes = (("SS", 0), ("S", 0))
    return How(sizes, ranks, axes)


@st.composite
def described(draw: st.DrawFn, name: str, saved: int, loaded: int, is_large: bool) -> Described:
    shape = LARGE if is_large else draw(st.sampled_from(SHAPES))
    dtype = draw(st.sampled_from(("float32", "bfloat16") if is_large else KNOWN))
    cast = dtype
    if dtype in ("float32", "bfloat16") and draw(st.integers(0, 5)) == 0:
        cast = draw(st.sampled_from(("float64", "float32")))
    ways = [None if dtype == UNCUT else draw(hows(size, shape)) for size in (saved, loaded)]
    return Described(name, shape, dtype, ways[0], ways[1], cast)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    saved = one_of(1, 1, 2)
    loaded = one_of(2, 3, 4) if saved == 1 else one_of(4, 4, 3)
    count = draw(st.integers(1, 12))
    tensors = [draw(described(f"t{number}", saved, loaded, False)) for number in range(count)]
    if draw(st.integers(0, 3)) == 0:
        tensors.append(draw(described("large", saved, loaded, True)))
    everyone = frozenset(range(loaded))
    return Case(
        saved,
        loaded,
        tuple(tensors),
        is_tied=draw(st.booleans()),
        compress=one_of(False, False, True),
        base=one_of("", "", "raw", "zstd", "delta"),
        changed=frozenset(draw(st.lists(st.integers(0, 12), max_size=4))),
        missing=one_of({}, {}, {}, {0: ("t0",)}, {1: ("t0", "t1")}),
        include=one_of(None, None, None, ("t1*", "t2")) if count > 2 else None,
        is_reversed=one_of(False, False, False, True),
        verify=one_of(True, True, False),
        harm=one_of("", "", "damage", "failure"),
        where=draw(st.integers(0, 999)),
        tight=one_of(frozenset(), frozenset(), everyone, frozenset({0})),
    )


def value(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """Elements of any bits, but of types that may be cast numbers that fit into all of them."""
    made: torch.dtype = getattr(torch, dtype)
    numel = torch.Size(shape).numel()
    rng = np.random.default_rng([seed, numel])
    if made is torch.bool:
        return torch.from_numpy(rng.integers(0, 2, numel).astype(bool)).reshape(shape)
    if made in (torch.float32, torch.bfloat16, torch.float64):
        numbers = torch.from_numpy(rng.integers(-128, 128, numel))
        return (numbers.float() / 64).to(made).reshape(shape)
    whole = torch.empty(numel, dtype=made)
    if numel:
        data = rng.integers(0, 256, whole.nbytes).astype(np.uint8)
        whole.view(torch.uint8).copy_(torch.from_numpy(data))
    return whole.reshape(shape)


_meshes: dict[tuple[tuple[int, ...], tuple[int, ...]], DeviceMesh] = {}


def mesh_of(how: How) -> DeviceMesh:
    """Called by all ranks, in the same order."""
    key = how.sizes, how.ranks
    if key not in _meshes:
        ranks = torch.tensor(how.ranks).reshape(how.sizes)
        _meshes[key] = DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b")[: ranks.ndim])
    return _meshes[key]


def placed(whole: torch.Tensor, how: How | None) -> torch.Tensor:
    if how is None:
        return whole
    placements: list[Placement] = []
    for kind, dim in how.axes:
        cut = _StridedShard(dim, split_factor=2) if kind == "SS" else Shard(dim)
        placements.append(Replicate() if kind == "R" else cut)
    return distribute_tensor(whole, mesh_of(how), placements, src_data_rank=None)


def bits(tensor: torch.Tensor) -> bytes:
    """Of this rank's part."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat = local.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def save(url: str, options: Options, case: Case) -> None:
    def state(changed: frozenset[int]) -> dict[str, torch.Tensor]:
        found = {
            one.name: placed(
                value(one.shape, one.dtype, number + 1000 * (number in changed)), one.saved
            )
            for number, one in enumerate(case.tensors)
        }
        return {**found, "tied": found["t0"]} if case.is_tied else found

    base, compress = None, COMPRESS[case.base] if case.base else case.compress
    if case.base:
        base = f"{url}-base"
        before = state(case.changed)
        ckpt.save(base, before, storage_options=options, compress=case.base != "raw")
    ckpt.save(url, state(frozenset()), storage_options=options, compress=compress, base=base)


def load(url: str, options: Options, case: Case) -> str:
    """Empty where this rank has what was saved, else what is wrong."""
    if dist.get_rank() in case.tight:
        os.environ[VARIABLE] = str(LEAST_BYTES)
    try:
        return " ".join(load_and_compare(url, options, case))
    except (ckpt.CkptError, FormatError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ.pop(VARIABLE, None)


def load_and_compare(url: str, options: Options, case: Case) -> list[str]:
    """The names of tensors that are not what they should be."""
    target, right = {}, {}
    rank = dist.get_rank()
    lacking = case.missing.get(rank, ()) if len(case.tensors) > 1 else ()
    for number, one in enumerate(case.tensors):
        blank = value(one.shape, one.loaded_dtype, 1 << 20)
        saved = value(one.shape, one.dtype, number).to(getattr(torch, one.loaded_dtype))
        made = placed(blank.clone(), one.loaded)
        if one.name not in lacking:
            target[one.name] = made
            right[one.name] = placed(saved if case.selects(one.name) else blank, one.loaded)
    if case.is_reversed and rank:
        target = dict(reversed(target.items()))
    if case.is_tied and "t0" in target:
        target["tied"] = target["t0"]

    def fail(nbytes: int) -> None:
        if case.harm == "failure" and case.where % case.loaded == rank:
            raise ValueError("told to fail")

    ckpt.load(
        url,
        target,
        storage_options=options,
        strict=not case.missing,
        dtype="target",
        verify=case.verify or case.harm == "damage",
        include=case.include,
        progress=fail,
    )
    return [name for name, tensor in right.items() if bits(target[name]) != bits(tensor)]


def damage(url: str, options: Options, thousandth: int) -> None:
    """A byte of the checkpoint's largest file is another."""
    with open_store(url, options) as store:
        files = {name: store.size(name) for name in store.names() if name.endswith(".safetensors")}
        if files:  # else all is borrowed
            name = max(files, key=lambda one: files[one])
            data = bytearray(store.read_whole(name, 1 << 30))
            data[thousandth * len(data) // 1000] ^= 1
            store.commit(name, bytes(data), replace=True)


@pytest.mark.parametrize(
    "examples",
    [
        pytest.param(3, marks=pytest.mark.thorough),
        pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_what_few_ranks_saved_more_ranks_load_bit_for_bit_or_all_fail(
    clusters: Callable, moto: Server, tmp_path: Path, examples: int
) -> None:
    options, tried = dict(moto.options), 0

    @settings(max_examples=examples, deadline=None)
    @given(cases())
    def check(case: Case) -> None:
        nonlocal tried
        tried += 1
        url = moto.url(f"{tmp_path.name}/{tried}")
        clusters(case.saved).run(save, url, options, case)
        if case.harm == "damage":
            damage(url, options, case.where)
        wrong = clusters(case.loaded).run(load, url, options, case)
        if not case.harm:
            assert not any(wrong), wrong
        elif any(wrong):
            cause = ".safetensors" if case.harm == "damage" else "told to fail"
            assert all(cause in text for text in wrong), wrong

    check()
