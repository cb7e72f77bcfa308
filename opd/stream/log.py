"""The target log: it keeps each step's rollouts and scores on disk, so that a resume can train the step again without them being made
again. A step is in the log whole or not at all.

    targets/step-000012/  rollouts.arrow  worker-0-part-0000.arrow  worker-1-part-0000.arrow  step.json

`rollouts.arrow` has all rollouts of the step in order, also those that no teacher could score. The parts are the teachers' rows, as
they came from the scoring workers. `step.json` has the request to which all of this belongs (step, policy version, prompts), BLAKE3
and size of each file, the teachers of each domain, and the prompts that were refused. Rollouts that were written ahead of their step
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

import numpy as np

from opd import cluster
from opd.cluster import BackgroundCall
from opd.errors import StorageError
from opd.files import raise_storage_errors, replace_dir
from opd.interfaces import TeacherPool
from opd.records.episodes import EpisodeStats
from opd.records.types import Prompt, Rollout, RolloutBatch
from opd.run.paths import parse_step_name, step_name
from opd.stream.rollouts import read_file
from opd.stream.schema import PartRecord, StreamError
from opd.stream.targets import ExpectedRow, TargetStream, TeacherRequest
from opd.stream.written_rollouts import (
    UNREADABLE,
    WrittenRollouts,
    describe_file,
    describe_request,
    make_manifest_entries,
    make_rollout_files,
    read_batch,
    read_verified,
    refuse_other_request,
)

MANIFEST = "step.json"
ROLLOUTS = "rollouts.arrow"
FORMAT = 5
"""Number of the files' format. Format 1 had log-probs at temperature 1, and could hold ids of padding rows; 2 had no file of
rollouts; 3 had no `origin`, `parent` and `next` of a rollout; 4 could hold rows of a start student, which the trainer scores today."""


class ArrowTargetLog:
    """Implements `opd.interfaces.TargetLog`."""

    def __init__(
        self,
        root: Path,
        teachers: TeacherPool,
        vocab_size: int,
        say: Callable[[str], None],
        timeout_s: float = 3600.0,
    ) -> None:
        """Keep the settings.

        `teachers` have the output heads that logged rows name. `vocab_size`: ids of the tokenizer. `say` is called with a line
        about a step that cannot be replayed. `timeout_s`: seconds in which the disk has to sync a step.
        """
        self._root = root
        self._timeout_s = timeout_s
        self._vocab_size = vocab_size
        self._teachers = teachers
        self._say = say
        self._written = WrittenRollouts(root, vocab_size, say)

    def record(
        self, step: int, policy_version: int, prompts: Sequence[Prompt], batch: RolloutBatch, targets: TargetStream
    ) -> None:
        """Have every part written when it is taken from `targets`. After the last one a thread syncs all files.

        A thread, because the sync takes longer than the writing. The step is in the log once `TargetStream.wait_for_sinks`
        returns, which is before the optimiser step. Taking parts and waiting raise: StorageError.
        """
        final = self._step_path(step)
        temporary = final.with_name(f".tmp-{final.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        files: dict[str, dict[str, Any]] = {}

        def write(name: str, raw: memoryview) -> None:
            (temporary / name).write_bytes(raw)
            files[name] = describe_file(raw)

        request = describe_request(FORMAT, step, policy_version, prompts)

        def finish() -> None:
            with _write_directory(temporary):
                for name, raw in make_rollout_files(batch, ROLLOUTS).items():
                    write(name, raw)
                manifest = {**request, "files": files, **_step_facts(batch, targets)}
                (temporary / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
                # Only this rename puts the step into the log. If the process is killed before it, the step is not there.
                replace_dir(temporary, final)

        def sink(record: PartRecord | None, raw: np.ndarray | None) -> Callable[[], None] | None:
            if record is None or raw is None:  # all parts have come
                finishing = BackgroundCall(finish, f"target log of step {step}")
                return partial(finishing.result, timeout_s=self._timeout_s)
            with _write_directory(temporary):
                write(f"worker-{record.worker}-part-{record.number:04d}.arrow", raw.data)
            return None

        targets.add_sink(sink)

    def replay(
        self, step: int, policy_version: int, prompts: Sequence[Prompt]
    ) -> tuple[RolloutBatch, TargetStream] | None:
        """Return the step as it was logged, with its files verified; None if it is not there or cannot be used.

        In the latter cases the step and all later ones are deleted: their responses were written by weights that do not exist
        any more once the step is rolled out again.
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

    def _read(self, step: int, policy_version: int, prompts: Sequence[Prompt]) -> tuple[RolloutBatch, TargetStream]:
        """Read and verify a step. Raises: `UNREADABLE` or StreamError if files were changed, or belong to another request."""
        manifest = json.loads((self._step_path(step) / MANIFEST).read_text(encoding="utf-8"))
        refuse_other_request(manifest, describe_request(FORMAT, step, policy_version, prompts), MANIFEST)
        raw = {name: read_verified(self._step_path(step) / name, facts) for name, facts in manifest["files"].items()}
        # What remains in `raw` are the teachers' parts, in the order in which they were written.
        stored = {ROLLOUTS: raw.pop(ROLLOUTS)}
        batch = read_batch(stored, ROLLOUTS, manifest, self._vocab_size)
        teachers = {
            domain: {name: ExpectedRow(**expected) for name, expected in part.items()}
            for domain, part in manifest["teachers"].items()
        }
        heads = self._teachers.heads()
        keys = sorted({expected.head for part in teachers.values() for expected in part.values() if expected.head})
        unknown = [key for key in keys if key not in heads]
        if unknown:
            raise ValueError(f"no teacher has the output head {unknown[0][:16]}")
        targets = TargetStream(
            (cluster.put_object(part) for part in raw.values()),
            TeacherRequest(
                rollouts=batch.rollouts,
                teachers=teachers,
                kind=tuple(manifest["kind"]),
                max_quarantined=1.0,  # the real limit was checked before the step was logged
                sender="target log",
            ),
            heads={key: heads[key] for key in keys},
        )
        targets.wait_for_parts()  # an error has to come now, while the step can still be rolled out instead
        return batch, targets

    def _step_path(self, step: int) -> Path:
        return self._root / step_name(step)

    def _delete_steps(self, unwanted: Callable[[int], bool]) -> None:
        for path in self._root.glob("step-*"):
            step = parse_step_name(path.name)
            if step is not None and unwanted(step):
                shutil.rmtree(path)


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
