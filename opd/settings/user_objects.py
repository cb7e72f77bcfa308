"""Names of the form `module:name`, and the import of what they name.

Our dictionaries hold such names, so that reading a dictionary imports nothing. A pipeline may name a user's own code in the
same way. That code may do whatever the process may do, so such a pipeline has to be trusted like a program.
"""

from __future__ import annotations

import re
import sys
import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from opd import ROOT
from opd.errors import ConfigError


def is_import_name(name: Any) -> bool:
    """Return True if this is written as `module:name`."""
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name) is not None


def import_object(import_name: str) -> Any:
    """Import the object that `module:name` names."""
    module, _, name = import_name.partition(":")
    return getattr(import_module(module), name)


def import_user_object(import_name: str, key: str, expected: str) -> Any:
    """Import the object that a user's `module:name` names. The current directory is searched last, after Python's own path.

    `key` and `expected` go into the error. Raises: ConfigError if it cannot be imported, or cannot be called.
    """
    module, _, name = import_name.partition(":")
    imported = getattr(_import_user_module(module, key), name, None)
    if not callable(imported):
        raise ConfigError.at(
            key,
            found=f"no `{name}` in {module}" if imported is None else f"`{name}` is a {type(imported).__name__}",
            wanted=expected,
            fix="correct the name after the colon",
        )
    return imported


def _import_user_module(module: str, key: str) -> ModuleType:
    # The current directory comes last, so that no file in it replaces an installed module. ROOT comes before it, so that no
    # file replaces a module of ours that is imported later.
    sys.path += [entry for entry in (ROOT, str(Path.cwd())) if entry not in sys.path]
    fix = f"correct the name before the colon, or start `opd` in the directory that holds {module.partition('.')[0]}.py"
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        problem = f"no module `{error.name}`"
        # The missing module may be one that the user's module imports: then the error has another name.
        if error.name is not None and not f"{module}.".startswith(f"{error.name}."):
            problem = f"{problem}, which {module} imports"
            fix = f"install {error.name}, or correct the import in {module}"
    except SyntaxError as error:
        problem = f"SyntaxError: {error.msg}, line {error.lineno} of {Path(error.filename or module).name}"
        fix = "correct that line"
    except Exception as error:  # noqa: BLE001 importing runs code that is not ours
        problem = traceback.format_exception_only(error)[-1].strip()
        fix = f"correct the module; `python -c 'import {module}'` shows where it raises this"
    raise ConfigError.at(key, found=problem, wanted=f"a module {module} that Python can import", fix=fix)
