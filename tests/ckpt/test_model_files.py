"""A Hugging Face folder gets the configuration and tokenizer that from_pretrained needs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import NotACheckpointError
from formats.errors import HostileError
from formats.limits import limits
from sharding.errors import ArgumentError

CONFIG = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "dtype": "float32",
}
NAMES = ("config.json", "tokenizer.json", "README.md", "tokenizer.model")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of a model with a tokenizer and a card."""
    folder = tmp_path / "source"
    folder.mkdir()
    ckpt.convert(_saved(tmp_path / "m.pt"), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer.model").write_bytes(b"pieces")
    (folder / "README.md").write_text("the model's card")
    return folder


def _saved(file: Path) -> Path:
    torch.save({"w": torch.arange(6.0), "v": torch.ones(3)}, file)
    return file


def config_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize("resume", [False, True])
def test_the_small_files_of_the_source_s_folder_are_copied(
    source: Path, tmp_path: Path, resume: bool
) -> None:
    for place in (source, source / "model.safetensors"):
        report = ckpt.convert(
            place, tmp_path / "hf", to="hf", resume=resume, overwrite=True, verify=True
        )
        assert report.model_files == NAMES
        there = {path.name for path in (tmp_path / "hf").iterdir()}
        assert there == {*NAMES, "model.safetensors"}
        for name in NAMES:
            assert (tmp_path / "hf" / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_configuration_has_the_dtype_of_the_weights(
    source: Path, tmp_path: Path, key: str
) -> None:
    (source / "config.json").write_text(json.dumps({key: "float32", "a": 1}))
    ckpt.convert(source, tmp_path / "hf", to="hf", dtype="bfloat16")
    assert config_in(tmp_path / "hf") == {key: "bfloat16", "a": 1}
    ckpt.convert(source, tmp_path / "two", to="hf", dtype={"w": "bfloat16", "*": None})
    assert config_in(tmp_path / "two") == {key: "float32", "a": 1}
    for name, one in (("half", torch.bfloat16), ("int8", torch.int8)):
        torch.save({n: torch.ones(3, dtype=one) for n in "wv"}, tmp_path / f"{name}.pt")
    for name, expected in (("half", "bfloat16"), ("int8", "float32")):
        ckpt.convert(tmp_path / f"{name}.pt", tmp_path / name, to="hf", config=source)
        assert config_in(tmp_path / name) == {key: expected, "a": 1}
    (source / "config.json").write_text("{}")
    ckpt.convert(tmp_path / "half.pt", tmp_path / "auto", to="hf", config=source)
    assert config_in(tmp_path / "auto") == {}


def test_new_names_make_another_model_whose_files_the_caller_names(
    source: Path, tmp_path: Path
) -> None:
    for number, changes in enumerate(({"rename": {"w": "u"}}, {"prefix": "model"})):
        report = ckpt.convert(source, tmp_path / str(number), to="hf", **changes)  # type: ignore[arg-type]
        assert report.model_files == ()
    for place in (source, source / "config.json"):
        report = ckpt.convert(
            tmp_path / "m.pt", tmp_path / "named", to="hf", config=place, overwrite=True
        )
        assert report.model_files == NAMES
        assert config_in(tmp_path / "named") == CONFIG
    assert ckpt.convert(source, tmp_path / "c.pt").model_files is None
    with pytest.raises(NotACheckpointError, match=r"no config\.json is there; config="):
        ckpt.convert(source, tmp_path / "none", to="hf", config=tmp_path)


def test_the_sizes_of_a_mapping_come_from_the_named_configuration(
    source: Path, tmp_path: Path
) -> None:
    (tmp_path / "map.toml").write_text(
        """
        [parameters]
        heads = ["num_attention_heads"]
        [[rule]]
        from = "w"
        to = "w"
        rearrange = "(kv two) -> (two kv)"
        sizes = { two = "heads / 2" }
        """
    )
    ckpt.convert(
        tmp_path / "m.pt", tmp_path / "hf", to="hf", mapping=tmp_path / "map.toml", config=source
    )
    found: Any = ckpt.read(tmp_path / "hf")
    assert torch.equal(found["w"], torch.arange(6.0).reshape(3, 2).T.reshape(-1))
    assert ckpt.diff(
        tmp_path / "m.pt", tmp_path / "hf", mapping=tmp_path / "map.toml", config=source
    ).equal


def test_a_configuration_without_effect_is_an_error(source: Path, tmp_path: Path) -> None:
    for config in (source, tmp_path / "nowhere"):
        with pytest.raises(ArgumentError, match=r"config='.*' has no effect: no mapping takes"):
            ckpt.convert(source, tmp_path / "c.pt", rename={"w": "u"}, config=config)
        with pytest.raises(ArgumentError, match=r"config='.*' has no effect"):
            ckpt.diff(source, source, config=config)
    assert not (tmp_path / "c.pt").exists()


def test_an_optimizer_gets_no_configuration_of_a_model(tmp_path: Path) -> None:
    trainer = Path(__file__).parents[1] / "data" / "trainer" / "checkpoint-2"
    files = ("config.json", "generation_config.json")
    for name, select, expected in (
        ("a", "model", files),
        ("b", "optimizer", ()),
        ("c", None, files),
    ):
        report = ckpt.convert(trainer, tmp_path / name, to="hf", select=select)
        assert report.model_files == expected
    assert ckpt.convert(trainer, tmp_path / "d", to="hf", part="optimizer").model_files == ()


@pytest.mark.parametrize("changes", [{"select": "model"}, {"part": "model"}, {}])
def test_the_model_of_a_training_gets_the_files_beside_its_checkpoint(
    tmp_path: Path, changes: Any
) -> None:
    ckpt.save(tmp_path / "run", {"model": {"w": torch.ones(3)}, "seen": torch.ones(3).int()})
    (tmp_path / "run" / "config.json").write_text("{}")
    report = ckpt.convert(tmp_path / "run", tmp_path / "hf", to="hf", **changes)
    assert report.model_files == ("config.json",)


def test_a_file_beyond_the_limit_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer.json").write_bytes(bytes(5000))
    with limits(header_bytes=4000), pytest.raises(HostileError, match=r"tokenizer\.json"):
        ckpt.convert(source, tmp_path / "hf", to="hf")
