"""Local state dicts as runtimes make them: flat parameters, with the names of what is in them.

Those of this project's runtime say themselves what they hold, in their `_metadata`. Those of
torch's FSDP have flat parameters and no word about them: only the module they are of knows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import nn

from ckpt.errors import StateError
from ckpt.state.stateful import unwrapped
from sharding.describe.local_part import FLAT_PARAMETERS

FLAT = "_flat_param"
"""What both runtimes call a flat parameter; a number follows where there are several."""


def by_parameters(state: Mapping[object, object]) -> Mapping[object, object]:
    """A state dict by the names of parameters: with `LocalPart`s where it has flat ones.

    The state dict itself where it does not say that it has. Nothing is copied. Raises
    LocalShapeError for a truncated shard, and ShardingError for another rank's.
    """
    metadata = getattr(state, "_metadata", None)
    if not isinstance(metadata, Mapping) or not any(
        isinstance(entry, Mapping) and FLAT_PARAMETERS in entry for entry in metadata.values()
    ):
        return state
    from sharding.describe.local_state_dicts import local_parts

    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return local_parts(state, rank=rank)  # type: ignore[arg-type, return-value]


def with_names(state: object, model: nn.Module | None) -> object:
    """A state whose local state dicts of torch's FSDP have the names that `model` knows.

    Raises StateError for flat parameters that nobody can name.
    """
    if not isinstance(state, Mapping):
        return state
    named = by_parameters(state)
    if named is not state:
        return state  # it speaks for itself
    flat = next((key for key in state if _is_flat(key)), None)
    if flat is None:
        found = {key: with_names(item, model) for key, item in state.items()}
        return found if any(found[key] is not item for key, item in state.items()) else state
    if model is None:
        raise StateError(
            f"{flat} is a flat parameter, and nothing says which parameters are in it: pass the "
            "module that the state dict is of as model=, or a state dict with its _metadata as "
            "this project's state_dict() returned it"
        )
    from sharding.describe.torch_fsdp import named_parts  # torch's FSDP

    return named_parts(unwrapped(model), state)


def _is_flat(key: object) -> bool:
    return isinstance(key, str) and key.rpartition(".")[2].startswith(FLAT)
