"""The sandbox: what code in it cannot do, and how its tasks are judged.

Skipped, and said, where this machine makes no namespaces; there the refusal is what counts.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import struct
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from opd.environments.sandbox.box import INSIDE, Box, CommandResult, SandboxLimits, strip_control_characters
from opd.environments.sandbox.environment import Sandbox
from opd.environments.sandbox.inside import ABSENT, MACHINES, calls_filter
from opd.errors import ConfigError, PromptError, RunError
from opd.records.environments import Action, Outcome, ToolCall
from opd.rollouts.episodes.spec import EpisodeOptions
from opd.rollouts.episodes.worlds import OwnEnvironment

LIMITS = SandboxLimits(seconds=3.0, memory_mb=256, disk_mb=4, processes=16)


def allowed() -> str:
    """Say why there can be no sandbox here; empty if there can be."""
    try:
        Box(LIMITS).close()
    except ConfigError as error:
        return str(error)
    return ""


REFUSED = allowed()
needs_namespaces = pytest.mark.skipif(bool(REFUSED), reason=f"no sandbox on this machine: {REFUSED}")


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    with Box(LIMITS) as made:
        yield made


def sh(box: Box, command: str) -> CommandResult:
    return box.run(["/bin/sh", "-c", command])


def python(box: Box, code: str) -> CommandResult:
    return box.run(["python3", "-c", code])


def processes(text: str) -> list[int]:
    """Processes of the whole machine whose command line has this text."""
    found = []
    for place in Path("/proc").iterdir():
        try:
            if place.name.isdigit() and text.encode() in (place / "cmdline").read_bytes():
                found.append(int(place.name))
        except OSError:
            continue
    return found


@needs_namespaces
def test_commands_run_in_a_directory_that_stays(box: Box) -> None:
    assert sh(box, "echo hello > a.txt; mkdir b").code == 0
    assert sh(box, "pwd; cat a.txt; ls").output == "/box\nhello\na.txt\nb\n"
    assert python(box, "print(sum(range(5)))").output == "10\n"
    assert sh(box, "exit 3") == CommandResult(3, "", "")
    assert box.run(["/bin/cat"], stdin="given").output == "given"


@needs_namespaces
def test_there_is_no_network(box: Box) -> None:
    with (
        Box(LIMITS.model_copy(update={"seconds": 30.0})) as patient,
        subprocess.Popen(
            [sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            text=True,
        ) as server,
    ):
        assert server.stdout is not None
        port = server.stdout.readline().split("port ")[1].split()[0]
        reach = f"import socket; socket.create_connection(('{{}}', {port}), 2)"
        subprocess.run([sys.executable, "-c", reach.format("127.0.0.1")], check=True, timeout=30)  # it is there
        try:
            said = [python(patient, reach.format(address)).output for address in ("127.0.0.1", "192.0.2.1")]
        finally:
            server.terminate()  # else the end of the block would wait for it
    assert all("unreachable" in text for text in said)
    assert [line.split()[0] for line in sh(box, "cat /proc/net/dev").output.splitlines()[2:]] == ["lo:"]


@needs_namespaces
def test_nothing_outside_can_be_read_or_written(box: Box, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("do not read me")
    tmp_path.chmod(0o777)
    secret.chmod(0o666)
    assert sh(box, f"cat {secret} {__file__} /etc/hostname").output.count("No such file") == 3
    for place in (
        "/x",
        "/usr/x",
        "/etc/x",
        "/run/bin/x",
        "/dev/x",
        f"{sys.base_prefix}/x",
        "/proc/sys/kernel/hostname",
    ):
        assert sh(box, f"echo x > {place}").code != 0, place
    assert python(box, f"open({str(secret)!r}, 'w')").code == 1
    assert secret.read_text() == "do not read me"


@needs_namespaces
def test_links_lead_nowhere(box: Box, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("do not read me")
    tmp_path.chmod(0o777)
    for target in (str(secret), f"/proc/1/root{secret}", f"/proc/1/cwd/../..{secret}"):
        assert "do not read" not in sh(box, f"rm -f link; ln -s {target} link; cat link; echo x > link").output
    assert secret.read_text() == "do not read me"


@needs_namespaces
def test_the_first_process_is_out_of_reach(box: Box) -> None:
    sh(box, "kill -9 1")
    reading = ("cat /proc/1/environ", "cat /proc/1/maps", "head -c 1 /proc/1/mem", "ls /proc/1/fd/", "ls /proc/1/root/")
    for command in reading:
        assert sh(box, command).code not in (0, None), command
    assert os.geteuid() != 0 or "inside.py" not in sh(box, "cat /proc/[0-9]*/cmdline").output
    assert sh(box, "echo yes").output == "yes\n"


@needs_namespaces
def test_there_are_no_rights(box: Box) -> None:
    told = sh(box, "grep -E 'Cap(Inh|Prm|Eff|Bnd|Amb)|NoNewPrivs' /proc/self/status").output.split()
    assert told[1::2] == ["0" * 16] * 5 + ["1"]
    for command in (
        "unshare -Ur true",
        "unshare -n true",
        "mount -t tmpfs none /tmp",
        "chroot / true",
        "mknod n c 1 3",
    ):
        assert sh(box, command).code != 0, command


@needs_namespaces
def test_a_fork_bomb_ends(box: Box) -> None:
    started = time.monotonic()
    told = python(box, "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass")
    assert told.end_reason in ("deadline", "memory") and time.monotonic() - started < 30
    count = "import os\nn = 0\ntry:\n    while True:\n        if os.fork() == 0:\n            import time; time.sleep(9)\n        n += 1\nexcept OSError:\n    print(n)"
    assert 1 <= int(python(box, count).output) < LIMITS.processes
    assert sh(box, "echo yes").output == "yes\n"


@needs_namespaces
def test_memory_is_limited_for_one_process_and_for_all_together(box: Box) -> None:
    assert "MemoryError" in python(box, "x = bytearray(400 << 20)").output
    many = "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        x = bytearray(60 << 20); time.sleep(9)\ntime.sleep(9)"
    assert python(box, many).end_reason == "memory"


HOLD = """
import ctypes, mmap, os, sys, time

libc, kept, piece = ctypes.CDLL(None, use_errno=True), [], 4 << 20
libc.shmat.restype = libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def sysv():
    number = libc.shmget(0, piece, 0o1600)
    if number < 0:
        raise OSError
    place = ctypes.c_void_p(libc.shmat(number, None, 0))
    ctypes.memset(place, 1, piece)
    libc.shmdt(place)  # resident in no process, and still there


def memfd():
    kept.append(os.memfd_create("kept"))
    os.write(kept[-1], bytes(piece))


def leave_one_page(file, kind):
    place = libc.mmap(None, piece, mmap.PROT_READ, kind, file, 0)
    if place == ctypes.c_void_p(-1).value:
        raise OSError
    sum((ctypes.c_ubyte * piece).from_address(place)[::4096])
    libc.munmap(place + 4096, piece - 4096)


def shared():
    leave_one_page(-1, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)


def zero():
    with open("/dev/zero", "rb") as source:
        child = os.fork()
        if child == 0:  # the kernel ends it where pages of that file have no room
            leave_one_page(source.fileno(), mmap.MAP_SHARED)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            raise OSError
        leave_one_page(source.fileno(), mmap.MAP_SHARED)


def files():
    for folder in ("/box", "/tmp"):
        try:
            with open(f"{folder}/{time.monotonic_ns()}", "wb") as file:
                return file.write(b"x" * piece)
        except OSError:
            continue
    raise OSError


def anonymous():
    kept.append(b"x" * piece)


def sockets():
    import socket
    held = 0
    while held < piece:
        kept.extend(socket.socketpair())
        kept[-1].setblocking(False)
        try:
            while True:
                held += kept[-1].send(b"x" * 4096)
        except BlockingIOError:
            pass


held = 0
for kind in sys.argv[1:]:
    try:
        for _ in range(40):
            globals()[kind]()
            held += piece
            print("held", held >> 20, kind, flush=True)
            time.sleep(0.05)
    except (OSError, MemoryError):
        print("no more", kind, flush=True)
"""


@needs_namespaces
@pytest.mark.parametrize(
    "kinds",
    [
        "sysv",
        "memfd",
        "shared",
        "zero",
        "files",
        "anonymous",
        "sockets",
        "sysv memfd shared zero files sockets anonymous",
    ],
)
def test_memory_is_limited_wherever_it_is_held(kinds: str) -> None:
    """Of 160 MB, of each kind, less than the limit is had, but for what is taken between two looks."""
    with Box(SandboxLimits(seconds=60, memory_mb=128, disk_mb=90, processes=16)) as box:
        ran = box.run(["python3", "-c", HOLD, *kinds.split()])
        assert "held" in ran.output or "no more" in ran.output, ran
        assert (
            max([int(line.split()[1]) for line in ran.output.splitlines() if line.startswith("held")], default=0) < 150
        )
        assert ran.end_reason == "memory" or ran.output.count("no more") == len(kinds.split()), ran
        assert sh(box, "rm -rf /box/* /tmp/*; echo yes").output == "yes\n", "what follows has room again"


@needs_namespaces
def test_standard_input_cannot_grow(box: Box) -> None:
    assert box.run(["python3", "-c", "import os; os.write(0, b'more')"], stdin="given").code == 1
    assert box.run(["/bin/cat"], stdin="given").output == "given"


KEY = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
add, control = {numbers}
found, text = libc.syscall(control, 10, -3, b"user", b"opd-test", 0), ctypes.create_string_buffer(99)
libc.syscall(control, 11, found, text, 99)
print(text.value, open("/proc/keys").read())
"""


@needs_namespaces
def test_keys_of_the_session_are_out_of_reach() -> None:
    names = MACHINES[os.uname().machine][1]
    reads = KEY.format(numbers=(names["add_key"], names["keyctl"]))
    owner = (
        f"import ctypes, subprocess, sys\nlibc = ctypes.CDLL(None)\nlibc.syscall({names['keyctl']}, 1, None)\n"
        f"assert libc.syscall({names['add_key']}, b'user', b'opd-test', b'a secret', 8, -3) > 0\n"
        "from opd.environments.sandbox.box import Box, SandboxLimits\n"
        f"reads = {reads!r}\n"
        "subprocess.run([sys.executable, '-c', reads], check=True)\nprint('inside', flush=True)\n"
        "with Box(SandboxLimits()) as box:\n    print(box.run(['python3', '-c', reads]))\n"
    )
    told = subprocess.run([sys.executable, "-c", owner], capture_output=True, text=True, timeout=60, check=False)
    if "AssertionError" in told.stderr:
        pytest.skip("this machine has no keyrings")
    outside, inside = told.stdout.split("inside\n")
    assert "a secret" in outside and "opd-test" in outside, "the test itself reads it"
    assert "code=0" in inside and "a secret" not in inside and "opd-test" not in inside


@needs_namespaces
def test_only_sockets_that_a_namespace_confines(box: Box) -> None:
    tried = (
        "import socket\nfor kind in range(46):\n    for how in range(1, 6):\n"
        "        try:\n            socket.socket(kind, how); print(kind)\n        except OSError: pass"
    )
    assert set(map(int, python(box, tried).output.split())) <= {1, 2, 10, 16}, "AF_VSOCK is 40"
    assert python(box, "import asyncio; print(asyncio.run(asyncio.sleep(0, 3)))").output == "3\n"


def decide(program: bytes, arch: int, number: int, *arguments: int) -> int:
    """Return a filter's answer, by the rules of the kernel's BPF."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    steps, at, value = list(struct.iter_unpack("<HBBI", program)), 0, 0
    while True:
        code, yes, no, k = steps[at]
        at += 1
        match code:
            case 0x20:
                (value,) = struct.unpack_from("<I", data, k)
            case 0x54:
                value &= k
            case 0x06:
                return int(k)
            case _:
                holds = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[code]
                at += yes if holds else no


@pytest.mark.parametrize("machine", sorted(MACHINES))
def test_the_filter_refuses_what_it_should_on_each_processor(machine: str) -> None:
    program = calls_filter(machine)
    arch, numbers = MACHINES[machine]
    failed, allowed = 0x00050000, 0x7FFF0000
    ask = lambda name, *arguments: decide(program, arch, numbers[name], *arguments)  # noqa: E731
    assert {ask(name) for name in ABSENT} == {failed | errno.ENOSYS}
    assert [ask("socket", family) for family in (1, 2, 10, 16)] == [allowed] * 4
    assert [ask("socketpair", family) for family in (0, 17, 38, 40)] == [failed | errno.EAFNOSUPPORT] * 4
    kinds = [0x01, 0x02, 0x22, 0x20022, 0x21, 0x23, 0x4021, 0x40022]  # the flags that Linux gives MAP_... on both
    assert [ask("mmap", 0, 0, 0, flags) for flags in kinds] == [allowed] * 4 + [failed | errno.EPERM] * 4
    assert [ask("fcntl", 0, command) for command in (1031, 1032, 0)] == [failed | errno.EPERM, allowed, allowed]
    asked = [ask("setsockopt", 0, *option) for option in ((1, 7), (1, 8), (6, 7))]
    assert asked == [failed | errno.EPERM, allowed, allowed]
    others = set(range(500)) - set(numbers.values())
    assert {decide(program, arch, number) for number in others} == {allowed}
    assert decide(program, arch, numbers["fcntl"] | 0x40000000) == failed | errno.ENOSYS
    assert decide(program, 0x40000003, 1) == 0x80000000, "calls of 32 bits"
    with pytest.raises(OSError, match="no list of system calls for the processor vax"):
        calls_filter("vax")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A Python of its own, with `opd` in it, as `pip install` puts it there. Returns its directory."""
    base, version = tmp_path / "base", f"python{sys.version_info.major}.{sys.version_info.minor}"
    library, made = Path(os.__file__).parent, base / "lib" / version
    left_out = shutil.ignore_patterns(
        "site-packages", "dist-packages", "test", "tests", "__pycache__", "config-*", "idlelib"
    )
    shutil.copytree(library, made, ignore=left_out)
    (base / "bin").mkdir()
    shutil.copy(Path(sys.executable).resolve(), base / "bin" / version)
    for shared in Path(sys.base_prefix, "lib").glob("libpython*.so*"):
        shutil.copy(shared, base / "lib")
    shutil.copytree(INSIDE.parents[2], made / "site-packages" / "opd", ignore=shutil.ignore_patterns("__pycache__"))
    return base


@needs_namespaces
def test_a_python_below_tmp_with_opd_in_it_works_and_hides_the_answers(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not str(installed).startswith("/tmp/"):
        pytest.skip("the temporary directory is not /tmp")
    place = next(installed.glob("lib/python3*/site-packages/opd/environments/sandbox"))
    monkeypatch.setattr(sys, "executable", str(next(installed.glob("bin/python3*"))))
    monkeypatch.setattr("opd.environments.sandbox.box.INSIDE", place / "inside.py")
    subprocess.run([sys.executable, "-I", "-c", f"open({str(place / 'problems.py')!r})"], check=True, timeout=60)
    with Box(LIMITS) as box:
        told = python(box, "import os, sys, json; print(sys.base_prefix); print(os.__file__)")
        assert told.output == f"{installed}\n{next(installed.glob('lib/python3*'))}/os.py\n"
        assert "No module named 'opd'" in python(box, "import opd.environments.sandbox.problems").output
        assert sh(box, f"find {installed} -name problems.py 2>&1").output.count("problems.py") == 0
        assert sh(box, f"cat {place / 'problems.py'}").code != 0
        assert sh(box, f"echo x > {installed}/x").code != 0 and sh(box, "echo x > /tmp/x").code == 0


@needs_namespaces
def test_the_python_of_a_virtual_environment_of_copies_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "copies", symlinks=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "copies" / "bin" / "python"))
    with Box(LIMITS) as box:
        assert python(box, "import sys; print(sys.prefix)").output == f"{sys.base_prefix}\n"


@needs_namespaces
def test_a_python_that_does_not_run_inside_is_refused(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of its library is where a sandbox does not look. Outside it runs."""
    library = next(installed.glob("lib/python3*"))
    (library / "json").rename(tmp_path / "json")
    (library / "json").symlink_to(tmp_path / "json")
    monkeypatch.setattr(sys, "executable", str(next(installed.glob("bin/python3*"))))
    with pytest.raises(
        ConfigError, match=r"(?s)python3 of this machine does not run in it: .*needs? no files but those in /usr"
    ):
        Box(LIMITS)


@needs_namespaces
def test_disk_is_limited(box: Box) -> None:
    assert sh(box, "head -c 20000000 /dev/zero > big").code != 0
    assert sh(box, "for i in 1 2 3 4 5 6 7 8; do head -c 1000000 /dev/zero > part$i || exit 1; done").code != 0
    assert sh(box, "i=0; while [ $i -lt 5000 ]; do : > f$i || exit 9; i=$((i+1)); done").code != 0
    assert sh(box, "rm -rf /box/*; ls").output == ""


@needs_namespaces
def test_a_deadline_ends_what_does_not(box: Box) -> None:
    started = time.monotonic()
    assert sh(box, "echo begun; sleep 60") == CommandResult(None, "begun\n", "deadline")
    assert sh(box, "exec >&- 2>&-; sleep 60").end_reason == "deadline"
    assert time.monotonic() - started < 30


@needs_namespaces
def test_what_runs_in_the_background_ends_with_its_command(box: Box) -> None:
    mark = f"98765.{os.getpid()}"
    told = sh(box, f"sleep {mark} & (setsid nohup sleep {mark} >/dev/null 2>&1 &) ; sleep 0.3; echo done")
    assert told == CommandResult(0, "done\n", "")
    assert processes(mark) == []
    assert "sleep" not in sh(box, "ps ax || cat /proc/[0-9]*/cmdline").output


@needs_namespaces
def test_everything_ends_with_the_sandbox_also_when_its_owner_is_killed() -> None:
    mark = f"87654.{os.getpid()}"
    code = (
        "import sys, threading, time; from opd.environments.sandbox.box import Box, SandboxLimits\n"
        f"box = Box(SandboxLimits(seconds=60))\nthreading.Thread(target=box.run, args=(['sleep', '{mark}'],)).start()\n"
        "time.sleep(1); print('running', flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[4])
    assert owner.stdout is not None and owner.stdout.readline() == b"running\n"
    assert len(processes(f"sleep\0{mark}")) == 1
    owner.kill()
    owner.wait()
    owner.stdout.close()
    end = time.monotonic() + 20
    while processes(f"sleep\0{mark}") and time.monotonic() < end:
        time.sleep(0.1)
    assert processes(f"sleep\0{mark}") == []


@needs_namespaces
def test_ten_megabytes_of_output_are_cut_and_endless_output_ends(box: Box) -> None:
    told = python(box, "print('first' + 'x' * 10_000_000 + 'last')")
    assert told.code == 0 and len(told.output) < LIMITS.output + 100
    assert told.output.startswith("firstx") and told.output.endswith("xlast\n") and "bytes are left out" in told.output
    assert sh(box, "yes").end_reason in ("output", "deadline")


@needs_namespaces
@pytest.mark.parametrize(
    "argv", [["sh", "-c", "a\0b"], ["sh", "-c", "\ud800"], ["sh", "-c", "x" * 200_000], ["nowhere"]]
)
def test_a_command_that_cannot_start_says_so(box: Box, argv: list[str]) -> None:
    told = box.run(argv)
    assert told.end_reason == "not started" and told.code is None and told.output
    assert sh(box, "echo yes").output == "yes\n"


@needs_namespaces
def test_a_sandbox_that_is_gone_is_an_error_of_the_run() -> None:
    made = Box(LIMITS)
    made._process.kill()
    made._process.wait()
    with pytest.raises(RunError, match=r"sandbox: it (has )?ended"):
        sh(made, "true")
    made.close()


def test_a_machine_without_namespaces_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in = tmp_path / "inside.py"
    stand_in.write_text('print(\'{"refused": "unshare: Operation not permitted"}\')')
    monkeypatch.setattr("opd.environments.sandbox.box.INSIDE", stand_in)
    with pytest.raises(ConfigError, match=r"(?s)environment sandbox.*Operation not permitted.*unprivileged_userns"):
        Box(LIMITS)
    stand_in.write_text("raise ValueError('a mistake of ours')")
    with pytest.raises(RunError, match="a mistake of ours"):
        Box(LIMITS)


def test_control_characters_are_taken_out() -> None:
    assert strip_control_characters(b"a\x1b[31mred\x1b[0m\a\x00b\r\nc\rd\x1b]0;title\x07e\xff") == "aredb\nc\nde\ufffd"
    assert strip_control_characters("a\u202eb\u200bc\u2028d\te".encode()) == "abcd\te"


def write(path: str, content: str) -> Action:
    return Action(text="", calls=(ToolCall(name="write_file", arguments={"path": path, "content": content}),))


def shell(command: str) -> Action:
    return Action(text="", calls=(ToolCall(name="shell", arguments={"command": command}),))


@pytest.fixture
def task() -> Iterator[Sandbox]:
    made = Sandbox(seconds=3, memory_mb=128)
    try:
        made.reset(Sandbox.tasks(1, 0)[0]["metadata"], 0)
        yield made
    finally:
        made.close()


@needs_namespaces
@pytest.mark.parametrize("number", range(4))
def test_a_mended_function_passes_and_a_broken_one_does_not(number: int) -> None:
    row = Sandbox.tasks(4, 5)[number]
    for mend in (False, True):
        made = Sandbox(seconds=5)
        try:
            made.reset(row["metadata"], 0)
            if mend:
                made.step(shell(f"rm {row['metadata']['file']}"))
                assert made.step(made.solve()).observation[0].startswith("wrote ")
                assert not made.solve().calls
            end = made.step(Action(text="It is done."))
            assert end.done and end.reward == float(mend) and (end.info["passed"] == end.info["of"]) == mend
        finally:
            made.close()


@needs_namespaces
@pytest.mark.parametrize(
    "cheat",
    [
        "print('[' + ', '.join(['0'] * 8) + ']')\nimport os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "while True: pass",
        "import atexit\natexit.register(lambda: print('[]'))\n",
        "this is no Python",
        "print('[' * 90_000)\nraise SystemExit",
        "import json\njson.dumps = lambda *a, **k: 'true'\n",
        "class Same(dict):\n    def __eq__(self, other): return True\n",
        "",
    ],
)
def test_no_trick_passes_for_a_right_function(task: Sandbox, cheat: str) -> None:
    source = (
        cheat + f"\ndef {task._task['function']}(*arguments):\n    return Same() if 'Same' in globals() else None\n"
    )
    task.step(write(task._task["file"], source))
    end = task.step(Action(text="done"))
    assert end.done and end.reward == 0


@needs_namespaces
def test_what_tools_say(task: Sandbox) -> None:
    said = lambda action: task.step(action).observation[0]  # noqa: E731
    assert said(shell("echo hi; exit 2")) == "hi\n[exit code 2]"
    assert said(shell("true")) == "[no output]"
    assert said(shell("sleep 9")) == "[ended: it took longer than 3 s]"
    assert said(shell("a\0b")).endswith("[not started]")
    assert said(write("deep/er/x.txt", "é\n")) == "wrote 2 characters to deep/er/x.txt"
    assert said(shell("cat deep/er/x.txt")) == "é"
    assert said(write("be\x07ll", "x")) == "wrote 1 characters to bell", (
        "a control character would end the episode as broken"
    )
    for path in ("/etc/x", "../x", "a/../../x", ""):
        assert said(write(path, "x")).startswith("error: ")
    assert not said(write("big", "x" * 20_000_000)).startswith("wrote")
    assert "Is a directory" in said(write("deep", "x"))


@needs_namespaces
def test_slow_calls_of_a_turn_end_before_the_step_is_late() -> None:
    """The policy reads that they took too long; the episode goes on."""
    options = EpisodeOptions(
        environment="opd.environments.sandbox.environment:Sandbox",
        options={"seconds": 3},
        max_turns=4,
        max_tokens=None,
        max_turn_tokens=64,
        step_timeout_s=5.0,
        max_broken=0.1,
    )

    async def play() -> list[Outcome]:
        world = OwnEnvironment(options, Sandbox.tasks(1, 0)[0]["metadata"], 0)
        try:
            await world.begin()
            slow = Action(text="", calls=shell("sleep 9").calls * 3 + write("a", "b").calls)
            return [await world.step(slow), await world.step(shell("echo here")), await world.step(Action(text="done"))]
        finally:
            await world.close()
            world.leave()

    slow, quick, end = asyncio.run(play())
    assert slow.observation[0] == "[ended: it took longer than 3 s]"
    assert slow.observation[1].startswith("[ended: it took longer than 0.") or slow.observation[1].startswith(
        "[ended: it took longer than 1"
    )
    assert slow.observation[2:] == ("[not started: the calls of a turn have 4 s together]",) * 2
    assert quick.observation == ("here",) and end.done and end.reward == 0


@needs_namespaces
def test_the_file_to_judge_may_be_a_link_or_a_directory(task: Sandbox) -> None:
    name = task._task["file"]
    task.step(shell(f"rm {name}; ln -s /proc/1/environ {name}"))
    assert task.solve().calls
    task.step(shell(f"rm {name}; mkdir {name}"))
    assert task.step(Action(text="done")).reward == 0


def test_tasks_are_the_same_for_the_same_seed_and_their_hidden_calls_are_not_told() -> None:
    rows = Sandbox.tasks(30, 2)
    assert rows == Sandbox.tasks(30, 2) != Sandbox.tasks(30, 3)
    for row in rows:
        task = row["metadata"]
        assert task["source"] != task["fixed"] == row["answer"] and len(task["calls"]) == len(task["expected"]) == 8
        assert "type: ignore" not in task["source"]
        told = sum(repr(call)[1:-1] in row["prompt"][0]["content"] for call in task["calls"])
        assert told < 8


@needs_namespaces
def test_metadata_of_another_kind_is_refused_by_name(task: Sandbox) -> None:
    with pytest.raises(PromptError, match="environment sandbox: metadata"):
        task.reset({"file": "x.py"}, 0)


def test_limits_that_are_none_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"(?s)environment sandbox: memory.*did you mean `memory_mb`"):
        Sandbox(memory=5)
