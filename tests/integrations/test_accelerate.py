"""CkptAccelerator in one process; the example of tests/integrations has several."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt

pytestmark = pytest.mark.thorough
pytest.importorskip("accelerate")


@pytest.fixture
def accelerator_of() -> Iterator[Any]:
    """Makes a CkptAccelerator with the options of a ProjectConfiguration."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import ProjectConfiguration

    from ckpt.integrations.accelerate import CkptAccelerator

    def make(**options: Any) -> Any:
        return CkptAccelerator(cpu=True, project_config=ProjectConfiguration(**options))

    yield make
    AcceleratorState._reset_state(reset_partial_state=True)


def test_a_folder_may_be_a_path(accelerator_of: Any, tmp_path: Path) -> None:
    accelerator = accelerator_of()
    model = accelerator.prepare(torch.nn.Linear(3, 2))
    accelerator.save_state(tmp_path / "saved")
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state(tmp_path / "saved")
    assert torch.equal(model.weight, before)


def test_a_base_stays_beyond_the_limit_while_a_newer_checkpoint_borrows_from_it(
    accelerator_of: Any, tmp_path: Path
) -> None:
    accelerator = accelerator_of(
        project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=1
    )
    accelerator.prepare(torch.nn.Linear(300, 100))
    first = accelerator.save_state()
    accelerator.save_state(base=first)
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_0", "checkpoint_1"]
    accelerator.save_state()
    assert [path.name for path in folder.iterdir()] == ["checkpoint_2"]


def test_automatic_names_without_a_project_folder_are_refused(accelerator_of: Any) -> None:
    accelerator = accelerator_of(automatic_checkpoint_naming=True)
    for call in (accelerator.save_state, accelerator.load_state):
        with pytest.raises(ckpt.ArgumentError, match="project_dir"):
            call()
