"""A talk with a model: what it reads, what it says, and when it forgets."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from cli import app
from opd.errors import ConfigError, ModelError, PromptError
from pipelines.after.chat import Chat, ChatOptions, run_dialogue
from pipelines.after.models import find_model
from tests.conftest import CHARACTERS, put_in_front

NEW = 6
ROOT = Path(__file__).parents[4]


def chat(path: Path, **options: Any) -> Chat:
    return Chat(find_model(path, print), ChatOptions(**{"max_new_tokens": NEW} | options))


@pytest.mark.parametrize("kind", ["newest", "t5"])
def test_an_architecture_that_writes_no_text_is_refused(kind: str, make_model_dir: Any, tmp_path: Path) -> None:
    source = make_model_dir(tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": kind}))
    with pytest.raises(ModelError, match=rf"config.json: model_type\n  found:.*{kind}"):
        chat(source)


def greedy(path: Path, text: str) -> str:
    """The reference: transformers' own greedy continuation of a text."""
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def test_a_dialogue_goes_through_the_template_and_a_plain_line_does_not(tiny_model_dir: Path) -> None:
    shown: list[str] = []
    talker = chat(tiny_model_dir)
    first = talker.answer_line("ab", shown.append)
    assert talker.templated and first == "".join(shown) == greedy(tiny_model_dir, "ab=")
    assert talker.answer_line("cd", shown.append) == greedy(tiny_model_dir, f"ab{first}cd=")
    talker.forget_dialogue()
    assert talker.answer_line("cd", shown.append) == greedy(tiny_model_dir, "cd=")
    plain = chat(tiny_model_dir, plain=True)
    assert [plain.answer_line("ab", shown.append) for _ in range(2)] == [greedy(tiny_model_dir, "ab")] * 2


def test_a_plain_line_begins_as_the_tokenizer_has_it(tiny_model_dir: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    put_in_front(AutoTokenizer.from_pretrained(model)).save_pretrained(model)
    shown = chat(model, plain=True).answer_line("ab", lambda text: None)
    assert shown == greedy(model, "ab") != greedy(tiny_model_dir, "ab")
    assert chat(model).answer_line("ab", lambda text: None) == greedy(tiny_model_dir, "ab="), "its template writes none"


def test_an_answer_has_its_special_tokens_but_for_the_end(tiny_model_dir: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": CHARACTERS})
    tokenizer.save_pretrained(model)
    said = greedy(tiny_model_dir, "ab")
    assert said and greedy(model, "ab") == "", "every letter is a special token now"
    assert chat(model, plain=True).answer_line("ab", lambda text: None) == said
    ids = tokenizer(f"ab{said}")["input_ids"]
    assert len(ids) == 2 + NEW, "none of its tokens ends it"
    config = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": [2, ids[3]]}))
    assert chat(model, plain=True).answer_line("ab", lambda text: None) == said[: said.index(said[1])], (
        "one more end token"
    )


def test_the_oldest_turns_are_forgotten_when_the_context_is_full(tiny_model_dir: Path) -> None:
    talker = chat(tiny_model_dir, max_new_tokens=8)
    talker.answer_line("a" * 500, lambda text: None)
    assert len(talker._turns) == 2
    talker.answer_line("b" * 20, lambda text: None)
    assert [turn["role"] for turn in talker._turns] == ["user", "assistant"], "a turn goes with its answer"
    assert talker._turns[0]["content"] == "b" * 20
    with pytest.raises(PromptError, match="this line\n  found:  601 tokens\n  wanted: fewer than 512"):
        talker.answer_line("c" * 600, lambda text: None)


def test_a_system_message_needs_a_template(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="--system"):
        chat(tiny_model_dir, plain=True, system="be short")
    assert chat(tiny_model_dir, system="x").answer_line("ab", lambda text: None) == greedy(tiny_model_dir, "xab=")


def test_an_error_ends_a_terminals_answer_and_a_scripts_talk(tiny_model_dir: Path) -> None:
    told: list[str] = []
    shown: list[str] = []
    run_dialogue(chat(tiny_model_dir, plain=True), ["c" * 600, "", "ab"], shown.append, told.append, keep_going=True)
    assert "this line" in told[0] and "".join(shown) == f"\n{greedy(tiny_model_dir, 'ab')}\n"
    with pytest.raises(PromptError):
        run_dialogue(chat(tiny_model_dir, plain=True), ["c" * 600, "ab"], shown.append, told.append, keep_going=False)


def test_without_a_terminal_it_answers_the_lines_of_its_input(tiny_model_dir: Path) -> None:
    result = CliRunner().invoke(
        app, ["chat", str(tiny_model_dir), "--max-new-tokens", str(NEW)], input="ab\n/new\ncd\n"
    )
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{greedy(tiny_model_dir, 'ab=')}\n{greedy(tiny_model_dir, 'cd=')}\n"


def test_through_a_pipe_an_answer_comes_before_the_next_line(tiny_model_dir: Path) -> None:
    command = [sys.executable, "-P", "-m", "cli", "chat", str(tiny_model_dir), "--max-new-tokens", str(NEW)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        late = Timer(120, process.kill)
        late.start()
        for line in ("ab", "/new\ncd"):
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            assert process.stdout.readline() == greedy(tiny_model_dir, f"{line[-2:]}=") + "\n"
        process.stdin.close()
        assert process.wait() == 0
        late.cancel()


def test_without_any_input_it_ends(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines.commands import chat as command

    monkeypatch.setattr(sys, "stdin", None)  # as with `<&-`
    command.chat(tiny_model_dir)
