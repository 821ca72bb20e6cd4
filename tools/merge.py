"""`ckpt merge`: a mean, a moving average or another weighted sum of checkpoints, in any format.

`torchrun --nproc-per-node N -m ckpt merge SRC ... DST` does it with N processes.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from dataclasses import dataclass

from tools.convert import Written, add_parts, add_target, write
from tools.exit_codes import OF_A_READER, ExitCode, Help
from tools.options import mapping

HELP = Help(
    summary="write the mean or another weighted sum of checkpoints, in bounded memory",
    description="""\
Writes the mean of checkpoints of one model, or their sum with weights of your own, in any format.
Names, plain values and files beside the weights are those of the first. Tensors of whole numbers
have to be equal in all.""",
    examples=(
        ("ckpt merge runs/gpt --last 8 mean --model-only", "the mean of the last 8 steps of a run"),
        ("ckpt merge base out --lora adapter --to hf", "a model with a LoRA adapter folded in"),
    ),
    codes=(*OF_A_READER, ExitCode.EXISTS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Written):
    """The sources with their weights, and the target."""

    sources: list[str]
    weights: tuple[float, ...] | None
    last: int | None
    ema: float | None
    in_float64: bool
    lora: list[str] | None


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("sources", metavar="SRC", nargs="+", help="paths or URLs; with --last the folder of a run")
    add("dst", metavar="DST", help="a path or URL that does not exist yet")
    add(
        "--weights",
        type=_numbers,
        metavar="W,W,...",
        help="a number for each SRC (example: 0.5,0.3,0.2); they need no sum of 1; default: equal",
    )
    add("--last", type=int, metavar="N", help="the newest N steps of the run SRC")
    add("--ema", type=float, metavar="DECAY", help="an exponential average, the last SRC newest")
    add("--float64", dest="in_float64", action="store_true", help="sums in float64, not float32")
    add("--lora", action="append", metavar="ADAPTER", help="add a LoRA adapter of PEFT; repeatable")
    add_parts(parser, "the first SRC", "model")
    add("--config", metavar="FOLDER", help="the model whose config.json and tokenizer hf gets")
    add_target(parser)


def run(options: Options) -> int:
    """Merges, and prints what was written."""
    from ckpt.run.merge import sum_of

    storage = mapping(options.storage_options)
    total = sum_of(
        *(options.sources, options.weights, options.last, options.ema, options.in_float64, storage),
        lora=options.lora or (),
    )
    return write(options, "merge", total, total.urls[0])


def _numbers(text: str) -> tuple[float, ...]:
    """Returns numbers with commas between them, for argparse.

    >>> _numbers("1,0.5,-0.5")
    (1.0, 0.5, -0.5)
    """
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no list of numbers; give 0.5,0.3,0.2") from None
