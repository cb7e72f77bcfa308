"""A chat template is somebody's program: one that runs away is refused before it runs here."""

from __future__ import annotations

import sys
import time
import venv
from pathlib import Path
from typing import Any

import jinja2
import pytest

from opd.errors import ModelError, PromptError
from opd.prompts import load_prompts, render_prompt
from opd.prompts.chat_templates import _find_fault, refuse_runaway_template
from pipelines.inputs.read import load_tokenizer
from tests.chatml import CHATML, COUNTS, LAST_ONLY, NO_END, THINKS, WITH_TOOLS, chat_tokenizer
from tests.tool_templates import FAMILIES

DOUBLES = "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "it takes more than 2 s"),
        ("{{ 9 ** (9 ** 9) }}", "it takes more than 2 s"),
        (
            "{% if tools %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}",
            "2 s",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "it calls itself without end"),
        ("{% macro f(x) %}{{ f(x + 1) }}{% endmacro %}{{ f(messages | length) }}", "it calls itself without end"),
        ("{{ 'a' * (10 ** 10) }}", "it takes more than 1024 MiB"),
        (DOUBLES, "it takes more than (1024 MiB|2 s)"),  # filling a GiB takes a slow machine more than two seconds
        ("{{ messages[0].content * 1000000 }}", "it writes 11,000,000 characters"),
    ],
)
def test_a_template_that_runs_away_is_refused(template: str, told: str, tmp_path: Path) -> None:
    chat_tokenizer(template).save_pretrained(tmp_path)
    begun = time.monotonic()
    with pytest.raises(ModelError, match=told) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value) and "fix:" in str(caught.value)
    assert time.monotonic() - begun < 60


GOOD = [CHATML, WITH_TOOLS, LAST_ONLY, THINKS, COUNTS, NO_END, None, *(family.template for family in FAMILIES.values())]


@pytest.mark.parametrize("template", GOOD)
def test_other_templates_are_taken_even_if_they_refuse_what_is_tried(template: str | None) -> None:
    refuse_runaway_template(chat_tokenizer(template), "m")
    refuse_runaway_template(chat_tokenizer(f"{template}{{{{ raise_exception('no') }}}}"), "m")
    refuse_runaway_template(
        chat_tokenizer(f"{{% generation %}}{template}{{% endgeneration %}}{{{{ bos_token }}}}"), "m"
    )


def test_a_template_is_tried_where_only_pythonpath_has_the_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # without site-packages
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PYTHONPATH", str(Path(jinja2.__file__).parents[1]))
    refuse_runaway_template(chat_tokenizer(f"{CHATML}{{# a template that nobody has tried yet #}}"), "m")


@pytest.mark.parametrize("wrong", ["{{ 1 / 0 }}", "{{ messages[7].content }}", "{{ x.y.z }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ [1].pop(5) }}", "{{ 'a'.index('b') }}"])  # fmt: skip
def test_a_template_that_fails_is_a_refusal_of_the_row(wrong: str, tmp_path: Path) -> None:
    tokenizer: Any = chat_tokenizer(wrong)
    with pytest.raises((jinja2.TemplateError, ValueError, TypeError)):
        render_prompt(tokenizer, [{"role": "user", "content": "a"}])
    (tmp_path / "p.jsonl").write_text('{"prompt": [{"role": "user", "content": "a"}]}\n')
    with pytest.raises(PromptError, match=r"prompt d/0"):
        load_prompts(tmp_path / "p.jsonl", "d", tokenizer)


def test_packages_may_be_where_only_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `pip install --user` and `--target` put them."""
    venv.create(tmp_path / "bare", symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    monkeypatch.setenv("PYTHONPATH", str(Path(jinja2.__file__).parents[1]))
    _find_fault.cache_clear()
    refuse_runaway_template(chat_tokenizer(CHATML), "m")
