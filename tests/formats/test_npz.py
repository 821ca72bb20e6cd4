"""Arrays of numpy: .npz and .npy, against numpy in both directions."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpt
from formats.catalog import OpaqueValue
from formats.errors import CorruptError, FormatError, HostileError, UnsupportedError
from tests.selection import examples

DTYPES = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", "c8", "c16"]
arrays = st.builds(
    lambda dtype, shape, order: np.asarray(
        np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype), order=order
    ),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=4).map(tuple),
    st.sampled_from("CF"),
)
names = st.text("abc/.é", min_size=1, max_size=6).filter(lambda name: name.strip("./") == name)
several = st.dictionaries(names, arrays, min_size=1, max_size=4)


def same(found: Any, array: np.ndarray) -> bool:
    return bool(
        isinstance(found, torch.Tensor)
        and found.numpy().dtype == array.dtype
        and found.shape == array.shape
        and found.numpy().tobytes() == array.tobytes()
    )


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(several, st.booleans())
def test_arrays_that_numpy_writes_are_read(
    tmp_path: Path, values: dict[str, np.ndarray], compress: bool
) -> None:
    (np.savez_compressed if compress else np.savez)(tmp_path / "a.npz", **values)  # type: ignore[arg-type]
    found = ckpt.read(tmp_path / "a.npz")
    assert isinstance(found, dict)
    assert list(found) == list(values)
    assert all(same(found[name], array) for name, array in values.items())
    report = ckpt.verify(tmp_path / "a.npz")
    assert report.sound
    assert report.bytes_checked


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(several)
def test_numpy_reads_the_arrays_of_a_conversion(
    tmp_path: Path, values: dict[str, np.ndarray]
) -> None:
    torch.save({k: torch.from_numpy(a.copy()) for k, a in values.items()}, tmp_path / "a.pt")
    report = ckpt.convert(tmp_path / "a.pt", tmp_path / "a.npz", overwrite=True)
    assert report.target_format == "npz"
    with np.load(tmp_path / "a.npz") as found:
        assert sorted(found.files) == sorted(values)
        for name, array in values.items():
            assert found[name].dtype == array.dtype
            assert np.array_equal(found[name], array)
            np.save(saved := io.BytesIO(), array.copy())
            with zipfile.ZipFile(tmp_path / "a.npz") as archive:
                assert archive.read(f"{name}.npy") == saved.getvalue()
    assert ckpt.diff(tmp_path / "a.pt", tmp_path / "a.npz").equal


@given(arrays)
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_array_alone_is_read(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", array)
    assert same(ckpt.read(tmp_path / "a.npy"), array)
    assert "no checksums" in ckpt.verify(tmp_path / "a.npy").checked


def test_a_file_of_nothing_but_empty_tensors_is_written(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(0), "b": torch.zeros(2, 0)}, tmp_path / "a.pt")
    for target in ("b.npz", "b.pt", "b.gguf"):
        ckpt.convert(tmp_path / "a.pt", tmp_path / target)
        assert ckpt.diff(tmp_path / "a.pt", tmp_path / target).equal


def test_slices_are_read_lazily(tmp_path: Path) -> None:
    array = np.arange(1 << 18, dtype=np.int64).reshape(512, 512)
    np.savez(tmp_path / "a.npz", w=array)
    with ckpt.open(tmp_path / "a.npz", verify=False) as opened:
        assert np.array_equal(opened["w"][3:5, ::7].numpy(), array[3:5, ::7])


def test_arrays_of_two_bytes_are_those_of_jax_in_bfloat16(tmp_path: Path) -> None:
    """numpy has no name for the dtype of `ml_dtypes`, and calls its elements void."""
    wanted = torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3)
    array = wanted.view(torch.int16).numpy().view("V2")
    np.savez_compressed(tmp_path / "a.npz", w=array)
    np.save(tmp_path / "a.npy", array)
    for found in (ckpt.read(tmp_path / "a.npz")["w"], ckpt.read(tmp_path / "a.npy")):
        assert isinstance(found, torch.Tensor)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_npy_is_read(tmp_path: Path, version: tuple[int, int]) -> None:
    with (tmp_path / "a.npy").open("wb") as file:
        np.lib.format.write_array(file, np.arange(3.0), version=version)
    assert same(ckpt.read(tmp_path / "a.npy"), np.arange(3.0))


def test_arrays_that_are_no_tensors_are_shown(tmp_path: Path) -> None:
    values = {
        "objects": np.array([1, "a"], dtype=object),
        "text": np.array("llama"),
        "big": np.arange(3, dtype=">f4"),
        "structured": np.zeros(2, dtype=[("a", "f4"), ("b", "i4", (2,))]),
        "w": np.ones(2),
    }
    np.savez(tmp_path / "a.npz", **values)  # type: ignore[arg-type]
    found = ckpt.read(tmp_path / "a.npz")
    assert isinstance(found, dict)
    assert found["objects"] == OpaqueValue("numpy.ndarray of O")
    assert found["text"] == OpaqueValue("numpy.ndarray of <U5")
    assert found["big"] == OpaqueValue("numpy.ndarray of >f4")
    assert found["structured"] == OpaqueValue("numpy.ndarray of V")
    assert same(found["w"], np.ones(2))
    report = ckpt.convert(tmp_path / "a.npz", tmp_path / "a.safetensors")
    assert report.left_out == ("objects", "text", "big", "structured")
    np.save(tmp_path / "a.npy", values["text"])
    with pytest.raises(UnsupportedError, match=r"numpy\.ndarray of <U5"):
        ckpt.read(tmp_path / "a.npy")


def test_what_numpy_lacks_is_refused_or_named(tmp_path: Path) -> None:
    weight = torch.ones(2)
    state = {"w": weight, "tied": weight, "b": torch.ones(2).bfloat16(), "step": 3}
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(UnsupportedError, match=r"a.npz: numpy has no bfloat16, of 1 tensors \(b\)"):
        ckpt.convert(tmp_path / "a.pt", tmp_path / "a.npz")
    assert not (tmp_path / "a.npz").exists()
    report = ckpt.convert(tmp_path / "a.pt", tmp_path / "a.npz", dtype="float32")
    assert report.left_out == ("step",)
    with np.load(tmp_path / "a.npz") as found:
        assert set(found) == {"w", "tied", "b"}
        assert np.array_equal(found["tied"], found["w"])


@pytest.mark.parametrize(
    ("name", "to", "says"),
    [
        ("a\0b", "npz", r"a zip has no name 'a\\x00b'"),
        ("\ud800", "npz", r"'\\ud800' is not Unicode text"),
        ("\ud800", "gguf", r"'\\ud800' is not Unicode text"),
        ("\ud800", "safetensors", r"near '.*\\ud800"),
    ],
)
def test_a_name_that_a_format_cannot_hold_is_refused(
    name: str, to: Any, says: str, tmp_path: Path
) -> None:
    torch.save({"w": torch.ones(1), name: torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(FormatError, match=says):
        ckpt.convert(tmp_path / "a.pt", tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()


def test_a_large_compressed_array_is_refused_by_its_limit(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", w=np.zeros(1000))
    with (
        ckpt.limits(chunk_bytes=1000),
        pytest.raises(HostileError, match=r"the compressed w\.npy: chunk_bytes would be 8128"),
    ):
        ckpt.open(tmp_path / "a.npz")


HEADER = b"{'descr': '<f8', 'fortran_order': False, 'shape': (2,), }"


def npy(header: bytes, data: bytes = bytes(16)) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        (npy(HEADER)[:40], CorruptError, "its header ends at byte"),
        (npy(HEADER)[:-1], CorruptError, "was truncated"),
        (npy(HEADER) + b"x", CorruptError, "1 bytes follow"),
        (npy(HEADER.replace(b"(2,)", b"(9" + b"9" * 18 + b",)")), HostileError, "absurdly many"),
        (npy(HEADER.replace(b"(2,)", b"(" + b"1," * 70 + b")")), HostileError, "70 dimensions"),
        (npy(HEADER.replace(b"(2,)", b"(-2,)")), FormatError, "not one of numpy"),
        (npy(HEADER.replace(b"(2,)", b"(2 3,)")), FormatError, "not one of numpy"),
        (npy(b"__import__('os')"), FormatError, "not one of numpy"),
        (npy(HEADER).replace(b"NUMPY\x01", b"NUMPY\x09"), FormatError, "of version 1 to 3"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_damaged_or_hostile_file_is_a_named_error(
    data: bytes, error: type[Exception], says: str, zipped: bool, tmp_path: Path
) -> None:
    path = tmp_path / ("a.npz" if zipped else "a.npy")
    if zipped:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("w.npy", data)
    else:
        path.write_bytes(data)
    with pytest.raises(error, match=r"a\.np[zy]" if zipped else says) as caught:
        ckpt.open(path)
    assert isinstance(caught.value, FormatError)


def test_damage_is_found_by_the_checksum_of_a_member(tmp_path: Path) -> None:
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", w=np.arange(1000.0), v=np.ones(3))
        data = bytearray((tmp_path / "a.npz").read_bytes())
        data[len(data) // 3] ^= 4
        (tmp_path / "a.npz").write_bytes(data)
        (problem,) = ckpt.verify(tmp_path / "a.npz").problems
        assert problem.file == "a.npz"
        with pytest.raises(CorruptError, match="w"):
            ckpt.read(tmp_path / "a.npz")


def test_headers_of_other_libraries_are_read(tmp_path: Path) -> None:
    header = b"{'descr': '<f8', 'fortran_order': True, 'shape': (2,1)}  \n"
    (tmp_path / "a.npy").write_bytes(npy(header))
    assert np.load(io.BytesIO(npy(header))).shape == (2, 1)
    assert same(ckpt.read(tmp_path / "a.npy"), np.zeros((2, 1)))


def test_a_file_without_arrays_is_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz")
    assert ckpt.read(tmp_path / "a.npz") == {}
    assert ckpt.verify(tmp_path / "a.npz").sound
