"""A scoring worker. Runs in a Ray actor; knows nothing of Ray."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType

import numpy as np

from opd.models.heads import HeadSource, head_array
from opd.records.types import LayoutProof, Teacher
from opd.stream.part_files import PartsDirectory
from opd.stream.part_summaries import make_summary
from opd.stream.schema import PartRecord, TargetRow, cut_parts, write_stream
from opd.vocabularies.spelling import build_tables
from teachers.probe import check_probe
from teachers.scorers import ScorerOptions, make_scorer
from teachers.shares import TeacherRows

EncodedPart = tuple[bytes, np.ndarray]
"""The summary of a part as JSON, and the part as one Arrow stream, uint8 [bytes]."""


class TeacherWorker:
    """Scores groups of rows, one teacher after the other, and meanwhile reads the next teacher ahead.

    It scores only when it is asked for a part, so the caller decides how far ahead of the trainer it may be. A thread encodes a part,
    hashes it and writes it into the target log while the rows of the next one are scored.
    """

    def __init__(self, engine: str, options: ScorerOptions) -> None:
        self._options = options
        self._scorer = make_scorer(engine, options)
        self._parts: Iterator[EncodedPart] = iter(())
        self._encoder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")

    def describe_head(self, teacher: Teacher) -> HeadSource:
        """Return the teacher's head as a source without a handle.

        Reading the head also shows that the teacher can be used: that its weights fit, or that its server answers.

        Raises: RunError if the teacher cannot be used, or if it is not the model that was registered.
        """
        scorer = self._scorer
        head = HeadSource(key=scorer.head_key(teacher), rule=scorer.head_rule(teacher), file=scorer.head_file(teacher))
        check_probe(self._scorer, teacher, self._options)
        return head

    def prove_layout(self, teacher: Teacher) -> LayoutProof | None:
        """Return how rows of this teacher share a forward pass, see `Scorer.layout`. Raises: RunError if they cannot."""
        return self._scorer.layout(teacher)

    def read_head(self, teacher: Teacher) -> np.ndarray:
        """Return the head's matrix, [V, D], as the array that goes into the object store."""
        return head_array(self._scorer.head(teacher))

    def read_tables(self, name: str) -> np.ndarray:
        """Return how the student spells the tokens of a teacher with another tokenizer, packed."""
        return build_tables(self._options.spellings[name]).pack()

    def begin_rows(
        self,
        groups: Sequence[TeacherRows],
        worker: int,
        directory: PartsDirectory | None = None,
        written: int = 0,
        broken: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Prepare to score these groups, the share of the next step; `next_part` then scores them.

        `broken`: sample id -> reason, for responses that no teacher can read; the first part says so.

        `worker` is the number that marks this worker's parts in the stream. Those from number `written` on are written into
        `directory` if this process reaches it; a worker before this one wrote the others.
        """
        self._parts = self._make_parts(groups, worker, directory, written, dict(broken))

    def next_part(self) -> EncodedPart | tuple[None, None]:
        """Return the next part, scored now; None twice after the last one."""
        return next(self._parts, (None, None))

    def _make_parts(
        self,
        groups: Sequence[TeacherRows],
        worker: int,
        directory: PartsDirectory | None,
        written: int,
        broken: dict[str, str],
    ) -> Iterator[EncodedPart]:
        names = [teacher.name for teacher, _, _ in groups]
        encoding: deque[Future[EncodedPart]] = deque()
        for rows, record in cut_parts(self._score_rows(groups, broken), worker=worker, broken=broken, teachers=names):
            target = directory if record.number >= written else None
            encoding.append(self._encoder.submit(self._encode_part, rows, record, target))
            if len(encoding) > 1:
                yield encoding.popleft().result()
        for future in encoding:
            yield future.result()

    def _encode_part(
        self, rows: Sequence[TargetRow], record: PartRecord, directory: PartsDirectory | None
    ) -> EncodedPart:
        dtype, payload = self._options.dtype, self._options.payload
        # An array, because workers read arrays from Ray's object store without a copy.
        raw = np.frombuffer(write_stream(rows, dtype, payload, record), dtype=np.uint8)
        file = directory.write_part(record, raw.data) if directory else ""
        return make_summary(rows, record, (dtype, payload), raw.nbytes, file).to_json(), raw

    def _score_rows(self, groups: Sequence[TeacherRows], broken: dict[str, str]) -> Iterator[list[TargetRow]]:
        next_teachers = [group[0] for group in groups[1:]] + [None]
        for (teacher, weight, rollouts), next_teacher in zip(groups, next_teachers, strict=False):
            batches = self._scorer.score(teacher, rollouts, broken)
            # Not before `score`, which loads this teacher: memory is shared between the one in use and the next one.
            if next_teacher is not None:
                self._scorer.prefetch(next_teacher)
            for rows in batches:
                yield [row.as_sampled().with_weight(weight) for row in rows]
