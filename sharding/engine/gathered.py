"""The parameters of a bucket: sharded, whole, and back.

Words: the *sharded* parameter is what the optimizer sees; the *whole* parameter is a view of the
bucket's full buffer, a leaf of autograd, that the module has while it computes. This file says when
and in which order things happen; how parameters are divided and what the optimizer sees is said by
the kinds of bucket: `ChunkBucket` and `FlatBucket`.

Rules:

1. The full buffer's storage is one object for the bucket's life, emptied by `reshard` and filled
   again by `unshard`: what autograd saved of it in forward is right again in backward.
2. Nothing but `wait`, `fetch` and a `reshard` of what is on its way waits for other ranks.
3. A full buffer that could not be gathered is left to the messages that may still come for it: it
   is neither emptied nor filled again. So is one that somebody interrupted, until all is there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from weakref import ref

import torch
from torch import nn

from sharding.engine.batches import AHEAD_BYTES, Gathers
from sharding.engine.composition import Composition, Item, Purpose, key_of
from sharding.engine.full_buffer import FullBuffer
from sharding.engine.packing import ChunkPacking, FlatPacking
from sharding.engine.parameter import Parameter, Precision
from sharding.engine.peers import Peers, Sharing
from sharding.engine.transport import Gathering, Transport, transport_between
from sharding.errors import TransferError


class Gathered(ABC):
    """See the rules at the top of this file."""

    def __init__(
        self, parameters: list[Parameter], sharing: Sharing, precision: Precision, number: int
    ) -> None:
        self.parameters = parameters
        self.sharing = sharing
        self.precision = precision
        self.number = number
        """Of all buckets that its group has, the same on all ranks."""
        self.name = ", ".join([parameter.name for parameter in parameters][:2])
        """For errors; the runtime knows a better one."""
        self.full_precision = False
        """Whether parameters are gathered in the dtype they are kept in, whatever the policy."""
        self.is_whole = False
        """Whether the full buffer has the whole parameters."""
        self.holders: set[object] = set()
        """Who needs the parameters whole now."""
        self.buffer: FullBuffer | None = None
        self._buffers: dict[torch.dtype, FullBuffer] = {}
        self._is_shown = False
        """Whether the modules have the whole parameters."""
        self._packing: ChunkPacking | FlatPacking | None = None
        self._transport: Transport | None = None
        self._gathering: Gathering | None = None
        self._error: Exception | None = None
        """By which a gathering ended: rule 3."""
        self._gathered_versions: list[int] = []
        self._kept: tuple[list[torch.Tensor], Peers] | None = None
        """This rank's part of the full buffer among fewer ranks, to gather from in backward."""
        self._key = 0
        """What tells it from others in the tags of messages; 0: to be found."""
        self._sequence = [0] * len(Purpose)
        self._hooked: set[int] = set()
        self._wanted = 0
        """How many of the whole parameters require a gradient."""

    # What the kinds of bucket say.

    @property
    @abstractmethod
    def stored_dtype(self) -> torch.dtype:
        """What the shards are kept in."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the parameters are used. Raises RuntimeError where they cannot be."""

    @abstractmethod
    def versions(self) -> list[int]:
        """Version counters of the shards: they tell whether they were changed, most of the time."""

    @abstractmethod
    def wants_gradient(self, index: int) -> bool:
        """Whether a parameter is to be trained."""

    @abstractmethod
    def take_over_replaced(self) -> None:
        """What a user put in the place of the sharded parameters is what is sharded."""

    @abstractmethod
    def _pack(self) -> ChunkPacking | FlatPacking:
        """Where everything lies."""

    @abstractmethod
    def _outgoing(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """This rank's spans, flat."""

    @abstractmethod
    def place_whole(self) -> None:
        """The modules have the whole parameters."""

    @abstractmethod
    def place_sharded(self) -> None:
        """The modules have the sharded parameters."""

    @abstractmethod
    def gradient_arrived(self, index: int) -> None:
        """Backward has completed the gradient of a whole parameter."""

    def places(self) -> Iterator[tuple[nn.Module, str]]:
        """Every place in the modules that has a parameter of the bucket."""
        for parameter in self.parameters:
            yield from parameter.owners

    def placed_more(self, parameter: Parameter) -> None:
        """A parameter has more places than before: what is there is what is in the others."""
        parameter.place(parameter.sharded)

    # Dtypes.

    @property
    def dtype(self) -> torch.dtype:
        """What the parameters are gathered and used in."""
        stored = self.stored_dtype
        if self.full_precision or not stored.is_floating_point:
            return stored
        return self.precision.param_dtype or stored

    @property
    def requires_grad(self) -> bool:
        """True when some parameter is to be trained."""
        return any(self.wants_gradient(index) for index in range(len(self.parameters)))

    # Whole and sharded.

    @property
    def whole(self) -> list[torch.Tensor]:
        """The whole parameters."""
        return [] if self.buffer is None else self.buffer.leaves

    @property
    def is_used(self) -> bool:
        """True once it has been gathered: its form is settled."""
        return bool(self._buffers)

    @property
    def full_bytes(self) -> int:
        """Bytes of the full buffer, as it was used last; as if large where there is none."""
        return AHEAD_BYTES if self.buffer is None else self.buffer.full_bytes

    def unshard(self, batch: Gathers) -> None:
        """Gather with the batch, unless the parameters are whole or on their way."""
        if self._error is not None:
            names = ", ".join([parameter.name for parameter in self.parameters][:3])
            raise RuntimeError(
                f"the ranks could not gather the parameters {names} and those with them before "
                f"({self._error}), and cannot any more in this process group: start the job again; "
                "what is sharded can still be saved"
            ) from self._error
        if not self.is_gathered:
            self.take_over_replaced()
            self._gathered_versions = self.versions()
            self._gathering = self._gather(batch)

    @property
    def is_gathered(self) -> bool:
        """True when the parameters are whole or on their way."""
        return self.is_whole or self._gathering is not None

    @property
    def is_stale(self) -> bool:
        """True when the shards are known to have changed since they were gathered."""
        return self.is_gathered and self._gathered_versions != self.versions()

    def wait(self) -> None:
        """The whole parameters are in the modules."""
        if self._gathering is not None:
            self._await(self._gathering)
            self._assemble()
        if not self.is_whole:
            self.is_whole = True
            self._wanted = sum(map(self._prepare_for_autograd, range(len(self.parameters))))
            self._is_shown = False
        if not self._is_shown:
            self._is_shown = True
            self.place_whole()

    def _await(self, gathering: Gathering) -> None:
        """All has arrived, or never will: an error is not waited for again, an interrupt is."""
        try:
            gathering.wait()
        except Exception as error:
            self._gathering, self._error = None, error
            raise
        self._gathering = None

    def show_sharded(self) -> None:
        """The modules have the sharded parameters, whether the whole ones stay in memory or not."""
        if self._is_shown:
            self._is_shown = False
            self.place_sharded()

    def reshard(self) -> None:
        """The sharded parameters are in the modules, and the full buffer has no memory."""
        self.holders.clear()
        if self._gathering is not None:
            with suppress(TransferError):  # nobody needs it; whoever does later gets the error
                self._await(self._gathering)
                self._free()
        if self.is_whole:
            self.is_whole = False
            self.show_sharded()
            self._free()

    def release(self, holder: object) -> None:
        """Reshard when nobody else needs the parameters whole."""
        self.holders.discard(holder)
        if not self.holders:
            self.reshard()

    def keep_part(self, size: int) -> None:
        """Before a release: keep this rank's part among `size` ranks, to gather from next time."""
        if self.is_whole and self.buffer is not None and len(self.holders) <= 1:
            peers = self.sharing.peers.part(size)
            lo, hi = _even_part(self.buffer.numel, peers.size, peers.rank)
            self._kept = [part.clone() for part in self.buffer.parts([(lo, hi)])], peers

    def drop_kept(self) -> None:
        """What was kept is not used: the next gather is from the shards."""
        self._kept = None

    def fetch(self) -> FullBuffer:
        """The whole parameters in the dtype they are kept in, in a buffer of their own. Waits."""
        packing, _ = self._settled()
        buffer = FullBuffer.of(packing.slots, packing.numel, self.stored_dtype, self.device)
        self.gather_now(self._outgoing(self.stored_dtype), buffer)
        return buffer

    def gather_now(self, mine: list[torch.Tensor], buffer: FullBuffer) -> None:
        """Fill a buffer, laid out as the bucket's own, from all ranks' spans of it. Waits."""
        packing, transport = self._settled()
        composition = Composition((self._next_item(Purpose.GATHER),))
        transport.gather(mine, buffer.places(packing), composition).wait()

    def sum_now(self, flat: torch.Tensor) -> None:
        """A tensor is the sum over the ranks that share. Waits."""
        _, transport = self._settled()
        transport.all_reduce(flat, Composition((self._next_item(Purpose.REDUCE),)))

    def _settled(self) -> tuple[ChunkPacking | FlatPacking, Transport]:
        if self._packing is None or self._transport is None:
            self._packing = self._pack()
            self._transport = transport_between(self.sharing.peers, self.device)
        return self._packing, self._transport

    def _gather(self, batch: Gathers) -> Gathering:
        """Start filling the full buffer."""
        packing, transport = self._settled()
        self.buffer = self._buffer(self.dtype)
        self.buffer.allocate()
        if self._kept is not None:
            kept, peers = self._kept
            self._kept = None
            ranges = [_even_part(self.buffer.numel, peers.size, r) for r in range(peers.size)]
            among = transport_between(peers, self.device)
            places = [self.buffer.parts([each]) for each in ranges]
            return batch.add(among, kept, places, self._next_item(Purpose.REGATHER))
        if not self._needs_gathering(self.buffer):
            return _Nothing()
        mine = self.buffer.cut(packing.spans(self.sharing.peers.rank), self._outgoing(self.dtype))
        item = self._next_item(Purpose.GATHER)
        return batch.add(transport, mine, self.buffer.places(packing), item)

    def _needs_gathering(self, buffer: FullBuffer) -> bool:
        """Whether the buffer is other memory than the shards'."""
        return True

    def _buffer(self, dtype: torch.dtype) -> FullBuffer:
        """The bucket's buffer of a dtype; it has memory when it is new."""
        if dtype not in self._buffers:
            packing, _ = self._settled()
            leaf = self._leaf
            buffer = FullBuffer(packing.slots, packing.numel, dtype, self.device, leaf)
            self._buffers[dtype] = buffer
            self._hooked.clear()
        return self._buffers[dtype]

    def _leaf(self, index: int, view: torch.Tensor) -> torch.Tensor:
        """The whole parameter over a view of the full buffer."""
        return nn.Parameter(view, requires_grad=False)

    def _assemble(self) -> None:  # noqa: B027 - most kinds have nothing to do
        """What `_gather` started has arrived: the whole parameters are made of it."""

    def _free(self) -> None:
        """Give back the memory of the whole parameters."""
        if self.buffer is not None:
            self.buffer.free()

    def _forget_forms(self) -> None:
        """The parameters are others than before: nothing that was made for them fits."""
        self._buffers.clear()
        self.buffer = None
        self._packing = self._transport = None
        self._hooked.clear()

    def named(self, name: str, parameters: list[str]) -> None:
        """The bucket has this name in errors; its parameters have these in the root module."""
        self.name = name
        self._key = key_of(self.number, parameters, (p.shape for p in self.parameters))

    def _next_item(self, purpose: Purpose) -> Item:
        """This bucket's part of the next exchange for a purpose."""
        if not self._key:
            self.named(self.name, [parameter.name for parameter in self.parameters])
        self._sequence[purpose] += 1
        return Item(self.name, self._key, purpose, self._sequence[purpose])

    def _prepare_for_autograd(self, index: int) -> bool:
        """Whether the whole parameter requires a gradient, as the sharded one does, and tells."""
        whole, wanted = self.whole[index], self.wants_gradient(index)
        if whole.requires_grad != wanted:
            whole.requires_grad_(wanted)
        if wanted and id(whole) not in self._hooked:
            self._hooked.add(id(whole))
            # Python cannot collect a cycle that goes through a tensor's hook.
            hook = partial(_tell, ref(self), index)
            whole.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return wanted


class _Nothing:
    """What is gathered where there is nothing to gather."""

    def wait(self) -> None:
        """It is there."""


def _tell(bucket: ref[Gathered], index: int, whole: torch.Tensor) -> None:
    """What is called when a whole parameter has got its gradient."""
    told = bucket()
    if told is not None:
        told.gradient_arrived(index)


def _even_part(numel: int, size: int, rank: int) -> tuple[int, int]:
    step = -(-numel // size)
    return min(numel, rank * step), min(numel, (rank + 1) * step)
