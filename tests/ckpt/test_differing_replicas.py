"""Replicas that differ: one rank's are stored in whole, and named; or the save is refused."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import ckpt
from ckpt.plan.save_plan import SPLIT_BYTES, choose_layouts
from ckpt.state.flatten import FlatState, Leaf
from ckpt.state.memory import SAMPLE_BYTES, _gather_sample, take_samples
from ckpt.transfer.replica_hashes import ReplicaHashes
from formats.dtypes import BY_NAME
from formats.native.manifest import StoredTensor
from sharding.layout import Layout, Mesh, Only
from sharding.layout import Replicate as Same
from sharding.layout import Shard as Cut

DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.uint8, torch.int64, torch.complex64]
DTYPES += [torch.complex128, torch.float8_e4m3fn]


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of random bytes."""
    torch.manual_seed(3)
    empty = torch.empty(shape, dtype=dtype)
    most = 2 if dtype == torch.bool else 256
    given = torch.randint(most, (empty.nbytes,), dtype=torch.uint8)
    return given.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (65,), (8, 9), (3, 5, 7), (200, 33), (0, 3)])
def test_a_sample_is_of_the_elements_however_they_lie(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = filled(shape, dtype)
    sample = take_samples([tensor])[0]
    others = [tensor.T.contiguous().T if tensor.ndim == 2 else tensor.clone()]
    others.append(torch.stack([tensor, tensor], -1)[..., 0])
    others.append(torch.cat([filled((1,), torch.uint8), tensor.reshape(-1).view(torch.uint8)])[1:])
    for other in others:
        assert bytes(take_samples([other])[0]) == bytes(sample)
    if tensor.numel():
        assert bytes(_gather_sample(tensor).numpy()) == bytes(sample)
        stored = tensor.reshape(-1).view(torch.uint8).numpy()
        if len(stored) <= SAMPLE_BYTES:
            assert bytes(sample[: len(stored)]) == bytes(stored)
        assert {sample[0], sample[-1]} == {stored[0], stored[-1]}


def test_a_sample_of_what_is_conjugated_or_negated_is_of_its_values() -> None:
    lazy = torch.randn(50, dtype=torch.complex64).conj()
    assert np.array_equal(take_samples([lazy]), take_samples([lazy.resolve_conj()]))
    assert np.array_equal(take_samples([lazy.imag]), take_samples([lazy.imag.resolve_neg()]))
    assert not np.array_equal(take_samples([lazy]), take_samples([lazy.conj()]))


GROUPS = st.sampled_from(
    [
        Layout((4,), Mesh.grid(("world",), (4,)), (Same(),)),
        Layout((4,), Mesh.of_ranks(("stage",), (2,), (1, 3)), (Same(),)),
        Layout((4,), Mesh.of_ranks(("stage",), (3,), (3, 0, 2)), (Same(),)),
        Layout((4,), Mesh.grid(("dp", "fsdp"), (2, 2)), (Same(), Cut(0))),
        Layout((4,), Mesh.of_ranks(("fsdp", "dp"), (2, 2), (0, 2, 1, 3)), (Cut(0), Same())),
        Layout((4,), Mesh.grid(("a", "b"), (2, 2)), (Same(), Same())),
        Layout((4,), Mesh.grid(("world",), (4,)), (Cut(0),)),
    ]
)


def leaf(name: str, local: torch.Tensor, layout: Layout) -> Leaf:
    return Leaf(name, BY_NAME["F32"], local, layout, local)


@pytest.mark.parametrize("way", ["sample", "check"])
@given(layouts=st.lists(GROUPS, min_size=1, max_size=6), data=st.data())
def test_the_ranks_numbers_add_up_to_zero_exactly_where_all_replicas_are_equal(
    way: Any, layouts: list[Layout], data: st.DataObject
) -> None:
    tensors = {f"m.{i}": StoredTensor((4,), BY_NAME["F32"], x) for i, x in enumerate(layouts)}
    bad = data.draw(st.none() | st.tuples(st.sampled_from(sorted(tensors)), st.integers(0, 3)))
    numbers, states = [], []
    for rank in range(4):
        leaves = {}
        for name, tensor in tensors.items():
            shape = tensor.layout.local_shape(rank)
            if tensor.layout.mesh.coordinate(rank) is not None:
                first = tensor.layout.pieces(rank)[0].box.lo[0]
                local = torch.arange(first, first + shape[0], dtype=torch.float32)
                if bad == (name, rank):
                    local[-1] = -1
                leaves[name] = leaf(name, local, tensor.layout)
        states.append(FlatState(leaves, {}, {}))
        numbers.append(ReplicaHashes(way, rank).weigh(states[-1], tensors))
    differs = False
    if bad is not None and bad[0] in states[bad[1]].leaves:
        differs = tensors[bad[0]].layout.replicas > 1
    assert (sum(numbers) % (1 << 64) != 0) == differs


def test_what_differs_is_stored_by_the_replica_of_the_lowest_rank_with_all_of_its_module() -> None:
    def on(mesh: Mesh, *placements: Any, rows: int = 4) -> StoredTensor:
        return StoredTensor((rows,), BY_NAME["F32"], Layout((rows,), mesh, placements))

    world, odd = Mesh.grid(("world",), (4,)), Mesh.of_ranks(("dp", "tp"), (2, 2), (3, 1, 2, 0))
    tensors = {
        "a.bn.mean": on(world, Same()),
        "a.bn.var": on(world, Same(), rows=SPLIT_BYTES),
        "a.bn.sub.w": on(world, Same(), rows=SPLIT_BYTES),
        "a.w": on(odd, Same(), Cut(0)),
        "b.w": on(odd, Same(), Cut(0), rows=SPLIT_BYTES),
    }
    usual = choose_layouts(tensors)
    stored = choose_layouts(tensors, ["a.bn.var", "a.w"])
    for name in ("a.bn.sub.w", "b.w"):
        assert stored[name] == usual[name]
    for name in ("a.bn.mean", "a.bn.var"):
        assert stored[name].layout.placements == (Only(0),)
    assert stored["a.w"].layout.placements == (Only(1), Cut(0))  # ranks 2 and 0


@contextmanager
def telling() -> Iterator[list[str]]:
    """What is warned of inside."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(w.message) for w in caught if w.category is ckpt.ReplicasWarning]


def save_batch_norms(folder: str, blocking: bool) -> tuple[list[str], dict[str, list[float]]]:
    """DDP with BatchNorm by torch's defaults, whose statistics differ after a step, and an EMA."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.BatchNorm1d(16))]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    torch.manual_seed(rank)
    model(torch.randn(4, 16)).sum().backward()
    average = torch.full((512, 512), float(rank))
    with telling() as said:
        handle = ckpt.save(folder, {"model": model, "ema": {"w": average}}, blocking=blocking)
        if handle is not None:
            handle.wait()
    return said, {k: v.flatten().tolist() for k, v in model.module.state_dict().items()}


@pytest.mark.parametrize("blocking", [True, False])
def test_statistics_and_averages_that_differ_come_from_the_lowest_rank_alone(
    clusters: Callable, tmp_path: Path, blocking: bool
) -> None:
    told = clusters(2).run(save_batch_norms, str(tmp_path), blocking)
    saved: Any = ckpt.read(tmp_path)
    for name, values in told[0][1].items():
        assert saved["model"][name].flatten().tolist() == values, name
    assert told[0][1]["1.running_mean"] != told[1][1]["1.running_mean"]
    assert torch.equal(saved["ema"]["w"], torch.zeros(512, 512))
    assert told[1][0] == []
    [said] = told[0][0]
    assert "ema.w (rank 1); model.1.running_mean (rank 1); model.1.running_var (rank 1)" in said
    assert "and 9 more tensors; they are stored as the lowest rank has them" in said
    assert "num_batches" not in said
    assert "weight" not in said


def save_many(folder: str, replicas: str) -> tuple[str, tuple[str, ...]]:
    """The text and the names of a warning or error of many replicas, most without interest."""
    rank = dist.get_rank()
    model = nn.Sequential(*[nn.BatchNorm1d(4) for _ in range(10)])
    for layer in model:
        layer.running_mean.add_(rank)
    model[9].weight.data.add_(rank)
    optim = {"state": {"9.weight": {"exp_avg": torch.full((4,), float(rank))}}}
    state = {"model": model, "optim": optim, "ema": torch.full((9,), float(rank))}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            ckpt.save(folder, state, replicas=replicas)  # type: ignore[arg-type]
        except ckpt.StateError as error:
            return str(error), error.names
    for each in caught:
        if isinstance(each.message, ckpt.ReplicasWarning):
            return str(each.message), each.message.tensors
    return "", ()


@pytest.mark.parametrize("replicas", ["sample", "check"])
def test_of_many_replicas_that_differ_all_names_are_told_and_loose_tensors_first(
    clusters: Callable, tmp_path: Path, replicas: str
) -> None:
    told = clusters(2).run(save_many, str(tmp_path), replicas)
    text, names = told[0]
    means = [f"model.{index}.running_mean" for index in range(10)]
    assert list(names) == ["ema", "model.9.weight", "optim.state.9.weight.exp_avg", *means]
    assert "ema (rank 1); model.9.weight (rank 1); optim.state.9.weight.exp_avg (rank 1)" in text
    assert "model.4.running_mean (rank 1) and 5 more tensors" in text
    assert told[1] == (told[0] if replicas == "check" else ("", ()))


def hybrid(values: list[float], rows: int) -> DTensor:
    """A tensor whose shards have two replicas; each rank says what it has."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "fsdp"))
    local = torch.full((rows, 3), values[dist.get_rank()])
    return DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)


def stage(value: float) -> DTensor:
    """A tensor that two ranks have each, of a name that both pairs have: replicas of shards."""
    pairs = [DeviceMesh("cpu", pair, mesh_dim_names=("tp",)) for pair in ([0, 1], [2, 3])]
    local = torch.full((2, 3), value)
    return DTensor.from_local(local, pairs[dist.get_rank() // 2], [Shard(0)], run_check=False)


def save_groups(folder: str, replicas: str) -> tuple[list[str], str]:
    """Replicas in groups of all kinds, some of which differ."""
    rank = dist.get_rank()
    nan = torch.tensor([float("nan"), -0.0])
    state: dict[str, Any] = {
        "same": {
            "h": hybrid([1, 2, 1, 2], 2),
            "nan": nan,
            "empty": torch.empty(0, rank + 1)[:, :0],
        },
        "small": {"h": hybrid([1, 2, 1, 5], 2)},
        "large": {"h": hybrid([1, 2, 4, 2], 1 << 16)},
        "pairs": {"w": stage([1.0, 2.0, 1.0, 7.0][rank])},
        "numbers": {"step": torch.tensor(float(rank == 2))},
    }
    if rank in (1, 3):
        state["some"] = {"w": torch.full((5,), float(rank))}
    error = ""
    with telling() as said:
        try:
            ckpt.save(folder, state, replicas=replicas)  # type: ignore[arg-type]
        except ckpt.StateError as refused:
            error = str(refused)
    return said, error


NAMED = [
    "large.h (rank 2)",
    "numbers.step (rank 2)",
    "pairs.w (rank 3)",
    "small.h (rank 3)",
    "some.w (rank 3)",
]


def test_replicas_of_every_kind_of_group_are_compared(clusters: Callable, tmp_path: Path) -> None:
    told = clusters(4).run(save_groups, str(tmp_path), "sample")
    assert [error for _, error in told] == [""] * 4
    assert [len(said) for said, _ in told] == [1, 0, 0, 0]
    listed = told[0][0][0].partition("have them: ")[2].partition("; they are")[0]
    assert sorted(listed.split("; ")) == NAMED
    saved: Any = ckpt.read(tmp_path)
    assert saved["small"]["h"][:, 0].tolist() == [1, 1, 2, 2]
    assert saved["large"]["h"].unique(return_counts=True)[1].tolist() == [3 << 16, 3 << 16]
    assert saved["pairs"]["w"][:, 0].tolist() == [1, 1, 2, 2]
    assert saved["numbers"]["step"] == 0
    assert saved["some"]["w"].tolist() == [1] * 5


def test_checked_replicas_that_differ_are_an_error_on_all_ranks_before_a_byte_is_written(
    clusters: Callable, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    told = clusters(4).run(save_groups, str(folder), "check")
    for said, error in told:
        assert said == []
        listed = error.partition("have them: ")[2].partition("; nothing was written")[0]
        assert sorted(listed.split("; ")) == NAMED
    assert not folder.exists()


def save_one_bit(folder: str, replicas: Any) -> str:
    """A large tensor of which one bit differs, where no sample looks; then the ways differ."""
    tensor = torch.zeros(1 << 18)
    if dist.get_rank():
        tensor[77].neg_()
    try:
        ckpt.save(folder, {"w": tensor}, replicas=replicas)
    except (ckpt.StateError, ckpt.RankError, ValueError) as error:
        return str(error)
    return ""


def save_unlike(folder: str) -> str:
    return save_one_bit(folder, ("sample", "check")[dist.get_rank()])


UNLIKE: dict[str, tuple[Any, Any]] = {
    "overwrite": (False, True),
    "compress": (False, True),
    "timeout": (60, 61.5),
    "staging": ("copied", "overlapped"),
    "when_busy": ("wait", "refuse"),
    "blocking": (True, False),
}


def save_with_unlike_arguments(folder: str) -> list[tuple[str, str]]:
    """The error of a save for each argument that differs between the ranks."""
    found = []
    for name, values in UNLIKE.items():
        options = {name: values[dist.get_rank()]}
        try:
            handle = ckpt.save(folder, {"w": torch.ones(3)}, **options)
            found.append(("saved", str(handle)))
        except ckpt.CkptError as error:
            found.append((type(error).__name__, str(error)))
    return found


def test_ranks_that_save_with_other_arguments_are_an_error_on_all_before_a_byte_is_written(
    clusters: Callable, tmp_path: Path
) -> None:
    for rank, found in enumerate(clusters(2).run(save_with_unlike_arguments, str(tmp_path))):
        for (name, values), (error, message) in zip(UNLIKE.items(), found, strict=True):
            if name == "blocking":
                assert error == "RankError"
                assert "ckpt.save(blocking=False)" in message
            else:
                assert error == "StateError"
                assert "the ranks were called with different arguments" in message
                value = float(values[rank]) if name == "timeout" else values[rank]
                assert f"{name}={value!r}" in message
    assert not list(tmp_path.iterdir())


def test_a_check_sees_every_bit_and_a_sample_does_not(clusters: Callable, tmp_path: Path) -> None:
    said = clusters(2).run(save_one_bit, str(tmp_path), "check")
    assert all("not the same on all ranks that have them: w (rank 1);" in text for text in said)
    unlike = clusters(2).run(save_unlike, str(tmp_path))
    assert all("the ranks were called with different arguments" in text for text in unlike)
    wrong = clusters(2).run(save_one_bit, str(tmp_path), "every")
    assert all("replicas is 'every'; it can be sample or check" in text for text in wrong)
    assert not list(tmp_path.iterdir())
    assert clusters(2).run(save_one_bit, str(tmp_path), "sample") == [""] * 2


def count_exchanges(folder: str, differs: bool) -> list[str]:
    """The stages of a save of 10,000 small tensors, of which one differs or none."""
    from sharding.agreement.ranks import Ranks

    rank, stages = dist.get_rank(), []
    once = Ranks.merge_records

    def counting(self: Ranks, stage: str, *rest: Any) -> bytes:
        stages.append(stage)
        return once(self, stage, *rest)

    state = {f"layer {i}": {"w": torch.full((16,), float(i))} for i in range(10_000)}
    if differs:
        state["layer 77"]["w"][3] = rank
    Ranks.merge_records = counting  # type: ignore[method-assign]
    try:
        with telling():
            ckpt.save(folder, state)
    finally:
        Ranks.merge_records = once  # type: ignore[method-assign]
    return stages


@pytest.mark.thorough
@pytest.mark.parametrize("differs", [False, True])
def test_ranks_that_agree_say_so_in_the_one_exchange_that_there_is(
    clusters: Callable, tmp_path: Path, differs: bool
) -> None:
    stages = clusters(2).run(count_exchanges, str(tmp_path), differs)
    compared = ["comparing replicas"] if differs else []
    assert stages == [["describing the state", *compared, "writing", "committing"]] * 2
