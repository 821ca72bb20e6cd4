"""The ready-made communication hooks on real ranks, bit for bit, without the runtime."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._comm_hooks import default_hooks

from sharding.comm_hooks import (
    DefaultState,
    LowPrecisionState,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    reduce_scatter_hook,
)
from sharding.engine.reduction import predivide_factor

ELEMENTS = 24
COMPRESS = {torch.float16: fp16_compress_hook, torch.bfloat16: bf16_compress_hook}


def gradient(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's gradient, of numbers from tiny to large."""
    generator = torch.Generator().manual_seed(rank)
    scale = 10.0 ** torch.randint(-4, 3, (ELEMENTS,), generator=generator)
    return (torch.randn(ELEMENTS, generator=generator, dtype=torch.float64) * scale).to(dtype)


def average(world_size: int, given: torch.dtype, reduced: torch.dtype) -> torch.Tensor:
    """Cast, divide, sum in the order of the ranks, divide: what every hook has to give."""
    factor = predivide_factor(world_size)
    summands = [gradient(rank, given).to(reduced).div_(factor) for rank in range(world_size)]
    return reduce(torch.add, summands).div_(world_size / factor)


def everyone() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


def run_plain_hooks(dtype: torch.dtype) -> tuple[Any, Any]:
    """What all-reduce and reduce-scatter leave on this rank."""
    state, rank = DefaultState(everyone()), dist.get_rank()
    whole = gradient(rank, dtype)
    storage = whole.data_ptr()
    allreduce_hook(state, whole)
    part = torch.full((ELEMENTS // state.world_size,), torch.nan, dtype=dtype)
    reduce_scatter_hook(state, gradient(rank, dtype), part)
    return whole.double().numpy(), part.double().numpy(), whole.data_ptr() == storage


def run_compressing_hook(
    reduced: torch.dtype, given: torch.dtype, parameter_type: torch.dtype
) -> tuple[Any, ...]:
    """What a compressing hook leaves on this rank, without and with an output."""
    state, rank = LowPrecisionState(everyone(), parameter_type), dist.get_rank()
    whole = gradient(rank, given)
    result = COMPRESS[reduced](state, whole)
    part = torch.full((ELEMENTS // state.world_size,), torch.nan, dtype=given)
    sharded = COMPRESS[reduced](state, gradient(rank, given), part)
    return (
        *(str(whole.dtype), str(part.dtype), result, sharded),
        *(whole.double().numpy(), part.double().numpy()),
    )


def run_in_a_group_of_one() -> tuple[float, float, Any]:
    """The factors of a group with one rank, and what its hook makes of a gradient."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    state = LowPrecisionState(groups[dist.get_rank()])
    grad = torch.tensor([1.0, 1 / 3])
    bf16_compress_hook(state, grad)
    return state.gradient_predivide_factor, state.gradient_postdivide_factor, grad.numpy()


def run_with_other_factors() -> tuple[Any, Any]:
    """Hooks whose state the user has told to sum rather than average."""
    state = DefaultState(everyone())
    state.gradient_predivide_factor = state.gradient_postdivide_factor = 1.0
    grad, part = torch.full((2,), 3.0), torch.empty(1)
    reduce_scatter_hook(state, grad.clone(), part)
    allreduce_hook(state, grad)
    return grad.tolist(), part.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_c_09_the_plain_hooks_leave_the_average(
    clusters: Callable[[int], Any], dtype: torch.dtype
) -> None:
    expected = average(2, dtype, dtype).double()
    for rank, (whole, part, in_place) in enumerate(clusters(2).run(run_plain_hooks, dtype)):
        assert in_place
        assert torch.equal(torch.from_numpy(whole), expected)
        assert torch.equal(torch.from_numpy(part), expected.chunk(2)[rank])


def test_c_09_on_four_ranks_the_order_of_the_sum_is_the_collectives(
    clusters: Callable[[int], Any],
) -> None:
    expected = average(4, torch.float64, torch.float64)
    for rank, (whole, part, _) in enumerate(clusters(4).run(run_plain_hooks, torch.float64)):
        torch.testing.assert_close(torch.from_numpy(whole), expected, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(
            torch.from_numpy(part), expected.chunk(4)[rank], rtol=1e-14, atol=1e-14
        )


@pytest.mark.parametrize("given", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("parameter_type", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("reduced", COMPRESS, ids=str)
def test_c_07_c_08_c_12_a_compressing_hook_averages_in_low_precision_exactly(
    clusters: Callable[[int], Any],
    reduced: torch.dtype,
    given: torch.dtype,
    parameter_type: torch.dtype,
) -> None:
    expected = average(2, given, reduced).double()
    assert not torch.equal(expected, average(2, given, given).double())
    answers = clusters(2).run(run_compressing_hook, reduced, given, parameter_type)
    for rank, (whole_dtype, part_dtype, result, sharded, whole, part) in enumerate(answers):
        assert (whole_dtype, part_dtype) == (str(parameter_type), str(parameter_type))
        assert result is None
        assert sharded is None
        assert torch.equal(torch.from_numpy(whole), expected)
        assert torch.equal(torch.from_numpy(part), expected.chunk(2)[rank])


def test_a_group_of_one_divides_by_nothing_but_still_compresses(
    clusters: Callable[[int], Any],
) -> None:
    for before, after, grad in clusters(2).run(run_in_a_group_of_one):
        assert (before, after) == (1.0, 1.0)
        assert torch.equal(torch.from_numpy(grad), torch.tensor([1.0, 1 / 3]).bfloat16().float())


def test_the_factors_of_a_state_can_be_changed(clusters: Callable[[int], Any]) -> None:
    assert clusters(2).run(run_with_other_factors) == [([6.0, 6.0], [6.0])] * 2


def test_a_state_without_a_group_is_refused() -> None:
    for state in (DefaultState, LowPrecisionState):
        with pytest.raises(ValueError, match="Expected to pass in an explicit ProcessGroup to"):
            state(None)


@pytest.mark.parametrize("world_size", range(1, 65))
def test_the_factors_are_torchs_and_their_product_is_the_number_of_ranks(world_size: int) -> None:
    factor = predivide_factor(world_size)
    assert factor == default_hooks.DefaultState._get_gradient_predivide_factor(world_size)
    assert factor * (world_size / factor) == world_size
