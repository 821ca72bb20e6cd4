"""The main job, end to end: train on 4 ranks, be killed, go on with 2 and 3, convert, find damage.

Each time with another runtime: torch's FSDP2, then this repository's wrapper class, then its
`fully_shard`. Last, the three of them train side by side and resume what the others saved.

Everything runs in processes of its own, as it would by hand; `--keep DIR` keeps what they write.
The losses of each distributed run are compared, step by step, with those of one process that
trained without torch.distributed and never stopped. Exit code 1, and a sentence that says what
differed, when anything does.

[Note: tolerance]
Runs on different numbers of ranks add the same float32 numbers in different orders, so their losses
differ by rounding: by less than 1e-6 of the loss in 75 steps here, on torch 2.13. TOLERANCE leaves
room for other processors and their kernels. It still tells rounding from mistakes: a resume that
forgets the moments of AdamW, or is off by one step of data, moves losses by 1e-2.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent
STEPS = 75
SAVE_EVERY = 25
EACH = 4
"""Steps of each runtime before it saves, and of each other one that resumes there."""
KILL_AFTER = 29
"""The step after which the first run is killed: behind one save, well before the next."""
RUNTIMES = ("fsdp2", "fully_shard", "wrapper")
"""What runtimes.py takes turns with."""
TOLERANCE = 2e-5
"""Largest relative difference of a loss. See [Note: tolerance]."""
TIME_LIMIT_SECONDS = 240.0
"""For each process; the whole demo takes one to three minutes on two cores."""


class DemoError(Exception):
    """Something did not come out as it must; the message says what."""


# --- Processes --------------------------------------------------------------------------------


def kill_all(process: subprocess.Popen[str], lines: list[str]) -> None:
    """SIGKILL a command and every rank that has given its process id in `lines`.

    torchrun starts each rank in a session of its own, so killing torchrun's group is not enough.
    """
    ranks = [re.fullmatch(r"rank \d+ of \d+ is process (\d+)", line) for line in lines]
    for leader in (process.pid, *(int(rank[1]) for rank in ranks if rank)):
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(leader, signal.SIGKILL)


def run(
    command: list[str],
    folder: Path,
    *,
    kill_when: Callable[[str], bool] | None = None,
    seconds: float = TIME_LIMIT_SECONDS,
) -> list[str]:
    """Run a command in `folder` to its end and return the lines it printed.

    With `kill_when`, the first line for which it is true is the command's last: it and all its
    ranks get SIGKILL, so no handler runs and nothing is flushed. The output ends when the last of
    these processes is gone; none of them lives on after this returns.

    Raises:
        DemoError: the command failed, took too long, or ended before it could be killed.
    """
    lines: list[str] = []
    late, killed = threading.Event(), False
    with subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:

        def stop_late() -> None:
            late.set()
            process.terminate()  # torchrun passes it on to ranks that have not said a word yet
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            kill_all(process, lines)

        limit = threading.Timer(seconds, stop_late)
        limit.start()
        try:
            for line in process.stdout or ():
                lines.append(line.rstrip())
                if not killed and kill_when and kill_when(lines[-1]):
                    kill_all(process, lines)
                    killed = True
        except BaseException:  # Ctrl-C reaches this process only
            kill_all(process, lines)
            raise
        finally:
            limit.cancel()

    if killed or (process.returncode == 0 and not kill_when and not late.is_set()):
        return lines
    if late.is_set():
        what = f"was stopped after {seconds:.0f} s"
    elif process.returncode == 0:
        what = "ended before it could be killed"
    else:
        what = f"failed with exit code {process.returncode}"
    raise DemoError("\n  ".join([f"`{' '.join(command)}` {what}; its last words:", *lines[-30:]]))


def python(script: str, *arguments: str) -> list[str]:
    """The command that runs one of the examples in this Python."""
    return [sys.executable, str(EXAMPLES / script), *arguments]


def torchrun(ranks: int, script: str, *arguments: str) -> list[str]:
    """The command that runs one of the examples on so many ranks, on a free port."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    local = ["--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)]
    return [*launcher, *local, str(EXAMPLES / script), *arguments]


# --- What must be equal -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Curve:
    """The losses one run logged."""

    name: str
    losses: dict[int, float]
    """By step, counted from 1."""

    @classmethod
    def read(cls, path: Path, first: int, last: int) -> Curve:
        """The curve in a file of JSON lines.

        Raises:
            DemoError: it does not run from `first` to `last`, one step after the other.
        """
        records = [json.loads(line) for line in path.read_text().splitlines()]
        steps = [record["step"] for record in records]
        if steps != list(range(first, last + 1)):
            raise DemoError(f"{path.name}: steps {first} to {last} were due, it has {steps}")
        return cls(path.name, {record["step"]: record["loss"] for record in records})

    def difference(self, reference: Curve) -> float:
        """The largest relative difference from the reference at equal steps.

        Raises:
            DemoError: it is over TOLERANCE, or no number.
        """
        worst = 0.0
        for step, loss in self.losses.items():
            expected = reference.losses[step]
            relative = abs(loss - expected) / expected
            if not relative <= TOLERANCE:
                raise DemoError(
                    f"{self.name}: the loss of step {step} is {loss:.7f}, that of the run that "
                    f"never stopped is {expected:.7f}: they differ by {relative:.1e}, over the "
                    f"tolerance of {TOLERANCE:.0e}"
                )
            worst = max(worst, relative)
        return worst


# --- The story --------------------------------------------------------------------------------


class Report:
    """Prints one line for each part of the story: what, how long, and what came out."""

    def __init__(self) -> None:
        self._part = 0

    @contextmanager
    def part(self, what: str) -> Iterator[list[str]]:
        """Print `what` now; when the block ends, its time and what the block put in the list."""
        self._part += 1
        print(f"{self._part}. {what:<60}", end="", flush=True)
        outcome: list[str] = []
        began = time.monotonic()
        try:
            yield outcome
        except BaseException:
            print("failed", flush=True)
            raise
        print(f"{time.monotonic() - began:6.1f} s", flush=True)
        for line in outcome:
            print(f"   {line}", flush=True)


def tell(folder: Path) -> None:
    """Run the whole story in `folder`, printing it.

    Raises:
        DemoError: a part failed or two results that must be equal are not.
    """
    report = Report()
    half = 2 * SAVE_EVERY
    checkpoint = ["--checkpoint", "run"]

    with report.part(f"1 process trains {STEPS} steps and never stops") as outcome:
        plain = ["--steps", str(STEPS), "--until", str(STEPS), "--runtime", "none"]
        target = ["--checkpoint", "uninterrupted", "--losses", "uninterrupted.jsonl"]
        run(python("train.py", "save", *plain, *target), folder)
        reference = Curve.read(folder / "uninterrupted.jsonl", 1, STEPS)
        outcome.append(f"loss {reference.losses[1]:.4f} -> {reference.losses[STEPS]:.4f}")

    with report.part(f"4 ranks save at {SAVE_EVERY}; SIGKILL after {KILL_AFTER}") as outcome:
        plain = ["--steps", str(STEPS), "--until", str(STEPS), "--save-every", str(SAVE_EVERY)]
        command = torchrun(4, "train.py", "save", *plain, *checkpoint, "--losses", "4-ranks.jsonl")
        run(command, folder, kill_when=lambda line: line.startswith(f"step {KILL_AFTER} "))
        logged = len((folder / "4-ranks.jsonl").read_text().splitlines())
        first = Curve.read(folder / "4-ranks.jsonl", 1, max(logged, KILL_AFTER))
        outcome.append(compared(first, reference))

    with report.part(f"2 ranks resume with --runtime wrapper, save at {half}") as outcome:
        command = torchrun(2, "train.py", "resume", *checkpoint, "--until", str(half))
        run([*command, "--runtime", "wrapper", "--losses", "2-ranks.jsonl"], folder)
        second = Curve.read(folder / "2-ranks.jsonl", SAVE_EVERY + 1, half)
        outcome.append(compared(second, reference))

    with report.part("3 ranks resume with --runtime fully_shard, train to the end") as outcome:
        command = torchrun(3, "train.py", "resume", *checkpoint)
        run([*command, "--runtime", "fully_shard", "--losses", "3-ranks.jsonl"], folder)
        third = Curve.read(folder / "3-ranks.jsonl", half + 1, STEPS)
        outcome.append(compared(third, reference))
        outcome += pictures(reference, (first, second, third))

    with report.part(f"2 ranks, 3 runtimes: each saves at {EACH}, the others resume") as outcome:
        run(torchrun(2, "runtimes.py", "--steps", str(STEPS), "--each", str(EACH)), folder)
        outcome.append(f"largest relative differences of a loss (tolerance {TOLERANCE:.0e}):")
        for saved in RUNTIMES:
            trained = Curve.read(folder / f"{saved}.jsonl", 1, EACH).difference(reference)
            found = [f"{saved} trains: {trained:.1e}"]
            for other in RUNTIMES:
                if other != saved:
                    losses = folder / f"{saved}-to-{other}.jsonl"
                    resumed = Curve.read(losses, EACH + 1, 2 * EACH).difference(reference)
                    found.append(f"{other} resumes: {resumed:.1e}")
            outcome.append("  ".join(found))

    with report.part("ckpt convert run model.safetensors --select model") as outcome:
        ckpt(folder, "convert", "run", "model.safetensors", "--select", "model")
        outcome.append(f"{size(folder / 'run')} -> {size(folder / 'model.safetensors')}")

    with report.part("python generate.py model.safetensors (no distributed code)") as outcome:
        text = run(python("generate.py", "model.safetensors", "--seed", "1"), folder)
        outcome += [f"| {line}" for line in text]

    with report.part("ckpt convert run hf --to hf ..., and generate again") as outcome:
        target = ["hf", "--to", "hf", "--max-shard-size", "2MB"]
        ckpt(folder, "convert", "run", *target, "--select", "model")
        names = sorted(path.name for path in (folder / "hf").iterdir())
        if run(python("generate.py", "hf", "--seed", "1"), folder) != text:
            raise DemoError("the Hugging Face folder generates another text than model.safetensors")
        outcome.append(f"the same text from {', '.join(names)}")

    with report.part("ckpt convert hf back --to ckpt; ckpt diff model.safetensors back") as outcome:
        ckpt(folder, "convert", "hf", "back", "--to", "ckpt")
        outcome += ckpt(folder, "diff", "model.safetensors", "back")[-1:]

    with report.part("one bit of the checkpoint flips; ckpt verify run") as outcome:
        shard = max((folder / "run").glob("*.safetensors"), key=lambda path: path.stat().st_size)
        flip_a_bit(shard)
        command = [sys.executable, "-m", "ckpt", "verify", "run"]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if ended.returncode == 0 or shard.name not in ended.stdout:
            raise DemoError(f"`ckpt verify` did not find the flipped bit:\n{ended.stdout}")
        outcome += textwrap.wrap(ended.stdout.splitlines()[0], 90, break_long_words=False)


BARS = "▁▂▃▄▅▆▇█"


def pictures(reference: Curve, parts: Sequence[Curve]) -> list[str]:
    """Two lines with the losses of each second step as bars: of one process, and of the parts."""
    low, high = min(reference.losses.values()), max(reference.losses.values())

    def bars(curve: Curve, first: int, last: int) -> str:
        shares = [
            (loss - low) / (high - low)
            for step, loss in curve.losses.items()
            if step % 2 and first < step <= last
        ]
        return "".join(BARS[round(min(max(share, 0), 1) * (len(BARS) - 1))] for share in shares)

    ends = [(SAVE_EVERY * at, SAVE_EVERY * (at + 1)) for at in range(len(parts))]
    whole = "|".join(bars(reference, *end) for end in ends)
    divided = "|".join(bars(part, *end) for part, end in zip(parts, ends, strict=True))
    return [f"loss of 1 process       {whole}", f"loss of 4, 2, 3 ranks   {divided}"]


def flip_a_bit(path: Path) -> None:
    """Changes one bit in the middle of a file, as a failing disk does."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def compared(curve: Curve, reference: Curve) -> str:
    """One line that says how close a run came to the reference."""
    steps = list(curve.losses)
    return (
        f"steps {steps[0]} to {steps[-1]}: largest relative difference of a loss "
        f"{curve.difference(reference):.1e} (tolerance {TOLERANCE:.0e})"
    )


def ckpt(folder: Path, *arguments: str) -> list[str]:
    """Run the ckpt command; `ckpt diff` fails when there is a difference."""
    return run([sys.executable, "-m", "ckpt", *arguments], folder)


def size(path: Path) -> str:
    """How large a file, or all files of a folder, are together."""
    files = path.iterdir() if path.is_dir() else [path]
    return f"{path.name} {sum(file.stat().st_size for file in files) / 1e6:.1f} MB"


def main(arguments: list[str]) -> int:
    """Tell the story; 0 when everything came out as it must."""
    parser = argparse.ArgumentParser(description="Show the main job of ckpt, end to end.")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="leave all output in a new folder in DIR"
    )
    keep: Path | None = parser.parse_args(arguments).keep
    began = time.monotonic()
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="ckpt-demo-") as scratch:
            kept = tempfile.mkdtemp(prefix="ckpt-demo-", dir=keep.resolve()) if keep else scratch
            tell(Path(kept))
    except DemoError as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    print(f"All as it must be, in {time.monotonic() - began:.0f} s.")
    if keep:
        print(f"Output: {kept}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
