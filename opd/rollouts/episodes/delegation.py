"""Sub-agents: a tool call starts an episode of its own, and returns the last turn of that episode.

    caller      P P  s s s CALL ────────────── answer o o  s s s      the answer is masked here: it is only a copy
    sub-agent             └──▶ task  s s s  o o  s s s ──┘            trained where it was written, by its domain's experts

A sub-agent is the policy itself, with a prompt and a context of its own. All its segments belong to the caller's episode: one
reward, one budget of tokens, one denominator of the loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from opd.config.sub_agents import ANSWER, TASK
from opd.records.environments import Outcome, Tool, ToolCall
from opd.records.episodes import BROKEN
from opd.rollouts.episodes.spec import EpisodeEnd, EpisodeOptions, EpisodeRequest
from opd.rollouts.episodes.sub_agents import REFUSED, SubAgentOptions
from opd.tool_formats.records import BadCall

if TYPE_CHECKING:
    from opd.prompts.conversation import Messages

NO_MORE = "error: no more agents can be started"
"""Result of a call beyond the number of sub-agents that an episode may start. A call whose shared environment was over before its
sub-agent could begin gets it too, but there the caller's episode ends, and nobody reads it."""
NO_ANSWER = "error: {name} stopped before it had an answer"
"""Result of a call whose sub-agent ran into a limit, or whose environment failed."""


class Delegation:
    """The sub-agents that one agent of an episode starts."""

    def __init__(self, request: EpisodeRequest, options: EpisodeOptions, clean: Callable[[str], str]) -> None:
        """`request` and `options` are those of the agent; `clean` returns a text without control characters and special tokens."""
        self._request = request
        self._options = options
        self._clean = clean
        self._num_started = 0
        self.ends: Counter[str] = Counter()
        """Reason -> number of sub-agents that ended for it, those that sub-agents started included; and `REFUSED` -> refused calls."""
        self.error = ""
        """Error of the first sub-agent that broke; empty if none did."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """Tools that start sub-agents."""
        return self._options.sub_agents.tools if self._options.sub_agents else ()

    def starts_sub_agent(self, call: ToolCall) -> bool:
        """Return True if the call is for a sub-agent, and not for the environment. Raises: BadCall if its task is empty."""
        if self._options.sub_agents is None or call.name not in self._options.sub_agents.kinds:
            return False
        if not self._task_of_call(call).strip():
            raise BadCall(f"{call.name}: arguments.task is empty")
        return True

    def make_requests(self, calls: Sequence[ToolCall], tokens: int | None) -> list[EpisodeRequest | None]:
        """Return the request for the episode of each call of a turn; None for a call over the limit. `tokens` is the rest of the
        agent's budget, None if it has no limit."""
        assert self._options.sub_agents is not None
        # Refused calls are among the ends too, but started nothing.
        num_allowed = self._options.sub_agents.at_most - sum(self.ends.values()) + self.ends[REFUSED]
        started = calls[:num_allowed]
        if not started:
            return [None] * len(calls)
        # The tokens, and the sub-agents that may still be started, are divided equally before they run: which sub-agent samples first
        # must not decide how much another one may write.
        share = None if tokens is None else tokens // len(started)
        num_nested = (num_allowed - len(started)) // len(started)
        requests = [self._make_request(call, share, num_nested) for call in started]
        return [*requests, *[None] * (len(calls) - len(started))]

    def refuse_call(self) -> str:
        """Count a call that started no sub-agent, and return its result."""
        self.ends[REFUSED] += 1
        return NO_MORE

    def render_answer(self, call: ToolCall, end: EpisodeEnd, last_turn: str, nested: Delegation) -> str:
        """Count a sub-agent that has ended, and return the result of its call. `last_turn` is the text of its last turn, `nested` the
        sub-agents that it started itself."""
        self.ends += nested.ends
        self.ends[end.reason] += 1
        self.error = self.error or nested.error or (end.error if end.reason in BROKEN else "")
        if end.reason != "done":
            return NO_ANSWER.format(name=call.name)
        return self._sub_agent_kind(call).result.replace(ANSWER, self._clean(last_turn))

    def shares_environment(self, call: ToolCall) -> bool:
        """Return True if the call's sub-agent acts on the environment of this agent."""
        return self._sub_agent_kind(call).shares

    def _sub_agent_kind(self, call: ToolCall) -> SubAgentOptions:
        assert self._options.sub_agents is not None
        return self._options.sub_agents.kinds[call.name]

    def _task_of_call(self, call: ToolCall) -> str:
        return self._clean(str(call.arguments["task"]))

    def _make_request(self, call: ToolCall, tokens: int | None, num_nested: int) -> EpisodeRequest:
        """Make the request for the episode that a call starts. `tokens` is its share of the budget, `num_nested` the number of sub-agents
        that it may start itself. Its ids, and so its seeds, follow from the order of calls alone."""
        assert self._options.sub_agents is not None
        self._num_started += 1
        caller, kind, task = self._request, self._sub_agent_kind(call), self._task_of_call(call)
        id_suffix = f"/{call.name}-{self._num_started}"
        limits = [limit for limit in (kind.max_tokens, tokens) if limit is not None]
        domain, prompt = kind.domain or caller.sample.domain, caller.prompt
        return replace(
            caller,
            prompt=replace(
                prompt,
                id=prompt.id + id_suffix,
                token_ids=(),
                text=_first_message(kind, task, plain=isinstance(prompt.text, str)),
                metadata={**prompt.metadata, "task": task},
            ),
            sample=replace(caller.sample, sample_id=caller.sample.sample_id + id_suffix, domain=domain),
            options=replace(
                self._options,
                environment=kind.environment,
                options=kind.options,
                step_timeout_s=kind.step_timeout_s,
                max_turns=kind.max_turns,
                max_tokens=min(limits, default=None),
                sub_agents=self._options.sub_agents.nested_options(num_nested),
            ),
            masked=caller.masked_by_domain.get(domain, frozenset()) if kind.domain else caller.masked,
            cut_after=None,
            guide=None,
        )


def _first_message(kind: SubAgentOptions, task: str, *, plain: bool) -> str | Messages:
    """Return the prompt of a sub-agent; `plain`: as text, not as messages."""
    task_text = kind.prompt.replace(TASK, task)
    if plain:
        return task_text
    system = [{"role": "system", "content": kind.system}] if kind.system else []
    return [*system, {"role": "user", "content": task_text}]


def merge_answers(delegated: Sequence[bool], answers: Sequence[str], outcome: Outcome) -> tuple[str, ...]:
    """Return one text for each call of a turn. `delegated` says of each call whether it started a sub-agent: then its text is the next of
    `answers`, else the next observation of the environment, empty if that has fewer."""
    observation = outcome.observation
    sub_agent_answers = iter(answers)
    observations = iter((observation,) if isinstance(observation, str) else observation)
    return tuple(next(sub_agent_answers) if is_delegated else next(observations, "") for is_delegated in delegated)
