"""All-gather outputs of extensions: the inputs of all ranks, joined in memory that can be freed.

Inputs are joined along one dimension. Ranks may have different numbers of indices along it, their
*rows*. Inputs travel as bytes, rows first, so that the rows of a rank are one range of bytes. The
range arrives in its final place if the joined dimension is the first, and is moved there otherwise.

The storage of an output stays the same object, so that its users find the same tensor when the
storage is filled again. Writes use aliases with version counters of their own: autograd sees no
change.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True, slots=True)
class Form:
    """The layout of the ranks' inputs in an output."""

    counts: tuple[int, ...]
    """By rank, the number of rows: indices of the dimension along which the inputs are joined."""
    rest: tuple[int, ...]
    """The sizes of the other dimensions."""
    along: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return prod(self.rest) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the output."""
        return sum(self.counts) * self.row_bytes

    @property
    def shape(self) -> tuple[int, ...]:
        """The output's shape."""
        return (*self.rest[: self.along], sum(self.counts), *self.rest[self.along :])

    def rows_first(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Returns this rank's input without padding, as it travels: bytes, rows first."""
        tensor = tensor.detach().narrow(self.along, 0, self.counts[rank])
        return tensor.movedim(self.along, 0).contiguous().view(-1).view(torch.uint8)


class Output:
    """One tensor that is gathered: its memory is allocated and freed, its storage object stays."""

    def __init__(self, form: Form, device: torch.device) -> None:
        self.form = form
        self._tensor = torch.empty(form.shape, dtype=form.dtype, device=device)
        self._storage = self._tensor.untyped_storage()
        # Bytes that arrive are written through aliases with version counters of their own.
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self._bytes.set_(self._storage, 0, (form.nbytes,), (1,))
        self._alias = torch.empty(0, dtype=form.dtype, device=device)
        self._alias.set_(self._storage, 0, form.shape, self._tensor.stride())
        self._landing = self._bytes

    def allocate(self) -> None:
        """Allocates the memory of the output."""
        self._storage.resize_(self.form.nbytes)
        if self.form.along:
            self._landing = torch.empty_like(self._bytes)

    def place(self, rank: int) -> torch.Tensor:
        """Returns the place of the bytes of a rank's input."""
        lo = sum(self.form.counts[:rank]) * self.form.row_bytes
        return self._landing[lo : lo + self.form.counts[rank] * self.form.row_bytes]

    def joined(self) -> torch.Tensor:
        """Returns the ranks' inputs, joined, once all have arrived."""
        if self._landing is not self._bytes:
            rows = self._landing.view(self.form.dtype).view(-1, *self.form.rest)
            self._alias.copy_(rows.movedim(0, self.form.along))
            self._landing = self._bytes
        return self._tensor

    def free(self) -> None:
        """Frees the memory."""
        self._landing = self._bytes
        self._storage.resize_(0)
