import json

import pytest
import torch
from safetensors.torch import load_file

from tools.exit_codes import ExitCode


def test_the_summary_says_from_what_to_what_and_how_much(run, saved, tmp_path):
    target = tmp_path / "model.safetensors"
    ended = run("convert", saved, target, "--select", "model")
    assert ended.code == ExitCode.FINE
    line = ended.out.splitlines()[0]
    assert line.startswith(f"{saved} (ckpt) -> {target} (safetensors): 2 tensors, 144 B in ")
    assert load_file(target)["embed.weight"].shape == (8, 4)


def test_values_that_the_target_cannot_hold_are_named(run, saved, tmp_path):
    ended = run("convert", saved, tmp_path / "all.safetensors")
    assert "step" in ended.out
    assert "left out" in ended.out


@pytest.mark.parametrize("to", ["ckpt", "safetensors", "hf", "torch", "dcp"])
def test_every_target_and_back_is_equal_to_the_bit(run, saved, tmp_path, to):
    assert run("convert", saved, tmp_path / "there", "--to", to).code == 0
    assert run("verify", tmp_path / "there").code == 0
    assert run("convert", tmp_path / "there", tmp_path / "back", "--to", "ckpt").code == 0
    ended = run("diff", saved, tmp_path / "back", "--tensors-only")
    assert ended.out.startswith("no difference: 4 tensors")


def test_what_is_there_is_not_overwritten_unless_asked(run, saved, tmp_path):
    target = tmp_path / "model.pt"
    target.write_bytes(b"precious")
    ended = run("convert", saved, target)
    assert ended.code == ExitCode.EXISTS
    assert "--overwrite" in ended.err
    assert target.read_bytes() == b"precious"
    assert run("convert", saved, target, "--overwrite").code == 0
    assert torch.load(target, weights_only=True)["step"] == 3


def test_patterns_sizes_and_dtypes_are_handed_on(run, saved, tmp_path):
    ended = run(
        *("convert", saved, tmp_path / "hf", "--to", "hf", "--include", "model.*"),
        *("--exclude", "*.scale", "--dtype", "bfloat16", "--max-shard-size", "2GiB"),
    )
    assert ended.code == 0
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "model.embed.weight": torch.bfloat16
    }


def test_json_has_the_summary(run, saved, tmp_path):
    found = json.loads(run("convert", saved, tmp_path / "m.safetensors", "--json").out)
    assert found["source_format"] == "ckpt"
    assert found["tensors"] == 4
    assert found["bytes"] == 276
    assert any("step" in name for name in found["left_out"])


def test_damage_stops_the_conversion(run, damaged, tmp_path):
    ended = run("convert", damaged, tmp_path / "m.safetensors")
    assert ended.code == ExitCode.DAMAGED
    assert not (tmp_path / "m.safetensors").exists()
