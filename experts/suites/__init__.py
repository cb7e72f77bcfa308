"""Prompt suites that need no download: rows are made, not fetched.

`write_suite("letters", Path("prompts/letters"), train=2000, eval=200, seed=0)` writes DOMAIN/train.jsonl and
DOMAIN/eval.jsonl, ready for `opd experts train` (prompt and completion, or messages) and for a merge (prompt and answer).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from experts.suites import agents, letters, reasoning, rewards, tools
from opd.errors import ConfigError
from opd.files import atomic_write_text
from opd.settings.suggestions import did_you_mean

Rows = Sequence[Mapping[str, Any]]

SUITES = {"agents": agents, "letters": letters, "reasoning": reasoning, "rewards": rewards, "tools": tools}
"""Each has `DOMAINS` and `make_rows(domain, count, seed)`. A row has the columns of TRL, such as
{"prompt": "rev hxkq=", "completion": "qkxh", "answer": "qkxh", "metadata": {"suite": "letters"}}."""
DOMAINS: dict[str, Mapping[str, object]] = {name: suite.DOMAINS for name, suite in SUITES.items()}


def write_suite(
    suite: str, out: Path, *, domains: list[str] | None = None, train: int, eval: int, seed: int
) -> dict[str, dict[str, Path]]:
    """Write both files of every domain in `domains`, or of all domains of the suite. Each file is written whole or not at all.

    `train` and `eval` are numbers of rows. The two files share no prompt, and the eval rows do not depend on `train`.
    Returns: {domain: {"train": path, "eval": path}}.
    Raises: ConfigError for an unknown suite or domain, for a number below 1, or for more rows than a domain has different
    ones. A domain of `rewards` may write fewer train rows than asked for, but at least one.
    """
    _check_known(suite, SUITES, "suite")
    for domain in domains or ():
        _check_known(domain, DOMAINS[suite], f"domain of suite {suite}")
    if min(train, eval) < 1:
        raise ConfigError.at(
            "rows", found=f"train {train}, eval {eval}", wanted="at least 1 of each", fix="for example 2000 and 200"
        )
    rows = {domain: SUITES[suite].make_rows(domain, train + eval, seed) for domain in domains or DOMAINS[suite]}
    for domain, domain_rows in rows.items():
        _check_apart(domain, domain_rows, eval)
    return {domain: _write_domain(domain_rows, eval, out / domain) for domain, domain_rows in rows.items()}


def _check_apart(domain: str, rows: Rows, eval: int) -> None:
    if len(rows) <= eval:  # a domain may have fewer different rows than were asked for
        raise ConfigError.at(
            f"domain {domain}",
            found=f"{len(rows)} different rows, of which none is left to train on",
            wanted=f"more than the {eval} held-out ones",
            fix="ask for fewer held-out rows",
        )
    prompts = [json.dumps(row["prompt"]) for row in rows]
    shared = len(set(prompts[:eval]) & set(prompts[eval:]))
    if shared:
        raise ConfigError.at(
            f"domain {domain}",
            found=f"{shared} prompts on both sides: there are only {len(set(prompts))} different ones",
            wanted=f"{eval} held-out prompts that no training row has",
            fix="ask for fewer of them",
        )


def _write_domain(rows: Rows, eval: int, directory: Path) -> dict[str, Path]:
    paths = {"train": directory / "train.jsonl", "eval": directory / "eval.jsonl"}
    _write_jsonl(paths["train"], rows[eval:])
    _write_jsonl(paths["eval"], rows[:eval])
    return paths


def _write_jsonl(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _check_known(name: str, names: Collection[str], kind: str) -> None:
    if name not in names:
        fix = did_you_mean(name, names, "choose one of them")
        raise ConfigError.at(kind, found=f"`{name}`", wanted=f"one of: {', '.join(names)}", fix=fix)
