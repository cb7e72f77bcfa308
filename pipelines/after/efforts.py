"""Efforts of a merged model: a request names one by OpenAI's `reasoning_effort`, and the chat template puts its tag into the prompt."""

from __future__ import annotations

from pathlib import Path

from opd.config import PipelineConfig
from opd.config.efforts import EFFORT_VARIABLE
from opd.errors import ConfigError
from opd.files import atomic_write_text
from opd.prompts.encode import load_tokenizer
from opd.settings.suggestions import did_you_mean
from pipelines.after.models import LocalModel

KNOWN = f"{EFFORT_VARIABLE} is defined and {EFFORT_VARIABLE}"
"""Condition of a chat template that the request, or the server's default, names an effort."""


MARK_MESSAGES = (
    "{%- set first = messages[0] -%}"
    "{%- if first['role'] not in ['system', 'developer'] -%}"
    "{%- set messages = [{'role': 'system', 'content': TEXT}] + messages -%}"
    "{%- else -%}"
    "{%- set content = TEXT ~ ('\\n\\n' ~ first['content'] if first['content'] else '') -%}"
    "{%- set messages = [{'role': first['role'], 'content': content}] + messages[1:] -%}"
    "{%- endif -%}"
)
"""Lines of a chat template that do to messages, for TEXT, what `opd.prompts.encode.mark_prompt` does."""


def refuse_unknown_effort(model: LocalModel, effort: str | None) -> None:
    """Refuse an effort that the model was not trained for; None is none. Raises: ConfigError."""
    known = list(model.config.efforts) if model.config else []
    if effort is not None and effort not in known:
        raise ConfigError.at(
            "--effort",
            found=f"{effort}, and {model.name}{'' if known else ' without `efforts` in its pipeline'}",
            wanted=f"one of: {', '.join(known)}" if known else "the run directory of a merge with `efforts`",
            fix=did_you_mean(effort, known, "leave it out"),
        )


def write_effort_template(model: LocalModel, directory: Path, effort: str | None) -> Path | None:
    """Write the chat template that puts the tag of a request's effort into its prompt, and return its path; None if the model has no
    efforts. `effort`: the one of requests that name none.

    Raises: ConfigError for an unknown effort, or one that a model without a chat template could not be told.
    """
    refuse_unknown_effort(model, effort)
    if model.config is None or not model.config.efforts:
        return None
    template = load_tokenizer(model.path).chat_template
    if not template and effort is not None:
        raise ConfigError.at(
            "--effort",
            found=f"{effort}, and a model without a chat template",
            wanted="a chat template, which puts the effort into prompts",
            fix=f"leave it out, and begin each prompt with efforts.{effort}.text",
        )
    if not template:
        return None
    path = directory / "chat_template.jinja"
    atomic_write_text(path, add_effort_tags(model.config, template))
    return path


def add_effort_tags(config: PipelineConfig, template: str) -> str:
    """Return a chat template that does, for the variable `reasoning_effort`, what the merge did for the effort of this name.

    Values are written as Python does, which jinja2 reads. An unknown effort is an error of the request.
    """
    branches = []
    for name, effort in config.efforts.items():
        settings = [f"{{%- set {key} = {value!r} -%}}" for key, value in config.chat_template_kwargs_at(name).items()]
        if effort.text:
            settings.append(MARK_MESSAGES.replace("TEXT", repr(effort.text)))
        branches.append(f"if {KNOWN} == {name!r} -%}}{''.join(settings)}")
    unknown = f"{EFFORT_VARIABLE}: one of {', '.join(config.efforts)}"
    refusal = f"elif {KNOWN} -%}}{{{{ raise_exception({unknown!r}) }}}}{{%- endif %}}"
    # The empty expression keeps a line break at the template's start, which would be dropped right behind a block.
    return "{%- " + "{%- el".join(branches) + "{%- " + refusal + "{{ '' }}" + template
