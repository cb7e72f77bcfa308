"""Writes what follows from the code: in docs/pipelines.md key tables and the shipped files, in docs/commands.md the commands, in
docs/cluster_spec.md the keys of a cluster spec, in docs/plan.md the shipped plans, in docs/results/plans.json their tables; and the
keys that the shell offers behind `--set`.

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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from commands_page import anchor, command_reference
from pydantic import BaseModel
from shipped_plans import SHIPPED_PLANS

from experts.rl.spec import ReinforceSpec
from experts.spec import ExpertsSpec
from experts.suites import DOMAINS
from opd.config import PipelineConfig, load_pipeline
from opd.config.monitors import SignalLimits
from opd.settings.yaml_files import iterate_keys, load_yaml
from pipelines.catalog import find_pipeline, shipped_pipelines
from pipelines.commands.completion import KEYS
from pipelines.plan.plan import MergePlan, make_plan
from pipelines.plan.spec import ClusterSpec, load_spec
from pipelines.plan.tables import plan_tables

PLANS = Path(__file__).with_name("results") / "plans.json"
PAGES = tuple(Path(__file__).with_name(name) for name in ("pipelines.md", "commands.md", "plan.md", "cluster_spec.md"))
MARKED = re.compile(r"(<!-- begin: (\S+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)
TYPE_NAMES = {"string": "text", "integer": "integer", "number": "number", "boolean": "true/false"}
LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}

SHARED: dict[str, tuple[str, type[BaseModel]]] = {"monitors": ("SIGNAL", SignalLimits)}
"""Section whose keys are mappings of one base -> the name that stands for each of them, and the base, whose table they share."""

Schema = Mapping[str, Any]
Row = tuple[str, ...]


class Tables:
    """One table for each mapping of a model's JSON schema; a mapping met twice is written once, at its shortest.

    Several kinds at one place share a table, in which a key that only some of them have names them. `owner` ends the headings where
    a page has tables of several models; `elsewhere` are mappings that another part of the page has, with their headings, and `known` rows of
    its top level, which are left out here. So are rows of a mapping that the model's own top level has.
    """

    def __init__(
        self,
        model: type[BaseModel],
        heading: str,
        owner: str = "",
        elsewhere: Mapping[str, str] | None = None,
        known: Collection[Row] = (),
    ) -> None:
        self._schema = model.model_json_schema()
        self._heading = heading
        self._owner = owner and f" of a {owner}"
        self._waiting: deque[tuple[str, list[Schema]]] = deque([("", [self._schema])])
        self.headings: dict[str, str] = dict(elsewhere or {})
        self.top: list[Row] = list(known)

    def __str__(self) -> str:
        return "\n".join(
            f"{self._heading} {self._title(prefix)}\n\n" + table(("Key", "Type (default)", "Meaning"), rows)
            for prefix, rows in self.sections()
        )

    def sections(self) -> list[tuple[str, list[tuple[str, ...]]]]:
        """Return prefix and rows of every mapping, in the order of the top level's keys."""
        sections: list[tuple[str, list[tuple[str, ...]]]] = []
        while self._waiting:
            prefix, kinds = self._waiting.popleft()
            rows = [
                row for row in self._rows(prefix, kinds) if (row[0].replace(prefix, "", 1), *row[1:]) not in self.top
            ]
            self.top += [] if prefix else rows
            sections.append((prefix, rows))
        order = ["", *self._schema["properties"]]
        return sorted(sections, key=lambda section: order.index(section[0].split(".")[0]))

    def _title(self, prefix: str) -> str:
        return (f"`{prefix.rstrip('.')}`" if prefix else "Top level") + self._owner

    def _rows(self, prefix: str, kinds: Sequence[Schema]) -> Iterator[tuple[str, ...]]:
        """The rows of one table. Keys that all kinds have in common come before those of some kinds."""
        names = dict.fromkeys(key for kind in kinds for key in kind["properties"])
        telling = next((key for key in names if all("const" in k["properties"].get(key, {}) for k in kinds)), "")
        some: list[tuple[str, ...]] = []
        for key in names:
            having = [kind for kind in kinds if key in kind["properties"]]
            if key == telling and len(kinds) > 1:
                yield self._kind_row(prefix, key, kinds)
                continue
            alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
            for kind in having:
                value = kind["properties"].get(telling, {}).get("const", "")
                alike[self._row(prefix, key, kind["properties"][key], kind)].append(f"`{value}`")
            for row, values in alike.items():
                if len(values) == len(kinds):
                    yield row
                else:
                    some.append((*row[:-1], f"With {', '.join(values)}: {row[-1]}"))
        yield from some

    def _kind_row(self, prefix: str, key: str, kinds: Sequence[Schema]) -> tuple[str, ...]:
        """The row of the key that tells kinds apart, with what each of them is."""
        own = [kind["properties"][key] for kind in kinds]
        default = next((f"`{one['default']}`" for one in own if "default" in one), "**required**")
        return f"`{prefix}{key}`", f"kind ({default})", " ".join(f"`{one['const']}`: {_meaning(one)}" for one in own)

    def _row(self, prefix: str, key: str, prop: Schema, section: Schema) -> tuple[str, ...]:
        kind, default = self._types(prefix + key, _options(prop)), _default(key, prop, section)
        if prefix.rstrip(".") in SHARED:
            default = _flow(prop["default"])
        return f"`{prefix}{key}`", f"{kind} ({default})" if default else kind, _meaning(prop)

    def _types(self, path: str, options: Sequence[Schema]) -> str:
        """The types of a key in words; mappings are put in the queue for a table of their own."""
        refs = [option["$ref"] for option in options if "$ref" in option]
        words = [f"[mapping]({self._table(path, refs)})"] if refs else []
        named = len(refs) > 1 and any("enum" in option for option in options)
        rest = [option for option in options if "$ref" not in option and not (named and "enum" in option)]
        return " or ".join(dict.fromkeys([*["kind"] * named, *(self._kind(path, one) for one in rest), *words]))

    def _kind(self, path: str, option: Schema) -> str:
        if "properties" in option:
            return f"[mapping]({self._table(path, [option])})"
        if "patternProperties" in option:
            (inner,) = option["patternProperties"].values()
            if "$ref" in inner:
                return f"[mapping]({self._table(f'{path}.NAME', [inner['$ref']])})"
            return f"mapping of {'texts' if inner.get('type') == 'string' else 'numbers'}"
        if "$ref" in option.get("items", {}):
            return f"list of [mappings]({self._table(f'{path}.N', [option['items']['$ref']])})"
        return _scalar(option)

    def _table(self, path: str, refs: Sequence[Any]) -> str:
        """The link to the table of a mapping, or of several kinds of it."""
        section = path.rpartition(".")[0]
        if section in SHARED:
            path, refs = f"{section}.{SHARED[section][0]}", [_without_defaults(SHARED[section][1])]
        name = refs[0] if isinstance(refs[0], str) else refs[0]["title"]
        if name not in self.headings:
            self.headings[name] = self._title(path)
            sections = [self._schema["$defs"][r.rsplit("/", 1)[-1]] if isinstance(r, str) else r for r in refs]
            self._waiting.append((f"{path}.", sections))
        return f"#{anchor(self.headings[name])}"


def _meaning(prop: Schema) -> str:
    """The string under a field on one line, with its mentions of pages as links."""
    return re.sub(r"docs/([\w-]+\.md)(#[\w-]+)?", r"[\1](\1\2)", " ".join(prop.get("description", "").split()))


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
        return "**required**"
    value = prop.get("default")
    return "" if value in (None, "") or isinstance(value, (dict, list)) else f"`{json.dumps(value).strip(chr(34))}`"


def _flow(mapping: Mapping[str, Any]) -> str:
    """A mapping as a pipeline gives it on one line, without the keys that are null."""
    return "`{" + ", ".join(f"{key}: {value:g}" for key, value in mapping.items() if value is not None) + "}`"


def _without_defaults(model: type[BaseModel]) -> Schema:
    schema = model.model_json_schema()
    keys = {
        key: {name: text for name, text in prop.items() if name != "default"}
        for key, prop in schema["properties"].items()
    }
    return {**schema, "properties": keys}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


@cache
def pipeline_page() -> tuple[str, ...]:
    """The key tables of docs/pipelines.md; a mapping of several models has its table in the first of them."""
    texts: list[str] = []
    headings: dict[str, str] = {}
    known: list[Row] = []
    for model, owner in ((PipelineConfig, ""), (ExpertsSpec, "training spec"), (ReinforceSpec, "reinforcement spec")):
        tables = Tables(model, "###", owner, headings, known)
        texts.append(str(tables))
        headings, known = tables.headings, tables.top
    return tuple(texts)


def shipped_files() -> str:
    """Return what `opd pipelines list` shows, and the training specs."""
    configs = {name: load_pipeline(path) for name, path in shipped_pipelines().items()}
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


def cluster_keys() -> str:
    """Return the keys of a cluster spec as a list, without sections whose keys have lines of their own."""
    tables = Tables(ClusterSpec, "")
    rows = [row for _, rows in tables.sections() for row in rows]
    headings = {f"[mapping](#{anchor(heading)})": heading for heading in tables.headings.values()}
    return "".join(_line(key, kind.removesuffix(" (**required**)"), meaning, headings) for key, kind, meaning in rows)


def _line(key: str, kind: str, meaning: str, headings: Mapping[str, str]) -> str:
    shared = headings.get(kind, "")
    if shared == key and not meaning:
        return ""
    kind = kind.replace(" (`", "; `").replace("`)", "`")
    words = f" ({kind})" if not shared else "" if meaning else f" as {shared}"
    return f"- {key}{words}" + (f": {meaning}\n" if meaning else "\n")


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
def _plan(name: str) -> MergePlan:
    return make_plan(load_pipeline(find_pipeline(name)), load_spec(SHIPPED_PLANS[name]))


def printed_plans() -> str:
    """Return what `opd plan` prints of each shipped plan, as JSON: rows by table."""
    printed = {name: {one.title: one.rows for one in plan_tables(_plan(name))} for name in SHIPPED_PLANS}
    return json.dumps(printed, indent=1) + "\n"


PARTS: dict[str, Callable[[], str]] = {
    "pipeline-keys": lambda: pipeline_page()[0],
    "training-spec-keys": lambda: pipeline_page()[1],
    "reinforcement-spec-keys": lambda: pipeline_page()[2],
    "shipped": shipped_files,
    "suites": suites,
    "commands": command_reference,
    "cluster-keys": cluster_keys,
    "shipped-plans": shipped_plans,
}


def fill(page: str) -> str:
    """The page with every part written anew. Raises: KeyError for a marker that names no part."""
    return MARKED.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]().strip()}\n\n{found[3]}", page)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Rewrite the generated parts of docs/pipelines.md, docs/commands.md, docs/plan.md and docs/cluster_spec.md."
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
    written[PLANS] = (PLANS.read_text(encoding="utf-8") if PLANS.is_file() else "", printed_plans())
    outdated = [page for page, (old, new) in written.items() if not _renew(page, old, new, check)]
    for page in outdated:
        print(f"{page} is out of date: run `python docs/make_reference.py`", file=sys.stderr)
    return 1 if outdated else 0


def settable_keys() -> list[str]:
    """Return the keys that `--set` offers: all but those below a name that the user chooses."""
    return sorted({key for key in iterate_keys(PipelineConfig) if "NAME" not in key.split(".")})


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
