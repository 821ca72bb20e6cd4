"""Restores into a state that is not the saved one, new runs with the weights of others, readers."""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckpt

State = dict[str, Any]


def built(
    *, extra: bool = False, vocab: int = 10, frozen: bool = False, drops: bool = False
) -> State:
    """A model with its optimizer: with one more layer, other sizes, a frozen embedding, and a
    state dict without frozen weights.
    """
    torch.manual_seed(0)
    layers = {"emb": nn.Embedding(vocab, 8), "l1": nn.Linear(8, 8)}
    layers |= {"l2": nn.Linear(8, 8)} if extra else {}
    model = nn.Sequential()
    for name, layer in (layers | {"head": nn.Linear(8, vocab)}).items():
        model.add_module(name, layer)
    model.emb.requires_grad_(not frozen)
    if drops:
        model._register_state_dict_hook(without_frozen)
    trained = [each for each in model.parameters() if each.requires_grad]
    return {"model": model, "optim": torch.optim.AdamW(trained, 1e-2)}


def without_frozen(module: nn.Module, entries: State, prefix: str, _: object) -> None:
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            entries.pop(prefix + name, None)


def step(state: State) -> None:
    state["optim"].zero_grad()
    state["model"](torch.arange(5)).square().mean().backward()
    state["optim"].step()


def state_of(value: float) -> State:
    return {"w": torch.full((4,), value), "seen": int(value)}


def train(run: ckpt.Checkpointer, steps: range, **more: Any) -> None:
    for number in steps:
        assert run.save(number, state_of(number), **more)


def first_step(folder: str | Path, state: State) -> State:
    """Saves step 1 of a run, with a learning rate that no fresh optimizer has."""
    step(state)
    state["optim"].param_groups[0]["lr"] = 0.5
    with ckpt.Checkpointer(folder, every_steps=1) as run:
        assert run.restore({}) is None
        assert run.save(1, state)
    return state


def with_average(state: State) -> State:
    return {**state, "average": torch.zeros(3)}


def without_optim(state: State) -> State:
    return {"model": state["model"]}


FROZEN = {"frozen": True}
DROPS = {"frozen": True, "drops": True}
STRICT: State = {"strict": False}
CHANGES = {
    "a layer more": (
        {},
        {"extra": True},
        dict,
        [{"exclude": ["model.l2.*", "optim.param_groups.0*"]}],
    ),
    "another size": ({}, {"vocab": 12}, dict, [{"exclude": ["*.emb.*", "*.head.*"]}]),
    "trained after all": (FROZEN, {}, dict, [{"exclude": "optim.param_groups.0*"}]),
    "frozen": ({}, FROZEN, dict, [{"exclude": "optim.state.emb.weight.*"}]),
    "the model alone": ({}, {}, without_optim, [{"exclude": "optim.*"}, {"include": "model.*"}]),
    "an entry more": ({}, {}, with_average, [{"exclude": "average"}]),
    "a hook that drops": (DROPS, DROPS, dict, [{"exclude": "model.emb.*"}]),
    "no hook any more": (DROPS, FROZEN, dict, [{"exclude": "model.emb.*"}]),
}


@pytest.mark.thorough
@pytest.mark.parametrize("change", CHANGES)
def test_each_way_that_the_error_of_a_restore_names_leads_on(tmp_path: Path, change: str) -> None:
    before, after, entries, others = CHANGES[change]
    for at, way in enumerate([STRICT, *others]):
        folder = tmp_path / str(at)
        saved = first_step(folder, built(**before))
        state = entries(built(**after))
        weight = state["model"].l1.weight.clone()
        with ckpt.Checkpointer(folder, every_steps=1) as run:
            with pytest.raises(ckpt.MismatchError, match=r"Checkpointer\.restore with") as error:
                run.restore(state)
            assert all(f"{name}=" in str(error.value) for name in way)
            assert torch.equal(state["model"].l1.weight, weight)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ckpt.SkippedWarning)
                assert run.restore(state, **way) == 1
            assert torch.equal(state["model"].l1.weight, saved["model"].l1.weight)
            if "optim" in state and "param_groups" not in str(way):
                assert state["optim"].param_groups[0]["lr"] == 0.5
                assert len(state["optim"].state) > 0
            assert run.save(2, state)
        again = entries(built(**after))
        with ckpt.Checkpointer(folder, every_steps=1) as run:
            if change == "a hook that drops":
                assert run.restore(again, exclude="model.emb.*") == 2
            else:
                assert run.restore(again) == 2
            assert run.all_steps() == [2, 1]


def test_names_and_dtypes_of_a_run_may_change(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, every_steps=1) as run:
        run.save(1, {"net": {"w": torch.ones(2, dtype=torch.float64)}})
    state = {"model": {"w": torch.zeros(2)}}
    with ckpt.Checkpointer(tmp_path, every_steps=1) as run:
        with pytest.raises(ckpt.MismatchError, match="rename="):
            run.restore(state)
        with pytest.raises(ckpt.MismatchError, match="dtype='target'"):
            run.restore(state, rename={"net": "model"})
        assert run.restore(state, rename={"net": "model"}, dtype="target") == 1
        assert state["model"]["w"].tolist() == [1, 1]
        assert run.save(2, state)


def test_a_warning_of_a_restore_is_at_the_line_that_restores(tmp_path: Path) -> None:
    first_step(tmp_path, built())
    with (
        ckpt.Checkpointer(tmp_path) as run,
        pytest.warns(ckpt.SkippedWarning, match="strict=False skips 3") as told,
    ):
        assert run.restore(built(extra=True), strict=False) == 1
    assert [one.filename for one in told] == [__file__]


@pytest.mark.parametrize(
    "wrong",
    [
        {"state": {"net": torch.zeros(3)}},
        {"state": {"w": torch.zeros(2)}, "step": 7},
        {"state": {"w": torch.zeros(2)}, "include": []},
        {"state": {"w": torch.zeros(2)}, "exclude": "nothing.*"},
        {"state": {"w": torch.zeros(2)}, "casting": "maybe"},
    ],
)
def test_a_refused_restore_does_not_let_a_run_replace_an_earlier_one(
    tmp_path: Path, wrong: State
) -> None:
    with ckpt.Checkpointer(tmp_path, every_steps=1) as run:
        run.save(1, {"w": torch.ones(2)})
    with ckpt.Checkpointer(tmp_path, every_steps=1) as run:
        with pytest.raises(ckpt.CkptError):
            run.restore(**wrong)
        for force in (False, True):
            with pytest.raises(ckpt.ExistsError, match=r"strict=False if the model has changed"):
                run.save(1, {"w": torch.zeros(2)}, force=force)
        state = {"w": torch.zeros(2)}
        assert run.restore(state) == 1
        assert state["w"].tolist() == [1, 1]
        assert run.save(2, state)


def goes_on(folder: str, local: str) -> list[object]:
    """The errors and steps of ranks that restore another model from the folders of their host."""
    told: list[object] = []
    state: State = {"w": torch.ones(2), "old": torch.ones(2)}
    with ckpt.Checkpointer(folder, every_steps=4, local=local, local_every_steps=1) as run:
        for number in range(1, 3):
            run.save(number, state)
    state = {"w": torch.zeros(2), "new": torch.zeros(2)}
    with ckpt.Checkpointer(folder, every_steps=4, local=local, local_every_steps=1) as run:
        for wrong in ({"include": [] if dist.get_rank() else None}, {}):
            try:
                run.restore(state, **wrong)
            except ckpt.CkptError as error:
                told.append(error.reason)
            try:
                run.save(1, state)
            except ckpt.ExistsError as error:
                told.append(str(error))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ckpt.SkippedWarning)
            told.append(run.restore(state, strict=False))
        told.append([each.tolist() for each in state.values()])
        told.append([run.save(number, state) for number in (3, 4)])
        run.wait_until_finished()
        told.append(run.restore({"w": torch.zeros(2), "new": torch.zeros(2)}))
    return told


def test_all_ranks_go_on_from_a_local_step_with_another_model(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    first, second = clusters(2).run(goes_on, str(tmp_path / "run"), str(tmp_path / "near"))
    assert "rank 1" in first[0]
    assert "include is an empty list" in first[0]
    assert "include is an empty list" in second[0]
    assert first[1:] == second[1:]
    assert "Call Checkpointer.restore with " in first[2]
    assert [told for told in first if "earlier run" in str(told)] == [first[1], first[3]]
    assert first[4:] == [2, [[1, 1], [0, 0]], [True, True], 4]


class Interrupted(Exception):
    """Ends a run without its close, as a crash does: memory outlives it."""


@pytest.mark.thorough
def test_a_run_goes_on_from_memory_with_another_model(tmp_path: Path) -> None:
    def started() -> ckpt.Checkpointer:
        memory = ckpt.Memory(replicas=0, every_steps=1, keep_seconds=60)
        return ckpt.Checkpointer(tmp_path, every_steps=100, memory=memory)

    with suppress(Interrupted), started() as run:
        for number in (1, 2):
            assert run.save(number, {"w": torch.full((2,), number), "old": torch.ones(1)})
        run.wait_until_finished()
        with pytest.raises(ckpt.MisuseError, match="in memory"):
            run.delete(2)
        raise Interrupted
    state = {"w": torch.zeros(2, dtype=torch.int64), "new": torch.zeros(1)}
    with started() as run:
        with pytest.raises(ckpt.MismatchError, match=r"Checkpointer\.restore with"):
            run.restore(state)
        with pytest.raises(ckpt.ExistsError, match="earlier run"):
            run.save(1, state)
        with pytest.warns(ckpt.SkippedWarning):
            assert run.restore(state, strict=False) == 2
        assert state["w"].tolist() == [2, 2]
        assert run.save(3, state)


def places_of_one_state(folder: Path, kind: str) -> Path:
    """A place of this kind with weights of 1: the newest step of a run, one step of it, ..."""
    if kind in ("a run", "a step"):
        with ckpt.Checkpointer(folder, every_steps=1, blocking=True) as run:
            for value in (3, 2, 1):
                run.save(10 - value, {"model": {"w": torch.full((2,), value)}, "optim": {"m": 7}})
        return folder if kind == "a run" else folder / "step-9"
    folder.mkdir()
    if kind == "a file":
        torch.save({"model": {"w": torch.ones(2, dtype=torch.int64)}, "epoch": 3}, folder / "a.pt")
        return folder / "a.pt"
    ckpt.save(folder / "ckpt", {"model": {"w": torch.ones(2, dtype=torch.int64)}})
    ckpt.convert(folder / "ckpt", folder / "hf", to="hf")
    return folder / "hf"


@pytest.mark.parametrize("kind", ["a run", "a step", "a file", "weights"])
def test_a_new_run_begins_with_the_weights_of_any_checkpoint_and_goes_on_with_its_own(
    tmp_path: Path, kind: str
) -> None:
    base, new = places_of_one_state(tmp_path / "base", kind), tmp_path / "new"
    for start in (0, 1):
        state = {"model": {"w": torch.zeros(2)}, "optim": {"m": 0}}
        with ckpt.Checkpointer(new, every_steps=1) as run:
            if run.restore(state) is None:
                taken = run.start_from(base, state, include="model.*", **UNSAFE)
                assert taken == str(tmp_path / "base/step-9" if kind == "a run" else base)
                assert not new.exists()
            else:
                with pytest.raises(ckpt.ExistsError, match="call restore"):
                    run.start_from(base, state, include="model.*")
            assert state["model"]["w"].tolist() == [1 + start] * 2
            assert state["optim"] == {"m": 5 * start}
            state["model"]["w"] += 1
            state["optim"]["m"] += 5
            assert run.save(start + 1, state)


UNSAFE: State = {"dtype": "target", "casting": "unsafe"}


def test_a_new_run_begins_with_the_newest_sound_step_of_the_other(tmp_path: Path) -> None:
    places_of_one_state(tmp_path / "base", "a run")
    for file in (tmp_path / "base/step-9").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    state = {"model": {"w": torch.zeros(2, dtype=torch.int64)}}
    with ckpt.Checkpointer(tmp_path / "new", every_steps=1) as run:
        with pytest.raises(
            ckpt.MismatchError,
            match=r"all Checkpointer\.start_from with exclude=\['optim\.\*'\], with include=",
        ):
            run.start_from(tmp_path / "base/step-8", state)
        with pytest.raises(ckpt.NotACheckpointError):
            run.start_from(tmp_path / "elsewhere", state)
        assert state["model"]["w"].tolist() == [0, 0]
        with pytest.warns(ckpt.FallbackWarning, match="step-9") as told:
            run.start_from(tmp_path / "base", state, include="model.*")
        assert [one.filename for one in told] == [__file__]
        assert state["model"]["w"].tolist() == [2, 2]
        assert run.save(1, state)
        with pytest.raises(ckpt.ExistsError, match="up to step 1"):
            run.start_from(tmp_path / "base", state, include="model.*")


def begins_anew(base: str, folder: str) -> tuple[str, list[float], int | None]:
    """The error of ranks of which one has a wrong argument; the weights that all begin with."""
    state = {"w": torch.zeros(2), "new": torch.zeros(2)}
    with ckpt.Checkpointer(folder, every_steps=1) as run:
        assert run.restore(state) is None
        with pytest.raises(ckpt.CkptError) as error:
            run.start_from(base, state, include=[] if dist.get_rank() else "w")
        run.start_from(base, state, include="w")
        run.save(1, state)
        run.wait_until_finished()
        return str(error.value), state["w"].tolist(), run.latest_step()


def test_all_ranks_begin_with_the_same_weights(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    with ckpt.Checkpointer(tmp_path / "base", every_steps=1) as run:
        run.save(3, {"w": torch.ones(2)})
    answers = clusters(2).run(begins_anew, str(tmp_path / "base"), str(tmp_path / "new"))
    assert all("include is an empty list" in told for told, *_ in answers)
    assert [rest for _, *rest in answers] == [[[1, 1], 1]] * 2


def test_an_evaluator_reads_beside_the_training_and_changes_nothing(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    with ckpt.Checkpointer(tmp_path / "later", every_steps=1, read_only=True) as reader:
        assert (reader.restore(state_of(0)), reader.latest_step()) == (None, None)
    assert not (tmp_path / "later").exists()
    with ckpt.Checkpointer(tmp_path, every_steps=1, blocking=True) as run:
        train(run, range(1, 3), metrics={"loss": 0.5})
        files = sorted(tmp_path.rglob("*"))
        keep = ckpt.Keep(best=1, metric="loss")
        with ckpt.Checkpointer(tmp_path, every_steps=1, keep=keep, read_only=True) as reader:
            state = state_of(0)
            assert reader.restore(state) == 2
            assert (reader.all_steps(), reader.best_step()) == ([2, 1], 2)
            for call in (
                lambda: reader.save(3, state),
                lambda: reader.save(3, state, force=True),
                lambda: reader.should_save(3),
                lambda: reader.start_from(tmp_path / "step-1", state),
            ):
                with pytest.raises(ckpt.MisuseError, match="read_only"):
                    call()
        assert sorted(tmp_path.rglob("*")) == files
    with pytest.raises(ckpt.ClosedError):
        reader.save(3, state)
    with pytest.raises(ckpt.ArgumentError, match="omit local= and memory="):
        ckpt.Checkpointer(tmp_path, local=tmp_path / "a", local_every_steps=1, read_only=True)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before


@pytest.mark.thorough
def test_an_evaluator_finds_a_sound_step_at_each_moment_of_the_training(tmp_path: Path) -> None:
    read: list[int] = []
    failed: list[BaseException] = []
    is_over = threading.Event()

    def evaluate() -> None:
        try:
            with ckpt.Checkpointer(tmp_path, read_only=True) as reader:
                while not is_over.is_set():
                    state = state_of(0)
                    step = reader.restore(state)
                    assert step == state["seen"] == state["w"][0]
                    read.append(step)
                    assert reader.latest_step() is not None
        except BaseException as error:
            failed.append(error)

    with ckpt.Checkpointer(tmp_path, every_steps=1, keep=ckpt.Keep(last=1), blocking=True) as run:
        train(run, range(1, 2))
        thread = threading.Thread(target=evaluate)
        thread.start()
        train(run, range(2, 60))
        is_over.set()
        thread.join()
    assert not failed
    assert read == sorted(read)
    assert read[-1] > read[0]


def test_a_last_step_of_the_weights_alone_in_another_dtype_is_restored_by_these_words(
    tmp_path: Path,
) -> None:
    state = first_step(tmp_path, built())
    with ckpt.Checkpointer(tmp_path, every_steps=1) as run:
        run.restore(state)
        assert run.save(2, {"model": state["model"]}, force=True, dtype="bfloat16")
    fresh = built()
    with ckpt.Checkpointer(tmp_path, read_only=True) as run:
        with pytest.raises(ckpt.MismatchError, match="dtype='target'"):
            run.restore({"model": fresh["model"]})
        assert run.restore({"model": fresh["model"]}, dtype="target") == 2
        assert fresh["model"].l1.weight.equal(state["model"].l1.weight.bfloat16().float())
        assert run.restore(fresh, step=1) == 1
        assert fresh["model"].l1.weight.equal(state["model"].l1.weight)
