"""Which cases of a parametrized test run when: in `make test`, in `make test-all`, or by `-m slow`.

Only tests on clusters of ranks and tests with the mark `costly` are divided. A parameter is either
a *setting*, by which many tests are run (a strategy, a form, a number of ranks), or the subject of
the test. Rules:

1. `make test` has each value of each subject at least once, and a third of the values of each
   setting (one of up to five; and one rank, which costs little, is not counted). Which third,
   differs from test to test: the tests of a file together have all values.
2. `make test-all` has every pair of values of two parameters; so of one or two parameters it has
   every case. Of a test with the mark `wide`, a product that takes long, it has each value of each
   parameter at least once.
3. The rest has the mark `slow`.
4. A test that has the mark `thorough` by hand, or whose file has it, is none of `make test`: most
   tests of what goes wrong beside a server are so. A parameter with the mark `thorough` or `slow`
   takes no part in this.
5. A property has a fifth of its examples in `make test`, and so have a few tests of their trials.

The choice depends on the name of the test and the values, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import combinations
from zlib import crc32

import pytest
from _pytest.mark import ParameterSet

SETTINGS = frozenset(
    {
        *("compress", "door", "first_only", "form", "forward", "full", "half", "how", "nested"),
        *("norm_type", "overwrite", "reentrant", "run", "strategy"),
        *("use_orig_params", "way", "world_size"),
    }
)
"""The names of settings."""


def thorough(value: object) -> ParameterSet:
    """A value of a parameter that `make test` leaves out."""
    return pytest.param(value, marks=pytest.mark.thorough)


def slow(value: object) -> ParameterSet:
    """A value of a parameter that `make test-all` leaves out as well."""
    return pytest.param(value, marks=pytest.mark.slow)


is_quick = False
"""Whether this run is `make test`; the options of the command line decide."""


def examples(count: int, least: int = 20) -> int:
    """How many examples of a property, or trials of another test, this run has of as many."""
    return min(count, max(least, count // 5)) if is_quick else count


Case = dict[str, str]
"""The values of the parameters by their names."""


def values_of(cases: Sequence[Case]) -> dict[str, list[str]]:
    """By parameter its values, in their order."""
    return {name: list(dict.fromkeys(case[name] for case in cases)) for name in cases[0]}


def turned(values: list[str], turn: int) -> list[str]:
    """The values from another one on.

    >>> turned(["a", "b", "c"], 4)
    ['b', 'c', 'a']
    """
    turn %= len(values)
    return values[turn:] + values[:turn]


def third(known: list[str], name: str) -> list[str]:
    """A third of the values of a setting, which one by the name; and one rank.

    >>> third(["1", "2", "3", "4"], "test world_size")
    ['1', '3']
    """
    others = [value for value in known if value != "1"]
    count = max(1, len(others) // 3)
    return ["1"] * ("1" in known) + turned(others, crc32(name.encode()))[:count]


def quick(cases: Sequence[Case], name: str) -> set[int]:
    """Which cases `make test` has of the test with this name (rule 1).

    >>> cases = [{"world_size": n, "kind": k} for n in "123" for k in "ab"]
    >>> [tuple(cases[i].values()) for i in sorted(quick(cases, "test"))]
    [('1', 'a'), ('2', 'b')]
    """
    wanted = values_of(cases)
    for each, known in wanted.items():
        if each in SETTINGS:
            wanted[each] = third(known, f"{name} {each}")
    return covering(cases, name, wanted)


def covering(
    cases: Sequence[Case],
    name: str,
    wanted: dict[str, list[str]],
    beside: Set[int] = frozenset(),
) -> set[int]:
    """Which few cases have each wanted value of each parameter at least once, with those beside.

    >>> cases = [{"a": a, "b": b} for a in "123" for b in "45"]
    >>> [tuple(cases[i].values()) for i in sorted(covering(cases, "test", values_of(cases)))]
    [('1', '5'), ('2', '4'), ('3', '4')]
    """
    chosen = {*beside}
    allowed = [i for i, case in enumerate(cases) if all(case[n] in wanted[n] for n in wanted)]
    if not allowed:  # the cases are no product
        return set(range(len(cases)))
    lacking = {(n, value) for n in wanted for value in wanted[n]}
    lacking = lacking.difference(*(cases[i].items() for i in chosen))
    start = crc32(name.encode()) % len(allowed)
    order = allowed[start:] + allowed[:start]
    while lacking:
        gains = {i: len(lacking & cases[i].items()) for i in order}
        best = max(order, key=lambda i: gains[i])
        if not gains[best]:
            break
        chosen.add(best)
        lacking -= cases[best].items()
    return chosen


def pairs(cases: Sequence[Case], name: str) -> set[int]:
    """Which cases `make test-all` has of it (rule 2).

    >>> cases = [{"a": a, "b": b, "c": c} for a in "12" for b in "12" for c in "12"]
    >>> len(pairs(cases, "test"))
    5
    """
    if len(cases[0]) < 3:
        return set(range(len(cases)))
    chosen = quick(cases, name)
    covered = [set(combinations(sorted(case.items()), 2)) for case in cases]
    lacking = set().union(*covered) - set().union(*(covered[i] for i in chosen))
    while lacking:
        best = max(range(len(cases)), key=lambda i: len(lacking & covered[i]))
        chosen.add(best)
        lacking -= covered[best]
    return chosen
