"""States on a device, and their bits: what the tests here save, change and compare."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from formats.dtypes import DTYPES

Leaves = dict[str, Tensor]


def bits(tensor: Tensor) -> Tensor:
    """A tensor's bytes, in host memory."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def differing(found: Leaves, wanted: Leaves) -> list[str]:
    """The names of the tensors that are not the same to the bit, in shape and dtype."""
    assert found.keys() == wanted.keys()
    return [
        name
        for name, tensor in wanted.items()
        if found[name].shape != tensor.shape
        or found[name].dtype != tensor.dtype
        or not torch.equal(bits(found[name]), bits(tensor))
    ]


def copies(leaves: Leaves) -> Leaves:
    """The same in memory of their own, in host memory."""
    return {name: tensor.detach().cpu().clone() for name, tensor in leaves.items()}


def leaves(device: str, seed: int = 0) -> Leaves:
    """A tensor of every dtype of torch and of checkpoints, and of awkward shapes and strides."""
    generator = torch.Generator().manual_seed(seed)
    found: Leaves = {}
    for stored in DTYPES:
        dtype = getattr(torch, stored.torch_name, None)
        if dtype is None or "float4" in stored.torch_name:  # which torch can hold and not copy
            continue
        if dtype == torch.bool:
            whole = torch.randint(2, (30,), generator=generator).bool()
        else:
            raw = torch.randint(256, (30 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
            whole = raw.view(dtype)
        found[stored.torch_name] = whole.reshape(5, 6).to(device)
    numbers = torch.randn(7, 9, generator=generator).to(device)
    waves = torch.randn(4, 3, dtype=torch.complex64, generator=generator).to(device)
    return found | {
        "transposed": numbers.T,
        "every other": numbers[::2, 1::3],
        "expanded": numbers[:1].expand(5, 9),
        "conjugate": waves.conj(),
        "negative": waves.conj().imag,
        "single": numbers[0, 0].clone(),
        "empty": numbers[:0].clone(),
        "large": torch.randn(3 << 20, generator=generator).to(device),
    }


def like(wanted: Leaves, device: str) -> Leaves:
    """Contiguous tensors of the same shapes and dtypes on a device, all bytes of which are zero."""
    found = {}
    for name, tensor in wanted.items():
        raw = torch.zeros(tensor.numel() * tensor.itemsize, dtype=torch.uint8, device=device)
        found[name] = raw.view(tensor.dtype).view(tensor.shape)
    return found


class Network(nn.Module):
    """A tied matrix, a norm with buffers, a layer in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.low = nn.Linear(8, 8).bfloat16()
        self.down = nn.Linear(8, 6)
        self.again = self.up

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.up(x))
        x = self.down(self.low(x.bfloat16()).float())
        return self.down(self.again(x).tanh())


def trained(
    device: str, options: dict[str, bool], seed: int
) -> tuple[Network, torch.optim.Optimizer]:
    """A network and its AdamW on a device; nothing has been trained."""
    torch.manual_seed(seed)
    model = Network().to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    """Steps on batches that depend on their numbers alone."""
    device = next(model.parameters()).device
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(16, 6, generator=generator).to(device)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> Leaves:
    """All tensors of a model and its optimizer."""
    found = dict(model.state_dict())
    for index, parameter in enumerate(model.parameters()):
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{key} of {index}"] = torch.as_tensor(value)
    return found
