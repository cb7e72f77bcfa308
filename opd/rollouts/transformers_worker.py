"""One transformers model as a rollout engine, owned by one process, with the methods that `opd.rollouts.engines` calls of a `VLLMWorker`.

It is slow, and serves every architecture that transformers has. There is no direct way from GPU to GPU, and it plays no episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opd.models.buckets import Bucket
from opd.models.files import weight_files
from opd.models.weights import Naming, load_causal_lm, load_config
from opd.rollouts.stepwise import generate_stepwise, prove_cache
from opd.rollouts.worker import EngineOptions, Generated, GenerateRequest, read_model_shape


class TransformersWorker:
    """Owns one model. `load` replaces its weights in place, or loads another model if that cannot be done."""

    def __init__(self, options: EngineOptions, stop_token_ids: Sequence[int]) -> None:
        self._options = options
        self._stop = frozenset(stop_token_ids)
        self._dtype: torch.dtype = getattr(torch, options.dtype)
        self._stream: dict[str, Tensor] | None = None
        """Tensors of the files that have come of new weights; None if none are coming."""
        self._stream_dir = options.model_dir
        """Directory of a model of the shape of the new weights; it has those that do not come."""
        self._stream_whole = True
        self._start_model(options.model_dir)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        """Sample every request; at temperature 0, decode it greedily. Raises: RunError on NaN log-probs."""
        return generate_stepwise(
            self._lm,
            requests,
            vocab_size=self._options.vocab_size,
            stop=self._stop,
            max_num_seqs=self._options.max_num_seqs,
            cached=self._cached,
        )

    @torch.inference_mode()
    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-prob of every token after a sequence's first, at temperature 1, as [sequence][token - 1]."""
        answers = []
        for sequence in sequences:
            ids_T = torch.tensor(sequence, device=self._lm.device)
            logits_T_V = self._lm(input_ids=ids_T[None], use_cache=False).logits[0, :-1, : self._options.vocab_size]
            logprobs_T_V = logits_T_V.float().log_softmax(-1)
            answers.append(logprobs_T_V.gather(-1, ids_T[1:, None])[:, 0].tolist())
        return answers

    def load(self, model_dir: Path, base: Path | None = None) -> None:
        """Hold the weights of this directory. If it has only some of a model's, `base` is the directory with the others."""
        if base is None and read_model_shape(model_dir) != self._shape:
            self._start_model(model_dir)
        else:
            self._copy_tensors((_read_files(base) if base else {}) | _read_files(model_dir))

    def begin_stream(self, model_dir: Path, *, whole: bool) -> None:
        """Prepare for weights that come in buckets until `finish_stream`: all that a model of this directory's shape has, or, unless
        `whole` is true, some of them; then the others are the directory's."""
        self._stream, self._stream_dir, self._stream_whole = {}, model_dir, whole

    def take_bucket(self, bucket: Bucket) -> None:
        """Take the weights of one bucket."""
        assert self._stream is not None
        self._stream |= dict(bucket.tensors())

    def finish_stream(self) -> None:
        """Hold the weights that came. Do nothing if none are coming."""
        if self._stream is None:
            return
        tensors, self._stream = self._stream, None
        if read_model_shape(self._stream_dir) != self._shape:
            self._start_model(self._stream_dir)
        self._copy_tensors(tensors if self._stream_whole else _read_files(self._stream_dir) | tensors)

    def _start_model(self, model_dir: Path) -> None:
        """Load a model, and try whether its cache can be trusted."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._lm: Any = load_causal_lm(model_dir, self._dtype).eval().requires_grad_(False).to(device)
        self._naming = Naming(load_config(model_dir), self._dtype)
        self._shape = read_model_shape(model_dir)
        self._cached = prove_cache(self._lm, self._options.vocab_size)

    def _copy_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Copy the tensors of a model's files into the modules."""
        state, problem = self._naming.from_files(tensors)
        assert not problem, problem  # the trainer writes what the architecture needs
        self._lm.load_state_dict(state, strict=False)  # a tied head is not in the files
        self._lm.tie_weights()


def _read_files(directory: Path) -> dict[str, Tensor]:
    """Return all tensors of a directory's files, memory-mapped."""
    from safetensors import safe_open

    tensors: dict[str, Tensor] = {}
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 it is no mapping
    return tensors
