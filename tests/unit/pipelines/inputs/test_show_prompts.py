"""`opd prompts show`: the text as rendered, its ids, and what is left out and why."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from cli import app


def show(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["prompts", "show", *arguments])
    return found.exit_code, found.output


def write(world: Any, *prompts: Any) -> None:
    rows = [{"prompt": prompt, "answer": "x"} for prompt in prompts]
    (world.root / "upper.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_prompt_is_shown_as_the_student_reads_it(world: Any) -> None:
    write(world, [{"role": "user", "content": "upp abc"}], "upp d\x1be=", "third")
    world.write()
    code, output = show("pipeline.yaml", "--domain", "upper", "-n", "2")
    assert code == 0
    lines = output.splitlines()
    assert lines[0] == "upper, training: 3 prompts of upper.jsonl"
    # The tests' chat template writes the contents and then `=`.
    at = lines.index("upper/0: 8 tokens, answer 'x'")
    assert lines[at + 1] == "  text: 'upp abc='"
    assert len(lines[at + 2].split()) == 1 + 8
    assert "\x1b" not in output and "upper/2" not in output
    assert "upper, exam: 6 prompts of upper-eval.jsonl" in lines and "reverse" not in output


def test_what_is_left_out_is_counted_with_its_reason(world: Any) -> None:
    long = [f"upp {letter * n}" for letter in "bcdefg" for n in (20, 40)]
    write(world, "upp a=", " ", *(f"upp {i:02d}=" for i in range(40)), "", *long)
    world.data["domains"]["upper"] = {
        "prompts": {"path": "upper.jsonl", "max_prompt_tokens": 33},
        "eval": {"holdout": 0.25},
    }
    world.data["rollout"]["max_model_len"] = 24
    world.write()
    code, output = show("pipeline.yaml", "--domain", "upper", "-n", "0")
    assert code == 0
    found = {
        line.split("  ")[-1].partition(":")[0]: line.split()[0] for line in output.splitlines() if ": upper/" in line
    }
    from opd.prompts import is_held_out, read_prompt_lines

    texts = [line.prompt for line in read_prompt_lines(world.root / "upper.jsonl")]
    stay = [t for t in texts if not is_held_out(t, 0.25)]
    assert found["held out for the exam (eval.holdout 0.25)"] == str(len(texts) - len(stay))
    assert found["left out, longer than max_prompt_tokens = 33"] == str(sum(len(t) > 33 for t in stay))
    no_room = "quarantined when they come, no room for a response in rollout.max_model_len = 24"
    assert found[no_room] == str(sum(24 <= len(t) <= 33 for t in stay))
    assert found["left out, no text"] == str(sum(not t.strip() for t in stay))
    used = [t for t in stay if t.strip() and len(t) < 24]
    assert f"{len(used)} are used, of " in output


def test_every_domain_is_shown_and_an_unknown_one_refused(world: Any) -> None:
    world.write()
    code, output = show("pipeline.yaml", "-n", "1")
    assert code == 0 and "reverse/0: " in output and "upper/0: " in output
    code, output = show("pipeline.yaml", "--domain", "math")
    assert code == 2 and "wanted: a domain of the pipeline: reverse, upper" in output


def test_a_student_that_is_not_there_is_refused_without_asking_a_hub(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*arguments: Any) -> Any:
        raise AssertionError(f"asked {arguments}")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    for student, word in (("models/base", "no such directory"), ("pipeline.yaml", "a file"), (".", "no tokenizer")):
        world.data["student"]["model"] = student
        world.write()
        code, output = show("pipeline.yaml")
        assert code == 2 and f"error: {student}\n  found:  {word}" in output, output


def test_what_a_row_and_the_student_tell_the_template_is_shown(world: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(world.root / "base")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}{% if fast %}!{% endif %}"
    tokenizer.save_pretrained(world.root / "base")
    rows = [{"prompt": "a", "system": "be brief"}, {"prompt": "b", "chat_template_kwargs": {"fast": False}, "level": 1}]
    (world.root / "upper.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    world.data["domains"]["upper"]["prompts"] = {"path": "upper.jsonl", "chat": True}
    world.data["student"]["chat_template_kwargs"] = {"fast": True}
    world.write()
    code, output = show("pipeline.yaml", "--domain", "upper")
    assert code == 0, output
    assert "  text: 'system:be briefuser:a!'" in output and "  text: 'user:b'" in output
    assert "  note: upper.jsonl: columns that are not read: level" in output
    world.data["student"]["chat_template_kwargs"] = {"quick": True}
    world.write()
    code, output = show("pipeline.yaml", "--domain", "upper")
    assert code == 2 and "error: student.chat_template_kwargs.quick\n  found:  a variable that" in output


@pytest.mark.parametrize("teachers", [None, "up"])
def test_prompts_that_came_with_an_expert_are_found(teachers: str | None, world: Any) -> None:
    from experts.registry import Registry

    registry = Registry(world.root / "registry")
    for name, domain in (("rev", "reverse"), ("up", "upper")):
        registry.add(name, world.root / name, domain, world.root / f"{domain}.jsonl")
    world.data["experts"] = {"use": "all"}
    world.data["domains"]["upper"] = {"teachers": teachers} if teachers else {}
    world.write()
    code, output = show("pipeline.yaml", "--domain", "upper")
    assert code == 0 and "6 prompts of " in output and "upper.jsonl" in output
