"""Reinforcement learning in two jobs: a trainer sends weights to a generator, and gets tokens back.

The policy is a small GPT without any training. It learns by REINFORCE, from its own tokens alone,
to write lower-case letters: in 20 versions their share rises from a tenth to nearly all.

    python examples/weights.py --versions 20

starts two jobs by torchrun. Nothing but the addresses of two live states connects them:

- the *trainer*, 2 ranks with `ckpt.sharding.fully_shard` and float32, publishes the state "policy"
  in bfloat16;
- the *generator*, 3 ranks with tensor parallelism and bfloat16, follows it, writes text with each
  version and publishes the tokens as the state "rollouts", which the trainer follows. On another
  host it gets the differences between versions alone.

On two hosts, each starts one job, with a folder that both see and a network to listen on:

    torchrun --master-addr H --nproc-per-node 2 weights.py --job train --folder D --address 0.0.0.0

The trainer also saves each version to the disk. The generator loads a second model from there and
compares: both must write the same tokens. Exit code 1, and the reason, if anything differs.

Promised: the generator writes with the weights of one version, whole and to the bit, and the
trainer learns from tokens of the version that it publishes. Not promised: the same tokens on other
hardware or another number of ranks, whose sums differ, or an order of the jobs that hides the wait
of one for the other. A real trainer makes several steps with old rollouts; a real engine has a
cache of keys and values, which it empties for each version.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from demo import run, torchrun
from gpt import GPT, Sizes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from train import build, clip_gradients, joined, say

import ckpt

TRAINERS, GENERATORS = 2, 3
PROMPTS = (b"def ", b"for ", b"if (", b"try:")
SAMPLES = 16
"""Of each prompt."""
TOKENS = 12
"""Bytes that the generator adds to each prompt."""
CONTEXT = TOKENS + len(PROMPTS[0])
RUN_SECONDS = 900.0
"""The longest time of a job."""
LIMIT_SECONDS = 120.0
"""The longest wait for the other job."""


def train(folder: Path, versions: int, address: str | None) -> None:
    """Publishes `versions` versions, each trained on the rollouts of the one before."""
    model = build("fully_shard", seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt.save(folder / "version-1", {"model": model})
    state = {"model": model}
    how = {"address": address, "dtype": torch.bfloat16, "timeout": LIMIT_SECONDS}
    with ckpt.publish(state, "policy", **how) as live:
        tell(folder / "policy", live.url)
        rollouts = ckpt.follow(told(folder / "rollouts"), timeout=LIMIT_SECONDS)
        for version in range(1, versions + 1):
            tokens = rollouts_of(version, next(rollouts))
            if version == versions:
                return
            optimizer.zero_grad()
            torch.autograd.backward(policy_loss(model, tokens))
            clip_gradients(model)
            optimizer.step()
            ckpt.save(folder / f"version-{version + 1}", {"model": model})
            live.update().wait()


def rollouts_of(version: int, found: ckpt.LiveVersion) -> Tensor:
    """Returns the tokens that the generator wrote with a version of the policy."""
    tokens = no_tokens()
    state: dict[str, object] = {"tokens": tokens, "version": 0}
    ckpt.load(found.url, state)
    if state["version"] != version:
        raise SystemExit(f"rollouts of version {version} were due, not of {state['version']}")
    return tokens


def no_tokens() -> Tensor:
    """The memory of one version's rollouts: (samples, CONTEXT)."""
    return torch.zeros(SAMPLES * len(PROMPTS), CONTEXT, dtype=torch.int64)


def rewards(tokens: Tensor) -> Tensor:
    """1 for each written byte that is a lower-case letter, else 0: (samples, TOKENS)."""
    written = tokens[:, -TOKENS:]
    return ((written >= ord("a")) & (written <= ord("z"))).float()


def policy_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss of REINFORCE of this rank's samples; `fully_shard` averages the gradients.

    A byte counts for the rewards from it on, less their mean over all samples at its place.
    """
    to_come = rewards(tokens).flip(1).cumsum(1).flip(1)
    advantages = to_come - to_come.mean(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    tokens, advantages = tokens.chunk(world)[rank], advantages.chunk(world)[rank]
    scores = model(tokens[:, :-1]).transpose(1, 2)
    costs = F.cross_entropy(scores, tokens[:, 1:], reduction="none")[:, -TOKENS:]
    return (advantages * costs).mean()


def generate(folder: Path, versions: int, address: str | None) -> None:
    """Follows the policy, and publishes the tokens of each version until the trainer ends."""
    policy, live = told(folder / "policy"), None
    model, reference = engine(), engine()
    rolled = no_tokens()
    rollouts: dict[str, object] = {"tokens": rolled, "version": 0}
    for version in ckpt.follow(policy, timeout=LIMIT_SECONDS):
        load(version.url, model)
        load(str(folder / f"version-{version.number}"), reference)
        tokens = written(model, version.number)
        if not torch.equal(tokens, written(reference, version.number)):
            raise SystemExit(f"version {version.number}: the tokens differ from the reference's")
        changed = int(torch.ne(rolled, tokens).sum())
        rolled.copy_(tokens)
        rollouts["version"] = version.number
        if live is None:
            live = ckpt.publish(rollouts, "rollouts", address=address, timeout=LIMIT_SECONDS)
            tell(folder / "rollouts", live.url)
        else:
            live.update().wait()
        if dist.get_rank() == 0:
            equal = f"{TOKENS * len(tokens)} tokens equal the reference"
            reward = f"reward {rewards(tokens).mean():.2f}"
            say(f"version {version.number}: {equal}, {changed} of them new, {reward}")
        if version.number == versions:
            break
    assert live is not None
    wait_for_the_end(policy, versions)
    live.close()


def engine() -> GPT:
    """The model of the generator: bfloat16, the weights of its blocks split over all ranks."""
    model = GPT(Sizes()).bfloat16().eval()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    names = [f"blocks.{at}.{layer}" for at in range(len(model.blocks)) for layer in LAYERS]
    parallelize_module(
        model, mesh, {name: ColwiseParallel(output_layouts=Replicate()) for name in names}
    )
    return model


LAYERS = ("attn.qkv", "attn.out", "mlp.0", "mlp.2")


def load(url: str, model: GPT) -> None:
    """Fills the engine: other names and layouts than the trainer's; of the disk, another dtype."""
    ckpt.load(url, {"engine": {"net": model}}, rename={"model": "engine.net"}, dtype="target")


@torch.inference_mode()
def written(model: GPT, seed: int) -> Tensor:
    """The prompts, each with bytes behind it that are drawn with a seed: (samples, CONTEXT)."""
    draw, prompts = torch.Generator().manual_seed(seed), [list(one) for one in PROMPTS]
    texts = torch.tensor(prompts * SAMPLES)
    for _ in range(TOKENS):
        chances = torch.softmax(model(texts)[:, -1].float(), dim=-1)
        texts = torch.cat([texts, torch.multinomial(chances, 1, generator=draw)], dim=1)
    return texts


def wait_for_the_end(policy: str, after: int) -> None:
    """Returns on rank 0 once the trainer has read the last rollouts, and has closed its state."""
    if dist.get_rank() == 0:
        ended = (ckpt.NotACheckpointError, ckpt.UnreachableError)
        with suppress(*ended):
            for _ in ckpt.follow(policy, after=after, group="self", timeout=LIMIT_SECONDS):
                pass


def tell(place: Path, url: str) -> None:
    """Rank 0 writes an address, which has the token, to a file that only its user can read."""
    if dist.get_rank() == 0:
        part = place.with_suffix(".part")
        with open(os.open(part, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(url)
        part.rename(place)


def told(place: Path) -> str:
    """The address that the other job has written, once it is there."""
    for _ in pauses(LIMIT_SECONDS):
        with suppress(FileNotFoundError):
            return place.read_text()
    raise SystemExit(f"{place}: the other job has not begun within {LIMIT_SECONDS:.0f} s")


def pauses(seconds: float) -> Iterator[None]:
    """Yields ten times a second, until so many seconds are over."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        yield
        time.sleep(0.1)


def start(folder: Path, versions: int) -> None:
    """Runs both jobs to their ends, and prints their lines."""
    shared = ["--versions", str(versions), "--folder", str(folder)]
    commands = [
        torchrun(count, "weights.py", "--job", job, *shared)
        for job, count in (("train", TRAINERS), ("generate", GENERATORS))
    ]
    with ThreadPoolExecutor(len(commands)) as pool:
        for lines in pool.map(lambda command: run(command, folder, seconds=RUN_SECONDS), commands):
            for line in lines:
                if line.startswith("version "):
                    say(line)


def main(arguments: list[str]) -> None:
    """One of the jobs on one rank; or, without --job, both of them."""
    parser = argparse.ArgumentParser(description="A trainer and a generator by live states.")
    parser.add_argument("--versions", type=int, default=20, help="of the policy (default: 20)")
    parser.add_argument("--folder", type=Path, help="for the copies on disk; else a temporary one")
    parser.add_argument("--job", choices=("train", "generate"), help="what torchrun starts")
    parser.add_argument("--address", help="where a job listens; on two hosts, 0.0.0.0")
    options = parser.parse_args(arguments)
    if options.job is None:
        with tempfile.TemporaryDirectory() as folder:
            start(options.folder or Path(folder), options.versions)
        return
    with joined("fully_shard") as ranks:
        say(f"rank {ranks.rank} of {ranks.world} is process {os.getpid()}")
        job = train if options.job == "train" else generate
        job(options.folder, options.versions, options.address)


if __name__ == "__main__":
    main(sys.argv[1:])
