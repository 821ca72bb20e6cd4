"""A trainer and a generator that live states connect: each token is that of weights from disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.slow  # five processes that import torch
@pytest.mark.parametrize("versions", [20])
@pytest.mark.timeout(1000)
def test_a_generator_with_another_layout_and_dtype_writes_the_tokens_of_the_disk(
    versions: int, tmp_path: Path
) -> None:
    command = [sys.executable, str(EXAMPLES / "weights.py"), "--versions", str(versions)]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)], capture_output=True, text=True, timeout=950
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("tokens equal the reference") == versions
    assert ", 0 of them new" not in done.stdout  # each version writes other tokens
