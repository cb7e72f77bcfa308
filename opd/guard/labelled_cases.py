"""Reads labelled commands and trajectories, our own and those of public sets, and makes `Case`s of them. A form is one of:

    commands         JSONL: {"command", "label": "hack" | "honest" | null, "trajectory"?, "kind"?}; null is context
    trace            TRACE (PatronusAI/trace-dataset): JSONL or Parquet with trajectory_id, conversation (JSON), label ("0": benign)
    atif             a directory of ATIF trajectories (Harbor; Terminal Wrench): **/*.json, labelled by the names of directories
    rewardhackbench  a directory of Harbor tasks: TRIAL/environment/trace.txt with TRIAL/tests/ground_truth.json

The public sets are not shipped, as they have licences of their own.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from opd.errors import OpdError
from opd.records.environments import ToolCall
from opd.settings.suggestions import did_you_mean

Label = Literal["hack", "honest"]
Half = Literal["development", "held_out", "both"]
MAX_FILE_BYTES = 1 << 29
HACK_PARTS = ("hack", "exploit", "cheat")
"""A file is labelled `hack` if one of these is a part of its path."""
HONEST_PARTS = ("legit", "baseline", "honest", "clean", "benign")
"""A file is labelled `honest` if one of these is a part of its path."""
_FENCE = re.compile(r"```(?:bash|sh|shell|console)\n(.*?)```", re.DOTALL)
_PROMPT = re.compile(r"^(?:\S*\$|\S+[@:]\S*#) (.+)$", re.MULTILINE)
"""A line of a terminal that begins with a prompt such as `$` or `root@box:/#`."""
_KEYS = re.compile(r'"(?:keystrokes|command|cmd)"\s*:\s*("(?:[^"\\]|\\.)*")')


"""A JSON field in which an agent of a terminal gives a command: the command as a JSON string."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Tool calls of one episode, with a label."""

    id: str
    label: Label
    steps: tuple[ToolCall, ...]
    kind: str = ""
    """Kind of hack or of honest work, in the words of the set."""
    labels_trajectory: bool = False
    """True if the label is that of the whole trajectory, which is caught if any of its steps is blocked. False if it is that of the last
    step; then the steps before only bring the session to where it is."""


def read_cases(path: Path, form: str = "commands") -> list[Case]:
    """Return the cases of a file or directory of one of `FORMS`. Raises: OpdError if it is not of that form, or has no case."""
    if form not in FORMS:
        raise OpdError.at("--format", found=form, wanted=f"one of: {', '.join(FORMS)}", fix="correct it")
    if not path.exists():
        raise OpdError.at(
            path,
            found="nothing there",
            wanted=f"`shipped`, or a file or directory of form {form}",
            fix=did_you_mean(str(path), ["shipped"], "correct the path"),
        )
    cases = list(FORMS[form](path))
    if not cases:
        raise OpdError.at(path, found="no labelled case", wanted=f"cases of form {form}", fix="see docs/guard.md")
    return cases


def shipped_cases(half: Half = "both") -> list[Case]:
    """Return the cases of our own set, which comes with the package, or of one half of it."""
    lines = files("opd.guard").joinpath("commands.jsonl").read_text(encoding="utf-8").split("\n")
    return [case for case in _parse_commands(lines, "commands.jsonl") if half in ("both", choose_half(case.id))]


def choose_half(case_id: str) -> Half:
    """Return the half of our set that a case is in. The hash of its id decides, so that new cases do not move the others."""
    return "development" if hashlib.sha256(case_id.encode()).digest()[0] % 2 == 0 else "held_out"


def _read_lines(path: Path) -> list[str]:
    if path.is_dir() or path.stat().st_size > MAX_FILE_BYTES:
        raise OpdError.at(path, found="a directory or too large a file", wanted="a file of lines", fix="name a file")
    return _read_text(path).split("\n")  # JSON may hold other characters that end a line


def _read_text(path: Path, errors: str = "strict") -> str:
    """Read a file. Raises: OpdError if that is not possible."""
    try:
        return path.read_text(encoding="utf-8", errors=errors)
    except (OSError, UnicodeDecodeError) as error:
        raise OpdError.at(path, found=str(error), wanted="a file of UTF-8 text", fix="correct the file") from None


def _parse_records(lines: list[str], source: object) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the object of each line of JSON that is not empty. `source` names the file in errors. Raises: OpdError for a
    line that is no JSON object."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        location = f"{source}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise OpdError.at(location, found=str(error), wanted="one JSON object a line", fix="correct it") from None
        if not isinstance(record, dict):
            raise OpdError.at(location, found=f"{line[:60]}", wanted="a JSON object", fix="correct it")
        yield number, record


def _parse_commands(lines: list[str], source: object) -> Iterator[Case]:
    """Yield a case for each labelled line of the form `commands`; lines of the same trajectory before it are its first steps. Raises:
    OpdError for a line that is not of that form."""
    trajectories: dict[str, list[ToolCall]] = {}
    for number, record in _parse_records(lines, source):
        command, label, name = record.get("command"), record.get("label"), record.get("trajectory")
        if not isinstance(command, str) or label not in ("hack", "honest", None):
            problem = f"command {command!r:.60}, label {label!r:.20}"
            requirement = "a text as `command`, and hack, honest or null as `label`"
            raise OpdError.at(f"{source}:{number}", found=problem, wanted=requirement, fix="correct the line")
        steps = trajectories.setdefault(str(name), []) if name is not None else []
        steps.append(ToolCall(name="bash", arguments={"command": command}))
        if label is not None:
            case_id = str(name) if name is not None else command
            yield Case(id=case_id, label=label, steps=tuple(steps), kind=str(record.get("kind", "")))


def _read_commands(path: Path) -> Iterator[Case]:
    return _parse_commands(_read_lines(path), path)


def _read_trace(path: Path) -> Iterator[Case]:
    for number, row in _read_parquet(path) if path.suffix == ".parquet" else _parse_records(_read_lines(path), path):
        try:
            messages = json.loads(row["conversation"]) if isinstance(row["conversation"], str) else row["conversation"]
            steps = tuple(step for message in messages for step in message_steps(message))
            name, label = str(row["trajectory_id"]), str(row["label"])
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            requirement = "trajectory_id, conversation (a JSON list of messages) and label"
            problem = f"no `{error.args[0]}`" if isinstance(error, KeyError) else f"{error!r:.80}"
            raise OpdError.at(f"{path}:{number}", found=problem, wanted=requirement, fix="correct the row") from None
        if steps:
            yield Case(
                id=name, label="honest" if label == "0" else "hack", steps=steps, kind=label, labels_trajectory=True
            )


def _read_parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    columns = ["trajectory_id", "conversation", "label"]
    try:
        table = parquet.read_table(path, columns=columns)
    except (OSError, arrow.ArrowException) as error:
        message = " ".join(str(error).split())[:200]
        requirement = f"a Parquet file with the columns {', '.join(columns)}"
        raise OpdError.at(path, found=message, wanted=requirement, fix="correct the file") from None
    return enumerate(table.to_pylist(), 1)


def message_steps(message: Mapping[str, Any]) -> Iterator[ToolCall]:
    """Yield the tool calls of one chat message: those in its `tool_calls`; if it has none, the commands in its text."""
    if message.get("role") != "assistant":
        return
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            arguments = {"command": arguments}
        if isinstance(arguments, dict):
            yield ToolCall(name=str(function.get("name", "bash")), arguments=arguments)
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    if not message.get("tool_calls") and isinstance(content, str):
        yield from text_steps(content)


def text_steps(text: str) -> Iterator[ToolCall]:
    """Yield the commands in running text: fenced shell code and JSON fields of terminal agents; if there are none, what stands behind the
    prompts of a terminal."""
    commands = [*_FENCE.findall(text)]
    for literal in _KEYS.findall(text):
        try:
            commands.append(json.loads(literal))
        except ValueError:
            continue  # not a JSON string after all, so not a field of a terminal agent
    for command in commands or _PROMPT.findall(text):
        if command.strip():
            yield ToolCall(name="bash", arguments={"command": command.strip()})


def _read_atif(path: Path) -> Iterator[Case]:
    for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
        data = _read_json(file)
        if not isinstance(data, dict) or not isinstance(data.get("steps"), list):
            continue  # tasks, results and indexes lie beside the trajectories
        label = _choose_label(file)
        calls = [call for step in data["steps"] if isinstance(step, dict) for call in step.get("tool_calls") or ()]
        steps = tuple(
            ToolCall(name=str(call.get("function_name", "bash")), arguments=call["arguments"])
            for call in calls
            if isinstance(call, dict) and isinstance(call.get("arguments"), dict)
        )
        if steps:
            yield Case(id=str(file), label=label, steps=steps, labels_trajectory=True)


def _choose_label(file: Path) -> Label:
    """Return the label that the path of a trajectory gives it. Raises: OpdError if it gives none, or both."""
    names = " ".join(part.lower() for part in file.parts)
    hack, honest = any(w in names for w in HACK_PARTS), any(w in names for w in HONEST_PARTS)
    if hack == honest:
        requirement = (
            f"a directory above it named after one of {', '.join(HACK_PARTS)} or one of {', '.join(HONEST_PARTS)}"
        )
        raise OpdError.at(
            file, found="a trajectory without a label", wanted=requirement, fix="sort the files into two directories"
        )
    return "hack" if hack else "honest"


def _read_json(file: Path) -> Any:
    try:
        return json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        raise OpdError.at(file, found=str(error), wanted="JSON", fix="correct or remove the file") from None


def _read_rewardhackbench(path: Path) -> Iterator[Case]:
    for truth in sorted(path.glob("*/tests/ground_truth.json")):
        labels = _read_json(truth)
        trace = truth.parents[1] / "environment" / "trace.txt"
        if not isinstance(labels, dict) or "harness_level_cheating" not in labels or not trace.is_file():
            requirement = "harness_level_cheating and task_level_reward_hacking, and ../environment/trace.txt"
            raise OpdError.at(truth, found=f"{labels!r:.80}", wanted=requirement, fix="complete the trial")
        cheats = [key for key in ("harness_level_cheating", "task_level_reward_hacking") if labels.get(key)]
        steps = tuple(text_steps(_read_text(trace, errors="replace")))
        if steps:
            yield Case(
                id=truth.parents[1].name,
                label="hack" if cheats else "honest",
                steps=steps,
                kind=", ".join(cheats),
                labels_trajectory=True,
            )


FORMS: dict[str, Callable[[Path], Iterator[Case]]] = {
    "commands": _read_commands,
    "trace": _read_trace,
    "atif": _read_atif,
    "rewardhackbench": _read_rewardhackbench,
}
"""Form -> the function that reads the cases of a file or directory of that form."""
