"""What matching a target with a checkpoint writes down: wants, differences and names used.

`ckpt.match.match` walks the target, `ckpt.match.match_optimizer` the optimizers in it,
`ckpt.match.match_slices` the state of their flat parameters; all fill one ledger.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ckpt.errors import Difference
from ckpt.match.selection import Claim, Selection
from ckpt.state.memory import empty_for
from ckpt.state.saved import Missing, Saved, holds_tensor, join
from ckpt.state.typed_values import opened
from formats.catalog import TensorRecord, TensorRef, Tree
from sharding.describe.describing import TensorLike

Step = Callable[[], object]
"""Installs a part of the target and returns what stands there now."""
Check = Callable[[], Difference | None]
"""What is wrong with numbers that were read."""


@dataclass(frozen=True, slots=True)
class Want:
    """A tensor to fill from a record of the checkpoint."""

    name: str
    record: TensorRecord
    tensor: TensorLike


@dataclass(frozen=True, slots=True)
class Match:
    """A target matched with a checkpoint."""

    wants: list[Want]
    numbers: list[Want]
    """To be read into memory of their own before anything of the target is touched."""
    checks: list[Check]
    """To be made once these are read."""
    differences: list[Difference]
    """All but the unexpected names."""
    shared: list[tuple[Want, ...]]
    """Wants that share memory of the target: to be compared before anything of it is touched."""
    unexpected: list[str]
    """The checkpoint's names that this rank's target does not have."""
    saved_names: list[str]
    """All of the checkpoint's names as the target knows them; the same on every rank."""
    own_names: list[str]
    """The names of this rank's target, where some are not selected."""
    idle: tuple[Claim, ...]
    """What of the selection chooses neither a name of the checkpoint nor one of this target."""
    install: Step
    """Sets values and calls `load_state_dict`s, once the wants are filled; returns the target."""


@dataclass
class Ledger:
    """The state of one matching."""

    saved: Saved
    selection: Selection
    wants: list[Want] = field(default_factory=list)
    numbers: list[Want] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    ties: list[tuple[Want, Want]] = field(default_factory=list)
    """Wants for one tensor of the target under two names: only the first is filled."""
    used: set[str] = field(default_factory=set)
    """The checkpoint's names that found their place, or are known not to matter."""
    own_names: list[str] = field(default_factory=list)
    """The names of the target that patterns may name, where some are not selected."""

    def differ(self, name: str, problem: str, detail: str) -> None:
        """Write down one way in which the two do not fit."""
        self.differences.append(Difference(name, problem, detail))

    def owns(self, *names: str) -> None:
        """Write down names of the target, for patterns to name."""
        if not self.selection.is_all:
            self.own_names += names

    def selects(self, path: str) -> bool:
        """True when something below a name is to be loaded, if there is anything."""
        self.owns(path, join(path, ""))
        return self.chooses(path, join(path, ""))

    def chooses(self, path: str, otherwise: str | None = None) -> bool:
        """Whether something saved at or below a name is selected; else whether that name is.

        `otherwise` is looked up in place of a name that nothing was saved under.
        """
        if self.selection.is_all:
            return True
        below = self.saved.under(path) or [path if otherwise is None else otherwise]
        return any(name in self.selection for name in below)

    def whole(
        self,
        tree: Tree,
        path: str,
        like: Callable[[str, TensorRecord], torch.Tensor] | None = None,
        is_one: bool = False,
    ) -> Step:
        """What was saved, with tensors of their own; `like` makes them from name and record.

        What is not selected is left out of its dict, and None in a list; not so in a value that
        `is_one`, which has a single name.
        """
        if isinstance(tree, TensorRef):
            record = self.saved.catalog.tensors[tree.name]
            tensor = like(path, record) if like is not None else whole_tensor(record)
            self.wants.append(Want(path, record, tensor))
            return lambda: tensor
        if isinstance(tree, dict):
            items = {
                key: self.whole(v, join(path, key), like, is_one)
                for key, v in tree.items()
                if is_one or self.chooses(join(path, key))
            }
            return lambda: {key: step() for key, step in items.items()}
        if isinstance(tree, list | tuple):
            is_one = is_one or not holds_tensor(tree)  # as `ckpt.state.saved.leaves` has it
            named = [(join(path, index), item) for index, item in enumerate(tree)]
            steps = [
                self.whole(v if is_one or self.chooses(at) else None, at, like, is_one)
                for at, v in named
            ]
            if isinstance(tree, tuple):
                return lambda: tuple(step() for step in steps)
            return lambda: [step() for step in steps]
        value = opened(tree)
        return lambda: value

    def anything(self, own: object, path: str) -> Step:
        """Whatever was saved there, for an object that knows what to do with it; else `own`."""
        if not self.selects(path):
            return lambda: own
        saved = self.saved.node(path)
        if isinstance(saved, Missing):
            self.differ(path, "missing", "is in the target and not in the checkpoint")
            return lambda: own
        self.used.update(self.saved.under(path))
        return self.whole(saved, path)


def whole_tensor(record: TensorRecord) -> torch.Tensor:
    """Fresh memory for a whole tensor of the checkpoint."""
    return empty_for(record, record.shape)
