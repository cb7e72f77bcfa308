"""Put a proposal together: the pipeline's keys and values, and a note on what each of them is for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from experts.model_dir import ModelInfo
from opd.config.domains import KEPT
from opd.config.objectives import DEFAULT_KIND
from opd.config.prompts import PromptsConfig
from pipelines.propose.domains import DomainFacts, can_split, choose_share, wants_holdout
from pipelines.propose.efforts import ExpertEffort, fold_efforts
from pipelines.propose.models import ExpertFacts
from pipelines.propose.sizes import build_merge_models, choose_lengths, choose_sizes, fits_memory, max_prompt_tokens
from pipelines.propose.text import Flow, render_on_one_line
from pipelines.sizing.machine import MachineFacts
from pipelines.sizing.shrink import ADAPTERS, Data, apply_change, shrink_to_fit


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeFacts:
    """Everything that was read and inspected before a pipeline is proposed."""

    student_dir: Path
    student: ModelInfo
    experts: Mapping[str, ExpertFacts]
    domains: Mapping[str, DomainFacts]
    keep: PromptsConfig | None = None
    """General prompts, on which the student is to stay as it is."""
    machine: MachineFacts
    efforts: Mapping[str, ExpertEffort] = field(default_factory=dict)
    """Expert -> domain and effort, if experts differ in their effort."""
    template_has_effort: bool = False
    """True if the student's chat template reads the effort."""

    def name_domain(self, expert: str) -> str:
        """Return the name that the expert's domain has in the pipeline."""
        return self.efforts[expert].domain if expert in self.efforts else expert


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A pipeline that has not been written yet."""

    data: Data
    notes: Mapping[str, str]
    """Dotted path of a key -> what the key is for, as a comment beside it says."""
    warnings: tuple[str, ...]
    """Facts that a user should know before merging."""


def propose_pipeline(name: str, facts: MergeFacts, *, lora: bool = False) -> Proposal:
    """Propose a pipeline for these facts. If `lora` is true, its student trains adapters, however much memory there is."""
    rollout = choose_lengths(facts.domains, facts.student.context, gpu=bool(facts.machine.gpus))
    share, max_prompt = choose_share(facts.domains), max_prompt_tokens(rollout)
    data: Data = {
        "name": name,
        "seed": 0,
        "student": {"model": facts.student_dir},
        "experts": {domain: _expert_section(domain, part) for domain, part in facts.experts.items()},
        "domains": {domain: _domain_section(part, share, max_prompt) for domain, part in facts.domains.items()},
        **({"keep": {"prompts": _prompts_section(facts.keep, None, max_prompt), "weight": 1.0}} if facts.keep else {}),
        "rollout": rollout,
    }
    if facts.efforts:
        data = fold_efforts(data, facts.efforts, in_template=facts.template_has_effort)
    num_domains = len(facts.domains) + (facts.keep is not None)
    data = apply_change(data, choose_sizes(facts.student.parameters, num_domains, facts.machine))
    if lora:
        data = apply_change(data, ADAPTERS)
    models = build_merge_models(facts.student, facts.experts, facts.domains)
    data, smaller, fits = shrink_to_fit(
        data, lambda changed: fits_memory(changed, models, facts.machine), gpus=bool(facts.machine.gpus)
    )
    warnings = [
        _warn_of_no_exam(domain, part)
        for domain, part in facts.domains.items()
        if "eval" not in data["domains"][facts.name_domain(domain)]
    ]
    if not fits:
        warnings.append(
            "the merge may not fit into this machine's memory: `opd check` shows the sum, and what to lower"
        )
    notes = NOTES | _pipeline_notes(facts, data)
    if lora:
        notes["student.lora"] = "trains adapters; export: adapter also leaves them as PEFT has them"
    if smaller:
        notes["trainer"] = f"made smaller until the merge fits into memory: {', '.join(smaller)}"
    return Proposal(data=data, notes=notes, warnings=tuple(warnings))


def replace_objective(proposal: Proposal, kind: str, reason: str) -> Proposal:
    """Return the proposal with an objective of this kind, and with the reason as its note."""
    data = apply_change(proposal.data, {"objective": {"kind": kind}})
    return replace(proposal, data=data, notes={**proposal.notes, "objective.kind": reason})


def summarise_proposal(proposal: Proposal, facts: MergeFacts) -> Iterator[str]:
    """Yield what was found and chosen, for users who do not read the file: a line for each domain, and one for the training."""
    for name, domain in facts.domains.items():
        columns = domain.sources.training.columns
        prompt_column, answers = columns.get("prompt", "prompt"), f"`{columns.get('answer', 'answer')}`"
        # The rows are conversations, each of which brings its answer as its last turn.
        if domain.table.rows.num_answered == len(domain.table.rows):
            answers = "the assistant's last turn"
        exam = proposal.data["domains"][facts.name_domain(name)].get("eval", {})
        exam_size = f", {_count_held_out(domain, exam):,} of them held out" if "holdout" in exam else ""
        exam_judge = f"; {render_on_one_line(exam['verifier'])} compares with {answers}" if exam else ""
        kind = "an adapter" if facts.experts[name].adapter else "a model"
        yield f"{name}: {kind}; {len(domain.table):,} prompts in column `{prompt_column}`{exam_size}{exam_judge}"
    if facts.keep is not None:
        yield f"{KEPT}: the student as it is now, on the prompts of {facts.keep.path}"
    trainer, kind = proposal.data["trainer"], proposal.data["objective"]["kind"]
    yield f"{kind}, {trainer['steps']} steps of {trainer['samples_per_step']} answers, learning rate {trainer['lr']:g}"


def _count_held_out(facts: DomainFacts, exam: Data) -> int:
    """Return how many prompts an exam's section holds out; 0 if it has prompts of its own."""
    return int(facts.table.held_out(exam["holdout"]).sum()) if "holdout" in exam else 0


def _expert_section(domain: str, facts: ExpertFacts) -> Flow:
    base = {} if facts.base is None else {"base": facts.base}
    return Flow({"model": facts.model, **base, "domain": domain})


def _domain_section(facts: DomainFacts, share: float, max_prompt: int) -> Data:
    """Return the section of a domain. It has no exam if nothing can judge the answers, or if there are too few prompts to divide."""
    domain: Data = {"prompts": _prompts_section(facts.sources.training, facts, max_prompt)}
    if facts.sources.exam is not None:
        domain["eval"] = {
            "prompts": _prompts_section(facts.sources.exam, None, max_prompt),
            "verifier": _flow_style(facts.verifier),
        }
    elif wants_holdout(facts) and can_split(facts.table, share):
        domain["eval"] = {"holdout": share, "verifier": _flow_style(facts.verifier)}
    return domain | {"weight": 1.0}


def _prompts_section(source: PromptsConfig, facts: DomainFacts | None, max_prompt: int) -> Data:
    """Return the keys that differ from their defaults. `facts` are those of the training prompts, of which the ones longer than
    `max_prompt` tokens are left out; None for an exam, of which none is."""
    prompts: Data = {"path": source.path}
    if source.columns:
        prompts["columns"] = Flow(**source.columns)
    if source.chat:
        prompts["chat"] = True
    if facts is not None and bool((facts.table.lengths > max_prompt).any()):
        prompts["max_prompt_tokens"] = max_prompt
    return prompts


def _flow_style(value: Any) -> Any:
    return Flow(value) if isinstance(value, Mapping) else value


def _warn_of_no_exam(domain: str, facts: DomainFacts) -> str:
    """Return the warning for a domain without an exam."""
    reason = facts.reason if facts.verifier is None else f"its {len(facts.table)} prompts are too few to hold any out"
    return f"{domain} is trained but not measured: {reason} (docs/evaluation.md names the verifiers)"


def _pipeline_notes(facts: MergeFacts, data: Data) -> dict[str, str]:
    """Return key -> note for the keys whose notes tell what was found."""
    notes = {"student.model": _describe_model(facts.student)}
    for name, expert in facts.experts.items():
        kind = (
            f"LoRA adapter of rank {expert.adapter.rank} on {expert.info.architecture}"
            if expert.adapter
            else _describe_model(expert.info)
        )
        notes[f"experts.{name}"] = kind
    for owner, domain in facts.domains.items():
        name = facts.name_domain(owner)
        notes |= {f"domains.{name}.{key}": note for key, note in _domain_notes(domain, data["domains"][name]).items()}
    first_domain = next(iter(data["domains"]), "")
    notes[f"domains.{first_domain}.weight"] = "share of each step's samples, beside the other domains' weights"
    return notes


def _describe_model(info: ModelInfo) -> str:
    return f"{info.architecture}, {info.parameters:,} parameters in {info.dtype}"


def _domain_notes(facts: DomainFacts, written: Data) -> dict[str, str]:
    lengths = facts.table.lengths
    num_held_out = _count_held_out(facts, written.get("eval", {}))
    low, middle, high = int(lengths.min()), int(np.median(lengths)), int(lengths.max())
    notes = {
        "prompts.path": f"{len(facts.table):,} prompts of {low} to {high} tokens (median {middle})",
        "prompts.columns": "our name of a column: the file's name",
        "prompts.chat": "read through the student's chat template; false: as plain text",
        "prompts.max_prompt_tokens": f"leaves out {int((lengths > written['prompts'].get('max_prompt_tokens', 0)).sum()):,} prompts",
        "eval.holdout": f"{num_held_out:,} of the prompts are never trained on: they are the exam",
        "eval.prompts": "the exam: never trained on",
        "eval.verifier": facts.reason,
    }
    if "eval" not in written:
        notes["weight"] = f"no `eval`: {facts.reason}"
    return notes


NOTES = {
    "name": "names the run directory, runs/NAME",
    "seed": "decides the order of prompts and every sampled token",
    "student": "who learns",
    "student.lora": "trains adapters, because training all weights needs more memory than there is",
    "experts": "who teaches: models by path; each scores what the student writes in its domain",
    "efforts": "from the least to the most; a tag in the prompt tells the student which is wanted: docs/efforts.md",
    "domains": "on which prompts",
    "keep": "general prompts, on which the student as it is now is the teacher: what it can, it keeps",
    "keep.weight": "share of each step's samples, beside the domains' weights",
    "rollout": "how the student writes its answers",
    "rollout.max_new_tokens": "longest answer; raise it if `opd check` or the report says that answers are cut",
    "rollout.max_model_len": "longest prompt and answer together",
    "rollout.dtype": "bfloat16 is faster where the hardware has it; float32 is exact",
    "rollout.max_num_seqs": "answers that are written at a time",
    "rollout.workers": "vLLM engines",
    "rollout.gpu_memory_utilization": "share of a GPU's memory for the engine",
    "rollout.sleep": "the engine gives its GPU memory back while the others compute",
    "teachers": "how experts score",
    "teachers.memory": "experts' weights in memory; those that do not fit are read again in each step",
    "teachers.workers": "processes that score; each holds one expert at a time at work",
    "objective": "what is minimised: docs/objectives.md",
    "objective.kind": f"{DEFAULT_KIND}, or forward_kl where the student can do nothing of what its experts do (--probe looks)",
    "trainer": "how the student is trained",
    "checkpoint": "what a crash leaves",
    "evaluate": "when exams are taken",
    "trainer.ranks": "processes that share the training",
    "trainer.steps": "longer trains more; `opd report` shows whether the loss still falls",
    "trainer.samples_per_step": "answers in a step, over all domains",
    "trainer.micro_batch_tokens": "tokens of one forward pass; less needs less memory",
    "trainer.gradient_checkpointing": "less memory, about a third more time",
    "trainer.lr": "a first guess from the student's size: halve it if the loss jumps, double it if it hardly falls",
    "trainer.warmup_steps": "steps in which the rate rises to lr",
    "trainer.lr_scheduler_type": "cosine, linear or constant",
    "trainer.min_lr_ratio": "where the rate ends, as a share of lr",
    "checkpoint.every": "steps that a crash can cost at most",
    "checkpoint.keep": "newest checkpoints on disk",
    "evaluate.every": "steps between exams; 0: only before and after",
    "evaluate.samples": "questions of an exam",
    "cluster": "GPUs for each worker of a role; docs/gpu.md",
}
"""Dotted path of a key -> what the key is for, whatever was found."""
