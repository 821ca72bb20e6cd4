"""Hugging Face folders, against transformers and huggingface_hub in both directions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.stores.store import open_store
from formats.catalog import Catalog, Outgoing, OutgoingTensor, TensorRef
from formats.dtypes import BY_NAME, dtype_of_torch
from formats.errors import CorruptError, FormatError, HostileError
from formats.limits import parse_size
from formats.safetensors.huggingface import Chosen, choose, plans, read, split
from tests.formats.written import write_files

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def transformers() -> Iterator[ModuleType]:
    """The library, without a network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield pytest.importorskip("transformers")


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def outgoing(name: str, tensor: torch.Tensor) -> OutgoingTensor:
    dtype = dtype_of_torch(str(tensor.dtype), name)
    return OutgoingTensor(name, tuple(tensor.shape), dtype, lambda: iter([memoryview(raw(tensor))]))


def state_of(tensors: dict[str, torch.Tensor], aliases: dict[str, str] | None = None) -> Outgoing:
    return Outgoing(
        {name: outgoing(name, tensor) for name, tensor in tensors.items()},
        {name: TensorRef(name) for name in tensors},
        aliases or {},
    )


def write_to(folder: Path, state: Outgoing, max_shard_bytes: int, **options: Any) -> None:
    with open_store(folder) as store:
        write_files(store, *plans(state, max_shard_bytes, **options))


def read_from(folder: Path, name: str | None = None) -> tuple[Catalog, dict[str, bytes]]:
    """The catalog of a folder, and the bytes of each tensor at the place it says."""
    with open_store(folder) as store:
        catalog = read(store, name)
        data = {}
        for tensor, record in catalog.tensors.items():
            (stored,) = record.pieces
            extent = stored.extent
            data[tensor] = store.read(extent.file, extent.offset, extent.nbytes)
    return catalog, data


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def abc(numel: int = 8) -> dict[str, torch.Tensor]:
    return {name: torch.arange(numel, dtype=torch.uint8) for name in "abc"}


def tiny_llama(transformers: ModuleType, tied: bool) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=40,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found = model(torch.arange(10).reshape(1, 10)).logits
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("max_shard_size", ["5KB", "5GB"])
def test_a_model_that_transformers_saved_is_read(
    tmp_path: Path, transformers: ModuleType, tied: bool, max_shard_size: str
):
    model = tiny_llama(transformers, tied)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (INDEX in files_in(tmp_path)) == (max_shard_size == "5KB")
    catalog, data = read_from(tmp_path)
    expected = {name: raw(tensor) for name, tensor in model.state_dict().items()}
    if tied:
        del expected["lm_head.weight"]
    assert data == expected
    assert {record.name for record in catalog.files} == {
        name for name in files_in(tmp_path) if "safetensors" in name
    }
    assert all(record.size == (tmp_path / record.name).stat().st_size for record in catalog.files)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("max_shard_bytes", [5_000, 5_000_000])
def test_a_model_that_is_written_gives_the_same_logits_in_transformers(
    tmp_path: Path, transformers: ModuleType, tied: bool, max_shard_bytes: int
):
    model = tiny_llama(transformers, tied)
    state = model.state_dict()
    aliases = {}
    if tied:
        del state["lm_head.weight"]
        aliases = {"lm_head.weight": "model.embed_tokens.weight"}
    write_to(tmp_path, state_of(state, aliases), max_shard_bytes)
    assert (INDEX in files_in(tmp_path)) == (max_shard_bytes == 5_000)
    model.config.save_pretrained(tmp_path)
    loaded, report = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report.values())
    assert torch.equal(logits(loaded.eval()), logits(model))
    assert read_from(tmp_path)[0].aliases == aliases


def test_the_folder_is_what_transformers_writes(tmp_path: Path, transformers: ModuleType):
    model = tiny_llama(transformers, tied=False)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="5KB")
    write_to(tmp_path / "ours", state_of(model.state_dict()), 5_000)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    shards = [name for name in files_in(theirs) if name.endswith(".safetensors")]
    assert files_in(ours) == sorted([*shards, INDEX])
    their_index, our_index = (json.loads((f / INDEX).read_text()) for f in (theirs, ours))
    assert our_index["weight_map"] == their_index["weight_map"]
    assert our_index["metadata"]["total_size"] == their_index["metadata"]["total_size"]


def test_every_shard_is_a_file_of_the_library(tmp_path: Path):
    write_to(tmp_path, state_of(abc()), 16)
    assert files_in(tmp_path) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX,
    ]
    found = {
        name: sorted(safetensors.torch.load_file(tmp_path / name))
        for name in files_in(tmp_path)[:2]
    }
    assert list(found.values()) == [["a", "b"], ["c"]]
    assert (tmp_path / INDEX).read_text() == (
        "{\n"
        '  "metadata": {\n'
        '    "total_size": 24\n'
        "  },\n"
        '  "weight_map": {\n'
        '    "a": "model-00001-of-00002.safetensors",\n'
        '    "b": "model-00001-of-00002.safetensors",\n'
        '    "c": "model-00002-of-00002.safetensors"\n'
        "  }\n"
        "}\n"
    )


@given(st.lists(st.integers(1, 12), max_size=12), st.integers(1, 20))
@settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_shards_are_filled_as_huggingface_hub_fills_them(sizes, max_shard_bytes):
    hub = pytest.importorskip("huggingface_hub")
    tensors = {f"{i}": torch.empty(size, dtype=torch.uint8) for i, size in enumerate(sizes)}
    theirs = hub.split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_bytes)
    ours = split(state_of(tensors).tensors.values(), max_shard_bytes)
    assert [[tensor.name for tensor in shard] for shard in ours if shard] == list(
        theirs.filename_to_tensors.values()
    )


def test_nothing_is_a_file_without_tensors(tmp_path: Path):
    write_to(tmp_path, state_of({}), 5)
    catalog, _ = read_from(tmp_path)
    assert (files_in(tmp_path), catalog.tensors) == (["model.safetensors"], {})


def test_the_index_comes_last(tmp_path: Path):
    def fails() -> Iterator[memoryview]:
        raise OSError("the source is gone")
        yield memoryview(b"")

    state = state_of(abc())
    broken = OutgoingTensor("z", (8,), BY_NAME["U8"], fails)
    with pytest.raises(OSError, match="the source is gone"):
        write_to(tmp_path, Outgoing({**state.tensors, "z": broken}, state.tree), 8)
    assert files_in(tmp_path) == [f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3)]
    with pytest.raises(FormatError, match="index is written last, so the save"):
        read_from(tmp_path)


def test_carried_dtypes_and_tied_names_come_back_from_shards(tmp_path: Path):
    tensors = {"a": torch.ones(3, dtype=torch.complex128), "b": torch.ones(3)}
    write_to(tmp_path, state_of(tensors, {"x": "a", "y": "b"}), 20)
    catalog, data = read_from(tmp_path)
    assert catalog.aliases == {"x": "a", "y": "b"}
    assert catalog.tensors["a"].dtype.torch_name == "complex128"
    assert data == {name: raw(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("base", ["model", "diffusion_pytorch_model", "adapter_model", "vae"])
@pytest.mark.parametrize("max_shard_bytes", [8, 100])
def test_weights_of_any_base_name_are_found(tmp_path: Path, base: str, max_shard_bytes: int):
    write_to(tmp_path, state_of(abc()), max_shard_bytes, base=base)
    (tmp_path / "config.json").write_text("{}")
    assert all(name.startswith((base, "config")) for name in files_in(tmp_path))
    _, data = read_from(tmp_path)
    assert data == {name: raw(tensor) for name, tensor in abc().items()}


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([], None),
        (["config.json", "pytorch_model.bin"], None),
        ([INDEX, "model.safetensors"], "model.safetensors"),
        (["consolidated.safetensors", "params.json"], "consolidated.safetensors"),
        ([INDEX, "model-00001-of-00001.safetensors", "consolidated.safetensors"], INDEX),
        (["adapter_model.safetensors", "other.safetensors"], "adapter_model.safetensors"),
        (["unet.safetensors", "unet.safetensors.index.json"], "unet.safetensors"),
        (["unet.safetensors.index.json", "unet-00001-of-00001.safetensors"],) * 2,
    ],
)
def test_the_file_that_counts_is_found(names: list[str], found: str | list[str] | None):
    wanted = found[0] if isinstance(found, list) else found
    assert choose(names, ".safetensors") == (None if wanted is None else Chosen.from_name(wanted))


def test_files_without_numbers_are_read_together(tmp_path: Path):
    for name in ("a.safetensors", "b.safetensors"):
        safetensors.torch.save_file({name[0]: torch.zeros(1)}, tmp_path / name)
    catalog, _ = read_from(tmp_path)
    assert list(catalog.tensors) == ["a", "b"]
    assert "2 files without numbers" in catalog.notes[0]
    assert list(read_from(tmp_path, "b.safetensors")[0].tensors) == ["b"]


def test_of_several_checkpoints_one_must_be_named(tmp_path: Path):
    for name in ("a.safetensors", "b.safetensors"):
        safetensors.torch.save_file({"w": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(FormatError, match=r"b\.safetensors: w lies in another .* name one of"):
        read_from(tmp_path)
    with pytest.raises(FormatError, match=r"a\.safetensors, b\.safe.*; name one"):
        choose(["a.safetensors", f"b{INDEX.removeprefix('model')}"], ".safetensors")
    with pytest.raises(FormatError, match="several checkpoints"):
        choose([f"{base}-00001-of-00001.safetensors" for base in "ab"], ".safetensors")
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    with pytest.raises(FormatError, match=r"extra\.safe.*, model-00001-of.*; name one"):
        choose([*shards, "extra.safetensors"], ".safetensors")


def test_files_that_contradict_each_other_are_told(tmp_path: Path):
    for name in "ab":
        file = tmp_path / f"{name}.safetensors"
        metadata = {"by": name * 2, "ckpt.tied": f'{{"x":"{name}"}}'}
        safetensors.torch.save_file({name: torch.zeros(1)}, file, metadata)
    with pytest.raises(FormatError, match=r"b\.safetensors: x is tied to b, .* to a; open one"):
        read_from(tmp_path)
    safetensors.torch.save_file({"b": torch.zeros(1)}, tmp_path / "b.safetensors", {"by": "us"})
    catalog, _ = read_from(tmp_path)
    assert catalog.notes[1:] == (
        "the files have different metadata 'by'; that of the last one counts",
    )


def test_shards_without_an_index_are_read_if_their_numbers_are_complete(tmp_path: Path):
    write_to(tmp_path, state_of(abc()), 8)
    (tmp_path / INDEX).unlink()
    catalog, data = read_from(tmp_path)
    assert data == {name: raw(tensor) for name, tensor in abc().items()}
    assert catalog.notes == (f"{INDEX} is missing; the numbers of the 3 shards are complete",)
    for number in (2, 3):  # the first hole, then also the end
        (tmp_path / f"model-0000{number}-of-00003.safetensors").unlink()
        with pytest.raises(FormatError, match=r"model-00002-of-00003\.safetensors is missing"):
            read_from(tmp_path)


def test_a_folder_without_safetensors_is_an_error_that_names_it(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}: no "):
        read_from(tmp_path)


def with_index(folder: Path, weight_map: object) -> None:
    """Two shards, `a` and `b` in the first and `c` in the second, and this index."""
    write_to(folder, state_of(abc()), 16)
    text = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
    (folder / INDEX).write_text(text)


FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


@pytest.mark.parametrize(
    ("weight_map", "error", "message"),
    [
        ("", FormatError, "the index is not JSON"),
        ("[]", FormatError, "not an object"),
        ("{}", FormatError, "weight_map"),
        ('{"weight_map":{"a":"x","a":"y"}}', HostileError, "the key 'a' twice"),
        ([FIRST], FormatError, "weight_map"),
        ({"a": 1}, FormatError, "the file of a is 1"),
        ({"a": f"../{FIRST}"}, HostileError, "of its own folder"),
        ({"a": f"sub/{FIRST}"}, HostileError, "of its own folder"),
        ({"a": "/etc/passwd"}, HostileError, "of its own folder"),
        ({"a": r"..\secret"}, HostileError, "of its own folder"),
        ({"a": "C:secret"}, HostileError, "of its own folder"),
        ({"a": ".."}, HostileError, "of its own folder"),
        ({"a": ""}, HostileError, "of its own folder"),
        ({"a": "a\x00b"}, HostileError, "of its own folder"),
        ({"a": FIRST, "c": "gone.safetensors"}, CorruptError, r"1 of its 2 files .* gone\.safe"),
        ({"a": FIRST, "d": SECOND}, CorruptError, f"1 tensors are not .*: d in {SECOND}"),
        ({"a": SECOND, "b": FIRST, "c": SECOND}, CorruptError, f"a in {SECOND}"),
    ],
)
def test_each_defect_of_an_index_has_its_error(
    tmp_path: Path, weight_map: object, error: type[FormatError], message: str
):
    with_index(tmp_path, weight_map)
    with pytest.raises(error, match=message) as raised:
        read_from(tmp_path)
    assert type(raised.value) is error
    assert str(raised.value).startswith(INDEX)


def test_a_tensor_the_index_leaves_out_is_read_all_the_same(tmp_path: Path):
    with_index(tmp_path, {"a": FIRST, "c": SECOND})
    assert list(read_from(tmp_path)[0].tensors) == ["a", "b", "c"]


def test_a_wrong_total_size_is_no_error(tmp_path: Path):
    weight_map = {"a": FIRST, "b": FIRST, "c": SECOND}
    with_index(tmp_path, json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    assert list(read_from(tmp_path)[0].tensors) == ["a", "b", "c"]


def test_of_two_tensors_of_one_name_the_index_says_which_counts(tmp_path: Path):
    with_index(tmp_path, {"a": FIRST, "c": SECOND})
    other = {"a": torch.full((8,), 7, dtype=torch.uint8), "c": abc()["c"]}
    safetensors.torch.save_file(other, tmp_path / SECOND)
    assert read_from(tmp_path)[1]["a"] == raw(abc()["a"])
    safetensors.torch.save_file({**other, "b": other["a"].clone()}, tmp_path / SECOND)
    with pytest.raises(FormatError, match=f"{SECOND}: b lies in another file of {INDEX} too"):
        read_from(tmp_path)


def test_a_truncated_shard_is_an_error_that_names_it(tmp_path: Path):
    write_to(tmp_path, state_of(abc()), 16)
    (tmp_path / SECOND).write_bytes((tmp_path / SECOND).read_bytes()[:-1])
    with pytest.raises(CorruptError, match=rf"{SECOND}: .* truncated within c"):
        read_from(tmp_path)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("4096", 4096),
        ("12B", 12),
        ("3KB", 3_000),
        ("40kB", 40_000),
        ("1M", 1_000_000),
        ("2 GiB", 2 * 2**30),
        ("8kiB", 8192),
        ("500MB", 500_000_000),
        ("5GB", 5_000_000_000),
        ("1.5 GB", 1_500_000_000),
        (" 2TB ", 2_000_000_000_000),
        ("2KiB", 2048),
        ("2MiB", 2 * 2**20),
        ("2GiB", 2 * 2**30),
        ("9007199254740993", 9_007_199_254_740_993),
    ],
)
def test_a_size_is_understood(text: str, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "0", "0GB", "-5GB", "5Gb", "5gb", "GB", "5 XB", "1e9", "nan", "5GBs", "٣MB"]
)
def test_what_is_no_size_is_refused_with_examples(text: str):
    with pytest.raises(ValueError, match="write a number of bytes, 500MB or 5GB"):
        parse_size(text)


def test_the_index_of_a_variant_has_the_name_that_transformers_gives_it(tmp_path: Path) -> None:
    shards = [f"model.fp16-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for number, shard in enumerate(shards):
        safetensors.torch.save_file({f"w{number}": torch.ones(2)}, tmp_path / shard)
    index = {"weight_map": {f"w{number}": shard for number, shard in enumerate(shards)}}
    place = tmp_path / "model.safetensors.index.fp16.json"
    place.write_text(json.dumps(index))
    with ckpt.open(tmp_path) as opened:
        assert list(opened) == ["w0", "w1"]
    assert ckpt.verify(tmp_path).notes == ()
    index["weight_map"]["w2"] = "model.fp16-00003-of-00002.safetensors"
    place.write_text(json.dumps(index))
    with pytest.raises(CorruptError, match="1 of its 3 files are missing"):
        ckpt.open(tmp_path)


def test_a_pipeline_of_diffusers_is_one_checkpoint_of_its_components(tmp_path: Path) -> None:
    for folder, file in (("unet", "diffusion_pytorch_model"), ("text_encoder", "model.fp16")):
        (tmp_path / folder).mkdir()
        safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / folder / f"{file}.safetensors")
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text("{}")
    index = {name: ["diffusers", "A"] for name in ("unet", "text_encoder", "scheduler")}
    index |= {"_class_name": "B", "safety_checker": [None, None], "requires": False}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    found = ckpt.read(tmp_path)
    assert {name: list(item) for name, item in found.items()} == {
        "unet": ["w"],
        "text_encoder": ["w"],
    }
    assert "not part of the checkpoint: scheduler" in str(ckpt.verify(tmp_path).notes)
    shutil.rmtree(tmp_path / "unet")
    with pytest.raises(CorruptError, match=r"names unet/, which is missing"):
        ckpt.read(tmp_path)
