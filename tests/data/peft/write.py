"""Writes the adapter of PEFT beside this file: `python tests/data/peft/write.py [FOLDER]`.

The files are those of peft 0.21. The values are those of `weights`.
"""

from __future__ import annotations

import sys
from pathlib import Path

RANK = 2
PREFIX = "base_model.model."
SHAPES = {"layer.lora_A.weight": (RANK, 3), "layer.lora_B.weight": (4, RANK)}


def weights() -> dict[str, list[list[float]]]:
    """The rows of each tensor, by its name in the file."""
    return {
        PREFIX + name: [[row + column / 8 for column in range(columns)] for row in range(rows)]
        for name, (rows, columns) in SHAPES.items()
    }


def main() -> None:
    import peft
    import torch
    from torch import nn

    class Base(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

    config = peft.LoraConfig(r=RANK, target_modules=["layer"], base_model_name_or_path="base")
    model = peft.get_peft_model(Base(), config)
    peft.set_peft_model_state_dict(
        model, {name: torch.tensor(rows) for name, rows in weights().items()}
    )
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "adapter"
    model.save_pretrained(folder)
    model.save_pretrained(folder.with_name("adapter-bin"), safe_serialization=False)
    for readme in (folder, folder.with_name("adapter-bin")):
        (readme / "README.md").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
