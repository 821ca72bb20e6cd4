"""Folders that DeepSpeed writes now, read as DeepSpeed's own converter reads them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckpt
from tests.data.deepspeed import make

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed: make test-peers has it", allow_module_level=True)

pytestmark = pytest.mark.timeout(900)  # for the start of DeepSpeed on a busy machine

ROOT = Path(__file__).parents[2]
UNIVERSAL = ("stage1", "stage3")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every folder of make.py, written anew."""
    folder = tmp_path_factory.mktemp("deepspeed")
    program = [sys.executable, "-m", make.__name__, str(folder), *UNIVERSAL]
    subprocess.run(program, check=True, timeout=800, cwd=ROOT)
    return folder


@pytest.mark.parametrize("variant", ["stage1", "stage2", "stage3"])
def test_the_weights_are_those_of_zero_to_fp32(written: Path, variant: str) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    theirs = get_fp32_state_dict_from_zero_checkpoint(str(written / variant))
    ours = ckpt.read(written / variant)["fp32"]
    assert set(ours) >= set(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].float(), tensor.float()), name


@pytest.mark.parametrize("variant", UNIVERSAL)
def test_a_universal_checkpoint_has_the_states_of_its_source(written: Path, variant: str) -> None:
    source = ckpt.read(written / variant)
    found = ckpt.read(written / variant / "global_step1_universal")
    for name in make.TRAINED:
        assert torch.equal(found["fp32"][name], source["fp32"][name])
        for key in make.STATES[1:]:
            ours = found["optimizer"]["state"][name][key]
            assert torch.equal(ours, source["optimizer"]["state"][name][key])
        steps = (kind["optimizer"]["state"][name]["step"] for kind in (found, source))
        assert len({float(step) for step in steps}) == 1
    groups = found["optimizer"]["param_groups"]
    assert groups == source["optimizer"]["param_groups"]
