"""Import large packages faster. A merge has five processes that mostly import in their first ten seconds."""

from __future__ import annotations

import atexit
import gc
import importlib
import sys

TRANSFORMERS = "transformers.models.auto.modeling_auto"
"""The module that every use of a transformers model imports first. Modules of single models are imported when needed."""
_NOT_NEEDED = ("sklearn", "scipy")
"""If they are installed, transformers imports them for a kind of decoding and for losses of object detectors, and vLLM
imports scipy for sound. Nothing here uses these. Importing sklearn takes two seconds, scipy a quarter to two thirds of a
second."""


def import_lightly(*names: str) -> None:
    """Import these modules without scikit-learn and scipy, and without garbage collection meanwhile.

    To the imported modules these two packages look as if they were not installed; a later import finds them. All objects
    that exist at the end are frozen, so that later garbage collections need not go through them.
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
        atexit.register(gc.unfreeze)  # else objects that C++ code holds would be reported as leaks at the end
        if collects:
            gc.enable()
