"""The black box: an agent's program runs each episode, and asks the policy over HTTP. (The white box, an environment of ours, is
`opd.rollouts.episodes.runner`.)

    task ─→ program ── requests ─→ endpoint ─→ session ─→ engine
               └─ result ─→ reward                └─ trace ─→ rollouts

Whatever a program does ends its own episode at most. `play_all_episodes` is the entrance for both kinds of episodes.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opd.interfaces import TokenEngine
from opd.machine import orphans
from opd.records.episodes import BROKEN, EpisodeResult
from opd.rollouts.endpoint.dialogue import ChatMessages, ClientDialogue, PlainMessages
from opd.rollouts.endpoint.options import AgentOptions
from opd.rollouts.endpoint.program import ProgramResult, program_environment, run_program
from opd.rollouts.endpoint.server import EndpointServer
from opd.rollouts.endpoint.session import EndpointSession, SessionLimits
from opd.rollouts.episodes.runner import Dialogues, open_guard_watch, run_episodes
from opd.rollouts.episodes.spec import EpisodeEnd, EpisodeRequest, is_reward
from opd.rollouts.episodes.threads import CallFailed, CallOverdue, OwnThread
from opd.rollouts.episodes.trace import Trace
from opd.text import to_one_line
from opd.verifiers import build_verifier

MAX_SHOWN = 200
"""Longest part of a program's or verifier's error that is shown, in characters."""


async def play_all_episodes(
    requests: Sequence[EpisodeRequest],
    engine: TokenEngine,
    dialogues: Dialogues,
    context: int,
    version: int,
    expert: TokenEngine | None = None,
) -> list[EpisodeResult]:
    """Run all episodes at once, those of agents' programs and those of environments, and return results in the requests' order.

    `context` is the longest sequence of the engine in tokens, `version` the policy's; `expert` writes some turns of environments'
    episodes, and none of a program's. Raises: RunError, ModelError.
    """
    agent_requests = [request for request in requests if isinstance(request.options, AgentOptions)]
    if not agent_requests:
        return await run_episodes(requests, engine, dialogues, context, version, expert)
    environment_requests = [request for request in requests if not isinstance(request.options, AgentOptions)]
    # See `opd.rollouts.episodes.threads.hand_over`. Environments' episodes have another one, which `run_episodes` makes.
    handover = asyncio.Lock()
    agents = [_ProgramEpisode(request, engine, dialogues, context, version, handover) for request in agent_requests]
    # Domain -> as many slots as programs of it may run side by side.
    program_slots = {agent.domain: asyncio.Semaphore(agent.max_parallel) for agent in agents}
    try:
        async with EndpointServer() as endpoint, asyncio.TaskGroup() as group:
            environment_task = group.create_task(
                run_episodes(environment_requests, engine, dialogues, context, version, expert)
            )
            agent_tasks = [group.create_task(agent.run(endpoint, program_slots[agent.domain])) for agent in agents]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    pairs = zip(
        [*environment_requests, *agent_requests],
        [*environment_task.result(), *(task.result() for task in agent_tasks)],
        strict=True,
    )
    results = {request.sample.sample_id: result for request, result in pairs}
    return [results[request.sample.sample_id] for request in requests]


class _ProgramEpisode:
    """One episode while its program runs."""

    def __init__(
        self,
        request: EpisodeRequest,
        engine: TokenEngine,
        dialogues: Dialogues,
        context: int,
        version: int,
        handover: asyncio.Lock,
    ) -> None:
        assert isinstance(request.options, AgentOptions)
        self._request, self._options = request, request.options
        self.domain, self.max_parallel = request.prompt.domain, request.options.parallel
        self._trace = Trace(version, request.masked)
        limits = SessionLimits(
            max_new_tokens=self._options.max_turn_tokens,
            max_model_len=context,
            max_calls=self._options.max_calls,
            max_tokens=self._options.max_tokens,
            seed=f"{request.seed}/{request.sample.sample_id}",
        )
        self._watch = open_guard_watch(request)
        self._session = EndpointSession(
            self._trace, engine, _open_dialogue(dialogues, request), limits, self._watch, handover
        )

    async def run(self, endpoint: EndpointServer, program_slots: asyncio.Semaphore) -> EpisodeResult:
        """Run the program to its end, once one of the slots is free. Raises: RunError if the engine fails."""
        reward: float | None = None
        try:
            async with program_slots:
                program_result = await self._run_program(endpoint)
            end = self._find_end(program_result)
            if end.reason not in BROKEN:
                reward = await self._find_reward(program_result)
        except EpisodeEnd as early_end:
            end = early_end
        session = self._session
        return EpisodeResult(
            rollouts=tuple(self._trace.to_rollouts(self._request.sample, end.reason, reward)),
            stop_reason=end.reason,
            reward=reward,
            audit=session.audit,
            invalid_calls=session.invalid_calls,
            error=f"{self._request.sample.sample_id}: {end.error}" if end.error else "",
            text="\n".join([*session.dialogue_lines, *_describe_requests(session)]),
            guard=None if self._watch is None else self._watch.stats,
        )

    async def _run_program(self, endpoint: EndpointServer) -> ProgramResult:
        """Run the agent's program. Raises: EpisodeEnd if its files cannot be written or it cannot be started, RunError if the engine
        fails meanwhile."""
        options, session = self._options, self._session
        session_environ = endpoint.open_session(session)
        try:
            with tempfile.TemporaryDirectory(
                prefix=f"{orphans.directory_prefix()}agent-", ignore_cleanup_errors=True
            ) as name:
                folder = Path(name)
                (folder / "task.json").write_text(json.dumps(self._task_for_program()), "utf-8")
                environ = program_environment(folder, {**options.env, **session_environ}, options.inherit)
                result = await run_program(options.command, folder, environ, session.ended, options.timeout_s)
        except OSError as error:
            raise EpisodeEnd("agent", f"the program cannot be started: {error}") from None
        finally:
            endpoint.close(session)
        # No fault of the program: the step fails with its engine.
        if session.failure is not None:
            raise session.failure
        return result

    def _task_for_program(self) -> dict[str, Any]:
        """Return the task that the program gets as JSON. The prompt's answer is not in it."""
        prompt = self._request.prompt
        return {
            "id": self._request.sample.sample_id,
            "prompt": prompt.text,
            "metadata": {key: prompt.metadata[key] for key in self._options.metadata if key in prompt.metadata},
        }

    def _find_end(self, result: ProgramResult) -> EpisodeEnd:
        """Return why the episode ended, as an `EpisodeEnd` that is not raised."""
        session = self._session
        if session.end_reason == "foreign":
            return EpisodeEnd("foreign", "the program used its key for another episode's session")
        if session.end_reason == "turns" or session.end_reason == "tokens":
            return EpisodeEnd(session.end_reason)
        # The program had to be ended. Sessions that end their program have returned above, so this is the deadline.
        if result.code is None:
            return EpisodeEnd("timeout", f"the program did not end within {self._options.timeout_s:g} s")
        if result.code and session.too_long:
            return EpisodeEnd("context")
        if result.code:
            lines = result.err.strip().splitlines()
            message = to_one_line(lines[-1], MAX_SHOWN) if lines else "it said nothing"
            return EpisodeEnd("agent", f"the program ended with exit status {result.code}: {message}")
        if not session.audit.turns:
            return EpisodeEnd("silent", "the program ended without one reply of the policy")
        return EpisodeEnd("done")

    async def _find_reward(self, result: ProgramResult) -> float | None:
        """Return the verifier's score of the answer; without a verifier the reward that the program itself reports, None if it
        reports none. The answer is the one in the program's result, or else the policy's last turn. Raises: EpisodeEnd for a reward
        that is no number, and for a verifier that fails."""
        reported = result.result if isinstance(result.result, Mapping) else {}
        if self._options.verifier is not None:
            return await self._verify_answer(reported.get("answer", self._session.last_text))
        reward = reported.get("reward")
        if reward is None or (is_reward(reward) and not isinstance(reward, bool)):
            return None if reward is None else float(reward)
        raise EpisodeEnd("agent", f"the program's result has the reward {reward!r:.40}, wanted a finite number or null")

    async def _verify_answer(self, answer: Any) -> float:
        """Score the answer with the verifier. Raises: EpisodeEnd if the verifier raises, or takes longer than `timeout_s`."""
        verifier, prompt = self._options.verifier, self._request.prompt
        assert verifier is not None

        def judge() -> float:
            text = answer if isinstance(answer, str) else json.dumps(answer)
            return build_verifier(verifier)(text, prompt.answer, prompt.metadata)

        thread = OwnThread(self._options.timeout_s)
        try:
            return await thread.call("the verifier", judge)
        except CallFailed as error:
            raise EpisodeEnd("raised", to_one_line(str(error), MAX_SHOWN)) from None
        except CallOverdue as error:
            raise EpisodeEnd("timeout", str(error)) from None
        finally:
            thread.end_when_idle()


def _open_dialogue(dialogues: Dialogues, request: EpisodeRequest) -> ClientDialogue:
    """Make the dialogue by which the student reads messages. Raises: ModelError if its chat template cannot append."""
    options, prompt = request.options, request.prompt.text
    assert isinstance(options, AgentOptions)
    if not options.uses_template(dialogues.tokenizer):
        # It gets the prompt, because special tokens of the prompt's own text are kept where a conversation begins with it.
        return PlainMessages(dialogues.tokenizer, dialogues.stops, prompt if isinstance(prompt, str) else "")
    return ChatMessages(dialogues.make_appender(options), dialogues.stops)


def _describe_requests(session: EndpointSession) -> list[str]:
    """Return lines about the requests of an episode, for people who read its dialogue."""
    settings = ", ".join(f"{name} ({count} requests)" for name, count in session.overridden.items())
    return [f"settings that the agent gave and the training decides: {settings}"] if settings else []
