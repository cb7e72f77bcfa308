"""The agents of a merge: the audit of their sampled tokens, how they did from step to step, and episodes turn by turn."""

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
"""Nats from which on a token has the next colour."""
MOST_CHARACTERS = 1_500_000
"""The room for episodes on the page, about; those that do not fit are counted."""
OF_A_TOKEN = 60
"""Characters that the page has for a token beside its text."""
BY = {"teacher": ", the expert", "taught": ", the expert", "blocked": ", blocked"}
"""Origin of a piece -> what is said of its turn."""
COUNTS = ("episodes", "tokens", "segments", "forks", "lost_turns", "invalid_calls", "broken")


def episode_rows(records: Sequence[StepRecord]) -> dict[str, dict[str, Any]]:
    """Return domain -> what became of its episodes in all these steps; empty without agents.

    `trained` is the share of the sampled tokens that carried loss; `by_turn` has tokens, loss and gap of each turn.
    """
    by_domain: dict[str, list[EpisodesRecord]] = {}
    for record in records:
        for domain, found in record.episodes.items():
            by_domain.setdefault(domain, []).append(found)
    return {domain: _make_row(found) for domain, found in sorted(by_domain.items())}


def _make_row(found: Sequence[EpisodesRecord]) -> dict[str, Any]:
    sums = {key: sum(getattr(one, key) for one in found) for key in COUNTS}
    return sums | {
        "turns": _weighted_mean(found, "turns", "episodes"),
        "reward": _weighted_mean(found, "reward", "episodes", _no_reward(found)),
        "trained": _weighted_mean(found, "trained", "tokens"),
        "stop_reasons": _sum_counts(one.stop_reasons for one in found),
        "sub_agents": _sum_counts(one.sub_agents for one in found),
        "error": next((one.error for one in found if one.error), ""),
        "by_turn": [
            _make_turn_row([one.by_turn[n] for one in found if n < len(one.by_turn)]) for n in range(_most_turns(found))
        ],
    }


def _sum_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add counts up by key, the most frequent first."""
    found: Counter[str] = Counter()
    for one in counts:
        found.update(one)
    return dict(found.most_common())


def _most_turns(found: Sequence[EpisodesRecord]) -> int:
    return max(len(one.by_turn) for one in found)


def _make_turn_row(found: Sequence[TurnRecord]) -> dict[str, float | None]:
    means = {key: _weighted_mean(found, key, "tokens") for key in ("loss", "logprob_gap")}
    return {"tokens": sum(one.tokens for one in found)} | means


def _no_reward(found: Iterable[EpisodesRecord]) -> float | None:
    """Return the reward of records that have none, as all of their episodes ended without one: 0, as in an exam, if another
    record of the domain has a reward, else None."""
    return 0.0 if any(one.reward is not None for one in found) else None


def _weighted_mean(found: Sequence[Any], key: str, weight: str, missing: float | None = None) -> float | None:
    """Return the mean of a field, weighted by another one; `missing` stands for None, and is left out if it is None too."""
    values = [(missing if getattr(one, key) is None else getattr(one, key), getattr(one, weight)) for one in found]
    total = sum(n for value, n in values if value is not None)
    return sum(value * n for value, n in values if value is not None) / total if total else None


def episode_curves(points: Sequence[Sequence[StepRecord]]) -> dict[str, dict[str, list[float | None]]]:
    """Return the curves `episode_reward` and `episode_turns` by domain: means of an episode with a value for each point, which
    is a group of steps; empty without agents."""
    domains = sorted({domain for part in points for record in part for domain in record.episodes})
    if not domains:
        return {}

    def curve(domain: str, key: str) -> list[float | None]:
        parts = [[record.episodes[domain] for record in part if domain in record.episodes] for part in points]
        missing = _no_reward(one for part in parts for one in part) if key == "reward" else None
        return [_weighted_mean(part, key, "episodes", missing) for part in parts]

    return {f"episode_{key}": {d: curve(d, key) for d in domains} for key in ("reward", "turns")}


def agent_plots(report: Mapping[str, Any], names: Sequence[str]) -> list[Plot]:
    """Reward and turns from step to step; loss and gap from turn to turn. `names` are the domains in the page's order."""
    from opd.report import figures

    episodes = report.get("episodes")
    if not episodes:
        return []
    found: list[Plot] = []
    curves = report["curves"]
    for key, title in (("reward", "Reward of an episode"), ("turns", "Turns of an episode")):
        values = {name: curves[f"episode_{key}"].get(name, [None] * len(curves["step"])) for name in names}
        if any(value is not None for curve in values.values() for value in curve):
            found.append(figures.by_domain(f"agents-{key}", title, curves["step"], curves["tokens"], values))
    for key, title in (("loss", "Loss by turn"), ("logprob_gap", "Gap between engine and trainer by turn")):
        by_turn = {
            name: [turn[key] for turn in episodes[name]["by_turn"]] if name in episodes else [] for name in names
        }
        if any(by_turn.values()):
            found.append(figures.by_turn(f"agents-{key}", title, by_turn))
    return found


def shown_episodes(run: RunFiles) -> tuple[list[dict[str, Any]], int]:
    """Return the episodes of the page, and how many did not fit: for each domain those of the newest step that was kept, and of
    the oldest the first one, which nobody picked, to compare with."""
    steps = sorted(run.traces)
    chosen = [(step, trace) for step in steps[-1:] for trace in run.traces[step].episodes]
    chosen += [(step, t) for step in steps[:-1][:1] for t in run.traces[step].episodes if "first" in t.why]
    chosen.sort(key=lambda pair: (pair[1].domain, -pair[0]))
    fitting, room = [], MOST_CHARACTERS
    for step, trace in chosen:
        cost = _trace_cost(trace)
        if cost <= room:
            room -= cost
            fitting.append(_show_episode(step, trace))
    return fitting, len(chosen) - len(fitting)


def _trace_cost(trace: EpisodeTrace) -> int:
    pieces = [piece for segment in trace.segments for piece in segment.pieces]
    texts = sum(len(segment.prompt) for segment in trace.segments)
    return texts + sum(OF_A_TOKEN + sum(len(text) + OF_A_TOKEN for text in piece.texts) for piece in pieces)


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
    """Return True if the segment begins with a copy of what another one has."""
    return segment.parent is not None and segment.origin != "sub_agent"


def _segment_title(segment: SegmentTrace, trace: EpisodeTrace) -> str:
    """Describe a segment in words."""
    comes = "" if segment.parent is None else f" of {segment.parent}"
    scored = "" if segment.domain == trace.domain else f", scored by the expert of {segment.domain}"
    goes = "" if segment.next is None else f", goes on in {segment.next}"
    return f"{segment.sample_id}: {trace.segment_kind(segment)}{comes}{scored}{goes}"


def _show_piece(turn: int, piece: Piece) -> dict[str, Any]:
    """Return the author of a piece, and its tokens with level and loss; the level is -1 where a token carries none."""
    trained = piece.origin in ("policy", "blocked", "taught")
    known = trained and bool(piece.losses)
    mean = sum(piece.losses) / len(piece.losses) if known else None
    losses = piece.losses if known else (None,) * len(piece.texts)
    return {
        "who": "environment" if piece.origin == "environment" else f"turn {turn}{BY.get(piece.origin, '')}",
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
    """Return the index of a loss's colour, from 0; -1 without one."""
    return -1 if loss is None else sum(loss >= bound for bound in LEVELS)
