"""Everything that a screen shows about a merge, as one frozen record."""

from __future__ import annotations

from dataclasses import dataclass

from opd.live.course import Course
from opd.records.sums import mean_or_none
from opd.report import recovered_share

RUNNING, KILLED = "running", "killed"
"""States of a run beside those of `opd.live.live_state.ENDS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainView:
    """The numbers of one domain; None stands for a number that the run does not have."""

    name: str
    loss: float | None = None
    """Mean loss over the last steps, nats per token."""
    first_loss: float | None = None
    """Mean loss over the first steps."""
    agreement: float | None = None
    """Share of the tokens where student and teacher rank the same token first, over the last steps."""
    reward: float | None = None
    tokens: int | None = None
    """Tokens with loss in the last step."""
    before: float | None = None
    """Accuracy of the student as it started, 0..1."""
    now: float | None = None
    """Accuracy in the newest exam."""
    expert: float | None = None
    headroom: float | None = None
    """Share of the way from `before` to `expert`; None if the expert is not better beyond chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A merge at one moment."""

    name: str = ""
    root: str = ""
    """The run directory, as the user names it."""
    state: str = RUNNING
    """`RUNNING`, `KILLED`, or one of `opd.live.live_state.ENDS`."""
    steps: int
    done: int = 0
    elapsed_s: float | None = None
    """Seconds since this `opd merge` began; if that is not known, the seconds of all steps."""
    left_s: float | None = None
    """Estimated seconds that are left."""
    doing: str = ""
    """Present work of the merge: a phase of a step, or a few words."""
    doing_s: float | None = None
    """Seconds since it began to do this."""
    why: str = ""
    """The reason if it ended early."""
    domains: tuple[DomainView, ...] = ()
    loss: float | None = None
    """Loss of the last step, over all domains."""
    losses: tuple[float, ...] = ()
    """Loss of every step."""
    mean_headroom: float | None = None
    """Mean over the domains that have a headroom."""
    exam_step: int | None = None
    """Step after which the newest exam was taken."""
    phases: tuple[tuple[str, float], ...] = ()
    """Phases of the last step with their seconds, the longest first."""
    tokens_per_s: float | None = None
    gap: float | None = None
    """Mean difference of the log-probs of trainer and engine after the last push, nats."""
    quarantined: int = 0
    """Prompts and responses that the last step left out."""
    memory: tuple[tuple[str, int], ...] = ()
    """Pairs of a kind of process and its bytes; see `opd.live.memory.measure_memory`."""
    checkpoint: int | None = None
    """Step of the newest checkpoint."""
    notes: tuple[str, ...] = ()
    """Sentences that the merge said, the newest last."""
    hints: tuple[str, ...] = ()
    """Suggestions for the next command."""


def _list_domains(course: Course) -> tuple[DomainView, ...]:
    """Return the views of a merge's domains, in the order of the course."""
    last = course.recent[-1].domains if course.recent else {}
    views = []
    for name in dict.fromkeys((*course.domains, *course.before)):
        before, now, expert = course.before.get(name), course.accuracy.get(name), course.expert.get(name)
        share = None if before is None or now is None else recovered_share(before, now, expert)
        clear = course.clear is None or name in course.clear
        views.append(
            DomainView(
                name=name,
                loss=course.recent_mean(name, "loss"),
                first_loss=course.first_mean(name, "loss"),
                agreement=course.recent_mean(name, "argmax_agreement"),
                reward=course.latest_reward(name),
                tokens=last[name].tokens if name in last else None,
                before=before,
                now=now,
                expert=expert,
                headroom=share if clear else None,
            )
        )
    return tuple(views)


def build_view(course: Course) -> View:
    """Build the view of a merge's course. The caller adds name, directory, state and what the merge does now."""
    domains, last = _list_domains(course), course.recent[-1] if course.recent else None
    phases = sorted(last.phase_s.items(), key=lambda phase: -phase[1]) if last else ()
    return View(
        steps=course.steps,
        done=course.steps_done,
        left_s=course.left_s,
        domains=domains,
        loss=last.loss if last else None,
        losses=tuple(course.losses),
        mean_headroom=mean_or_none(domain.headroom for domain in domains),
        exam_step=course.exam_step,
        phases=tuple(phases),
        tokens_per_s=course.tokens_per_s,
        gap=last.probe_gap if last else None,
        quarantined=sum(last.quarantined.values()) if last else 0,
        checkpoint=course.checkpoint,
    )
