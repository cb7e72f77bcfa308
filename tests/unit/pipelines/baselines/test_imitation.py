"""The authors of what the student imitates, and its amount: the merge's prompts, the experts' words, the merge's tokens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from opd.config import PipelineConfig, load_pipeline
from opd.config.domains import StudentLora
from opd.errors import PromptError
from opd.prompts import MixedPrompts
from opd.records.types import Prompt, Rollout, RolloutBatch, Teacher, WeightedTeacher
from pipelines.baselines import imitation
from pipelines.baselines.imitation import file_author, read_completions, train_off_policy, write_by_experts
from pipelines.inputs.read import Inputs, read_inputs
from tests.rows import make_rollout


class FakeEngine:
    """Answers with the number of the model that it was told to load, and the prompt's last token."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.steps: list[int] = []
        self._model = ""

    def load(self, model_dir: Path) -> None:
        self._model = model_dir.name
        self.events.append((self._model, 0))

    def generate(self, prompts: Sequence[Prompt], *, step: int, policy_version: int) -> RolloutBatch:
        self.events.append((self._model, len(prompts)))
        self.steps.append(step)
        return RolloutBatch(rollouts=tuple(self._rollout(p, step) for p in prompts), quarantined=())

    def _rollout(self, prompt: Prompt, step: int) -> Rollout:
        return make_rollout(
            sample_id=f"{step}/{prompt.id}",
            step=step,
            domain=prompt.domain,
            policy_version=0,
            prompt_ids=prompt.token_ids,
            response_ids=({"one": 101, "two": 102}[self._model], prompt.token_ids[-1]),
            behaviour_logprobs=(0.0, 0.0),
        )


def teacher(name: str, weight: float) -> WeightedTeacher:
    return WeightedTeacher(teacher=Teacher(name=name, model_dir=Path(name), digest=name), weight=weight)


def prompts(domain: str, num: int) -> list[Prompt]:
    return [Prompt(id=f"{domain}/{i}", domain=domain, token_ids=(1, i)) for i in range(num)]


def test_each_prompt_is_answered_by_its_domains_expert_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imitation, "CHUNK", 3)
    engine = FakeEngine()
    mixed = [p for pair in zip(prompts("a", 4), prompts("b", 4), strict=True) for p in pair]
    routes = {"a": (teacher("one", 1.0),), "b": (teacher("two", 1.0),)}
    found = write_by_experts(engine, routes, mixed, 0, Path("unused"))  # type: ignore[arg-type]
    assert [r.response_ids for r in found] == [
        (101, 0),
        (102, 0),
        (101, 1),
        (102, 1),
        (101, 2),
        (102, 2),
        (101, 3),
        (102, 3),
    ]
    assert engine.events == [("one", 0), ("one", 3), ("one", 1), ("two", 0), ("two", 3), ("two", 1)]
    assert engine.steps == [1, 2, 1, 2], "the same prompt again, in the next chunk, is sampled with another seed"


def test_several_experts_of_a_domain_write_by_their_weights() -> None:
    routes = {"a": (teacher("one", 0.75), teacher("two", 0.25))}
    many = prompts("a", 2000)
    written = [write_by_experts(FakeEngine(), routes, many, seed, Path("unused")) for seed in (0, 0, 1)]  # type: ignore[arg-type]
    found = [[r.response_ids for r in rollouts] for rollouts in written]
    share = Counter(response[0] for response in found[0])[102] / 2000
    assert share == pytest.approx(0.25, abs=0.03)  # three standard errors
    assert found[0] == found[1] != found[2]


def test_an_episode_that_broke_is_left_out_and_the_others_stay_in_order() -> None:
    class Breaking(FakeEngine):
        def generate(self, prompts: Sequence[Prompt], *, step: int, policy_version: int) -> RolloutBatch:
            batch = super().generate(prompts, step=step, policy_version=policy_version)
            return replace(batch, rollouts=tuple(r for r in reversed(batch.rollouts) if not r.sample_id.endswith("/1")))

    routes = {"a": (teacher("one", 1.0),)}
    found = write_by_experts(Breaking(), routes, prompts("a", 4), 0, Path("unused"))  # type: ignore[arg-type]
    assert [r.response_ids[1] for r in found] == [0, 2, 3]


def test_what_an_environment_wrote_is_read_and_not_learned(
    learning: tuple[PipelineConfig, Inputs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, inputs = learning
    seen: list[Any] = []
    monkeypatch.setattr("experts.sft.train_on_text", lambda model, examples, *_, **__: seen.extend(examples))

    @contextmanager
    def author() -> Iterator[imitation.Author]:
        yield lambda part: [
            make_rollout(sample_id=p.id, step=1, domain=p.domain, prompt_ids=p.token_ids, response_ids=(5, 6, 7), loss_mask=(True, False, True))
            for p in part
        ]  # fmt: skip

    tokens = train_off_policy(config, inputs, author(), None, tmp_path / "out", lambda _: None)
    assert tokens == 3 * 6 * 2
    assert all(e["labels"][-3:] == [5, -100, 7] and set(e["labels"][:-3]) == {-100} for e in seen) and len(seen) == 18


@pytest.fixture
def learning(world: Any) -> tuple[PipelineConfig, Inputs]:
    """Two domains whose prompts files have completions, with chance for a large change in few steps."""
    for domain in ("reverse", "upper"):
        lines = [{"prompt": f"{domain[:3]} {c * 3}=", "completion": c * 3, "answer": c * 3} for c in "abcdef"]
        (world.root / f"{domain}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    world.data["trainer"] = {"steps": 3, "samples_per_step": 6, "lr": 3e-3}
    world.data["domains"]["reverse"]["weight"] = 2.0
    config = load_pipeline(world.write())
    return config, read_inputs(config)


def test_completions_are_the_files_own_with_an_end(learning: tuple[PipelineConfig, Inputs]) -> None:
    config, inputs = learning
    completions = read_completions(config, inputs)
    want = (*inputs.tokenizer.encode("ccc", add_special_tokens=False), inputs.tokenizer.eos_token_id)
    assert completions["upper/2"] == want
    assert len(completions) == 12


def test_a_prompt_without_a_completion_is_refused(learning: tuple[PipelineConfig, Inputs], world: Any) -> None:
    config, inputs = learning
    with (world.root / "upper.jsonl").open("r+") as file:
        text = file.read().replace('"completion": "bbb", ', "")
        file.seek(0)
        file.write(text)
        file.truncate()
    with pytest.raises(PromptError, match=r"upper\.jsonl: prompt upper/1\n  found:  no completion"):
        read_completions(config, inputs)


@contextmanager
def recording(config: PipelineConfig, inputs: Inputs, asked: list[list[str]]) -> Iterator[imitation.Author]:
    with file_author(config, read_completions(config, inputs)) as write:

        def author(part: Sequence[Prompt]) -> list[Rollout]:
            asked.append([p.id for p in part])
            return write(part)

        yield author


def train(
    learning: tuple[PipelineConfig, Inputs], budget: Mapping[str, float] | None, out: Path
) -> tuple[int, list[list[str]], list[str]]:
    asked: list[list[str]] = []
    lines: list[str] = []
    tokens = train_off_policy(*learning, recording(*learning, asked), budget, out, lines.append)
    return tokens, asked, lines


def test_without_a_merge_the_prompts_are_those_a_merge_would_take(
    learning: tuple[PipelineConfig, Inputs], tmp_path: Path
) -> None:
    config, inputs = learning
    tokens, asked, _ = train(learning, None, tmp_path / "out")
    merge = MixedPrompts(inputs.prompts, {"reverse": 4, "upper": 2}, config.seed)
    assert asked == [[p.id for step in (1, 2, 3) for p in merge.take(step)]]
    assert tokens == 3 * 6 * 4, "three letters and the end token each"
    found, before = (load_file(d / "model.safetensors") for d in (tmp_path / "out", config.student.model))
    assert any(not torch.equal(found[name], before[name]) for name in before)
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_seed_that_numpy_does_not_take_is_taken(learning: tuple[PipelineConfig, Inputs], tmp_path: Path) -> None:
    config, inputs = learning
    tokens, _, _ = train((config.model_copy(update={"seed": 1 << 32}), inputs), None, tmp_path / "out")
    assert tokens == 3 * 6 * 4


def test_a_lora_student_is_trained_by_its_adapters_here_too(
    learning: tuple[PipelineConfig, Inputs], tmp_path: Path
) -> None:
    config, inputs = learning
    lora = StudentLora(r=4, targets=["q_proj"])
    config = config.model_copy(update={"student": config.student.model_copy(update={"lora": lora})})
    train((config, inputs), None, tmp_path / "out")
    found, before = (load_file(d / "model.safetensors") for d in (tmp_path / "out", config.student.model))
    assert set(found) == set(before), "a whole model"
    moved = {name for name in before if not torch.equal(found[name], before[name])}
    assert moved == {name for name in before if "q_proj" in name}


def test_the_samples_of_a_step_make_up_the_merges_tokens(
    learning: tuple[PipelineConfig, Inputs], tmp_path: Path
) -> None:
    tokens, asked, lines = train(learning, {"reverse": 80.0, "upper": 40.0}, tmp_path / "out")
    assert tokens == 120, "ten samples of four tokens in each of three steps"
    assert [len(ids) for ids in asked][-1] == 30
    assert "30 responses: 3 steps of 10" in lines


def test_a_domain_gets_the_tokens_that_the_merge_gave_it_whatever_its_weight_says(
    learning: tuple[PipelineConfig, Inputs], tmp_path: Path
) -> None:
    _, asked, _ = train(learning, {"reverse": 24.0, "upper": 96.0}, tmp_path / "out")
    assert Counter(name.split("/")[0] for name in asked[-1]) == {"reverse": 3 * 2, "upper": 3 * 8}


def test_each_prompt_gets_as_many_responses_as_in_the_merge(
    learning: tuple[PipelineConfig, Inputs], tmp_path: Path
) -> None:
    config, inputs = learning
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"n": 3})})
    tokens, asked, _ = train((config, inputs), None, tmp_path / "out")
    merge = MixedPrompts(inputs.prompts, {"reverse": 1, "upper": 1}, config.seed, 3)
    assert asked == [[p.id for step in (1, 2, 3) for p in merge.take(step)]]
    assert len(set(asked[0])) == 3 * 2 and tokens == 3 * 6 * 4


@pytest.mark.parametrize(
    ("budget", "prompts"),
    [
        (
            {"reverse": 72.0, "upper": 36.0},
            {"reverse": 2, "upper": 1},
        ),  # nine samples of four tokens in each of three steps
        ({"reverse": 60.0, "upper": 36.0}, {"reverse": 2, "upper": 1}),  # eight: rounded up to whole prompts
        ({"reverse": 1.0, "upper": 0.0}, {"reverse": 1, "upper": 1}),
    ],
)
def test_a_budget_is_spent_on_whole_prompts(
    budget: dict[str, float], prompts: dict[str, int], learning: tuple[PipelineConfig, Inputs], tmp_path: Path
) -> None:
    config, inputs = learning
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"n": 3})})
    _, asked, _ = train((config, inputs), budget, tmp_path / "out")
    merge = MixedPrompts(inputs.prompts, prompts, config.seed, 3)
    assert asked[-1] == [p.id for step in (1, 2, 3) for p in merge.take(step)]


@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("samples", [1, 7, 24, 193, 256])
def test_a_step_is_whole_prompts_and_whole_micro_batches(
    n: int, samples: int, learning: tuple[PipelineConfig, Inputs]
) -> None:
    config, _ = learning
    room = config.rollout.max_model_len
    trainer = config.trainer.model_copy(update={"micro_batch_tokens": 10 * room})
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"n": n}), "trainer": trainer})
    shape = imitation._micro_batch_shape(config, samples)
    assert shape.samples % n == 0 and shape.micro_batch <= 10
    fewest = -(-samples // n)
    assert fewest * n <= shape.samples <= fewest * n + n * shape.accumulate


def test_every_domain_is_in_a_step_however_small_the_budget(
    learning: tuple[PipelineConfig, Inputs], tmp_path: Path
) -> None:
    _, asked, _ = train(learning, {"reverse": 1.0, "upper": 0.0}, tmp_path / "out")
    assert [p.split("/")[0] for p in asked[-1]] == ["reverse", "upper"] * 3
