"""A program of a user, in full types, which is checked against the installed package."""
# ruff: noqa: T201 - it speaks to its user

import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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
    one: ckpt.RunStep
    for one in ckpt.run_steps(url):
        loss: float = one.metrics["loss"]
        print(one.step, one.time, loss, one.pins)


def data(folder: Path) -> None:
    class Loader:
        def state_dict(self) -> dict[str, int]:
            return {"at": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            print(state)

    numbers = TensorDataset(torch.arange(8.0))
    sampler = ckpt.ElasticSampler(numbers, num_replicas=1, rank=0, shuffle=False)
    batches: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(numbers, 2, sampler=sampler)
    own: ckpt.PerRank = ckpt.per_rank(Loader(), on_resize="keep")
    state: dict[str, object] = {"sampler": sampler, "loader": own}
    ckpt.prepare(state)
    sampler.set_epoch(1)
    for (batch,) in batches:
        ckpt.save(folder / f"data-{int(batch[0])}", state)
    whole: object = ckpt.read(folder / "data-0")
    memory = ckpt.Memory(every_steps=2, replicas=0)
    with Checkpointer(folder / "data", memory=memory, signals=()) as run:
        run.restore(state)
    print(whole, memory)


def weights(folder: Path) -> None:
    torch.save({"w": torch.ones(2)}, folder / "w.pt")
    opened: ckpt.Checkpoint
    with ckpt.open(folder / "w.pt") as opened:
        shapes: list[tuple[int, ...]] = [opened[name].shape for name in opened]
    identity: ckpt.Identity = ckpt.id(folder / "w.pt")
    same: bool = identity.digest == ckpt.id({"w": torch.ones(2)}).digest
    mean = ckpt.merge([folder / "w.pt"] * 2, folder / "mean.safetensors", weights=[0.5, 0.5])
    total = ckpt.WeightedSum((str(folder / "w.pt"),), (2.0,))
    double = ckpt.convert(total, folder / "double.safetensors")
    mapping: ckpt.TensorMapping = ckpt.read_mapping("llama-hf-torchtitan")
    inverse = mapping.inverse()
    print(ckpt.__version__, shapes, same, mean.nbytes, double.dst, inverse)


def observed(folder: Path) -> None:
    def tell(event: ckpt.events.Event) -> None:
        sent: int = sum(one.sent for one in event.requests.values())
        none = ckpt.events.Requests()
        print(event.call, event.seconds, sent, none.nbytes)

    ends = [ckpt.events.subscribe(tell), ckpt.events.log()]
    with ckpt.events.recorded() as events, ckpt.events.trace(folder / "trace.json"):
        ckpt.save(folder / "observed", {"w": torch.ones(2)})
    for end in ends:
        end()
    print([event.stage for event in events])


def describe(error: ckpt.CkptError) -> str:
    """What a program may ask of each error; the classes come before their bases."""
    names: tuple[str, ...] = error.names
    match error:
        case ckpt.MismatchedLoadError() | ckpt.DamagedLoadError() | ckpt.ReplacedLoadError():
            return f"read again into {error.touched}"
        case ckpt.PartialLoadError():
            return f"read again into {error.touched}"
        case ckpt.MismatchError():
            found: tuple[ckpt.Difference, ...] = error.differences
            return ", ".join(f"{one.name}: {one.problem}, {one.detail}" for one in found)
        case ckpt.RankError():
            return f"rank {error.rank} has {error.error}: {error.message}"
        case ckpt.VersionGoneError():
            return f"{error.version} is gone, {error.newest} is new"
        case ckpt.TooLargeError():
            return f"{error.nbytes} bytes"
        case ckpt.GoneError() | ckpt.SizeError() | ckpt.CorruptError() | ckpt.HostileError():
            return error.reason
        case ckpt.ForeignFileError() | ckpt.UnsupportedError() | ckpt.FormatError():
            return error.kind
        case ckpt.InUseError() | ckpt.ExistsError() | ckpt.NotACheckpointError():
            return str(error.filename)
        case ckpt.AccessDeniedError() | ckpt.UnreachableError() | ckpt.StoreTimeoutError():
            return str(error.errno)
        case ckpt.ProtocolError() | ckpt.ReplacedError() | ckpt.StoreError():
            return str(error.strerror)
        case ckpt.ArgumentTypeError() | ckpt.ArgumentError() | ckpt.StateError():
            return str(error)
        case ckpt.BackgroundError() | ckpt.BusyError() | ckpt.ClosedError() | ckpt.MisuseError():
            return str(error)
        case ckpt.NotOwnerError() | ckpt.StateChangedError() | ckpt.WaitTimeoutError():
            return str(error)
        case ckpt.UnknownNameError() | ckpt.TensorIndexError() | ckpt.TransferError():
            return str(error)
        case ckpt.WorldMismatchError() | ckpt.LocalShapeError() | ckpt.OptimizerMismatchError():
            return str(error)
        case ckpt.HoleError() | ckpt.PartialError() | ckpt.UnknownPlacementError():
            return str(error)
        case ckpt.NotAMemberError() | ckpt.DestroyedGroupError() | ckpt.ShardingError():
            return str(error)
        case ckpt.TorchAssertionError():
            return str(error)
        case _:
            return f"{type(error).__name__}: {names}"


def quietly(folder: Path) -> None:
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("error", ckpt.NotDurableWarning)
        warnings.simplefilter("ignore", ckpt.LeftOverWarning)
        warnings.simplefilter("ignore", ckpt.SaveFailedWarning)
        warnings.simplefilter("ignore", ckpt.UnreadableWarning)
        warnings.simplefilter("ignore", ckpt.WireWarning)
        ckpt.load(folder / "a", {"w": torch.ones(1)}, strict=False, fallback=True)
    for one in raised:
        told = one.message
        if isinstance(told, ckpt.FallbackWarning):
            skipped: tuple[ckpt.Skipped, ...] = told.skipped
            print(told.taken, [each.message for each in skipped])
        elif isinstance(told, ckpt.SkippedWarning):
            print([each.name for each in told.differences])
        elif isinstance(told, ckpt.UnverifiedWarning | ckpt.ReplicasWarning):
            print(told.tensors)
        elif isinstance(told, ckpt.ValuesWarning):
            print(told.names)


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
    state: ckpt.LiveState
    with ckpt.publish({"model": model}, "policy") as state:
        state.update().wait()
        print(state.url)
    one: ckpt.LiveVersion
    for one in ckpt.follow(url):
        ckpt.load(one.url, {"model": model})


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        train(f"{place}/run")
        steps(f"{place}/run")
        verbs(Path(place))
        print(errors(Path(place)))
        data(Path(place))
        weights(Path(place))
        observed(Path(place))
        try:
            quietly(Path(place))
        except ckpt.CkptError as failure:
            print(describe(failure))
