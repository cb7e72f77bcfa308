"""All that a screen shows of a merge, as one frozen record."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from opd.live.course import Course
from opd.report import recovered_share

RUNNING, KILLED = "running", "killed"
"""States of a run beside those of `opd.live.now.ENDS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainView:
    """One domain; None for a number that the run does not have."""

    name: str
    loss: float | None = None
    """Mean over the last steps, nats a token."""
    first_loss: float | None = None
    """The same over the first steps."""
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
    """Share of the way from `before` to `expert`; None where there is no way to go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A merge at one moment."""

    name: str = ""
    root: str = ""
    """The run directory, as the user names it."""
    state: str = RUNNING
    """`RUNNING`, `KILLED`, or one of `opd.live.now.ENDS`."""
    steps: int
    done: int = 0
    elapsed_s: float | None = None
    """Since this `opd merge` began; where that is not known, the seconds of all steps."""
    left_s: float | None = None
    doing: str = ""
    doing_s: float | None = None
    """Since when it does this."""
    why: str = ""
    """Its reason for an early end."""
    domains: tuple[DomainView, ...] = ()
    loss: float | None = None
    """Loss of the last step, over all domains."""
    losses: tuple[float, ...] = ()
    """Loss of every step."""
    mean_headroom: float | None = None
    exam_step: int | None = None
    """The step after which the newest exam was."""
    phases: tuple[tuple[str, float], ...] = ()
    """Phases of the last step, with seconds."""
    tokens_per_s: float | None = None
    gap: float | None = None
    """Between the log-probs of trainer and engine after the last push, nats."""
    quarantined: int = 0
    """Prompts and responses that the last step left out."""
    memory: tuple[tuple[str, int], ...] = ()
    """Process -> bytes."""
    checkpoint: int | None = None
    """The step of the newest checkpoint."""
    notes: tuple[str, ...] = ()
    """Its sentences, the newest last."""
    hints: tuple[str, ...] = ()
    """Suggestions for the next command."""


def domain_views(course: Course) -> tuple[DomainView, ...]:
    """The domains of a merge in their order."""
    last = course.recent[-1].domains if course.recent else {}
    accuracy = course.exam.accuracy if course.exam else {}
    views = []
    for name in dict.fromkeys((*course.domains, *course.before)):
        before, now, expert = course.before.get(name), accuracy.get(name), course.expert.get(name)
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


def mean_headroom(domains: tuple[DomainView, ...]) -> float | None:
    """Mean over the domains that have one."""
    values = [domain.headroom for domain in domains if domain.headroom is not None]
    return fmean(values) if values else None


def view_of(course: Course) -> View:
    """Build the view of a merge's course; the caller adds where it is, its state and what it does."""
    domains, last = domain_views(course), course.recent[-1] if course.recent else None
    phases = sorted(last.phase_s.items(), key=lambda phase: -phase[1]) if last else ()
    return View(
        steps=course.steps,
        done=course.steps_done,
        left_s=course.left_s,
        domains=domains,
        loss=last.loss if last else None,
        losses=tuple(course.losses),
        mean_headroom=mean_headroom(domains),
        exam_step=course.exam.step if course.exam else None,
        phases=tuple(phases),
        tokens_per_s=course.tokens_per_s,
        gap=last.probe_gap if last else None,
        quarantined=sum(last.quarantined.values()) if last else 0,
        checkpoint=course.checkpoint,
    )
