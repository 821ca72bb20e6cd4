"""Folders of torch.distributed.checkpoint (DCP): see `formats.dcp_read` and `formats.dcp_write`."""

from formats.dcp_read import read
from formats.dcp_write import plans

__all__ = ["plans", "read"]
