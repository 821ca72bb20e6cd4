"""Folders of torch.distributed.checkpoint, against torch in both directions."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.utils._pytree import tree_leaves

from ckpt.opening.sources import open_source
from ckpt.stores.store import open_store
from formats.catalog import Catalog, Outgoing, OutgoingTensor, TensorRecord, TensorRef, Tree
from formats.dcp import plans, read
from formats.dcp.nest import flatten, unflatten
from formats.dcp.reader import AlikeItems
from formats.dtypes import DTYPES, dtype_of_torch
from formats.errors import CorruptError, FormatError, HostileError, UnsupportedError
from formats.storage import Reader
from sharding.layout import Box
from tests.dcp_alone import load as torch_load
from tests.dcp_alone import save as torch_save
from tests.formats.counting import Counting
from tests.formats.save_with_fsdp2 import train_and_save
from tests.formats.written import write_files
from tests.old_torch import COPIES_FLOAT4, runs_fsdp2
from tests.selection import examples

METADATA = ".metadata"
ITEMS = "__0_0.distcp"
TORCH_DTYPES = [
    getattr(torch, dtype.torch_name) for dtype in DTYPES if hasattr(torch, dtype.torch_name)
]

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bits, but for bool, whose bytes are 0 and 1."""
    count = prod(shape) * torch.empty(0, dtype=dtype).itemsize
    data = random.Random(seed).randbytes(count)
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)


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


def outgoing(nest: Any) -> Outgoing:
    """A nest of tensors and values as a writer gets it."""
    found: dict[str, OutgoingTensor] = {}

    def stream(tensor: torch.Tensor) -> Callable[[], Iterator[memoryview]]:
        data = memoryview(raw(tensor))
        return lambda: (data[start : start + 7] for start in range(0, len(data), 7))

    def tree(value: Any, path: tuple[object, ...]) -> Tree:
        if isinstance(value, torch.Tensor):
            name = ".".join(map(str, path))
            dtype = dtype_of_torch(str(value.dtype), name)
            found[name] = OutgoingTensor(name, tuple(value.shape), dtype, stream(value))
            return TensorRef(name)
        if isinstance(value, torch.dtype):
            return dtype_of_torch(str(value), "")
        if isinstance(value, dict):
            return {key: tree(each, (*path, key)) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(tree(each, (*path, i)) for i, each in enumerate(value))
        return value  # type: ignore[no-any-return]

    return Outgoing(tensors=found, tree=tree(nest, ()))


def saved(folder: Path, state: dict[str, Any]) -> Catalog:
    torch_save(state, checkpoint_id=folder)
    return read(open_store(folder))


def target_like(value: Any) -> Any:
    """A nest of the same structure with other tensors, for dcp.load to fill."""
    if isinstance(value, torch.Tensor):
        return random_tensor(value.dtype, tuple(value.shape), seed=99)
    if isinstance(value, dict):
        return {key: target_like(each) for key, each in value.items()}
    if isinstance(value, list | tuple):  # New ones, also of values: dcp.load changes them in place.
        return type(value)(map(target_like, value))
    return value


def change(folder: Path, how: Callable[[Metadata], object]) -> None:
    """Rewrite `.metadata` with something changed."""
    metadata = pickle.loads((folder / METADATA).read_bytes())
    how(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


# Reading.


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_dtype_and_shape_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    shapes = [(), (0,), (3, 0), (5,), (2, 3, 4)]
    state = {str(i): random_tensor(dtype, shape) for i, shape in enumerate(shapes)}
    catalog = saved(tmp_path, state)
    assert filled(catalog.tree, catalog, open_store(tmp_path)) == expected(state)


def test_views_are_read_with_the_strides_of_their_items(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {"t": base.t(), "part": base[1:, 2:], "wide": base[:, :1].expand(4, 7), "d": base[1]}
    catalog = saved(tmp_path, state)
    assert filled(catalog.tree, catalog, open_store(tmp_path)) == expected(state)
    (stored,) = catalog.tensors["t"].pieces
    assert stored.piece.strides == (1, 6)


def test_the_nest_is_rebuilt_from_the_key_paths(tmp_path: Path) -> None:
    one = torch.ones(2)
    state = {
        "model": {"layers.0.w": one},
        "optim": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1]}]},
        "tuple": (one + 1, [one + 2]),
        "list": [one + 3, 4, [5]],
        "dtype": torch.bfloat16,
        "text": "é",
    }
    catalog = saved(tmp_path, state)
    assert filled(catalog.tree, catalog, open_store(tmp_path)) == expected(state)
    assert set(catalog.tensors) == {"model.layers.0.w", "tuple.0", "tuple.1.0", "list.0"}
    assert [file.name for file in catalog.files] == [METADATA, ITEMS]
    assert catalog.metadata in ({"version": "1.0.0"}, {})  # torch 2.6 writes none


def test_without_key_paths_the_tree_is_flat(tmp_path: Path) -> None:
    saved(tmp_path, {"a": {"b": torch.ones(2)}, "lr": 0.5})
    change(tmp_path, lambda metadata: setattr(metadata, "planner_data", None))
    assert read(open_store(tmp_path)).tree == {"a.b": TensorRef("a.b"), "lr": 0.5}


def test_a_checkpoint_with_the_fields_of_older_versions_is_read(tmp_path: Path) -> None:
    saved(tmp_path, {"a": {"b": torch.ones(2)}, "lr": 0.5})

    def older(metadata: Metadata) -> None:
        del metadata.storage_meta
        vars(metadata).pop("version", None)  # torch 2.6 writes none

    change(tmp_path, older)
    catalog = read(open_store(tmp_path))
    assert catalog.tree == {"a": {"b": TensorRef("a.b")}, "lr": 0.5}
    assert catalog.metadata == {}


@pytest.fixture(scope="module")
def trained(clusters: Callable[[int], Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks saved of a model under FSDP2 with Adam, see save_with_fsdp2.py."""
    folder = tmp_path_factory.mktemp("fsdp2")
    clusters(2).run(train_and_save, folder)
    return folder


@runs_fsdp2
def test_what_two_ranks_saved_is_read_whole(trained: Path) -> None:
    store = open_store(trained / "checkpoint")
    catalog = read(store)
    full = torch.load(trained / "full.pt")
    found = filled(catalog.tree, catalog, store)
    assert found["model"] == expected(full["model"])
    assert found["optim"]["state"] == expected(full["optim"]["state"])
    assert found["step"] == 7
    assert found["optim"]["param_groups"][0]["lr"] == 0.1
    assert {file.name for file in catalog.files} == {METADATA, ITEMS, "__1_0.distcp"}


@runs_fsdp2
def test_a_box_is_located_in_the_shards_that_hold_it(trained: Path) -> None:
    record = read(open_store(trained / "checkpoint")).tensors["model.0.weight"]
    located = [(str(s.piece.box), s.extent.file) for s in record.pieces.locate(Box.whole((5, 3)))]
    assert located == [("[0:3, 0:3]", ITEMS), ("[3:5, 0:3]", "__1_0.distcp")]
    (last,) = record.pieces.locate(Box((4, 1), (5, 2)))
    assert last.extent.file == "__1_0.distcp"


def test_opening_reads_no_tensor_and_values_in_few_reads(tmp_path: Path) -> None:
    tensors = {str(i): torch.zeros(1 << 18) for i in range(8)}
    saved(tmp_path, {"t": tensors, "values": {str(i): i for i in range(100)}})
    counting = Counting(open_store(tmp_path))
    catalog = read(counting)
    assert len(counting.reads) <= 3
    assert sum(counting.reads) < 3 << 20
    counting.reads.clear()
    (stored,) = catalog.tensors["t.3"].pieces
    assert len(counting.reads) == 2
    assert sum(counting.reads) <= 8192
    list(catalog.tensors["t.3"].pieces)
    assert len(counting.reads) == 2
    assert stored.extent.nbytes == 1 << 20


# Refusing.


class Command:
    """Runs a shell command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_hostile_metadata_are_refused_by_name_and_nothing_runs(tmp_path: Path) -> None:
    folder, proof = tmp_path / "checkpoint", tmp_path / "proof"
    saved(folder, {"w": torch.ones(2)})
    command = Command(f"touch {proof}")
    change(folder, lambda metadata: setattr(metadata, "storage_meta", [command]))
    with pytest.raises(HostileError, match=r"\.metadata: the pickle asks for posix\.system"):
        read(open_store(folder))
    assert not proof.exists()
    pickle.loads((folder / METADATA).read_bytes())
    assert proof.exists()


def test_a_hostile_value_is_refused_by_name_and_nothing_runs(tmp_path: Path) -> None:
    folder, proof = tmp_path / "checkpoint", tmp_path / "proof"
    with pytest.raises(HostileError, match=r"__0_0\.distcp at byte \d+: the pickle asks for posix"):
        saved(folder, {"w": torch.ones(2), "x": Command(f"touch {proof}")})
    assert not proof.exists()


def test_a_hostile_item_of_a_tensor_is_refused_when_it_is_located(tmp_path: Path) -> None:
    folder, proof = tmp_path / "checkpoint", tmp_path / "proof"
    saved(folder, {"w": torch.ones(2)})
    torch.save(Command(f"touch {proof}"), folder / ITEMS)
    info = _StorageInfo(ITEMS, 0, (folder / ITEMS).stat().st_size)
    change(
        folder,
        lambda metadata: metadata.storage_data.update(dict.fromkeys(metadata.storage_data, info)),
    )
    record = read(open_store(folder)).tensors["w"]
    with pytest.raises(HostileError, match=r"__0_0\.distcp at byte 0: the pickle asks for posix"):
        list(record.pieces)
    assert not proof.exists()


def sharded(folder: Path, shape: tuple[int, ...], chunks: list[tuple[Any, Any]]) -> None:
    """A checkpoint whose metadata say that tensor `w` is cut into these chunks."""
    saved(folder, {"w": torch.arange(float(prod(shape))).reshape(shape)})

    def cut(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata["w"]
        assert isinstance(entry, TensorStorageMetadata)
        (info,) = metadata.storage_data.values()
        sizes = [(torch.Size(offsets), torch.Size(size)) for offsets, size in chunks]
        entry.chunks = [ChunkStorageMetadata(*each) for each in sizes]
        metadata.storage_data = {MetadataIndex("w", offsets): info for offsets, _ in sizes}

    change(folder, cut)


@pytest.mark.parametrize(
    ("chunks", "says"),
    [
        ([((0, 0), (2, 4)), ((1, 0), (3, 4))], r"\[0:2, 0:4\] and \[1:4, 0:4\] overlap"),
        ([((0, 0), (4, 2)), ((0, 1), (4, 3))], r"\[0:4, 0:2\] and \[0:4, 1:4\] overlap"),
        ([((0, 0), (4, 2)), ((0, 3), (4, 1))], "hold 12 of the 16 elements"),
        ([], "hold 0 of the 16 elements"),
        ([((0, 0), (5, 4))], r"\[0:5, 0:4\] is not inside"),
        ([((0, 0), (1 << 70, 4))], "is not inside"),
        ([((0,), (4,))], "does not have 2 dimensions"),
    ],
)
def test_chunks_that_do_not_tile_the_tensor_are_an_error(
    tmp_path: Path, chunks: list[tuple[Any, Any]], says: str
) -> None:
    sharded(tmp_path, (4, 4), chunks)
    with pytest.raises(FormatError, match=rf"\.metadata: .*w.*{says}"):
        read(open_store(tmp_path))


def test_an_item_that_is_not_what_the_metadata_say_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path, {"w": torch.ones(4, 4)})

    def reshape(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata["w"]
        assert isinstance(entry, TensorStorageMetadata)
        entry.size = entry.chunks[0].sizes = torch.Size((2, 8))

    change(tmp_path, reshape)
    record = read(open_store(tmp_path)).tensors["w"]
    with pytest.raises(FormatError, match=r"shape \(4, 4\) and .* has w \[0:2, 0:8\]"):
        list(record.pieces)


def moved_by(metadata: Metadata, name: str, nbytes: int) -> None:
    """Item `name` is said to begin later, and to be as much shorter."""
    (index,) = (index for index in metadata.storage_data if index.fqn == name)
    was = metadata.storage_data[index]
    metadata.storage_data[index] = _StorageInfo(
        was.relative_path, was.offset + nbytes, was.length - nbytes
    )


def renamed(metadata: Metadata) -> None:
    metadata.planner_data["W"] = metadata.planner_data.pop("w")


# `.metadata` has no checksum: what it says has to agree with the files, and with itself.
@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (lambda m: moved_by(m, "v", 64), CorruptError, r"bytes \d+:\d+ belong to no item"),
        (lambda m: moved_by(m, "w", 64), CorruptError, r"bytes \d+:\d+ belong to no item"),
        (lambda m: m.storage_data.pop(MetadataIndex("s")), CorruptError, "belong to no item"),
        (lambda m: delattr(m, "planner_data"), FormatError, "a Metadata has no planner_data"),
        (renamed, FormatError, r"planner_data has no key path for \['w'\]"),
    ],
)
def test_metadata_that_contradict_the_files_or_themselves_are_an_error(
    tmp_path: Path, damage: Callable[[Metadata], object], error: type[Exception], says: str
) -> None:
    saved(tmp_path, {"w": torch.ones(9), "v": torch.ones(5), "s": 3})
    change(tmp_path, lambda metadata: damage(metadata) and None)
    with pytest.raises(error, match=says):
        read(open_store(tmp_path))


def test_two_chunks_in_the_same_bytes_are_an_error(tmp_path: Path) -> None:
    sharded(tmp_path, (4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 4))])
    with pytest.raises(FormatError, match="two chunks of w lie in the same bytes"):
        read(open_store(tmp_path))


def test_bytes_behind_the_last_item_are_an_error(tmp_path: Path) -> None:
    saved(tmp_path, {"w": torch.ones(9)})
    size = (tmp_path / ITEMS).stat().st_size
    with (tmp_path / ITEMS).open("ab") as file:
        file.write(b"more")
    says = rf"{ITEMS}: bytes {size}:{size + 4} belong to no item"
    with pytest.raises(CorruptError, match=says):
        read(open_store(tmp_path))


@pytest.mark.parametrize(
    ("info", "error", "says"),
    [
        (_StorageInfo("../" + ITEMS, 0, 10), HostileError, "outside of the checkpoint"),
        (_StorageInfo("/etc/passwd", 0, 10), HostileError, "outside of the checkpoint"),
        (_StorageInfo("gone.distcp", 0, 10), CorruptError, "gone.distcp: .* is missing"),
        (_StorageInfo(ITEMS, 0, 1 << 40), CorruptError, "truncated"),
        (_StorageInfo(ITEMS, -5, 10), CorruptError, "bytes -5:5"),
        (_StorageInfo(ITEMS, 0, 1.5), FormatError, "no file, offset and length"),  # type: ignore[arg-type]
        *(
            [(_StorageInfo(ITEMS, 0, 10, ["stream.zstd"]), UnsupportedError, "stream transform")]
            if hasattr(_StorageInfo, "transform_descriptors")  # torch 2.8 and later
            else []
        ),
    ],
)
def test_an_item_outside_of_the_files_is_an_error(
    tmp_path: Path, info: _StorageInfo, error: type[Exception], says: str
) -> None:
    saved(tmp_path, {"w": torch.ones(2)})
    change(
        tmp_path,
        lambda metadata: setattr(metadata, "storage_data", {MetadataIndex("w", (0,)): info}),
    )
    with pytest.raises(error, match=says):
        read(open_store(tmp_path))


@pytest.mark.parametrize(
    "damage",
    [
        {"state_dict_metadata": None},
        {"state_dict_metadata": {"w": 1}},
        {"state_dict_metadata": {1: None}},
        {"storage_data": None},
        {"storage_data": {1: 2}},
        {"storage_data": {}},
        {"planner_data": [1]},
        {"planner_data": {"w": 1}},
        {"planner_data": {"w": ()}},
        {"planner_data": {"w": ("v",)}},
        {"planner_data": {"w": (-1,)}},
    ],
)
def test_metadata_that_make_no_sense_are_an_error(tmp_path: Path, damage: dict[str, Any]) -> None:
    saved(tmp_path, {"w": torch.ones(2)})
    change(tmp_path, lambda metadata: vars(metadata).update(damage))
    with pytest.raises(FormatError, match=r"\.metadata: "):
        read(open_store(tmp_path))


@pytest.mark.parametrize(
    "leaves",
    [
        {("a",): 1, ("a", "b"): 2},
        {("a", "b"): 2, ("a",): 1},
        {("a", "b"): 2, ("a", 0): 1},
        {("a", 1 << 60): 1},
        {(0,): 1},
    ],
)
def test_key_paths_that_make_no_nest_are_an_error(leaves: dict[Any, Any]) -> None:
    with pytest.raises(FormatError, match=r"\.metadata: "):
        unflatten(leaves)


def test_a_folder_without_metadata_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"\.metadata"):
        read(open_store(tmp_path))
    (tmp_path / "__0.metadata").touch()
    with pytest.raises(UnsupportedError, match="each rank saved a checkpoint of its own"):
        read(open_store(tmp_path))


def test_every_truncation_of_the_metadata_is_an_error_that_names_them(tmp_path: Path) -> None:
    saved(tmp_path, {"a": {"w": torch.ones(2)}, "lr": 0.1})
    data = (tmp_path / METADATA).read_bytes()
    for length in range(0, len(data), 7):
        (tmp_path / METADATA).write_bytes(data[:length])
        with pytest.raises(FormatError, match=r"\.metadata: "):
            read(open_store(tmp_path))


def test_truncated_items_are_an_error_that_names_the_file(tmp_path: Path) -> None:
    saved(tmp_path, {"w": torch.ones(2), "v": torch.ones(3)})
    data = (tmp_path / ITEMS).read_bytes()
    for length in (0, 1, len(data) // 2, len(data) - 1):
        (tmp_path / ITEMS).write_bytes(data[:length])
        with pytest.raises(CorruptError, match=r"__0_0\.distcp"):
            read(open_store(tmp_path))


# Writing, and any nest both ways.

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
    | st.text()
    | st.binary(max_size=20)
    | st.sampled_from(TORCH_DTYPES)
)
words = st.text("abc", min_size=1, max_size=4)
# No empty dicts within: DCP drops them.
nests = st.recursive(
    tensors | values,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(words, inner, min_size=1, max_size=4)
    ),
    max_leaves=12,
)
states = st.dictionaries(words, nests, max_size=4)
unhurried = settings(
    max_examples=examples(50),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def is_float4(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and "float4" in str(leaf.dtype)


@unhurried
@given(states)
def test_any_state_that_torch_saves_is_read_equal(tmp_path: Path, state: dict[str, Any]) -> None:
    catalog = saved(tmp_path, state)
    assert filled(catalog.tree, catalog, open_store(tmp_path)) == expected(state)


@unhurried
@given(states)
def test_any_state_that_is_written_is_loaded_equal(tmp_path: Path, state: dict[str, Any]) -> None:
    assume(COPIES_FLOAT4 or not any(map(is_float4, tree_leaves(state))))
    write_files(open_store(tmp_path), *plans(outgoing(state)))
    target = target_like(state)
    torch_load(target, checkpoint_id=tmp_path)
    assert expected(target) == expected(state)
    catalog = read(open_store(tmp_path))
    assert filled(catalog.tree, catalog, open_store(tmp_path)) == expected(state)


@unhurried
@given(states)
def test_the_state_is_flattened_as_torch_flattens_it(state: dict[str, Any]) -> None:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    _, paths = flatten_state_dict(state)
    assert [path for path, _ in flatten(outgoing(state).tree)] == list(paths.values())


def test_torch_converts_what_is_written(tmp_path: Path) -> None:
    state = {"m": {"w": torch.arange(6.0).reshape(2, 3)}, "l": [torch.ones(1), 2], "lr": 0.5}
    write_files(open_store(tmp_path / "checkpoint"), *plans(outgoing(state)))
    dcp_to_torch_save(tmp_path / "checkpoint", tmp_path / "model.pt")
    assert expected(torch.load(tmp_path / "model.pt")) == expected(state)


def test_tied_names_are_both_there_and_share_an_item(tmp_path: Path) -> None:
    alone = outgoing({"in": torch.arange(300.0)})
    tied: Tree = {"in": TensorRef("in"), "out": {"w": TensorRef("in")}}
    write_files(open_store(tmp_path), *plans(Outgoing(alone.tensors, tied)))
    assert (tmp_path / ITEMS).stat().st_size < 2 * 1200
    target = {"in": torch.zeros(300), "out": {"w": torch.zeros(300)}}
    torch_load(target, checkpoint_id=tmp_path)
    assert torch.equal(target["out"]["w"], torch.arange(300.0))  # type: ignore[index]
    catalog = read(open_store(tmp_path))
    assert catalog.aliases == {"out.w": "in"}
    assert catalog.tree == tied


def test_what_dcp_cannot_hold_is_an_error_of_the_plan() -> None:
    ref = TensorRef("w")
    tensors = outgoing({"w": torch.ones(1)}).tensors
    with pytest.raises(UnsupportedError, match="is a dict, not a list"):
        plans(Outgoing(tensors, [ref]))
    with pytest.raises(UnsupportedError, match=r"\['a'\]\['b'\] and \['a\.b'\] would both"):
        plans(Outgoing(tensors, {"w": ref, "a": {"b": 1}, "a.b": 2}))
    for one, other in ({"x": 1}, {"y": 2}), ({"x": 1}, 2), ({"x": 1}, [ref]):
        with pytest.raises(UnsupportedError, match=r"\['a'\]\[1\] and \['a'\]\['1'\] have keys"):
            plans(Outgoing(tensors, {"w": ref, "a": {1: one, "1": other}}))
    with pytest.raises(UnsupportedError, match=r"\['t'\] shares a tensor with \['w'\]"):
        plans(Outgoing(tensors, {"w": ref, "t": (ref, 1)}))
    with pytest.raises(ValueError, match="no place for 1 of the tensors: w"):
        plans(Outgoing(tensors, {"v": 1}))


@pytest.mark.thorough
def test_an_item_that_is_like_another_is_read_as_if_it_were_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"w{at}" for at in range(4)]
    torch_save({name: torch.full((3, 2), at) for at, name in enumerate(names)}, tmp_path / "a")
    (file,) = (tmp_path / "a").glob("*.distcp")
    sound = file.read_bytes()

    def places() -> object:
        """The place and checksum of each tensor, or the error that opening them gives."""
        try:
            with open_source(tmp_path / "a") as source:
                return [
                    tuple(piece.extent for piece in source.catalog.tensors[name].pieces)
                    for name in names
                ]
        except FormatError as error:
            return str(error)

    found = places()
    with monkeypatch.context() as patch:
        patch.setattr(AlikeItems, "find", lambda *_: None)
        assert places() == found
    begin = len(sound) // 4
    for at in range(begin, 2 * begin, 1400 // examples(400, 60)):
        file.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        ours = places()
        with monkeypatch.context() as patch:
            patch.setattr(AlikeItems, "find", lambda *_: None)
            assert places() == ours, at
