"""Which entries a parameter's saved state lacks, and what optimizers leave out for good reasons."""

import pytest

from ckpt.match.match_optimizer import SavedState, lacking_entries


def state(name: str, dimensions: int, placed: str, others: str = "step") -> SavedState:
    """The state of a parameter: its entries of the parameter's shape, and the others."""
    mine = frozenset(placed.split())
    return SavedState(name, dimensions, mine | frozenset(others.split()), mine)


WHOLE = {
    "adam": [state("w", 2, "exp_avg exp_avg_sq"), state("b", 1, "exp_avg exp_avg_sq")],
    "nothing for one": [state("w", 2, "exp_avg"), SavedState("v", 2, frozenset(), frozenset())],
    "adafactor": [state("w", 2, "", "step row_var col_var"), state("b", 1, "variance")],
    "8-bit, small ones not": [
        state("large", 2, "state1 state2", "step qmap1 qmap2 absmax1 absmax2"),
        state("small", 2, "state1 state2"),
    ],
    "by dimensions": [state("w", 2, "momentum"), state("b", 1, "momentum exp_avg_sq")],
    "others for others": [state("w", 2, "momentum"), state("v", 2, "exp_avg exp_avg_sq")],
    "no parameter": [],
}


@pytest.mark.parametrize("case", WHOLE)
def test_what_optimizers_leave_out_is_not_lacking(case: str) -> None:
    assert not list(lacking_entries(WHOLE[case]))


def test_every_entry_is_named_with_a_parameter_that_has_it() -> None:
    found = list(
        lacking_entries(
            [
                state("w", 2, "exp_avg exp_avg_sq max_exp_avg_sq"),
                state("v", 2, "exp_avg"),
                state("u", 2, "exp_avg exp_avg_sq"),
                state("b", 1, "exp_avg"),
            ]
        )
    )
    assert [(each.name, each.entry, each.other) for each in found] == [
        ("v", "exp_avg_sq", "w"),
        ("v", "max_exp_avg_sq", "w"),
        ("u", "max_exp_avg_sq", "w"),
    ]
