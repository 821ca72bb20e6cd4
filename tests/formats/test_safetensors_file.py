"""Single safetensors files, against the safetensors library in both directions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from ckpt.stores.store import open_store
from formats.catalog import Catalog, Outgoing, OutgoingTensor, TensorRef, plain_names
from formats.dtypes import DTYPES, DType, dtype_of_torch
from formats.errors import CorruptError, FormatError, UnsupportedError
from formats.safetensors.file import (
    BITS,
    DTYPES_KEY,
    PACKED,
    TIED_KEY,
    build,
    is_carried,
    plan,
    read,
)
from sharding.layout import Box
from tests.formats.written import write_files
from tests.selection import examples

FILE = "model.safetensors"
TORCH_DTYPES = {
    dtype.name: getattr(torch, dtype.torch_name)
    for dtype in DTYPES
    if hasattr(torch, dtype.torch_name)  # the youngest 8-bit floats are not in every torch
}


seeded = settings(
    derandomize=True,
    deadline=None,
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.too_slow],
)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bits, so NaNs and all, except that a bool is 0 or 1."""
    high = 2 if dtype is torch.bool else 256
    generator = torch.Generator().manual_seed(seed)
    nbytes = prod(shape) * dtype.itemsize
    bits = torch.randint(0, high, (nbytes,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).reshape(shape)


def is_of_the_library(dtype: DType) -> bool:
    """Whether the installed safetensors writes and reads a dtype."""
    tensor = random_tensor(TORCH_DTYPES[dtype.name], (2,), seed=0)
    try:
        found = safetensors.torch.load(safetensors.torch.save({"w": tensor}))
        return found["w"].dtype == tensor.dtype
    except (KeyError, AttributeError, SafetensorError):
        return False


LIBRARY_DTYPES = [
    TORCH_DTYPES[dtype.name]
    for dtype in DTYPES
    if dtype.name in TORCH_DTYPES and dtype.name != PACKED and is_of_the_library(dtype)
]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def outgoing(name: str, tensor: torch.Tensor, block_bytes: int = 7) -> OutgoingTensor:
    data = memoryview(raw(tensor))

    def blocks() -> Iterator[memoryview]:
        for at in range(0, len(data), block_bytes):
            yield data[at : at + block_bytes]

    dtype = dtype_of_torch(str(tensor.dtype), name)
    return OutgoingTensor(name, tuple(tensor.shape), dtype, blocks)


def state_of(
    tensors: dict[str, torch.Tensor],
    aliases: dict[str, str] | None = None,
    metadata: dict[str, str] | None = None,
) -> Outgoing:
    return Outgoing(
        {name: outgoing(name, tensor) for name, tensor in tensors.items()},
        {name: TensorRef(name) for name in tensors},
        aliases or {},
        metadata or {},
    )


def write_to(folder: Path, state: Outgoing) -> tuple[str, ...]:
    with open_store(folder) as store:
        write_files(store, plan(FILE, state))
    return plain_names(state.tree)


def read_from(folder: Path) -> tuple[Catalog, dict[str, bytes]]:
    """The catalog of a file, and the bytes of each tensor at the place it says."""
    with open_store(folder) as store:
        catalog = read(store, FILE)
        data = {}
        for name, record in catalog.tensors.items():
            (stored,) = record.pieces
            assert stored.piece.box == Box.whole(record.shape)
            assert stored.piece.is_packed
            extent = stored.extent
            data[name] = store.read(extent.file, extent.offset, extent.nbytes)
    return catalog, data


tensors_of_library_dtypes = st.dictionaries(
    st.text("abc.é", max_size=5),
    st.builds(
        random_tensor,
        st.sampled_from(LIBRARY_DTYPES),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
        st.integers(0, 99),
    ),
    max_size=6,
)


@given(tensors_of_library_dtypes)
@seeded
def test_a_file_of_the_library_is_read(tmp_path_factory, tensors):
    folder = tmp_path_factory.mktemp("read")
    safetensors.torch.save_file(tensors, folder / FILE, {"format": "pt", "by": "them"})
    catalog, data = read_from(folder)
    assert {
        name: (record.shape, record.dtype.torch_name) for name, record in catalog.tensors.items()
    } == {
        name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    }
    assert data == {name: raw(tensor) for name, tensor in tensors.items()}
    assert catalog.metadata == {"format": "pt", "by": "them"}
    assert [record.size for record in catalog.files] == [(folder / FILE).stat().st_size]


@given(tensors_of_library_dtypes)
@seeded
def test_the_library_reads_a_file_that_is_written(tmp_path_factory, tensors):
    folder = tmp_path_factory.mktemp("written")
    assert write_to(folder, state_of(tensors, metadata={"by": "us"})) == ()
    with safe_open(folder / FILE, "pt") as file:
        assert file.metadata() == {"format": "pt", "by": "us"}
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {name: (t.shape, t.dtype) for name, t in found.items()} == {
        name: (t.shape, t.dtype) for name, t in tensors.items()
    }
    assert {name: raw(t) for name, t in found.items()} == {n: raw(t) for n, t in tensors.items()}


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3)], ids=str)
def test_every_dtype_comes_back_as_it_was(tmp_path: Path, dtype, shape):
    tensor = random_tensor(dtype, shape, seed=1)
    write_to(tmp_path, state_of({"w": tensor}))
    catalog, data = read_from(tmp_path)
    assert data == {"w": raw(tensor)}
    record = catalog.tensors["w"]
    assert (record.shape, record.dtype.torch_name) == (shape, str(dtype).removeprefix("torch."))
    assert catalog.metadata == {"format": "pt"}


def test_other_readers_see_complex128_as_pairs_of_float64(tmp_path: Path):
    tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128)
    write_to(tmp_path, state_of({"w": tensor}))
    found = safetensors.torch.load_file(tmp_path / FILE)
    assert torch.equal(found["w"], torch.view_as_real(tensor))


def test_a_tied_name_is_stored_once_and_comes_back(tmp_path: Path):
    weight = random_tensor(torch.float32, (3, 2), seed=2)
    write_to(tmp_path, state_of({"embed.weight": weight}, {"head.weight": "embed.weight"}))
    assert list(safetensors.torch.load_file(tmp_path / FILE)) == ["embed.weight"]
    catalog, _ = read_from(tmp_path)
    assert catalog.aliases == {"head.weight": "embed.weight"}
    assert catalog.tree == {
        "embed.weight": TensorRef("embed.weight"),
        "head.weight": TensorRef("embed.weight"),
    }
    assert catalog.metadata == {"format": "pt"}


def test_the_tied_names_of_save_model_come_back(tmp_path: Path):
    model = torch.nn.ModuleDict({"embed": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 2)})
    model["head"].weight = model["embed"].weight
    safetensors.torch.save_model(model, str(tmp_path / FILE))
    catalog, _ = read_from(tmp_path)
    assert catalog.aliases == {"head.weight": "embed.weight"}
    assert set(catalog.tree) == set(model.state_dict())
    assert "head.weight" not in catalog.metadata


def test_a_tensor_called_pt_is_not_taken_for_a_tied_one(tmp_path: Path):
    safetensors.torch.save_file({"pt": torch.zeros(1)}, tmp_path / FILE, {"format": "pt"})
    catalog, _ = read_from(tmp_path)
    assert catalog.aliases == {}


def test_metadata_with_the_name_of_a_tensor_is_not_taken_for_a_tie(tmp_path: Path):
    metadata = {"best": "w", "note": "x"}
    write_to(tmp_path, state_of({"w": torch.ones(2)}, metadata=metadata))
    catalog, _ = read_from(tmp_path)
    assert (list(catalog.tensors), catalog.aliases) == (["w"], {})
    assert catalog.metadata == {"format": "pt", **metadata}


def test_metadata_of_an_earlier_file_does_not_speak_of_this_one(tmp_path: Path):
    stale = {TIED_KEY: '{"a":"b"}', DTYPES_KEY: '{"b":"C128"}', "note": "kept"}
    write_to(tmp_path, state_of({"w": torch.zeros(1)}, metadata=stale))
    catalog, _ = read_from(tmp_path)
    assert (catalog.aliases, catalog.metadata) == ({}, {"format": "pt", "note": "kept"})


def test_every_tensor_is_aligned_to_its_elements(tmp_path: Path):
    tensors = {str(dtype): random_tensor(dtype, (3,), seed=3) for dtype in reversed(LIBRARY_DTYPES)}
    write_to(tmp_path, state_of(tensors))
    catalog, _ = read_from(tmp_path)
    for record in catalog.tensors.values():
        (stored,) = record.pieces
        assert stored.extent.offset % record.dtype.itemsize == 0


def test_the_values_around_the_tensors_are_named_since_they_are_not_stored(tmp_path: Path):
    state = Outgoing(
        {"model.w": outgoing("model.w", torch.zeros(2))},
        {
            "model": {"w": TensorRef("model.w")},
            "optimizer": {"groups": [{"lr": 0.1, "betas": (0.9, 0.999)}], "state": {0: {"t": 1}}},
            "step": 3,
            "note": None,
            "empty": [],
        },
    )
    assert write_to(tmp_path, state) == plain_names(state.tree)
    assert plain_names(state.tree) == (
        "optimizer.groups.0.lr",
        "optimizer.groups.0.betas",
        "optimizer.state.0.t",
        "step",
        "note",
        "empty",
    )
    assert plain_names({}) == ()
    assert plain_names(5) == ("the whole state",)


@pytest.mark.parametrize(("size", "cut"), [(-1, "second"), (-5, "first")])
def test_a_truncated_file_is_an_error_that_names_the_file_and_the_tensor(
    tmp_path: Path, size: int, cut: str
):
    tensors = {"first": torch.zeros(2), "second": torch.zeros(4, dtype=torch.uint8)}
    write_to(tmp_path, state_of(tensors))
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[:size])
    with pytest.raises(CorruptError, match=rf"model\.safetensors: .* within {cut}"):
        read_from(tmp_path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({TIED_KEY: "{"}, "ckpt.tied in its metadata is not JSON"),
        ({TIED_KEY: "[]"}, "not an object"),
        ({TIED_KEY: '{"a":1}'}, "has 1 for a, which is not text"),
        ({TIED_KEY: '{"a":"b"}'}, "ties a to b"),
        ({TIED_KEY: '{"w":"w"}'}, "ties w to w"),
        ({DTYPES_KEY: '{"a":"C128"}'}, "names a, not a tensor"),
        ({DTYPES_KEY: '{"w":"C32"}'}, "w is F64 of shape .* as C32, which is carried as F16"),
        ({DTYPES_KEY: '{"w":"C128"}'}, r"shape \[2, 3\]; its metadata has it as C128"),
        ({DTYPES_KEY: '{"w":"C256"}'}, "w has dtype C256"),
    ],
)
def test_metadata_of_ours_that_does_not_fit_the_file_is_refused(
    tmp_path: Path, metadata: dict[str, str], message: str
):
    header = build([("w", "F64", (2, 3), 48)], metadata)
    (tmp_path / FILE).write_bytes(header + bytes(48))
    with pytest.raises(FormatError, match=message) as raised:
        read_from(tmp_path)
    assert str(raised.value).startswith(FILE)


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in DTYPES if dtype.name in TORCH_DTYPES], ids=str
)
def test_a_dtype_that_the_library_knows_is_one_for_it_and_another_is_called_carried(
    tmp_path: Path, dtype: DType
):
    tensor = random_tensor(TORCH_DTYPES[dtype.name], (2, 4), seed=5)
    write_to(tmp_path, state_of({"w": tensor}))
    catalog, data = read_from(tmp_path)
    assert (catalog.tensors["w"].dtype, catalog.tensors["w"].shape) == (dtype, (2, 4))
    assert data == {"w": raw(tensor)}
    if is_of_the_library(dtype):
        found = safetensors.torch.load_file(tmp_path / FILE)["w"]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert raw(found) == raw(tensor)
        assert not is_carried(dtype, (2, 4))
    elif dtype.name not in BITS and dtype.name != PACKED:
        assert is_carried(dtype, (2, 4))


@pytest.mark.parametrize(("dtype", "shape"), [("F4", (2, 1)), ("F6_E2M3", (8,)), ("F6_E3M2", (8,))])
def test_elements_that_fill_no_whole_bytes_are_refused_by_name(
    tmp_path: Path, dtype: str, shape: tuple[int, ...]
):
    nbytes = 1 if dtype == "F4" else 6
    header = build([("w", dtype, shape, nbytes)], {})
    (tmp_path / FILE).write_bytes(header + bytes(nbytes))
    with pytest.raises(UnsupportedError, match=f"w has dtype {dtype}"):
        read_from(tmp_path)


def test_our_metadata_is_json_that_others_can_read(tmp_path: Path):
    tensor = torch.zeros(1, dtype=torch.complex128)
    write_to(tmp_path, state_of({"é": tensor}, {"b": "é"}))
    with safe_open(tmp_path / FILE, "pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata[TIED_KEY]) == {"b": "é"}
    assert json.loads(metadata[DTYPES_KEY]) == {"é": "C128"}
