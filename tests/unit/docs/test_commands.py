"""A reader can type what the pages say: every command parses, and what it names is there. Nothing is run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec as find_module
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from pydantic import BaseModel

from cli import app
from experts.rl.spec import ReinforceSpec, load_training
from experts.spec import ExpertsSpec, find_spec
from experts.suites import DOMAINS
from opd.config import PipelineConfig, load_pipeline
from opd.config.domains import DomainConfig
from opd.errors import OpdError
from opd.guard.rules import RuleFile
from opd.settings.yaml_files import parse_yaml, validate_section
from pipelines.catalog import find_pipeline, shipped_pipelines
from tests.unit.docs.written import PAGES, ROOT, Command, blocks, commands, is_placeholder

UsageError = typer.BadParameter.__bases__[0]
FILE = re.compile(r"[/.]")
"""A name with a dot or a slash is a path of the reader's own."""
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


class Tree:
    """The real command line, of which words are read and nothing is done."""

    def __init__(self) -> None:
        self.root: Any = typer.main.get_command(app)

    def parse(self, words: Sequence[str]) -> Mapping[str, Any]:
        """The parameters of a whole command. Raises: UsageError, KeyError for a command that is not there."""
        command, rest = self.root, [word for word in words if word not in _options(self.root)]
        while inner := getattr(command, "commands", {}):
            command, rest = inner[rest[0] if rest else "nothing"], rest[1:]
        values: Mapping[str, Any] = command.make_context("opd", rest).params
        return values

    def unknown(self, words: Sequence[str]) -> list[str]:
        """The words that are no command and no option, in a command that may be cut short."""
        command, options, found = self.root, {"--help"}, []
        options |= _options(command)
        for word in words:
            if word == "--":
                break
            if word.startswith("-") and len(word) > 1:
                found += [] if word.partition("=")[0] in options else [word]
            elif inner := getattr(command, "commands", {}):
                if is_placeholder(word):
                    break
                if word not in inner:
                    return [*found, word]
                command = inner[word]
                options |= _options(command)
        return found


def _options(command: Any) -> set[str]:
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts)}


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree()


def opd_errors(tree: Tree, command: Command) -> list[str]:
    """Say what is wrong with one `opd ...`."""
    words = command.words[1:]
    if not command.whole or {"--help", "COMMAND"} & set(words) or words[0].startswith("-"):
        return [f"unknown: {word}" for word in tree.unknown(words)]
    try:
        values = tree.parse(["1" if is_placeholder(word) else word for word in words])
    except UsageError as refused:
        return [refused.format_message()]
    except KeyError as unknown:
        return [f"no command {unknown}"]
    return [*_wrong_names(values), *_wrong_keys(words, values)]


def _wrong_names(values: Mapping[str, Any]) -> Iterator[str]:
    """Names of shipped things that are not shipped."""
    pipelines = {file.stem for file in (ROOT / "pipelines").rglob("*.yaml")}
    for key, known in (("pipeline", pipelines), ("target", pipelines), ("matrix", pipelines), ("suite", DOMAINS)):
        name = values.get(key)
        if name and name != "1" and not FILE.search(name) and name not in known:
            yield f"no {key} is called {name}"
    spec = values.get("spec", "1")
    if spec != "1" and not FILE.search(spec) and not is_shipped_spec(spec):
        yield f"no training spec is called {spec}"


def is_shipped_spec(name: str) -> bool:
    return (ROOT / "experts" / f"{name}.yaml").is_file()


def _wrong_keys(words: Sequence[str], values: Mapping[str, Any]) -> Iterator[str]:
    """Keys of `--set` that no pipeline has; where the pipeline is a shipped one, also values that it refuses."""
    overrides = [one for one in values.get("overrides") or () if not is_placeholder(one.partition("=")[0])]
    models = (ExpertsSpec, ReinforceSpec) if "spec" in values else (PipelineConfig,)
    for one in overrides:
        key = one.partition("=")[0]
        if not any(has_key(model, key.split(".")) for model in models):
            yield f"no key {key}"
    try:
        if values.get("pipeline") in shipped_pipelines():
            load_pipeline(find_pipeline(values["pipeline"]), overrides)
        elif is_shipped_spec(values.get("spec") or "1"):
            load_training(find_spec(values["spec"]), overrides)
    except OpdError as refused:
        yield str(refused)


@cache
def schema_of(model: type[BaseModel]) -> Mapping[str, Any]:
    return model.model_json_schema()


def has_key(model: type[BaseModel], path: Sequence[str]) -> bool:
    """Return True if a dotted key stands for something, whatever kind a section with several kinds is of."""
    return _has_key(schema_of(model), schema_of(model), list(path))


def _has_key(whole: Mapping[str, Any], node: Any, path: list[str]) -> bool:
    if "$ref" in node:
        return _has_key(whole, whole["$defs"][node["$ref"].rsplit("/", 1)[-1]], path)
    if not path:
        return True
    options = [*node.get("anyOf", ()), *node.get("oneOf", ())]
    if options:
        return any(_has_key(whole, option, path) for option in options)
    if path[0] in node.get("properties", {}):
        return _has_key(whole, node["properties"][path[0]], path[1:])
    if "items" in node:
        return _has_key(whole, node["items"], path)
    inner = [*node.get("patternProperties", {}).values()]
    anything = node.get("type") == "object" and not inner and "properties" not in node
    more = node.get("additionalProperties", anything)
    inner += [more] if isinstance(more, dict) else []
    return more is True or any(_has_key(whole, one, path[1:]) for one in inner)


MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z][a-z0-9-]*):", MAKEFILE, re.MULTILINE))
VARIABLES = set(re.findall(r"^([A-Z_]+) \?=", MAKEFILE, re.MULTILINE))


def make_errors(words: Sequence[str]) -> list[str]:
    """Say what is wrong with one `make ...`."""
    given = {word.partition("=")[0] for word in words if "=" in word}
    targets = {word for word in words if "=" not in word}
    return [f"no target {word}" for word in targets - TARGETS] + [f"no variable {word}" for word in given - VARIABLES]


def python_errors(words: Sequence[str]) -> list[str]:
    """Say what is wrong with one `python ...`; modules of others are theirs."""
    if words[0] == "-m":
        top = words[1].partition(".")[0]
        if not (ROOT / top).is_dir():
            return [] if find_module(top) else [f"no module {top}"]
        path = ROOT / words[1].replace(".", "/")
        files = [path.with_suffix(".py"), path / "__main__.py"]
        file, arguments = next((one for one in files if one.is_file()), None), words[2:]
    elif words[0].endswith(".py") and "/" in words[0]:
        file, arguments = (ROOT / words[0] if (ROOT / words[0]).is_file() else None), words[1:]
    else:
        return []
    if file is None:
        return [f"no file of {' '.join(words[:2])}"]
    known = script_options(file)
    given = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    return [f"{file.relative_to(ROOT)} has no option {name}" for name in given if name not in known]


@cache
def script_options(file: Path) -> set[str]:
    """Options that a script of ours adds to its parser, itself or in a neighbour that it imports."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = {"--help"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            texts = (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))
            found |= {text for text in texts if text.startswith("--")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("benchmarks", "tests")):
            for name in (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)):
                neighbour = ROOT / (name.replace(".", "/") + ".py")
                found |= script_options(neighbour) if neighbour.is_file() and neighbour != file else set()
    return found


def errors(tree: Tree, command: Command) -> list[str]:
    if command.words[0] == "opd":
        return opd_errors(tree, command)
    return make_errors(command.words[1:]) if command.words[0] == "make" else python_errors(command.words[1:])


@by_page
def test_every_command_parses(page: Path, tree: Tree) -> None:
    wrong = [(one.line, " ".join(one.words), found) for one in commands(page) if (found := errors(tree, one))]
    assert not wrong


@by_page
def test_every_pipeline_is_one(page: Path) -> None:
    """A whole pipeline loads; every key of a part of one is a key; what is none is a part of a domain, a training spec or a guard's rules."""
    wrong = []
    for block in blocks(page):
        if block.language == "yaml":
            data = _yaml(block.text)
            if isinstance(data, dict) and set(data) <= set(PipelineConfig.model_fields):
                wrong += [(block.line, found) for found in _pipeline_errors(data)]
            else:
                wrong += [(block.line, found) for found in _other_errors(data)]
    assert not wrong


def _yaml(text: str) -> Any:
    """The value of a block, whose dots stand for keys that are left out."""
    return parse_yaml(re.sub(r"(?:, )?\.\.\.(?=\s*\})", "", text))


def _pipeline_errors(data: dict[str, Any]) -> Iterator[str]:
    if {"name", "student", "experts", "domains", "trainer"} <= set(data):
        try:
            validate_section(PipelineConfig, data, "pipeline")
        except OpdError as refused:
            yield str(refused)
    for path in _paths(data):
        if not has_key(PipelineConfig, path):
            yield f"no key {'.'.join(path)}"


def _other_errors(data: Any) -> Iterator[str]:
    models = [one for one in (DomainConfig, RuleFile, ReinforceSpec, ExpertsSpec) if {*data} <= {*one.model_fields}]
    if not models:
        yield f"nothing has the keys {', '.join(data)}"
    for model in models:
        try:
            validate_section(model, data, model.__name__)
        except OpdError as refused:
            yield str(refused)


def _paths(data: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(data, dict) and data:
        for key, value in data.items():
            yield from _paths(value, (*above, str(key)))
    elif isinstance(data, list) and any(isinstance(one, dict) for one in data):
        for one in data:
            yield from _paths(one, above)
    elif above:
        yield above


@by_page
def test_every_python_block_compiles_and_imports_what_is_there(page: Path) -> None:
    wrong = []
    for block in blocks(page):
        if block.language == "python":
            for node in ast.walk(ast.parse(block.text)):
                if isinstance(node, ast.ImportFrom) and (ROOT / str(node.module).partition(".")[0]).is_dir():
                    known = _names(str(node.module))
                    wrong += [(block.line, f"{node.module}.{one.name}") for one in node.names if one.name not in known]
    assert not wrong


def _names(module: str) -> set[str]:
    """Every name that a module of ours spells out, its own and those that it hands on."""
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assigned = {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for name in node.targets
        if isinstance(name, ast.Name)
    }
    return defined | imported | assigned


def test_the_python_page_names_every_function_with_its_parameters() -> None:
    import pipelines

    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    tree = ast.parse((ROOT / "pipelines/api.py").read_text(encoding="utf-8"))
    functions = {node.name: node.args for node in tree.body if isinstance(node, ast.FunctionDef)}
    for name in pipelines.__all__:
        assert f"`{name}" in page, name
        if name in functions:
            written = re.search(rf"`{name}\((.*?)\)`", page)
            assert written, name
            own = {arg.arg for arg in (*functions[name].args, *functions[name].kwonlyargs)}
            given = {word.partition("=")[0] for word in written[1].replace("...", "").split(", ") if word}
            assert given <= own, (name, given - own)
    (result,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "MergeResult")
    fields = {
        node.target.id for node in result.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    public = {node.name for node in result.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}
    assert {name for name in fields | public if f"`{name}`" not in page} == set()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("opd merge quickstart --set trainer.stepz=3", "no key trainer.stepz"),
        ("opd merge quickstart --set trainer.steps=none", "trainer.steps"),
        ("opd merge quikstart", "no pipeline is called quikstart"),
        ("opd merge mine.yaml --resum runs/mine", "--resum"),
        ("opd experts train quickstart-expert", "no training spec"),
        ("opd experts add math --domain math", "--model"),
        ("opd prompts make word --output prompts", "no suite is called word"),
        ("opd check mine.yaml --samples few", "'--samples'"),
        ("make deploy", "no target deploy"),
        ("make demo TORCH=x", "no variable TORCH"),
        ("python -m benchmarks.losses", "no file"),
        ("python -m benchmarks.objectives --pipelines x", "no option --pipelines"),
    ],
)
def test_a_wrong_command_is_found(words: str, found: str, tree: Tree) -> None:
    assert found in " ".join(errors(tree, Command(1, tuple(words.split()), True)))


def test_a_command_within_a_sentence_may_be_cut_short(tree: Tree) -> None:
    assert not errors(tree, Command(1, ("opd", "experts", "add"), False))
    assert errors(tree, Command(1, ("opd", "experts", "ad"), False)) == ["unknown: ad"]
    assert errors(tree, Command(1, ("opd", "check", "--fixup"), False)) == ["unknown: --fixup"]


@pytest.mark.parametrize(
    ("key", "there"),
    [
        ("trainer.lr", True),
        ("domains.math.eval.verifier.kind", True),
        ("domains.math.teachers.algebra", True),
        ("objective.reward.schedule.to", True),
        ("rounds.trainer.steps", True),
        ("trainer.learning_rate", False),
        ("domains.math.evals", False),
    ],
)
def test_keys_of_a_pipeline(key: str, there: bool) -> None:
    assert has_key(PipelineConfig, key.split(".")) is there


def test_a_broken_pipeline_is_found() -> None:
    assert list(_pipeline_errors(yaml.safe_load("trainer: {stepz: 3}"))) == ["no key trainer.stepz"]
