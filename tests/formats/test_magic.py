"""Files of other kinds are named by their first bytes, with the remedy."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from torch import nn

import ckpt
from formats.detect import HEAD_BYTES, SAFETENSORS, kind_of
from formats.errors import CorruptError, ForeignFileError, HostileError
from sharding.errors import ArgumentError


def tar(magic: int = tarfile.PAX_FORMAT) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=magic) as archive:
        archive.addfile(tarfile.TarInfo("model_weights.ckpt"))
    return target.getvalue()


def zipped(*names: str) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    return target.getvalue()


def exported() -> bytes:
    target = io.BytesIO()
    program = torch.export.export(nn.Linear(2, 3), (torch.ones(1, 2),))
    torch.export.save(program, target)
    return target.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
# The first bytes by their published layouts: HDF5 3.0, ONNX's ModelProto, msgpack.
FILES: dict[str, tuple[bytes, str]] = {
    "model.h5": (b"\x89HDF\r\n\x1a\n" + bytes(100), "an HDF5 file"),
    "model.onnx": (b"\x08\x09\x12\x07pytorch\x1a\x052.1.0:\x04\x0a\x02ab", "an ONNX model"),
    "flax_model.msgpack": (b"\x82\xa6params\x80\xa4step\x03", "a msgpack file, as of flax"),
    "model.nemo": (tar(), "a tar archive"),
    "model.tar.gz": (gzip.compress(tar()), "compressed by gzip"),
    "model.pt.zst": (zstandard.compress(b"x"), "compressed by zstd"),
    "model.bz2": (bz2.compress(b"x"), "compressed by bzip2"),
    "model.xz": (lzma.compress(b"x"), "compressed by xz"),
    "lib.so": (b"\x7fELF\x02\x01\x01" + bytes(57), "a program or library"),
    "model.safetensors": (POINTER, "a Git LFS pointer"),
    "pytorch_model.bin": (b"\n<!DOCTYPE html><title>Sign in</title>", "an HTML page"),
    "index.json": (json.dumps({"weight_map": {}}).encode(), "a JSON file"),
    "model.pth": (b"404: Not Found", "a text file"),
    "model.pkl": (pickle.dumps({"a": 1}, 0), "a pickle of protocol 0 or 1"),
    "model.ckpt.index": (bytes(range(40)), "a part of a TensorFlow checkpoint"),
    "model.tflite": (b"\x1c\0\0\0TFL3" + bytes(40), "a TFLite model"),
    "Model.mlmodel": (b"\x08\x04\x12\x30\x0a\x05input", "a Core ML model"),
    "saved_model.pb": (b"\x08\x01\x12\x10abc", "a SavedModel of TensorFlow"),
    "openvino_model.bin": (b"PK\x03\x04" + bytes(40), "an OpenVINO model"),
    "model.xml": (b'<?xml version="1.0"?>\n<net name="m" version="11">', "an OpenVINO model"),
    "page.xml": (b'<?xml version="1.0"?>\n<html>', "an HTML page"),
    "model.pt2": (exported(), "a program of torch.export"),
    "model.keras": (zipped("metadata.json", "model.weights.h5"), "a .keras file"),
    "files.zip": (zipped("a.txt", "b.txt"), r"a zip of other files \(a.txt, b.txt\)"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_kind_is_named_with_the_remedy(name: str, tmp_path: Path) -> None:
    data, says = FILES[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ForeignFileError, match=rf"{name}: this is {says}.*; \w+"):
        ckpt.open(tmp_path / name)


@pytest.mark.thorough
def test_the_command_ends_with_7_for_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_bytes(FILES["model.h5"][0])
    for command in ("inspect", "verify", "ls"):
        done = subprocess.run(
            [sys.executable, "-m", "ckpt", command, str(tmp_path / "a.h5")],
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 7, done
        assert "this is an HDF5 file" in done.stderr


def test_an_empty_or_unknown_file_is_damage(tmp_path: Path) -> None:
    for name in ("a.pt", "a.safetensors"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(CorruptError):
            ckpt.open(tmp_path / name)
        assert not ckpt.verify(tmp_path / name).sound
    (tmp_path / "a.pt").write_bytes(bytes(100))
    with pytest.raises(ckpt.NotACheckpointError, match=r"a\.pt: its first bytes are of no known"):
        ckpt.open(tmp_path / "a.pt")


def test_content_decides_and_not_the_name(tmp_path: Path) -> None:
    w = torch.ones(2)
    torch.save({"w": w}, tmp_path / "torch.safetensors")
    np.savez(tmp_path / "numpy.npz", w=w.numpy())
    (tmp_path / "numpy.npz").rename(tmp_path / "numpy.pt")
    ckpt.convert(tmp_path / "numpy.pt", tmp_path / "a.gguf")
    (tmp_path / "a.gguf").rename(tmp_path / "gguf.bin")
    ckpt.convert(tmp_path / "numpy.pt", tmp_path / "a.safetensors")
    (tmp_path / "a.safetensors").rename(tmp_path / "safetensors.ckpt")
    for name in ("torch.safetensors", "numpy.pt", "gguf.bin", "safetensors.ckpt"):
        with ckpt.open(tmp_path / name) as opened:
            assert torch.equal(opened["w"][...], w), name


@pytest.mark.parametrize(
    "ending", ["h5", "onnx", "msgpack", "tar", "ckpt", "npy", "pkl", "pt2", "nemo", "index", "H5"]
)
def test_a_target_of_a_format_that_is_not_written_is_refused(ending: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    target = tmp_path / f"b.{ending}"
    with pytest.raises(ArgumentError, match=rf"b\.{ending} ends with .*to='ckpt'"):
        ckpt.convert(tmp_path / "a.pt", target)
    assert not target.exists()
    assert ckpt.convert(tmp_path / "a.pt", target, to="ckpt").target_format == "ckpt"


def test_no_first_bytes_are_an_error() -> None:
    for first in range(256):
        for data in (bytes([first]), bytes([first]) * 3, bytes([first]) + bytes(HEAD_BYTES)):
            kind_of(data)


def test_an_attack_is_told_from_another_kind(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(b"\x80\x02cposix\nsystem\nX\x01\x00\x00\x00x\x85R.")
    with pytest.raises(HostileError, match=r"posix\.system"):
        ckpt.open(tmp_path / "a.pkl")


@pytest.mark.parametrize("start", [b"\x80\x02", b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\x08\x12"])
def test_a_safetensors_file_is_one_whatever_the_length_of_its_header_is(start: bytes) -> None:
    length = start.ljust(8, b"\0")
    assert kind_of(length + b'{"w":{"dtype":"F32"') == SAFETENSORS
