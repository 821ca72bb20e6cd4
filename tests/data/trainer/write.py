"""Writes the folders beside this file with transformers' Trainer: `python write.py`.

`checkpoint-2` is of a run of two steps on the CPU. `logits.json` has the logits of its model for
the tokens 0 to 7, and `losses.json` the losses of the four steps of the run.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

HERE = Path(__file__).resolve().parent


def model() -> Any:
    """A tiny Llama, the same each time."""
    import torch
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=16,
            max_position_embeddings=16,
            tie_word_embeddings=False,
        )
    )


def data() -> list[dict[str, Any]]:
    """Eight sequences of eight tokens."""
    import torch

    rows = torch.arange(64).reshape(8, 8) * 5 % 16
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(folder: str, steps: int, save: bool = True) -> Any:
    """A run of so many steps."""
    import transformers

    arguments = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        save_strategy="steps" if save else "no",
        save_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        weight_decay=0.1,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=0,
        data_seed=0,
    )

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            import torch

            return torch.utils.data.SequentialSampler(self.train_dataset)

    return InOrder(model=model(), args=arguments, train_dataset=data())


def logits(of: Any) -> list[list[float]]:
    """The logits for the tokens 0 to 7."""
    import torch

    with torch.no_grad():
        found: list[list[float]] = of.eval()(torch.arange(8).reshape(1, 8)).logits[0].tolist()
    return found


def main() -> None:
    """Runs, copies the folder and writes the numbers."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # the arguments in the folder have a relative path
        run = trainer("run", 4)
        run.train()
        kept = HERE / "checkpoint-2"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(Path("run") / "checkpoint-2", kept)
        losses = [each["loss"] for each in run.state.log_history if "loss" in each]
        (HERE / "losses.json").write_text(json.dumps(losses))
        import transformers

        found = transformers.LlamaForCausalLM.from_pretrained(kept)
        (HERE / "logits.json").write_text(json.dumps(logits(found)))


if __name__ == "__main__":
    main()
