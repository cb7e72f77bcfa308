"""One vLLM engine, owned by one process. The class runs in a Ray actor, but does not use Ray.

Token ids go in and token ids come out: the engine has no tokenizer, and is told how many ids there are. Its weights lie in this process,
or in several others (`tensor_parallel_size`); work that needs the weights at hand is in `worker_extension`, and is called in all of these
processes. Faults of vLLM that nobody would notice are repaired: in its CPU build (`cpu_patches`), in its drafting (`drafting`), and a
prefix cache that outlives the weights (`weight_loading`). Another, that vLLM dies on the CPU when it reads a prompt in parts, is avoided
by a setting (`cpu_settings`).
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from opd.draft.shape import DraftShape, DraftWeights
from opd.errors import RunError
from opd.guard.build import shared_guard
from opd.machine import orphans
from opd.machine.imports import import_lightly
from opd.models.buckets import Bucket
from opd.prompts import load_tokenizer
from opd.records.episodes import EpisodeResult
from opd.records.types import TurnStop
from opd.rollouts.cpu_patches import RESTARTED
from opd.rollouts.cpu_settings import cpu_settings
from opd.rollouts.engine_files import own_files
from opd.rollouts.episodes.engine import BatchEngine, Sampling
from opd.rollouts.episodes.runner import Dialogues
from opd.rollouts.episodes.spec import EpisodeRequest
from opd.rollouts.processes import bind_processes, drop_service_port, explain_failed_start
from opd.rollouts.served_families import HF_FORMAT
from opd.rollouts.weight_loading import StreamedSwap, reset_prefix_cache, swap_weights
from opd.rollouts.worker_extension import EXTENSION
from opd.transfer.routes import DirectPush, MeetingPoint, Route

SLEEPING = ("weights", "kv_cache")
"""vLLM's names of the two parts of an engine's memory, in the order in which they wake up."""
FOR_NEW_WEIGHTS = SLEEPING[:1]

_shapes: dict[bytes, dict[str, Any]] = {}
"""Text of a model's config -> what `read_model_shape` returns for it; at most one entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options that an engine is started with; plain values, so they cross process boundaries."""

    model_dir: Path
    dtype: str
    max_model_len: int
    max_num_seqs: int
    gpu_memory_utilization: float
    vocab_size: int
    """Number of ids that the tokenizer knows. A generating engine writes no others: padding rows of the head have no probability."""
    share_prompts: bool = False
    """True if several requests begin alike, as responses to one prompt or turns of one episode do. Then a CPU engine's cache has blocks
    small enough for such beginnings to be found again."""
    sleep: bool = False
    """Give the GPU's memory back after each use of the engine; the next use takes it again."""
    tensor_parallel_size: int = 1
    """Number of the engine's processes, each with a part of every weight; 1: the engine lies in its owner's process."""
    kv_cache_dtype: str = "auto"
    """Type of the key-value cache, as vLLM names it; auto: the engine's `dtype`."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM. Arguments that `start_engine` sets itself take precedence."""
    add_special_tokens: bool = True
    """True if prompts of episodes in plain text begin with the special tokens that the tokenizer puts there."""
    draft: DraftShape | None = None
    """The draft with which the engine guesses tokens; None: it writes one token in each pass. Its weights come by `VLLMWorker.load_draft`."""
    num_speculative_tokens: int = 0
    """Guesses of the draft that a pass checks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sequence to continue."""

    token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int | None
    """Seed of the request's own random stream, so that a response does not depend on how many others are written; None: no seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Tokens that the engine wrote for one request."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-prob of each token in the distribution that it was drawn from, temperature included."""
    stop_reason: TurnStop
    accepted: tuple[int, ...] = ()
    """[K + 1] number of passes in which 0, 1, ... K guesses of the draft were kept; empty without a draft."""


class VLLMWorker:
    """Owns one `vllm.LLM`. `load` swaps its weights in place, or starts a new engine if that cannot be done."""

    def __init__(self, options: EngineOptions, stop_token_ids: Sequence[int]) -> None:
        self._options = options
        self._stop = list(stop_token_ids)
        self._llm = start_engine(options)
        self._shape = read_model_shape(options.model_dir)
        self._asleep: tuple[str, ...] = ()
        """Those of `SLEEPING` whose memory the engine has given back."""
        self._base: Path | None = options.model_dir
        """Directory whose weights the engine holds, except those that a load with `base` replaced; None if it is not known."""
        self._stream: StreamedSwap | None = None
        """Weights that are coming in; None if none are."""
        self._expert: VLLMWorker | None = None
        """A second engine in this process, for an expert that writes turns; made when one is first needed."""
        self._draft: DraftWeights | None = None
        """Weights of the draft; None until some came."""

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        """Sample every request; at temperature 0, decode it greedily. The prefix cache is emptied first, because a response must not depend
        on what the engine wrote before: a resumed run has not written that. Raises: RunError on NaN log-probs."""
        self._wake_engine()
        reset_prefix_cache(self._llm)
        params = [self._sampling_params(r.max_tokens, r.temperature, r.seed) for r in requests]
        prompts: Any = [{"prompt_token_ids": list(r.token_ids)} for r in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        self._sleep_engine()
        return [_read_output(output.outputs[0]) for output in outputs]

    def generate_without_draft(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        """Sample every request without guesses, to learn what they save; as `generate` otherwise."""
        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        # vLLM's own table from the number of running requests to that of guesses; None: always all guesses.
        usual, scheduler.dynamic_sd_lookup = scheduler.dynamic_sd_lookup, [0] * (self._options.max_num_seqs + 1)
        try:
            return self.generate(requests)
        finally:
            scheduler.dynamic_sd_lookup = usual

    def episodes(
        self, requests: Sequence[EpisodeRequest], temperature: float, policy_version: int
    ) -> list[EpisodeResult]:
        """Play every episode to its end. The turns of episodes with the same guide, or with none, are one batch, so each expert is loaded
        once. Raises: RunError; ModelError if the chat template cannot append."""
        results: dict[int, EpisodeResult] = {}
        guides = [None if request.guide is None else request.guide.model_dir for request in requests]
        # None is one of these: episodes without a guide are a batch of their own.
        for guide in dict.fromkeys(guides):
            indices = [index for index, other in enumerate(guides) if other == guide]
            expert = None if guide is None else self._load_expert(guide)
            batch = [requests[index] for index in indices]
            results |= zip(indices, self._play_with_expert(batch, temperature, policy_version, expert), strict=True)
        return [results[index] for index in range(len(requests))]

    def _load_expert(self, model_dir: Path) -> VLLMWorker:
        """Return the engine beside the student's, with this expert's weights and an empty prefix cache, for the same reason as in
        `generate`."""
        if self._expert is None:
            # The draft is the student's: an expert's states are not what it has learned to read.
            self._expert = VLLMWorker(dataclasses.replace(self._options, model_dir=model_dir, draft=None), self._stop)
        elif self._expert._base == model_dir:
            reset_prefix_cache(self._expert._llm)
        else:
            self._expert.load(model_dir)
        return self._expert

    def _play_with_expert(
        self, requests: Sequence[EpisodeRequest], temperature: float, policy_version: int, expert: VLLMWorker | None
    ) -> list[EpisodeResult]:
        """Play episodes with one expert beside the policy, or with none. Raises: as `episodes`."""
        from vllm.sampling_params import RequestOutputKind

        # Not at the top: the package of its HTTP server is installed only with the engines.
        from opd.rollouts.endpoint.episode import play_all_episodes

        self._wake_engine()
        reset_prefix_cache(self._llm)
        for spec in {r.options.guard.digest: r.options.guard for r in requests if r.options.guard is not None}.values():
            # This loads a judge's model here, in the main thread, before another thread plays the episodes.
            shared_guard(spec)

        def make_params(max_tokens: int, seed: int) -> Any:
            params = self._sampling_params(max_tokens, temperature, seed if temperature else None)
            params.output_kind = RequestOutputKind.FINAL_ONLY  # a response comes only once, at its end
            return params

        context = self._options.max_model_len
        sampling = Sampling(params=make_params, read=_read_output, context=context, policy_version=policy_version)
        engine = BatchEngine(self._llm.llm_engine, sampling)
        expert_engine = None if expert is None else engine.add_engine(expert._llm.llm_engine)

        results = engine.drive(
            lambda: play_all_episodes(requests, engine, self._dialogues, context, policy_version, expert_engine)
        )
        self._sleep_engine()
        return results

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-prob of every token after a sequence's first, at temperature 1, as [sequence][token - 1]."""
        from vllm import SamplingParams

        self._wake_engine()
        # vLLM samples at least one token, which nobody reads.
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        prompts: Any = [{"prompt_token_ids": list(ids)} for ids in sequences]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [
            # vLLM has None for the first token, which nothing predicts.
            [step[token].logprob for token, step in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
            for ids, output in zip(sequences, outputs, strict=True)
        ]

    def load(self, model_dir: Path, base: Path | None = None) -> None:
        """Hold the weights of this directory. If it has only some of a model's, `base` is the directory with the others, which are read
        only if the engine does not hold them already. Raises: RunError if the caches could not be reset."""
        if base is not None and base != self._base:
            self.load(base)
        self._wake_engine(FOR_NEW_WEIGHTS)
        self._base = None  # until all weights are there
        if base is not None:
            swap_weights(self._llm, model_dir, whole=False)
        else:
            self._load_all(model_dir)
        self._base = base or model_dir

    def begin_stream(self, model_dir: Path, *, whole: bool) -> None:
        """Prepare for weights that come in buckets until `finish_stream`: all that a model of this directory's shape has, or, unless
        `whole` is true, some of them; then the others are the directory's. The directory is read only if the engine does not fit, or does
        not hold the others. Raises: RunError if a model of this family cannot take its weights in this way."""
        if self._stream is not None:
            # The stream before broke off. vLLM cannot forget what it took of a layer, so that is finished, and then replaced.
            self._stream.finish_swap()
            self._stream = None
        shape = read_model_shape(model_dir)
        if whole and shape["model_type"] in RESTARTED:
            raise RunError(f"{shape['model_type']} takes new weights from files alone: set sync.kind to shared_memory")
        # If only some weights come, the engine has to hold the weights of the very directory that has the others.
        fits = can_swap(self._shape, shape) if whole else model_dir == self._base
        if not fits:
            self.load(model_dir)
        self._wake_engine(FOR_NEW_WEIGHTS)
        self._base = None  # until all weights are there
        self._stream = StreamedSwap(self._llm, None if whole else model_dir)

    def take_bucket(self, bucket: Bucket) -> None:
        """Take the weights of one bucket."""
        assert self._stream is not None
        self._stream.take_bucket(bucket)

    def finish_stream(self) -> None:
        """Hold the weights that came, and reset the caches. Do nothing if none are coming. Raises: as `load`."""
        if self._stream is None:
            return
        stream, self._stream = self._stream, None
        stream.finish_swap()
        if stream.base is None:
            cut_vocabulary(self._llm, self._options.vocab_size)
        self._base = stream.base

    def load_draft(self, weights: DraftWeights) -> None:
        """Hold these weights of the draft, in the names of `opd.draft.export`. Any weights give samples of the student; those of a worse
        draft only come slower."""
        self._wake_engine(FOR_NEW_WEIGHTS)
        self._draft = weights
        self._give_draft()

    def _give_draft(self) -> None:
        """Give the engine the draft's weights, if it has a draft and some came."""
        if self._draft is not None and self._llm.llm_engine.vllm_config.speculative_config is not None:
            self._llm.collective_rpc("opd_load_draft", args=(self._draft,))

    def memory_ids(self) -> list[str]:
        """Return the id of each process's GPU: see `opd.transfer.handles.find_memory_id`."""
        ids: list[str] = self._llm.collective_rpc("opd_memory_id")
        return ids

    def join_channel(self, meeting: MeetingPoint, routes: Sequence[Route]) -> str:
        """Have the engine's processes join a channel, each by its route. Returns the reason if that fails; else an empty text."""
        return self._first_problem("opd_join_channel", meeting, routes)

    def receive_directly(self, model_dir: Path, push: DirectPush) -> str:
        """Take the weights of a push out of the channel; `finish_stream` has to follow. `model_dir`: as in `begin_stream`. Returns the
        reason why not all came; else an empty text. Raises: as `begin_stream`."""
        self.begin_stream(model_dir, whole=push.plan.whole)
        return self._first_problem("opd_take_directly", push)

    def _first_problem(self, method: str, *arguments: Any) -> str:
        """Call a method in all processes of the engine, and return the first text that is not empty, or an empty one."""
        return next(filter(None, self._llm.collective_rpc(method, args=arguments)), "")

    def _load_all(self, model_dir: Path) -> None:
        """Load all weights of a directory: into the running engine if that fits, else into a new one."""
        shape = read_model_shape(model_dir)
        if can_swap(self._shape, shape):
            swap_weights(self._llm, model_dir)
            cut_vocabulary(self._llm, self._options.vocab_size)
        else:
            old, self._llm = self._llm, None
            stop_engine(old)  # frees its memory before the new one takes its own
            self._asleep = ()
            options = dataclasses.replace(self._options, model_dir=model_dir)
            if self._options.draft is not None and not self._options.draft.fits(shape):
                options = dataclasses.replace(options, draft=None)
            self._llm = start_engine(options)
            self._shape = shape
            self._give_draft()

    def _sampling_params(self, max_tokens: int, temperature: float, seed: int | None) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            stop_token_ids=self._stop,
            # 0 asks for the log-prob of the sampled token, and for no likelier tokens beside it.
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            skip_clone=True,  # these parameters are made for one request alone, so vLLM need not copy them
        )

    @cached_property
    def _dialogues(self) -> Dialogues:
        """Dialogues with the student's tokenizer, which is loaded when the first episodes come: nothing else here needs it."""
        tokenizer = load_tokenizer(self._options.model_dir, self._options.add_special_tokens)
        return Dialogues(tokenizer, self._stop)

    def _sleep_engine(self) -> None:
        """Have the engine give its GPU memory back if it is to sleep. Level 1 keeps the weights in the machine's memory, because after an
        evaluation no new ones come."""
        if self._options.sleep:
            self._llm.sleep(level=1)
            self._asleep = SLEEPING

    def _wake_engine(self, parts: Sequence[str] = SLEEPING) -> None:
        """Have the engine take its GPU memory again, or only that of some parts: for new weights that of the weights is enough, and the
        trainer that gathers them still needs memory of its own."""
        tags = [part for part in parts if part in self._asleep]
        if tags:
            self._llm.wake_up(tags=tags)
            self._asleep = tuple(part for part in self._asleep if part not in tags)


def read_model_shape(model_dir: Path) -> dict[str, Any]:
    """Read the part of a model's config that decides whether weights can be swapped in place."""
    config = (model_dir / "config.json").read_bytes()
    if config not in _shapes:
        _shapes.clear()  # one entry is enough: every push asks for the shape of a copy of the same file
        _shapes[config] = _read_shape(model_dir)
    return _shapes[config]


def _read_shape(model_dir: Path) -> dict[str, Any]:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False).to_dict()
    # These keys say where a model lies and how it is loaded, not what tensors it has.
    return {k: v for k, v in config.items() if k not in ("_name_or_path", "transformers_version", "dtype", "use_cache")}


def can_swap(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Return True if an engine of one shape takes the weights of another in place."""
    return old == new and new["model_type"] not in RESTARTED


def cut_vocabulary(llm: Any, vocab_size: int) -> None:
    """Cut the model's padding rows off all logits, as vLLM does with the padding rows that it adds itself.

    Sampled tokens and the log-probs of prompts are then over the ids that the tokenizer knows, as they are in trainer and teachers.
    Raises: RunError if the model gives logits of another width all the same.
    """
    for name, width in llm.collective_rpc("opd_cut_vocabulary", args=(vocab_size,)):
        # None is from a process that gets no logits, see `WorkerExtension.opd_cut_vocabulary`.
        if width not in (vocab_size, None):
            raise RunError(
                f"{llm.llm_engine.model_config.model}: vLLM's {name} gives logits for {width} ids, the tokenizer knows "
                f"{vocab_size}: it could sample what is no token, or not sample what is one"
            )


def start_engine(options: EngineOptions, **overrides: Any) -> Any:
    """Start a `vllm.LLM` that is scheduled in this process. `overrides` are arguments of vLLM that replace those set here.

    Only the temperature can change the distribution: top-k, top-p, min-p, penalties, biases, forbidden words and the model directory's
    generation config are off.
    Raises: RunError if the engine cannot be kept to the tokenizer's ids.
    """
    drop_service_port(os.environ)
    import_lightly("vllm.entrypoints.llm")
    from vllm import LLM
    from vllm.platforms import current_platform

    is_cpu = current_platform.is_cpu()
    on_cpu = cpu_settings(options.model_dir, shares_prompts=options.share_prompts) if is_cpu else {}
    settings = _engine_settings(options) | on_cpu | overrides
    with (
        orphans.mark_children_as_owned(),
        own_files(),
        explain_failed_start(options.tensor_parallel_size),
        _draft_settings(options) as drafting,
    ):
        # Our settings come last, so that no argument of a user undoes them.
        llm = LLM(**{**options.engine_args, **settings, **drafting})
    bind_processes(llm)
    if options.draft is not None:
        llm.collective_rpc("opd_repair_drafting", args=(options.vocab_size,))
    llm.collective_rpc("opd_skip_rank_counts")
    if is_cpu:
        llm.collective_rpc("opd_rotate_every_head")
        llm.collective_rpc("opd_use_norm_kernels")
    if overrides.get("runner") != "pooling":  # a pooling engine has no output head
        cut_vocabulary(llm, options.vocab_size)
    return llm


@contextmanager
def _draft_settings(options: EngineOptions) -> Iterator[dict[str, Any]]:
    """Yield the arguments of vLLM for an engine with a draft, whose files exist within the context; none without a draft."""
    if options.draft is None:
        yield {}
        return
    # A draft with random weights: the true ones come with each push. Every machine makes its own files, because it need not read another's.
    from opd.draft.export import write_blank_draft

    with tempfile.TemporaryDirectory(prefix="opd-draft-") as folder:
        write_blank_draft(options.draft, Path(folder))
        yield {
            "speculative_config": {
                "method": "eagle3",
                "model": folder,
                "num_speculative_tokens": options.num_speculative_tokens,
                # vLLM's default, `greedy`, keeps a guess with the probability p of the one token that the draft holds likeliest, and not
                # with that in which p and q agree.
                "draft_sample_method": "probabilistic",
            },
            "per_request_spec_decode_metrics": "summary",
        }


def _engine_settings(options: EngineOptions) -> dict[str, Any]:
    """Return the arguments of vLLM that are the same on a CPU and a GPU."""
    settings: dict[str, Any] = {
        "model": str(options.model_dir),
        **HF_FORMAT,
        "skip_tokenizer_init": True,
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "logprobs_mode": "processed_logprobs",  # a sampled token's in the distribution that it was drawn from; those of prompts stay raw
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
    """Return the tokens of an output of vLLM. Raises: RunError on NaN log-probs, and if vLLM gave up on the request."""
    logprobs = tuple(float(step[token].logprob) for token, step in zip(output.token_ids, output.logprobs, strict=True))
    # With NaN weights vLLM writes token 0 for ever, without an error. NaN is the one value that is unequal to itself.
    if any(value != value for value in logprobs):
        raise RunError("the rollout engine returned NaN log-probs: the student's weights are broken")
    if output.finish_reason not in get_args(TurnStop):
        raise RunError(f"the rollout engine gave up on a request: vLLM says {output.finish_reason!r}")
    drafted = output.spec_decode_metrics
    return Generated(
        token_ids=tuple(output.token_ids),
        logprobs=logprobs,
        stop_reason=output.finish_reason,
        accepted=() if drafted is None else tuple(drafted.histogram),
    )
