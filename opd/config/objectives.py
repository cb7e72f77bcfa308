"""The section `objective`: what all kinds share. Each kind has its own class in its file in `opd/losses/`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, SerializeAsAny
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from opd.config.reward import CriticBaseline, RewardConfig
from opd.errors import ConfigError
from opd.settings.auto import AUTO, OrAuto
from opd.settings.strict import Strict
from opd.settings.suggestions import find_nearest
from opd.settings.user_objects import import_object, import_user_object, is_import_name

if TYPE_CHECKING:
    from opd.interfaces import Objective

OBJECTIVES = {
    "reverse_kl": "opd.losses.reverse_kl:ReverseKLConfig",
    "forward_kl": "opd.losses.forward_kl:ForwardKLConfig",
    "adaptive_kl": "opd.losses.adaptive_kl:AdaptiveKLConfig",
    "jsd": "opd.losses.jsd:JSDConfig",
    "skew": "opd.losses.skew:SkewConfig",
    "sampled": "opd.losses.sampled:SampledConfig",
    "top_k": "opd.losses.top_k:TopKConfig",
    "aligned_kl": "opd.losses.aligned_kl:AlignedKLConfig",
    "sft": "opd.losses.sft:SFTConfig",
    "none": "opd.losses.none:NoDivergenceConfig",
}
"""`objective.kind` -> the class of its section. Only the class of the kind in use is imported, when it is used."""
DEFAULT_KIND = "adaptive_kl"
"""Kind of a section without `kind`; the field `kind` of that class has the same default."""
SECTION = "a class on top of opd.config.objectives.ObjectiveConfig, as module:Class"


class ObjectiveConfig(Strict):
    """Base of every kind's section. Its capitals say what a pipeline has to know before anything is computed."""

    OBJECTIVE: ClassVar[type[Any]]
    """The class that computes the objective. Its fields are the keys of the section that it needs."""
    PAYLOADS: ClassVar[tuple[str, ...]] = ("hidden_states",)
    """Payloads that hold what the objective needs; the first is the cheapest."""
    HAS_DIVERGENCE: ClassVar[bool] = True
    """False if the kind is no divergence, so that only `reward` teaches: a step without a reward is skipped."""
    IS_ESTIMATE: ClassVar[bool] = False
    """True if the objective only estimates a divergence from the sampled tokens. Its value may then be negative, and the
    weight of a token in the mean must not depend on the response that it stands in."""

    kind: str
    chunk: Annotated[int, Field(ge=1), OrAuto(128)] = Field(AUTO, validate_default=True)
    """Response tokens whose logits exist at one time. `auto`: 128 on a CPU, on a GPU from type and memory."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the elementwise part; needs a C++ compiler and on a GPU Triton, else it runs eagerly. `auto`: on a GPU only."""
    normalize: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Mean over the step's trained tokens, or over its responses."""
    reward: RewardConfig | None = None
    """Train on a task reward beside the divergence, see docs/objectives.md#with-a-reward."""
    extrapolate: float = Field(1.0, gt=0)
    """Above 1: train beyond the experts; below 1: toward a point on the way to them; see
    docs/objectives.md#beyond-the-experts."""

    @property
    def weighting(self) -> str:
        """Name of the weighting of tokens in the mean; `opd.train.totals.weigh_rows` has the formulas."""
        return "leave_one_out" if self.IS_ESTIMATE else self.normalize

    @property
    def has_critic(self) -> bool:
        """True if a critic, a second model, estimates what states are worth."""
        return self.reward is not None and isinstance(self.reward.baseline, CriticBaseline)

    @property
    def judging_models(self) -> tuple[str, ...]:
        """Names of the models of the student's size that learn beside it to judge its responses."""
        has_discriminator = self.reward is not None and self.reward.preference is not None
        return (*(("critic",) if self.has_critic else ()), *(("discriminator",) if has_discriminator else ()))

    @property
    def wants_baseline(self) -> bool:
        """True if the objective subtracts a mean over other rows, so that training needs all rows of a step before it starts."""
        return False

    @property
    def top_k(self) -> int:
        """Number of its likeliest tokens that a teacher has to give at each position."""
        return 0

    def problem_with(self, payload: str) -> PydanticCustomError | None:
        """Return why the objective cannot be computed from this payload; None if it can."""
        if payload in self.PAYLOADS:
            return None
        return PydanticCustomError(
            "payload",
            "objective.kind {kind} needs teachers.payload {wanted}",
            {
                "kind": self.kind,
                "wanted": " or ".join(self.PAYLOADS),
                "where": "objective.kind",
                "found": f"{self.kind} with teachers.payload {payload}",
            },
        )

    def problem_with_extrapolation(self, payload: str) -> PydanticCustomError | None:
        """Return why the objective cannot be computed for an extrapolated target from this payload; None if it can."""
        if payload in ("hidden_states", "sampled_logprobs"):
            return None
        return PydanticCustomError(
            "extrapolate",
            "1, or teachers.payload hidden_states: which tokens are the likeliest beyond an expert only whole "
            "distributions tell",
            {"with": f"teachers.payload {payload}"},
        )

    def build(self) -> Objective:
        """Make the objective from the keys of the section that are also fields of `OBJECTIVE`."""
        objective: Objective = self.OBJECTIVE(**{f.name: getattr(self, f.name) for f in fields(self.OBJECTIVE)})
        return objective


def find_objective_section(kind: str) -> type[ObjectiveConfig]:
    """Return the class of the section of this kind; `module:Class` is a class of the user's.

    Raises: KeyError for an unknown kind; ConfigError for a `module:Class` that cannot be imported or is no section.
    """
    section_class: type[ObjectiveConfig] = (
        import_user_object(kind, "objective.kind", SECTION) if ":" in kind else import_object(OBJECTIVES[kind])
    )
    is_section = isinstance(section_class, type) and issubclass(section_class, ObjectiveConfig)
    if not is_section or not hasattr(section_class, "OBJECTIVE"):
        raise ConfigError.at("objective.kind", found=kind, wanted=SECTION, fix="see docs/python.md for an example")
    return section_class


def build_default_objective() -> ObjectiveConfig:
    """Return the objective of a pipeline that has no such section."""
    return find_objective_section(DEFAULT_KIND).model_validate({})


class _ByKind:
    """Annotation for pydantic: the section is read with the class of its `kind`."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(_read_objective, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"oneOf": [handler(find_objective_section(kind).__pydantic_core_schema__) for kind in OBJECTIVES]}


def _read_objective(value: Any) -> ObjectiveConfig:
    if isinstance(value, ObjectiveConfig):
        return value
    kind = value.get("kind", DEFAULT_KIND) if isinstance(value, Mapping) else DEFAULT_KIND
    # A list of names, because a dictionary would raise for a kind that cannot be hashed, such as a YAML list.
    if kind not in list(OBJECTIVES) and not is_import_name(kind):
        near = find_nearest(kind, OBJECTIVES) if isinstance(kind, str) else None
        raise PydanticCustomError(
            "objective_kind",
            "{hint}`kind` is one of: {kinds}, or your own module:Class",
            {
                "hint": f"did you mean `{near}`? " if near else "",
                "kinds": ", ".join(OBJECTIVES),
                "where": "objective.kind",
                "found": str(kind),
            },
        )
    return find_objective_section(kind).model_validate(value)


AnyObjective = Annotated[SerializeAsAny[ObjectiveConfig], _ByKind()]
"""Any kind's section."""
