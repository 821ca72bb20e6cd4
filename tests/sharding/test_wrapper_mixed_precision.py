"""Mixed precision of the wrapper class: which dtype is where, and that training is torch's.

A model of probes notes the dtypes it meets in its forward; the same lines run through torch.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import fsdp

import sharding
from tests.sharding.wrapper_models import (
    CPU,
    STRATEGIES,
    assert_equal,
    full_parameters,
    numbers,
    sgd,
    wrapped,
)

bf16, fp16, fp32, fp64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Probe(nn.Module):
    """A layer with two buffers that notes the dtypes of all it computes with."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / 2)
        self.bias = nn.Parameter(torch.randn(outputs) / 2)
        self.register_buffer("scale", torch.linspace(0.5, 1, outputs))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.seen: list[tuple[torch.dtype, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        dtype = self.weight.dtype
        self.seen.append((x.dtype, dtype, self.bias.dtype, self.scale.dtype, self.calls.dtype))
        return torch.tanh(F.linear(x.to(dtype), self.weight, self.bias)) * self.scale.to(dtype)


class Nested(Probe):
    """A probe that is a unit of its own."""


class Probes(nn.Module):
    """A probe in the root's unit, then one in its own, then the root's again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Probe(5, 7)
        self.second = Nested(7, 7)
        self.third = Probe(7, 3)
        self.inputs: list[Any] = []

    def forward(
        self, x: torch.Tensor, *, index: torch.Tensor, more: dict[str, torch.Tensor]
    ) -> dict[str, Any]:
        self.inputs.append((x.dtype, index.dtype, more["x"].dtype))
        y = self.third(self.second(self.first(x)))
        return {"y": y, "parts": (y[index], more["x"])}

    @property
    def seen(self) -> list[Any]:
        return [self.inputs, self.first.seen, self.second.seen, self.third.seen]


def probes(runtime: ModuleType, strategy: str, use_orig_params: bool, **precision: Any) -> Any:
    """The model of probes in a runtime's wrapper, with this mixed precision."""
    torch.manual_seed(0)
    return wrapped(
        runtime,
        Probes(),
        strategy,
        auto_wrap_policy=runtime.wrap.ModuleWrapPolicy({Nested}),
        mixed_precision=runtime.MixedPrecision(**precision),
        use_orig_params=use_orig_params,
    )


def forward(model: nn.Module, step: int) -> dict[str, Any]:
    x = numbers(step, 4, 5)
    return model(x, index=torch.tensor([0, 2]), more={"x": x})


def dtypes(tensors: Any) -> list[torch.dtype | None]:
    return [None if tensor is None else tensor.dtype for tensor in tensors]


def train_probes(runtime: ModuleType, *arguments: Any, **precision: Any) -> tuple[Any, Any]:
    """The dtypes met in three steps, and the losses and parameters after them."""
    model = probes(runtime, *arguments, **precision)
    optimizer = sgd(model)
    met, losses = [], []
    for step in range(3):
        optimizer.zero_grad()
        output = forward(model, step)
        met.append(dtypes([output["y"], *output["parts"]]))
        loss = output["y"].float().square().sum()
        loss.backward()
        met.append(dtypes(model.parameters()))
        met.append(sorted({str(p.grad.dtype) for p in model.parameters() if p.grad is not None}))
        met.append(dtypes(model.buffers()))
        # The optimizers of torch want a gradient of the parameter's own dtype.
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
                gradient, parameter.grad = parameter.grad, None
                parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
        losses.append(loss.detach())
    optimizer.zero_grad()
    met.append(model.module.seen)
    with runtime.FullyShardedDataParallel.summon_full_params(model):
        met.append(dtypes(model.parameters()))
    return met, (losses, full_parameters(runtime, model))


PRECISIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "param": {"param_dtype": bf16},
    "half, reduced in single": {"param_dtype": fp16, "reduce_dtype": fp32},
    "reduce": {"reduce_dtype": bf16},
    "reduce in double": {"reduce_dtype": fp64},
    "buffer": {"buffer_dtype": fp16},
    "all": {"param_dtype": bf16, "reduce_dtype": fp32, "buffer_dtype": fp16},
    "low gradients": {"param_dtype": bf16, "keep_low_precision_grads": True},
    "root inputs as they are": {"param_dtype": bf16, "cast_root_forward_inputs": False},
    "nested inputs cast": {"param_dtype": fp16, "cast_forward_inputs": True},
    "nested inputs alone": {
        "param_dtype": bf16,
        "cast_forward_inputs": True,
        "cast_root_forward_inputs": False,
    },
}


def train_alike(strategy: str, use_orig_params: bool, precision: dict[str, Any]) -> None:
    ours, numbers_ = train_probes(sharding, strategy, use_orig_params, **precision)
    theirs, wanted = train_probes(fsdp, strategy, use_orig_params, **precision)
    for one, other in zip(ours, theirs, strict=True):
        assert one == other, f"{one} and in torch {other}"
    torch.testing.assert_close(numbers_[0], wanted[0], rtol=1e-3, atol=1e-3)
    assert_equal(numbers_[1], wanted[1], rtol=1e-3, atol=1e-3)


@pytest.mark.thorough
@pytest.mark.wide
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", list(PRECISIONS))
def test_every_dtype_and_number_is_that_of_torch(
    clusters: Callable[..., Any], name: str, strategy: str, use_orig_params: bool
) -> None:
    clusters(2).run(train_alike, strategy, use_orig_params, PRECISIONS[name])


def meet() -> list[Any]:
    model = probes(sharding, "FULL_SHARD", True, param_dtype=bf16, buffer_dtype=fp16)
    output = forward(model, 0)
    output["y"].float().sum().backward()
    return [
        *model.module.seen,
        dtypes([output["y"], *output["parts"]]),
        sorted({str(p.dtype) for p in model.parameters()}),
        sorted({str(p.grad.dtype) for p in model.parameters() if p.grad is not None}),
    ]


def test_parameters_inputs_and_buffers_have_their_dtypes_and_the_shards_keep_theirs(
    clusters: Callable[..., Any],
) -> None:
    inside = [(bf16, bf16, bf16, fp16, torch.int64)]
    assert (
        clusters(2).run(meet)
        == [
            [
                [(bf16, torch.int64, bf16)],
                *[inside] * 3,
                [bf16, bf16, bf16],
                ["torch.float32"],
                ["torch.float32"],
            ]
        ]
        * 2
    )


def wrap_in_two_dtypes(runtime: ModuleType) -> list[Any]:
    torch.manual_seed(0)
    model = Probes()
    wrapper, precision = runtime.FullyShardedDataParallel, runtime.MixedPrecision
    inner = precision(param_dtype=fp16, cast_forward_inputs=True)
    model.second = wrapper(model.second, mixed_precision=inner, device_id=CPU)
    outer = precision(param_dtype=bf16, cast_forward_inputs=True)
    model = wrapper(model, mixed_precision=outer, device_id=CPU)
    output = forward(model, 0)
    output["y"].float().sum().backward()
    return [
        *model.module.seen,
        dtypes([output["y"], *output["parts"]]),
        dtypes(model.parameters()),
        dtypes(p.grad for p in model.parameters()),
    ]


def wrap_alike_in_two_dtypes() -> list[Any]:
    ours = wrap_in_two_dtypes(sharding)
    assert ours == wrap_in_two_dtypes(fsdp)
    return ours[1:4]


def test_a_nested_unit_of_another_dtype_casts_what_comes_in(clusters: Callable[..., Any]) -> None:
    for first, second, third in clusters(2).run(wrap_alike_in_two_dtypes):
        assert first[0][:2] == (bf16, bf16)
        assert second[0][:2] == (fp16, fp16)
        assert third[0][:2] == (fp16, bf16)


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """This variable of the environment for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def evaluate(runtime: ModuleType, value: str, strategy: str, use_orig_params: bool) -> list[Any]:
    with environment("FSDP_USE_FULL_PREC_IN_EVAL", value):
        model = probes(
            runtime,
            strategy,
            use_orig_params,
            param_dtype=bf16,
            buffer_dtype=fp16,
            cast_forward_inputs=True,
        )
    found: list[Any] = []
    for training in (True, False, True, False):
        model.train(training)
        for seen in model.module.seen:
            seen.clear()
        with torch.set_grad_enabled(training):
            output = forward(model, 0)
        if training:
            output["y"].float().sum().backward()
        found.append([list(seen) for seen in model.module.seen])
        found.append(dtypes([output["y"], *output["parts"]]))
        found.append(dtypes(model.parameters()))
        found.append(dtypes(model.buffers()))
        found.append(output["y"].detach().double())
    model.eval()
    forward(model, 1)["y"].sum().backward()
    found.append(sorted({str(p.grad.dtype) for p in model.parameters() if p.grad is not None}))
    return found


def evaluate_alike(value: str, strategy: str, use_orig_params: bool) -> Any:
    ours = evaluate(sharding, value, strategy, use_orig_params)
    theirs = evaluate(fsdp, value, strategy, use_orig_params)
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
        else:
            assert one == other, f"{one} and in torch {other}"
    return ours[5:7]


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("value", ["1", "0"])
def test_evaluation_is_in_full_precision_where_the_environment_said_so_at_construction(
    clusters: Callable[..., Any], value: str, strategy: str, use_orig_params: bool
) -> None:
    for seen, output in clusters(2).run(evaluate_alike, value, strategy, use_orig_params):
        low = fp32 if value == "1" else bf16
        assert seen[1] == [(low, low, low, fp32 if value == "1" else fp16, torch.int64)]
        assert output == [low] * 3


def evaluate_a_root_without_parameters(runtime: ModuleType) -> list[str]:
    wrapper = runtime.FullyShardedDataParallel
    given = {"mixed_precision": runtime.MixedPrecision(param_dtype=fp16), "device_id": CPU}
    found = []
    for nested in (range(1), range(2)):
        with environment("FSDP_USE_FULL_PREC_IN_EVAL", "1"):
            parts = [nn.Linear(5, 5), nn.Linear(5, 7)]
            for index in nested:
                parts[index] = wrapper(parts[index], **given)
            model = wrapper(nn.Sequential(*parts), **given)
        for training in (True, False, True):
            model.train(training)
            try:
                found.append(str(model(torch.ones(2, 5)).dtype))
            except RuntimeError as error:
                found.append(str(error).partition(",")[0])
    return found


def evaluate_roots_alike() -> list[str]:
    ours = evaluate_a_root_without_parameters(sharding)
    assert ours == evaluate_a_root_without_parameters(fsdp)
    return ours


def test_a_root_whose_parameters_all_belong_to_inner_units_evaluates_in_full_precision(
    clusters: Callable[..., Any],
) -> None:
    for found in clusters(2).run(evaluate_roots_alike):
        assert found[3:] == [str(fp16), str(fp32), str(fp16)]


class Normalized(nn.Module):
    """Layers with batch norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Nested(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.last = Nested(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def normalize(runtime: ModuleType) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = wrapped(
            runtime,
            Normalized(),
            auto_wrap_policy=runtime.wrap.ModuleWrapPolicy({Nested}),
            mixed_precision=runtime.MixedPrecision(param_dtype=bf16, reduce_dtype=bf16),
        )
    texts = [str(w.message) for w in caught if "Both mixed precision" in str(w.message)]
    met: list[Any] = [text[:80] for text in texts]
    units = runtime.FullyShardedDataParallel.fsdp_modules(model)
    met.append([type(unit.module).__name__ for unit in units])
    weights: list[torch.dtype] = []
    norm = model.norm.module
    norm.register_forward_pre_hook(lambda module, _: weights.append(module.weight.dtype))
    output = model(numbers(0, 4, 5))
    output.float().sum().backward()
    met += [weights, output.dtype, norm.running_mean.dtype, model.module.last.seen]
    met.append(dtypes(p.grad for p in model.parameters()))
    values = [output.detach(), norm.running_mean, norm.running_var]
    values += full_parameters(runtime, model).values()
    return met, values


def normalize_alike() -> list[Any]:
    (ours, numbers_), (theirs, wanted) = normalize(sharding), normalize(fsdp)
    for one, other in zip(ours, theirs, strict=True):
        assert one == other, f"{one} and in torch {other}"
    torch.testing.assert_close(numbers_, wanted)
    return ours


def test_batch_norm_is_wrapped_alone_in_full_precision_with_a_warning(
    clusters: Callable[..., Any],
) -> None:
    for text, units, weights, *_ in clusters(2).run(normalize_alike):
        assert text.startswith(
            "Both mixed precision and an auto_wrap_policy were specified to FSDP"
        )
        assert units == ["Normalized", "Nested", "BatchNorm1d", "Nested"]
        assert weights == [fp32]


def reduce_in(dtype: torch.dtype, strategy: str) -> list[str]:
    seen = []

    def hook(state: None, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
        seen.append(str(grad.dtype))
        dist.all_reduce(grad)
        if output is not None:
            seen.append(str(output.dtype))
            output.copy_(grad.chunk(dist.get_world_size())[dist.get_rank()])

    model = probes(sharding, strategy, False, param_dtype=bf16, reduce_dtype=dtype)
    model.register_comm_hook(None, hook)
    forward(model, 0)["y"].float().sum().backward()
    assert all(p.grad is None or p.grad.dtype == fp32 for p in model.parameters())
    return seen


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [fp16, fp32, fp64])
def test_a_communication_hook_gets_gradients_in_the_dtype_of_reduction(
    clusters: Callable[..., Any], dtype: torch.dtype, strategy: str
) -> None:
    for seen in clusters(2).run(reduce_in, dtype, strategy):
        assert len(seen) == (2 if strategy == "NO_SHARD" else 4)
        assert set(seen) == {str(dtype)}


def clip_low(use_orig_params: bool) -> list[Any]:
    found = []
    for runtime in (sharding, fsdp):
        model = probes(
            runtime,
            "FULL_SHARD",
            use_orig_params,
            param_dtype=bf16,
            keep_low_precision_grads=True,
        )
        forward(model, 0)["y"].float().sum().backward()
        total = model.clip_grad_norm_(0.1)
        found.append((str(total.dtype), total.item()))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-2)
    return found[0][0]


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_norm_of_low_precision_gradients_has_their_dtype(
    clusters: Callable[..., Any], use_orig_params: bool
) -> None:
    assert clusters(2).run(clip_low, use_orig_params) == ["torch.bfloat16"] * 2
