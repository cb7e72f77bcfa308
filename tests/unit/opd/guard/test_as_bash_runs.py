"""Random scripts: whatever file bash would read is among those that the guard says may be read."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from opd.guard.session import GuardSession
from opd.guard.shell.programs import PROGRAMS
from opd.guard.shell.walk import Walker

PRELUDE = """
cat() { case $1 in /*) echo "$1";; *) echo "$PWD/$1";; esac >> "$LOG"; return 1; }
yes() { :; }; no() { return 1; }
"""
"""For bash: `cat` notes what it would read and fails, and success hangs on programs that the guard knows nothing of."""
PLACES = ("a", "b", "a/c")


class Scripts:
    """Random scripts, whose directories are below `root`."""

    def __init__(self, seed: int, root: Path) -> None:
        self._random = random.Random(seed)
        self._root = root

    def script(self, depth: int = 0) -> str:
        """A few commands one after the other."""
        return "; ".join(self._command(depth) for _ in range(self._random.randint(1, 3)))

    def _command(self, depth: int) -> str:
        kinds = ["cd", "set", "read", "read", "list", "list"]
        kinds += ["if", "case", "subshell", "braces", "for", "while", "function", "value", "pipe", "bash"] * (depth < 2)
        return str(getattr(self, f"_{self._random.choice(kinds)}")(depth))

    def _place(self) -> str:
        return f"{self._root}/{self._random.choice(PLACES)}"

    def _test(self) -> str:
        return self._random.choice(["yes", "no", "true", "false"])

    def _cd(self, depth: int) -> str:
        return self._random.choice([f"cd {self._place()}", "cd -", "cd .."])

    def _set(self, depth: int) -> str:
        return f"d={self._place()}"

    def _read(self, depth: int) -> str:
        return self._random.choice(["cat x", 'cat "$d/y"'])

    def _list(self, depth: int) -> str:
        simple = [self._cd, self._set, self._read]
        parts = [self._test(), *(self._random.choice(simple)(depth) for _ in range(self._random.randint(1, 2)))]
        return "".join(f"{part} {self._random.choice(['&&', '||'])} " for part in parts[:-1]) + parts[-1]

    def _if(self, depth: int) -> str:
        otherwise = f"; else {self.script(depth + 1)}" if self._random.random() < 0.5 else ""
        return f"if {self._test()}; then {self.script(depth + 1)}{otherwise}; fi"

    def _case(self, depth: int) -> str:
        end = self._random.choice([";;", ";&"])
        return f"case {self._test()} in yes) {self.script(depth + 1)} {end} no|true) {self.script(depth + 1)} ;; esac"

    def _subshell(self, depth: int) -> str:
        return f"({self.script(depth + 1)})"

    def _braces(self, depth: int) -> str:
        return f"{{ {self.script(depth + 1)}; }}"

    def _for(self, depth: int) -> str:
        stop = self._random.choice(["", f"{self._test()} && break; ", f"{self._test()} && continue; "])
        return f"for i in 1 2; do {self.script(depth + 1)}; {stop}{self.script(depth + 1)}; done"

    def _while(self, depth: int) -> str:
        return f"n=; while [ ${{#n}} -lt 2 ]; do n=x$n; {self.script(depth + 1)}; done"

    def _function(self, depth: int) -> str:
        stop = self._random.choice(["", f"{self._test()} && return; "])
        return f"f() {{ {self.script(depth + 2)}; {stop}{self.script(depth + 2)}; }}; f"

    def _value(self, depth: int) -> str:
        return f"v=$({self.script(depth + 1)})"

    def _pipe(self, depth: int) -> str:
        return f"{{ {self.script(depth + 1)}; }} | {{ {self.script(depth + 1)}; }}"

    def _bash(self, depth: int) -> str:
        return f"eval '{self.script(2)}'"


def really_read(script: str, root: Path) -> set[str]:
    """Return what bash reads."""
    log = root / "log"
    log.write_text("")
    begin = f"LOG={log}; d={root}/a; cd {root}/b; cd {root}/a\n"
    subprocess.run(["bash", "-c", PRELUDE + begin + script], check=False, timeout=20, capture_output=True)
    return set(log.read_text().split())


def may_read(script: str, root: Path) -> set[str]:
    session = GuardSession(cwd="/workspace")
    session.cwd, session.previous_cwd, session.variables = f"{root}/a", f"{root}/b", {"d": f"{root}/a"}
    walker = Walker(session, PROGRAMS)
    walker.walk_text(script)
    return {path for call in walker.calls for path in call.reads if call.program == "cat"}


@pytest.mark.parametrize("seed", range(150))
def test_what_bash_reads_may_be_read(seed: int, tmp_path: Path) -> None:
    for place in PLACES:
        (tmp_path / place).mkdir(parents=True)
    script = Scripts(seed, tmp_path).script()
    assert really_read(script, tmp_path) <= may_read(script, tmp_path), script.replace(str(tmp_path), "R")
