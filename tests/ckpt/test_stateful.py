"""Objects with `state_dict()` and `load_state_dict()`: tensors filled in place, the rest given.

`AppState` is the class of torch's tutorial on distributed checkpoints, `ModelWrapper` that of
torchtitan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import ckpt
import sharding
from tests import dcp_alone
from tests.ckpt.wrappings import state_of, train
from tests.old_torch import needs, runs_fsdp2

FSDP2 = pytest.param("fsdp2", marks=runs_fsdp2)
FSDP2_STAYS = pytest.param(
    "fsdp2", marks=needs((2, 10), "load_state_dict of torch 2.8's FSDP2 moves uneven parameters")
)

WIDTH = 48


class AppState:
    """A model and its optimizer behind one pair of methods."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )


class ModelWrapper:
    """The parts of a model behind one pair of methods, their state dicts in one."""

    def __init__(self, *parts: nn.Module) -> None:
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        return {k: v for part in self.parts for k, v in get_model_state_dict(part).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part in self.parts:
            own = get_model_state_dict(part)
            set_model_state_dict(part, {key: state[key] for key in own})


class Held:
    """An object whose state is what it was given, or was made with."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.calls = 0

    def state_dict(self) -> Any:
        self.calls += 1
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def made(how: str, value: float) -> AppState:
    """A model of a few rows that divide unevenly, stepped once, every number known by `value`."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH + 2), nn.Linear(WIDTH + 2, 3, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            numbers = torch.arange(1.0, parameter.numel() + 1)
            parameter.copy_(numbers.view_as(parameter) * value)
    if how != "unsharded":
        shard: Any = torch_fsdp.fully_shard if how == "fsdp2" else sharding.fully_shard
        shard(model[0])
        shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=value / 8)
    if value:
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return AppState(model, optimizer)


def whole(value: Any) -> Any:
    """A nest with the bytes of whole tensors in the place of tensors."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return tensor.detach().numpy().tobytes() if torch.is_tensor(tensor) else value


def save(folder: str, how: str) -> dict[str, Any]:
    app = made(how, 1.0)
    state = {"app": app, "parts": ModelWrapper(app.model), "step": 7}
    ckpt.save(folder, state)
    return {"app": whole(app.state_dict()), "parts": whole(state["parts"].state_dict())}


def load(folder: str, how: str) -> tuple[dict[str, Any], int, bool]:
    """What is loaded, the bytes this rank reads, and whether parameters stay where they are."""
    app = made(how, 0.0)
    parts = ModelWrapper(made(how, 0.0).model)
    places = [here(p) for p in app.model.parameters()]
    read: list[int] = []
    state = {"app": app, "parts": parts, "step": 0}
    assert ckpt.load(folder, state, verify=False, progress=read.append) is state
    assert state["step"] == 7
    stay = places == [here(p) for p in app.model.parameters()]
    found = {"app": whole(app.state_dict()), "parts": whole(parts.state_dict())}
    return found, sum(read), stay


def here(parameter: torch.Tensor) -> int:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).data_ptr()


@pytest.mark.parametrize("how", [FSDP2_STAYS, "fully_shard"])
def test_each_rank_reads_its_own_part_of_a_stateful_s_tensors(
    clusters: Callable, tmp_path: Path, how: str
) -> None:
    folder = str(tmp_path)
    saved = clusters(2).run(save, folder, how)[0]
    nbytes = sum(record.nbytes for record in ckpt.open(folder).catalog.tensors.values())
    for world_size, target in [(2, how), (3, how), (1, how), (1, "unsharded")]:
        results = clusters(world_size).run(load, folder, target)
        for found, read, stay in results:
            assert found == saved
            assert stay
            assert read <= 1.1 * nbytes / world_size
        assert sum(read for _, read, _ in results) >= nbytes


def save_and_load_in_another_wrapping(folder: str, how: str) -> bool:
    """A network with tied weights, its optimizer's groups, and all of it loaded once more."""
    state = state_of(how)
    train(state, 0, 2)
    ckpt.save(folder, AppState(model=state["model"], optimizer=state["optim"]))
    fresh = state_of(how, seed=1)
    ckpt.load(folder, AppState(fresh["model"], fresh["optim"]))
    return train(fresh, 2, 2) == train(state, 2, 2)


@pytest.mark.parametrize("how", [FSDP2, "fully_shard", "flat", "ddp"])
def test_training_goes_on_to_the_bit_after_an_app_state_is_loaded(
    clusters: Callable, tmp_path: Path, how: str
) -> None:
    assert all(clusters(2).run(save_and_load_in_another_wrapping, str(tmp_path), how))


def load_what_differs(folder: str) -> dict[str, tuple[str, bool]]:
    """What is said of targets that do not fit, and whether one of their tensors was touched."""
    found = {}
    for case in ("missing", "shape", "dtype"):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=case == "missing"))
        if case == "shape":
            model[1] = nn.Linear(4, 6, bias=False)
        if case == "dtype":
            model[1].to(torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        torch_fsdp.fully_shard(model[0])
        torch_fsdp.fully_shard(model[1])
        try:
            ckpt.load(folder, {"app": ModelWrapper(model)})
            said = ""
        except ckpt.MismatchError as error:
            said = error.reason
        touched = any((p.to_local() != 0).any() for p in model.parameters())  # type: ignore[operator]
        found[case] = said, bool(touched)
    return found


def test_what_does_not_fit_is_refused_before_anything_is_touched(
    clusters: Callable, tmp_path: Path
) -> None:
    ckpt.save(tmp_path, {"app": {"0.weight": torch.ones(4, 4), "1.weight": torch.ones(4, 4)}})
    for found in clusters(2).run(load_what_differs, str(tmp_path)):
        assert not any(touched for _, touched in found.values())
        assert "app.1.bias: is in the target and not in the checkpoint" in found["missing"][0]
        assert (
            "app.1.weight: the checkpoint has shape (4, 4), the target has (6, 4)"
            in (found["shape"][0])
        )
        assert (
            "app.1.weight: the checkpoint has dtype float32, the target has float64"
            in found["dtype"][0]
        )


def one(value: float) -> torch.Tensor:
    return torch.full((3,), value)


@pytest.mark.parametrize(
    ("saved", "own", "given"),
    [
        ({"position": 9, "seed": "x"}, {"position": 0, "seed": ""}, None),
        ({"position": 9}, {}, None),  # empty before the first load
        ({"position": 9, "workers": [{"at": 1}]}, {"fresh": True}, None),  # other keys
        ({"scale": 2.0, "tracker": 5}, {"scale": 1.0}, None),
        ({}, {"position": 3}, None),
        ([1, 2], [0], None),
        ({"w": one(1)}, {}, None),
        ({"w": one(1), "deep": {"n": 4}}, {"v": 3, "deep": {}}, None),
        ({"buffer": torch.ones(5, 2)}, {"buffer": torch.zeros(0, 2)}, None),  # of any length
        ({"last": 2.5}, {"last": torch.zeros(1)}, None),
        ({"w": one(1), "c": Counter(a=2)}, {"w": one(0), "c": Counter()}, None),
        ([one(1), {"n": 1}], [one(0), {"n": 0}], None),
        ({0: {"m": one(1)}}, {0: {"m": one(0)}}, None),
        ({"w": one(1)}, {"w": one(0), "only": 3}, {"w": one(1)}),
    ],
)
def test_an_object_gets_what_was_saved_for_it(
    tmp_path: Path, saved: Any, own: Any, given: Any
) -> None:
    ckpt.save(tmp_path, {"object": Held(saved), "step": 1})
    target = Held(own)
    place = own["w"].data_ptr() if isinstance(own, dict) and "w" in own else None
    ckpt.load(tmp_path, {"object": target, "step": 0})
    wanted = saved if given is None else given
    assert repr(target.state) == repr(wanted)
    if place is not None:
        assert target.state["w"].data_ptr() == place


def test_an_object_of_plain_values_is_not_asked_for_its_state(tmp_path: Path) -> None:
    ckpt.save(tmp_path, Held({"epoch": 3, "seeds": [1, 2]}))
    target = Held({"epoch": 0})
    ckpt.load(tmp_path, target)
    assert (target.calls, target.state) == (0, {"epoch": 3, "seeds": [1, 2]})


def test_a_tensor_that_the_checkpoint_lacks_stays_with_strict_false(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"object": Held({"w": one(1), "deep": {"n": 1}})})
    target = Held({"w": one(0), "new": one(5), "deep": {"x": one(6)}})
    with pytest.raises(ckpt.MismatchError, match=r"object\.new: is in the target") as error:
        ckpt.load(tmp_path, {"object": target})
    assert {one.name for one in error.value.differences} == {"object.new", "object.deep.x"}
    assert (target.state["w"] == 0).all()
    with pytest.warns(UserWarning, match="strict=False skips 2"):
        ckpt.load(tmp_path, {"object": target}, strict=False)
    wanted = {"w": one(1), "deep": {"n": 1, "x": one(6)}, "new": one(5)}
    assert repr(target.state) == repr(wanted)


def test_a_tensor_of_another_dtype_is_cast_only_on_request(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"object": Held({"w": one(1.5)})})
    target = Held({"w": one(0).double()})
    with pytest.raises(ckpt.MismatchError, match=r"object\.w: the checkpoint has dtype float32"):
        ckpt.load(tmp_path, {"object": target})
    ckpt.load(tmp_path, {"object": target}, dtype="target")
    assert torch.equal(target.state["w"], one(1.5).double())


def test_what_is_not_selected_of_an_object_stays_as_it_is(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"object": Held({"w": one(1), "v": one(2), "n": 3, "saved": 4})})
    target = Held({"w": one(0), "v": one(0), "n": 0})
    ckpt.load(tmp_path, {"object": target}, exclude=["object.v", "object.n", "object.saved"])
    assert repr(target.state) == repr({"w": one(1), "v": one(0), "n": 0})
    plain = Held({"a": 0, "b": 0})
    ckpt.save(tmp_path, {"object": Held({"a": 1, "b": 2})}, overwrite=True)
    ckpt.load(tmp_path, {"object": plain}, include="object.b")
    assert plain.state == {"a": 0, "b": 2}


def test_a_renamed_object_gets_its_state_in_its_nest(tmp_path: Path) -> None:
    saved = {"deep": {"w": one(1), "more": {"n": 1}}, "list": [one(2), 3]}
    ckpt.save(tmp_path, {"old": Held(saved), "step": 1})
    for own in ({}, {"deep": {"w": one(0), "more": {"n": 0}}, "list": [one(0), 0]}):
        target = Held(own)
        ckpt.load(tmp_path, {"new": target, "step": 0}, rename={"old": "new"})
        assert repr(target.state) == repr(saved)


def test_an_object_gets_its_own_keys_from_a_checkpoint_of_dcp(tmp_path: Path) -> None:
    dcp_alone.save({"object": {0: {"w": one(1)}, "n": 2}}, tmp_path)
    target = Held({0: {"w": one(0)}, "n": 0})
    ckpt.load(tmp_path, {"object": target})
    assert repr(target.state) == repr({0: {"w": one(1)}, "n": 2})


def test_an_object_is_filled_from_memory_too() -> None:
    target = Held({"w": one(0), "n": 0})
    place = target.state["w"].data_ptr()
    ckpt.state_dict.load({"object": {"w": one(1), "n": 2}}, {"object": target})
    assert repr(target.state) == repr({"w": one(1), "n": 2})
    assert target.state["w"].data_ptr() == place


def test_an_exception_of_state_dict_names_the_entry_and_nothing_is_touched(
    tmp_path: Path,
) -> None:
    class Broken(Held):
        def state_dict(self) -> Any:
            raise RuntimeError("not ready")

    ckpt.save(tmp_path, {"w": one(1), "object": Held({"v": one(1)})})
    target = {"w": one(0), "object": Broken({})}
    with pytest.raises(RuntimeError, match="not ready") as error:
        ckpt.load(tmp_path, target)
    assert "raised by state_dict() of object" in error.value.__notes__
    assert (target["w"] == 0).all()


@pytest.mark.parametrize("place", ["a folder", "memory"])
def test_an_exception_of_load_state_dict_names_the_tensors_that_were_filled(
    tmp_path: Path, place: str
) -> None:
    class Refusing(Held):
        def load_state_dict(self, state_dict: Any) -> None:
            raise KeyError("refused")

    state = {"w": torch.ones(2), "object": Held({"n": 1})}
    target = {"w": torch.zeros(2), "object": Refusing({"n": 0})}
    ckpt.save(tmp_path, state)
    with pytest.raises(ckpt.PartialLoadError, match=r"KeyError: 'refused'.* bytes in: w") as error:
        ckpt.load(tmp_path, target) if place == "a folder" else ckpt.state_dict.load(state, target)
    assert error.value.touched == ("w",)
    assert target["w"].tolist() == [1, 1]
    with pytest.raises(ckpt.PartialLoadError, match="No tensor was touched"):
        ckpt.load(tmp_path, target, include="object*")


def test_optimizers_in_a_list_have_no_state_if_none_was_saved(tmp_path: Path) -> None:
    def made(lr: float) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        return {"model": model, "optims": [torch.optim.Adam(model.parameters(), lr), {"n": lr}]}

    ckpt.save(tmp_path, made(0.5))
    target = made(0.25)
    ckpt.load(tmp_path, target)
    [optimizer, rest] = target["optims"]
    assert (dict(optimizer.state), optimizer.param_groups[0]["lr"]) == ({}, 0.5)
    assert rest == {"n": 0.5}


@pytest.mark.parametrize("nest", [[[one(2)]], [[3], [one(2), {"k": (one(2),)}]]], ids=str)
def test_an_object_in_a_tuple_gets_the_nest_that_was_saved(tmp_path: Path, nest: Any) -> None:
    ckpt.save(tmp_path, {"pair": (Held(nest), one(1))})
    target = Held([])
    ckpt.load(tmp_path, {"pair": (target, one(0))})
    assert repr(target.state) == repr(nest)


def test_an_entry_that_a_saved_list_of_dicts_lacks_is_missing(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"l": [Held({"a": 1}), {"b": 1}]})
    target = {"l": [Held({"a": 0}), {"b": 0, "new": None}]}
    with pytest.raises(ckpt.MismatchError, match=r"l\.1\.new: is in the target and not in the"):
        ckpt.load(tmp_path, target)


@pytest.mark.parametrize("more", [(), (5, "text"), ([3, {"x": 1}],)], ids=str)
def test_objects_in_a_list_get_what_was_saved_though_none_of_them_has_a_tensor(
    more: tuple[object, ...], tmp_path: Path
) -> None:
    def state(at: float) -> tuple[list[torch.optim.lr_scheduler.StepLR], dict[str, object]]:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=at)
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, n) for n in (2, 3)]
        return schedulers, {"in": {"schedulers": [*schedulers, *more]}, "step": at}

    saved, whole = state(0.5)
    ckpt.save(tmp_path, whole)
    loaded, target = state(0.25)
    ckpt.load(tmp_path, target)
    assert target == {"in": {"schedulers": [*loaded, *more]}, "step": 0.5}
    assert [one.state_dict() for one in loaded] == [one.state_dict() for one in saved]
    short, _ = state(0.25)
    with pytest.raises(ckpt.MismatchError, match="schedulers"):
        ckpt.load(tmp_path, {"in": {"schedulers": short[:1]}, "step": 0})


def test_a_list_of_objects_may_be_the_only_part_that_is_selected(tmp_path: Path) -> None:
    def scheduler(lr: float) -> torch.optim.lr_scheduler.StepLR:
        return torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=lr), 2)

    ckpt.save(tmp_path, {"schedulers": [scheduler(0.5)], "step": 7})
    one, target = scheduler(0.25), {"schedulers": [scheduler(0.25)], "step": 0}
    target["schedulers"] = [one]
    ckpt.load(tmp_path, target, include="schedulers")
    assert (one.base_lrs, target["step"]) == ([0.5], 0)
    ckpt.load(tmp_path, {"schedulers": [one], "step": 0}, exclude="schedulers")
    assert one.base_lrs == [0.5]
