"""Errors that a user can act on.

    OpdError(ValueError)     the user's mistake: the command ends with exit code 2, nothing written
    ├── ConfigError          a key or value in a YAML file or in `--set`
    ├── ModelError           a model directory: weights, tokenizer, config
    ├── RegistryError        an expert's name or its registry entry
    ├── PromptError          a prompts file or one of its lines
    └── RunDirError          a run directory that exists, is incomplete or is in use
    RunError(RuntimeError)   a run that started and cannot go on: exit code 1
    ├── StorageError         a disk that takes no more: exit code 3, what was finished before is intact
    └── Paused               a monitor wants a person to look: exit code 4, a resume goes on

Our own bugs are `assert`s, not members of this tree.
"""

from __future__ import annotations

from typing import Self

from opd.text import escape_control_characters


class OpdError(ValueError):
    """A mistake in what the user gave: says where, what was found, what is wanted and the way out.

    One string argument keeps it picklable, so it crosses Ray's process boundary unchanged.
    """

    @classmethod
    def at(cls, where: object, *, found: str, wanted: str, fix: str) -> Self:
        """Make the error. `where` is the field or file; the three sentences become one message of four lines.

        `found` may quote text of others. Its further lines are indented, so that it cannot forge a `fix` line.
        """
        parts = {"found:  ": found, "wanted: ": wanted, "fix:    ": fix}
        lines = [_indent(f"  {label}{text}") for label, text in parts.items()]
        return cls("\n".join([escape_control_characters(str(where)).replace("\n", "\\n"), *lines]))


def _indent(text: str) -> str:
    return escape_control_characters(text).replace("\n", "\n" + 10 * " ")


class ConfigError(OpdError):
    """A pipeline or training spec that cannot be used as written."""


class ModelError(OpdError):
    """A model directory that cannot be loaded safely or does not fit the student."""


class RegistryError(OpdError):
    """A registry entry that is missing, taken, or badly named."""


class PromptError(OpdError):
    """A prompts file with a broken or missing line."""


class RunDirError(OpdError):
    """A run directory in the wrong state for what was asked."""


class RunError(RuntimeError):
    """A run that had started and must stop: a dead worker, a weight push that did not arrive."""


class StorageError(RunError):
    """A disk that is full, over quota, read-only, closed to us or broken."""


class Paused(RunError):
    """A merge that a monitor ended for a person to look at, with a checkpoint of its last step."""
