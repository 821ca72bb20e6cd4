"""Where parameters must lie, what `device_id` says about it, and which mistakes are named.

M-01 to M-08 and M-17 of the behaviours asked of the wrapper class. Torch wants an accelerator for
most of them; on a machine without one the CPU is the device, and nothing has to be said.
"""

import functools
import warnings
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp.wrap
from torch import nn

import sharding
import sharding.wrap
from sharding import CPUOffload, ShardingStrategy
from tests.sharding import models

CPU = torch.device("cpu")
FSDP = sharding.FullyShardedDataParallel
GPUS = torch.cuda.device_count()
without_an_accelerator = pytest.mark.skipif(
    torch.accelerator.is_available(),
    reason="the behaviour is that of machines without an accelerator, and this one has one",
)


def nested(api: ModuleType = sharding, **keywords: object) -> nn.Module:
    """A network whose blocks, and within them whose first layers, are wrapped on their own."""
    model = models.network()
    wrap = functools.partial(api.FullyShardedDataParallel, **keywords)
    model.stem = wrap(model.stem)
    for index, block in enumerate(model.blocks):
        block.up = wrap(block.up)
        model.blocks[index] = wrap(block)
    return wrap(model)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(models.trainable(model), lr=0.1, momentum=0.9)


def equals_a_replica(model: FSDP) -> None:
    """Raise unless this wrapped `models.network()` trains as an unsharded one does."""
    replica = models.network()
    wanted = models.train_replica(replica, sgd(replica), range(3))
    assert models.train(model, sgd(model), range(3)) == pytest.approx(wanted)
    models.same(models.whole_states(FSDP, model), models.states(replica), rtol=1e-5, atol=1e-6)


def lies_on_the_cpu(api: ModuleType, use_orig_params: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = nested(api, device_id=CPU, use_orig_params=use_orig_params)
    assert not [w for w in caught if "explicit index" in str(w.message)]
    assert {p.device for p in model.parameters()} == {CPU}
    assert {b.device for b in model.buffers()} == {CPU}
    assert {m.compute_device for m in api.FullyShardedDataParallel.fsdp_modules(model)} == {CPU}
    if not use_orig_params:
        assert all(isinstance(p, api.FlatParameter) for p in model.parameters())


def every_way_lies_on_the_cpu() -> None:
    for api in (torch_fsdp, sharding):
        for use_orig_params in (False, True):
            lies_on_the_cpu(api, use_orig_params)
    equals_a_replica(nested(device_id=CPU))


def test_m_01_device_id_cpu_keeps_parameters_on_the_cpu_and_warns_of_nothing(
    clusters: Callable,
) -> None:
    clusters(2).run(every_way_lies_on_the_cpu)


def takes_a_name() -> None:
    for api in (torch_fsdp, sharding):
        model = nested(api, device_id="cpu")
        assert {m.compute_device for m in api.FullyShardedDataParallel.fsdp_modules(model)} == {CPU}
    with pytest.raises(sharding.ArgumentError, match="device_id='nowhere' is no device"):
        FSDP(nn.Linear(2, 2), device_id="nowhere")


def test_device_id_may_be_the_name_of_a_device(clusters: Callable) -> None:
    clusters(2).run(takes_a_name)


def policies_pass_the_device_on() -> None:
    classes = {nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}
    for api in (torch_fsdp, sharding):
        wrapper = api.FullyShardedDataParallel
        for policy in (
            api.wrap.ModuleWrapPolicy(classes),
            functools.partial(api.wrap.transformer_auto_wrap_policy, transformer_layer_cls=classes),
        ):
            model = wrapper(models.transformer(), auto_wrap_policy=policy, device_id=CPU)
            units = wrapper.fsdp_modules(model)
            assert [type(unit.module) for unit in units] == [
                models.Transformer,
                nn.TransformerEncoderLayer,
                nn.TransformerDecoderLayer,
            ]
            assert [unit.compute_device for unit in units] == [CPU, CPU, CPU]
            assert wrapper.fsdp_modules(model, root_only=True) == [model]


def test_m_02_an_auto_wrap_policy_passes_device_id_on_to_every_instance(
    clusters: Callable,
) -> None:
    clusters(2).run(policies_pass_the_device_on)


def no_device_is_needed() -> None:
    for use_orig_params in (False, True):
        equals_a_replica(nested(use_orig_params=use_orig_params))
    model = FSDP(models.network(), use_orig_params=True)
    assert model.compute_device == CPU
    equals_a_replica(model)


@without_an_accelerator
def test_m_03_without_device_id_and_accelerator_training_happens_on_the_cpu(
    clusters: Callable,
) -> None:
    clusters(2).run(no_device_is_needed)


def nothing_to_shard(keywords: dict[str, torch.device]) -> None:
    x = models.batch(0)
    relu = FSDP(nn.ReLU(), **keywords)
    assert list(relu.parameters()) == []
    torch.testing.assert_close(relu(x), x.relu())
    layer = models.linears(1)
    wanted = layer(x).relu().sum(0)
    model = FSDP(nn.Sequential(layer, FSDP(nn.ReLU(), **keywords)), **keywords)
    found = model(x).sum(0)
    torch.testing.assert_close(found, wanted)
    found.sum().backward()
    assert len(FSDP.fsdp_modules(model)) == 2


def test_m_04_a_module_without_parameters_can_be_wrapped(clusters: Callable) -> None:
    clusters(2).run(nothing_to_shard, {"device_id": CPU})
    if not torch.accelerator.is_available():
        clusters(2).run(nothing_to_shard, {})


def unavailable_devices() -> None:
    for device_id in (GPUS, torch.device("cuda", GPUS)):
        for module in (nn.Linear(3, 3), nn.ReLU()):
            with pytest.raises((RuntimeError, ValueError, AssertionError)):
                FSDP(module, device_id=device_id)


def test_m_05_a_device_id_that_is_not_there_is_an_error(clusters: Callable) -> None:
    clusters(2).run(unavailable_devices)


class Mixed(nn.Module):
    """A layer with values and one without, each on its own device."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.real = nn.Linear(models.WIDTH, models.WIDTH)
        self.meta = nn.Linear(models.WIDTH, models.WIDTH, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.meta(self.real(x))


def two_devices() -> None:
    for use_orig_params in (False, True):
        with pytest.raises(RuntimeError, match="please pass in device_id"):
            FSDP(Mixed(), use_orig_params=use_orig_params)
        module = Mixed()
        before = models.states(module.real)
        model = FSDP(
            module,
            device_id=CPU,
            use_orig_params=use_orig_params,
            auto_wrap_policy=sharding.wrap.ModuleWrapPolicy({nn.Linear}),
            param_init_fn=fill,
        )
        assert {p.device for p in model.parameters()} == {CPU}
        after = models.whole_states(FSDP, model)
        assert torch.equal(after["meta.weight"], torch.full_like(after["meta.weight"], 0.25))
        models.same({"weight": after["real.weight"], "bias": after["real.bias"]}, before)
        model(models.batch(0)).sum().backward()


def fill(module: nn.Module) -> None:
    """Give a module values where it has none."""
    if any(p.is_meta for p in module.parameters(recurse=False)):
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            for parameter in module.parameters(recurse=False):
                parameter.fill_(0.25)


def test_m_06_a_module_on_two_devices_needs_device_id_and_is_unified_by_it(
    clusters: Callable,
) -> None:
    clusters(2).run(two_devices)


def parameters_gone_elsewhere() -> None:
    x = models.batch(0)
    for use_orig_params in (False, True):
        used = nested(device_id=CPU, use_orig_params=use_orig_params)
        used(x).sum().backward()
        for model in (
            nested(device_id=CPU, use_orig_params=use_orig_params),
            FSDP(models.linears(2), device_id=CPU, use_orig_params=use_orig_params),
            used,
        ):
            model.to("meta")
            with pytest.raises(
                RuntimeError,
                match=r"An FSDP-managed module unexpectedly has parameters on meta\. Make sure to "
                r"move the module to cpu before training\.",
            ):
                model(x)
        model = nested(
            device_id=CPU,
            use_orig_params=use_orig_params,
            cpu_offload=CPUOffload(offload_params=True),
        ).to("meta")
        with pytest.raises(
            RuntimeError,
            match=r"An FSDP-managed module with parameter CPU offloading enabled has parameters on "
            r"meta\. Make sure to not move the module from CPU when offloading parameters\.",
        ):
            model(x)


def test_m_07_training_with_parameters_on_the_wrong_device_is_an_error_that_says_which(
    clusters: Callable,
) -> None:
    clusters(2).run(parameters_gone_elsewhere)


def offloaded_parameters_train() -> None:
    elsewhere = torch.accelerator.is_available()  # then no device_id means the accelerator
    for use_orig_params in (False, True):
        for keywords in ({"device_id": CPU},) if elsewhere else ({"device_id": CPU}, {}):
            model = nested(
                cpu_offload=CPUOffload(offload_params=True),
                use_orig_params=use_orig_params,
                **keywords,
            )
            equals_a_replica(model)
            assert {p.device for p in model.parameters()} == {CPU}
            assert {p.grad.device for p in model.parameters() if p.grad is not None} == {CPU}


def test_m_08_offloaded_parameters_stay_on_the_cpu_and_train(clusters: Callable) -> None:
    clusters(2).run(offloaded_parameters_train)


def stays_on_the_cpu() -> None:
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = nested(sharding_strategy=strategy)
        assert not [w for w in caught if "is on CPU" in str(w.message)]
        assert {p.device for p in model.parameters()} == {CPU}
        equals_a_replica(model)


@without_an_accelerator
def test_m_17_a_cpu_module_without_device_id_stays_on_the_cpu_and_trains_there(
    clusters: Callable,
) -> None:
    clusters(2).run(stays_on_the_cpu)
