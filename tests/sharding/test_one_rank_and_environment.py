"""One rank alone shards nothing; an environment variable says how views are set.

M-27 and M-28 of the behaviours asked of the wrapper class.
"""

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

import sharding
from tests.sharding import models

CPU = torch.device("cpu")


def switches(api: ModuleType, strategy: str | None) -> tuple[nn.Module, list[str]]:
    """A network wrapped with a strategy, and what is said about switching to another one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = api.FullyShardedDataParallel(
            models.network(),
            sharding_strategy=strategy and api.ShardingStrategy[strategy],
            device_id=CPU,
            use_orig_params=True,
        )
    texts = [str(w.message) for w in caught if w.category is UserWarning]
    return model, [text for text in texts if "is switching" in text]


def alone() -> None:
    for api in (torch_fsdp, sharding):
        for strategy, named in (
            ("FULL_SHARD", "FULL_SHARD"),
            (None, "FULL_SHARD"),
            ("SHARD_GRAD_OP", "SHARD_GRAD_OP"),
        ):
            model, said = switches(api, strategy)
            (text,) = said
            assert text == (
                f"FSDP is switching to use `NO_SHARD` instead of ShardingStrategy.{named} since "
                "the world size is 1."
            )
            assert model.sharding_strategy == api.ShardingStrategy.NO_SHARD
            trains_like_a_plain_one(model)
        model, said = switches(api, "NO_SHARD")
        assert said == []
        trains_like_a_plain_one(model)


def trains_like_a_plain_one(model: nn.Module) -> None:
    plain = models.network()
    wanted, found = (
        models.train(each, torch.optim.Adam(models.trainable(each), lr=0.01), range(3))
        for each in (plain, model)
    )
    assert found == pytest.approx(wanted)


def test_m_27_one_rank_alone_switches_to_no_shard_and_says_so(clusters: Callable) -> None:
    clusters(1).run(alone)


class Counting(nn.Module):
    """Counts how often its own `__setattr__` is asked to set its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = [0]
        self.weight = nn.Parameter(torch.ones(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            self.settings[0] += 1
        super().__setattr__(name, value)


def settings(api: ModuleType, variable: str | None, use_orig_params: bool) -> int:
    """How often a forward and a backward set the weight through the module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FSDP_USE_UNSAFE_SETATTR", raising=False)
        if variable is not None:
            patch.setenv("FSDP_USE_UNSAFE_SETATTR", variable)
        module = Counting()
        model = api.FullyShardedDataParallel(module, device_id=CPU, use_orig_params=use_orig_params)
    module.settings[0] = 0
    model(models.batch(0, features=5)).square().sum().backward()
    return module.settings[0]


def ways_to_set() -> None:
    for api in (torch_fsdp, sharding):
        for use_orig_params in (False, True):
            assert settings(api, None, use_orig_params) > 0
            assert settings(api, "1", use_orig_params) == 0
            assert settings(api, "0", use_orig_params) > 0


def test_m_28_an_environment_variable_bypasses_setattr_when_views_are_set(
    clusters: Callable,
) -> None:
    clusters(2).run(ways_to_set)
