"""`opd init`, from the flags to the written files."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from opd import __version__
from opd.config import PipelineConfig
from opd.errors import ConfigError
from opd.files import atomic_write_text, raise_storage_errors
from opd.settings.yaml_files import parse_yaml, validate_section
from opd.text import Tell, quote_for_shell
from pipelines.propose.efforts import reads_effort
from pipelines.propose.flags import Ask, Flags, complete_flags
from pipelines.propose.shipped_pipelines import RECIPES, list_commands, read_files
from pipelines.propose.text import make_schema_line, render_pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """The file to write."""

    path: Path
    force: bool = False
    """Replace files that are there."""

    @property
    def schema(self) -> Path:
        """The JSON schema of a pipeline, by which editors complete and check it."""
        return self.path.with_suffix(".schema.json")

    def refuse_existing(self, files: Mapping[Path, str] | None = None) -> None:
        """Refuse to replace one of these files (None: the pipeline alone) or the schema without `force`, and a directory that is not there.

        Raises: ConfigError.
        """
        for path in (*(files or {self.path: ""}), self.schema):
            if path.is_dir():
                raise ConfigError.at(path, found="a directory", wanted="a file to write", fix="name a file in it")
            if path.exists() and not self.force and not (path == self.schema and _is_schema(path)):
                raise ConfigError.at(
                    path,
                    found="a file that is there already",
                    wanted="a new file, or leave to replace this one",
                    fix="choose another one with --output, or replace it with --force",
                )
            if not path.parent.is_dir():
                raise ConfigError.at(
                    path, found=f"no directory {path.parent}", wanted="a directory that exists", fix="make it first"
                )

    def write_pipeline(self, text: str) -> None:
        """Write the text of a pipeline, after it has been validated as `opd merge` will. Raises: ConfigError, StorageError."""
        validate_section(PipelineConfig, parse_yaml(text), self.path)
        self.write({self.path: text})

    def write(self, files: Mapping[Path, str]) -> None:
        """Write all files, the schema first. Raises: StorageError."""
        schema = json.dumps(PipelineConfig.model_json_schema(), indent=1) + "\n"
        for path, text in {self.schema: schema, **files}.items():
            with raise_storage_errors(path):
                atomic_write_text(path, text)


def _is_schema(path: Path) -> bool:
    """Return True if an earlier call wrote this file. It may be replaced then, since the schema is the same for every pipeline."""
    return f'"title": "{PipelineConfig.__name__}"' in path.read_text(encoding="utf-8", errors="replace")


def copy_shipped(name: str, target: OutputFile) -> list[str]:
    """Write a shipped pipeline and the training spec of its experts, and return the commands that come next. Raises: ConfigError,
    StorageError."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        fix = f"did you mean `{near[0]}`?" if near else "choose one of them; `opd pipelines list` says what they are"
        raise ConfigError.at("--from", found=name, wanted=f"one of: {', '.join(RECIPES)}", fix=fix)
    files = read_files(name, target.path)
    target.refuse_existing(files)
    files[target.path] = f"{make_schema_line(target.schema)}\n{files[target.path]}"
    target.write(files)
    return list_commands(name, target.path)


def write_proposal(flags: Flags, target: OutputFile, ask: Ask | None, tell: Tell) -> list[str]:
    """Read the models and prompts that the flags name, write a pipeline for them, and return the commands that come next. `ask` is None
    if nobody can be asked.

    Raises: OpdError for anything that is missing, broken or does not fit, before anything is written.
    """
    target.refuse_existing()
    ask = ask if flags.incomplete else None
    answers = complete_flags(flags, ask, tell)
    from pipelines.propose.domains import find_keep_source, find_sources
    from pipelines.propose.models import inspect_experts, inspect_student

    student = inspect_student(answers.student)
    experts = inspect_experts(answers, student, tell)
    sources, keep = find_sources(answers, student, flags.chat), find_keep_source(answers, student, flags.chat)
    # These take seconds to import, so everything that can be refused without them has been refused by now.
    from pipelines.inputs.prompts import load_exams, load_training, refuse_leaks
    from pipelines.inputs.read import load_tokenizer
    from pipelines.propose.domains import read_domains
    from pipelines.propose.plan import MergeFacts, propose_pipeline, replace_objective, summarise_proposal
    from pipelines.sizing.machine import read_machine

    tokenizer, machine = load_tokenizer(answers.student), read_machine()
    domains = read_domains(answers, sources, tokenizer, ask, tell)
    facts = MergeFacts(
        student_dir=answers.student,
        student=student,
        experts=experts,
        domains=domains,
        keep=keep,
        machine=machine,
        efforts=answers.efforts,
        template_has_effort=reads_effort(tokenizer.chat_template),
    )
    proposal = propose_pipeline(_make_pipeline_name(target.path), facts, lora=flags.lora)
    config = validate_section(PipelineConfig, proposal.data, target.path)
    prompts = {name: domain.prompts for name, domain in config.domains.items() if domain.prompts}
    notes: list[str] = []
    training = load_training(config, prompts, tokenizer, notes.append)
    refuse_leaks(load_exams(config, tokenizer, tell=notes.append), training)
    if flags.probe:
        from pipelines.propose.probe import choose_objective, probe_experts

        proposal = replace_objective(proposal, *choose_objective(probe_experts(student, experts, domains, tell)))
    target.write_pipeline(render_pipeline(_make_file_header(target, str(machine)), proposal.data, proposal.notes))
    for line in (*(f"note: {note}" for note in notes), *summarise_proposal(proposal, facts)):
        tell(line)
    for warning in proposal.warnings:
        tell(f"warning: {warning}")
    return [f"opd check {quote_for_shell(target.path)}", f"opd merge {quote_for_shell(target.path)}"]


def _make_pipeline_name(path: Path) -> str:
    """Make a valid name, of at most 64 characters, of a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._")[:64] or "pipeline"


def _make_file_header(target: OutputFile, machine: str) -> list[str]:
    """Make the lines of comment that the file begins with."""
    return [
        make_schema_line(target.schema),
        f"Written by `opd init` of opd-merge {__version__} for a machine with {machine}.",
        "Paths are relative to the directory that `opd` is started in; all keys are in docs/pipelines.md.",
        "",
        f"    opd check {quote_for_shell(target.path)}      can these experts teach this student anything?",
        f"    opd merge {quote_for_shell(target.path)}      writes runs/{_make_pipeline_name(target.path)}",
    ]
