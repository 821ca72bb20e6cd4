"""An unsharded replica as the oracle: what one process with all ranks' batches would compute."""

import copy
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

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
    trained = [parameter for parameter in replica.parameters() if parameter.requires_grad]
    has = torch.tensor([int(parameter.grad is not None) for parameter in trained])
    dist.all_reduce(has)
    averaged = [parameter for parameter, count in zip(trained, has.tolist(), strict=True) if count]
    for dtype in dict.fromkeys(parameter.dtype for parameter in averaged):
        alike = [parameter for parameter in averaged if parameter.dtype == dtype]
        mine = torch.cat([_gradient(parameter).flatten() for parameter in alike])
        parts = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(parts, mine)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        total /= size if divide is None else divide
        sums = total.split([parameter.numel() for parameter in alike])
        for parameter, sum_ in zip(alike, sums, strict=True):
            parameter.grad = sum_.view(parameter.shape).clone()


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's value."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def assert_equal(
    model: nn.Module, replica: nn.Module, exact: bool = True, parameters: bool = True
) -> None:
    """Equal names, gradients and (if asked for) parameters, bit for bit (if asked for).

    Each rank compares its own parts. All ranks call it, and all raise where one finds a difference.
    """
    try:
        _assert_equal_here(model, replica, exact, parameters)
        error = None
    except AssertionError as raised:
        error = raised
    differ = torch.tensor(int(error is not None))
    dist.all_reduce(differ)
    if error is not None:
        raise error
    assert not differ, "a model and its replica differ on another rank"


def _assert_equal_here(model: nn.Module, replica: nn.Module, exact: bool, parameters: bool) -> None:
    sharded, plain = dict(model.named_parameters()), dict(replica.named_parameters())
    assert list(sharded) == list(plain)
    for name, parameter in sharded.items():
        other = plain[name]
        assert (parameter.grad is None) == (other.grad is None), name
        compared = [(parameter, other)] if parameters else []
        if parameter.grad is not None and other.grad is not None:
            compared.append((parameter.grad, other.grad))
        for a, b in compared:
            mine, wanted = here(a.detach()), part_of(b.detach(), a)
            if exact:
                assert torch.equal(mine, wanted), (name, mine, wanted)
            else:
                torch.testing.assert_close(mine, wanted, msg=lambda m, n=name: f"{n}: {m}")


def here(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(plain: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What this rank has of a plain tensor that is placed as this one; nothing is sent."""
    if not isinstance(like, DTensor):
        return plain
    return here(distribute_tensor(plain, like.device_mesh, like.placements, src_data_rank=None))


def train(
    model: nn.Module,
    replica: nn.Module,
    batches: Iterable[torch.Tensor],
    loss: Loss = lambda model, x: model(x).square().mean(),
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    exact: bool = True,
    **settings: object,
) -> None:
    """Train both, and assert equal losses and gradients at every step, and all at the end."""
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
        assert_equal(model, replica, exact, parameters=False)
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    assert_equal(model, replica, exact)
