"""What fuzzing and looking found, each by itself, so that it stays found."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from formats.errors import FormatError, HostileError
from formats.limits import decode_object, limits
from formats.native.borrowed import BORROWED, RUN
from formats.native.manifest import MANIFEST
from formats.pickles.machine import load
from formats.pickles.records import StoredTensor
from tests.fuzz.folders import Folder, exercise
from tests.fuzz.mutations import put_together, signed, taken_apart
from tests.fuzz.seeds import seeds
from tools.main import main


def refuses(loads: Callable[[bytes], object], data: bytes) -> bool:
    """True where one of Python's two unpicklers takes the data for damaged."""
    try:
        loads(data)
    except (pickle.UnpicklingError, LookupError, EOFError):
        return True
    return False


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x04\x95" + (5).to_bytes(8, "little") + b"N.", "does not end where"),
        (b"\x80\x04\x95" + (2).to_bytes(8, "little") + b"M\x01\x00.", "goes on|last frame"),
        (b"\x80\x04" + b"\x95" + (10).to_bytes(8, "little") + b"\x95" + bytes(8) + b"N.", "frame"),
        (b"\x80\x02K\x01(K\x020s.", "is not valid|put into"),
        (b"\x80\x02]K\x01(\x85a.", "tuple of 1"),
        (b"\x80\x02](a.", "is not valid"),
    ],
)
def test_what_python_refuses_in_a_pickle_is_refused(data: bytes, message: str) -> None:
    assert any(map(refuses, (pickle.loads, pickle._loads), [data] * 2))  # type: ignore[attr-defined]
    with pytest.raises(FormatError, match=message):
        load(data, "f")


def test_dropping_what_lies_under_a_mark_drops_the_mark() -> None:
    data = b"\x80\x02]K\x01(0a."
    assert load(data, "f") == pickle.loads(data) == [1]


@pytest.mark.parametrize("number", ["-0", "[-0]", '{"b":[1,-0 ]}'])
def test_a_minus_before_zero_is_refused(number: str) -> None:
    with pytest.raises(FormatError, match="-0 is not an integer"):
        decode_object(f'{{"a":{number},"model-00001":-1}}', "f")
    assert decode_object('{"a":"-0","model-0":[-0.5]}', "f")["a"] == "-0"


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((0, 10**30), (1, 1)), ((1,), (2**62,)), ((1,) * 65, (1,) * 65), ((2**40, 2**40), (0, 0))],
)
def test_no_shape_or_stride_is_larger_than_memory_can_have(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    from formats.dtypes import BY_NAME
    from formats.pickles.records import Storage, view

    storage = Storage("0", BY_NAME["F32"], 100)
    assert isinstance(view(storage, storage.dtype, 0, (1,), (5,)), StoredTensor)
    with pytest.raises(FormatError):
        view(storage, storage.dtype, 0, shape, strides)


def test_a_borrowed_run_lies_inside_the_file_it_is_borrowed_from() -> None:
    for seed in seeds():
        manifest: Any = json.loads(seed.files.get(MANIFEST, b"{}"))
        if not manifest.get("bases"):
            continue
        entry = manifest["files"][0]
        header, data = taken_apart(seed.files[entry[0]])
        if BORROWED not in header:
            continue
        lo, hi = header[BORROWED]["data_offsets"]
        for offset in (2**62, 2**64 - 8):
            runs = b"".join(
                RUN.pack(first, count, base, rank, offset)
                for first, count, base, rank, _ in RUN.iter_unpack(data[lo:hi])
            )
            shard = put_together(header, data[:lo] + runs + data[hi:])
            assert exercise(_with(seed.files, manifest, shard)) is None
        return
    raise AssertionError("no seed borrows")


def _with(files: dict[str, bytes], manifest: Any, shard: bytes) -> dict[str, bytes]:
    """The files with another first shard, its digest right."""
    import xxhash

    content = {key: value for key, value in manifest.items() if key != "digest"}
    entry = list(content["files"][0])
    header_bytes = 8 + int.from_bytes(shard[:8], "little")
    head, table = shard[:header_bytes], shard[len(shard) - entry[4] :]
    entry[2:] = [len(shard), header_bytes, entry[4], xxhash.xxh3_128_hexdigest(head + table)]
    content["files"] = [entry, *content["files"][1:]]
    signed_manifest = signed(json.dumps(content).encode())
    return {**files, entry[0]: shard, MANIFEST: signed_manifest}


def test_a_tied_name_of_a_tensor_that_no_file_has_is_refused() -> None:
    def file(metadata: dict[str, str], *names: str) -> bytes:
        entries = {
            name: {"dtype": "U8", "shape": [1], "data_offsets": [at, at + 1]}
            for at, name in enumerate(names)
        }
        return put_together({"__metadata__": metadata, **entries}, bytes(len(names)))

    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index = {"weight_map": {"w": two, "x": two, "y": one}}
    files = {
        one: file({"t": "w"}, "w", "y"),
        two: file({"w": "x"}, "x"),
        "model.safetensors.index.json": json.dumps(index).encode(),
    }
    from formats.safetensors import huggingface

    with pytest.raises(FormatError, match="t is tied to w, which is in none of its files"):
        huggingface.read(Folder(files))


def test_a_name_that_could_not_be_read_back_is_not_saved(tmp_path: Path) -> None:
    long = {"x" * 5000: torch.ones(1)}
    with pytest.raises(ckpt.StateError, match="the name has 5000 characters"):
        ckpt.save(tmp_path / "a", long)
    with limits(name_chars=10_000):
        ckpt.save(tmp_path / "a", long)
        assert list(ckpt.read(tmp_path / "a")) == list(long)  # type: ignore[call-overload]
    with pytest.raises(HostileError, match="name_chars"):
        ckpt.read(tmp_path / "a")


def test_the_name_of_an_axis_tells_the_terminal_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ckpt.save(tmp_path / "a", {"w": torch.ones(2)})
    manifest = json.loads((tmp_path / "a" / MANIFEST).read_bytes())
    del manifest["digest"]
    manifest["meshes"][0]["names"] = ["\x1b[2J" for _ in manifest["meshes"][0]["names"]]
    (tmp_path / "a" / MANIFEST).write_bytes(signed(json.dumps(manifest).encode()))
    assert main(["inspect", str(tmp_path / "a")]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert all(line.isprintable() for line in said.splitlines())
