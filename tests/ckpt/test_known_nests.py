"""A state that was described before gives what it would give if it had not been."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TorchShard

import ckpt
from ckpt.state.flatten import flatten
from ckpt.state.known_nests import KnownNest
from sharding.layout import Mesh
from tests.old_torch import runs_fsdp2

WORLD = Mesh.grid(("world",), (1,))


class Training:
    """A small model with a tied parameter, a buffer and an optimizer, and loose things beside."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.optimizer = torch.optim.Adam(self.model[0].parameters())
        self.spare = nn.Linear(2, 2)
        self.more: dict[str, Any] = {"epoch": 1}
        for parameter in self.model[0].parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    @property
    def state(self) -> dict[str, Any]:
        """What is saved."""
        return {"model": self.model, "optimizer": self.optimizer, "more": self.more}

    @property
    def weight(self) -> nn.Parameter:
        """The first parameter."""
        return next(self.model.parameters())

    @property
    def moments(self) -> dict[str, Any]:
        """What the optimizer keeps of a parameter."""
        return next(iter(self.optimizer.state.values()))

    def set(self, name: str, value: nn.Parameter | None) -> None:
        """Put a parameter into the last layer."""
        self.model[-1].register_parameter(name, value)


def resized(tensor: torch.Tensor) -> None:
    """Give up the memory, and take as much anew."""
    nbytes = tensor.untyped_storage().nbytes()
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(nbytes)
    tensor.zero_()


def swapped(training: Training) -> None:
    """Exchange two parameters of one shape."""
    first, last = training.model[0], training.model[-1]
    first.weight, last.weight = (
        nn.Parameter(last.weight.detach().t().contiguous()),
        nn.Parameter(first.weight.detach().t().contiguous()),
    )


def grouped(training: Training) -> None:
    """A parameter more for the optimizer."""
    if len(training.optimizer.param_groups) < 2:
        training.optimizer.add_param_group({"params": [training.model[1].weight], "lr": 0.5})


def negated(training: Training) -> None:
    """The same memory, to be read with the other sign."""
    training.weight.data = torch._neg_view(training.weight.data)


CHANGES: dict[str, Callable[[Training], object]] = {
    "nothing": lambda t: None,
    "in place": lambda t: t.weight.data.add_(1),
    "a step": lambda t: t.optimizer.step(),
    "new data": lambda t: setattr(t.weight, "data", torch.rand(4, 3)),
    "transposed data": lambda t: setattr(t.weight, "data", t.weight.data.t().contiguous().t()),
    "other bits": lambda t: setattr(
        t.model[1].running_mean, "data", t.model[1].running_mean.data.view(torch.int32)
    ),
    "flat data": lambda t: setattr(t.weight, "data", t.weight.data.contiguous().view(2, 6)),
    "the other way": lambda t: setattr(t.model[2].weight, "data", t.model[2].weight.data.t()),
    "fewer rows": lambda t: setattr(t.weight, "data", t.weight.data[:2]),
    "half of it": lambda t: setattr(t.model[1].bias, "data", torch.rand(4)[:2]),
    "negated view": negated,
    "new parameter": lambda t: setattr(t.model[0], "bias", nn.Parameter(torch.rand(4))),
    "swapped": swapped,
    "memory given up": lambda t: resized(t.model[1].running_mean),
    "half precision": lambda t: t.model.half(),
    "double precision": lambda t: t.model.double(),
    "a key more": lambda t: t.set("extra", nn.Parameter(torch.rand(5))),
    "a key less": lambda t: t.set("extra", None),
    "no elements": lambda t: t.set("extra", nn.Parameter(torch.rand(0))),
    "tied": lambda t: t.set("weight", t.weight),
    "untied": lambda t: t.set("weight", nn.Parameter(torch.rand(3, 4))),
    "a view": lambda t: t.set("extra", nn.Parameter(t.weight.data.t())),
    "tied outside": lambda t: t.more.update(loose=t.weight.detach()),
    "a view outside": lambda t: t.more.update(loose=t.weight.data.reshape(-1)),
    "not outside": lambda t: t.more.pop("loose", None),
    "moments tied": lambda t: t.moments.update(exp_avg=t.moments["exp_avg_sq"]),
    "a moment more": lambda t: t.moments.update(bound=torch.ones(3)),
    "a moment less": lambda t: t.moments.pop("bound", None),
    "a plain step": lambda t: t.moments.update(step=7),
    "another plain step": lambda t: t.moments.update(step=1 << 80),
    "a tensor step": lambda t: t.moments.update(step=torch.tensor(3.0)),
    "no moments": lambda t: t.moments.clear(),
    "plain values": lambda t: t.more.update(epoch=t.more["epoch"] + 1),
    "rate": lambda t: t.optimizer.param_groups[0].update(lr=0.25),
    "group": grouped,
    "another module": lambda t: t.model.append(nn.BatchNorm1d(3)),
    "persistent": lambda t: t.model[1]._non_persistent_buffers_set.add("running_var"),
    "not persistent": lambda t: t.model[1]._non_persistent_buffers_set.discard("running_var"),
    "assigned": lambda t: t.model.load_state_dict(
        {k: v.clone() for k, v in t.model.state_dict().items()}, assign=True
    ),
    "a hook": lambda t: t.model.register_state_dict_post_hook(
        lambda module, state, *_: state.update({"0.bias": torch.ones(9)})
    ),
}


@contextmanager
def nothing_known() -> Iterator[None]:
    """Inside, every state is described in full."""
    unchanged: Any = KnownNest.unchanged
    patch: Any = KnownNest
    patch.unchanged = lambda *_: None
    try:
        yield
    finally:
        patch.unchanged = unchanged


def described(state: object) -> Any:
    """What a save would store of a state, its bytes among it, or the error that it would raise."""
    try:
        flat = flatten(state, WORLD)
    except ckpt.StateError as error:
        return str(error)
    leaves = [
        (name, leaf.name, leaf.dtype, str(leaf.layout), leaf.layout.shape, contents(leaf.local))
        for name, leaf in flat.leaves.items()
    ]
    return leaves, flat.aliases, repr(flat.tree)


def contents(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor as it shows them."""
    return tensor.resolve_neg().contiguous().numpy().tobytes()


@settings(max_examples=30)
@given(st.lists(st.sampled_from(sorted(CHANGES)), max_size=6))
def test_a_state_that_changes_between_saves_is_stored_as_if_it_were_new(names: list[str]) -> None:
    training = Training()
    flatten(training.state, WORLD)
    for name in names:
        with suppress(RuntimeError, IndexError):  # after another change it may be impossible
            CHANGES[name](training)
        found = described(training.state)
        with nothing_known():
            assert found == described(training.state), name


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_every_single_change_is_seen(name: str) -> None:
    training = Training()
    CHANGES["a key more"](training)
    CHANGES["a moment more"](training)
    flatten(training.state, WORLD)
    CHANGES[name](training)
    found = described(training.state)
    with nothing_known():
        assert found == described(training.state)


def test_an_unchanged_state_is_not_described_again(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    flatten(training.state, WORLD)
    module: Any = import_module("ckpt.state.flatten")
    described: list[str] = []
    describe = module.describe

    def counting(tensor: Any, name: str, world: Mesh) -> Any:
        described.append(name)
        return describe(tensor, name, world)

    monkeypatch.setattr(module, "describe", counting)
    training.optimizer.step()
    training.more["loose"] = torch.ones(2)
    flatten(training.state, WORLD)
    assert described == ["more.loose"]


def test_a_model_that_nobody_needs_any_more_is_freed_after_a_save(tmp_path: Path) -> None:
    training = Training()
    ckpt.prepare(training.state)
    ckpt.save(tmp_path / "a", training.state)
    ckpt.save(tmp_path / "b", training.state, blocking=False).wait()
    tensors = [*training.model.state_dict(keep_vars=True).values(), *training.moments.values()]
    freed: list[Any] = []
    for thing in (training.model, training.optimizer, *tensors):
        weakref.finalize(thing, freed.append, None)
    expected = len(tensors) + 2
    del training, tensors, thing
    gc.collect()
    assert len(freed) == expected


def moved_after_a_save(folder: str) -> tuple[torch.Size, list[str], int]:
    """A sharded model and its optimizer that change after a save.

    The shape of a moment that is spread otherwise, over the same memory; the dtypes of the model
    when it is cast; how many of its local tensors are freed.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    for name in ("a", "b"):
        ckpt.save(f"{folder}/{name}", state)
    moments = optimizer.state[model[0].weight]
    local = moments["exp_avg"].to_local()
    moments["exp_avg"] = DTensor.from_local(local, mesh, [TorchShard(1)])
    model.half()
    ckpt.save(f"{folder}/c", state)
    stored: Any = ckpt.read(f"{folder}/c")
    shape = stored["optimizer"]["state"]["0.weight"]["exp_avg"].shape
    dtypes = [str(tensor.dtype) for tensor in stored["model"].values()]
    freed: list[Any] = []
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        weakref.finalize(parameter._local_tensor, freed.append, None)
    del model, optimizer, state, parameter, moments, local
    gc.collect()
    return shape, dtypes, len(freed)


@runs_fsdp2
def test_a_sharded_model_that_changes_after_a_save_is_stored_as_it_is_then_and_is_freed(
    clusters: Callable, tmp_path: Path
) -> None:
    for shape, dtypes, freed in clusters(2).run(moved_after_a_save, str(tmp_path)):
        assert tuple(shape) == (2, 8)
        assert dtypes == ["torch.float16"] * 4
        assert freed == 4
