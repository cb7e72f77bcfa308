"""A merged model reads at an effort, in a talk and from a server, what the merge rendered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from typer.testing import CliRunner

from cli import app
from opd.config import PipelineConfig, load_pipeline
from opd.errors import ConfigError
from opd.machine.address import Address
from opd.prompts.encode import load_tokenizer, mark_prompt, render_prompt
from pipelines.after.chat import Chat, ChatOptions
from pipelines.after.efforts import add_effort_tags, write_effort_template
from pipelines.after.models import LocalModel, find_model
from pipelines.after.serve import ServeOptions, server_command

TEMPLATE = (
    "\n{% for m in messages %}[{{ m['role'] }}: {{ m['content'] }}]{% endfor %}"
    "{% if enable_thinking %}<think>{% endif %}{% if add_generation_prompt %}={% endif %}"
)
EFFORTS = {
    "low": {"text": 'Be "short" and {{ plain }}\n\u2603'},
    "high": {"chat_template_kwargs": {"enable_thinking": True}},
}
USER = {"role": "user", "content": "ab"}
DIALOGUES = (
    [USER],
    [{"role": "system", "content": "kind"}, USER],
    [{"role": "developer", "content": "kind"}, USER],
    [{"role": "system", "content": ""}, USER],
)


@pytest.fixture
def merged(world: Any, tiny_model_dir: Path) -> LocalModel:
    world.data["student"]["chat_template_kwargs"] = {"enable_thinking": False}
    world.data["efforts"] = EFFORTS
    world.data["trainer"]["samples_per_step"] = 8
    info = find_model(tiny_model_dir, print).info
    return LocalModel(path=tiny_model_dir, info=info, config=load_pipeline(world.write()))


def config(merged: LocalModel) -> PipelineConfig:
    assert merged.config is not None
    return merged.config


@pytest.mark.parametrize("messages", DIALOGUES, ids=str)
@pytest.mark.parametrize("effort", [None, *EFFORTS])
def test_a_request_reads_what_the_merge_rendered(merged: LocalModel, messages: Any, effort: str | None) -> None:
    tokenizer = load_tokenizer(merged.path)
    tokenizer.chat_template = TEMPLATE
    text = "" if effort is None else config(merged).efforts[effort].text
    rendered = render_prompt(
        tokenizer, mark_prompt(messages, text), None, **config(merged).chat_template_kwargs_at(effort)
    )
    tokenizer.chat_template = add_effort_tags(config(merged), TEMPLATE)
    # As vLLM asks: with the server's default, and thoughts switched on for every request that names an effort.
    variables = {"reasoning_effort": effort, "enable_thinking": effort is not None}
    assert render_prompt(tokenizer, messages, None, **variables) == rendered


def test_an_unknown_effort_is_an_error_of_the_request(merged: LocalModel) -> None:
    tokenizer = load_tokenizer(merged.path)
    tokenizer.chat_template = add_effort_tags(config(merged), TEMPLATE)
    with pytest.raises(TemplateError, match="reasoning_effort: one of low, high"):
        render_prompt(tokenizer, [USER], None, reasoning_effort="medium")


def test_the_server_gets_the_template_and_its_default(merged: LocalModel, tmp_path: Path) -> None:
    file = write_effort_template(merged, tmp_path, "low")
    assert file is not None and "reasoning_effort" in file.read_text()
    words = server_command(merged, ServeOptions(address=Address("127.0.0.1", 1), effort="low", chat_template=file))
    assert words[words.index("--chat-template") + 1] == str(file)
    variables = json.loads(words[words.index("--default-chat-template-kwargs") + 1])
    assert variables == {"enable_thinking": False, "reasoning_effort": "low"}


def test_a_talk_at_an_effort_has_its_tag(merged: LocalModel) -> None:
    dialogue = Chat(merged, ChatOptions(max_new_tokens=1, effort="low"))
    tokenizer = load_tokenizer(merged.path)
    want = render_prompt(tokenizer, mark_prompt([USER], EFFORTS["low"]["text"]))  # type: ignore[arg-type]
    assert list(dialogue._encode_dialogue("ab")) == tokenizer.encode(want, add_special_tokens=False)
    plain = Chat(merged, ChatOptions(max_new_tokens=1, effort="low", plain=True))
    assert tokenizer.decode(plain._encode_dialogue("ab")).endswith("ab")
    assert len(plain._encode_dialogue("ab")) > len(tokenizer.encode("ab", add_special_tokens=False))


def test_an_effort_that_the_model_does_not_have_is_refused(merged: LocalModel, tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)--effort\n  found:  lo, .*one of: low, high.*did you mean `low`"):
        Chat(merged, ChatOptions(effort="lo"))
    bare = find_model(tiny_model_dir, print)
    assert write_effort_template(bare, tiny_model_dir, None) is None
    with pytest.raises(ConfigError, match="the run directory of a merge with `efforts`"):
        write_effort_template(bare, tiny_model_dir, "low")
    outcome = CliRunner().invoke(app, ["chat", str(tiny_model_dir), "--effort", "low"], input="ab\n")
    assert outcome.exit_code == 2 and "--effort" in outcome.output


def test_a_model_without_a_chat_template_cannot_be_told_by_requests(
    merged: LocalModel, tmp_path: Path, make_model_dir: Any
) -> None:
    bare = make_model_dir(tmp_path / "bare")
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    model = LocalModel(path=bare, info=merged.info, config=merged.config)
    assert write_effort_template(model, tmp_path, None) is None
    with pytest.raises(ConfigError, match="a model without a chat template"):
        write_effort_template(model, tmp_path, "high")
