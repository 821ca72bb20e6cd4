"""Modules are saved and loaded as torch does: the entries of `state_dict()`, by clean names.

The oracle is torch: `state_dict()` and `load_state_dict()` of the module itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import parametrizations

import ckpt
import sharding

Make = Callable[[], nn.Module]
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning")


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone, for wrappers that need one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def stored(place: Path) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint's module `m` by name."""
    found = ckpt.read(place)
    assert isinstance(found, dict)
    return dict(found["m"])


class Marked(nn.Linear):
    """A layer with a buffer, one that is not saved, and one that is None."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("mark", torch.rand(2))
        self.register_buffer("scratch", torch.rand(2), persistent=False)
        self.register_buffer("nothing", None)


class Holder(nn.Module):
    """A user's own class, with children of the names that wrappers use, and a parameter."""

    def __init__(self, child: str) -> None:
        super().__init__()
        self.add_module(child, Marked())
        self.weight = nn.Parameter(torch.rand(2, 2))
        self.register_buffer("mark", torch.rand(3))


def grown(module: nn.Module) -> nn.Module:
    """The module, which gets a buffer, a parameter and a child of its own."""
    module.register_buffer("ema", torch.rand(2))
    module.register_parameter("scale", nn.Parameter(torch.rand(3)))
    module.add_module("head", nn.Linear(2, 1))
    return module


def compiled(module: nn.Module) -> nn.Module:
    """The module in the wrapper of torch.compile."""
    found: nn.Module = torch.compile(module, backend="eager")  # type: ignore[assignment]
    return found


def ddp(module: nn.Module) -> nn.Module:
    """The module in DistributedDataParallel, over the ranks of this test."""
    return nn.parallel.DistributedDataParallel(module)


WRAPPERS: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "compiled": (compiled, "_orig_mod."),
    "DDP": (ddp, "module."),
    "DataParallel": (nn.DataParallel, "module."),
    "compiled DDP": (lambda inner: compiled(ddp(inner)), "_orig_mod.module."),
    "DDP of a compiled one": (lambda inner: ddp(compiled(inner)), "module._orig_mod."),
    "checkpointed": (checkpoint_wrapper, "_checkpoint_wrapped_module."),
}
"""The wrapping functions, and the parts of names that they add."""


def same(one: nn.Module, other: nn.Module) -> None:
    """Both modules have the same state dict."""
    mine, theirs = one.state_dict(), other.state_dict()
    assert list(mine) == list(theirs)
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", list(WRAPPERS))
def test_entries_of_a_wrapper_itself_are_saved_and_loaded(
    tmp_path: Path, kind: str, nested: bool
) -> None:
    torch.manual_seed(0)
    wrap, part = WRAPPERS[kind]

    def make() -> nn.Module:
        # the hooks of activation checkpointing move all entries of the wrapper into its module
        made = wrap(Marked()) if kind == "checkpointed" else grown(wrap(Marked()))
        return nn.Sequential(made, nn.Linear(1, 1)) if nested else made

    saved, target = make(), make()
    ckpt.save(tmp_path / "a", {"m": saved})
    names = [key.replace(part, "") for key in saved.state_dict()]
    assert list(stored(tmp_path / "a")) == names
    ckpt.load(tmp_path / "a", {"m": target})
    same(saved, target)
    ckpt.state_dict.load({"m": make()}, {"m": saved})
    ckpt.load(tmp_path / "a", {"m": saved})
    same(saved, target)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("child", ["_orig_mod", "module", "_fsdp_wrapped_module", "a_orig_mod"])
def test_a_childs_name_alone_makes_no_wrapper(tmp_path: Path, child: str, nested: bool) -> None:
    torch.manual_seed(0)
    saved, target = Holder(child), Holder(child)
    if nested:
        saved, target = nn.Sequential(saved), nn.Sequential(target)  # type: ignore[assignment]
    ckpt.save(tmp_path / "a", {"m": saved})
    assert list(stored(tmp_path / "a")) == list(saved.state_dict())
    ckpt.load(tmp_path / "a", {"m": target})
    same(saved, target)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", ["compiled", "DDP", "DataParallel", "compiled DDP"])
def test_a_wrappers_entry_of_the_name_of_an_inner_one_is_an_error(
    tmp_path: Path, kind: str
) -> None:
    wrap, part = WRAPPERS[kind]
    module = nn.Sequential(wrap(Marked()))
    ckpt.save(tmp_path / "a", {"m": module})
    module[0]._buffers["mark"] = torch.rand(2)  # a compiled one refuses it in register_buffer
    both = rf"'0\.mark' and '0\.{part}mark'.*the name '0\.mark'"
    for call in (ckpt.save, ckpt.load):
        with pytest.raises(ckpt.CkptError, match=both):
            call(tmp_path / "b" if call is ckpt.save else tmp_path / "a", {"m": module})


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", list(WRAPPERS))
def test_an_optimizer_of_a_wrappers_own_parameters_resumes(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    wrap, _ = WRAPPERS[kind]

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(wrap(Marked()) if kind == "checkpointed" else grown(wrap(Marked())))
        return model, torch.optim.Adam(model.parameters())

    model, optim = make()
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optim.step()
    ckpt.save(tmp_path / "a", {"m": model, "o": optim})
    fresh, other = make()
    ckpt.load(tmp_path / "a", {"m": fresh, "o": other})
    same(model, fresh)
    for one, two in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(optim.state[one]["exp_avg"], other.state[two]["exp_avg"])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", ["compiled", "DDP", "DataParallel", "compiled DDP"])
def test_a_module_is_loaded_from_and_into_a_wrapped_one(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    wrap, _ = WRAPPERS[kind]
    plain, inner = nn.Sequential(Marked()), Marked()
    wrapped = nn.Sequential(wrap(inner))
    ckpt.save(tmp_path / "a", {"m": plain})
    ckpt.load(tmp_path / "a", {"m": wrapped})
    same(plain, nn.Sequential(inner))
    again = nn.Sequential(Marked())
    ckpt.save(tmp_path / "b", {"m": wrapped})
    ckpt.load(tmp_path / "b", {"m": again})
    same(plain, again)


def sharded_with_own_entries(folder: Path, ours: bool, original: bool) -> set[str]:
    torch.manual_seed(0)
    outer = sharding.FullyShardedDataParallel if ours else FullyShardedDataParallel
    device = {} if ours else {"device_id": torch.device("cpu")}

    def make() -> nn.Module:
        made = outer(compiled(Marked()), use_orig_params=original, **device)
        made.register_buffer("ema", torch.rand(2))
        return made

    saved, target = make(), make()
    ckpt.save(folder, {"m": saved})
    ckpt.load(folder, {"m": target})
    mine, theirs = (
        [*module.parameters(), module.ema, module.get_buffer(inner)]
        for module in (saved, target)
        for inner in [next(name for name, _ in module.named_buffers() if name.endswith("mark"))]
    )
    assert all(map(torch.equal, mine, theirs))
    return set(stored(folder))


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("original", [False, True])
def test_entries_of_a_sharded_wrapper_itself_are_saved_and_loaded(
    clusters: Callable[[int], Any], tmp_path: Path, ours: bool, original: bool
) -> None:
    for names in clusters(2).run(sharded_with_own_entries, tmp_path / "a", ours, original):
        assert names == {"weight", "bias", "mark", "ema"}


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    return module


KINDS: dict[str, Make] = {
    "no entry": nn.ReLU,
    "buffers not saved, and None": Marked,
    "ties": tied,
    "a module in two places": lambda: nn.Sequential(*[Marked()] * 2),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(2, 2)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(2, 2)),
    "batch norm": lambda: nn.BatchNorm1d(2),
    "a script": lambda: torch.jit.script(Marked()),
    "a trace": lambda: torch.jit.trace(Marked(), torch.rand(1, 2)),
    "a script in a wrapper": lambda: nn.DataParallel(torch.jit.script(Marked())),
    "an average": lambda: torch.optim.swa_utils.AveragedModel(Marked()),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_module_has_the_names_and_tensors_of_its_state_dict(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    saved, target = KINDS[kind](), KINDS[kind]()
    ckpt.save(tmp_path / "a", {"m": saved})
    before, found = saved.state_dict(), stored(tmp_path / "a")
    part = "module." if isinstance(saved, nn.DataParallel) else ""
    assert list(found) == [name.removeprefix(part) for name in before]
    assert all(map(torch.equal, found.values(), before.values()))
    ckpt.load(tmp_path / "a", {"m": target})
    same(saved, target)
