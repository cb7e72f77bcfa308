"""A function of the user's: imported before any compute, called once for each answer.

It runs in the driver with all the driver may do: a pipeline that names a function is to be trusted like a program.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from opd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Python:
    """Calls `module:function` as function(text, answer, metadata)."""

    function: str

    def __post_init__(self) -> None:
        """Raises: ConfigError if the module cannot be imported or has no such function."""
        load(self.function)

    def __call__(self, text: str, answer: str, metadata: Mapping[str, Any]) -> float:
        score = float(load(self.function)(text, answer, metadata))
        if not 0 <= score <= 1:  # NaN is not
            raise ValueError(f"{self.function} gave {score}, no score in 0..1")
        return score

    def problem(self, answer: str, metadata: Mapping[str, Any]) -> str:
        return ""


def load(where: str) -> Callable[..., Any]:
    """The function of `module:function`. Raises: ConfigError."""
    module, _, name = where.partition(":")
    found = getattr(_import(module, where), name, None)
    if not callable(found):
        raise ConfigError.at(
            f"verifier {where}",
            found=f"no `{name}` in {module}" if found is None else f"`{name}` is a {type(found).__name__}",
            wanted="a function(text, answer, metadata) that gives a score in 0..1",
            fix="correct the name after the colon",
        )
    return found


def _import(module: str, where: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: no file here may stand in for an installed module
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A module that it imports in turn may also be missing; then the name is another.
        found = f"no module `{error.name}`" + ("" if error.name == module else f", which {module} imports")
    except Exception as error:  # noqa: BLE001 importing runs code that is not ours
        found = traceback.format_exception_only(error)[-1].strip()
    raise ConfigError.at(
        f"verifier {where}",
        found=found,
        wanted=f"a module {module} that Python can import",
        fix=f"correct `function`, or start `opd` in the directory that holds {module.partition('.')[0]}.py",
    )
