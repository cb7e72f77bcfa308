"""Objectives: one small file each, with its section of the pipeline and what computes it, behind one dictionary."""

from __future__ import annotations

OBJECTIVES = {
    "reverse_kl": "opd.losses.reverse_kl:ReverseKLConfig",
    "forward_kl": "opd.losses.forward_kl:ForwardKLConfig",
    "adaptive_kl": "opd.losses.adaptive_kl:AdaptiveKLConfig",
    "jsd": "opd.losses.jsd:JSDConfig",
    "skew": "opd.losses.skew:SkewConfig",
    "sampled": "opd.losses.sampled:SampledConfig",
    "top_k": "opd.losses.top_k:TopKConfig",
    "none": "opd.losses.none:NoDivergenceConfig",
}
"""`objective.kind` -> the class of its section. Named, not imported: `opd.config` reads the names."""
