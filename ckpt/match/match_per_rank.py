"""Matches an object of one rank (`ckpt.state.per_rank`): it gets the state of its rank.

The state is loaded whole, into new memory on the CPU, or not at all if no name of it is selected.
The match does not call `state_dict()` of the target's object.
"""

from __future__ import annotations

from ckpt.match.match_builder import Installer, MatchBuilder
from ckpt.state.per_rank import PerRank, ranks_in
from ckpt.state.saved import Missing, kind_of
from ckpt.state.stateful import call_of
from formats.catalog import join


def match_per_rank(builder: MatchBuilder, node: PerRank, path: str) -> Installer:
    """Matches an object of this rank with the states that ranks have saved at a path."""
    if not builder.selects(path):
        return lambda: node
    saved = builder.saved.node(path)
    if isinstance(saved, Missing):
        builder.differ(path, "missing", "is in the target and not in the checkpoint")
        return lambda: node
    builder.used.update(builder.saved.under(path))
    keys, here = ranks_in(saved), list(builder.world.ranks())
    if not keys or not isinstance(saved, dict):
        builder.differ(
            path,
            "structure",
            f"is {kind_of(saved)} in the checkpoint, and a state for each rank in the target",
        )
        return lambda: node
    problem = node.problem(keys, here)
    if problem is not None:
        builder.differ(path, "structure", problem)
        return lambda: node
    steps = {
        rank: builder.whole(saved[keys[rank]], join(path, keys[rank]), is_one=True)
        for rank in node.wanted(keys, here)
    }

    def install() -> object:
        states = {rank: step() for rank, step in steps.items()}
        with call_of("load_state_dict", path):
            node.install(states, here if set(keys) != set(here) else ())
        return node

    return install
