"""`opd init` from the first look to the written files."""

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
from opd.text import quote_for_shell
from pipelines.propose.given import Ask, Flags, Tell, complete_flags
from pipelines.propose.shipped import RECIPES, commands_of, files_of
from pipelines.propose.text import render_pipeline, schema_line


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
        """Raises: ConfigError for a file that would be replaced, or a directory that is not there."""
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
        """Write a pipeline that loads as it stands. Raises: StorageError."""
        validate_section(PipelineConfig, parse_yaml(text), self.path)
        self.write({self.path: text})

    def write(self, files: Mapping[Path, str]) -> None:
        """Write all files, the schema first. Raises: StorageError."""
        schema = json.dumps(PipelineConfig.model_json_schema(), indent=1) + "\n"
        for path, text in {self.schema: schema, **files}.items():
            with raise_storage_errors(path):
                atomic_write_text(path, text)


def _is_schema(path: Path) -> bool:
    """Whether an earlier call wrote it: it is the same for every pipeline."""
    return f'"title": "{PipelineConfig.__name__}"' in path.read_text(encoding="utf-8", errors="replace")


def copy_shipped(name: str, target: OutputFile) -> list[str]:
    """Write a shipped pipeline and what belongs to it; returns the commands that come next. Raises: ConfigError."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        fix = f"did you mean `{near[0]}`?" if near else "choose one of them; `opd pipelines list` says what they are"
        raise ConfigError.at("--from", found=name, wanted=f"one of: {', '.join(RECIPES)}", fix=fix)
    files = files_of(name, target.path)
    target.refuse_existing(files)
    files[target.path] = f"{schema_line(target.schema)}\n{files[target.path]}"
    target.write(files)
    return commands_of(name, target.path)


def write_proposal(flags: Flags, target: OutputFile, ask: Ask | None, tell: Tell) -> list[str]:
    """Look at what the flags name, write a pipeline for it, and return the commands that come next.

    Raises: OpdError for what is missing, broken or does not fit, before anything is written.
    """
    target.refuse_existing()
    ask = ask if flags.incomplete else None
    answers = complete_flags(flags, ask, tell)
    from pipelines.propose.domains import find_sources
    from pipelines.propose.models import look_at_experts, look_at_student

    student = look_at_student(answers.student)
    experts = look_at_experts(answers, student, tell)
    sources = find_sources(answers, student, flags.chat)
    # What can be refused without them has been: these take seconds to import.
    from pipelines.inputs.prompts import load_exams, load_training, refuse_leaks
    from pipelines.inputs.read import load_tokenizer
    from pipelines.propose.domains import look_at_domains
    from pipelines.propose.plan import MergeFacts, propose_pipeline, summarise_proposal, with_objective
    from pipelines.sizing.machine import read_machine

    tokenizer, machine = load_tokenizer(answers.student), read_machine()
    domains = look_at_domains(answers, sources, tokenizer, ask, tell)
    facts = MergeFacts(student_dir=answers.student, student=student, experts=experts, domains=domains, machine=machine)
    proposal = propose_pipeline(_pipeline_name(target.path), facts, lora=flags.lora)
    config = validate_section(PipelineConfig, proposal.data, target.path)
    prompts = {name: domain.prompts for name, domain in config.domains.items() if domain.prompts}
    notes: list[str] = []
    training = load_training(config, prompts, tokenizer, notes.append)
    refuse_leaks(load_exams(config, tokenizer, tell=notes.append), training)
    if flags.probe:
        from pipelines.propose.probe import choose_objective, probe_experts

        proposal = with_objective(proposal, *choose_objective(probe_experts(student, experts, domains, tell)))
    target.write_pipeline(render_pipeline(_file_header(target, str(machine)), proposal.data, proposal.notes))
    for line in (*(f"note: {note}" for note in notes), *summarise_proposal(proposal, facts)):
        tell(line)
    for warning in proposal.warnings:
        tell(f"warning: {warning}")
    return [f"opd check {quote_for_shell(target.path)}", f"opd merge {quote_for_shell(target.path)}"]


def _pipeline_name(path: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._")[:64] or "pipeline"


def _file_header(target: OutputFile, machine: str) -> list[str]:
    return [
        schema_line(target.schema),
        f"Written by `opd init` of opd-merge {__version__} for a machine with {machine}.",
        "Paths are relative to the directory that `opd` is started in; all keys are in docs/pipelines.md.",
        "",
        f"    opd check {quote_for_shell(target.path)}      can these experts teach this student anything?",
        f"    opd merge {quote_for_shell(target.path)}      writes runs/{_pipeline_name(target.path)}",
    ]
