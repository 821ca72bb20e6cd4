"""Small models that hold what a sharding runtime can get wrong, and plain oracles to train beside.

- `Network` has units inside units, a frozen layer, a parameter under two names, and buffers.
- `Transformer` has its embedding and its output projection share one parameter.
- Everything is drawn from a seed; every rank has its own batch of every step.
- Nothing here imports a sharding runtime: the same functions serve ours, torch's and none.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

WIDTH = 6
"""Features of `Network`: no multiple of 4, so that flat shards end inside parameters."""

WORDS = 11
"""Tokens that `Transformer` knows."""

WRAPPED = "_fsdp_wrapped_module."
"""What a wrapper adds to the names of its parameters and buffers."""


class Tied(nn.Module):
    """One matrix under two names: there with the one, back with the other's transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.there = nn.Parameter(torch.randn(5, WIDTH) / 3)
        self.back = self.there

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.there).tanh(), self.back.T)


class Block(nn.Module):
    """Two layers beside an identity, scaled by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)
        self.register_buffer("gain", torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(x)))


class Network(nn.Module):
    """A frozen stem, two blocks, a tied matrix and a head; buffers at two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.Sequential(Block(), Block())
        self.tied = Tied()
        self.head = nn.Linear(WIDTH, 3, bias=False)
        self.register_buffer("shift", torch.ones(3))
        self.register_buffer("version", torch.tensor(7))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tied(self.blocks(self.stem(x)))) + self.shift


class Transformer(nn.Module):
    """An encoder and a decoder of one layer each between two uses of one embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.transformer = nn.Transformer(8, 2, 1, 1, dim_feedforward=8, dropout=0.0)
        self.projection = nn.Linear(8, WORDS, bias=False)
        self.projection.weight = self.embedding.weight
        self.register_buffer("bias", torch.linspace(0, 1, WORDS))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        hidden = self.transformer(self.embedding(source), self.embedding(target))
        return self.projection(hidden) + self.bias


def network(seed: int = 0) -> Network:
    """A `Network` drawn from a seed."""
    torch.manual_seed(seed)
    return Network()


def transformer(seed: int = 0) -> Transformer:
    """A `Transformer` drawn from a seed."""
    torch.manual_seed(seed)
    return Transformer()


def linears(count: int, width: int = WIDTH, seed: int = 0) -> nn.Sequential:
    """Square linear layers, one after the other, drawn from a seed."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def batch(step: int, *, features: int = WIDTH, device: str = "cpu") -> Tensor:
    """This rank's batch of 4 of a step."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, features, generator=generator).to(device)


def words(step: int) -> tuple[Tensor, Tensor]:
    """This rank's source and target of a step: 5 and 4 tokens of 2 sentences."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    source = torch.randint(WORDS, (5, 2), generator=generator)
    return source, torch.randint(WORDS, (4, 2), generator=generator)


def average_gradients(module: nn.Module) -> None:
    """Make every gradient the mean over ranks: what a replica does that nothing shards."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        alike = [gradient for gradient in gradients if gradient.dtype == dtype]
        flat = torch.cat([gradient.flatten() for gradient in alike])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for gradient, mean in zip(alike, flat.split([g.numel() for g in alike]), strict=True):
            gradient.copy_(mean.view(gradient.shape))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
    *,
    before_step: Callable[[], None] = lambda: None,
    data: Callable[[int], Any] = lambda step: (batch(step),),
) -> list[float]:
    """The loss of each step of training on this rank's batches."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(*data(step)).square().mean()
        loss.backward()
        before_step()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_replica(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
    **keywords: Any,
) -> list[float]:
    """What `train` returns for a model on every rank whose gradients are averaged."""
    return train(model, optimizer, steps, before_step=lambda: average_gradients(model), **keywords)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def states(model: nn.Module) -> dict[str, Tensor]:
    """Copies of parameters and buffers by the names they have without wrappers."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name.replace(WRAPPED, ""): value.detach().clone() for name, value in found.items()}


def whole_states(wrapper: Any, model: nn.Module) -> dict[str, Tensor]:
    """What `states` returns of a model wrapped by this class, its parameters gathered."""
    with wrapper.summon_full_params(model, writeback=False):
        return states(model)


def same(found: dict[str, Tensor], wanted: dict[str, Tensor], **tolerance: float) -> None:
    """Raise unless names, shapes, dtypes and values agree: exactly, where no tolerance is given."""
    assert found.keys() == wanted.keys(), f"{sorted(found)} are not {sorted(wanted)}"
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name],
            value,
            **(tolerance or {"rtol": 0, "atol": 0}),
            msg=lambda text, name=name: f"{name}: {text}",
        )


class Watch:
    """The storages of linear layers' parameters as forwards see them, held weakly."""

    def __init__(self, *layers: nn.Linear) -> None:
        """Sees whatever these layers, given before they are wrapped, use from now on."""
        self._seen: dict[int, StorageWeakRef] = {}
        for layer in layers:
            layer.register_forward_pre_hook(self._see)

    def _see(self, layer: nn.Linear, _arguments: object) -> None:
        for tensor in (layer.weight, layer.bias):
            reference = StorageWeakRef(tensor.untyped_storage())
            self._seen[reference.cdata] = reference

    @property
    def live_bytes(self) -> int:
        """Bytes that the storages seen, where they still exist, hold now. Raises if none was."""
        if not self._seen:
            raise LookupError("no layer has run: there is nothing to look at")
        storages = (
            torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            for reference in self._seen.values()
        )
        return sum(storage.nbytes() for storage in storages if storage is not None)
