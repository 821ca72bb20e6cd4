"""One small network and its optimizer under every runtime, and its state read without `ckpt`.

A trainer is made from a kind's name, on all ranks of the default group alike. The network has what
checkpoints stumble over: a tied weight, sizes that no number of ranks divides, a parameter of no
dimensions, a frozen layer, buffers, and an AdamW of two groups with different options.

[Note: the same arithmetic]
All ranks see the same batch, so that each computes on whole parameters
what one process would, and the mean of the ranks' gradients is the gradient of each, if taking the
mean rounds nothing. Sums of 2 and of 4 equal numbers are exact. Of 3 they are not, so `coarse`
takes two bits from every gradient before a runtime sees it: three times a number of 22 bits has 24,
which float32 holds, and a third of that is the number again. AdamW goes from element to element
and rounds each as it would anywhere else, so it does not matter how a runtime cuts them (which
`fused=True` would not keep: what is left over from its vectors, it rounds in another way). What
remains:

* DDP multiplies by 1/3 before it sums; that rounds, so on 3 ranks it is like nothing but itself.
* Tensor parallelism adds up the parts of a product in another order, the same on 2 and on 4 ranks.

`arithmetic` says which class a trainer is of. Two of one class train bit for bit alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import sharding
from tests.kept_groups import kept
from tests.networks import Frozen
from tests.old_torch import TORCH_TRAINS_ON_CPU

ALL_KINDS = (
    "plain",
    "ddp",
    "torch-fsdp1-flat",
    "torch-fsdp1-original",
    "torch-fsdp2",
    "torch-fsdp2-tensor",
    "torch-fsdp2-hybrid",
    "wrapper-flat",
    "wrapper-original",
    "composable",
    "fully_shard",
    "fully_shard-hybrid",
)
KINDS = tuple(k for k in ALL_KINDS if TORCH_TRAINS_ON_CPU or not k.startswith("torch-fsdp2"))
ON_A_GRID = ("torch-fsdp2-tensor", "torch-fsdp2-hybrid", "fully_shard-hybrid")
"""Kinds whose ranks are a grid with two columns."""

WORDS, WIDTH = 11, 7


class _Coarse(torch.autograd.Function):
    """The identity, whose gradient has 22 bits of the 24 (Veltkamp's splitting)."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        scaled = gradient * 5
        return scaled - (scaled - gradient)


def coarse(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter as it is, whose gradient three ranks can average exactly."""
    return _Coarse.apply(parameter)


class Linear(nn.Linear):
    """A layer with coarse gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, coarse(self.weight), coarse(self.bias))


class Block(nn.Module):
    """Two layers around a bend, and a buffer: a unit inside."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = Linear(WIDTH, inner)
        self.down = Linear(inner, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x * self.scale)))


class Network(nn.Module):
    """An embedding that is the head's weight too, two blocks, a frozen layer, a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(8), Block(9)])
        self.frozen = Frozen(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embedding.weight
        self.gain = nn.Parameter(torch.rand(()) + 0.5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        words = coarse(self.embedding.weight)  # once: what is rounded is the sum of both uses
        x = F.embedding(tokens, words)
        for block in self.blocks:
            x = block(x)
        self.calls += 1
        return F.linear(self.frozen(x), words, coarse(self.head.bias)) * coarse(self.gain)


@dataclass(frozen=True, slots=True)
class Trainer:
    """A model under a runtime, and its optimizer."""

    kind: str
    model: nn.Module
    optimizer: AdamW
    left_out: tuple[nn.Parameter, ...]
    """What the runtime does not take; the training step averages these gradients itself."""


def worlds(kind: str) -> tuple[int, ...]:
    """The world sizes that a kind can have."""
    return (2, 4) if kind in ON_A_GRID else (1, 2, 3, 4)


def arithmetic(kind: str, world_size: int) -> str:
    """Trainers with the same answer train bit for bit alike; see the note at the top."""
    if kind == "torch-fsdp2-tensor":
        return "parts of products"
    if kind == "ddp" and world_size == 3:
        return "thirds"
    return "one process"


def trainer(kind: str, seed: int, model: Callable[[], Network] = Network) -> Trainer:
    """A network under a runtime, drawn from a seed, with an optimizer that has not stepped."""
    torch.manual_seed(seed)
    bare = model()
    left_out = _left_out(kind, bare)
    wrapped = _wrapped(kind, bare, left_out)
    inside = [p for name, p in wrapped.named_parameters() if "blocks" in name]
    outside = [p for name, p in wrapped.named_parameters() if "blocks" not in name]
    groups = [
        {"params": inside, "lr": 0.02, "weight_decay": 0.1},
        {"params": outside, "betas": (0.8, 0.95)},
    ]
    optimizer = AdamW(groups, lr=0.01, weight_decay=0.0, eps=1e-4)
    return Trainer(kind, wrapped, optimizer, left_out)


def _left_out(kind: str, bare: Network) -> tuple[nn.Parameter, ...]:
    """torch's runtimes refuse parameters of no dimensions."""
    return (bare.gain,) if kind.startswith("torch-") else ()


def _wrapped(kind: str, bare: Network, left_out: tuple[nn.Parameter, ...]) -> nn.Module:
    if kind == "plain":
        return bare
    if kind == "ddp":
        return DistributedDataParallel(bare)
    runtime: Any = torch_fsdp if kind.startswith("torch-") else sharding
    policy = torch_fsdp.wrap.ModuleWrapPolicy({Block, Frozen})
    if kind == "composable":
        return sharding.composable.fully_shard(bare, policy=policy)
    if kind.endswith(("-flat", "-original")):
        return runtime.FullyShardedDataParallel(
            bare,
            auto_wrap_policy=policy,
            device_id=torch.device("cpu"),
            use_orig_params=kind.endswith("-original"),
            ignored_states=left_out,
        )
    mesh = _mesh(kind)
    if kind.endswith("-tensor"):
        plan = {"blocks.0.up": ColwiseParallel(), "blocks.0.down": RowwiseParallel()}
        parallelize_module(bare, mesh["columns"], plan)
        mesh = mesh["rows"]
    for unit in (*bare.blocks, bare.frozen, bare):
        runtime.fully_shard(unit, mesh=mesh, ignored_params=set(left_out))
    return bare


def _mesh(kind: str) -> DeviceMesh:
    """All ranks in a row, or in a grid: (replicate, shard), or (shard, tensor)."""
    ranks = dist.get_world_size()
    return _mesh_of((ranks // 2, 2) if kind in ON_A_GRID else (ranks,))


@kept
def _mesh_of(sizes: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("rows", "columns")[-len(sizes) :])


def train(this: Trainer, first: int, steps: int) -> list[float]:
    """Train on the batches of these steps, the same on all ranks; returns the losses."""
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        tokens, following = torch.randint(WORDS, (2, 4, 5), generator=generator)
        loss = F.cross_entropy(this.model(tokens).flatten(0, 1), following.flatten())
        this.optimizer.zero_grad()
        loss.backward()
        for parameter in this.left_out:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        this.optimizer.step()
        losses.append(loss.item())
    return losses


# What a trainer has, whole, by the means of its own runtime.

Snapshot = dict[str, torch.Tensor]
"""Whole tensors by what they are and of which parameter: `exp_avg blocks.0.up.weight`."""


def snapshot(this: Trainer) -> Snapshot:
    """Copies of all parameters, buffers and optimizer state, whole. All ranks call it.

    What the optimizer keeps of a parameter is as the parameter is, cut as it is cut. So it is put
    in the parameter's place, where the runtime itself makes it whole, and the parameter put back.
    """
    found = {f"parameter {name}": tensor for name, tensor in _whole(this).items()}
    for key in ("exp_avg", "exp_avg_sq", "step"):
        with _in_place_of_parameters(this, key):
            found |= {f"{key} {name}": tensor for name, tensor in _whole(this).items()}
    for name, buffer in _network(this).named_buffers():
        found[f"buffer {_plain(name)}"] = buffer.detach().clone()
    return found


def is_tied(this: Trainer) -> bool:
    """Whether the embedding and the head have one weight, when it is whole and when it is not."""
    network = _network(this)
    outside = network.embedding.weight is network.head.weight
    with _summoned(this):
        return outside and network.embedding.weight is network.head.weight


@contextmanager
@torch.no_grad()
def _in_place_of_parameters(this: Trainer, key: str) -> Iterator[None]:
    """Inside, parameters have the values of the optimizer's entry: NaN where it has none."""
    parameters = list(this.model.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        value = this.optimizer.state.get(parameter, {}).get(key)
        if value is None or value.ndim < parameter.ndim:
            parameter.fill_(float("nan") if value is None else value.item())
        else:
            parameter.copy_(value)
    yield
    for parameter, value in zip(parameters, before, strict=True):
        parameter.copy_(value)


def _whole(this: Trainer) -> Snapshot:
    with _summoned(this):
        return {
            _plain(name): (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in _network(this).named_parameters()
        }


def _summoned(this: Trainer) -> Any:
    """Inside, a runtime with flat parameters shows the whole ones."""
    if not this.kind.endswith(("-flat", "-original", "composable")):
        return nullcontext()
    runtime = torch_fsdp if this.kind.startswith("torch-") else sharding
    return runtime.FullyShardedDataParallel.summon_full_params(this.model, writeback=False)


def _network(this: Trainer) -> Network:
    return next(part for part in this.model.modules() if isinstance(part, Network))


def _plain(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")
