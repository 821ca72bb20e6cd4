"""Programs written for DCP run on `ckpt.dcp` by their import lines alone, with equal results."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.old_torch import needs

PROGRAMS = Path(__file__).with_name("programs.py")
TORCH, OURS, BOTH = "torch.distributed.checkpoint", "ckpt.dcp", "ckpt.dcp and sharding"
THEIR_RUNTIME = "from torch.distributed.fsdp import StateDictType, fully_shard"
OUR_RUNTIME = "from sharding import fully_shard; from torch.distributed.fsdp import StateDictType"
pytestmark = needs((2, 8), "no_dist= and FSDP2 on a CPU came with torch 2.8")


def program(package: str, name: str) -> Callable[[str], Any]:
    """A function of the programs, whose import lines name this package, or both of ours."""
    called = f"dcp_programs_on_{package}"
    if called not in sys.modules:
        module = types.ModuleType(called)
        sys.modules[called] = module
        code = PROGRAMS.read_text().replace(TORCH, package.partition(" ")[0])
        assert THEIR_RUNTIME in code
        code = code.replace(THEIR_RUNTIME, OUR_RUNTIME) if package == BOTH else code
        exec(code, module.__dict__)  # noqa: S102
    return getattr(sys.modules[called], name)  # type: ignore[no-any-return]


def run(package: str, name: str, folder: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a process that is alone
        return bits(program(package, name)(folder))


def bits(value: Any) -> Any:
    """A nest with the bits of its tensors, which can be sent and compared."""
    if isinstance(value, torch.Tensor):
        data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), data
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(bits, value))
    return value


def run_both(cluster: Any, name: str, folder: Path) -> Any:
    """What a program returns on each rank, the same with both packages."""
    wanted = cluster.run(run, TORCH, name, str(folder / "torch"))
    found = cluster.run(run, OURS, name, str(folder / "ckpt"))
    assert found == wanted
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("loading", [1, 3])
def test_the_recipe_resumes_at_another_world_size(
    clusters: Callable[[int], Any], tmp_path: Path, loading: int
) -> None:
    saved = run_both(clusters(2), "save_recipe", tmp_path)[0]
    for loaded, step, rate in run_both(clusters(loading), "resume_recipe", tmp_path):
        assert (step, rate) == (2, 0.05)
        assert loaded == saved
    # And ckpt.dcp reads what torch has written, into torch's runtime and into ours.
    for package in (OURS, BOTH):
        elsewhere = clusters(loading).run(run, package, "resume_recipe", str(tmp_path / "torch"))
        assert elsewhere[0][0] == saved


@pytest.mark.thorough
def test_saves_in_the_background_are_of_the_state_at_their_calls(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    saved = run_both(clusters(2), "save_in_a_loop", tmp_path)[0]
    assert run_both(clusters(3), "load_from_the_loop", tmp_path)[0] == saved
    assert not ckpt.verify(tmp_path / "ckpt" / "2").problems


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["load_a_part", "load_more_than_there_is", "miss_a_name"])
def test_loads_of_fewer_and_of_other_names_do_the_same(
    clusters: Callable[[int], Any], tmp_path: Path, name: str
) -> None:
    run_both(clusters(2), "save_recipe", tmp_path)
    found = run_both(clusters(2), name, tmp_path)
    assert found[0] is not None


def test_a_process_alone_saves_and_loads_every_kind_of_value(tmp_path: Path) -> None:
    for package in (TORCH, OURS):
        saved = run(package, "save_alone", str(tmp_path / package))
        for reader in (package, OURS):
            loaded = run(reader, "load_alone", str(tmp_path / package))
            assert loaded.pop("half")[:2] == ("torch.float32", (2, 3))
            assert loaded == {key: saved[key] for key in saved if key != "half"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("world_size", "name"),
    [
        (3, "save_by_a_group"),
        (2, "save_by_storage"),
        (2, "save_by_planner"),
        (2, "save_over_another"),
        (2, "sharded_states_of_flat_parameters"),
        (2, "what_is_returned"),
    ],
)
def test_the_rest_of_the_programs_do_the_same(
    clusters: Callable[[int], Any], tmp_path: Path, world_size: int, name: str
) -> None:
    found = run_both(clusters(world_size), name, tmp_path)
    assert found[1] is not None
