"""Ranks that run different units: an error that names both sides, never another unit's bytes.

Every case runs on a process group of its own with a short time-out, so that one set of processes
serves a whole table. A step that all ranks run alike comes first, then two in which they differ.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import sharding
from sharding import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from sharding.composable import fully_shard as composable
from sharding.engine.composition import (
    ANSWER_SECONDS,
    FIRST_TAG,
    Composition,
    Item,
    Purpose,
    key_of,
    tag_of,
)
from sharding.errors import CkptError, MisuseError, TransferError
from sharding.wrap import ModuleWrapPolicy

SECONDS = 5.0
"""The time-out of a case's process group."""
SLACK_SECONDS = 20.0
"""What a loaded machine may add."""
STEPS = 3
DOORS = ("fully_shard", "wrapper", "wrapper with original parameters", "composable")


class Block(nn.Module):
    """A residual block of one layer; `width` rows are divided over ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(x))


class Net(nn.Module):
    """Blocks of one size that run in the order of `path`."""

    def __init__(self, width: int = 16, blocks: int = 4) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.path = list(range(blocks))
        self.without_gradients: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.without_gradients:
            with torch.no_grad():
                self.blocks[index](x)
        for index in self.path:
            x = self.blocks[index](x)
        return x


@dataclass
class Program:
    """What one rank runs: a module, and how."""

    net: Net
    backward: bool = True
    reduces: bool = True


Change = Callable[[Program], None]


def skip(*indices: int) -> Change:
    def change(program: Program) -> None:
        program.net.path = [index for index in program.net.path if index not in indices]

    return change


def run_in(*path: int) -> Change:
    def change(program: Program) -> None:
        program.net.path = list(path)

    return change


def run_also(*indices: int) -> Change:
    def change(program: Program) -> None:
        program.net.without_gradients = list(indices)

    return change


def no_backward(program: Program) -> None:
    program.backward = False


def no_reduction(program: Program) -> None:
    program.reduces = False


def freeze(program: Program) -> None:
    for parameter in program.net.blocks[1].parameters():
        parameter.requires_grad_(False)


def fail(program: Program) -> None:
    program.net.path = [0, 1, 9]


@dataclass(frozen=True)
class Case:
    """How ranks differ, by rank; what comes last counts for all further ranks."""

    changes: tuple[Change | None, ...] = (None,)
    """What a rank changes after the first step."""
    settings: tuple[dict[str, Any], ...] = ({},)
    """Arguments of the entry point."""
    width: int = 16
    blocks: tuple[int, ...] = (4,)
    doors: tuple[str, ...] = DOORS
    may_be_right: bool = False
    """Whether all ranks may go on, with the right weights."""
    needs_nothing: int = -1
    """The rank that runs nothing in which it waits for others, and so goes on."""
    in_units: bool = False
    """Whether ranks shard different units, which they compare before the first all-gather."""

    def of(self, values: tuple[Any, ...]) -> Any:
        return values[min(dist.get_rank(), len(values) - 1)]


LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
PER_PARAMETER, FLAT = DOORS[:1], DOORS[1:]
CASES = {
    "one skips a block": Case((None, skip(2))),
    "one skips the first": Case((skip(0), None)),
    "one skips the last": Case((None, skip(3))),
    "one skips two": Case((None, skip(0, 3))),
    "each skips another": Case((skip(1), skip(2))),
    "each runs half": Case((skip(0, 1), skip(2, 3))),
    "large blocks, one skips": Case((None, skip(2)), width=640),
    "large blocks, each skips another": Case((skip(1), skip(2)), width=640),
    "another order": Case((None, run_in(0, 2, 1, 3))),
    "the reverse order": Case((None, run_in(3, 2, 1, 0))),
    "a unit twice": Case((None, run_in(0, 1, 1, 2, 3)), may_be_right=True),
    "the first unit again at the end": Case((run_in(0, 1, 2, 3, 0), None)),
    "another forward, the same backward": Case((None, run_also(2)), may_be_right=True),
    "a rank without backward": Case((None, no_backward)),
    "a rank runs none": Case((None, run_in()), needs_nothing=1),
    "without shards, one skips a block": Case(
        (None, skip(2)),
        settings=({"sharding_strategy": ShardingStrategy.NO_SHARD},),
        doors=("wrapper", "wrapper with original parameters"),
    ),
    "rows for two ranks": Case((None, skip(2)), width=2),
    "a rank fails by itself": Case((None, fail)),
    "a rank that does not reduce": Case((None, no_reduction), doors=DOORS[:3]),
    "another dtype of the same size": Case(
        settings=tuple({"mp_policy": MixedPrecisionPolicy(param_dtype=d)} for d in LOW.values()),
        doors=PER_PARAMETER,
        in_units=True,
    ),
    "another dtype of the same size, flat": Case(
        settings=tuple({"mixed_precision": MixedPrecision(param_dtype=d)} for d in LOW.values()),
        doors=FLAT,
        in_units=True,
    ),
    "another dtype of reductions": Case(
        settings=({}, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}),
        doors=PER_PARAMETER,
        in_units=True,
    ),
    "freed after forward on one": Case(
        settings=({"reshard_after_forward": True}, {"reshard_after_forward": False}),
        doors=PER_PARAMETER,
        in_units=True,
    ),
    "frozen on one": Case((None, freeze), doors=PER_PARAMETER),
    "a unit more on one": Case(blocks=(4, 5), in_units=True),
}
QUICK = (
    ("fully_shard", "each skips another"),
    ("composable", "a rank without backward"),
)
THREE = (
    *("one skips a block", "each runs half", "another order", "a rank without backward"),
    "rows for two ranks",
)


def sharded(door: str, net: Net, group: dist.ProcessGroup, settings: dict[str, Any]) -> Any:
    """The net, every block a unit, through a entry point."""
    if door == "fully_shard":
        settings = {"mesh": DeviceMesh.from_group(group, "cpu"), **settings}
        for block in net.blocks:
            sharding.fully_shard(block, **settings)
        return sharding.fully_shard(net, **settings)
    settings = {"process_group": group, **settings}
    policy = ModuleWrapPolicy({Block})
    if door == "composable":
        return composable(net, policy=policy, **settings)
    original = "original" in door
    settings = {"use_orig_params": original, "device_id": torch.device("cpu"), **settings}
    return FullyShardedDataParallel(net, auto_wrap_policy=policy, **settings)


def loss_of(program: Program, model: Any, number: int) -> torch.Tensor:
    """Of a batch of this rank's own."""
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    x: torch.Tensor = torch.randn(2, program.net.width, generator=generator)
    loss: torch.Tensor = model(x).square().mean()
    return loss


def train(program: Program, model: Any, change: Change | None) -> str:
    """Steps of a sharded model until an error, whose text this is."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(STEPS):
        if number == 1 and change is not None:
            change(program)
        wrapped = isinstance(model, FullyShardedDataParallel)
        if not program.reduces and not wrapped:
            model.set_requires_gradient_sync(False)
        began = monotonic()
        try:
            with nullcontext() if program.reduces or not wrapped else model.no_sync():
                loss = loss_of(program, model, number)
                if program.backward and loss.requires_grad:
                    loss.backward()
        except MisuseError as error:
            return str(error)
        except TransferError as error:
            assert monotonic() - began < SECONDS + ANSWER_SECONDS + SLACK_SECONDS
            return str(error)
        except IndexError as error:
            return f"its own: {error}"
        if program.reduces:
            optimizer.step()
            optimizer.zero_grad()
    return ""


def weights(case: Case) -> list[torch.Tensor]:
    """What plain modules on all ranks, their gradients averaged, come to by the same steps."""
    torch.manual_seed(0)
    program = Program(Net(case.width, case.of(case.blocks)))
    optimizer = torch.optim.SGD(program.net.parameters(), lr=0.1)
    change = case.of(case.changes)
    for number in range(STEPS):
        if number == 1 and change is not None:
            change(program)
        loss_of(program, program.net, number).backward()
        for parameter in program.net.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in program.net.parameters()]


def whole(model: nn.Module) -> list[torch.Tensor]:
    """The weights of a sharded model."""
    found = model.state_dict().values()
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in found]


@cache
def warm_up(door: str) -> None:
    """A step on the default group: what is imported at first use outlasts a case's time-out."""
    model = sharded(door, Net(blocks=1), dist.group.WORLD, {})
    model(torch.ones(2, 16)).sum().backward()


def own_group(*ranks: int) -> dist.ProcessGroup:
    """A group with a short time-out, of all ranks or some; all are here when it is made."""
    dist.barrier()
    group = dist.new_group(list(ranks) or None, timeout=timedelta(seconds=SECONDS))
    assert isinstance(group, dist.ProcessGroup) or dist.get_rank() not in ranks
    return group  # type: ignore[return-value]


def mismatch(door: str, name: str) -> str:
    """What a rank ends with: "right", "wrong", "went on", or the text of its error."""
    case = CASES[name]
    warm_up(door)
    group = own_group()
    torch.manual_seed(0)
    program = Program(Net(case.width, case.of(case.blocks)))
    model = sharded(door, program.net, group, case.of(case.settings))
    text = train(program, model, case.of(case.changes))
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    if any(texts):
        return text or "went on"
    pairs = zip(whole(model), weights(case), strict=True)
    return "right" if all(torch.allclose(a, b, atol=1e-6) for a, b in pairs) else "wrong"


def check(door: str, name: str, ended: list[str]) -> None:
    """Every rank has an error that names both sides, or all are right where that may be."""
    if CASES[name].may_be_right and set(ended) == {"right"}:
        return
    if CASES[name].in_units:
        assert len(set(ended)) == 1, (door, name, ended)
        assert "shard the same modules on all ranks" in ended[0], (door, name, ended)
        return
    for rank, text in enumerate(ended):
        if text.startswith("its own: "):
            continue
        if rank == CASES[name].needs_nothing and text == "went on":
            continue
        assert text.startswith(f"rank {rank} waited in the "), (door, name, ended)
        others = [f"Rank {r} " in text for r in range(len(ended)) if r != rank]
        assert all(others), (door, name, ended)
        assert "start the job again" in text


def run_cases(cluster: Any, cases: Iterable[tuple[str, str]]) -> None:
    for door, name in cases:
        check(door, name, cluster.run(mismatch, door, name))


@pytest.mark.thorough
def test_ranks_that_run_different_units_all_raise_and_name_both_sides(
    doomed_cluster: Callable[..., Any],
) -> None:
    run_cases(doomed_cluster(2), QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_no_difference_between_two_ranks_is_silent(
    doomed_cluster: Callable[..., Any], door: str
) -> None:
    names = [name for name, case in CASES.items() if door in case.doors]
    run_cases(doomed_cluster(2), ((door, name) for name in names))


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_one_of_three_ranks_that_differs_ends_all_three(
    doomed_cluster: Callable[..., Any], door: str
) -> None:
    run_cases(doomed_cluster(3), ((door, name) for name in THREE))


# Ranks that have sharded different units: an error on all of them, before any parameter travels.


def ignored_by(door: str, net: Net) -> dict[str, Any]:
    """Arguments with which each rank leaves out another block."""
    block = net.blocks[dist.get_rank()]
    if door == "fully_shard":
        return {"ignored_params": set(block.parameters())}
    return {"ignored_modules": [block]}


Use = Callable[[Any], object]
USES: dict[str, Use] = {
    "forward": lambda model: model(torch.ones(2, 16)),
    "summon_full_params": lambda model: FullyShardedDataParallel.summon_full_params(
        model
    ).__enter__(),
    "state_dict": lambda model: model.state_dict(),
    "load_state_dict": lambda model: model.load_state_dict({}, strict=False),
}


def errors_of_uses(door: str) -> dict[str, str]:
    """By use, the error of a model whose ranks ignore different blocks."""
    found = {}
    for name in USES if door in FLAT else ("forward",):
        net = Net()
        model = sharded(door, net, dist.group.WORLD, ignored_by(door, net))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        try:
            USES[name](model)
            found[name] = "none"
        except MisuseError as error:
            found[name] = str(error)
        dist.barrier()  # the group can still be used
        after = [parameter.detach() for parameter in model.parameters()]
        assert all(map(torch.equal, before, after))
    return found


def test_units_that_differ_are_an_error_with_the_names_before_anything_travels(
    clusters: Callable[..., Any],
) -> None:
    for door in DOORS:
        first, second = clusters(2).run(errors_of_uses, door)
        assert first == second
        for use, text in first.items():
            assert text.startswith("the ranks have different sharded parameters of the root"), use
            for rank, other in ((0, 1), (1, 0)):
                layer = f"blocks.{other}.layer"
                has = f"rank {rank} has {layer}.weight, {layer}.bias, which rank {other} lacks"
                assert has in text, use


def replaced_on_one_rank(group_of: Callable[[], dist.ProcessGroup], steps: int) -> list[str]:
    """By use, the error after rank 0 has put a tensor of another shape into the first block."""
    found = []
    for door in ("fully_shard", "wrapper with original parameters"):
        for name in USES if door in FLAT else ("forward",):
            net = Net(blocks=2)
            model = sharded(door, net, group_of(), {})
            for _ in range(steps):
                model(torch.ones(2, 16)).sum().backward()
            if dist.get_rank() == 0:
                weight = nn.Parameter(torch.ones(3, 4))
                net.blocks[0].layer.register_parameter("weight", weight)
            with pytest.raises(CkptError) as caught:
                USES[name](model)
            found.append(f"{type(caught.value).__name__}: {caught.value}")
            dist.barrier()  # the group can still be used
    return found


def replaced_before_a_step() -> list[str]:
    return replaced_on_one_rank(lambda: dist.group.WORLD, 0)


def replaced_after_a_step() -> list[str]:
    warm_up("fully_shard")
    return replaced_on_one_rank(own_group, 1)


def test_a_parameter_of_another_shape_on_one_rank_is_an_error_with_its_number_on_all(
    clusters: Callable[..., Any],
) -> None:
    first, second = clusters(2).run(replaced_before_a_step)
    assert len(first) == 1 + len(USES)
    for own, told in zip(first, second, strict=True):
        assert "layer.weight" in own
        assert told.startswith("RankError: the comparison of sharded parameters of the root ")
        assert told.endswith(f"failed on rank 0 with {own}")


@pytest.mark.slow
def test_a_parameter_of_another_shape_after_a_step_is_named_when_the_wait_is_over(
    doomed_cluster: Callable[..., Any],
) -> None:
    first, second = doomed_cluster(2).run(replaced_after_a_step)
    for own, told in zip(first, second, strict=True):
        assert told.startswith("TransferError: rank 1 waited in the all-gather of ")
        assert f"Rank 0 has failed with {own}." in told


def other_shards() -> list[str]:
    """The errors of models that differ between ranks in other ways."""
    rank, found = dist.get_rank(), []
    wrapped = FullyShardedDataParallel
    policies = (ModuleWrapPolicy({Block}), ModuleWrapPolicy({nn.Linear}))

    def wider() -> Any:
        net = Net(blocks=2)
        net.blocks[rank] = Block(17)
        return sharding.fully_shard(net)

    ways: list[Callable[[], Any]] = [
        lambda: wrapped(Net(blocks=2), auto_wrap_policy=policies[rank]),
        wider,
        lambda: sharding.fully_shard(Net(blocks=2).to([torch.float32, torch.float64][rank])),
        lambda: sharding.fully_shard(Net(blocks=2), reshard_after_forward=bool(rank)),
    ]
    for way in ways:
        model = way()
        with pytest.raises(MisuseError) as caught:
            model(torch.ones(2, 16))
        found.append(str(caught.value))
    undivided = Net(blocks=2)
    ignored = {"ignored_modules": [undivided.blocks[rank]]}
    model = wrapped(undivided, sharding_strategy=ShardingStrategy.NO_SHARD, **ignored)
    with pytest.raises(MisuseError) as caught:
        model(torch.ones(2, 16)).sum().backward()
    return [*found, str(caught.value)]


def test_units_that_differ_in_one_property_are_an_error_that_says_which(
    clusters: Callable[..., Any],
) -> None:
    texts, others = clusters(2).run(other_shards)
    assert texts == others
    differs = "blocks.0.layer.weight differs between the ranks"
    parts = (
        f"{differs}: unit blocks.0 on rank 0 and blocks.0.layer on rank 1",
        f"{differs}: shape (17, 17) on rank 0 and (16, 16) on rank 1",
        "dtype float32 on rank 0 and float64 on rank 1",
        "reshard_after_forward False on rank 0 and True on rank 1",
        "rank 1 has blocks.0.layer.weight, blocks.0.layer.bias, which rank 0 lacks",
    )
    for text, part in zip(texts, parts, strict=True):
        assert part in text


def synchronized(door: str, policy: bool) -> tuple[str, bool]:
    """The error of `sync_module_states`, and whether the module is as it was."""
    torch.manual_seed(dist.get_rank())
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    given: dict[str, Any] = {"sync_module_states": True, **ignored_by(door, net)}
    if not policy:
        wrap = composable if door == "composable" else FullyShardedDataParallel
    with pytest.raises(MisuseError) as caught:
        sharded(door, net, dist.group.WORLD, given) if policy else wrap(net, **given)
    after = net.state_dict()
    same = list(before) == list(after) and all(torch.equal(before[n], after[n]) for n in before)
    return str(caught.value), same


@pytest.mark.parametrize("policy", [False, True])
def test_states_are_synchronized_only_between_the_same_modules(
    clusters: Callable[..., Any], policy: bool
) -> None:
    for door in ("composable", "wrapper"):
        (text, same), (other, same_there) = clusters(2).run(synchronized, door, policy)
        assert text == other
        assert same
        assert same_there
        unit = ", the unit blocks.1" if policy else ""
        layer = "blocks.1.layer"
        assert f"rank 0 has {layer}.weight, {layer}.bias{unit}, which rank 1 lacks" in text


def alone() -> bool:
    """Rank 1 alone runs a model whose parameters no rank divides."""
    settings = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    model = sharded("wrapper", Net(), dist.group.WORLD, settings)
    if dist.get_rank() == 1:
        model(torch.ones(2, 16))
    model(torch.ones(2, 16)).sum().backward()
    return True


def test_a_rank_can_run_a_forward_alone_that_gathers_nothing(clusters: Callable[..., Any]) -> None:
    assert clusters(2).run(alone) == [True, True]


# Other ways to differ.


def two_models() -> str:
    """Two models of one form on one group, which ranks run in different orders."""
    warm_up("fully_shard")
    group = own_group()
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(sharded("fully_shard", Net(), group, {}))
    x = torch.ones(2, 16)
    try:
        for number in range(2):
            order = models if number == 0 or dist.get_rank() == 0 else models[::-1]
            for model in order:
                model(x).square().mean().backward()
    except TransferError as error:
        return str(error)
    return "went on"


@pytest.mark.slow
def test_models_that_ranks_run_in_different_orders_never_take_each_others_bytes(
    doomed_cluster: Callable[..., Any],
) -> None:
    for text in doomed_cluster(2).run(two_models):
        assert "but of another parameter group" in text


def in_a_replica(door: str) -> str:
    """Two replicas of two shards; rank 3 skips a block."""
    warm_up(door)
    rank = dist.get_rank()
    shards = [own_group(0, 1), own_group(2, 3)][rank // 2]
    replicas = [own_group(0, 2), own_group(1, 3)][rank % 2]
    torch.manual_seed(0)
    program = Program(Net())
    settings: dict[str, Any] = {
        "process_group": (shards, replicas),
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
    }
    if door == "fully_shard":
        mesh = DeviceMesh.from_group(
            [replicas, shards],
            "cpu",
            mesh=torch.tensor([[0, 1], [2, 3]]),
            mesh_dim_names=("replicate", "shard"),
        )
        settings = {"mesh": mesh}
    model = sharded(door, program.net, shards, settings)
    return train(program, model, skip(2) if rank == 3 else None)


@pytest.mark.slow
@pytest.mark.parametrize("door", ["fully_shard", "wrapper"])
def test_a_rank_that_differs_in_one_replica_ends_all_replicas(
    doomed_cluster: Callable[..., Any], door: str
) -> None:
    for rank, text in enumerate(doomed_cluster(4).run(in_a_replica, door)):
        assert text.startswith(f"rank {rank} waited in the ")
        assert "start the job again" in text


def by_collectives() -> str:
    """Each rank skips another block, and the library's collectives cannot tell."""
    os.environ["SHARDING_TRANSPORT"] = "collectives"
    try:
        return mismatch("fully_shard", "each skips another")
    finally:
        del os.environ["SHARDING_TRANSPORT"]


def test_collectives_of_unlike_units_are_an_error_before_their_sums_are_used(
    clusters: Callable[..., Any],
) -> None:
    for rank, text in enumerate(clusters(2).run(by_collectives)):
        assert text.startswith(f"rank {rank} took part in the reduce-scatter of blocks.3")
        assert f"Rank {1 - rank} waited in the reduce-scatter of blocks.3" in text


# What the tags say.


def items(*names: str, sequence: int = 1) -> Composition:
    return Composition(
        tuple(Item(n, key_of(0, [n], [(4,)]), Purpose.ALL_GATHER, sequence) for n in names)
    )


def test_messages_that_are_unlike_in_anything_have_different_tags() -> None:
    one, two = torch.zeros(4), [torch.zeros(4), torch.zeros(8)]
    first = items("a", "b")
    tags = [
        tag_of(composition.digest, tensors)
        for composition in (
            first,
            items("a"),
            items("b", "a"),
            items("a", "c"),
            items("a", "b", sequence=2),
            replace(first, stage=1),
            Composition(
                tuple(replace(item, purpose=Purpose.REDUCE_SCATTER) for item in first.items)
            ),
        )
        for tensors in ([one], [one[:3]], two, two[::-1], [one.to(torch.int32)], [one.half()])
    ]
    assert len(set(tags)) == len(tags)
    assert all(FIRST_TAG <= tag < 1 << 31 for tag in tags)


def test_a_tag_is_the_same_in_every_process_and_version() -> None:
    assert key_of(3, ["a.weight"], [(2, 5)]) == 17602404362784560944
    assert tag_of(items("a", "b").digest, [torch.zeros(4)]) == 1925558861


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((1, ["a"], [(4,)]), other)
        for other in [(2, ["a"], [(4,)]), (1, ["b"], [(4,)]), (1, ["a"], [(2, 2)])]
    ],
)
def test_parameter_groups_differ_by_number_names_and_shapes(first: Any, second: Any) -> None:
    assert key_of(*first) != key_of(*second)


def test_a_composition_of_many_parameter_groups_is_named_in_short() -> None:
    text = "the all-gather of a (number 1), b (number 1), c (number 1), d (number 1) and 2 more"
    assert str(items(*"abcdef")) == text


# What comes after the error.

ENDS = """
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from sharding import fully_shard

rank, store, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
fully_shard(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()  # imports what it needs
dist.barrier()
group = dist.new_group(timeout=timedelta(seconds=5))


class Net(nn.Sequential):
    skip = None

    def forward(self, x):
        for index, layer in enumerate(self):
            if index != self.skip:
                x = layer(x)
        return x


def main():
    torch.manual_seed(0)
    width = 640 if how == "large units" else 16
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    layers = [fully_shard(nn.Linear(width, width), mesh=mesh) for _ in range(4)]
    model = fully_shard(Net(*layers), mesh=mesh)
    before = {name: t.to_local().clone() for name, t in model.state_dict().items()}
    x = torch.ones(2, width)
    model(x).sum().backward()
    model.skip = rank + 1
    for attempt in range(2):
        try:
            model(x).square().mean().backward()
        except RuntimeError as error:
            print("raised", flush=True)
    model.zero_grad()
    for name, t in model.state_dict().items():
        assert torch.equal(t.to_local(), before[name]), name
    return model


model = main()
if how == "lets go of all":
    del model
if how != "just ends":
    dist.destroy_process_group()
print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["just ends", "destroys the group", "lets go of all", "large units"]
)
def test_a_process_saves_its_shards_and_ends_as_any_other_after_the_error(
    tmp_path: Path, how: str
) -> None:
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store"), how],
            env={**environment, "PYTHONWARNINGS": "ignore"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            said, _ = process.communicate(timeout=200)
            assert said.splitlines()[-3:] == ["raised", "raised", "done"], said
            assert process.returncode == 0, said
    finally:
        for process in ranks:
            process.kill()
