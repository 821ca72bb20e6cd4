"""A small GPT that reads bytes: a real decoder, in the least code that is still one.

Every size can be read off the shapes of the weights (`Sizes.of`), so a file of tensors alone is
enough to build the model again. There is no dropout: a step's loss depends on weights and data
only, which is what lets the demo compare runs on different numbers of ranks.

Shape letters in comments: B sequences, T positions, C model width, H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEAD_WIDTH = 32


@dataclass(frozen=True, slots=True)
class Sizes:
    """What it takes to build a model."""

    vocabulary: int = 256
    """Tokens; one for each byte."""
    context: int = 64
    """Most positions the model can look at."""
    width: int = 160
    """A multiple of HEAD_WIDTH. Not a multiple of 3, so that three ranks hold uneven shards."""
    layers: int = 4

    @classmethod
    def of(cls, weights: Mapping[str, Tensor]) -> Sizes:
        """The sizes of the model these weights come from.

        Raises:
            ValueError: the weights are not those of a `GPT`.
        """
        if "embed.weight" not in weights or "position.weight" not in weights:
            raise ValueError(
                "no embed.weight and position.weight among the tensors "
                f"({', '.join(sorted(weights)[:5])}, ...): these are not the weights of this GPT"
            )
        vocabulary, width = weights["embed.weight"].shape
        layers = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
        return cls(vocabulary, weights["position.weight"].shape[0], width, len(layers))


class Attention(nn.Module):
    """Causal self-attention with all heads in one product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        heads = self.qkv(x).unflatten(-1, (3, -1, HEAD_WIDTH))  # (B, T, 3, H, D)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to what comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    """The model. `head.weight` is `embed.weight`: tied, one tensor under two names."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.position = nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes.width) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.head.weight = self.embed.weight
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next byte at every position: (B, T) -> (B, T, vocabulary)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores
