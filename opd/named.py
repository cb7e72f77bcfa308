"""What a name stands for: our dictionaries say `module:name`, so that whoever reads the names alone imports none of it. A
pipeline may name what is the user's own in the same way; it runs with all that the process may do, so a pipeline that names
code is to be trusted like a program."""

from __future__ import annotations

import re
import sys
import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from opd.errors import ConfigError


def is_place(name: Any) -> bool:
    """Whether this is written as `module:name`."""
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name) is not None


def imported(place: str) -> Any:
    """What `module:name` names."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def users(place: str, where: str, wanted: str) -> Any:
    """What a user's `module:name` names; the module is looked for where Python finds modules, last in the current directory.

    `where` and `wanted` go into the error. Raises: ConfigError if it cannot be imported, or cannot be called.
    """
    module, _, name = place.partition(":")
    found = getattr(_users_module(module, where), name, None)
    if not callable(found):
        raise ConfigError.at(
            where,
            found=f"no `{name}` in {module}" if found is None else f"`{name}` is a {type(found).__name__}",
            wanted=wanted,
            fix="correct the name after the colon",
        )
    return found


def _users_module(module: str, where: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: no file here may stand in for an installed module
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        # A module that it imports in turn may also be missing; then the name is another.
        found = f"no module `{error.name}`" + ("" if error.name == module else f", which {module} imports")
    except Exception as error:  # noqa: BLE001 importing runs code that is not ours
        found = traceback.format_exception_only(error)[-1].strip()
    raise ConfigError.at(
        where,
        found=found,
        wanted=f"a module {module} that Python can import",
        fix=f"correct the name before the colon, or start `opd` in the directory that holds {module.partition('.')[0]}.py",
    )
