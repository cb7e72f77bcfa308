"""Compaction: the summary is trained once, where it was sampled; what is copied carries no loss; the episode goes on."""

from __future__ import annotations

import pytest

from opd.errors import ModelError, RunError
from opd.records.environments import Outcome
from opd.records.episodes import EpisodeStats
from opd.records.types import Rollout
from opd.rollouts.episodes.chat import ChatAppender
from opd.rollouts.episodes.compaction import CompactionOptions
from opd.rollouts.episodes.spec import refuse_many_broken
from tests.chatml import CHATML, WITH_TOOLS, chat_tokenizer
from tests.tool_templates import ALTERNATES, ALTERNATES_WITH_TOOLS
from tests.unit.opd.rollouts.episodes.test_runner import EOS, TOKENIZER, encode, play, request

ASK = "sum up: "
HERMES_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
MISTRAL_MARKS = ("[TOOL_CALLS]", "[ARGS]")


def options(**changes: object) -> CompactionOptions:
    known: dict[str, object] = {
        "compact_at": 36,
        "keep_last": 1,
        "prompt": ASK,
        "resume": "so far {summary} ",
        "max_tokens": 12,
        "max_compactions": 3,
    }
    return CompactionOptions(**known | changes)  # type: ignore[arg-type]


def policy(text: str) -> str:
    """Counts on, and sums up with the number that was reached."""
    import re

    reached = int(re.findall(r"\d+", text.replace("sum 0", ""))[-1])
    return f"at {reached}" if text.endswith(ASK) or ASK in text.rpartition("<|im_start|>user")[2] else str(reached + 1)


def text_of(rollout: Rollout) -> tuple[str, str]:
    return TOKENIZER.decode(rollout.prompt_ids), TOKENIZER.decode(rollout.response_ids)


def sampled_text(rollout: Rollout) -> str:
    return TOKENIZER.decode(rollout.trained_ids)


def test_an_episode_goes_on_from_its_summary_and_its_last_turn() -> None:
    (found,), _ = play(request(options={"goal": 11}, max_turns=20, compaction=options()), policy=policy)
    assert found.stop_reason == "done" and found.reward == 11 * 0.25
    first, second, third = found.rollouts
    turns = "".join(f"{n}<|im_end|> {n} " for n in range(1, 7))
    assert text_of(first) == ("count:0 ", f"{turns}{ASK}at 6<|im_end|>")
    turns = "".join(f"{n}<|im_end|> {n} " for n in range(7, 10))
    assert text_of(second) == ("count:0 so far at 6 6<|im_end|> 6 ", f"{turns}{ASK}at 9<|im_end|>")
    assert text_of(third) == ("count:0 so far at 9 9<|im_end|> 9 ", "10<|im_end|> 10 11<|im_end|>")
    assert sum(r.num_trained for r in found.rollouts) == found.audit.sampled == found.audit.trained
    assert found.audit.forks == found.audit.lost_turns == 0
    assert {r.episode for r in found.rollouts} == {"s0"}
    assert [r.sample_id for r in found.rollouts] == ["s0", "s0+1", "s0+2"]
    assert {r.reward for r in found.rollouts} == {11 * 0.25}
    assert [(r.origin, r.parent, r.next) for r in found.rollouts] == [
        ("main", None, "s0+1"), ("summary", "s0", "s0+2"), ("summary", "s0+1", None),
    ]  # fmt: skip


def test_copies_carry_no_loss_and_every_sampled_token_one_span() -> None:
    (found,), speaker = play(request(options={"goal": 11}, max_turns=20, compaction=options()), policy=policy)
    turns = [str(n) for n in range(1, 12)]
    written = [t for r in found.rollouts for t in sampled_text(r).split("<|im_end|>") if t]
    assert [t for t in written if not t.startswith("at ")] == turns, "each turn is trained once"
    assert [t for t in written if t.startswith("at ")] == ["at 6", "at 9"]
    assert len(speaker.seeds) == len(set(speaker.seeds)) == len(written), "a seed for each turn and each summary"
    for rollout in found.rollouts:
        for place, trained in enumerate(rollout.loss_mask):
            assert trained == (rollout.behaviour_logprobs[place] == -1.0)


def test_no_turn_is_kept_but_the_summary() -> None:
    (found,), _ = play(request(options={"goal": 8}, compaction=options(keep_last=0)), policy=policy)
    assert found.stop_reason == "done"
    assert text_of(found.rollouts[1])[0].startswith("count:0 so far at ")
    assert "<|im_end|>" not in text_of(found.rollouts[1])[0]


def test_after_the_last_summary_the_episode_ends_where_the_context_does() -> None:
    (found,), _ = play(
        request(options={"goal": 999}, max_turns=999, compaction=options(max_compactions=2)), policy=policy
    )
    assert found.stop_reason == "context" and len(found.rollouts) == 3


@pytest.mark.parametrize("max_tokens", [None, 12])
def test_nothing_is_summed_up_after_the_last_turn(max_tokens: int | None) -> None:
    """Six turns of two tokens: the observation after them is the first beyond `compact_at`."""
    asked = request(options={"goal": 99}, max_turns=6, max_tokens=max_tokens, compaction=options())
    (found,), _ = play(asked, policy=policy)
    assert (found.stop_reason, found.audit.sampled, len(found.rollouts)) == ("turns", 12, 1)
    assert found.text.endswith("environment:  6 ")


def test_the_budget_of_an_episode_counts_all_segments() -> None:
    (found,), _ = play(request(options={"goal": 99}, max_turns=99, max_tokens=30, compaction=options()), policy=policy)
    assert found.stop_reason == "tokens" and len(found.rollouts) > 1
    assert sum(r.num_trained for r in found.rollouts) == 30


def test_a_summary_that_is_cut_is_trained_and_goes_on() -> None:
    (found,), _ = play(request(options={"goal": 7}, compaction=options(max_tokens=2)), policy=policy)
    assert found.rollouts[0].trained_ids[-2:] == tuple(encode("at"))
    assert text_of(found.rollouts[1])[0].startswith("count:0 so far at 6<|im_end|> 6 ")


def test_what_no_one_can_read_is_left_out_of_the_copy() -> None:
    def odd(text: str) -> str:
        return "at\x0b <|im_start|>6" if ASK in text[-len(ASK) :] else policy(text.replace("\x0b", ""))

    (found,), _ = play(request(options={"goal": 8}, compaction=options()), policy=odd)
    assert found.stop_reason == "done" and not found.error
    assert "\x0b" not in text_of(found.rollouts[1])[0] and "<|im_start|>" not in text_of(found.rollouts[1])[0]


@pytest.mark.parametrize("template", [CHATML, WITH_TOOLS], ids=["ChatML", "with tools"])
def test_chat_messages(template: str) -> None:
    messages = [{"role": "system", "content": "be exact"}, {"role": "user", "content": "count"}]
    (found,), _ = play(
        request(text=messages, options={"goal": 4}, compaction=options(compact_at=100)),
        policy=policy,
        tokenizer=chat_tokenizer(template),
    )
    assert found.stop_reason == "done"
    first, second = (text_of(r) for r in found.rollouts[:2])
    assert first[1].endswith("\n\nsum up: <|im_end|>\n<|im_start|>assistant\n" + first[1].rpartition("assistant\n")[2])
    assert second[0].startswith("<|im_start|>system\nbe exact<|im_end|>\n<|im_start|>user\ncount\n\n0 \n\nso far at ")
    kept = second[0].partition("<|im_start|>assistant\n")[2]
    assert kept.split("<|im_end|>")[0].isdigit() and kept.endswith("<|im_start|>assistant\n")
    assert found.rollouts[0].response_ids[-1] == EOS


@pytest.mark.parametrize("template", [CHATML, WITH_TOOLS], ids=["ChatML", "with tools"])
def test_a_turn_that_gets_no_observation(template: str) -> None:
    silent = {"step": Outcome(observation=())}
    (found,), _ = play(
        request(text=[{"role": "user", "content": "count"}], options=silent, compaction=options(compact_at=60)),
        policy=policy,
        tokenizer=chat_tokenizer(template),
    )
    assert (found.stop_reason, found.error) == ("turns", "") and len(found.rollouts) > 1
    asked = text_of(found.rollouts[0])[1]
    assert f"<|im_end|>\n<|im_start|>user\n{ASK}<|im_end|>\n<|im_start|>assistant\n" in asked


@pytest.mark.parametrize(
    ("template", "specials", "call", "asked"),
    [
        (ALTERNATES, (), HERMES_CALL, "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n\nsum up:<|im_end|>"),
        (
            ALTERNATES_WITH_TOOLS,
            MISTRAL_MARKS,
            '[TOOL_CALLS]add[ARGS]{"a": 1}',
            "<|im_start|>tool\n2\n\nsum up: <|im_end|>",
        ),
    ],
    ids=["Gemma, Command R", "Mistral Small 3.2"],
)
def test_a_template_whose_roles_alternate_gets_results_and_request_in_one_message(
    template: str, specials: tuple[str, ...], call: str, asked: str
) -> None:
    told: list[str] = []

    def adds(text: str) -> str:
        told.append("at 2" if ASK.strip() in text.rpartition("<|im_start|>")[0].rpartition("<|im_start|>")[2] else call)
        return "9" if told.count(call) > 5 else told[-1]

    (found,), _ = play(
        request(
            text=[{"role": "user", "content": "add"}],
            place="Adding",
            max_turn_tokens=80,
            compaction=options(compact_at=300),
        ),
        policy=adds,
        tokenizer=chat_tokenizer(template, specials),
    )
    assert (found.stop_reason, found.error, found.invalid_calls) == ("done", "", 0)
    first, second = (text_of(rollout) for rollout in found.rollouts[:2])
    assert first[1].count(asked) == 1 and first[1].endswith("at 2<|im_end|>")
    assert "so far at 2" in second[0] and found.rollouts[1].origin == "summary"


def test_a_template_that_refuses_the_request_breaks_the_episode_and_is_counted() -> None:
    loop = "{% for m in messages %}"
    picky = CHATML.replace(loop, loop + "{% if ' 3 ' in m.content %}{{ raise_exception('no') }}{% endif %}")
    asked = [request(i, text=[{"role": "user", "content": "count"}], options={"goal": 9}) for i in range(2)]
    results, _ = play(*asked, tokenizer=chat_tokenizer(picky))
    assert [r.stop_reason for r in results] == ["template", "template"] and results[0].error == "s0: no"
    with pytest.raises(RunError, match="2 of 2 episodes broke"):
        refuse_many_broken("d", EpisodeStats.from_results(results), 0.1)


def test_a_template_that_takes_no_request_after_results_is_refused_at_the_start() -> None:
    loop = "{% for m in messages %}"
    picky = CHATML.replace(loop, loop + "{% if 'Sum up' in m.content %}{{ raise_exception('no') }}{% endif %}")
    with pytest.raises(ModelError, match="refuses a text of the user's after the results of tools"):
        ChatAppender(chat_tokenizer(picky), [EOS]).prove_note()
    for template in (CHATML, WITH_TOOLS, ALTERNATES):
        ChatAppender(chat_tokenizer(template), [EOS]).prove_note()


def test_a_call_is_never_apart_from_its_result() -> None:
    messages = [{"role": "user", "content": "add"}]

    def adds(text: str) -> str:
        if ASK in text.rpartition("<|im_start|>user")[2]:
            return "added"
        done = text.count("<tool_call>\n{") - text.count('{"name": "NAME"')
        return "9" if done >= 2 else '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

    (found,), _ = play(
        request(text=messages, place="Adding", max_turn_tokens=80, compaction=options(compact_at=300)),
        policy=adds,
        tokenizer=chat_tokenizer(WITH_TOOLS),
    )
    assert found.stop_reason == "done" and len(found.rollouts) > 1
    asked = text_of(found.rollouts[0])[1]
    assert asked.rindex("<|im_start|>tool\n2") < asked.index(ASK), "the result, then the request"
    kept = text_of(found.rollouts[1])[0]
    assert kept.count("<tool_call>\n{") - kept.count('{"name": "NAME"') == kept.count("<|im_start|>tool\n2") == 1
