"""Several ranks convert one checkpoint: the bytes of one process, and all or nothing."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.opening.sources import open_source
from ckpt.stores.store import open_store
from ckpt.transfer.copy_shares import share_of
from formats.catalog import FilePlan
from tests.stores.server import Server

TARGETS = {"safetensors": "c.safetensors", "torch": "c.pt", "hf": "hf", "dcp": "dcp", "ckpt": "c"}


def state() -> dict[str, Any]:
    made = torch.Generator().manual_seed(0)
    big = torch.randn(900, 500, generator=made)
    layers = {f"w{i}": torch.randn(60, 50 + i, generator=made) for i in range(12)}
    return {"model": {"big": big, "turned": big[:300].t(), **layers}, "step": 3}


def digests(place: Path) -> dict[str, str]:
    """The digest of each file of a checkpoint; the manifest and its files have random names."""
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("source") / "m.pt"
    torch.save(state(), place)
    return place


@given(
    sizes=st.lists(st.integers(0, 50), max_size=12),
    world_size=st.integers(1, 5),
)
def test_the_shares_of_a_file_are_all_of_it(sizes: list[int], world_size: int) -> None:
    parts = [bytes([at]) * size for at, size in enumerate(sizes)]
    end, joined, count = 0, b"", 0
    for rank in range(world_size):
        offset, share = share_of(FilePlan("f", parts), rank, world_size)
        data = b"".join(part for part in share.parts if isinstance(part, bytes))
        assert offset == end
        end, joined, count = offset + len(data), joined + data, count + len(share.parts)
        if len(data) > 50:
            assert len(data) <= sum(sizes) / world_size + 50
    assert joined == b"".join(parts)
    assert count == len(parts)


@pytest.mark.parametrize("target", list(TARGETS))
def test_ranks_together_write_the_bytes_of_one_process(
    clusters: Callable[[int], Any], source: Path, tmp_path: Path, target: str
) -> None:
    alone, together = tmp_path / "alone" / TARGETS[target], tmp_path / "group" / TARGETS[target]
    report = ckpt.convert(source, alone, to=target, **sizes_of(target))
    found = clusters(3).run(convert_with, str(source), str(together), target)
    assert found == [(report.tensors, report.nbytes)] * 3
    if target == "ckpt":
        assert {name: value.tolist() for name, value in ckpt.read(together)["model"].items()} == {
            name: value.tolist() for name, value in state()["model"].items()
        }
    else:
        assert digests(together) == digests(alone)
    assert sorted(os.listdir(together.parent)) == sorted(os.listdir(alone.parent))


def sizes_of(target: str) -> dict[str, Any]:
    """A size of files that makes several, for the formats that have it."""
    return {"max_shard_bytes": 500_000} if target in ("ckpt", "hf") else {}


def convert_with(source: str, target: str, to: str) -> tuple[int, int]:
    report = ckpt.convert(source, target, to=to, group=None, **sizes_of(to))
    return report.tensors, report.nbytes


def convert_far(source: str, target: str, options: dict[str, Any]) -> None:
    ckpt.convert(source, target, to="hf", group=None, dst_storage_options=options, **sizes_of("hf"))


@pytest.mark.thorough
def test_ranks_together_write_whole_files_into_a_bucket(
    clusters: Callable[[int], Any],
    servers: Callable[[str], Server],
    source: Path,
    tmp_path: Path,
) -> None:
    server, alone = servers("moto"), tmp_path / "alone"
    ckpt.convert(source, alone, to="hf", **sizes_of("hf"))
    place = server.url("together/hf")
    clusters(3).run(convert_far, str(source), place, server.options)
    with open_store(place, server.options) as store:
        found = {name: store.read_whole(name, 1 << 30) for name in store.entries("")}
    assert found == {file.name: file.read_bytes() for file in alone.iterdir()}


def failures(cluster: Any, job: Callable[..., object], *arguments: object) -> dict[int, Any]:
    with pytest.raises(Exception) as raised:
        cluster.run(job, *arguments)
    return raised.value.errors  # type: ignore[attr-defined]


@pytest.mark.parametrize("target", ["torch", "hf"])
def test_a_failure_of_one_rank_reaches_all_and_nothing_appears(
    clusters: Callable[[int], Any], source: Path, tmp_path: Path, target: str
) -> None:
    damaged = tmp_path / "m.pt"
    content = bytearray(source.read_bytes())
    with open_source(source) as opened:
        (stored,) = opened.catalog.tensors["model.w11"].pieces
    content[stored.extent.offset] ^= 1
    damaged.write_bytes(content)
    place = tmp_path / "out" / TARGETS[target]
    errors = failures(clusters(2), convert_with, str(damaged), str(place), target)
    assert {kind for kind, _, _ in errors.values()} == {"CorruptError", "RankError"}
    assert os.listdir(place.parent) == []
    (tmp_path / "there.pt").write_bytes(b"old")
    errors = failures(clusters(2), convert_with, str(source), str(tmp_path / "there.pt"), "torch")
    assert {kind for kind, _, _ in errors.values()} == {"ExistsError", "RankError"}
    assert (tmp_path / "there.pt").read_bytes() == b"old"


def convert_apart(source: str, target: str) -> None:
    ckpt.convert(source, f"{target}-{dist.get_rank()}.pt", group=None)


def convert_other(source: str, target: str) -> None:
    ckpt.convert(source, target, group=None, include=["*"] if dist.get_rank() else "model.big")


def test_ranks_that_plan_other_files_are_an_error(
    clusters: Callable[[int], Any], source: Path, tmp_path: Path
) -> None:
    for job in (convert_apart, convert_other):
        errors = failures(clusters(2), job, str(source), str(tmp_path / "out" / "c.pt"))
        assert {kind for kind, _, _ in errors.values()} <= {"StoreError", "RankError"}
        assert "different checkpoints" in str(errors)
    assert not list(tmp_path.rglob("*.p*"))


@pytest.mark.thorough
def test_a_command_that_a_process_of_torchrun_starts_converts_alone(
    source: Path, tmp_path: Path
) -> None:
    rank = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = [sys.executable, "-m", "ckpt", "convert", str(source), str(tmp_path / "c.pt")]
    done = subprocess.run(
        ["sh", "-c", '"$@"; exit $?', "trainer", *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **rank, "TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0"},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "c.pt").exists()


@pytest.mark.slow  # and `make package` runs this command
def test_torchrun_converts(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "ckpt", "convert", str(source), str(tmp_path / "c.safetensors"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"target_format"') == 1
    ckpt.convert(source, tmp_path / "alone.safetensors")
    pair = [tmp_path / "c.safetensors", tmp_path / "alone.safetensors"]
    assert pair[0].read_bytes() == pair[1].read_bytes()
