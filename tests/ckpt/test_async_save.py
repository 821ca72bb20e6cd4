"""A save in the background stores the state at the call, whatever training does meanwhile."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckpt
import sharding
from ckpt.saving.writers import arena_writer
from tests.ckpt.late_copies import SECONDS, late_copies
from tests.ckpt.trainers import KINDS, Snapshot, snapshot, train, trainer
from tests.selection import slow, thorough

ALL_WAYS = ("plain", "wrapper-flat", "composable", "torch-fsdp2", "fully_shard-hybrid")
"""A trainer for each way in which parameters and optimizer states are stored."""
LATER: Any = {"blocking": False, "staging": "overlapped"}


def differences(one: Snapshot, other: Snapshot) -> list[str]:
    """The names of what is not the same bit for bit; NaN stands where an optimizer has no state."""
    assert one.keys() == other.keys()
    return [
        name
        for name, tensor in one.items()
        if not torch.allclose(tensor, other[name], rtol=0, atol=0, equal_nan=True)
    ]


def train_while_saving(kind: str, folder: str) -> list[str]:
    """Training goes on before anything that can be put off is copied, up to an optimizer's step."""
    source = trainer(kind, seed=0)
    train(source, 0, 2)
    before = snapshot(source)
    state = {"model": source.model, "optim": source.optimizer, "step": 2}
    wrong = []
    for staging in ("copied", "overlapped"):
        place = f"{folder}/{staging}"
        with late_copies() as go:
            handle = ckpt.save(place, state, blocking=False, staging=staging)
            assert handle._staged.is_set() == (staging == "copied")
            train(source, 2, 1)
            go.set()
        handle.wait(SECONDS)
        target = trainer(kind, seed=1)
        loaded = {"model": target.model, "optim": target.optimizer, "step": 0}
        assert ckpt.load(place, loaded)["step"] == 2
        assert differences(snapshot(source), before)  # it did train on
        wrong += differences(snapshot(target), before)
        ckpt.load(place, {"model": source.model, "optim": source.optimizer, "step": 0})
    return wrong


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [kind if kind in ALL_WAYS else slow(kind) for kind in KINDS])
def test_training_on_changes_nothing_of_what_is_stored(
    clusters: Callable, tmp_path: Path, kind: str
) -> None:
    assert clusters(2).run(train_while_saving, kind, str(tmp_path)) == [[], []]


@pytest.mark.parametrize("staging", ["copied", "overlapped"])
def test_what_no_optimizer_owns_is_copied_before_the_call_returns(
    tmp_path: Path, staging: Any
) -> None:
    model = nn.BatchNorm1d(3)
    loose, array, number = torch.arange(6.0), np.arange(4), {"n": 1}
    strided = torch.arange(12.0).reshape(3, 4).T
    state = {"model": model, "loose": loose, "array": array, "number": number, "t": strided}
    with late_copies() as go:
        handle = ckpt.save(tmp_path, state, blocking=False, staging=staging)
        model(torch.randn(5, 3))
        for tensor in (*model.parameters(), loose, strided):
            tensor.detach().zero_()
        array[:] = 9
        number["n"] = 9
        go.set()
        handle.wait(SECONDS)
    found: Any = ckpt.read(tmp_path)
    assert found["model"]["running_mean"].equal(torch.zeros(3))
    assert found["model"]["weight"].equal(torch.ones(3))
    assert found["loose"].equal(torch.arange(6.0))
    assert found["array"].equal(torch.arange(4))
    assert found["number"] == {"n": 1}
    assert found["t"].equal(torch.arange(12.0).reshape(3, 4).T)


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(40, 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(40)).sum().backward()
    return model, optimizer


@pytest.mark.parametrize("change", [torch.Tensor.zero_, lambda p: nn.init.ones_(p)])
def test_a_change_past_the_optimizer_fails_the_save_by_name(
    tmp_path: Path, change: Callable
) -> None:
    model, optimizer = network()
    with late_copies() as go:
        handle = ckpt.save(tmp_path, {"model": model, "o": optimizer}, **LATER)
        with torch.no_grad():
            change(model.weight)
        go.set()
        with pytest.raises(ckpt.StateChangedError, match=r"^model\.weight was changed, and not by"):
            handle.wait(SECONDS)
    with pytest.raises(ckpt.NotACheckpointError):
        ckpt.read(tmp_path)
    assert not list(tmp_path.iterdir())
    ckpt.save(tmp_path, {"model": model})  # nothing is left to tell


def test_memory_that_is_given_up_too_early_fails_the_save_by_name(tmp_path: Path) -> None:
    model, optimizer = network()
    with late_copies() as go:
        handle = ckpt.save(tmp_path, {"model": model, "o": optimizer}, **LATER)
        model.weight.untyped_storage().resize_(0)
        go.set()
        with pytest.raises(ckpt.StateChangedError, match=r"^model\.weight has no memory for its"):
            handle.wait(SECONDS)
    assert not list(tmp_path.iterdir())


def test_after_wait_staged_everything_may_be_changed(tmp_path: Path) -> None:
    model, optimizer = network()
    weight = model.weight.detach().clone()
    handle = ckpt.save(tmp_path, {"model": model, "o": optimizer}, **LATER)
    handle.wait_staged(SECONDS)
    model.weight.data.zero_()
    handle.wait(SECONDS)
    assert ckpt.open(tmp_path)["model.weight"][:].equal(weight)


def test_what_a_wait_was_interrupted_at_is_copied_nevertheless(tmp_path: Path) -> None:
    model, optimizer = network()
    weight = model.weight.detach().clone()
    with late_copies(main=KeyboardInterrupt("Ctrl-C")) as go:
        handle = ckpt.save(tmp_path, {"model": model, "o": optimizer}, **LATER)
        with pytest.raises(KeyboardInterrupt):
            handle.wait_staged()
        go.set()
        handle.wait(SECONDS)
    assert ckpt.open(tmp_path)["model.weight"][:].equal(weight)


def test_a_load_waits_for_the_copies_and_for_the_checkpoint_itself(tmp_path: Path) -> None:
    model, optimizer = network()
    weight = model.weight.detach().clone()
    ckpt.save(tmp_path / "other", {"model": nn.Linear(40, 30)})
    (tmp_path / "link").symlink_to("new")
    with late_copies() as go:
        ckpt.save(tmp_path / "new", {"model": model, "o": optimizer}, **LATER)
        waiting = threading.Timer(0.01, go.set)
        waiting.start()
        ckpt.load(tmp_path / "other", {"model": model})
        waiting.join(SECONDS)
    assert not model.weight.equal(weight)
    assert ckpt.open(tmp_path / "link")["model.weight"][:].equal(weight)


def test_a_handle_says_how_far_the_save_is(tmp_path: Path) -> None:
    model, optimizer = network()
    told: list[int] = []
    total = 4 * (40 * 30 + 30)
    with late_copies() as go:
        handle = ckpt.save(tmp_path, {"m": model, "o": optimizer}, progress=told.append, **LATER)
        assert handle.progress() == (0, total)
        assert not handle.done()
        with pytest.raises(TimeoutError, match="not copied after"):
            handle.wait_staged(0.01)
        with pytest.raises(TimeoutError, match=f"has written 0 of {total:,} bytes"):
            handle.wait(0.01)
        assert "in flight" in repr(handle)
        go.set()
        result = handle.result(SECONDS)
    assert handle.done()
    assert handle.progress() == (total, total)
    assert (result.url, result.nbytes) == (str(tmp_path), total)
    assert 0 < result.staged_seconds < result.seconds
    assert sum(told) == total


@pytest.mark.parametrize("url", ["{folder}", "file://{folder}", "memory://async"])
@pytest.mark.parametrize("compress", [False, True])
def test_a_save_in_the_background_is_the_blocking_one_in_all_else(
    tmp_path: Path, url: str, compress: bool
) -> None:
    place = url.format(folder=tmp_path)
    state = {"w": torch.arange(300_000.0), "b": torch.ones(3, 2, dtype=torch.complex128).conj()}
    options: Any = {"compress": compress, "metadata": {"run": "a"}, "overwrite": True}
    ckpt.save(place, {"w": torch.zeros(2)}, overwrite=True)
    ckpt.save(place, state, blocking=False, **options).wait(SECONDS)
    found: Any = ckpt.read(place)
    assert found["w"].equal(state["w"])
    assert found["b"].equal(state["b"])
    assert ckpt.open(place).metadata["run"] == "a"
    assert not ckpt.verify(place).problems
    with pytest.raises(ckpt.ExistsError):
        ckpt.save(place, state, blocking=False)


def wander(folder: str) -> list[dict[str, str]]:
    """A save from one folder that is written while the process is in another one."""
    import os

    before = os.getcwd()
    os.mkdir(f"{folder}/elsewhere")
    model, optimizer = network()
    state, said = {"model": model, "optim": optimizer}, {"epoch": "1"}
    os.chdir(folder)
    try:
        ckpt.save("1", state)
        with late_copies() as go:
            handle = ckpt.save("2", state, blocking=False, base="1", metadata=said)
            os.chdir("elsewhere")
            said["epoch"] = "2"
            go.set()
            handle.wait(SECONDS)
    finally:
        os.chdir(before)
    assert not os.listdir(f"{folder}/elsewhere")
    return [dict(ckpt.open(f"{folder}/2").metadata)]


def test_a_save_is_of_the_arguments_and_the_folder_at_the_call(
    clusters: Callable, tmp_path: Path
) -> None:
    [[metadata]] = clusters(1).run(wander, str(tmp_path))
    assert metadata["epoch"] == "1"
    assert not ckpt.verify(tmp_path / "2").problems


def relative_path(folder: str) -> None:
    """The writer was started in another folder than the trainer is in now."""
    import os

    before = os.getcwd()
    os.chdir(folder)
    try:
        ckpt.save("here", {"w": torch.ones(2)}, blocking=False).wait(SECONDS)
    finally:
        os.chdir(before)


def test_a_relative_path_is_the_trainers(clusters: Callable, tmp_path: Path) -> None:
    clusters(1).run(relative_path, str(tmp_path))
    assert ckpt.read(tmp_path / "here")["w"].equal(torch.ones(2))  # type: ignore[index]


def grow_and_shrink(folder: str) -> None:
    """States of many sizes, one after another; on some ranks there is nothing to write."""
    from importlib import import_module

    rank = dist.get_rank()
    for number, size in enumerate((1000, 300_000, 0, 7, 2_000_000, 100, 100, 100, 100, 5_000)):
        own = torch.full((size,), float(number + rank)) if rank == number % 2 else torch.empty(0)
        state = {f"own{rank}": own, "n": number}
        ckpt.save(f"{folder}/{number}", state, blocking=False).wait(SECONDS)
        found: Any = ckpt.read(f"{folder}/{number}")
        assert found[f"own{rank}"].equal(own)
        assert found["n"] == number
    # The largest of the last four needs, to the page.
    arena = import_module("ckpt.saving.writers").arena_writer().arena
    assert arena.size < 40_000


def test_one_arena_serves_states_of_all_sizes(clusters: Callable, tmp_path: Path) -> None:
    clusters(2).run(grow_and_shrink, str(tmp_path))


# Waves: a state passes through host memory that is smaller.

BOUND = "1MiB"


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=0.1, **({} if kind == "adamw" else {kind: True}))


def wide_model() -> nn.Module:
    """Parameters and an optimizer's state of several times the bound, and buffers."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(300, 600), nn.BatchNorm1d(600), nn.Linear(600, 300))


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(4, 300)).square().mean().backward()
        optimizer.step()


@contextmanager
def held_writer() -> Iterator[int]:
    """The writer process stands still until the block ends."""
    process = int(arena_writer().writer().process.pid)
    os.kill(process, signal.SIGSTOP)
    try:
        yield process
    finally:
        os.kill(process, signal.SIGCONT)


def blocking_id(state: object, folder: Path) -> str:
    """The identity of a blocking save of a state."""
    ckpt.save(folder, state, overwrite=True)
    return ckpt.id(folder).digest


def train_in_waves(kind: str, folder: str) -> list[bool]:
    """Whether the saves of a loop equal blocking ones of the same state."""
    model = wide_model()
    if dist.is_initialized():
        for layer in (model[0], model[2], model):  # type: ignore[index]
            sharding.fully_shard(layer)
    optimizer = make_optimizer(kind, model)
    take_steps(model, optimizer, 2)
    # A buffer of this size is copied in the call, and changed by training at once.
    state: dict[str, Any] = {"model": model, "optim": optimizer, "loose": torch.zeros(70_000)}
    equal, options = [], dict[str, Any](blocking=False, host_memory=BOUND, overwrite=True)
    for compress in (False, True):
        want = blocking_id(state, Path(folder) / "want")
        handle = ckpt.save(f"{folder}/got", state, compress=compress, **options)
        state["loose"].add_(1)
        take_steps(model, optimizer, 2)
        handle.wait(SECONDS)
        assert arena_writer().arena.size <= 1 << 20
        equal.append(ckpt.id(f"{folder}/got").digest == want)
        equal.append(not ckpt.verify(f"{folder}/got").problems)
    return equal


@pytest.mark.parametrize("kind", ["foreach", *map(thorough, ("sgd", "adamw", "fused"))])
def test_a_state_that_passes_smaller_memory_is_stored_as_at_the_call(
    tmp_path: Path, clusters: Callable, kind: str
) -> None:
    assert clusters(2).run(train_in_waves, kind, str(tmp_path)) == [[True] * 4] * 2


def test_one_process_saves_in_waves_to_each_kind_of_store_and_borrows(tmp_path: Path) -> None:
    model = wide_model()
    optimizer = make_optimizer("adamw", model)
    take_steps(model, optimizer, 1)
    state = {"model": model, "optim": optimizer}
    options: Any = {"blocking": False, "host_memory": BOUND, "overwrite": True}
    for place in (str(tmp_path / "one"), "memory://waves/one"):
        want = blocking_id(state, tmp_path / "want")
        handle = ckpt.save(place, state, **options)
        take_steps(model, optimizer, 1)
        handle.wait(SECONDS)
        assert ckpt.id(place).digest == want
        assert not ckpt.verify(place).problems
    ckpt.save(tmp_path / "two", state, base=tmp_path / "one", **options).wait(SECONDS)
    assert ckpt.id(tmp_path / "two").digest == blocking_id(state, tmp_path / "want")


def test_a_step_waits_until_all_waves_are_copied_and_forward_and_backward_do_not(
    tmp_path: Path,
) -> None:
    model = wide_model()
    optimizer = make_optimizer("adamw", model)
    take_steps(model, optimizer, 1)
    state = {"model": model, "optim": optimizer}
    want = blocking_id(state, tmp_path / "want")
    with held_writer() as process:
        handle = ckpt.save(tmp_path / "got", state, blocking=False, host_memory=BOUND)
        model(torch.randn(4, 300)).sum().backward()
        with pytest.raises(TimeoutError, match="not copied after"):
            handle.wait_staged(0.01)
        threading.Timer(0.05, os.kill, (process, signal.SIGCONT)).start()
        optimizer.step()
        assert handle._staged.wait(SECONDS)
    handle.wait(SECONDS)
    assert ckpt.id(tmp_path / "got").digest == want


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.zero_(),
        lambda tensor: tensor.data.mul_(2),
        lambda tensor: tensor.numpy().fill(3),
    ],
)
def test_a_change_between_waves_past_the_optimizer_fails_the_save_by_name(
    tmp_path: Path, change: Callable
) -> None:
    model = wide_model()
    optimizer = make_optimizer("adamw", model)
    take_steps(model, optimizer, 1)
    weight = model[2].weight.detach()  # type: ignore[index]
    with held_writer():
        handle = ckpt.save(
            tmp_path, {"m": model, "o": optimizer}, blocking=False, host_memory=BOUND
        )
        change(weight)
    with pytest.raises(ckpt.StateChangedError, match=r"^m\.2\.weight was changed.*host_memory"):
        handle.wait(SECONDS)
    assert not list(tmp_path.iterdir())
    take_steps(model, optimizer, 1)


def ask_for_memory(folder: str) -> list[str]:
    model = wide_model()
    optimizer = make_optimizer("sgd", model)
    take_steps(model, optimizer, 1)

    def save(state: object, **options: Any) -> str:
        try:
            ckpt.save(f"{folder}/a", state, blocking=False, **options)
        except ckpt.CkptError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    rank = dist.get_rank()
    mine = model if rank else nn.Linear(2, 2)
    state = {"m": model, "o": optimizer}
    return [
        save(state, host_memory=BOUND if rank else "2MiB"),
        save(state, host_memory=5),
        save(state, host_memory=BOUND, also=ckpt.HuggingFace(f"{folder}/hf")),
        save({f"mine{rank}": mine}, host_memory=BOUND),
    ]


def test_memory_that_cannot_do_is_an_error_on_all_ranks_before_anything_is_written(
    clusters: Callable, tmp_path: Path
) -> None:
    for found in clusters(2).run(ask_for_memory, str(tmp_path)):
        differs, few, also, small = found
        assert "host_memory" in differs
        assert "1" in differs
        assert "at least 1MiB" in few
        assert "also= writes from a copy of the whole state" in also
        assert "mine1.0.weight (720,000 bytes) and others are none of these" in small
    assert not list(tmp_path.iterdir())
