"""The settings against drift: off by default, and refused where they contradict each other, the environment or the objective."""

from __future__ import annotations

from typing import Any

import pytest

from opd.config import PipelineConfig
from opd.errors import ConfigError
from opd.records.types import Teacher, WeightedTeacher
from opd.rollouts.episodes.drift import Curriculum, DriftOptions, TeacherTurns
from opd.settings.yaml_files import validate_section
from opd.train.turns import TurnWeights
from pipelines.inputs.drift import drift_options
from pipelines.specs import rollout_spec, trainer_spec, turn_weights
from tests.unit.opd.config.test_schedule import VALID

TEACHER = {"share": 0.5, "over_steps": 10}
WEIGHTS = {"decay": 0.9}


def config(
    *, pipeline: dict[str, Any] | None = None, domain: dict[str, Any] | None = None, **acts: Any
) -> PipelineConfig:
    made = {"prompts": "maze.jsonl", "environment": {"name": "maze", "max_turns": 8} | acts} | (domain or {})
    return validate_section(PipelineConfig, VALID | {"domains": {"math": made}} | (pipeline or {}), "p.yaml")


def routes() -> dict[str, tuple[WeightedTeacher, ...]]:
    from pathlib import Path

    heavy, light = (Teacher(name=name, model_dir=Path("/models") / name) for name in ("heavy", "light"))
    return {"math": (WeightedTeacher(teacher=heavy, weight=0.7), WeightedTeacher(teacher=light, weight=0.3))}


def test_all_is_off_unless_it_is_asked_for() -> None:
    plain = config()
    assert drift_options(plain, routes()) == {} and turn_weights(plain) == {}
    assert not trainer_spec(plain, 76).weighs_turns and not trainer_spec(plain, 76).rank.turn_weights


def test_what_is_asked_for_reaches_engines_and_ranks() -> None:
    from pathlib import Path

    asked = config(
        curriculum={"first": 2, "over_steps": 5}, teacher_turns=TEACHER, turn_weights=WEIGHTS | {"divergence": 1}
    )
    turns = TeacherTurns(model_dir=Path("/models/heavy"), share=0.5, over_steps=10, train=False)
    wanted = DriftOptions(curriculum=Curriculum(first=2, over_steps=5), teacher_turns=turns)
    assert drift_options(asked, routes()) == {"math": wanted}
    assert rollout_spec(asked, Path("m"), 76, (2,)).drift == {}, "an exam knows nothing of it"
    spec = trainer_spec(asked, 76)
    assert spec.weighs_turns and spec.rank.turn_weights == {"math": TurnWeights(decay=0.9, divergence=1.0, floor=0.05)}
    assert drift_options(config(replay=True), routes()) == {"math": DriftOptions(replay=True)}


@pytest.mark.parametrize(
    ("acts", "where", "said"),
    [
        ({"curriculum": {"first": 8, "over_steps": 5}}, "curriculum.first", "below max_turns, 8"),
        ({"curriculum": {"first": 0, "over_steps": 5}}, "curriculum.first", "1"),
        ({"curriculum": {"first": 2, "over_steps": 0}}, "curriculum.over_steps", "1"),
        ({"curriculum": {"first": 2}}, "curriculum.over_steps", ""),
        ({"teacher_turns": TEACHER | {"share": 1.5}}, "teacher_turns.share", "1"),
        ({"teacher_turns": TEACHER | {"share": 0}}, "teacher_turns.share", "0"),
        ({"teacher_turns": TEACHER | {"share": 1}}, "teacher_turns", "trains nothing"),
        ({"teacher_turns": TEACHER | {"to": 0.9}}, "teacher_turns.to", "remove the key"),
        ({"turn_weights": {"decay": 1.1}}, "turn_weights.decay", "1"),
        ({"turn_weights": {}}, "turn_weights", "all turns weigh the same"),
        ({"turn_weights": {"divergence": -1}}, "turn_weights.divergence", "0"),
        ({"replay": True, "curriculum": {"first": 2, "over_steps": 5}}, "replay", "no curriculum"),
        ({"replay": True, "turn_weights": WEIGHTS}, "replay", "no turn_weights"),
    ],
)
def test_what_makes_no_sense_is_refused(acts: dict[str, Any], where: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(**acts)
    assert f"p.yaml: domains.math.environment.{where}\n" in str(error.value) and said in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "where", "said"),
    [
        (
            {"teacher_turns": TEACHER, "pipeline": {"rollout": {"sleep": True}, "cluster": {"rollout_gpus": 1}}},
            "rollout.sleep",
            "a second one",
        ),
        (
            {"turn_weights": WEIGHTS, "domain": {"reward": True}, "pipeline": {"objective": {"reward": {}}}},
            "domains.math.environment.turn_weights",
            "no objective.reward",
        ),
        (
            {"replay": True, "domain": {"eval": {"holdout": 0.1}}},
            "domains.math.eval.holdout",
            "prefixes are no tasks",
        ),
        (
            {
                "turn_weights": WEIGHTS,
                "pipeline": {"objective": {"kind": "sampled"}, "teachers": {"payload": "sampled_logprobs"}},
            },
            "domains.math.environment.turn_weights",
            "an objective that is a divergence",
        ),
        (
            {
                "teacher_turns": TEACHER | {"train": True},
                "pipeline": {"objective": {"kind": "sampled"}, "teachers": {"payload": "sampled_logprobs"}},
            },
            "domains.math.environment.teacher_turns.train",
            "tokens of the student's own",
        ),
    ],
)
def test_what_does_not_go_with_the_rest_of_the_pipeline_is_refused(
    arguments: dict[str, Any], where: str, said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        config(**arguments)
    assert f"p.yaml: {where}\n" in str(error.value) and said in str(error.value)


def test_a_domain_without_an_environment_has_no_such_setting() -> None:
    with pytest.raises(ConfigError, match="curriculum"):
        config(domain={"environment": None, "curriculum": {"first": 2, "over_steps": 5}})
