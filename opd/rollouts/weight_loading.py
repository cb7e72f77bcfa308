"""Give a running vLLM engine new weights of the same shape: from a directory, or bucket by bucket as the trainer sends them.

The work at the weights themselves is in `inside`, whose methods are called in all processes of the engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opd.errors import RunError
from opd.models.buckets import Bucket


def swap_weights(llm: Any, model_dir: Path, *, whole: bool = True) -> None:
    """Put a directory's weights into a running engine of the same shape. If `whole` is false, the directory has only some of a model's
    weights, and the engine keeps its others.

    Raises: RunError if the prefix cache, which holds keys and values of the old weights, could not be reset.
    """
    llm.collective_rpc("opd_swap_weights", args=(str(model_dir), whole))
    reset_prefix_cache(llm)


class StreamedSwap:
    """A swap of weights that come a few at a time, in the order of a model's files. It must be finished before the engine is used again:
    until then layers that wait for weights have none."""

    def __init__(self, llm: Any, base: Path | None) -> None:
        """`base`: the directory with the weights that do not come, which the engine keeps; None if all weights of the model come."""
        self._llm, self.base = llm, base
        llm.collective_rpc("opd_begin_stream", args=(base is None,))

    def take_bucket(self, bucket: Bucket) -> None:
        """Take the weights of a bucket, which have their names in the files; each process of the engine keeps its part of them."""
        self._llm.collective_rpc("opd_take_bucket", args=(bucket,))

    def finish_swap(self) -> None:
        """Finish the swap, once all weights have come. Raises: RunError as `swap_weights`."""
        self._llm.collective_rpc("opd_finish_stream")
        reset_prefix_cache(self._llm)


def wipe_cache(llm: Any) -> None:
    """Overwrite the key-value cache with zeros. Raises: RunError if the prefix cache could not be reset."""
    reset_prefix_cache(llm)
    llm.collective_rpc("opd_wipe_cache")


def reset_prefix_cache(llm: Any) -> None:
    """Drop all keys and values that earlier requests left in the prefix cache. Raises: RunError if vLLM refuses."""
    if not llm.reset_prefix_cache():
        raise RunError("vLLM refused to reset its prefix cache: requests were still running")
