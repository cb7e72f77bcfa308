"""Rollouts by vLLM: engines in Ray actors, requests dealt out among them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from opd import cluster
from opd.errors import RunError
from opd.interfaces import Decoder
from opd.rollouts.worker import EngineOptions, Generated, GenerateRequest, VLLMWorker
from opd.types import Completion, Origin, Prompt, Quarantined, Rollout, RolloutBatch, Span, unknown_id

ENGINE_ENV = {
    # In-process: faster on a small machine, and no engine process that outlives its owner.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


Weights = Callable[[], AbstractContextManager[Path]]
"""Gives the weights that the engines hold as a Hugging Face directory, for as long as one reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """What rollout engines are started with."""

    engine: EngineOptions
    """What every worker's engine is started with: the model first of all."""
    stop_token_ids: tuple[int, ...]
    """Token ids that end a response."""
    untrained: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Domain -> token ids that carry no loss where the student writes them."""
    workers: int = 1
    """Engines; requests are dealt out among them."""
    gpus: float = 0
    """GPUs of each engine; 0: the CPU."""
    kv_cache_gib: int = 1
    """Key-value cache of an engine on the CPU, whole GiB."""
    seed: int = 0
    """Decides, with the sample id, what is sampled."""
    temperature: float = 1.0
    """At which responses are sampled."""
    max_new_tokens: int
    """Longest response."""
    max_answer_tokens: int
    """Longest answer in an exam."""
    start_timeout_s: float
    """Deadline for an engine to be up with its model loaded."""
    timeout_s: float
    """Deadline of every other call."""


class VLLMRolloutEngine:
    """Implements `opd.interfaces.RolloutEngine`."""

    def __init__(self, spec: RolloutSpec, tokenizer: Decoder) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        model_dir = spec.engine.model_dir
        options = replace(spec.engine, model_dir=model_dir.absolute())  # a worker has another directory
        env = cluster.worker_env(spec.workers) | ENGINE_ENV | {"VLLM_CPU_KVCACHE_SPACE": str(spec.kv_cache_gib)}
        if not spec.gpus:
            env |= {"CUDA_VISIBLE_DEVICES": ""}

        def spawn(index: int) -> Any:
            return cluster.spawn(VLLMWorker, options, spec.stop_token_ids, name=_name(index), env=env, gpus=spec.gpus)

        self._spawn = spawn
        self._workers = [spawn(index) for index in range(spec.workers)]
        self._restarted: list[str] = []
        """Since the last rollouts."""
        self._weights: Weights = lambda: nullcontext(model_dir)

    def wait_ready(self) -> None:
        """Block until every engine is up. Raises: RunError past the deadline."""
        probe = [[[0, 0]]]  # two tokens of one sequence: the smallest request there is
        cluster.call(self._workers, "logprobs", [probe] * len(self._workers), timeout_s=self._spec.start_timeout_s)

    def generate(self, prompts: Sequence[Prompt], *, step: int, policy_version: int) -> RolloutBatch:
        limit, room = self._spec.max_new_tokens, self._spec.engine.max_model_len
        sample_ids = _sample_ids(prompts, step)
        fitting = [(p, s) for p, s in zip(prompts, sample_ids, strict=True) if _fits(p, room)]
        requests = [
            GenerateRequest(
                token_ids=p.token_ids,
                max_tokens=min(limit, room - len(p.token_ids)),
                temperature=self._spec.temperature,
                seed=_seed(self._spec.seed, sample_id),
            )
            for p, sample_id in fitting
        ]
        sampled = self._generate(requests)
        for sample_id, out in zip((s for _, s in fitting), sampled, strict=True):
            _refuse_unknown(sample_id, out.token_ids, self._spec.engine.vocab_size)
        rollouts = []
        for (p, sample_id), out in zip(fitting, sampled, strict=True):
            spans = _spans(out.token_ids, self._spec.untrained.get(p.domain, frozenset()), policy_version)
            rollouts.append(_rollout(p, sample_id, step, out, spans))
        restarted, self._restarted = tuple(self._restarted), []
        return RolloutBatch(
            rollouts=tuple(rollouts),
            quarantined=tuple(_refused(p, room) for p in prompts if not _fits(p, room)),
            restarted=restarted,
        )

    def answer(self, prompts: Sequence[Prompt], *, n: int = 1, temperature: float = 0.0) -> list[Completion]:
        limit, room = self._spec.max_answer_tokens, self._spec.engine.max_model_len
        asked = [(p, i) for p in prompts for i in range(n)]
        requests = [
            GenerateRequest(
                token_ids=p.token_ids,
                max_tokens=min(limit, room - len(p.token_ids)),
                temperature=temperature,
                seed=_seed(self._spec.seed, f"answer/{p.id}#{i}") if temperature else None,
            )
            for p, i in asked
            if _fits(p, room)
        ]
        answers = iter(self._generate(requests))
        return [self._completion(p, next(answers) if _fits(p, room) else None) for p, _ in asked]

    def load(self, model_dir: Path, again: Weights | None = None) -> None:
        self._weights = lambda: nullcontext(model_dir)
        self._call("load", [[model_dir.absolute()]] * len(self._workers))
        self._weights = again or self._weights

    def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        return self._call("logprobs", [[token_ids]] * len(self._workers))

    def _completion(self, prompt: Prompt, sampled: Generated | None) -> Completion:
        ids = sampled.token_ids if sampled else ()
        return Completion(
            prompt=prompt,
            text=self._tokenizer.decode(ids, skip_special_tokens=True),
            num_tokens=len(ids),
            truncated=sampled is not None and sampled.stop_reason == "length",
        )

    def _generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        """Deal out round-robin, so workers get equal domain mixes, and put the answers back in order."""
        num = len(self._workers)
        parts = self._call("generate", [[requests[i::num]] for i in range(num)])
        return [parts[i % num][i // num] for i in range(len(requests))]

    def _call(self, method: str, argument_lists: Sequence[Sequence[Any]]) -> list[Any]:
        """As `cluster.call`, but a worker that dies is started again, once a call: it gets the weights that the others
        hold, and does its part anew. Seeds are of the requests, so the answers are the same."""
        refs = cluster.submit(self._workers, method, argument_lists)
        restarted: set[int] = set()
        while True:
            try:
                return cluster.wait(self._workers, refs, method, timeout_s=self._spec.timeout_s)
            except cluster.WorkerDied as error:
                if error.actor not in self._workers or self._workers.index(error.actor) in restarted:
                    raise
                index = self._workers.index(error.actor)
                restarted.add(index)
                self._restarted.append(_name(index))
                self._workers[index] = self._spawn(index)
                with self._weights() as model_dir:
                    cluster.call(
                        [self._workers[index]], "load", [[model_dir.absolute()]], timeout_s=self._spec.start_timeout_s
                    )
                (refs[index],) = cluster.submit([self._workers[index]], method, [argument_lists[index]])


def _name(index: int) -> str:
    return f"rollout worker {index}"


def _fits(prompt: Prompt, room: int) -> bool:
    return 0 < len(prompt.token_ids) < room


def _refused(prompt: Prompt, room: int) -> Quarantined:
    num = len(prompt.token_ids)
    reason = f"{num} tokens, rollout.max_model_len is {room}: no room for a response" if num else "no tokens"
    return Quarantined(prompt_id=prompt.id, domain=prompt.domain, reason=reason)


def _sample_ids(prompts: Sequence[Prompt], step: int) -> list[str]:
    seen: dict[str, int] = {}
    ids = []
    for prompt in prompts:
        seen[prompt.id] = seen.get(prompt.id, 0) + 1
        repeat = f"#{seen[prompt.id]}" if seen[prompt.id] > 1 else ""
        ids.append(_sample_id(step, prompt) + repeat)
    return ids


def _sample_id(step: int, prompt: Prompt) -> str:
    """The id of the first response to the prompt in a step, which also names the group of all of them."""
    return f"{step:06d}/{prompt.id}"


def _seed(seed: int, sample_id: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{sample_id}".encode()).digest()[:4], "big")


def _refuse_unknown(sample_id: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises: RunError for an id that no token has, before it gets into the target log."""
    wrong = unknown_id(token_ids, vocab_size)
    if wrong is not None:
        raise RunError(
            f"sample {sample_id}: the rollout engine wrote token id {wrong}, the tokenizer knows 0 to {vocab_size - 1}"
        )


def _rollout(prompt: Prompt, sample_id: str, step: int, out: Generated, spans: tuple[Span, ...]) -> Rollout:
    return Rollout(
        sample_id=sample_id,
        group=_sample_id(step, prompt),
        episode=sample_id,
        step=step,
        domain=prompt.domain,
        prompt_ids=prompt.token_ids,
        response_ids=out.token_ids,
        behaviour_logprobs=out.logprobs,
        spans=spans,
        stop_reason=out.stop_reason,
    )


def _spans(token_ids: Sequence[int], masked: frozenset[int], policy_version: int) -> tuple[Span, ...]:
    """A span for each run of trained tokens and for each run of masked ones."""
    origins: list[Origin] = ["masked" if token in masked else "policy" for token in token_ids]
    runs = [(origin, len(list(run))) for origin, run in groupby(origins)] or [("policy", 0)]
    return tuple(Span(length=length, origin=origin, policy_version=policy_version) for origin, length in runs)
