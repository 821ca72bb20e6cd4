"""What wrapping does to a module before its first forward, and which mixtures it refuses.

M-18 to M-24 of the behaviours asked of the wrapper class: values taken over from rank 0, modules
without values, what is ignored, settings that must agree, containers that never run.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp.wrap
from torch import Tensor, nn

import sharding
import sharding.wrap
from tests.sharding import models

CPU = torch.device("cpu")
FSDP = sharding.FullyShardedDataParallel


def unlike_others() -> nn.Module:
    """A network whose parameters and buffers are this rank's own, frozen ones as well."""
    model = models.network(seed=dist.get_rank())
    for buffer in model.buffers():
        buffer.add_(dist.get_rank())
    return model


def of_rank_zero(model: nn.Module) -> dict[str, Tensor]:
    found = [models.states(model)]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def by_policy(model: nn.Module, **keywords: object) -> nn.Module:
    return FSDP(model, auto_wrap_policy=sharding.wrap.always_wrap_policy, **keywords)


def by_hand(model: nn.Module, **keywords: object) -> nn.Module:
    """Units inside units: the frozen layer, the first block within all blocks, the root."""
    model.stem = FSDP(model.stem, **keywords)
    model.blocks[0] = FSDP(model.blocks[0], **keywords)
    model.blocks = FSDP(model.blocks, **keywords)
    return FSDP(model, **keywords)


def synchronized(keywords: dict[str, torch.device]) -> None:
    for wrap in (by_policy, by_hand):
        for use_orig_params in (False, True):
            model = unlike_others()
            wanted = of_rank_zero(model)
            if dist.get_rank():
                mine = models.states(model)
                assert not any(torch.equal(mine[name], wanted[name]) for name in wanted)
            wrapped = wrap(
                model, sync_module_states=True, use_orig_params=use_orig_params, **keywords
            )
            models.same(models.whole_states(FSDP, wrapped), wanted)


def test_m_18_sync_module_states_gives_parameters_and_buffers_rank_zeros_values(
    clusters: Callable,
) -> None:
    clusters(2).run(synchronized, {"device_id": CPU})


@pytest.mark.skipif(
    torch.accelerator.is_available(),
    reason="the behaviour is that of machines without an accelerator, and this one has one",
)
def test_m_19_sync_module_states_needs_no_device_id_where_the_cpu_is_the_device(
    clusters: Callable,
) -> None:
    clusters(2).run(synchronized, {})


def equal_models() -> None:
    model = by_policy(unlike_others(), device_id=CPU, sync_module_states=True)
    rank_zero = of_rank_zero(unlike_others())
    with FSDP.summon_full_params(model):
        mine = torch.cat([p.detach().flatten() for p in model.parameters()])
        others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(others, mine)
        assert all(torch.equal(mine, other) for other in others)
        models.same(models.states(model), rank_zero)
    replica = models.network()
    replica.load_state_dict(rank_zero, strict=False)
    wanted = models.train_replica(replica, sgd(replica), range(3))
    assert models.train(model, sgd(model), range(3)) == pytest.approx(wanted)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(models.trainable(model), lr=0.1)


def test_m_20_models_drawn_from_other_seeds_are_equal_once_synchronized(
    clusters: Callable,
) -> None:
    clusters(2).run(equal_models)


class Tied(nn.Module):
    """Two layers with one weight, of a size that two ranks do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight


def tied(inner: bool, use_orig_params: bool) -> None:
    options = {"use_orig_params": use_orig_params, "sync_module_states": True}

    def wrapped(model: nn.Module) -> nn.Module:
        if inner:
            model.first = FSDP(model.first, **options)
        return FSDP(model, **options)

    torch.manual_seed(dist.get_rank())
    given = Tied()
    wanted = of_rank_zero(given)
    state = wrapped(given).state_dict()
    assert all(torch.equal(state[name], value) for name, value in wanted.items())
    with torch.device("meta"):
        made = Tied()
    state = wrapped(made).state_dict()
    assert state["first.weight"].any()
    assert torch.equal(state["first.weight"], state["second.weight"])


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("inner", [False, True], ids=["one unit", "two units"])
def test_tied_weights_are_synchronized_and_made_real_as_one(
    clusters: Callable, inner: bool, use_orig_params: bool
) -> None:
    clusters(2).run(tied, inner, use_orig_params)


class Constant(nn.Module):
    """A parameter and a buffer that `reset_parameters` gives its value."""

    def __init__(self, value: float, device: str) -> None:
        super().__init__()
        self.value = value
        self.weight = nn.Parameter(torch.empty(3, 5, device=device))
        self.register_buffer("offset", torch.empty(3, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.fill_(self.value)
            self.offset.fill_(-self.value)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.offset


class Deferred(nn.Module):
    """Three parts without values: `a`, which tests ignore, `b`, and `c` with a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(Constant(1, "meta"), nn.Linear(5, 5, device="meta"))
        self.b = Constant(2, "meta")
        self.c = nn.Sequential(Constant(3, "meta"), nn.Sequential(Constant(4, "meta")))


def materialized(
    api: ModuleType, initializes: bool, policy: Callable | None
) -> tuple[dict[str, Tensor], list[str]]:
    """What a wrapped `Deferred` then holds, and the modules that `param_init_fn` was called on."""
    model = Deferred()
    names = {module: name for name, module in model.named_modules()}
    called: list[str] = []

    def initialize(module: nn.Module) -> None:
        called.append(names[module])
        module.to_empty(device="cpu", recurse=False)
        if isinstance(module, Constant):
            module.value = 10 * module.value
            module.reset_parameters()

    wrapper = api.FullyShardedDataParallel
    wrapped = wrapper(
        model,
        ignored_modules=[model.a],
        param_init_fn=initialize if initializes else None,
        auto_wrap_policy=policy,
        device_id=CPU,
    )
    assert {t.device.type for t in (*model.a.parameters(), *model.a.buffers())} == {"meta"}
    assert isinstance(wrapped.module.a[0].weight, nn.Parameter)
    model.a = nn.Identity()
    found = models.whole_states(wrapper, wrapped)
    assert {tensor.device for tensor in found.values()} == {CPU}
    return found, called


def meta_models() -> None:
    for initializes in (False, True):
        for policy in (None, "always_wrap_policy"):
            wanted, wanted_calls = materialized(
                torch_fsdp, initializes, policy and getattr(torch_fsdp.wrap, policy)
            )
            found, calls = materialized(
                sharding, initializes, policy and getattr(sharding.wrap, policy)
            )
            models.same(found, wanted)
            assert found["c.1.0.weight"].unique().tolist() == [40 if initializes else 4]
            assert sorted(calls) == sorted(wanted_calls)
            assert not [name for name in calls if name.startswith("a")]
            assert len(calls) == len(set(calls))


def test_m_21_an_ignored_module_stays_on_meta_while_the_rest_is_given_values(
    clusters: Callable,
) -> None:
    clusters(2).run(meta_models)


class Partly(nn.Module):
    """A layer to shard, a layer to leave alone, and states nobody has given a device."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sharded = nn.Linear(models.WIDTH, models.WIDTH)
        self.alone = nn.Linear(models.WIDTH, models.WIDTH)
        self.alone.register_buffer("offset", torch.ones(models.WIDTH))
        self.nowhere = nn.Linear(2, 2, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return self.alone(self.sharded(x)) + self.alone.offset


def ignoring(api: ModuleType, how: str, use_orig_params: bool) -> dict[str, Tensor]:
    """The gradients of a wrapped `Partly` that ignores two of its layers."""
    module = Partly()
    modules = [module.alone, module.nowhere]
    parameters = [parameter for each in modules for parameter in each.parameters()]
    untouched = {
        "weight": module.alone.weight,
        "bias": module.alone.bias,
        "offset": module.alone.offset,
    }
    addresses = {name: tensor.data_ptr() for name, tensor in untouched.items()}
    ignored = {
        "ignored_modules": {"ignored_modules": modules},
        "modules": {"ignored_states": modules},
        "parameters": {"ignored_states": parameters},
    }[how]
    if how != "parameters":  # where modules are ignored, their buffers are
        module.nowhere.register_buffer("offset", torch.empty(2, device="meta"))
    wrapper = api.FullyShardedDataParallel
    model = wrapper(module, device_id=CPU, use_orig_params=use_orig_params, **ignored)
    model(models.batch(0)).square().mean().backward()
    assert all(t.is_meta for t in (*module.nowhere.parameters(), *module.nowhere.buffers()))
    for name, tensor in untouched.items():
        assert getattr(module.alone, name) is tensor
        assert tensor.data_ptr() == addresses[name]
    assert module.alone.weight.shape == (models.WIDTH, models.WIDTH)
    ours = [p for p in model.parameters() if not any(p is other for other in parameters)]
    shard = torch.cat([p.grad.flatten() for p in ours if p.numel()])
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, shard)
    return {
        "sharded": torch.cat(shards),
        "weight": module.alone.weight.grad,
        "bias": module.alone.bias.grad,
    }


def ignored_states() -> None:
    replica = Partly()
    replica(models.batch(0)).square().mean().backward()
    own = {"weight": replica.alone.weight.grad, "bias": replica.alone.bias.grad}
    models.average_gradients(replica.sharded)
    mean = torch.cat([p.grad.flatten() for p in replica.sharded.parameters()])
    for api in (torch_fsdp, sharding):
        for how in ("ignored_modules", "modules", "parameters"):
            for use_orig_params in (False, True):
                found = ignoring(api, how, use_orig_params)
                models.same(found, {"sharded": mean, **own}, rtol=1e-5, atol=1e-6)
        linear = nn.Linear(2, 2)
        with pytest.warns(UserWarning, match="Trying to ignore the top-level module"):
            api.FullyShardedDataParallel(linear, ignored_modules=[linear], device_id=CPU)


def test_m_22_what_is_ignored_is_neither_moved_nor_sharded_nor_reduced(clusters: Callable) -> None:
    clusters(2).run(ignored_states)


@contextmanager
def environment(value: str | None) -> Iterator[None]:
    """Whether evaluation is said to run in full precision, while modules are built."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FSDP_USE_FULL_PREC_IN_EVAL", raising=False)
        if value is not None:
            patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", value)
        yield


def settings_that_disagree() -> None:
    x = models.batch(0)
    for api in (torch_fsdp, sharding):
        wrap = functools.partial(api.FullyShardedDataParallel, device_id=CPU)
        for name in ("use_orig_params", "limit_all_gathers"):
            for inner in (False, True):
                model = models.linears(3)
                model[1] = wrap(model[1], **{name: inner})
                model = wrap(model, **{name: not inner})
                attribute = "_use_orig_params" if name == "use_orig_params" else name
                with pytest.raises(
                    ValueError, match=f"Expects one homogeneous value for {attribute}"
                ):
                    model(x)
        for inner, outer in (("1", None), ("0", "1"), (None, "0"), ("1", "1")):
            model = models.linears(3)
            with environment(inner):
                model[1] = wrap(model[1])
            with environment(outer):
                model = wrap(model)
            if (inner == "1") == (outer == "1"):
                model(x)
            else:
                with pytest.raises(
                    ValueError, match="Expects one homogeneous value for _use_full_prec_in_eval"
                ):
                    model(x)


def test_m_23_nested_instances_must_agree_on_what_holds_for_the_whole(clusters: Callable) -> None:
    clusters(2).run(settings_that_disagree)


def containers() -> None:
    message = "FSDP will not all-gather parameters for containers that do not implement forward"
    for api in (torch_fsdp, sharding):
        for container in (
            nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]),
            nn.ModuleDict({"one": nn.Linear(3, 3)}),
        ):
            with pytest.warns(UserWarning, match=message):
                api.FullyShardedDataParallel(container, device_id=CPU)


def test_m_24_wrapping_a_container_that_has_no_forward_warns(clusters: Callable) -> None:
    clusters(2).run(containers)


def shown_settings(api: ModuleType, strategy: str) -> list[object]:
    """The public attributes of every instance, before, in and after a step."""
    seen: list[object] = []
    mixed = {"param_dtype": torch.float32, "keep_low_precision_grads": True}
    offload = api.CPUOffload(False) if strategy == "SHARD_GRAD_OP" else None

    class Watch(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append([unit.training_state.name for unit in units])
            return super().forward(x)

    model = nn.Sequential(Watch(4, 4), Watch(4, 4), nn.Linear(4, 3))
    model[1] = api.FullyShardedDataParallel(
        model[1], device_id=torch.device("cpu"), sharding_strategy=api.ShardingStrategy[strategy]
    )
    model = api.FullyShardedDataParallel(
        model,
        device_id=torch.device("cpu"),
        sharding_strategy=api.ShardingStrategy[strategy],
        mixed_precision=api.MixedPrecision(**mixed),
        backward_prefetch=api.BackwardPrefetch.BACKWARD_POST,
        forward_prefetch=True,
        cpu_offload=offload,
    )
    units = api.FullyShardedDataParallel.fsdp_modules(model)
    for unit in units:
        precision = unit.mixed_precision
        seen.append((unit.rank, unit.world_size, unit.process_group == dist.group.WORLD))
        seen.append((unit.backward_prefetch.name, unit.forward_prefetch, unit.limit_all_gathers))
        seen.append((precision.param_dtype, precision.keep_low_precision_grads))
        seen.append((unit.cpu_offload.offload_params, unit.sharding_strategy.name))
    model(torch.ones(2, 4)).sum().backward()
    with api.FullyShardedDataParallel.summon_full_params(model[1]):
        seen.append([unit.training_state.name for unit in units])
    seen.append([unit.training_state.name for unit in units])
    return seen


def settings_are_shown_alike(strategy: str) -> None:
    assert shown_settings(sharding, strategy) == shown_settings(torch_fsdp, strategy)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_the_public_attributes_of_an_instance_are_those_of_torch(
    clusters: Callable, strategy: str
) -> None:
    clusters(2).run(settings_are_shown_alike, strategy)


def test_a_param_init_fn_that_cannot_be_called_is_an_argument_error(clusters: Callable) -> None:
    with pytest.raises(Exception, match="Expected param_init_fn=42 to be callable") as caught:
        clusters(2).run(initialize_with_a_number)
    assert {name for name, _, _ in caught.value.errors.values()} == {"ArgumentError"}


def initialize_with_a_number() -> None:
    sharding.FullyShardedDataParallel(nn.Linear(2, 2, device="meta"), param_init_fn=42)
