"""Find results in a run directory that are out of date: a sentence for each, with the command that measures it again.

A merge can go on after it has ended: `opd merge --extend RUN_DIR --steps 20`. Baselines that were measured against
its first 20 steps would then look as if they had had the same budget.
"""

from __future__ import annotations

from opd.evaluation.baselines import BaselineResult
from opd.records.scores import Evaluation
from opd.report.run import RunFiles
from opd.run.metrics import count_steps_and_tokens
from opd.run.paths import RunPaths
from opd.text import quote_for_shell


def describe_unfinished(run: RunFiles) -> str | None:
    """Describe how far an unfinished merge has come, and which model the report calls merged; None for a finished merge."""
    if run.finished:
        return None
    steps, _ = count_steps_and_tokens(run.records)
    progress = f"{steps} of {run.planned_steps} steps are done" if run.planned_steps else f"{steps} steps are done"
    if steps and steps == run.planned_steps:
        progress += ", the model or its exam is missing"
    # Records also have the accuracies of exams whose files no longer exist.
    measured = [*run.during, *(record.step for record in run.records if record.accuracy)]
    if not measured:
        return f"{progress}; there has been no evaluation yet"
    return f"{progress}; what stands under “merged” is the last evaluation so far, after step {max(measured)}"


def explain_stale_baseline(baseline: BaselineResult, run: RunFiles) -> str | None:
    """Return why a baseline is out of date; None if it is not.

    A baseline that merges weights has no `token_share`: it does not depend on the merge's steps, so it stays up to date.
    """
    steps, tokens = count_steps_and_tokens(run.records)
    if baseline.token_share is None or not steps:
        return None
    if baseline.merge_steps is None:
        return "an older release measured it and did not record beside how many steps"
    if (baseline.merge_steps, baseline.merge_tokens) == (steps, tokens):
        return None
    return describe_changed_budget((baseline.merge_steps, baseline.merge_tokens or 0), (steps, tokens))


def describe_changed_budget(then: tuple[int, int], now: tuple[int, int]) -> str:
    """Describe the merge's budget when a baseline was measured and now; each is a number of steps and of tokens."""
    return f"measured beside {then[0]} steps and {then[1]:,} tokens of the merge, which has {now[0]} and {now[1]:,} now"


def explain_stale_matrix(run: RunFiles) -> str | None:
    """Return why the matrix is out of date; None if it is not, or if there is no matrix."""
    from opd.evaluation.evaluator import MERGED  # it needs pydantic, which those who only read a run do not

    merged = run.matrix.get(MERGED)
    steps, _ = count_steps_and_tokens(run.records)
    if merged is None or (run.finished and run.after is None):
        return None
    if not merged.weights:
        return "an older release measured it and did not record of which weights"
    matrix_digests = {digest for evaluation in run.matrix.values() for digest in evaluation.weights.values()}
    run_digests = {
        digest for evaluation in (run.before, run.expert) if evaluation for digest in evaluation.weights.values()
    }
    if not run_digests <= matrix_digests:
        return "student or experts were other models than the merge's"
    if run.finished and run.after and _same_model(merged, run.after):
        return None
    if merged.step is None:
        return "“merged” was another model than this merge's"
    return f"“merged” was measured at step {merged.step} of {run.planned_steps or steps}"


def _same_model(exam: Evaluation, reference: Evaluation) -> bool:
    """Return True if both are exams of the same model. An exam of an older release names no model and counts as the same."""
    common = exam.weights.keys() & reference.weights.keys()
    return all(exam.weights[domain] == reference.weights[domain] for domain in common)


def _baseline_command(baseline: BaselineResult, run: RunFiles) -> str:
    share = "" if baseline.token_share in (None, 1.0) else f" --share {baseline.token_share:g}"
    seed = "" if baseline.seed == run.pipeline.get("seed", 0) else f" --seed {baseline.seed}"
    return f"opd baseline {quote_for_shell(run.root)} --method {baseline.method}{share}{seed}"


def describe_stale_results(run: RunFiles) -> list[str]:
    """Return a sentence for each result that is out of date, with the command that measures it again."""
    outdated = {
        _baseline_command(baseline, run): (baseline.label, reason)
        for baseline in run.baselines
        if (reason := explain_stale_baseline(baseline, run))
    }
    lines = [f"{label}: {reason}; `{command}` measures it again" for command, (label, reason) in outdated.items()]
    if reason := explain_stale_matrix(run):
        lines.append(
            f"{RunPaths(run.root).matrix.relative_to(run.root)}: {reason}; `opd evaluate --matrix {quote_for_shell(run.root)}` "
            "measures it again"
        )
    return lines
