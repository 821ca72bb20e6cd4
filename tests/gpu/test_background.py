"""Saves in the background of tensors on a device: what is stored is what was there at the call."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ckpt
from ckpt.saving import staging as device_copies
from tests.gpu.states import Leaves, copies, differing, leaves, like, parts, train, trained

SECONDS = 60

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def in_place(tensor: Tensor) -> None:
    tensor.mul_(3).add_(1)


def past_autograd(tensor: Tensor) -> None:
    tensor.data.fill_(7)


def through_a_view(tensor: Tensor) -> None:
    tensor.view(-1)[::2] = 5


def through_the_storage(tensor: Tensor) -> None:
    tensor.untyped_storage().fill_(1)


def through_dlpack(tensor: Tensor) -> None:
    torch.utils.dlpack.from_dlpack(tensor.detach()).zero_()


def foreach(tensor: Tensor) -> None:
    torch._foreach_add_([tensor], 2)


def memory_given_back(tensor: Tensor) -> None:
    """What the allocator hands out next may be the same memory."""
    shape, device = tensor.shape, tensor.device
    tensor.set_(torch.empty(0, device=device))  # type: ignore[call-overload]
    torch.full(shape, 9.0, device=device)


def on_another_stream(tensor: Tensor) -> None:
    if tensor.device.type == "cpu":
        tensor.zero_()
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        tensor.zero_()
    stream.synchronize()


WAYS = (
    *(in_place, past_autograd, through_a_view, through_the_storage, through_dlpack, foreach),
    *(memory_given_back, on_another_stream),
)


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_is_changed_right_after_the_call_is_stored_as_it_was(
    tmp_path: Path, device: str, way: Callable[[Tensor], None]
) -> None:
    state = {
        f"{number}": torch.randn(1 << 18, device=device, requires_grad=number % 2 == 0)
        for number in range(8)
    }
    wanted = copies(state)
    handle = ckpt.save(tmp_path / "c", state, blocking=False)
    with torch.no_grad():
        for tensor in state.values():
            way(tensor)
    handle.wait(SECONDS)
    assert differing(ckpt.read(tmp_path / "c"), wanted) == []


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
def test_training_goes_on_while_a_save_is_in_the_background(
    tmp_path: Path, device: str, options: dict[str, bool]
) -> None:
    model, optimizer = trained(device, options, seed=0)
    train(model, optimizer, 0, 2)
    wanted = copies(parts(model, optimizer))
    handle = ckpt.save(tmp_path / "c", {"model": model, "optim": optimizer}, blocking=False)
    train(model, optimizer, 2, 3)
    handle.wait(SECONDS)
    again, its_optimizer = trained(device, options, seed=1)
    ckpt.load(tmp_path / "c", {"model": again, "optim": its_optimizer})
    assert differing(parts(again, its_optimizer), wanted) == []
    assert differing(parts(model, optimizer), wanted) != []


def test_training_goes_on_while_a_state_passes_smaller_memory(tmp_path: Path, device: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(700, 600, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(700, device=device)).sum().backward()
        optimizer.step()

    step()
    state = {"model": model, "optim": optimizer, "loose": torch.ones(70_000, device=device)}
    ckpt.save(tmp_path / "want", state)
    handle = ckpt.save(tmp_path / "got", state, blocking=False, host_memory="1MiB")
    state["loose"].zero_()  # type: ignore[operator]
    step()
    handle.wait(SECONDS)
    assert ckpt.id(tmp_path / "got").digest == ckpt.id(tmp_path / "want").digest


def test_every_dtype_and_stride_is_staged_to_the_bit(tmp_path: Path, device: str) -> None:
    state = leaves(device)
    ckpt.save(tmp_path / "c", state, blocking=False).wait(SECONDS)
    assert differing(ckpt.load(tmp_path / "c", like(state, device)), state) == []


@pytest.mark.thorough
def test_states_of_all_sizes_are_staged_one_after_the_other(tmp_path: Path, device: str) -> None:
    """The memory that is shared with the writer is mapped anew, and page-locked anew."""
    wanted: list[Leaves] = []
    for number, numel in enumerate((1000, 3 << 20, 10, 6 << 20)):
        state = {"w": torch.randn(numel, device=device), "host": torch.randn(numel)}
        wanted.append(copies(state))
        handle = ckpt.save(tmp_path / f"{number}", state, blocking=False)
        state["w"].zero_()
        state["host"].zero_()
        handle.wait(SECONDS)
    for number, state in enumerate(wanted):
        assert differing(ckpt.read(tmp_path / f"{number}"), state) == []


def test_after_wait_staged_everything_may_be_changed(tmp_path: Path, device: str) -> None:
    model, optimizer = trained(device, {}, seed=0)
    train(model, optimizer, 0, 1)
    wanted = copies(parts(model, optimizer))
    handle = ckpt.save(tmp_path / "c", {"model": model, "optim": optimizer}, blocking=False)
    handle.wait_staged()
    with torch.no_grad():
        for tensor in parts(model, optimizer).values():
            tensor.zero_()
    handle.wait(SECONDS)
    again, its_optimizer = trained(device, {}, seed=1)
    ckpt.load(tmp_path / "c", {"model": again, "optim": its_optimizer})
    assert differing(parts(again, its_optimizer), wanted) == []


@pytest.mark.gpu
def test_what_streams_were_told_before_the_call_is_stored(tmp_path: Path) -> None:
    state = {"w": torch.zeros(1 << 20, device="cuda")}
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # the device is busy for a tenth of a second
    state["w"].add_(1)
    handle = ckpt.save(tmp_path / "c", state, blocking=False)
    state["w"].add_(1)
    handle.wait(SECONDS)
    assert torch.equal(ckpt.read(tmp_path / "c")["w"], torch.ones(1 << 20))


@pytest.mark.gpu
def test_a_call_that_copies_later_does_not_wait_for_queued_work(tmp_path: Path) -> None:
    model = torch.nn.Linear(300, 300, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(300, device="cuda")).sum().backward()
    optimizer.step()
    state = {"model": model, "optim": optimizer}
    ckpt.save(tmp_path / "first", state, blocking=False, staging="overlapped").wait(SECONDS)
    is_over = torch.cuda.Event()
    torch.cuda._sleep(4_000_000_000)  # some seconds
    is_over.record()
    handle = ckpt.save(tmp_path / "c", state, blocking=False, staging="overlapped")
    has_waited = is_over.query()
    handle.wait(SECONDS)
    assert not has_waited
    assert ckpt.diff(tmp_path / "first", tmp_path / "c").equal


@pytest.mark.gpu
def test_copies_of_strided_tensors_take_memory_for_one_of_them(tmp_path: Path) -> None:
    state = {f"{number}": torch.rand(2048, 2048, device="cuda").T for number in range(8)}
    wanted, before = copies(state), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ckpt.save(tmp_path / "c", state, blocking=False).wait(SECONDS)
    assert torch.cuda.max_memory_allocated() - before < 3 * state["0"].nbytes
    assert differing(ckpt.read(tmp_path / "c"), wanted) == []


@pytest.mark.gpu
def test_the_memory_that_is_copied_into_is_page_locked_until_it_is_released() -> None:
    with mmap.mmap(-1, 1 << 20) as memory:
        data = memoryview(memory)
        device_copies.page_lock(data, torch.device("cuda", 0))
        seen = torch.frombuffer(data, dtype=torch.uint8)
        assert seen.is_pinned()
        device_copies.page_lock(data, torch.device("cuda", 0))  # again: nothing to be done
        device_copies.release(ctypes.addressof(ctypes.c_char.from_buffer(data)))
        assert not seen.is_pinned()
        del seen
        data.release()


@pytest.mark.gpu
def test_a_refused_page_lock_is_not_the_error_of_the_next_kernel() -> None:
    device = torch.device("cuda", 0)
    with mmap.mmap(-1, 1 << 20) as memory:
        data = memoryview(memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        device_copies.page_lock(data, device)
        device_copies._locked.clear()
        device_copies.page_lock(data, device)  # refused: it is registered
        assert torch.ones(4, device=device).add_(1).tolist() == [2.0] * 4
        device_copies._locked[address] = len(data)
        device_copies.release(address)
        data.release()
