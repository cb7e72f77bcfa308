"""Experts with another tokenizer in a whole pipeline: what they read, and what is refused before compute."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from opd.config import PipelineConfig, load_pipeline
from opd.errors import ConfigError, ModelError, OpdError
from opd.live.interfaces import Display
from opd.prompts.encode import load_tokenizer
from opd.prompts.turn_ends import find_turn_end
from opd.records.scores import DomainScore, Evaluation
from opd.run.paths import RunPaths
from pipelines.baselines.run import check_methods
from pipelines.evaluation.models import Subject
from pipelines.inputs.early_checks import refuse_at_once
from pipelines.inputs.read import Inputs, read_inputs
from pipelines.inputs.show_prompts import show_prompts
from pipelines.merging import exams as merge_exams
from pipelines.merging.exams import StartingExams, measure_own_exams
from pipelines.merging.manifest import make_manifest
from pipelines.serve import serve_teachers
from teachers.flight.access import ListenAddress
from tests.exams import Measuring
from tests.tokenizers import train_byte_level, train_sentencepiece
from tests.unit.pipelines.inputs.test_teacher_prompts import sample

ENGINE = {"kind": "transformers", "payload": "aligned_states"}
OBJECTIVE = {"kind": "aligned_kl"}


@pytest.fixture
def foreign(world: Any, make_model_dir: Callable[..., Path]) -> Any:
    """The expert of `reverse` has a tokenizer like Llama 2's."""
    make_model_dir(world.root / "foreign", tokenizer=train_sentencepiece(340))
    world.data["experts"]["rev"] = {"model": "foreign", "domain": "reverse", "engine": dict(ENGINE)}
    world.data["domains"]["reverse"]["objective"] = OBJECTIVE
    return world


def read(world: Any) -> Inputs:
    config = load_pipeline(world.write())
    refuse_at_once(config)
    return read_inputs(config)


def test_the_expert_reads_prompt_and_response_in_its_own_tokens(foreign: Any) -> None:
    inputs = read(foreign)
    (assigned,) = inputs.scoring["reverse"]
    assert assigned.prompts is not None and assigned.encoder is not None
    assert inputs.scoring["upper"][0].encoder is None
    tokenizer = load_tokenizer(foreign.root / "foreign")
    sent = sample(inputs, "reverse", 1)
    text = inputs.tokenizer.decode(sent.prompt_ids)
    assert tokenizer.decode(assigned.prompts(sent)).strip() == text
    ids = tuple(inputs.tokenizer.encode("fox", add_special_tokens=False))
    encoded = assigned.encoder.encode_response([*ids, inputs.tokenizer.eos_token_id])
    assert tokenizer.convert_ids_to_tokens(encoded.token_ids[-1]) == "<end>"
    assert inputs.warnings == ()


def test_messages_go_through_the_experts_own_template(foreign: Any) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    (foreign.root / "foreign" / "chat_template.jinja").write_text(template)
    chat = [{"role": "user", "content": "fox"}]
    (foreign.root / "reverse.jsonl").write_text(json.dumps({"prompt": chat, "answer": "xof"}) + "\n")
    inputs = read(foreign)
    (assigned,) = inputs.scoring["reverse"]
    assert assigned.prompts is not None
    tokenizer = load_tokenizer(foreign.root / "foreign")
    assert tokenizer.decode(assigned.prompts(sample(inputs, "reverse", 0))).strip() == "[user]fox[assistant]"
    assert inputs.tokenizer.decode(inputs.prompts["reverse"][0].token_ids) == "fox="


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        (("rollout", "temperature"), 0.7, "rollout.temperature"),
        (("teachers", "mask_tokens"), {"rev": ["a"]}, "teachers.mask_tokens.rev"),
        (("trainer", "sequence_parallel_size"), 2, "trainer.sequence_parallel_size"),
        (("domains", "reverse", "objective"), {"kind": "reverse_kl"}, "domains.reverse.objective"),
        (("domains", "reverse", "extrapolate"), 1.5, "domains.reverse.extrapolate"),
        (("experts", "rev", "engine", "kind"), "vllm", "experts.rev.engine"),
    ],
)
def test_what_does_not_go_with_tokens_of_its_own_is_refused(
    path: tuple[str, ...], value: Any, where: str, foreign: Any
) -> None:
    section = foreign.data
    for key in path[:-1]:
        section = section.setdefault(key, {})
    section[path[-1]] = value
    if path[-1] == "sequence_parallel_size":
        foreign.data["trainer"]["ranks"] = 2
    with pytest.raises(OpdError, match=where):
        read(foreign)


def test_prompts_are_shown_as_the_expert_reads_them(foreign: Any) -> None:
    lines = list(show_prompts(load_pipeline(foreign.write()), "reverse", 1))
    assert any("experts.rev.prompt: " in line for line in lines)


def test_without_the_payload_the_refusal_names_the_way_out(foreign: Any) -> None:
    del foreign.data["experts"]["rev"]["engine"], foreign.data["domains"]["reverse"]["objective"]
    with pytest.raises(ModelError, match=r"payload: aligned_states") as refusal:
        read(foreign)
    assert "aligned_kl" in str(refusal.value)


def test_an_expert_without_an_end_token_is_refused(foreign: Any) -> None:
    folder = foreign.root / "foreign"
    for name in ("generation_config.json", "config.json", "tokenizer_config.json"):
        settings = json.loads((folder / name).read_text())
        settings.pop("eos_token_id", None)
        settings.pop("eos_token", None)
        (folder / name).write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="no end token"):
        read(foreign)


def test_a_server_of_teachers_has_no_tokens_of_their_own(foreign: Any) -> None:
    foreign.data["teachers"] = {"payload": "aligned_states"}
    foreign.data["objective"] = OBJECTIVE
    del foreign.data["experts"]["rev"]["engine"], foreign.data["domains"]["reverse"]["objective"]
    config, door = load_pipeline(foreign.write()), cast(ListenAddress, None)  # nothing listens yet
    with pytest.raises(ConfigError, match="the student's tokens"):
        serve_teachers(config, door, print, print)


def test_the_manifest_knows_the_experts_tokenizer(foreign: Any) -> None:
    config = load_pipeline(foreign.write())
    facts = make_manifest(config, read_inputs(config))["experts"]
    assert "tokenizer.json" in facts["rev"]["config"]
    assert list(facts["up"]["config"]) == ["config.json"]


def test_baselines_in_which_the_expert_would_write_or_be_merged_are_refused(foreign: Any) -> None:
    config = load_pipeline(foreign.write())
    inputs = read_inputs(config)
    for method in ("off_policy", "linear"):
        with pytest.raises(ConfigError, match=r"(?s)tokens of its own.*--method mixed_sft,opd"):
            check_methods(config, inputs, ["opd", method])
    assert check_methods(config, inputs, ["opd"]) == {}


def test_the_expert_takes_its_exam_before_the_merges_workers_start(
    foreign: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its own tokens and once: a second session finds the result in the run directory, another run in the cache."""
    asked: list[Subject] = []

    def answer(config: PipelineConfig, subjects: Sequence[Subject], tell: Any) -> dict[str, Evaluation]:
        asked.extend(subjects)
        score = DomainScore(accuracy=0.9, stderr=0.1, low=0.8, high=1, questions=6)
        return {s.model.name: Evaluation(model=s.model.name, scores=dict.fromkeys(s.exams, score)) for s in subjects}

    monkeypatch.setattr(merge_exams, "evaluate_subjects", answer)
    monkeypatch.setenv("OPD_EXAM_CACHE", str(foreign.root / "cache"))
    config = load_pipeline(foreign.write())
    inputs = read_inputs(config)
    assert set(inputs.own_exams) == {"reverse"}
    shown: Any = Display()
    for name, first in (("run", True), ("run", False), ("another", False)):
        paths = RunPaths(foreign.root / name)
        paths.root.mkdir(exist_ok=True)
        own = measure_own_exams(config, inputs, paths, shown)
        parts: Any = Measuring(paths, shown)
        before, expert = StartingExams(parts, config, inputs, paths, shown, own).measure_exams()
        assert set(before.scores) == {"reverse", "upper"} and set(expert.weights) == {"reverse", "upper"}
        assert expert.accuracy["reverse"] == 0.9 and "expert rev" not in parts.asked
        assert ("expert up" in parts.asked, "load base" in parts.asked) == (first, first)
        assert set(own) == ({"reverse"} if first or name == "another" else set())
    (subject,) = asked
    tokenizer = load_tokenizer(foreign.root / "foreign")
    (exam,) = subject.exams.values()
    assert [tokenizer.decode(prompt.token_ids).strip() for prompt in exam.prompts] == [
        inputs.tokenizer.decode(prompt.token_ids) for prompt in inputs.exams["reverse"].prompts
    ]


def test_an_expert_with_a_prompt_of_its_own_too_takes_no_exam(foreign: Any) -> None:
    (foreign.root / "join.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    prompt = {"system": "Hint. ", "template": "join.jinja", "max_model_len": 64}
    foreign.data["experts"]["rev"]["prompt"] = prompt
    assert read(foreign).own_exams == {}


def test_the_end_of_a_turn_is_what_the_template_writes() -> None:
    tokenizer = train_byte_level(300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<turn>")]
    assert find_turn_end(tokenizer, ends) == ends[0]
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<turn>\n{% endfor %}</s>"
    assert find_turn_end(tokenizer, ends) == ends[1]
