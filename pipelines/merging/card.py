"""README.md of a merged model, which says what the model was made from."""

from __future__ import annotations

from pathlib import Path

import yaml

from opd import __version__
from opd.config import PipelineConfig, extrapolation
from opd.lora import ADAPTER_WEIGHTS
from pipelines.inputs.read import Inputs
from pipelines.inputs.routes import Expert


def model_card(config: PipelineConfig, inputs: Inputs) -> str:
    """Markdown with the hub's header."""
    header = yaml.safe_dump({"library_name": "transformers", "tags": _tags(inputs)}, sort_keys=False)
    lora = config.student.lora
    lines = [
        f"---\n{header}---",
        f"# {config.name}",
        *_made(config, inputs),
        "",
        f"- Student: `{config.student.model.name}` ({inputs.student.architecture}, {inputs.student.parameters:,} parameters)",
        f"- Steps: {config.trainer.steps} of {config.trainer.samples_per_step} responses, lr {config.trainer.lr:g}, seed {config.seed}",
        *_beyond(config),
        *([f"- LoRA: {inputs.trained:,} parameters, rank {lora.r}, alpha {lora.alpha:g}"] if lora else []),
        "",
    ]
    if inputs.routes:
        lines += ["| Domain | Expert | Weights (BLAKE3, first 16 digits) |", "|---|---|---|"]
    for domain, assigned in inputs.routes.items():
        for one in assigned:
            name = one.teacher.name
            share = "" if one.weight == 1 else f" ({one.weight:.3g})"
            lines.append(f"| {domain} | {name}{share} | {_weights_cell(inputs.experts[name])} |")
    return "\n".join(lines) + "\n"


def _tags(inputs: Inputs) -> list[str]:
    return ["on-policy-distillation", "merge"] if inputs.experts else ["reinforcement-learning"]


def _made(config: PipelineConfig, inputs: Inputs) -> list[str]:
    """How the model was made, as sentences."""
    if not inputs.experts:
        return [
            f"Trained by reinforcement with opd-merge {__version__}: the student wrote, and verifiers or environments gave each",
            f"response a reward. Domains: {', '.join(config.domains)}.",
        ]
    return [
        f"Merged from {len(inputs.experts)} experts by on-policy distillation with opd-merge {__version__}: the student wrote,",
        f"the experts of each prompt's domain scored every token, and the student was trained on `{config.objective.kind}`.",
    ]


def _beyond(config: PipelineConfig) -> list[str]:
    """The card's line about domains whose target lies beyond their experts, if there are any."""
    factors = {domain: extrapolation(config, domain) for domain in config.domains}
    shown = ", ".join(f"{domain} {factor:g}" for domain, factor in factors.items() if factor > 1)
    return [f"- Extrapolated beyond the experts, away from the student as it was: {shown}"] if shown else []


def _weights_cell(expert: Expert) -> str:
    """The card's cell about an expert's weights; for an adapter its own hash, and name and hash of its base."""
    full = ", ".join(digest[:16] for digest in expert.info.weight_files.values())
    if expert.adapter is None:
        return f"`{full}`"
    return f"LoRA `{expert.adapter.files[ADAPTER_WEIGHTS][:16]}` on `{Path(expert.info.path).name}` `{full}`"
