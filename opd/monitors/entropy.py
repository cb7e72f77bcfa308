"""A student that is surer than its teacher: what reverse KL ends in when it seeks one of several right answers.

A low entropy alone says nothing, since experts on short answers are sure too.
"""

from __future__ import annotations

from collections.abc import Mapping

from opd.monitors.signal import Signal, SignalHistory, mean_probability, means_of_tokens


def _read(history: SignalHistory) -> Mapping[str, float]:
    student = means_of_tokens(history.last, "student_entropy")
    teacher = means_of_tokens(history.last, "teacher_entropy")
    return {domain: teacher[domain] - entropy for domain, entropy in student.items() if domain in teacher}


SIGNAL = Signal(
    says="the student's entropy is {value:.2f} nats a token below its teacher's",
    advice="choose an objective that keeps the teacher's spread, such as forward_kl or jsd (docs/objectives.md)",
    read=_read,
    shown_by=mean_probability,
)
