"""The parameters that an optimizer sees for flat ones, and reads of them that are refused.

Both runtimes that flatten parameters use these types: ours (`sharding.describe.own_members`) and
torch's FSDP1 (`sharding.describe.torch_fsdp`).

One rank's part of a tensor that is spread over ranks: its elements, and the layout.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sharding.describe.wrappers import CleanNames
from sharding.errors import LocalShapeError, ShardingError
from sharding.layout import Layout, Replicate


@dataclass(frozen=True, slots=True, eq=False)
class FlatMember:
    """A parameter that an optimizer sees, and the slices of module parameters in it."""

    parameter: nn.Parameter
    names: tuple[tuple[str, ...], ...]
    """For each slice: the names of its parameter, in the order of the modules."""
    slices: tuple[FlatSlice, ...]
    is_original: bool
    """Whether it is in the modules, in the place of its one parameter."""
    is_idle: bool = False
    """Whether this rank has no element of it and gets no gradient, unlike other ranks."""

    def parts(self) -> Iterator[tuple[str, LocalPart]]:
        """Yields the parts in it, under all names."""
        for names, part in zip(self.names, self.slices, strict=True):
            found = part.of(self.parameter, part.key)
            for name in names:
                yield name, found


class NamedParameter(NamedTuple):
    """A parameter that an optimizer sees, with the names of its parameters in a module."""

    parameter: torch.Tensor
    names: tuple[str, ...]
    """One name, several for a flat parameter; the first name of a tied one."""
    slices: tuple[FlatSlice, ...] = ()
    """For each name: its part of the parameter; empty if the parameter is not a flat one."""
    is_idle: bool = False
    """Whether this rank has no element of it, so that its optimizer keeps no state for it."""

    @classmethod
    def of(cls, member: FlatMember) -> NamedParameter:
        """Returns a parameter with parts of the module's parameters."""
        names = tuple(tied[0] for tied in member.names)
        return cls(member.parameter, names, member.slices, member.is_idle)


def check_numel(parameter: nn.Parameter, name: str, numel: int) -> None:
    """Raises LocalShapeError unless a parameter has this rank's number of elements."""
    if parameter.numel() != numel:
        raise LocalShapeError(
            f"{name} has {parameter.numel()} elements, but this rank's shard of it has {numel}: "
            "its data was replaced by a tensor of another shape"
        )


class PartsUnread:
    """Makes reads of a module's divided parameters errors, while its state dict is made.

    Shapes, dtypes and views may be taken: only an operation that needs values is an error.
    """

    def __init__(self, module: nn.Module, members: Iterable[FlatMember]) -> None:
        self._module = module
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._is_flat = False
        for member in members:
            self._is_flat = True
            placements = (p for part in member.slices for p in part.layout.placements)
            if not all(isinstance(placement, Replicate) for placement in placements):
                storage = member.parameter.untyped_storage()
                self._storages[storage._cdata] = storage

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Reads in the block raise ShardingError."""
        if not self._is_flat:
            yield
            return
        with _Calls(self), _Operations(self):
            yield

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has a part of a divided parameter, or none of its elements in memory."""
        local = getattr(tensor, "_local_tensor", tensor)
        if is_lazy(local):
            return False
        if type(local).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or local.is_meta:
            return False
        if local.layout is not torch.strided:
            return False
        storage = local.untyped_storage()
        return storage._cdata in self._storages or (local.numel() > 0 and storage.nbytes() == 0)

    def check(self, args: Iterable[object]) -> None:
        """Raises ShardingError if an argument of an operation that reads values is a part."""
        for arg in args:
            if isinstance(arg, torch.Tensor) and self.has(arg):
                raise self.error(arg, f"{_caller()} reads it")
            if isinstance(arg, list | tuple):
                self.check(arg)

    def error(self, tensor: torch.Tensor, reason: str) -> ShardingError:
        """Returns the error for a tensor that shares the memory of a parameter of the module."""
        return ShardingError(
            f"{self._name(tensor)} is divided over the ranks, which do not gather it to save or "
            f"load, and {reason}; keep the values that a hook or method of state dicts needs in a "
            "buffer, or save model.state_dict() and load it by model.load_state_dict(), which "
            "gather whole parameters for hooks"
        )

    def _name(self, tensor: torch.Tensor) -> str:
        """Returns the name of the parameter whose memory a tensor shares; all that have no element.

        Parts without elements begin at the same place, so a view of one may be of any of them.
        """
        shared = getattr(tensor, "_local_tensor", tensor)
        storage, at = shared.untyped_storage()._cdata, shared.storage_offset()
        clean = CleanNames(self._module)
        found: list[str] = []
        for path, part in self._module.named_modules():
            for name, value in {**vars(part), **part._parameters}.items():
                own = getattr(value, "_local_tensor", value)
                if not isinstance(own, torch.Tensor) or own.layout is not torch.strided:
                    continue
                place = at - own.storage_offset()
                is_inside = 0 <= place < own.numel() if shared.numel() else own.numel() == place
                if own.untyped_storage()._cdata == storage and is_inside:
                    found.append(clean.prefix(path) + name)
        return " or ".join(found) or "a parameter"


_HERE = f"{__name__.rpartition('.')[0]}."
DIRECT_READS = (
    "tolist",
    "numpy",
    "__array__",
    "__dlpack__",
    "__deepcopy__",
    "__reduce_ex__",
    "__repr__",
)
"""Methods of a tensor that read its memory without an operation, or hide where they read it."""


class _Calls(TorchFunctionMode):
    """Sees the calls of Python that read memory without an operation."""

    def __init__(self, unread: PartsUnread) -> None:
        super().__init__()
        self._unread = unread

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in DIRECT_READS:
            self._unread.check(args)
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees all operations, also those inside torch's functions; those that make views read none."""

    def __init__(self, unread: PartsUnread) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unread = unread

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not func.is_view:
            self._unread.check((*args, *kwargs.values()))
        try:
            return func(*args, **kwargs)
        except RuntimeError:  # a view of elements that are not in memory
            self._unread.check((*args, *kwargs.values()))
            raise


def _caller() -> str:
    """Returns the function that called torch, with its place in its file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(_HERE) and name.partition(".")[0] != "torch":
            code = frame.f_code
            return f"{code.co_name} ({code.co_filename}:{frame.f_lineno})"
        frame = frame.f_back
    return "an operation"


FLAT_PARAMETERS = "flat_parameters"
"""The key in the metadata of a local state dict for the records of its flat parameters."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalPart:
    """This rank's part of a tensor, in the place of the tensor in a module's state."""

    local: torch.Tensor
    """The local storage, in the tensor's row-major order; it shares the tensor's memory."""
    layout: Layout
    key: object = None
    """A key that is equal for the parts of one tensor; None for a part with only one name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return self.local.dtype

    @property
    def is_meta(self) -> bool:
        """Whether the part has no memory yet."""
        return self.local.is_meta


@dataclass(frozen=True, slots=True)
class FlatSlice:
    """This rank's part of one parameter: elements `[lo, hi)` of a tensor that an optimizer sees."""

    lo: int
    hi: int
    layout: Layout
    key: object

    def of(self, tensor: torch.Tensor, key: object = None) -> LocalPart:
        """Returns the part of a tensor with the parameter's layout, such as its moments."""
        local = tensor.detach()
        if (self.lo, self.hi) != (0, local.numel()):
            local = local[self.lo : self.hi]
        return LocalPart(local, self.layout, key)


def check_holds(name: str, local: torch.Tensor, layout: Layout, rank: int) -> None:
    """Raises LocalShapeError unless a local tensor has the elements that a rank's layout gives."""
    lo, hi = layout.span(rank)
    if local.numel() != hi - lo:
        raise LocalShapeError(
            f"{name}: rank {rank} has a local tensor of {local.numel()} elements, but of "
            f"{layout.shape} as {layout} it holds {hi - lo}; it was truncated, or belongs to "
            "another rank or world size"
        )


def check_source(name: str, local: torch.Tensor, layout: Layout, rank: int) -> None:
    """As `check_holds`, for a tensor whose elements travel to other ranks, which wait for them.

    Raises ShardingError if the tensor has no values.
    """
    check_holds(name, local, layout, rank)
    if local.is_meta and local.numel():
        raise ShardingError(
            f"{name}: rank {rank} has its {local.numel()} elements on the meta device, without "
            "values; give a tensor with values"
        )
