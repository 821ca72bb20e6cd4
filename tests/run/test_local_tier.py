"""Two tiers: a folder of each host beside the shared one. A host here is a folder of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Collection
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpt
from ckpt.plan.save_plan import choose_layouts, host_layouts
from ckpt.stores.local_store import LocalStore
from formats.dtypes import dtype_of_torch
from formats.native.manifest import StoredTensor
from sharding import layout as algebra
from sharding.layout import Layout, Mesh

RANKS_PER_HOST = 2
PLACEMENTS = (algebra.Replicate(), algebra.Shard(0), algebra.Shard(1))


def tier_of(folder: str) -> str:
    """The local folder of this rank's host."""
    return f"{folder}/host{dist.get_rank() // RANKS_PER_HOST}"


def long_of(value: float) -> torch.Tensor:
    return torch.arange(1000.0 * 100).reshape(1000, 100) + value


def state_of(value: float, placements: tuple[Any, ...] | None = None) -> dict[str, Any]:
    """Replicas, shards over all ranks, shards that hosts have replicas of, and what ranks own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    grid = init_device_mesh("cpu", (size // RANKS_PER_HOST, RANKS_PER_HOST))
    long = long_of(value)
    return {
        "plain": long.clone(),
        "small": torch.full((3,), value),
        "sharded": distribute_tensor(long, mesh, [Shard(0)]),
        "hybrid": distribute_tensor(long, grid, placements or (Replicate(), Shard(0))),
        "step": value,
        f"own{rank}": torch.full((2,), value + rank),
    }


def holds(state: dict[str, Any], value: float) -> bool:
    wanted = state_of(value)
    return all(
        torch.equal(local(state[key]), local(wanted[key])) if key != "step" else state[key] == value
        for key in wanted
    )


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def run_in(folder: str, **more: Any) -> ckpt.Checkpointer:
    arguments: dict[str, Any] = {"every_steps": 10, "local_every_steps": 2, "signals": (), **more}
    return ckpt.Checkpointer(f"{folder}/shared", local=tier_of(folder), **arguments)


def trained(folder: str, steps: int, first: int = 1) -> list[int]:
    """The steps at which a run saved in either tier."""
    saved = []
    with run_in(folder) as run:
        run.restore(state_of(0.0))
        for step in range(first, steps + 1):
            if run.save(step, state_of(float(step))):
                saved.append(step)
            run.wait_until_finished()
    return saved


def restored(folder: str, step: int | None = None) -> tuple[int | None, list[str]]:
    """The step that a run is restored to, and what is told of others."""
    state = state_of(0.0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with run_in(folder) as run:
            found = run.restore(state, step)
    assert holds(state, float(found or 0))
    return found, [str(one.message) for one in told if one.category is ckpt.FallbackWarning]


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*")) if folder.exists() else []


@pytest.mark.thorough
def test_a_run_restores_the_nearest_step_that_every_host_has(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    on = clusters(4)
    assert on.run(trained, str(tmp_path), 16)[0] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert steps_in(tmp_path / "shared") == ["step-10"]
    for host in ("host0", "host1"):
        assert steps_in(tmp_path / host) == ["step-14", "step-16"]
        names = [path.name for path in (tmp_path / host / "step-16").glob("*.safetensors")]
        ranks = (0, 1) if host == "host0" else (2, 3)
        assert sorted(name[-17:-12] for name in names) == [f"{rank:05d}" for rank in ranks]
    assert on.run(restored, str(tmp_path)) == [(16, [])] * 4
    assert on.run(restored, str(tmp_path), 14) == [(14, [])] * 4
    assert on.run(restored, str(tmp_path), 10) == [(10, [])] * 4

    # The folders of all hosts, copied into one, are a checkpoint.
    for host in ("host1", "host0"):
        shutil.copytree(tmp_path / host / "step-16", tmp_path / "whole", dirs_exist_ok=True)
    assert ckpt.verify(tmp_path / "whole").sound
    assert torch.equal(ckpt.read(tmp_path / "whole")["hybrid"], long_of(16.0))  # type: ignore[index]

    # One host has lost its newest step, or the step is damaged: all go back to the same one.
    shutil.move(tmp_path / "host1" / "step-16", tmp_path / "gone")
    assert on.run(restored, str(tmp_path)) == [(14, [])] * 4
    shutil.move(tmp_path / "gone", tmp_path / "host1" / "step-16")
    for file in (tmp_path / "host1" / "step-16").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    found = on.run(restored, str(tmp_path))
    assert {step for step, _ in found} == {14}
    assert "step-16" in found[0][1][0]

    # A host was replaced: what counts is in the shared folder alone.
    shutil.rmtree(tmp_path / "host1")
    assert on.run(restored, str(tmp_path)) == [(10, [])] * 4
    assert on.run(trained, str(tmp_path), 12, 11)[0] == [12]
    assert on.run(restored, str(tmp_path)) == [(12, [])] * 4


@pytest.mark.thorough
def test_other_ranks_are_restored_from_the_shared_folder_and_try_no_local_step(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    clusters(4).run(trained, str(tmp_path), 12)
    assert "step-12" in steps_in(tmp_path / "host0")
    assert clusters(2).run(other_world, str(tmp_path)) == [(10, [])] * 2


def other_world(folder: str) -> tuple[int | None, list[str]]:
    """The step that a run on other hosts is restored to, and what is told of others."""
    state = {"plain": torch.zeros(1000, 100), "step": 0.0}
    extra = {"small": torch.zeros(3), "sharded": torch.zeros(1000, 100), "hybrid": None}
    owned = {f"own{rank}": torch.zeros(2) for rank in range(4)}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with run_in(folder) as run:
            found = run.restore({**state, **extra, **owned})
    return found, [str(one.message) for one in told if one.category is ckpt.FallbackWarning]


def failing(folder: str) -> tuple[int, list[str], int | None]:
    """The failures of a run of which one host's disk fails once, its warnings, its last step."""
    blocked = f"{folder}/host1/step-4"
    if dist.get_rank() == 0:
        os.makedirs(f"{folder}/host1")
        with open(blocked, "w") as file:
            file.write("a file where a folder has to be")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with run_in(folder) as run:
            for step in range(1, 8):
                run.save(step, state_of(float(step)))
                run.wait_until_finished()
            failures = run.failures
    texts = [str(one.message) for one in told if one.category is ckpt.SaveFailedWarning]
    return failures, texts, restored(folder)[0]


@pytest.mark.thorough
def test_a_host_whose_disk_fails_costs_one_local_step_on_all(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    answers = clusters(4).run(failing, str(tmp_path))
    assert [failures for failures, _, _ in answers] == [1] * 4
    assert [step for _, _, step in answers] == [6] * 4
    assert "step-4" in answers[0][1][0]
    assert [len(texts) for _, texts, _ in answers] == [1, 0, 0, 0]


def foreign(folder: str) -> str:
    with pytest.raises((ckpt.ArgumentError, ckpt.RankError)) as error:
        run_in(folder, keep=None).close()
    return str(error.value)


def test_a_local_folder_belongs_to_one_run(clusters: Callable[[int], Any], tmp_path: Path) -> None:
    clusters(2).run(trained, str(tmp_path), 2)
    shutil.move(tmp_path / "host0", tmp_path / "other")
    (tmp_path / "next").mkdir()
    shutil.move(tmp_path / "other", tmp_path / "next" / "host0")
    for text in clusters(2).run(foreign, str(tmp_path / "next")):
        assert "belongs to the run" in text
        assert "a local folder of its own" in text


def test_a_process_alone_has_a_near_tier_too(tmp_path: Path) -> None:
    def checkpointer(**more: Any) -> ckpt.Checkpointer:
        return ckpt.Checkpointer(
            tmp_path / "far", every_steps=4, local=tmp_path / "near", local_every_steps=1, **more
        )

    state = {"w": torch.zeros(3)}
    with checkpointer(local_keep=3) as run:
        for step in range(1, 8):
            state["w"].fill_(step)
            assert run.save(step, state)
            run.wait_until_finished()
    assert steps_in(tmp_path / "far") == ["step-4"]
    assert steps_in(tmp_path / "near") == ["step-5", "step-6", "step-7"]
    with checkpointer() as run:
        with pytest.raises(ckpt.ExistsError, match="up to step 7"):
            run.save(8, state)
        assert run.restore(state) == 7
    shutil.rmtree(tmp_path / "near")
    with checkpointer() as run:
        assert run.restore(state) == 4
    assert state["w"].tolist() == [4.0] * 3


def listing(folder: Path) -> dict[str, bytes]:
    files = [one for one in folder.rglob("*") if one.is_file()]
    return {str(one.relative_to(folder)): one.read_bytes() for one in files}


KILLED = """
import os, sys, torch, ckpt
from ckpt.stores.local_store import LocalStore
def dies(store, part, name, *more):
    if name == "manifest.json" and "near" in store.url:
        os._exit(9)
    named(store, part, name, *more)
LocalStore._give_name, named = dies, LocalStore._give_name
run = ckpt.Checkpointer(sys.argv[1], every_steps=9, local=sys.argv[2], local_every_steps=1)
run.save(1, {"w": torch.zeros(3)})
run.wait_until_finished()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("is_part", [False, True])
def test_a_run_removes_the_files_of_its_own_killed_saves_and_none_of_another_program(
    tmp_path: Path, is_part: bool
) -> None:
    near, state = tmp_path / "near", {"w": torch.zeros(3)}
    for name in ("evaluation", "step-1", "step-5", "step-8"):  # of others, unfinished
        ckpt.save(near / name, {"of": "others"} | state)
        (near / name / "manifest.json").rename(near / name / ".manifest.json.01234567.part")
    for name in (".model.0a1b2c3d.old/model.safetensors", ".x.0a1b2c3d.part/notes.txt"):
        (near / name).parent.mkdir()
        (near / name).write_text("the only copy")
    (near / ".x.pt.0a1b2c3d.part").write_bytes(b"PK\x03\x04")
    of_others = listing(near)
    script = [sys.executable, "-c", KILLED, tmp_path / "run", near]
    assert subprocess.run(script, check=False).returncode == 9
    [shard] = [name for name in listing(near).keys() - of_others.keys() if "-00000." in name]
    if is_part:
        part = near / "step-1" / f".{Path(shard).name}.1a2b3c4d.part"
        (near / shard).rename(part)
    left = listing(near).keys() - of_others.keys() - {"owner-1.json"}
    assert len(left) == 2  # and a part of the manifest
    for folder in ("evaluation", "step-5"):  # also of the same time as the next start
        (near / folder / ".0123456789abcdef-00000.safetensors.1a2b3c4d.part").write_bytes(b"x")
    of_others = {name: data for name, data in listing(near).items() if name not in left}
    of_others.pop("owner-1.json", None)
    arguments: Any = {"every_steps": 99, "local": near, "local_every_steps": 1, "local_keep": 1}
    with ckpt.Checkpointer(tmp_path / "run", **arguments) as run:
        assert run.restore(state) is None
        assert left <= listing(near).keys()  # a job that only restores removes nothing
        assert run.save(2, state)
        run.wait_until_finished()
        now = listing(near)
        assert not left & now.keys()
        assert of_others.items() <= now.items()
        # A finished one of another program, also below the name of a step, stays.
        ckpt.save(near / "step-4", {"of": "others"})
        with pytest.raises(ckpt.ArgumentError, match="step-4 belongs to no run's local folder"):
            run.save(4, state, force=False)
    assert ckpt.read(near / "step-4") == {"of": "others"}


def test_a_local_save_waits_for_the_one_before_and_none_begins_beside_a_far_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_slow, may_end = threading.Event(), threading.Event()
    commit = LocalStore.commit

    def slow(store: LocalStore, name: str, *more: Any, **options: Any) -> None:
        if "far" in store.url and is_slow.is_set() and name == "manifest.json":
            assert may_end.wait(60)
        commit(store, name, *more, **options)

    monkeypatch.setattr(LocalStore, "commit", slow)
    state = {"w": torch.zeros(3)}
    with ckpt.Checkpointer(
        tmp_path / "far", every_steps=4, local=tmp_path / "near", local_every_steps=1, local_keep=9
    ) as run:
        is_slow.set()
        saved = [run.save(step, state) for step in range(1, 8)]
        may_end.set()
        run.wait_until_finished()
        saved.append(run.save(9, state))
    assert saved == [True] * 4 + [False] * 3 + [True]
    assert steps_in(tmp_path / "near") == ["step-1", "step-2", "step-3", "step-9"]
    assert steps_in(tmp_path / "far") == ["step-4"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"local": "near"}, "belong together"),
        ({"local_every_steps": 3}, "belong together"),
        ({"local": "near", "local_every_steps": 0}, "local_every_steps=0"),
        ({"local": "near", "local_every_steps": 1, "local_keep": 0}, "local_keep=0"),
        ({"local": "s3://bucket/near", "local_every_steps": 1}, "on a disk or in memory"),
        ({"local": ".", "local_every_steps": 1}, "'.' is the folder of the run"),
    ],
)
def test_arguments_that_mean_nothing_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=told):
        ckpt.Checkpointer(tmp_path, **arguments)


@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2)),
    placements=st.tuples(
        *[st.sampled_from([algebra.Replicate(), algebra.Shard(0), algebra.Shard(1)])] * 3
    ),
    shape=st.tuples(st.integers(0, 9), st.integers(1, 300)),
    ranks_per_host=st.sampled_from([1, 2, 3, 4, 6, 9]),
)
def test_the_ranks_of_a_host_find_all_they_hold_in_files_of_that_host(
    sizes: tuple[int, ...], placements: Any, shape: tuple[int, int], ranks_per_host: int
) -> None:
    layout = Layout(shape, Mesh.grid(("a", "b", "c"), sizes), placements)
    world = range(layout.mesh.size)
    tensor = StoredTensor(shape, dtype_of_torch("torch.float32", "w"), layout)
    for first in range(0, len(world), ranks_per_host):
        host = [rank for rank in world if first <= rank < first + ranks_per_host]
        try:
            found = host_layouts({"w": tensor}, host)
        except ckpt.ArgumentError:
            continue
        stored = choose_layouts(found)["w"].layout
        assert held(layout, host) == held(stored, host)
        assert stored.replicas == 1


def held(layout: Layout, ranks: Collection[int]) -> set[tuple[int, ...]]:
    """The elements that these ranks hold."""
    boxes = [piece.box for rank in ranks for piece in layout.pieces(rank)]
    return {at for box in boxes for at in product(*map(range, box.lo, box.hi))}
