"""An open checkpoint is indexed as a tensor is, and reads what the index needs."""

import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import ckpt
from ckpt.converting.convert import convert
from ckpt.errors import CkptError, NotACheckpointError
from ckpt.loading import lazy
from ckpt.loading.lazy import Checkpoint
from formats.catalog import TensorRef
from formats.errors import CorruptError, UnsupportedError
from formats.native.shard import CHUNK_BYTES
from tests.garbage import collect_garbage
from tests.stores.fault_proxy import FaultProxy
from tests.stores.faults import Fault
from tests.stores.server import Server

SHAPES = ((7, 5, 4), (12,), (), (0, 3), (1, 1, 2, 3), (2, 0), (9, 4))
FORMATS = {"ckpt": "c", "safetensors": "c.safetensors", "hf": "hf", "torch": "c.pt", "dcp": "dcp"}


def value(shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor of a shape: every element different."""
    return torch.arange(prod(shape), dtype=torch.float32).reshape(shape) + 1


def state() -> dict[str, Any]:
    """A nest with plain values and tied tensors."""
    tied = torch.arange(6.0).reshape(2, 3)
    return {
        "model": {"embed": tied, "head": tied, "w": torch.arange(40, dtype=torch.int16)},
        "layers": [torch.ones(2, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bool)],
        "optimizer": {"lr": 0.5, "betas": (0.9, 0.99), "step": torch.tensor(3)},
        "note": "text",
    }


@pytest.fixture(scope="module", params=[False, True], ids=["raw", "zstd"])
def shapes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """An open checkpoint with a tensor of each shape, under the shape's number."""
    folder = tmp_path_factory.mktemp("shapes")
    whole = {str(number): value(shape) for number, shape in enumerate(SHAPES)}
    ckpt.save(folder, whole, compress=request.param)
    with ckpt.open(folder) as checkpoint:
        yield checkpoint


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Checkpoint]:
    ckpt.save(tmp_path / "c", state(), metadata={"run": "7"})
    with ckpt.open(tmp_path / "c") as checkpoint:
        yield checkpoint


def slices() -> st.SearchStrategy[slice]:
    bound = st.none() | st.integers(-15, 15)
    return st.builds(slice, bound, bound, st.none() | st.integers(1, 5))


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """An index into a tensor of this shape that torch accepts."""
    parts: list[Any] = []
    for size in draw(st.sampled_from([shape[:n] for n in range(len(shape) + 1)])):
        choices = [slices()] + ([st.integers(-size, size - 1)] if size else [])
        parts.append(draw(st.one_of(choices)))
    if draw(st.booleans()):
        at = draw(st.integers(0, len(parts)))
        rest = shape[len(shape) - (len(parts) - at) :]
        parts[at:] = [...] + [  # what follows an ellipsis counts from the end
            draw(st.one_of([slices()] + ([st.integers(-size, size - 1)] if size else [])))
            for size in rest
        ]
    if len(parts) == 1 and draw(st.booleans()):
        return parts[0]
    return tuple(parts)


@given(number=st.sampled_from(range(len(SHAPES))), data=st.data())
def test_indexing_is_indexing_a_tensor(
    shapes: Checkpoint, number: int, data: st.DataObject
) -> None:
    index = data.draw(indices(SHAPES[number]))
    found, expected = shapes[str(number)][index], value(SHAPES[number])[index]
    assert found.shape == expected.shape
    assert torch.equal(found, expected)


def test_what_is_read_has_memory_of_its_own_and_no_more(shapes: Checkpoint) -> None:
    for index in ((slice(0, 7, 3),), (2, slice(1, 3)), slice(None, None, 2**70), ...):
        found = shapes["0"][index]
        assert found.untyped_storage().nbytes() == found.nbytes
    first = shapes["0"][...]
    first.fill_(0)
    assert torch.equal(shapes["0"][...], value(SHAPES[0]))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (7, r"0: index 7 is out of range in dimension 0 of \(7, 5, 4\)"),
        (-8, "index -8 is out of range"),
        ((0, 5), "index 5 is out of range in dimension 1"),
        ((0, 0, 0, 0), r"4 indices for shape \(7, 5, 4\)"),
        ((..., ...), "at most one ellipsis"),
        ((..., 0, 0, 0, 0), "indices for shape"),
        (slice(None, None, -1), "the step of a slice must be positive, not -1"),
        (slice(None, None, 0), "the step of a slice must be positive, not 0"),
        ([0, 7], r"index 7 is out of range in dimension 0 of \(7, 5, 4\)"),
    ],
)
def test_an_index_that_does_not_fit_is_an_error_with_the_numbers(
    shapes: Checkpoint, index: Any, message: str
) -> None:
    with pytest.raises(IndexError, match=message):
        shapes["0"][index]


@pytest.mark.parametrize(
    "index",
    [
        True,
        None,
        1.0,
        "a",
        [True, False],
        (0, [1]),
        (0, None),
        torch.tensor([True] * 7),
        torch.tensor(True),
        slice(1.0, 2),
        slice(0, 2, "a"),
        (0, ..., "a"),
    ],
    ids=str,
)
def test_what_torch_takes_and_we_do_not_is_refused(shapes: Checkpoint, index: Any) -> None:
    with pytest.raises(TypeError, match=r"^0: an index is an integer, a slice or"):
        shapes["0"][index]


@given(number=st.sampled_from([0, 1, 4, 6]), data=st.data())
def test_a_list_of_rows_is_read_as_a_tensor_is_indexed(
    shapes: Checkpoint, number: int, data: st.DataObject
) -> None:
    shape = SHAPES[number]
    rows = data.draw(st.lists(st.integers(-shape[0], shape[0] - 1), max_size=5))
    kinds = (list, torch.tensor, np.array) if rows else (list,)
    more = [
        data.draw(st.integers(0, size - 1) | st.just(slice(None)) | st.just(slice(1, None, 2)))
        for size in shape[1 : 1 + data.draw(st.integers(0, len(shape) - 1))]
    ]
    found = shapes[str(number)][(data.draw(st.sampled_from(kinds))(rows), *more)]
    expected = value(shape)[(rows, *more)]
    assert torch.equal(found, expected)
    assert found.untyped_storage().nbytes() == found.nbytes


def test_an_integer_of_any_type_is_an_index(shapes: Checkpoint) -> None:
    for three in (torch.tensor(3), np.int64(3)):
        assert torch.equal(shapes["1"][three], value((12,))[3])


def bytes_read_so_far() -> int:
    """What this process has asked the operating system to read, from files of all kinds."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("verify", [True, False])
def test_a_slice_reads_its_own_bytes_and_little_else(tmp_path: Path, verify: bool) -> None:
    rows = 16 << 20 >> 12
    ckpt.save(tmp_path, {"w": value((rows, 1024)), "other": torch.zeros(1 << 20)})
    start = bytes_read_so_far()
    with ckpt.open(tmp_path, verify=verify) as checkpoint:
        handle = checkpoint["w"]
        opened = bytes_read_so_far()
        assert opened - start < 10_000  # the manifest
        assert torch.equal(handle[100], value((rows, 1024))[100])
        first = bytes_read_so_far()
        assert torch.equal(handle[200:210, 5], value((rows, 1024))[200:210, 5])
        second = bytes_read_so_far()
    header_bytes = 10_000
    if verify:
        assert first - opened <= header_bytes + 2 * CHUNK_BYTES
        assert second - first <= 10 * 4096 + 2 * CHUNK_BYTES + 1000
    else:
        assert first - opened <= header_bytes + 4096
        assert second - first <= 10 * 4096 + 1000


def test_a_damaged_part_is_an_error_only_for_what_needs_it(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"w": torch.ones(1 << 18)})
    (shard,) = tmp_path.glob("*.safetensors")
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size - 1000)
        file.write(b"\x07")
    with ckpt.open(tmp_path) as checkpoint:
        assert torch.equal(checkpoint["w"][:1000], torch.ones(1000))
        with pytest.raises(CorruptError, match="w: bytes"):
            checkpoint["w"][...]
    with ckpt.open(tmp_path, verify=False) as checkpoint:
        assert checkpoint["w"].shape == checkpoint["w"][...].shape == (1 << 18,)


def test_a_checkpoint_is_a_mapping_from_every_name_to_a_handle(saved: Checkpoint) -> None:
    names = {"model.embed", "model.head", "model.w", "layers.0", "layers.1", "optimizer.step"}
    assert set(saved) == set(saved.keys()) == names
    assert len(saved) == len(list(saved)) == 6
    assert "model.w" in saved
    assert "model" not in saved
    assert saved.get("absent") is None
    assert {name: handle.shape for name, handle in saved.items()}["model.w"] == (40,)
    handle = saved["layers.0"]
    assert (handle.name, handle.shape, handle.dtype) == ("layers.0", (2,), torch.bfloat16)
    assert repr(handle) == "TensorHandle('layers.0', shape=(2,), dtype=bfloat16)"
    assert handle.layout is not None


def test_tied_names_are_one_tensor_under_each_name(saved: Checkpoint) -> None:
    tied = state()["model"]["embed"]
    assert torch.equal(saved["model.embed"][...], tied)
    assert torch.equal(saved["model.head"][...], tied)
    assert saved["model.embed"].record is saved["model.head"].record


def test_a_name_that_is_not_there_is_a_key_error_that_says_where(saved: Checkpoint) -> None:
    with pytest.raises(KeyError, match=r"'model\.embd' is not in .*; did you mean 'model\.embed'"):
        saved["model.embd"]
    with pytest.raises(KeyError, match=r"nothing.* is not in .*list\(checkpoint\).* has the names"):
        saved["nothing"]


def test_values_are_the_nest_with_references_to_tensors(saved: Checkpoint) -> None:
    values: Any = saved.values()
    assert values["note"] == "text"
    assert values["optimizer"]["betas"] == (0.9, 0.99)
    assert values["model"]["w"] == TensorRef("model.w")
    assert values["model"]["embed"] == values["model"]["head"]


def test_the_writers_metadata_is_there(saved: Checkpoint) -> None:
    assert saved.metadata["run"] == "7"
    assert saved.metadata["world_size"] == "1"


def test_a_closed_checkpoint_says_so_and_closes_twice(saved: Checkpoint) -> None:
    handle = saved["model.w"]
    saved.close()
    saved.close()
    assert handle.shape == (40,)
    with pytest.raises(CkptError, match="the checkpoint was closed"):
        handle[0]


def test_opening_and_closing_leaves_no_descriptor(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "c", state())
    collect_garbage()  # what other tests forgot
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        with ckpt.open(tmp_path / "c") as checkpoint:
            checkpoint["model.w"][3]
        ckpt.read(tmp_path / "c")
        with pytest.raises(NotACheckpointError):
            ckpt.open(tmp_path / "absent")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_reading_gives_the_nest_as_it_was_saved(tmp_path: Path) -> None:
    ckpt.save(tmp_path, state())
    found: Any = ckpt.read(tmp_path)
    assert same(found, state())
    assert found["model"]["embed"] is found["model"]["head"]


def same(a: Any, b: Any) -> bool:
    """Whether two nests have the same types, keys and values."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_a_selection_leaves_keys_out_and_keeps_places_in_lists(tmp_path: Path) -> None:
    ckpt.save(tmp_path, state())
    found: Any = ckpt.read(tmp_path, include=["model.*", "layers.1"], exclude="model.w")
    tied = state()["model"]["embed"]
    expected = {
        "model": {"embed": tied, "head": tied},
        "layers": [None, torch.zeros(3, dtype=torch.bool)],
    }
    assert same(found, expected)
    assert found["model"]["embed"] is found["model"]["head"]
    found = ckpt.read(tmp_path, include="model.head")  # the name that is not the stored one
    assert same(found, {"model": {"head": tied}})


def test_a_dtype_casts_floating_point_tensors_only(tmp_path: Path) -> None:
    ckpt.save(tmp_path, state())
    found: Any = ckpt.read(tmp_path, dtype=torch.float64)
    assert found["model"]["embed"].dtype == torch.float64
    assert found["model"]["embed"] is found["model"]["head"]
    assert found["layers"][0].dtype == torch.float64
    assert found["layers"][1].dtype == torch.bool
    assert found["model"]["w"].dtype == torch.int16
    assert torch.equal(found["layers"][0], torch.ones(2, dtype=torch.float64))
    with pytest.raises(ckpt.ArgumentError, match=r"cannot be cast to 'torch\.int8'; give dtype="):
        ckpt.read(tmp_path, dtype=torch.int8)


def test_a_number_beyond_the_range_of_the_dtype_is_an_error(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"w": torch.tensor([float("inf"), 1e5, 1]), "empty": torch.empty(0, 3)})
    with pytest.raises(
        UnsupportedError, match="w: its element 100000 is beyond the range of float16"
    ):
        ckpt.read(tmp_path, dtype=torch.float16)
    found: Any = ckpt.read(tmp_path, dtype=torch.bfloat16)
    assert found["w"].tolist() == [float("inf"), 99840, 1]


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="torch lacks the dtype")
def test_a_tensor_that_torch_casts_to_no_dtype_is_an_error(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"w": torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)})
    with pytest.raises(UnsupportedError, match=r"w: torch casts no torch\.float4_e2m1fn_x2; leave"):
        ckpt.read(tmp_path, dtype=torch.bfloat16)


@pytest.mark.parametrize("to", list(FORMATS))
def test_every_format_opens(tmp_path: Path, to: str) -> None:
    ckpt.save(tmp_path / "source", state())
    place = tmp_path / FORMATS[to]
    convert(tmp_path / "source", place, to=to, select="")
    with ckpt.open(place) as checkpoint:
        assert {"model.embed", "model.head", "model.w", "layers.0", "layers.1"} <= set(checkpoint)
        assert torch.equal(checkpoint["model.w"][5:30:7], state()["model"]["w"][5:30:7])
        assert torch.equal(checkpoint["model.head"][1, 1:], state()["model"]["head"][1, 1:])
        assert checkpoint["layers.0"].dtype == torch.bfloat16
        assert checkpoint["optimizer.step"][...] == 3
    found: Any = ckpt.read(place)
    if to in ("safetensors", "hf"):
        assert found["model.embed"] is found["model.head"]
    else:
        assert found["model"]["embed"] is found["model"]["head"]
        assert found["optimizer"]["lr"] == 0.5


def test_views_saved_by_torch_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    base = torch.arange(60.0).reshape(6, 10)
    views = {
        "turned": base.T,
        "part": base[1:4, 2:7],
        "expanded": base[0].expand(5, 10),
        "every_other": base[::2, ::3],
        "scalar": base[2, 2],
    }
    torch.save(views, tmp_path / "views.pt")
    with ckpt.open(tmp_path / "views.pt") as checkpoint:
        for name, view in views.items():
            assert torch.equal(checkpoint[name][...], view), name
            if view.ndim == 2:
                assert torch.equal(checkpoint[name][1:3, -1], view[1:3, -1]), name
    found: Any = ckpt.read(tmp_path / "views.pt")
    assert all(torch.equal(found[name], view) for name, view in views.items())


def test_a_file_of_safetensors_own_writer_opens(tmp_path: Path) -> None:
    save_file({"w": value((8, 8))}, tmp_path / "m.safetensors", metadata={"format": "pt"})
    with ckpt.open(tmp_path / "m.safetensors") as checkpoint:
        assert torch.equal(checkpoint["w"][3:5, ::2], value((8, 8))[3:5, ::2])
        assert checkpoint["w"].layout is None


def test_a_place_without_a_checkpoint_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(NotACheckpointError, match=r"no checkpoint here \(there are notes\.txt\)"):
        ckpt.open(tmp_path)
    with pytest.raises(NotACheckpointError, match="nothing is there"):
        ckpt.open(tmp_path / "absent")
    (tmp_path / "step-1").mkdir()
    with pytest.raises(NotACheckpointError, match=r"step-1/\)$"):
        ckpt.open(tmp_path)


def test_a_checkpoint_that_is_deleted_while_it_is_open_is_an_error_that_says_so() -> None:
    """On a disk what is open can be read though it is deleted."""
    url = "memory://deleted-while-open"
    ckpt.save(url, {"w": value((8, 8)), "v": value((8, 8))})
    with ckpt.open(url) as checkpoint:
        assert torch.equal(checkpoint["w"][3], value((8, 8))[3])
        ckpt.delete(url)
        with pytest.raises(ckpt.ReplacedError, match=r"deleted while it was read, and .*-00000\."):
            checkpoint["v"][...]
        assert torch.equal(checkpoint["w"][5], value((8, 8))[5])  # of a chunk that was kept


@pytest.mark.thorough
def test_rows_on_a_server_are_read_in_one_call_and_their_chunks_are_kept(
    moto: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy, "KEPT_BYTES", 1 << 20)
    w = value((4096, 256))  # 4 MiB: 64 rows a chunk
    with FaultProxy(moto) as proxy:
        url, options = proxy.server.url(tmp_path.name), proxy.server.options
        ckpt.save(url, {"w": w}, storage_options=options)
        with ckpt.open(url, storage_options=options) as checkpoint:
            handle = checkpoint["w"]
            assert torch.equal(handle[0], w[0])
            proxy.clear()
            for row in (*range(64), 0, -4096):
                assert torch.equal(handle[row], w[row])
            assert proxy.count() == 0
            rows = [130, 70, 4000, 3, 71, -96, 70]  # two of neighbouring chunks, one far away
            assert torch.equal(handle[rows], w[rows])
            assert torch.equal(handle[rows, 5:9], w[rows][:, 5:9])
            assert proxy.count() == 2
            # One flipped bit is not kept.
            proxy.clear()
            proxy.schedule = lambda one: Fault.FLIP_ANSWER if one.number == 0 else None
            with pytest.warns(ckpt.WireWarning):
                assert torch.equal(handle[2000], w[2000])
            assert torch.equal(handle[2001], w[2001])
            assert proxy.count() == 2
            for row in range(0, 4096, 64):  # within a bound
                handle[row]
            assert kept_bytes(checkpoint) <= 1 << 20


def kept_bytes(checkpoint: Checkpoint) -> int:
    return sum(map(len, checkpoint._reader._kept.values()))  # type: ignore[attr-defined]


def test_what_was_opened_by_a_relative_path_is_read_from_there_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    ckpt.save("base", {"w": value((8, 8)), "frozen": value((300, 300))})
    ckpt.save("step-1", {"w": value((8, 8)) + 1, "frozen": value((300, 300))}, base="base")
    with ckpt.open("step-1") as checkpoint:
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert torch.equal(checkpoint["w"][3], value((8, 8))[3] + 1)
        assert torch.equal(checkpoint["frozen"][...], value((300, 300)))
        assert checkpoint.url == "step-1"


def test_a_message_has_the_path_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ckpt.save("step-1", {"w": value((8, 8))})
    (shard,) = Path("step-1").glob("*.safetensors")
    os.truncate(shard, 100)
    with ckpt.open("step-1") as checkpoint, pytest.raises(CorruptError) as cut:
        checkpoint["w"][3]
    assert str(cut.value).startswith(f"step-1/{shard.name}: the file has 100 bytes")
    with pytest.raises(ckpt.ExistsError, match=r"^step-1"):
        ckpt.save("step-1", {"w": value((8, 8))})
    shard.unlink()
    with ckpt.open("step-1") as checkpoint:
        monkeypatch.chdir(tmp_path.parent)
        with pytest.raises(CorruptError, match=r"^step-1/"):
            checkpoint["w"][3]
