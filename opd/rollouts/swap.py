"""New weights for a running vLLM engine of the same shape: from a directory, or as they come from the trainer.

vLLM reloads layer by layer: it keeps what belongs to a layer until all of it is there, packs it as the first load did, and
copies it into the tensors that the engine reads. What it leaves stale on the CPU is repaired here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.errors import RunError
from opd.rollouts.repairs import drop_expert_kernels

if TYPE_CHECKING:
    from torch import Tensor


def swap_weights(llm: Any, model_dir: Path, *, whole: bool = True) -> None:
    """Put a directory's weights into a running engine of that shape; without `whole` it has some of them, and the others stay.

    Raises: RunError if the prefix cache, which holds what the old weights computed, could not be reset.
    """
    if whole:
        drop_expert_kernels(engine_model(llm))  # experts that stay are packed already
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model_dir)})
    _settle(llm)


class StreamedSwap:
    """The same for weights that come a few at a time, in the order of a model's files. It must be finished before the engine is
    used: until then the layers that wait for weights have none."""

    def __init__(self, llm: Any, *, whole: bool) -> None:
        self._llm = llm
        self._model = engine_model(llm)
        if whole:
            drop_expert_kernels(self._model)
        with self._reloading() as life_cycle:
            life_cycle.initialize_layerwise_reload(self._model)

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Some weights, by their names in the files. They must stay as they are: vLLM reads them when their layer is complete."""
        with self._reloading():
            self._model.load_weights(tensors)

    def finish(self) -> None:
        """All have come. Raises: RunError as `swap_weights`."""
        with self._reloading() as life_cycle:
            life_cycle.finalize_layerwise_reload(self._model, self._llm.llm_engine.model_config)
        _settle(self._llm)

    @contextmanager
    def _reloading(self) -> Iterator[Any]:
        """vLLM's functions for a reload, in the surroundings that it gives to its own."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import reload

        with set_current_vllm_config(_worker(self._llm).vllm_config):
            yield reload


def _settle(llm: Any) -> None:
    """Repair what a reload leaves stale."""
    repack_output_head(engine_model(llm))
    reset_prefix_cache(llm)


def wipe_cache(llm: Any) -> None:
    """Overwrite the key-value cache with zeros. Raises: RunError if the prefix cache could not be reset."""
    reset_prefix_cache(llm)
    for layer in _worker(llm).model_runner.kv_caches:
        for tensor in layer if isinstance(layer, list | tuple) else [layer]:
            tensor.zero_()


def engine_model(llm: Any) -> Any:
    """The torch module inside an in-process engine."""
    return _worker(llm).get_model()


def _worker(llm: Any) -> Any:
    """The executor and its one worker are reachable objects: no pickled callable is needed."""
    return llm.llm_engine.model_executor.driver_worker.worker


def reset_prefix_cache(llm: Any) -> None:
    if not llm.reset_prefix_cache():
        raise RunError("vLLM refused to reset its prefix cache: requests were still running")


def repack_output_head(model: Any) -> None:
    """Pack the output head again after a reload, on the CPU.

    vLLM's CPU build multiplies with a copy of the head packed at load time; `reload_weights` rebuilds those copies for
    linear layers but not for the embedding that a tied model uses as its head.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
