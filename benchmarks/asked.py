"""A run that is kept across calls of a benchmark is taken again only by a call that asks for the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opd.files import atomic_write_text


def claim(run_dir: Path, asked: Mapping[str, Any]) -> None:
    """Note beside a run directory what is asked of it, before it is begun. Raises: SystemExit if it was begun for something else."""
    file = run_dir.with_name(f"{run_dir.name}.asked.json")
    wanted = json.loads(json.dumps(asked, default=str))
    if not run_dir.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(file, json.dumps(wanted, indent=2) + "\n")
        return
    found = json.loads(file.read_text()) if file.exists() else {}
    differs = sorted(key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key))
    if differs:
        raise SystemExit(
            f"{run_dir}: begun with other settings ({', '.join(differs)}): name another folder, or remove that one"
        )
