"""A real S3 server: Ceph's gateway over one monitor and one disk daemon, all on this machine.

Objects live in memory (`memstore`). Signatures are checked; ranges, multipart uploads and
`If-None-Match: *` behave as at any site that runs Ceph. Debian has it:
`apt-get install --no-install-recommends ceph-mon ceph-osd radosgw ceph-common`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from tests.stores.child import (
    HOST,
    DidNotStart,
    NotInstalled,
    answers,
    free_ports,
    running,
    wait_until,
)
from tests.stores.server import Server, s3_server

PROGRAMS = (
    "ceph",
    "ceph-authtool",
    "ceph-mon",
    "ceph-osd",
    "monmaptool",
    "radosgw",
    "radosgw-admin",
)
PACKAGES = "ceph-mon ceph-osd radosgw ceph-common"
KEY, SECRET = "test-key", "test-secret"
OTHER = "other"
"""The name, key and secret of a second user, who may do what the policy of a bucket allows."""
STORE_BYTES = 16 << 30
"""What the server says it can hold. Memory is taken as objects come."""

CONFIGURATION = """\
[global]
fsid = {fsid}
mon host = [v2:{host}:{mon_port},v1:{host}:{old_mon_port}]
public addr = {host}
cluster addr = {host}
auth allow insecure global id reclaim = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
# Every pool and every daemon is a round of the monitors' agreement: at start, most of the time.
paxos propose interval = 0.01
paxos min wait = 0.01
keyring = {folder}/keyring
run dir = {folder}
crash dir = {folder}
admin socket =
pid file =
log file = {folder}/$name.log
mon cluster log file = {folder}/cluster.log
[mon]
mon data = {folder}/mon
mon data avail crit = 1
mon data avail warn = 1
[osd]
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = {store_bytes}
osd class default list = *
osd class load list = *
[client.rgw]
rgw data = {folder}/rgw
rgw frontends = beast endpoint={host}:{port} tcp_nodelay=1
rgw thread pool size = 64
# What is deleted or replaced gives its room back at once, not after two hours.
rgw gc obj min wait = 1
rgw gc processor period = 5
rgw gc processor max time = 5
rgw crypt require ssl = false
"""


def missing() -> str | None:
    """Why the server cannot be started here; None when it can."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if not absent:
        return None
    return (
        f"Ceph is not installed ({', '.join(absent)}): "
        f"apt-get install --no-install-recommends {PACKAGES}, or make test-stores"
    )


@contextmanager
def started(folder: Path) -> Iterator[Server]:
    """The server with an empty bucket; logs and settings go to the folder.

    Raises NotInstalled, or DidNotStart with the end of a log.
    """
    reason = missing()
    if reason is not None:
        raise NotInstalled(reason)
    port, mon_port, old_mon_port = free_ports(3)
    fsid = str(uuid.uuid4())
    for name in ("mon", "osd", "rgw"):
        (folder / name).mkdir()
    settings = folder / "ceph.conf"
    settings.write_text(
        CONFIGURATION.format(
            fsid=fsid,
            host=HOST,
            port=port,
            mon_port=mon_port,
            old_mon_port=old_mon_port,
            folder=folder,
            store_bytes=STORE_BYTES,
        )
    )

    def do(*command: str) -> str:
        try:
            done = subprocess.run(
                command,
                check=True,
                capture_output=True,
                text=True,
                timeout=60,
                env={**os.environ, "CEPH_CONF": str(settings)},
            )
        except subprocess.SubprocessError as error:
            said = getattr(error, "stderr", None)
            raise DidNotStart(f"{error}: {said}; logs are in {folder}") from error
        return done.stdout

    def daemon(program: str, *arguments: str) -> tuple[str, ...]:
        return (program, "-f", "-c", str(settings), *arguments)

    addresses = f"[v2:{HOST}:{mon_port},v1:{HOST}:{old_mon_port}]"
    keyring, monmap = str(folder / "keyring"), str(folder / "monmap")
    do("monmaptool", "--create", "--clobber", "--fsid", fsid, "--addv", "a", addresses, monmap)
    everything = ("--cap", "mon", "allow *", "--cap", "osd", "allow *")
    new_key = ("ceph-authtool", keyring, "--gen-key", "-n")
    do(*new_key, "mon.", "--create-keyring", "--cap", "mon", "allow *")
    do(*new_key, "client.admin", *everything, "--cap", "mgr", "allow *")
    do(*new_key, "client.rgw", *everything)
    do(*new_key, "osd.0", "--cap", "mon", "allow profile osd", "--cap", "osd", "allow *")
    do(
        "ceph-mon",
        "-c",
        str(settings),
        "--mkfs",
        "-i",
        "a",
        "--monmap",
        monmap,
        "--keyring",
        keyring,
    )
    with ExitStack() as stack:

        def start(program: str, *arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
            log = folder / f"{program}.out"
            return stack.enter_context(running(daemon(program, *arguments), log)), log

        start("ceph-mon", "-i", "a")
        osd_id = str(uuid.uuid4())
        do("ceph", "osd", "new", osd_id)
        do("ceph-osd", "-c", str(settings), "-i", "0", "--mkfs", "--osd-uuid", osd_id)
        osd = start("ceph-osd", "-i", "0")
        wait_until(lambda: "1 up" in do("ceph", "osd", "stat"), *osd)
        for user, key, secret in (("test", KEY, SECRET), (OTHER, OTHER, OTHER)):
            names = (f"--uid={user}", f"--display-name={user}")
            keys = (f"--access-key={key}", f"--secret-key={secret}")
            do("radosgw-admin", "user", "create", *names, *keys)
        gateway = start("radosgw", "-n", "client.rgw")
        wait_until(lambda: answers(port), *gateway)
        yield replace(s3_server("radosgw", port, KEY, SECRET), settings=str(settings))
