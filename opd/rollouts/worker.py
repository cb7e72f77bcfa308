"""One vLLM engine, owned by one process. Runs in a Ray actor; knows nothing of Ray.

Token ids in, token ids out: the engine has no tokenizer, and is told how many ids there are. Its weights lie in this process, or
in several others (`tensor_parallel_size`); what has to be done beside them is in `inside`, and is called in all of them.
Two vLLM behaviours are repaired, both silent otherwise: a reload on the CPU leaves the packed output head of a tied model stale,
and the prefix cache outlives the weights (`swap`). A third, that it dies on the CPU when it reads a prompt in parts, is kept from
happening. `repairs` has those of single families.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from opd.errors import RunError
from opd.guard.build import shared_guard
from opd.machine import leftovers
from opd.machine.imports import import_lightly
from opd.models.buckets import Bucket
from opd.prompts import load_tokenizer
from opd.records.episodes import EpisodeResult
from opd.records.types import TurnStop
from opd.rollouts.episodes.engine import BatchEngine, Sampling
from opd.rollouts.episodes.runner import Dialogues
from opd.rollouts.episodes.spec import EpisodeRequest
from opd.rollouts.inside import EXTENSION
from opd.rollouts.on_cpu import cpu_settings
from opd.rollouts.own_files import own_files
from opd.rollouts.processes import bind_processes, drop_service_port, explain_failed_start
from opd.rollouts.repairs import RESTARTED
from opd.rollouts.served import HF_FORMAT
from opd.rollouts.swap import IncomingWeights, StreamedSwap, reset_prefix_cache, swap_weights

_shapes: dict[bytes, dict[str, Any]] = {}
"""Text of a model's config -> `model_shape`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options that an engine is started with; plain values, so they cross process boundaries."""

    model_dir: Path
    dtype: str
    max_model_len: int
    max_num_seqs: int
    gpu_memory_utilization: float
    vocab_size: int
    """Ids that the tokenizer knows; a generating engine gives no others, padding rows of the head have no probability."""
    share_prompts: bool = False
    """Several requests begin alike, as responses to one prompt or turns of one episode: keep that in blocks of the cache that are
    small enough to be found again."""
    sleep: bool = False
    """Give the GPU's memory back after `generate`; it comes back with the next call."""
    tensor_parallel_size: int = 1
    """Processes of the engine, each with a part of every weight; 1: the engine lies in its owner's process."""
    kv_cache_dtype: str = "auto"
    """Type of the key-value cache, as vLLM names it; auto: that of the engine."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM; what is set in `start_engine` comes before them."""
    add_special_tokens: bool = True
    """Whether episodes in plain text begin as the tokenizer has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sequence to continue."""

    token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int | None
    """Own random stream per request, so a response does not depend on its neighbours' number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Tokens that the engine wrote for one request."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-prob of each token in the distribution that it was drawn from, temperature included."""
    stop_reason: TurnStop


class VLLMWorker:
    """Owns one `vllm.LLM`; `load` swaps its weights in place, or restarts it where that cannot be done."""

    def __init__(self, options: EngineOptions, stop_token_ids: Sequence[int]) -> None:
        self._options = options
        self._stop = list(stop_token_ids)
        self._llm = start_engine(options)
        self._shape = model_shape(options.model_dir)
        self._asleep = False
        self._base: Path | None = options.model_dir
        """Directory whose weights the engine holds, except those that a load with `base` replaced; None if not known."""
        self._stream: IncomingWeights | None = None
        """Weights that are coming in."""
        self._expert: VLLMWorker | None = None
        """A second engine in this process, which holds an expert that writes turns; made when one is asked for."""

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        """Sample (or, at temperature 0, decode greedily) every request. Caches are empty at the start: what is written must not
        depend on what was written before, which a resumed run has not seen. Raises: RunError on NaN log-probs."""
        self._wake_engine()
        reset_prefix_cache(self._llm)
        params = [self._sampling_params(r.max_tokens, r.temperature, r.seed) for r in requests]
        prompts: Any = [{"prompt_token_ids": list(r.token_ids)} for r in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        self._sleep_engine()
        return [_read_output(output.outputs[0]) for output in outputs]

    def episodes(
        self, requests: Sequence[EpisodeRequest], temperature: float, policy_version: int
    ) -> list[EpisodeResult]:
        """Play every episode to its end, all turns in one batch; those that an expert guides in a batch for each expert, which is
        loaded once. Raises: RunError; ModelError if the chat template cannot append."""
        results: dict[int, EpisodeResult] = {}
        guides = [None if request.guide is None else request.guide.model_dir for request in requests]
        # None is one of them: episodes that nobody guides are a batch of their own.
        for guide in dict.fromkeys(guides):
            places = [index for index, other in enumerate(guides) if other == guide]
            expert = None if guide is None else self._engine_with_weights(guide)
            guided = [requests[index] for index in places]
            results |= zip(places, self._play_with_expert(guided, temperature, policy_version, expert), strict=True)
        return [results[index] for index in range(len(requests))]

    def _engine_with_weights(self, model_dir: Path) -> VLLMWorker:
        """Return the engine beside the student's, with these weights and empty caches: what it writes must not depend on what
        it wrote in a step before, which a resumed run has not seen."""
        if self._expert is None:
            self._expert = VLLMWorker(dataclasses.replace(self._options, model_dir=model_dir), self._stop)
        elif self._expert._base == model_dir:
            reset_prefix_cache(self._expert._llm)
        else:
            self._expert.load(model_dir)
        return self._expert

    def _play_with_expert(
        self,
        requests: Sequence[EpisodeRequest],
        temperature: float,
        policy_version: int,
        expert: VLLMWorker | None,
    ) -> list[EpisodeResult]:
        """Play episodes with one expert beside the policy or none."""
        from opd.rollouts.endpoint.episode import (
            play_all_episodes,  # its HTTP server is not there where engines are not installed
        )

        self._wake_engine()
        reset_prefix_cache(self._llm)
        for spec in {r.options.guard.digest: r.options.guard for r in requests if r.options.guard is not None}.values():
            shared_guard(spec)  # a judge's model is loaded here, before another thread plays the episodes

        def params(max_tokens: int, seed: int) -> Any:
            return self._only_final_output(
                self._sampling_params(max_tokens, temperature, seed if temperature else None)
            )

        context = self._options.max_model_len
        sampling = Sampling(params=params, read=_read_output, context=context, policy_version=policy_version)
        engine = BatchEngine(self._llm.llm_engine, sampling)
        expert_engine = None if expert is None else engine.add_engine(expert._llm.llm_engine)

        results = engine.drive(
            lambda: play_all_episodes(requests, engine, self._dialogues, context, policy_version, expert_engine)
        )
        self._sleep_engine()
        return results

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-prob of every token after the first, at temperature 1, as [sequence][token - 1]."""
        from vllm import SamplingParams

        self._wake_engine()
        # vLLM samples one token at least; nobody reads it.
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        prompts: Any = [{"prompt_token_ids": list(ids)} for ids in sequences]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [
            # vLLM has None for the first token, which nothing predicts.
            [step[token].logprob for token, step in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
            for ids, output in zip(sequences, outputs, strict=True)
        ]

    def load(self, model_dir: Path, base: Path | None = None) -> None:
        """Hold this directory's weights; with `base` those that it lacks are `base`'s, which are read only if the engine
        holds others. Raises: RunError if the caches could not be reset."""
        if base is not None and base != self._base:
            self.load(base)
        self._wake_engine()
        self._base = None  # until all weights are there
        if base is not None:
            swap_weights(self._llm, model_dir, whole=False)
        else:
            self._load_all(model_dir)
        self._base = base or model_dir

    def begin_stream(self, model_dir: Path, *, whole: bool) -> None:
        """Prepare for weights that come in buckets until `finish_stream`: all that a model of this directory's shape has, or,
        unless `whole`, some; the others are the directory's. It is read only if the engine holds another model, or other
        weights. Raises: RunError if the engine cannot take all weights of its family in this way."""
        shape = model_shape(model_dir)
        if whole and shape["model_type"] in RESTARTED:
            raise RunError(f"{shape['model_type']} takes new weights from files alone: set sync.kind to shared_memory")
        # Some weights alone are right only on top of those of the very directory that has the others.
        fits = can_swap(self._shape, shape) if whole else model_dir == self._base
        if not fits:
            self.load(model_dir)
        self._wake_engine()
        self._base = None  # until all weights are there
        self._stream = IncomingWeights(StreamedSwap(self._llm, whole=whole), None if whole else model_dir)

    def take_bucket(self, bucket: Bucket) -> None:
        """Take some of the weights."""
        assert self._stream is not None
        self._stream.swap.take_bucket(bucket)

    def finish_stream(self) -> None:
        """Hold the weights that came, caches reset; nothing if none are coming. Raises: as `load`."""
        if self._stream is None:
            return
        stream, self._stream = self._stream, None
        stream.swap.finish_swap()
        if stream.base is None:
            cut_vocabulary(self._llm, self._options.vocab_size)
        self._base = stream.base

    def _load_all(self, model_dir: Path) -> None:
        shape = model_shape(model_dir)
        if can_swap(self._shape, shape):
            swap_weights(self._llm, model_dir)
            cut_vocabulary(self._llm, self._options.vocab_size)
        else:
            old, self._llm = self._llm, None
            stop_engine(old)  # frees its memory before the new one takes its own
            self._llm = start_engine(dataclasses.replace(self._options, model_dir=model_dir))
            self._shape = shape

    def _sampling_params(self, max_tokens: int, temperature: float, seed: int | None) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            stop_token_ids=self._stop,
            # 0: that of the sampled token, and no likelier ones beside it.
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            skip_clone=True,  # made for this request alone, so vLLM need not copy it
        )

    @staticmethod
    def _only_final_output(params: Any) -> Any:
        """Have the engine say nothing of a response before its end."""
        from vllm.sampling_params import RequestOutputKind

        params.output_kind = RequestOutputKind.FINAL_ONLY
        return params

    @cached_property
    def _dialogues(self) -> Dialogues:
        """Dialogues with the student's tokenizer, which episodes need and nothing else here."""
        tokenizer = load_tokenizer(self._options.model_dir, self._options.add_special_tokens)
        return Dialogues(tokenizer, self._stop)

    def _sleep_engine(self) -> None:
        """Send the engine to sleep, level 1: weights wait in the machine's memory, since after an evaluation no new ones come."""
        if self._options.sleep:
            self._llm.sleep(level=1)
            self._asleep = True

    def _wake_engine(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False


def model_shape(model_dir: Path) -> dict[str, Any]:
    """Return everything in a model's config that decides whether weights can be swapped in place."""
    config = (model_dir / "config.json").read_bytes()
    if config not in _shapes:
        _shapes.clear()  # the last one will do: every push asks for the shape of a copy of the same file
        _shapes[config] = _read_shape(model_dir)
    return _shapes[config]


def _read_shape(model_dir: Path) -> dict[str, Any]:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False).to_dict()
    # Left out is what says where a model lies and how it is loaded, not what tensors it has.
    return {k: v for k, v in config.items() if k not in ("_name_or_path", "transformers_version", "dtype", "use_cache")}


def can_swap(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Return True if an engine of one shape takes the weights of another in place."""
    return old == new and new["model_type"] not in RESTARTED


def cut_vocabulary(llm: Any, vocab_size: int) -> None:
    """Take the head's padding rows out of all logits, as vLLM does with those that it adds itself.

    What is sampled and the log-probs of prompts are then over the ids that the tokenizer knows, as trainer and teachers
    have it. Raises: RunError if the model gives logits of another width all the same.
    """
    for name, width in llm.collective_rpc("opd_cut_vocabulary", args=(vocab_size,)):
        # None is from a process that gets no logits, see `Inside.opd_cut_vocabulary`.
        if width not in (vocab_size, None):
            raise RunError(
                f"{llm.llm_engine.model_config.model}: vLLM's {name} gives logits for {width} ids, the tokenizer knows "
                f"{vocab_size}: it could sample what is no token, or not sample what is one"
            )


def start_engine(options: EngineOptions, **overrides: Any) -> Any:
    """Start a `vllm.LLM` that is scheduled in this process; `overrides` goes to it as it is and comes before what is set here.

    Of all that could bend the distribution only the temperature is left: top-k, top-p, min-p, penalties, biases, forbidden
    words and the model directory's generation config are off.
    Raises: RunError if the engine cannot be kept to the tokenizer's ids.
    """
    drop_service_port(os.environ)
    import_lightly("vllm.entrypoints.llm")
    from vllm import LLM
    from vllm.platforms import current_platform

    is_cpu = current_platform.is_cpu()
    on_cpu = cpu_settings(options.model_dir, shares_prompts=options.share_prompts) if is_cpu else {}
    settings = _engine_settings(options) | on_cpu | overrides
    with leftovers.mark_children_as_owned(), own_files(), explain_failed_start(options.tensor_parallel_size):
        # Ours are last: no argument of a user undoes them.
        llm = LLM(**{**options.engine_args, **settings})
    bind_processes(llm)
    llm.collective_rpc("opd_skip_rank_counts")
    if is_cpu:
        llm.collective_rpc("opd_rotate_every_head")
        llm.collective_rpc("opd_use_norm_kernels")
    if overrides.get("runner") != "pooling":  # that one has no head
        cut_vocabulary(llm, options.vocab_size)
    return llm


def _engine_settings(options: EngineOptions) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "model": str(options.model_dir),
        **HF_FORMAT,
        "skip_tokenizer_init": True,
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "logprobs_mode": "processed_logprobs",  # of a sampled token in the distribution it was drawn from; prompts stay raw
        "generation_config": "vllm",  # sampling is decided by the pipeline alone, not by a file in the model directory
        "trust_remote_code": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": EXTENSION,
        "tensor_parallel_size": options.tensor_parallel_size,
        "kv_cache_dtype": options.kv_cache_dtype,
    }
    if options.sleep:
        settings["enable_sleep_mode"] = True
    if options.tensor_parallel_size > 1:
        settings["distributed_executor_backend"] = "mp"  # else vLLM looks for GPUs of other machines in Ray
    return settings


def stop_engine(llm: Any | None) -> None:
    """End an engine, if there is one, with its processes."""
    if llm is not None:
        llm.llm_engine.engine_core.shutdown()


def _read_output(output: Any) -> Generated:
    logprobs = tuple(float(step[token].logprob) for token, step in zip(output.token_ids, output.logprobs, strict=True))
    # NaN weights make vLLM emit token 0 for ever without an error; NaN is the one value unequal to itself.
    if any(value != value for value in logprobs):
        raise RunError("the rollout engine returned NaN log-probs: the student's weights are broken")
    if output.finish_reason not in get_args(TurnStop):
        raise RunError(f"the rollout engine gave up on a request: vLLM says {output.finish_reason!r}")
    return Generated(token_ids=tuple(output.token_ids), logprobs=logprobs, stop_reason=output.finish_reason)
