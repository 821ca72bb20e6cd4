"""The optimizers, schedulers and scalers of the zoo.

`OPTIMIZERS` makes one from parameter groups; `GROUPINGS` makes modules and the groups of their
parameters. Both are functions of their arguments alone, so that a resumed run can be compared with
one that went on. `LIBRARIES` has the optimizers of libraries, which may be absent.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer, lr_scheduler, swa_utils

Groups = list[dict[str, Any]]
Make = Callable[[Groups], Optimizer]


def _torch() -> dict[str, Make]:
    o = torch.optim
    made: dict[str, Make] = {
        "Adadelta": lambda g: o.Adadelta(g),
        "Adafactor": lambda g: o.Adafactor(g),
        "Adagrad": lambda g: o.Adagrad(g),
        "Adagrad, lr_decay": lambda g: o.Adagrad(g, lr_decay=0.1, initial_accumulator_value=0.1),
        "Adam": lambda g: o.Adam(g),
        "Adam, amsgrad": lambda g: o.Adam(g, amsgrad=True),
        "Adam, foreach": lambda g: o.Adam(g, foreach=True),
        "Adam, fused": lambda g: o.Adam(g, fused=True),
        "Adam, rate in a tensor": lambda g: o.Adam(g, lr=torch.tensor(0.01), foreach=False),
        "Adam, maximize": lambda g: o.Adam(g, maximize=True),
        "Adagrad, fused": lambda g: o.Adagrad(g, fused=True),
        "AdamW, fused": lambda g: o.AdamW(g, fused=True, amsgrad=True),
        "AdamW": lambda g: o.AdamW(g),
        "AdamW, amsgrad": lambda g: o.AdamW(g, amsgrad=True),
        "AdamW, betas in tensors": lambda g: o.AdamW(
            g, betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False
        ),
        "Adamax": lambda g: o.Adamax(g),
        "ASGD": lambda g: o.ASGD(g),
        "ASGD, foreach": lambda g: o.ASGD(g, foreach=True, maximize=True),
        "NAdam": lambda g: o.NAdam(g),
        "NAdam, decoupled": lambda g: o.NAdam(g, decoupled_weight_decay=True, foreach=True),
        "RAdam": lambda g: o.RAdam(g),
        "RAdam, decoupled": lambda g: o.RAdam(g, decoupled_weight_decay=True, foreach=True),
        "RMSprop": lambda g: o.RMSprop(g),
        "RMSprop, centered": lambda g: o.RMSprop(g, centered=True, momentum=0.5),
        "Rprop": lambda g: o.Rprop(g),
        "Rprop, maximize": lambda g: o.Rprop(g, maximize=True),
        "SGD": lambda g: o.SGD(g),
        "SGD, momentum": lambda g: o.SGD(g, momentum=0.9),
        "SGD, nesterov": lambda g: o.SGD(g, lr=0.1, momentum=0.9, nesterov=True),
        "SGD, foreach": lambda g: o.SGD(g, momentum=0.9, dampening=0.1, foreach=True),
        "SGD, fused": lambda g: o.SGD(g, momentum=0.9, fused=True),
        "SparseAdam": lambda g: o.SparseAdam(g),
    }
    if hasattr(o, "Muon"):
        made["Muon"] = lambda g: o.Muon([_matrices(group) for group in g])
    return made


def _matrices(group: dict[str, Any]) -> dict[str, Any]:
    """The group without what Muon refuses."""
    return {**group, "params": [p for p in group["params"] if p.ndim == 2]}


def _of(module: str, name: str, **options: Any) -> Make:
    """An optimizer of a library, which is imported when it is made."""
    return lambda groups: getattr(import_module(module), name)(groups, **options)


def _named(library: str, module: str, names: Sequence[str], **options: Any) -> dict[str, Make]:
    return {f"{library} {name}": _of(module, name, **options) for name in names}


LIBRARIES: dict[str, dict[str, Make]] = {
    "transformers": {
        "transformers Adafactor": _of("transformers.optimization", "Adafactor"),
        "transformers Adafactor, fixed rate": _of(
            *("transformers.optimization", "Adafactor"),
            lr=1e-3,
            relative_step=False,
            scale_parameter=False,
            beta1=0.9,
        ),
    },
    "pytorch_optimizer": {
        **_named(
            *("pytorch_optimizer", "pytorch_optimizer"),
            (
                *("AdaBelief", "AdaBound", "Adan", "AdEMAMix", "ADOPT", "Amos", "CAME", "GaLore"),
                *("DAdaptAdam", "Lamb", "LARS", "Lion", "Prodigy", "ScheduleFreeAdamW", "Shampoo"),
                *("SOAP", "StableAdamW", "Tiger", "Yogi"),
            ),
        ),
        **_named("pytorch_optimizer", "pytorch_optimizer", ("Ranger21",), num_iterations=20),
    },
    "torchao": _named("torchao", "torchao.optim", ("Adam8bit", "AdamW8bit", "AdamW4bit")),
    "bitsandbytes": {
        # Without the option these small parameters have moments of 32 bits.
        **_named(
            *("bitsandbytes", "bitsandbytes.optim", ("AdamW8bit", "Lion8bit", "RMSprop8bit")),
            min_8bit_size=1,
        ),
        **_named("bitsandbytes", "bitsandbytes.optim", ("AdamW", "AdEMAMix", "Lion")),
        **_named("bitsandbytes", "bitsandbytes.optim", ("LAMB", "Adagrad")),
        **_named("bitsandbytes", "bitsandbytes.optim", ("LARS", "SGD"), lr=0.1, momentum=0.9),
    },
}
"""By library: its optimizers by name, which begins with the library's."""
INSTALLED = {
    name: make
    for library, optimizers in LIBRARIES.items()
    if find_spec(library) is not None
    for name, make in optimizers.items()
}
"""The optimizers of libraries that are here."""
OPTIMIZERS: dict[str, Make] = _torch()
"""Torch's, but for those that take one group."""
NEEDS_ONE_GROUP: dict[str, Make] = {
    "LBFGS": lambda g: torch.optim.LBFGS(g, max_iter=2, history_size=2),
}


@dataclass(frozen=True)
class Grouping:
    """Modules, and the groups that an optimizer gets of their parameters."""

    make: Callable[[], tuple[dict[str, nn.Module], list[Tensor], Groups]]
    """To modules by name, loose tensors, groups."""
    untrained: frozenset[int] = frozenset()
    """Parameters by position that never get a gradient."""


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2, bias=False))


def _one() -> tuple[dict[str, nn.Module], list[Tensor], Groups]:
    net = _net()
    return {"net": net}, [], [{"params": list(net.parameters())}]


def _two() -> tuple[dict[str, nn.Module], list[Tensor], Groups]:
    net = _net()
    flat, wide = (
        [p for p in net.parameters() if p.ndim == 1],
        [p for p in net.parameters() if p.ndim == 2],
    )
    return {"net": net}, [], [{"params": wide, "lr": 0.02}, {"params": flat, "weight_decay": 0.0}]


def _empty() -> tuple[dict[str, nn.Module], list[Tensor], Groups]:
    net = _net()
    return {"net": net}, [], [{"params": list(net.parameters())}, {"params": [], "lr": 0.5}]


def _frozen() -> tuple[dict[str, nn.Module], list[Tensor], Groups]:
    net = _net()
    net[0].requires_grad_(False)
    return {"net": net}, [], [{"params": [p for p in net.parameters() if p.requires_grad]}]


def _modules() -> tuple[dict[str, nn.Module], list[Tensor], Groups]:
    first, second = _net(), _net()
    groups = [{"params": list(second.parameters())}, {"params": list(first.parameters())}]
    return {"first": first, "second": second}, [], groups


def _loose() -> tuple[dict[str, nn.Module], list[Tensor], Groups]:
    loose = [torch.rand(3, 2, requires_grad=True), torch.rand(2, requires_grad=True)]
    return {}, loose, [{"params": loose}]


GROUPINGS: dict[str, Grouping] = {
    "one group": Grouping(_one),
    "two groups": Grouping(_two),
    "an empty group": Grouping(_empty),
    "frozen parameters": Grouping(_frozen),
    "never trained": Grouping(_one, untrained=frozenset({0, 3})),
    "two modules": Grouping(_modules),
    "loose tensors": Grouping(_loose),
}


def divided(gradient: Tensor, p: Tensor) -> Tensor:
    """The gradient, divided among ranks as its parameter is."""
    if not isinstance(p, DTensor):
        return gradient
    return distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)


class Training:
    """Modules, loose tensors and an optimizer, trained by gradients that the seed gives."""

    def __init__(
        self,
        optimizer: str,
        grouping: str,
        seed: int,
        form: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        torch.manual_seed(seed)
        self.grouping = GROUPINGS[grouping]
        self.modules, self.loose, groups = self.grouping.make()
        if form is not None:  # the form replaces the parameters
            self.modules = {name: form(module) for name, module in self.modules.items()}
            groups = [{"params": [p for m in self.modules.values() for p in m.parameters()]}]
        make = {**OPTIMIZERS, **INSTALLED, **NEEDS_ONE_GROUP}[optimizer]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.optim = make(groups)

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters of the optimizer, in the order of its groups."""
        return [p for group in self.optim.param_groups for p in group["params"]]

    def step(self, number: int) -> None:
        """One step with the gradients of this number."""
        if hasattr(self.optim, "train"):
            self.optim.train()  # the schedule-free ones ask for it
        drawn = torch.Generator().manual_seed(number)
        for position, p in enumerate(self.parameters):
            gradient = torch.randn(p.shape, generator=drawn)
            if isinstance(self.optim, torch.optim.SparseAdam):
                gradient = gradient.to_sparse()
            p.grad = None if position in self.grouping.untrained else divided(gradient, p)
        for group in self.optim.param_groups:  # as a scheduler or a program does
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(group["lr"].item() * 0.9)
            elif group["lr"] is not None:
                group["lr"] *= 0.9
        is_compiled = type(self.optim).__module__.startswith("torchao")  # each step anew
        eager = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
        with warnings.catch_warnings(), eager:
            warnings.simplefilter("ignore")
            # LBFGS wants the loss again; a function of nothing leaves the gradients as they are.
            self.optim.step(lambda: 1.0) if _wants_loss(self.optim) else self.optim.step()

    @property
    def state(self) -> dict[str, Any]:
        """What a program would save."""
        loose = {f"loose{i}": tensor for i, tensor in enumerate(self.loose)}
        return {**self.modules, **loose, "optim": self.optim}


def _wants_loss(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.LBFGS)


def lasting(number: int) -> float:
    """A factor of LambdaLR."""
    return 0.9**number


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 20),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lasting),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.95),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05),
    "GradScaler": lambda _: torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2),
}
