"""An expert that is a moving average of the student: who scores with it, what it takes, and what it does not go with."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from opd.config import PipelineConfig, load_pipeline
from opd.config.teachers import TrainerTeachers
from opd.errors import ConfigError
from opd.settings.yaml_files import validate_section
from pipelines.build import num_workers
from pipelines.inputs.read import read_inputs
from pipelines.plan.plan import make_plan
from pipelines.plan.spec import load_spec
from pipelines.sizing.memory import averages_bytes, estimate_memory
from pipelines.specs import trainer_spec

DATA: dict[str, Any] = {
    "name": "n",
    "student": {"model": "base"},
    "experts": {
        "slow": {"model": "student", "domain": "math", "ema": 0.99, "prompt": {"system": "Be {{ row.answer }}."}}
    },
    "domains": {"math": {"prompts": "math.jsonl"}},
    "trainer": {"steps": 3, "samples_per_step": 6},
}


def read(**changes: Any) -> PipelineConfig:
    data = copy.deepcopy(DATA)
    for path, value in changes.items():
        *above, last = path.split("__")
        section = data
        for key in above:
            section = section.setdefault(key, {})
        section[last] = value
    return validate_section(PipelineConfig, data, "p.yaml")


@pytest.mark.parametrize("lora", [None, {"r": 4}])
def test_the_trainers_ranks_score_with_it_with_lora_or_without(lora: Any) -> None:
    config = read(student__lora=lora)
    assert isinstance(config.engine_of("slow"), TrainerTeachers) and num_workers(config) == 1 + config.trainer.ranks
    assert validate_section(PipelineConfig, config.model_dump(mode="json"), "again.yaml") == config
    assert isinstance(read(experts__slow__engine={"kind": "trainer"}).engine_of("slow"), TrainerTeachers)
    assert isinstance(read(teachers__engine="trainer").engine_of("slow"), TrainerTeachers)


@pytest.mark.parametrize(
    ("changes", "where", "said"),
    [
        ({"experts__slow__model": "models/x"}, "experts.slow.ema", "`model: student`, whose weights are averaged"),
        ({"experts__slow__engine": {"kind": "vllm"}}, "experts.slow.ema", "no engine, or kind trainer"),
        ({"experts__slow__engine": {"kind": "openai", "payload": "sampled_logprobs",
                                    "servers": {"slow": {"base_url": "http://127.0.0.1:1/v1", "model": "m"}}}},
         "experts.slow.ema", "no engine, or kind trainer"),
        ({"domains__math__environment": {"name": "maze", "teacher_turns": {"share": 0.5, "over_steps": 9}}}, "experts.slow.ema", "that can write turns"),
        ({"experts__slow__ema": 1.0}, "experts.slow.ema", "below 1"),
        ({"objective": {"kind": "sampled", "baseline": "leave_one_out"}}, "objective.baseline", "before the trainer computes"),
        ({"experts__code": {"model": "code", "domain": "code", "engine": {"kind": "trainer"}}, "domains__code": {}},
         "teachers.engine", "student.lora"),
    ],
)  # fmt: skip
def test_what_it_does_not_go_with(changes: dict[str, Any], where: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(**changes)
    assert str(error.value).startswith(f"p.yaml: {where}\n") and said in str(error.value), str(error.value)


@pytest.mark.parametrize("lora", [None, {"r": 4}])
def test_a_pipeline_with_it_is_read_and_its_memory_counted(lora: Any, world: Any) -> None:
    world.data["experts"]["up"] = {
        "model": "student",
        "domain": "upper",
        "ema": 0.9,
        "prompt": {"system": "{{ row.answer }}"},
    }
    world.data["experts"]["up"]["prompt"]["template"] = "plain.jinja"
    (world.root / "plain.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    world.data["student"]["lora"] = lora
    config = load_pipeline(world.write())
    inputs = read_inputs(config)
    spec = trainer_spec(config, inputs.student.vocab_size, inputs.scoring)
    assert spec.rank.base_scoring is not None
    (teacher,) = spec.rank.base_scoring.teachers
    assert (teacher.name, teacher.decay, list(teacher.weights)) == (
        "up",
        0.9,
        ["upper"],
    ) and "up" in spec.teacher_prompts
    head = 0 if lora else config.trainer.ranks * 4 * inputs.student.vocab_size * inputs.student.hidden_size
    assert averages_bytes(config, inputs) == 8 * inputs.trained + head
    frozen = config.model_copy(update={"experts": {**config.inline_experts, "up": config.inline_experts["rev"]}})
    needs = [sum(need.nbytes for need in estimate_memory(one, inputs) if need.part.startswith("trainer: weights"))
             for one in (config, frozen)]  # fmt: skip
    assert needs[0] - needs[1] == averages_bytes(config, inputs)
    assert make_plan(config, load_spec("8-gpus"))
