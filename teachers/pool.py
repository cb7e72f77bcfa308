"""The pool: routes every rollout to the teacher of its domain and spreads teachers over scoring workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from opd import cluster
from opd.config import PipelineConfig
from opd.errors import RunError
from opd.interfaces import TargetSet
from opd.stream.schema import write_stream
from opd.types import Rollout, Teacher

Group = tuple[Teacher, tuple[Rollout, ...]]


class TeacherWorker:
    """Scores groups of rows, one teacher after the other. Runs in a Ray actor; knows nothing of Ray."""

    def __init__(self, dtype: str) -> None:
        from teachers.scorer import TransformersScorer

        self._dtype = dtype
        self._scorer = TransformersScorer(dtype)

    def head_key(self, teacher: Teacher) -> str:
        """Content hash of the teacher's head; loading it here also proves that its weights fit its config."""
        return self._scorer.head_key(teacher)

    def head(self, teacher: Teacher) -> np.ndarray:
        """[V, D] the head, for the object store."""
        from opd.stream.heads import head_array

        return head_array(self._scorer.head(teacher))

    def score(self, groups: Sequence[Group]) -> np.ndarray:
        """One Arrow stream (bytes as uint8) with all rows of all groups."""
        batches = (rows for teacher, rollouts in groups for rows in self._scorer.score(teacher, rollouts))
        return np.frombuffer(write_stream(batches, self._dtype), dtype=np.uint8)


class Pool:
    """Implements `opd.interfaces.TeacherPool`."""

    def __init__(self, config: PipelineConfig, teachers: Mapping[str, Teacher]) -> None:
        """`teachers` maps a domain to the expert that scores it."""
        self._by_domain = dict(teachers)
        self._timeout_s = config.cluster.phase_timeout_s
        self._start_timeout_s = config.cluster.start_timeout_s
        gpus = config.cluster.teacher_gpus
        env = cluster.worker_env(config.teachers.workers) | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})
        self._workers = [
            cluster.spawn(TeacherWorker, config.teachers.dtype, name=f"teacher worker {i}", env=env, gpus=gpus)
            for i in range(config.teachers.workers)
        ]
        self._head_keys: dict[str, str] = {}
        self._heads: dict[str, Any] = {}

    def wait_ready(self) -> None:
        """Load every teacher once and publish each distinct head. Raises: RunError if a teacher does not load."""
        worker = self._workers[0]
        for teacher in self._by_domain.values():
            (key,) = cluster.call([worker], "head_key", [[teacher]], timeout_s=self._start_timeout_s)
            self._head_keys[teacher.name] = key
            if key not in self._heads:
                (self._heads[key],) = cluster.submit([worker], "head", [[teacher]])

    def score(self, rollouts: Sequence[Rollout]) -> TargetSet:
        """Every rollout scored by the teacher of its domain. Raises: RunError for a domain without a teacher."""
        groups = self._route(rollouts)
        shares = _share_out(groups, len(self._workers))
        refs = cluster.submit(self._workers, "score", [[share] for share in shares])
        cluster.wait(self._workers, refs, "score", timeout_s=self._timeout_s)
        keys = {self._head_keys[teacher.name] for teacher, _ in groups}
        return TargetSet(streams=tuple(refs), heads={key: self._heads[key] for key in sorted(keys)}, rows=len(rollouts))

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
