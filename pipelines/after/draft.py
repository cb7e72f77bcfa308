"""Train a draft for a model that is finished, on texts that the model writes itself."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from opd.config import PipelineConfig
from opd.config.draft import DraftConfig
from opd.errors import ModelError
from opd.files import fill_output, refuse_existing_output
from opd.prompts import MixedPrompts, samples_by_weight
from opd.records.types import Rollout
from opd.text import Tell
from pipelines.after.models import LocalModel
from pipelines.baselines.imitation import rollout_engine
from pipelines.draft import draft_spec, find_drafted_families
from pipelines.inputs.read import Inputs, read_inputs

HELD_OUT = 0.1
"""Share of the texts from which the draft does not learn, and on which it is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTraining:
    """Size of a draft's training."""

    samples: int
    """Texts that the model writes."""
    steps: int
    """Optimiser steps."""
    batch: int
    """Texts of a step."""


def train_model_draft(
    model: LocalModel, config: PipelineConfig, training: DraftTraining, output: Path, tell: Tell
) -> Mapping[str, float]:
    """Train a draft with the settings of the pipeline's section `draft`, write it to `output`, and return its numbers on held-out texts.

    Raises: OpdError, before any compute for what a merge refuses; RunError if an engine fails.
    """
    refuse_existing_output(output)
    draft = config.draft or DraftConfig()
    if model.info.model_type not in (families := find_drafted_families(draft.kind)):
        raise ModelError.at(
            str(model.path),
            found=f"a model of the family {model.info.model_type}, draft.kind {draft.kind}",
            wanted=f"one of {', '.join(families)}, whose inner states a draft of this kind reads",
            fix="serve it without a draft",
        )
    config = config.model_copy(
        update={
            "student": config.student.model_copy(update={"model": model.path, "lora": None}),
            "draft": draft,
        }
    )
    inputs = read_inputs(config)
    tell(f"{model.name}: writing {training.samples} texts")
    rollouts = write_texts(config, inputs, training.samples)
    return _learn_from_texts(config, inputs, rollouts, training, output, tell)


def write_texts(config: PipelineConfig, inputs: Inputs, count: int) -> list[Rollout]:
    """Have the pipeline's student write at least `count` texts or episodes to its prompts, of all domains in turn. Raises: RunError."""
    total = max(config.trainer.samples_per_step // config.rollout.n, len(config.domains))
    weights = samples_by_weight(total, config.domain_weights)
    prompts = MixedPrompts(inputs.prompts, weights, config.seed, config.rollout.n, config.prompt_orders)
    rollouts: list[Rollout] = []
    with rollout_engine(config, inputs) as engine:
        step = 0
        while len(rollouts) < count:
            step += 1
            rollouts += engine.generate(prompts.take(step), step=step, policy_version=0).rollouts
    return [rollout for rollout in rollouts if rollout.num_trained > 1]


def split_texts(rollouts: Sequence[Rollout], share: float, seed: int) -> tuple[list[Rollout], list[Rollout]]:
    """Return the texts to learn from, in a random order, and those that are held out: all to a share of the prompts, one at least."""
    rng = random.Random(seed)
    prompts = sorted({rollout.prompt_ids for rollout in rollouts})
    kept = set(rng.sample(prompts, max(1, round(share * len(prompts)))))
    learned = [rollout for rollout in rollouts if rollout.prompt_ids not in kept]
    return rng.sample(learned, len(learned)), [rollout for rollout in rollouts if rollout.prompt_ids in kept]


def _learn_from_texts(
    config: PipelineConfig, inputs: Inputs, rollouts: list[Rollout], training: DraftTraining, output: Path, tell: Tell
) -> Mapping[str, float]:
    import torch

    from opd.draft.alone import FrozenModel, measure_draft, train_draft
    from opd.draft.export import write_draft
    from opd.models.weights import load_causal_lm

    assert config.draft is not None
    spec = draft_spec(config, config.draft, inputs.student.vocab_size)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = FrozenModel(load_causal_lm(config.student.model, torch.float32).to(device), spec.read_layers)
    learned, held_out = split_texts(rollouts, HELD_OUT, config.seed)
    batches, tests = (model.read_batches(texts, training.batch) for texts in (learned, held_out))

    def report(step: int, numbers: Mapping[str, float]) -> None:
        if step % 50 == 0 or step == training.steps:
            tell(
                f"step {step}/{training.steps}  loss {numbers['loss']:.3f}  accepted length {numbers['accepted_length']:.2f}"
            )

    draft = train_draft(model, spec, batches, training.steps, report)
    numbers = measure_draft(model, draft, tests)
    with fill_output(output) as temporary:
        write_draft(spec.shape, draft.serving_weights(), temporary)
        (temporary / "held_out.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    return numbers
