"""What lies in a run directory and is not of the merge as it stands: sentences that say so, and how to have it measured again.

A merge can go on after it has ended: `opd merge --resume RUN_DIR --set trainer.steps=40`. What was measured beside its 20 steps
would otherwise stand there as if it had had the same budget.
"""

from __future__ import annotations

from opd.evaluation.baselines import BaselineResult
from opd.evaluation.evaluator import MERGED
from opd.evaluation.scores import Evaluation
from opd.metrics import steps_and_tokens
from opd.report.run import RunFiles
from opd.run_dir import RunPaths


def unfinished(run: RunFiles) -> str | None:
    """How far a merge has come that has a way to go, and what stands under `merged`; None of one that is finished."""
    if run.finished:
        return None
    steps, _ = steps_and_tokens(run.records)
    done = f"{steps} of {run.planned_steps} steps are done" if run.planned_steps else f"{steps} steps are done"
    if steps and steps == run.planned_steps:
        done += ", the model or its exam is missing"
    measured = [step for step in run.during if step <= steps]
    if not measured:
        return f"{done}; there has been no evaluation yet"
    return f"{done}; what stands under “merged” is the last evaluation so far, after step {measured[-1]}"


def stale_baseline(one: BaselineResult, run: RunFiles) -> str | None:
    """Why a baseline is none of this merge as it stands; None if it is. Merges of weights have no part in its steps."""
    steps, tokens = steps_and_tokens(run.records)
    if one.token_share is None or not steps:
        return None
    if one.merge_steps is None:
        return "an older release measured it and did not record beside how many steps"
    if (one.merge_steps, one.merge_tokens) == (steps, tokens):
        return None
    return other_budget((one.merge_steps, one.merge_tokens or 0), (steps, tokens))


def other_budget(then: tuple[int, int], now: tuple[int, int]) -> str:
    """What a baseline was measured beside: steps and tokens of the merge."""
    return f"measured beside {then[0]} steps and {then[1]:,} tokens of the merge, which has {now[0]} and {now[1]:,} now"


def stale_matrix(run: RunFiles) -> str | None:
    """Why the matrix is not of this merge as it stands; None if it is, or there is none."""
    merged = run.matrix.get(MERGED)
    steps, _ = steps_and_tokens(run.records)
    if merged is None or (run.finished and run.after is None):
        return None
    if not merged.weights:
        return "an older release measured it and did not record of which weights"
    asked = {digest for found in run.matrix.values() for digest in found.weights.values()}
    taught = {digest for found in (run.before, run.expert) if found for digest in found.weights.values()}
    if not taught <= asked:
        return "student or experts were other models than the merge's"
    if run.finished and run.after and _same_model(merged, run.after):
        return None
    if merged.step is None:
        return "“merged” was another model than this merge's"
    return f"“merged” was measured at step {merged.step} of {run.planned_steps or steps}"


def _same_model(one: Evaluation, other: Evaluation) -> bool:
    """Whether both are of one model, as far as they say it: an older release's exam is taken for one of the model beside it."""
    common = one.weights.keys() & other.weights.keys()
    return all(one.weights[domain] == other.weights[domain] for domain in common)


def _command(one: BaselineResult, run: RunFiles) -> str:
    share = "" if one.token_share in (None, 1.0) else f" --share {one.token_share:g}"
    seed = "" if one.seed == run.pipeline.get("seed", 0) else f" --seed {one.seed}"
    return f"opd baseline {run.root} --method {one.method}{share}{seed}"


def notices(run: RunFiles) -> list[str]:
    """A sentence for each result that is out of date, with the command that measures it again."""
    found = {_command(one, run): (one.label, why) for one in run.baselines if (why := stale_baseline(one, run))}
    lines = [f"{label}: {why}; `{command}` measures it again" for command, (label, why) in found.items()]
    if why := stale_matrix(run):
        lines.append(
            f"{RunPaths(run.root).matrix.relative_to(run.root)}: {why}; `opd evaluate --matrix {run.root}` measures it again"
        )
    return lines
