"""The pool: routes every rollout to the teacher of its domain and spreads teachers over scoring workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from opd import cluster
from opd.config import PipelineConfig, TopKConfig
from opd.errors import RunError
from opd.interfaces import TargetSet
from opd.losses.chunked import LogitRule
from opd.stream.schema import write_stream
from opd.types import Rollout, Teacher

Group = tuple[Teacher, tuple[Rollout, ...]]


class TeacherWorker:
    """Scores groups of rows, one teacher after the other. Runs in a Ray actor; knows nothing of Ray."""

    def __init__(self, dtype: str, payload: str, top_k: int, vocab_size: int) -> None:
        from teachers.scorer import TransformersScorer

        self._dtype = dtype
        self._payload = payload
        self._scorer = TransformersScorer(dtype, payload, top_k, vocab_size)
        self._broken: dict[str, str] = {}

    def describe(self, teacher: Teacher) -> tuple[str, LogitRule]:
        """Content hash and logit rule of the teacher's head; loading it here also proves that its weights fit."""
        return self._scorer.head_key(teacher), self._scorer.head_rule(teacher)

    def head(self, teacher: Teacher) -> np.ndarray:
        """[V, D] the head, for the object store."""
        from opd.stream.heads import head_array

        return head_array(self._scorer.head(teacher))

    def score(self, groups: Sequence[Group]) -> np.ndarray:
        """One Arrow stream (bytes as uint8) with all rows of all groups that could be scored."""
        self._broken = {}
        batches = (rows for teacher, rollouts in groups for rows in self._scorer.score(teacher, rollouts, self._broken))
        return np.frombuffer(write_stream(batches, self._dtype, self._payload), dtype=np.uint8)

    def broken(self) -> dict[str, str]:
        """Sample id -> why the last `score` left it out."""
        return self._broken


class Pool:
    """Implements `opd.interfaces.TeacherPool`."""

    def __init__(self, config: PipelineConfig, teachers: Mapping[str, Teacher], vocab_size: int) -> None:
        """`teachers` maps a domain to the expert that scores it; `vocab_size` is the tokenizer's."""
        self._by_domain = dict(teachers)
        self._timeout_s = config.cluster.phase_timeout_s
        self._start_timeout_s = config.cluster.start_timeout_s
        self._max_quarantined = config.teachers.max_quarantined
        gpus = config.cluster.teacher_gpus
        env = cluster.worker_env(config.teachers.workers) | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})
        top_k = config.objective.k if isinstance(config.objective, TopKConfig) else 0
        options = (config.teachers.dtype, config.teachers.payload, top_k, vocab_size)
        self._workers = [
            cluster.spawn(TeacherWorker, *options, name=f"teacher worker {i}", env=env, gpus=gpus)
            for i in range(config.teachers.workers)
        ]
        self._head_keys: dict[str, str] = {}
        self._head_rules: dict[str, LogitRule] = {}
        self._heads: dict[str, Any] = {}
        self._sends_heads = config.teachers.payload == "hidden_states"

    def wait_ready(self) -> None:
        """Load every teacher once and publish each distinct head. Raises: RunError if a teacher does not load."""
        worker = self._workers[0]
        for teacher in self._by_domain.values():
            ((key, rule),) = cluster.call([worker], "describe", [[teacher]], timeout_s=self._start_timeout_s)
            self._head_keys[teacher.name] = key
            self._head_rules[key] = rule
            if self._sends_heads and key not in self._heads:
                (self._heads[key],) = cluster.submit([worker], "head", [[teacher]])

    def score(self, rollouts: Sequence[Rollout]) -> TargetSet:
        """Every rollout scored by the teacher of its domain.

        Raises: RunError for a domain without a teacher, or if more than `teachers.max_quarantined` of the responses
        could not be scored (one is always tolerated).
        """
        groups = self._route(rollouts)
        shares = _share_out(groups, len(self._workers))
        refs = cluster.submit(self._workers, "score", [[share] for share in shares])
        cluster.wait(self._workers, refs, "score", timeout_s=self._timeout_s)
        broken = {i: why for part in self._call("broken") for i, why in part.items()}
        if len(broken) > max(1, self._max_quarantined * len(rollouts)):
            sample_id, why = next(iter(broken.items()))
            raise RunError(
                f"{len(broken)} of {len(rollouts)} responses could not be scored, first {sample_id}: {why}; "
                f"teachers.max_quarantined is {self._max_quarantined}"
            )
        keys = sorted({self._head_keys[teacher.name] for teacher, _ in groups}) if self._sends_heads else []
        return TargetSet(
            streams=tuple(refs),
            heads={key: self._heads[key] for key in keys},
            head_rules={key: self._head_rules[key] for key in keys},
            quarantined=broken,
            rows=len(rollouts) - len(broken),
        )

    def _call(self, method: str) -> list[Any]:
        return cluster.call(self._workers, method, [[]] * len(self._workers), timeout_s=self._timeout_s)

    def _route(self, rollouts: Sequence[Rollout]) -> list[Group]:
        by_domain: dict[str, list[Rollout]] = defaultdict(list)
        for rollout in rollouts:
            by_domain[rollout.domain].append(rollout)
        unknown = sorted(set(by_domain) - set(self._by_domain))
        if unknown:
            raise RunError(f"no teacher for domain {unknown[0]!r}; teachers serve {', '.join(sorted(self._by_domain))}")
        return [(self._by_domain[domain], tuple(rows)) for domain, rows in sorted(by_domain.items())]


def _share_out(groups: Sequence[Group], workers: int) -> list[list[Group]]:
    """Each teacher's rows to one worker, most tokens first to the worker with the fewest."""
    shares: list[list[Group]] = [[] for _ in range(workers)]
    loads = [0] * workers
    sizes = [sum(len(r.prompt_ids) + len(r.response_ids) for r in rows) for _, rows in groups]
    for index in sorted(range(len(groups)), key=lambda i: (-sizes[i], i)):
        worker = loads.index(min(loads))
        shares[worker].append(groups[index])
        loads[worker] += sizes[index]
    return shares
