"""The checkpoint of another run at which a new run begins, as `--from RUN_DIR@STEP` names it. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from opd.errors import RunDirError
from opd.run import checkpoints
from opd.run.paths import RunPaths, step_name
from pipelines.merging.directory import refuse_no_run


@dataclass(frozen=True, slots=True)
class Origin:
    """A checkpoint of a run, from which another run branches."""

    paths: RunPaths
    step: int

    @property
    def checkpoint(self) -> Path:
        """Directory of the checkpoint."""
        return self.paths.checkpoints / step_name(self.step)

    def __str__(self) -> str:
        return f"{self.paths.root}@{self.step}"


def find_origin(text: str) -> Origin:
    """Return the checkpoint of `RUN_DIR@STEP`, or the newest one of `RUN_DIR`; its bytes are not verified yet.

    Raises: RunDirError if there is no such run, or no such checkpoint in it.
    """
    root, at, step = text.rpartition("@")
    has_step = bool(at) and step.isdecimal()  # the directory's own name may have an @
    paths = RunPaths(Path(root if has_step else text))
    refuse_no_run(paths)
    steps = checkpoints.list_checkpoint_steps(paths.checkpoints)
    if not steps or (has_step and int(step) not in steps):
        raise RunDirError.at(
            f"--from {text}",
            found="checkpoints of steps " + ", ".join(map(str, steps))
            if steps
            else f"no checkpoint in {paths.checkpoints}",
            wanted="RUN_DIR@STEP, the step of a checkpoint that is there, or RUN_DIR for the newest",
            fix="name one of these steps; checkpoint.keep and checkpoint.keep_every say which ones a run keeps"
            if steps
            else f"give {_describe_alternative(paths)} to start from its weights alone, set student.model to the model that it left",
        )
    return Origin(paths, int(step) if has_step else steps[-1])


def _describe_alternative(paths: RunPaths) -> str:
    """Return what to name in place of a run without a checkpoint: for a merge in several rounds, one of these."""
    return f"a round, such as {paths.round_dir(1).root};" if paths.rounds.exists() else "another run;"
