"""README.md of a merged model: what it was made from, under which licences, what it is worth, and how it was made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from experts.licences import Licence, find_common, find_licences, list_concerns
from opd import __version__
from opd.config import PipelineConfig, domain_extrapolation
from opd.models.lora import ADAPTER_WEIGHTS
from opd.report import domain_rows, markdown_table
from opd.run.lineage import LINEAGE, format_events, list_commands
from pipelines.inputs.read import Inputs
from pipelines.routes import RoutedExpert

NAME = "README.md"
"""File name of the card, which a hub shows as the model's page."""
RESULT_COLUMNS = ("Domain", "Student before", "Expert", "This model", "Headroom recovered")


def model_card(
    config: PipelineConfig,
    inputs: Inputs,
    manifest: Mapping[str, Any] | None = None,
    report: Mapping[str, Any] | None = None,
) -> str:
    """Return the card in Markdown, with the hub's header. `manifest` is the run's, `report` its report once there is one."""
    licences = _read_licences(inputs)
    licence = find_common(licences)
    header = {"library_name": "transformers", **({"license": licence} if licence else {}), "tags": _card_tags(inputs)}
    lora = config.student.lora
    lines = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---",
        f"# {config.name}",
        *_describe_merge(config, inputs),
        "",
        f"- Student: `{config.student.model.name}` ({inputs.student.architecture}, {inputs.student.parameters:,} parameters)",
        f"- Steps: {config.trainer.steps} of {config.trainer.samples_per_step} responses, lr {config.trainer.lr:g}, seed {config.seed}",
        *_extrapolation_lines(config),
        *([f"- LoRA: {inputs.trained:,} parameters, rank {lora.r}, alpha {lora.alpha:g}"] if lora else []),
        *(f"- Lineage: {line}" for line in format_events((manifest or {}).get(LINEAGE, ()))),
        "",
        *_expert_lines(inputs),
        *_result_lines(report),
        *_draft_lines(config, report),
        *_licence_lines(licences),
        *_command_lines(manifest or {}),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def _expert_lines(inputs: Inputs) -> list[str]:
    """Return the table of each domain's experts and their weights; nothing without experts."""
    if not inputs.routes:
        return []
    lines = ["| Domain | Expert | Weights (BLAKE3, first 16 digits) |", "|---|---|---|"]
    for domain, assigned in inputs.routes.items():
        for weighted_teacher in assigned:
            name = weighted_teacher.teacher.name
            share = "" if weighted_teacher.weight == 1 else f" ({weighted_teacher.weight:.3g})"
            lines.append(f"| {domain} | {name}{share} | {_weights_cell(inputs.experts[name])} |")
    return [*lines, ""]


def _draft_lines(config: PipelineConfig, report: Mapping[str, Any] | None) -> list[str]:
    """Return what the draft beside the weights is worth; nothing without one that vLLM serves."""
    rows = (report or {}).get("draft", {}).get("rows", ())
    if not rows or config.draft is None or config.draft.kind != "eagle3":
        return []
    return [
        "## Draft",
        "",
        "`draft/` is an EAGLE-3 draft for vLLM's speculative decoding. At the end of the merge a pass of the model writes "
        + ", ".join(f"{row['last']:.2f} tokens ({row['domain']})" for row in rows if row["last"] is not None)
        + ", by the exact probabilities of both on sampled text.",
        "",
    ]


def _result_lines(report: Mapping[str, Any] | None) -> list[str]:
    """Return the table of right answers on held-out prompts; nothing before they were measured."""
    rows = domain_rows(dict(report)) if report else []
    if not rows:
        return []
    return ["## Results", "", "Right answers on held-out prompts.", "", markdown_table(RESULT_COLUMNS, rows), ""]


def _read_licences(inputs: Inputs) -> dict[str, list[Licence]]:
    """Return owner (student, expert, base) -> the licences that its directory names; a base of several adapters comes once."""
    directories = {f"the student `{Path(inputs.student.path).name}`": Path(inputs.student.path)}
    for name, expert in inputs.experts.items():
        directories[f"the expert `{name}`"] = Path(expert.adapter.path if expert.adapter else expert.info.path)
        if expert.adapter is not None and Path(expert.info.path) not in directories.values():
            directories[f"the base `{Path(expert.info.path).name}`"] = Path(expert.info.path)
    return {owner: find_licences(directory) for owner, directory in directories.items()}


def _licence_lines(by_owner: Mapping[str, list[Licence]]) -> list[str]:
    """Return the list of licences, and the questions that they leave open."""
    lines = [
        "## Licences",
        "",
        "As the directories of the models state them; nobody has checked what follows from them.",
        "",
    ]
    lines += [f"- {owner}: {', '.join(map(str, licences)) or 'none found'}" for owner, licences in by_owner.items()]
    if open_questions := list_concerns(by_owner):
        lines += ["", "Before you pass this model on, look at:", "", *(f"- {line}" for line in open_questions)]
    return [*lines, ""]


def _command_lines(manifest: Mapping[str, Any]) -> list[str]:
    """Return the commands that made the model, if the manifest has them, and those that use it."""
    command_lines = [f"    {command}" for command in list_commands(manifest)]
    use_lines = [
        "## Use",
        "",
        "    opd chat .      # in this directory; a terminal chat",
        "    opd serve .     # an OpenAI server by vLLM",
    ]
    return [*(["## How it was made", "", *command_lines, ""] if command_lines else []), *use_lines]


def _card_tags(inputs: Inputs) -> list[str]:
    return ["on-policy-distillation", "merge"] if inputs.experts else ["reinforcement-learning"]


def _describe_merge(config: PipelineConfig, inputs: Inputs) -> list[str]:
    """Return sentences on the making of the model."""
    if not inputs.experts:
        return [
            f"Trained by reinforcement with opd-merge {__version__}: the student wrote, and verifiers or environments gave each",
            f"response a reward. Domains: {', '.join(config.domains)}.",
        ]
    kinds = dict.fromkeys(config.objective_of(domain).kind for domain in config.domains)
    objectives = ", ".join(f"`{kind}`" for kind in kinds)
    return [
        f"Merged from {len(inputs.experts)} experts by on-policy distillation with opd-merge {__version__}: the student wrote,",
        f"the experts of each prompt's domain scored every token, and the student was trained on {objectives}.",
    ]


def _extrapolation_lines(config: PipelineConfig) -> list[str]:
    """Return the card's lines about domains whose target lies beyond their experts, or on the way to them, if there are any."""
    factors = {domain: domain_extrapolation(config, domain) for domain in config.domains}
    beyond = ", ".join(f"{domain} {factor:g}" for domain, factor in factors.items() if factor > 1)
    between = ", ".join(f"{domain} {factor:g}" for domain, factor in factors.items() if factor < 1)
    return [
        *([f"- Extrapolated beyond the experts, away from the student as it was: {beyond}"] if beyond else []),
        *([f"- Toward a point between the student as it was and the experts: {between}"] if between else []),
    ]


def _weights_cell(expert: RoutedExpert) -> str:
    """Return the hashes of an expert's weights; for an adapter its own hash, then name and hashes of its base."""
    model_hashes = ", ".join(digest[:16] for digest in expert.info.weight_files.values())
    if expert.adapter is None:
        return f"`{model_hashes}`"
    return f"LoRA `{expert.adapter.files[ADAPTER_WEIGHTS][:16]}` on `{Path(expert.info.path).name}` `{model_hashes}`"
