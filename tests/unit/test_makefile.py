"""The targets that take long go on after an interruption: make itself runs, `opd` is a script that notes its words and writes
what the command would."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from experts.suites import DOMAINS
from tests.unit.sources import ROOT

OPD = """#!/bin/sh
echo "$*" >> called
case "$1 $2" in
    "prompts make") for domain in {domains}; do
        mkdir -p "$5/$domain"; : > "$5/$domain/train.jsonl"; : > "$5/$domain/eval.jsonl"
        test "$domain" != "$KILLED_IN" || exit 130
    done;;
    "models from-gguf") mkdir -p "$5";;
    "experts train") test "$KILLED_IN" != experts || exit 130;;
    "merge --resume") : > "$3/report.json";;
    "merge "*) mkdir -p "$4"; test "$KILLED_IN" != merge || exit 130; : > "$4/report.json";;
esac
"""
RUNS = {
    "agents": "runs/agents",
    "rl": "runs/rewards/merged",
    "smollm2-tools": "runs/smollm2-tools",
    "smollm2-rewards": "runs/smollm2-rewards/merged",
}
MADE = {
    "agents": list(DOMAINS["agents"]),
    "rl": list(DOMAINS["rewards"]),
    "smollm2-tools": list(DOMAINS["tools"]),
    "smollm2-rewards": ["needle", "relations", "kin"],
}
"""Domains in the order in which their prompts are written."""
MERGES = {"rl": "rewards"}
"""Pipelines that are not called like their target."""
FIRST = {target: ["models from-gguf"] for target in ("smollm2-tools", "smollm2-rewards")}
"""Commands that a target needs before its prompts."""


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
@pytest.mark.parametrize("target", RUNS)
def test_what_is_finished_is_kept_and_an_interrupted_target_goes_on(target: str, tmp_path: Path) -> None:
    domains, run = MADE[target], RUNS[target]
    script = tmp_path / "opd"
    script.write_text(OPD.replace("{domains}", " ".join(domains)))
    installs = tmp_path / "pip"
    installs.write_text("#!/bin/sh\n")
    for program in (script, installs):
        program.chmod(0o755)

    def called(killed_in: str = "") -> list[str]:
        (tmp_path / "called").unlink(missing_ok=True)
        # -o setup: there is nothing to install
        command = ["make", "-s", "-f", str(ROOT / "Makefile"), "-o", "setup", target, "BIN=.", "OPD=./opd"]
        done = subprocess.run(command, cwd=tmp_path, env={"KILLED_IN": killed_in, "PATH": "/usr/bin:/bin"}, timeout=60)
        assert bool(done.returncode) == bool(killed_in)
        return [" ".join(line.split()[:2]) for line in (tmp_path / "called").read_text().splitlines()]

    merge = f"merge {MERGES.get(target, target)}"
    assert called(domains[1]) == [*FIRST.get(target, ()), "prompts make"]
    assert called("experts") == ["prompts make", "experts train"], "prompts that are not all there are made again"
    assert called("merge") == ["experts train", merge]
    (tmp_path / run / "checkpoint").touch()
    assert called() == ["experts train", "merge --resume"]
    assert called() == ["experts train"], "which finds every expert finished"
    assert (tmp_path / run / "checkpoint").exists(), "nothing was deleted"
