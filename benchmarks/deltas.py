"""How small a delta checkpoint is: the examples' GPT, really trained, saved again and again.

    python benchmarks/deltas.py --store DIR

A base is saved when the model has learnt something, and then the same state after more and more
steps: compressed, and as deltas from the base. The figures are bytes of tensors over bytes stored,
and do not depend on the machine. bfloat16 weights are copies of the float32 ones, as mixed
precision trains them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import report
import torch
from torch.nn import functional as F

import ckpt
from formats.native.manifest import MANIFEST, load

# At the end: benchmarks and examples have files of the same names.
sys.path.append(str(Path(__file__).parent.parent / "examples"))

import gpt
import text

WIDTH = 160
WARM_UP = 100
"""Steps before the base."""
STEPS = (1, 10, 100)
"""Steps after it at which the state is saved."""
LEARNING_RATES = (3e-4, 1e-5)
"""As in pre-training, and as in a fine-tune."""

Tensors = dict[str, torch.Tensor]


class _Training:
    """The model and AdamW, on one process."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._model = gpt.GPT(gpt.Sizes(width=WIDTH))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATES[0])
        self._batches = text.Batches(text.standard_library(), seed=0)
        self._done = 0

    def go_on(self, steps: int, learning_rate: float) -> None:
        """Train for so many steps more."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        for step in range(self._done, self._done + steps):
            inputs, targets = self._batches.share(step)
            loss = F.cross_entropy(self._model(inputs).flatten(0, 1), targets.flatten())
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
        self._done += steps

    def states(self) -> dict[str, Tensors]:
        """What is saved, each kind by itself."""
        parameters = dict(self._model.named_parameters())
        weights = {name: parameter.detach() for name, parameter in parameters.items()}
        state = self._optimizer.state
        return {
            "bfloat16 weights": {name: tensor.bfloat16() for name, tensor in weights.items()},
            "float32 weights": weights,
            "Adam's moments": {
                f"{key}.{name}": state[parameter][key]
                for name, parameter in parameters.items()
                for key in ("exp_avg", "exp_avg_sq")
            },
        }


def _ratio(folder: str, tensors: Tensors) -> float:
    """Bytes of the tensors over the bytes that a checkpoint has for them."""
    manifest = load((Path(folder) / MANIFEST).read_bytes())
    stored = sum(f.size - f.header_bytes - f.table_bytes for f in manifest.files)
    return sum(tensor.nbytes for tensor in tensors.values()) / stored


def tables(options: report.Options) -> list[report.Table]:
    """One table: a row for each learning rate and kind of tensor. A short form takes one step."""
    rows = []
    steps_after = STEPS[:1] if options.short else STEPS
    with options.folder() as store:
        for rate in LEARNING_RATES:
            training, found = _Training(), {}
            training.go_on(1 if options.short else WARM_UP, LEARNING_RATES[0])
            for kind, tensors in training.states().items():
                base = f"{store}/{rate}-{kind}"
                ckpt.save(base, tensors, compress=True)
                found[kind] = [f"{rate:g}", kind, f"{_ratio(base, tensors):.2f}"]
            done = 0
            for steps in steps_after:
                training.go_on(steps - done, rate)
                done = steps
                for kind, tensors in training.states().items():
                    base, url = f"{store}/{rate}-{kind}", f"{store}/delta"
                    ckpt.save(url, tensors, base=base, compress="delta", overwrite=True)
                    found[kind].append(f"{_ratio(url, tensors):.2f}")
            rows += found.values()
    columns = ("learning rate", "", "compressed", *(f"delta, {n} steps" for n in steps_after))
    return [report.Table("Delta checkpoints: bytes of tensors ÷ bytes stored", columns, rows)]


if __name__ == "__main__":
    report.main(__doc__, tables)
