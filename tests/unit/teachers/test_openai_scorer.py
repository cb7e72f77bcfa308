"""Against a real HTTP server that answers like `vllm serve`, or as a broken one would."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from opd.config import PipelineConfig
from opd.errors import RunError
from opd.models.logit_rule import IDENTITY
from opd.records.types import Rollout, Teacher, WeightedTeacher
from opd.servers import requests as server_requests
from opd.stream.schema import TargetRow
from pipelines.specs import pool_spec
from teachers.pool import Pool
from teachers.scorers import ScorerOptions, Server
from teachers.scorers.openai import OpenAIScorer
from tests.listener import answer_posts
from tests.rows import make_rollout, spans_of

VOCABULARY = 76
KEY_ENV = "OPD_TEST_KEY"


def log_probs(context: tuple[int, ...]) -> list[float]:
    """[V] the served model: any distribution that depends on all tokens so far."""
    rng = random.Random(str(context))
    logits = [rng.gauss(0, 2) for _ in range(VOCABULARY)]
    lse = math.log(sum(math.exp(z) for z in logits))
    return [z - lse for z in logits]


def prompt_logprobs(ids: list[int], k: int) -> list[Any]:
    """As vLLM: nothing for the first token; for each other one itself, then the k likeliest."""
    out: list[Any] = [None]
    for t in range(1, len(ids)):
        logq = log_probs(tuple(ids[:t]))
        ranked = sorted(range(VOCABULARY), key=lambda token: -logq[token])
        out.append(
            {
                str(token): {"logprob": logq[token], "rank": ranked.index(token) + 1, "decoded_token": None}
                for token in [ids[t], *ranked[:k]]
            }
        )
    return out


class Served:
    """The server's behaviour; a test spoils it."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.spoil: Callable[[dict[str, Any], list[Any]], Any] = lambda question, steps: steps
        self.refuse: Callable[[dict[str, Any]], tuple[int, str] | None] = lambda question: None
        self.raw: bytes | None = None
        self.delay_s = 0.0
        self.key: str | None = None
        self.busy = self.most_busy = 0
        self.lock = threading.Lock()

    def answer(self, path: str, authorization: str | None, question: dict[str, Any]) -> tuple[int, bytes]:
        with self.lock:
            self.requests.append(question)
            self.busy += 1
            self.most_busy = max(self.busy, self.most_busy)
        time.sleep(self.delay_s)
        with self.lock:
            self.busy -= 1
        refused = self.refuse(question)
        if path != "/v1/completions" or question["model"] != "expert":
            refused = 404, "The model does not exist."
        if self.key is not None and authorization != f"Bearer {self.key}":
            refused = 401, "Unauthorized"
        if refused:
            return refused[0], json.dumps({"error": {"message": refused[1]}}).encode()
        if self.raw is not None:
            return 200, self.raw
        steps = self.spoil(question, prompt_logprobs(question["prompt"], question["prompt_logprobs"]))
        return 200, json.dumps({"choices": [{"index": 0, "text": "", "prompt_logprobs": steps}]}).encode()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(server_requests, "BACKOFF_S", 0.01)
    state = Served()

    def answer(path: str, headers: Mapping[str, str], question: Any) -> tuple[int, bytes]:
        return state.answer(path, headers.get("Authorization"), question)

    with answer_posts(answer) as address:
        state.url = f"{address}/v1"
        yield state


@pytest.fixture
def teacher(tiny_model_dir: Path) -> Teacher:
    return Teacher(name="rev", model_dir=tiny_model_dir)


def scorer(served: Served, payload: str = "sampled_logprobs", **changes: Any) -> OpenAIScorer:
    server = Server(base_url=changes.pop("url", served.url), model=changes.pop("model", "expert"))
    return OpenAIScorer(
        ScorerOptions(
            **{"dtype": "float32", "payload": payload, "top_k": 4, "vocab_size": VOCABULARY, "memory_bytes": 1}
            | {"servers": {"rev": server}, "server_timeout_s": 5.0}
            | changes
        )
    )


def rollout(i: int, prompt: int = 3, response: int = 4) -> Rollout:
    rng = random.Random(i)
    return make_rollout(
        sample_id=f"000001/reverse/{i}", step=1, domain="reverse", policy_version=0,
        prompt_ids=tuple(rng.choices(range(76), k=prompt)), response_ids=tuple(rng.choices(range(76), k=response)),
        behaviour_logprobs=(-1.0,) * response,
    )  # fmt: skip


def score(scoring: OpenAIScorer, teacher: Teacher, rollouts: list[Rollout]) -> tuple[list[TargetRow], dict[str, str]]:
    broken: dict[str, str] = {}
    return [row for rows in scoring.score(teacher, rollouts, broken) for row in rows], broken


def truth(given: Rollout) -> list[list[float]]:
    """[R][V]"""
    ids = (*given.prompt_ids, *given.response_ids)
    return [log_probs(ids[:t]) for t in range(len(given.prompt_ids), len(ids))]


@pytest.mark.parametrize("payload", ["sampled_logprobs", "top_k"])
def test_only_trained_tokens_are_answered(payload: str, served: Served, teacher: Teacher) -> None:
    whole = rollout(1, response=6)
    part = dataclasses.replace(whole, sample_id="part", spans=spans_of((True, False, False, True, True, False)))
    none = dataclasses.replace(whole, sample_id="none", spans=spans_of((False,) * 6))
    rows, broken = score(scorer(served, payload), teacher, [whole, part, none])
    said = {row.rollout.sample_id: row.answer for row in rows}
    columns = {row: [list(getattr(said[row], name)) for name, _ in said[row].ROW] for row in said}
    for all_of_them, some, no in zip(columns[whole.sample_id], columns["part"], columns["none"], strict=True):
        k = len(all_of_them) // 6
        assert some == [all_of_them[place * k + i] for place in (0, 3, 4) for i in range(k)]
        assert no == []
    assert broken == {}


def test_sampled_log_probs_are_the_servers_own(served: Served, teacher: Teacher) -> None:
    given = {r.sample_id: r for r in (rollout(i, prompt=1 + i % 4, response=i % 6) for i in range(40))}
    served.delay_s = 0.1
    rows, broken = score(scorer(served), teacher, list(given.values()))
    assert ({r.rollout.sample_id for r in rows}, broken) == (set(given), {})
    for row in rows:
        own = given[row.rollout.sample_id]
        want = [logq[token] for logq, token in zip(truth(own), own.response_ids, strict=True)]
        assert list(row.answer.teacher_logprobs) == pytest.approx(want)
        assert (row.rollout.prompt_ids, row.rollout.response_ids, row.answer.head_key()) == (
            own.prompt_ids,
            own.response_ids,
            "",
        )
    assert 1 < served.most_busy <= server_requests.IN_FLIGHT
    assert all((q["max_tokens"], q["temperature"]) == (1, 0.0) for q in served.requests)


@pytest.mark.parametrize("k", [1, 4, 1000])
def test_top_k_is_that_of_the_server_without_the_token_that_stands_there(
    k: int, served: Served, teacher: Teacher
) -> None:
    given = rollout(1, response=9)
    ((row,), _) = score(scorer(served, "top_k", top_k=k), teacher, [given])
    for r, logq in enumerate(truth(given)):
        width = min(k, VOCABULARY)
        want = sorted(range(VOCABULARY), key=lambda token: -logq[token])[:width]
        assert list(row.answer.topk_ids[r * width : (r + 1) * width]) == want
        assert list(row.answer.topk_logprobs[r * width : (r + 1) * width]) == pytest.approx([logq[t] for t in want])
    assert len(row.answer.topk_ids) == 9 * min(k, VOCABULARY)


def spoiled(change: Callable[[dict[str, Any]], None], at: int = -1) -> Callable[[dict[str, Any], list[Any]], list[Any]]:
    """A change of one position's dictionary."""

    def spoil(question: dict[str, Any], steps: list[Any]) -> list[Any]:
        change(steps[at])
        return steps

    return spoil


FAULTS = {
    "no prompt log-probs": (lambda q, s: None, "sends no prompt_logprobs"),
    "fewer positions": (lambda q, s: s[:-1], r"scored 7 positions of 8 tokens"),
    "more positions": (lambda q, s: [*s, s[-1]], r"scored 9 positions of 8 tokens"),
    "other tokens": (
        spoiled(lambda step: (step.clear(), step.update({"5": {"logprob": -1.0}}))),
        "scored other tokens than were sent: 7 is not among",
    ),
    "another vocabulary": (
        spoiled(lambda step: step.update({"76": {"logprob": -9.0}})),
        "another vocabulary: it names token 76, the tokenizer knows 76",
    ),
    "logits": (spoiled(lambda step: step.update({"7": {"logprob": 3.5}})), r"sends 3\.5 as a log-prob"),
    "no number": (spoiled(lambda step: step.update({"7": {"logprob": "x"}})), "cannot be read"),
    "no dictionary": (lambda q, s: [*s[:-1], 3], "cannot be read"),
    "token strings": (spoiled(lambda step: step.update({"the": {"logprob": -1.0}})), "cannot be read"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_answer_that_cannot_be_used_is_named(fault: str, served: Served, teacher: Teacher) -> None:
    served.spoil, message = FAULTS[fault]
    with pytest.raises(RunError, match=f"teacher rev: .*{message}"):
        scorer(served).head_key(teacher)
    assert len(served.requests) == 1, "asking again would not help"


def test_fewer_log_probs_than_asked_for(served: Served, teacher: Teacher) -> None:
    served.spoil = lambda question, steps: prompt_logprobs(question["prompt"], 2)
    with pytest.raises(RunError, match=r"objective\.k is 4: start it with `--max-logprobs 4`"):
        scorer(served, "top_k").head_key(teacher)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"<html>\x1b[31m", r"no JSON: <html>\\x1b\[31m"),
        (b"[]", "without one choice"),
        (b'{"choices": []}', "without one choice"),
    ],
)
def test_no_completion_at_all(raw: bytes, message: str, served: Served, teacher: Teacher) -> None:
    served.raw = raw
    with pytest.raises(RunError, match=message):
        scorer(served).head_key(teacher)


def test_a_fault_after_the_first_request_stops_the_run_too(served: Served, teacher: Teacher) -> None:
    scoring = scorer(served)
    assert (scoring.head_key(teacher), scoring.head_rule(teacher)) == ("", IDENTITY)
    served.spoil = lambda question, steps: steps[1:]
    broken: dict[str, str] = {}
    with pytest.raises(RunError, match="scored 6 positions of 7 tokens"):
        list(scoring.score(teacher, [rollout(i) for i in range(30)], broken))
    assert broken == {}, "it is not quarantined"


@pytest.mark.parametrize("value", [None, math.nan, -math.inf])
def test_log_probs_that_are_not_finite_leave_one_response_out(
    value: float | None, served: Served, teacher: Teacher
) -> None:
    given = [rollout(i) for i in range(4)]
    bad = [*given[2].prompt_ids, *given[2].response_ids]

    def spoil(question: dict[str, Any], steps: list[Any]) -> list[Any]:
        if question["prompt"] == bad:
            steps[-2][str(bad[-2])]["logprob"] = value
        return steps

    served.spoil = spoil
    rows, broken = score(scorer(served), teacher, given)
    assert broken == {given[2].sample_id: "teacher rev: log-probs are not finite"}
    assert {r.rollout.sample_id for r in rows} == {r.sample_id for r in given} - set(broken)


def test_a_position_that_is_null_leaves_the_response_out(served: Served, teacher: Teacher) -> None:
    served.spoil = lambda question, steps: [*steps[:-1], None]
    rows, broken = score(scorer(served), teacher, [rollout(0)])
    assert (rows, set(broken)) == ([], {rollout(0).sample_id})


# Refusals, outages


def test_a_wrong_model_name(served: Served, teacher: Teacher) -> None:
    with pytest.raises(RunError, match=r"teacher rev: http://127.*404, no model 'other'.*does not exist"):
        scorer(served, model="other").head_key(teacher)


def test_a_wrong_path(served: Served, teacher: Teacher) -> None:
    with pytest.raises(RunError, match=r"404.*no such API at this base_url"):
        scorer(served, url=served.url.removesuffix("/v1")).head_key(teacher)


def test_keys(served: Served, teacher: Teacher, monkeypatch: pytest.MonkeyPatch) -> None:
    served.key = "secret-7"
    with pytest.raises(RunError, match="401, the key is missing or wrong"):
        scorer(served).head_key(teacher)
    monkeypatch.delenv(KEY_ENV, raising=False)
    with pytest.raises(RunError, match=f"api_key_env: {KEY_ENV} is not set"):
        scorer(served, api_key_env=KEY_ENV).head_key(teacher)
    monkeypatch.setenv(KEY_ENV, "wrong-key")
    with pytest.raises(RunError, match="401") as refused:
        scorer(served, api_key_env=KEY_ENV).head_key(teacher)
    assert "wrong-key" not in str(refused.value)
    monkeypatch.setenv(KEY_ENV, "secret-7")
    assert scorer(served, api_key_env=KEY_ENV).head_key(teacher) == ""


def test_a_redirect_is_not_followed(served: Served, teacher: Teacher) -> None:
    served.refuse = lambda question: (307, "elsewhere")
    with pytest.raises(RunError, match="refused with status 307"):
        scorer(served).head_key(teacher)
    assert len(served.requests) == 1


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_is_busy_is_asked_again(status: int, served: Served, teacher: Teacher) -> None:
    served.refuse = lambda question: (status, "busy") if len(served.requests) < server_requests.ATTEMPTS else None
    assert scorer(served).head_key(teacher) == ""
    assert len(served.requests) == server_requests.ATTEMPTS


def test_a_server_that_stays_busy_stops_the_run(served: Served, teacher: Teacher) -> None:
    served.refuse = lambda question: (503, "busy")
    with pytest.raises(RunError, match=r"4 attempts failed, the last with: status 503: .*busy"):
        scorer(served).head_key(teacher)
    assert len(served.requests) == server_requests.ATTEMPTS


def test_a_bad_request_is_not_repeated(served: Served, teacher: Teacher) -> None:
    served.refuse = lambda question: (400, "max_logprobs is 20")
    with pytest.raises(RunError, match=r"status 400.*max_logprobs is 20"):
        scorer(served).head_key(teacher)
    assert len(served.requests) == 1


def test_nobody_listens(served: Served, teacher: Teacher) -> None:
    with pytest.raises(RunError, match="4 attempts failed, the last with: Cannot connect"):
        scorer(served, url="http://127.0.0.1:1/v1").head_key(teacher)


def test_a_server_that_does_not_answer_costs_a_bounded_time(served: Served, teacher: Teacher) -> None:
    served.delay_s = 60
    began = time.monotonic()
    with pytest.raises(RunError, match=r"4 attempts failed, the last with: no answer in time \(server_time"):
        scorer(served, server_timeout_s=0.1).head_key(teacher)
    assert time.monotonic() - began < 10


def test_a_server_that_dribbles_costs_a_bounded_time(served: Served, teacher: Teacher) -> None:
    """A byte now and then keeps a socket timeout from ever firing."""
    import socket

    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def dribble() -> None:
        while not stop.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=drip, args=(connection,), daemon=True).start()

    def drip(connection: socket.socket) -> None:
        try:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            while not stop.wait(0.05):
                connection.sendall(b" ")
        except OSError:
            pass

    threading.Thread(target=dribble, daemon=True).start()
    try:
        began = time.monotonic()
        with pytest.raises(RunError, match="no answer in time"):
            scorer(served, url=f"http://127.0.0.1:{listener.getsockname()[1]}/v1", server_timeout_s=0.3).head_key(
                teacher
            )
        assert time.monotonic() - began < 10
    finally:
        stop.set()
        listener.close()


def test_a_teacher_without_a_server(served: Served, teacher: Teacher) -> None:
    with pytest.raises(RunError, match=r"teacher up: no server; teachers.servers names rev"):
        scorer(served).head_key(dataclasses.replace(teacher, name="up"))


def test_a_head_with_padding_rows_is_refused(served: Served, teacher: Teacher) -> None:
    with pytest.raises(RunError, match="its head has 76 rows, the tokenizer knows 70"):
        scorer(served, vocab_size=70).head_key(teacher)
    assert served.requests == []


def test_the_pool_tries_every_server_before_the_first_step(
    served: Served, teacher: Teacher, tmp_path: Path, in_process: Any, rows_of: Any
) -> None:
    config = {
        "name": "n",
        "student": {"model": "base"},
        "experts": {"rev": {"model": "m", "domain": "reverse"}},
        "domains": {"reverse": {}},
        "objective": {"kind": "sampled"},
        "trainer": {"steps": 1, "samples_per_step": 2},
        "teachers": {
            "engine": "openai",
            "payload": "sampled_logprobs",
            "servers": {"rev": {"base_url": served.url, "model": "expert"}},
        },
    }
    routes = {"reverse": (WeightedTeacher(teacher=teacher, weight=1.0),)}
    pool = Pool(pool_spec(PipelineConfig.model_validate(config), VOCABULARY), routes)
    pool.wait_ready()
    assert len(served.requests) == 1
    targets = pool.score([rollout(0), rollout(1)])
    assert (targets.rows, dict(targets.heads)) == (2, {})
    assert len(rows_of(targets)) == 2


@pytest.mark.parametrize("wrong", ["rev", "up"])
def test_the_pool_tries_the_servers_of_experts_that_have_one_directory(
    wrong: str, served: Served, teacher: Teacher, in_process: Any
) -> None:
    """Their weights are not read, so one directory may stand for all of them."""
    config = {
        "name": "n",
        "student": {"model": "base"},
        "experts": {"rev": {"model": "m", "domain": "reverse"}, "up": {"model": "m", "domain": "upper"}},
        "domains": {"reverse": {}, "upper": {}},
        "objective": {"kind": "sampled"},
        "trainer": {"steps": 1, "samples_per_step": 2},
        "teachers": {
            "engine": "openai",
            "payload": "sampled_logprobs",
            "servers": {
                name: {"base_url": served.url, "model": "exprt" if name == wrong else "expert"}
                for name in ("rev", "up")
            },
        },
    }
    up = dataclasses.replace(teacher, name="up")
    routes = {d: (WeightedTeacher(teacher=t, weight=1.0),) for d, t in (("reverse", teacher), ("upper", up))}
    pool = Pool(pool_spec(PipelineConfig.model_validate(config), VOCABULARY), routes)
    with pytest.raises(RunError, match=f"teacher {wrong}: .*no model 'exprt'"):
        pool.wait_ready()
