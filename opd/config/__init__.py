"""A pipeline file as typed, frozen objects. It is read once, at the start of a command; an unknown key is refused, with the
nearest known one as a hint.

This package needs only pydantic and PyYAML, so `opd --help` and `opd pipelines` never import torch.
Paths in a pipeline are relative to the directory that `opd` was started in.
"""

from opd.config.expert_engines import trainer_has_start
from opd.config.pipeline import (
    PipelineConfig,
    as_begun,
    domain_extrapolation,
    has_short_first_round,
    is_overlapped,
    list_distinct_rounds,
    load_pipeline,
    load_run_pipeline,
    max_staleness,
    scored_model_len,
    split_rounds,
    sync_tolerance,
)

__all__ = [
    "PipelineConfig",
    "as_begun",
    "domain_extrapolation",
    "has_short_first_round",
    "is_overlapped",
    "list_distinct_rounds",
    "load_pipeline",
    "load_run_pipeline",
    "max_staleness",
    "scored_model_len",
    "split_rounds",
    "sync_tolerance",
    "trainer_has_start",
]
