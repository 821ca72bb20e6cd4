"""What ranks hold under one name differs, in every way: it is stored whole, told, or refused.

Each kind of difference has a row: what each rank's state is, and what must become of it. Nothing
may be lost without a word.
"""

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import ckpt


class Loader:
    """An object of a user's with a state of its own."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "seen": [self.position]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def generator_state(rank: int) -> Any:
    return random.Random(rank).getstate()


def optimizer(rank: int, **options: Any) -> dict[str, Any]:
    """A module of two parameters and its optimizer, whose group has these options as well."""
    torch.manual_seed(5)
    model = torch.nn.Linear(3, 2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(3)).sum().backward()
    optim.step()
    optim.param_groups[0].update(options)
    return {"model": model, "optim": optim}


def parts_without_state(rank: int, lr: float) -> dict[str, Any]:
    """A module, and an optimizer without state for another parameter of it on each rank."""
    torch.manual_seed(5)
    model = torch.nn.Linear(3, 2)
    part = model.bias if rank else model.weight
    return {"model": model.requires_grad_(False), "optim": torch.optim.SGD([part], lr=lr)}


def without_state_of_bias(rank: int) -> dict[str, Any]:
    state = optimizer(rank)
    if rank:
        state["optim"].state.pop(state["model"].bias)
    return state


def replicated(value: float) -> DTensor:
    """A DTensor that every rank has whole, each with what it says itself."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return DTensor.from_local(torch.full((4, 4), value), mesh, [Replicate()], run_check=False)


def sharded(dtype: torch.dtype) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return DTensor.from_local(torch.zeros(2, 2, dtype=dtype), mesh, [Shard(0)], run_check=False)


def tied(rank: int) -> dict[str, torch.Tensor]:
    first = torch.ones(2)
    return {"a": first, "b": first if rank else torch.ones(2)}


@dataclass(frozen=True)
class Kind:
    """One kind of difference."""

    state: Callable[[int], Any]
    saved: dict[str, Any] = field(default_factory=dict)
    """What the checkpoint has at these key paths, a dot between two keys."""
    warned: str = ""
    """What the ranks are warned of, all of them together; nothing at all where it is empty."""
    error: str = ""
    """What the save is refused with, on all ranks."""
    loads: bool = True
    """Whether the same ranks get back what each of them had."""


KINDS: dict[str, Kind] = {
    # Names of a rank's own.
    "a value": Kind(lambda r: {f"dl-{r}": {"pos": 7 + r}, "step": 3}, {"dl-1.pos": 8, "step": 3}),
    "an object": Kind(lambda r: {f"loader-{r}": Loader(r)}, {"loader-1.position": 1}),
    "a tuple": Kind(lambda r: {f"py-{r}": generator_state(r)}, {"py-1": generator_state(1)}),
    "keys deep in the nest": Kind(
        lambda r: {"ranks": {str(r): {"seed": r}}}, {"ranks.0.seed": 0, "ranks.1.seed": 1}
    ),
    "keys that are numbers": Kind(lambda r: {"at": {r: [r]}}, {"at.0": [0], "at.1": [1]}),
    "a tensor": Kind(lambda r: {f"rng-{r}": torch.tensor([r])}, {"rng-1": torch.tensor([1])}),
    "keys in the state of an object": Kind(
        lambda r: {"all": {f"w-{r}": Loader(r)}}, {"all.w-1.position": 1}
    ),
    "an option of a parameter group": Kind(
        lambda r: optimizer(r, **{f"seed-{r}": r}),
        {"optim.param_groups.0.seed-0": 0, "optim.param_groups.0.seed-1": 1},
    ),
    "a parameter of an optimizer without state": Kind(
        lambda r: parts_without_state(r, 0.5),
        {"optim.param_groups.0.params": ["weight", "bias"]},
    ),
    "a parameter, and options, of an optimizer without state": Kind(
        lambda r: parts_without_state(r, 0.5 + r),
        {"optim.param_groups.0.lr": 0.5, "optim.param_groups.1.params": ["bias"]},
    ),
    "a dict in a list": Kind(
        lambda r: {"l": [{f"k-{r}": r}]}, {"l.0.k-0": 0, "l.0.k-1": 1}, loads=False
    ),
    "an empty dict and one with keys": Kind(
        lambda r: {"d": {"k": 1} if r else {}}, {"d.k": 1}, loads=False
    ),
    "None and a dict": Kind(lambda r: {"d": {"k": 1} if r else None}, {"d.k": 1}, loads=False),
    "None and a tensor": Kind(
        lambda r: {"ema": torch.ones(3) if r else None}, {"ema": torch.ones(3)}, loads=False
    ),
    "a state of an optimizer for one parameter": Kind(without_state_of_bias, {}, loads=False),
    "lists of tensors of two lengths": Kind(
        lambda r: {"l": [torch.ones(1)] * 1 + [torch.zeros(2)] * r}, {"l.1": torch.zeros(2)}
    ),
    "the order of keys": Kind(
        lambda r: {"b": 1, "a": torch.ones(1)} if r else {"a": torch.ones(1), "b": 1}, {"b": 1}
    ),
    # Values of one name.
    "integers": Kind(lambda r: {"x": r}, {"x": 0}, "'x'", loads=False),
    "floats": Kind(lambda r: {"x": 0.1 + r}, {"x": 0.1}, "'x'", loads=False),
    "the sign of a zero": Kind(lambda r: {"x": -0.0 if r else 0.0}, {}, "'x'", loads=False),
    "an integer and a bool": Kind(lambda r: {"x": True if r else 1}, {}, "'x'", loads=False),
    "an integer and a float": Kind(lambda r: {"x": 1.0 if r else 1}, {}, "'x'", loads=False),
    "texts": Kind(lambda r: {"a": {"x": str(r)}}, {"a.x": "0"}, "'a.x'", loads=False),
    "bytes": Kind(lambda r: {"x": bytes([r])}, {"x": b"\0"}, "'x'", loads=False),
    "dtypes": Kind(
        lambda r: {"x": torch.int8 if r else torch.int16}, {"x": torch.int16}, "'x'", loads=False
    ),
    "None and a number": Kind(lambda r: {"x": r or None}, {"x": None}, "'x'", loads=False),
    "a list and a tuple": Kind(
        lambda r: {"x": (1, 2) if r else [1, 2]}, {"x": [1, 2]}, "'x'", loads=False
    ),
    "lists of two lengths": Kind(lambda r: {"x": [5] * (r + 1)}, {"x": [5]}, "'x'", loads=False),
    "lists of dicts of two lengths": Kind(
        lambda r: {"x": [{"a": 1}] * (r + 1)}, {"x": [{"a": 1}] * 2}, "'x'", loads=False
    ),
    "states of a generator": Kind(
        lambda r: {"x": generator_state(r)}, {"x": generator_state(0)}, "'x'", loads=False
    ),
    "a value beside a name of its own": Kind(
        lambda r: {"x": r, f"own-{r}": 1}, {"x": 0, "own-1": 1}, "'x'", loads=False
    ),
    "options of a parameter group": Kind(
        lambda r: optimizer(r, lr=0.1 + r),
        {"optim.param_groups.0.lr": 0.1},
        "'optim.param_groups.0.lr'",
        loads=False,
    ),
    # Bytes of one name.
    "plain tensors": Kind(
        lambda r: {"w": torch.full((5,), float(r))}, {"w": torch.zeros(5)}, "w (rank 1", loads=False
    ),
    "large plain tensors": Kind(
        lambda r: {"ema": torch.full((512, 512), float(r))},
        {"ema": torch.zeros(512, 512)},
        "ema (rank 1",
        loads=False,
    ),
    "numpy arrays": Kind(
        lambda r: {"w": torch.full((5,), r).numpy()},
        {"w": torch.zeros(5, dtype=torch.int64)},
        "w (rank 1",
        loads=False,
    ),
    "DTensors that are replicated": Kind(
        lambda r: {"w": replicated(float(r))}, {"w": torch.zeros(4, 4)}, "w (rank 1", loads=False
    ),
    "tensors beside a name of its own": Kind(
        lambda r: {"a": {"w": torch.full((5,), float(r))}, f"own-{r}": torch.ones(1)},
        {"a.w": torch.zeros(5), "own-1": torch.ones(1)},
        "a.w (rank 1",
        loads=False,
    ),
    # What nobody can unite.
    "a dict and a number": Kind(
        lambda r: {"a": {"x": 1} if r else 1}, error="a.x|a: 1 on rank 0, a dict of 1 on rank 1"
    ),
    "a number and a dict": Kind(
        lambda r: {"a": 1 if r else {"x": 1}}, error="a: a dict of 1 on rank 0, 1 on rank 1"
    ),
    "a tensor and a number": Kind(
        lambda r: {"a": torch.ones(1) if r else 1}, error="a: 1 on rank 0, a tensor on rank 1"
    ),
    "a tuple and a list of tensors": Kind(
        lambda r: {"a": (torch.ones(1),) if r else [torch.ones(1)]},
        error="a: a list of 1 on rank 0, a tuple of 1 on rank 1",
    ),
    "a dict and a list at the top": Kind(
        lambda r: [1, {}] if r else {"a": 1}, error="the state: dict on rank 0, list on rank 1"
    ),
    "keys that get the same name": Kind(
        lambda r: {"d": {("1" if r else 1): torch.ones(1)}}, error="get the name 'd.1'"
    ),
    "keys that are one to Python": Kind(
        lambda r: {"d": {(True if r else 1): torch.ones(1)}},
        error="d: the keys 1 on rank 0 and True",
    ),
    "keys with dots and nests": Kind(
        lambda r: {"a.b": 1} if r else {"a": {"b": 1}}, error="get the name 'a.b'"
    ),
    "shapes": Kind(lambda r: {"w": torch.ones(1 + r)}, error="w: rank 0 has float32 [1]"),
    "dtypes of tensors": Kind(
        lambda r: {"w": torch.ones(1).to(torch.bfloat16 if r else torch.float32)}, error="bfloat16"
    ),
    "dtypes of shards": Kind(
        lambda r: {"w": sharded(torch.bfloat16 if r else torch.float32)}, error="bfloat16"
    ),
    "a DTensor and a plain tensor": Kind(
        lambda r: {"w": sharded(torch.float32) if r else torch.zeros(2, 2)}, error="w: rank 0 has"
    ),
    "ties": Kind(tied, error="tied to a on some ranks only"),
}


def save_kind(folder: str, what: str) -> tuple[list[str], str]:
    """What this rank was warned of, and refused with, as it saved its state of a kind."""
    state, error = KINDS[what].state(dist.get_rank()), ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            ckpt.save(folder, state)
        except ckpt.StateError as refused:
            error = str(refused)
    told = [str(one.message) for one in caught]
    texts = ("of its own", "of their own", "different names")
    return [text for text in told if any(part in text for part in texts)], error


def load_kind(folder: str, what: str) -> None:
    """Every rank gets back what it had: into places with other values, and into empty ones."""
    rank = dist.get_rank()
    expected, target = KINDS[what].state(rank), KINDS[what].state(rank)
    for place in _tensors(target):
        place.detach().zero_()
    loaded = ckpt.load(folder, target)
    assert _plain(loaded) == _plain(expected)


def _tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, dict | list):
        items = state.values() if isinstance(state, dict) else state
        return [tensor for item in items for tensor in _tensors(item)]
    return [state] if isinstance(state, torch.Tensor) else []


def _plain(state: Any) -> Any:
    """A state as values that compare, without options that only other ranks have."""
    if isinstance(state, dict):
        return {k: _plain(v) for k, v in sorted(state.items(), key=str)}
    if isinstance(state, list):
        return [_plain(item) for item in state]
    if isinstance(state, torch.optim.Optimizer):
        return _plain(state.state_dict()["state"])
    if isinstance(state, torch.nn.Module | Loader):
        return _plain(dict(state.state_dict()))
    return state.tolist() if isinstance(state, torch.Tensor) else state


def _at(state: Any, path: str) -> Any:
    """What a nest has at a key path."""
    for key in path.split("."):
        if isinstance(state, dict):
            state = state[next(own for own in state if str(own) == key)]
        else:
            state = state[int(key)]
    return state


@pytest.mark.thorough
@pytest.mark.parametrize("what", KINDS)
def test_no_difference_between_ranks_is_silent(
    clusters: Callable, tmp_path: Path, what: str
) -> None:
    kind, folder = KINDS[what], tmp_path / "checkpoint"
    told = clusters(2).run(save_kind, str(folder), what)
    errors = [error for _, error in told]
    if kind.error:
        for error in errors:
            assert any(text in error for text in kind.error.split("|")), errors
        assert not folder.exists() or not list(folder.iterdir())
        return
    assert errors == ["", ""]
    said = [message for messages, _ in told for message in messages]
    assert len(said) == (1 if kind.warned else 0), said
    assert kind.warned in "".join(said)
    state = ckpt.read(folder)
    for path, value in kind.saved.items():
        found = _at(state, path)
        assert type(found) is type(value), path
        assert _plain(found) == _plain(value), path
    if kind.loads:
        clusters(2).run(load_kind, str(folder), what)


def load_own_name(folder: str) -> str:
    rank = dist.get_rank()
    try:
        ckpt.load(folder, {f"loader-{rank}": Loader(9), "step": 0})
    except (ckpt.MismatchError, ckpt.RankError) as error:
        return str(error)
    return ""


def save_own_name(folder: str) -> None:
    ckpt.save(folder, {f"loader-{dist.get_rank()}": Loader(3), "step": 1})


def test_a_rank_without_an_entry_of_its_own_is_told_by_name(
    clusters: Callable, tmp_path: Path
) -> None:
    clusters(2).run(save_own_name, str(tmp_path))
    said = clusters(4).run(load_own_name, str(tmp_path))
    missing = "is in the target and not in the checkpoint"
    assert all(f"loader-{rank}: {missing}" in said[rank] for rank in (2, 3))
    assert all("rank 2" in message for message in said[:2])
    assert set(ckpt.read(tmp_path)) == {"loader-0", "loader-1", "step"}  # type: ignore[call-overload]


def save_with_many_names(folder: str) -> int:
    """Four ranks with names of their own in a large state; how many exchanges that took."""
    from sharding.agreement.ranks import Ranks

    rank, made = dist.get_rank(), []
    once = Ranks.merge_records

    def counting(self: Ranks, stage: str, record: bytes, *rest: Any) -> bytes:
        made.append(len(record))
        return once(self, stage, record, *rest)

    own: dict[str, Any] = {f"dl-{rank}": {"pos": rank}, "all": {str(rank): torch.tensor([rank])}}
    model = {f"layer-{i}.weight": torch.full((2,), float(i)) for i in range(200)}
    Ranks.merge_records = counting  # type: ignore[method-assign]
    try:
        ckpt.save(folder, {**model, **own, "step": 3})
    finally:
        Ranks.merge_records = once  # type: ignore[method-assign]
    return sum(made)


def test_a_rank_tells_of_its_own_names_and_not_of_the_model_again(
    clusters: Callable, tmp_path: Path
) -> None:
    told = clusters(4).run(save_with_many_names, str(tmp_path))
    assert max(told[1:]) < 3000  # rank 0 tells of the model, once: more than 5,000 bytes
    state: Any = ckpt.read(tmp_path)
    assert list(state)[:200] == [f"layer-{i}.weight" for i in range(200)]
    assert [state[f"dl-{rank}"] for rank in range(4)] == [{"pos": rank} for rank in range(4)]
    assert [state["all"][str(rank)].item() for rank in range(4)] == [0, 1, 2, 3]


def in_memory() -> tuple[Any, Any, list[str]]:
    """What ranks with names and values of their own make of their states without a file."""
    rank = dist.get_rank()
    state: dict[str, Any] = {f"dl-{rank}": {"pos": rank}, "w": torch.full((4,), 1.0), "seed": rank}
    state["mean"] = {"w": torch.full((4,), float(rank))}
    target = {f"dl-{r}": {"pos": 9} for r in range(2)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = ckpt.state_dict.convert(state, "full")
        ckpt.state_dict.load(state, target, include="dl-*")
    return _plain(made), target, [str(one.message) for one in caught if "ranks" in str(one.message)]


def test_in_memory_no_key_is_lost_either_and_differences_are_told(clusters: Callable) -> None:
    for rank, (made, target, said) in enumerate(clusters(2).run(in_memory)):
        expected = {"dl-0": {"pos": 0}, "dl-1": {"pos": 1}}
        assert target == expected
        assert {key: made[key] for key in expected} == expected
        assert len(said) == 2
        text = "not the same on all ranks that have them: mean.w (rank 1); each rank uses its own"
        assert all((text if rank == 0 else "taken: 'seed'; give values") in one for one in said)
