"""Run a command under umask 077 in a file system view of its own, and tell what other users could open meanwhile.

    python doors.py SHOWN... -- COMMAND...     prints JSON

The command sees empty `/tmp`, `/dev/shm`, `/var/tmp` and `/run`, and the directories SHOWN at their places. So whatever lies there
is its own, wherever a library puts it, and no other process of the machine disturbs the walk.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import psutil

from opd.environments.sandbox.inside import BIND, mount

EMPTY = ("/tmp", "/dev/shm", "/var/tmp", "/run")
OTHERS = 0o077


def make_own_view(shown: list[str]) -> None:
    """Cover the places where programs leave things; this process is alone in its mount namespace."""
    kept = [os.open(path, os.O_PATH | os.O_DIRECTORY) for path in shown]
    for place in EMPTY:
        if Path(place).is_dir() and not Path(place).is_symlink():
            mount("none", place, "tmpfs", 0, "mode=1777")
    for path, number in zip(shown, kept, strict=True):
        Path(path).mkdir(parents=True, exist_ok=True)
        mount(f"/proc/self/fd/{number}", path, None, BIND)


def walk(place: str, reachable: bool = True) -> Iterator[tuple[str, str, bool]]:
    """Path, kind, and whether another user gets at it, of all below a directory. What goes away meanwhile is left out."""
    with contextlib.suppress(FileNotFoundError), os.scandir(place) as entries:
        for entry in entries:
            try:
                mode = entry.stat(follow_symlinks=False).st_mode
            except FileNotFoundError:
                continue
            kind = next((n for n in ("SOCK", "FIFO", "DIR", "LNK") if getattr(stat, f"S_IS{n}")(mode)), "file")
            if kind != "LNK":  # a link has no rights of its own
                yield entry.path, f"{kind} {stat.S_IMODE(mode):o}", reachable and bool(mode & OTHERS)
            if kind == "DIR":
                yield from walk(entry.path, reachable and bool(mode & 0o011))


def doors_without_files(processes: list[psutil.Process]) -> Iterator[str]:
    """Ports beyond loopback at which the processes listen, and abstract sockets, which have no rights at all."""
    abstract = {
        fields[6]: fields[7]
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]
        if len(fields := line.split()) > 7 and fields[7].startswith("@")
    }
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            for port in process.net_connections(kind="inet"):
                listens = port.status == psutil.CONN_LISTEN or (port.type.name == "SOCK_DGRAM" and not port.raddr)
                if listens and not ip_address(port.laddr.ip.removeprefix("::ffff:")).is_loopback:
                    yield f"{process.name()} listens on {port.laddr.ip} ({port.type.name})"
            for link in Path("/proc", str(process.pid), "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    name = str(link.readlink())
                    if name.startswith("socket:[") and name[8:-1] in abstract:
                        yield f"{process.name()} has the abstract socket {abstract[name[8:-1]]}"


def main() -> None:
    split = sys.argv.index("--")
    shown, command = sys.argv[1:split], sys.argv[split + 1 :]
    make_own_view(shown)
    before = {path for place in shown for path, _, _ in walk(place)}
    seen: dict[str, str] = {}
    open_to_others: dict[str, str] = {}
    other_doors: set[str] = set()
    with subprocess.Popen(command, umask=0o077) as started:
        me = psutil.Process()
        while True:
            ended = started.poll() is not None
            for place in (*EMPTY, *shown):
                for path, kind, reachable in walk(place):
                    if path not in before and not any(path == s or s.startswith(path + "/") for s in shown):
                        seen[path] = kind
                        if reachable:
                            open_to_others[path] = kind
            other_doors.update(doors_without_files(me.children(recursive=True)))
            if ended:
                break
            time.sleep(0.1)
    left = sorted(
        p for place in EMPTY for p, _, _ in walk(place) if not any(p.startswith(s) or s.startswith(p) for s in shown)
    )
    told = {
        "code": started.returncode,
        "seen": seen,
        "open": open_to_others,
        "other": sorted(other_doors),
        "left": left,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
