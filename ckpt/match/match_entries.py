"""Finds entries that the saved state of a parameter lacks, by the states of similar parameters.

A parameter without any state may never have been stepped. A parameter with state that lacks one
entry is different: training would start this entry from zero, silently for a flat parameter and
with a KeyError elsewhere. Each optimizer chooses its own entries, so the rule is narrow:

1. Two parameters are similar if they are in the same group and have equally many dimensions.
2. An entry is lacking if the state of a similar parameter has all entries of this state and this
   entry too, in the shape of that parameter.

Adafactor and 8-bit optimizers keep different entries for different parameters. Neither breaks the
rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from formats.catalog import Key


@dataclass(frozen=True, slots=True)
class SavedState:
    """The names of the entries that were saved for one parameter."""

    name: str
    dimensions: int
    entries: frozenset[Key]
    placed: frozenset[Key]
    """The entries that have the parameter's shape."""


@dataclass(frozen=True, slots=True)
class Lacking:
    """An entry that a parameter lacks and a similar one, `other`, has."""

    name: str
    entry: Key
    other: str


def lacking_entries(group: Iterable[SavedState]) -> Iterator[Lacking]:
    """Yields the entries that states of one group's parameters lack, by the rule of this file.

    >>> moments = frozenset({"exp_avg", "exp_avg_sq"})
    >>> whole = SavedState("up.weight", 2, moments, moments)
    >>> half = SavedState("down.weight", 2, moments - {"exp_avg_sq"}, frozenset({"exp_avg"}))
    >>> list(lacking_entries([whole, half]))
    [Lacking(name='down.weight', entry='exp_avg_sq', other='up.weight')]
    """
    states = [state for state in group if state.entries]
    kinds: dict[tuple[int, frozenset[Key], frozenset[Key]], SavedState] = {}
    for state in states:
        kinds.setdefault((state.dimensions, state.entries, state.placed), state)
    for state in states:
        found: dict[Key, str] = {}
        for other in kinds.values():
            if other.dimensions == state.dimensions and state.entries < other.entries:
                for entry in other.placed - state.entries:
                    found.setdefault(entry, other.name)
        for entry in sorted(found, key=str):
            yield Lacking(state.name, entry, found[entry])
