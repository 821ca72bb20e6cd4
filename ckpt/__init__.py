"""Checkpoints of PyTorch training: save on N ranks, load on M, convert to other formats.

    import ckpt

    ckpt.save("runs/step-100", {"model": model, "optim": optim, "step": step})
    state = ckpt.load("runs/step-100", {"model": model, "optim": optim, "step": 0})
    weights = ckpt.open("runs/step-100")["model.embed.weight"][0:16]
    full = ckpt.state_dict.convert(model, to="full", rank0_only=True)

Names are imported when they are first used: `ckpt inspect`, `verify` and `ls` never import torch.
`ckpt.sharding` is the training runtime.
No module has the name of a function here (`ckpt.saving` has `save`): importing it would hide it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ckpt.installation import __version__, check_neighbours

check_neighbours()
from sharding.supported import check_versions  # noqa: E402 - a `sharding` that is not ours is named first

check_versions()
import formats  # noqa: E402
from ckpt import errors  # noqa: E402
from ckpt.errors import *  # noqa: E402, F403 - `ckpt.errors` has the one list of errors

# mypy follows no chain of such imports within one package, as which all of this is installed.
from formats.errors import *  # noqa: E402, F403
from sharding.errors import *  # noqa: E402, F403

if TYPE_CHECKING:
    from ckpt import events, sharding, state_dict
    from ckpt.checking.diff import diff
    from ckpt.checking.identity import Identity
    from ckpt.checking.identity import id as id
    from ckpt.checking.verify import verify
    from ckpt.converting.convert import convert
    from ckpt.converting.second_output import HuggingFace, SecondOutput
    from ckpt.converting.weighted_sum import WeightedSum
    from ckpt.live.publish import LiveState, publish
    from ckpt.loading.lazy import Checkpoint, TensorHandle, read
    from ckpt.loading.lazy import open as open
    from ckpt.loading.load import load
    from ckpt.loading.newest import latest
    from ckpt.mapping.changes import read_mapping
    from ckpt.mapping.rules import TensorMapping
    from ckpt.removing.delete import delete
    from ckpt.removing.gc import LeftOver, gc
    from ckpt.run.checkpointer import Checkpointer
    from ckpt.run.follow import LiveVersion, follow
    from ckpt.run.merge import merge
    from ckpt.run.policy import Keep, RunStep
    from ckpt.run.sampler import ElasticSampler
    from ckpt.run.steps import run_steps
    from ckpt.run.tiers import Memory
    from ckpt.saving.background import Saved, SaveHandle
    from ckpt.saving.save import prepare, save
    from ckpt.state.per_rank import PerRank, per_rank, rng
    from formats.limits import limits

_WHERE = {
    "save": "ckpt.saving.save",
    "prepare": "ckpt.saving.save",
    "SaveHandle": "ckpt.saving.background",
    "Saved": "ckpt.saving.background",
    "load": "ckpt.loading.load",
    "latest": "ckpt.loading.newest",
    "open": "ckpt.loading.lazy",
    "read": "ckpt.loading.lazy",
    "follow": "ckpt.run.follow",
    "LiveVersion": "ckpt.run.follow",
    "Checkpoint": "ckpt.loading.lazy",
    "TensorHandle": "ckpt.loading.lazy",
    "convert": "ckpt.converting.convert",
    "HuggingFace": "ckpt.converting.second_output",
    "SecondOutput": "ckpt.converting.second_output",
    "WeightedSum": "ckpt.converting.weighted_sum",
    "merge": "ckpt.run.merge",
    "read_mapping": "ckpt.mapping.changes",
    "TensorMapping": "ckpt.mapping.rules",
    "delete": "ckpt.removing.delete",
    "gc": "ckpt.removing.gc",
    "LeftOver": "ckpt.removing.gc",
    "diff": "ckpt.checking.diff",
    "Identity": "ckpt.checking.identity",
    "id": "ckpt.checking.identity",
    "verify": "ckpt.checking.verify",
    "limits": f"{formats.__name__}.limits",
    "LiveState": "ckpt.live.publish",
    "publish": "ckpt.live.publish",
    "Checkpointer": "ckpt.run.checkpointer",
    "Memory": "ckpt.run.tiers",
    "Keep": "ckpt.run.policy",
    "RunStep": "ckpt.run.policy",
    "run_steps": "ckpt.run.steps",
    "rng": "ckpt.state.per_rank",
    "ElasticSampler": "ckpt.run.sampler",
    "PerRank": "ckpt.state.per_rank",
    "per_rank": "ckpt.state.per_rank",
}

__all__ = [
    "Checkpoint",
    "Checkpointer",
    "ElasticSampler",
    "HuggingFace",
    "Identity",
    "Keep",
    "LeftOver",
    "LiveState",
    "LiveVersion",
    "Memory",
    "PerRank",
    "RunStep",
    "SaveHandle",
    "Saved",
    "SecondOutput",
    "TensorHandle",
    "TensorMapping",
    "WeightedSum",
    "__version__",
    "convert",
    "delete",
    "diff",
    "events",
    "follow",
    "gc",
    "latest",
    "limits",
    "load",
    "merge",
    "per_rank",
    "prepare",
    "publish",
    "read",
    "read_mapping",
    "rng",
    "run_steps",
    "save",
    "sharding",
    "state_dict",
    "verify",
]
__all__ += errors.__all__
"""All names but `open` and `id`, which would hide Python's own."""


def __getattr__(name: str) -> object:
    if name in ("events", "sharding", "state_dict"):
        return importlib.import_module(f"ckpt.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "id", "open"])
