"""Three runtimes, one training: each trains, and each goes on with what every other one saved.

    torchrun --nproc-per-node 2 examples/runtimes.py --steps 75 --each 4

Torch's `fsdp2`, and `fully_shard` and `wrapper` of this repository, take turns in the same
processes. RUNTIME trains `--each` steps and saves into the folder RUNTIME; then every other one
resumes there, trains as many steps more and saves into RUNTIME-to-OTHER. The losses go into files
of these names.
"""

from __future__ import annotations

import argparse
import os
import sys
from itertools import permutations
from pathlib import Path

from train import Options, joined, say, train

SHARDING = ("fsdp2", "fully_shard", "wrapper")


def main(arguments: list[str]) -> None:
    """Train with each runtime, then resume with all others."""
    parser = argparse.ArgumentParser(description="Train with three runtimes that take turns.")
    parser.add_argument("--steps", type=int, default=75, help="of the whole training (default: 75)")
    parser.add_argument("--each", type=int, default=4, help="steps of each turn (default: 4)")
    parser.add_argument("--seed", type=int, default=1, help="of weights and data (default: 1)")
    given = parser.parse_args(arguments)

    def turn(action: str, runtime: str, place: str, until: int, into: str) -> None:
        options = Options(
            action=action,
            checkpoint=place,
            steps=given.steps,
            seed=given.seed,
            until=until,
            save_every=None,
            runtime=runtime,
            losses=Path(f"{into}.jsonl"),
            into=into,
        )
        train(options, ranks)

    with joined("fsdp2") as ranks:
        say(f"rank {ranks.rank} of {ranks.world} is process {os.getpid()}")
        for runtime in SHARDING:
            turn("save", runtime, runtime, given.each, runtime)
        for saved, resumed in permutations(SHARDING, 2):
            turn("resume", resumed, saved, 2 * given.each, f"{saved}-to-{resumed}")


if __name__ == "__main__":
    main(sys.argv[1:])
