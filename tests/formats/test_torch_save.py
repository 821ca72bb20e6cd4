"""Files of torch.save, against torch in both directions."""

from __future__ import annotations

import io
import math
import os
import random
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from ckpt.stores.store import open_store
from formats.catalog import (
    Catalog,
    OpaqueValue,
    Outgoing,
    OutgoingTensor,
    TensorRecord,
    TensorRef,
    Tree,
)
from formats.dtypes import DTYPES, DType, dtype_of_torch
from formats.errors import CorruptError, FormatError, HostileError, UnsupportedError
from formats.limits import DEPTH
from formats.storage import Reader
from formats.torch_save import plan, read
from formats.zip_plan import ZIP64_BYTES
from sharding.layout import Box
from tests.formats.counting import Counting
from tests.formats.written import write_files
from tests.old_torch import needs
from tests.selection import examples

FILE = "model.pt"
TORCH_DTYPES = [
    getattr(torch, dtype.torch_name) for dtype in DTYPES if hasattr(torch, dtype.torch_name)
]

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bits, but for bool, whose bytes are 0 and 1."""
    count = math.prod(shape) * torch.empty(0, dtype=dtype).itemsize
    data = random.Random(seed).randbytes(count)
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if count else torch.empty(0)
    return flat.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def raw(tensor: torch.Tensor) -> bytes:
    """The packed bytes, of any dtype."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def stored_bytes(reader: Reader, record: TensorRecord) -> bytes:
    """The packed bytes of a tensor of a catalog, put together from its pieces."""
    itemsize = record.dtype.itemsize
    whole = torch.zeros((*record.shape, itemsize), dtype=torch.uint8)
    for stored in record.pieces:
        extent, piece = stored.extent, stored.piece
        data = bytearray(reader.read(extent.file, extent.offset, extent.nbytes))
        strides = (*(step * itemsize for step in piece.strides), 1)
        source = torch.frombuffer(data, dtype=torch.uint8).as_strided(
            (*piece.box.shape, itemsize), strides, piece.at * itemsize
        )
        whole[tuple(map(slice, piece.box.lo, piece.box.hi))] = source
    return whole.numpy().tobytes()


def outgoing(name: str, tensor: torch.Tensor, block_bytes: int = 7) -> OutgoingTensor:
    data = raw(tensor)

    def blocks() -> Iterator[memoryview]:
        for start in range(0, len(data), block_bytes):
            yield memoryview(data)[start : start + block_bytes]

    dtype = dtype_of_torch(str(tensor.dtype), name)
    return OutgoingTensor(name, tuple(tensor.shape), dtype, blocks)


def saved(folder: Path, value: object, protocol: int = 2) -> Catalog:
    torch.save(value, folder / FILE, pickle_protocol=protocol)
    return read(open_store(folder), FILE)


def filled(tree: Tree, catalog: Catalog, reader: Reader) -> Any:
    """The tree with the bytes of its tensors."""
    if isinstance(tree, TensorRef):
        record = catalog.tensors[tree.name]
        return str(record.dtype), record.shape, stored_bytes(reader, record)
    if isinstance(tree, dict):
        return {key: filled(value, catalog, reader) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(filled(value, catalog, reader) for value in tree)
    return tree


def expected(value: Any) -> Any:
    """What `filled` gives for a nest of tensors and values."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch."), tuple(value.shape), raw(value)
    if isinstance(value, torch.dtype):
        return dtype_of_torch(str(value), "")
    if isinstance(value, dict):
        return {key: expected(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(expected, value))
    return value


# Reading.


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)], ids=str)
def test_every_dtype_and_shape_is_read(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = random_tensor(dtype, shape)
    catalog = saved(tmp_path, {"w": tensor})
    assert catalog.tensors["w"].shape == shape
    assert stored_bytes(open_store(tmp_path), catalog.tensors["w"]) == raw(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint16], ids=str)
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[1:, 2:],
        lambda t: t[::2, ::3],
        lambda t: t[1].expand(3, 6),
        lambda t: t[:, :1].expand(4, 7),
        lambda t: t.reshape(2, 2, 6).permute(2, 0, 1),
        lambda t: t[2, 3],
        lambda t: t[2:2],
    ],
)
def test_views_are_read_with_their_own_strides(
    tmp_path: Path, dtype: torch.dtype, view: Any
) -> None:
    tensor = view(random_tensor(dtype, (4, 6)))
    catalog = saved(tmp_path, {"w": tensor})
    assert stored_bytes(open_store(tmp_path), catalog.tensors["w"]) == raw(tensor)


def test_a_strided_tensor_has_one_piece_that_is_located_by_box(tmp_path: Path) -> None:
    catalog = saved(tmp_path, {"w": torch.arange(12.0).reshape(3, 4).t()})
    pieces = catalog.tensors["w"].pieces
    (stored,) = pieces.locate(Box((1, 1), (2, 2)))
    assert stored.piece.strides == (1, 4)
    assert not list(pieces.locate(Box((1, 1), (1, 2))))


def test_names_are_key_paths_and_the_tree_keeps_the_nest(tmp_path: Path) -> None:
    one = torch.ones(2)
    catalog = saved(
        tmp_path,
        {
            "model": OrderedDict({"layers.0.w": one}),
            "optim": {"state": {0: {"step": torch.tensor(1.0)}}, "betas": (0.9, 0.95)},
            "list": [one + 1, {"deep": (one + 2,)}],
            "dtype": torch.bfloat16,
        },
    )
    names = ["model.layers.0.w", "optim.state.0.step", "list.0", "list.1.deep.0"]
    assert list(catalog.tensors) == names
    assert catalog.tree == {
        "model": {"layers.0.w": TensorRef(names[0])},
        "optim": {"state": {0: {"step": TensorRef(names[1])}}, "betas": (0.9, 0.95)},
        "list": [TensorRef(names[2]), {"deep": (TensorRef(names[3]),)}],
        "dtype": dtype_of_torch("bfloat16", ""),
    }
    assert [file.name for file in catalog.files] == [FILE]


def test_a_bare_tensor_is_named_tensor(tmp_path: Path) -> None:
    catalog = saved(tmp_path, torch.ones(2))
    assert catalog.tree == TensorRef("tensor")
    assert list(catalog.tensors) == ["tensor"]


def test_equal_views_of_a_storage_are_tied_names_and_others_share_its_bytes(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    catalog = saved(
        tmp_path, {"in": weight, "out": weight, "flat": weight.detach().reshape(-1)[1:]}
    )
    assert list(catalog.tensors) == ["in", "flat"]
    assert catalog.aliases == {"out": "in"}
    assert catalog.tree == {
        "in": TensorRef("in"),
        "out": TensorRef("in"),
        "flat": TensorRef("flat"),
    }
    (whole,), (part,) = catalog.tensors["in"].pieces, catalog.tensors["flat"].pieces
    assert whole.extent == part.extent
    assert stored_bytes(open_store(tmp_path), catalog.tensors["flat"]) == raw(weight)[4:]


def test_what_a_tree_lacks_becomes_the_nearest_it_has(tmp_path: Path) -> None:
    catalog = saved(
        tmp_path,
        {"seen": {3, 1, 2}, "bytes": bytearray(b"ab"), "size": torch.Size((1, 2)), "c": 1j},
    )
    assert catalog.tree == {"seen": [1, 2, 3], "bytes": b"ab", "size": (1, 2), "c": 1j}


def test_a_frozenset_is_a_sorted_list_and_a_dict_with_one_as_key_is_opaque(tmp_path: Path) -> None:
    members = {frozenset("bca"), frozenset("d"), (2,), (1, 2), "z"}
    keyed = {frozenset({1, 2}): torch.ones(2)}
    catalog = saved(tmp_path, {"members": members, "keyed": keyed, "w": torch.ones(1)})
    assert catalog.tree == {
        "members": [["a", "b", "c"], ["d"], "z", (1, 2), (2,)],
        "keyed": OpaqueValue("dict with keys that are not text or numbers"),
        "w": TensorRef("w"),
    }
    assert list(catalog.tensors) == ["w"]


@pytest.mark.parametrize("protocol", [2, 4])
def test_frozensets_that_are_slow_to_compare_are_refused(tmp_path: Path, protocol: int) -> None:
    alike = {frozenset({number * sys.hash_info.modulus}): 1 for number in range(300)}
    with pytest.raises(HostileError, match="keys of one dict have the same hash"):
        saved(tmp_path, alike, protocol)
    with pytest.raises(HostileError, match="a frozenset of over 1000 parts is the key"):
        saved(tmp_path, {frozenset(range(1001)): 1}, protocol)
    sets = [frozenset({number % 2 + 0.5}) for number in range(2000)]
    assert saved(tmp_path, {"s": sets}, protocol).tree == {"s": [[0.5], [1.5]] * 1000}


@pytest.mark.parametrize(
    ("state", "paths"),
    [
        ({"a": {"b": 1}, "a.b": 2}, r"\['a'\]\['b'\] and \['a.b'\]"),
        ({"a": {1: 1, "1": 2}}, r"\['a'\]\[1\] and \['a'\]\['1'\]"),
        ({"a": [1], "a.0": 2}, r"\['a'\]\[0\] and \['a.0'\]"),
    ],
)
def test_two_key_paths_with_one_name_are_an_error_that_shows_both(
    tmp_path: Path, state: Any, paths: str
) -> None:
    def with_tensors(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: with_tensors(each) for key, each in value.items()}
        if isinstance(value, list):
            return list(map(with_tensors, value))
        return torch.tensor(float(value))

    with pytest.raises(UnsupportedError, match=paths):
        saved(tmp_path, with_tensors(state))


def test_a_parameter_with_attributes_is_read_without_them(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.arange(3.0))
    parameter.note = "mine"  # type: ignore[attr-defined]
    tensor = torch.arange(4.0)
    tensor.note = "mine"  # type: ignore[attr-defined]
    catalog = saved(tmp_path, {"p": parameter, "t": tensor})
    assert stored_bytes(open_store(tmp_path), catalog.tensors["p"]) == raw(parameter)
    assert stored_bytes(open_store(tmp_path), catalog.tensors["t"]) == raw(tensor)


class Command:
    """Runs a shell command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_a_hostile_file_is_refused_by_name_and_nothing_runs(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    with pytest.raises(HostileError, match=r"model\.pt: the pickle asks for posix\.system"):
        saved(tmp_path, {"w": torch.ones(2), "x": [Command(f"touch {proof}")]})
    assert not proof.exists()
    torch.load(tmp_path / FILE, weights_only=False)
    assert proof.exists()


def with_records(path: Path, target: Path, **changed: bytes | None) -> None:
    """Copy a file of torch.save with some records replaced, or left out."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            data = changed.get(info.filename.partition("/")[2].replace("/", "_"), old.read(info))
            if data is not None:
                new.writestr(info.filename, data)


def test_a_nest_that_holds_itself_is_refused(tmp_path: Path) -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(HostileError, match=f"deeper than {DEPTH}"):
        saved(tmp_path, value)


def test_bytes_of_a_big_endian_machine_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "little.pt")
    with_records(tmp_path / "little.pt", tmp_path / FILE, byteorder=b"big")
    with pytest.raises(UnsupportedError, match="big-endian"):
        read(open_store(tmp_path), FILE)


def test_a_storage_that_is_missing_or_of_another_size_is_an_error(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "whole.pt")
    with_records(tmp_path / "whole.pt", tmp_path / FILE, data_0=None)
    with pytest.raises(CorruptError, match="lacks the record whole/data/0"):
        read(open_store(tmp_path), FILE)
    with_records(tmp_path / "whole.pt", tmp_path / FILE, data_0=bytes(7))
    with pytest.raises(CorruptError, match="storage of w has 8 bytes by the pickle, 7 by the file"):
        read(open_store(tmp_path), FILE)


def test_a_compressed_zip_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "stored.pt")
    with (
        zipfile.ZipFile(tmp_path / "stored.pt") as old,
        zipfile.ZipFile(tmp_path / FILE, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(UnsupportedError, match="compressed"):
        read(open_store(tmp_path), FILE)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_records_of_one_name_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / FILE)
    with zipfile.ZipFile(tmp_path / FILE, "a") as archive:
        archive.writestr("model/data/0", bytes(8))
    with pytest.raises(HostileError, match="two records are named 'model/data/0'"):
        read(open_store(tmp_path), FILE)


def test_other_zips_are_refused_by_what_they_are(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with zipfile.ZipFile(tmp_path / FILE, "w") as archive:
        archive.writestr("a.txt", "text")
    with pytest.raises(UnsupportedError, match=r"not one of torch\.save"):
        read(store, FILE)
    for data in (b"", b"P", b"PK\x03\x04", bytes(100)):
        (tmp_path / FILE).write_bytes(data)
        with pytest.raises(CorruptError, match=r"model\.pt"):
            read(store, FILE)


def test_every_truncation_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(6.0), "n": [1, 2]}, tmp_path / "whole.pt")
    data = (tmp_path / "whole.pt").read_bytes()
    for length in range(0, len(data), 5):
        (tmp_path / FILE).write_bytes(data[:length])
        with pytest.raises(FormatError, match=r"model\.pt"):
            read(open_store(tmp_path), FILE)


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_file_gives_a_catalog_or_a_format_error(
    tmp_path: Path, data: st.DataObject
) -> None:
    whole = io.BytesIO()
    torch.save({"w": torch.arange(6.0), "n": [1, 2]}, whole)
    damaged = bytearray(whole.getvalue())
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / FILE).write_bytes(damaged)
    try:
        for record in read(open_store(tmp_path), FILE).tensors.values():
            stored_bytes(open_store(tmp_path), record)
    except FormatError:
        return


def test_damage_to_the_values_is_found_by_their_checksum(tmp_path: Path) -> None:
    torch.save({"lr": 0.125}, tmp_path / FILE)
    data = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(data.replace(b"lr", b"lx", 1))
    with pytest.raises(CorruptError, match="checksum"):
        read(open_store(tmp_path), FILE)


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        catalog = saved(tmp_path, {"w": torch.arange(3.0), "lr": 0.5})
    finally:
        torch.serialization.set_crc32_options(True)
    assert stored_bytes(open_store(tmp_path), catalog.tensors["w"]) == raw(torch.arange(3.0))


def test_opening_a_large_file_reads_only_its_structure(tmp_path: Path) -> None:
    torch.save({str(i): torch.zeros(1 << 18) for i in range(20)}, tmp_path / FILE)
    counting = Counting(open_store(tmp_path))
    catalog = read(counting, FILE)
    assert catalog.nbytes == 20 << 20
    assert sum(counting.reads) < 20_000


tensors = st.builds(
    random_tensor,
    st.sampled_from(TORCH_DTYPES),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.integers(0, 9),
)
values = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 100), 1 << 100)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary(max_size=20)
    | st.sampled_from(TORCH_DTYPES)
)
# No dots: two key paths could then have one name, which has its own test.
words = st.text("abc", min_size=1, max_size=4)
nests = st.recursive(
    tensors | values,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(words | st.integers(-9, 9), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(words, nests, max_size=4))
def test_any_nest_that_torch_saves_is_read_equal(tmp_path: Path, nest: dict[str, object]) -> None:
    catalog = saved(tmp_path, nest)
    assert filled(catalog.tree, catalog, open_store(tmp_path)) == expected(nest)


# Writing.


def outgoing_nest(nest: Any) -> Outgoing:
    """A nest of tensors and values as a writer gets it."""
    found: dict[str, OutgoingTensor] = {}

    def tree(value: Any, path: tuple[object, ...]) -> Tree:
        if isinstance(value, torch.Tensor):
            name = ".".join(map(str, path))
            found[name] = outgoing(name, value)
            return TensorRef(name)
        if isinstance(value, torch.dtype):
            return dtype_of_torch(str(value), "")
        if isinstance(value, dict):
            return {key: tree(each, (*path, key)) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(tree(each, (*path, i)) for i, each in enumerate(value))
        return value  # type: ignore[no-any-return]

    return Outgoing(tensors=found, tree=tree(nest, ()))


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(words, nests, max_size=4))
def test_any_nest_that_is_written_is_loaded_equal(tmp_path: Path, nest: dict[str, object]) -> None:
    write_files(open_store(tmp_path), plan(FILE, outgoing_nest(nest)))
    for mmap in (False, True):
        loaded = torch.load(tmp_path / FILE, weights_only=True, mmap=mmap)
        assert expected(loaded) == expected(nest)
    catalog = read(open_store(tmp_path), FILE)
    assert filled(catalog.tree, catalog, open_store(tmp_path)) == expected(nest)
    with zipfile.ZipFile(tmp_path / FILE) as archive:
        assert archive.testzip() is None


def test_storages_begin_at_multiples_of_64_bytes(tmp_path: Path) -> None:
    state = {f"{'n' * i}{i}": torch.ones(i + 1, dtype=torch.uint8) for i in range(20)}
    write_files(open_store(tmp_path), plan(FILE, outgoing_nest(state)))
    catalog = read(open_store(tmp_path), FILE)
    offsets = [stored.extent.offset for each in catalog.tensors.values() for stored in each.pieces]
    assert len(offsets) == 20
    assert not any(offset % 64 for offset in offsets)


def test_tied_names_share_a_storage(tmp_path: Path) -> None:
    shared = TensorRef("in")
    tree: Tree = {"in": shared, "out": shared, "alias": TensorRef("alias")}
    tensor = outgoing("in", torch.arange(3.0))
    write_files(open_store(tmp_path), plan(FILE, Outgoing({"in": tensor}, tree, {"alias": "in"})))
    loaded = torch.load(tmp_path / FILE, weights_only=True)
    assert len({loaded[name].data_ptr() for name in ("in", "out", "alias")}) == 1
    assert read(open_store(tmp_path), FILE).aliases == {"out": "in", "alias": "in"}


@needs((2, 8), "torch 2.6 does not keep the offsets of storages")
def test_torch_knows_the_offsets_without_reading_data(tmp_path: Path) -> None:
    state = {"a": torch.ones(0), "b": torch.ones(100), "c": torch.ones(3, dtype=torch.uint16)}
    write_files(open_store(tmp_path), plan(FILE, outgoing_nest(state)))
    with FakeTensorMode():
        loaded = torch.load(tmp_path / FILE, weights_only=True)
    for name, record in read(open_store(tmp_path), FILE).tensors.items():
        for stored in record.pieces:
            assert loaded[name].untyped_storage()._checkpoint_offset == stored.extent.offset


def test_a_module_loads_what_was_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 4)
    write_files(open_store(tmp_path), plan(FILE, outgoing_nest(dict(model.state_dict()))))
    other = torch.nn.Linear(3, 4)
    other.load_state_dict(torch.load(tmp_path / FILE, weights_only=True))
    assert torch.equal(model.weight, other.weight)


def test_nothing_is_written_when_the_tree_has_no_place_for_a_tensor(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no place for 1 of the tensors: w"):
        write_files(
            open_store(tmp_path), plan(FILE, Outgoing({"w": outgoing("w", torch.ones(1))}, {}))
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_tensor_beyond_4_gib_is_written_in_little_memory_and_loads(tmp_path: Path) -> None:
    block = memoryview(bytes(range(256)) * (1 << 16))
    count = (1 << 32) // len(block) + 1
    uint8: DType = dtype_of_torch("uint8", "")
    large = OutgoingTensor("large", (count, len(block)), uint8, lambda: iter([block] * count))
    tree: Tree = {"large": TensorRef("large"), "after": TensorRef("after")}
    after = outgoing("after", torch.arange(5.0))
    write_files(open_store(tmp_path), plan(FILE, Outgoing({"large": large, "after": after}, tree)))
    assert large.nbytes > ZIP64_BYTES
    loaded = torch.load(tmp_path / FILE, weights_only=True, mmap=True)
    assert torch.equal(loaded["after"], torch.arange(5.0))
    assert torch.equal(loaded["large"][-1], torch.frombuffer(bytearray(block), dtype=torch.uint8))
    record = read(open_store(tmp_path), FILE).tensors["after"]
    assert stored_bytes(open_store(tmp_path), record) == raw(torch.arange(5.0))
