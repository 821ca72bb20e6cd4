"""torchtitan: a checkpoint manager that writes and reads ckpt's format.

    CkptCheckpointManager.Config(enable=True, interval=100, keep_latest_k=3, async_mode="async")

in the place of torchtitan's `CheckpointManager.Config` in a trainer's configuration. All options
keep their meaning. Rules:

1. Each rank writes and reads its shards. `async` and `async_with_pinned_mem` are saves in the
   background of ckpt: the tensors are copied in the call.
2. The newest step is the newest committed one, also of another program. DCP and Hugging Face
   folders of torchtitan are loaded, and a save in Hugging Face's format is torchtitan's own.
3. A removed checkpoint disappears as a whole: its manifest first.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from ckpt import dcp
from ckpt.integrations import needs, remove
from ckpt.run.steps import run_steps

with needs("torchtitan"):
    from torchtitan.components.checkpointer import MODEL, AsyncMode, CheckpointManager
    from torchtitan.components.checkpointer.base import purge_thread

__all__ = ["CkptCheckpointManager"]


class CkptCheckpointManager(CheckpointManager):  # type: ignore[misc] # it ships no types
    """A CheckpointManager of torchtitan 0.3 whose checkpoints are those of ckpt."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """The options of torchtitan's manager."""

    def __init__(self, config: Any, **parts: Any) -> None:
        """`parts` are the states and the folder, as the trainer of torchtitan passes them."""
        super().__init__(config, **parts)
        if self.enable and self.purge_thread is not None:
            # The thread of torchtitan removes a folder file by file, its manifest at any time.
            self.purge_queue.put(None)
            self.purge_thread.join()
            arguments = (self.purge_queue, remove)
            remover = threading.Thread(target=purge_thread, args=arguments, daemon=True)
            remover.start()
            self.purge_thread: threading.Thread | None = remover

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Stores a state dict; with an `async_mode`, returns its future. All ranks call this.

        Raises as `ckpt.dcp.save` does.
        """
        if to_hf:
            return super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
        if async_mode == AsyncMode.DISABLED:
            dcp.save(state_dict, checkpoint_id=checkpoint_id)
            return None
        written: Any = dcp.async_save(
            state_dict, checkpoint_id=checkpoint_id, process_group=self.pg
        )
        if async_mode == AsyncMode.ASYNC:
            return written
        copied: Future[None] = Future()
        copied.set_result(None)
        return AsyncSaveResponse(staging_completion=copied, upload_completion=written)

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Fills a state dict from a checkpoint of ckpt, or one of DCP. All ranks call this.

        Raises as `ckpt.dcp.load` does.
        """
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        dcp.load(state_dict, checkpoint_id=checkpoint_id)
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    def _find_load_step(self, folder: str = "") -> int:
        """Returns the newest step with a checkpoint of any format; -1 if there is none."""
        own = [step.step for step in run_steps(folder or self.folder) if not step.is_damaged]
        return max([super()._find_load_step(folder), *own])  # type: ignore[no-any-return]
