"""Ways to write to a state: by optimizers, in place, past autograd, by others."""

import ctypes
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from tests.old_torch import set_version


class Subject:
    """A small model that trains, and loose things beside it."""

    def __init__(self, optimizer: Callable[..., Any] | None = None) -> None:
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
        self.p: Any = self.model[0].weight
        make = optimizer or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
        self.optimizer = make([self.p])
        self.loose, self.array = torch.rand(5), np.arange(7.0)
        self.nest: list[Any] = [1, {"a": 2}]
        self.step()

    @property
    def state(self) -> dict[str, Any]:
        """What is saved."""
        return {
            "model": self.model,
            "optim": self.optimizer,
            "loose": self.loose,
            "array": self.array,
            "nest": self.nest,
        }

    @property
    def moment(self) -> torch.Tensor:
        """A tensor of the optimizer."""
        return next(v for v in self.optimizer.state[self.p].values() if torch.is_tensor(v))

    def step(self) -> None:
        """One step of the optimizer."""

        def loss() -> float:
            self.p.grad = torch.ones_like(self.p)
            return 1.0

        loss()
        closure = (loss,) if isinstance(self.optimizer, torch.optim.LBFGS) else ()
        self.optimizer.step(*closure)


class PlainOptimizer:
    """Not one of torch's: no hooks, and a state dict of its own."""

    def __init__(self, params: list[Any]) -> None:
        self.params = params
        self.state = {p: {"sum": torch.zeros_like(p)} for p in params}

    def step(self) -> None:
        for p in self.params:
            self.state[p]["sum"] += p.grad
            p.data.sub_(0.1 * p.grad)

    def state_dict(self) -> dict[str, Any]:
        return {"sums": [self.state[p]["sum"] for p in self.params]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for p, total in zip(self.params, state["sums"], strict=True):
            self.state[p]["sum"] = total


class OwnStep(torch.optim.SGD):
    """Torch's class with a step that goes past autograd."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(0.1 * p.grad)
                self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)).add_(1)


class Patched(torch.optim.SGD):
    """A class of which `step` is replaced once there are instances, torch's wrapper inside."""


def patch_class(params: list[Any]) -> torch.optim.Optimizer:
    made = Patched(params, lr=0.1, momentum=0.9)
    torchs = torch.optim.SGD.step

    def step(self: Any, closure: Any = None) -> None:
        for p in params:
            p.data.mul_(1.5)
        torchs(self, closure)

    step.hooked = True  # type: ignore[attr-defined]  # as functools.wraps would copy it
    Patched.step = step  # type: ignore[method-assign]
    return made


def patch_instance(params: list[Any]) -> torch.optim.Optimizer:
    made = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    torchs = made.step

    def step(closure: Any = None) -> None:
        for p in params:
            p.data.mul_(1.5)
        torchs(closure)

    made.step = step  # type: ignore[method-assign]
    return made


def scheduled(params: list[Any]) -> torch.optim.Optimizer:
    made = torch.optim.AdamW(params)
    torch.optim.lr_scheduler.StepLR(made, 1)
    return made


def hooked_before(params: list[Any]) -> torch.optim.Optimizer:
    made = torch.optim.SGD(params, lr=0.1, momentum=0.9)

    def hook(*_: object) -> None:
        params[0].data.mul_(1.5)

    made.register_step_pre_hook(hook)
    return made


def globally_hooked(params: list[Any]) -> torch.optim.Optimizer:
    made = torch.optim.SGD(params, lr=0.1, momentum=0.9)

    def hook(given: Any, *_: object) -> None:
        if given is made:
            params[0].data.mul_(1.5)

    register_optimizer_step_pre_hook(hook)
    return made


def optimizers() -> dict[str, Callable[..., Any]]:
    """Every kind of optimizer, by a name for it."""
    named: dict[str, Callable[..., Any]] = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
        "Nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        "capturable Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
        "differentiable": lambda p: torch.optim.SGD(p, lr=0.1, maximize=True),
        "not torch's": PlainOptimizer,
        "own step": lambda p: OwnStep(p, lr=0.1),
        "step of the class replaced": patch_class,
        "step of the instance replaced": patch_instance,
        "step compiled by a scheduler": scheduled,
        "a hook that writes": hooked_before,
        "a global hook that writes": globally_hooked,
    }
    kinds = "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop LBFGS Adafactor Muon"
    for kind in kinds.split():
        known = getattr(torch.optim, kind, None)
        if known is not None:
            named[kind] = known
    for kind in ("Adam", "AdamW", "SGD", "Adagrad"):
        known = getattr(torch.optim, kind)
        named[f"foreach {kind}"] = lambda p, known=known: known(p, lr=0.1, foreach=True)
        named[f"fused {kind}"] = lambda p, known=known: known(p, lr=0.1, fused=True)
    return named


def no_grad(write: Callable[[Subject], object]) -> Callable[[Subject], object]:
    return torch.no_grad()(write)


def in_thread(write: Callable[[], object]) -> None:
    thread = threading.Thread(target=write)
    thread.start()
    thread.join(60)


def forked(write: Callable[[], object]) -> None:
    child = os.fork()
    if not child:
        write()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def set_item(tensor: Any, value: float) -> None:
    tensor[0] = value


def average(s: Subject) -> None:
    mean = AveragedModel(s.model)
    mean.module = s.model  # averages into the model itself
    other = Subject().model
    mean.n_averaged += 1
    mean.update_parameters(other)


def receive(s: Subject) -> None:
    other, turn = 1 - dist.get_rank(), dist.get_rank()
    for sender in range(2):
        if sender == turn:
            dist.send(torch.full((8, 6), 5.0), other)
        else:
            dist.recv(s.p.data, other)


def receive_later(s: Subject) -> None:
    works = [dist.isend(torch.full((8, 6), 5.0), 1 - dist.get_rank())]
    works.append(dist.irecv(s.p.data, 1 - dist.get_rank()))
    for work in works:
        work.wait()


def gather(s: Subject) -> None:
    given = s.p.detach().clone() + 1
    into = [s.p.data, torch.empty(8, 6)] if dist.get_rank() == 0 else None
    dist.gather(given, into)
    into = [torch.empty(8, 6), s.p.data] if dist.get_rank() == 1 else None
    dist.gather(given, into, dst=1)


def reduce_on_both(s: Subject) -> None:
    for rank in range(2):
        dist.reduce(s.p.data if dist.get_rank() == rank else torch.ones(8, 6), rank)


def broadcast_from(s: Subject) -> None:
    for rank in range(2):
        dist.broadcast(torch.ones(8, 6) if dist.get_rank() == rank else s.p.data, rank)


def scatter(s: Subject) -> None:
    parts = [torch.full((8, 6), 3.0), torch.full((8, 6), 4.0)]
    dist.scatter(s.p.data, parts if dist.get_rank() == 0 else None)


def mapped_file(s: Subject) -> Callable[[Subject], None]:
    """Lets the parameter lie in a file that another process writes to."""
    file = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115
    file.write(s.p.detach().numpy().tobytes())
    file.close()
    s.p.data = torch.from_file(file.name, shared=True, size=48, dtype=torch.float32).view(8, 6)

    def write(_: Subject) -> None:
        with open(file.name, "r+b") as target:
            subprocess.run(
                ["dd", "bs=192", "count=1", "conv=notrunc", "status=none"],
                stdin=open("/dev/zero", "rb"),  # noqa: SIM115
                stdout=target,
                check=True,
            )
        os.unlink(file.name)

    return write


def shared(s: Subject) -> Callable[[Subject], None]:
    s.p.data.share_memory_()
    return lambda s: forked(lambda: s.p.detach().numpy().fill(7))


Prepared = Callable[[Subject], Callable[[Subject], object]]
PREPARED: dict[str, Prepared] = {
    "a file, by another process": mapped_file,
    "shared memory, by a forked process": shared,
}
"""Ways that need something to be done with the subject before it is saved."""

IN_PLACE: dict[str, Callable[[Subject], object]] = {
    "mul_": lambda s: s.p.mul_(1.5),
    "add_": lambda s: s.p.add_(1),
    "copy_": lambda s: s.p.copy_(torch.ones(8, 6)),
    "zero_": lambda s: s.p.zero_(),
    "fill_": lambda s: s.p.fill_(3),
    "uniform_": lambda s: s.p.uniform_(2, 3),
    "normal_": lambda s: s.p.normal_(),
    "item": lambda s: set_item(s.p, 3.0),
    "index_fill_": lambda s: s.p.index_fill_(0, torch.tensor([1]), 9.0),
    "index_add_": lambda s: s.p.index_add_(0, torch.tensor([1]), torch.ones(1, 6)),
    "masked_fill_": lambda s: s.p.masked_fill_(torch.ones(8, 6, dtype=torch.bool), 2.0),
    "scatter_": lambda s: s.p.scatter_(0, torch.zeros(1, 6, dtype=torch.long), 8.0),
    "put_": lambda s: s.p.put_(torch.tensor([0]), torch.tensor([4.0])),
    "addcmul_": lambda s: s.p.addcmul_(s.p, s.p),
    "lerp_": lambda s: s.p.lerp_(torch.ones(8, 6), 0.5),
    "clamp_": lambda s: s.p.clamp_(5, 6),
    "out=": lambda s: torch.add(s.p, 1, out=s.p),
    "_foreach_mul_": lambda s: torch._foreach_mul_([s.p], 2.0),
    "nn.init": lambda s: nn.init.ones_(s.p),
    "a view": lambda s: s.p.view(-1).mul_(2),
    "a transpose": lambda s: s.p.t().mul_(2),
    "as_strided": lambda s: s.p.as_strided((2,), (1,)).mul_(2),
    "detach": lambda s: s.p.detach().mul_(2),
    "an optimizer's state": lambda s: s.moment.mul_(3).add_(1),
    "load_state_dict": lambda s: s.model.load_state_dict(Subject().model.state_dict()),
    "vector_to_parameters": lambda s: nn.utils.vector_to_parameters(
        torch.ones(sum(p.numel() for p in s.model.parameters())), s.model.parameters()
    ),
    "averaged weights": average,
    "a loose tensor": lambda s: s.loose.mul_(9),
    "a buffer by forward": lambda s: s.model(torch.rand(4, 6)),
}
"""Operations that torch counts."""

PAST: dict[str, Callable[[Subject], object]] = {
    ".data.mul_": lambda s: s.p.data.mul_(1.5),
    ".data.copy_": lambda s: s.p.data.copy_(torch.ones(8, 6)),
    ".data[...]": lambda s: set_item(s.p.data.view(1, -1), 3.0),
    ".data of the moment": lambda s: s.moment.data.add_(1),
    ".data of a view": lambda s: s.p.view(-1).data.mul_(2),
    "numpy": lambda s: s.p.detach().numpy().fill(2),
    "numpy view": lambda s: s.p.detach().numpy().reshape(-1)[::-1].fill(2),
    "numpy of the moment": lambda s: s.moment.numpy().fill(2),
    "np.asarray": lambda s: np.multiply(np.asarray(s.p.detach()), 3, out=s.p.detach().numpy()),
    "memoryview": lambda s: (
        memoryview(s.p.detach().numpy()).cast("B").__setitem__(slice(0, 192), b"\1" * 192)
    ),
    "torch.from_dlpack": lambda s: torch.from_dlpack(s.p.detach()).mul_(2),
    "np.from_dlpack": lambda s: torch.from_dlpack(
        torch.utils.dlpack.to_dlpack(s.p.detach())
    ).zero_(),
    "untyped storage": lambda s: s.p.untyped_storage().fill_(1),
    "storage copy_": lambda s: s.p.untyped_storage().copy_(torch.ones(48).untyped_storage()),
    "typed storage": lambda s: torch.TypedStorage(
        wrap_storage=s.p.untyped_storage(), dtype=torch.float32, _internal=True
    ).fill_(5.0),
    "a tensor over the storage": lambda s: torch.empty(0).set_(s.p.untyped_storage()).fill_(2),
    "torch.frombuffer": lambda s: torch.frombuffer(
        (ctypes.c_char * 192).from_address(s.p.data_ptr()), dtype=torch.float32
    ).mul_(2),
    "ctypes.memset": lambda s: ctypes.memset(s.p.data_ptr(), 1, 192),
    "preserved version": lambda s: preserving_version(s),
    "a hidden version": lambda s: hiding_version(s),
    "inference mode": lambda s: torch.inference_mode()(lambda: s.p.mul_(2))(),
    "a thread": lambda s: in_thread(lambda: s.p.data.mul_(2)),
    "a thread, by numpy": lambda s: in_thread(lambda: s.p.detach().numpy().fill(4)),
    "a pool of threads": lambda s: ThreadPoolExecutor(2).submit(s.p.data.mul_, 2).result(60),
    "a step in another thread": lambda s: in_thread(s.step),
    "a loose array": lambda s: s.array.fill(3),
    "a loose array's view": lambda s: s.array[2:4].fill(3),
    "a list in the state": lambda s: s.nest.append(4),
    "a dict in the state": lambda s: s.nest[1].update(a=3),
    "a group's option": lambda s: s.optimizer.param_groups[0].update(lr=7.0),
}
"""What torch does not count, or nobody but a step does."""

COLLECTIVE: dict[str, Callable[[Subject], object]] = {
    "all_reduce": lambda s: dist.all_reduce(s.p.data),
    "all_reduce of the parameter": lambda s: dist.all_reduce(s.p.detach()),
    "all_reduce of the moment": lambda s: dist.all_reduce(s.moment),
    "all_reduce later": lambda s: dist.all_reduce(s.p.data, async_op=True).wait(),
    "broadcast": broadcast_from,
    "reduce": reduce_on_both,
    "scatter": scatter,
    "all_gather": lambda s: dist.all_gather([s.p.data, torch.empty(8, 6)], torch.full((8, 6), 2.0)),
    "all_gather_into_tensor": lambda s: dist.all_gather_into_tensor(s.p.data, torch.ones(4, 6)),
    "gather": gather,
    "send and recv": receive,
    "isend and irecv": receive_later,
    "all_to_all_single": lambda s: dist.all_to_all_single(s.p.data, torch.full((8, 6), 6.0)),
}
"""Messages of torch.distributed, by both of two ranks."""

SWAPPED: dict[str, Callable[[Subject], object]] = {
    ".data = ": lambda s: setattr(s.p, "data", torch.ones(8, 6)),
    "set_": lambda s: s.moment.set_(torch.full((8, 6), 3.0)),
    "swap_tensors": lambda s: torch.utils.swap_tensors(s.p, nn.Parameter(torch.ones(8, 6))),
    "another parameter": lambda s: setattr(s.model[0], "weight", nn.Parameter(torch.ones(8, 6))),
    "to another type": lambda s: s.model.double(),
}
"""Other memory in the place of the saved one."""

UNSEEN: dict[str, Callable[[Subject], object]] = {
    "one element through .data": lambda s: s.p.data.view(-1)[7:8].add_(1),
    "one element by numpy": lambda s: s.p.detach().numpy().reshape(-1)[9:10].fill(3),
    "one byte": lambda s: ctypes.memset(s.p.data_ptr() + 43, 77, 1),
}
"""What a sample may miss, where copies are put off."""


def preserving_version(s: Subject) -> None:
    with torch.autograd._unsafe_preserve_version_counter(s.p):
        s.p.mul_(2)


def hiding_version(s: Subject) -> None:
    before = s.p._version
    s.p.mul_(2)
    set_version(s.p, before)


def ways() -> dict[str, tuple[Subject, Callable[[Subject], object]]]:
    """Every way by name, with the subject that it writes to."""
    found: dict[str, tuple[Subject, Callable[[Subject], object]]] = {}
    for name, make in optimizers().items():
        found[f"optimizer {name}"] = Subject(make), Subject.step
    for table in (IN_PLACE, PAST, COLLECTIVE, SWAPPED, UNSEEN):
        for name, write in table.items():
            found[name] = Subject(), no_grad(write)
    for name, prepare in PREPARED.items():
        subject = Subject()
        found[name] = subject, no_grad(prepare(subject))
    return found
