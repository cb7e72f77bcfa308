"""The draft that a pipeline's student gets: its shape follows from the student's."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.config import PipelineConfig
from opd.config.draft import DraftConfig, DraftKind
from opd.draft.shape import ARCHITECTURES, DraftShape, IndexerShape
from opd.records.step import DRAFT
from opd.rollouts.served_families import DRAFTED, SPARSE

if TYPE_CHECKING:  # it imports torch and transformers, which a memory sum does without
    from opd.draft.companion import DraftSpec


def draft_shape(model: Path, draft: DraftConfig, vocab_size: int) -> DraftShape:
    """Return the shape of a model's draft. `vocab_size` is the tokenizer's. Raises: ModelError for a model without a config."""
    from opd.models.weights import load_config

    student = load_config(model).get_text_config(decoder=True)
    heads = student.num_attention_heads
    last = student.num_hidden_layers - 1
    rope = getattr(student, "rope_parameters", None) or {}
    return DraftShape(
        model={
            "hidden_size": student.hidden_size,
            "intermediate_size": student.intermediate_size,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(student, "num_key_value_heads", None) or heads,
            "head_dim": getattr(student, "head_dim", None) or student.hidden_size // heads,
            "rms_norm_eps": getattr(student, "rms_norm_eps", 1e-6),
            "max_position_embeddings": student.max_position_embeddings,
            "vocab_size": student.vocab_size,
            "rope_parameters": {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10_000.0)},
        },
        kind=draft.kind,
        layers=draft.layers or tuple(sorted({0, last // 2, last})),
        vocab=_choose_tokens(draft.vocab_size, vocab_size, student),
        indexer=IndexerShape(topk=student.index_topk, heads=student.index_n_heads, head_dim=student.index_head_dim)
        if student.model_type in SPARSE
        else None,
    )


def find_served_draft(model: Path) -> Path | None:
    """Return the directory of the draft that learned beside a model; None if there is none that vLLM can serve."""
    config = model / DRAFT / "config.json"
    served = config.is_file() and ARCHITECTURES["eagle3"] in config.read_text(encoding="utf-8")
    return config.parent if served else None


def read_served_shape(model: Path, draft: Path, vocab_size: int) -> DraftShape:
    """Return the shape of the draft in the directory `draft`, which `opd.draft.export` wrote for a model. `vocab_size` is the tokenizer's."""
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    layers = tuple(number - 1 for number in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    return draft_shape(model, DraftConfig(vocab_size=config["draft_vocab_size"], layers=layers), vocab_size)


def turn_off_guesses(config: PipelineConfig) -> PipelineConfig:
    """Return the pipeline with engines that guess nothing: outside of a merge no push brings them a draft."""
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"num_speculative_tokens": 0})})


def find_drafted_families(kind: DraftKind) -> tuple[str, ...]:
    """Return the families whose models can have a draft of this kind."""
    return DRAFTED if kind == "eagle3" else (*DRAFTED, *SPARSE)


def draft_spec(config: PipelineConfig, draft: DraftConfig, vocab_size: int) -> DraftSpec:
    """Return the spec with which trainer ranks start the draft. Raises: as `draft_shape`."""
    from opd.draft.companion import DraftSpec

    return DraftSpec(
        shape=draft_shape(config.student.model, draft, vocab_size),
        steps=draft.num_speculative_tokens,
        loss=draft.loss,
        decay=draft.decay,
        lr=draft.lr,
        warmup_steps=draft.warmup_steps,
        tokens=draft.tokens,
        temperature=config.rollout.temperature,
        seed=config.seed,
        domains=tuple(config.domains),
    )


def _choose_tokens(size: int | None, vocab_size: int, student: Any) -> tuple[int, ...]:
    """Return the ids that the draft can guess, in rising order: the lowest, and those that end a turn."""
    ends = student.eos_token_id if isinstance(student.eos_token_id, list) else [student.eos_token_id]
    last = {end for end in ends if end is not None and end < vocab_size}
    lowest = (id for id in range(vocab_size) if id not in last)
    return tuple(sorted([*last, *islice(lowest, min(size or vocab_size, vocab_size) - len(last))]))
