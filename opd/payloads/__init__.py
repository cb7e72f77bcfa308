"""Payloads: one file for each kind of answer that a teacher gives, behind one dictionary from `teachers.payload` to its class.

A file has everything about its payload: the columns of the stream, the check of a row, its size in bytes, how a scorer makes an
answer, the block that the loss makes of a micro-batch's rows, and what an objective sees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opd.config.payloads import PAYLOADS
from opd.settings.user_objects import import_object

if TYPE_CHECKING:
    from opd.payloads.answer import Answer


def answer_class(payload: str) -> type[Answer]:
    """Return the class of a payload's answers; `payload` is a value of `teachers.payload`. Raises: KeyError for another name."""
    answers: type[Answer] = import_object(PAYLOADS[payload])
    return answers
