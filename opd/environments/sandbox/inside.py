"""The first process of a sandbox: makes it, then runs one command after the other in it. Run as a script, never imported.

`box.py` starts it and talks to it in lines of JSON: a request is {"argv", "stdin", "seconds", "output"}, an answer {"code", "why",
"head", "tail", "missing"}. Only the standard library: `-I -S` leaves everything else out.

What a command sees: a root that cannot be written, with the machine's programs and this Python; `/box` and `/tmp`, which hold
a few megabytes each in memory; its own processes; no network. It runs without any capability, as `nobody` if root started the
sandbox, and without the system calls that hold memory where nobody counts it or lead out of the namespaces. When it ends,
everything that it left running is killed. Nothing of a sandbox is on a disk.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import fcntl
import json
import os
import re
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
NOBODY = 65534
ROOT_CANDIDATES = ("/mnt", "/media", "/srv", "/tmp")
"""Directories of the machine that nothing in the sandbox needs: the new root is mounted over the first that fits."""
FILES = ("box", "tmp")
"""Directories that commands can write to, in memory."""
DEVICES = ("null", "full", "random", "urandom")
ZEROES = 1 << 50
"""Bytes of `/dev/zero`, which is an ordinary file full of holes here. Of the real one, pages can be mapped for which no process is
charged."""
MACHINES = {
    "x86_64": (0xC000003E, {
        "mmap": 9, "shmget": 29, "socket": 41, "socketpair": 53, "setsockopt": 54, "semget": 64, "msgget": 68, "fcntl": 72,
        "mq_open": 240, "add_key": 248, "request_key": 249, "keyctl": 250, "vmsplice": 278, "perf_event_open": 298,
        "memfd_create": 319, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "memfd_secret": 447,
    }),
    "aarch64": (0xC00000B7, {
        "mmap": 222, "shmget": 194, "socket": 198, "socketpair": 199, "setsockopt": 208, "semget": 190, "msgget": 186, "fcntl": 25,
        "mq_open": 180, "add_key": 217, "request_key": 218, "keyctl": 219, "vmsplice": 75, "perf_event_open": 241,
        "memfd_create": 279, "bpf": 280, "userfaultfd": 282, "io_uring_setup": 425, "memfd_secret": 447,
    }),
}  # fmt: skip
"""Processor -> its number among the kernel's, and the numbers of the calls that the filter looks at."""
ABSENT = (
    "shmget", "semget", "msgget", "mq_open", "memfd_create", "memfd_secret", "vmsplice", "io_uring_setup", "perf_event_open",
    "userfaultfd", "bpf", "add_key", "request_key", "keyctl",
)  # fmt: skip
"""Calls that a command does not have: memory that no process is charged for, ways deep into the kernel, and the keys of whoever started
us, which namespaces do not separate."""
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
"""Kinds of sockets that our network namespace confines; AF_VSOCK, say, reaches the host of a virtual machine from any."""
MAP_SHARED, MAP_ANONYMOUS, MAP_HUGETLB = 0x01, 0x20, 0x40000
F_SETPIPE_SZ = 1031
POLL_S = 0.02
"""Seconds between two looks at a command and its memory."""
PIECE = 1 << 16
"""The most bytes that are read at once."""
MOST_OUTPUT = 16 << 20
"""Bytes of output after which a command is ended, as one that never stops writing."""
libc = ctypes.CDLL(None, use_errno=True)


def check_result(function: str, result: int) -> None:
    """Check the result of the C function of this name. Raises: OSError if it failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """Call mount(2); `kind` is the type of the file system. Raises: OSError."""
    kind_bytes = None if kind is None else kind.encode()
    result = libc.mount(source.encode(), target.encode(), kind_bytes, ctypes.c_ulong(flags), data.encode())
    check_result(f"mount {kind or source} on {target}", result)


def enter_namespaces() -> None:
    """Enter namespaces of our own: users, mounts, processes, network, host name, shared memory.

    Root also maps `nobody`, so that commands have a user whose number of processes can be limited.
    """
    ready, outside = os.pipe(), os.getpid()
    helper = os.fork()
    if helper == 0:  # it stays outside, where only root may map a second user
        os.read(ready[0], 1)
        try:
            _map_users(Path("/proc", str(outside)), os.geteuid(), os.getegid())
        except OSError:
            os._exit(1)
        os._exit(0)
    # The users can only be mapped once the namespace is there: until then the helper waits for a byte.
    failed = libc.unshare(NEWUSER | NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET) and ctypes.get_errno()
    os.write(ready[1], b".")
    _, status = os.waitpid(helper, 0)
    os.close(ready[0])
    os.close(ready[1])
    if failed:
        raise OSError(failed, f"unshare: {os.strerror(failed)}")
    if status != 0:
        raise OSError("the users of a new namespace could not be mapped")


def _map_users(process: Path, uid: int, gid: int) -> None:
    """Make the user and the group root in the namespace of a process, given by its directory in `/proc`; for root, `nobody` too."""
    second = f"\n{NOBODY} {NOBODY} 1" if uid == 0 else ""
    if uid != 0:
        (process / "setgroups").write_text("deny")
    (process / "gid_map").write_text(f"0 {gid} 1{second}")
    (process / "uid_map").write_text(f"0 {uid} 1{second}")


def become_process_one() -> None:
    """Go on in a child, which is process 1 of the new namespace: the parent that made the namespace cannot enter it. The parent waits for
    the child and ends with its exit code; if the parent dies, the child is killed."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0x7F)
    check_result("prctl", libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def build_root(python: str, disk_mb: int) -> None:
    """Mount the new root and move into it. `python` is the directory where this interpreter is installed. Raises: OSError."""
    mount("none", "/", None, REC | PRIVATE)
    shown = ["/usr", *([] if python == "/usr" or python.startswith("/usr/") else [python])]
    root = next(
        p for p in ROOT_CANDIDATES if Path(p).is_dir() and not any(s == p or s.startswith(p + "/") for s in shown)
    )
    mount("root", root, "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
    _make_directories(root, disk_mb)  # first: the machine's Python may lie below a place that they cover
    old_mounts = {line.split()[0] for line in _list_mounts()}
    for link in ("bin", "sbin", "lib", "lib64", "lib32"):
        if Path("/", link).is_symlink():
            Path(root, link).symlink_to(Path("/", link).readlink())
        elif Path("/", link).is_dir():
            shown.append(f"/{link}")
    for source in [*shown, *(p for p in ("/etc/alternatives", "/etc/ld.so.cache") if Path(p).exists())]:
        bind_mount(source, root + source)
    _make_devices(root)
    _make_read_only(root, [line.split()[4] for line in _list_mounts() if line.split()[0] not in old_mounts])
    for directory in _find_own_directories(shown):
        mount("none", root + directory, "tmpfs", NOSUID | NODEV | RDONLY, "size=4k,nr_inodes=1,mode=0")
    mount("none", root, None, REMOUNT | BIND | RDONLY | NOSUID | NODEV)
    os.chroot(root)
    os.chdir("/box")


def bind_mount(source: str, target: str) -> None:
    """Create `target`, and show a file or directory of the machine there."""
    if Path(source).is_dir():
        Path(target).mkdir(parents=True, exist_ok=True)
    else:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).touch()
    mount(source, target, None, BIND | REC)


def _make_devices(root: str) -> None:
    """Make `/dev` of the new root: harmless devices of the machine, a `zero` of our own, and links to the standard streams."""
    for name in DEVICES:
        bind_mount(f"/dev/{name}", f"{root}/dev/{name}")
    with Path(root, "dev", "zero").open("wb") as zero:
        zero.truncate(ZEROES)
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        Path(root, "dev", name).symlink_to(f"/proc/self/fd/{number}")
    Path(root, "dev", "fd").symlink_to("/proc/self/fd")


def _find_own_directories(shown: list[str]) -> Iterator[str]:
    """Yield the directories below those that are shown in which `opd` is installed. They must be hidden, since the right answers of our own
    tasks are in them."""
    package = Path(__file__).resolve().parents[2]
    root = package.parent if (package.parent / "pyproject.toml").is_file() else package
    installed = (
        path
        for top in shown
        for kind in ("lib", "local/lib")
        for path in Path(top, kind).glob("python3*/*-packages/opd")
    )
    directories = {path.resolve() for path in (root, *installed)}
    for directory in directories - {inner for inner in directories if directories.intersection(inner.parents)}:
        if any(str(directory).startswith(top + "/") for top in shown):
            yield str(directory)


def _list_mounts() -> list[str]:
    """Return the lines of mountinfo: the first word is the id of a mount, the fifth its place."""
    return Path("/proc/self/mountinfo").read_text().splitlines()


def _make_read_only(root: str, mounted: list[str]) -> None:
    """Make everything that comes from the machine read-only, also mounts inside of what is shown."""
    for escaped in mounted:
        target = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), escaped)  # a blank is `\040` there
        if target.startswith(root + "/") and not target.startswith(root + "/dev/"):
            noexec_flag = os.statvfs(target).f_flag & NOEXEC  # a flag that the machine set cannot be taken away
            mount("none", target, None, REMOUNT | BIND | RDONLY | NOSUID | NODEV | noexec_flag)


def _make_directories(root: str, disk_mb: int) -> None:
    """Make the directories of the new root that are our own: those to write in, `/proc`, Python's names and a list of users."""
    for name in (*FILES, "proc", "run/bin", "etc"):
        Path(root, name).mkdir(parents=True, exist_ok=True)
    # A virtual environment may have a copy of it.
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    for name in ("python", "python3"):
        Path(root, "run/bin", name).symlink_to(python)
    Path(root, "etc/passwd").write_text(f"root:x:0:0::/box:/bin/sh\nnobody:x:{NOBODY}:{NOBODY}::/box:/bin/sh\n")
    Path("/proc/sys/user/max_user_namespaces").write_text("0")  # ours alone: a command can make no namespace of its own
    mount("proc", root + "/proc", "proc", NOSUID | NODEV | NOEXEC, "hidepid=2")  # not to group 0, which is ours
    for name in ("keys", "key-users"):
        if Path(root, "proc", name).exists():
            mount("/dev/null", f"{root}/proc/{name}", None, BIND)
    for name in FILES:
        mount(name, f"{root}/{name}", "tmpfs", NOSUID | NODEV, f"size={disk_mb}m,nr_inodes=4096,mode=777")


def calls_filter(machine: str) -> bytes:
    """Return the program with which the kernel looks at every system call of a command, for a processor's name.

    Raises: OSError for a processor whose calls we do not know.
    """
    if machine not in MACHINES or sys.byteorder != "little":
        raise OSError(f"no list of system calls for the processor {machine}")
    architecture, number = MACHINES[machine]
    # Opcodes of BPF: load a word, jump if equal, if at least, if any bit is set, and, return. What is read is seccomp_data: the
    # number of the call at byte 0, the architecture at 4, the arguments from 16 on in 8 bytes each, their low halves first.
    load, jump, jump_from, jump_any, mask, end = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
    allow, kill, fail = 0x7FFF0000, 0x80000000, 0x00050000
    # An instruction is (opcode, instructions to skip if true, to skip if false, operand).
    instructions: list[tuple[int, int, int, int]] = []

    def argument(position: int) -> tuple[int, int, int, int]:
        return load, 0, 0, 16 + 8 * position

    def look_at(name: str, *steps: tuple[int, int, int, int]) -> None:
        """Take these steps for one call. One of them must always answer: `argument` overwrites the number of the call, which the
        comparisons after it need."""
        instructions.extend([(jump, 0, len(steps), number[name]), *steps])

    # No other set of calls, such as that for 32 bits.
    instructions += [(load, 0, 0, 4), (jump, 1, 0, architecture), (end, 0, 0, kill)]
    instructions += [(load, 0, 0, 0), (jump_from, 0, 1, 0x40000000), (end, 0, 0, fail | errno.ENOSYS)]  # nor x32
    for name in ABSENT:
        look_at(name, (end, 0, 0, fail | errno.ENOSYS))
    for name in ("socket", "socketpair"):
        kinds = [(jump, len(FAMILIES) - i, 0, family) for i, family in enumerate(FAMILIES)]
        look_at(name, argument(0), *kinds, (end, 0, 0, fail | errno.EAFNOSUPPORT), (end, 0, 0, allow))
    allow_or_refuse = [(end, 0, 0, allow), (end, 0, 0, fail | errno.EPERM)]
    shared = MAP_SHARED | MAP_ANONYMOUS  # its pages stay when the process unmaps all but one of them
    look_at(
        "mmap", argument(3), (jump_any, 3, 0, MAP_HUGETLB), (mask, 0, 0, shared), (jump, 1, 0, shared), *allow_or_refuse
    )
    look_at("fcntl", argument(1), (jump, 1, 0, F_SETPIPE_SZ), *allow_or_refuse)
    # `sockets_in_use` counts on it that their buffers have the size they begin with.
    look_at(
        "setsockopt",
        argument(1),
        (jump, 0, 2, socket.SOL_SOCKET),
        argument(2),
        (jump, 1, 0, socket.SO_SNDBUF),
        *allow_or_refuse,
    )
    instructions.append((end, 0, 0, allow))
    return b"".join(struct.pack("=HBBI", *step) for step in instructions)


def install_filter(program: bytes) -> None:
    """Have the kernel ask this program of `calls_filter` about every system call of this process and of all that it starts. Raises:
    OSError."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))

    filter_program = Program(len(program) // 8, program)
    check_result("prctl", libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(filter_program), 0, 0))


def give_up_rights(limits: dict[str, int], program: bytes) -> None:
    """In the child, before its program: limits, no capability, another user where there is one, fewer system calls. None of it
    can be undone."""
    megabytes = 1 << 20
    for kind, most in (
        (resource.RLIMIT_AS, limits["memory_mb"] * megabytes),
        (resource.RLIMIT_FSIZE, limits["disk_mb"] * megabytes),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    for capability in range(last + 1):
        check_result("prctl", libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0))
    if limits["nobody"]:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # version 3 of capabilities
    check_result("capset", libc.capset(header, nothing))
    check_result("prctl", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    install_filter(program)


class Output:
    """The beginning and the end of what a command wrote."""

    def __init__(self, most: int) -> None:
        self.head, self.tail, self.length = b"", b"", 0
        self._half = most // 2

    def add(self, read: bytes) -> None:
        """Add a piece of output. Of what lies between the first and the last half only the length is kept."""
        self.length += len(read)
        room = self._half - len(self.head)
        self.head += read[:room]
        self.tail = (self.tail + read[room:])[-self._half :]

    def both_halves(self) -> dict[str, Any]:
        """Return both halves in Base64, and how many bytes are missing between them, as an answer has them."""
        halves = {"head": base64.b64encode(self.head).decode(), "tail": base64.b64encode(self.tail).decode()}
        return halves | {"missing": self.length - len(self.head) - len(self.tail)}


def run(request: dict[str, Any], limits: dict[str, int], program: bytes) -> dict[str, Any]:
    """Run the command of a request to its end or to a limit, and kill all processes that it left. Return the answer."""
    stdin_file = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(stdin_file, request["stdin"].encode())
    os.lseek(stdin_file, 0, os.SEEK_SET)
    fcntl.fcntl(
        stdin_file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    )
    reading, writing = os.pipe()
    output, end_reason = Output(request["output"]), "not started"
    code: int | None = None
    try:
        child = subprocess.Popen(
            request["argv"],
            stdin=stdin_file,
            stdout=writing,
            stderr=subprocess.STDOUT,
            cwd="/box",
            env=ENVIRONMENT,
            start_new_session=True,
            preexec_fn=lambda: give_up_rights(limits, program),  # this process has one thread
        )
    except (OSError, subprocess.SubprocessError) as error:
        output.add(str(error).encode())
    else:
        end_reason = _read_until_end(child, reading, output, request["seconds"], limits)
        code = child.poll()
    kill_all()
    os.close(writing)
    while read := os.read(reading, PIECE):  # nobody writes any more
        output.add(read)
    os.close(reading)
    os.close(stdin_file)
    return {"code": code, "why": end_reason} | output.both_halves()


ENVIRONMENT = {
    "PATH": "/run/bin:/usr/local/bin:/usr/bin:/bin",
    "HOME": "/box",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}


def _read_until_end(
    child: subprocess.Popen[bytes], reading: int, output: Output, seconds: float, limits: dict[str, int]
) -> str:
    """Read the output of a command until it ends or meets a limit. Return the name of that limit, else nothing."""
    end = time.monotonic() + seconds
    with selectors.DefaultSelector() as waiting:
        waiting.register(reading, selectors.EVENT_READ)
        waiting.register(0, selectors.EVENT_READ)
        while child.poll() is None:
            for key, _ in waiting.select(POLL_S):
                if key.fd == 0:  # whoever started us is gone
                    os._exit(0)
                output.add(os.read(reading, PIECE))
            if output.length > MOST_OUTPUT:
                return "output"
            if time.monotonic() > end:
                return "deadline"
            if memory_in_use() > limits["memory_mb"] << 20:
                return "memory"
    return ""


def memory_in_use() -> int:
    """Return the bytes that the sandbox holds: what its processes wrote to their own memory, swapped out or not, and the
    kernel's tables of it; the files that it wrote; and the most that its sockets can hold. The calls that hold memory elsewhere
    are filtered out."""
    total = sum(_process_memory(entry) for entry in os.listdir("/proc") if entry.isdigit() and entry != "1")  # noqa: PTH208 often
    for name in FILES:
        files = os.statvfs(f"/{name}")
        total += (files.f_blocks - files.f_bfree) * files.f_bsize
    return total + sockets_in_use() * SOCKET_BYTES


def _process_memory(process: str) -> int:
    """Return the bytes of a process without pages of files: ours are counted as files, the machine's are there without us."""
    try:
        status = Path("/proc", process, "status").read_text()
    except OSError:  # it ended meanwhile
        return 0
    return sum(int(size) << 10 for size in re.findall(r"^(?:RssAnon|VmSwap|VmPTE):\s*(\d+) kB$", status, re.MULTILINE))


def sockets_in_use() -> int:
    """Return the number of sockets in our network namespace."""
    return int(Path("/proc/net/sockstat").read_text().split()[2])


def _socket_bytes() -> int:
    """Return the bytes that may lie unread in a socket of this machine."""
    with socket.socket(socket.AF_UNIX) as unix_socket:
        return unix_socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


SOCKET_BYTES = _socket_bytes()


def kill_all() -> None:
    """Kill every process of the sandbox but this one, and wait for them. Here `-1` means these alone, since process 1 sees no process
    outside of its namespace."""
    try:
        os.kill(-1, signal.SIGKILL)
        while True:
            os.waitpid(-1, 0)
    except (ProcessLookupError, ChildProcessError):
        return


def main() -> None:
    """Make the sandbox, say so, and serve until standard input ends."""
    limits = json.loads(sys.argv[1])
    limits["nobody"] = os.geteuid() == 0
    os.umask(0o022)
    try:
        program = calls_filter(os.uname().machine)
        enter_namespaces()
        become_process_one()
        build_root(sys.base_prefix, limits["disk_mb"])
        check_result("prctl", libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))  # nobody traces this process or reads its memory
    except OSError as error:
        print(json.dumps({"refused": str(error)}), flush=True)
        sys.exit(1)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line), limits, program)), flush=True)


if __name__ == "__main__":
    main()
