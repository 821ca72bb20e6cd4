import json
import re

import pytest
import torch
from safetensors.torch import save_file

import ckpt
from ckpt.saving.save import save
from sharding.layout import Layout, Mesh, Shard, Split
from tools.exit_codes import ExitCode
from tools.inspect import legend, selects


def test_a_tree_shows_dtype_shape_bytes_and_placement(run, saved):
    lines = run("inspect", saved).out.splitlines()
    assert lines[0].startswith(f"{saved}: ckpt, 36 parameters, 4 tensors, ")
    (embed,) = [line for line in lines if line.split()[:1] == ["embed.weight"]][:1]
    assert embed.split() == ["embed.weight", "float32", "[8,", "4]", "128", "B", "world:1=R"]


def test_layouts_have_a_legend_dates_are_dates_and_metrics_are_numbers(run, tmp_path):
    with ckpt.Checkpointer(tmp_path, every_steps=1, signals=()) as trained:
        trained.save(1, {"w": torch.zeros(4)}, {"loss": 3.612345678, "tokens": 120_000})
    out = run("inspect", tmp_path / "step-1").out
    assert "  metrics: loss=3.61235, tokens=120,000\n" in out
    assert re.search(r"\n  run:\n    command: ", out)
    assert len(re.findall(r"  (?:time|began): \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\n", out)) == 2
    assert "layouts:" not in out  # one rank has everything
    mesh = Mesh.grid(("dp", "tp"), (2, 2))
    found = list(legend([Layout((8, 4), mesh, (Shard(0), Split())), None]))
    assert found[1].startswith("layouts: dp:2=S(0) is axis dp of the mesh, 2 ranks, ")
    assert [line.split()[0] for line in found[2:]] == ["S(D)", "split"]


def test_what_the_writer_said_of_itself_is_shown(run, saved):
    out = run("inspect", saved).out
    assert "  world_size: 1\n" in out
    assert "  note: first\n" in out


def test_a_tied_name_says_what_it_is_tied_to(run, saved):
    assert "tied to model.embed.weight" in run("inspect", saved).out


def test_a_branch_says_how_much_is_in_it(run, saved):
    (line,) = [x for x in run("inspect", saved).out.splitlines() if x.startswith("model ")]
    assert line.split() == ["model", "2", "tensors", "144", "B"]


def test_depth_folds_what_is_deeper(run, saved):
    out = run("inspect", saved, "--depth", "1").out
    assert "norm.scale" not in out
    assert "\nmodel " in out


def test_a_depth_below_one_is_wrong_usage(run, saved):
    assert run("inspect", saved, "--depth", "0").code == ExitCode.USAGE


def test_values_are_counted_and_shown_when_asked_for(run, saved):
    assert "3 plain values; --values shows them" in run("inspect", saved).out
    out = run("inspect", saved, "--values").out
    assert "= 0.001" in out
    assert "= (0.9, 0.99)" in out
    assert "= 3" in out


def test_files_are_listed_when_asked_for(run, saved):
    out = run("inspect", saved, "--files").out
    assert "manifest.json" in out
    assert sum(line.endswith("B") and ".safetensors" in line for line in out.splitlines()) == 1
    assert run("inspect", saved, "-v").out == run("inspect", saved, "--files", "--values").out


@pytest.mark.parametrize("pattern", ["model.norm", "*.scale", "model.n?rm.*"])
def test_patterns_choose_names(run, saved, pattern):
    out = run("inspect", saved, pattern).out
    assert "norm.scale" in out
    assert "embed" not in out
    assert "1 tensor," in out


def test_a_pattern_names_what_is_below_it_and_no_longer_name():
    assert selects("layers.1", "layers.1.w")
    assert not selects("layers.1", "layers.10.w")


def test_json_has_everything_a_program_needs(run, saved):
    found = json.loads(run("inspect", saved, "--json").out)
    assert found["format"] == "ckpt"
    assert found["bytes"] == 144 + 132
    assert found["aliases"] == {"model.head.weight": "model.embed.weight"}
    assert found["tensors"][0] == {
        "name": "model.embed.weight",
        "dtype": "float32",
        "shape": [8, 4],
        "bytes": 128,
        "placement": "world:1=R",
    }
    assert found["values"] == {
        "optimizer.param_groups.0.lr": 0.001,
        "optimizer.param_groups.0.betas": {"$tuple": [0.9, 0.99]},
        "step": 3,
    }
    assert next(file["name"] for file in found["files"]) == "manifest.json"


def test_values_that_json_has_no_words_for_are_still_json(run, tmp_path):
    save(tmp_path / "c", {"loss": float("nan"), "raw": b"\x00\xff", "kind": torch.bfloat16})
    found = json.loads(run("inspect", tmp_path / "c", "--json").out)
    assert found["values"]["loss"] == {"$float": "nan"}
    assert found["values"]["kind"] == {"$dtype": "BF16"}


def test_a_checkpoint_without_tensors_can_be_inspected(run, tmp_path):
    save(tmp_path / "c", {"step": 1})
    ended = run("inspect", tmp_path / "c")
    assert ended.code == 0
    assert "0 tensors" in ended.out


def test_long_values_are_cut(run, tmp_path):
    save(tmp_path / "c", {"text": "x" * 10_000})
    out = run("inspect", tmp_path / "c", "--values").out
    assert max(map(len, out.splitlines())) < 300


def test_a_name_that_nothing_has_is_wrong_usage(run, saved):
    ended = run("inspect", saved, "model", "modle.norm")
    assert (ended.code, ended.out) == (ExitCode.USAGE, "")
    assert "'modle.norm' matches no name; there are model.norm" in ended.err
    for name in ("model", "step", "optimizer.param_groups.0", "model.head.weight"):
        assert run("inspect", saved, name).code == 0


def test_two_values_of_one_name_are_an_error_and_not_one_of_them(run, tmp_path):
    torch.save({"a.b": 1, "a": {"b": 2}}, tmp_path / "e.pt")
    torch.save({"a.b": 1, "a": {"b": torch.ones(2)}}, tmp_path / "f.pt")
    for file in ("e.pt", "f.pt"):
        for more in ([], ["--json"]):
            ended = run("inspect", tmp_path / file, *more)
            assert (ended.code, ended.out) == (ExitCode.USAGE, "")
            assert f"two entries of {tmp_path / file} get the name 'a.b'" in ended.err


def test_a_bracket_in_a_pattern_is_a_bracket(run, tmp_path):
    save(tmp_path / "c", {"blk[0].w": torch.ones(1), "blk0.w": torch.ones(1)})
    found = json.loads(run("inspect", tmp_path / "c", "blk[0]", "--json").out)
    assert [tensor["name"] for tensor in found["tensors"]] == ["blk[0].w"]


def test_notes_of_a_checkpoint_are_shown(run, tmp_path):
    for name in ("a", "b"):
        save_file({name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    note = "2 files without numbers or an index were read as one checkpoint"
    assert f"  note: {note}" in run("inspect", tmp_path).out.splitlines()
    assert json.loads(run("inspect", tmp_path, "--json").out)["notes"] == [note]


def test_inspect_and_convert_count_and_name_plain_values_alike(run, tmp_path):
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}]
    state = {"w": torch.ones(2), "optim": {"state": {}, "param_groups": groups}, "log": [1, [2]]}
    save(tmp_path / "a", state)
    assert "; 6 plain values;" in run("inspect", tmp_path / "a").out
    shown = json.loads(run("inspect", tmp_path / "a", "--json").out)["values"]
    ended = run("convert", tmp_path / "a", tmp_path / "a.safetensors", "--json")
    assert json.loads(ended.out)["left_out"] == list(shown)
