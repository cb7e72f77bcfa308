"""Repairs of vLLM's drafting for its own server, whose workers import this module by `--worker-extension-cls`.

The import itself repairs, because nobody calls a method of the workers there.
"""

from opd.rollouts.drafting import repair_functions

repair_functions()


class RepairedWorker:
    """Adds nothing to vLLM's worker."""
