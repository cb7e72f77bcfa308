"""Several machines on this one: each has its own network address, host name, processes, /tmp and /dev/shm.

A machine is a set of Linux namespaces: network (a veth pair into a bridge, which is in a namespace of its own, so that this
machine's network stays as it is), processes, mounts and host name. The disk is shared, as on a cluster with network storage,
but for directories that a machine is told to hide. This needs root and iproute2: `missing()` says what is not there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import psutil

NETWORK = "10.213.7"
"""The first three numbers of the machines' addresses."""
TOOLS = ("ip", "unshare", "nsenter", "mount", "hostname")
SETUP_S = 30
"""Deadline of each command that sets a machine up."""

# `.` is the shared directory, which the new /tmp hides: -c keeps `mount` from spelling it as a path, which would lead into /tmp.
BOOT = """
set -e
hostname "$NAME"
cd "$SHARED"
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /tmp
mkdir -p "$SHARED"
mount -c --bind . "$SHARED"
cd "$SHARED"
for path in $HIDDEN; do mount -t tmpfs tmpfs "$path"; done
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$NAME" > /tmp/hosts
mount --bind /tmp/hosts /etc/hosts
echo ready
exec sleep infinity
"""
"""Shell script with which a machine starts. Its own name stands for 127.0.1.1, as on Debian: nobody else reaches that."""


def missing() -> str:
    """Say why there can be no machines here; empty if there can."""
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"needs {', '.join(absent)}"
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    probe = f"opd-{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, timeout=SETUP_S, check=False)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    bridge = ["ip", "-n", probe, "link", "add", "br0", "type", "bridge"]
    bridged = subprocess.run(bridge, capture_output=True, text=True, timeout=SETUP_S, check=False)
    subprocess.run(["ip", "netns", "del", probe], timeout=SETUP_S, check=True)
    return f"no bridges here: {bridged.stderr.strip()}" if bridged.returncode else ""


@dataclass
class Machine:
    """One of `machines`; it runs until `die` or the end of the block."""

    name: str
    """Its host name."""
    address: str
    netns: str
    init: psutil.Process
    """Its first process: when it ends, all the others do."""
    _outer: subprocess.Popen[str] = field(repr=False)
    _network: int

    def command(self, command: Sequence[str], cwd: Path) -> list[str]:
        """The command line that runs `command` on this machine."""
        inside = ["nsenter", f"--target={self.init.pid}", "--net", "--mount", "--pid", "--uts"]
        # The directory is entered afterwards: nsenter's own --wd would open it on this side.
        return [*inside, "--", "sh", "-c", 'cd "$0" && exec "$@"', str(cwd), *command]

    def titles(self) -> list[str]:
        """The command lines of its processes, which for Ray's workers say what they do."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if self._network == Path(f"/proc/{process.pid}/ns/net").stat().st_ino:
                    found.append(" ".join(process.cmdline()))
        return found

    def die(self) -> None:
        """Kill every process on it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.init.kill()
        self._outer.kill()
        self._outer.wait(timeout=SETUP_S)

    def unplug(self) -> None:
        """Cut its network: nobody hears that it is gone."""
        _ip("-n", self.netns, "link", "set", "eth0", "down")


class Machines:
    """Any number of machines in one network, which end with the `with` block."""

    def __init__(self, shared: Path) -> None:
        """`shared` is a directory of this machine that all of them have too, although it may be in /tmp."""
        self._shared = shared
        self._mark = f"opd-{secrets.token_hex(3)}"
        self._bridge = f"{self._mark}-net"
        self._all: list[Machine] = []

    def __enter__(self) -> Machines:
        _ip("netns", "add", self._bridge)
        _ip("-n", self._bridge, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._bridge, "link", "set", "br0", "up")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for machine in self._all:
            machine.die()
            _ip("netns", "del", machine.netns)
        _ip("netns", "del", self._bridge)

    def start(self, name: str, hidden: Sequence[Path] = ()) -> Machine:
        """Start a machine, on which the directories `hidden` are empty and nobody else sees what is written there."""
        number = len(self._all) + 1
        address, netns = f"{NETWORK}.{number}", f"{self._mark}-{number}"
        _ip("netns", "add", netns)
        port = f"port{number}"
        _ip("-n", self._bridge, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", netns)
        _ip("-n", self._bridge, "link", "set", port, "master", "br0", "up")
        _ip("-n", netns, "address", "add", f"{address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            _ip("-n", netns, "link", "set", link, "up")
        _ip("-n", netns, "route", "add", "default", "dev", "eth0")  # Ray and vLLM ask the route for their own address
        env = {"PATH": os.environ["PATH"], "NAME": name, "SHARED": str(self._shared)}
        env["HIDDEN"] = " ".join(map(str, hidden))
        unshare = ["unshare", "--mount", "--pid", "--uts", "--fork", "--mount-proc", "--kill-child", "sh", "-c", BOOT]
        outer = subprocess.Popen(["ip", "netns", "exec", netns, *unshare], env=env, stdout=subprocess.PIPE, text=True)
        assert outer.stdout is not None
        said = outer.stdout.readline().strip()
        assert said == "ready", f"{name} did not start: {said}"
        init = psutil.Process(outer.pid).children()[0]
        machine = Machine(name, address, netns, init, outer, Path(f"/proc/{init.pid}/ns/net").stat().st_ino)
        self._all.append(machine)
        return machine


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], timeout=SETUP_S, check=True)
