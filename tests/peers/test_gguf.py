"""GGUF beside its own library, which reads what a conversion writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from formats.errors import UnsupportedError
from formats.gguf import BLOCK_TYPES, TENSOR_TYPES, VALUE_TYPES
from tests.formats.test_losses import SOURCES

gguf = pytest.importorskip("gguf", reason="make test-peers installs it")
constants = pytest.importorskip("gguf.constants", reason="make test-peers installs it")


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "a": torch.arange(12.0).reshape(3, 4),
        "b": torch.arange(6).reshape(1, 2, 3).half(),
        "c": torch.arange(5).bfloat16(),
        "d": torch.arange(5),
        "e": torch.tensor(2.0),
        "gguf": {"general.architecture": "llama", "n": 3, "xs": [1, -2], "f": 0.5, "s": ["a", "b"]},
        "step": 3,
    }
    torch.save(state, tmp_path / "a.pt")
    report = ckpt.convert(tmp_path / "a.pt", tmp_path / "a.gguf")
    assert report.left_out == ("step",)
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    assert reader.fields["general.architecture"].contents() == "llama"
    assert reader.fields["xs"].contents() == [1, -2]
    assert reader.fields["f"].contents() == 0.5
    assert reader.fields["s"].contents() == ["a", "b"]
    for tensor in reader.tensors:
        expected = state[tensor.name]
        assert tuple(tensor.shape[::-1]) == tuple(expected.shape)
        data = expected.reshape(-1).view(torch.uint8).numpy()
        assert np.array_equal(np.ascontiguousarray(tensor.data).reshape(-1).view(np.uint8), data)
    assert {tensor.name for tensor in reader.tensors} == set("abcde")


@pytest.mark.parametrize("source", SOURCES)
def test_each_weight_is_in_the_file_for_the_library_or_named_as_lost(
    source: str, tmp_path: Path
) -> None:
    expected = SOURCES[source](tmp_path / "a.pt")
    try:
        report = ckpt.convert(tmp_path / "a.pt", tmp_path / "a.gguf", allow_loss=True)
    except UnsupportedError as error:  # of dtypes that the format lacks, by name
        said = str(error)
        if any(name in said for name in expected):
            return
        raise
    lost = {line.partition(" ")[0] for line in report.lost}
    found = {each.name: each for each in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    for name, tensor in expected.items():
        short = name.removeprefix("state_dict.")
        assert (short in found) != (name in lost), (name, lost, list(found))
        if short in found:
            assert tuple(found[short].shape[::-1]) == tuple(tensor.shape)
            data = np.ascontiguousarray(found[short].data).tobytes()
            assert data == tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def test_the_tables_are_those_of_the_library() -> None:
    kinds = constants.GGMLQuantizationType
    sizes = constants.GGML_QUANT_SIZES
    for number, block in BLOCK_TYPES.items():
        assert kinds(number).name == block.name
        assert sizes[kinds(number)] == (block.elements, block.nbytes)
    for number, name in TENSOR_TYPES.items():
        assert kinds(number).name == name
    known = {kind.value for kind in sizes}
    assert known == {*BLOCK_TYPES, *TENSOR_TYPES}
    assert [constants.GGUFValueType(number).name for number in range(13)] == list(VALUE_TYPES)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q5_1", "TQ2_0"])
def test_quantised_tensors_are_the_bytes_of_the_library(kind: str, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(2, 3, 512)).astype("f4")
    number = constants.GGMLQuantizationType[kind]
    blocks = gguf.quantize(rows, number)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("w", blocks, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ckpt.convert(tmp_path / "a.gguf", tmp_path / "b")
    ckpt.convert(tmp_path / "b", tmp_path / "b.gguf")
    for name in ("a.gguf", "b", "b.gguf"):
        found: Any = ckpt.read(tmp_path / name)
        assert np.array_equal(found["w"].numpy(), blocks)
    (tensor,) = gguf.GGUFReader(tmp_path / "b.gguf").tensors
    assert (tensor.tensor_type, list(tensor.shape)) == (number, [512, 3, 2])
    assert np.array_equal(gguf.dequantize(tensor.data, number), gguf.dequantize(blocks, number))
