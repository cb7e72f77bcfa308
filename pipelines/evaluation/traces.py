"""The episodes that the exams of a run kept, as text for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from opd.errors import RunDirError
from opd.records.scores import Evaluation, ScoredAnswer
from opd.run.paths import RunPaths


def episodes_of(run_dir: Path, exam: str, domains: Sequence[str], limit: int) -> list[ScoredAnswer]:
    """Return the first `limit` episodes of each of these domains, or of all, in one exam; by default the newest of the student.

    Raises: RunDirError if there is no such exam, if its file is damaged, or if it has no episode.
    """
    evaluation = Evaluation.load(_exam_file(RunPaths(run_dir), exam))
    counts: Counter[str] = Counter()
    episodes = []
    for answer in evaluation.answers:
        if answer.turns is not None and (not domains or answer.domain in domains) and counts[answer.domain] < limit:
            counts[answer.domain] += 1
            episodes.append(answer)
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
