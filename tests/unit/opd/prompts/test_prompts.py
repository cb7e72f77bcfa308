"""Prompt files are refused by file and line; the mix of each step depends on nothing but seed and step."""

from __future__ import annotations

import copy
import json
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opd.config.prompts import PromptsConfig
from opd.errors import ConfigError, PromptError
from opd.prompts import (
    MixedPrompts,
    encode_prompt,
    load_prompts,
    load_tokenizer,
    open_rows,
    read_prompt_lines,
    samples_by_weight,
)
from opd.prompts.encode import encode_text, ids_in_front, mark_prompt, put_nothing_in_front
from opd.prompts.line import as_chat, read_row
from opd.records.types import Prompt
from tests.conftest import build_tokenizer, put_in_front


def write(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refusal(path: Path) -> str:
    with pytest.raises(PromptError) as error:
        read_prompt_lines(path)
    return str(error.value)


# Files


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ('{"prompt": "a"', "column"),
        ("not json", "not json"),
        ('"text"', "line"),
        ("[1]", "line"),
        ('{"answer": "b"}', "column `prompt`"),
        ('{"prompt": "' + "a" * (8 << 20) + '"}', "8,388,622 bytes"),
        ('{"metadata": ' + "[" * 100_000, "recursion"),
        ('{"prompt": "a", "metadata": {"n": ' + "9" * 5000 + "}}", "digits"),
        ('{"prompt": "a\0"}', "control character"),
        ('{"prompt": 3}', "column `prompt"),
        ('{"prompt": null}', "column `prompt"),
        ('{"prompt": "a", "answer": [4]}', "column `answer`"),
        ('{"prompt": "a", "answer": true}', "column `answer`"),
        ('{"prompt": "a", "metadata": []}', "column `metadata`"),
        ('{"prompt": [{"role": 1}]}', "column `prompt`, message 1: the keys `role`"),
        ('{"conversations": [], "id": 3}', "no column `prompt`, but `conversations`, `id`"),
        ('{"prompt": [{"from": "human", "value": "a"}]}', "column `prompt`, message 1: the keys `from`, `value`"),
        ('{"prompt": [{"role": "user", "content": "a"}, {"role": "user"}]}', "message 2: the keys `role`"),
        ('{"prompt": [{"role": "user", "content": null}]}', "message 1: `content` is no text: None"),
        ('{"prompt": [{"role": "user", "content": [{"text": "a"}]}]}', "message 1: `content` is no text"),
        ('{"prompt": [{"role": "", "content": "a"}]}', "message 1: an empty `role`"),
        ('{"prompt": [{}]}', "message 1: no keys"),
        ('{"prompt": ["a"]}', "message 1: 'a'"),
        ('{"prompt": "a", "completion": [{"from": "gpt", "value": "b"}]}', "column `completion`, message 1: the keys"),
        ("{}", "no column `prompt`"),
    ],
)
def test_a_broken_line_is_named_by_file_and_number(line: str, word: str, tmp_path: Path) -> None:
    path = write(tmp_path, f'{{"prompt": "a"}}\n\n{line}\n{{"prompt": "b"}}\n')
    message = refusal(path)
    assert message.startswith(f"{path}:3\n")
    assert word in message
    assert all(f"\n  {part}" in message for part in ("found:  ", "wanted: ", "fix:    "))


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_the_longest_line_is_read_whatever_ends_it(end: str, tmp_path: Path) -> None:
    text = "a" * ((8 << 20) - len('{"prompt":""}'))
    (line,) = read_prompt_lines(write(tmp_path, f'{{"prompt":"{text}"}}{end}'))
    assert line.prompt == text


@pytest.mark.parametrize("content", ["", "\n \n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(content: str | bytes, tmp_path: Path) -> None:
    path = write(tmp_path, content)
    assert refusal(path).startswith(f"{path}\n  found:  no prompts")


def test_a_missing_file_a_directory_and_bytes_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    assert "found:  no such file" in refusal(tmp_path / "none.jsonl")
    assert str(tmp_path) in refusal(tmp_path)
    path = write(tmp_path, '{"prompt": "é"}'.encode("latin-1"))
    assert refusal(path).startswith(f"{path}:1\n  found:  byte 13 is not UTF-8")
    path.write_bytes(b'{"prompt": "a"}\n\n{"prompt": "\xff"}\n')
    assert refusal(path).startswith(f"{path}:3\n")


def test_a_byte_order_mark_and_windows_line_ends_change_nothing(tmp_path: Path) -> None:
    text = '{"prompt": "a", "answer": "é"}\n{"prompt": "b"}\n'
    plain = read_prompt_lines(write(tmp_path, text))
    assert read_prompt_lines(write(tmp_path, b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())) == plain
    assert [line.prompt for line in plain] == ["a", "b"]
    assert plain[0].answer == "é"


def test_a_line_separator_inside_a_string_is_no_new_line(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False) + "\n")
    assert [line.prompt for line in read_prompt_lines(path)] == ["a\u2028b\x85c"]


def test_other_columns_are_ignored(tmp_path: Path) -> None:
    (line,) = read_prompt_lines(write(tmp_path, '{"prompt": "a", "source": 3, "metadata": {"k": [1]}}'))
    assert line.metadata == {"k": [1]}


def test_prompts_are_tokenised_as_written(tiny_tokenizer: Any, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "rev ab"}]
    path = write(tmp_path, json.dumps({"prompt": "rev ab=", "answer": "ba"}) + "\n" + json.dumps({"prompt": messages}))
    text, chat = load_prompts(path, "reverse", tiny_tokenizer)
    assert (text.id, chat.id, text.domain, text.answer) == ("reverse/0", "reverse/1", "reverse", "ba")
    # The tests' chat template writes the contents and then `=`.
    assert text.token_ids == chat.token_ids == tuple(tiny_tokenizer.convert_tokens_to_ids(list("rev ab=")))
    assert encode_prompt(tiny_tokenizer, "") == ()


# What the tokenizer puts in front


def letters_of(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.convert_tokens_to_ids(list(text)))


@pytest.mark.parametrize("behind", ["", "<eos>"])
def test_plain_text_begins_as_the_tokenizer_has_it(behind: str, tmp_path: Path) -> None:
    """An end token behind the text is left out: the student writes on there."""
    tokenizer = put_in_front(build_tokenizer(), behind=behind)
    want = (1, *letters_of(tokenizer, "ab="))
    if not behind:
        assert want == tuple(tokenizer("ab=")["input_ids"]), "as transformers has it"
    path = write(tmp_path, '{"prompt": "ab="}\n{"prompt": "<bos>ab="}\n{"prompt": "<bos>"}\n{"prompt": ""}\n')
    assert [prompt.token_ids for prompt in load_prompts(path, "d", tokenizer)] == [want, want, (), ()]
    assert encode_prompt(tokenizer, "ab=") == encode_prompt(tokenizer, "<bos>ab=") == want
    assert encode_text(tokenizer, "ab=") == list(want[1:]), "what goes on has no begin"


@pytest.mark.parametrize("begin", ["", "{{ bos_token }}"])
def test_a_chat_has_the_begin_that_its_template_writes(begin: str, tmp_path: Path) -> None:
    tokenizer = put_in_front(build_tokenizer())
    tokenizer.chat_template = begin + tokenizer.chat_template
    messages = [{"role": "user", "content": "ab"}]
    want = (*([1] if begin else []), *letters_of(tokenizer, "ab="))
    (prompt,) = load_prompts(write(tmp_path, json.dumps({"prompt": messages})), "d", tokenizer)
    assert prompt.token_ids == encode_prompt(tokenizer, messages) == want
    assert list(want) == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def test_a_tokenizer_can_be_told_to_put_nothing_in_front(tmp_path: Path) -> None:
    put_in_front(build_tokenizer()).save_pretrained(tmp_path)
    first, second = load_tokenizer(tmp_path), load_tokenizer(tmp_path, add_special_tokens=False)
    assert (ids_in_front(first), ids_in_front(second)) == ([1], [])
    path = write(tmp_path, '{"prompt": "ab="}\n')
    found = [next(iter(load_prompts(path, "d", tokenizer))).token_ids for tokenizer in (first, second, first)]
    assert found == [(1, *letters_of(first, "ab=")), letters_of(first, "ab="), found[0]], "one cache for both"


def test_a_tokenizer_written_in_python_cannot_be_told_so(tmp_path: Path) -> None:
    from transformers import CanineTokenizer

    with pytest.raises(ConfigError, match="add_special_tokens\n  found:  false, and a CanineTokenizer"):
        put_nothing_in_front(CanineTokenizer())


@pytest.mark.parametrize("template", [None, "{{ raise_exception('roles must alternate') }}"])
def test_messages_that_the_tokenizer_refuses_are_named(
    template: str | None, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = template
    path = write(tmp_path, '{"prompt": "a"}\n{"prompt": [{"role": "user", "content": "b"}]}\n')
    with pytest.raises(PromptError) as error:
        load_prompts(path, "d", tokenizer)
    assert f"{path}: prompt d/1\n" in str(error.value)
    assert ("roles must alternate" if template else "chat_template is not set") in str(error.value)


def test_text_that_is_not_unicode_is_refused(tiny_tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="prompt d/0"):
        load_prompts(write(tmp_path, '{"prompt": "a\\ud800"}'), "d", tiny_tokenizer)


@pytest.mark.parametrize(
    ("prompt", "asks"),
    [
        ("", False),
        (" \t\n\u3000", False),
        ("<bos><eos>", False),
        ([], False),
        ([{"role": "user", "content": " "}], False),
        ("<bos>a", True),
        ([{"role": "user", "content": "a"}], True),
    ],
)
def test_a_prompt_that_asks_nothing_has_no_tokens(prompt: Any, asks: bool, tiny_tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps({"prompt": "x"}) + "\n" + json.dumps({"prompt": prompt}) + "\n")
    first, second = load_prompts(path, "d", tiny_tokenizer)
    assert first.token_ids
    assert (second.id, bool(second.token_ids)) == ("d/1", asks)


# Messages of another kind


def test_sharegpt_messages_are_refused_with_a_command_that_converts_them(tmp_path: Path) -> None:
    turns = [("system", "short"), ("human", "7+5?"), ("gpt", "12"), ("human", "é?")]
    row = {
        "prompt": [{"from": who, "value": text} for who, text in turns],
        "completion": [{"from": "gpt", "value": "b"}],
    }
    path = write(tmp_path, (json.dumps(row | {"answer": "b"}) + "\n") * 2)
    command = refusal(path).partition("fix:    ")[2].replace("OLD", str(path.with_suffix(""))).replace("NEW", "new")
    subprocess.run(command, shell=True, check=True, cwd=tmp_path, timeout=60)
    first, second = read_prompt_lines(tmp_path / "new.jsonl")
    roles = ["system", "user", "assistant", "user"]
    assert first.prompt == [{"role": r, "content": t} for r, (_, t) in zip(roles, turns, strict=True)]
    assert (first.completion, first.answer, second) == ([{"role": "assistant", "content": "b"}], "b", first)


@pytest.mark.parametrize(
    ("roles", "refused"),
    [(["human"], "human"), (["system"], "system"), (["human", "user"], "human"), (["tool", "user"], "")],
)
def test_a_role_whose_messages_the_template_leaves_out_is_named(
    roles: list[str], refused: str, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}:"
    messages = [{"role": role, "content": f" ask {role}"} for role in roles]
    path = write(tmp_path, json.dumps({"prompt": messages}))
    if refused:
        with pytest.raises(PromptError, match=f"leaves out what has the role '{refused}'"):
            load_prompts(path, "d", tokenizer)
    else:
        assert load_prompts(path, "d", tokenizer)[0].token_ids


# Shares of a step


@pytest.mark.parametrize(
    ("total", "weights", "counts"),
    [
        (4, {"a": 1, "b": 1}, {"a": 2, "b": 2}),
        (5, {"a": 1, "b": 1, "c": 1}, {"a": 5 / 3, "b": 5 / 3, "c": 5 / 3}),
        (3, {"a": 1, "b": 100, "c": 1}, {"a": 1, "b": 1, "c": 1}),
        (12, {"a": 3, "b": 1}, {"a": 9, "b": 3}),
        (7, {"a": 0.001, "b": 1000.0}, {"a": 1, "b": 6}),
        (8, {"a": 0.1, "b": 2, "c": 1}, {"a": 1, "b": 14 / 3, "c": 7 / 3}),
        (40, {"most": 9.0, **{f"d{i}": 1.0 for i in range(9)}}, {"most": 20, **{f"d{i}": 20 / 9 for i in range(9)}}),
        (1, {"a": 0.5}, {"a": 1}),
    ],
)
def test_a_weight_is_a_share_of_the_samples(total: int, weights: dict[str, float], counts: dict[str, float]) -> None:
    found = samples_by_weight(total, weights)
    assert list(found) == list(weights)
    assert found == pytest.approx(counts)


def shares(total: int, weights: dict[str, float], steps: int, seed: int = 0) -> list[Counter[str]]:
    """Count the prompts of each domain in each step."""
    source = MixedPrompts({d: prompts(d, 50) for d in weights}, samples_by_weight(total, weights), seed)
    return [Counter(p.domain for p in source.take(step)) for step in range(1, steps + 1)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("total", "weights"),
    [
        (5, dict.fromkeys("abc", 1.0)),
        (40, {"most": 9.0, **{f"d{i}": 1.0 for i in range(9)}}),
        (200, {"a": 2.5, "b": 3.0, "c": 0.4, "d": 0.4, "e": 1.0, "f": 2.25}),
        (17, {f"d{i}": 1 / (1 + i) for i in range(10)}),
    ],
)
def test_what_is_left_over_by_rounding_goes_round(total: int, weights: dict[str, float], seed: int) -> None:
    exact, steps, sums = samples_by_weight(total, weights), 60, Counter[str]()
    for number, counts in enumerate(shares(total, weights, steps, seed), start=1):
        sums.update(counts)
        assert sum(counts.values()) == total and min(counts[d] for d in weights) >= 1
        assert all(abs(counts[d] - exact[d]) < 1 for d in weights)
        assert all(abs(sums[d] - number * exact[d]) < 2.5 for d in weights), "at every step, not in the end alone"


# The mix


def prompts(domain: str, num: int) -> list[Prompt]:
    return [Prompt(id=f"{domain}/{i}", domain=domain, token_ids=(i,)) for i in range(num)]


def mixed(seed: int = 0) -> MixedPrompts:
    return MixedPrompts({"a": prompts("a", 7), "b": prompts("b", 30)}, {"a": 3, "b": 2}, seed)


def ids(source: MixedPrompts, step: int) -> list[str]:
    return [p.id for p in source.take(step)]


def test_a_step_depends_on_seed_and_step_alone() -> None:
    forward, backward, jumping = mixed(), mixed(), mixed()
    want = {step: ids(forward, step) for step in range(1, 40)}
    assert {step: ids(backward, step) for step in range(39, 0, -1)} == want
    assert ids(jumping, 37) == want[37]
    assert ids(jumping, 2) == want[2]
    assert ids(jumping, 2) == want[2]


def test_a_step_that_is_taken_twice_is_read_once() -> None:
    read: list[int] = []

    class Table(list[Prompt]):
        def __getitem__(self, index: Any) -> Any:
            read.append(index)
            return super().__getitem__(index)

    source = MixedPrompts({"a": Table(prompts("a", 7))}, {"a": 3}, 0)
    first, again = source.take(4), source.take(4)
    assert first == again == mixed().take(4)[:3] and len(read) == 3
    again.clear()  # nobody else's list
    assert source.take(4) == first
    source.take(5)
    assert len(read) == 6


def test_every_domain_is_in_every_step() -> None:
    source = mixed()
    for step in range(1, 50):
        assert Counter(p.domain for p in source.take(step)) == {"a": 3, "b": 2}


def test_an_epoch_covers_every_prompt_once_and_the_next_has_another_order() -> None:
    source = mixed()
    stream = [i for step in range(1, 100) for i in ids(source, step) if i.startswith("a/")]
    epochs = [stream[i : i + 7] for i in range(0, 7 * 40, 7)]
    assert all(sorted(epoch) == [f"a/{i}" for i in range(7)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 30


def test_seeds_and_domains_have_orders_of_their_own() -> None:
    assert [ids(mixed(0), s) for s in range(1, 9)] != [ids(mixed(1), s) for s in range(1, 9)]
    twins = MixedPrompts({"a": prompts("x", 30), "b": prompts("x", 30)}, {"a": 15, "b": 15}, 0)
    first = ids(twins, 1)
    assert first[:15] != first[15:]


def test_a_prompt_comes_as_often_as_it_gets_responses() -> None:
    once, thrice = mixed(), MixedPrompts({"a": prompts("a", 7), "b": prompts("b", 30)}, {"a": 3, "b": 2}, 0, 3)
    for step in range(1, 9):
        assert ids(thrice, step) == [i for i in ids(once, step) for _ in range(3)]


def test_the_order_is_the_same_in_every_process_and_release() -> None:
    # A resumed run must see the prompts that the first run would have seen.
    assert ids(mixed(), 1) == ["a/6", "a/3", "a/5", "b/27", "b/15"]


# Chats


@pytest.mark.parametrize(
    ("row", "prompt", "completion"),
    [
        ({"prompt": "2+2="}, [("user", "2+2=")], None),
        ({"prompt": "2+2=", "completion": "4"}, [("user", "2+2=")], [("assistant", "4")]),
        ({"prompt": [("user", "2+2="), ("assistant", "4")]}, [("user", "2+2=")], [("assistant", "4")]),
        ({"prompt": [("system", "s"), ("user", "2+2=")]}, [("system", "s"), ("user", "2+2=")], None),
        ({"prompt": [("user", "a"), ("assistant", "b"), ("user", "c")]}, [("user", "a"), ("assistant", "b"), ("user", "c")], None),
        ({"prompt": [("assistant", "b")]}, [("assistant", "b")], None),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("keys", [("role", "content"), ("from", "value")], ids=str)
def test_a_chat_ends_before_the_assistants_last_turn(
    row: dict[str, Any], prompt: Any, completion: Any, keys: tuple[str, str]
) -> None:
    theirs = {"user": "human", "assistant": "gpt"} if keys[0] == "from" else {}
    given = {
        name: [{keys[0]: theirs.get(role, role), keys[1]: text} for role, text in value]
        if isinstance(value, list)
        else value
        for name, value in row.items()
    }
    found = read_row(as_chat(given, {}))
    said = {"prompt": prompt, "completion": completion}
    assert {name: getattr(found, name) for name in said} == {
        name: None if turns is None else [{"role": role, "content": text} for role, text in turns]
        for name, turns in said.items()
    }


def test_a_number_is_an_answer_as_json_spells_it() -> None:
    assert [read_row({"prompt": "a", "answer": value}).answer for value in (42, -0.5, "007")] == ["42", "-0.5", "007"]


def test_a_chat_has_rows_of_its_own_in_the_cache(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n')
    plain, chat = (open_rows(PromptsConfig(path=file, chat=chat)) for chat in (False, True))
    assert plain.key != chat.key
    assert plain.key == open_rows(file).key


def test_the_tokenizer_of_a_directory_is_tokenizer_json_also_beside_mistrals_own(
    make_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """Laid out as Mistral publishes its models."""
    model = make_model_dir(tmp_path / "model", layers=1)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]})
    )
    (model / "tekken.json").write_text("{}")
    assert load_tokenizer(model)("ab").input_ids == [4, 5]


@pytest.mark.parametrize(
    ("prompt", "marked"),
    [
        ("2+2=", "T2+2="),
        (" ", " "),
        ([{"role": "user", "content": "a"}], [{"role": "system", "content": "T"}, {"role": "user", "content": "a"}]),
        (
            [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}],
            [{"role": "system", "content": "T\n\ns"}, {"role": "user", "content": "a"}],
        ),
        (
            [{"role": "developer", "content": "s"}, {"role": "user", "content": "a"}],
            [{"role": "developer", "content": "T\n\ns"}, {"role": "user", "content": "a"}],
        ),
        (
            [{"role": "system", "content": " "}, {"role": "user", "content": "a"}],
            [{"role": "system", "content": "T"}, {"role": "user", "content": "a"}],
        ),
    ],
    ids=str,
)
def test_a_text_goes_before_a_prompt(prompt: Any, marked: Any) -> None:
    assert mark_prompt(prompt, "T") == marked
    assert mark_prompt(prompt, "") == prompt
