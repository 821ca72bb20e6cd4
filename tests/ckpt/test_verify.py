import json
import random
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt
from ckpt.checking import verify as verifying
from ckpt.checking.verify import library_difference, verify
from ckpt.converting.convert import convert
from ckpt.errors import NotACheckpointError
from ckpt.saving.save import save
from ckpt.stores.local_store import LocalStore
from formats.catalog import OutgoingTensor, TensorRef
from formats.dtypes import BY_NAME
from formats.errors import UnsupportedError
from formats.native.manifest import Manifest, StoredTensor, dump, load
from formats.native.shard_writer import write_shard
from formats.safetensors.file import parse
from sharding.layout import Layout, Mesh, Shard

WORLD = 3
ROWS = 9


def write_native(folder: Path, rows: int = ROWS, compress: bool = False) -> Path:
    """A checkpoint of three ranks: `w` and `v`, F32 of shape (rows, 40,000), cut by rows."""
    layout = Layout((rows, 40_000), Mesh.grid(("dp",), (WORLD,)), (Shard(0),))
    store = LocalStore(folder)
    files = []
    for rank in range(WORLD):
        parts = []
        for seed, name in enumerate(("w", "v")):
            shape = layout.local_shape(rank)
            random_bytes = random.Random(rank * 2 + seed).randbytes(shape[0] * 40_000)
            data = memoryview(bytes(b for byte in random_bytes for b in (byte, 0, 0, 63)))
            blocks = iter([data])
            parts.append(OutgoingTensor(name, shape, BY_NAME["F32"], lambda blocks=blocks: blocks))
        name = f"{7:016x}-{rank:05d}.safetensors"
        with store.create(name, rewritable=compress) as file:
            files.append(write_shard(file, parts, compress).to_file(name, rank))
    stored = StoredTensor(layout.shape, BY_NAME["F32"], layout)
    tree = {"w": TensorRef("w"), "v": TensorRef("v"), "step": 5}
    store.commit(
        "manifest.json", dump(Manifest({"w": stored, "v": stored}, {}, tree, files)), False
    )
    return folder


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """One sound checkpoint as it is and one compressed; not to be changed."""
    root = tmp_path_factory.mktemp("originals")
    return {c: write_native(root / str(c), compress=c) for c in (False, True)}


@pytest.fixture
def native(originals: dict[bool, Path], tmp_path: Path) -> Path:
    """A copy of the one that is not compressed."""
    return copied(originals[False], tmp_path / "c")


def copied(folder: Path, target: Path) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def flip(file: Path, at: int, bit: int = 0) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1 << bit]))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def header_bytes(shard: Path) -> int:
    return 8 + int.from_bytes(shard.read_bytes()[:8], "little")


@pytest.mark.parametrize("compress", [False, True])
def test_a_sound_checkpoint_is_compared_to_the_last_byte(originals, compress):
    folder = originals[compress]
    report = verify(folder)
    assert report.sound
    assert report.format == "ckpt"
    assert report.files == WORLD + 1
    assert report.bytes_checked == sum(file.stat().st_size for file in folder.iterdir())
    assert report.notes == ()


@pytest.mark.thorough
@pytest.mark.parametrize("compress", [False, True])
def test_any_flipped_bit_is_found_with_file_and_tensor(originals, tmp_path, compress):
    folder = copied(originals[compress], tmp_path / "c")
    files = sorted(folder.iterdir())
    sizes = [file.stat().st_size for file in files]
    chance = random.Random(compress)
    for trial in range(150):
        # Every other one in a manifest, header or table, which are small.
        file = files[trial % len(files)] if trial % 2 else chance.choices(files, sizes)[0]
        size = file.stat().st_size
        at = chance.randrange(min(size, 1000)) if trial % 4 == 1 else chance.randrange(size)
        bit = chance.randrange(8)
        flip(file, at, bit)
        report = verify(folder)
        (problem,) = report.problems
        assert problem.file == file.name
        assert file.name in problem.message
        if problem.lo is not None:
            assert problem.lo <= at < problem.hi
            assert problem.tensor in ("w", "v")
            assert f": {problem.tensor}: bytes {problem.lo}:{problem.hi} " in problem.message
        elif file.name != "manifest.json":
            assert "it holds parts of w, v" in problem.message
        flip(file, at, bit)
    assert verify(folder).sound


def test_every_damaged_chunk_of_every_file_is_reported(native):
    expected = []
    for shard in shards(native):
        start = header_bytes(shard)
        for at in (start, start + 300_000, start + 600_000):
            flip(shard, at)
            expected.append((shard.name, at))
    found = verify(native).problems
    assert [problem.file for problem in found] == [name for name, _ in expected]
    for problem, (_, at) in zip(found, expected, strict=True):
        assert problem.lo <= at < problem.hi


def test_a_missing_file_does_not_keep_the_others_from_being_checked(native):
    first, second, third = shards(native)
    first.unlink()
    flip(third, header_bytes(third))
    report = verify(native)
    assert [problem.file for problem in report.problems] == [first.name, third.name]
    assert "missing" in report.problems[0].message
    assert "it holds parts of w, v" in report.problems[0].message
    assert report.bytes_checked > second.stat().st_size


@pytest.mark.parametrize("change", [-1, +1])
def test_a_file_of_another_size_is_reported(native, change):
    shard = shards(native)[1]
    data = shard.read_bytes()
    shard.write_bytes(data[:change] if change < 0 else data + b"x")
    (problem,) = verify(native).problems
    assert problem.file == shard.name
    assert ("truncated" if change < 0 else "appended to") in problem.message


def test_a_manifest_that_speaks_of_what_no_file_has_is_reported(native):
    path = native / "manifest.json"
    manifest = load(path.read_bytes())
    layout = Layout((6,), Mesh.grid(("dp",), (WORLD,)), (Shard(0),))
    lost = StoredTensor((6,), BY_NAME["F32"], layout)
    tree = {**manifest.tree, "lost": TensorRef("lost")}
    tensors = {**manifest.tensors, "lost": lost}
    files = [*manifest.files[:2], manifest.files[2]._replace(rank=7)]
    path.write_bytes(dump(Manifest(tensors, {}, tree, files)))
    problems = verify(native).problems
    assert [(problem.tensor, problem.file) for problem in problems] == [
        ("w", "manifest.json"),  # no file of rank 2 is listed
        ("v", "manifest.json"),
        ("lost", shards(native)[0].name),
        ("lost", shards(native)[1].name),
        ("lost", "manifest.json"),
    ]


def test_chunks_may_be_larger_than_a_read(native, monkeypatch):
    monkeypatch.setattr(verifying, "BLOCK_BYTES", 1000)
    assert verify(native).sound
    flip(shards(native)[0], header_bytes(shards(native)[0]) + 5000)
    assert len(verify(native).problems) == 1


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    save(tmp_path / "c", {"w": torch.zeros(24 << 20), "v": torch.zeros(8 << 20)})
    verify(tmp_path / "c")  # what is imported stays
    tracemalloc.start()
    try:
        assert verify(tmp_path / "c").sound
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()


def test_progress_counts_every_byte_of_the_shards(native):
    counted = []
    assert verify(native, counted.append).sound
    assert sum(counted) == sum(shard.stat().st_size for shard in shards(native))


def test_files_of_no_checkpoint_are_notes_and_no_damage(native):
    stray = f"{8:016x}-00000.safetensors"
    (native / stray).write_bytes(b"of an attempt that failed")
    report = verify(native)
    assert report.sound
    assert report.notes == (f"{stray} is in the folder and not a part of the checkpoint",)


@pytest.mark.parametrize("state", [{}, {"step": 1}, {"empty": torch.zeros(0, 4)}])
def test_a_checkpoint_without_bytes_is_sound(tmp_path, state):
    save(tmp_path / "c", state)
    assert verify(tmp_path / "c").sound


def test_where_there_is_no_checkpoint_there_is_nothing_to_report(native):
    (native / "manifest.json").unlink()
    with pytest.raises(NotACheckpointError, match="unfinished save"):
        verify(native)


def test_a_later_version_cannot_be_called_damaged(native):
    import xxhash

    path = native / "manifest.json"
    body = b"{" + path.read_bytes()[45:].replace(b'"version":1', b'"version":9')
    path.write_bytes(b'{"digest":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'",' + body[1:])
    with pytest.raises(UnsupportedError, match="version 9"):
        verify(native)


def test_a_torch_file_is_checked_record_by_record(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(1000), "b": torch.full((1000,), 2.0), "step": 3}, path)
    assert verify(path).sound
    data = path.read_bytes()
    value = torch.full((1,), 2.0).numpy().tobytes()
    at = data.index(value * 1000) + 17
    flip(path, at)
    (problem,) = verify(path).problems
    assert (problem.file, problem.tensor) == ("x.pt", "b")
    assert problem.lo <= at < problem.hi


def test_a_truncated_torch_file_is_a_problem(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:-50])
    report = verify(path)
    assert [problem.file for problem in report.problems] == ["x.pt"]
    assert report.format == "torch"


def test_records_without_a_checksum_are_told(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(1000)}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    report = verify(tmp_path / "x.pt")
    assert report.sound
    assert "records were written without a checksum" in report.notes[0]


def test_the_items_of_a_dcp_folder_are_checked(native, tmp_path):
    convert(native, tmp_path / "dcp", to="dcp")
    report = verify(tmp_path / "dcp")
    assert report.sound
    assert report.format == "dcp"
    assert report.bytes_checked > 2 * ROWS * 40_000 * 4
    (file,) = [f for f in (tmp_path / "dcp").iterdir() if f.suffix == ".distcp"]
    at = file.stat().st_size // 3
    flip(file, at)
    (problem,) = verify(tmp_path / "dcp").problems
    assert problem.tensor in ("w", "v")
    assert problem.lo <= at < problem.hi


def test_a_dcp_folder_without_one_of_its_files_is_a_problem(native, tmp_path):
    convert(native, tmp_path / "dcp", to="dcp")
    (file,) = [f for f in (tmp_path / "dcp").iterdir() if f.suffix == ".distcp"]
    file.unlink()
    report = verify(tmp_path / "dcp")
    assert not report.sound
    assert file.name in report.problems[0].message


def test_of_a_safetensors_file_structure_and_size_are_checked(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.ones(100)}, path)
    report = verify(path)
    assert report.sound
    assert report.bytes_checked == 0
    assert "no checksums" in report.checked
    path.write_bytes(path.read_bytes()[:-1])
    (problem,) = verify(path).problems
    assert problem.file == "w.safetensors"
    assert "truncated within w" in problem.message


def written(path: Path, x: str = "1", name: str = "w", **changed: object) -> Path:
    """A safetensors file of one byte, whose entry also has the key `x` with this JSON."""
    entry = json.dumps({"dtype": "U8", "shape": [1], "data_offsets": [0, 1], **changed})
    header = f'{{"{name}": {entry[:-1]}, "x": {x}}}}}'.encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"1")
    return path


def test_a_file_that_the_safetensors_library_refuses_is_a_problem(tmp_path):
    for name in ("w.safetensors", "model-00001-of-00001.safetensors"):
        path = written(tmp_path / name, "[" * 150 + "]" * 150)
        assert ckpt.read(path)["w"].tolist() == [49]
        (problem,) = verify(path if name.startswith("w") else tmp_path).problems
        assert "the safetensors library refuses it" in problem.message
        assert problem.file == name
        path.unlink()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"name": "v"}, "sees other tensors: v, w"),
        ({"dtype": "I8"}, "sees other tensors: w"),
        ({"shape": [1, 1]}, "sees other tensors: w"),
        ({}, ""),
    ],
)
def test_a_file_that_the_safetensors_library_sees_otherwise_is_a_problem(tmp_path, other, said):
    header = parse(written(tmp_path / "w.safetensors").read_bytes(), "w.safetensors")
    assert library_difference(header, str(written(tmp_path / "o.safetensors", **other))) == said


def test_every_damaged_file_of_a_hugging_face_folder_is_reported(native, tmp_path):
    convert(native, tmp_path / "hf", to="hf", max_shard_bytes=1_000_000)
    files = shards(tmp_path / "hf")
    assert len(files) == 2
    for file in files:
        file.write_bytes(file.read_bytes()[:-1])
    report = verify(tmp_path / "hf")
    assert [problem.file for problem in report.problems] == [file.name for file in files]


def test_a_hugging_face_folder_that_lacks_a_file_is_a_problem(native, tmp_path):
    convert(native, tmp_path / "hf", to="hf", max_shard_bytes=1_000_000)
    gone = shards(tmp_path / "hf")[1]
    gone.unlink()
    (problem,) = verify(tmp_path / "hf").problems
    assert gone.name in problem.message


def test_the_companions_of_a_hugging_face_folder_are_named_as_not_checked(native, tmp_path):
    convert(native, tmp_path / "hf", to="hf")
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "hf" / "runs").mkdir()
    assert verify(tmp_path / "hf").notes == ("not checked: config.json, runs/",)


def test_a_url_is_checked_like_a_folder(native):
    import fsspec

    memory = fsspec.filesystem("memory")
    try:
        for file in native.iterdir():
            memory.pipe_file(f"/verify/c/{file.name}", file.read_bytes())
        report = verify("memory://verify/c")
        assert report.sound
        assert report.files == WORLD + 1
    finally:
        memory.rm("/verify", recursive=True)
