"""Small models of the tests of the wrapper class, and the replica that a sharded one must equal.

`sharding` and `torch.distributed.fsdp` offer the same names, so a test takes either as `runtime`
and runs the same lines through both. Sizes are multiples of no world size, every model is a few
hundred numbers, and every rank has a batch of its own.
"""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.networks import Block, Frozen

CPU = torch.device("cpu")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
WORDS, WIDTH = 11, 6


class Network(nn.Module):
    """An embedding shared with the head, two blocks, a frozen layer, two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(9), Block(7)])
        self.frozen = Frozen()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.0, WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.word = "attribute"

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(self.frozen(x)))


def network(seed: int = 0) -> Network:
    """A `Network` drawn from a seed."""
    torch.manual_seed(seed)
    return Network()


def layers(*sizes: int, seed: int = 0) -> nn.Sequential:
    """Linear layers of these sizes with a bend after each but the last, drawn from a seed."""
    torch.manual_seed(seed)
    parts: list[nn.Module] = []
    for before, after in pairwise(sizes):
        parts += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*parts[:-1])


def wrapped(
    runtime: ModuleType, model: nn.Module, strategy: str = "FULL_SHARD", **arguments: Any
) -> Any:
    """The model in a runtime's wrapper class, each block and frozen layer a unit of its own."""
    arguments.setdefault("auto_wrap_policy", runtime.wrap.ModuleWrapPolicy({Block, Frozen}))
    return runtime.FullyShardedDataParallel(
        model,
        sharding_strategy=runtime.ShardingStrategy[strategy],
        device_id=CPU,
        **arguments,
    )


def batch(step: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and the words that should follow them: a rank's own in a step."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(WORDS, (3, 4), generator=generator)
    return tokens, torch.randint(WORDS, (3, 4), generator=generator)


def numbers(step: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers of this shape: this rank's own in a step."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(shape, generator=generator, dtype=dtype)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """The loss of a (wrapped) `Network` on this rank's batch of a step."""
    tokens, following = batch(step)
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), following.flatten())


def average_gradients(replica: nn.Module) -> None:
    """Each gradient becomes its mean over the ranks; a rank without one counts as zero."""
    parameters = list(replica.parameters())
    has = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
    dist.all_reduce(has)
    averaged = [parameter for parameter, count in zip(parameters, has, strict=True) if count > 0]
    for dtype in dict.fromkeys(parameter.dtype for parameter in averaged):
        alike = [parameter for parameter in averaged if parameter.dtype == dtype]
        for parameter in alike:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([parameter.grad.flatten() for parameter in alike])
        dist.all_reduce(flat)
        means = (flat / dist.get_world_size()).split([parameter.numel() for parameter in alike])
        for parameter, mean in zip(alike, means, strict=True):
            parameter.grad.copy_(mean.view(parameter.shape))


def sgd(model: nn.Module) -> torch.optim.SGD:
    """The optimizer of these tests, over what is trained."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, steps: int, *, replica: bool = False) -> list[float]:
    """This rank's losses over some steps; a replica's gradients are averaged before each."""
    optimizer = sgd(model)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        if replica:
            average_gradients(model)
        optimizer.step()
        losses.append(loss.item())
    return losses


def full_parameters(runtime: ModuleType, model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the whole parameters by the names that the unwrapped model gives them."""
    with runtime.FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return copies(model)


def full_gradients(runtime: ModuleType, model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the whole gradients, of a model wrapped with `use_orig_params=True`."""
    with runtime.FullyShardedDataParallel.summon_full_params(
        model, writeback=False, with_grads=True
    ):
        return gradients(model)


def plain(name: str) -> str:
    """A parameter's name without what the wrapper classes put into it."""
    return name.replace("_fsdp_wrapped_module.", "")


def copies(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the parameters as they lie in the model now."""
    return {plain(name): p.detach().clone() for name, p in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the gradients that there are."""
    return {
        plain(name): p.grad.detach().clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def assert_equal(
    found: dict[str, torch.Tensor],
    wanted: dict[str, torch.Tensor],
    *,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """The same names, shapes, dtypes and (but for rounding) numbers."""
    assert sorted(found) == sorted(wanted), f"only on one side: {sorted({*found} ^ {*wanted})}"
    for name, tensor in wanted.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )
