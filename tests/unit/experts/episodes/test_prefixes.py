"""A prefix, read as a prompt, has exactly the tokens that a rollout has before that turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig
from typer.testing import CliRunner

from cli import app
from experts.episodes.play import PlaySettings, play_tasks
from experts.episodes.prefixes import read_prefixes
from experts.suites.letters import build_tokenizer
from opd.environments import ENVIRONMENTS, find_environment
from opd.errors import ConfigError, PromptError
from opd.prompts import load_prompts
from pipelines.environments import write_prefixes
from tests.chatml import CHATML, bpe_tokenizer, chat_tokenizer
from tests.conftest import put_in_front
from tests.spoken import spoken

GAMES = ["maze", "hanoi", "number", "sorting", "calculator"]


def episodes(path: Path, name: str, form: str, count: int = 6) -> list[dict[str, Any]]:
    rows = play_tasks(
        name, find_environment(name, "test").tasks(count, 3, form=form), PlaySettings(mistakes=0.3, max_turns=9, seed=3)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


@pytest.mark.parametrize(("form", "begin"), [("characters", ""), ("characters", "<bos>"), ("chat", "")])
@pytest.mark.parametrize("name", GAMES)
def test_a_prompt_has_the_tokens_that_a_rollout_has_before_the_turn(
    name: str, form: str, begin: str, tmp_path: Path
) -> None:
    tokenizer = build_tokenizer() if form == "characters" else chat_tokenizer(CHATML)
    if begin:
        put_in_front(tokenizer, begin)
    rows = episodes(tmp_path / "episodes.jsonl", name, form)
    found = read_prefixes(tmp_path / "episodes.jsonl", tokenizer)
    output = tmp_path / "prefixes.jsonl"
    output.write_text("".join(json.dumps(row) + "\n" for row in found.rows))
    prompts = list(load_prompts(output, "d", tokenizer))
    assert found.left_out == 0 and len(prompts) == len(found.rows)
    for row in rows:
        said = [turn for turn in row["messages"] if turn["role"] == "assistant"]
        (rollout,) = spoken(tokenizer, ENVIRONMENTS[name], row, [turn["content"] for turn in said]).rollouts
        whole, at, turn = [*rollout.prompt_ids, *rollout.response_ids], len(rollout.prompt_ids), 0
        for span in rollout.spans:
            if span.origin == "policy":
                prompt = prompts.pop(0)
                assert prompt.token_ids == tuple(whole[:at])
                assert tokenizer.decode(prompt.token_ids).startswith(begin)
                assert prompt.metadata == {**row["metadata"], "turn": turn}
                assert prompt.answer == (said[turn]["content"] if said[turn]["weight"] else "")
                turn += 1
            at += span.length
        assert turn == len(said)
    assert not prompts, "one for each turn"


def test_a_prefix_whose_text_gives_other_tokens_is_left_out_and_counted(tmp_path: Path) -> None:
    """The turn ends within a word that the tokenizer would merge with what follows, if they were one text."""
    tokenizer, path = bpe_tokenizer(), tmp_path / "episodes.jsonl"
    merged = [
        {"role": "assistant", "content": "go"},
        {"role": "user", "content": "to the th"},
        {"role": "assistant", "content": "e"},
    ]
    row = {
        "prompt": "out",
        "messages": [*merged, {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
    }
    path.write_text(json.dumps(row) + "\n")
    found = read_prefixes(path, tokenizer)
    assert [r["metadata"]["turn"] for r in found.rows] == [0, 1] and found.left_out == 1


def test_prefixes_are_read_on_the_day_and_with_the_calls_of_the_merge(tmp_path: Path) -> None:
    dated = "{{ '<|im_start|>system\n' + strftime_now('%Y-%m-%d') + (mood or '') + '<|im_end|>\n' }}" + CHATML
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
    row = {"prompt": [{"role": "user", "content": "1+2"}], "messages": [{"role": "assistant", "content": "3"}]}
    path = tmp_path / "episodes.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "tools": [tool]}) + "\n")
    model, output = tmp_path / "model", tmp_path / "prefixes.jsonl"
    chat_tokenizer(dated).save_pretrained(model)
    LlamaConfig(vocab_size=105, architectures=["LlamaForCausalLM"], torch_dtype="float32").save_pretrained(model)
    save_file({"model.norm.weight": torch.zeros(4096)}, model / "model.safetensors")
    asked = [
        "environments",
        "prefixes",
        str(path),
        "--model",
        str(model),
        "--output",
        str(output),
        "--tool-call-parser",
    ]
    done = CliRunner().invoke(app, [*asked, "qwen3_xml", "--template-date", "2020-01-02"])
    assert done.exit_code == 0, done.output
    one, other = (json.loads(line)["prompt"] for line in output.read_text().splitlines())
    assert one.startswith("<|im_start|>system\n2020-01-02<|im_end|>") and other.startswith("<|im_start|>system\n2020")
    assert "<function=NAME>" in other
    done = CliRunner().invoke(app, [*asked, "hermes", "--chat-template-kwargs", '{"mood": " calm"}'])
    assert done.exit_code == 0 and output.read_text().count(" calm<|im_end|>") == 2, done.output
    done = CliRunner().invoke(app, [*asked, "odd"])
    assert done.exit_code == 2 and "odd" in done.output
    for odd in ("{", "[]", '{"tools": []}'):
        done = CliRunner().invoke(app, [*asked, "hermes", "--chat-template-kwargs", odd])
        assert isinstance(done.exception, ConfigError) or done.exit_code == 2, done.output


def test_prefixes_of_a_pipeline_without_a_begin_token_have_none(tmp_path: Path) -> None:
    tokenizer, model = chat_tokenizer(None, ["<bos>"]), tmp_path / "model"
    put_in_front(tokenizer, "<bos>")
    tokenizer.save_pretrained(model)
    LlamaConfig(vocab_size=106, architectures=["LlamaForCausalLM"], torch_dtype="float32").save_pretrained(model)
    save_file({"model.norm.weight": torch.zeros(4096)}, model / "model.safetensors")
    path = tmp_path / "episodes.jsonl"
    path.write_text(json.dumps({"prompt": "1+2", "messages": [{"role": "assistant", "content": "3"}]}) + "\n")
    for add, begin in ((True, "<bos>1+2"), (False, "1+2")):
        write_prefixes(path, model, tmp_path / "prefixes.jsonl", add_special_tokens=add)
        assert json.loads((tmp_path / "prefixes.jsonl").read_text())["prompt"] == begin


def test_a_file_of_which_no_prefix_is_left_is_refused(tmp_path: Path) -> None:
    class Lossy:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def __call__(self, *args: Any, **options: Any) -> Any:
            return self.inner(*args, **options)

        def decode(self, ids: Any, **options: Any) -> str:
            return self.inner.decode(ids, **options) + "x"

    episodes(tmp_path / "episodes.jsonl", "maze", "characters", 1)
    with pytest.raises(PromptError, match="of which none has a text that gives its tokens"):
        read_prefixes(tmp_path / "episodes.jsonl", Lossy(build_tokenizer()))
