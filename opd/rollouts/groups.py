"""Groups of responses that teachers score while the student still writes: which responses go to them together, and when.

The last bits of a score depend on what shares the forward pass. So who is scored together follows from the step's prompts, and
never from who was done first:

    prompts of a domain in their order      a b c d │ e f g h │ i        groups of four
    written to their end                    c . a d   e f . g   .        in any order
    goes to the teachers                    e to h, as soon as g is there, while b and i are still written

A response is written to its end, or an episode played. The rows of a group have the order of its prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from opd.records.types import Prompt, Rollout

if TYPE_CHECKING:  # it needs torch
    from opd.stream.targets import TargetStream

Ready = Callable[[int, Sequence[Rollout]], None]
"""Takes the number of a group, which all of its rollouts have reached, and these."""


class Early(Protocol):
    """A step that teachers begin with before all of it is written."""

    group_of: Mapping[str, int]
    """Sample id of a prompt's response, or episode -> number of the group that it is scored with."""

    def written(self, sample_id: str, rollouts: Sequence[Rollout]) -> None:
        """Take what came of a prompt, once it is whole: a response, the segments of an episode, or nothing. Called once for
        each sample, in any order; returns at once. Raises: what scoring raised meanwhile."""
        ...

    def stream(self, rollouts: Sequence[Rollout]) -> TargetStream:
        """Return the step's scores, now that all is written: `rollouts` are those of the batch."""
        ...


class Groups:
    """Puts what is written into the groups that the prompts decide, and hands on each that is whole."""

    def __init__(self, prompts: Sequence[Prompt], sample_ids: Sequence[str], size: int, ready: Ready) -> None:
        """`size`: responses of one domain that are scored together, and as many more as belong to the last one's prompt."""
        self.of = _number_groups(prompts, sample_ids, size)
        """Sample id -> number of its group. The numbers have the order in which the trainer takes domains."""
        self._ready = ready
        self._members: dict[int, dict[str, Sequence[Rollout] | None]] = {}
        for sample_id in sample_ids:
            self._members.setdefault(self.of[sample_id], {})[sample_id] = None

    def written(self, sample_id: str, rollouts: Sequence[Rollout]) -> None:
        """See `Early.written`."""
        number = self.of[sample_id]
        members = self._members[number]
        assert members[sample_id] is None, f"{sample_id} was written before"
        members[sample_id] = rollouts
        # An empty sequence counts too: nothing came of that prompt, and its group need not wait for it.
        if all(found is not None for found in members.values()):
            # Members lie in the order of the prompts, not in that in which they were written.
            self._ready(number, [rollout for found in members.values() for rollout in found or ()])


def _number_groups(prompts: Sequence[Prompt], sample_ids: Sequence[str], size: int) -> dict[str, int]:
    by_domain: dict[str, list[tuple[Prompt, str]]] = {}
    for prompt, sample_id in zip(prompts, sample_ids, strict=True):
        by_domain.setdefault(prompt.domain, []).append((prompt, sample_id))
    found: dict[str, int] = {}
    number = -1
    # Sorted, because the numbers have the order in which the trainer takes domains.
    for _, mine in sorted(by_domain.items()):
        # As if the group before were full: each domain begins one of its own.
        before, filled = None, size
        for prompt, sample_id in mine:
            # A group never ends between the responses to one prompt.
            if filled >= size and prompt.id != before:
                number, filled = number + 1, 0
            found[sample_id], before, filled = number, prompt.id, filled + 1
    return found
