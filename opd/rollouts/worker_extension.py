"""Work that is done inside the processes of a vLLM engine, beside its model.

An engine is one process, or with `tensor_parallel_size` several of which each holds a part of every weight. vLLM makes
`WorkerExtension` a base of its own worker class (`worker_extension_cls`), and calls these methods by name in all processes at the same
time. So there is one way for one process and for many, and no code travels.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opd.draft.shape import DraftWeights
from opd.models.buckets import Bucket
from opd.rollouts.cpu_patches import drop_expert_kernels, repack_output_head, rotate_every_head
from opd.rollouts.drafting import repair_drafting
from opd.rollouts.processes import unlink_shared_memory
from opd.transfer.routes import DirectPush, MeetingPoint, Route

if TYPE_CHECKING:
    from opd.rollouts.engine_channel import EngineChannel

EXTENSION = "opd.rollouts.worker_extension.WorkerExtension"
"""The name under which vLLM imports the class below."""
PR_SET_PDEATHSIG = 1


class WorkerExtension:
    """Methods that are added to vLLM's worker class; each process of an engine has one such worker. vLLM refuses a method whose name its
    own class has."""

    _opd_channel: EngineChannel | None = None
    """The channel of direct pushes; None if this process has joined none."""

    def opd_bind(self, owner: int | None) -> None:
        """Leave no shared memory behind, and end when the process `owner`, which started this one, ends. None: leave that to vLLM.

        vLLM's own way is a pipe that a thread listens to. A process that waits for another one's part of a sum would not notice, and
        would wait for ever, at full load. Except on Linux there is only vLLM's way.
        """
        unlink_shared_memory()
        if owner is None or not sys.platform.startswith("linux"):
            return
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != owner:  # the owner ended before this call
            os._exit(1)

    def opd_rotate_every_head(self) -> None:
        """Repair the rotary embeddings of the CPU build."""
        rotate_every_head(self._opd_model())

    def opd_use_norm_kernels(self) -> None:
        """Compute norms of the CPU build by its own kernel."""
        from opd.rollouts.norm_kernels import use_norm_kernels

        use_norm_kernels()

    def opd_skip_rank_counts(self) -> None:
        """Return rank 0 for each token, the number of ids that are at least as likely: nobody reads it, and vLLM's count of them is a
        `torch.compile` function, which costs compile time at the first request with log-probs."""
        import torch
        from vllm.v1.sample import sampler

        def return_zero_ranks(logprobs_N_V: torch.Tensor, values_N_1: torch.Tensor) -> torch.Tensor:
            return torch.zeros(len(logprobs_N_V), dtype=torch.int64, device=logprobs_N_V.device)

        # `sampler` has imported the function by name, so it is replaced there.
        sampler.batched_count_greater_than = return_zero_ranks

    def opd_cut_vocabulary(self, vocab_size: int) -> tuple[str, int | None]:
        """Cut all logits to so many ids, and return the name of the model's class and the width of its logits. The width is None in a
        process that gets no logits, because vLLM gathers them in the first one."""
        import torch
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        model, config = self._opd_model(), self._opd_this().model_config
        for module in model.modules():
            if isinstance(module, LogitsProcessor):
                module.org_vocab_size = min(module.org_vocab_size, vocab_size)
        device = next(model.parameters()).device
        hidden_1_D = torch.zeros(1, config.get_hidden_size(), dtype=config.dtype, device=device)
        with torch.inference_mode():
            logits_1_V = model.compute_logits(hidden_1_D)
        return type(model).__name__, None if logits_1_V is None else logits_1_V.shape[-1]

    def opd_swap_weights(self, weights_path: str, whole: bool) -> None:
        """Take a directory's weights, or this process's part of them. If `whole` is false, the model keeps those that the directory
        lacks."""
        model = self._opd_model()
        if whole:
            drop_expert_kernels(model)  # experts that stay are packed already
        self._opd_this().reload_weights(weights_path=weights_path)
        repack_output_head(model)

    def opd_begin_stream(self, whole: bool) -> None:
        """Prepare for weights that come a few at a time: all that the model has if `whole` is true, else some of them.

        vLLM reloads layer by layer: it keeps the weights of a layer until all of them are there, packs them as the first load did, and
        copies them into the tensors that the engine reads.
        """
        model = self._opd_model()
        if whole:
            drop_expert_kernels(model)
        with self._opd_reloading() as life_cycle:
            life_cycle.initialize_layerwise_reload(model)

    def opd_take_bucket(self, bucket: Bucket) -> None:
        """Take the weights of a bucket, or this process's part of them. The bucket must stay unchanged, because vLLM reads it only when a
        layer is complete."""
        with self._opd_reloading():
            self._opd_model().load_weights(bucket.tensors())

    def opd_repair_drafting(self, vocab_size: int) -> None:
        """Repair vLLM's drafting, and cut the draft's guesses to so many ids, as the student's are."""
        repair_drafting(self._opd_drafter(), vocab_size)

    def opd_load_draft(self, weights: DraftWeights) -> None:
        """Take weights of the draft, or this process's part of them. The embedding, which it shares with the student, stays."""
        draft = self._opd_drafter()
        with self._opd_reloading() as life_cycle:
            life_cycle.initialize_layerwise_reload(draft)
            draft.load_weights(weights.items())
            life_cycle.finalize_layerwise_reload(
                draft, self._opd_this().vllm_config.speculative_config.draft_model_config
            )
        repack_output_head(draft)

    def _opd_drafter(self) -> Any:
        """Return the draft as a torch module, or this process's part of it."""
        return self._opd_this().model_runner.drafter.model

    def opd_memory_id(self) -> str:
        """Return the id of this process's GPU: see `opd.transfer.handles.find_memory_id`."""
        from opd.transfer.handles import find_memory_id

        return find_memory_id(self._opd_this().device)

    def opd_join_channel(self, meeting: MeetingPoint, routes: Sequence[Route]) -> str:
        """Join the channel of direct pushes by the route of this process. Returns the reason if that fails; else an empty text."""
        from opd.rollouts.engine_channel import EngineChannel
        from opd.transfer.channel import TransferBroken

        this = self._opd_this()
        if self._opd_channel is not None:
            self._opd_channel.close()
            self._opd_channel = None
        try:
            self._opd_channel = EngineChannel(meeting, routes[this.rank], this.device)
        except TransferBroken as error:
            return str(error)
        return ""

    def opd_take_directly(self, push: DirectPush) -> str:
        """Take the weights of a push out of the channel, between `opd_begin_stream` and `opd_finish_stream`. Returns the reason why not
        all came; else an empty text."""
        from opd.transfer.channel import TransferBroken

        if self._opd_channel is None:  # the engine was started anew after it had joined
            return "the engine is in no channel"
        try:
            for tensors in self._opd_channel.take_buckets(push):
                with self._opd_reloading():
                    self._opd_model().load_weights(tensors)
        except TransferBroken as error:
            self._opd_channel.close()
            self._opd_channel = None
            return str(error)
        return ""

    def opd_finish_stream(self) -> None:
        """Finish the stream of weights, all of which have come."""
        model = self._opd_model()
        with self._opd_reloading() as life_cycle:
            life_cycle.finalize_layerwise_reload(model, self._opd_this().model_config)
        repack_output_head(model)

    @contextmanager
    def _opd_reloading(self) -> Iterator[Any]:
        """Yield vLLM's functions for a reload, within the context that vLLM's own reload runs in."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import reload

        with set_current_vllm_config(self._opd_this().vllm_config):
            yield reload

    def opd_wipe_cache(self) -> None:
        """Overwrite the key-value cache with zeros."""
        for layer in self._opd_this().model_runner.kv_caches:
            for tensor in layer if isinstance(layer, list | tuple) else [layer]:
                tensor.zero_()

    def _opd_model(self) -> Any:
        """Return the model as a torch module, or this process's part of it."""
        return self._opd_this().get_model()

    def _opd_this(self) -> Any:
        """Return this object, untyped: it is an instance of vLLM's worker class, too."""
        return self
