"""Two hosts on one machine: network namespaces with addresses and host names of their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

DEVICE = "veth0"
"""The network device of each host."""


def system(*command: str) -> str:
    """The output of a command of the system, which has to succeed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout


@contextmanager
def two_hosts(addresses: Mapping[str, str]) -> Iterator[None]:
    """Two namespaces, by the names and addresses of the hosts, with a pair of devices between them.

    Skips the test where the system allows none.
    """
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("unshare")):
        pytest.skip("network namespaces need root, ip and unshare")
    try:
        for host in addresses:
            system("ip", "netns", "add", host)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this system allows no network namespaces: {error.stderr.strip()}")
    try:
        ends = [word for host in addresses for word in ("name", DEVICE, "netns", host)]
        system("ip", "link", "add", *ends[:4], "type", "veth", "peer", *ends[4:])
        for host, address in addresses.items():
            system("ip", "-n", host, "address", "add", f"{address}/24", "dev", DEVICE)
        yield
    finally:
        for host in addresses:
            lose(host)
            subprocess.run(["ip", "netns", "delete", host], timeout=30, check=False)


def connect(*hosts: str) -> None:
    """Switch the network devices of hosts on."""
    for host in hosts:
        for device in ("lo", DEVICE):
            system("ip", "-n", host, "link", "set", device, "up")


def lose(host: str) -> None:
    """End a host as a power failure does: silence on the network, and no process is left."""
    down = ["ip", "-n", host, "link", "set", DEVICE, "down"]
    subprocess.run(down, capture_output=True, timeout=30, check=False)
    found = subprocess.run(
        ["ip", "netns", "pids", host], capture_output=True, text=True, timeout=30, check=False
    )
    for process in found.stdout.split():
        os.kill(int(process), signal.SIGKILL)


def command_on(host: str, command: Sequence[str]) -> list[str]:
    """The command that runs a command on a host, with the host's name."""
    shell = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host]
    return ["ip", "netns", "exec", host, *shell, *command]


def environment() -> dict[str, str]:
    """The environment of a program of ranks on a host."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE}
