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
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp
    import tensorstore

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
    shutil.rmtree(folder / "zarr3", ignore_errors=True)
    small = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=16), state)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True)
    with ocp.Checkpointer(handler) as checkpointer:
        saved = ocp.args.PyTreeSave(state, save_args=small)
        checkpointer.save(folder.absolute() / "zarr3", args=saved)
    shutil.rmtree(folder / "shards", ignore_errors=True)
    numbers = [{"name": "bytes", "configuration": {"endian": "little"}}]
    shard = {
        "chunk_shape": [2, 3],
        "codecs": [*numbers, {"name": "zstd", "configuration": {"level": 1}}],
        "index_codecs": [*numbers, {"name": "crc32c"}],
    }
    array = {
        "shape": [10, 7],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 6]}},
        "codecs": [{"name": "sharding_indexed", "configuration": shard}],
    }
    place = f"file://{folder.absolute()}/shards/"
    spec = {"driver": "zarr3", "kvstore": place, "metadata": array, "create": True}
    tensorstore.open(spec).result().write(jnp.arange(1.0, 71.0).reshape(10, 7)).result()
    shutil.rmtree(folder / "deep", ignore_errors=True)
    config = {"max_decoded_node_bytes": 400, "max_inline_value_bytes": 20}
    base = f"file://{folder.absolute()}/deep/"
    database = tensorstore.KvStore.open(
        {"driver": "ocdbt", "base": base, "config": config}
    ).result()
    with tensorstore.Transaction() as transaction:
        for number in range(100):
            database.with_transaction(transaction)[f"a/{number:03d}"] = b"x" * (number % 40)
    shutil.rmtree(folder / "manager", ignore_errors=True)
    with ocp.CheckpointManager(folder.absolute() / "manager") as manager:
        manager.save(5, args=ocp.args.StandardSave(state))


if __name__ == "__main__":
    main()
