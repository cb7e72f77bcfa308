"""Environments that episodes act on: games, calculators, sandboxes. One small file each, behind one dictionary.

An environment is a class with the methods of `opd.interfaces.Environment`; those here have two more. `tasks(n, seed, **options)`
makes rows of a prompts file, and `solve()` is the action of an expert in the present state, whatever mistakes led to it.
"""

from __future__ import annotations

from typing import Any

from opd.errors import ConfigError
from opd.settings.suggestions import did_you_mean
from opd.settings.user_objects import import_user_object, is_import_name

ENVIRONMENTS = {
    "calculator": "opd.environments.calculator:Calculator",
    "lookup": "opd.environments.lookup:Lookup",
    "boxes": "opd.environments.boxes:Boxes",
    "retry": "opd.environments.retry:Retry",
    "maze": "opd.environments.maze:Maze",
    "hanoi": "opd.environments.hanoi:Hanoi",
    "number": "opd.environments.number:GuessTheNumber",
    "sorting": "opd.environments.sorting:Sorting",
    "sandbox": "opd.environments.sandbox.environment:Sandbox",
    "verifiers": "opd.environments.from_verifiers:FromVerifiers",
}
"""Name -> the class as `module:Class`. Named, not imported: a pipeline is checked without its environments."""


def find_import_name(name: str, setting: str) -> str:
    """Return the `module:Class` of a name, or of an import path itself; imports nothing. Raises: ConfigError."""
    if name in ENVIRONMENTS or is_import_name(name):
        return ENVIRONMENTS.get(name, name)
    raise ConfigError.at(
        setting,
        found=f"`{name}`",
        wanted=f"one of: {', '.join(ENVIRONMENTS)}; or an import path module:Class",
        fix=did_you_mean(str(name), ENVIRONMENTS, "choose one of them"),
    )


def find_environment(name: str, setting: str) -> Any:
    """Return the class of a name or import path. Raises: ConfigError if there is none, or if it cannot be imported."""
    wanted = "a class with the methods of opd.interfaces.Environment"
    return import_user_object(find_import_name(name, setting), setting, wanted)
