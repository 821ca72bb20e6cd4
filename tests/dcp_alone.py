"""DCP in one process without a process group, with every torch of the range.

2.8 has `no_dist=True` for it; 2.6 has not and finds out by itself, with a warning.
"""

import warnings
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save


def save(state: dict[str, Any], checkpoint_id: str | Path) -> None:
    """Write a DCP folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the process that is alone, and of torch's own calls
        dcp_save(state, checkpoint_id=checkpoint_id)


def load(target: dict[str, Any], checkpoint_id: str | Path) -> None:
    """Read a DCP folder into a target."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_load(target, checkpoint_id=checkpoint_id)
