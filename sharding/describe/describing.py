"""Describes this rank's part of a module's state: names, local tensors and layouts.

A checkpoint needs only these from a runtime. Two runtimes flatten parameters: ours
(`sharding.describe.own_members`) and torch's FullyShardedDataParallel
(`sharding.describe.torch_fsdp`).

Rules:

1. No function communicates. Unsharded parameters of the modules are resharded; an all-gather in
   flight is awaited.
2. Names are those of the modules themselves, without the parts that wrappers add. A tied parameter
   has all of its names, and one part. Two entries that get one name are an error.
3. A local part shares the memory of the parameter that the optimizer sees: a write to the part
   loads the parameter.
4. Optimizer state of a parameter is divided like the parameter (`FlatSlice.of`).
5. Hooks and methods of the user run while a state dict is made or loaded here, and torch's full
   state dict would give them whole parameters. Here the modules have a rank's part, or views of
   freed memory, which end the process if they are read. A read is an error (`PartsUnread`).

The parameters of `fully_shard` are DTensors, which `sharding.describe.dtensor` describes. A flat
parameter is a run of parameters end to end, cut evenly over the ranks that share it. A rank has a
range of the row-major elements of each parameter, `FlatShard` in the algebra. Ranks that hold the
same shard are replicas. If tensor parallelism has divided the parameters first, the range is one of
the local part of tensor parallelism.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sharding.describe import dtensor, torch_fsdp
from sharding.describe.members import FlatMember, LocalPart, check_holds
from sharding.describe.wrappers import CleanNames
from sharding.errors import ShardingError
from sharding.layout import Layout, Mesh, Replicate

TensorLike = torch.Tensor | LocalPart
"""A tensor of a state: a plain one, a DTensor, torch's ShardedTensor, or a part."""


def describe(tensor: TensorLike, name: str, world: Mesh) -> tuple[torch.Tensor, Layout]:
    """Returns this rank's part of a tensor, detached and sharing memory, and the tensor's layout.

    Like `sharding.describe.dtensor.describe`, but also for `LocalPart`s and ShardedTensors. Raises
    LocalShapeError if a part does not have the elements that its layout gives this rank.
    """
    if isinstance(tensor, LocalPart):
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        check_holds(name, tensor.local, tensor.layout, rank)
        return tensor.local, tensor.layout
    if type(tensor) in dtensor.ORDINARY:  # nearly always
        return tensor.detach(), dtensor.get_replicated(tensor.shape, world)
    if dtensor.is_sharded(tensor):
        return dtensor.describe_sharded_tensor(tensor, name)
    return dtensor.describe(tensor, name, world)


def describe_module(module: nn.Module) -> dict[str, object]:
    """Returns the module's state by name: a `LocalPart` for every parameter in a flat one.

    The other values are those of `module.state_dict(keep_vars=True)`: tensors and DTensors, which
    `describe` takes, and objects that modules add to their state dicts. The result's `_metadata`
    has the versions of the modules. Raises ShardingError if two entries get one name.

    >>> import torch.distributed as dist
    >>> from sharding import FullyShardedDataParallel, ShardingStrategy
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> strategy = ShardingStrategy.NO_SHARD
    >>> model = FullyShardedDataParallel(nn.Linear(2, 3), sharding_strategy=strategy)
    >>> [(k, v.shape, str(v.layout)) for k, v in describe_module(model).items()]
    [('weight', (3, 2), 'replicate:1=R'), ('bias', (3,), 'replicate:1=R')]
    >>> dist.destroy_process_group()
    """
    if (ours := _own_members()) is not None:
        ours.check_is_whole(module)
    torch_fsdp.check_is_whole(module)
    has_torch_fsdp = torch_fsdp.is_in(module)
    members = {id(m.parameter): m for m in _flat_members(module, has_torch_fsdp)}
    unread = PartsUnread(module, members.values())
    with _local_state_dicts(module, has_torch_fsdp), unread.guard():
        state = module.state_dict(keep_vars=True)
    for path, value in state.items() if members else ():
        if isinstance(value, torch.Tensor) and id(value) not in members and unread.has(value):
            raise unread.error(value, f"state_dict() has it as {path!r}")
    buffer_dtypes = torch_fsdp.buffer_dtypes(module) if has_torch_fsdp else {}
    clean = CleanNames(module)
    entries: OrderedDict[str, object] = OrderedDict()
    if isinstance(metadata := getattr(state, "_metadata", None), Mapping):
        entries._metadata = {  # type: ignore[attr-defined]
            clean.prefix(path)[:-1]: {"version": own.get("version", 1)}
            for path, own in metadata.items()
            if isinstance(own, Mapping)
        }
    for name, path in _names_of(module, state, clean).items():
        value = state[path]
        member = members.get(id(value))
        if member is None:
            entries[name] = value
            if torch_fsdp.is_flattened(value):  # not divided: the same as before wrapping
                entries[name] = value.detach()
            elif name in buffer_dtypes and isinstance(value, torch.Tensor):
                entries[name] = value.to(buffer_dtypes[name])
        elif member.is_original:
            [own] = member.slices
            entries[name] = own.of(member.parameter, own.key)
        else:
            entries |= dict(member.parts())
    for member in members.values():  # a flat parameter outside that has a tied one
        if not member.is_original:
            for name, part in member.parts():
                entries.setdefault(name, part)
    return entries


_MARKS = frozenset((torch_fsdp.MARK, "_sharding_entry"))
"""Attributes of parameters that are, or may be, parts: torch's, and that of `sharding.engine.unit`,
which imports the engine."""


def flat_members(module: nn.Module) -> Iterator[FlatMember]:
    """Yields the parameters in a module that an optimizer sees for flat parameters.

    Original parameters that are not divided are left out: they are the same as before wrapping.
    """
    return _flat_members(module, torch_fsdp.is_in(module))


def _flat_members(module: nn.Module, has_torch_fsdp: bool) -> Iterator[FlatMember]:
    if (ours := _own_members()) is not None:
        yield from ours.flat_members(module)
    if has_torch_fsdp:
        yield from torch_fsdp.flat_members(module)


def part_of(tensor: torch.Tensor) -> LocalPart | None:
    """Returns the part that an original parameter is, without its module; None if it is none.

    Raises ShardingError for a parameter of torch's FullyShardedDataParallel: only its module
    knows the whole parameter.
    """
    if _MARKS.isdisjoint(vars(tensor)):
        return None
    if torch_fsdp.is_flattened(tensor) and tensor.ndim == 1:
        raise torch_fsdp.loose(tensor)
    ours = _own_members()
    return None if ours is None else ours.part_of(tensor)


def is_divided(parameter: torch.Tensor) -> bool:
    """Whether the parameter that an optimizer sees is a part, and does not name the whole one.

    One-dimensional parameters that torch's FullyShardedDataParallel replicates count as parts.
    """
    if torch_fsdp.is_flattened(parameter):
        return parameter.ndim == 1
    ours = _own_members()
    return ours is not None and (ours.is_flat(parameter) or ours.part_of(parameter) is not None)


def load_rest(
    module: nn.Module,
    state: Mapping[str, object],
    strict: bool = False,
    versions: Mapping[str, int] | None = None,
) -> tuple[list[str], list[str]]:
    """Calls the module's `load_state_dict` with all values but the `LocalPart`s, filled before.

    The modules inside are told that the state has these versions; by default, their own.
    Returns the missing and the unexpected names: those that the method returns, but for the values
    that were filled before. Only a module with a method of its own sees `strict`.
    """
    rest = OrderedDict((n, value) for n, value in state.items() if not isinstance(value, LocalPart))
    is_torchs = type(module).load_state_dict is nn.Module.load_state_dict
    members = list(flat_members(module))
    has_parts = len(rest) < len(state) or any(not m.is_original for m in members)
    unread = PartsUnread(module, members)
    with _local_state_dicts(module, torch_fsdp.is_in(module)), unread.guard():
        # Without versions, each module would take the state for one of before its first version.
        keys = module.state_dict()
        metadata = getattr(keys, "_metadata", None)
        clean = CleanNames(module)
        if versions is not None and isinstance(metadata, Mapping):
            metadata = {
                path: {**own, "version": versions.get(clean.prefix(path)[:-1], 1)}
                for path, own in metadata.items()
            }
        rest._metadata = metadata  # type: ignore[attr-defined]
        result = module.load_state_dict(rest, strict=strict and not is_torchs and not has_parts)
    missing: Iterable[str] = getattr(result, "missing_keys", ())
    if has_parts:  # the parts, under their own names or those of flat parameters, were filled
        missing = [key for key in missing if key not in keys and clean.of(key) not in state]
    unexpected: Iterable[str] = getattr(result, "unexpected_keys", ())
    return [*map(clean.of, missing)], [*map(clean.of, unexpected)]


def state_dict_keys(module: nn.Module) -> dict[str, str]:
    """Returns the keys of the module's `state_dict()` by the names of its state, without a gather.

    Raises ShardingError if two keys get one name.
    """
    unread = PartsUnread(module, flat_members(module))
    with _local_state_dicts(module, torch_fsdp.is_in(module)), unread.guard():
        return _names_of(module, module.state_dict(), CleanNames(module))


def _names_of(module: nn.Module, keys: Iterable[str], clean: CleanNames) -> dict[str, str]:
    if not clean.has_wrappers:
        return {key: key for key in keys}
    names: dict[str, str] = {}
    for key in keys:
        name = clean.of(key)
        if names.setdefault(name, key) != key:
            raise ShardingError(
                f"the entries {names[name]!r} and {key!r} of a {type(module).__name__} both get "
                f"the name {name!r}, as names have no parts of wrappers; rename one of them"
            )
    return names


_is_local: ContextVar[bool] = ContextVar("_is_local", default=False)


def is_local_forced() -> bool:
    """Whether state dicts have this rank's own tensors now, of whatever kind a user has set."""
    return _is_local.get()


@contextmanager
def _local_state_dicts(module: nn.Module, has_torch_fsdp: bool) -> Iterator[None]:
    """Makes state dicts have this rank's tensors in the block, of whatever kind a user has set."""
    theirs = torch_fsdp.local_state_dicts(module) if has_torch_fsdp else nullcontext()
    before = _is_local.set(True)
    try:
        with theirs:
            yield
    finally:
        _is_local.reset(before)


class _OwnMembers(Protocol):
    """The functions of `sharding.describe.own_members`."""

    def check_is_whole(self, module: nn.Module) -> None: ...

    def flat_members(self, module: nn.Module) -> Iterator[FlatMember]: ...

    def part_of(self, tensor: torch.Tensor) -> LocalPart | None: ...

    def is_flat(self, tensor: torch.Tensor) -> bool: ...


_FLAT_PARAMETERS = f"{__name__.removesuffix('describe.describing')}engine.flat_param_group"
"""The module of our flat parameters: `sharding` lies in `ckpt` in an installation."""


def _own_members() -> _OwnMembers | None:
    """Returns the description of our flat parameters; None before any module can have one."""
    if _FLAT_PARAMETERS not in sys.modules:
        return None
    # Start-up: this imports the engine, which takes a second, and few states have flat parameters.
    from sharding.describe import own_members

    return own_members


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
