"""Every call hands its storage options to the driver: here one that finds nothing without them."""

import pickle
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.stores.store import place_elsewhere
from ckpt.transfer.write_job import WriteJob
from tools.exit_codes import ExitCode
from tools.main import main

STATE = {"w": torch.arange(6.0).reshape(2, 3), "step": 3}


@pytest.fixture
def told(tmp_path: Path) -> Mapping[str, object]:
    """Options under which `dir://` is a folder of this test."""
    return {
        "path": str(tmp_path),
        "target_protocol": "file",
        "target_options": {"auto_mkdir": True},
    }


@pytest.fixture
def arguments(told: Mapping[str, object]) -> list[str]:
    """The same for a command."""
    return ["-o", f"path={told['path']}", "-o", "target_protocol=file"]


def same(found: object) -> bool:
    assert isinstance(found, dict)
    return torch.equal(found["w"], STATE["w"]) and found["step"] == 3


@pytest.mark.thorough
@pytest.mark.parametrize("blocking", [True, False])
def test_saving_and_loading_take_them(told: Mapping[str, object], blocking: bool) -> None:
    handle = ckpt.save("dir://run/a", STATE, storage_options=told, blocking=blocking)
    if handle is not None:
        handle.wait()
        assert str(told["path"]) not in repr(handle)
    assert Path(str(told["path"]), "run", "a", "manifest.json").exists()
    target = {"w": torch.zeros(2, 3), "step": 0}
    assert same(ckpt.load("dir://run/a", target, storage_options=told))
    assert same(ckpt.read("dir://run/a", storage_options=told))
    with ckpt.open("dir://run/a", storage_options=told) as checkpoint:
        assert torch.equal(checkpoint["w"][1], STATE["w"][1])


@pytest.mark.parametrize("blocking", [True, False])
def test_a_base_is_found_and_kept_with_them(told: Mapping[str, object], blocking: bool) -> None:
    ckpt.save("dir://run/a", STATE, storage_options=told)
    handle = ckpt.save(
        "dir://run/b", STATE, base="dir://run/a", storage_options=told, blocking=blocking
    )
    if handle is not None:
        handle.wait()
    assert same(ckpt.read("dir://run/b", storage_options=told))
    with pytest.raises(ckpt.InUseError):
        ckpt.delete("dir://run/a", storage_options=told)
    with pytest.raises(ckpt.InUseError):
        ckpt.save("dir://run/a", STATE, overwrite=True, storage_options=told)
    ckpt.delete("dir://run/b", storage_options=told)
    ckpt.delete("dir://run/a", storage_options=told)


def test_what_looks_and_converts_takes_them(told: Mapping[str, object], tmp_path: Path) -> None:
    ckpt.save("dir://run/a", STATE, storage_options=told)
    assert ckpt.verify("dir://run/a", storage_options=told).sound
    for target in ("dir://b", "dir://b.pt", "dir://b.safetensors"):
        ckpt.convert("dir://run/a", target, storage_options=told)
    ckpt.convert("dir://b.pt", f"{tmp_path}/c", storage_options=told, dst_storage_options={})
    ckpt.convert(f"{tmp_path}/c", "dir://d", dst_storage_options=told)
    assert ckpt.diff("dir://run/a", "dir://d", storage_options=told).equal
    assert ckpt.diff(f"{tmp_path}/c", "dir://d", b_storage_options=told).equal


def test_every_command_takes_them(
    told: Mapping[str, object], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ckpt.save("dir://run/a", STATE, storage_options=told)
    for command in (
        ["ls", "dir://run"],
        ["ls", "dir://run/a"],
        ["inspect", "dir://run/a"],
        ["verify", "dir://run/a"],
        ["convert", "dir://run/a", "dir://run/b"],
        ["diff", "dir://run/a", "dir://run/b"],
        ["rm", "dir://run/b"],
    ):
        assert main([*command, *arguments]) == ExitCode.FINE, capsys.readouterr().err
    assert main(["ls", "dir://run", "-o", "hunter2"]) == ExitCode.USAGE
    assert "hunter2" not in capsys.readouterr().err  # it may be a secret without its name


def test_options_reach_the_process_that_writes_if_json_can_hold_them() -> None:
    url = "s3://bucket/run"
    assert place_elsewhere(url, {"anon": True, "key": "a"}) == (url, {"anon": True, "key": "a"})
    assert place_elsewhere(url, {"session": object()}) is None
    assert place_elsewhere(url, {"pair": (1, 2)}) is None
    assert place_elsewhere("memory://run", {}) is None


def test_options_are_not_shown() -> None:
    job = WriteJob("s3://bucket/run", "f", False, [], options={"secret": "hunter2"})
    assert "hunter2" not in repr(job)
    assert b"hunter2" in pickle.dumps(job)
