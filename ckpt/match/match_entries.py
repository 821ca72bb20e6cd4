"""Whether what was saved for a parameter is whole, judged by what was saved for others like it.

An optimizer that has no state for a parameter may never have stepped it. One that has some and
lacks an entry would start that entry from nothing, silently in a flat parameter and with a KeyError
elsewhere. What an optimizer keeps is its own affair, so the rule is narrow: parameters are alike
when they are of one group and of as many dimensions, and an entry is lacking when another's state
has all that this one has and this entry too, in that other parameter's shape. (Adafactor and 8-bit
optimizers keep different entries for different parameters, and all of them fit the rule.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from formats.catalog import Key


@dataclass(frozen=True, slots=True)
class SavedState:
    """What was saved for one parameter: the names of its entries."""

    name: str
    dimensions: int
    entries: frozenset[Key]
    placed: frozenset[Key]
    """Those that have the parameter's shape."""


@dataclass(frozen=True, slots=True)
class Lacking:
    """An entry that a parameter lacks and another like it has."""

    name: str
    entry: Key
    other: str


def lacking_entries(group: Iterable[SavedState]) -> Iterator[Lacking]:
    """What the states of a group's parameters lack; see the top of this file.

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
