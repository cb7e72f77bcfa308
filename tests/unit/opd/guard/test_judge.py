"""Stage two over HTTP, against a server of ours that answers well, badly, late or not at all."""

from __future__ import annotations

import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from opd.guard.judge import CachedJudge, HttpJudge, LogProbJudge
from opd.guard.local_judge import ModelScorer
from opd.guard.records import JudgeFailed, Opinion, Question
from tests.conftest import put_in_front
from tests.listener import Listener

QUESTION = Question(
    tool="bash", text="curl https://example.org", command="curl https://example.org", suspicion="network"
)
Answer = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


@contextmanager
def server(answer: Answer) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer(self, body)

        def log_message(self, *_: Any) -> None:
            pass

    running = Listener(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_port}/v1"
    finally:
        running.shutdown()
        running.server_close()


def says(text: Any, logprobs: list[tuple[str, float]] | None = None, status: int = 200) -> Answer:
    def answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}}
        if logprobs is not None:
            assert body["logprobs"] is True
            top = [{"token": token, "logprob": value} for token, value in logprobs]
            choice["logprobs"] = {"content": [{"token": top[0]["token"], "top_logprobs": top}]}
        data = json.dumps({"choices": [choice]}).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def ask(answer: Answer, threshold: float | None = None, deadline_s: float = 5.0, key: str | None = None) -> Opinion:
    with server(answer) as url:
        judge = HttpJudge(url, "m", api_key_env=key, threshold=threshold, deadline_s=deadline_s)
        return judge.judge(QUESTION)


def test_it_is_asked_with_the_call_as_data() -> None:
    asked: list[dict[str, Any]] = []

    def answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        asked.append({**body, "path": handler.path, "key": handler.headers.get("Authorization")})
        says("allow: fine")(handler, body)

    assert ask(answer) == Opinion(block=False, reason="fine")
    (body,) = asked
    assert (body["path"], body["model"], body["temperature"], body["key"]) == ("/v1/chat/completions", "m", 0, None)
    assert json.loads(body["messages"][1]["content"])["call"] == QUESTION.text


@pytest.mark.parametrize(
    ("text", "block"), [("block: it fetches", True), ("**BLOCK**", True), ("Allow - ok", False), (" allow", False)]
)
def test_its_word_is_taken(text: str, block: bool) -> None:
    assert ask(says(text)).block == block


@pytest.mark.parametrize(
    ("logprobs", "threshold", "block"),
    [
        ([("allow", math.log(0.6)), ("block", math.log(0.4))], 0.5, False),
        ([("allow", math.log(0.6)), ("block", math.log(0.4))], 0.3, True),
        ([("bl", math.log(0.5)), ("Block", math.log(0.3)), ("allow", math.log(0.2))], 0.75, True),
        ([("all", math.log(0.9)), ("x", math.log(0.1))], 0.5, False),
    ],
)
def test_its_log_probs_are_taken_if_there_is_a_threshold(
    logprobs: list[tuple[str, float]], threshold: float, block: bool
) -> None:
    assert ask(says("allow", logprobs), threshold).block == block


def test_without_log_probs_its_word_is_taken_in_spite_of_a_threshold() -> None:
    assert ask(says("block: x"), threshold=0.5).block


def slow(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    time.sleep(3)


def drips(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    """Sends a byte now and then, so that no single wait is long."""
    handler.send_response(200)
    handler.end_headers()
    try:
        for _ in range(40):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.1)
    except OSError:
        pass


def drips_headers(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    handler.send_response(200)
    try:
        for number in range(40):
            handler.send_header(f"x-{number}", "x")
            handler.flush_headers()
            time.sleep(0.1)
    except OSError:
        pass


def nested(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(b"[" * 100_000)


def garbage(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    handler.wfile.write(b"hello\r\n\r\n")


def not_json(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "5")
    handler.end_headers()
    handler.wfile.write(b"hello")


@pytest.mark.parametrize(
    "answer",
    [
        slow,
        drips,
        drips_headers,
        garbage,
        not_json,
        nested,
        says("perhaps"),
        says(None),
        says([{"type": "text", "text": "allow"}]),
        says({"text": "allow"}),
        says(1),
        says("allow", status=500),
    ],
)
def test_what_is_no_answer_fails_in_time(answer: Answer) -> None:
    began = time.monotonic()
    with pytest.raises(JudgeFailed):
        ask(answer, deadline_s=0.5)
    assert time.monotonic() - began < 2.5


@pytest.mark.parametrize("logprob", [math.nan, math.inf, 1000.0])
def test_log_probs_that_are_no_numbers_are_no_answer(logprob: float) -> None:
    with pytest.raises(JudgeFailed):
        ask(says("allow", [("allow", logprob)]), threshold=0.5)


def test_no_server() -> None:
    with pytest.raises(JudgeFailed, match="127"):
        HttpJudge("http://127.0.0.1:9/v1", "m", api_key_env=None, threshold=None, deadline_s=2.0).judge(QUESTION)


def test_a_key_comes_from_the_environment_and_into_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JudgeFailed, match="JUDGE_KEY is empty"):
        ask(says("allow"), key="JUDGE_KEY")
    monkeypatch.setenv("JUDGE_KEY", "sk-hunter2")
    with pytest.raises(JudgeFailed) as error:
        ask(says("allow", status=401), key="JUDGE_KEY")
    assert "hunter2" not in str(error.value)


class Counting:
    def __init__(self) -> None:
        self.asked = 0
        self.fails = False

    def judge(self, question: Question) -> Opinion:
        self.asked += 1
        if self.fails:
            raise JudgeFailed("down")
        return Opinion(block=True, reason="")


def other(command: str) -> Question:
    return Question(tool="bash", text=command + " # a comment", command=command, suspicion="network")


def test_equal_questions_are_asked_once() -> None:
    counting = Counting()
    judge = CachedJudge(counting, 2)
    for command in ("a", "a", "b", "a", "c", "a", "b"):
        assert judge.judge(other(command)).block
    assert counting.asked == 4, "a, b, c, and b again, which was dropped as the oldest"


def test_an_answer_counts_for_no_other_text() -> None:
    """The calls of two texts may be alike although a file's content, or a program's input, is not."""
    counting = Counting()
    judge = CachedJudge(counting, 8)
    for text in ("cat > a <<< x", "cat > a <<< y", "cat > a <<< x"):
        judge.judge(replace(other("cat"), text=text))
    assert counting.asked == 2


def test_failures_are_not_kept() -> None:
    counting = Counting()
    judge = CachedJudge(counting, 8)
    counting.fails = True
    with pytest.raises(JudgeFailed):
        judge.judge(QUESTION)
    counting.fails = False
    assert judge.judge(QUESTION).block and counting.asked == 2


@pytest.mark.parametrize(("scores", "block"), [((-2.0, -1.0), True), ((-1.0, -2.0), False), ((-math.inf, -1.0), True)])
def test_a_model_of_ones_own(scores: tuple[float, float], block: bool) -> None:
    assert LogProbJudge(lambda prompt, verdicts: scores, 0.5, 5.0).judge(QUESTION).block == block


@pytest.mark.parametrize("scores", [(), (1.0,), (math.nan, -1.0), (-math.inf, -math.inf)])
def test_log_probs_that_are_none(scores: tuple[float, ...]) -> None:
    with pytest.raises(JudgeFailed):
        LogProbJudge(lambda prompt, verdicts: scores, 0.5, 5.0).judge(QUESTION)


def test_a_model_of_ones_own_says_how_likely_both_verdicts_are(tiny_model_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    scorer = ModelScorer(tiny_model_dir)
    tokenizer, lm = AutoTokenizer.from_pretrained(tiny_model_dir), AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    found = scorer("Verdict: ", ["allow", "block"])
    for text, logprob in zip(("allow", "block"), found, strict=True):
        question = [{"role": "user", "content": "Verdict: "}]
        shown = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        asked, said = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (shown, text))
        logp = lm.float()(torch.tensor([asked + said])).logits[0].log_softmax(-1).detach()
        wanted = sum(float(logp[len(asked) + i - 1, token]) for i, token in enumerate(said))
        assert logprob == pytest.approx(wanted, abs=1e-4)


def test_a_model_without_a_template_reads_the_question_after_its_begin_token(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    (model / "chat_template.jinja").unlink()
    put_in_front(AutoTokenizer.from_pretrained(model)).save_pretrained(model)
    assert ModelScorer(model)._encode_question("a<bos>") == AutoTokenizer.from_pretrained(model)("a< bos>")["input_ids"]


def test_a_call_cannot_forge_the_end_of_the_question(tiny_model_dir: Path) -> None:
    scorer = ModelScorer(tiny_model_dir)
    special = set(scorer._tokenizer.all_special_ids)
    texts = [scorer._tokenizer.decode([token]) for token in special]
    assert len(texts) >= 3 and all(texts)
    for text in texts:
        assert special & set(scorer._tokenizer(f"a{text}b", add_special_tokens=False)["input_ids"]), "it would be one"
        assert not special & set(scorer._encode_question(f"a{text}b"))
