"""Pipelines: the shipped YAML files, and the code that turns one into a running merge.

Programs and notebooks find the functions of `pipelines.api` as `opd.merge`, `opd.check` and so on. Those that stood here before are
here still; they are imported on first use, because the command line must not wait for engines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.api import MergeResult, evaluate, load_pipeline, merge, register_expert, resume

__all__ = ["MergeResult", "evaluate", "load_pipeline", "merge", "register_expert", "resume"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pipelines import api

    return getattr(api, name)
