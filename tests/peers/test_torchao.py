"""Quantised optimizer state of torchao on ranks: saved, and resumed on another number of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp

import ckpt
import sharding
from tests.conftest import Cluster

pytest.importorskip("torchao.optim", reason="torchao is not installed: make test-peers has it")

LIBRARIES = {"ours": sharding.fully_shard, "torch": fsdp.fully_shard}
WHOLE = {"rows": (12, 1024), "blocks": (128, 1, 256)}
"""Parameters whose parts are whole blocks of 256 on two and on three ranks."""
CUT = {"odd": (128, 128)}
"""On three ranks 43 rows of 128, so that cuts lie inside of blocks of 256; on two none does."""
PLAIN = {"mixed": (10, 1024)}
"""On three ranks the last one has two rows, which torchao keeps plain."""

Moments = dict[str, tuple[str, list[bytes]]]
"""By parameter the class of its first moment on a rank, and the bytes of its inner tensors."""


def model(shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    torch.manual_seed(1)
    module = nn.Module()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.randn(shape)))
    return module


def state(
    shapes: dict[str, tuple[int, ...]], library: str, kind: str, steps: int
) -> dict[str, Any]:
    """A sharded model with an optimizer of torchao, after some steps."""
    import torchao.optim

    torch.compiler.set_stance("force_eager")  # or each step is compiled first
    module = model(shapes)
    LIBRARIES[library](module)
    optimizer = getattr(torchao.optim, kind)(module.parameters(), lr=0.01, block_size=256)
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        for parameter in module.parameters():
            whole = torch.randn(parameter.shape, generator=generator)
            mine = parameter.detach().clone()  # type: ignore[attr-defined]
            rows = mine._local_tensor.shape[0]
            first = sum(
                len(part)
                for part in whole.chunk(mine.device_mesh.size())[: mine.device_mesh.get_rank()]
            )
            mine._local_tensor.copy_(whole[first : first + rows])
            parameter.grad = mine
        optimizer.step()
    return {"model": module, "optim": optimizer}


def moments(target: dict[str, Any]) -> Moments:
    """The first moments on this rank."""
    found = {}
    for name, parameter in target["model"].named_parameters():
        local = target["optim"].state[parameter]["exp_avg"]._local_tensor
        names = local.__tensor_flatten__()[0] if hasattr(local, "__tensor_flatten__") else []
        tensors = [getattr(local, each) for each in names] or [local]
        data = [each.contiguous().view(torch.uint8).numpy().tobytes() for each in tensors]
        found[name] = (type(local).__name__, data)
    return found


def saved(folder: Path, *given: Any) -> Moments:
    made = state(*given)
    ckpt.save(folder, made)
    return moments(made)


def resumed(folder: Path, again: Path | None, options: dict[str, Any], *given: Any) -> Moments:
    """Loads into a fresh optimizer, saves again, and returns the loaded moments."""
    target = state(*given)
    ckpt.load(folder, target, **options)
    found = moments(target)
    if again is not None:
        ckpt.save(again, target)
    target["model"].zero_grad()
    target["optim"].step()
    return found


def refused(folder: Path, *given: Any) -> str:
    target = state(*given)
    try:
        ckpt.load(folder, target)
    except ckpt.MismatchError as error:
        assert not target["optim"].state
        return str(error)
    return ""


def joined(ranks: list[Moments], name: str) -> list[bytes]:
    """The codes and scales of all ranks, end to end."""
    every = [each[name][1] for each in ranks]
    return [b"".join(inner) for inner in zip(*every, strict=True)][:2]


def values(ranks: list[Moments], name: str) -> torch.Tensor:
    """The plain moments of all ranks, end to end."""
    return torch.frombuffer(bytearray(joined(ranks, name)[0]), dtype=torch.float32)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_codes_and_scales_go_from_two_ranks_to_three_and_back(
    clusters: Callable[[int], Cluster], tmp_path: Path, library: str, kind: str
) -> None:
    given = (WHOLE, library, kind)
    before = clusters(2).run(saved, tmp_path / "2", *given, 2)
    on_three = clusters(3).run(resumed, tmp_path / "2", tmp_path / "3", {}, *given, 0)
    after = clusters(2).run(resumed, tmp_path / "3", None, {}, *given, 0)
    for name in WHOLE:
        assert before[0][name][0].startswith("OptimState")
        assert {each[name][0] for each in (*on_three, *after)} == {before[0][name][0]}
        assert joined(before, name) == joined(on_three, name) == joined(after, name)


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit"])
def test_one_process_takes_the_state_of_ranks(
    clusters: Callable[[int], Cluster], tmp_path: Path, kind: str
) -> None:
    import torchao.optim

    before = clusters(2).run(saved, tmp_path / "2", WHOLE, "torch", kind, 2)
    module = model(WHOLE)
    optimizer = getattr(torchao.optim, kind)(module.parameters(), lr=0.5, block_size=256)
    ckpt.load(tmp_path / "2", {"model": module, "optim": optimizer})
    for name, parameter in module.named_parameters():
        found = optimizer.state[parameter]["exp_avg"]
        assert type(found).__name__ == before[0][name][0]
        data = [found.codes.numpy().tobytes(), found.scale.numpy().tobytes()]
        assert data == joined(before, name)
    ckpt.save(tmp_path / "1", {"model": module, "optim": optimizer})
    after = clusters(3).run(resumed, tmp_path / "1", None, {}, WHOLE, "ours", kind, 0)
    for name in WHOLE:
        assert joined(after, name) == joined(before, name)


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit"])
def test_a_cut_inside_a_block_is_refused_unless_casts_are_allowed(
    clusters: Callable[[int], Cluster], tmp_path: Path, kind: str
) -> None:
    given = (CUT, "torch", kind)
    before = clusters(2).run(saved, tmp_path / "2", *given, 2)
    assert before[0]["odd"][0].startswith("OptimState")
    for message in clusters(3).run(refused, tmp_path / "2", *given, 0):
        assert "optim.state.odd.exp_avg" in message
        assert "blocks of 256 elements" in message
    options = {"dtype": "target"}
    after = clusters(3).run(resumed, tmp_path / "2", tmp_path / "3", options, *given, 0)
    assert {each["odd"][0] for each in after} == {"Tensor"}
    whole = values(after, "odd").view(CUT["odd"])
    assert torch.equal(whole, dequantized(tmp_path / "2", kind, "odd"))
    assert torch.equal(whole, ckpt.read(tmp_path / "3")["optim"]["state"]["odd"]["exp_avg"])


def test_state_that_is_plain_on_one_rank_is_stored_as_plain_values(
    clusters: Callable[[int], Cluster], tmp_path: Path
) -> None:
    given = (PLAIN, "torch", "AdamW8bit")
    before = clusters(3).run(saved, tmp_path / "3", *given, 2)
    assert [each["mixed"][0] for each in before] == ["OptimState8bit", "OptimState8bit", "Tensor"]
    stored = ckpt.read(tmp_path / "3")["optim"]["state"]["mixed"]["exp_avg"]
    assert torch.equal(stored[8:].flatten(), values(before[2:], "mixed"))
    after = clusters(2).run(resumed, tmp_path / "3", None, {}, *given, 0)
    assert torch.equal(values(after, "mixed"), stored.flatten())


def dequantized(folder: Path, kind: str, name: str) -> torch.Tensor:
    """The values of a saved first moment, by torchao in one process."""
    import torchao.optim

    module = model(CUT)
    optimizer = getattr(torchao.optim, kind)(module.parameters(), lr=0.5, block_size=256)
    ckpt.load(folder, {"model": module, "optim": optimizer})
    found: torch.Tensor = optimizer.state[module.get_parameter(name)]["exp_avg"].dequantize()
    return found
