"""Folders of torch.distributed.checkpoint (DCP)."""

from formats.dcp.reader import read
from formats.dcp.writer import plans

__all__ = ["plans", "read"]
