"""Each piece of advice that an error gives is followed, as it stands in the message, and works."""

from __future__ import annotations

import ast
import bz2
import gzip
import json
import lzma
import pickle
import re
import shlex
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckpt
from tools.main import main

TITAN = Path(__file__).parents[1] / "data" / "torchtitan"


def message(call: Callable[[], object]) -> str:
    """What an error says."""
    with pytest.raises((ckpt.CkptError, ValueError)) as error:
        call()
    return str(error.value)


def said(pattern: str, call: Callable[[], object]) -> str:
    """The group of a pattern in what an error says."""
    text = message(call)
    found = re.search(pattern, text)
    assert found is not None, text
    return found[1]


def value(pattern: str, call: Callable[[], object]) -> Any:
    return ast.literal_eval(said(pattern, call))


def names(path: str | Path, **given: Any) -> set[str]:
    with ckpt.open(path, **given) as found:
        return set(found)


def weights(path: Path, name: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.ones(2)}, path)
    return path


def test_one_of_several_files_is_opened(tmp_path: Path) -> None:
    for name in ("a b.pt", "c.pt"):
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    command = said(r"one of its 2 files: (ckpt inspect .*)", lambda: ckpt.open(tmp_path))
    assert main(shlex.split(command)[1:]) == 0
    assert names(shlex.split(command)[2]) == {"w"}


def test_one_of_the_snapshots_of_a_cache_is_opened(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    for revision in ("aa", "bb"):
        weights(tmp_path / "snapshots" / revision / "model.safetensors")
    assert names(said(r"one of its 2 snapshots: (\S+)", lambda: ckpt.open(tmp_path))) == {"w"}


@pytest.mark.parametrize("native", [True, False])
def test_one_of_the_checkpoints_in_a_folder_is_opened(
    tmp_path: Path, native: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (9, 10):
        place = tmp_path / "runs" / f"step-{step}"
        if native:
            ckpt.save(place, {"w": torch.ones(2)})
        else:
            weights(place / "model.safetensors")
            (place / "config.json").write_text("{}")
    runs = tmp_path / "runs"
    assert names(said(r"such as (\S+)", lambda: ckpt.open(runs))) == {"w"}
    for given in (runs, tmp_path):
        command = said(r"`ckpt (.*?)`", lambda given=given: ckpt.open(given))
        assert main(shlex.split(command)) == 0
        assert "step-10" in capsys.readouterr().out


def test_the_similar_path_is_opened(tmp_path: Path) -> None:
    weights(tmp_path / "model.safetensors")
    missing = tmp_path / "modle.safetensors"
    assert names(said(r"did you mean (\S+)\?", lambda: ckpt.open(missing))) == {"w"}


def test_an_archive_is_unpacked_and_its_files_are_opened(tmp_path: Path) -> None:
    plain = weights(tmp_path / "w.safetensors")
    content = plain.read_bytes()
    packed = tmp_path / "m.tar"
    with tarfile.open(packed, "w") as archive:
        archive.add(plain, "inside.safetensors")
    assert "unpack it with tar, and give the files in it" in message(lambda: ckpt.open(packed))
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path / "out", filter="data")
    assert names(tmp_path / "out" / "inside.safetensors") == {"w"}
    for module, program in ((gzip, "gunzip"), (lzma, "unxz"), (bz2, "bunzip2")):
        one = tmp_path / "one.bin"
        one.write_bytes(module.compress(content))  # type: ignore[attr-defined]
        assert f"with {program}" in message(lambda one=one: ckpt.open(one))
        one.write_bytes(module.decompress(one.read_bytes()))  # type: ignore[attr-defined]
        assert names(one) == {"w"}
    with zipfile.ZipFile(tmp_path / "m.zip", "w") as whole:
        whole.write(plain, "deep/w.safetensors")
    assert "unzip it, and give the files in it" in message(lambda: ckpt.open(tmp_path / "m.zip"))
    zipfile.ZipFile(tmp_path / "m.zip").extractall(tmp_path / "zip")
    assert names(tmp_path / "zip" / "deep" / "w.safetensors") == {"w"}


def test_an_old_pickle_is_pickled_again_and_a_json_file_is_the_folder_s(tmp_path: Path) -> None:
    path = tmp_path / "old.pkl"
    path.write_bytes(pickle.dumps({"step": 3, "rate": 0.5}, protocol=0))
    assert "load it where you trust it, and pickle it again" in message(lambda: ckpt.open(path))
    path.write_bytes(pickle.dumps(pickle.loads(path.read_bytes())))
    assert ckpt.read(path) == {"step": 3, "rate": 0.5}
    weights(tmp_path / "hf" / "model.safetensors")
    config = tmp_path / "hf" / "config.json"
    config.write_text("{}")
    assert "give the folder that it belongs to" in message(lambda: ckpt.open(config))
    assert names(config.parent) == {"w"}


def test_entries_that_the_target_lacks_are_excluded_or_others_included(tmp_path: Path) -> None:
    given, target = nn.Linear(3, 2), nn.Linear(3, 2)
    extra = {"epoch": 3, "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]}}
    torch.save({**given.state_dict(), **extra}, tmp_path / "m.pt")
    text = message(lambda: ckpt.load(tmp_path / "m.pt", target))
    found = re.search(r"with exclude=(\[.*?\]), with include= and patterns of the target's", text)
    assert found is not None, text
    ckpt.load(tmp_path / "m.pt", target, exclude=ast.literal_eval(found[1]))
    assert torch.equal(target.weight, given.weight)
    ckpt.load(tmp_path / "m.pt", nn.Linear(3, 2), include=["weight", "bias"])
    with pytest.warns(ckpt.SkippedWarning):
        ckpt.load(tmp_path / "m.pt", nn.Linear(3, 2), strict=False)


def llama(folder: Path, model_type: str = "llama", sizes: bool = True) -> Path:
    """A folder of Hugging Face, with or without the sizes that a mapping needs."""
    from safetensors.torch import load_file

    every = load_file(TITAN / "llama.safetensors")
    folder.mkdir()
    hf = {name[3:]: tensor for name, tensor in every.items() if name.startswith("hf.")}
    save_file(hf, folder / "model.safetensors")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2} if sizes else {}
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **heads}))
    return folder


def test_a_mapping_gets_its_sizes_and_leaves_out_what_it_does_not_name(tmp_path: Path) -> None:
    source, target = llama(tmp_path / "hf", sizes=False), tmp_path / "t.pt"
    name = said(
        r"parameters=\{'(\w+)': NUMBER\}",
        lambda: ckpt.convert(source, target, mapping="llama-hf-megatron"),
    )
    given = {name: 2}
    ckpt.convert(source, target, mapping="llama-hf-megatron", parameters=given)
    name = said(
        r"parameters=\{'(\w+)': NUMBER\}",
        lambda: ckpt.read(target, mapping="llama-megatron-hf", parameters=given),
    )
    given |= {name: 4}
    state = {"model": torch.load(target), "step": torch.ones(()), "extra": torch.ones(2)}
    torch.save(state, tmp_path / "run.pt")
    back = {"mapping": "llama-megatron-hf", "parameters": given}
    text = message(lambda: ckpt.convert(tmp_path / "run.pt", tmp_path / "b.pt", **back))
    assert "select= takes the model alone, and exclude= leaves tensors out" in text
    ckpt.convert(tmp_path / "run.pt", tmp_path / "b.pt", select="model", **back)
    torch.save({**state["model"], "extra": torch.ones(2)}, tmp_path / "more.pt")
    ckpt.convert(tmp_path / "more.pt", tmp_path / "c.pt", exclude="extra", **back)
    assert ckpt.diff(tmp_path / "b.pt", tmp_path / "c.pt").equal


def test_a_mapping_that_auto_names_is_taken(tmp_path: Path) -> None:
    source = llama(tmp_path / "hf")
    several = said(r"name one: (.*)", lambda: ckpt.read(source, mapping="auto"))
    for name in several.split(", "):
        assert ckpt.read(source, mapping=name)
    ckpt.convert(source, tmp_path / "m.pt", mapping=several.split(", ")[0])
    text = message(lambda: ckpt.convert(tmp_path / "m.pt", tmp_path / "b.pt", mapping="auto"))
    assert "give config=, the folder of the model" in text
    ckpt.convert(tmp_path / "m.pt", tmp_path / "b.pt", mapping="auto", config=source)
    assert ckpt.diff(source, tmp_path / "b.pt").equal
    known = said(r"the mappings are (.*?);", lambda: ckpt.read_mapping("llama"))
    assert all(ckpt.read_mapping(name).rules for name in known.split(", "))
    also = said(r"also takes (.*), chosen", lambda: ckpt.read_mapping("llama")).split(", ")
    assert "auto-hf-torchtitan" in also
    assert ckpt.read(source, mapping="auto-hf-torchtitan")


def test_the_model_that_an_error_names_is_selected(tmp_path: Path) -> None:
    model = {"w": torch.ones(2)}
    optimizer = {"state": {}, "param_groups": [{"lr": 0.1}]}
    cases = {
        "list": {"models": [model, model], "optimizer": optimizer},
        "below": {"net": {"model": model}, "other": {"model": model}, "optimizer": optimizer},
    }
    for name, state in cases.items():
        path = tmp_path / f"{name}.pt"
        torch.save(state, path)
        target = tmp_path / f"{name}-out.pt"
        place = said(
            r"select='?([\w.]+)",
            lambda path=path, target=target: ckpt.convert(path, target, part="model"),
        )
        ckpt.convert(path, target, select=place)
        assert names(target) == {"w"}
    torch.save({"model": model, "ema": {"w": torch.zeros(2)}}, tmp_path / "two.pt")

    def convert(**given: Any) -> Any:
        return ckpt.convert(tmp_path / "two.pt", tmp_path / "hf", to="hf", overwrite=True, **given)

    place = said(r"name it with select='(\w+)'", convert)
    assert place == "model"
    assert convert(select=place).tensors == 1
    assert "under its full names, with select=''" in message(convert)
    assert convert(select="").tensors == 2
    top = said(
        r"its top entries are (.*)", lambda: ckpt.convert(tmp_path / "two.pt", "x.pt", select="m")
    )
    assert {convert(select=place).tensors for place in top.split(", ")} == {1}
