"""What an earlier checkpoint has is not stored again, and every way of reading finds it there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from ckpt.stores.store import open_store
from ckpt.transfer.bases import borrowers
from formats.native import shard
from formats.native.borrowed import BORROWED
from formats.native.manifest import MANIFEST, load
from formats.native.reader import read as read_catalog
from tests.selection import examples

seeded = settings(derandomize=True, deadline=None, max_examples=examples(25, 8))

CHUNK = 64
SIZES = {"w": (40, 9), "half": (301,), "n": (), "empty": (0, 3), "wide": (3, 200)}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks so small that little tensors have many."""
    monkeypatch.setattr(shard, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(shard, "COMPRESSED_CHUNK_BYTES", CHUNK)


def state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    dtypes = {"half": torch.bfloat16, "n": torch.int64}
    return {
        name: torch.randn(shape, generator=generator).to(dtypes.get(name, torch.float32))
        for name, shape in SIZES.items()
    }


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(a[name], b[name]) for name in SIZES)


def data_bytes(folder: Path) -> int:
    """Bytes of tensor data in a checkpoint's own files."""
    with open_store(folder) as store:
        manifest = load(store.read(MANIFEST, 0, store.size(MANIFEST)))
    return sum(f.size - f.header_bytes - f.table_bytes for f in manifest.files)


def bases(folder: Path) -> list[str]:
    """The folders that a checkpoint says it borrows from."""
    with open_store(folder) as store:
        manifest = load(store.read(MANIFEST, 0, store.size(MANIFEST)))
    return [base.folder for base in manifest.bases if base is not None]


@st.composite
def edits(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Elements to change between two saves."""
    names = st.sampled_from([name for name, shape in SIZES.items() if 0 not in shape])
    found = draw(st.lists(st.tuples(names, st.integers(0, 10**6)), max_size=6))
    return [(name, at % max(1, torch.Size(SIZES[name]).numel())) for name, at in found]


@pytest.mark.thorough
@seeded
@given(
    steps=st.lists(edits(), min_size=1, max_size=5),
    compress=st.sampled_from([False, True, "delta"]),
)
def test_every_checkpoint_of_a_chain_is_its_state_and_stores_the_chunks_that_changed(
    tmp_path_factory: pytest.TempPathFactory, steps: list[list[tuple[str, int]]], compress: Any
) -> None:
    run = tmp_path_factory.mktemp("run")
    states = [state()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "CHUNK_BYTES", CHUNK)
        patch.setattr(shard, "COMPRESSED_CHUNK_BYTES", CHUNK)
        ckpt.save(run / "0", states[0], compress=bool(compress))
        chunks: set[tuple[str, int]] = set()
        for number, step in enumerate(steps, 1):
            changed = {name: tensor.clone() for name, tensor in states[-1].items()}
            if compress != "delta":  # a delta is not lent: it is made anew, from the same root
                chunks = set()
            for name, at in step:
                changed[name].view(-1)[at] += 1000 * number
                chunks.add((name, at * changed[name].element_size() // CHUNK))
            states.append(changed)
            ckpt.save(run / str(number), changed, base=run / str(number - 1), compress=compress)
            assert data_bytes(run / str(number)) <= CHUNK * len(chunks)
    for number, saved in enumerate(states):
        folder = run / str(number)
        assert same(ckpt.read(folder), saved)
        assert same(ckpt.load(folder, state(1)), saved)
        assert ckpt.verify(folder).sound
        assert torch.equal(ckpt.open(folder)["w"][3:30, 2:5], saved["w"][3:30, 2:5])
        assert torch.equal(ckpt.open(folder)["wide"][1], saved["wide"][1])


def test_a_delta_is_smaller_than_what_it_stands_for(tmp_path: Path) -> None:
    before = {"w": torch.randn(1 << 20).bfloat16()}
    ckpt.save(tmp_path / "0", before, compress=True)
    after = {"w": before["w"] + 0.001 * before["w"]}
    ckpt.save(tmp_path / "whole", after, compress=True)
    ckpt.save(tmp_path / "1", after, compress="delta", base=tmp_path / "0")
    assert data_bytes(tmp_path / "1") < 0.5 * data_bytes(tmp_path / "whole")
    again = {"w": after["w"] + 0.001 * after["w"]}
    ckpt.save(tmp_path / "2", again, compress="delta", base=tmp_path / "1")
    ckpt.delete(tmp_path / "1")  # its deltas are from 0, and so are those of 2
    assert bases(tmp_path / "2") == ["0"]
    assert torch.equal(ckpt.read(tmp_path / "2")["w"], again["w"])  # type: ignore[index, call-overload]
    assert ckpt.verify(tmp_path / "2").sound


def test_where_nothing_is_alike_a_delta_is_no_larger_than_compression(tmp_path: Path) -> None:
    before, after = ({"w": torch.randn(1 << 20)} for _ in range(2))
    ckpt.save(tmp_path / "0", before, compress=True)
    ckpt.save(tmp_path / "whole", after, compress=True)
    ckpt.save(tmp_path / "1", after, compress="delta", base=tmp_path / "0")
    assert data_bytes(tmp_path / "1") <= data_bytes(tmp_path / "whole")


def test_a_chunk_that_became_zeros_is_not_taken_for_the_one_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its delta is what the base's chunk holds, and so is the frame of that chunk."""
    monkeypatch.setattr(shard, "COMPRESSED_CHUNK_BYTES", 4096)
    before = torch.randn(40, 2048, generator=torch.Generator().manual_seed(0)).bfloat16()
    after = before.clone()
    after[:, ::50] *= 2
    after[7:10] = 0
    ckpt.save(tmp_path / "1", {"w": before}, compress=True)
    ckpt.save(tmp_path / "2", {"w": after}, compress="delta", base=tmp_path / "1")
    assert torch.equal(ckpt.read(tmp_path / "2")["w"], after)


def test_a_delta_needs_a_base(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a base"):
        ckpt.save(tmp_path / "a", state(), compress="delta")


def test_every_flipped_bit_of_a_root_is_found(tmp_path: Path, small_chunks: None) -> None:
    zeros = {"w": torch.arange(64.0).repeat(8)}
    ckpt.save(tmp_path / "a", zeros, compress=True)
    ckpt.save(tmp_path / "b", {"w": zeros["w"] + 1}, compress="delta", base=tmp_path / "a")
    assert bases(tmp_path / "b") == ["a"]
    (path,) = (tmp_path / "a").glob("*.safetensors")
    data = path.read_bytes()
    with open_store(tmp_path / "a") as store:
        (file,) = load(store.read(MANIFEST, 0, store.size(MANIFEST))).files
    for at in range(file.header_bytes, file.size - file.table_bytes, 11):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        found = ckpt.verify(tmp_path / "b").problems
        assert [problem.file for problem in found] in ([f"../a/{path.name}"], [])
        if found:
            with pytest.raises(ckpt.CorruptError, match=path.name):
                ckpt.read(tmp_path / "b")


def test_a_file_that_borrows_is_still_a_safetensors_file(tmp_path: Path) -> None:
    from safetensors import safe_open

    ckpt.save(tmp_path / "a", state())
    ckpt.save(tmp_path / "b", {**state(), "n": torch.tensor(5)}, base=tmp_path / "a")
    (path,) = (tmp_path / "b").glob("*.safetensors")
    with safe_open(path, "pt") as file:
        assert BORROWED in list(file.keys())
        assert file.get_tensor("n") == 5  # what is all here is there for every reader


def test_what_borrows_nothing_is_written_as_if_there_were_no_base(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", {"other": torch.ones(3)})
    ckpt.save(tmp_path / "b", state(), base=tmp_path / "a")
    assert bases(tmp_path / "b") == []
    assert b'"version":1,' in (tmp_path / "b" / MANIFEST).read_bytes()
    ckpt.delete(tmp_path / "a")
    assert same(ckpt.read(tmp_path / "b"), state())


def test_a_base_in_the_middle_of_a_chain_is_not_needed(tmp_path: Path) -> None:
    for name, base in (("a", None), ("b", "a"), ("c", "b")):
        ckpt.save(tmp_path / name, state(), base=tmp_path / base if base else None)
    assert bases(tmp_path / "c") == ["a"]
    ckpt.delete(tmp_path / "b")
    assert same(ckpt.read(tmp_path / "c"), state())


@pytest.mark.parametrize("difference", ["dtype", "shape", "name", "compress"])
def test_nothing_is_borrowed_from_what_is_cut_or_typed_otherwise(
    tmp_path: Path, difference: str
) -> None:
    zeros = torch.zeros(64)
    before = {
        "dtype": {"w": zeros.int()},
        "shape": {"w": zeros.reshape(8, 8)},
        "name": {"v": zeros},
        "compress": {"w": zeros},
    }[difference]
    ckpt.save(tmp_path / "a", before, compress=difference == "compress")
    ckpt.save(tmp_path / "b", {"w": zeros}, base=tmp_path / "a")
    assert bases(tmp_path / "b") == []


def test_a_checkpoint_that_others_borrow_from_is_neither_deleted_nor_overwritten(
    tmp_path: Path,
) -> None:
    ckpt.save(tmp_path / "a", state())
    ckpt.save(tmp_path / "b", state(), base=tmp_path / "a")
    assert borrowers(str(tmp_path), "a", None) == ["b"]
    for attempt in (
        lambda: ckpt.delete(tmp_path / "a"),
        lambda: ckpt.save(tmp_path / "a", state(1), overwrite=True),
    ):
        with pytest.raises(ckpt.InUseError, match="b beside it"):
            attempt()
    assert same(ckpt.read(tmp_path / "a"), state())
    ckpt.delete(tmp_path / "b")
    ckpt.delete(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_manifest_is_taken_at_its_word_when_it_names_a_base(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", state())
    ckpt.save(tmp_path / "b", state(), base=tmp_path / "a")
    manifest = tmp_path / "b" / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b'"step', b'"stop') + b" ")
    with pytest.raises(ckpt.InUseError):
        ckpt.delete(tmp_path / "a")


def _save_in_the_background(run: str) -> None:
    ckpt.save(f"{run}/a", _frozen(1))
    handle = ckpt.save(f"{run}/b", _frozen(2), base=f"{run}/a", blocking=False)
    handle.wait(60)


def test_a_save_in_the_background_borrows_as_a_blocking_one(
    clusters: Callable, tmp_path: Path
) -> None:
    clusters(2).run(_save_in_the_background, str(tmp_path))
    assert data_bytes(tmp_path / "b") == 40
    found: Any = ckpt.read(tmp_path / "b")
    assert torch.equal(found["frozen"], torch.arange(4000.0).reshape(40, 100))
    assert torch.equal(found["tuned"], torch.full((10,), 2.0))


def _save_with_bases(run: str, bases: list[str | None]) -> str:
    ckpt.save(f"{run}/a", state())
    ckpt.save(f"{run}/b", state())
    base = bases[dist.get_rank()]
    try:
        ckpt.save(f"{run}/new", state(), base=None if base is None else f"{run}/{base}")
    except ckpt.StateError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("bases", [[None, "a"], ["a", None], ["a", "b"]], ids=str)
def test_ranks_with_other_bases_are_refused(
    clusters: Callable, tmp_path: Path, bases: list[str | None]
) -> None:
    said = clusters(2).run(_save_with_bases, str(tmp_path), bases)
    for base, error in zip(bases, said, strict=True):
        assert f"different arguments, this rank with replicas='sample', base={base!r}" in error
    assert not (tmp_path / "new").exists()


def test_convert_makes_a_checkpoint_whole(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", state())
    ckpt.save(tmp_path / "b", state(), base=tmp_path / "a")
    ckpt.convert(tmp_path / "b", tmp_path / "whole")
    ckpt.delete(tmp_path / "b")
    ckpt.delete(tmp_path / "a")
    assert same(ckpt.read(tmp_path / "whole"), state())


def test_a_base_elsewhere_is_refused(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "run" / "a", state())
    for url, base in ((tmp_path / "b", tmp_path / "run" / "a"), (tmp_path / "a", tmp_path / "a")):
        with pytest.raises(ValueError, match="beside"):
            ckpt.save(url, state(), base=base)


def test_a_base_that_is_no_checkpoint_of_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(ckpt.NotACheckpointError, match="cannot be the base"):
        ckpt.save(tmp_path / "b", state(), base=tmp_path / "a")
    assert not (tmp_path / "b" / MANIFEST).exists()


def test_a_base_may_be_named_by_a_link_beside_it(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", state())
    (tmp_path / "latest").symlink_to("a")
    ckpt.save(tmp_path / "b", state(), base=tmp_path / "latest")
    assert bases(tmp_path / "b") == ["a"]


def _borrowing(run: Path) -> tuple[Path, Path]:
    """A base's shard file, and the checkpoint that borrows all of it."""
    ckpt.save(run / "a", state())
    ckpt.save(run / "b", state(), base=run / "a")
    (path,) = (run / "a").glob("*.safetensors")
    return path, run / "b"


@pytest.mark.thorough
def test_every_flipped_bit_of_what_is_borrowed_is_found(tmp_path: Path, small_chunks: None) -> None:
    path, folder = _borrowing(tmp_path)
    data = path.read_bytes()
    with open_store(tmp_path / "a") as store:
        (file,) = load(store.read(MANIFEST, 0, store.size(MANIFEST))).files
    for at in range(file.header_bytes, file.size - file.table_bytes, 31):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        (problem,) = ckpt.verify(folder).problems
        assert problem.file == f"../a/{path.name}"
        assert problem.lo <= at < problem.hi
        with pytest.raises(ckpt.CorruptError, match=path.name):
            ckpt.load(folder, state())


@pytest.mark.parametrize("damage", ["gone", "short", "long"])
def test_a_base_that_lost_its_file_is_named_before_anything_is_touched(
    tmp_path: Path, damage: str
) -> None:
    path, folder = _borrowing(tmp_path)
    if damage == "gone":
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes(data[:-1] if damage == "short" else data + b"x")
    target = state(1)
    with pytest.raises(ckpt.CorruptError, match=f"borrows from a/{path.name}"):
        ckpt.load(folder, target)
    assert same(target, state(1))
    assert not ckpt.verify(folder).sound


def test_a_checkpoint_lists_what_it_borrows(tmp_path: Path) -> None:
    _borrowing(tmp_path)
    with open_store(tmp_path / "b") as store:
        files = [file.name for file in read_catalog(store).files]
    assert all("/" not in name for name in files)


def _frozen(rank_state: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    frozen = torch.arange(4000.0).reshape(40, 100)
    return {
        "frozen": distribute_tensor(frozen, mesh, [Shard(0)], src_data_rank=None),
        "same": torch.arange(200_000.0),
        "tuned": torch.full((10,), float(rank_state)),
    }


def _save_two(run: str) -> None:
    ckpt.save(f"{run}/a", _frozen(1))
    ckpt.save(f"{run}/b", _frozen(2), base=f"{run}/a")


def _save_on_more(run: str) -> None:
    ckpt.save(f"{run}/c", _frozen(3), base=f"{run}/b")


def _save_without_base(run: str) -> list[str]:
    try:
        ckpt.save(f"{run}/d", _frozen(3), base=f"{run}/nothing")
    except Exception as error:
        return [type(error).__name__]
    return []


def test_ranks_borrow_each_from_their_own_file_and_another_world_size_from_none(
    clusters: Callable, tmp_path: Path
) -> None:
    clusters(2).run(_save_two, str(tmp_path))
    assert data_bytes(tmp_path / "b") == 40
    clusters(3).run(_save_on_more, str(tmp_path))
    assert bases(tmp_path / "c") == []
    for name, number in (("a", 1), ("b", 2), ("c", 3)):
        found: Any = ckpt.read(tmp_path / name)
        assert torch.equal(found["frozen"], torch.arange(4000.0).reshape(40, 100))
        assert torch.equal(found["same"], torch.arange(200_000.0))
        assert torch.equal(found["tuned"], torch.full((10,), float(number)))


def test_a_base_that_is_not_there_is_an_error_on_every_rank(
    clusters: Callable, tmp_path: Path
) -> None:
    for kinds in clusters(2).run(_save_without_base, str(tmp_path)):
        assert kinds in (["NotACheckpointError"], ["RankError"])
    assert not (tmp_path / "d" / MANIFEST).exists()


def test_a_store_in_memory_has_folders_beside_one_another_too() -> None:
    run = "memory://test_borrowing"
    ckpt.save(f"{run}/a", state())
    ckpt.save(f"{run}/b", state(), base=f"{run}/a")
    assert same(ckpt.read(f"{run}/b"), state())
    with pytest.raises(ckpt.InUseError):
        ckpt.delete(f"{run}/a")
    ckpt.delete(f"{run}/b")
    ckpt.delete(f"{run}/a")
    with pytest.raises(ckpt.NotACheckpointError):
        ckpt.read(f"{run}/a")
