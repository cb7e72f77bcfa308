"""The pipeline of an expert by reinforcement. It is a merge without teachers; where the spec says nothing, it has defaults that
are known to work.

    ppo    one response per prompt; a critic, made from the base, estimates what each state is worth
    grpo   eight responses per prompt, each compared with their mean and spread
    rloo   eight responses per prompt, each compared with the mean of the others

The critic's defaults are those of its section, `objective.reward.baseline`. With `kl_to_base` the base is the only teacher,
and the exact divergence from it is a loss of its own beside the reward; it is not subtracted from the reward.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experts.rl.spec import ReinforceSpec, merge_mappings

BASELINES: dict[str, dict[str, Any]] = {
    "ppo": {"kind": "critic"},
    "grpo": {"kind": "group", "divide_by_std": True},
    "rloo": {"kind": "leave_one_out"},
}
"""Method -> `objective.reward.baseline`."""
DOMAIN_KEYS = {"prompts", "environment", "agent", "eval"}
"""Keys of an expert in the spec that a pipeline's domain has too."""
GROUP = 8
"""Responses to a prompt, for the methods that compare them."""
SAMPLES = 128
"""Responses of a step."""
MONITORS: dict[str, Any] = {"entropy": {"warn": None}, "disagreement": {"warn": None}, "grad_norm": {"warn": 100}}
"""Limits of monitors that differ from the pipeline's defaults. An expert is meant to move away from its base, so entropy and
disagreement mean nothing. And the gradient is nearly zero in steps whose answers are all alike, so its norm varies a lot."""


def pipeline_data(spec: ReinforceSpec, name: str) -> dict[str, Any]:
    """Return the pipeline of one expert of the spec as plain data, not checked yet."""
    expert = spec.experts[name]
    sections = spec.merge_sections(name)
    kl = spec.kl_to_base if expert.kl_to_base is None else expert.kl_to_base
    reward = merge_mappings({"baseline": BASELINES[spec.method]}, sections.pop("reward"))
    if kl:
        limit = sections["trainer"].get("max_grad_norm", 1.0)
        reward["baseline"] = _critic_clipped(reward["baseline"], limit)
        # `_beside_base` gives the divergence the weight 1 and the reward 1/kl, instead of kl and 1. So all gradients are 1/kl
        # times as large. AdamW does not notice the factor, but the limit of the norm has to be scaled too.
        sections["trainer"] = {**sections["trainer"], "max_grad_norm": _divide_by_kl(kl, limit)}
    guarded = spec.guard is not None and expert.guard is not False and expert.has_episodes
    domain_keys = DOMAIN_KEYS | ({"guard"} if guarded else set())
    defaults = {
        "rollout": {"n": 1 if spec.method == "ppo" else GROUP},
        "trainer": {"samples_per_step": SAMPLES},
        "monitors": MONITORS,
    }
    alone = {"experts": {}, "teachers": {"engine": "none"}, "objective": {"kind": "none", "reward": reward}}
    return {
        "name": f"{name}-{spec.method}",
        "seed": spec.seed,
        "student": {
            "model": spec.base_dir,
            **spec.base.template_reading,
            **({} if spec.add_special_tokens else {"add_special_tokens": False}),
            **({"chat_template_kwargs": spec.chat_template_kwargs} if spec.chat_template_kwargs else {}),
        },
        "domains": {expert.domain: expert.model_dump(include=domain_keys, exclude_none=True)},
        **({"guard": spec.guard} if guarded else {}),
        **(_beside_base(spec.base_dir, expert.domain, reward, kl) if kl else alone),
        **merge_mappings(defaults, sections),
    }


def _beside_base(base: Path, domain: str, reward: dict[str, Any], kl: float) -> dict[str, Any]:
    """Return sections with the base as the only teacher: the divergence has the weight 1, the reward its own divided by kl."""
    weighed = {**reward, "weight": _divide_by_kl(kl, reward.get("weight", 1.0))}
    schedule = reward.get("schedule")
    if isinstance(schedule, dict) and "to" in schedule:
        weighed["schedule"] = {**schedule, "to": _divide_by_kl(kl, schedule["to"])}
    return {
        "experts": {"base": {"model": base, "domain": domain}},
        "objective": {"kind": "reverse_kl", "reward": weighed},
    }


def _critic_clipped(baseline: Any, limit: Any) -> Any:
    """Add the spec's gradient limit to a critic's baseline. The critic's loss does not depend on kl, so its limit is not scaled."""
    named = {"kind": baseline} if isinstance(baseline, str) else baseline
    if not isinstance(named, dict) or named.get("kind") != "critic":
        return baseline
    return {"max_grad_norm": limit, **named}


def _divide_by_kl(kl: float, value: Any) -> Any:
    """Return a number of the spec divided by kl. It may be text, because YAML reads `1e-2` as text.

    Any value that is no number above 0 is returned unchanged, so that the pipeline's checks name it in their error.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        return value
    return number / kl if number > 0 else value
