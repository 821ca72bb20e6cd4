"""`ckpt cp` and `ckpt pin`: copies that are whole and checked, and steps that stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.run.copy import copy
from tests.stores.server import Server, s3_client
from tests.tools.conftest import Run, flip
from tools.exit_codes import ExitCode


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith("owner-")
    }


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A run of three steps; the first, by the clock, borrows from the second."""
    folder, state = tmp_path / "run", {"w": torch.arange(60_000.0), "step": torch.zeros(1)}
    for step in (2, 1, 3):
        base = folder / "step-2" if step == 1 else None
        ckpt.save(folder / f"step-{step}", {**state, "step": state["step"] + step}, base=base)
    return folder


def test_a_copy_of_a_run_has_the_same_bytes_and_a_second_copies_nothing(
    run: Run, trained: Path, tmp_path: Path
) -> None:
    assert run("pin", trained / "step-2", "release-1").code == ExitCode.FINE
    (trained / "left.part").write_bytes(b"of no checkpoint")
    ended = run("cp", trained, tmp_path / "new" / "copy")
    assert ended.code == ExitCode.FINE
    found = contents(tmp_path / "new" / "copy")
    assert found == {name: data for name, data in contents(trained).items() if name != "left.part"}
    assert "pin-2-release-1.json" in found
    lines = ended.out.splitlines()
    assert [line.split(": ")[0][-6:] for line in lines[:3]] == ["step-2", "step-1", "step-3"]
    again = json.loads(run("cp", "--json", trained, tmp_path / "new" / "copy").out)
    assert [one["copied_bytes"] for one in again["checkpoints"]] == [0, 0, 0]
    assert ckpt.latest(tmp_path / "new" / "copy").endswith("step-3")


def test_an_interrupted_copy_goes_on_with_the_missing_files(trained: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"

    def stop(nbytes: int) -> None:
        if (target / "step-2" / "manifest.json").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(copy(trained, target, progress=stop))
    assert (target / "step-2" / "manifest.json").exists()
    assert not (target / "step-1" / "manifest.json").exists()
    (shard,) = (trained / "step-3").glob("*.safetensors")
    (target / "step-3").mkdir()
    (target / "step-3" / shard.name).write_bytes(shard.read_bytes())  # whole, of an earlier try
    counted: list[int] = []
    copied = {one.name: one.copied_bytes for one in copy(trained, target, progress=counted.append)}
    assert copied["step-2"] == 0
    assert copied["step-3"] == (trained / "step-3" / "manifest.json").stat().st_size
    assert sum(counted) == next((trained / "step-1").glob("*.safetensors")).stat().st_size
    assert contents(target) == contents(trained)


@pytest.mark.parametrize("place", ["source", "target"])
def test_a_copy_of_damaged_bytes_does_not_appear(
    run: Run, trained: Path, tmp_path: Path, place: str
) -> None:
    (shard,) = (trained / "step-3").glob("*.safetensors")
    target = tmp_path / "copy" / "step-3"
    if place == "source":
        flip(shard, 4096)
    else:  # a file of an earlier try, with the right size
        target.mkdir(parents=True)
        (target / shard.name).write_bytes(shard.read_bytes())
        flip(target / shard.name, 4096)
    ended = run("cp", trained, tmp_path / "copy")
    assert ended.code == ExitCode.DAMAGED
    assert f"{target}/{shard.name}: w: bytes " in ended.err
    assert list(target.iterdir()) == []
    assert run("cp", trained, tmp_path / "copy").code == (
        ExitCode.DAMAGED if place == "source" else ExitCode.FINE
    )


def test_a_copy_replaces_nothing_and_leaves_no_checkpoint_without_its_base(
    run: Run, trained: Path, tmp_path: Path
) -> None:
    ckpt.save(tmp_path / "other" / "step-3", {"w": torch.ones(3)})
    before = contents(tmp_path / "other" / "step-3")
    assert run("cp", trained / "step-3", tmp_path / "other" / "step-3").code == ExitCode.EXISTS
    assert contents(tmp_path / "other" / "step-3") == before
    ended = run("cp", trained / "step-1", tmp_path / "alone")
    assert (ended.code, (tmp_path / "alone").exists()) == (ExitCode.USAGE, False)
    assert "borrows chunks from step-2 beside it" in ended.err
    assert run("cp", trained, f"{trained}/").code == ExitCode.USAGE
    assert run("cp", tmp_path / "nothing", tmp_path / "x").code == ExitCode.NOT_A_CHECKPOINT
    assert run("cp", trained / "step-3", tmp_path / "one").code == ExitCode.FINE
    assert ckpt.verify(tmp_path / "one").sound


def test_a_run_goes_to_a_bucket_and_back(
    run: Run, trained: Path, tmp_path: Path, moto: Server
) -> None:
    s3_client(moto).create_bucket(Bucket="copies")
    told = [
        f"-o={key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in moto.options.items()
    ]
    assert run("cp", "-q", trained, "s3://copies/run", *told).code == ExitCode.FINE
    assert run("cp", "-q", "s3://copies/run", tmp_path / "back", *told).out == ""
    assert contents(tmp_path / "back") == contents(trained)


def test_a_pin_is_set_shown_and_removed_without_the_run(run: Run, trained: Path) -> None:
    step = trained / "step-2"
    assert [run("pin", step, name).code for name in ("b", "a", "a")] == [ExitCode.FINE] * 3
    assert run("pin", step).out == "a\nb\n"
    assert run("rm", "--keep", "last=1", trained).code == ExitCode.FINE
    assert step.exists()
    assert "ckpt pin --remove" in run("rm", step).err
    assert run("pin", "--remove", step, "a").code == ExitCode.FINE
    assert run("pin", step).out == "b\n"
    assert run("pin", "--remove", step).code == ExitCode.USAGE
    assert run("pin", "--remove", step, "c").code == ExitCode.NOT_A_CHECKPOINT
    assert run("pin", step, "no/name").code == ExitCode.USAGE
    assert run("pin", trained / "step-9", "x").code == ExitCode.NOT_A_CHECKPOINT
    assert run("pin", trained, "x").code == ExitCode.NOT_A_CHECKPOINT
