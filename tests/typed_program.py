"""A program of a user, in full types, which is checked against the installed package."""
# ruff: noqa: T201 - it speaks to its user

import tempfile
from pathlib import Path

import torch
from torch import nn

import ckpt
import ckpt.dcp as dcp
from ckpt import Checkpointer, Keep
from ckpt.sharding import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard


def train(url: str) -> None:
    model = nn.Linear(4, 4)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optim": optim, "rng": ckpt.rng()}
    keep = Keep(last=3, best=1, metric="loss")
    with Checkpointer(url, every_steps=10, keep=keep, signals=()) as run:
        start: int | None = run.restore(state)
        for step in range((start or 0) + 1, 21):
            loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            optim.step()
            saved: bool = run.save(step, state, {"loss": loss.item()})
            if saved and run.reached_preemption():
                break
        run.wait_until_finished()
        steps: list[int] = run.all_steps()
        newest: int | None = run.latest_step()
        run.pin(10, "release")
    print(steps, newest)


def verbs(folder: Path) -> None:
    model = nn.Linear(4, 4)
    ckpt.save(folder / "a", {"model": model})
    handle: ckpt.SaveHandle = ckpt.save(folder / "b", {"model": model}, blocking=False)
    handle.wait()
    done: bool = handle.done()
    saved: ckpt.Saved = handle.result()
    loaded = ckpt.load(folder / "a", {"model": model})
    with ckpt.open(folder / "a") as opened:
        tensor: ckpt.TensorHandle = opened["model.weight"]
        part: torch.Tensor = tensor[0:2]
        names: list[str] = list(opened)
    sound: bool = ckpt.verify(folder / "a").sound
    equal: bool = ckpt.diff(folder / "a", folder / "b").equal
    report = ckpt.convert(folder / "a", folder / "a.safetensors", dtype="bfloat16")
    tensors: int = report.tensors
    left: list[ckpt.LeftOver] = ckpt.gc(folder)
    path: str = ckpt.latest(folder)
    ckpt.delete(path)
    print(done, saved, loaded["model"].weight, part, names, sound, equal, tensors, left)
    full = ckpt.state_dict.convert(model, to="full", rank0_only=True)
    print(full)


def errors(folder: Path) -> str:
    stop = ckpt.events.subscribe(print)
    try:
        with ckpt.limits(manifest_bytes=1 << 20):
            ckpt.load(folder / "a", {"model": nn.Linear(2, 2)}, rename={"a": "b"})
    except ckpt.MismatchError as error:
        differences = [one.name for one in error.differences]
        return f"{error.kind}: {differences}"
    except ckpt.RankError as error:
        return f"rank {error.rank}: {error.message}"
    except (ckpt.CorruptError, ckpt.ArgumentError, ckpt.StoreError) as error:
        return error.kind
    finally:
        stop()
    return ""


def steps(url: str) -> None:
    for one in ckpt.run_steps(url):
        loss: float = one.metrics["loss"]
        print(one.step, one.time, loss, one.pins)


def sharded() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(model)
    wrapped = FullyShardedDataParallel(nn.Linear(2, 2))
    with FullyShardedDataParallel.summon_full_params(wrapped):
        norm: torch.Tensor = wrapped.clip_grad_norm_(1.0)
    dcp.save({"model": model.state_dict()}, checkpoint_id="x")
    dcp.load({"model": model.state_dict()}, checkpoint_id="x")
    print(norm)


def live(url: str) -> None:
    model = nn.Linear(1, 1)
    with ckpt.publish({"model": model}, "policy") as state:
        state.update().wait()
        print(state.url)
    for one in ckpt.follow(url):
        ckpt.load(one.url, {"model": model})


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        train(f"{place}/run")
        steps(f"{place}/run")
        verbs(Path(place))
        print(errors(Path(place)))
