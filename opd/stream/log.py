"""The target log: it keeps each step's rollouts and scores on disk, so that a resume can train the step again without them being made
again. A step is in the log whole or not at all.

    targets/step-000012/  rollouts.arrow  worker-0-part-0000.arrow  worker-1-part-0000.arrow  step.json

`rollouts.arrow` has all rollouts of the step in order, also those that no teacher could score. The parts are the teachers' rows, as
they came from the scoring workers; a worker that reaches this directory writes its parts itself. `step.json` has the request to which
all of this belongs (step, policy version, prompts), BLAKE3 and size of each file, a summary of each part, the teachers of each
domain, and the prompts that were refused. Rollouts that were written ahead of their step
are beside these directories (`opd.stream.written_rollouts`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from opd.cluster import BackgroundCall
from opd.errors import StorageError
from opd.files import raise_storage_errors, replace_dir
from opd.interfaces import TeacherPool
from opd.records.episodes import EpisodeStats
from opd.records.types import Prompt, Rollout, RolloutBatch
from opd.run.paths import parse_step_name, step_name
from opd.stream.part_files import PartsDirectory, part_name
from opd.stream.part_summaries import PartSummary, parse_summary
from opd.stream.rollouts import read_file, write_file
from opd.stream.schema import StreamError
from opd.stream.targets import ExpectedRow, StreamPart, TargetStream, TeacherRequest
from opd.stream.written_rollouts import (
    UNREADABLE,
    WrittenRollouts,
    describe_file,
    describe_request,
    make_manifest_entries,
    read_batch,
    read_verified,
    refuse_other_request,
    verify_file,
)

MANIFEST = "step.json"
ROLLOUTS = "rollouts.arrow"
FORMAT = 6
"""Number of the files' format. Format 1 had log-probs at temperature 1, and could hold ids of padding rows; 2 had no file of
rollouts; 3 had no `origin`, `parent` and `next` of a rollout; 4 could hold rows of a start student, which the trainer scores today;
5 had no summaries of parts."""


class ArrowTargetLog:
    """Implements `opd.interfaces.TargetLog`."""

    def __init__(
        self,
        root: Path,
        teachers: TeacherPool,
        vocab_size: int,
        say: Callable[[str], None],
        timeout_s: float = 3600.0,
        *,
        keeps_targets: bool = True,
        max_bytes: int | None = None,
    ) -> None:
        """Keep the settings.

        `teachers` have the output heads that logged rows name. `vocab_size`: ids of the tokenizer. `say` is called with a line
        about a step that cannot be replayed. `timeout_s`: seconds in which the disk has to sync a step. `keeps_targets`: False to
        log the rollouts alone. `max_bytes`: most bytes of all steps together, for `lacks_room`.
        """
        self._root = root
        self._timeout_s = timeout_s
        self._vocab_size = vocab_size
        self._teachers = teachers
        self._say = say
        self._keeps_targets = keeps_targets
        self._max_bytes = max_bytes
        self._sizes = {step: _count_bytes(self._step_path(step)) for step in list_logged_steps(root)}
        """Step in the log -> bytes of its files."""
        self._largest = max(self._sizes.values(), default=0)
        """Bytes of the largest step so far."""
        self._written = WrittenRollouts(root, vocab_size, say)

    def begin(self, step: int) -> PartsDirectory | None:
        """Make the directory into which scoring workers write a step's parts; None if no parts are logged. Raises: StorageError."""
        if not self._keeps_targets:
            return None
        temporary = self._temporary_path(step)
        shutil.rmtree(temporary, ignore_errors=True)
        with raise_storage_errors(temporary):
            return PartsDirectory.create(temporary)

    def record(
        self, step: int, policy_version: int, prompts: Sequence[Prompt], batch: RolloutBatch, targets: TargetStream
    ) -> None:
        """Have every part in a file when it is taken from `targets`: the scoring worker's own, or one that is written here.

        After the last one a thread syncs all files, because the sync takes longer than the writing. The step is in the log once
        `TargetStream.wait_for_sinks` returns, which is before the optimiser step. Taking parts and waiting raise: StorageError.
        """
        temporary = self._temporary_path(step)
        files: dict[str, dict[str, Any]] = {}
        summaries: list[PartSummary] = []

        def write(name: str, raw: memoryview) -> None:
            (temporary / name).write_bytes(raw)
            files[name] = describe_file(raw)

        request = describe_request(FORMAT, step, policy_version, prompts)

        def finish() -> None:
            with _write_directory(temporary):
                write(ROLLOUTS, memoryview(write_file(batch.rollouts)))
                # A worker that died may have left a part that nobody knows of.
                for path in temporary.iterdir():
                    if path.name not in files:
                        path.unlink()
                parts = [json.loads(summary.to_json()) for summary in summaries] if self._keeps_targets else None
                manifest = {**request, "files": files, "parts": parts, **_step_facts(batch, targets)}
                (temporary / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
                # Only this rename puts the step into the log. If the process is killed before it, the step is not there.
                replace_dir(temporary, self._step_path(step))
            self._note_size(step)

        def sink(part: StreamPart | None) -> Callable[[], None] | None:
            if part is None:  # all parts have come
                finishing = BackgroundCall(finish, f"target log of step {step}")
                return partial(finishing.result, timeout_s=self._timeout_s)
            if self._keeps_targets:
                summary, name = part.summary, part_name(part.summary.record)
                summaries.append(summary)
                if summary.file:
                    files[name] = {"blake3": summary.file, "bytes": summary.nbytes}
                else:
                    with _write_directory(temporary):
                        write(name, targets.read_part(part).data)
            return None

        targets.add_sink(sink)

    def lacks_room(self, steps: int) -> bool:
        """Return True if so many further steps, each as large as the largest so far, would exceed `max_bytes`."""
        return self._max_bytes is not None and sum(self._sizes.values()) + steps * self._largest > self._max_bytes

    def replay(
        self, step: int, policy_version: int, prompts: Sequence[Prompt]
    ) -> tuple[RolloutBatch, TargetStream | None] | None:
        """Return the step as it was logged, with its files verified; None if it is not there or cannot be used.

        In the latter cases the step and all later ones are deleted: their responses were written by weights that do not exist
        any more once the step is rolled out again. The stream is None if the rollouts alone were logged.
        """
        if self._step_path(step).exists():
            try:
                return self._read(step, policy_version, prompts)
            except (*UNREADABLE, StreamError) as error:
                self._say(f"warning: step {step} is rolled out again, the target log cannot be used: {error}")
        self._delete_steps(lambda logged: logged >= step)
        # Responses of step + 1 were written ahead by the weights from before this step, so they stay valid.
        self._written.delete_steps(lambda written: written > step + 1)
        return None

    def prune(self, step: int) -> None:
        """Delete the steps up to `step`: a checkpoint holds their result now."""
        self._delete_steps(lambda logged: logged <= step)
        self._written.delete_steps(lambda written: written <= step)

    def keep_written(self, step: int, policy_version: int, prompts: Sequence[Prompt], batch: RolloutBatch) -> None:
        """Implements `TargetLog.keep_written`."""
        self._written.store_rollouts(step, policy_version, prompts, batch)

    def written(self, step: int, policy_version: int, prompts: Sequence[Prompt]) -> RolloutBatch | None:
        """Implements `TargetLog.written`."""
        return self._written.read(step, policy_version, prompts)

    def written_files(self, step: int) -> dict[str, bytes]:
        """Implements `TargetLog.written_files`."""
        return self._written.read_files(step)

    def bring_back(self, step: int, directory: Path) -> None:
        """Implements `TargetLog.bring_back`."""
        self._written.bring_back(step, directory)

    def _read(
        self, step: int, policy_version: int, prompts: Sequence[Prompt]
    ) -> tuple[RolloutBatch, TargetStream | None]:
        """Read and verify a step. Raises: `UNREADABLE` or StreamError if files were changed, or belong to another request."""
        path = self._step_path(step).absolute()
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        refuse_other_request(manifest, describe_request(FORMAT, step, policy_version, prompts), MANIFEST)
        files = manifest["files"]
        batch = read_batch(read_verified(path / ROLLOUTS, files[ROLLOUTS]), manifest, self._vocab_size)
        if manifest["parts"] is None:
            return batch, None
        teachers = {
            domain: {name: ExpectedRow(**expected) for name, expected in part.items()}
            for domain, part in manifest["teachers"].items()
        }
        heads = self._teachers.heads()
        keys = sorted({expected.head for part in teachers.values() for expected in part.values() if expected.head})
        unknown = [key for key in keys if key not in heads]
        if unknown:
            raise ValueError(f"no teacher has the output head {unknown[0][:16]}")
        summaries = [parse_summary(json.dumps(part).encode()) for part in manifest["parts"]]
        for summary in summaries:
            verify_file(path / part_name(summary.record), files[part_name(summary.record)])
        targets = TargetStream(
            # The ranks read the files themselves.
            (
                StreamPart(handle=path / part_name(summary.record), summary=summary, driver_bytes=0)
                for summary in summaries
            ),
            TeacherRequest(
                rollouts=batch.rollouts,
                teachers=teachers,
                kind=tuple(manifest["kind"]),
                kinds={domain: tuple(kind) for domain, kind in manifest.get("kinds", {}).items()},
                max_quarantined=1.0,  # the real limit was checked before the step was logged
                sender="target log",
            ),
            heads={key: heads[key] for key in keys},
        )
        targets.wait_for_parts()  # an error has to come now, while the step can still be rolled out instead
        return batch, targets

    def _step_path(self, step: int) -> Path:
        return self._root / step_name(step)

    def _temporary_path(self, step: int) -> Path:
        return self._root / f".tmp-{step_name(step)}"

    def _note_size(self, step: int) -> None:
        self._sizes[step] = _count_bytes(self._step_path(step))
        self._largest = max(self._largest, self._sizes[step])

    def _delete_steps(self, unwanted: Callable[[int], bool]) -> None:
        for step in list_logged_steps(self._root):
            if unwanted(step):
                shutil.rmtree(self._step_path(step))
                self._sizes.pop(step, None)


def _count_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


@contextmanager
def _write_directory(temporary: Path) -> Iterator[None]:
    """Within, the directory exists and its files are written.

    Raises: StorageError, after the directory was deleted, because a full disk needs the room.
    """
    try:
        with raise_storage_errors(temporary):
            temporary.mkdir(parents=True, exist_ok=True)
            yield
    except StorageError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _step_facts(batch: RolloutBatch, targets: TargetStream) -> dict[str, Any]:
    """Return the manifest's entries about a step that neither the rollouts nor the parts have."""
    return {
        "kind": targets.request.kind,
        **({"kinds": dict(targets.request.kinds)} if targets.request.kinds else {}),
        "teachers": {
            domain: {n: asdict(e) for n, e in part.items()} for domain, part in targets.request.teachers.items()
        },
        **make_manifest_entries(batch),
    }


def list_logged_steps(root: Path) -> list[int]:
    """Return the numbers of the steps that a log has, in order."""
    return sorted(step for path in root.glob("step-*") if (step := parse_step_name(path.name)) is not None)


def read_logged_rollouts(root: Path, step: int, vocab_size: int) -> list[Rollout]:
    """Read the rollouts of a step that a log has.

    Raises: RolloutError if another release wrote them, or they are damaged; OSError.
    """
    return read_file((root / step_name(step) / ROLLOUTS).read_bytes(), vocab_size)


def read_logged_episodes(root: Path, step: int) -> dict[str, EpisodeStats]:
    """Return domain -> counts of its episodes, for a step that a log has.

    Raises: ValueError, KeyError or TypeError for a damaged file; OSError.
    """
    file = root / step_name(step) / MANIFEST
    manifest = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {domain: EpisodeStats.from_json(data) for domain, data in manifest.get("episodes", {}).items()}
