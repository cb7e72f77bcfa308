"""Importing large packages in less time. A merge has five processes that do little else in their first ten seconds."""

from __future__ import annotations

import atexit
import gc
import importlib
import sys

TRANSFORMERS = "transformers.models.auto.modeling_auto"
"""What every use of a transformers model imports first; its models' own modules come when they are asked for."""
_NOT_NEEDED = "sklearn"
"""transformers loads it, where it is installed, for a kind of decoding that nobody here uses: two seconds."""


def import_lightly(*names: str) -> None:
    """Import these modules without scikit-learn, and without looking for garbage meanwhile.

    A module that wants scikit-learn finds that it is not installed; whoever imports it later gets it. What is in memory at
    the end stays there, so that no later collection looks at it again.
    """
    if all(name in sys.modules for name in names):
        return
    hidden = _NOT_NEEDED not in sys.modules
    if hidden:
        sys.modules[_NOT_NEEDED] = None  # type: ignore[assignment]
    collects = gc.isenabled()
    gc.disable()
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        if hidden:
            del sys.modules[_NOT_NEEDED]
        gc.freeze()
        atexit.register(gc.unfreeze)  # what C++ holds is counted as leaked if it is not collected at the end
        if collects:
            gc.enable()
