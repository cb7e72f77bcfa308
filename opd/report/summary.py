"""The content of report.json: what a merge gained in each domain, and its curves. Other tools read it, so its keys must not
change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from opd.config.objectives import DEFAULT_KIND
from opd.evaluation.baselines import BaselineResult
from opd.records.scores import DomainScore, Evaluation
from opd.records.step import StepRecord, compute_mean_length, compute_token_mean, select_domain
from opd.records.sums import mean_or_none, sum_by_key
from opd.records.texts import TextSpending
from opd.report.agents import episode_curves, episode_rows
from opd.report.alarms import alarm_rows
from opd.report.drafts import draft_report
from opd.report.efforts import effort_report, end_loss_curves
from opd.report.exams import answer_stats, latest_exam, success_by_length
from opd.report.guard import guard_report
from opd.report.indexers import indexer_curves
from opd.report.intervals import Estimate, headroom_interval, is_clear, mean_estimate, subtract_estimates
from opd.report.rewards import reward_curves
from opd.report.run import STORED, RunFiles
from opd.report.stale import describe_stale_results, describe_unfinished, explain_stale_baseline
from opd.run.lineage import LINEAGE, format_events
from opd.run.metrics import count_trained_tokens
from opd.run.paths import MERGE_EVALUATIONS

POINTS = 60
"""Most points of a curve. Each is a mean over neighbouring steps, because single steps of one domain are noisy."""
PER_TOKEN = ("loss", "student_entropy", "teacher_entropy", "argmax_agreement")
"""Keys of a domain's record that are means over its tokens."""


def recovered_share(before: float, after: float, expert: float | None) -> float | None:
    """Return the share of the way from the starting student to the expert: (after - before) / (expert - before).

    None if there is no expert or if it is no better than the student was, because then there was nothing to recover. An
    expert that may be better only by chance can give any share, so use this for the domains of `clear_domains` only.
    """
    return (after - before) / (expert - before) if expert is not None and expert > before else None


def clear_domains(before: Mapping[str, DomainScore], expert: Mapping[str, DomainScore]) -> frozenset[str]:
    """Return the domains whose expert is better than the starting student beyond chance; only these have a headroom."""
    return frozenset(
        domain
        for domain, score in expert.items()
        if domain in before and is_clear(make_estimate(before[domain]), make_estimate(score))
    )


def build_report(
    name: str,
    exams: Mapping[str, Mapping[str, float]],
    records: Sequence[StepRecord],
    *,
    wall_s: float,
    versions: Mapping[str, str],
    clear: Collection[str] | None = None,
    judges: Mapping[str, TextSpending] | None = None,
) -> dict[str, Any]:
    """Return the report of a merge from the records of `metrics.jsonl` and its accuracies (0..1) by domain.

    `exams`: the accuracies by domain of `before`, `expert` and `after`. `clear`: the result of `clear_domains`; None if it is
    not known. `judges`: domain -> what its judge has taken, exams included; None: take that of the last step.
    """
    tokens = sum(record.response_tokens for record in records)
    phase_s: dict[str, float] = {}
    for record in records:
        for phase, seconds in record.phase_s.items():
            phase_s[phase] = round(phase_s.get(phase, 0.0) + seconds, 3)
    busy_s = sum(phase_s.values())
    return {
        "name": name,
        "steps": len(records),
        **_summarise_gains(exams["before"], exams["expert"], exams["after"], clear),
        "wall_s": round(wall_s, 1),
        "phase_s": phase_s,
        "response_tokens": tokens,
        "response_tokens_per_s": round(tokens / busy_s, 1) if busy_s else 0.0,
        "versions": dict(versions),
        **({"judges": _list_spending(judges)} if judges else {}),
    }


def _summarise_gains(
    before: Mapping[str, float], expert: Mapping[str, float], after: Mapping[str, float], clear: Collection[str] | None
) -> dict[str, Any]:
    """Return the accuracies and headroom by domain, with the mean and the worst headroom.

    `clear` is the result of `clear_domains`. It is None if only accuracies are known; then every domain with a better expert
    has a headroom.
    """
    domains = {
        domain: {
            "before": before[domain],
            "after": after[domain],
            "expert": expert.get(domain),
            "headroom": recovered_share(before[domain], after[domain], expert.get(domain))
            if clear is None or domain in clear
            else None,
        }
        for domain in after
    }
    recovered = [d["headroom"] for d in domains.values() if d["headroom"] is not None]
    return {
        "domains": domains,
        "mean_headroom": mean_or_none(recovered),
        "worst_headroom": min(recovered) if recovered else None,
    }


def full_report(run: RunFiles) -> dict[str, Any]:
    """Return the report from all files of a run directory; for a merge that is not finished, the report so far.

    It has the keys of `build_report`. If the evaluation files exist it has the intervals of `_add_intervals`, and if there
    are records `curves` and what is measured from records. `texts` and `judges` (calls and money), `efforts`, `draft`, `episodes` (of
    agents), `by_length`, `guard`, `evaluations`, `objectives`, `rounds`, `models`, `baselines`, `command`, `lineage` and `alarms` are there
    if the files have something for them. `stale` lists results that are out of date, and `unfinished` says how far an unfinished merge has
    come.
    """
    report = _stored_report(run) if run.finished else _partial_report(run)
    for values in report["domains"].values():
        values["regression"] = values["before"] - values["after"]  # negative for a gain
    merged = latest_exam(run)
    if run.before and merged and (run.expert or run.without_teachers):
        _add_intervals(report, run.before, run.expert, merged)
    if objectives := domain_objectives(run.pipeline):
        report["objectives"] = objectives
    if run.records:
        report["curves"] = compute_curves(run.records)
        report["truncated"] = _truncated_share(run.records)
        report["utilisation"] = measure_utilisation(run.records)
        report["token_ages"] = token_ages(run.records)
        report["quarantined"] = sum(sum(record.quarantined.values()) for record in run.records)
        # What was spent is counted from the start of each round.
        last = [part[-1] for part in [r.records for r in run.rounds] or [run.records] if part]
        report |= {"texts": result} if (result := _list_spending(sum_by_key(r.texts for r in last))) else {}
        asked = sum_by_key(r.reward.judges for r in last if r.reward)
        report |= {"judges": _list_spending(asked)} if asked and "judges" not in report else {}
        report |= {"episodes": result} if (result := episode_rows(run.records)) else {}
        groups = list(_group_steps(run.records, POINTS))
        report |= {"guard": guard} if (guard := guard_report(groups)) else {}
        last_steps = groups[-1]
        report |= {"draft": draft} if (draft := draft_report(groups[0], last_steps)) else {}
        report |= {"efforts": efforts} if (efforts := effort_report(run, last_steps)) else {}
        report["largest_probe_gap"] = max(record.probe_gap for record in run.records)
    if points := _evaluation_curve(run):
        report["evaluations"] = points
    lengths = {name: result for name in MERGE_EVALUATIONS if (result := getattr(run, name))}
    if lengths:
        report["answers"] = answer_stats(lengths)
    report |= success_by_length(run)
    if run.baselines:
        rows = [_baseline_row(group, run) for group in _group_by_method(run.baselines)]
        report["baselines"] = sorted(rows, key=lambda row: -(row["mean_headroom"] or 0.0))
    if run.rounds:
        report["rounds"] = [_summarise_round(run, index) for index in range(len(run.rounds))]
    if alarms := alarm_rows(run):
        report["alarms"] = alarms
    if outdated := describe_stale_results(run):
        report["stale"] = outdated
    if going_on := describe_unfinished(run):
        report["unfinished"] = going_on
    return report | _manifest_fields(run.manifest)


def _list_spending(spending: Mapping[str, TextSpending]) -> dict[str, Any]:
    """Return expert, or domain of a judge -> what its answers have taken."""
    return {name: asdict(spent) for name, spent in spending.items()}


def domain_objectives(pipeline: Mapping[str, Any]) -> dict[str, str]:
    """Return domain -> kind of its objective; empty if no domain of the pipeline has an objective of its own."""
    shared = (pipeline.get("objective") or {}).get("kind", DEFAULT_KIND)
    own = {name: (domain or {}).get("objective") for name, domain in pipeline.get("domains", {}).items()}
    if not any(own.values()):
        return {}
    return {name: objective.get("kind", DEFAULT_KIND) if objective else shared for name, objective in own.items()}


def _manifest_fields(manifest: Mapping[str, Any]) -> dict[str, Any]:
    past = format_events(manifest.get(LINEAGE, ()))
    return ({LINEAGE: past} if past else {}) | {key: manifest[key] for key in ("command", "models") if key in manifest}


def _summarise_round(run: RunFiles, index: int) -> dict[str, Any]:
    """Return what one round gained, by itself and together with the rounds before it.

    Each domain has before, after, expert, headroom (counted from the very first student) and headroom_in_round (counted from
    the round's own start). Then come the means: of after - before, of headroom with its interval, and of headroom_in_round.
    `domains` is empty if the round is not finished.
    """
    round_files = run.rounds[index]
    summary: dict[str, Any] = {
        "round": index + 1,
        "finished": round_files.finished,
        "steps": len(round_files.records),
        "response_tokens": sum(record.response_tokens for record in round_files.records),
        "wall_s": round_files.stored["wall_s"] if round_files.stored else None,
    }
    start, before, expert, after = (
        e.accuracy if e else {}
        for e in (
            run.before,
            round_files.before,
            round_files.expert,
            round_files.after if round_files.finished else None,
        )
    )
    in_round = _summarise_gains(before, expert, after, find_clear_domains(round_files.before, round_files.expert))
    among = {d: value for d, value in after.items() if d in start}
    cumulative = _summarise_gains(start, expert, among, find_clear_domains(run.before, round_files.expert))
    for domain, values in in_round["domains"].items():
        values["headroom_in_round"] = values["headroom"]
        values["headroom"] = cumulative["domains"].get(domain, {}).get("headroom")
    gains = [values["after"] - values["before"] for values in in_round["domains"].values()]
    return summary | {
        "domains": in_round["domains"],
        "mean_gain": mean_or_none(gains),
        "mean_headroom": cumulative["mean_headroom"],
        "mean_headroom_interval": _mean_interval(run.before, round_files.expert, round_files.after),
        "mean_headroom_in_round": in_round["mean_headroom"],
    }


def _stored_report(run: RunFiles) -> dict[str, Any]:
    """Return the stored report with the accuracies of the evaluation files, which may have been measured again."""
    assert run.stored is not None
    stored = {key: run.stored[key] for key in STORED if key != "domains"}
    return {
        "name": stored.pop("name"),
        "steps": stored.pop("steps"),
        **_summarise_gains(*_read_accuracies(run), find_clear_domains(run.before, run.expert)),
        **stored,
        **({"judges": run.stored["judges"]} if "judges" in run.stored else {}),
    }


def _partial_report(run: RunFiles) -> dict[str, Any]:
    return build_report(
        run.pipeline["name"],
        dict(zip(("before", "expert", "after"), _read_accuracies(run), strict=True)),
        run.records,
        wall_s=sum(record.seconds for record in run.records),
        versions=run.manifest.get("versions", {}),
        clear=find_clear_domains(run.before, run.expert),
    )


def find_clear_domains(before: Evaluation | None, expert: Evaluation | None) -> frozenset[str] | None:
    """Return `clear_domains` of two evaluations; None if one of them is missing."""
    return clear_domains(before.scores, expert.scores) if before and expert else None


def _read_accuracies(run: RunFiles) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Return the accuracies of the student before, of the experts and after, by domain.

    They come from the evaluation files, or from the stored report if a file is missing. `after` of an unfinished merge is its
    newest evaluation.
    """
    stored = run.stored["domains"] if run.stored else {}

    def read_accuracy(name: str, evaluation: Evaluation | None) -> dict[str, float]:
        if evaluation:
            return evaluation.accuracy
        return {domain: values[name] for domain, values in stored.items()}

    before, expert = read_accuracy("before", run.before), read_accuracy("expert", run.expert)
    if run.finished:
        after = read_accuracy("after", run.after)
    else:
        after = next((point["accuracy"] for point in reversed(_evaluation_curve(run)) if point["step"]), {})
    compared = before if run.without_teachers or run.finished else expert
    return before, expert, {d: value for d, value in after.items() if d in before and d in compared}


def make_estimate(score: DomainScore) -> Estimate:
    return Estimate(score.accuracy, score.low, score.high)


def _accuracy_pair(estimate: Estimate | None) -> list[float] | None:
    return None if estimate is None else [estimate.low, estimate.high]


def _add_intervals(report: dict[str, Any], before: Evaluation, expert: Evaluation | None, after: Evaluation) -> None:
    """Add the 95 % interval [low, high] of each number; it is null for a domain without a headroom beyond chance."""
    shares = []
    for domain, values in report["domains"].items():
        b, a = (make_estimate(x.scores[domain]) for x in (before, after))
        e = make_estimate(expert.scores[domain]) if expert and domain in expert.scores else None
        share = headroom_interval(b, a, e) if e else None
        values |= {
            "before_interval": _accuracy_pair(b),
            "after_interval": _accuracy_pair(a),
            "expert_interval": _accuracy_pair(e),
            "headroom_interval": _accuracy_pair(share),
            "regression_interval": _accuracy_pair(subtract_estimates(b, a)),
        }
        if share is not None:
            shares.append(share)
    report["mean_headroom_interval"] = _accuracy_pair(mean_estimate(shares)) if shares else None


def compute_curves(records: Sequence[StepRecord]) -> dict[str, Any]:
    """Return curves of at most `POINTS` points. Each point is a mean over neighbouring steps; null if a domain had no token.

    step, tokens: the point's last step, and the response tokens that were trained on until then.
    By domain: loss, student_entropy, teacher_entropy, argmax_agreement (means per token), length (tokens per response),
    sample_share and token_share (the domain's share of the steps' prompts and of their trained tokens).
    By place in the response: positions (loss, mean per token).
    Over all domains: truncated (share of the responses), tokens_per_s.
    With rewards also the curves of `opd.report.rewards.reward_curves`, with agents those of `opd.report.agents.episode_curves`, with
    efforts that of `opd.report.efforts.end_loss_curves`, and that of `opd.report.indexers.indexer_curves`.
    """
    points = [list(part) for part in _group_steps(records, POINTS)]
    domains = sorted({name for record in records for name in record.domains})
    total = 0
    tokens = []
    for part in points:
        total += sum(map(count_trained_tokens, part))
        tokens.append(total)
    curves: dict[str, Any] = {"step": [part[-1].step for part in points], "tokens": tokens}
    for key in PER_TOKEN:
        curves[key] = {
            name: [compute_token_mean(select_domain(part, name), key) for part in points] for name in domains
        }
    curves["length"] = {name: [compute_mean_length(part, name) for part in points] for name in domains}
    curves |= {f"{of}_share": domain_shares(points, domains, of) for of in ("sample", "token")}
    curves["positions"] = _position_curves(points)
    curves["truncated"] = [_truncated_share(part) for part in points]
    curves["tokens_per_s"] = [_mean_rate(part) for part in points]
    curves |= reward_curves(points, domains) | episode_curves(points)
    return curves | end_loss_curves(points, domains) | indexer_curves(points)


def domain_shares(
    points: Sequence[Sequence[StepRecord]], domains: Sequence[str], of: str
) -> dict[str, list[float | None]]:
    """Return domain -> its share at each point, which is a group of steps.

    `of="sample"` is about the steps' prompts, `of="token"` about their trained tokens; if there are none, the share is None.
    Records of an older release have no prompts by domain, so their trained responses are counted instead.
    """

    def count(record: StepRecord) -> Mapping[str, int]:
        if of == "sample" and record.prompts:
            return record.prompts
        return {name: stats.tokens if of == "token" else stats.samples for name, stats in record.domains.items()}

    shares: dict[str, list[float | None]] = {name: [] for name in domains}
    for part in points:
        counts = [count(record) for record in part]
        total = sum(sum(step_counts.values()) for step_counts in counts)
        for name, values in shares.items():
            values.append(sum(step_counts.get(name, 0) for step_counts in counts) / total if total else None)
    return shares


def _group_steps(records: Sequence[StepRecord], max_groups: int) -> Iterable[Sequence[StepRecord]]:
    """Return groups of neighbouring steps, as few steps in each as `max_groups` allows."""
    width = -(-len(records) // max_groups)
    return (records[start : start + width] for start in range(0, len(records), width))


def _position_curves(points: Sequence[Sequence[StepRecord]]) -> dict[str, list[float | None]]:
    """Return place in the response, such as `4-7` -> curve of the loss. Empty for runs of older releases."""
    stats = [[record.positions for record in part] for part in points]
    positions = {position for part in stats for record in part for position in record}
    return {
        position: [
            compute_token_mean([record[position] for record in part if position in record], "loss") for part in stats
        ]
        for position in sorted(positions, key=lambda position: int(position.split("-")[0]))
    }


def measure_utilisation(records: Sequence[StepRecord]) -> dict[str, float]:
    """Return role -> share of the steps' time in which it was at work. Steps of releases that did not measure it are left out."""
    timed_records = [record for record in records if record.busy_s]
    seconds = sum(record.seconds for record in timed_records)
    roles = dict.fromkeys(role for record in timed_records for role in record.busy_s)
    return {role: sum(r.busy_s.get(role, 0.0) for r in timed_records) / seconds for role in roles} if seconds else {}


def token_ages(records: Sequence[StepRecord]) -> dict[str, int]:
    """Return age -> trained tokens of that age in the whole merge. An age is the number of weight pushes since sampling."""
    total = Counter[str]()
    for record in records:
        total.update(record.token_ages)
    return dict(sorted(total.items(), key=lambda item: int(item[0])))


def _truncated_share(part: Sequence[StepRecord]) -> float:
    samples = sum(s.samples for record in part for s in record.domains.values())
    return sum(record.truncated for record in part) / samples if samples else 0.0


def _mean_rate(part: Sequence[StepRecord]) -> float:
    seconds = sum(record.seconds for record in part)
    return sum(record.response_tokens for record in part) / seconds if seconds else 0.0


def _evaluation_curve(run: RunFiles) -> list[dict[str, Any]]:
    """Return a point for each evaluation of the student, those at the start and at the end included.

    A point has step, tokens, accuracy by domain, and mean_headroom with its interval if it is known.
    """
    tokens = {0: 0}
    for record in run.records:
        tokens[record.step] = tokens[max(tokens)] + count_trained_tokens(record)
    last = max(tokens)
    by_step: dict[int, tuple[Mapping[str, float], Evaluation | None]] = {}
    by_step |= {r.step: (r.accuracy, None) for r in run.records if r.accuracy}
    by_step |= {step: (e.accuracy, e) for step, e in run.during.items() if step in tokens}
    if run.before:
        by_step[0] = (run.before.accuracy, run.before)
    if run.after and last:  # without records (metrics.jsonl) the step of the end is not known
        by_step[last] = (run.after.accuracy, run.after)
    return [
        {"step": step, "tokens": tokens[step], "accuracy": accuracy, **_mean_headroom(run, accuracy, evaluation)}
        for step, (accuracy, evaluation) in sorted(by_step.items())
    ]


def _mean_headroom(run: RunFiles, accuracy: Mapping[str, float], scores: Evaluation | None) -> dict[str, Any]:
    """Return `mean_headroom` for these accuracies; with `scores`, their evaluation, also its interval."""
    before = run.before.accuracy if run.before else {}
    expert = run.expert.accuracy if run.expert else {}
    comparable = {d: value for d, value in accuracy.items() if d in before and d in expert}
    summary: dict[str, Any] = {
        "mean_headroom": _summarise_gains(before, expert, comparable, find_clear_domains(run.before, run.expert))[
            "mean_headroom"
        ]
    }
    if scores and scores is not run.before and run.before and run.expert:
        summary["mean_headroom_interval"] = _mean_interval(run.before, run.expert, scores)
    return summary


def _mean_interval(
    before: Evaluation | None, expert: Evaluation | None, model: Evaluation | BaselineResult | None
) -> list[float] | None:
    """Return the interval of a model's mean headroom, over the domains that have one; None if no domain has one."""
    if before is None or expert is None or model is None:
        return None
    shares = [
        headroom_interval(make_estimate(before.scores[d]), make_estimate(score), make_estimate(expert.scores[d]))
        for d, score in model.scores.items()
        if d in before.scores and d in expert.scores
    ]
    clear_shares = [share for share in shares if share is not None]
    return _accuracy_pair(mean_estimate(clear_shares)) if clear_shares else None


def _group_by_method(baselines: Sequence[BaselineResult]) -> list[list[BaselineResult]]:
    """Return groups of results that differ only in the seed."""
    groups: dict[tuple[str, str, float], list[BaselineResult]] = {}
    for result in baselines:
        share = -1.0 if result.token_share is None else result.token_share
        groups.setdefault((result.method, result.label, share), []).append(result)
    return [groups[key] for key in sorted(groups)]


def _baseline_row(group: Sequence[BaselineResult], run: RunFiles) -> dict[str, Any]:
    """Return the row of one method, with means over its seeds.

    `interval` of several seeds is the lowest and the highest mean headroom; of one seed it comes from the exams' intervals.
    """
    before, expert, _ = _read_accuracies(run)
    gains = [
        _summarise_gains(
            before,
            expert,
            {d: s.accuracy for d, s in result.scores.items() if d in before},
            find_clear_domains(run.before, run.expert),
        )
        for result in group
    ]
    shares = [g["mean_headroom"] for g in gains if g["mean_headroom"] is not None]
    interval = [min(shares), max(shares)] if len(shares) > 1 else None
    if len(group) == 1:
        interval = _mean_interval(run.before, run.expert, group[0])
    domains = sorted({d for g in gains for d in g["domains"]})
    tokens = [result.tokens for result in group if result.tokens is not None]
    return {
        "method": group[0].method,
        "label": group[0].label,
        "token_share": group[0].token_share,
        "tokens": round(fmean(tokens)) if tokens else None,
        "seeds": len(group),
        "mean_headroom": mean_or_none(shares),
        "worst_headroom": mean_or_none(g["worst_headroom"] for g in gains),
        "interval": interval,
        "accuracy": {d: fmean(g["domains"][d]["after"] for g in gains if d in g["domains"]) for d in domains},
        "stale": next((reason for result in group if (reason := explain_stale_baseline(result, run))), None),
    }
