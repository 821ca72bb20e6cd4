"""Writes the folders of DeepSpeed beside this file, on two ranks over gloo.

    .venvs/peers/bin/python -m tests.data.deepspeed.make [FOLDER [VARIANT ...]]

The variants are converted to Universal checkpoints too, by default only `stage1`.

The written values are those of `value`, so that a test needs neither DeepSpeed nor a copy of them.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from tests.data.two_ranks import RANKS, elements, write_on_two_ranks

VARIANTS = ("stage0", "stage1", "stage2", "stage3", "bf16")
TRAINED = {
    "embed.weight": (5, 3),
    "inner.weight": (3, 3),
    "inner.bias": (3,),
    "norm.weight": (3,),
    "norm.bias": (3,),
}
FROZEN = {"fixed.weight": (4, 3), "fixed.bias": (4,)}
BUFFERS = {"scale": (3,)}
STATES = ("fp32", "exp_avg", "exp_avg_sq")


def value(name: str, key: str = "fp32") -> list[float]:
    """The row-major elements of a parameter, or of its state of this key.

    All are multiples of 1/8 with few digits, so that bfloat16 and float16 have them too.
    """
    shape = {**TRAINED, **FROZEN, **BUFFERS}[name]
    return elements(shape, f"{name} {key}")


def _model():
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.inner = nn.Linear(3, 3)
            self.norm = nn.LayerNorm(3)
            self.register_buffer("scale", torch.ones(3))
            self.fixed = nn.Linear(3, 4).requires_grad_(False)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            hidden = self.norm(self.inner(self.embed(tokens)))  # the scale has its own dtype
            return self.head(hidden).sum() + self.fixed(hidden).sum()

    return Model()


def _config(variant: str) -> dict:
    half = {"bf16": {"enabled": True}}
    adam = {"lr": 0.01, "betas": [0.9, 0.95], "torch_adam": True}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
    }
    if variant == "bf16":
        return {
            **config,
            **half,
            "zero_optimization": {"stage": 1},
            "data_types": {"grad_accum_dtype": "fp32"},
        }
    stage = int(variant[-1])
    zero = {"stage": stage}
    zero |= {3: {"sub_group_size": 20}, 2: {"parameter_alignment": True}}.get(stage, {})
    return {**config, **(half if stage in (2, 3) else {}), "zero_optimization": zero}


def _set(engine, parameter, key: str, whole) -> None:
    """Puts a parameter, or its state, into the flat partitions of this rank."""
    import torch
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    if hasattr(parameter, "ds_id"):
        share = parameter.ds_tensor.numel()
        padded = torch.zeros(RANKS * share)
        padded[: whole.numel()] = whole.flatten()
        part = padded.chunk(RANKS)[torch.distributed.get_rank()]
        if key == "fp32":
            safe_set_local_fp32_param(parameter, part)
        else:
            safe_set_local_optimizer_state(parameter, part, key)
        return
    mapping = parameter._hp_mapping
    if mapping is None:  # this rank has no part of the parameter
        return
    ours, its = mapping.hp_fragment_address, mapping.lp_fragment_address
    part = whole.flatten()[its.start : its.start + its.numel]
    flats = engine.optimizer.optimizer.param_groups[mapping.param_group_index]["params"]
    flat = flats[0] if key == "fp32" else engine.optimizer.optimizer.state[flats[0]][key]
    flat.narrow(0, ours.start, ours.numel).copy_(part)


def _write(variant: str, folder: Path) -> None:
    import deepspeed
    import torch

    torch.manual_seed(0)
    model = _model()
    groups = [
        {"params": [p for p in model.parameters() if p.requires_grad and p.ndim > 1]},
        {
            "params": [p for p in model.parameters() if p.requires_grad and p.ndim == 1],
            "weight_decay": 0.0,
        },
    ]

    def tensor(name: str, key: str = "fp32"):
        return torch.tensor(value(name, key)).view({**TRAINED, **FROZEN, **BUFFERS}[name])

    given = {name: p for name, p in model.named_parameters() if name in FROZEN}
    given |= dict(model.named_buffers())
    for name in (*FROZEN, *BUFFERS):
        given[name].data.copy_(tensor(name))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=_config(variant))
    engine.backward(engine(torch.arange(4)))
    engine.step()
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad and variant == "stage0":
                parameter.copy_(tensor(name))
                for key in STATES[1:]:
                    engine.optimizer.state[parameter][key].copy_(tensor(name, key))
            elif parameter.requires_grad:
                for key in STATES:
                    _set(engine, parameter, key, tensor(name, key))
    # The 16-bit weights are those of the step before, as they are after a step that overflowed.
    engine.save_checkpoint(str(folder / variant), client_state={"note": "by hand", "epoch": 3})
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        for script in (folder / variant).glob("zero_to_*.py"):
            script.unlink()  # programs, which a reader does not need


def make_universal(step: Path) -> None:
    """Converts a step's folder to a Universal checkpoint beside it."""
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        Namespace(
            input_folder=str(step),
            output_folder=f"{step}_universal",
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


def _run(folder: Path, universal: Sequence[str]) -> None:
    import deepspeed
    import torch

    deepspeed.init_distributed("gloo")
    for variant in VARIANTS:
        _write(variant, folder)
    if torch.distributed.get_rank() == 0:
        for variant in universal:
            make_universal(folder / variant / "global_step1")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    write_on_two_ranks(
        "tests.data.deepspeed.make",
        lambda folder: _run(folder, sys.argv[2:] or ["stage1"]),
        {"DS_ACCELERATOR": "cpu"},
    )
