"""Builds a guard from the section `guard` of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Lock

from opd.config.guard import EndpointJudge as EndpointConfig
from opd.config.guard import GuardConfig, JudgeConfig
from opd.guard.guard import Guard
from opd.guard.judge import CachedJudge, HttpJudge, LogProbJudge, PromptScorer
from opd.guard.records import Judge
from opd.guard.rules import RuleFile, RuleSet, read_rules
from opd.guard.verdict_file import StoredJudge
from opd.settings.user_objects import import_user_object


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSpec:
    """All that a worker needs to build the guard. The rules are in it, so that the worker reads no file of rules."""

    config: GuardConfig
    rules: tuple[RuleFile, ...]
    judged: Path | None = None
    """File of the run that keeps the judge's opinions; None: they are kept in memory."""
    digest: str
    """A hash of all else in the spec: guards with the same digest are the same."""


def guard_spec(config: GuardConfig, judged: Path | None = None) -> GuardSpec:
    """Return the spec of a section, its rule files already read. Raises: ConfigError for rules that cannot be read."""
    rules = tuple(read_rules(name) for name in config.rules)
    parts = [config.model_dump_json(), *(rule_file.model_dump_json() for rule_file in rules), str(judged)]
    return GuardSpec(config=config, rules=rules, judged=judged, digest=sha256("\n".join(parts).encode()).hexdigest())


_SHARED: dict[str, Guard] = {}
"""Digest of a spec -> the guard of this process for it."""
_LOCK = Lock()


def shared_guard(spec: GuardSpec) -> Guard:
    """Return the guard of this process for a spec; the first call builds it. All episodes share it, and so the cached opinions of its
    judge. The first call also loads the model of a judge in this process, so make it from the main thread (see `ModelScorer`).

    Raises: as `build_guard`.
    """
    with _LOCK:
        if spec.digest not in _SHARED:
            _SHARED[spec.digest] = _build_guard_of_rules(spec.config, spec.rules, spec.judged)
        return _SHARED[spec.digest]


def build_guard(config: GuardConfig) -> Guard:
    """Return the guard that a section describes. Raises: ConfigError for rules or a scorer that cannot be used."""
    return _build_guard_of_rules(config, [read_rules(name) for name in config.rules], None)


def _build_guard_of_rules(config: GuardConfig, rules: Sequence[RuleFile], judged: Path | None) -> Guard:
    """Return the guard of a section whose rules are already read; `judged` as in `GuardSpec`. Raises: as `build_guard`."""
    judge: Judge | None = None
    if config.judge is not None:
        inner_judge = _build_judge(config.judge, config.deadline_s)
        judge = (
            StoredJudge(inner_judge, judged, _judge_identity(config.judge))
            if judged
            else CachedJudge(inner_judge, config.cache)
        )
    return Guard(RuleSet(rules, config.protected), judge, config)


def _build_judge(config: JudgeConfig, deadline_s: float) -> Judge:
    """Return the judge of a section, without a cache: a server, a model in this process, or the user's scorer."""
    if isinstance(config, EndpointConfig):
        return HttpJudge(
            config.base_url,
            config.model,
            api_key_env=config.api_key_env,
            threshold=config.threshold,
            deadline_s=deadline_s,
        )
    if config.model is not None:
        from opd.guard.local_judge import ModelScorer  # it needs torch, which a check of rules does not

        return LogProbJudge(ModelScorer(config.model), config.threshold, deadline_s)
    assert config.scorer is not None
    return LogProbJudge(users_scorer(config.scorer), config.threshold, deadline_s)


def users_scorer(reference: str) -> PromptScorer:
    """Import the user's scorer. Raises: ConfigError if it cannot be imported."""
    scorer: PromptScorer = import_user_object(reference, "guard.judge.scorer", "a function of prompt and verdicts")
    return scorer


def _judge_identity(config: JudgeConfig) -> str:
    """Return the name of a judge in the file of its opinions. The same model at another address is the same judge."""
    model = config.model if isinstance(config, EndpointConfig) else config.model or config.scorer
    return f"{config.kind}/{model}/{config.threshold}"
