"""Readers on hosts of their own that start together, with and without `ckpt.follow(share=True)`.

    python benchmarks/live_swarm.py --size-mb 500 --readers 8

As root: each host is a network namespace, and sends and receives 100 MB/s at most (tc tbf). One
publisher, one rank each. A second load of a reader is of a new version, of which 1 % has changed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import report
import torch

import ckpt

NET, DEVICE, TENSORS, READERS = "ckpt-swarm", "eth0", 16, 8
LIMIT = ("root", "tbf", "rate", "800mbit", "burst", "1mb", "latency", "100ms")


def system(*command: str) -> str:
    """The output of a command of the system."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def address(host: int) -> str:
    """The address of a host; the publisher is host 0."""
    return f"10.213.9.{host + 1}"


@contextmanager
def network(hosts: int) -> Iterator[None]:
    """A bridge with hosts."""
    names = [NET, *(f"{NET}{host}" for host in range(hosts))]
    try:
        for name in names:
            system("ip", "netns", "add", name)
            system("ip", "-n", name, "link", "set", "lo", "up")
        system("ip", "-n", NET, "link", "add", "bridge", "type", "bridge")
        system("ip", "-n", NET, "link", "set", "bridge", "up")
        for host, name in enumerate(names[1:]):
            port = f"port{host}"
            ends = ["name", DEVICE, "netns", name, "type", "veth", "peer", "name", port]
            system("ip", "link", "add", *ends, "netns", NET)
            system("ip", "-n", name, "address", "add", f"{address(host)}/24", "dev", DEVICE)
            system("ip", "-n", NET, "link", "set", port, "master", "bridge")
            for place, device in ((name, DEVICE), (NET, port)):
                system("tc", "-n", place, "qdisc", "add", "dev", device, *LIMIT)
                system("ip", "-n", place, "link", "set", device, "up")
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def state_of(nbytes: int) -> dict[str, torch.Tensor]:
    """Tensors of bfloat16."""
    random = torch.Generator().manual_seed(1)
    rows = nbytes // TENSORS // 2 // 1024
    return {
        f"w{number}": torch.randn(rows, 1024, generator=random).bfloat16()
        for number in range(TENSORS)
    }


def read(url: str, nbytes: int, share: bool) -> None:
    """A reader: loads each version when a line comes, and says how long it took."""
    state = {name: torch.zeros_like(one) for name, one in state_of(nbytes).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ckpt.load(url, {"w0": torch.zeros_like(state["w0"])}, strict=False)  # imports
    print("ready", flush=True)
    versions = ckpt.follow(url, share=share)
    while sys.stdin.readline():
        started = time.perf_counter()
        ckpt.load(next(versions).url, state)
        seconds = time.perf_counter() - started
        print(seconds, float(state["w3"][0, 0]), flush=True)


def started(host: int, *arguments: object) -> subprocess.Popen[str]:
    """This program on a host, with sockets of its own."""
    folder = tempfile.mkdtemp(prefix="ckpt-bench-run-")
    command = ["ip", "netns", "exec", f"{NET}{host}", sys.executable, __file__]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CKPT_RUNTIME_DIR": folder, "OMP_NUM_THREADS": "1"},
    )


def say(process: subprocess.Popen[str]) -> None:
    """Lets a process go on."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def heard(process: subprocess.Popen[str]) -> list[str]:
    """The words of the next line of a process."""
    assert process.stdout is not None
    return process.stdout.readline().split()


def publish(nbytes: int) -> None:
    """The publisher: makes a new version when a line comes."""
    state = state_of(nbytes)
    with ckpt.publish(state, "bench", address=address(0)) as live:
        print(live.url, flush=True)
        while sys.stdin.readline():
            for one in state.values():
                one.view(torch.int16).reshape(-1)[::100] += 1
            live.update().wait()
            print(float(state["w3"][0, 0]), flush=True)


def sent() -> int:
    """The bytes that have left the publisher's host."""
    place = f"/sys/class/net/{DEVICE}/statistics/tx_bytes"
    return int(system("ip", "netns", "exec", f"{NET}0", "cat", place))


def run(count: int, share: bool, nbytes: int) -> list[tuple[float, float]]:
    """The seconds of the slowest reader and the models that left the publisher, per version."""
    publisher, found = started(0, "--publish", nbytes), []
    (url,) = heard(publisher)
    readers = [started(1 + host, "--read", url, nbytes, int(share)) for host in range(count)]
    for reader in readers:
        heard(reader)
    for version in range(2):
        if version:
            say(publisher)
            (value,) = heard(publisher)
        before = sent()
        for reader in readers:
            say(reader)
        said = [heard(reader) for reader in readers]
        assert not version or {one[1] for one in said} == {value}
        found.append((max(float(one[0]) for one in said), (sent() - before) / nbytes))
    for process in (*readers, publisher):
        process.communicate()
    return found


def table(nbytes: int, readers: int = READERS) -> report.Table:
    """One reader, and several with and without sharing. As root."""
    rows = []
    with network(readers + 1):
        for count, share in ((1, False), (readers, False), (readers, True)):
            for version, (seconds, models) in zip(
                ("first version", "1 % changed"), run(count, share, nbytes), strict=True
            ):
                name = f"{count}, share={share}"
                rows.append([name, version, f"{seconds:.1f}", f"{models:.3f}"])
    columns = ("readers", "load", "seconds of the slowest", "models that left the publisher")
    title = f"Readers that start together, {nbytes / 1e6:.0f} MB of bfloat16, links of 100 MB/s"
    return report.Table(title, columns, rows)


def main(given: Sequence[str]) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mb", type=int, default=500)
    parser.add_argument("--readers", type=int, default=READERS)
    options = parser.parse_args(given)
    print(report.origin(), end="\n\n", flush=True)
    print(table(options.size_mb * 10**6, options.readers))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--publish"]:
        publish(int(sys.argv[2]))
    elif sys.argv[1:2] == ["--read"]:
        read(sys.argv[2], int(sys.argv[3]), bool(int(sys.argv[4])))
    else:
        main(sys.argv[1:])
