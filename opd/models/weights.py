"""Loading a model, and converting its tensors between two sets of names: those of its files, and those of its modules.

For some architectures the modules of transformers have other tensors than the files: it fuses the experts of a mixture into one
tensor, splits tensors or renames them. This file uses transformers' own conversion in both directions.

    files ──→ Naming.from_files ──→ modules ──→ to_files ──→ files
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from opd.errors import ModelError
from opd.models.varlen import VARLEN, has_varlen_kernel, register_attention

State = dict[str, Tensor]


def whole_shape(param: Any) -> torch.Size:
    """Return the shape of a parameter. One that ZeRO-3 has cut among its ranks is an empty tensor, but keeps its whole shape as
    `ds_shape`."""
    shape: torch.Size = getattr(param, "ds_shape", param.shape)
    return shape


def choose_attention(config: Any, device: torch.device | None = None, dtype: torch.dtype | None = None) -> str:
    """Return the fastest attention that transformers has for an architecture without further packages: `sdpa`, `eager`, or `VARLEN`
    where its kernel runs on `device` in the type `dtype`.

    What the model's files name does not count. Gemma 2 bounds attention scores, which torch's kernel cannot do: with `sdpa`
    transformers would silently leave the bound out.
    """
    if getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None):
        return "eager"
    model_class = find_causal_lm_class(config)
    if model_class is not None and not model_class._supports_sdpa:
        return "eager"
    if device is None or dtype is None or not _attends_fully(config) or not has_varlen_kernel(device, dtype):
        return "sdpa"
    return register_attention()


def obeys_masks(lm: Any) -> bool:
    """Return True if every layer attends to exactly the tokens that a given mask of four dimensions allows.

    Windows, chunks and recurrent states depend on columns or on distance, whatever such a mask says.
    """
    config = lm.config.get_text_config(decoder=True)
    # `eager` obeys a mask where `sdpa` does, so support of `sdpa` is asked for in both cases. `VARLEN` with a mask is `sdpa`.
    kernel_takes_masks = config._attn_implementation in ("sdpa", "eager", VARLEN) and lm._supports_sdpa
    return _attends_fully(config) and kernel_takes_masks and lm.is_backend_compatible() and not lm._is_stateful


def takes_lengths(lm: Any) -> bool:
    """Return True if the model's attention can tell the sequences of a row apart by their lengths, without a mask."""
    return bool(lm.config.get_text_config(decoder=True)._attn_implementation == VARLEN)


def _attends_fully(config: Any) -> bool:
    """Return True if no layer has a window or a chunk."""
    config = config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return set(kinds) == {"full_attention"}
    return not any(getattr(config, key, None) for key in ("sliding_window", "attention_chunk_size", "window_size"))


def load_config(model_dir: Path) -> Any:
    """Load transformers' config of a model directory, without running code from it.

    Raises: ModelError if transformers does not know the architecture, or the config's keys contradict each other.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        return AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
    except (ValueError, StrictDataclassError) as error:
        kind = json.loads((model_dir / "config.json").read_text(encoding="utf-8")).get("model_type")
        raise (
            _make_unusable_config_error(model_dir, error)
            if kind in CONFIG_MAPPING
            else _make_unknown_architecture_error(model_dir, kind)
        ) from None


def find_causal_lm_class(config: Any) -> Any:
    """Return transformers' class of causal language models for a config; None if there is none."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM._model_mapping.get(type(config), None)


def causal_lm_class(model_dir: Path) -> tuple[Any, Any]:
    """Return the config of a directory, and transformers' class of causal language models for it.

    Raises: ModelError if there is no such class; what `load_config` raises.
    """
    config = load_config(model_dir)
    model_class = find_causal_lm_class(config)
    if model_class is None:
        raise _make_unknown_architecture_error(model_dir, config.model_type)
    return config, model_class


@contextmanager
def refuse_unusable_config(model_dir: Path) -> Iterator[None]:
    """Within, transformers makes a model of a directory's config. Raises: ModelError if it cannot."""
    try:
        yield
    except (KeyError, ValueError) as error:
        raise _make_unusable_config_error(model_dir, error) from None


def _make_unknown_architecture_error(model_dir: Path, kind: object) -> ModelError:
    return ModelError.at(
        f"{model_dir / 'config.json'}: model_type",
        found=f"{kind!r}, which transformers has no causal language model for",
        wanted="an architecture of AutoModelForCausalLM",
        fix="take another model, or the version of transformers that knows this one",
    )


def _make_unusable_config_error(model_dir: Path, error: Exception) -> ModelError:
    message = " ".join(str(error).split())
    return ModelError.at(
        model_dir / "config.json",
        found=f"{message}, which transformers does not know" if isinstance(error, KeyError) else message,
        wanted="a config of which transformers can make a model",
        fix="correct the key, or copy the file from the original model",
    )


def load_causal_lm(model_dir: Path, dtype: torch.dtype) -> Any:
    """Load the causal language model of a directory, from safetensors only and without running code from it.

    Raises: ModelError if transformers has no such model for the config; also if the files lack a tensor or have it in another
    shape, where transformers would go on with random numbers.
    """
    from transformers import AutoModelForCausalLM

    config, _ = causal_lm_class(model_dir)
    with refuse_unusable_config(model_dir):
        lm, loading_info = AutoModelForCausalLM.from_pretrained(
            model_dir,
            dtype=dtype,
            attn_implementation=choose_attention(config),
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
        )
    _refuse_random_weights(model_dir, loading_info)
    return lm


def _refuse_random_weights(model_dir: Path, loaded: Mapping[str, Any]) -> None:
    """Refuse a model with tensors that transformers initialised at random, because the files lack them or have other shapes.

    `loaded`: transformers' report about the loading. Raises: ModelError.
    """
    odd = [
        f"{name} of shape {' x '.join(map(str, file_shape))}, config.json calls for {' x '.join(map(str, config_shape))}"
        for name, file_shape, config_shape in sorted(loaded["mismatched_keys"])
    ]
    missing = sorted(loaded["missing_keys"])
    if odd or missing:
        raise ModelError.at(
            model_dir,
            found=odd[0] if odd else f"no weights for {', '.join(missing[:3])}",
            wanted="every tensor that config.json calls for",
            fix="config.json and weights are of two models, or a shard is missing; copy both again",
        )


class Naming:
    """Knows which tensors of the files make which tensors of the modules, for one architecture.

    Create it in the main thread, because transformers changes torch's default type meanwhile. Any thread may use it.
    """

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        """Build the model of a transformers config on the meta device. Raises: ValueError if it has no causal language model."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=choose_attention(config), trust_remote_code=False
            )
        self._dtype = dtype
        self._names = set(self._model.state_dict())
        self._plan = self._model._get_dtype_plan(dtype)
        self._lock = Lock()  # a conversion uses the model as its workspace: one thread at a time

    @property
    def model(self) -> Any:
        """A causal language model of transformers on the meta device."""
        return self._model

    def is_plain(self, names: Collection[str]) -> bool:
        """Return True if tensors with these names need no conversion: the modules have the same names, and no type changes."""
        return self._names.issuperset(names) and not self._plan

    def from_files(self, tensors: Mapping[str, Tensor]) -> tuple[State, str]:
        """Convert tensors of the files to the modules' names and shapes.

        Returns the converted tensors, and a description of those that do not fit; empty if all fit. A tied weight may be
        missing. Tensors that need no conversion and have the right type stay as they are, for example memory-mapped; the
        others are copied.
        """
        from transformers.core_model_loading import convert_and_load_state_dict_in_model

        with self._lock, _hide_progress_bars():
            try:
                loading_info, _ = convert_and_load_state_dict_in_model(
                    self._model, dict(tensors), self._load_config(tensors), disk_offload_index=None
                )
                absent = loading_info.missing_keys | {name for name, *_ in loading_info.mismatched_keys}
                state = {n: t.detach() for n, t in self._model.state_dict().items() if n not in absent}
                return state, self._describe_problem(loading_info)
            finally:
                # The conversion has put the tensors into the model. `state` keeps them; the model must let go of them.
                to_meta(self._model)

    def head_names(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return those of the files' tensor `names` that are the output head, unchanged by conversion.

        If the head is tied to the embedding, the embedding's name comes first.
        """
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        weight = self._model.get_output_embeddings().weight
        heads = {name for name, param in self._model.named_parameters(remove_duplicate=False) if param is weight}
        tied = {source for target, source in self._model.all_tied_weights_keys.items() if target in heads}
        mapping = get_model_conversion_mapping(self._model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        with self._lock:
            model_tensors = self._model.state_dict()
        targets_by_name = {
            n: rename_source_key(n, renamings, converters, self._model.base_model_prefix, model_tensors) for n in names
        }
        unchanged_names = {n: {n, target} for n, (target, pattern) in targets_by_name.items() if pattern is None}
        # The embeddings that a head is tied to come first, then the names of the head itself.
        return tuple(n for group in (tied, heads - tied) for n, aliases in unchanged_names.items() if aliases & group)

    def _load_config(self, tensors: Mapping[str, Tensor]) -> Any:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.modeling_utils import LoadStateDictConfig

        only_shapes = any(tensor.is_meta for tensor in tensors.values())
        return LoadStateDictConfig(
            device_map={"": "meta" if only_shapes else "cpu"},
            dtype=self._dtype,
            dtype_plan=self._plan,
            weight_mapping=get_model_conversion_mapping(self._model),
        )

    def _describe_problem(self, loading_info: Any) -> str:
        """Describe the tensors that do not fit, empty if all do. transformers would only warn, and use random values for them."""
        self._model._adjust_missing_and_unexpected_keys(loading_info)
        missing = sorted(loading_info.missing_keys - set(self._model.all_tied_weights_keys))
        parts = {
            "missing": missing,
            "unexpected": sorted(loading_info.unexpected_keys),
            "of another shape": sorted(name for name, *_ in loading_info.mismatched_keys),
            "not convertible": sorted(loading_info.conversion_errors),
        }
        return ", ".join(f"{problem} {names[:3]}" for problem, names in parts.items() if names)


@contextmanager
def _hide_progress_bars() -> Iterator[None]:
    """Within, transformers shows no progress bar."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def to_meta(model: nn.Module) -> None:
    """Move the model's parameters and persistent buffers to the meta device; buffers that no file holds stay."""
    model.load_state_dict({name: value.to("meta") for name, value in model.state_dict().items()}, assign=True)


@dataclass(frozen=True, slots=True)
class FileGroup:
    """Tensors of a model's modules that are converted to tensors of its files together. Mostly one becomes one."""

    names: tuple[str, ...]
    """Names of the tensors in the modules."""
    target: str
    """Name of the tensor in the files; of the first one, if there are several."""
    conversion: Any = None
    """transformers' object that converts to the files; None if the tensor stays as it is."""
    patterns: tuple[str, ...] = ()
    """For each name, the pattern of the conversion that it fits; empty without a conversion."""

    def to_files(self, model: Any, tensors: Mapping[str, Tensor]) -> State:
        """Return the tensors of the files, which may be views of `tensors`. `tensors`: name in the modules -> tensor."""
        if self.conversion is None:
            return {self.target: tensors[self.names[0]]}
        for name, pattern in zip(self.names, self.patterns, strict=True):
            self.conversion.add_tensor(self.target, name, pattern, tensors[name])
        file_tensors = self.conversion.convert(self.target, model=model, config=model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in file_tensors.items()}


def make_file_groups(model: Any, names: Iterable[str]) -> list[FileGroup]:
    """Divide module tensors with these names into the groups that become tensors of the files, in the order of the files.

    Its result lets a caller convert group by group; `revert_weight_conversion` of transformers needs all tensors at once. The
    conversions are those with which the model was loaded, or its architecture's if it was not loaded from files.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions = _list_conversions(model)
    if conversions is None:
        return [FileGroup((name,), name) for name in names]
    reversed_ = [conversion.reverse_transform() for conversion in conversions[::-1]]
    renamings = [entry for entry in reversed_ if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in reversed_ if isinstance(entry, WeightConverter)]
    converter_of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    parts: dict[str, list[tuple[str, str | None]]] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, reverse=True)
        parts.setdefault(target, []).append((name, pattern))
    groups = []
    for target, members in parts.items():
        module_names, patterns = tuple(name for name, _ in members), tuple(p for _, p in members if p is not None)
        assert len(patterns) in (0, len(module_names)), target
        # A copy for each group, because a conversion collects the tensors that are added to it.
        groups.append(
            FileGroup(module_names, target, deepcopy(converter_of_pattern[patterns[0]]) if patterns else None, patterns)
        )
    return groups


def _list_conversions(model: Any) -> list[Any] | None:
    """Return transformers' conversions of a model's files to its modules: those of its loading, or else its architecture's."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    used: list[Any] | None = getattr(model, "_weight_conversions", None)
    if used is not None:
        return used
    # Some architectures' files have a prefix before all names, others not. Without files we take none.
    every = get_model_conversion_mapping(model, add_legacy=False)
    return [entry for entry in every if not isinstance(entry, PrefixChange)] or None


def to_files(model: Any, state: Mapping[str, Tensor]) -> State:
    """Convert a model's tensors to the names and shapes that its files have.

    Each tensor owns its bytes, because safetensors refuses a tensor that is a part of another one.
    """
    files: State = {}
    for group in make_file_groups(model, state):
        for name, tensor in group.to_files(model, {part: state[part] for part in group.names}).items():
            owns_bytes = tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous()
            files[name] = tensor if owns_bytes else tensor.clone(memory_format=torch.contiguous_format)
    return files


def iterate_persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of the buffers that a model's files have beside its parameters, such as the bias of a router.

    Training does not change them.
    """
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
