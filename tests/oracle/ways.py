"""The ways in and out, each beside torch's own: a cell is an object of the zoo and one way.

A way takes a source and a target and returns the target's content. The oracle is the same source,
through `state_dict()` and `load_state_dict()` alone, in a target built alike. `compare` lists what
differs; a refusal of ckpt is a difference too, unless torch refuses.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedTensorMixin

import ckpt
import ckpt.dcp
from tests.oracle.optimizers import SCHEDULERS, Training
from tests.oracle.zoo import Entry


@dataclass(frozen=True)
class Refused:
    """A call raised."""

    by: str
    text: str

    @property
    def is_named(self) -> bool:
        """Whether ckpt refused in its own words, or torch at the end of a way."""
        return self.by.startswith("ckpt")


class TorchRefused(Exception):
    """A call of torch at the end of a way raised."""


def attempt(action: Callable[[], Any]) -> Any:
    """What the action returns, or how it was refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return action()
    except (ckpt.CkptError, TorchRefused) as error:
        return Refused(f"ckpt {type(error).__name__}", str(error))
    except BaseException as error:  # that of DCP is no Exception
        return Refused(f"{type(error).__module__}.{type(error).__qualname__}", str(error))


def whole(value: Any) -> Any:
    """A copy of a nest with whole tensors, which later changes of the source leave as it is."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, UninitializedTensorMixin):
        return "uninitialized"
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: whole(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(whole(each) for each in value)
    return copy.deepcopy(value)


def compare(got: Any, want: Any, path: str = "") -> Iterator[str]:
    """What differs between two contents, a line each."""
    if isinstance(want, Refused) or isinstance(got, Refused):
        if not isinstance(want, Refused):
            yield f"{path}: refused by {got.by}: {got.text[:300]}"
        elif not isinstance(got, Refused):
            yield f"{path}: torch refuses ({want.text[:200]})"
        elif not got.is_named:
            yield f"{path}: a bare {got.by}: {got.text[:200]}"
    elif isinstance(want, Tensor):
        yield from _compare_tensors(got, want, path)
    elif isinstance(want, Mapping):
        if not isinstance(got, Mapping):
            yield f"{path}: {type(got).__name__} in the place of a dict"
            return
        for key in [key for key in want if key not in got]:
            yield f"{path}.{key}: lost"
        for key in [key for key in got if key not in want]:
            yield f"{path}.{key}: invented"
        for key in [key for key in want if key in got]:
            yield from compare(got[key], want[key], f"{path}.{key}")
    elif isinstance(want, list | tuple):
        if type(got) is not type(want) or len(got) != len(want):
            yield f"{path}: {got!r:.60} in the place of {want!r:.60}"
            return
        for index, (one, other) in enumerate(zip(got, want, strict=True)):
            yield from compare(one, other, f"{path}[{index}]")
    elif type(got) is not type(want) or not (got == want or (got != got and want != want)):
        if callable(want) and callable(got):
            return
        yield f"{path}: {got!r:.60} in the place of {want!r:.60}"


def _compare_tensors(got: Any, want: Tensor, path: str) -> Iterator[str]:
    if not isinstance(got, Tensor):
        yield f"{path}: {got!r:.60} in the place of a tensor"
    elif got.dtype != want.dtype or got.shape != want.shape:
        yield (
            f"{path}: {got.dtype} {tuple(got.shape)} in the place of {want.dtype} "
            f"{tuple(want.shape)}"
        )
    elif want.is_meta or got.is_meta:
        if want.is_meta != got.is_meta:
            yield f"{path}: {got.device} in the place of {want.device}"
    elif got.is_sparse or want.is_sparse:
        if not torch.equal(got.to_dense(), want.to_dense()):
            yield f"{path}: other values"
    elif want.dtype.is_floating_point and want.element_size() == 1:
        if not torch.equal(got.view(torch.uint8), want.view(torch.uint8)):
            yield f"{path}: other values"
    elif not torch.equal(got, want):
        yield f"{path}: other values"


# --- modules ---------------------------------------------------------------------------------

Way = Callable[[Any, Any, Path], Any]
"""From source, target and an empty folder to the target's content."""


def state_dict(module: Any) -> Any:
    """A copy of what torch gives."""
    return whole(dict(module.state_dict()))


def by_torch(source: Any, target: Any) -> Any:
    """The oracle: torch's own way from one to the other."""
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=False))
    return state_dict(target)


def load(source: Any, target: Any, folder: Path) -> Any:
    ckpt.save(str(folder / "saved"), {"m": source})
    ckpt.load(str(folder / "saved"), {"m": target})
    return state_dict(target)


def load_root(source: Any, target: Any, folder: Path) -> Any:
    """The object is the whole state."""
    ckpt.save(str(folder / "saved"), source)
    ckpt.load(str(folder / "saved"), target)
    return state_dict(target)


def load_again(source: Any, target: Any, folder: Path) -> Any:
    """Into a target that was filled before, by another state."""
    ckpt.state_dict.load({"m": target}, {"m": target})
    return load(source, target, folder)


def state_dict_load(source: Any, target: Any, folder: Path) -> Any:
    ckpt.state_dict.load({"m": source}, {"m": target})
    return state_dict(target)


def background(source: Any, target: Any, folder: Path) -> Any:
    ckpt.save(str(folder / "saved"), {"m": source}, blocking=False).wait()
    ckpt.load(str(folder / "saved"), {"m": target})
    return state_dict(target)


def checkpointer(source: Any, target: Any, folder: Path) -> Any:
    with ckpt.Checkpointer(str(folder / "run"), every_steps=1) as run:
        run.restore({})
        run.save(1, {"m": source})
    with ckpt.Checkpointer(str(folder / "run"), every_steps=1) as run:
        run.restore({"m": target})
    return state_dict(target)


def torch_save(source: Any, target: Any, folder: Path) -> Any:
    """A file that torch wrote, loaded by ckpt."""
    torch.save({"m": source.state_dict()}, folder / "saved.pt")
    ckpt.load(str(folder / "saved.pt"), {"m": target})
    return state_dict(target)


def take(target: Any, state: Any) -> Any:
    """Torch's own call at the end of a way: its refusal is the oracle's."""
    try:
        target.load_state_dict(state)
    except Exception as error:
        raise TorchRefused(str(error)) from error
    return state_dict(target)


def to_torch(source: Any, target: Any, folder: Path) -> Any:
    """A checkpoint of ckpt, converted to a file that torch loads.

    The file has the names without a wrapper's parts, for the module in the wrapper.
    """
    ckpt.save(str(folder / "saved"), {"m": source})
    ckpt.convert(str(folder / "saved"), str(folder / "saved.pt"), to="torch")
    return take_plain(target, torch.load(folder / "saved.pt", weights_only=False)["m"])


def read_by_hand(source: Any, target: Any, folder: Path) -> Any:
    """`ckpt.read`, and torch's own `load_state_dict`."""
    ckpt.save(str(folder / "saved"), {"m": source})
    return take_plain(target, ckpt.read(str(folder / "saved"))["m"])


def convert_by_hand(source: Any, target: Any, folder: Path) -> Any:
    """`ckpt.state_dict.convert`, and torch's own `load_state_dict`."""
    return take_plain(target, ckpt.state_dict.convert({"m": source}, to="full")["m"])


def take_plain(target: Any, state: Any) -> Any:
    """As `take`, from names without a wrapper's parts: the module in a wrapper takes those."""
    by_plain_name = {target.plain_name(name): name for name in target.state_dict()}
    for name in list(state):
        state[by_plain_name.get(name, name)] = state.pop(name)
    return take(target, state)


def dcp(source: Any, target: Any, folder: Path) -> Any:
    """Saved and loaded by `ckpt.dcp`."""
    ckpt.dcp.save({"m": source.state_dict()}, checkpoint_id=folder / "saved")
    into = {"m": target.state_dict()}
    ckpt.dcp.load(into, checkpoint_id=folder / "saved")
    return take(target, into["m"])


def to_dcp(source: Any, target: Any, folder: Path) -> Any:
    """A checkpoint of `ckpt.dcp`, converted to a folder that torch's DCP loads."""
    ckpt.dcp.save({"m": source.state_dict()}, checkpoint_id=folder / "native")
    ckpt.convert(str(folder / "native"), str(folder / "saved"), to="dcp")
    into = {"m": target.state_dict()}
    torch_dcp.load(into, checkpoint_id=folder / "saved")
    return take(target, into["m"])


def from_dcp(source: Any, target: Any, folder: Path) -> Any:
    """Saved by torch's DCP and loaded by `ckpt.dcp`."""
    torch_dcp.save({"m": source.state_dict()}, checkpoint_id=folder / "saved")
    into = {"m": target.state_dict()}
    ckpt.dcp.load(into, checkpoint_id=folder / "saved")
    return take(target, into["m"])


WAYS: dict[str, Way] = {
    "load": load,
    "load as the whole state": load_root,
    "load again": load_again,
    "load from memory": state_dict_load,
    "background save": background,
    "Checkpointer": checkpointer,
    "from torch.save": torch_save,
    "convert to torch": to_torch,
    "read": read_by_hand,
    "convert in memory": convert_by_hand,
    "ckpt.dcp": dcp,
    "ckpt.dcp to torch's DCP": to_dcp,
    "torch's DCP to ckpt.dcp": from_dcp,
}
"""The ways that fill a target."""


def by_torch_dcp(source: Any, target: Any, folder: Path) -> Any:
    """The oracle of the ways by DCP: torch's DCP alone."""
    torch_dcp.save({"m": source.state_dict()}, checkpoint_id=folder / "oracle")
    into = {"m": target.state_dict()}
    torch_dcp.load(into, checkpoint_id=folder / "oracle")
    target.load_state_dict(into["m"])
    return state_dict(target)


def module_cell(entry: Entry, way: str, folder: Path) -> list[str]:
    """What differs from torch when an object of the zoo goes this way."""
    is_dcp = "dcp" in way
    want = attempt(
        lambda: (
            by_torch_dcp(entry.build(1), entry.build(2), folder)
            if is_dcp
            else by_torch(entry.build(1), entry.build(2))
        )
    )

    def ours() -> Any:
        target = entry.build(2)
        vars(target)["plain_name"] = entry.plain
        return WAYS[way](entry.build(1), target, folder)

    return list(compare(attempt(ours), want))


def names_cell(entry: Entry, way: str, folder: Path) -> list[str]:
    """What differs between `state_dict()` and what a program reads or converts in memory."""
    source = entry.build(1)
    want = attempt(lambda: {entry.plain(n): v for n, v in state_dict(source).items()})

    def read() -> Any:
        ckpt.save(str(folder / "saved"), {"m": source})
        return dict(ckpt.read(str(folder / "saved"))["m"])

    def converted() -> Any:
        return whole(ckpt.state_dict.convert(source, to="full"))

    return list(compare(attempt({"read": read, "convert": converted}[way]), want))


# --- optimizers ------------------------------------------------------------------------------


def trained_by_torch(source: Training, target: Training) -> Any:
    """The oracle of a resumed training: torch's own functions, then two steps."""
    file = io.BytesIO()
    torch.save([part.state_dict() for part in (*source.modules.values(), source.optim)], file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for part, state in zip((*target.modules.values(), target.optim), loaded, strict=True):
        part.load_state_dict(state)
    with torch.no_grad():
        for into, tensor in zip(target.loose, source.loose, strict=True):
            into.copy_(tensor)
    return went_on(target)


def went_on(training: Training) -> Any:
    """The content after two further steps."""
    loaded = whole(training.optim.state_dict())
    for number in (7, 8):
        training.step(number)
    return {
        "loaded": loaded,
        "weights": [whole(p) for p in training.parameters],
        "state": whole(training.optim.state_dict()),
    }


def _load(source: Training, target: Training, folder: Path) -> None:
    ckpt.save(str(folder / "saved"), source.state)
    ckpt.load(str(folder / "saved"), target.state)


def _from_memory(source: Training, target: Training, folder: Path) -> None:
    ckpt.state_dict.load(source.state, target.state)


def _checkpointer(source: Training, target: Training, folder: Path) -> None:
    with ckpt.Checkpointer(str(folder / "run"), every_steps=1) as run:
        run.restore({})
        run.save(1, source.state)
    with ckpt.Checkpointer(str(folder / "run"), every_steps=1) as run:
        run.restore(target.state)


def _from_torch(source: Training, target: Training, folder: Path) -> None:
    state = {
        name: part if isinstance(part, Tensor) else part.state_dict()
        for name, part in source.state.items()
    }
    torch.save(state, folder / "saved.pt")
    ckpt.load(str(folder / "saved.pt"), target.state)


OPTIMIZER_WAYS: dict[str, Callable[[Training, Training, Path], None]] = {
    "load": _load,
    "load from memory": _from_memory,
    "Checkpointer": _checkpointer,
    "from torch.save": _from_torch,
}


def optimizer_cell(
    optimizer: str, grouping: str, way: str, is_used: bool, folder: Path
) -> list[str]:
    """What differs from torch when a training goes on after this way."""

    def source() -> Training:
        made = Training(optimizer, grouping, 1)
        made.step(1)
        made.step(2)
        return made

    def target() -> Training:
        made = Training(optimizer, grouping, 2)
        if is_used:
            made.step(5)
        return made

    def ours() -> Any:
        into = target()
        OPTIMIZER_WAYS[way](source(), into, folder)
        return went_on(into)

    return list(compare(attempt(ours), attempt(lambda: trained_by_torch(source(), target()))))


def scheduler_cell(name: str, folder: Path) -> list[str]:
    """What differs from torch when a scheduler or a scaler goes on."""

    def make(steps: int) -> tuple[Training, Any]:
        training = Training("SGD, momentum", "two groups", 1)
        scheduler = SCHEDULERS[name](training.optim)
        go_on(training, scheduler, steps)
        return training, scheduler

    def go_on(training: Training, scheduler: Any, steps: int) -> Any:
        rates = []
        for number in range(steps):
            training.step(number)
            if name == "GradScaler":
                scheduler.scale(torch.ones(()))
                scheduler.update(4.0 + number)
            elif name == "ReduceLROnPlateau":
                scheduler.step(1.0 + number)
            else:
                scheduler.step()
            rates.append([group["lr"] for group in training.optim.param_groups])
        return rates, whole(scheduler.state_dict())

    def ours() -> Any:
        training, scheduler = make(3)
        ckpt.save(str(folder / "saved"), {**training.state, "scheduler": scheduler})
        training, scheduler = make(0)
        ckpt.load(str(folder / "saved"), {**training.state, "scheduler": scheduler})
        return go_on(training, scheduler, 3)

    def by_torch() -> Any:
        first, scheduler = make(3)
        saved = copy.deepcopy(scheduler.state_dict())
        second, other = make(0)
        for a, b in zip(first.state.values(), second.state.values(), strict=True):
            b.load_state_dict(copy.deepcopy(a.state_dict()))
        other.load_state_dict(saved)
        return go_on(second, other, 3)

    return list(compare(attempt(ours), attempt(by_torch)))
