"""On-policy distillation that merges many expert models into one.

For programs and notebooks: `opd.merge`, `resume`, `check`, `plan`, `evaluate`, `register_expert`, `load_pipeline`. They are what
`pipelines.api` has, and are imported on first use, because the command line must not wait for engines.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

__version__ = "0.2.0"
_OFFERED = ("MergeResult", "check", "evaluate", "load_pipeline", "merge", "plan", "register_expert", "resume")
PACKAGES = ("experts", "teachers", "pipelines")
"""Our other packages. Their names are common, and a notebook searches its own directory first."""
ROOT = str(Path(__file__).parents[1])
"""The directory in which our packages lie. With an editable install it is on no path."""


def __getattr__(name: str) -> Any:
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for package in PACKAGES:
        _load_ours(package)
    return getattr(import_module("pipelines.api"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_OFFERED])


def _load_ours(package: str) -> None:
    """Load a package from beside this one, whatever else of its name Python would find: a folder `experts/` with models, say.

    Raises: ImportError if something else of that name was loaded before.
    """
    spec = PathFinder.find_spec(package, [ROOT])
    assert spec is not None and spec.loader is not None, f"no {package} beside {__file__}"
    loaded = sys.modules.get(package)
    if loaded is None:
        module = sys.modules[package] = module_from_spec(spec)
        spec.loader.exec_module(module)
    elif getattr(loaded, "__file__", None) != spec.origin:
        raise ImportError(
            f"{loaded!r} was imported before, and opd has a package of that name; import opd and use it first, or rename yours"
        )
