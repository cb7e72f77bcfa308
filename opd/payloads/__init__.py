"""Payloads: one file for each kind of answer that a teacher gives, behind one dictionary from `teachers.payload` to its class.

A file says everything about its payload: the columns of the stream, the check of a row, its bytes, how a scorer makes an
answer, the block that rows of a micro-batch become, and what of it an objective sees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opd.config.payloads import PAYLOADS
from opd.settings.named import import_object

if TYPE_CHECKING:
    from opd.payloads.answer import Answer


def answer_class(payload: str) -> type[Answer]:
    """Return the class of a payload's answers. Raises: KeyError for a name that is no payload."""
    answers: type[Answer] = import_object(PAYLOADS[payload])
    return answers
