"""Writes the folders of Orbax beside this file.

    .venvs/peers/bin/python tests/data/orbax/make.py [FOLDER]

The arrays are those of `VALUES`, so that a test needs neither Orbax nor a copy of them.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

SHAPES = {"embed": (3, 4), "bias": (4,), "half": (2, 2)}


def main() -> None:
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    state = {
        "params": {
            "embed": jnp.arange(12.0).reshape(3, 4),
            "bias": jnp.ones(4),
            "half": jnp.ones((2, 2), jnp.bfloat16),
        },
        "layers": [{"w": jnp.zeros(2, jnp.int32)}, {}],
        "step": 5,
    }
    for name in ("ocdbt", "zarr"):
        shutil.rmtree(folder / name, ignore_errors=True)
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=name == "ocdbt")
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(folder.absolute() / name, args=ocp.args.PyTreeSave(state))
    shutil.rmtree(folder / "manager", ignore_errors=True)
    with ocp.CheckpointManager(folder.absolute() / "manager") as manager:
        manager.save(5, args=ocp.args.StandardSave(state))


if __name__ == "__main__":
    main()
