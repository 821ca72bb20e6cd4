"""The order of a run's samples, which goes on in the middle of an epoch on any number of ranks.

Rules:

1. The samples of all epochs are one stream: epoch after epoch, each in an order of its own. `R`
   ranks take `R` neighbours at a time, the rank `r` the one at `position + r`. The union of what
   the ranks have taken is therefore always the start of the stream, whatever their number was.
2. The position counts what the loop has trained with, not what a loader has fetched in advance.
3. Each sample comes once in an epoch. If the ranks do not divide the samples, the last ones take
   the first samples of the next epoch: all ranks get the same number, none is padded or dropped.
4. A loader draws a seed from torch's random numbers whenever an iteration begins. Only the one at
   the begin of an epoch counts, so that a run that goes on within it draws as many as one that was
   never stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler

from ckpt.errors import ArgumentError, MisuseError

__all__ = ["ElasticSampler"]

Batch = TypeVar("Batch")
SEED_LIMIT = 2**63


class ElasticSampler(Sampler[int]):
    """The samples of a dataset for each rank, in one order that no number of ranks changes.

    Takes the place of torch's `DistributedSampler`, and has its order: where the ranks divide the
    samples, the indices are equal. It is an entry of a state: saved on 4 ranks in the middle of an
    epoch, it goes on with the next sample on 3. An epoch's order takes 8 bytes a sample.

    >>> import ckpt
    >>> from torch.utils.data import DataLoader
    >>> sampler = ckpt.ElasticSampler(range(6), shuffle=False)
    >>> loader = DataLoader(range(6), batch_size=2, sampler=sampler)
    >>> for batch in sampler.batches(loader):
    ...     print(batch.tolist(), sampler.state_dict()["position"])
    [0, 1] 2
    [2, 3] 4
    [4, 5] 0
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        """Each rank makes one, with equal arguments but `rank`. No rank communicates.

        Args:
            dataset: the samples, by numbers below its length.
            num_replicas: the number of ranks that share the samples; by default the world size.
                With tensor parallelism the number of data-parallel ranks.
            rank: this rank among them; by default the rank of this process.
            shuffle: whether each epoch has an order of its own, by `seed` and its number.
            drop_last: at the end of an epoch drop the samples that are too few for all ranks.

        Raises ArgumentError for an empty dataset, and for impossible numbers.
        """
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self._ranks = ranks if num_replicas is None else num_replicas
        self._rank = rank if rank is not None else dist.get_rank() if ranks > 1 else 0
        self._size, self._shuffle, self._seed = len(dataset), bool(shuffle), seed
        self._drops = drop_last
        if not (type(self._ranks) is type(self._rank) is int and 0 <= self._rank < self._ranks):
            raise ArgumentError(
                f"ElasticSampler(num_replicas={self._ranks!r}, rank={self._rank!r}): give a rank "
                "from 0 up to the number of ranks"
            )
        if type(seed) is not int or not 0 <= seed < SEED_LIMIT:
            raise ArgumentError(f"ElasticSampler(seed={seed!r}): give a whole number from 0 on")
        if self._size < (self._ranks if drop_last else 1):
            raise ArgumentError(
                f"ElasticSampler: {self._size} samples give nothing to {self._ranks} ranks"
            )
        self.epoch = 0
        """The epoch of the next sample."""
        self._position = 0
        """The samples of this epoch that all ranks together have trained with."""
        self._iterated: tuple[int, int] | None = None
        """Where an iteration that was read to its end has begun."""

    def __len__(self) -> int:
        """The number of samples of each rank that are left in this epoch."""
        left = self._size - self._position
        return left // self._ranks if self._drops else -(-left // self._ranks)

    def __iter__(self) -> Iterator[int]:
        """Yields this rank's indices from the position to the end of the epoch.

        Raises MisuseError if an iteration from here was read to its end, and no sample counted.
        """
        begin = (self.epoch, self._position)
        if self._iterated == begin:
            raise MisuseError(
                f"ElasticSampler: epoch {self.epoch} was read from sample {self._position} to its "
                "end, and no sample of it counted; iterate over sampler.batches(loader), or call "
                "sampler.advance(samples) after each batch"
            )
        end = self._position + len(self) * self._ranks
        ahead, order = 0, self._order(self.epoch)
        for at in range(self._position + self._rank, end, self._ranks):
            if at // self._size != ahead:  # the last ones are the first of the next epoch
                ahead = at // self._size
                order = self._order(begin[0] + ahead)
            yield order[at % self._size]
        self._iterated = begin

    def batches(self, loader: DataLoader[Batch]) -> Iterator[Any]:
        """Yields the batches of a loader over this sampler up to the end of the epoch.

        A batch counts as soon as it is yielded: a state that is saved in the body of the loop
        contains it. All ranks iterate. Batches that the loader has fetched in advance do not count,
        and those that it drops count at the end. Within an epoch torch's random numbers stay as
        they are (rule 4). The loader is torch's `DataLoader`, torchdata's `StatefulDataLoader`, or
        another with `sampler` and `batch_size`.

        Raises ArgumentError if the loader has another sampler, or no size of batches.
        """
        size = loader.batch_size
        if loader.sampler is not self or size is None:
            raise ArgumentError(
                "ElasticSampler.batches(loader): give a loader with sampler=this sampler and "
                "batch_size=; for others call sampler.advance(samples) after each batch"
            )
        left = len(self)
        is_within = self._position >= self._ranks
        before = torch.get_rng_state() if is_within else None
        batches = iter(loader)
        if before is not None:
            torch.set_rng_state(before)
        for batch in batches:
            samples = min(size, left)
            left -= samples
            self.advance(samples)
            yield batch
        self.advance(left)

    def advance(self, samples: int) -> None:
        """Counts samples that this rank has trained with. All ranks count the same number."""
        self._position += samples * self._ranks
        if self._drops and self._size - self._position < self._ranks:
            self.epoch, self._position = self.epoch + 1, 0
        self.epoch += self._position // self._size
        self._position %= self._size

    def set_epoch(self, epoch: int) -> None:
        """Goes to the begin of an epoch, unless it is the one of the next sample."""
        if epoch != self.epoch:
            self.epoch, self._position, self._iterated = epoch, 0, None

    def state_dict(self) -> dict[str, int | bool]:
        """Returns the epoch and the position in it, and the order. Equal on all ranks."""
        return {
            "epoch": self.epoch,
            "position": self._position,
            "size": self._size,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes to the saved position. Raises ArgumentError for another order of samples."""
        own = self.state_dict()
        others = [name for name in ("size", "shuffle", "seed") if state_dict[name] != own[name]]
        if others:
            changed = ", ".join(f"{name}={state_dict[name]} (here {own[name]})" for name in others)
            raise ArgumentError(
                f"ElasticSampler: the saved position is in another order of samples: {changed}; "
                "give the sampler these, or leave it out of the load (exclude=) to begin an epoch"
            )
        self.epoch, self._position = int(state_dict["epoch"]), int(state_dict["position"])
        self._iterated = None

    def _order(self, epoch: int) -> memoryview | range:
        """Returns the indices of an epoch: those of torch's `DistributedSampler` on one rank."""
        if not self._shuffle:
            return range(self._size)
        generator = torch.Generator().manual_seed(self._seed + epoch)
        order: memoryview = torch.randperm(self._size, generator=generator).numpy().data
        return order  # an index of a tensor takes 30 times as long
