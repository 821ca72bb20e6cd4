"""Train the small GPT; stop anywhere, go on with any number of ranks.

    torchrun --nproc-per-node 4 examples/train.py save   --checkpoint DIR
    torchrun --nproc-per-node 3 examples/train.py resume --checkpoint DIR

`save` begins anew, trains the first half and saves. `resume` takes up what DIR holds, trains to the
end and saves there again. Both may be stopped or killed at any time: DIR always holds the last
checkpoint that was complete. `--runtime` says what distributes the model: torch's `fsdp2` or `ddp`,
or this repository's `fully_shard` or `wrapper`; any of them resumes what any other saved.

The mathematics is the same on any number of ranks: equal shares of one global batch, gradients
averaged over ranks, gradients clipped by their global norm. What remains is the order of float32
additions. All that a run needs to go on is the model, the optimizer and `progress`; the learning
rate and the data are functions of the step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, Block, Sizes
from text import Batches, digest, standard_library
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt import sharding
from ckpt.sharding.wrap import ModuleWrapPolicy

PEAK_RATE = 1e-3
WARMUP_STEPS = 20
RUNTIMES = ("fsdp2", "fully_shard", "wrapper", "ddp", "none")
MAX_NORM = 1.0
"""Of all gradients together; larger ones are scaled down."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    action: str
    checkpoint: str
    """A folder or any URL that ckpt can open."""
    steps: int
    """Length of the whole training, which sets the learning rates; `resume` takes it from DIR."""
    seed: int
    until: int | None
    """The step to stop after; None: half of the way (`save`), the end (`resume`)."""
    save_every: int | None
    """Save after each so many steps as well as at the end."""
    runtime: str
    losses: Path | None
    into: str | None = None
    """Where to save, if not to `checkpoint`."""


def parse(arguments: list[str]) -> Options:
    """The options, or exit code 2 with a message."""
    parser = argparse.ArgumentParser(
        description="Train a small GPT, under torchrun or in one process."
    )
    actions = parser.add_subparsers(dest="action", required=True)
    save = actions.add_parser("save", help="begin anew; a checkpoint already in DIR is replaced")
    resume = actions.add_parser("resume", help="go on from DIR")
    save.add_argument("--steps", type=int, default=120, help="of the whole training (default: 120)")
    save.add_argument("--seed", type=int, default=1, help="of weights and data (default: 1)")
    resume.set_defaults(steps=0, seed=0)
    for action in (save, resume):
        action.add_argument("--checkpoint", required=True, metavar="DIR", help="folder or URL")
        action.add_argument("--until", type=int, metavar="STEP", help="stop after this step")
        action.add_argument("--save-every", type=int, metavar="STEPS", help="save on the way too")
        action.add_argument("--runtime", choices=RUNTIMES, default="fsdp2")
        action.add_argument("--losses", type=Path, metavar="FILE", help="JSON lines of losses")
        action.add_argument("--into", metavar="DIR", help="save there and leave DIR as it is")
    return Options(**vars(parser.parse_args(arguments)))


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that train together."""

    rank: int
    world: int

    def mean(self, value: torch.Tensor) -> float:
        """The mean of a number over all ranks. Every rank calls it; it communicates."""
        value = value.detach().clone()
        if self.world > 1:
            dist.all_reduce(value)
        return value.item() / self.world


@contextmanager
def joined(runtime: str) -> Iterator[Ranks]:
    """The process group that torchrun describes, or this process alone with `--runtime none`."""
    if (runtime == "none") == ("RANK" in os.environ):
        raise SystemExit(
            "use `torchrun --nproc-per-node 4 examples/train.py ...` for several processes, or "
            "`python examples/train.py ... --runtime none` for one"
        )
    if runtime == "none":
        yield Ranks(0, 1)
        return
    dist.init_process_group("gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
        gc.collect()  # a model of torch's FSDP2 keeps the group (docs/sharding.md)


def build(runtime: str, seed: int) -> nn.Module:
    """The model with the seed's initial weights, the same on every rank, distributed."""
    torch.manual_seed(seed)
    model = GPT(Sizes())
    if runtime == "ddp":
        return DistributedDataParallel(model)
    # Each rank keeps its part of the weights it drew: equal seeds stand in for a broadcast.
    if runtime == "wrapper":
        each_block = ModuleWrapPolicy({Block})
        return sharding.FullyShardedDataParallel(model, auto_wrap_policy=each_block)
    if runtime in ("fsdp2", "fully_shard"):
        fully_shard = torch_fsdp.fully_shard if runtime == "fsdp2" else sharding.fully_shard
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return model


def clip_gradients(model: nn.Module) -> None:
    """Scale all gradients, as one vector over all ranks, down to MAX_NORM."""
    if isinstance(model, sharding.FullyShardedDataParallel):
        model.clip_grad_norm_(MAX_NORM)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)


def learning_rate(step: int, steps: int) -> float:
    """A short rise, then a straight line down to a tenth."""
    rise = (step + 1) / WARMUP_STEPS
    fall = 1 - 0.9 * step / steps
    return PEAK_RATE * min(rise, fall)


def say(line: str) -> None:
    """Print a line in one write, so that lines of several ranks do not mix."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def train(options: Options, ranks: Ranks) -> None:
    """The run of one rank from where it begins to where it shall stop."""
    model = build(options.runtime, options.seed)
    optim = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    text = standard_library()
    progress: dict[str, int | str] = {
        "step": 0,
        "steps": options.steps,
        "seed": options.seed,
        "text": digest(text),
    }
    state = {"model": model, "optim": optim, "progress": progress}
    if options.action == "resume":
        ckpt.load(options.checkpoint, state)  # fills all three in place
    if progress["text"] != digest(text):
        raise SystemExit(
            f"{options.checkpoint} was trained on text {progress['text']}, this Python's library "
            f"is {digest(text)}: go on with the Python version that began"
        )
    step, steps = int(progress["step"]), int(progress["steps"])
    batches = Batches(text, int(progress["seed"]))
    until = min(steps, options.until or (steps // 2 if options.action == "save" else steps))
    if ranks.rank == 0:
        say(f"{step} of {steps} steps done; training until {until} on {ranks.world} ranks")

    with open(options.losses, "w") if options.losses and ranks.rank == 0 else nullcontext() as log:
        while step < until:
            for group in optim.param_groups:
                group["lr"] = learning_rate(step, steps)
            inputs, targets = batches.share(step, ranks.rank, ranks.world)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optim.zero_grad()
            loss.backward()
            clip_gradients(model)
            optim.step()
            step += 1

            value = ranks.mean(loss)
            if log:
                print(json.dumps({"step": step, "loss": value}), file=log, flush=True)
            if ranks.rank == 0:
                say(f"step {step}  loss {value:.4f}")
            if step == until or (options.save_every and step % options.save_every == 0):
                progress["step"] = step
                place = options.into or options.checkpoint
                ckpt.save(place, state, overwrite=True)
                if ranks.rank == 0:
                    say(f"saved {place} at step {step}")


def main(arguments: list[str]) -> None:
    """Train as the command line says."""
    options = parse(arguments)
    with joined(options.runtime) as ranks:
        say(f"rank {ranks.rank} of {ranks.world} is process {os.getpid()}")
        train(options, ranks)


if __name__ == "__main__":
    main(sys.argv[1:])
