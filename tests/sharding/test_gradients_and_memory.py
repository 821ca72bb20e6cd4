"""Who gets a gradient, and when gathered parameters are let go.

M-09 to M-12 of the behaviours asked of the wrapper class. Memory is seen from outside: the storages
that a layer's parameters had inside its forward hold no bytes once they are not needed.
"""

import copy
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp.wrap
from torch import Tensor, nn

import sharding
import sharding.wrap
from tests.sharding import models

CPU = torch.device("cpu")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


class Fork(nn.Module):
    """Two layers side by side: both outputs, or the first one's alone."""

    def __init__(self, uses_second: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(models.WIDTH, models.WIDTH)
        self.second = nn.Linear(models.WIDTH, models.WIDTH)
        self.uses_second = uses_second

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.first(x), self.second(x) if self.uses_second else None


def gradients_of_a_fork(api: ModuleType, **keywords: object) -> list[Tensor]:
    """The first layer's gradient shards of 4 backwards, the second layer's being None."""
    uses_second = bool(keywords.pop("uses_second"))
    model = api.FullyShardedDataParallel(
        Fork(uses_second),
        auto_wrap_policy=api.wrap.always_wrap_policy,
        device_id=CPU,
        **keywords,
    )
    found = []
    for step in range(4):
        model(models.batch(step))[0].square().mean().backward()
        used = [p.grad for p in model.module.first.parameters() if p.numel()]
        assert used
        assert all(gradient is not None for gradient in used)
        assert all(p.grad is None for p in model.module.second.parameters())
        found += [gradient.clone() for gradient in used]
    return found


def forks() -> None:
    for strategy in ("NO_SHARD", None):
        for uses_second in (True, False):
            for use_orig_params in (False, True):
                wanted, found = (
                    gradients_of_a_fork(
                        api,
                        sharding_strategy=strategy and api.ShardingStrategy[strategy],
                        uses_second=uses_second,
                        use_orig_params=use_orig_params,
                    )
                    for api in (torch_fsdp, sharding)
                )
                assert len(found) == len(wanted) >= 4
                for one, other in zip(found, wanted, strict=True):
                    torch.testing.assert_close(one.reshape(-1), other.reshape(-1))


@pytest.mark.thorough
def test_m_09_a_layer_outside_the_loss_gets_no_gradient(clusters: Callable) -> None:
    clusters(2).run(forks)


def drop_the_second_output(api: ModuleType, strategy: str, use_orig_params: bool) -> None:
    """Raise unless a fork whose second output leaves the loss trains as a local one does."""
    wrapper = api.FullyShardedDataParallel
    keywords = {
        "sharding_strategy": api.ShardingStrategy[strategy],
        "use_orig_params": use_orig_params,
        "device_id": CPU,
    }
    module = Fork()
    local = copy.deepcopy(module)
    watches = [models.Watch(module.first), models.Watch(module.second)]
    module.first = wrapper(module.first, **keywords)
    model = wrapper(module, **keywords)
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local_optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    for step in range(6):
        x = models.batch(step)
        before = models.states(local)
        for trained, its_optimizer in ((local, local_optimizer), (model, optimizer)):
            its_optimizer.zero_grad()
            a, b = trained(x)
            loss = a.square().mean() + (b.square().mean() if step < 2 else 0)
            loss.backward()
            if trained is model and strategy != "NO_SHARD":
                assert [watch.live_bytes for watch in watches] == [0, 0]
            if trained is local:
                models.average_gradients(local)
            its_optimizer.step()
        after = models.states(local)
        assert not torch.equal(before["first.weight"], after["first.weight"])
        assert torch.equal(before["second.weight"], after["second.weight"]) == (step >= 2)
        models.same(models.whole_states(wrapper, model), after, rtol=1e-5, atol=1e-6)
        assert [name for name, _ in model.named_parameters()] == names


def forks_that_lose_an_output() -> None:
    for strategy in STRATEGIES:
        for use_orig_params in (False, True):
            drop_the_second_output(sharding, strategy, use_orig_params)
            if (strategy, use_orig_params) != ("NO_SHARD", True):
                drop_the_second_output(torch_fsdp, strategy, use_orig_params)


@pytest.mark.thorough
def test_m_10_each_backward_frees_the_gathered_parameters_though_an_output_is_dropped(
    clusters: Callable,
) -> None:
    clusters(2).run(forks_that_lose_an_output)


def memory_over_a_step(api: ModuleType, strategy: str, use_orig_params: bool) -> None:
    """Raise unless a nested instance's memory lives as long as its strategy says."""
    wrapper = api.FullyShardedDataParallel
    keywords = {
        "sharding_strategy": api.ShardingStrategy[strategy],
        "use_orig_params": use_orig_params,
        "device_id": CPU,
    }
    layers = models.linears(3)
    whole = sum(p.numel() * p.element_size() for p in layers[0].parameters())
    watch = models.Watch(layers[0])
    in_forward, when_next_runs = [], []
    layers[0].register_forward_hook(lambda *_: in_forward.append(watch.live_bytes))
    layers[1].register_forward_pre_hook(lambda *_: when_next_runs.append(watch.live_bytes))
    model = wrapper(
        nn.Sequential(wrapper(layers[0], **keywords), wrapper(layers[1], **keywords), layers[2]),
        **keywords,
    )
    for step in range(3):
        output = model(models.batch(step))
        kept = strategy == "SHARD_GRAD_OP"
        assert in_forward.pop() >= whole
        assert (when_next_runs.pop() >= whole) == kept
        assert (watch.live_bytes >= whole) == kept
        if not kept:
            assert watch.live_bytes == 0
        output.square().mean().backward()
        assert watch.live_bytes == 0


def memory_of_both_strategies() -> None:
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        for use_orig_params in (False, True):
            for api in (torch_fsdp, sharding):
                memory_over_a_step(api, strategy, use_orig_params)


@pytest.mark.thorough
def test_m_11_full_shard_frees_after_forward_what_shard_grad_op_keeps_for_backward(
    clusters: Callable,
) -> None:
    clusters(2).run(memory_of_both_strategies)


def optimizers_in_backward() -> None:
    # Imported on the ranks, where warnings are no errors: this package scripts at import.
    from torch.distributed.optim import _apply_optimizer_in_backward

    for api in (torch_fsdp, sharding):
        wrapper = api.FullyShardedDataParallel
        for policy in (api.wrap.always_wrap_policy, None):
            model = wrapper(models.linears(2), auto_wrap_policy=policy, device_id=CPU)
            _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
            with pytest.raises(RuntimeError, match="only supported with use_orig_params=True"):
                model(models.batch(0))
        model = wrapper(
            models.linears(2),
            auto_wrap_policy=api.wrap.always_wrap_policy,
            device_id=CPU,
            use_orig_params=True,
        )
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        replica = models.linears(2)
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
        models.train_replica(replica, optimizer, range(2))
        for step in range(2):
            model(models.batch(step)).square().mean().backward()
            assert all(parameter.grad is None for parameter in model.parameters())
        models.same(
            models.whole_states(wrapper, model), models.states(replica), rtol=1e-5, atol=1e-6
        )


def test_m_12_an_optimizer_in_backward_needs_original_parameters_and_works_with_them(
    clusters: Callable,
) -> None:
    clusters(2).run(optimizers_in_backward)


def test_the_watch_used_here_counts_only_storages_that_live() -> None:
    layer = nn.Linear(3, 2)
    watch = models.Watch(layer)
    with pytest.raises(LookupError, match="no layer has run"):
        _ = watch.live_bytes
    layer(torch.ones(1, 3))
    assert watch.live_bytes == 4 * (6 + 2)
    layer.weight.untyped_storage().resize_(0)
    assert watch.live_bytes == 4 * 2
    del layer.bias
    assert watch.live_bytes == 0
