"""The command run in this process, and small checkpoints for it to look at."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.saving.save import save
from tools.main import HELPS, main


@dataclass(frozen=True)
class Ended:
    """How a run of the command ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs `ckpt` with these arguments."""

    def run_command(*arguments: object) -> Ended:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        if arguments and arguments[0] in HELPS:
            assert code in HELPS[str(arguments[0])].every_code, "a code that its help lacks"
        return Ended(code, captured.out, captured.err)

    return run_command


def training_state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    embed = torch.randn(8, 4)
    return {
        "model": {"embed.weight": embed, "norm.scale": torch.ones(4), "head.weight": embed},
        "optimizer": {
            "state": {"embed.weight": {"step": torch.tensor(3.0), "exp_avg": torch.randn(8, 4)}},
            "param_groups": [{"lr": 0.001, "betas": (0.9, 0.99)}],
        },
        "step": 3,
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A native checkpoint with tied weights, optimizer state and plain values."""
    save(tmp_path / "run" / "step-3", training_state(), metadata={"note": "first"})
    return tmp_path / "run" / "step-3"


def flip(file: Path, at: int) -> None:
    """Flip one bit of a file's byte."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.fixture
def damaged(saved: Path) -> Path:
    """The native checkpoint with one bit of its tensors flipped."""
    (shard,) = saved.glob("*.safetensors")
    header = 8 + int.from_bytes(shard.read_bytes()[:8], "little")
    flip(shard, header + 5)
    return saved
