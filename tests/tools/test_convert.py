import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckpt
from ckpt.saving.save import save
from tools.exit_codes import ExitCode


def test_the_summary_says_from_what_to_what_and_how_much(run, saved, tmp_path):
    target = tmp_path / "model.safetensors"
    ended = run("convert", saved, target, "--select", "model")
    assert ended.code == ExitCode.FINE
    line = ended.out.splitlines()[0]
    assert line.startswith(f"{saved} (ckpt) -> {target} (safetensors): 2 tensors, 144 B in ")
    assert load_file(target)["embed.weight"].shape == (8, 4)


def test_what_lies_beside_the_weights_of_a_training_is_named(run, tmp_path):
    trainer = Path(__file__).parents[1] / "data" / "trainer" / "checkpoint-2"
    ended = run("convert", trainer, tmp_path / "x.safetensors")
    assert ended.code == ExitCode.FINE
    took = r"note: took the weights alone, model; for another part pass --select optimizer \(or "
    assert re.search(took + r".*\), for everything --select ''\n", ended.out)
    ended = run("convert", trainer, tmp_path / "hf", "--to", "hf", "--dry-run")
    assert "note: would take the weights alone, model; " in ended.out
    assert "note: would be copied beside the weights: config.json" in ended.out
    ended = run("convert", trainer, tmp_path / "y.pt", "--select", "optimizer")
    assert "the weights alone" not in ended.out
    ended = run("inspect", trainer, "--depth", "1", "--values")
    assert "<transformers.training_args.TrainingArguments>" in ended.out


def test_values_that_the_target_cannot_hold_are_named(run, saved, tmp_path):
    ended = run("convert", saved, tmp_path / "all.safetensors")
    assert "step" in ended.out
    assert "left out" in ended.out
    assert "note: names of the model keep the prefix 'model.'; --model-only takes " in ended.out
    ended = run("convert", saved, tmp_path / "model.safetensors", "--model-only")
    assert "prefix" not in ended.out


@pytest.mark.parametrize("to", ["ckpt", "safetensors", "hf", "torch", "dcp"])
def test_every_target_and_back_is_equal_to_the_bit(run, saved, tmp_path, to):
    everything = ("--select", "")  # without it hf gets the model alone
    assert run("convert", saved, tmp_path / "there", "--to", to, *everything).code == 0
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


def test_weights_without_a_configuration_are_warned_of_with_an_option_that_helps(
    run, saved, tmp_path
):
    command = ("convert", saved, tmp_path / "hf", "--to", "hf", "--model-only")
    assert "add" not in run(*command, "--dry-run", "-q").err
    ended = run(*command)
    assert ended.code == 0
    assert ended.err == (
        f"warning: {tmp_path}/hf has no config.json, and from_pretrained needs one: repeat the "
        "command with --config FOLDER --overwrite, the folder of the model with its config.json "
        "and tokenizer\n"
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    ended = run(*command, "--config", tmp_path / "model", "--overwrite")
    assert (ended.code, ended.err) == (0, "")
    assert (tmp_path / "hf" / "config.json").exists()


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


@pytest.mark.parametrize(
    ("kind", "ranks", "embed", "step", "said"),
    [
        ("full", "2", "world:2=only(0)", "world:2=only(1)", "full over 2 ranks"),
        ("full", None, "world:1=R", "world:1=R", "full over 1 rank"),
        ("sharded", "3", "dim_0:3=S(0)", "world:3=only(0)", "sharded over 3 ranks"),
        ("local", "5", "world:5=F(0,7)", "world:5=only(0)", "local over 5 ranks"),
    ],
)
def test_a_kind_and_a_number_of_ranks_are_said_and_shown(
    run, saved, tmp_path, kind, ranks, embed, step, said
):
    options = ["--kind", kind] + (["--world-size", ranks] if ranks else [])
    ended = run("convert", saved, tmp_path / "made", *options)
    assert (ended.code, ended.err) == (ExitCode.FINE, "")
    assert f" (ckpt, {said}): 4 tensors, 276 B in " in ended.out
    shown = json.loads(run("inspect", tmp_path / "made", "--json").out)
    placements = {tensor["name"]: tensor["placement"] for tensor in shown["tensors"]}
    assert placements["model.embed.weight"] == embed
    assert placements["optimizer.state.embed.weight.step"] == step
    assert shown["metadata"]["world_size"] == (ranks or "1")
    assert embed in run("inspect", tmp_path / "made").out
    assert run("diff", saved, tmp_path / "made").out.startswith("no difference: 4 tensors")
    options.append("--overwrite")
    found = json.loads(run("convert", saved, tmp_path / "made", *options, "--json").out)
    assert (found["kind"], found["world_size"]) == (kind, int(ranks or 1))


def test_json_has_no_kind_where_none_was_asked_for(run, saved, tmp_path):
    found = json.loads(run("convert", saved, tmp_path / "made", "--json").out)
    assert (found["kind"], found["world_size"]) == (None, None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--kind", "full", "--world-size", "0"], "'0' is no number of ranks"),
        (["--kind", "full", "--world-size", "-1"], "'-1' is no number of ranks"),
        (["--kind", "full", "--world-size", "1.5"], "'1.5' is no number of ranks"),
        (["--kind", "flat"], "invalid choice: 'flat'"),
        (["--world-size", "2"], "give one of full, sharded, local as well (--kind)"),
        (["--kind", "local"], "local needs a number of ranks"),
        (
            ["--kind", "local", "--world-size", "2", "--to", "hf"],
            "with --to ckpt, or leave out --kind and",
        ),
    ],
)
def test_a_division_that_cannot_be_is_a_wrong_argument(run, saved, tmp_path, options, said):
    ended = run("convert", saved, tmp_path / "made", *options)
    assert ended.code == ExitCode.USAGE
    assert said in ended.err
    assert ended.err.startswith("ckpt: ")
    assert not (tmp_path / "made").exists()


def test_a_truncated_file_of_a_rank_stops_the_conversion_before_it_begins(run, saved, tmp_path):
    options = ("--kind", "local", "--world-size")
    assert run("convert", saved, tmp_path / "three", *options, "3").code == 0
    last = sorted((tmp_path / "three").glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    ended = run("convert", tmp_path / "three", tmp_path / "two", *options, "2")
    assert ended.code == ExitCode.DAMAGED
    assert f"{last}: the file has" in ended.err
    assert "it was truncated; restore it" in ended.err
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (["--include", "modle.*"], "'modle.*' matches no name; there are model"),
        (["--include", "model.*", "--include", "stepp"], "'stepp' matches no name; there are step"),
        (["--exclude", "modle.*"], "exclude: 'modle.*' matches no name; there are model"),
        (["--exclude", "*"], "are excluded by '*'"),
        (["--select", "model", "--include", "model.*"], "'model.*' matches no name; there are"),
    ],
)
def test_patterns_that_choose_nothing_are_wrong_usage_and_nothing_is_written(
    run, saved, tmp_path, patterns, said
):
    ended = run("convert", saved, tmp_path / "made", *patterns)
    assert ended.code == ExitCode.USAGE
    assert said in ended.err
    assert not (tmp_path / "made").exists()


def test_a_bracket_in_a_pattern_is_a_bracket(run, tmp_path):
    torch.save({"blk[0].w": torch.ones(1), "blk0.w": torch.ones(1)}, tmp_path / "e.pt")
    target = tmp_path / "m.safetensors"
    assert run("convert", tmp_path / "e.pt", target, "--include", "blk[0].w").code == 0
    assert list(load_file(target)) == ["blk[0].w"]


@pytest.mark.parametrize("to", ["safetensors", "hf", "torch", "dcp"])
def test_compression_of_a_format_that_has_none_is_a_wrong_argument(run, saved, tmp_path, to):
    ended = run("convert", saved, tmp_path / "made", "--to", to, "--compress")
    assert (ended.code, ended.out) == (ExitCode.USAGE, "")
    assert f"made would be written as {to}, which is not compressed" in ended.err
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "dtype",
    [
        *("int8", "bool", "uint16", "complex64", "float8_e8m0fnu", "float4_e2m1fn_x2"),
        *("bf16", "float", ""),
    ],
)
def test_a_type_that_weights_cannot_be_cast_to_is_a_wrong_argument(run, saved, tmp_path, dtype):
    ended = run("convert", saved, tmp_path / "made", "--dtype", dtype)
    assert (ended.code, ended.out) == (ExitCode.USAGE, "")
    assert (
        f"floating-point tensors cannot be cast to {dtype!r}; give --dtype as one of" in ended.err
    )
    assert not (tmp_path / "made").exists()


def test_smaller_floats_that_were_not_cast_are_named(run, tmp_path):
    w = torch.ones(4)
    kinds = {"e4": torch.float8_e4m3fn, "e5": torch.float8_e5m2, "e8": torch.float8_e8m0fnu}
    state = {"w": w, "n": torch.arange(3), **{name: w.to(kind) for name, kind in kinds.items()}}
    save(tmp_path / "c", state)
    ended = run("convert", tmp_path / "c", tmp_path / "made", "--dtype", "torch.bfloat16")
    assert ended.out.splitlines()[1:] == ["note: 3 tensors of smaller floats not cast: e4, e5, e8"]
    options = ("--to", "torch", "--dtype", "float8_e5m2", "--json")
    found = json.loads(run("convert", tmp_path / "c", tmp_path / "e5.pt", *options).out)
    assert found["not_cast"] == ["e4", "e8"]
    assert torch.load(tmp_path / "e5.pt", weights_only=True)["w"].dtype == torch.float8_e5m2
    plain = json.loads(run("convert", tmp_path / "c", tmp_path / "plain", "--json").out)
    assert plain["not_cast"] == []


MAPPING = """
[[rule]]
from = "*.scale"
to = "*.gain"
[[rule]]
from = "embed.weight"
to = "embed"
rearrange = "(half v) d -> half d v"
sizes = { half = "parts" }
"""


def test_names_and_shapes_change_as_the_options_say(run, saved, tmp_path):
    (tmp_path / "m.toml").write_text(MAPPING)
    changes = (
        "--map",
        tmp_path / "m.toml",
        "--set",
        "parts=2",
        "--rename",
        r"/head\.(w.*)/=out.\1",
    )
    ended = run(
        *(
            "convert",
            saved,
            tmp_path / "m.safetensors",
            "--model-only",
            *changes,
            "--prefix",
            "net",
        ),
        *("--dtype", "*gain=keep", "--dtype", "bfloat16", "--verify", "-v"),
    )
    assert ended.code == 0
    assert ended.err == ""
    *rows, summary = ended.out.splitlines()
    assert [" ".join(row.split()) for row in rows] == [
        "model.embed.weight -> net.embed float32 -> bfloat16 [2, 4, 4] 64 B",
        "model.norm.scale -> net.norm.gain float32 [4] 16 B",
        "model.head.weight -> net.out.weight float32 -> bfloat16 [8, 4] 64 B",
    ]
    assert summary.endswith(" s, read back and equal")
    found = load_file(tmp_path / "m.safetensors")
    assert found["net.embed"].shape == (2, 4, 4)
    assert found["net.norm.gain"].dtype == torch.float32
    ended = run("diff", saved, tmp_path / "m.safetensors", "--select", "model", *changes, "-v")
    assert ended.code == ExitCode.DIFFERENT  # the prefix is missing
    ended = run(
        *("convert", tmp_path / "m.safetensors", tmp_path / "back", "--inverse-map"),
        *(tmp_path / "m.toml", "--set", "parts=2", "--select", "net", "--rename", "out=head"),
    )
    assert ended.code == 0
    ended = run("diff", tmp_path / "back", saved, "--select", "model", "--ignore-dtype", "-v")
    assert "= norm.scale" in ended.out.splitlines()


def test_a_dry_run_prints_the_plan_and_writes_nothing(run, saved, tmp_path):
    ended = run("convert", saved, tmp_path / "m.pt", "--optimizer-only", "--dry-run")
    assert ended.code == 0
    *rows, summary, note = ended.out.splitlines()
    name = "state.embed.weight.exp_avg"
    assert rows[-1].split()[:3] == [f"optimizer.{name}", "->", name]
    assert note.startswith("note: 1 value left out, which torch cannot hold: metadata")
    assert "132 B to write, 132 B to read, at most " in summary
    assert summary.endswith(" in memory; a dry run: nothing was written")
    assert not (tmp_path / "m.pt").exists()
    ended = run("convert", saved, tmp_path / "m.pt", "--optimizer-only", "--dry-run", "--json")
    summary = json.loads(ended.out)
    assert summary["written"] is False
    assert summary["plan"]["read_bytes"] == 132


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rename", "old"], "'old' is not of the form OLD=NEW"),
        (["--rename", "a=b", "--rename", "a=c"], "--rename has 'a' twice"),
        (["--set", "heads=many"], "'heads=many' is not of the form NAME=N"),
        (["--dtype", "int8"], "cannot be cast to 'int8'"),
        (["--dtype", "float16", "--dtype", "bfloat16"], "--dtype has '*' twice"),
        (["--map", "nothing"], "'nothing' is neither a mapping nor a file; the mappings are"),
        (["--select", "model", "--model-only"], "not allowed with argument"),
    ],
)
def test_a_wrong_option_is_one_line(run, saved, tmp_path, arguments, said):
    ended = run("convert", saved, tmp_path / "out", *arguments)
    assert ended.code == ExitCode.USAGE
    assert said in ended.err
    assert ended.err.count("\n") == 1


def test_a_part_that_is_not_there_is_told_by_the_option_that_names_it(run, saved, tmp_path):
    ended = run("convert", saved, tmp_path / "made", "--select", "modle")
    assert (ended.code, ended.out) == (ExitCode.USAGE, "")
    top = "its top entries are model, optimizer, step"
    assert ended.err == f"ckpt: {saved}: --select modle names no entry of the checkpoint; {top}\n"


def test_a_merge_says_what_it_wrote(run, tmp_path):
    for step, value in enumerate((1.0, 2.0, 6.0)):
        save(tmp_path / f"run/step-{step}", {"model": {"w": torch.full((4,), value)}, "step": step})
    steps = [tmp_path / f"run/step-{step}" for step in range(3)]
    ended = run("merge", tmp_path / "run", "--last", "3", tmp_path / "m.safetensors")
    assert ended.code == ExitCode.FINE
    assert "step-0 + " in ended.out
    assert "-> " + str(tmp_path / "m.safetensors") + " (safetensors): 1 tensor, 16 B" in ended.out
    ended = run("merge", *steps, tmp_path / "ema.pt", "--ema", "0.5", "--model-only", "--verify")
    assert "read back and equal" in ended.out
    assert torch.load(tmp_path / "ema.pt")["w"].tolist() == [3.75] * 4
    summed = json.loads(run("merge", *steps, tmp_path / "x", "--weights=1,-1,1", "--json").out)
    assert (summed["tensors"], summed["written"]) == (1, True)
    assert ckpt.read(tmp_path / "x")["model"]["w"].tolist() == [5.0] * 4
    for wrong, said in (
        (["--weights", "1"], "3 checkpoints have 1 weights"),
        (["--weights", "a,b"], "'a,b' is no list of numbers"),
        (["--last", "2"], "give one run and a number"),
    ):
        ended = run("merge", *steps, tmp_path / "y", *wrong)
        assert ended.code == ExitCode.USAGE
        assert said in ended.err
