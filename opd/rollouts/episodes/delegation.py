"""Sub-agents: a tool call starts an episode of its own, and the last answer of that is what the call returns.

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
"""What the policy reads after a call beyond the number of sub-agents that an episode may start. Nobody reads it after one
whose environment was over before it could begin."""
NO_ANSWER = "error: {name} stopped before it had an answer"
"""What it reads of a sub-agent that ran into a limit, or whose environment failed."""


class Delegation:
    """The sub-agents that one agent of an episode starts."""

    def __init__(self, request: EpisodeRequest, options: EpisodeOptions, clean: Callable[[str], str]) -> None:
        """`request` and `options` are the agent's; `clean` takes out of a text what is no text to a model."""
        self._request = request
        self._options = options
        self._clean = clean
        self._number = 0
        self.ends: Counter[str] = Counter()
        """Why sub-agents ended, those that they started included -> how many."""
        self.error = ""
        """What broke the first that broke."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """Tools that start sub-agents."""
        return self._options.sub_agents.tools if self._options.sub_agents else ()

    def starts_sub_agent(self, call: ToolCall) -> bool:
        """Return True if the call is for a sub-agent, and not for the environment. Raises: BadCall if it gives no task."""
        if self._options.sub_agents is None or call.name not in self._options.sub_agents.kinds:
            return False
        if not self._task_of_call(call).strip():
            raise BadCall(f"{call.name}: arguments.task is empty")
        return True

    def make_requests(self, calls: Sequence[ToolCall], tokens: int | None) -> list[EpisodeRequest | None]:
        """Return the episode that each call of a turn starts; None for a call over the limit. `tokens`: what is left of the
        agent's budget."""
        assert self._options.sub_agents is not None
        # A call that was refused is among the ends too, but started nothing.
        num_allowed = self._options.sub_agents.at_most - sum(self.ends.values()) + self.ends[REFUSED]
        started = calls[:num_allowed]
        if not started:
            return [None] * len(calls)
        # Equal shares, fixed before they run: who samples first must not decide what another one may still write.
        share = None if tokens is None else tokens // len(started)
        inner = (num_allowed - len(started)) // len(started)
        requests = [self._make_request(call, share, inner) for call in started]
        return [*requests, *[None] * (len(calls) - len(started))]

    def refuse_call(self) -> str:
        """Count a call that started nothing, and return what the agent reads of it."""
        self.ends[REFUSED] += 1
        return NO_MORE

    def render_answer(self, call: ToolCall, end: EpisodeEnd, last_turn: str, inner: Delegation) -> str:
        """Return what the agent reads of a sub-agent that ended so, with `last_turn` as its last turn and `inner` its own
        sub-agents."""
        self.ends += inner.ends
        self.ends[end.reason] += 1
        self.error = self.error or inner.error or (end.error if end.reason in BROKEN else "")
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

    def _make_request(self, call: ToolCall, tokens: int | None, inner: int) -> EpisodeRequest:
        """Return the episode that a call starts. Its ids, and so its seeds, follow from the order of calls alone."""
        assert self._options.sub_agents is not None
        self._number += 1
        caller, kind, task = self._request, self._sub_agent_kind(call), self._task_of_call(call)
        id_suffix = f"/{call.name}-{self._number}"
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
                sub_agents=self._options.sub_agents.nested_options(inner),
            ),
            masked=caller.masked_by_domain.get(domain, frozenset()) if kind.domain else caller.masked,
            cut_after=None,
            guide=None,
        )


def _first_message(kind: SubAgentOptions, task: str, *, plain: bool) -> str | Messages:
    """Return what the sub-agent reads before the first observation."""
    task_text = kind.prompt.replace(TASK, task)
    if plain:
        return task_text
    system = [{"role": "system", "content": kind.system}] if kind.system else []
    return [*system, {"role": "user", "content": task_text}]


def merge_answers(calls: Sequence[bool], answers: Sequence[str], outcome: Outcome) -> tuple[str, ...]:
    """Return one text for each call of a turn: `calls` says which started sub-agents, whose answers these are; the others are
    the environment's."""
    observation = outcome.observation
    sub_agent_answers, observations = (
        iter(answers),
        iter((observation,) if isinstance(observation, str) else observation),
    )
    return tuple(next(sub_agent_answers) if delegated else next(observations, "") for delegated in calls)
