"""A Hugging Face folder gets the configuration and tokenizer that from_pretrained needs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt
from ckpt.errors import NotACheckpointError
from ckpt.mapping.model_files import LARGE_BYTES
from formats.errors import HostileError, UnsupportedError
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


def test_small_files_of_any_name_travel_and_those_that_do_not_belong_stay(
    source: Path, tmp_path: Path
) -> None:
    belong = (
        *("modeling_x.py", "tekken.json", "sentencepiece.bpe.model", "video_processor.json"),
        *("quantize_config.json", "recipe.yaml", "additional_chat_templates/rag.jinja", "LICENSE"),
        *("1_Pooling/config.json", "optimizer_utils.py", "code/deep/layers.py"),
    )
    foreign = (
        *("optimizer.pt", "training_args.bin", "all_results.json", "tf_model.h5", "model.gguf"),
        *("pytorch_model.bin", "pytorch_model.bin.index.json", "run.log", ".git/config", "wandb/x"),
        *("__pycache__/x.pyc", "checkpoint-5/config.json", "onnx/config.json", "runs/a/events.out"),
        *(".cache/x", "events.out.tfevents.1", "zero_to_fp32.py", "config.json.lock"),
    )
    for name in (*belong, *foreign, "other/config.json", "other/model.safetensors"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("{}")
    (source / "corpus.txt").write_bytes(bytes(LARGE_BYTES + 1))
    report = ckpt.convert(source, tmp_path / "hf", to="hf", verify=True)
    there = {
        path.relative_to(tmp_path / "hf").as_posix()
        for path in (tmp_path / "hf").rglob("*")
        if path.is_file()
    }
    assert there == {*NAMES, *belong, "model.safetensors"}
    assert set(report.model_files or ()) == {*NAMES, *belong}
    assert set(report.not_copied) == {"corpus.txt", "other/"}


def test_the_modules_of_sentence_transformers_go_along_with_their_weights(
    source: Path, tmp_path: Path
) -> None:
    modules = [{"idx": n, "path": path} for n, path in enumerate(("", "1_Pooling", "2_Dense"))]
    (source / "modules.json").write_text(json.dumps(modules))
    for name in ("1_Pooling", "2_Dense"):
        (source / name).mkdir()
        (source / name / "config.json").write_text("{}")
    dense = {"linear.weight": torch.ones(3, 2), "linear.bias": torch.zeros(3)}
    save_file(dense, source / "2_Dense" / "model.safetensors")
    for resume in (False, True):
        hf = tmp_path / f"hf{resume:d}"
        report = ckpt.convert(source, hf, to="hf", dtype="bfloat16", verify=True, resume=resume)
        assert (report.tensors, report.lost, report.not_copied) == (4, (), ())
        found = load_file(hf / "2_Dense" / "model.safetensors")
        assert {name: tensor.dtype for name, tensor in found.items()} == dict.fromkeys(
            dense, torch.bfloat16
        )
        assert torch.equal(found["linear.weight"].float(), dense["linear.weight"])
        assert set(load_file(hf / "model.safetensors")) == {"w", "v"}
        assert (hf / "2_Dense" / "config.json").read_text() == "{}"
    ckpt.convert(source, tmp_path / "a.safetensors", verify=True)
    flat = load_file(tmp_path / "a.safetensors")
    assert set(flat) == {"w", "v", "2_Dense.linear.weight", "2_Dense.linear.bias"}
    with pytest.raises(UnsupportedError, match=r"2_Dense/ is a folder of weights that is not read"):
        ckpt.convert(source, tmp_path / "b.safetensors", rename={"w": "x"})


def test_a_file_of_weights_that_is_not_read_is_named(source: Path, tmp_path: Path) -> None:
    save_file({"v_head": torch.ones(2)}, source / "value_head.safetensors")
    save_file({"w": torch.ones(2)}, source / "model.fp16.safetensors")  # a copy
    with pytest.raises(UnsupportedError, match=r"1 of its .* lost: value_head\.safetensors is"):
        ckpt.convert(source, tmp_path / "hf", to="hf")
    assert not (tmp_path / "hf").exists()
    report = ckpt.convert(source, tmp_path / "hf", to="hf", allow_loss=True)
    assert [line.partition(" ")[0] for line in report.lost] == ["value_head.safetensors"]


@pytest.mark.parametrize(
    ("names", "config"),
    [
        (("module.bert.w", "module.cls.w"), {}),
        (("module._orig_mod.w", "module._orig_mod.v"), {}),
        (("model.bert.w", "model.cls.w"), {"model_type": "bert"}),
        (("net.model.layers.0.w", "net.lm_head.weight"), {"model_type": "llama"}),
        (("net.roberta.w", "net.roberta.v"), {"model_type": "xlm-roberta"}),
    ],
)
def test_names_below_the_key_of_a_wrapper_are_an_error_with_the_option(
    names: tuple[str, ...], config: dict[str, Any], tmp_path: Path
) -> None:
    torch.save({name: torch.ones(2) for name in names}, tmp_path / "a.pt")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArgumentError, match=r"make random weights: take the key off with rename="):
        ckpt.convert(tmp_path / "a.pt", tmp_path / "hf", to="hf", config=tmp_path / "c")
    assert not (tmp_path / "hf").exists()
    prefix = "module._orig_mod" if "_orig_mod" in names[0] else names[0].partition(".")[0]
    rename = {prefix: ""}
    ckpt.convert(tmp_path / "a.pt", tmp_path / "hf", to="hf", config=tmp_path / "c", rename=rename)
    assert set(load_file(tmp_path / "hf" / "model.safetensors")) == {
        name.removeprefix(f"{prefix}.") for name in names
    }
    ckpt.convert(tmp_path / "a.pt", tmp_path / "b", to="hf", config=tmp_path / "c", select="")


@pytest.mark.parametrize(
    ("names", "config"),
    [
        (("model.embed.w", "model.layers.0.w"), {"model_type": "llama"}),
        (("bert.w", "cls.w"), {"model_type": "bert"}),
        (("vision_model.encoder.w", "vision_model.head.w"), {"model_type": "siglip_vision_model"}),
    ],
)
def test_the_key_of_a_base_model_is_none_of_a_wrapper(
    names: tuple[str, ...], config: dict[str, Any], tmp_path: Path
) -> None:
    torch.save({name: torch.ones(2) for name in names}, tmp_path / "a.pt")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text(json.dumps(config))
    ckpt.convert(tmp_path / "a.pt", tmp_path / "hf", to="hf", config=tmp_path / "c")
    assert set(load_file(tmp_path / "hf" / "model.safetensors")) == set(names)


def test_the_weights_beside_the_configuration_say_which_names_are_expected(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    expected = {name: torch.ones(2) for name in ("text.w", "text.v", "text.position_ids")}
    save_file(expected, folder / "model.safetensors")
    torch.save({"net.text.w": torch.ones(2), "net.text.v": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(ArgumentError, match=r"all names would begin with 'net\.'"):
        ckpt.convert(tmp_path / "a.pt", tmp_path / "hf", to="hf", config=folder)
    for start in ("text.", ""):  # from_pretrained adds the key of the base model
        torch.save({f"{start}w": torch.ones(2)}, tmp_path / "b.pt")
        with pytest.raises(UnsupportedError, match=r"1 of its weights .* lost: text\.v is among"):
            ckpt.convert(tmp_path / "b.pt", tmp_path / "hf", to="hf", config=folder)
    torch.save({"text.w": torch.ones(2), "text.packed": torch.ones(2)}, tmp_path / "d.pt")
    ckpt.convert(tmp_path / "d.pt", tmp_path / "hf", to="hf", config=folder)  # renamed, perhaps


def test_a_model_that_ties_no_embeddings_gets_both_names(source: Path, tmp_path: Path) -> None:
    weight = torch.ones(2)
    torch.save({"embed.weight": weight, "lm_head.weight": weight}, tmp_path / "a.pt")
    (tmp_path / "c").mkdir()
    for is_tied, names in ((True, {"embed.weight"}), (False, {"embed.weight", "lm_head.weight"})):
        (tmp_path / "c" / "config.json").write_text(json.dumps({"tie_word_embeddings": is_tied}))
        report = ckpt.convert(
            tmp_path / "a.pt", tmp_path / "hf", to="hf", config=tmp_path / "c", overwrite=True
        )
        assert set(load_file(tmp_path / "hf" / "model.safetensors")) == names
        assert bool(report.tied) == is_tied
