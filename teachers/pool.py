"""The pool: routes every rollout to the teachers of its domain and spreads teachers over scoring workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from opd import cluster
from opd.config import PipelineConfig, TopKConfig
from opd.errors import RunError
from opd.interfaces import TargetSet
from opd.losses.chunked import LogitRule
from opd.rollouts.vllm import ENGINE_ENV
from opd.types import Rollout, Teacher, WeightedTeacher
from teachers.scorers import ScorerOptions, Server
from teachers.weights import base_key, weight_key
from teachers.worker import Group, TeacherWorker

Routes = Mapping[str, Sequence[WeightedTeacher]]
"""Domain -> the teachers that score it."""


class Pool:
    """Implements `opd.interfaces.TeacherPool`."""

    def __init__(self, config: PipelineConfig, routes: Routes, vocab_size: int) -> None:
        """`vocab_size` is the tokenizer's."""
        self._routes = {domain: tuple(assigned) for domain, assigned in routes.items()}
        self._timeout_s = config.cluster.phase_timeout_s
        self._start_timeout_s = config.cluster.start_timeout_s
        self._max_quarantined = config.teachers.max_quarantined
        self._gpus = config.cluster.teacher_gpus
        self._env = cluster.worker_env(config.teachers.workers) | ({} if self._gpus else {"CUDA_VISIBLE_DEVICES": ""})
        if config.teachers.engine == "vllm":
            self._env |= ENGINE_ENV | {"VLLM_CPU_KVCACHE_SPACE": str(config.teachers.kv_cache_gib)}
        self._engine = config.teachers.engine
        self._options = scorer_options(config, vocab_size)
        self._workers = [self._spawn(index) for index in range(config.teachers.workers)]
        self._stopped = False
        self._head_keys: dict[str, str] = {}
        self._head_rules: dict[str, LogitRule] = {}
        self._head_owners: dict[str, Teacher] = {}
        """Content hash of an output head -> a teacher that has it."""
        self._sends_heads = config.teachers.payload == "hidden_states"

    def wait_ready(self) -> None:
        """Try every teacher once. Raises: RunError if one does not load or answer."""
        worker = self._workers[0]
        for teacher in {weight_key(a.teacher): a.teacher for part in self._routes.values() for a in part}.values():
            ((key, rule),) = cluster.call([worker], "describe", [[teacher]], timeout_s=self._start_timeout_s)
            self._head_keys[weight_key(teacher)] = key
            self._head_rules[key] = rule
            self._head_owners.setdefault(key, teacher)

    def score(self, rollouts: Sequence[Rollout]) -> TargetSet:
        """Every rollout scored by the teachers of its domain.

        Raises: RunError for a domain without a teacher, or if more than `teachers.max_quarantined` of the responses
        could not be scored (one is always tolerated).
        """
        groups = list(self._route(rollouts))
        shares = share_out(groups, len(self._workers))
        refs, broken, restarted = self._score(shares)
        refuse_many_broken(broken, len(rollouts), self._max_quarantined)
        keys = sorted({self._head_keys[weight_key(teacher)] for teacher, _, _ in groups}) if self._sends_heads else []
        return TargetSet(
            streams=tuple(refs),
            heads={key: self.head_handle(key) for key in keys},
            head_rules={key: self._head_rules[key] for key in keys},
            quarantined=broken,
            restarted=restarted,
            rows=rows_wanted(rollouts, self._routes, broken),
        )

    def heads(self) -> tuple[Mapping[str, Any], Mapping[str, LogitRule]]:
        """As `opd.interfaces.TeacherPool.heads`, once the pool is ready."""
        return {key: self.head_handle(key) for key in self._head_owners}, self._head_rules

    def head_of(self, teacher: Teacher) -> tuple[str, LogitRule]:
        """Content hash and logit rule of a teacher's head, once the pool is ready."""
        key = self._head_keys[weight_key(teacher)]
        return key, self._head_rules[key]

    def stop(self) -> None:
        """End the workers; a `score` in another thread raises RunError."""
        self._stopped = True
        cluster.kill(self._workers)

    def head_handle(self, key: str) -> Any:
        """Handle to a head, which is read from its teacher's weights when it is fetched. Raises: KeyError."""
        return cluster.Remote(self._workers[0], "head", (self._head_owners[key],), self._timeout_s)

    def _score(self, shares: Sequence[Sequence[Group]]) -> tuple[list[Any], dict[str, str], tuple[str, ...]]:
        """Streams, what could not be scored, and the workers that had to be started again, each at most once.

        Raises: RunError if a worker dies twice or misses the deadline.
        """
        refs = cluster.submit(self._workers, "score", [[share] for share in shares])
        restarted: list[str] = []
        while True:
            try:
                cluster.wait(self._workers, refs, "score", timeout_s=self._timeout_s)
                parts = cluster.call(self._workers, "broken", [[]] * len(self._workers), timeout_s=self._timeout_s)
                return refs, {i: why for part in parts for i, why in part.items()}, tuple(restarted)
            except cluster.WorkerDied as error:
                index = self._workers.index(error.actor)
                if self._stopped or _name(index) in restarted:
                    raise
                restarted.append(_name(index))
                self._workers[index] = self._spawn(index)
                if self._stopped:  # just now, and perhaps before this worker was in the list
                    cluster.kill([self._workers[index]])
                    raise
                # All of its rows: a stream is whole or it is nothing, so none of them is in the step twice.
                (refs[index],) = cluster.submit([self._workers[index]], "score", [[shares[index]]])

    def _spawn(self, index: int) -> Any:
        return cluster.spawn(
            TeacherWorker, self._engine, self._options, name=_name(index), env=self._env, gpus=self._gpus
        )

    def _route(self, rollouts: Sequence[Rollout]) -> Iterator[Group]:
        """One group for each domain and each of its teachers."""
        refuse_unknown_domains(rollouts, self._routes)
        by_domain: dict[str, list[Rollout]] = defaultdict(list)
        for rollout in rollouts:
            by_domain[rollout.domain].append(rollout)
        for domain, rows in sorted(by_domain.items()):
            for assigned in self._routes[domain]:
                yield assigned.teacher, assigned.weight, tuple(rows)


def _name(index: int) -> str:
    return f"teacher worker {index}"


def refuse_unknown_domains(rollouts: Sequence[Rollout], routes: Routes) -> None:
    """Raises: RunError for a domain without a teacher."""
    unknown = sorted({r.domain for r in rollouts} - set(routes))
    if unknown:
        raise RunError(f"no teacher for domain {unknown[0]!r}; teachers serve {', '.join(sorted(routes))}")


def rows_wanted(rollouts: Sequence[Rollout], routes: Routes, broken: Mapping[str, str]) -> int:
    """As `TargetSet.rows`: one for each teacher of each sample that is not in `broken`."""
    return sum(len(routes[r.domain]) for r in rollouts if r.sample_id not in broken)


def refuse_many_broken(broken: Mapping[str, str], num_rollouts: int, max_share: float) -> None:
    """Raises: RunError if more than `max_share` of the responses could not be scored; one always may."""
    if len(broken) > max(1, max_share * num_rollouts):
        sample_id, why = next(iter(broken.items()))
        raise RunError(
            f"{len(broken)} of {num_rollouts} responses could not be scored, first {sample_id}: {why}; "
            f"teachers.max_quarantined is {max_share}"
        )


def scorer_options(config: PipelineConfig, vocab_size: int) -> ScorerOptions:
    """What a pipeline says about scoring."""
    return ScorerOptions(
        dtype=config.teachers.dtype,
        payload=config.teachers.payload,
        top_k=config.objective.k if isinstance(config.objective, TopKConfig) else 0,
        vocab_size=vocab_size,
        memory_bytes=config.teachers.memory,
        max_model_len=config.rollout.max_model_len,
        gpu_memory_utilization=config.teachers.gpu_memory_utilization,
        servers={
            name: Server(base_url=server.base_url, model=server.model)
            for name, server in config.teachers.servers.items()
        },
        api_key_env=config.teachers.api_key_env,
        server_timeout_s=config.teachers.server_timeout_s,
    )


def share_out(groups: Sequence[Group], workers: int) -> list[list[Group]]:
    """All groups of a teacher to one worker, most tokens first to the worker with the fewest.

    In a share, teachers of one base lie side by side, so that the base is put in place once.
    """
    by_teacher: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_teacher[weight_key(group[0])].append(group)
    sizes = {
        key: sum(len(r.prompt_ids) + len(r.response_ids) for _, _, rows in mine for r in rows)
        for key, mine in by_teacher.items()
    }
    shares: list[list[Group]] = [[] for _ in range(workers)]
    loads = [0] * workers
    for key in sorted(by_teacher, key=lambda k: (-sizes[k], k)):
        worker = loads.index(min(loads))
        shares[worker] += by_teacher[key]
        loads[worker] += sizes[key]
    return [sorted(share, key=lambda group: base_key(group[0])) for share in shares]
