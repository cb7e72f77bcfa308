"""An episode that an expert learns has exactly the tokens of a rollout with the same turns, and the same tokens count."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

import pytest

from experts.episodes.encode import EpisodeEncoder
from experts.episodes.rows import read_episode
from experts.sft import IGNORED, collate_examples, encode_lines
from experts.suites.letters import build_tokenizer
from opd.errors import ModelError, PromptError
from opd.prompts import PromptLine, encode_prompt
from opd.records.environments import Action, Outcome, Tool
from opd.records.types import Rollout
from tests.chatml import CHATML, LAST_ONLY, WITH_TOOLS, chat_tokenizer
from tests.spoken import spoken
from tests.tool_templates import QWEN3

ADD = Tool(
    name="add",
    description="Add one.",
    parameters={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
)
Script = list[tuple[str, tuple[str, ...]]]
"""The policy's words in each turn, and the environment's answers: a text for each call, one without calls."""


class Scripted:
    """Answers as its prompt's metadata say."""

    def __init__(self, tools: bool = False) -> None:
        self.tools = (ADD,) if tools else ()

    def reset(self, metadata: Mapping[str, Any], seed: int) -> Any:
        self.answers = list(metadata["answers"])
        return metadata["first"]

    def step(self, action: Action) -> Outcome:
        texts = self.answers.pop(0)
        return Outcome(observation=tuple(texts) if action.calls else texts[0], done=not self.answers)

    def close(self) -> None:
        pass


def rollout(tokenizer: Any, prompt: Any, first: Any, script: Script, *, tools: bool = False) -> Rollout:
    task = {"prompt": prompt, "metadata": {"first": first, "answers": [texts for _, texts in script]}}
    found = spoken(tokenizer, f"{__name__}:Scripted", task, [said for said, _ in script], tools=tools)
    assert (found.error, found.audit.turns, found.audit.forks) == ("", len(script), 0)
    (only,) = found.rollouts
    return only


def messages(first: str, script: Script, weights: Sequence[int] = ()) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"role": "user", "content": first}] if first else []
    for number, (said, texts) in enumerate(script):
        weight = {"weight": weights[number]} if weights else {}
        rows.append({"role": "assistant", "content": said} | weight)
        role = "tool" if "add" in said else "user"
        rows += [{"role": role, "content": text} for text in texts]
    return rows


def words(rng: random.Random, letters: str) -> str:
    return "".join(rng.choices(letters, k=rng.randint(1, 8)))


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("kind", ["letters", "bytes", "chat", "chat with tools"])
def test_a_row_has_the_tokens_and_the_mask_of_a_rollout(kind: str, tools: bool) -> None:
    """200 random episodes in all: turns, observations, calls and first observations of any length."""
    templates = {"bytes": None, "chat": CHATML, "chat with tools": WITH_TOOLS}
    tokenizer = build_tokenizer() if kind == "letters" else chat_tokenizer(templates[kind])
    encoder, rng = EpisodeEncoder(tokenizer), random.Random(kind)
    for _ in range(25):
        prompt: Any = words(rng, "abc \n")
        if kind.startswith("chat"):
            prompt = [{"role": "user", "content": prompt}]
        first = words(rng, "xyz:\n") if rng.random() < 0.7 else ""
        script = [turn(rng, kind, tools and rng.random() < 0.5) for _ in range(rng.randint(1, 5))]
        said = messages(first, script)
        row = {"prompt": prompt, "messages": said} | ({"tools": [ADD.schema()]} if tools else {})
        ids, learned = encoder.encode(read_episode(json.loads(json.dumps(row))))
        wanted = rollout(tokenizer, prompt, first, script, tools=tools)
        assert ids == [*wanted.prompt_ids, *wanted.response_ids]
        assert learned == [False] * len(wanted.prompt_ids) + list(wanted.loss_mask)


def turn(rng: random.Random, kind: str, calls: bool) -> tuple[str, tuple[str, ...]]:
    if not calls:
        return words(rng, "stu 12"), (words(rng, "xyz:\n"),)
    if not kind.startswith("chat"):
        return f"add {rng.randint(0, 99)}", (words(rng, "xyz:\n"),)
    number = rng.randint(1, 3)
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    return "So: " + call * number, tuple(words(rng, "xyz") for _ in range(number))


def test_a_mistake_is_read_and_not_learned() -> None:
    tokenizer = build_tokenizer()
    row = {"prompt": "maze\n", "messages": messages("b3:", [("N", ("b2:",)), ("S", ("b3:",)), ("E", ())], [1, 0, 1])}
    (example,) = encode_lines(tokenizer, [read_episode(row)], max_length=64)
    assert tokenizer.decode(example["input_ids"]) == "maze\nb3:N<eos>b2:S<eos>b3:E<eos>"
    shown = [tokenizer.decode([label]) if label != IGNORED else "_" for label in example["labels"]]
    assert "".join(shown) == "_" * len("maze\nb3:") + "N<eos>" + "_" * len("b2:S.b3:") + "E<eos>"


def test_a_turn_ends_with_the_models_end_token_that_the_template_writes() -> None:
    """As Gemma's do: the tokenizer's own end token is another one, and ends no turn."""
    known, other = chat_tokenizer(), chat_tokenizer()
    other.eos_token = "<|endoftext|>"
    ends = [known.eos_token_id, other.eos_token_id]
    row = read_episode({"messages": [*messages("1+2?", [("4", ("Sure?",)), ("3", ())])]})
    assert EpisodeEncoder(other, ends=ends).encode(row) == EpisodeEncoder(known).encode(row)
    line = PromptLine(prompt=[{"role": "user", "content": "1+2?"}], completion=[{"role": "assistant", "content": "3"}])
    assert encode_lines(other, [line, row], 64, ends) == encode_lines(known, [line, row], 64)
    (text,) = encode_lines(other, [PromptLine(prompt="1+2=", completion="3")], 64, ends)
    assert text["input_ids"][-1] == other.eos_token_id


def test_a_last_turn_with_calls_ends_as_calls_do() -> None:
    """As GLM's do: the mark of what comes next ends a turn, and nothing follows the last one that would tell."""
    end, call_end = (
        "{{ '<|im_end|>\n' }}{% endfor %}",
        "{{ '<|endoftext|>\n' }}{% else %}{{ '<|im_end|>\n' }}{% endif %}",
    )
    template = WITH_TOOLS.replace("{% endfor %}{% endif %}" + end, "{% endfor %}" + call_end + "{% endfor %}")
    assert template != WITH_TOOLS
    tokenizer = chat_tokenizer(template)
    encoder = EpisodeEncoder(tokenizer, ends=[tokenizer.convert_tokens_to_ids("<|endoftext|>")])
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    broken = '<tool_call>{"name": "add", "arguments": </tool_call>'
    for last, closer in ((call, "<|endoftext|>"), (broken, "<|endoftext|>"), ("done", "<|im_end|>")):
        said = messages("1+2?", [(call, ("3",)), (last, ())])
        row = read_episode({"messages": said, "tools": [ADD.schema()]})
        text = tokenizer.decode(encoder.encode(row)[0])
        assert text.endswith(last + closer) and call + "<|endoftext|>" in text


def test_episodes_and_single_turns_share_a_batch() -> None:
    tokenizer = build_tokenizer()
    lines = [
        PromptLine(prompt="rev ab=", completion="ba"),
        read_episode({"prompt": "maze\n", "messages": messages("b3:", [("N", ("b2:",)), ("S", ())])}),
    ]
    batch = collate_examples(encode_lines(tokenizer, lines, max_length=64))
    labels = batch["labels"]
    assert not isinstance(labels, int)
    assert [tokenizer.decode(row[row != IGNORED]) for row in labels] == ["ba<eos>", "N<eos>S<eos>"]


def test_a_conversation_without_a_prompt_is_openais_format() -> None:
    tokenizer = chat_tokenizer(CHATML)
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": "4", "weight": 0},
        {"role": "user", "content": "No."},
        {"role": "assistant", "content": "3", "weight": 1},
    ]
    row = read_episode({"messages": talk})
    ids, learned = EpisodeEncoder(tokenizer).encode(row)
    plain = [{"role": str(m["role"]), "content": str(m["content"])} for m in talk]
    whole = tokenizer.apply_chat_template(plain, tokenize=False).removesuffix("\n")
    assert tokenizer.decode(ids) == whole
    assert tokenizer.decode([i for i, learn in zip(ids, learned, strict=True) if learn]) == "3<|im_end|>"
    assert not row.asks


def test_the_prompt_and_what_follows_it() -> None:
    tokenizer = build_tokenizer()
    row = read_episode({"prompt": "maze\n", "messages": messages("b3:", [("N", ("b2:",)), ("S", ())], [0, 1])})
    encoder = EpisodeEncoder(tokenizer)
    prompt, ids, learned = encoder.encode_prompt_and_rest(row)
    assert [prompt] == encoder.encode_prefixes(row)[:1]
    assert (tokenizer.decode(prompt), tokenizer.decode(ids)) == ("maze\nb3:", "N<eos>b2:S<eos>")
    assert learned == [False] * len("N.b2:") + [True] * len("S.")
    assert encoder.encode(row) == (prompt + ids, [False] * len(prompt) + learned)


def test_a_template_that_asks_for_a_date_gets_the_merges() -> None:
    dated = "{{ '<|im_start|>system\n' + strftime_now('%Y-%m-%d') + '<|im_end|>\n' }}" + CHATML
    tokenizer = chat_tokenizer(dated)
    prompt = [{"role": "user", "content": "a"}]
    row = read_episode({"prompt": prompt, "messages": messages("", [("b", ())])})
    found, _, _ = EpisodeEncoder(tokenizer, date(2020, 1, 2)).encode_prompt_and_rest(row)
    assert tuple(found) == encode_prompt(tokenizer, prompt, date(2020, 1, 2))
    assert "2020-01-02" in tokenizer.decode(found)


def test_thoughts_that_the_template_drops_before_the_next_turn() -> None:
    """A prefix has what a rollout has there; no one row can be the whole episode."""
    tokenizer = chat_tokenizer(QWEN3)
    said = ["<think>\nhm\n</think>\n\na", "b", "<think>\noh\n</think>\n\nc"]
    prompt = [{"role": "user", "content": "x"}]
    row = read_episode(
        {"prompt": prompt, "messages": messages("", [(said[0], ("1",)), (said[1], ("2",)), (said[2], ())])}
    )
    encoder = EpisodeEncoder(tokenizer)
    for number, ids in enumerate(encoder.encode_prefixes(row)):
        before = [*prompt]
        for turn, seen in zip(said[:number], "12", strict=False):
            before += [{"role": "assistant", "content": turn}, {"role": "user", "content": seen}]
        assert tuple(ids) == encode_prompt(tokenizer, before)
    with pytest.raises(PromptError, match="thoughts in a turn, which the chat template leaves out"):
        encoder.encode(row)
    mended = read_episode({"prompt": prompt, "messages": messages("", [("a", ("1",)), ("b", ("2",)), (said[2], ())])})
    ids, learned = encoder.encode(mended)
    text = tokenizer.decode(ids)
    assert text.endswith(f"{said[2]}<|im_end|>") and text.count("think>") == 2 and sum(learned) > len(said[2])
    (kept, _) = EpisodeEncoder(chat_tokenizer(CHATML)).encode(row)
    assert tokenizer.decode(kept).count("<think>") == 2, "a template that keeps them has them in one row"


def test_a_template_that_cannot_append_and_an_observation_nobody_can_read_are_refused() -> None:
    row = read_episode({"prompt": [{"role": "user", "content": "a"}], "messages": messages("", [("b", ())])})
    with pytest.raises(ModelError, match="changes what stands before a turn"):
        EpisodeEncoder(chat_tokenizer(LAST_ONLY)).encode(row)
    odd = read_episode({"prompt": "a", "messages": messages("b", [("c", ("\x07",)), ("d", ())])})
    with pytest.raises(PromptError, match="control character"):
        EpisodeEncoder(build_tokenizer()).encode(odd)
