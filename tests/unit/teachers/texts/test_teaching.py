"""Against a real HTTP server that writes answers, or that does what servers do wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opd.errors import ConfigError, RunError
from opd.prompts.encode import encode_text, load_tokenizer
from opd.records.types import Prompt, RolloutBatch, Span
from opd.servers.budget import CallBudget
from opd.servers.text_server import TextServerSpec
from teachers.texts.teaching import TextDomain, TextTeaching, TextTeachingSpec
from tests.rows import make_rollout
from tests.writer import Reply, Writer


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    return load_tokenizer(tiny_model_dir)


@pytest.fixture
def teach(writer: Writer, tokenizer: Any, tmp_path: Path) -> Callable[..., TextTeaching]:
    """Function that starts a session of the run; keyword arguments change the domain, the server or the limits."""

    def start(max_quarantined: float = 1.0, max_new_tokens: int = 16, **more: Any) -> TextTeaching:
        server = {"base_url": writer.url, "model": "expert", "api": "chat", "max_tokens": 16, "timeout_s": 5.0}
        server |= {key: more.pop(key) for key in list(more) if key in TextServerSpec.__dataclass_fields__}
        domain = {
            "steps": 2,
            "compares": False,
        }
        budget = {"max_calls": None, "max_cost": None, "input_price": 1.0, "output_price": 2.0}
        budget |= {key: more.pop(key) for key in list(more) if key in budget}
        own = TextDomain(expert="e", server=TextServerSpec(**server), budget=CallBudget(**budget), **domain | more)
        spec = TextTeachingSpec(
            domains={"a": own}, stop_token_ids=(tokenizer.eos_token_id,), max_new_tokens=max_new_tokens, max_model_len=32,
            max_quarantined=max_quarantined,
        )  # fmt: skip
        return TextTeaching(spec, tokenizer, tmp_path / "texts.jsonl")

    return start


def step_of(number: int, *texts: str, domain: str = "a") -> tuple[RolloutBatch, list[Prompt]]:
    prompts = [Prompt(id=f"{domain}/{text}", domain=domain, token_ids=(5, 6), text=text) for text in texts]
    rollouts = tuple(
        make_rollout(sample_id=f"{number:06d}/{p.id}", step=number, domain=domain, policy_version=number - 1,
                     prompt_ids=(5, 6), response_ids=(7, 8), behaviour_logprobs=(-1.0, -1.0))
        for p in prompts
    )  # fmt: skip
    return RolloutBatch(rollouts=rollouts, quarantined=()), prompts


def test_answers_take_the_place_of_responses_for_so_many_steps(
    teach: Callable[..., TextTeaching], writer: Writer, tokenizer: Any
) -> None:
    texts = teach()
    first = texts.teach(*step_of(1, "abc", "de"))
    ids = tuple(encode_text(tokenizer, "cba"))
    taught = first.rollouts[0]
    assert taught.response_ids == (*ids, tokenizer.eos_token_id) and taught.stop_reason == "stop"
    assert taught.spans == (Span(length=len(ids) + 1, origin="taught", policy_version=0),)
    assert not any(taught.sampled_mask) and taught.num_trained == len(ids) + 1
    assert [texts.is_taught(rollout) for rollout in first.rollouts] == [True, True]
    batch, prompts = step_of(3, "xyz")
    assert texts.teach(batch, prompts) == batch, "after its steps the expert is not asked"
    other, prompts = step_of(1, "abc", domain="b")
    assert texts.teach(other, prompts) == other
    assert len(writer.requests) == 2
    asked = {"model": "expert", "messages": [{"role": "user", "content": "abc"}], "temperature": 0.0, "max_tokens": 16}
    assert asked in writer.requests


def test_nobody_is_asked_twice_not_even_after_a_resume(
    teach: Callable[..., TextTeaching], writer: Writer, tmp_path: Path
) -> None:
    batch, prompts = step_of(1, "abc", "de")
    twice = replace(batch, rollouts=(*batch.rollouts, replace(batch.rollouts[0], sample_id="again")))
    first = teach().teach(twice, prompts)
    with (tmp_path / "texts.jsonl").open("ab") as file:
        file.write(b'{"expert": "e", "prompt_id": "a/cut o')  # a process was killed here
    resumed = teach()
    assert resumed.teach(twice, prompts) == first and len(writer.requests) == 2
    resumed.teach(*step_of(2, "new"))
    assert teach().sum_spending() == resumed.sum_spending()
    spent = resumed.sum_spending()["e"]
    assert (spent.calls, spent.failed, spent.prompt_tokens, spent.completion_tokens) == (3, 0, 8, 8)
    assert spent.cost == (8 * 1.0 + 8 * 2.0) / 1e6


def test_a_discriminator_reads_answers_after_the_steps_of_imitation(
    teach: Callable[..., TextTeaching], tokenizer: Any
) -> None:
    texts = teach(compares=True)
    batch, prompts = step_of(3, "abc")
    (rollout,) = texts.teach(batch, prompts).rollouts
    assert rollout == batch.rollouts[0] and not texts.is_taught(rollout)
    assert texts.find_response(rollout) == ((*encode_text(tokenizer, "cba"), tokenizer.eos_token_id), True)


def test_answers_that_a_replayed_step_needs_and_that_are_lost_are_named(teach: Callable[..., TextTeaching]) -> None:
    (rollout,) = step_of(3, "abc")[0].rollouts
    with pytest.raises(RunError, match=r"texts.jsonl: no answer to prompt a/abc"):
        teach(compares=True).find_response(rollout)


def test_a_discriminator_keeps_the_other_responses_to_a_prompt(teach: Callable[..., TextTeaching]) -> None:
    texts = teach(compares=True)
    batch, prompts = step_of(1, "abc")
    (first,) = batch.rollouts
    batch = replace(batch, rollouts=(first, replace(first, sample_id="second", episode="second")))
    taught, other = texts.teach(batch, prompts).rollouts
    assert texts.is_taught(taught) and not any(taught.sampled_mask)
    assert not texts.is_taught(other) and other == batch.rollouts[1]


def test_an_answer_that_does_not_fit_is_cut_without_an_end(
    teach: Callable[..., TextTeaching], writer: Writer, tokenizer: Any
) -> None:
    (cut,) = teach(max_new_tokens=3).teach(*step_of(1, "abcdef")).rollouts
    assert cut.response_ids == tuple(encode_text(tokenizer, "fed")) and cut.stop_reason == "length"
    writer.spoil = lambda text, reply: (200, {**reply, "choices": [{**reply["choices"][0], "finish_reason": "length"}]})
    (unfinished,) = teach().teach(*step_of(1, "xy")).rollouts
    assert unfinished.response_ids == tuple(encode_text(tokenizer, "yx")) and unfinished.stop_reason == "length"


def test_text_that_spells_a_special_token_stays_text(
    teach: Callable[..., TextTeaching], writer: Writer, tokenizer: Any
) -> None:
    spelt = f"a{tokenizer.eos_token}b"
    writer.spoil = lambda text, reply: (
        200, {**reply, "choices": [{"finish_reason": "stop", "message": {"content": spelt}}]}
    )  # fmt: skip
    batch = teach(max_new_tokens=30).teach(*step_of(1, "q"))
    for rollout in batch.rollouts:
        assert rollout.response_ids.count(tokenizer.eos_token_id) == 1
    assert batch.rollouts or "cannot write" in batch.quarantined[0].reason


def changed(**values: Any) -> Callable[[str, dict[str, Any]], Reply]:
    return lambda text, reply: (200, {**reply, **values})


def with_choice(**values: Any) -> Callable[[str, dict[str, Any]], Reply]:
    return lambda text, reply: (200, {**reply, "choices": [{**reply["choices"][0], **values}]})


BAD: dict[str, tuple[Any, str, int]] = {
    "empty": (with_choice(message={"content": " \n"}), "an empty answer", 1),
    "none": (with_choice(message={"content": None}), "an empty answer", 1),
    "twice": (lambda text, reply: (200, {**reply, "choices": reply["choices"] * 2}), "without one choice", 1),
    "other model": (changed(model="expertise"), "'expertise' answered, asked was 'expert'", 1),
    "no model": (changed(model=None), "None answered", 1),
    "filtered": (with_choice(finish_reason="content_filter"), "finish_reason 'content_filter'", 1),
    "no Unicode": (with_choice(message={"content": "\ud800"}), "no Unicode", 1),
    "no JSON": (lambda text, reply: (200, b"<html>"), "no JSON", 1),
    "refused": (lambda text, reply: (400, {"error": "too long"}), "refused with status 400", 1),
    "429 for ever": (lambda text, reply: (429, {"error": "slow down"}), "4 attempts failed, the last with: status 429", 4),
    "no price": (changed(usage=None), "does not say how many tokens", 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_answer_is_refused_at_the_start_and_quarantined_later(
    kind: str, teach: Callable[..., TextTeaching], writer: Writer
) -> None:
    spoil, reason, attempts = BAD[kind]
    batch, prompts = step_of(1, "abc", "bad", "de")
    writer.spoil = lambda text, reply: spoil(text, reply) if text == "bad" else None
    texts = teach(needs_usage=True)
    with pytest.raises(ConfigError) as error:
        texts.prove({"a": prompts[1]}, Path("runs/a"))
    assert "experts.e.engine" in str(error.value) and reason in str(error.value)
    (first,) = texts.prove({"a": prompts[0]}, Path("runs/a"))
    assert (first.answer.text, first.answer.model, first.prompt) == ("cba", "expert", prompts[0]) and first.seconds > 0
    taught = texts.teach(batch, prompts)
    assert [rollout.sample_id for rollout in taught.rollouts] == ["000001/a/abc", "000001/a/de"]
    (left_out,) = taught.quarantined
    assert left_out.prompt_id == "a/bad" and reason in left_out.reason
    spent, failed = (
        texts.sum_spending()["e"],
        2 if attempts > 1 else 1,
    )  # what failed in a way that may pass is asked anew
    assert (spent.calls, spent.failed) == (2 + attempts * failed, failed)
    with pytest.raises(RunError, match=r"1 of 3 responses have no answer .*max_quarantined 0.1"):
        teach(max_quarantined=0.1, needs_usage=True).teach(batch, prompts)


def test_an_answer_that_is_late_is_quarantined(teach: Callable[..., TextTeaching], writer: Writer) -> None:
    writer.delay_s = 0.3
    batch = teach(timeout_s=0.05).teach(*step_of(1, "abc"))
    assert "no answer in time" in batch.quarantined[0].reason and not batch.rollouts


@pytest.mark.parametrize(("status", "said"), [(401, "the key is missing"), (404, "no model 'expert'")])
def test_a_server_that_refuses_every_request_stops_the_run(
    status: int, said: str, teach: Callable[..., TextTeaching], writer: Writer
) -> None:
    writer.spoil = lambda text, reply: (status, {"error": "no"})
    with pytest.raises(RunError, match=said):
        teach().teach(*step_of(1, "abc"))
    assert len(writer.requests) == 1


def test_names_with_a_date_and_names_that_the_user_states(teach: Callable[..., TextTeaching], writer: Writer) -> None:
    writer.spoil = changed(model="expert-2026-01-02")
    assert len(teach().teach(*step_of(1, "abc")).rollouts) == 1
    assert "served_model" in teach(served_model="other").teach(*step_of(1, "xy")).quarantined[0].reason


def test_budgets_end_the_run_and_a_resume_may_raise_them(teach: Callable[..., TextTeaching], writer: Writer) -> None:
    batch = step_of(1, "a", "b", "c")
    with pytest.raises(RunError, match=r"all 2 requests of max_calls were made"):
        teach(max_calls=2).teach(*batch)
    assert len(writer.requests) <= 2
    assert len(teach(max_calls=3).teach(*batch).rollouts) == 3
    assert len(teach(max_calls=1).teach(*batch).rollouts) == 3, "nothing is left to ask"
    with pytest.raises(RunError, match=r"max_cost is 1e-06"):
        teach(max_cost=1e-6).teach(*step_of(1, "d"))


def test_completions_get_the_text_as_it_stands_and_the_users_keys(
    teach: Callable[..., TextTeaching], writer: Writer, tokenizer: Any
) -> None:
    texts = teach(api="completions", request={"stop": ["\n"]})
    (rollout,) = texts.teach(*step_of(1, "abc")).rollouts
    assert rollout.response_ids[:-1] == tuple(encode_text(tokenizer, "cba"))
    assert writer.requests == [
        {"model": "expert", "prompt": "abc", "temperature": 0.0, "max_tokens": 16, "stop": ["\n"]}
    ]


def test_models_that_take_no_temperature_and_another_limit(teach: Callable[..., TextTeaching], writer: Writer) -> None:
    teach(temperature=None, request={"max_completion_tokens": 99}).teach(*step_of(1, "abc"))
    (request,) = writer.requests
    assert request.keys() == {"model", "messages", "max_completion_tokens"}
