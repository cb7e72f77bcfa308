"""Writes what follows from the code: in docs/pipelines.md key tables, shipped files and an example report, in docs/commands.md the
commands, in docs/plan.md the keys of a cluster spec and the shipped plans, in docs/results/plans.json the tables of these plans;
and the keys that the shell offers behind `--set`.

    python docs/make_reference.py            rewrite the text between the markers
    python docs/make_reference.py --check    write nothing; exit code 1 and a diff if the text is out of date

A part lies between `<!-- begin: NAME -->` and `<!-- end: NAME -->`. Needs no torch.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from commands_page import command_reference
from pydantic import BaseModel

from experts.registry import Manifest
from experts.rl.spec import ReinforceSpec
from experts.spec import ExpertsSpec
from experts.suites import DOMAINS
from opd.config import PipelineConfig, load_pipeline
from opd.records.step import StepRecord
from opd.report import build_report
from opd.settings.yaml_files import every_key, load_yaml
from pipelines.catalog import find, shipped
from pipelines.commands.completion import KEYS
from pipelines.plan.plan import Plan, make_plan
from pipelines.plan.spec import ClusterSpec, load_spec
from pipelines.plan.tables import tables

PLANS = Path(__file__).with_name("results") / "plans.json"
SHIPPED_PLANS = {"merge-7b": "8-gpus", "merge-70b": "32-gpus", "merge-744b": "256-gpus"}
PAGES = tuple(Path(__file__).with_name(name) for name in ("pipelines.md", "commands.md", "plan.md"))
MARKED = re.compile(r"(<!-- begin: (\S+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)
TYPE_NAMES = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}
LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}

Schema = Mapping[str, Any]


class Tables:
    """One table for each mapping of a model's JSON schema; a mapping met twice is written once, at its shortest."""

    def __init__(self, model: type[BaseModel], heading: str) -> None:
        self._schema = model.model_json_schema()
        self._heading = heading
        self._seen: dict[str, str] = {}
        self._waiting: deque[tuple[str, Schema]] = deque([("", self._schema)])

    def __str__(self) -> str:
        sections = self.sections()
        variants: dict[str, list[Schema]] = defaultdict(list)
        for prefix, section, _ in sections:
            variants[prefix].append(section["properties"])
        return "\n".join(
            f"{self._heading} {_title(prefix, section['properties'], variants[prefix])}\n\n"
            + table(("Key", "Type", "Default", "Meaning"), rows)
            for prefix, section, rows in sections
        )

    def sections(self) -> list[tuple[str, Schema, list[tuple[str, ...]]]]:
        """Return prefix, schema and rows of every mapping, in the order of the top level's keys."""
        sections = []
        while self._waiting:
            prefix, section = self._waiting.popleft()
            rows = [self._row(prefix, key, prop, section) for key, prop in section["properties"].items()]
            sections.append((prefix, section, rows))
        order = ["", *self._schema["properties"]]
        sections.sort(key=lambda s: order.index(s[0].split(".")[0]))
        return sections

    def _row(self, prefix: str, key: str, prop: Schema, section: Schema) -> tuple[str, ...]:
        path = prefix + key
        kinds = [self._kind(path, option) for option in _options(prop)]
        default = _default(key, prop, section)
        return f"`{path}`", " or ".join(dict.fromkeys(kinds)), default, " ".join(prop.get("description", "").split())

    def _kind(self, path: str, option: Schema) -> str:
        """A type in words; mappings are put in the queue for a table of their own."""
        if "$ref" in option:
            return self._mapping(option["$ref"], path)
        if "properties" in option:
            return self._table(option["title"], option, path)
        if "patternProperties" in option:
            (inner,) = option["patternProperties"].values()
            values = "texts" if inner.get("type") == "string" else "numbers"
            return self._mapping(inner["$ref"], f"{path}.NAME") if "$ref" in inner else f"mapping of names to {values}"
        if "$ref" in option.get("items", {}):
            return "list of " + self._mapping(option["items"]["$ref"], f"{path}.N").replace("mapping", "mappings", 1)
        return _scalar(option)

    def _mapping(self, ref: str, path: str) -> str:
        return self._table(ref, self._schema["$defs"][ref.rsplit("/", 1)[-1]], path)

    def _table(self, key: str, section: Schema, path: str) -> str:
        if key not in self._seen:
            self._seen[key] = path
            self._waiting.append((f"{path}.", section))
        return f"mapping, see `{self._seen[key]}`"


def _title(prefix: str, own: Schema, variants: Sequence[Schema]) -> str:
    """`variants`: the keys of all mappings that may stand at this place; where there are several, one key tells them apart."""
    name = f"`{prefix.rstrip('.')}`" if prefix else "Top level"
    telling = [key for key in own if all("const" in keys.get(key, {}) for keys in variants)]
    return f"{name} with `{telling[0]}: {own[telling[0]]['const']}`" if len(variants) > 1 and telling else name


def _options(prop: Schema) -> Sequence[Schema]:
    """The alternatives of a key without `null`, which only says that the key may be left out."""
    options = prop.get("anyOf") or prop.get("oneOf")
    if options is None:
        return [] if prop.get("type") == "null" else [prop]
    return [inner for option in options for inner in _options(option)]


def _scalar(option: Schema) -> str:
    if "const" in option:
        return f"`{option['const']}`"
    if "enum" in option:
        return ", ".join(f"`{value}`" for value in option["enum"])
    if option.get("format") == "path":
        return "path"
    if option.get("type") == "array":
        return "list of " + " or ".join(f"{_scalar(inner)}s" for inner in _options(option["items"]))
    if option.get("type") == "object":
        return "mapping"
    name = "name" if "pattern" in option else TYPE_NAMES[option["type"]]
    return " ".join([name, *(f"{sign} {option[key]:g}," for key, sign in LIMITS.items() if key in option)]).rstrip(",")


def _default(key: str, prop: Schema, section: Schema) -> str:
    if key in section.get("required", ()):
        return "required"
    value = prop.get("default")
    return "" if value is None or isinstance(value, (dict, list)) else f"`{json.dumps(value).strip(chr(34))}`"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def shipped_files() -> str:
    """What `opd pipelines list` shows, and the training specs."""
    configs = {name: load_pipeline(path) for name, path in shipped().items()}
    rows = [(f"`{n}`", f"`{c.student.model}`", str(len(c.domains)), str(c.trainer.steps)) for n, c in configs.items()]
    specs = {p.name.removesuffix(".yaml"): load_yaml(Path(str(p))) for p in _experts_yaml()}
    trained = [(f"`{n}`", f"`{s['output_dir']}`", str(len(s["experts"]))) for n, s in specs.items()]
    return (
        table(("Pipeline", "Student", "Domains", "Steps"), rows)
        + "\n"
        + table(("Training spec", "Writes to", "Experts"), trained)
    )


def _experts_yaml() -> Iterator[Any]:
    return (p for p in sorted(files("experts").iterdir(), key=str) if p.name.endswith(".yaml"))


def suites() -> str:
    """The task suites of `opd prompts make`."""
    rows = [(f"`{name}`", str(len(domains)), ", ".join(f"`{d}`" for d in domains)) for name, domains in DOMAINS.items()]
    return table(("Suite", "Domains", "Names"), rows)


def report_example() -> str:
    """What `opd.report.build_report` makes of one domain and two steps."""
    phase_s = {"rollout": 0.5, "score": 0.25, "train": 0.75, "sync": 0.1}
    records = [StepRecord(step=step, response_tokens=1000, phase_s=phase_s) for step in (1, 2)]
    report = build_report(
        "example",
        {"before": {"reverse": 0.4}, "expert": {"reverse": 1.0}, "after": {"reverse": 0.94}},
        records,
        wall_s=31.5,
        versions={"python": "3.11.2", "opd-merge": "0.2.0", "torch": "2.13.0"},
    )
    rounded = json.loads(json.dumps(report), parse_float=lambda text: round(float(text), 4))
    return f"```json\n{json.dumps(rounded, indent=2)}\n```\n"


def cluster_keys() -> str:
    """Return the keys of a cluster spec as a list, without sections whose keys have lines of their own."""
    rows = [row for _, _, rows in Tables(ClusterSpec, "").sections() for row in rows]
    return "".join(_line(*row) for row in rows if row[3] or row[1] != f"mapping, see {row[0]}")


def _line(key: str, kind: str, default: str, meaning: str) -> str:
    shared = kind.removeprefix("mapping, see ")
    kind = "" if shared == key or (shared != kind and meaning) else f" as {shared}" if shared != kind else f" ({kind})"
    default = "" if default in ("", "required") else f"; default {default}"
    return f"- {key}{kind[:-1] + default + ')' if default else kind}" + (f": {meaning}\n" if meaning else "\n")


def shipped_plans() -> str:
    """Return a row of seconds and hours for each shipped plan."""
    header = ("Plan", "Cluster", "Experts", "Step", "Rollout", "Score", "Train", "Push", "Hours of the merge")
    plans = {name: _plan(name) for name in SHIPPED_PLANS}
    rows = [
        (
            f"`{name}`",
            f"`{plan.cluster}`",
            str(plan.experts),
            *(f"{seconds:.3g}" for seconds in (plan.step_s, *(phase.seconds for phase in plan.phases))),
            f"{plan.hours:.3g}",
        )
        for name, plan in plans.items()
    ]
    return table(header, rows)


@cache
def _plan(name: str) -> Plan:
    return make_plan(load_pipeline(find(name)), load_spec(SHIPPED_PLANS[name]))


def plan_tables() -> str:
    """Return what `opd plan` prints of each shipped plan, as JSON: rows by table."""
    printed = {name: {one.title: one.rows for one in tables(_plan(name))} for name in SHIPPED_PLANS}
    return json.dumps(printed, indent=1) + "\n"


PARTS: dict[str, Callable[[], str]] = {
    "pipeline-keys": lambda: str(Tables(PipelineConfig, "###")),
    "training-spec-keys": lambda: str(Tables(ExpertsSpec, "###")),
    "reinforcement-spec-keys": lambda: str(Tables(ReinforceSpec, "###")),
    "manifest-keys": lambda: str(Tables(Manifest, "###")),
    "shipped": shipped_files,
    "suites": suites,
    "report-example": report_example,
    "commands": command_reference,
    "cluster-keys": cluster_keys,
    "shipped-plans": shipped_plans,
}


def fill(page: str) -> str:
    """The page with every part written anew. Raises: KeyError for a marker that names no part."""
    return MARKED.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]().strip()}\n\n{found[3]}", page)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Rewrite the generated parts of docs/pipelines.md, docs/commands.md and docs/plan.md."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a part is out of date")
    check = parser.parse_args().check
    pages = {page: page.read_text(encoding="utf-8") for page in PAGES}
    missing = set(PARTS) - {found[2] for text in pages.values() for found in MARKED.finditer(text)}
    if missing:
        print(f"docs: no markers for {', '.join(sorted(missing))}", file=sys.stderr)
        return 1
    written = {page: (old, fill(old)) for page, old in pages.items()}
    written[KEYS] = (KEYS.read_text(encoding="utf-8"), "".join(f"{key}\n" for key in settable_keys()))
    written[PLANS] = (PLANS.read_text(encoding="utf-8") if PLANS.is_file() else "", plan_tables())
    outdated = [page for page, (old, new) in written.items() if not _renew(page, old, new, check)]
    for page in outdated:
        print(f"{page} is out of date: run `python docs/make_reference.py`", file=sys.stderr)
    return 1 if outdated else 0


def settable_keys() -> list[str]:
    """Return the keys that `--set` offers: all but those below a name that the user chooses."""
    return sorted({key for key in every_key(PipelineConfig) if "NAME" not in key.split(".")})


def _renew(page: Path, old: str, new: str, check: bool) -> bool:
    """Write a page anew, or only say how it would differ; False if it is out of date and stays so."""
    if not check:
        page.write_text(new, encoding="utf-8")
    elif new != old:
        print(
            "\n".join(difflib.unified_diff(old.splitlines(), new.splitlines(), "written", "from the code", lineterm=""))
        )
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
