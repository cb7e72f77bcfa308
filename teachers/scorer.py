"""Scoring by a plain transformers body: the exact hidden states that the teacher's head would turn into logits.

One skeleton per architecture; a teacher's weights are memory-mapped and assigned into it, so a swap costs milliseconds
and memory does not grow with the number of teachers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import safe_open
from torch import Tensor

from opd.errors import RunError
from opd.stream.schema import TargetRow
from opd.train.batch import pack_sequences, predict_positions
from opd.types import Rollout, Teacher

SCORE_TOKENS = 4096
"""Tokens of one forward pass; more does not get faster on a CPU."""


class TransformersScorer:
    """Holds one teacher at a time."""

    def __init__(self, dtype: str) -> None:
        self._dtype = getattr(torch, dtype)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._skeletons: dict[str, Any] = {}
        self._loaded: Teacher | None = None
        self._model: Any = None
        self._head_keys: dict[Path, str] = {}

    def head(self, teacher: Teacher) -> Tensor:
        """[V, D] the teacher's output head, on the CPU."""
        self._load(teacher)
        return self._model.get_output_embeddings().weight.detach().cpu()

    def head_key(self, teacher: Teacher) -> str:
        """BLAKE3 of the head's bytes and type: equal heads have one key."""
        if teacher.model_dir not in self._head_keys:
            head = self.head(teacher).contiguous()
            digest = blake3(str((head.dtype, tuple(head.shape))).encode())
            digest.update(head.view(torch.uint8).numpy().data)
            self._head_keys[teacher.model_dir] = digest.hexdigest()
        return self._head_keys[teacher.model_dir]

    def score(self, teacher: Teacher, rollouts: Sequence[Rollout]) -> Iterator[list[TargetRow]]:
        """Target rows in batches, shortest rows first. Raises: RunError if the teacher's hidden states are not finite."""
        self._load(teacher)
        key = self.head_key(teacher)
        for batch in _batches(rollouts):
            hidden_parts = self._hidden(batch)
            for rollout, hidden_R_D in zip(batch, hidden_parts, strict=True):
                if not bool(torch.isfinite(hidden_R_D).all()):
                    raise RunError(f"teacher {teacher.name}: hidden states of {rollout.sample_id} are not finite")
            yield [_row(r, teacher, key, h) for r, h in zip(batch, hidden_parts, strict=True)]

    @torch.no_grad()
    def _hidden(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """Per rollout [R, D]: the state at the position before each response token, from which it is predicted."""
        packed = pack_sequences([[*r.prompt_ids, *r.response_ids] for r in rollouts])
        spans = [(len(r.prompt_ids), len(r.prompt_ids) + len(r.response_ids)) for r in rollouts]
        out = self._model.base_model(
            input_ids=packed.input_ids_B_T.to(self._device),
            position_ids=packed.position_ids_B_T.to(self._device),
            use_cache=False,
        )
        hidden_N_D = out.last_hidden_state.flatten(0, 1)[predict_positions(packed, spans)].cpu()
        return list(hidden_N_D.split([len(r.response_ids) for r in rollouts]))

    def _load(self, teacher: Teacher) -> None:
        if self._loaded == teacher:
            return
        self._loaded = None  # half-assigned weights must not pass for a teacher if loading fails
        self._model = self._skeleton(teacher.model_dir)
        state = read_weights(teacher.model_dir, self._dtype)
        missing, unexpected = self._model.load_state_dict(state, strict=False, assign=True)
        self._model.tie_weights()
        tied = set(self._model._tied_weights_keys or ()) if self._model.config.tie_word_embeddings else set()
        if set(missing) - tied or unexpected:
            raise RunError(
                f"teacher {teacher.name}: weights do not fit its config: missing {missing[:3]}, unexpected {unexpected[:3]}"
            )
        self._model.to(self._device)
        self._loaded = teacher

    def _skeleton(self, model_dir: Path) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
        key = config.to_json_string(use_diff=False)
        if key not in self._skeletons:
            model = AutoModelForCausalLM.from_config(
                config, dtype=self._dtype, attn_implementation="sdpa", trust_remote_code=False
            )
            self._skeletons[key] = model.eval().requires_grad_(False)
        return self._skeletons[key]


def read_weights(model_dir: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of a directory's safetensors, memory-mapped where they already have `dtype`."""
    state: dict[str, Tensor] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            state.update({name: file.get_tensor(name).to(dtype) for name in file.keys()})  # noqa: SIM118 - not a dict
    return state


def _batches(rollouts: Sequence[Rollout]) -> Iterator[list[Rollout]]:
    batch: list[Rollout] = []
    tokens = 0
    for rollout in sorted(rollouts, key=lambda r: (len(r.prompt_ids) + len(r.response_ids), r.sample_id)):
        length = len(rollout.prompt_ids) + len(rollout.response_ids)
        if batch and tokens + length > SCORE_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(rollout)
        tokens += length
    if batch:
        yield batch


def _row(rollout: Rollout, teacher: Teacher, head_key: str, hidden_R_D: Tensor) -> TargetRow:
    return TargetRow(
        sample_id=rollout.sample_id,
        step=rollout.step,
        domain=rollout.domain,
        teacher=teacher.name,
        policy_version=rollout.policy_version,
        prompt_ids=rollout.prompt_ids,
        response_ids=rollout.response_ids,
        loss_mask=rollout.loss_mask,
        behaviour_logprobs=rollout.behaviour_logprobs,
        head=head_key,
        hidden_size=hidden_R_D.shape[1],
        hidden=hidden_R_D.contiguous().view(torch.uint8).numpy().tobytes(),
    )
