"""Whoever dies in the middle of a step takes his own episodes with him and no others; 64 sessions keep apart."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from opd.records.episodes import EpisodeResult
from opd.records.types import SampledTurn
from opd.rollouts.endpoint import episode
from opd.rollouts.endpoint.episode import play_all_episodes
from opd.rollouts.endpoint.server import EndpointServer
from opd.rollouts.episodes.runner import Dialogues
from opd.rollouts.episodes.spec import EpisodeRequest
from tests.chatml import CHATML, chat_tokenizer
from tests.unit.opd.rollouts.endpoint.clients import in_a_loop
from tests.unit.opd.rollouts.endpoint.fakes import FakeEngine, Served, decode, serve
from tests.unit.opd.rollouts.endpoint.test_episode import BARE, CONTEXT, Speaker, agent, counts, white

ASKS = BARE + (
    "import time\n"
    "for n in range(30):\n    ask([{'role': 'user', 'content': str(n)}])\n    time.sleep(0.05)\n"
    "    if n == 2:\n        open(PID + '.tmp', 'w').write(str(os.getpid())); os.rename(PID + '.tmp', PID)\n"
)
"""Asks thirty times, and after the third says which process it is."""


def asking(tmp_path: Path, i: int) -> tuple[EpisodeRequest, Path]:
    """An episode of that program, and the file that has its process id."""
    pid = tmp_path / f"pid-{i}"
    return agent(f"PID = {str(pid)!r}\n{ASKS}", tmp_path, i, max_calls=99), pid


def disturbed(
    requests: Sequence[EpisodeRequest], pids: Sequence[Path], disturb: Callable[[], Any]
) -> list[EpisodeResult]:
    """Play the requests, and call `disturb` once these programs are at work."""
    tokenizer = chat_tokenizer(CHATML)
    speaker = Speaker(counts, tokenizer, step_s=0.002)
    dialogues = Dialogues(tokenizer, [tokenizer.eos_token_id])

    async def work() -> list[EpisodeResult]:
        playing = asyncio.ensure_future(play_all_episodes(requests, speaker, dialogues, CONTEXT, 2))
        async with asyncio.timeout(60):
            while not all(pid.exists() for pid in pids):
                await asyncio.sleep(0.01)
        found = disturb()
        if found is not None:
            await found
        return await playing

    return asyncio.run(work())


def test_a_program_that_is_killed_ends_its_own_episode(tmp_path: Path) -> None:
    (killed, pid), (other, _) = asking(tmp_path, 1), asking(tmp_path, 2)
    dead, whole, beside = disturbed(
        [killed, other, white("Counting")], [pid], lambda: os.kill(int(pid.read_text()), signal.SIGKILL)
    )
    assert dead.stop_reason == "agent" and "exit status -9" in dead.error
    assert 3 <= dead.audit.turns < 30 and len(dead.rollouts) == dead.audit.segments, "what it was sent stays"
    assert (whole.stop_reason, whole.audit.turns, whole.audit.lost_turns) == ("done", 30, 0)
    assert (beside.stop_reason, beside.audit.turns) == ("done", 3)


def test_an_endpoint_that_dies_ends_the_episodes_that_ask_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[EndpointServer] = []

    class Seen(EndpointServer):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(episode, "EndpointServer", Seen)
    (one, first), (two, second) = asking(tmp_path, 1), asking(tmp_path, 2)
    *theirs, ours = disturbed([one, two, white("Counting")], [first, second], lambda: made[0]._runner.cleanup())
    for found in theirs:
        assert found.stop_reason == "agent" and "exit status 1" in found.error
        assert 3 <= found.audit.turns < 30 and sum(r.num_trained for r in found.rollouts) == found.audit.trained
    assert (ours.stop_reason, ours.audit.turns) == ("done", 3)


class Provenance(FakeEngine):
    """Remembers after which tokens each turn was sampled. A turn says for which session it is."""

    def __init__(self) -> None:
        super().__init__(lambda before, seed: f"{before.split('|')[1]}:{seed}", step_s=0.002)
        self.wrote: Counter[tuple[int, ...]] = Counter()

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int, seed: int) -> SampledTurn:
        turn = await super().generate(token_ids, max_tokens=max_tokens, seed=seed)
        self.wrote[(*token_ids, *turn.token_ids)] += 1
        return turn


async def restless(served: Served, name: str, rng: random.Random) -> None:
    """An agent that goes on, goes back, repeats itself, rewrites its history, asks twice at once, and goes away in between."""
    url = f"{served.environ['OPENAI_BASE_URL']}/chat/completions"
    headers = {"Authorization": f"Bearer {served.environ['OPENAI_API_KEY']}"}
    chat: list[dict[str, str]] = [{"role": "user", "content": f"|{name}| begin"}]

    async def ask(client: httpx.AsyncClient, messages: list[dict[str, str]]) -> dict[str, str]:
        reply = await client.post(url, json={"model": "m", "messages": messages}, headers=headers, timeout=50)
        assert reply.status_code == 200, reply.text
        said = reply.json()["choices"][0]["message"]["content"]
        assert said.startswith(f"{name}:"), "nobody gets the words of another"
        return {"role": "assistant", "content": said}

    async with httpx.AsyncClient() as client:
        for turn in range(6):
            what = rng.choice(["on", "again", "back", "twice", "away"])
            if what == "away":
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.003):
                        await ask(client, [*chat, {"role": "user", "content": f"leave {turn}"}])
            if what == "back":
                chat = chat[: 1 + 2 * rng.randrange((len(chat) + 1) // 2)]
            replies = await asyncio.gather(*(ask(client, chat) for _ in range(2 if what == "twice" else 1)))
            if what == "again":
                assert await ask(client, chat) == replies[0]
            chat = [*chat, replies[-1], {"role": "user", "content": f"next {turn}"}]


def test_no_token_of_a_session_is_in_another_of_sixty_four() -> None:
    async def work() -> None:
        engine = Provenance()
        async with EndpointServer() as endpoint:
            every = {f"s{n:02d}": serve(endpoint, engine) for n in range(64)}
            await asyncio.gather(*(restless(one, name, random.Random(name)) for name, one in every.items()))
            for one in every.values():
                endpoint.close(one.session)
        assert engine.most > 16
        for name, served in every.items():
            audit = served.session.audit
            assert audit.sampled == audit.trained > 0
            for segment in served.trace.segments:
                at, text = segment.prompt_len, decode(segment.ids)
                assert f"|{name}|" in text and not any(f"|{other}|" in text for other in every if other != name)
                for span in segment.spans:
                    at += span.length
                    if span.origin == "policy":
                        assert engine.wrote[tuple(segment.ids[:at])] > 0, "sampled after these very tokens"
                        engine.wrote[tuple(segment.ids[:at])] -= 1
        audits = [served.session.audit for served in every.values()]
        unread = sum(engine.wrote.values())
        assert sum(audit.turns for audit in audits) == engine.finished - unread, "each turn once"
        assert unread + engine.cancelled <= sum(audit.lost_turns for audit in audits) < engine.started / 2
        assert sum(audit.forks for audit in audits) > 20

    in_a_loop(work)
