"""The part of text-only experts in each step: their answers take the place of the student's responses, or stand beside them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opd.errors import ConfigError, RunError
from opd.prompts.encode import encode_text
from opd.prompts.turn_ends import find_turn_end
from opd.prompts.untrusted_text import escape_specials, special_texts
from opd.records.texts import TextAnswer, TextSpending
from opd.records.types import Prompt, QuarantinedPrompt, Rollout, RolloutBatch, Span
from opd.servers.answers_file import AnswersFile
from opd.servers.budget import BudgetedServer, CallBudget
from opd.servers.text_server import TextServer, TextServerSpec
from opd.text import quote_for_shell


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDomain:
    """A domain whose expert only writes text."""

    expert: str
    """The expert's name."""
    server: TextServerSpec
    """Settings of requests to it."""
    steps: int | None
    """Steps in which answers take the place of the student's responses; None: all."""
    compares: bool
    """True if after these steps a discriminator compares the student's responses with answers, so that the expert is still asked."""
    budget: CallBudget
    """Budget of its answers."""

    def teaches_in(self, step: int) -> bool:
        """Return True if answers take the place of responses in this step."""
        return self.steps is None or step <= self.steps

    def replaces(self, rollout: Rollout) -> bool:
        """Return True if the answer takes the place of this response. For a discriminator, of several to one prompt only the first has to
        go: it learns from the others, and the same text again would teach nothing."""
        return self.teaches_in(rollout.step) and (not self.compares or rollout.sample_id == rollout.group)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTeachingSpec:
    """All text-only experts of a merge."""

    domains: Mapping[str, TextDomain]
    stop_token_ids: Sequence[int]
    """Ids that end a response of the student's."""
    max_new_tokens: int
    max_model_len: int
    """Most tokens of a prompt and its response."""
    max_quarantined: float
    """Share of a step's responses that may be left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstAnswer:
    """Answer of an expert to the one prompt by which it shows that it answers."""

    domain: str
    prompt: Prompt
    answer: TextAnswer
    seconds: float
    """Until the answer was there."""


class TextTeaching:
    """Implements `opd.interfaces.TextExperts`."""

    def __init__(self, spec: TextTeachingSpec, tokenizer: Any, path: Path) -> None:
        """`tokenizer` is the student's; `path`, the file of the run's answers, may have those of an earlier session.

        Raises: StorageError.
        """
        self._spec = spec
        self._tokenizer = tokenizer
        self._specials = special_texts(tokenizer)
        self._end_id = find_turn_end(tokenizer, spec.stop_token_ids)
        self._path = path
        self._file = AnswersFile(path)
        self._servers = {
            domain: BudgetedServer(TextServer(own.expert, own.server), own.budget, self._file)
            for domain, own in spec.domains.items()
        }

    def prove(self, prompts: Mapping[str, Prompt], run_dir: Path | None = None) -> list[FirstAnswer]:
        """Have every expert answer one prompt of its domain. `prompts`: domain -> that prompt. `run_dir`: what a resume is given; None
        before there is a run. Returns the answers.

        Raises: ConfigError for an expert whose answer cannot be used; StorageError.
        """
        first_answers = []
        for domain, own in self._spec.domains.items():
            prompt, began = prompts[domain], time.monotonic()
            try:
                self._ask(domain, [prompt])
                problem = self._find_problem(domain, prompt.id)
            except RunError as error:
                problem = str(error)
            if problem:
                resume = "" if run_dir is None else f", then `opd merge --resume {quote_for_shell(run_dir)}`"
                raise ConfigError.at(
                    f"experts.{own.expert}.engine",
                    found=problem,
                    wanted=f"a server that answers prompt {prompt.id}",
                    fix=f"see that it does{resume}; --set experts.{own.expert}.engine.KEY=VALUE changes a key of the engine",
                )
            answer = self._find(domain, prompt.id)
            assert answer is not None, "an answer without a problem"
            first_answers.append(
                FirstAnswer(domain=domain, prompt=prompt, answer=answer, seconds=time.monotonic() - began)
            )
        return first_answers

    def teach(self, batch: RolloutBatch, prompts: Sequence[Prompt]) -> RolloutBatch:
        step = batch.rollouts[0].step if batch.rollouts else 0
        by_group = {f"{step:06d}/{prompt.id}": prompt for prompt in prompts}
        asked = {domain for domain, own in self._spec.domains.items() if own.teaches_in(step) or own.compares}
        for domain in sorted(asked):
            wanted = {r.group: by_group[r.group] for r in batch.rollouts if r.domain == domain}
            self._ask(domain, list(wanted.values()))
        rollouts: list[Rollout] = []
        left_out: list[QuarantinedPrompt] = []
        for rollout in batch.rollouts:
            if rollout.domain not in asked:
                rollouts.append(rollout)
                continue
            prompt_id = by_group[rollout.group].id
            if problem := self._find_problem(rollout.domain, prompt_id):
                left_out.append(QuarantinedPrompt(prompt_id=prompt_id, domain=rollout.domain, reason=problem))
            elif self._spec.domains[rollout.domain].replaces(rollout):
                rollouts.append(self._put_answer(rollout, prompt_id))
            else:
                rollouts.append(rollout)
        if len(left_out) > self._spec.max_quarantined * len(batch.rollouts):
            raise RunError(
                f"step {step}: {len(left_out)} of {len(batch.rollouts)} responses have no answer of their expert, more than "
                f"teachers.max_quarantined {self._spec.max_quarantined:g}; the first: {left_out[0].reason}"
            )
        return replace(batch, rollouts=tuple(rollouts), quarantined=(*batch.quarantined, *left_out))

    def is_taught(self, rollout: Rollout) -> bool:
        own = self._spec.domains.get(rollout.domain)
        return own is not None and own.replaces(rollout)

    def find_response(self, rollout: Rollout) -> tuple[tuple[int, ...], bool]:
        prompt_id = rollout.group.partition("/")[2]
        answer = self._find(rollout.domain, prompt_id)
        if answer is None:
            raise RunError(
                f"{self._path}: no answer to prompt {prompt_id}, which this run had; put the file back as it was"
            )
        return self._encode(answer, len(rollout.prompt_ids))

    def sum_spending(self) -> dict[str, TextSpending]:
        return {own.expert: self._servers[domain].sum_spending() for domain, own in self._spec.domains.items()}

    def _ask(self, domain: str, prompts: Sequence[Prompt]) -> None:
        """Ask the domain's expert about the prompts that it has not answered yet. Raises: RunError where a budget ends."""
        missing = [prompt for prompt in prompts if self._find(domain, prompt.id) is None]
        if missing:
            self._servers[domain].ask_prompts(missing)

    def _find(self, domain: str, prompt_id: str) -> TextAnswer | None:
        return self._file.find_answer(self._spec.domains[domain].expert, prompt_id)

    def _find_problem(self, domain: str, prompt_id: str) -> str:
        """Return why the prompt has no answer that can be used; empty if it has one."""
        expert = self._spec.domains[domain].expert
        answer = self._file.find_answer(expert, prompt_id)
        if answer is None:
            return self._file.find_failure(expert, prompt_id)
        unknown = getattr(self._tokenizer, "unk_token_id", None)
        if not answer.problem and unknown is not None and unknown in self._encode_text(answer):
            return f"expert {expert}: text that the student's tokenizer cannot write"
        return answer.problem

    def _put_answer(self, rollout: Rollout, prompt_id: str) -> Rollout:
        """Return the rollout with the expert's answer in the place of the student's response."""
        answer = self._find(rollout.domain, prompt_id)
        assert answer is not None, f"{prompt_id}: the expert was not asked"
        ids, is_whole = self._encode(answer, len(rollout.prompt_ids))
        return replace(
            rollout,
            response_ids=ids,
            behaviour_logprobs=(0.0,) * len(ids),
            spans=(Span(length=len(ids), origin="taught", policy_version=rollout.policy_version),),
            stop_reason="stop" if is_whole else "length",
        )

    def _encode(self, answer: TextAnswer, prompt_tokens: int) -> tuple[tuple[int, ...], bool]:
        """Return the answer in the student's tokens, with an end token if the expert ended it and it fits, and whether it has one."""
        ids = self._encode_text(answer)
        ids += [self._end_id] if answer.finished else []
        room = min(self._spec.max_new_tokens, self._spec.max_model_len - prompt_tokens)
        return tuple(ids[:room]), answer.finished and len(ids) <= room

    def _encode_text(self, answer: TextAnswer) -> list[int]:
        return encode_text(self._tokenizer, escape_specials(answer.text, self._specials))
