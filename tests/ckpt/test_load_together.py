"""What ranks tell one another in a load: as little as can be, and every error in time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from sharding.agreement.ranks import Ranks


def state(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.full((6, 4), value)
    return {"w": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None), "step": 1}


def save(folder: str) -> None:
    ckpt.save(folder, state(1.0))


def agreements_of_a_load(folder: str, extra: bool) -> int:
    """How often the ranks agree while a load goes well."""
    target = {**state(0.0), **({"extra": 0} if extra else {})}
    count, before = [0], Ranks.agree

    def counting(self: Ranks, *arguments: Any, **options: Any) -> Any:
        count[0] += 1
        return before(self, *arguments, **options)

    Ranks.agree = counting  # type: ignore[method-assign]
    try:
        ckpt.load(folder, target, strict=not extra)
    finally:
        Ranks.agree = before  # type: ignore[method-assign]
    assert torch.equal(target["w"].to_local(), state(1.0)["w"].to_local())
    return count[0]


@pytest.mark.filterwarnings("ignore:.*strict=False skips")
def test_a_load_in_which_all_fits_takes_an_agreement_less(
    clusters: Callable, tmp_path: Path
) -> None:
    clusters(2).run(save, str(tmp_path))
    assert clusters(2).run(agreements_of_a_load, str(tmp_path), False) == [3, 3]
    assert clusters(2).run(agreements_of_a_load, str(tmp_path), True) == [4, 4]


def load_what_is_damaged(folder: str) -> tuple[str, str, bool]:
    """The error that this rank raises, and whether its target was touched."""
    target = state(0.0)
    with pytest.raises((ckpt.CorruptError, ckpt.RankError)) as raised:
        ckpt.load(folder, target)
    touched = not torch.equal(target["w"].to_local(), state(0.0)["w"].to_local())
    return type(raised.value).__name__, str(raised.value), touched


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_that_one_rank_cannot_open_is_an_error_on_all_before_anything_is_touched(
    clusters: Callable, tmp_path: Path, rank: int
) -> None:
    clusters(2).run(save, str(tmp_path))
    (path,) = tmp_path.glob(f"*-{rank:05d}.safetensors")
    data = path.read_bytes()
    path.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])
    found = clusters(2).run(load_what_is_damaged, str(tmp_path))
    assert [kind for kind, _, _ in found].count("RankError") == 1
    assert found[rank][0] == "CorruptError"
    assert f"rank {rank}" in found[1 - rank][1]
    assert "planning to load" in found[1 - rank][1]
    assert not any(touched for _, _, touched in found)
