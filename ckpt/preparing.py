"""Before the first save in the background: the memory and the process that it needs."""

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
    """The first save of `state` in the background will not have to wait for new memory.

    Returns once the ranks know who will write what, which takes as long as a save needs to
    describe the state. A thread then finds the memory for this rank's copy of its part, page by
    page, and starts the process that writes. A save that comes before it is done waits for it.

    To be called as `ckpt.save`, by all ranks of `group`, with a state of the same shapes; an
    optimizer's state counts once it exists, which for most is after the first step. From now on
    this process has the memory: as much as the rank writes. Without this call the first save takes
    it, and several times as long as a later one.

    Raises:
        StateError: something cannot be stored; the key path is named.
        BackgroundError: an earlier save in the background failed and nobody was told until now.
        RankError: another rank failed; its number and error are named.

    >>> import ckpt, torch
    >>> ckpt.prepare({"w": torch.ones(2)})
    """
    ranks = Ranks(group, timeout)
    with ranks.call("ckpt.prepare"), collected_later(), ExitStack() as stack:
        in_flight.wait()
        turn = object()
        for _ in range(2):  # an interrupt may come while it is left
            stack.callback(in_flight.leave_turn, turn)

        def described() -> FlatState:
            check_free("wait", turn, ranks.is_single_process)
            return flatten(state, ranks.mesh)

        held = agree_on_state(ranks, "describing the state", described)
        stored = stored_layouts(held.whole.tensors)
        plan = plan_save(spec_of(held.flat).tensors, stored, ranks.global_rank)
        leaves = list(held.flat.leaves.values())
        for_cuda = any(leaves[item.source].local.is_cuda for item in plan.items)
        workplace().prepare(plan.nbytes, workers_for(ranks.world_size), for_cuda)
