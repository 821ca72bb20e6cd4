"""The memory and the process for the first background save, made in advance."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from ckpt import in_flight
from ckpt.background.workplace import workplace
from ckpt.garbage import collected_later
from ckpt.plan.save_plan import plan_save, stored_layouts
from ckpt.saving import check_free
from ckpt.state.flatten import FlatState, flatten
from ckpt.state.merged_state import agree_on_state, spec_of
from ckpt.transfer.read import workers_for
from sharding.agreement.channel import TIMEOUT_SECONDS
from sharding.agreement.ranks import Ranks

if TYPE_CHECKING:
    from sharding.agreement.ranks import Group

__all__ = ["prepare"]


def prepare(state: object, *, group: Group = None, timeout: float = TIMEOUT_SECONDS) -> None:
    """Prepares this process so that its first background save of `state` waits for no new memory.

    Returns once the ranks have a plan, which takes as long as a save's description of the state. A
    thread then allocates the memory for this rank's part, page by page, and starts the process
    that writes. A save that begins earlier waits for the thread.

    All ranks of `group` call this as they call `ckpt.save`, with a state of the same shapes. Most
    optimizers have no state before their first step. From now on this process keeps the memory: as
    much as the rank writes. Without this call the first save allocates it, and takes several times
    as long as a later one.

    Raises:
        StateError: a value cannot be stored; the error names its key path.
        BackgroundError: an earlier background save failed, and no caller has seen its error.
        RankError: another rank failed; the error names the rank and its error.

    >>> import ckpt, torch
    >>> ckpt.prepare({"w": torch.ones(2)})
    """
    ranks = Ranks(group, timeout)
    with ranks.call("ckpt.prepare"), collected_later(), ExitStack() as stack:
        in_flight.saves.wait()
        turn = object()
        for _ in range(2):  # an interrupt may come while the turn is given up
            stack.callback(in_flight.saves.leave_turn, turn)

        def described() -> FlatState:
            check_free(in_flight.saves, "wait", turn, ranks.is_single_process)
            return flatten(state, ranks.mesh)

        held = agree_on_state(ranks, "describing the state", described)
        stored = stored_layouts(held.whole.tensors)
        plan = plan_save(spec_of(held.flat).tensors, stored, ranks.global_rank)
        leaves = list(held.flat.leaves.values())
        for_cuda = any(leaves[item.source].local.is_cuda for item in plan.items)
        workplace().prepare(plan.nbytes, workers_for(ranks.world_size), for_cuda)
