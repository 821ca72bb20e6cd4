"""What the demo's comparison of losses rests on: the same data on any number of ranks."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TEXT = bytes(range(256)) * 40


@pytest.fixture(name="example")
def fixture_example(monkeypatch: pytest.MonkeyPatch) -> object:
    """Import an example as the scripts see each other: by its bare name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def test_the_batch_of_a_step_depends_on_text_seed_and_step_alone(example):
    text = example("text")
    one, other = text.Batches(TEXT, seed=3), text.Batches(TEXT, seed=3)
    for step in (5, 0, 117):
        other.share(step + 1)  # asking for other steps first changes nothing
        for mine, yours in zip(one.share(step), other.share(step), strict=True):
            assert torch.equal(mine, yours)
    assert not torch.equal(one.share(5)[0], one.share(6)[0])
    assert not torch.equal(one.share(5)[0], text.Batches(TEXT, seed=4).share(5)[0])


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 12])
def test_the_shares_of_all_ranks_are_the_same_global_batch_in_every_world(example, world):
    batches = example("text").Batches(TEXT, seed=1)
    for step in range(3):
        whole = batches.share(step)
        shares = [batches.share(step, rank, world) for rank in range(world)]
        assert len({inputs.shape for inputs, _ in shares}) == 1
        assert torch.equal(torch.cat([inputs for inputs, _ in shares]), whole[0])
        assert torch.equal(torch.cat([targets for _, targets in shares]), whole[1])


def test_a_target_is_the_byte_that_follows_its_input(example):
    inputs, targets = example("text").Batches(TEXT, seed=1).share(0)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal((inputs + 1) % 256, targets)  # TEXT counts up


def test_ranks_that_cannot_have_equal_shares_are_refused(example):
    with pytest.raises(ValueError, match="12 sequences cannot be shared equally by 5 ranks"):
        example("text").Batches(TEXT, seed=1).share(0, 0, 5)


def test_a_text_shorter_than_a_sequence_is_refused(example):
    with pytest.raises(ValueError, match="a text of 64 bytes has no sequence of 65"):
        example("text").Batches(bytes(64), seed=1)
    assert len(example("text").Batches(bytes(65), seed=1).share(0)[0]) == 12


def test_the_standard_library_is_a_stable_text_of_at_most_the_limit(example):
    text = example("text")
    whole = text.standard_library(200_000)
    assert len(whole) == 200_000
    assert whole == text.standard_library(200_000)
    assert whole.startswith(text.standard_library(1_000))
    assert text.digest(whole) != text.digest(whole[:-1])


def test_the_sizes_of_a_model_are_read_off_its_weights(example):
    gpt = example("gpt")
    sizes = gpt.Sizes(vocabulary=50, context=7, width=64, layers=3)
    assert gpt.Sizes.of(gpt.GPT(sizes).state_dict()) == sizes
    with pytest.raises(ValueError, match="not the weights of this GPT"):
        gpt.Sizes.of({"w": torch.zeros(2)})


def test_a_position_does_not_see_what_follows_it(example):
    gpt = example("gpt")
    torch.manual_seed(0)
    model = gpt.GPT(gpt.Sizes(context=8, width=32, layers=2))
    tokens = torch.arange(8)[None]
    changed = tokens.clone()
    changed[0, 5] = 99
    with torch.no_grad():
        before, after = model(tokens)[0], model(changed)[0]
    torch.testing.assert_close(after[:5], before[:5])
    assert not torch.allclose(after[5:], before[5:])


@pytest.mark.thorough
def test_a_tied_weight_may_be_in_a_file_once_or_twice(example, tmp_path):
    from safetensors.torch import save_file

    gpt, generate = example("gpt"), example("generate")
    torch.manual_seed(0)
    model = gpt.GPT(gpt.Sizes(context=8, width=32, layers=1))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(weights, tmp_path / "twice.safetensors")
    del weights["head.weight"]
    save_file(weights, tmp_path / "once.safetensors")
    texts = [
        generate.continue_text(
            generate.load_model(generate.read_weights(tmp_path / name)), b"def ", 12, seed
        )
        for name in ("twice.safetensors", "once.safetensors")
        for seed in (None, 7)
    ]
    assert texts[:2] == texts[2:]
    assert all(len(text) == 12 for text in texts)


def test_a_hugging_face_folder_is_read_through_its_index(example, tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(1)}, tmp_path / "model-2.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert sorted(example("generate").read_weights(tmp_path)) == ["a", "b"]


def test_a_missing_or_wrong_loss_fails_the_demo_with_a_sentence(example, tmp_path):
    demo = example("demo")
    log = tmp_path / "run.jsonl"
    log.write_text("".join(json.dumps({"step": s, "loss": 2.0}) + "\n" for s in (3, 4)))
    curve = demo.Curve.read(log, 3, 4)
    assert curve.difference(demo.Curve("reference", {3: 2.0, 4: 2.0})) == 0.0
    with pytest.raises(demo.DemoError, match="steps 1 to 4 were due"):
        demo.Curve.read(log, 1, 4)
    with pytest.raises(demo.DemoError, match=r"the loss of step 4 is 2\.0000000"):
        curve.difference(demo.Curve("reference", {3: 2.0, 4: 2.1}))
    with pytest.raises(demo.DemoError, match="differ by nan"):
        demo.Curve("run", {3: float("nan")}).difference(curve)


def test_a_command_that_fails_shows_its_last_words(example, tmp_path):
    demo = example("demo")
    script = "print('about to fail'); raise SystemExit(3)"
    with pytest.raises(demo.DemoError, match=r"(?s)exit code 3.*about to fail"):
        demo.run([demo.sys.executable, "-c", script], tmp_path)


def test_a_killed_command_is_gone_with_all_it_started(example, tmp_path):
    # The child stands for a rank: in a session of its own, as torchrun starts them. It would hold
    # the pipe open for an hour if it lived.
    demo = example("demo")
    script = (
        "import subprocess, sys\n"
        'rank = \'import os, time; print(f"rank 0 of 1 is process {os.getpid()}", flush=True);'
        ' print("go", flush=True); time.sleep(3600)\'\n'
        "subprocess.Popen([sys.executable, '-c', rank], start_new_session=True).wait()\n"
    )
    command = [demo.sys.executable, "-c", script]
    lines = demo.run(command, tmp_path, kill_when=lambda line: line == "go")
    assert lines[-1] == "go"
