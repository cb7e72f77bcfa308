"""Scoring with plain transformers models: the exact hidden states that a teacher's head would turn into logits.

Each architecture has one skeleton, a model without weights. A teacher's weights are memory-mapped and assigned to it, so a
swap takes milliseconds, and memory does not grow with the number of teachers (see `teachers.weights`). A LoRA expert is
its base with hooks on the linear modules that the adapter changes. A swap between two adapters of the same base changes
only the hooks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from opd.errors import RunError
from opd.machine.devices import to_device
from opd.machine.imports import TRANSFORMERS, import_lightly
from opd.models.heads import HeadFile, head_key, logit_rule
from opd.models.layouts import LAYOUTS, Packed, find_positions_before_trained, layout_error, prove_layout
from opd.models.linear_kernels import use_quick_products
from opd.models.logit_rule import LogitRule
from opd.models.lora import ADAPTER_CONFIG, LoraConfig, attach_updates, find_nonlinear_modules, read_updates
from opd.models.packing import SHARED
from opd.models.weights import Naming, choose_attention, obeys_masks, takes_lengths, to_meta
from opd.payloads import answer_class
from opd.payloads.answer import Answer, TeacherStates
from opd.records.types import EncodedRollout, LayoutProof, Rollout, Teacher
from opd.stream.schema import TargetRow
from opd.vocabularies.spelling import build_tables
from teachers.device_cache import DeviceCache
from teachers.scorers import SCORE_TOKENS, ScorerOptions
from teachers.scorers.division import DeviceName, Division, measure_free_memory, remove_hooks
from teachers.scorers.rows import split_batches
from teachers.weight_keys import base_key, weight_key
from teachers.weights import State, WeightCache, read_tensors, weights_nbytes


class TransformersScorer:
    """Implements `opd.interfaces.Scorer`; one teacher is in a skeleton at a time."""

    def __init__(self, options: ScorerOptions, device: str | None = None) -> None:
        """`device` is a name such as `cuda` or `cpu`; by default the GPU, if there is one."""
        import_lightly(TRANSFORMERS)  # early, while other workers start, instead of when the first teacher is loaded
        self._dtype = getattr(torch, options.dtype)
        self._answer_class = answer_class(options.payload)
        self._top_k = options.top_k
        self._vocab_size = options.vocab_size
        self._spellings = options.spellings
        self._share = options.share_prompts
        self._lends_memory = options.lends_memory
        self._weights = WeightCache(self._dtype, options.memory_bytes, self._read_state, self._measure_state)
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._batches_ahead = 1 if self._device.type == "cuda" else 0
        """Batches that are computed before the rows of one are made, so that a GPU need not wait for the CPU."""
        self._device_cache = DeviceCache(self._device, options.gpu_memory_bytes)
        self._is_divided = options.device_map is not None
        self._max_memory: dict[DeviceName, int] = dict(options.max_memory)
        self._architectures: dict[str, _Architecture] = {}
        """Key: the config as JSON."""
        self._architecture_of: dict[Path, _Architecture] = {}
        """Key: directory of a full model or of an adapter's base."""
        self._loaded_key = ""
        """`weight_key` of the teacher that `self._model` computes now; empty if none is loaded completely."""
        self._loaded_base = ""
        """`base_key` of the weights that `self._model` holds; empty if none are loaded completely."""
        self._hooks: list[RemovableHandle] = []
        self._model: Any = None
        self._head_keys: dict[str, str] = {}

    def prefetch(self, teacher: Teacher) -> None:
        """Begin to map and read the teacher's weights in a thread, and to copy them to a GPU with room for them; returns at once."""
        self._get_architecture(teacher.model_dir)  # here, because the reading thread only looks it up
        if teacher.adapter_dir or self._device_cache.find(base_key(teacher)) is None:
            self._weights.prefetch(teacher)
            reading = self._weights.find_base(teacher)
            if reading is not None and not self._is_divided:
                self._device_cache.copy_ahead(base_key(teacher), *reading)

    def head(self, teacher: Teacher) -> Tensor:
        """Return the teacher's output head, [V, D] on the CPU, in the teacher's own ids."""
        self._load_teacher(teacher)
        return self._read_head_weight().cpu()

    def _count_ids(self, teacher: Teacher) -> int:
        """Return the number of ids that the teacher's tokenizer knows."""
        spelling = self._spellings.get(teacher.name)
        return self._vocab_size if spelling is None else len(spelling.tokens)

    def _read_head_weight(self) -> Tensor:
        """Return the head of the loaded teacher, [V, D] on the device that multiplies with it."""
        from accelerate.utils import align_module_device

        head = self._model.get_output_embeddings()
        with align_module_device(head):  # moves the head there if a divided teacher keeps it elsewhere
            weight: Tensor = head.weight.detach()
        return weight

    def head_key(self, teacher: Teacher) -> str:
        """Return the BLAKE3 hash of the head's bytes, type, logit rule and spelling. Equal heads have equal keys.

        Raises: RunError if the head is not finite, or if head and rule do not give the logits that the model gives.
        """
        weights = weight_key(teacher)
        if weights not in self._head_keys:
            head = self.head(teacher)
            self._check_head(teacher)
            spelling = self._spellings.get(teacher.name)
            tables = None if spelling is None else build_tables(spelling).pack()
            self._head_keys[weights] = head_key(head, logit_rule(self._model.config), tables)
        return self._head_keys[weights]

    def head_file(self, teacher: Teacher) -> HeadFile | None:
        """Return the file that holds the head; None where its key is that of a spelling, too. For an adapter it is a file of the base,
        because adapters of heads are refused."""
        if teacher.name in self._spellings:
            return None
        names = self._get_architecture(teacher.model_dir).naming.head_names(read_tensors(teacher.model_dir))
        return HeadFile(teacher.model_dir.absolute(), names, str(self._dtype).removeprefix("torch."))

    def head_rule(self, teacher: Teacher) -> LogitRule:
        """Return what the teacher's architecture does to its logits."""
        self._load_teacher(teacher)
        return logit_rule(self._model.config)

    def layout(self, teacher: Teacher) -> LayoutProof:
        """Return how rows are laid out for the teacher's architecture. The layout is proven with the first such teacher.

        Raises: RunError if in every layout the rows of a batch influence each other.
        """
        self._load_teacher(teacher)
        architecture = self._get_architecture(teacher.model_dir)
        proof = architecture.proof
        if proof is None:
            model = self._model

            def measure_error(layout: str) -> float:
                return layout_error(
                    self._compute_states,
                    layout,
                    self._count_ids(teacher),
                    self._dtype,
                    masks_decide=obeys_masks(model),
                    lengths_decide=takes_lengths(model),
                )

            proof = prove_layout(
                measure_error, f"teacher {teacher.name}", share=self._share, varlen=self._device.type == "cuda"
            )
            if proof.proven:  # nothing is proven by a teacher whose states are not finite
                architecture.proof = proof
        return proof

    @torch.no_grad()
    def _check_head(self, teacher: Teacher) -> None:
        """Compare the logits of head and rule with the model's own on a few tokens. Raises: RunError if they differ.

        They differ for architectures that add a bias to their logits, or scale them in a way that `LogitRule` lacks.
        """
        vocab_size = self._count_ids(teacher)  # without padding rows, whose logits are never used
        head_V_D = self._read_head_weight()[:vocab_size]
        if not bool(torch.isfinite(head_V_D).all()):
            raise RunError(f"teacher {teacher.name}: output head is not finite")
        ids_B_T = torch.arange(min(8, vocab_size), device=self._device)[None]
        model_T_V = self._model(input_ids=ids_B_T, use_cache=False).logits[0, :, :vocab_size].float()
        hidden_T_D = self._model.base_model(input_ids=ids_B_T, use_cache=False).last_hidden_state[0]
        computed_T_V = logit_rule(self._model.config).apply(hidden_T_D.to(head_V_D.device) @ head_V_D.T).float()
        computed_T_V = computed_T_V.to(model_T_V.device)
        worst, size = (computed_T_V - model_T_V).abs().max(), model_T_V.abs().max()
        # The comparison is False for NaN: `score` reports each row whose hidden states are not finite.
        if bool(worst > 0.02 * size) or self._has_bias(vocab_size):
            raise RunError(
                f"teacher {teacher.name}: {type(self._model).__name__} computes its logits otherwise than by head, "
                "factor and soft-cap; such a teacher is not supported"
            )

    def _has_bias(self, vocab_size: int) -> bool:
        """Return True if the loaded head adds a bias to the logits. A bias can be too small for the comparison of logits."""
        from accelerate.utils import align_module_device

        head = self._model.get_output_embeddings()
        with align_module_device(head):
            bias = getattr(head, "bias", None)
            return bias is not None and bool((bias[:vocab_size] != 0).any())

    def score(self, teacher: Teacher, rollouts: Sequence[Rollout], broken: dict[str, str]) -> Iterator[list[TargetRow]]:
        """Return an iterator over target rows in batches, shortest rows first. The teacher is loaded when this returns.

        A response whose hidden states are not finite gets no row but an entry in `broken`: sample id -> reason.
        """
        self._load_teacher(teacher)
        return self._score_batches(teacher, rollouts, broken)

    def _score_batches(
        self, teacher: Teacher, rollouts: Sequence[Rollout], broken: dict[str, str]
    ) -> Iterator[list[TargetRow]]:
        layout = self.layout(teacher).layout
        computed: deque[tuple[list[Rollout], _HostStates]] = deque()
        for batch in split_batches(rollouts, SCORE_TOKENS, share=layout == SHARED):
            self._load_teacher(teacher)  # between two batches the caller may have asked another teacher for its head
            computed.append((batch, self._compute_trained_states(batch, layout)))
            if len(computed) > self._batches_ahead:
                yield self._make_rows(teacher, *computed.popleft(), layout, broken)
        while computed:
            yield self._make_rows(teacher, *computed.popleft(), layout, broken)
        if self._lends_memory:  # to the rollout engine, which wakes up on this GPU when scoring is done
            torch.cuda.empty_cache()

    def _make_rows(
        self, teacher: Teacher, batch: Sequence[Rollout], states: _HostStates, layout: str, broken: dict[str, str]
    ) -> list[TargetRow]:
        """Make the rows of a batch from its states."""
        key, rows, hidden_states = self.head_key(teacher), [], states.wait()
        self._load_teacher(teacher)
        finite = _is_finite(torch.cat(hidden_states))
        for rollout, hidden_N_D in zip(batch, hidden_states, strict=True):
            if not finite and not _is_finite(hidden_N_D):
                # Compute the row alone: its NaNs may come from a neighbour, because masking multiplies by 0 and
                # 0 * NaN is NaN.
                (hidden_N_D,) = self._compute_trained_states([rollout], layout).wait()
            if finite or _is_finite(hidden_N_D):
                answer = self._build_answer(teacher, rollout, hidden_N_D, key)
                rows.append(TargetRow(rollout=rollout, teacher=teacher.name, answer=answer))
            else:
                broken[rollout.sample_id] = f"teacher {teacher.name}: hidden states are not finite"
        return rows

    @torch.no_grad()
    def _build_answer(self, teacher: Teacher, rollout: Rollout, hidden_N_D: Tensor, head: str) -> Answer:
        """Build the answer of a teacher, which is loaded, for one row from its states [N, D]; `head` is the key of the teacher's head."""
        encoded = rollout if isinstance(rollout, EncodedRollout) else None

        def compute_logprobs() -> Tensor:
            head_V_D = self._read_head_weight()[: self._count_ids(teacher)]
            logits_N_V = logit_rule(self._model.config).apply(hidden_N_D.to(head_V_D.device) @ head_V_D.T)
            return logits_N_V.float().log_softmax(-1).cpu()

        return self._answer_class.of_states(
            TeacherStates(
                token_ids=rollout.trained_ids,
                hidden_N_D=hidden_N_D,
                head=head,
                logprobs=compute_logprobs,
                top_k=self._top_k,
                sampled_ids=None if encoded is None else encoded.sampled.response_ids,
                alignment=None if encoded is None else encoded.alignment,
                # The tokens of a probe are the teacher's own; there is no text of the student's to compare with.
                spelling=None if encoded is None else self._spellings.get(teacher.name),
            )
        )

    @torch.no_grad()
    def _compute_trained_states(self, rollouts: Sequence[Rollout], layout: str) -> _HostStates:
        """Compute for each rollout the states that predict its trained tokens, [N, D]: those one position before them.

        On a GPU this returns before they are computed.
        """
        packed = LAYOUTS[layout]([[*r.prompt_ids, *r.response_ids] for r in rollouts])
        positions = find_positions_before_trained(packed, rollouts)
        if not self._is_divided:  # nobody knows on which device a divided teacher's states are
            positions = positions.to(self._device)  # before the pass, because such a copy waits for what a GPU computes
        hidden_N_D = self._compute_states(packed)[positions]
        return _HostStates.copy(hidden_N_D, [r.num_trained for r in rollouts])

    @torch.no_grad()
    def _compute_states(self, packed: Packed) -> Tensor:
        """Return the last hidden states of the loaded teacher, [B*T, D]."""
        inputs = to_device(packed, self._device).inputs(self._dtype)
        return self._model.base_model(**inputs).last_hidden_state.flatten(0, 1)

    def _load_teacher(self, teacher: Teacher) -> None:
        if self._loaded_key == weight_key(teacher):
            return
        self._loaded_key = ""  # so that after a failure a half-loaded teacher does not count as loaded
        while self._hooks:
            self._hooks.pop().remove()
        architecture = self._get_architecture(teacher.model_dir)
        if self._loaded_base != base_key(teacher):
            self._loaded_base = ""
            in_memory = self._device_cache.find(base_key(teacher)) is not None or self._weights.has(teacher)
            reuses_skeleton = self._model is architecture.skeleton and architecture.tensor_modules and in_memory
            if self._model is not None and not reuses_skeleton:
                remove_hooks(self._model)
                to_meta(self._model)  # else two teachers would be in memory while the next one is read
        base, *adapters = self._read_tensors(teacher)
        if not self._loaded_base:
            self._model = architecture.skeleton
            self._assign_weights(teacher, base)
        for adapter in adapters:
            self._attach_adapter(teacher, adapter)
        self._loaded_key = weight_key(teacher)

    def _read_tensors(self, teacher: Teacher) -> list[State]:
        """Return the tensors of the (base) model, then those of the adapter if it has one. Raises: RunError."""
        if teacher.adapter_dir is None and (cached := self._device_cache.find(base_key(teacher))):
            return [cached]
        try:
            return self._weights.get(teacher)
        except RunError as error:
            raise RunError(f"teacher {teacher.name}: {error}") from None

    def _copy_to_device(self, teacher: Teacher, state: State) -> State:
        """Return the tensors on the device that computes. Only for architectures that are not divided."""
        if not self._device_cache.has_room_for(base_key(teacher), state):
            to_meta(self._model)  # else the model would keep the previous teacher on the GPU, beyond the budget
        return self._device_cache.copy_to_device(base_key(teacher), state)

    def _assign_weights(self, teacher: Teacher, state: State) -> None:
        architecture = self._get_architecture(teacher.model_dir)
        if architecture.division is None:
            state = self._copy_to_device(teacher, state)
        if architecture.replace_tensors(state):
            self._loaded_base = base_key(teacher)
            return
        missing, unexpected = self._model.load_state_dict(state, strict=False, assign=True)
        self._model.tie_weights()
        division = architecture.division
        on_disk = division.on_disk if division else frozenset()
        missing = [name for name in missing if name not in self._model.all_tied_weights_keys and name not in on_disk]
        if missing or unexpected:
            raise RunError(
                f"teacher {teacher.name}: weights do not fit its config: missing {missing[:3]}, unexpected {unexpected[:3]}"
            )
        if division is None:
            self._model.to(self._device)  # moves the buffers, which are in no file
            architecture.note_modules(state)
        else:
            try:
                division.dispatch(self._model, teacher.model_dir, self._dtype)
            except RunError as error:
                raise RunError(f"teacher {teacher.name}: {error}") from None
        self._loaded_base = base_key(teacher)

    def _attach_adapter(self, teacher: Teacher, state: State) -> None:
        """Attach hooks that add the adapter's change to each module's output. Raises: RunError for a module that is not linear."""
        assert teacher.adapter_dir is not None
        config = LoraConfig.model_validate_json((teacher.adapter_dir / ADAPTER_CONFIG).read_bytes())
        changes = read_updates(config, state)
        unsupported = find_nonlinear_modules(self._model, changes)
        if unsupported:
            raise RunError(
                f"teacher {teacher.name}: its adapter changes {unsupported[0]}, which is no linear module of "
                f"{type(self._model).__name__} in transformers; merge it into a full model"
            )
        division = self._get_architecture(teacher.model_dir).division
        devices = {name: division.find_device(name) if division else self._device for name in changes}
        self._hooks = attach_updates(self._model, {name: change.to(devices[name]) for name, change in changes.items()})

    def _read_state(self, directory: Path, dtype: torch.dtype) -> State:
        """Return a directory's tensors, without those that stay on disk.

        A model's tensors have the names that transformers' modules use; an adapter's have the names of its file. Raises:
        RunError if the names or shapes do not fit the model's config.
        """
        tensors, architecture = read_tensors(directory), self._architecture_of.get(directory)
        on_disk = self._names_on_disk(directory)
        if architecture is None or architecture.naming.is_plain(tensors):
            return {name: tensor.to(dtype) for name, tensor in tensors.items() if name not in on_disk}
        if on_disk:
            raise RunError(
                "transformers names, or joins, its weights otherwise than the files do, so none can stay on disk: raise what "
                "teachers.max_memory has for GPUs and cpu"
            )
        state, problem = architecture.naming.from_files(tensors)
        if problem:
            raise RunError(f"weights do not fit its config: {problem}")
        return state

    def _measure_state(self, directory: Path, dtype: torch.dtype) -> int:
        """Return how many bytes the tensors that `_read_state` returns take."""
        return weights_nbytes(directory, dtype, self._names_on_disk(directory))

    def _names_on_disk(self, directory: Path) -> frozenset[str]:
        architecture = self._architecture_of.get(directory)
        return (
            architecture.division.on_disk
            if architecture is not None and architecture.division is not None
            else frozenset()
        )

    def _get_architecture(self, model_dir: Path) -> _Architecture:
        if model_dir not in self._architecture_of:
            config, key = _read_config(model_dir)
            if key not in self._architectures:
                skeleton = _build_skeleton(config, self._dtype, None if self._is_divided else self._device)
                try:
                    division = self._divide_layers(skeleton) if self._is_divided else None
                except RunError as error:
                    raise RunError(f"{model_dir}: {error}") from None
                if not division:
                    use_quick_products(skeleton, self._device)
                self._architectures[key] = _Architecture(Naming(config, self._dtype), skeleton, division)
            self._architecture_of[model_dir] = self._architectures[key]
        return self._architecture_of[model_dir]

    def _divide_layers(self, skeleton: Any) -> Division:
        main: DeviceName = 0 if self._device.type == "cuda" else "cpu"
        # Free memory is measured once, before any teacher is loaded. Without `max_memory`, layers go to the CPU only if
        # there is no GPU.
        if not self._max_memory:
            self._max_memory = {
                device: size for device, size in measure_free_memory().items() if (device == "cpu") == (main == "cpu")
            }
        return Division.from_skeleton(skeleton, self._max_memory, main)


def _is_finite(states: Tensor) -> bool:
    return bool(torch.isfinite(states).all())


@dataclass(frozen=True, slots=True)
class _HostStates:
    """States of a batch on their way to the CPU."""

    states: tuple[Tensor, ...]
    """For each rollout [N, D]. On the way from a GPU they lie in pinned memory, to which a GPU copies while it and the CPU go on."""
    copied: torch.cuda.Event | None
    """Comes when they are there; None if they are."""

    @classmethod
    def copy(cls, hidden_N_D: Tensor, lengths: Sequence[int]) -> _HostStates:
        """Begin to copy the states of rollouts with these numbers of trained tokens."""
        if hidden_N_D.device.type != "cuda":
            return cls(hidden_N_D.split(lengths), None)
        host_N_D = torch.empty(hidden_N_D.shape, dtype=hidden_N_D.dtype, pin_memory=True)
        host_N_D.copy_(hidden_N_D, non_blocking=True)
        return cls(host_N_D.split(lengths), torch.cuda.current_stream(hidden_N_D.device).record_event())

    def wait(self) -> tuple[Tensor, ...]:
        """Return the states, once they are there."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.states


@dataclass(slots=True)
class _Architecture:
    """Common parts of teachers with equal configs."""

    naming: Naming
    skeleton: Any
    """A causal language model of transformers without weights. The weights of one teacher at a time are assigned to it."""
    division: Division | None = None
    """The devices of its layers; None: all layers are on one device."""
    proof: LayoutProof | None = None
    """The layout of its rows, once proven with a teacher whose states are finite."""
    tensor_modules: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)
    """Name of a tensor -> the module that holds it as a parameter, and the parameter's name there. It is filled when the
    first teacher was loaded, and then allows `replace_tensors`. It stays empty if any tensor is not a parameter."""

    def note_modules(self, state: State) -> None:
        """Fill `tensor_modules` from the teacher that has just been loaded into the skeleton, if all tensors are parameters."""
        split = {name: name.rpartition(".") for name in state}
        modules = {
            name: (self.skeleton.get_submodule(module), tensor_name) for name, (module, _, tensor_name) in split.items()
        }
        if all(tensor_name in module._parameters for module, tensor_name in modules.values()):
            self.tensor_modules = modules

    def replace_tensors(self, state: State) -> bool:
        """Replace the loaded teacher's tensors by those of another teacher. Returns False, with nothing changed, if names or
        shapes differ or `tensor_modules` is empty.

        It is a shortcut: for a tiny model `load_state_dict` takes as long as scoring a few hundred tokens.
        """
        if not self.tensor_modules or state.keys() != self.tensor_modules.keys():
            return False
        if any(
            module.get_parameter(tensor_name).shape != state[name].shape
            for name, (module, tensor_name) in self.tensor_modules.items()
        ):
            return False
        for name, (module, tensor_name) in self.tensor_modules.items():
            module._parameters[tensor_name] = nn.Parameter(state[name], requires_grad=False)
        self.skeleton.tie_weights()
        return True


def _build_skeleton(config: Any, dtype: torch.dtype, device: torch.device | None) -> Any:
    """Build a model without weights. `device`: where all of it will compute; None: its layers will be on several."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=choose_attention(config, device, dtype),
            trust_remote_code=False,
        )
    return model.eval().requires_grad_(False)


def _read_config(model_dir: Path) -> tuple[Any, str]:
    """Return a model's config, and its content as text, which is equal for all models of one architecture."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
    # They say where the model is from, not what it computes.
    config.name_or_path, config.transformers_version = ("", None)
    return config, config.to_json_string(use_diff=False)
