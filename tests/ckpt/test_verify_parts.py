"""torch.save files and DCP folders: what is read whole is compared with its checksum. Where a part
is read, the caller is told, or `verify="all"` reads the rest."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from ckpt.transfer.record_sums import Verify

ROWS = 400
"""Of 256 bytes: `a` and `b` are too large for their rest to be read with a part."""


def state(value: float) -> dict[str, Any]:
    return {
        "a": torch.full((ROWS, 64), float(value)),
        "b": torch.full((ROWS, 64), float(value)),
        "small": torch.full((100,), float(value)),
        "step": int(value),
    }


def flip(path: Path, name: str, row: int, row_bytes: int = 256) -> None:
    """Change one bit of a tensor in a file of torch.save."""
    with ckpt.open(path) as checkpoint:
        (stored,) = checkpoint[name].record.pieces
    data = bytearray(path.read_bytes())
    data[stored.extent.offset + row * row_bytes] ^= 1
    path.write_bytes(data)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.save(state(3), tmp_path / "x.pt")
    return tmp_path / "x.pt"


def test_slices_say_once_that_they_cannot_be_verified(file: Path) -> None:
    with ckpt.open(file) as checkpoint:
        with pytest.warns(ckpt.UnverifiedWarning, match=r"x\.pt: parts of records .*\(a\)") as told:
            assert checkpoint["a"][1:3].unique().tolist() == [3]
        assert checkpoint["b"][1:3].unique().tolist() == [3]
    (warning,) = told
    assert warning.filename == __file__
    assert isinstance(warning.message, ckpt.UnverifiedWarning)
    assert (warning.message.url, warning.message.tensors) == (str(file), ("a",))


@pytest.mark.parametrize("verify", [True, "all"])
def test_a_slice_of_a_small_tensor_is_verified(file: Path, verify: Verify) -> None:
    flip(file, "small", 99, 4)
    with (
        ckpt.open(file, verify=verify) as checkpoint,
        pytest.raises(ckpt.CorruptError, match=r"x\.pt: small: bytes \d+:\d+ have the CRC-32"),
    ):
        checkpoint["small"][3]


def test_with_all_a_slice_meets_damage_elsewhere_in_its_record(file: Path) -> None:
    flip(file, "a", 300)
    with ckpt.open(file, verify="all") as checkpoint:
        assert checkpoint["b"][1:3].unique().tolist() == [3]
        with pytest.raises(ckpt.CorruptError, match=r"x\.pt: a: bytes \d+:\d+ have the CRC-32"):
            checkpoint["a"][1:3]
    with ckpt.open(file, verify=False) as checkpoint:
        assert checkpoint["a"][1:3].unique().tolist() == [3]
        assert checkpoint["a"][...].unique().numel() == 2


def test_a_view_of_a_larger_storage_is_told_of_and_verified_by_convert_and_diff(
    tmp_path: Path,
) -> None:
    path, same = tmp_path / "x.pt", tmp_path / "same.pt"
    for place in (path, same):
        torch.save({"view": torch.ones(ROWS, 64)[10:20]}, place)
    with pytest.warns(ckpt.UnverifiedWarning) as told:
        ckpt.read(path)
    assert told[0].filename == __file__
    ckpt.read(path, verify="all")
    flip(path, "view", 300)
    with pytest.raises(ckpt.CorruptError, match=r"x\.pt: view: bytes"):
        ckpt.convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ckpt.CorruptError, match=r"x\.pt: view: bytes"):
        ckpt.diff(same, path)
    with pytest.raises(ckpt.CorruptError, match=r"x\.pt: view: bytes"):
        ckpt.read(path, verify="all")


def test_records_that_torch_gave_no_checksum_are_read_without_one(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state(3), tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    with ckpt.open(tmp_path / "x.pt") as checkpoint:
        assert checkpoint["a"][1:3].unique().tolist() == [3]
    assert torch.equal(ckpt.read(tmp_path / "x.pt", verify="all")["a"], state(3)["a"])  # type: ignore[index]


@pytest.mark.parametrize("dtype", [None, "target"])
def test_a_load_alone_meets_every_flip_and_goes_back(
    file: Path, tmp_path: Path, dtype: str | None
) -> None:
    torch.save(state(2), tmp_path / "older.pt")
    flip(file, "b", ROWS - 1)
    target = state(0)
    if dtype is not None:
        target["b"] = target["b"].double()
    with pytest.raises(ckpt.DamagedLoadError, match=r"x\.pt: b: bytes \d+:\d+ have the CRC-32"):
        ckpt.load(file, target, dtype=dtype)
    with pytest.warns(ckpt.FallbackWarning):
        ckpt.load(file, target, dtype=dtype, fallback=tmp_path / "older.pt")
    assert {name: target[name].unique().tolist() for name in ("a", "b")} == {"a": [2], "b": [2]}
    ckpt.load(file, target, dtype=dtype, verify=False)
    assert target["b"].unique().numel() == 2


def test_a_verify_that_is_none_is_refused_by_all_that_take_one(file: Path) -> None:
    for call in (
        lambda: ckpt.load(file, state(0), verify="some"),  # type: ignore[arg-type]
        lambda: ckpt.read(file, verify="some"),  # type: ignore[arg-type]
        lambda: ckpt.open(file, verify="some"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match="verify is 'some'; give True, False or 'all'"):
            call()


Told = tuple[str, tuple[str, ...], list[tuple[str, ...]]]


def sharded(value: float) -> dict[str, Any]:
    """`a` cut over the ranks, the rest the same on all."""
    whole = state(value)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {**whole, "a": distribute_tensor(whole["a"], mesh, [Shard(0)], src_data_rank=None)}


def load_on_ranks(path: str, verify: Verify, fallback: Any = False, replicas: str = "read") -> Told:
    """The kind of the error, whose tensors were loaded, and of what each warning told."""
    target, error = sharded(0), ""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            ckpt.load(path, target, verify=verify, fallback=fallback, replicas=replicas)
        except Exception as raised:
            error = type(raised).__name__
    local = {"a": target["a"].to_local(), "b": target["b"]}
    loaded = {f"{name}={value}" for name, t in local.items() for value in t.unique().tolist()}
    told = [one.message for one in warned if isinstance(one.message, ckpt.UnverifiedWarning)]
    assert all(one.filename == __file__ for one in warned)
    return error, tuple(sorted(loaded)), [one.tensors for one in told]


def load_on_the_second(path: str) -> list[tuple[str, ...]]:
    """Rank 1 has a part of `a`; of what each warning tells."""
    whole = state(0)
    if dist.get_rank() == 1:
        mesh = init_device_mesh("cpu", (2,))
        whole["a"] = distribute_tensor(whole["a"], mesh, [Shard(0)], src_data_rank=None)
    else:
        init_device_mesh("cpu", (2,))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ckpt.load(path, whole)
    return [
        one.message.tensors for one in warned if isinstance(one.message, ckpt.UnverifiedWarning)
    ]


def test_ranks_that_read_a_part_say_so_once_or_read_the_rest(
    clusters: Callable[..., Any], file: Path, tmp_path: Path
) -> None:
    two, sound = clusters(2), ("a=3.0", "b=3.0")
    assert two.run(load_on_ranks, str(file), True) == [("", sound, [("a",)]), ("", sound, [])]
    assert two.run(load_on_ranks, str(file), "all") == [("", sound, []), ("", sound, [])]
    assert two.run(load_on_the_second, str(file)) == [[()], []], "rank 0 tells of other ranks' too"
    torch.save(state(2), tmp_path / "older.pt")
    flip(file, "a", ROWS - 1)  # in the part of rank 1
    assert two.run(load_on_ranks, str(file), False)[0] == ("", sound, [])
    back = ("", ("a=2.0", "b=2.0"), [])
    assert two.run(load_on_ranks, str(file), "all", str(tmp_path / "older.pt")) == [back, back]


def test_what_one_rank_reads_whole_for_all_is_verified(
    clusters: Callable[..., Any], file: Path
) -> None:
    flip(file, "b", 5)
    found = clusters(2).run(load_on_ranks, str(file), True, False, "exchange")
    assert sorted(error for error, _, _ in found) == ["DamagedLoadError", "RankError"]
