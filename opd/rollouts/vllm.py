"""Rollouts by vLLM: engines in Ray actors, among which requests and episodes are dealt out."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from opd import cluster
from opd.cluster import Worker
from opd.interfaces import Decoder
from opd.records.drafts import DraftSpeeds, add_histograms
from opd.records.episodes import EpisodeResult, EpisodeStats
from opd.records.types import Completion, Prompt, QuarantinedPrompt, RolloutBatch
from opd.rollouts.decoding import end_ids, written_text
from opd.rollouts.endpoint.options import AgentOptions
from opd.rollouts.engines import Engines, worker_name
from opd.rollouts.episodes.drift import DriftOptions
from opd.rollouts.episodes.spec import LIMITS, EpisodeOptions, EpisodeRequest, refuse_many_broken
from opd.rollouts.episodes.trace import EpisodeKey
from opd.rollouts.processes import engine_env
from opd.rollouts.responses import derive_response_seed, make_group_id, make_rollout, make_sample_ids, refuse_unknown
from opd.rollouts.worker import EngineOptions, Generated, GenerateRequest, VLLMWorker

R = TypeVar("R")
SPEED_STEP = 10
"""The step whose responses are written a second time without the draft: it has learned a little by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """The settings with which rollout engines are started and used."""

    engine: EngineOptions
    """The model and the settings of every worker's engine."""
    stop_token_ids: tuple[int, ...]
    """Token ids that end a response."""
    untrained: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Domain -> token ids that carry no loss where the student writes them."""
    episodes: Mapping[str, EpisodeOptions | AgentOptions] = field(default_factory=dict)
    """Domain -> options of its episodes; in the other domains the student writes a single response."""
    drift: Mapping[str, DriftOptions] = field(default_factory=dict)
    """Domain -> measures in training against errors that add up over turns; the other domains have none."""
    workers: int = 1
    """Number of engines, among which requests are dealt out."""
    gpus: float = 0
    """GPUs of each process of an engine, a share below 1 for one that is shared; 0: the engine runs on the CPU."""
    kv_cache_gib: int = 1
    """Key-value cache of each process of an engine on the CPU, whole GiB."""
    roles: int = 1
    """Number of roles that compute on these cores at the same time, this one included."""
    seed: int = 0
    """The run's seed; together with the sample id it decides what is sampled."""
    n: int = 1
    """Number of responses to each prompt. They are neighbours in the list of prompts, and one engine writes all of them, so that it reads
    the prompt once."""
    temperature: float = 1.0
    """Temperature at which responses are sampled."""
    max_new_tokens: int
    """Longest response in tokens."""
    max_answer_tokens: int
    """Longest answer in an exam, and longest turn of its episodes, in tokens."""
    start_timeout_s: float
    """Deadline for an engine to start and load its model, in seconds."""
    timeout_s: float
    """Deadline of every other call, in seconds."""


class VLLMRolloutEngine(Engines):
    """Implements `opd.interfaces.RolloutEngine`."""

    WORKER: ClassVar[Any] = VLLMWorker
    """The class of the workers: this one, or one with the same methods."""

    def __init__(self, spec: RolloutSpec, tokenizer: Decoder) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._ends = end_ids(tokenizer, spec.stop_token_ids)
        model_dir = spec.engine.model_dir
        options = replace(spec.engine, model_dir=model_dir.absolute())  # a worker starts in another directory
        size = options.tensor_parallel_size
        env = cluster.worker_env(spec.workers * size, spec.roles) | engine_env(size)
        env |= {"VLLM_CPU_KVCACHE_SPACE": str(spec.kv_cache_gib)}
        if not spec.gpus:
            env |= cluster.KEEPS_SOME_MEMORY | {"CUDA_VISIBLE_DEVICES": ""}
        gpus = spec.gpus * size  # a Ray worker and all its GPUs are on one machine

        def spawn(index: int) -> Worker[VLLMWorker]:
            return cluster.spawn_worker(
                self.WORKER, options, spec.stop_token_ids, name=worker_name(index), env=env, gpus=gpus
            )

        super().__init__(spawn, spec.workers, model_dir, (spec.start_timeout_s, spec.timeout_s))

    def generate(self, prompts: Sequence[Prompt], *, step: int, policy_version: int) -> RolloutBatch:
        # After a replayed prefix the student writes one turn, so that is sampled like the response to any prompt.
        replayed = {domain for domain, drift in self._spec.drift.items() if drift.replay}
        with_episodes = self._spec.episodes.keys() - replayed
        responses = self._sample_responses([p for p in prompts if p.domain not in with_episodes], step, policy_version)
        episodes = self._play_step([p for p in prompts if p.domain in with_episodes], step, policy_version)
        restarted, self._restarted = tuple(self._restarted), []
        return RolloutBatch(
            rollouts=responses.rollouts + episodes.rollouts,
            quarantined=responses.quarantined + episodes.quarantined,
            restarted=restarted,
            episodes=episodes.episodes,
            accepted=responses.accepted,
            speeds=responses.speeds,
        )

    def _sample_responses(self, prompts: Sequence[Prompt], step: int, policy_version: int) -> RolloutBatch:
        """Sample one response to each prompt that fits the context; the others are quarantined. Raises: RunError."""
        limit, context = self._spec.max_new_tokens, self._spec.engine.max_model_len
        fitting = [
            (p, s) for p, s in zip(prompts, make_sample_ids(prompts, step), strict=True) if _fits_context(p, context)
        ]
        requests = [
            GenerateRequest(
                token_ids=prompt.token_ids,
                max_tokens=min(limit, context - len(prompt.token_ids)),
                temperature=self._spec.temperature,
                seed=derive_response_seed(self._spec.seed, sample_id),
            )
            for prompt, sample_id in fitting
        ]
        rollouts, histograms = [], defaultdict(list)
        generated, seconds = self._time_requests(VLLMWorker.generate, requests)
        for (prompt, sample_id), out in zip(fitting, generated, strict=True):
            histograms[prompt.domain].append(out.accepted)
            refuse_unknown(sample_id, out.token_ids, self._spec.engine.vocab_size)
            masked = self._spec.untrained.get(prompt.domain, frozenset())
            rollouts.append(make_rollout(prompt, sample_id, step, out, masked, policy_version))
        measures = step == SPEED_STEP and self._spec.engine.draft is not None and generated
        speeds = self._compare_speeds(requests, seconds, generated) if measures else None
        return RolloutBatch(
            rollouts=tuple(rollouts),
            quarantined=tuple(_quarantine_prompt(p, context) for p in prompts if not _fits_context(p, context)),
            speeds=speeds,
            accepted={domain: total for domain, counts in histograms.items() if (total := add_histograms(counts))},
        )

    def _compare_speeds(
        self, requests: Sequence[GenerateRequest], seconds: float, generated: Sequence[Generated]
    ) -> DraftSpeeds:
        """Write the step's responses once more, without the draft, and return both speeds. `generated` took `seconds` with it."""
        plain, plain_seconds = self._time_requests(VLLMWorker.generate_without_draft, requests)
        speeds = [
            sum(len(out.token_ids) for out in outputs) / taken
            for outputs, taken in ((generated, seconds), (plain, plain_seconds))
        ]
        return DraftSpeeds(with_draft=speeds[0], without_draft=speeds[1])

    def _time_requests(
        self, method: Callable[..., list[Generated]], requests: Sequence[GenerateRequest]
    ) -> tuple[list[Generated], float]:
        """Sample requests by a method of the workers, and return what they wrote and the seconds that it took."""
        began = time.monotonic()
        generated = self._dispatch_requests(method, requests, self._spec.n)
        return generated, time.monotonic() - began

    def _play_step(self, prompts: Sequence[Prompt], step: int, policy_version: int) -> RolloutBatch:
        """Play one episode for each prompt that fits the context; the others are quarantined, and so are prompts whose episode ended
        before a turn. Raises: RunError if too many episodes of a domain break."""
        room = self._spec.engine.max_model_len
        requests = [
            self._make_step_request(
                p, EpisodeKey(sample_id=sample_id, group=make_group_id(step, p), step=step, domain=p.domain)
            )
            for p, sample_id in zip(prompts, make_sample_ids(prompts, step), strict=True)
            if _fits_context(p, room)
        ]

        results = self._play_episodes(requests, self._spec.temperature, policy_version)
        rollouts = tuple(rollout for result in results for rollout in result.rollouts)
        for rollout in rollouts:
            refuse_unknown(rollout.sample_id, rollout.response_ids, self._spec.engine.vocab_size)
        stats = {
            domain: EpisodeStats.from_results(
                result for request, result in zip(requests, results, strict=True) if request.prompt.domain == domain
            )
            for domain in dict.fromkeys(request.prompt.domain for request in requests)
        }
        for domain, domain_stats in stats.items():
            refuse_many_broken(domain, domain_stats, self._spec.episodes[domain].max_broken)
        refused = [_quarantine_prompt(p, room) for p in prompts if not _fits_context(p, room)]
        refused += [_quarantine_unplayed(q.prompt, r) for q, r in zip(requests, results, strict=True) if not r.rollouts]
        return RolloutBatch(rollouts=rollouts, quarantined=tuple(refused), episodes=stats)

    def _make_step_request(self, prompt: Prompt, sample: EpisodeKey) -> EpisodeRequest:
        """Make the request for an episode of training, in which the measures against drift depend on the step."""
        request, drift = self._make_episode_request(prompt, sample), self._spec.drift.get(prompt.domain)
        if drift is None or not isinstance(request.options, EpisodeOptions):
            return request
        limit = drift.turn_limit(sample.step, request.options.max_turns)
        return replace(request, cut_after=limit, guide=drift.guide_at_step(sample.step))

    def _make_episode_request(self, prompt: Prompt, sample: EpisodeKey) -> EpisodeRequest:
        """Make the request for an episode, without measures against drift, as an exam has it."""
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

    def _play_episodes(
        self, requests: Sequence[EpisodeRequest], temperature: float, policy_version: int = 0
    ) -> list[EpisodeResult]:
        """Play episodes, and return the results in the order of the requests."""
        if not requests:
            return []
        return self._dispatch_requests(VLLMWorker.episodes, requests, 1, temperature, policy_version)

    def answer(self, prompts: Sequence[Prompt], *, n: int = 1, temperature: float = 0.0) -> list[Completion]:
        limit, room = self._spec.max_answer_tokens, self._spec.engine.max_model_len
        drawn_prompts = [(p, i) for p in prompts for i in range(n)]
        played = iter(self._play_exam_episodes(drawn_prompts, temperature))
        requests = [
            GenerateRequest(
                token_ids=p.token_ids,
                max_tokens=min(limit, room - len(p.token_ids)),
                temperature=temperature,
                # Greedy decoding draws nothing, so it needs no seed.
                seed=derive_response_seed(self._spec.seed, f"answer/{p.id}#{i}") if temperature else None,
            )
            for p, i in drawn_prompts
            if _fits_context(p, room) and p.domain not in self._spec.episodes
        ]
        answers = iter(self._generate(requests, n))
        return [
            _episode_completion(p, next(played) if _fits_context(p, room) else None)
            if p.domain in self._spec.episodes
            else self._make_completion(p, next(answers) if _fits_context(p, room) else None)
            for p, _ in drawn_prompts
        ]

    def _play_exam_episodes(
        self, drawn_prompts: Sequence[tuple[Prompt, int]], temperature: float
    ) -> list[EpisodeResult]:
        """Play an exam's episodes, for the prompts that fit and whose domain has episodes. `drawn_prompts` has each prompt with the number
        of its answer."""
        room, limit = self._spec.engine.max_model_len, self._spec.max_answer_tokens
        requests = [
            self._make_episode_request(
                p, EpisodeKey(sample_id=f"answer/{p.id}#{i}", group=p.id, step=0, domain=p.domain)
            )
            for p, i in drawn_prompts
            if p.domain in self._spec.episodes and _fits_context(p, room)
        ]
        # An exam has its own limit for the length of a turn.
        turns = [replace(r, options=replace(r.options, max_turn_tokens=limit)) for r in requests]
        return self._play_episodes(turns, temperature)

    def _make_completion(self, prompt: Prompt, sampled: Generated | None) -> Completion:
        """Make the completion of an answer in an exam; None: the prompt did not fit, so the answer is empty."""
        ids = sampled.token_ids if sampled else ()
        return Completion(
            prompt=prompt,
            text=written_text(self._tokenizer, ids, self._ends),
            num_tokens=len(ids),
            truncated=sampled is not None and sampled.stop_reason == "length",
            accepted=sampled.accepted if sampled else (),
        )

    def _generate(self, requests: Sequence[GenerateRequest], n: int) -> list[Generated]:
        """Return the answers in the order of the requests. `n` neighbours, which are the responses to one prompt, go to one worker."""
        return self._dispatch_requests(VLLMWorker.generate, requests, n)


def _fits_context(prompt: Prompt, room: int) -> bool:
    """Return True if the prompt has a token, and leaves room for one in a context of `room` tokens."""
    return 0 < len(prompt.token_ids) < room


def _quarantine_prompt(prompt: Prompt, room: int) -> QuarantinedPrompt:
    """Return the quarantine record of a prompt that does not fit."""
    num = len(prompt.token_ids)
    reason = f"{num} tokens, rollout.max_model_len is {room}: no room for a response" if num else "no tokens"
    return QuarantinedPrompt(prompt_id=prompt.id, domain=prompt.domain, reason=reason)


def _episode_completion(prompt: Prompt, result: EpisodeResult | None) -> Completion:
    """Return the completion of an episode in an exam; None: the prompt did not fit, so there was no episode."""
    return Completion(
        prompt=prompt,
        text=result.text if result else "",
        num_tokens=result.audit.sampled if result else 0,
        truncated=result is not None and result.stop_reason in LIMITS,
        episode=result,
    )


def _quarantine_unplayed(prompt: Prompt, result: EpisodeResult) -> QuarantinedPrompt:
    """Return the quarantine record of an episode in which the policy took no turn."""
    reason = f"the episode ended before the first turn ({result.stop_reason}) {result.error}".strip()
    return QuarantinedPrompt(prompt_id=prompt.id, domain=prompt.domain, reason=reason)
