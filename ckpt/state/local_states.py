"""Names the parts of flat parameters in local state dicts.

A local state dict of this project's runtime has the names in its `_metadata`. One of torch's FSDP
has flat parameters without names: only its module has them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import nn

from ckpt.errors import StateError
from ckpt.state.stateful import MAX_DEPTH
from sharding.describe.local_part import FLAT_PARAMETERS

FLAT = "_flat_param"
"""Both runtimes' name of a flat parameter; a number follows if there are several."""


def by_parameters(state: Mapping[object, object]) -> Mapping[object, object]:
    """Returns a state dict by parameter names, with `LocalPart`s in the place of flat parameters.

    Returns the state dict itself if its `_metadata` names no flat parameters. Copies nothing.

    Raises:
        LocalShapeError: a shard is truncated.
        ShardingError: a shard is another rank's.
    """
    metadata = getattr(state, "_metadata", None)
    if not isinstance(metadata, Mapping) or not any(
        isinstance(entry, Mapping) and FLAT_PARAMETERS in entry for entry in metadata.values()
    ):
        return state
    from sharding.describe.local_state_dicts import local_parts

    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return local_parts(state, rank=rank)  # type: ignore[arg-type, return-value]


def with_names(state: object, model: nn.Module | None, depth: int = 0) -> object:
    """Returns a state whose local state dicts of torch's FSDP have the parameter names of `model`.

    Raises:
        StateError: there are flat parameters and no `model`, or the state nests too deep.
    """
    if not isinstance(state, Mapping):
        return state
    if depth > MAX_DEPTH:
        raise StateError(f"the state nests deeper than {MAX_DEPTH}: a cycle?")
    named = by_parameters(state)
    if named is not state:
        return state  # its `_metadata` has the names
    flat = next((key for key in state if _is_flat(key)), None)
    if flat is None:
        found = {key: with_names(item, model, depth + 1) for key, item in state.items()}
        return found if any(found[key] is not item for key, item in state.items()) else state
    if model is None:
        raise StateError(
            f"{flat} is a flat parameter without the names of its parameters: pass the module of "
            "the state dict as model=, or a state dict with _metadata, as this project's "
            "state_dict() returns it"
        )
    from sharding.describe.torch_fsdp import named_parts  # torch's FSDP

    return named_parts(model, state)


def _is_flat(key: object) -> bool:
    return isinstance(key, str) and key.rpartition(".")[2].startswith(FLAT)
