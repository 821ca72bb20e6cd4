"""The order of the units of one root, and their reductions in backward.

Rules:

1. All ranks start reduce-scatters in reverse order of first use. A group without a local gradient
   contributes zeros once backward has passed it (unit.py).
2. All ranks gather every unit of a backward in the same order, also one that autograd skips on this
   rank: another rank may need it.
3. At most `IN_FLIGHT` batches of reductions are in flight when the next starts, so that the size of
   units bounds memory, not the size of the model. Waits cannot deadlock: all ranks start all
   batches, in order. All ranks form the same batches of small units (reduction.py).
4. The next forward or backward forgets a backward that failed.
5. No state is global to the process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from weakref import ref

import torch
from torch.autograd import Variable

from sharding.engine.order_check import Names, OrderCheck, check_replicas
from sharding.engine.param_group import ParamGroup
from sharding.engine.reduction import PREFETCH_BYTES, ReduceScatters
from sharding.engine.unit import ForwardPass, Unit, UnitCall, units_of, unshard_together
from sharding.policies import BackwardPrefetch


class Runtime:
    """The runtime of one tree of modules; the first unit of the tree that runs makes it."""

    def __init__(self, root: Unit, units: list[Unit]) -> None:
        self.root = root
        self.units = units
        self._names = Names(root)
        self.order_check = OrderCheck() if root.checks_order else None
        self.running: list[UnitCall] = []
        """The calls that run now, the innermost last."""
        self.pending_recomputes: Counter[Unit] = Counter()
        """By unit, its calls without gradients that a checkpoint may run again."""
        self.run = ForwardPass(False)
        self._last_run = self.run
        """The forward before, whose order guides prefetch."""
        self._clock = 0
        self._ending: ref[partial[None]] | None = None
        """The callback for the end of a backward, which only autograd's engine keeps alive. If the
        reference is dead and not None, the backward ended with an error."""
        self._reached: list[ForwardPass] = []
        self._schedule: list[ParamGroup] = []
        """The groups that this backward must still reduce, in order."""
        self._passed = 0
        """The lowest end of the calls that backward has reached; later calls are done."""
        self._reductions = ReduceScatters()
        self._halfway: Unit | None = None
        """The unit, among those gathered ahead, whose forward prefetches more."""

    @classmethod
    def make_root(cls, root: Unit) -> Runtime:
        """Returns the runtime of a unit and all below it, which leave their former runtimes."""
        runtime = cls(root, list(units_of(root.modules)))
        for unit in runtime.units:
            unit.runtime = runtime
        runtime.number_param_groups()
        for unit in runtime.units:
            unit.prepare()
        return runtime

    def number_param_groups(self) -> None:
        """Gives every parameter group its index and name, which are equal on all ranks."""
        for index, param_group in enumerate(self._param_groups()):
            param_group.index = index
        for unit in self.units:
            self._names.give(unit)

    def _param_groups(self) -> Iterator[ParamGroup]:
        for unit in self.units:
            yield from unit.param_groups

    # Forward.

    def tick(self) -> int:
        """Returns the next value of the clock that orders beginnings and ends of calls."""
        self._clock += 1
        return self._clock

    @property
    def is_running(self) -> bool:
        """True inside a forward of one of its units: of the root's, most of the time."""
        return bool(self.running)

    def innermost(self, unit: Unit) -> UnitCall | None:
        """Returns the last call of a unit that runs now; None if there is none."""
        return next((call for call in reversed(self.running) if call.unit is unit), None)

    def end_call(self, call: UnitCall) -> list[UnitCall]:
        """Removes a call that has ended; returns it, after those inside that cannot end any more.

        In a call of the root, they are those of a list of modules, of which not all have run. The
        last one comes first.
        """
        is_root = call.unit is self.root
        unfinished = [c for c in self.running if is_root and c.start > call.start]
        ended = [*reversed(unfinished), call]
        self.running = [c for c in self.running if c not in ended]
        return ended

    def begin_forward(self) -> None:
        """Begins a forward of the outermost unit: reshards parameters that may be out of date."""
        self.recover()
        if self.in_backward:
            return
        self._last_run, self.run = self.run, ForwardPass(torch.is_grad_enabled())
        if self.order_check is not None:
            self.order_check.begin_forward()
        for unit in self.units:
            unit.refresh()

    def end_forward(self) -> None:
        """Ends a forward of the outermost unit: reshards units that were prefetched in vain."""
        if not self.in_backward:
            for unit in self.units:
                for param_group in unit.param_groups:
                    if not param_group.holders:
                        param_group.reshard()
                    elif unit.policy.always_show_sharded:
                        param_group.show_sharded()

    def prefetch_forward(self, unit: Unit) -> None:
        """Starts all-gathers of the units that followed this one the last time."""
        position = len(self.run.started)
        self.run.started.append(unit)
        if unit.policy.units_to_forward_prefetch is not None:
            unshard_together(unit.policy.units_to_forward_prefetch)
            return
        last = self._last_run.started
        if self.root.policy.forward_prefetch and last[position : position + 1] == [unit]:
            self._prefetch(unit, islice(last, position + 1, None))

    def _prefetch(self, unit: Unit, following: Iterable[Unit]) -> None:
        """Unshards the next unit, or as many small ones as `PREFETCH_BYTES` hold.

        Prefetches again once half of these units have run, so that messages have time to arrive.
        """
        chosen: list[Unit] = []
        nbytes = 0
        for other in following:
            if not other.used:
                continue
            if other.is_gathered and not chosen and unit is not self._halfway:
                return
            nbytes += other.unsharded_bytes
            if nbytes > PREFETCH_BYTES and nbytes > other.unsharded_bytes:
                break
            if not other.is_gathered:
                chosen.append(other)
        if chosen:
            self._halfway = chosen[len(chosen) // 2]
            unshard_together(chosen)

    # Backward.

    @property
    def in_backward(self) -> bool:
        """True from the first gradient to the end of a backward."""
        return self._ending is not None and self._ending() is not None

    def enter_backward(self) -> None:
        """Registers `_end_backward` for the end of the backward that runs now."""
        if not self.in_backward:
            self.recover()
            ending = partial(self._end_backward)
            self._ending = ref(ending)
            self._passed = self._clock + 1
            Variable._execution_engine.queue_callback(ending)

    def recover(self) -> None:
        """Forgets a backward that ended with an error."""
        if self._ending is not None and not self.in_backward:
            self._ending = None
            for param_group in self._param_groups():
                param_group.forget()
            self._forget_backward()

    def begin(self, call: UnitCall) -> None:
        """Unshards the parameters of a call that backward has reached. May wait."""
        self.enter_backward()
        if call.begun:
            return
        if call.index < 0:  # recomputed: not in the order, because its backward is a separate
            self._come_to(call)  # run of the engine
            Variable._execution_engine.queue_callback(partial(self.leave_call, call))
            return
        self._reach(call.run)
        for skipped in call.run.take_skipped(call.index):
            self._come_to(skipped)
        self._come_to(call)

    def gradient_arrived(self, param_group: ParamGroup) -> None:
        """Notes that a parameter of a group has its gradient; reduces a complete group."""
        self.enter_backward()
        if param_group.is_complete and self._schedule and self._schedule[0] is param_group:
            self._advance()

    def leave_call(self, call: UnitCall) -> None:
        """Reshards the parameters of a call that backward has left."""
        if call in call.run.open:
            call.run.open.remove(call)
            call.unit.leave(call)
            if call.unit.policy.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
                self._prefetch_backward(call)

    def _reach(self, run: ForwardPass) -> None:
        """Schedules the reductions of the groups that a forward used, when backward reaches it."""
        if run in self._reached:
            return
        self._reached.append(run)
        run.cursor = len(run.calls)
        for call in run.calls:
            for param_group in call.unit.used:
                param_group.backward.due += call.comes_back
                if param_group.backward.first is None or call.start < param_group.backward.first:
                    param_group.backward.first = call.start
        due = [b for b in self._param_groups() if b.backward.first is not None and b.is_trained]
        self._schedule = sorted(
            (b for b in due if not b.backward.reduced),
            key=lambda b: (-(b.backward.first or 0), b.index),
        )

    def _come_to(self, call: UnitCall) -> None:
        run, unit = call.run, call.unit
        if call.index >= 0:
            run.cursor = call.index
            # A rank on which autograd has left them already has prefetched for this call too.
            for earlier in [other for other in run.open if other.start > call.end]:
                self.leave_call(earlier)
            self._passed = min(self._passed, call.end)
            self._advance()
        call.begun = True
        run.open.append(call)
        if unit.policy.unshard_in_backward:
            unit.acquire(call)
        for param_group in unit.used:
            param_group.backward.outstanding -= 1
            param_group.backward.due -= 1
        if unit.policy.units_to_backward_prefetch is not None:
            unshard_together(unit.policy.units_to_backward_prefetch)
        elif unit.policy.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            self._prefetch_backward(call)

    def _prefetch_backward(self, call: UnitCall) -> None:
        """Starts all-gathers of units that backward reaches after a call."""
        if call.index >= 0:
            due = (before.unit for before in call.run.before(call) if not before.begun)
            self._prefetch(call.unit, (unit for unit in due if unit.policy.unshard_in_backward))

    def _advance(self, to_the_end: bool = False) -> None:
        """Reduces the scheduled groups that are complete or passed, in order."""
        while self._schedule:
            param_group = self._schedule[0]
            state = param_group.backward
            passed = state.outstanding <= 0 and (state.first or 0) > self._passed
            if not (to_the_end or passed or param_group.is_complete):
                return
            self._schedule.pop(0)
            self._complete(param_group)

    def _complete(self, param_group: ParamGroup) -> None:
        """Reduces a group that gets no more gradients, or keeps its gradients for later."""
        if param_group.reduces:
            if param_group.replicates:
                check_replicas(self.root)
            self._reductions.reduce(param_group.gradient_bytes, param_group.reduce)
        else:
            param_group.hold_gradients()

    def _end_backward(self) -> None:
        """Ends a backward: all shards get their gradients, all units are resharded. Waits."""
        for run in list(self._reached):
            for skipped in run.take_skipped(-1):
                self._come_to(skipped)
        self._advance(to_the_end=True)
        for param_group in self._param_groups():  # also groups that no hook of forward has seen
            if param_group.backward.arrived and param_group.is_trained:
                self._complete(param_group)
        self._reductions.finish()
        for param_group in self._param_groups():
            param_group.end_backward()
        self._forget_backward()
        self._ending = None
        if self.order_check is not None:
            self.order_check.end_backward()
        self.pending_recomputes.clear()
        # A part of the calls that a checkpoint runs in backward never ends.
        self.running = [call for call in self.running if not call.recomputed]
        for unit in self.units:
            unit.end_backward()

    def _forget_backward(self) -> None:
        for run in self._reached:
            run.rewind()
        self._reached.clear()
        self._schedule.clear()
        self._reductions.forget()


def runtime_of(unit: Unit) -> Runtime:
    """Returns the runtime of a unit; a unit without one becomes a root."""
    runtime = unit.runtime
    return runtime if isinstance(runtime, Runtime) else Runtime.make_root(unit)


def is_running(unit: Unit) -> bool:
    """Returns True inside a unit's forward, and in a backward of its root."""
    runtime = unit.runtime
    return isinstance(runtime, Runtime) and (
        runtime.in_backward or runtime.innermost(unit) is not None
    )


def reset(units: Iterable[Unit]) -> None:
    """Reshards units and forgets the state that an error in forward or backward left."""
    for unit in units:
        runtime = unit.runtime
        if isinstance(runtime, Runtime):
            runtime.recover()
            runtime.running = [call for call in runtime.running if call.unit is not unit]
        unit.refresh()
        unit.reshard()


def attach(unit: Unit) -> None:
    """Connects the gradients of a new unit's groups to its runtime."""
    for param_group in unit.param_groups:
        param_group.on_gradient = partial(_gradient_arrived, unit)


def _gradient_arrived(unit: Unit, param_group: ParamGroup) -> None:
    runtime_of(unit).gradient_arrived(param_group)
