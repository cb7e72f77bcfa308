"""Rollouts by vLLM: engines in Ray actors, requests dealt out among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TypeVar

from opd import cluster, leftovers
from opd.buckets import WeightStream
from opd.cluster import Pending, Worker
from opd.interfaces import Decoder
from opd.rollouts.endpoint.options import AgentOptions
from opd.rollouts.episodes.drift import DriftOptions
from opd.rollouts.episodes.spec import (
    LIMITS,
    EpisodeOptions,
    EpisodeRequest,
    EpisodeResult,
    EpisodeStats,
    refuse_many_broken,
)
from opd.rollouts.episodes.trace import Sample
from opd.rollouts.partial import Cuts
from opd.rollouts.pour import pour
from opd.rollouts.processes import engine_env
from opd.rollouts.responses import (
    WHOLE,
    begin,
    carried_on,
    group_id,
    refuse_unknown,
    request_of,
    sample_ids,
    seed_of,
)
from opd.rollouts.worker import EngineOptions, Generated, GenerateRequest, VLLMWorker
from opd.types import Completion, Prompt, Quarantined, Rollout, RolloutBatch

R = TypeVar("R")
Weights = Callable[[], AbstractContextManager[Path]]
"""Gives the weights that the engines hold as a Hugging Face directory, which exists within the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """The settings that rollout engines are started with."""

    engine: EngineOptions
    """The model and the settings of every worker's engine."""
    stop_token_ids: tuple[int, ...]
    """Token ids that end a response."""
    untrained: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Domain -> token ids that carry no loss where the student writes them."""
    episodes: Mapping[str, EpisodeOptions | AgentOptions] = field(default_factory=dict)
    """Domain -> how its episodes run; the student answers once in the other domains."""
    drift: Mapping[str, DriftOptions] = field(default_factory=dict)
    """Domain -> what is done in training about errors that add up over turns; nothing in the other domains."""
    workers: int = 1
    """Engines; requests are dealt out among them."""
    gpus: float = 0
    """GPUs of each process of an engine; 0: the CPU."""
    kv_cache_gib: int = 1
    """Key-value cache of each process of an engine on the CPU, whole GiB."""
    roles: int = 1
    """Roles that compute at the same time on these cores, this one among them."""
    seed: int = 0
    """Together with the sample id it decides what is sampled."""
    n: int = 1
    """Responses to each prompt, side by side: one engine writes all of them, so that it reads the prompt once."""
    temperature: float = 1.0
    """Temperature at which responses are sampled."""
    max_new_tokens: int
    """Longest response."""
    max_answer_tokens: int
    """Longest answer in an exam."""
    start_timeout_s: float
    """Deadline for an engine to start and load its model."""
    timeout_s: float
    """Deadline of every other call."""


class VLLMRolloutEngine:
    """Implements `opd.interfaces.RolloutEngine`."""

    def __init__(self, spec: RolloutSpec, tokenizer: Decoder) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        model_dir = spec.engine.model_dir
        options = replace(spec.engine, model_dir=model_dir.absolute())  # a worker starts in another directory
        size = options.tensor_parallel_size
        env = (
            cluster.worker_env(spec.workers * size, spec.roles)
            | engine_env(size)
            | {"VLLM_CPU_KVCACHE_SPACE": str(spec.kv_cache_gib)}
        )
        if not spec.gpus:
            env |= cluster.KEEPS_SOME_MEMORY | {"CUDA_VISIBLE_DEVICES": ""}
        gpus = spec.gpus * size  # a Ray worker and all its GPUs are on one machine

        def spawn(index: int) -> Worker[VLLMWorker]:
            return cluster.spawn(VLLMWorker, options, spec.stop_token_ids, name=worker_name(index), env=env, gpus=gpus)

        self._spawn = spawn
        self._workers = [spawn(index) for index in range(spec.workers)]
        self._restarted: list[str] = []
        """Workers that were started again since the last rollouts."""
        self._hold_files(lambda: nullcontext(model_dir))

    def wait_ready(self) -> None:
        """Block until every engine is up. Raises: RunError past the deadline."""
        probe = [[0, 0]]  # two tokens of one sequence: the smallest request there is
        answers = [worker.submit(VLLMWorker.logprobs, probe) for worker in self._workers]
        cluster.wait(answers, timeout_s=self._spec.start_timeout_s)

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, policy_version: int, cuts: Cuts = WHOLE
    ) -> RolloutBatch:
        replayed = {domain for domain, drift in self._spec.drift.items() if drift.replay}
        acting = [p for p in prompts if p.domain in self._spec.episodes and p.domain not in replayed]
        answering = [p for p in prompts if p.domain not in self._spec.episodes or p.domain in replayed]
        answers, acts = self._respond(answering, step, policy_version, cuts), self._act(acting, step, policy_version)
        restarted, self._restarted = tuple(self._restarted), []
        return replace(
            answers,
            rollouts=answers.rollouts + acts.rollouts,
            quarantined=answers.quarantined + acts.quarantined,
            restarted=restarted,
            episodes=acts.episodes,
        )

    def _respond(self, prompts: Sequence[Prompt], step: int, policy_version: int, cuts: Cuts) -> RolloutBatch:
        """One response to each prompt, and the next part of those that were begun."""
        limit, context = self._spec.max_new_tokens, self._spec.engine.max_model_len
        fitting = [(p, s) for p, s in zip(prompts, sample_ids(prompts, step), strict=True) if _fits(p, context)]
        # New ones first: the responses to a prompt are dealt out together.
        begun = [begin(p, s, step) for p, s in fitting] + [replace(rollout, step=step) for rollout in cuts.begun]
        left = [min(limit, context - len(r.prompt_ids)) - len(r.response_ids) for r in begun]
        rooms = [cuts.room(len(r.response_ids), all_of_it) for r, all_of_it in zip(begun, left, strict=True)]
        requests = [
            request_of(r, room, self._spec.temperature, self._spec.seed) for r, room in zip(begun, rooms, strict=True)
        ]
        sampled = self._generate(requests, self._spec.n)
        for rollout, out in zip(begun, sampled, strict=True):
            refuse_unknown(rollout.sample_id, out.token_ids, self._spec.engine.vocab_size)
        written: dict[bool, list[Rollout]] = {True: [], False: []}
        for rollout, out, room, all_of_it in zip(begun, sampled, rooms, left, strict=True):
            masked = self._spec.untrained.get(rollout.domain, frozenset())
            done = out.stop_reason == "stop" or room == all_of_it
            written[done].append(carried_on(rollout, out, masked, policy_version))
        return RolloutBatch(
            rollouts=tuple(written[True]),
            quarantined=tuple(_refused(p, context) for p in prompts if not _fits(p, context)),
            unfinished=tuple(written[False]),
            carried_on=frozenset(rollout.sample_id for rollout in cuts.begun),
        )

    def _act(self, prompts: Sequence[Prompt], step: int, policy_version: int) -> RolloutBatch:
        """One episode for each prompt. Raises: RunError if too many of a domain break."""
        room = self._spec.engine.max_model_len
        requests = [
            self._in_step(p, Sample(sample_id=sample_id, group=group_id(step, p), step=step, domain=p.domain))
            for p, sample_id in zip(prompts, sample_ids(prompts, step), strict=True)
            if _fits(p, room)
        ]
        results = self._play(requests, self._spec.temperature, policy_version)
        stats = {
            domain: EpisodeStats.of(
                result for request, result in zip(requests, results, strict=True) if request.prompt.domain == domain
            )
            for domain in dict.fromkeys(request.prompt.domain for request in requests)
        }
        for domain, found in stats.items():
            refuse_many_broken(domain, found, self._spec.episodes[domain].max_broken)
        rollouts = tuple(r for result in results for r in result.rollouts)
        for rollout in rollouts:
            refuse_unknown(rollout.sample_id, rollout.response_ids, self._spec.engine.vocab_size)
        refused = [_refused(p, room) for p in prompts if not _fits(p, room)]
        refused += [_unplayed(q.prompt, r) for q, r in zip(requests, results, strict=True) if not r.rollouts]
        return RolloutBatch(rollouts=rollouts, quarantined=tuple(refused), episodes=stats)

    def _in_step(self, prompt: Prompt, sample: Sample) -> EpisodeRequest:
        """An episode of training: what is done about drift depends on the step."""
        request, drift = self._request(prompt, sample), self._spec.drift.get(prompt.domain)
        if drift is None or not isinstance(request.options, EpisodeOptions):
            return request
        limit = drift.limit(sample.step, request.options.max_turns)
        return replace(request, cut_after=limit, guide=drift.guide(sample.step))

    def _request(self, prompt: Prompt, sample: Sample) -> EpisodeRequest:
        options, untrained = self._spec.episodes[prompt.domain], self._spec.untrained
        sub_agents = None if isinstance(options, AgentOptions) else options.sub_agents
        return EpisodeRequest(
            prompt=prompt,
            sample=sample,
            options=options,
            seed=self._spec.seed,
            masked=untrained.get(prompt.domain, frozenset()),
            masked_by_domain={d: untrained[d] for d in (sub_agents.domains if sub_agents else ()) if d in untrained},
        )

    def _play(
        self, requests: Sequence[EpisodeRequest], temperature: float, policy_version: int = 0
    ) -> list[EpisodeResult]:
        """Deal episodes out as `_generate` deals out requests."""
        num = len(self._workers)
        if not requests:
            return []
        parts = self._call(
            lambda worker, i: worker.submit(VLLMWorker.episodes, requests[i::num], temperature, policy_version)
        )
        return [parts[i % num][i // num] for i in range(len(requests))]

    def answer(self, prompts: Sequence[Prompt], *, n: int = 1, temperature: float = 0.0) -> list[Completion]:
        limit, room = self._spec.max_answer_tokens, self._spec.engine.max_model_len
        asked = [(p, i) for p in prompts for i in range(n)]
        played = iter(self._exam_episodes(asked, temperature))
        requests = [
            GenerateRequest(
                token_ids=p.token_ids,
                max_tokens=min(limit, room - len(p.token_ids)),
                temperature=temperature,
                seed=seed_of(self._spec.seed, f"answer/{p.id}#{i}") if temperature else None,
            )
            for p, i in asked
            if _fits(p, room) and p.domain not in self._spec.episodes
        ]
        answers = iter(self._generate(requests, n))
        return [
            _played(p, next(played) if _fits(p, room) else None)
            if p.domain in self._spec.episodes
            else self._completion(p, next(answers) if _fits(p, room) else None)
            for p, _ in asked
        ]

    def _exam_episodes(self, asked: Sequence[tuple[Prompt, int]], temperature: float) -> list[EpisodeResult]:
        """The episodes of those prompts whose domain has them, and that fit."""
        room, limit = self._spec.engine.max_model_len, self._spec.max_answer_tokens
        requests = [
            self._request(p, Sample(sample_id=f"answer/{p.id}#{i}", group=p.id, step=0, domain=p.domain))
            for p, i in asked
            if p.domain in self._spec.episodes and _fits(p, room)
        ]
        turns = [replace(r, options=replace(r.options, max_turn_tokens=limit)) for r in requests]
        return self._play(turns, temperature)

    def load(self, model_dir: Path, again: Weights | None = None, base: Path | None = None) -> None:
        base = base and base.absolute()
        self._hold_files(lambda: nullcontext(model_dir), base)
        self._call(lambda worker, _: worker.submit(VLLMWorker.load, model_dir.absolute(), base))
        if again:
            self._hold_files(again, base)

    def _hold_files(self, weights: Weights, base: Path | None = None) -> None:
        """From now on a worker that is started again gets these weights; those of `base`, if that is not None, where they are
        not all."""

        def restore(worker: Worker[VLLMWorker]) -> None:
            with weights() as model_dir:
                loaded = worker.submit(VLLMWorker.load, model_dir.absolute(), base)
                loaded.result(timeout_s=self._spec.start_timeout_s)

        self._restore = restore

    def receive(self, send: Callable[[], WeightStream]) -> None:
        def restore(worker: Worker[VLLMWorker]) -> None:
            pour([worker], send(), timeout_s=self._spec.start_timeout_s)
            worker.submit(VLLMWorker.finish_stream).result(timeout_s=self._spec.timeout_s)

        self._restore = restore
        pour(self._workers, send(), timeout_s=self._spec.timeout_s)
        # Here those that died meanwhile are noticed, and get a stream of their own.
        self._call(lambda worker, _: worker.submit(VLLMWorker.finish_stream))

    def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        return self._call(lambda worker, _: worker.submit(VLLMWorker.logprobs, token_ids))

    def _completion(self, prompt: Prompt, sampled: Generated | None) -> Completion:
        ids = sampled.token_ids if sampled else ()
        return Completion(
            prompt=prompt,
            text=self._tokenizer.decode(ids, skip_special_tokens=True),
            num_tokens=len(ids),
            truncated=sampled is not None and sampled.stop_reason == "length",
        )

    def _generate(self, requests: Sequence[GenerateRequest], n: int) -> list[Generated]:
        """Deal out round-robin, `n` at a time, so workers get equal domain mixes, and put the answers back in order."""
        num = len(self._workers)
        dealt = [[i for i in range(len(requests)) if i // n % num == index] for index in range(num)]
        parts = self._call(lambda worker, i: worker.submit(VLLMWorker.generate, [requests[j] for j in dealt[i]]))
        answers = dict(zip(chain(*dealt), chain(*parts), strict=True))
        return [answers[i] for i in range(len(requests))]

    def _call(self, ask: Callable[[Worker[VLLMWorker], int], Pending[R]]) -> list[R]:
        """The answers of all workers; `ask` calls one of them, and gets its index too.

        A worker that dies is started again, once a call. The programs of its agents are ended, the new worker gets the weights
        that the others hold and does its part anew. Seeds belong to requests, so its answers are the same. Raises: what `opd.cluster.wait` raises.
        """
        pending = [ask(worker, index) for index, worker in enumerate(self._workers)]
        restarted: set[int] = set()
        while True:
            try:
                return cluster.wait(pending, timeout_s=self._spec.timeout_s)
            except cluster.WorkerDied as error:
                if error.worker not in self._workers or self._workers.index(error.worker) in restarted:
                    raise
                index = self._workers.index(error.worker)
                restarted.add(index)
                self._restarted.append(worker_name(index))
                leftovers.end_abandoned()
                worker = self._workers[index] = self._spawn(index)
                self._restore(worker)
                pending[index] = ask(worker, index)


def worker_name(index: int) -> str:
    """What errors call a worker, and what a place is reserved for."""
    return f"rollout worker {index}"


def _fits(prompt: Prompt, room: int) -> bool:
    return 0 < len(prompt.token_ids) < room


def _refused(prompt: Prompt, room: int) -> Quarantined:
    num = len(prompt.token_ids)
    reason = f"{num} tokens, rollout.max_model_len is {room}: no room for a response" if num else "no tokens"
    return Quarantined(prompt_id=prompt.id, domain=prompt.domain, reason=reason)


def _played(prompt: Prompt, result: EpisodeResult | None) -> Completion:
    """An episode as an answer; None: the prompt did not fit."""
    return Completion(
        prompt=prompt,
        text=result.text if result else "",
        num_tokens=result.audit.sampled if result else 0,
        truncated=result is not None and result.stop_reason in LIMITS,
        episode=result,
    )


def _unplayed(prompt: Prompt, result: EpisodeResult) -> Quarantined:
    """An episode in which the policy took no turn."""
    reason = f"the episode ended before the first turn ({result.stop_reason}) {result.error}".strip()
    return Quarantined(prompt_id=prompt.id, domain=prompt.domain, reason=reason)
