"""Write a little text with a converted model: torch and safetensors, nothing else.

    ckpt convert DIR model.safetensors --select model
    python examples/generate.py model.safetensors --prompt "def " --bytes 200

MODEL is one safetensors file or a Hugging Face folder. Nothing here knows of `ckpt`, of ranks or of
the training run: what `ckpt convert` writes is an ordinary file. The sizes of the model are read
off the shapes of its tensors.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from gpt import GPT, Sizes
from safetensors.torch import load_file
from torch import Tensor


def read_weights(model: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of all files a folder's index names.

    Raises:
        FileNotFoundError: `model` is neither.
    """
    if model.is_file():
        return load_file(model)
    index = model / "model.safetensors.index.json"
    single = model / "model.safetensors"
    if not index.is_file():
        if single.is_file():
            return load_file(single)
        raise FileNotFoundError(
            f"{model}: neither a safetensors file nor a folder with {index.name}"
        )
    files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return {name: tensor for file in files for name, tensor in load_file(model / file).items()}


def load_model(weights: dict[str, Tensor]) -> GPT:
    """The model with these weights; a file may hold a tied weight under one of its names."""
    model = GPT(Sizes.of(weights))
    weights.setdefault("head.weight", weights["embed.weight"])
    model.load_state_dict(weights)
    return model.eval()


@torch.inference_mode()
def continue_text(model: GPT, prompt: bytes, count: int, seed: int | None) -> bytes:
    """`count` bytes that follow the prompt: the likeliest ones, or drawn when there is a seed."""
    draw = None if seed is None else torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(count):
        seen = torch.tensor([text[-model.position.num_embeddings :]])
        scores = model(seen)[0, -1]
        if draw is None:
            text.append(int(scores.argmax()))
        else:
            chances = torch.softmax(scores / 0.7, dim=0)
            text.append(int(torch.multinomial(chances, 1, generator=draw)))
    return bytes(text[len(prompt) :])


def main(arguments: list[str]) -> None:
    """Print the prompt and what the model makes of it."""
    parser = argparse.ArgumentParser(description="Continue a text with the small GPT.")
    parser.add_argument("model", type=Path, help="safetensors file or Hugging Face folder")
    parser.add_argument("--prompt", default="def ", help="how the text begins (default: 'def ')")
    parser.add_argument("--bytes", type=int, default=200, help="how many to add (default: 200)")
    parser.add_argument("--seed", type=int, help="draw at random; without it take the likeliest")
    options = parser.parse_args(arguments)
    prompt = options.prompt.encode()
    if not prompt:
        parser.error("--prompt must hold at least one byte")
    model = load_model(read_weights(options.model))
    added = continue_text(model, prompt, options.bytes, options.seed)
    print((prompt + added).decode(errors="replace"))


if __name__ == "__main__":
    main(sys.argv[1:])
