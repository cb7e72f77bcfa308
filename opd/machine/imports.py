"""Importing large packages in less time. A merge has five processes that do little else in their first ten seconds."""

from __future__ import annotations

import atexit
import gc
import importlib
import sys

TRANSFORMERS = "transformers.models.auto.modeling_auto"
"""What every use of a transformers model imports first; its models' own modules come when they are asked for."""
_NOT_NEEDED = ("sklearn", "scipy")
"""transformers loads them, where they are installed, for a kind of decoding and for losses of object detectors, and vLLM loads scipy for
sound, none of which anybody here uses: two seconds, and a quarter to two thirds of one."""


def import_lightly(*names: str) -> None:
    """Import these modules without scikit-learn and scipy, and without looking for garbage meanwhile.

    A module that wants these finds that they are not installed; whoever imports them later gets them. What is in memory at
    the end stays there, so that no later collection looks at it again.
    """
    if all(name in sys.modules for name in names):
        return
    hidden = [name for name in _NOT_NEEDED if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    collects = gc.isenabled()
    gc.disable()
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        for name in hidden:
            del sys.modules[name]
        gc.freeze()
        atexit.register(gc.unfreeze)  # what C++ holds is counted as leaked if it is not collected at the end
        if collects:
            gc.enable()
