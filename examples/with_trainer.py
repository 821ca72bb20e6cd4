"""Hugging Face's Trainer with checkpoints of ckpt: stop anywhere, go on with any number of ranks.

    torchrun --nproc-per-node 2 examples/with_trainer.py --folder DIR --steps 6
    torchrun --nproc-per-node 3 examples/with_trainer.py --folder DIR --steps 10 --resume

One line differs from a program without ckpt: the class of the trainer. `--lora` trains a PEFT
adapter, of which the checkpoints hold no more. Needs `pip install transformers accelerate`, and
`peft` for `--lora`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from ckpt.integrations.transformers import CkptTrainer

BATCH, TOKENS, WORDS = 12, 12, 64


class Losses(TrainerCallback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.all: list[float] = []

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float], **more: Any
    ) -> None:
        """Note the loss that is logged."""
        if "loss" in logs:
            self.all.append(logs["loss"])


def model_of(lora: bool, dropout: float) -> Any:
    """A small Llama with weights that are equal on all ranks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2 * TOKENS,
        attention_dropout=dropout,
    )
    model = LlamaForCausalLM(config)
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], lora_dropout=dropout))


def main(given: Sequence[str] | None = None) -> None:
    """Train to a step; rank 0 prints the losses of this run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(given)
    model = model_of(options.lora, options.dropout)
    texts = torch.randint(0, WORDS, (5 * BATCH, TOKENS)).tolist()
    losses = Losses()
    trainer = CkptTrainer(
        model,
        TrainingArguments(
            options.folder,
            max_steps=options.steps,
            per_device_train_batch_size=BATCH // int(os.environ.get("WORLD_SIZE", "1")),
            learning_rate=1e-2,
            lr_scheduler_type="constant_with_warmup",
            save_steps=2,
            save_total_limit=2,
            logging_steps=1,
            ddp_find_unused_parameters=False,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": text, "labels": text} for text in texts],  # type: ignore[arg-type]
        callbacks=[losses],
    )
    trainer.saves_in_background = True
    trainer.train(resume_from_checkpoint=options.resume)
    if trainer.is_world_process_zero():
        print(json.dumps(losses.all))
    trainer.accelerator.wait_for_everyone()  # else DDP may hang at exit, with its last all-gather
    trainer.accelerator.end_training()  # else gloo may abort the process at its end


if __name__ == "__main__":
    main()
