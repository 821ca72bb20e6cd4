"""An unsharded replica as the oracle: what one process with all ranks' batches would compute."""

import copy
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """A residual block; sizes that no world size divides."""

    def __init__(self, width: int = 7, hidden: int = 11) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def blocks(count: int = 3) -> nn.Sequential:
    """Some of them, and a layer of another width."""
    return nn.Sequential(*(Block() for _ in range(count)), nn.Linear(7, 5))


def batch(step: int, *shape: int) -> torch.Tensor:
    """Another batch on every rank and at every step."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(shape, generator=generator)


def pair(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Two equal models, equal on all ranks: one to shard, one to leave."""
    torch.manual_seed(0)
    model = build()
    return model, copy.deepcopy(model)


def average_gradients(replica: nn.Module, divide: float | None = None) -> None:
    """The gradients, summed over ranks in rank order and divided; None where no rank has one."""
    size = dist.get_world_size()
    for parameter in replica.parameters():
        if not parameter.requires_grad:
            continue
        flag = torch.tensor(int(parameter.grad is not None))
        dist.all_reduce(flag)
        if not flag:
            continue
        mine = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        parts = [torch.empty_like(parameter) for _ in range(size)]
        dist.all_gather(parts, mine.detach().contiguous())
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        parameter.grad = total / (size if divide is None else divide)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's value."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def assert_equal(model: nn.Module, replica: nn.Module, exact: bool = True) -> None:
    """Equal names, parameters and gradients, bit for bit."""
    sharded, plain = dict(model.named_parameters()), dict(replica.named_parameters())
    assert list(sharded) == list(plain)
    for name, parameter in sharded.items():
        other = plain[name]
        assert (parameter.grad is None) == (other.grad is None), name
        compared = [(parameter, other)]
        if parameter.grad is not None and other.grad is not None:
            compared.append((parameter.grad, other.grad))
        for a, b in compared:
            mine = whole(a)
            if exact:
                assert torch.equal(mine, b.detach()), (name, mine, b)
            else:
                torch.testing.assert_close(mine, b.detach(), msg=lambda m, n=name: f"{n}: {m}")


def train(
    model: nn.Module,
    replica: nn.Module,
    batches: Iterable[torch.Tensor],
    loss: Loss = lambda model, x: model(x).square().mean(),
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    exact: bool = True,
    **settings: object,
) -> None:
    """Train both, and assert equal losses, gradients and parameters at every step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    ours = optimizer(trained, lr=0.1, **settings)
    theirs = optimizer([p for p in replica.parameters() if p.requires_grad], lr=0.1, **settings)
    for x in batches:
        losses = []
        for each in (model, replica):
            result = loss(each, x)
            result.backward()
            losses.append(result.item())
        assert not exact or losses[0] == losses[1], losses
        average_gradients(replica)
        assert_equal(model, replica, exact)
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    assert_equal(model, replica, exact)
