"""Make a merge longer: the pipeline and the manifest that it has from then on.

The further steps are those that a merge of so many steps would have taken: prompts, seeds and the rate of a step follow from the
pipeline and the step's number. Only the steps already taken may differ from those of a longer merge: a linear or cosine decay
went down faster in them. The pipeline remembers it (`trainer.extended`), so that a resume from any checkpoint finds the same rates.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd.config import PipelineConfig
from opd.config.sections import ShorterConfig
from opd.errors import RunDirError
from opd.run import checkpoints
from opd.run.lineage import EXTENDED, LINEAGE
from opd.run.paths import RunPaths
from opd.settings.yaml_files import validate_section
from opd.text import quote_for_shell
from pipelines.merging.directory import refuse_no_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """Further steps for a finished or stopped merge."""

    further_steps: int
    """Steps that are added to those of the pipeline."""
    at: int
    """Step of the newest checkpoint, from which training continues."""

    def extended_pipeline(self, config: PipelineConfig) -> PipelineConfig:
        """Return the pipeline with the further steps, and with a record of the shorter learning-rate decay before them."""
        trainer = config.trainer
        update: dict[str, Any] = {"steps": trainer.steps + self.further_steps}
        if trainer.lr_scheduler_type != "constant":
            # `extended` of a branch may come from its origin, with entries for steps that the branch has not taken. Then the steps that
            # it has taken had the rates of the first such entry.
            ahead = [entry.steps for entry in trainer.extended if entry.at >= self.at]
            shorter = ShorterConfig(at=self.at, steps=[*ahead, trainer.steps][0])
            update["extended"] = (*(entry for entry in trainer.extended if entry.at < self.at), shorter)
        return config.model_copy(update={"trainer": trainer.model_copy(update=update)})

    def extended_manifest(self, recorded: Mapping[str, Any], paths: RunPaths) -> dict[str, Any]:
        """Return the manifest with the further steps, and an event in its lineage.

        Raises: RunDirError for a run that an extension before has not brought to its end.
        """
        old_config = validate_section(PipelineConfig, recorded["config"], paths.manifest)
        self._refuse_unfinished_extension(recorded, old_config.trainer.steps, paths)
        new_config = self.extended_pipeline(old_config)
        event = {
            "event": EXTENDED,
            "after_step": self.at,
            "steps": [old_config.trainer.steps, new_config.trainer.steps],
            "lr_scheduler_type": new_config.trainer.lr_scheduler_type,
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        }
        trainer = new_config.trainer.model_dump(mode="json")
        return {
            **recorded,
            "config": {**recorded["config"], "trainer": trainer},
            LINEAGE: [*recorded.get(LINEAGE, ()), event],
        }

    def _refuse_unfinished_extension(self, recorded: Mapping[str, Any], steps: int, paths: RunPaths) -> None:
        """Refuse an extension of an unfinished extension: repeating the command after Ctrl-C would add its steps twice."""
        events = recorded.get(LINEAGE, ())
        if events and events[-1]["event"] == EXTENDED and self.at < steps:
            raise RunDirError.at(
                paths.root,
                found=f"a run that was extended to {steps} steps and has come to step {self.at}",
                wanted="a run that has reached the end of its last extension",
                fix=f"`opd merge --resume {quote_for_shell(paths.root)}` goes on to that end; extend it then",
            )

    def extension_notices(self, config: PipelineConfig) -> list[str]:
        """Return sentences on the length of the extended pipeline `config`, and on its differences from one run of that length."""
        trainer, steps_taken = config.trainer, f"the {self.at} steps already taken"
        notices = [
            f"{trainer.steps} steps in all, {self.further_steps} more than before; the run goes on after step {self.at}"
        ]
        if trainer.lr_scheduler_type != "constant":
            notices.append(
                f"{steps_taken} had the rates of a {trainer.lr_scheduler_type} decay over fewer steps; from here the rates are those "
                f"of a run of {trainer.steps} steps"
            )
        if config.schedule.mode == "one_step_off":
            notices.append(
                "nothing was written ahead at the end of the shorter run, so the next step is trained on responses of age 0"
            )
        return notices


def plan_extension(paths: RunPaths, further_steps: int) -> Extension:
    """Return the extension of a run by so many steps, after a check that the run can have it. Needs no torch, reads no weights.

    Raises: RunDirError if it is no run, a merge in several rounds or one of them, or has no checkpoint.
    """
    if further_steps < 1:
        raise RunDirError.at(
            "--steps", found=str(further_steps), wanted="at least 1", fix="give the number of further steps"
        )
    refuse_no_run(paths)
    if paths.rounds.exists() or paths.merge_root != paths.root:
        raise RunDirError.at(
            paths.root,
            found="a merge in several rounds",
            wanted="a merge of one round",
            fix=f"start a new merge whose student.model is {RunPaths(paths.merge_root).model}",
        )
    steps = checkpoints.list_checkpoint_steps(paths.checkpoints)
    if not steps:
        raise RunDirError.at(
            paths.checkpoints,
            found="no checkpoint",
            wanted="the checkpoint of the last step, with weights and optimiser",
            fix=f"put it back, or start a new merge whose student.model is {paths.model}",
        )
    return Extension(further_steps=further_steps, at=steps[-1])
