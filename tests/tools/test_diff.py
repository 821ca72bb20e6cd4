import json
import shutil

import torch

from ckpt.saving.save import save
from tools.exit_codes import ExitCode


def test_a_checkpoint_is_equal_to_its_copy(run, saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    ended = run("diff", saved, tmp_path / "copy")
    assert ended.code == ExitCode.FINE
    assert ended.out == (
        "no difference: 4 tensors, 276 B compared, 276 B of them by recorded checksums "
        "(--read-all reads them)\n"
    )
    assert run("diff", "--read-all", saved, tmp_path / "copy").out == (
        "no difference: 4 tensors, 276 B compared\n"
    )


def test_every_kind_of_difference_is_one_line(run, tmp_path):
    a = {"w": torch.zeros(2, 3), "x": torch.zeros(2), "y": torch.zeros(2), "a": torch.ones(1)}
    b = {
        "w": torch.tensor([[0.0, 0, 0], [0, 0.5, 0]]),
        "x": torch.zeros(3),
        "y": torch.zeros(2, dtype=torch.float16),
        "b": torch.ones(1),
    }
    save(tmp_path / "a", {**a, "step": 3})
    save(tmp_path / "b", {**b, "step": 4})
    ended = run("diff", tmp_path / "a", tmp_path / "b")
    assert ended.code == ExitCode.DIFFERENT
    largest = "the largest difference is 0.5 (relative 1)"
    assert ended.out.splitlines() == [
        f"A is {tmp_path}/a",
        f"B is {tmp_path}/b",
        "- a: only in A",
        "+ b: only in B",
        "! x: shape [2] in A, [3] in B",
        "! y: dtype float32 in A, float16 in B",
        f"! w: 1 of 6 elements differ, first at [1, 1]: 0 in A, 0.5 in B; {largest}",
        "! step: 3 in A, 4 in B",
        (
            "6 differences: 2 in names, 3 in tensors, 1 in values; 1 tensor, 24 B compared; "
            "the largest difference is 0.5, in w"
        ),
    ]


def test_weights_and_large_differences_come_first_and_random_states_stand_apart(run, tmp_path):
    names = [f"model.layers.{layer}.{name}" for layer in range(3) for name in "abcdefgh"]
    state = {name: torch.zeros(2) for name in names}
    state |= {"rng.rank0": torch.zeros(4, dtype=torch.uint8), "optim.step": torch.zeros(1)}
    state["optim.state.a.exp_avg"] = torch.zeros(2)
    save(tmp_path / "a", state)
    other = {name: value + at / 8 for at, (name, value) in enumerate(state.items())}
    save(tmp_path / "b", {**other, "rng.rank0": state["rng.rank0"] + 200})
    assert run("diff", "-q", tmp_path / "a", tmp_path / "b").out == ""
    lines = run("diff", tmp_path / "a", tmp_path / "b").out.splitlines()
    changed = [line.split()[1] for line in lines if line.startswith("! ")]
    assert changed == [f"{name}:" for name in reversed(names[1:])][:20]  # a is equal
    assert "... and 5 more; -v prints all" in lines
    assert "  model.layers.0   7 of 8        14    0.875" in lines
    assert "random states, which differ at each step: rng.rank0" in lines
    assert "  optim.step       1 of 1         1    3.125" in lines
    last = "; the largest difference is 3.25, in optim.state.a.exp_avg"
    assert lines[-1].endswith(last)  # not the 200 of random states
    whole = run("diff", "-v", tmp_path / "a", tmp_path / "b").out.splitlines()
    shown = [line for line in whole if line.startswith("! ")]
    last = [line.split()[1] for line in shown[-2:]]
    assert (len(shown), last) == (25, ["optim.state.a.exp_avg:", "optim.step:"])


def test_a_value_of_one_side_alone_and_a_long_one_are_told_by_their_difference(run, tmp_path):
    long = "x" * 300
    save(tmp_path / "a", {"lr": 0.1, "only_a": 1, "note": f"{long}1", "w": torch.tensor(1.0)})
    save(tmp_path / "b", {"lr": 0.2, "only_b": 2, "note": f"{long}2", "w": torch.tensor(2.0)})
    lines = run("diff", tmp_path / "a", tmp_path / "b").out.splitlines()
    assert "! lr: 0.1 in A, 0.2 in B" in lines
    assert "- only_a: only in A: 1" in lines
    assert "+ only_b: only in B: 2" in lines
    same = "x" * 20
    assert f"! note: ...{same}1' in A, ...{same}2' in B" in lines
    assert any(line.startswith("! w: 1 of 1 elements differ: 1 in A, 2 in B; ") for line in lines)


def test_a_tolerance_forgives_and_says_how_much(run, tmp_path):
    save(tmp_path / "a", {"w": torch.ones(4)})
    save(tmp_path / "b", {"w": torch.ones(4) + 0.25})
    ended = run("diff", tmp_path / "a", tmp_path / "b", "--atol", "0.3")
    assert ended.code == 0
    assert "1 within the tolerance and not equal; the largest difference is 0.25" in ended.out
    assert run("diff", tmp_path / "a", tmp_path / "b", "--rtol", "0.1").code == 1


def test_an_exported_part_is_compared_with_select(run, saved, tmp_path):
    exported = tmp_path / "model.safetensors"
    assert run("convert", saved, exported, "--select", "model").code == 0
    ended = run("diff", saved, exported, "--select", "model")
    assert ended.code == 0
    assert "no difference" in ended.out
    assert run("diff", saved, exported).code == 1


def test_names_below_one_prefix_are_told_with_the_option_that_compares_them(run, tmp_path):
    weights = {"embed.w": torch.ones(2), "w": torch.ones(3)}
    save(tmp_path / "plain", weights)
    save(tmp_path / "all", {"model": weights})
    save(tmp_path / "run", {"model": weights, "ema": torch.ones(2)})
    for a, b, names, option in (
        ("all", "plain", "B are in A", ("--rename", "model=")),
        ("plain", "all", "A are in B", ("--rename", "=model")),
        ("run", "plain", "B are in A", ("--select", "model")),
        ("plain", "run", "A are in B", ("--select", "model")),
    ):
        told = f"note: all names of {names} below model; {' '.join(option)} compares them"
        assert told in run("diff", tmp_path / a, tmp_path / b).out.splitlines()
        assert run("diff", tmp_path / a, tmp_path / b, *option).code == ExitCode.FINE
    save(tmp_path / "other", {"v": torch.ones(2)})
    assert "note" not in run("diff", tmp_path / "plain", tmp_path / "other").out
    base = {"model": weights, "head": torch.ones(2)}  # --select would change both
    save(tmp_path / "base", base)
    save(tmp_path / "beside", {"model": base, "ema": weights, "emb": torch.ones(2)})
    told = "--rename model= --exclude 'ema*' --exclude 'emb*'"
    assert f"model; {told} compares them" in run("diff", tmp_path / "beside", tmp_path / "base").out
    options = told.replace("'", "").split()
    assert run("diff", tmp_path / "beside", tmp_path / "base", *options).code == ExitCode.FINE
    save(tmp_path / "mixed", {"model": base, "head": weights})  # whose names both sides have
    assert "note" not in run("diff", tmp_path / "mixed", tmp_path / "base").out


def test_values_are_left_alone_when_told(run, tmp_path):
    save(tmp_path / "a", {"w": torch.ones(4), "step": 1})
    save(tmp_path / "b", {"w": torch.ones(4), "step": 2})
    assert run("diff", tmp_path / "a", tmp_path / "b", "--tensors-only").code == 0


def test_json_has_the_comparison(run, tmp_path):
    save(tmp_path / "a", {"w": torch.ones(4)})
    save(tmp_path / "b", {"w": torch.tensor([1, 1, 1, float("nan")])})
    ended = run("diff", tmp_path / "a", tmp_path / "b", "--json")
    assert ended.code == 1
    found = json.loads(ended.out)
    assert found["equal"] is False
    assert found["tensors"][0]["first"] == [3]
    assert found["max_abs"] == found["tensors"][0]["max_abs"] == "inf"


def test_a_negative_tolerance_is_wrong_usage(run, saved):
    assert run("diff", saved, saved, "--atol", "-1").code == ExitCode.USAGE


def test_a_select_that_nothing_has_is_wrong_usage(run, saved):
    ended = run("diff", saved, saved, "--select", "teacher")
    assert ended.code == ExitCode.USAGE
    assert "teacher" in ended.err


def test_damage_is_an_error_not_a_difference(run, damaged):
    assert run("diff", "--read-all", damaged, damaged).code == ExitCode.DAMAGED


def test_a_difference_of_structure_is_a_line_and_in_the_json(run, tmp_path):
    save(tmp_path / "a", {"betas": (0.9, 0.99), "state": {0: 1}})
    save(tmp_path / "b", {"betas": [0.9, 0.99], "state": {"0": 1}})
    ended = run("diff", tmp_path / "a", tmp_path / "b")
    assert ended.code == ExitCode.DIFFERENT
    assert ended.out.splitlines() == [
        f"A is {tmp_path}/a",
        f"B is {tmp_path}/b",
        "! betas: a tuple in A, a list in B",
        "! state.0: under the key 0 in A, under '0' in B",
        (
            "2 differences: 0 in names, 0 in tensors, 0 in values, 2 in structure; "
            "0 tensors, 0 B compared"
        ),
    ]
    found = json.loads(run("diff", tmp_path / "a", tmp_path / "b", "--json").out)
    assert found["equal"] is False
    assert found["structure"][0] == {"name": "betas", "a": "a tuple", "b": "a list"}
    assert run("diff", tmp_path / "a", tmp_path / "b", "--tensors-only").code == 0


def test_patterns_that_leave_nothing_to_compare_are_wrong_usage(run, saved):
    for patterns in (["--include", "modle.*"], ["--exclude", "*"], ["--exclude", "modle.*"]):
        ended = run("diff", saved, saved, *patterns)
        assert (ended.code, ended.out) == (ExitCode.USAGE, "")
        assert ended.err.startswith(f"ckpt: {saved} and {saved}: ")
