"""Folders of weights by other writers: `.bin` files, DCP's safetensors, Meta's Llama files."""

from __future__ import annotations

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter, filesystem

import ckpt
from ckpt.errors import ExistsError
from formats.errors import CorruptError, FormatError, HostileError, UnsupportedError
from formats.safetensors import huggingface
from tests.old_torch import needs

State = dict[str, torch.Tensor]
FORMATS: Any = getattr(filesystem, "SerializationFormat", None)
HF_WRITER: Any = getattr(dcp, "HuggingFaceStorageWriter", None)
writes_safetensors = pytest.mark.skipif(
    FORMATS is None or HF_WRITER is None, reason="this torch writes no safetensors"
)
BIN = "pytorch_model.bin"


def state() -> State:
    base = torch.arange(24.0)
    return {"a": base.reshape(6, 4), "b": base.bfloat16(), "c": torch.tensor(7)}


def same(found: Any, expected: State) -> bool:
    return set(found) == set(expected) and all(
        torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


# Files of torch.save.


def bins(folder: Path, index: bool = True) -> State:
    """Two shards of torch.save, as transformers wrote them before safetensors."""
    tensors = state()
    weight_map = {}
    for number, names in ((1, ("a", "b")), (2, ("c",))):
        file = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    if index:
        (folder / f"{BIN}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    torch.save({"z": torch.ones(1)}, folder / "training_args.bin")
    return tensors


@pytest.mark.parametrize("index", [True, False])
def test_shards_of_torch_save_are_one_checkpoint(tmp_path: Path, index: bool) -> None:
    tensors = bins(tmp_path, index)
    assert same(ckpt.read(tmp_path), tensors)
    report = ckpt.verify(tmp_path)
    assert report.sound
    assert report.format == "huggingface"
    assert report.bytes_checked >= sum(tensor.nbytes for tensor in tensors.values())
    assert report.notes[-1] == "not checked: training_args.bin"
    assert any("index.json is missing" in note for note in report.notes) == (not index)


def test_a_whole_bin_counts_and_safetensors_before_it(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / BIN)
    assert same(ckpt.read(tmp_path), state())
    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert same(ckpt.read(tmp_path), {"a": torch.zeros(1)})
    assert ckpt.verify(tmp_path).notes == (f"not checked: {BIN}",)


def test_a_save_does_not_hide_weights_in_a_bin(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / BIN)
    with pytest.raises(ExistsError, match=r"another format \(pytorch_model\.bin\)"):
        ckpt.save(tmp_path, state())
    ckpt.save(tmp_path, {"z": torch.ones(1)}, overwrite=True)
    assert list(ckpt.read(tmp_path)) == ["z"]


def test_a_bin_of_torch_before_1_6_is_read(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / BIN, _use_new_zipfile_serialization=False)
    assert same(ckpt.read(tmp_path), state())
    assert "number of elements" in ckpt.verify(tmp_path).checked


def test_damage_of_a_bin_is_found_in_its_shard(tmp_path: Path) -> None:
    bins(tmp_path)
    file = tmp_path / "pytorch_model-00001-of-00002.bin"
    data = bytearray(file.read_bytes())
    data[data.index(state()["a"].numpy().tobytes()) + 5] ^= 1
    file.write_bytes(data)
    (problem,) = ckpt.verify(tmp_path).problems
    assert (problem.file, problem.tensor) == (file.name, "a")
    with pytest.raises(CorruptError, match="pytorch_model-00001"):
        ckpt.load(tmp_path, state())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"d": "pytorch_model-00002-of-00002.bin"}, CorruptError, "1 tensors are not in the file"),
        ({"a": "gone.bin"}, CorruptError, "1 of its 3 files are missing: gone"),
        ({"a": "../x.bin"}, HostileError, "of its own folder"),
    ],
)
def test_each_defect_of_an_index_has_its_error(
    tmp_path: Path, change: dict[str, str], error: type[FormatError], message: str
) -> None:
    bins(tmp_path)
    index = json.loads((tmp_path / f"{BIN}.index.json").read_text())
    index["weight_map"] |= change
    (tmp_path / f"{BIN}.index.json").write_text(json.dumps(index))
    with pytest.raises(error, match=message):
        ckpt.read(tmp_path)


def test_a_missing_shard_without_an_index_is_named(tmp_path: Path) -> None:
    bins(tmp_path, index=False)
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(FormatError, match=r"pytorch_model-00002-of-00002\.bin is missing"):
        ckpt.read(tmp_path)


def test_two_bins_with_one_name_are_refused(tmp_path: Path) -> None:
    bins(tmp_path, index=False)
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(FormatError, match="a is in another file of the folder too"):
        ckpt.read(tmp_path)


# DCP's writers of safetensors.


def save(tensors: dict[str, Any], writer: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tensors, storage_writer=writer, no_dist=True)


@writes_safetensors
def test_dcp_with_safetensors_in_its_files_is_read(tmp_path: Path) -> None:
    nested = {**state(), "n": {"step": 3, "t": torch.arange(3)}, "list": [1, 2]}
    save(nested, FileSystemWriter(tmp_path, serialization_format=FORMATS.SAFETENSORS))
    found = ckpt.read(tmp_path)
    assert same({name: found[name] for name in state()}, state())
    assert (found["n"]["step"], found["list"]) == (3, [1, 2])
    assert torch.equal(found["n"]["t"], torch.arange(3))
    report = ckpt.verify(tmp_path)
    assert report.sound
    assert "tensors in safetensors have none" in report.checked
    file = tmp_path / "__0_0.distcp"
    for data in (file.read_bytes()[:-1], file.read_bytes() + b"x"):
        file.write_bytes(data)
        with pytest.raises(FormatError, match="__0_0"):
            ckpt.read(tmp_path)


@writes_safetensors
def test_dcp_with_safetensors_and_another_shape_is_refused(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path, serialization_format=FORMATS.SAFETENSORS)
    save({"a": torch.zeros(2, 3)}, writer)
    file = tmp_path / "__0_0.distcp"
    for new, error in ((b"[3,2]", "of shape"), (b"[7,1]", "covers|bytes")):
        file.write_bytes(file.read_bytes().replace(b"[2,3]", new))
        with pytest.raises(FormatError, match=error):
            ckpt.read(tmp_path)
        file.write_bytes(file.read_bytes().replace(new, b"[2,3]"))


@needs((2, 8), "dcp.save of torch 2.6 has no no_dist=")
def test_the_metadata_of_torch_2_1_is_read(tmp_path: Path) -> None:
    save({**state(), "step": 3}, FileSystemWriter(tmp_path))
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for later in ("storage_meta", "version"):
        metadata.__dict__.pop(later, None)
    data = pickle.dumps(metadata, protocol=2)
    for new, old in (("TensorProperties",) * 2, ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING")):
        there = f"ctorch.distributed.checkpoint.metadata\n{new}\n".encode()
        assert there in data
        before = f"ctorch.distributed._shard.sharded_tensor.metadata\n{old}\n".encode()
        data = data.replace(there, before)
    (tmp_path / ".metadata").write_bytes(data)
    found = ckpt.read(tmp_path)
    assert found.pop("step") == 3
    assert same(found, state())


@writes_safetensors
def test_the_consolidated_output_of_dcp_is_a_hugging_face_folder(tmp_path: Path) -> None:
    save(state(), HF_WRITER(str(tmp_path)))
    assert same(ckpt.read(tmp_path), state())


def shard(folder: Path, rank: int, chunks: dict[str, tuple[list[int], torch.Tensor]]) -> None:
    """A file that HuggingFaceStorageWriter writes of these chunks with their offsets."""
    info = {name: {"saved_offsets": offsets} for name, (offsets, _) in chunks.items()}
    safetensors.torch.save_file(
        {name: tensor for name, (_, tensor) in chunks.items()},
        folder / f"shard-0000{rank}-model-00001-of-00001.safetensors",
        {huggingface.OFFSETS_KEY: json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"},
    )


@writes_safetensors
def test_the_writer_of_distributed_shards_writes_this_layout(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    save(state(), HF_WRITER(str(tmp_path / "theirs"), save_distributed=True))
    shard(tmp_path / "ours", 1, {name: ([0] * t.ndim, t) for name, t in state().items()})
    name = "shard-00001-model-00001-of-00001.safetensors"
    ours, theirs = (
        safetensors.safe_open(tmp_path / which / name, "pt") for which in ("ours", "theirs")
    )
    assert ours.metadata() == theirs.metadata()
    assert same(ckpt.read(tmp_path / "theirs"), ckpt.read(tmp_path / "ours"))


def test_distributed_shards_are_whole_tensors(tmp_path: Path) -> None:
    whole = state()["a"]
    shard(tmp_path, 1, {"a": ([0, 0], whole[:4]), "c": ([], torch.tensor(7))})
    shard(tmp_path, 2, {"a": ([4, 0], whole[4:])})
    found = ckpt.read(tmp_path)
    assert same(found, {"a": whole, "c": torch.tensor(7)})
    assert ckpt.open(tmp_path).metadata == {}
    assert "if the last ranks' are missing" in ckpt.verify(tmp_path).notes[0]
    (tmp_path / "shard-00001-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(FormatError, match="hold 8 of the 24 elements"):
        ckpt.read(tmp_path)


@pytest.mark.parametrize(
    ("offsets", "error", "message"),
    [
        ([-1, 0], FormatError, "not whole numbers"),
        ([0], FormatError, "not have 2 offsets of a"),
        ([2, 0], FormatError, "overlap"),
        ([2**62, 0], HostileError, "more elements than torch can count"),
        ([6, 0], FormatError, "elements"),
        (["4", 0], FormatError, "not whole numbers"),
    ],
)
def test_each_defect_of_the_offsets_has_its_error(
    tmp_path: Path, offsets: list[Any], error: type[FormatError], message: str
) -> None:
    whole = state()["a"]
    shard(tmp_path, 1, {"a": ([0, 0], whole[:4])})
    shard(tmp_path, 2, {"a": (offsets, whole[4:])})
    with pytest.raises(error, match=message):
        ckpt.read(tmp_path)


# Meta's Llama.


def llama(dim: int = 4, hidden: int = 6, vocab: int = 8) -> State:
    torch.manual_seed(0)
    layer = {
        "attention.wq": (dim, dim),
        "attention.wk": (dim // 2, dim),
        "attention.wv": (dim // 2, dim),
        "attention.wo": (dim, dim),
        "feed_forward.w1": (hidden, dim),
        "feed_forward.w2": (dim, hidden),
        "feed_forward.w3": (hidden, dim),
        "attention_norm": (dim,),
        "ffn_norm": (dim,),
    }
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (vocab, dim)}
    shapes |= {f"layers.0.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"norm.weight": (dim,), "output.weight": (vocab, dim), "rope.freqs": (3,)}
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def cut(name: str, tensor: torch.Tensor, embeddings: int) -> list[torch.Tensor]:
    """The parts of two ranks, by the layers of the published model."""
    if name.startswith("tok_embeddings"):
        return [part.clone() for part in tensor.chunk(2, embeddings)]
    if "norm" in name or name == "rope.freqs":
        return [tensor, tensor.clone()]
    dim = 1 if name.endswith(("wo.weight", "w2.weight")) else 0
    return [part.clone() for part in tensor.chunk(2, dim)]


@pytest.mark.parametrize("embeddings", [0, 1], ids=["llama 3", "llama 2"])
def test_the_parallel_files_of_llama_are_one_model(tmp_path: Path, embeddings: int) -> None:
    whole = llama()
    parts = {name: cut(name, tensor, embeddings) for name, tensor in whole.items()}
    for rank in (0, 1):
        file = tmp_path / f"consolidated.0{rank}.pth"
        torch.save({name: each[rank] for name, each in parts.items()}, file)
    (tmp_path / "params.json").write_text("{}")
    assert same(ckpt.read(tmp_path), whole)
    report = ckpt.verify(tmp_path)
    assert report.sound
    assert report.notes == ("not checked: params.json",)
    ckpt.convert(tmp_path, tmp_path / "out.safetensors")
    assert same(ckpt.read(tmp_path / "out.safetensors"), whole)


def test_values_of_other_files_of_llama_are_told(tmp_path: Path) -> None:
    for rank in (0, 1):
        saved = {"output.weight": torch.full((1, 2), rank), "epoch": rank}
        torch.save(saved, tmp_path / f"consolidated.0{rank}.pth")
    found = ckpt.read(tmp_path)
    assert (found["output.weight"].tolist(), found["epoch"]) == ([[0, 0], [1, 1]], 0)
    note = "the values are those of consolidated.00.pth, and others in consolidated.01.pth"
    assert note in ckpt.verify(tmp_path).notes


def test_one_file_of_llama_is_read_as_it_is(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "consolidated.00.pth")
    assert same(ckpt.read(tmp_path), state())


def test_an_unknown_layer_in_several_files_is_refused_with_the_reason(tmp_path: Path) -> None:
    for rank in (0, 1):
        torch.save({"experts.w": torch.ones(2)}, tmp_path / f"consolidated.0{rank}.pth")
    with pytest.raises(UnsupportedError, match=r"how experts\.w is cut .* open each file"):
        ckpt.read(tmp_path)
    assert ckpt.read(tmp_path / "consolidated.01.pth")["experts.w"].shape == (2,)


def test_a_missing_file_of_llama_is_an_error(tmp_path: Path) -> None:
    for rank in (0, 2):
        torch.save(state(), tmp_path / f"consolidated.0{rank}.pth")
    with pytest.raises(CorruptError, match="consolidated files are missing"):
        ckpt.read(tmp_path)


@pytest.mark.parametrize("other", [{"output.weight": torch.ones(2)}, {"b": torch.ones(2, 2)}])
def test_files_of_llama_that_do_not_fit_together_are_refused(tmp_path: Path, other: State) -> None:
    torch.save({"output.weight": torch.ones(2, 2)}, tmp_path / "consolidated.00.pth")
    torch.save(other, tmp_path / "consolidated.01.pth")
    with pytest.raises(FormatError, match=r"consolidated\.01"):
        ckpt.read(tmp_path)
