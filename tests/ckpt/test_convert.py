"""From every format to every format, on any terms, without harm to what is there."""

import random
from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import ckpt
from ckpt.converting.convert import ConvertReport, convert
from ckpt.converting.target_formats import Format, format_of
from ckpt.errors import ArgumentError, ExistsError, NotACheckpointError
from ckpt.stores.local_store import LocalStore
from formats.catalog import OutgoingTensor, TensorRef
from formats.dtypes import BY_NAME, DTYPES
from formats.errors import CorruptError, UnsupportedError
from formats.native.manifest import Manifest, StoredTensor, dump
from formats.native.shard_writer import write_shard
from sharding.layout import Layout, Mesh, Shard

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

PLACES = {"ckpt": "c", "safetensors": "c.safetensors", "hf": "hf", "torch": "c.pt", "dcp": "dcp"}
NESTED = ("ckpt", "torch", "dcp")
"""The formats that hold plain values and nests."""
SHAPES = ((3, 4), (), (0, 2), (1,), (5, 1, 2))


def filled(torch_name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor of random bits; booleans are 0 or 1."""
    dtype = getattr(torch, torch_name)
    data = random.Random(seed).randbytes(prod(shape) * dtype.itemsize)
    if dtype == torch.bool:
        data = bytes(byte & 1 for byte in data)
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
    return (raw.view(dtype) if data else torch.empty(0, dtype=dtype)).reshape(shape)


def every_dtype() -> dict[str, Any]:
    """A nest with each dtype in each shape, tied tensors and plain values."""
    tensors: dict[str, Any] = {
        dtype.torch_name: {
            "x".join(map(str, shape)) or "scalar": filled(dtype.torch_name, shape, seed)
            for seed, shape in enumerate(SHAPES)
        }
        for dtype in DTYPES
        if hasattr(torch, dtype.torch_name)  # torch 2.6 lacks two
    }
    tied = torch.arange(12.0).reshape(3, 4)
    return {
        "model": {**tensors, "a": tied, "b": tied},
        "list": [torch.ones(3), torch.zeros(2, dtype=torch.int64)],
        "step": 17,
        "config": {"lr": 1e-3, "betas": (0.9, 0.95), "name": "adam", "flag": True, "none": None},
    }


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    flat = tensor.contiguous().reshape(-1)
    raw = bytes(flat.view(torch.uint8).numpy()) if tensor.numel() else b""
    return tensor.dtype, tuple(tensor.shape), raw


def tensors_of(nest: Any, path: str = "") -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """The bits of every tensor of a nest, by key path."""
    if isinstance(nest, torch.Tensor):
        return {path: bits(nest)}
    items: Any = ()
    if isinstance(nest, dict):
        items = nest.items()
    elif isinstance(nest, list | tuple):
        items = enumerate(nest)
    found = {}
    for key, item in items:
        found.update(tensors_of(item, f"{path}.{key}" if path else str(key)))
    return found


def values_of(nest: Any) -> Any:
    """A nest with None in the place of every tensor."""
    if isinstance(nest, torch.Tensor):
        return None
    if isinstance(nest, dict):
        return {key: values_of(item) for key, item in nest.items()}
    if isinstance(nest, list | tuple):
        return type(nest)(map(values_of, nest))
    return nest


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The nest of all dtypes in each format; not to be changed."""
    root = tmp_path_factory.mktemp("sources")
    ckpt.save(root / PLACES["ckpt"], every_dtype())
    for to, name in PLACES.items():
        if to != "ckpt":
            convert(root / PLACES["ckpt"], root / name, to=to, select="", allow_loss=True)
    return {to: root / name for to, name in PLACES.items()}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A native checkpoint of a training run in small."""
    state = {
        "model": {"layers": [{"w": torch.arange(20.0).reshape(4, 5), "b": torch.ones(4)}] * 1},
        "optimizer": {"exp_avg": torch.full((4, 5), 0.25), "step": 3},
        "ids": torch.arange(7),
    }
    ckpt.save(tmp_path / "small", state)
    return tmp_path / "small"


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@pytest.mark.parametrize(("source", "target"), list(product(PLACES, PLACES)))
def test_every_format_becomes_every_format_to_the_bit(
    sources: dict[str, Path], tmp_path: Path, source: str, target: str
) -> None:
    place = tmp_path / PLACES[target]
    report = convert(sources[source], place, to=target, select="", allow_loss=True)
    others = ("complex128", "complex32", "float4_e2m1fn_x2.scalar")
    carried = {name for name in tensors_of(every_dtype()) if any(one in name for one in others)}
    seen = carried if target in ("safetensors", "hf") else set()
    assert {line.partition(" is ")[0] for line in report.lost} == seen
    found: Any = ckpt.read(place)
    expected = tensors_of(every_dtype())
    assert tensors_of(found) == expected
    assert (report.target_format, report.tensors) == (target, len(expected) - 1)  # two are tied
    tied = found["model"] if source in NESTED and target in NESTED else found
    names = ("a", "b") if tied is not found else ("model.a", "model.b")
    assert tied[names[0]] is tied[names[1]]
    if source in NESTED and target in NESTED:
        assert values_of(found) == values_of(every_dtype())
        assert report.left_out == ()
    if source in NESTED and target not in NESTED:
        assert {"step", "config.lr", "config.name"} <= set(report.left_out)


def test_the_report_says_what_was_written(small: Path, tmp_path: Path) -> None:
    target = tmp_path / "m.safetensors"
    report = convert(small, target)
    assert report == ConvertReport(
        src=str(small),
        dst=str(target),
        source_format="ckpt",
        target_format="safetensors",
        tensors=4,
        nbytes=(20 + 4 + 20) * 4 + 7 * 8,
        left_out=("optimizer.step",),
        prefix="model",
    )


@pytest.mark.parametrize("target", list(PLACES))
def test_a_top_entry_without_a_name_is_refused_before_anything_is_replaced(
    tmp_path: Path, target: str
) -> None:
    place = tmp_path / PLACES[target]
    torch.save({"w": torch.ones(2)}, tmp_path / "sound.pt")
    convert(tmp_path / "sound.pt", place, to=target)
    save_file({"": torch.zeros(2), "w": torch.zeros(2)}, tmp_path / "nameless.safetensors")
    torch.save({"": {"w": torch.zeros(2)}}, tmp_path / "nested.pt")
    for source in ("nameless.safetensors", "nested.pt"):
        with pytest.raises(UnsupportedError, match=rf"{source}: the name of a top entry is empty"):
            convert(tmp_path / source, place, to=target, overwrite=True)
    assert tensors_of(ckpt.read(place)) == tensors_of({"w": torch.ones(2)})
    convert(tmp_path / "nameless.safetensors", place, to=target, overwrite=True, exclude="")
    assert tensors_of(ckpt.read(place)) == tensors_of({"w": torch.zeros(2)})


def test_what_dcp_cannot_hold_is_reported(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "optim": {"state": {0: {"m": torch.ones(2)}, 1: {}}}}
    torch.save({**state, "empty": {}}, tmp_path / "a.pt")
    report = convert(tmp_path / "a.pt", tmp_path / "dcp", to="dcp")
    assert report.left_out == ("optim.state.1", "empty")
    assert report.became_text == ("optim.state",)
    again = convert(tmp_path / "dcp", tmp_path / "again", to="dcp")
    assert (again.left_out, again.became_text) == ((), ())


@pytest.mark.parametrize("chosen", [{"include": "modle.*"}, {"exclude": "*"}])
def test_patterns_that_choose_nothing_are_refused_and_nothing_is_written(
    small: Path, tmp_path: Path, chosen: dict[str, str]
) -> None:
    with pytest.raises(ValueError, match=r"'modle\.\*' matches no name|all 6 names are excluded"):
        convert(small, tmp_path / "c", **chosen)  # type: ignore[arg-type]
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("target", list(PLACES))
def test_metadata_of_a_file_is_kept_where_there_is_a_place_for_it(
    tmp_path: Path, target: str
) -> None:
    said = {"modelspec.title": "a model", "ss_network_dim": "4"}
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors", {"format": "pt", **said})
    report = convert(tmp_path / "a.safetensors", tmp_path / PLACES[target], to=target)
    if target in ("torch", "dcp"):
        assert report.left_out == ("metadata['modelspec.title']", "metadata['ss_network_dim']")
        return
    assert report.left_out == ()
    convert(tmp_path / PLACES[target], tmp_path / "b.safetensors")
    with safe_open(tmp_path / "b.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", **said}


def test_progress_adds_up_to_the_bytes_of_the_tensors(small: Path, tmp_path: Path) -> None:
    seen: list[int] = []
    report = convert(small, tmp_path / "m.pt", progress=seen.append)
    assert sum(seen) == report.nbytes


def test_a_key_path_selects_what_lies_below_it(small: Path, tmp_path: Path) -> None:
    convert(small, tmp_path / "m.safetensors", select="model")
    assert set(ckpt.open(tmp_path / "m.safetensors")) == {"layers.0.w", "layers.0.b"}
    convert(small, tmp_path / "m.pt", select="model.layers.0")
    assert set(ckpt.open(tmp_path / "m.pt")) == {"w", "b"}
    convert(small, tmp_path / "c", select="optimizer")
    found: Any = ckpt.read(tmp_path / "c")
    assert found["step"] == 3
    assert torch.equal(found["exp_avg"], torch.full((4, 5), 0.25))
    convert(small, tmp_path / "one", select="ids")
    assert tensors_of(ckpt.read(tmp_path / "one")) == {"tensor": bits(torch.arange(7))}


def test_a_key_path_that_is_not_there_is_an_error_that_lists_what_is(
    small: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        ArgumentError,
        match=r": select='modle' names no entry .*; its top entries are model, optimizer, ids",
    ):
        convert(small, tmp_path / "m.safetensors", select="modle")
    assert not (tmp_path / "m.safetensors").exists()


def test_include_and_exclude_go_by_the_names_that_are_left(small: Path, tmp_path: Path) -> None:
    convert(small, tmp_path / "a.safetensors", select="model", include="layers.*.w")
    assert set(ckpt.open(tmp_path / "a.safetensors")) == {"layers.0.w"}
    convert(small, tmp_path / "c", exclude=["optimizer*", "*.b"])
    assert set(ckpt.open(tmp_path / "c")) == {"model.layers.0.w", "ids"}
    assert "optimizer" not in ckpt.read(tmp_path / "c")  # type: ignore[operator]


@pytest.mark.parametrize("to", list(PLACES))
def test_floating_point_tensors_are_cast_when_asked(small: Path, tmp_path: Path, to: str) -> None:
    convert(small, tmp_path / PLACES[to], to=to, select="", dtype="bfloat16")
    with ckpt.open(tmp_path / PLACES[to]) as checkpoint:
        whole = torch.arange(20.0).reshape(4, 5)
        assert torch.equal(checkpoint["model.layers.0.w"][...], whole.to(torch.bfloat16))
        assert checkpoint["ids"].dtype == torch.int64


def test_a_cast_of_many_blocks_is_a_cast_of_the_whole(tmp_path: Path) -> None:
    whole = torch.randn(2049, 2053, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ckpt.save(tmp_path / "c", {"w": whole})
    convert(tmp_path / "c", tmp_path / "m.safetensors", dtype="float16")
    found: Any = ckpt.read(tmp_path / "m.safetensors")
    assert torch.equal(found["w"], whole.to(torch.float16))


@pytest.mark.parametrize("to", ["ckpt", "hf"])
def test_files_of_a_folder_are_cut_at_the_size_that_is_asked(tmp_path: Path, to: str) -> None:
    state = {f"t{i}": torch.full((1000,), float(i)) for i in range(10)} | {
        "large": torch.ones(5000)
    }
    ckpt.save(tmp_path / "c", state)
    convert(tmp_path / "c", tmp_path / "out", to=to, max_shard_bytes=10_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    sizes = sorted(file.stat().st_size for file in files)
    assert len(sizes) == 6
    assert all(size < 11_000 for size in sizes[:-1])
    assert 20_000 < sizes[-1] < 21_000  # one tensor is never cut
    assert tensors_of(ckpt.read(tmp_path / "out")) == tensors_of(state)


def test_a_native_copy_is_compressed_when_asked_and_committed(tmp_path: Path) -> None:
    state = {"w": torch.arange(300_000), "b": torch.ones(7)}
    torch.save(state, tmp_path / "m.pt")
    convert(tmp_path / "m.pt", tmp_path / "raw")
    convert(tmp_path / "m.pt", tmp_path / "zstd", compress=True)
    sizes = [
        sum(len(data) for data in snapshot(tmp_path / name).values()) for name in ("raw", "zstd")
    ]
    assert sizes[1] < sizes[0] / 2
    for name in ("raw", "zstd"):
        assert tensors_of(ckpt.read(tmp_path / name)) == tensors_of(state)
        assert ckpt.verify(tmp_path / name).sound


@pytest.mark.parametrize("target", list(PLACES))
def test_what_exists_is_refused_and_left_as_it_was(
    small: Path, tmp_path: Path, target: str
) -> None:
    place = tmp_path / "out" / PLACES[target]
    ckpt.save(tmp_path / "first", {"w": torch.zeros(3)})
    convert(tmp_path / "first", place, to=target)
    before = snapshot(tmp_path / "out")
    with pytest.raises(ExistsError, match="overwrite=True"):
        convert(small, place, to=target)
    assert snapshot(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("to", "options"),
    [("safetensors", {}), ("torch", {}), ("dcp", {}), ("ckpt", {"kind": "full"})],
)
def test_a_largest_size_of_files_is_refused_where_there_are_none(
    small: Path, tmp_path: Path, to: str, options: dict[str, str]
) -> None:
    with pytest.raises(ckpt.ArgumentError, match="leave out max_shard_bytes="):
        convert(small, tmp_path / "out", to=to, max_shard_bytes=1500, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", list(PLACES))
def test_overwriting_replaces_and_leaves_nothing_of_the_old(
    small: Path, tmp_path: Path, target: str
) -> None:
    place, fresh = tmp_path / "out" / PLACES[target], tmp_path / "fresh" / PLACES[target]
    ckpt.save(tmp_path / "first", {f"w{i}": torch.zeros(300) for i in range(5)})
    sizes = {"max_shard_bytes": 1500} if target in ("ckpt", "hf") else {}
    convert(tmp_path / "first", place, to=target, **sizes)
    convert(small, place, to=target, select="", overwrite=True)
    convert(small, fresh, to=target, select="")
    assert tensors_of(ckpt.read(place)) == tensors_of(ckpt.read(small))
    assert len(snapshot(tmp_path / "out")) == len(snapshot(tmp_path / "fresh"))


def damage(folder: Path) -> None:
    """Change a byte of the data of a native checkpoint, which has one shard."""
    (shard,) = folder.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    at = 8 + int.from_bytes(content[:8], "little") + 40
    content[at] ^= 1
    shard.write_bytes(content)


@pytest.mark.parametrize("target", list(PLACES))
@pytest.mark.parametrize("overwrite", [False, True], ids=["fresh", "overwrite"])
def test_a_corrupt_source_changes_nothing_at_the_target(
    small: Path, tmp_path: Path, target: str, overwrite: bool
) -> None:
    place = tmp_path / "out" / PLACES[target]
    if overwrite:
        ckpt.save(tmp_path / "first", {"w": torch.zeros(3)})
        convert(tmp_path / "first", place, to=target)
    before = snapshot(tmp_path)
    damage(small)
    changed = snapshot(small)
    with pytest.raises(CorruptError, match="bytes"):
        convert(small, place, to=target, select="", overwrite=overwrite)
    after = snapshot(tmp_path)
    assert {name for name in after if after[name] != before.get(name)} == {
        f"small/{name}" for name in changed if changed[name] != before[f"small/{name}"]
    }


def test_damage_beside_the_tensors_of_a_record_is_found_if_a_part_is_converted(
    tmp_path: Path,
) -> None:
    """One record has both tensors, and its checksum is of all of its bytes."""
    both = torch.arange(float(1 << 20))
    torch.save({"a": both[:32], "b": both[32:]}, tmp_path / "both.pt")
    data = bytearray((tmp_path / "both.pt").read_bytes())
    data[data.index(both[:32].numpy().tobytes()) + 16] ^= 1
    (tmp_path / "both.pt").write_bytes(data)
    with pytest.raises(CorruptError, match="CRC-32"):
        ckpt.convert(tmp_path / "both.pt", tmp_path / "hf", to="hf", include="a")
    assert not (tmp_path / "hf").exists()


def test_a_source_that_is_not_there_is_an_error_and_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpointError):
        convert(tmp_path / "absent", tmp_path / "deep" / "c.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_the_source_is_no_target(small: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    before = snapshot(tmp_path)
    for source, to in (
        (small, "ckpt"),
        (small, "hf"),
        (tmp_path / "m.pt", "torch"),
        (tmp_path / "m.pt", "safetensors"),
    ):
        same = source.parent / "." / "small" / ".." / source.name
        with pytest.raises(ExistsError, match="is the source itself"):
            convert(source, same, to=to, overwrite=True)
    with pytest.raises(ExistsError, match="is the source itself"):
        convert(small, f"file://{small}", to="hf", overwrite=True)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_a_folder_that_holds_the_source_is_not_overwritten(tmp_path: Path, to: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    torch.save({"w": torch.ones(2)}, run / "m.pt")
    ckpt.save(run / "step-1", {"w": torch.ones(2)})
    (run / "notes.txt").write_text("precious")
    before = snapshot(tmp_path)
    for source in (run / "m.pt", run / "step-1"):
        with pytest.raises(ExistsError, match="holds the source"):
            convert(source, run, to=to, overwrite=True)
    assert snapshot(tmp_path) == before


def test_a_file_of_the_source_is_not_overwritten(small: Path, tmp_path: Path) -> None:
    convert(small, tmp_path / "hf", to="hf", max_shard_bytes=100)
    before = snapshot(tmp_path)
    for file in sorted((tmp_path / "hf").glob("*.safetensors")):
        with pytest.raises(ExistsError, match="is a file of the source"):
            convert(tmp_path / "hf", file, overwrite=True)
    assert snapshot(tmp_path) == before


def test_a_target_inside_the_source_is_written_beside_what_is_there(small: Path) -> None:
    before = snapshot(small)
    convert(small, small / "export" / "m.safetensors")
    convert(small, small / "m.pt")
    after = snapshot(small)
    assert {name: after[name] for name in before} == before
    expected = tensors_of(ckpt.read(small))
    assert tensors_of(ckpt.read(small / "export" / "m.safetensors")) == expected
    assert tensors_of(ckpt.read(small / "m.pt")) == expected


@pytest.mark.parametrize(
    ("name", "to", "expected"),
    [
        ("m.safetensors", None, Format.SAFETENSORS),
        ("m.pt", None, Format.TORCH),
        ("m.pth", None, Format.TORCH),
        ("pytorch_model.bin", None, Format.TORCH),
        ("folder", None, Format.CKPT),
        ("m.pt", "safetensors", Format.SAFETENSORS),
        ("folder", "hf", Format.HUGGINGFACE),
    ],
)
def test_the_format_is_what_is_asked_or_what_the_name_says(
    name: str, to: str | None, expected: Format
) -> None:
    assert format_of(name, to) is expected


def test_an_unknown_format_is_an_error_that_lists_the_known(small: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="cannot write 'onnx'; known formats are ckpt, safetensors"
    ):
        convert(small, tmp_path / "m", to="onnx")


@pytest.mark.parametrize("target", list(PLACES))
def test_a_source_cut_along_its_columns_is_put_together(tmp_path: Path, target: str) -> None:
    whole = torch.arange(3 * 1001 * 7, dtype=torch.float32).reshape(3, 1001, 7)
    layout = Layout((3, 1001, 7), Mesh.grid(("tp",), (3,)), (Shard(1),))
    store = LocalStore(tmp_path / "c")
    files = []
    for rank, part in enumerate(whole.chunk(3, dim=1)):
        assert layout.local_shape(rank) == part.shape
        name = f"{1:016x}-{rank:05d}.safetensors"
        block = memoryview(part.contiguous().numpy()).cast("B")
        tensor = OutgoingTensor("w", tuple(part.shape), BY_NAME["F32"], stream(block))
        with store.create(name) as file:
            files.append(write_shard(file, [tensor]).to_file(name, rank))
    stored = StoredTensor(layout.shape, BY_NAME["F32"], layout)
    manifest = Manifest({"w": stored}, {}, {"w": TensorRef("w")}, files)
    store.commit("manifest.json", dump(manifest), replace=False)
    convert(tmp_path / "c", tmp_path / "out" / PLACES[target], to=target)
    found: Any = ckpt.read(tmp_path / "out" / PLACES[target])
    assert torch.equal(found["w"], whole)


def stream(block: memoryview) -> Callable[[], Iterator[memoryview]]:
    return lambda: iter([block])


@pytest.mark.parametrize("to", PLACES)
def test_names_as_long_as_a_save_allows_are_read_back_from_every_format(
    tmp_path: Path, to: str
) -> None:
    state = {"a" * 4096: torch.ones(2)}
    if to in NESTED:
        state |= {"b": [{"c" * (4096 - len("b.0.")): torch.zeros(3)}]}
    ckpt.save(tmp_path / "source", state)
    convert(tmp_path / "source", tmp_path / PLACES[to], to=to)
    torch.testing.assert_close(ckpt.read(tmp_path / PLACES[to]), state, rtol=0, atol=0)
    convert(tmp_path / PLACES[to], tmp_path / "back")
    torch.testing.assert_close(ckpt.read(tmp_path / "back"), state, rtol=0, atol=0)


def test_a_result_that_the_safetensors_library_does_not_read_is_an_error(tmp_path: Path) -> None:
    def damage(event: ckpt.events.Event) -> None:
        if event.stage == "writing":  # a key that ckpt ignores, nested deeper than the library goes
            nested = "[" * 150 + "]" * 150
            entry = f'{{"w": {{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":{nested}}}}}'
            header = entry.encode()
            path.write_bytes(len(header).to_bytes(8, "little") + header + b"\1")

    path = tmp_path / "w.safetensors"
    ckpt.save(tmp_path / "source", {"w": torch.ones(1, dtype=torch.uint8)})
    end = ckpt.events.subscribe(damage)
    with pytest.raises(CorruptError, match="the safetensors library refuses it"):
        convert(tmp_path / "source", path, verify=True)
    end()
