"""Scoring by servers elsewhere that speak the OpenAI completions API with vLLM's prompt log-probs (`vllm serve`).

    POST {base_url}/completions  {"model", "prompt": [ids], "max_tokens": 1, "temperature": 0, "prompt_logprobs": k}
    → choices[0].prompt_logprobs = [null, {"17": {"logprob": -0.2, ...}, ...}, ...]     one entry per token

Each response is sent in a request of its own, so a server cannot mix up the answers of two rows. Every attempt has a
deadline, and the number of attempts is limited. The expert's own directory is still needed, because its tokenizer and
vocabulary are checked; its weights are not read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from opd.errors import RunError
from opd.models.logit_rule import IDENTITY, LogitRule
from opd.payloads import answer_class
from opd.payloads.answer import Position
from opd.records.types import Rollout, Teacher
from opd.servers.requests import IN_FLIGHT, MAX_SHOWN, open_session, post_request
from opd.stream.schema import TargetRow
from opd.text import to_one_line
from teachers.scorers import ENGINE_TOKENS, ScorerOptions, Server
from teachers.scorers.rows import build_logprob_answer, split_batches

PROBE_TOKENS = 8
"""Tokens that a server has to score before a step relies on it."""

Sequences = Sequence[Sequence[int]]


class OpenAIScorer:
    """Implements `opd.interfaces.Scorer` for the payloads that can be made of an engine's log-probs."""

    def __init__(self, options: ScorerOptions) -> None:
        self._answers = answer_class(options.payload)
        num_logprobs = self._answers.named_by_engine(min(options.top_k, options.vocab_size))
        assert num_logprobs is not None, "refused when the pipeline is read"
        self._top_k = num_logprobs
        self._vocab_size = options.vocab_size
        self._servers = options.servers
        self._timeout_s = options.server_timeout_s
        self._key_env = options.api_key_env
        self._verified_teachers: set[str] = set()

    def prefetch(self, teacher: Teacher) -> None:
        """Do nothing: the server holds the weights."""

    def head(self, teacher: Teacher) -> Tensor:
        """Raise, because servers send no head; only hidden states need one, and they are refused with servers."""
        raise AssertionError("a head is needed by hidden states only")

    def head_key(self, teacher: Teacher) -> str:
        """Return an empty key, once the server has scored a few tokens.

        Raises: RunError if the teacher has no server, the server does not score, or its head has padding rows.
        """
        if teacher.name not in self._verified_teachers:
            self._refuse_padded_head(teacher)
            probe = list(range(min(PROBE_TOKENS, self._vocab_size)))
            asyncio.run(self._request_all(self._find_server(teacher), teacher, [probe]))
            self._verified_teachers.add(teacher.name)
        return ""

    def head_file(self, teacher: Teacher) -> None:
        """Return None: a server gives no access to its files."""
        return None

    def layout(self, teacher: Teacher) -> None:
        """Return None: the engine keeps its sequences apart by itself."""

    def head_rule(self, teacher: Teacher) -> LogitRule:
        """Return the identity: the server's log-probs are final."""
        return IDENTITY

    def score(self, teacher: Teacher, rollouts: Sequence[Rollout], broken: dict[str, str]) -> Iterator[list[TargetRow]]:
        """Yield target rows in batches, shortest rows first.

        A response with a log-prob that is not finite gets no row but an entry in `broken`: sample id -> reason.
        Raises: RunError if all attempts fail, or if an answer cannot be used.
        """
        self.head_key(teacher)
        for batch in split_batches(rollouts, ENGINE_TOKENS):
            sequences = [[*r.prompt_ids, *r.response_ids] for r in batch]
            rows = []
            for rollout, positions in zip(
                batch, asyncio.run(self._request_all(self._find_server(teacher), teacher, sequences)), strict=True
            ):
                trained_positions = [
                    positions[len(rollout.prompt_ids) + offset] for offset in rollout.trained_positions
                ]
                answer = build_logprob_answer(self._answers, rollout, trained_positions, self._top_k)
                if answer is None:
                    broken[rollout.sample_id] = f"teacher {teacher.name}: log-probs are not finite"
                else:
                    rows.append(TargetRow(rollout=rollout, teacher=teacher.name, answer=answer))
            yield rows

    def _find_server(self, teacher: Teacher) -> Server:
        if teacher.name not in self._servers:
            raise RunError(
                f"teacher {teacher.name}: no server; teachers.servers names {', '.join(sorted(self._servers)) or 'none'}"
            )
        return self._servers[teacher.name]

    def _refuse_padded_head(self, teacher: Teacher) -> None:
        """Refuse a head with padding rows. Raises: RunError.

        The server's softmax includes the padding rows, and their probability cannot be taken out of its log-probs.
        """
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(teacher.model_dir, trust_remote_code=False)
        rows = config.get_text_config(decoder=True).vocab_size
        if rows > self._vocab_size:
            raise RunError(
                f"teacher {teacher.name}: its head has {rows} rows, the tokenizer knows {self._vocab_size}: the rest would "
                "count in a server's log-probs; use teachers.engine vllm or transformers, or serve a model without them"
            )

    async def _request_all(self, server: Server, teacher: Teacher, sequences: Sequences) -> list[list[Position]]:
        """Request the log-probs of all sequences, `IN_FLIGHT` requests at a time.

        Returns for each sequence one entry per token. The first entry is empty: nothing predicts the first token.
        """
        free_slots = asyncio.Semaphore(IN_FLIGHT)
        url = f"{server.base_url.rstrip('/')}/completions"
        async with open_session(self._timeout_s, self._key_env, "the scoring worker's environment") as session:

            async def request_positions(ids: Sequence[int]) -> list[Position]:
                async with free_slots:
                    request = self._build_request(server, ids)
                    answer = await post_request(session, url, request, f"teacher {teacher.name}: {url}")
                    return self._parse_positions(answer, ids, teacher)

            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(request_positions(ids)) for ids in sequences]
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def _build_request(self, server: Server, ids: Sequence[int]) -> dict[str, Any]:
        return {
            "model": server.model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": self._top_k,
        }

    def _parse_positions(self, response: Any, ids: Sequence[int], teacher: Teacher) -> list[Position]:
        """Check a server's answer and return its log-probs, one entry per token. Raises: RunError saying what is wrong."""
        speaker = f"teacher {teacher.name}: its server"
        choices = response.get("choices") if isinstance(response, dict) else None
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise RunError(f"{speaker} answered without one choice: {to_one_line(json.dumps(response), MAX_SHOWN)}")
        steps = choices[0].get("prompt_logprobs")
        if not isinstance(steps, list):
            raise RunError(
                f"{speaker} sends no prompt_logprobs; it has to be one that knows them, such as `vllm serve`"
            )
        if len(steps) != len(ids):
            raise RunError(f"{speaker} scored {len(steps)} positions of {len(ids)} tokens")
        return [
            {},
            *(self._parse_position(step, token, speaker) for step, token in zip(steps[1:], ids[1:], strict=True)),
        ]

    def _parse_position(self, step: Any, token: int, speaker: str) -> Position:
        if step is None:  # a server that has no number for this token; the response is then left out as not finite
            return {token: float("nan")}
        try:
            position = {int(key): _parse_number(entry["logprob"]) for key, entry in step.items()}
        except (AttributeError, KeyError, TypeError, ValueError):
            raise RunError(
                f"{speaker} sends prompt_logprobs that cannot be read: {to_one_line(json.dumps(step), MAX_SHOWN)}"
            ) from None
        unknown_ids = [key for key in position if not 0 <= key < self._vocab_size]
        if unknown_ids:
            raise RunError(
                f"{speaker} has another vocabulary: it names token {unknown_ids[0]}, the tokenizer knows {self._vocab_size}"
            )
        if token not in position:
            raise RunError(f"{speaker} scored other tokens than were sent: {token} is not among {list(position)[:5]}")
        if len(position) < self._top_k:
            raise RunError(
                f"{speaker} sends {len(position)} log-probs a token, objective.k is {self._top_k}: "
                f"start it with `--max-logprobs {self._top_k}`"
            )
        if any(value > 1e-3 for value in position.values()):  # a log-prob is at most 0, apart from rounding
            raise RunError(f"{speaker} sends {max(position.values()):.3g} as a log-prob; these may be logits")
        return position


def _parse_number(value: Any) -> float:
    return float("nan") if value is None else float(value)
