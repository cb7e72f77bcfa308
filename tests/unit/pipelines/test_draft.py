"""The shape of a draft follows from its student's config."""

from __future__ import annotations

import json
from pathlib import Path

from opd.config import PipelineConfig
from opd.config.draft import DraftConfig
from opd.draft.export import write_blank_draft
from opd.draft.head import build_draft
from opd.rollouts.worker import read_model_shape
from pipelines.draft import draft_shape, find_served_draft, read_served_shape
from pipelines.sizing.draft import count_draft_parameters
from pipelines.specs import rank_options, rollout_spec
from tests.unit.opd.config.test_keep import DATA


def test_a_draft_reads_three_depths_and_guesses_all_tokens(tiny_model_dir: Path) -> None:
    shape = draft_shape(tiny_model_dir, DraftConfig(), 70)
    assert shape.layers == (0, 1) and shape.vocab == tuple(range(70)) and shape.model["hidden_size"] == 64
    assert shape.fits(read_model_shape(tiny_model_dir))


def test_a_smaller_vocabulary_has_the_lowest_ids_and_the_ends(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_model_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": [2, 40]}))
    shape = draft_shape(tmp_path, DraftConfig(vocab_size=6), 70)
    assert shape.vocab == (0, 1, 2, 3, 4, 40)


def test_files_of_a_draft_tell_its_shape(tiny_model_dir: Path, tmp_path: Path) -> None:
    for options in (DraftConfig(), DraftConfig(vocab_size=20, layers=(1,))):
        shape = draft_shape(tiny_model_dir, options, 70)
        (tmp_path / "draft").mkdir(exist_ok=True)
        write_blank_draft(shape, tmp_path / "draft")
        draft = find_served_draft(tmp_path)
        assert draft is not None and read_served_shape(tiny_model_dir, draft, 70) == shape
        assert find_served_draft(tmp_path.parent) is None


def test_the_memory_sum_counts_the_weights_that_a_draft_has(tiny_model_dir: Path) -> None:
    for options in (DraftConfig(), DraftConfig(vocab_size=20, layers=(1,))):
        shape = draft_shape(tiny_model_dir, options, 70)
        counted = sum(param.numel() for param in build_draft(shape, 0).parameters())
        assert count_draft_parameters(shape) == counted


def test_an_engine_guesses_with_the_drafts_shape_only_if_it_is_asked_to(tiny_model_dir: Path) -> None:
    for guesses in (0, 2):
        config = PipelineConfig.model_validate(
            {**DATA, "keep": None, "student": {"model": str(tiny_model_dir)}, "draft": {}}
            | {"rollout": {"num_speculative_tokens": guesses}}
        )
        engine = rollout_spec(config, tiny_model_dir, 70, (2,)).engine
        assert engine.num_speculative_tokens == guesses
        assert engine.draft == (draft_shape(tiny_model_dir, DraftConfig(), 70) if guesses else None)
        assert [spec.name for spec in rank_options(config, 70).companions] == ["draft"]
