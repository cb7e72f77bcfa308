"""The agents of a merge in its report: what became of their sampled tokens, curves over the steps, and episodes turn by turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opd.records.episodes import EpisodesRecord, TurnRecord
from opd.records.step import StepRecord
from opd.report.run import RunFiles
from opd.traces.record import EpisodeTrace, Piece, SegmentTrace

if TYPE_CHECKING:  # it needs matplotlib, which those who only read a run do not
    from opd.report.drawing import Plot

LEVELS = (0.05, 0.2, 0.5, 1.0, 2.0)
"""Losses in nats from which a token has the next colour."""
MOST_CHARACTERS = 1_500_000
"""Most characters of HTML for all episodes on the page, by estimate. The page says how many episodes did not fit."""
MARKUP_PER_TOKEN = 60
"""Characters of HTML around each token's text, by estimate."""
TURN_SUFFIXES = {"teacher": ", the expert", "taught": ", the expert", "blocked": ", blocked"}
"""Origin of a piece -> what follows the number of its turn on the page."""
COUNTS = ("episodes", "tokens", "segments", "forks", "lost_turns", "invalid_calls", "broken")


def episode_rows(records: Sequence[StepRecord]) -> dict[str, dict[str, Any]]:
    """Return domain -> sums and means over its episodes in all these steps; empty without agents.

    `trained` is the share of the sampled tokens that carried loss; `by_turn` has tokens, loss and gap of each turn.
    """
    by_domain: dict[str, list[EpisodesRecord]] = {}
    for record in records:
        for domain, episodes in record.episodes.items():
            by_domain.setdefault(domain, []).append(episodes)
    return {domain: _make_row(episodes) for domain, episodes in sorted(by_domain.items())}


def _make_row(records: Sequence[EpisodesRecord]) -> dict[str, Any]:
    sums = {key: sum(getattr(record, key) for record in records) for key in COUNTS}
    return sums | {
        "turns": _weighted_mean(records, "turns", "episodes"),
        "reward": _weighted_mean(records, "reward", "episodes", _no_reward(records)),
        "trained": _weighted_mean(records, "trained", "tokens"),
        "stop_reasons": _sum_counts(record.stop_reasons for record in records),
        "sub_agents": _sum_counts(record.sub_agents for record in records),
        "error": next((record.error for record in records if record.error), ""),
        "by_turn": [
            _make_turn_row([record.by_turn[n] for record in records if n < len(record.by_turn)])
            for n in range(max(len(record.by_turn) for record in records))
        ],
    }


def _sum_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add the counts up by key, and return the largest sums first."""
    total: Counter[str] = Counter()
    for entry in counts:
        total.update(entry)
    return dict(total.most_common())


def _make_turn_row(turns: Sequence[TurnRecord]) -> dict[str, float | None]:
    means = {key: _weighted_mean(turns, key, "tokens") for key in ("loss", "logprob_gap")}
    return {"tokens": sum(turn.tokens for turn in turns)} | means


def _no_reward(records: Iterable[EpisodesRecord]) -> float | None:
    """Return the value that stands for a missing reward in these records of a domain.

    A record lacks a reward if all of its episodes ended without one. They count as 0, as in an exam, if another record of
    the domain has a reward; else the domain has no rewards, and the value is None.
    """
    return 0.0 if any(record.reward is not None for record in records) else None


def _weighted_mean(records: Sequence[Any], key: str, weight: str, missing: float | None = None) -> float | None:
    """Return the mean of the field `key`, weighted by the field `weight`; None if there is nothing to average.

    `missing` takes the place of None in the field; if `missing` is None too, such records are left out.
    """
    values = [
        (missing if getattr(record, key) is None else getattr(record, key), getattr(record, weight))
        for record in records
    ]
    total = sum(n for value, n in values if value is not None)
    return sum(value * n for value, n in values if value is not None) / total if total else None


def episode_curves(points: Sequence[Sequence[StepRecord]]) -> dict[str, dict[str, list[float | None]]]:
    """Return the curves `episode_reward` and `episode_turns` by domain; empty without agents.

    Each point is a group of steps, and the curve's value there is the mean over the episodes in them.
    """
    domains = sorted({domain for part in points for record in part for domain in record.episodes})
    if not domains:
        return {}

    def curve(domain: str, key: str) -> list[float | None]:
        parts = [[record.episodes[domain] for record in part if domain in record.episodes] for part in points]
        missing = _no_reward(episodes for part in parts for episodes in part) if key == "reward" else None
        return [_weighted_mean(part, key, "episodes", missing) for part in parts]

    return {f"episode_{key}": {d: curve(d, key) for d in domains} for key in ("reward", "turns")}


def agent_plots(report: Mapping[str, Any], names: Sequence[str]) -> list[Plot]:
    """Plot reward and turns over the steps, and loss and gap over the turns. `names`: the domains in the page's order."""
    from opd.report import figures

    episodes = report.get("episodes")
    if not episodes:
        return []
    plots: list[Plot] = []
    curves = report["curves"]
    for key, title in (("reward", "Reward of an episode"), ("turns", "Turns of an episode")):
        values = {name: curves[f"episode_{key}"].get(name, [None] * len(curves["step"])) for name in names}
        if any(value is not None for curve in values.values() for value in curve):
            plots.append(figures.draw_by_domain(f"agents-{key}", title, curves, values))
    for key, title in (("loss", "Loss by turn"), ("logprob_gap", "Gap between engine and trainer by turn")):
        by_turn = {
            name: [turn[key] for turn in episodes[name]["by_turn"]] if name in episodes else [] for name in names
        }
        if any(by_turn.values()):
            plots.append(figures.draw_by_turn(f"agents-{key}", title, by_turn))
    return plots


def shown_episodes(run: RunFiles) -> tuple[list[dict[str, Any]], int]:
    """Return the episodes of the page, and how many more did not fit on it.

    These are all episodes of the newest step with traces. To compare with, each domain also has its first episode of the
    oldest step, which was kept because it came first and not because of its result.
    """
    steps = sorted(run.traces)
    candidates = [(step, trace) for step in steps[-1:] for trace in run.traces[step].episodes]
    oldest = steps[:1] if len(steps) > 1 else []
    candidates += [(step, trace) for step in oldest for trace in run.traces[step].episodes if "first" in trace.why]
    candidates.sort(key=lambda pair: (pair[1].domain, -pair[0]))
    fitting, room = [], MOST_CHARACTERS
    for step, trace in candidates:
        cost = _trace_cost(trace)
        if cost <= room:
            room -= cost
            fitting.append(_show_episode(step, trace))
    return fitting, len(candidates) - len(fitting)


def _trace_cost(trace: EpisodeTrace) -> int:
    pieces = [piece for segment in trace.segments for piece in segment.pieces]
    texts = sum(len(segment.prompt) for segment in trace.segments)
    return texts + sum(MARKUP_PER_TOKEN + sum(len(text) + MARKUP_PER_TOKEN for text in piece.texts) for piece in pieces)


def _show_episode(step: int, trace: EpisodeTrace) -> dict[str, Any]:
    return {
        "step": step,
        "trace": trace,
        "segments": [
            {"depth": depth, "title": _segment_title(segment, trace), "copied": _is_copy(segment), "segment": segment}
            | {"pieces": [_show_piece(turn, piece) for turn, piece in segment.turns]}
            for depth, segment in trace.tree
        ],
    }


def _is_copy(segment: SegmentTrace) -> bool:
    """Return True if the segment begins with a copy of its parent's tokens, as every segment but a sub-agent's does."""
    return segment.parent is not None and segment.origin != "sub_agent"


def _segment_title(segment: SegmentTrace, trace: EpisodeTrace) -> str:
    """Describe a segment in words."""
    origin = "" if segment.parent is None else f" of {segment.parent}"
    scorer = "" if segment.domain == trace.domain else f", scored by the expert of {segment.domain}"
    continuation = "" if segment.next is None else f", goes on in {segment.next}"
    return f"{segment.sample_id}: {trace.segment_kind(segment)}{origin}{scorer}{continuation}"


def _show_piece(turn: int, piece: Piece) -> dict[str, Any]:
    """Return a piece as the page shows it: its author, and its tokens with loss and colour (`level`; -1 without a loss)."""
    trained = piece.origin in ("policy", "blocked", "taught")
    has_losses = trained and bool(piece.losses)
    mean = sum(piece.losses) / len(piece.losses) if has_losses else None
    losses = piece.losses if has_losses else (None,) * len(piece.texts)
    return {
        "who": "environment" if piece.origin == "environment" else f"turn {turn}{TURN_SUFFIXES.get(piece.origin, '')}",
        "kind": piece.origin,
        "length": piece.length,
        "version": piece.policy_version,
        "mean": mean,
        "left_out": piece.left_out if piece.origin != "environment" else 0,
        "tokens": [
            {
                "text": text if piece.origin == "environment" else text.replace("\n", "⏎\n"),
                "loss": loss,
                "level": loss_level(loss),
            }
            for text, loss in zip(piece.texts, losses, strict=True)
        ],
    }


def loss_level(loss: float | None) -> int:
    """Return the index of the colour for a loss, from 0; -1 for None."""
    return -1 if loss is None else sum(loss >= bound for bound in LEVELS)
