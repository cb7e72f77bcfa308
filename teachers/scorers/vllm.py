"""Scoring by a vLLM engine inside the worker.

Two runners of vLLM answer the three payloads:

    hidden_states                 pooling runner, one embedding per token: the states after the final norm
    sampled_logprobs, top_k       generating runner, log-probs of the prompt; entry t is the log-prob of token t

Teachers with the same config are swapped inside the running engine; another config needs a new engine. vLLM does not
notice weights that it loads wrongly. So each teacher's answers are first compared with a plain forward pass of
transformers on a few tokens, on the CPU. For that its files are read a second time, once per worker and run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from opd.errors import RunError
from opd.models.heads import HeadFile, HeadSource
from opd.models.logit_rule import LogitRule
from opd.payloads import answer_class
from opd.payloads.answer import Answer
from opd.payloads.hidden_states import HiddenStates
from opd.records.types import Rollout, Teacher
from opd.rollouts.weight_loading import swap_weights, wipe_cache
from opd.rollouts.worker import EngineOptions, can_swap, read_model_shape, start_engine, stop_engine
from opd.stream.schema import TargetRow
from teachers.scorers import ENGINE_TOKENS, ScorerOptions
from teachers.scorers.rows import build_logprob_answer, split_batches
from teachers.scorers.transformers import TransformersScorer
from teachers.weight_keys import weight_key

MAX_NUM_SEQS = 256
"""Sequences that the engine computes at the same time."""
TOLERANCE = {"float32": 0.01, "bfloat16": 0.1}
"""Compute type -> largest gap to transformers on the probe; `opd.payloads.answer.Answer.gap` defines the gap."""


class VLLMScorer:
    """Implements `opd.interfaces.Scorer`; one teacher is in the engine at a time."""

    def __init__(self, options: ScorerOptions) -> None:
        self._options = options
        self._dtype = getattr(torch, options.dtype)
        self._answer_class = answer_class(options.payload)
        self._pooling = self._answer_class is HiddenStates
        num_logprobs = (
            0 if self._pooling else self._answer_class.named_by_engine(min(options.top_k, options.vocab_size))
        )
        assert num_logprobs is not None, f"vLLM does not tell what {options.payload} needs"
        self._top_k = num_logprobs
        self._llm: Any = None
        self._shape: dict[str, Any] = {}
        self._loaded_key = ""
        self._heads: dict[str, HeadSource] = {}
        """Key: `weight_key` of the teacher."""

    def prefetch(self, teacher: Teacher) -> None:
        """Do nothing: the engine reads a teacher's files when it needs them."""

    def head(self, teacher: Teacher) -> Tensor:
        """Return the teacher's output head, [V, D] on the CPU, from its files: a pooling engine does not load the head."""
        return self._make_reference().head(teacher)

    def head_key(self, teacher: Teacher) -> str:
        """Return the content hash of the head and its logit rule.

        Raises: RunError as `TransformersScorer.head_key` does, and if vLLM's answers differ from those of transformers.
        """
        return self._prove_head(teacher).key

    def head_file(self, teacher: Teacher) -> HeadFile | None:
        """Return the file that holds the head."""
        return self._prove_head(teacher).file

    def layout(self, teacher: Teacher) -> None:
        """Return None: the engine keeps its sequences apart by itself."""

    def head_rule(self, teacher: Teacher) -> LogitRule:
        """Return what the teacher's architecture does to its logits."""
        return self._prove_head(teacher).rule

    def score(self, teacher: Teacher, rollouts: Sequence[Rollout], broken: dict[str, str]) -> Iterator[list[TargetRow]]:
        """Yield target rows in batches, shortest rows first.

        A response whose states or log-probs are not finite gets no row but an entry in `broken`: sample id -> reason.
        """
        key = self.head_key(teacher)
        for batch in split_batches(rollouts, ENGINE_TOKENS):
            self._load_teacher(teacher)  # the caller may have asked for another teacher between two batches
            rows = []
            for rollout, answer in zip(batch, self._score_batch(batch, key), strict=True):
                if answer is None:
                    quantity = "hidden states" if self._pooling else "log-probs"
                    broken[rollout.sample_id] = f"teacher {teacher.name}: {quantity} are not finite"
                else:
                    rows.append(TargetRow(rollout=rollout, teacher=teacher.name, answer=answer))
            yield rows

    def _score_batch(self, rollouts: Sequence[Rollout], head: str) -> list[Answer | None]:
        """Return the loaded teacher's answer for each row, None for one that is not finite.

        `head` is the key of the teacher's head.
        """
        answers = self._run_engine(rollouts, head)
        for i, rollout in enumerate(rollouts):
            if answers[i] is None:
                # The row itself may be fine: vLLM reuses blocks of its cache without clearing them. Attention multiplies
                # values beyond a sequence's end by 0, and 0 * NaN is NaN. So clear the cache and score the row alone.
                wipe_cache(self._llm)
                (answers[i],) = self._run_engine([rollout], head)
        if None in answers:
            wipe_cache(self._llm)  # the NaNs of these rows must not reach later rows
        return answers

    def _run_engine(self, rollouts: Sequence[Rollout], head: str) -> list[Answer | None]:
        prompts: Any = [{"prompt_token_ids": [*r.prompt_ids, *r.response_ids]} for r in rollouts]
        return (
            self._encode_states(rollouts, prompts, head)
            if self._pooling
            else self._generate_logprobs(rollouts, prompts)
        )

    def _encode_states(self, rollouts: Sequence[Rollout], prompts: Any, head: str) -> list[Answer | None]:
        from vllm import PoolingParams

        # Without this, a pooler scales each state to length 1.
        params = PoolingParams(use_activation=False)
        outputs = self._llm.encode(prompts, pooling_params=params, pooling_task="token_embed", use_tqdm=False)
        answers: list[Answer | None] = []
        for rollout, output in zip(rollouts, outputs, strict=True):
            start = len(rollout.prompt_ids) - 1  # the state that predicts a token is one position before the token
            offsets = torch.tensor(rollout.trained_positions, dtype=torch.long)
            hidden_N_D = output.outputs.data[start + offsets].to(self._dtype).cpu()
            finite = bool(torch.isfinite(hidden_N_D).all())
            answers.append(HiddenStates.from_states(hidden_N_D, head) if finite else None)
        return answers

    def _generate_logprobs(self, rollouts: Sequence[Rollout], prompts: Any) -> list[Answer | None]:
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=self._top_k, flat_logprobs=True, detokenize=False
        )
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        answers = []
        for rollout, output in zip(rollouts, outputs, strict=True):
            steps = [output.prompt_logprobs[len(rollout.prompt_ids) + offset] for offset in rollout.trained_positions]
            positions = [{token: entry.logprob for token, entry in step.items()} for step in steps]
            answers.append(build_logprob_answer(self._answer_class, rollout, positions, self._top_k))
        return answers

    def _load_teacher(self, teacher: Teacher) -> None:
        if self._loaded_key == weight_key(teacher):
            return
        if teacher.adapter_dir is not None:
            raise RunError(f"teacher {teacher.name}: teachers.engine vllm does not load adapters; transformers does")
        self._loaded_key = ""  # half-loaded weights must not pass for a teacher if loading fails
        shape = read_model_shape(teacher.model_dir)
        if self._llm is not None and can_swap(self._shape, shape):
            swap_weights(self._llm, teacher.model_dir.absolute())
        else:
            self._restart_engine(teacher, shape)
        self._loaded_key = weight_key(teacher)

    def _restart_engine(self, teacher: Teacher, shape: dict[str, Any]) -> None:
        old_llm, self._llm = self._llm, None
        stop_engine(old_llm)  # before the new engine starts, because both would not fit into memory
        length = self._options.max_model_len if self._pooling else self._options.max_model_len + 1
        context = (shape.get("text_config") or shape).get("max_position_embeddings")
        if context is not None and length > context:
            suffix = "" if self._pooling else " and one token for vLLM to generate"
            raise RunError(
                f"teacher {teacher.name}: its context is {context} tokens, rollout.max_model_len (or the max_model_len of "
                f"an expert's own prompt) {self._options.max_model_len}{suffix} do not fit: lower it"
            )
        options = EngineOptions(
            model_dir=teacher.model_dir.absolute(),
            dtype=self._options.dtype,
            max_model_len=length,
            max_num_seqs=MAX_NUM_SEQS,
            gpu_memory_utilization=self._options.gpu_memory_utilization,
            vocab_size=self._options.vocab_size,
            tensor_parallel_size=self._options.tensor_parallel_size,
        )
        if self._pooling:
            from vllm.config import PoolerConfig

            # vLLM's pooling front end needs a tokenizer, although no text is tokenised here.
            pooler = PoolerConfig(task="token_embed")
            self._llm = start_engine(options, runner="pooling", pooler_config=pooler, skip_tokenizer_init=False)
        else:
            self._llm = start_engine(options, max_logprobs=max(1, self._top_k))
        self._shape = shape

    def _make_reference(self) -> TransformersScorer:
        """Make a new transformers scorer on the CPU. It is not kept, because it would hold a second teacher in memory."""
        return TransformersScorer(self._options, device="cpu")

    def _prove_head(self, teacher: Teacher) -> HeadSource:
        """Return the head of a teacher, after comparing vLLM with transformers on a probe.

        Raises: RunError if they differ.
        """
        weights = weight_key(teacher)
        if weights not in self._heads:
            reference = self._make_reference()
            head = HeadSource(
                key=reference.head_key(teacher), rule=reference.head_rule(teacher), file=reference.head_file(teacher)
            )
            probe = _make_probe(self._options.vocab_size)
            reference_rows = [row for rows in reference.score(teacher, [probe], {}) for row in rows]
            self._load_teacher(teacher)
            (answer,) = self._score_batch([probe], head.key)
            # There is no row or answer if states are not finite; `score` then reports each such row.
            if reference_rows and answer is not None:
                gap = answer.gap(reference_rows[0].answer, len(probe.response_ids), self._dtype)
                if gap > TOLERANCE[self._options.dtype]:
                    raise RunError(
                        f"teacher {teacher.name}: vLLM is {gap:.3g} away from transformers on "
                        f"{len(probe.response_ids)} tokens, {TOLERANCE[self._options.dtype]} is allowed: "
                        "it computes this architecture otherwise; use teachers.engine transformers"
                    )
            self._heads[weights] = head
        return self._heads[weights]


def _make_probe(vocab_size: int) -> Rollout:
    """Return a few tokens that every vocabulary has."""
    prompt, *response = range(min(8, vocab_size))
    return Rollout.from_tokens("probe", (prompt,), tuple(response))
