"""The pipeline of an expert by reinforcement: a merge's, without teachers, with what is known to work where a spec says nothing.

    ppo    one response a prompt; a critic from the base's backbone says what each state is worth
    grpo   eight responses a prompt, each compared with their mean and spread
    rloo   eight responses a prompt, each compared with the mean of the others

The critic's own defaults are with its section, `objective.reward.baseline`. With `kl_to_base` the base is the one teacher, and
the exact divergence from it has its own mean beside that of the reward: neither is part of the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experts.rl.spec import ReinforcedExpert, ReinforceSpec, merge_mappings

BASELINES: dict[str, dict[str, Any]] = {
    "ppo": {"kind": "critic"},
    "grpo": {"kind": "group", "divide_by_std": True},
    "rloo": {"kind": "leave_one_out"},
}
"""Method -> `objective.reward.baseline`."""
OF_THE_DOMAIN = {"prompts", "environment", "agent", "eval"}
"""Keys of an expert that are those of a pipeline's domain."""
GROUP = 8
"""Responses to a prompt, for the methods that compare them."""
SAMPLES = 128
"""Responses of a step."""
MONITORS: dict[str, Any] = {"entropy": {"warn": None}, "disagreement": {"warn": None}, "grad_norm": {"warn": 100}}
"""An expert is meant to leave its base; and a gradient of rewards is nearly zero in a step whose answers are all alike."""


def pipeline_data(spec: ReinforceSpec, name: str) -> dict[str, Any]:
    """Return the pipeline of one expert of the spec as plain data, not checked yet."""
    expert = spec.experts[name]
    sections = spec.sections_of(name)
    kl = spec.kl_to_base if expert.kl_to_base is None else expert.kl_to_base
    reward = merge_mappings({"baseline": BASELINES[spec.method]}, sections.pop("reward"))
    if kl:
        limit = sections["trainer"].get("max_grad_norm", 1.0)
        reward["baseline"] = _critic_clipped(reward["baseline"], limit)
        # All gradients are 1/kl times as large as those of a divergence that weighs kl. AdamW does not see that, a clipped norm does.
        sections["trainer"] = {**sections["trainer"], "max_grad_norm": _divide_by_kl(kl, limit)}
    guarded = spec.guard is not None and expert.guard is not False and expert.has_episodes
    return {
        "name": f"{name}-{spec.method}",
        "seed": spec.seed,
        "student": {
            "model": spec.base_dir,
            **spec.base.template_reading,
            **({} if spec.add_special_tokens else {"add_special_tokens": False}),
            **({"chat_template_kwargs": spec.chat_template_kwargs} if spec.chat_template_kwargs else {}),
        },
        "domains": {expert.domain: _build_domain(expert, guarded)},
        **({"guard": spec.guard} if guarded else {}),
        **(_beside_base(spec.base_dir, expert.domain, reward, kl) if kl else _reward_alone(reward)),
        **merge_mappings(_build_defaults(spec.method), sections),
    }


def _build_domain(expert: ReinforcedExpert, guarded: bool) -> dict[str, Any]:
    return expert.model_dump(include=OF_THE_DOMAIN | ({"guard"} if guarded else set()), exclude_none=True)


def _build_defaults(method: str) -> dict[str, Any]:
    return {
        "rollout": {"n": 1 if method == "ppo" else GROUP},
        "trainer": {"samples_per_step": SAMPLES},
        "monitors": MONITORS,
    }


def _reward_alone(reward: dict[str, Any]) -> dict[str, Any]:
    return {"experts": {}, "teachers": {"engine": "none"}, "objective": {"kind": "none", "reward": reward}}


def _beside_base(base: Path, domain: str, reward: dict[str, Any], kl: float) -> dict[str, Any]:
    """Return the base as the one teacher: a divergence that weighs 1 beside a reward that weighs 1/kl, from its first step to its last."""
    weighed = {**reward, "weight": _divide_by_kl(kl, reward.get("weight", 1.0))}
    schedule = reward.get("schedule")
    if isinstance(schedule, dict) and "to" in schedule:
        weighed["schedule"] = {**schedule, "to": _divide_by_kl(kl, schedule["to"])}
    return {
        "experts": {"base": {"model": base, "domain": domain}},
        "objective": {"kind": "reverse_kl", "reward": weighed},
    }


def _critic_clipped(baseline: Any, limit: Any) -> Any:
    """Add the spec's gradient limit to a critic's baseline: the critic's loss knows nothing of kl, so its gradients are clipped where the spec says."""
    named = {"kind": baseline} if isinstance(baseline, str) else baseline
    if not isinstance(named, dict) or named.get("kind") != "critic":
        return baseline
    return {"max_grad_norm": limit, **named}


def _divide_by_kl(kl: float, value: Any) -> Any:
    """Return a number of the spec over kl. YAML takes `1e-2` for text; what is no number above 0 the pipeline's check refuses as it is."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return value
    return number / kl if number > 0 else value
