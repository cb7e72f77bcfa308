"""Episodes of a run as text for a terminal: those that its exams kept, and those of a training step as trees of segments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from opd.config.pipeline import load_pipeline
from opd.errors import RunDirError, RunError
from opd.records.scores import Evaluation, ScoredAnswer
from opd.run.paths import RunPaths
from opd.stream.log import list_logged_steps, read_logged_episodes, read_logged_rollouts
from opd.traces.record import EpisodeTrace, Piece, SegmentTrace, StepTraces, read_traces
from opd.traces.rendering import list_guard_events, make_trace
from opd.traces.selection import group_episodes
from pipelines.inputs.read import load_tokenizer

BESIDE = {
    "masked": " without loss",
    "blocked": " counted against the student",
    "teacher": " of the expert without loss",
    "taught": " of the expert",
}
"""Origin of a piece -> the remark about it."""
LAST = "last"
"""The newest step that is there, for `--step`."""
Episode = TypeVar("Episode", ScoredAnswer, EpisodeTrace)


def select_by_domain(episodes: Iterable[Episode], domains: Sequence[str], limit: int) -> list[Episode]:
    """Return the first `limit` episodes of each of these domains, or of all."""
    counts: Counter[str] = Counter()
    selected = []
    for episode in episodes:
        counts[episode.domain] += 1
        if counts[episode.domain] <= limit and (not domains or episode.domain in domains):
            selected.append(episode)
    return selected


def exam_episodes(run_dir: Path, exam: str, domains: Sequence[str], limit: int) -> list[ScoredAnswer]:
    """Return the first `limit` episodes of each of these domains, or of all, in one exam; by default the newest of the student.

    Raises: RunDirError if there is no such exam, if its file is damaged, or if it has no episode.
    """
    evaluation = Evaluation.load(_exam_file(RunPaths(run_dir), exam))
    episodes = select_by_domain((a for a in evaluation.answers if a.turns is not None), domains, limit)
    if not episodes:
        raise RunDirError.at(
            run_dir,
            found=f"no episode of {', '.join(domains) or 'any domain'} in the exam {evaluation.model!r}",
            wanted="a domain with `environment` and `eval`",
            fix="name another domain with --domain, or another exam with --exam",
        )
    return episodes


def _exam_file(paths: RunPaths, exam: str) -> Path:
    """Return the file of the exam. Raises: RunDirError."""
    if not paths.root.is_dir():
        raise RunDirError.at(
            paths.root,
            found="no such directory",
            wanted="a run directory of `opd merge`",
            fix="check the path; it is relative to the current directory",
        )
    steps = list(paths.evaluations_by_step().values())
    candidates = (
        [paths.evaluation_file(exam)]
        if exam
        else [paths.evaluation_file("after"), *reversed(steps), paths.evaluation_file("before")]
    )
    no_exams = (paths.matrix, paths.lm_eval)
    file = next((path for path in candidates if path.is_file() and path not in no_exams), None)
    if file is None:
        exams = sorted(path.stem for path in paths.evaluation.glob("*.json") if path not in no_exams)
        exam_names = ", ".join(exams) or "no exam"
        raise RunDirError.at(
            paths.root,
            found=exam_names,
            wanted=f"the exam {exam!r}" if exam else "an exam of the student",
            fix="name one that is there with --exam",
        )
    return file


def trace_lines(answer: ScoredAnswer) -> Iterator[str]:
    """Return one episode as text for people: who it is, the prompt, the turns, what broke."""
    invalid = f", {answer.invalid_calls} invalid calls" if answer.invalid_calls else ""
    yield f"== {answer.prompt_id}: score {answer.score:.2f}, {answer.turns} turns, {answer.tokens} tokens{invalid}"
    yield answer.prompt.rstrip("\n")
    yield answer.text
    if answer.error:
        yield f"broke: {answer.error}"
    yield ""


def step_episodes(run_dir: Path, step_option: str, domains: Sequence[str], limit: int) -> list[EpisodeTrace]:
    """Return the first `limit` episodes of each of these domains, or of all, in a training step: all that the target log has,
    else those that were kept.

    Raises: RunDirError if nothing is there of this step, or what is there is damaged or of another release.
    """
    paths = RunPaths(run_dir)
    step = _choose_step(paths, step_option)
    episodes = select_by_domain(_read_step(paths, step), domains, limit)
    if not episodes:
        raise RunDirError.at(
            run_dir,
            found=f"no episode of {', '.join(domains) or 'any domain'} in step {step}",
            wanted="a domain with `environment` or `agent`",
            fix="name another domain with --domain, or another step with --step",
        )
    return episodes


def _choose_step(paths: RunPaths, step_option: str) -> int:
    """Return the number of the step. Raises: RunDirError if nothing is there of it."""
    steps = sorted({*paths.traces_by_step(), *list_logged_steps(paths.targets)})
    if steps and step_option == LAST:
        return steps[-1]
    if step_option.isdecimal() and int(step_option) in steps:
        return int(step_option)
    raise RunDirError.at(
        paths.root,
        found=f"episodes of the steps {', '.join(map(str, steps))}" if steps else "episodes of no step",
        wanted=f"step {step_option}" if step_option != LAST else "a run with agents that has taken a step",
        fix=f"name one that is there, or `--step {LAST}`",
    )


def _read_step(paths: RunPaths, step: int) -> Sequence[EpisodeTrace]:
    stored_traces = (
        read_traces(paths.trace_file(step)) if paths.trace_file(step).exists() else StepTraces(step=step, episodes=())
    )
    if step not in list_logged_steps(paths.targets):
        return stored_traces.episodes
    student = load_pipeline(paths.pipeline).student.model
    # The merged model has the student's tokenizer, wherever the student is now.
    tokenizer = load_tokenizer(paths.model if paths.model.is_dir() and not student.is_dir() else student)
    try:
        rollouts = read_logged_rollouts(paths.targets, step, len(tokenizer))
        events = list_guard_events(read_logged_episodes(paths.targets, step).values())
    except (RunError, ValueError, KeyError, TypeError) as error:
        raise RunDirError.at(
            paths.targets,
            found=str(error),
            wanted="a target log of this release of opd, undamaged",
            fix=f"name a step that {paths.traces.name}/ has with --step",
        ) from None
    # The target log has the rollouts; the losses, and the reasons to keep an episode, are in the stored traces alone.
    reasons = {episode.episode: episode.why for episode in stored_traces.episodes}
    segments = [segment for episode in stored_traces.episodes for segment in episode.segments]
    losses = {s.sample_id: [loss for piece in s.pieces for loss in piece.losses] for s in segments}
    return [
        make_trace(episode_rollouts, reasons.get(name, ()), losses, tokenizer, events)
        for name, episode_rollouts in group_episodes(rollouts).items()
    ]


def tree_lines(trace: EpisodeTrace) -> Iterator[str]:
    """Return one episode as text for people: how it ended, then each segment under the one that it comes from."""
    reward = "no reward" if trace.reward is None else f"reward {trace.reward:.2f}"
    reasons = f"; {', '.join(trace.why)}" if trace.why else ""
    yield (
        f"== {trace.episode}: {trace.stop_reason}, {reward}, {trace.num_turns} turns, {len(trace.segments)} segments, "
        f"{trace.trained} of {trace.sampled} sampled tokens trained{reasons}"
    )
    yield from trace.guard
    for depth, segment in trace.tree:
        for line in _segment_lines(segment, trace):
            yield "  " * depth + line.replace("\n", "\n" + "  " * (depth + 2))
    yield ""


def _segment_lines(segment: SegmentTrace, trace: EpisodeTrace) -> Iterator[str]:
    origin = "" if segment.parent is None else f" of {segment.parent}"
    continuation = "" if segment.next is None else f", goes on in {segment.next}"
    yield f"segment {segment.sample_id}, {trace.segment_kind(segment)}{origin}{continuation}"
    prompt_kind = "prompt" if segment.parent is None or segment.origin == "sub_agent" else "copied"
    yield f"  {prompt_kind}, {segment.prompt_length} tokens: {segment.prompt}"
    for turn, piece in segment.turns:
        author = "environment" if piece.origin == "environment" else f"turn {turn}"
        yield f"  {author}, {piece.length} tokens{_describe_piece(piece)}: {''.join(piece.texts)}"


def _describe_piece(piece: Piece) -> str:
    """Return the remarks on a piece beside its length."""
    if piece.origin == "environment":
        return ""
    masked = BESIDE.get(piece.origin, "")
    loss = f", mean loss {sum(piece.losses) / len(piece.losses):.3f}" if piece.losses else ""
    cut = f", the last {piece.left_out} not shown" if piece.left_out else ""
    return f"{masked} by weights {piece.policy_version}{loss}{cut}"
