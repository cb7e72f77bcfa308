"""Records of `make gpu-check` as a page.

    python -m benchmarks.gpu.render gpu.json [MORE.json ...] > docs/results/gpu.md

Parts of several records, of runs that were cut in two, stand together; of a part that two have, the last one's counts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.check import PARTS

GIB = 1 << 30


def page(records: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: the machine, a section for each part, what was left out."""
    parts = {name: part for record in records for name, part in record["parts"].items()}
    lines = ["# What a GPU shows", "", "By `make gpu-check`; every figure is of the machine named here.", ""]
    lines += _machine(records[-1]["environment"])
    for part in PARTS:
        if part.name in parts:
            lines += ["", f"## {part.title}", "", *_part(parts[part.name])]
    return "\n".join(lines).rstrip() + "\n"


def _machine(environment: Mapping[str, Any]) -> list[str]:
    return ["| | |", "| --- | --- |"] + [f"| {key} | {_cell('', value)} |" for key, value in environment.items()]


def _part(part: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, rows in part["tables"].items():
        if name == "time and memory":
            rows = _beside_each_other(rows)
            name += ": forward and backward, beyond the inputs, relative error of the hidden states' gradient"
        columns = list(dict.fromkeys(key for row in rows for key in row))
        lines += [f"**{name[0].upper()}{name[1:]}**", ""]
        lines += ["| " + " | ".join(map(_title, columns)) + " |"]
        lines += ["| " + " | ".join("---" for _ in columns) + " |"]
        lines += ["| " + " | ".join(_cell(key, row.get(key)) for key in columns) + " |" for row in rows]
        lines += [""]
    if part.get("error"):
        lines += [f"Ended with: {_cell('', part['error'])}", ""]
    if part["left_out"]:
        lines += ["Left out:", ""] + [f"- {item['what']}: {item['why']}" for item in part["left_out"]] + [""]
    return lines


def _beside_each_other(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row a shape, one column a variant: milliseconds and GiB."""
    shapes: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        shape = {key: row[key] for key in ("dtype", "V", "D", "T")}
        shapes.setdefault(tuple(shape.values()), shape)[row["variant"]] = row.get("note") or ", ".join(
            [
                f"{row['ms']:.1f} ms",
                *([] if row["extra_bytes"] is None else [f"{row['extra_bytes'] / GIB:.2f} GiB"]),
                f"{row['gradient_error']:.1e}",
            ]
        )
    return list(shapes.values())


def _title(key: str) -> str:
    return key.replace("_bytes", ", GiB").replace("_per_s", "/s").replace("_", " ")


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.endswith("_bytes"):
        return f"{value / GIB:.2f}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    sys.stdout.write(page([json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]]))
