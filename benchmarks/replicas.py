"""What comparing replicas adds to a save: processor time for 1,000 tensors, beside describing them.

    python benchmarks/replicas.py

Each row is the median of 30 rounds, with the least and the most; the rounds of all rows are
interleaved. Caches are swept before each: a training step has done so, too. "all replicas" is what
a rank does where the model is replicated (DDP), "no replicas" where every tensor is sharded.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from ckpt.state.flatten import FlatState, Leaf, flatten
from ckpt.state.merged_state import spec_of, state_hashes
from ckpt.transfer.replica_hashes import ReplicaHashes, Replicas
from formats.dtypes import BY_NAME
from sharding.layout import Layout, Mesh, Shard

ROUNDS = 30
WORLD = Mesh.grid(("world",), (2,))


def replicated(count: int, elements: int) -> FlatState:
    """So many tensors, of which every rank of two has a replica."""
    state = {f"layer {i}": {"weight": torch.randn(elements)} for i in range(count)}
    return flatten(state, WORLD)


def sharded(count: int, elements: int) -> FlatState:
    """So many tensors, of which a rank has half."""
    layout = Layout((2 * elements,), WORLD, (Shard(0),))
    leaves = {}
    for i in range(count):
        name, local = f"layer {i}.weight", torch.randn(elements)
        leaves[name] = Leaf(name, BY_NAME["F32"], local, layout, local)
    return FlatState(leaves, {}, {})


def weighing(flat: FlatState, way: Replicas) -> Callable[[], object]:
    """What a save does of it before its first exchange."""
    described = spec_of(flat)
    return lambda: ReplicaHashes(way, 0).weigh(flat, described.tensors)


def main() -> None:
    """Print the table."""
    small, middle, large = replicated(1000, 16), replicated(1000, 4096), replicated(300, 1 << 18)
    rows: dict[str, tuple[int, Callable[[], object]]] = {
        "all replicas, 64 B each": (1000, weighing(small, "sample")),
        "all replicas, 16 KiB each": (1000, weighing(middle, "sample")),
        "all replicas, 1 MiB each": (300, weighing(large, "sample")),
        "no replicas": (1000, weighing(sharded(1000, 16), "sample")),
        'all replicas, 16 KiB each, "check"': (1000, weighing(middle, "check")),
        "the hashes of names and values": (1000, lambda: state_hashes(spec_of(middle))),
    }
    spent: dict[str, list[float]] = {name: [] for name in rows}
    sweep = torch.zeros(16 << 20)
    for _ in range(ROUNDS):
        for name, (count, run) in rows.items():
            sweep.add_(1)
            began = time.thread_time()
            run()
            spent[name].append((time.thread_time() - began) * 1e6 / count)
    print("| what | ms for 1,000 tensors: median (least to most) |\n|---|---|")
    for name, times in spent.items():
        middle_time = statistics.median(times)
        print(f"| {name} | {middle_time:.2f} ({min(times):.2f} to {max(times):.2f}) |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
