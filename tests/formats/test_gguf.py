"""GGUF, against a file of its library and the published layout; tests/peers has the library."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from formats.errors import CorruptError, FormatError, HostileError, UnsupportedError

DATA = Path(__file__).parents[1] / "data" / "gguf"


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def a_file(
    entries: list[tuple[str, tuple[int, ...], int, int]],
    values: bytes = b"",
    count: int = 0,
    data: bytes = bytes(64),
    head: bytes = b"GGUF\x03\0\0\0",
) -> bytes:
    """A file put together by hand: entries of name, shape, type and offset."""
    found = head + struct.pack("<QQ", len(entries), count) + values
    for name, shape, kind, offset in entries:
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        found += text(name) + sizes + struct.pack("<IQ", kind, offset)
    return found + bytes(-len(found) % 32) + data


def test_values_and_tensors_of_a_file_of_the_library_are_read() -> None:
    """tests/data/gguf/write.py, which wrote the file with the gguf package, has the values."""
    path = DATA / "small.gguf"
    with ckpt.open(path) as opened:
        found: Any = ckpt.read(path)
        values = found.pop("gguf")
        assert values["general.architecture"] == "llama"
        assert values["llama.block_count"] == 2
        assert values["llama.attention.layer_norm_rms_epsilon"] == float(np.float32(1e-5))
        assert values["tokenizer.ggml.tokens"] == ["<s>", "▁a", "é"]
        assert values["tokenizer.ggml.scores"] == [0.0, -1.0, -2.5]
        assert values["tokenizer.ggml.token_type"] == [3, 1, 1]
        assert values["tokenizer.ggml.add_bos_token"] is True
        assert values["test.int64"] == -3
        for name, dtype in (("f32", "float32"), ("f16", "float16"), ("i8", "int8")):
            expected = torch.arange(12).reshape(3, 4).to(getattr(torch, dtype))
            assert torch.equal(found[f"{name}.weight"], expected)
        assert torch.equal(found["bf16.weight"], torch.arange(12).reshape(3, 4).bfloat16())
        quantised = json.loads(opened.metadata["gguf.quantised"])
        assert quantised == {"q8.weight": ["Q8_0", [2, 64]], "q4.weight": ["Q4_0", [2, 64]]}
        assert opened["q8.weight"].shape == (2, 68)
        assert opened["q8.weight"].dtype == torch.uint8
    row = found["q8.weight"][0].numpy()
    scale = row[:2].view(np.float16)[0].astype(np.float32)
    assert np.allclose(row[2:34].view(np.int8) * scale, np.arange(32), atol=0.3)
    report = ckpt.verify(path)
    assert report.sound
    assert report.checked == "structure and sizes only: this format has no checksums"


def test_a_file_is_the_same_after_two_conversions(tmp_path: Path) -> None:
    for way in ("a", "a.gguf"):
        ckpt.convert(DATA / "small.gguf", tmp_path / way)
    ckpt.convert(tmp_path / "a", tmp_path / "b.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    assert ckpt.diff(DATA / "small.gguf", tmp_path / "b.gguf").equal
    with ckpt.open(DATA / "small.gguf") as one, ckpt.open(tmp_path / "b.gguf") as other:
        assert one.metadata == other.metadata


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"w": torch.ones(2, dtype=torch.uint8)}, "GGUF has no uint8, of w; cast it"),
        ({"w": torch.ones(2).to(torch.float8_e4m3fn)}, "GGUF has no float8_e4m3fn"),
        ({"w" * 64: torch.ones(2)}, "at most 63 bytes"),
        ({"w": torch.ones(1, 1, 1, 1, 1)}, "at most 4 dimensions"),
    ],
)
def test_what_gguf_lacks_is_refused_by_name(
    state: dict[str, torch.Tensor], says: str, tmp_path: Path
) -> None:
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(UnsupportedError, match=says):
        ckpt.convert(tmp_path / "a.pt", tmp_path / "a.gguf")
    assert not (tmp_path / "a.gguf").exists()


def test_text_that_is_not_utf_8_is_written_as_it_was(tmp_path: Path) -> None:
    """A token may be a part of a character, and so may the text that shows it."""
    tokens = (b"\xe4\xbd", b"\\xe4\\xbd", "é".encode())
    head = text("tokens") + struct.pack("<IIQ", 9, 8, len(tokens))
    values = head + b"".join(struct.pack("<Q", len(token)) + token for token in tokens)
    (tmp_path / "a.gguf").write_bytes(a_file([ONE], values, 1, data=bytes(32)))
    ckpt.convert(tmp_path / "a.gguf", tmp_path / "b.gguf")
    ckpt.convert(tmp_path / "a.gguf", tmp_path / "c")
    ckpt.convert(tmp_path / "c", tmp_path / "d.gguf")
    for name in ("b.gguf", "d.gguf"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "a.gguf").read_bytes()


def test_a_tensor_among_the_values_is_not_told_as_left_out(tmp_path: Path) -> None:
    torch.save({"gguf": {"w": torch.ones(2), "n": 1, "x": None}}, tmp_path / "a.pt")
    assert ckpt.convert(tmp_path / "a.pt", tmp_path / "a.gguf").left_out == ("gguf.x",)
    assert torch.equal(ckpt.read(tmp_path / "a.gguf")["gguf.w"], torch.ones(2))


def test_a_tensor_with_the_name_of_the_values_is_read_in_a_file_without_them(
    tmp_path: Path,
) -> None:
    torch.save({"gguf": torch.ones(2)}, tmp_path / "a.pt")
    ckpt.convert(tmp_path / "a.pt", tmp_path / "a.gguf")
    assert torch.equal(ckpt.read(tmp_path / "a.gguf")["gguf"], torch.ones(2))


def split_file(number: int, count: int, kind: int = 0) -> bytes:
    """A file of a split model: a tensor of its own, and the values of llama.cpp's splits."""
    values = text("split.no") + struct.pack("<IH", 2, number - 1)
    values += text("split.count") + struct.pack("<IH", 2, count)
    if number == 1:
        values += text("general.architecture") + struct.pack("<I", 8) + text("llama")
    shape, nbytes = ((2, 32), 68) if kind else ((2, 4), 32)
    entry = (f"t{number}", shape, kind, 0)
    return a_file([entry], values, 2 + (number == 1), bytes([number] * nbytes))


def test_the_files_of_a_split_model_are_one_checkpoint(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        data = split_file(number, 3, kind=8 * (number == 3))
        (tmp_path / f"m-0000{number}-of-00003.gguf").write_bytes(data)
    found = ckpt.read(tmp_path)
    assert set(found) == {"t1", "t2", "t3", "gguf"}
    assert found["gguf"] == {"general.architecture": "llama"}
    assert bytes(found["t2"].flatten().view(torch.uint8).numpy()) == bytes([2] * 32)
    assert ckpt.verify(tmp_path).sound
    ckpt.convert(tmp_path, tmp_path / "whole" / "m.gguf")  # the blocks of t3 keep their type
    with ckpt.open(tmp_path / "whole" / "m.gguf") as whole:
        assert "Q8_0" in whole.metadata["gguf.quantised"]
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(FormatError, match="of 00003 files only m-00001-of-00003"):
        ckpt.read(tmp_path)
    (tmp_path / "m-00002-of-00004.gguf").write_bytes(split_file(2, 4))
    with pytest.raises(FormatError, match="several models"):
        ckpt.read(tmp_path)


ONE = ("w", (2, 4), 0, 0)


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        (a_file([ONE])[:-40], CorruptError, "truncated"),
        (a_file([ONE])[:30], CorruptError, "truncated"),
        (a_file([ONE], data=bytes(65)), CorruptError, "33 bytes follow"),
        (a_file([ONE, ("v", (2, 4), 0, 16)]), HostileError, "share bytes"),
        (a_file([ONE, ONE]), FormatError, "two tensors are named 'w'"),
        (a_file([("w", (2, 4), 99, 0)]), UnsupportedError, "the type 99"),
        (a_file([("w", (2, 31), 8, 0)]), FormatError, "not whole blocks of 32"),
        (a_file([("w", (2**40, 2**40), 0, 0)]), HostileError, "absurdly many"),
        (a_file([("w", (1,) * 65, 0, 0)]), HostileError, "65 dimensions"),
        (a_file([ONE], head=b"GGUF\0\0\0\x03"), UnsupportedError, "big-endian"),
        (a_file([ONE], head=b"GGUF\1\0\0\0"), UnsupportedError, "of version 1"),
        (a_file([ONE], text("a") + b"\x63\0\0\0\0", 1), FormatError, "the type 99"),
        (
            a_file([("gguf", (2, 8), 0, 0)], text("a") + b"\7\0\0\0\1", 1),
            UnsupportedError,
            "named 'gguf'",
        ),
        (
            a_file([ONE], text("a") + struct.pack("<IIQ", 9, 4, 2**60), 1),
            CorruptError,
            "beyond the file",
        ),
        (
            a_file([ONE], text("general.alignment") + struct.pack("<II", 4, 3), 1),
            FormatError,
            "not a power of two",
        ),
    ],
)
def test_a_damaged_or_hostile_file_is_a_named_error(
    data: bytes, error: type[Exception], says: str, tmp_path: Path
) -> None:
    (tmp_path / "a.gguf").write_bytes(a_file([ONE], data=bytes(32)))
    assert ckpt.verify(tmp_path / "a.gguf").sound
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(error, match=says):
        ckpt.open(tmp_path / "a.gguf")


def test_a_file_of_version_2_is_read(tmp_path: Path) -> None:
    for version in (2, 3):
        head = b"GGUF" + struct.pack("<I", version)
        (tmp_path / f"{version}.gguf").write_bytes(a_file([ONE], head=head, data=bytes(range(32))))
    assert ckpt.diff(tmp_path / "2.gguf", tmp_path / "3.gguf").equal
    assert ckpt.read(tmp_path / "2.gguf")["w"].shape == (2, 4)


def test_types_that_a_file_has_are_not_left_out(tmp_path: Path) -> None:
    report = ckpt.convert(DATA / "small.gguf", tmp_path / "c.gguf")
    assert report.left_out == ()
    assert ckpt.diff(DATA / "small.gguf", tmp_path / "c.gguf").equal
