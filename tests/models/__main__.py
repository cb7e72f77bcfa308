"""`python -m tests.models`: which families of models a merge is right for, tried one after the other.

Every family's tiny random model is merged, resumed and looked at (`row.py`); about a minute each on two cores. The exit
code is 1 if a family neither works nor is refused before the first worker starts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipelines.merging.manifest import library_versions
from tests.models.families import FAMILIES
from tests.models.row import Row, make_row
from tests.models.table import render


def say(line: str) -> None:
    """Progress goes to stderr."""
    print(line, file=sys.stderr, flush=True)


def one_family(name: str, keep: Path | None) -> Row:
    """A family's row; its directory stays under `keep`, if that is given."""
    say(f"{name}: begins")
    place = Path(tempfile.mkdtemp(prefix="opd-models-")) if keep is None else keep / name.replace("/", "-")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        row = make_row(name, FAMILIES[name], place, lambda line: say(f"{name}: {line}"))
    finally:
        if keep is None:
            shutil.rmtree(place)
    say(f"{name}: {row.state}, {row.seconds:.0f} s" + "".join(f"\n  {line}" for line in row.said))
    return row


def known_rows(file: Path | None) -> dict[str, Any]:
    """Rows that an earlier run left in the file, by family."""
    if file is None or not file.exists():
        return {}
    return {row["family"]: row for row in json.loads(file.read_text())["rows"]}


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.models", description=__doc__)
    parser.add_argument("--families", help=f"comma-separated; default: all of {', '.join(FAMILIES)}")
    parser.add_argument("--output", type=Path, help="JSON file; rows of families that are not run stay in it")
    parser.add_argument("--table", type=Path, help="Markdown file, such as docs/models.md; default: print the table")
    parser.add_argument("--keep", type=Path, help="directory in which each family's models and run stay")
    parser.add_argument("--no-runs", action="store_true", help="only write the table of what --output has")
    args = parser.parse_args(arguments)
    names = [] if args.no_runs else args.families.split(",") if args.families else list(FAMILIES)
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    rows = known_rows(args.output)
    for name in names:
        rows[name] = asdict(one_family(name, args.keep)) | {"versions": library_versions()}
        ordered = {"rows": [rows[family] for family in FAMILIES if family in rows]}
        if args.output:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(ordered, indent=1) + "\n")
    text = render([rows[family] for family in FAMILIES if family in rows])
    if args.table:
        args.table.write_text(text)
    else:
        print(text)
    return int(any(rows[name]["state"] in ("FAILED", "deadline") for name in names or rows))


if __name__ == "__main__":
    sys.exit(main())
