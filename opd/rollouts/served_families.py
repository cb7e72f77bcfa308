"""Find out which models the installed vLLM can serve. This reads vLLM's source, because importing it would take seconds and a process of
its own.

Limits that the source does not show were found by trying a tiny model of each family. vLLM itself would refuse such a model only later,
in a worker.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

REGISTRY = "model_executor/models/registry.py"
ENGINE_ARGUMENTS = "engine/arg_utils.py"
CPU_ATTENTION = "v1/attention/backends/cpu_attn.py"
CPU_LATENT_ATTENTION = "v1/attention/backends/mla/cpu_mla.py"
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "longcat_flash", "minicpm3")
"""Families with latent attention: a token's keys and values for all heads are one vector of `kv_lora_rank` + `qk_rope_head_dim` numbers."""
CPU_LATENT = "CPU_MLA"
"""vLLM's name for its latent attention on a CPU. On cores with AMX it would by itself take another one, which has no float32 and works
with packed copies of weights."""
SPARSE = ("glm_moe_dsa", "deepseek_v32")
"""Families with sparse attention. Here and below a family is the `model_type` of a config.json."""
GATED_DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")
"""Families with gated delta layers, a linear attention."""
MAMBA_1 = ("jamba", "mamba", "falcon_mamba")
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers, as `layer_types` names them, that vLLM can run inside transformers' own modules."""
DRAFTED = ("llama", "mistral", "qwen2", "qwen3", "granite", "apertus")
"""Families whose inner states vLLM gives to a draft, and whose states there are those of transformers, as a test shows for each."""
WITH_IMAGES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")
"""Families whose code in vLLM imports torchvision, for text too."""

DIVIDED = (
    "num_attention_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "mamba_n_heads",
    "mamba_num_heads",
)
"""Keys of config.json whose numbers vLLM divides by the number of processes, so that they have to be multiples of it."""

HF_FORMAT = {"load_format": "hf", "config_format": "hf"}
"""Arguments that keep an engine to the files that `opd.models.files.weight_files` names. By itself vLLM would take `consolidated.safetensors`
and params.json where a directory has them beside Hugging Face's files, as Mistral publishes its models."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reason for which vLLM cannot serve a model, or not with a setting; the parts of an error message about it."""

    key: str
    """The key of config.json, or the setting, that is the reason."""
    found: str
    wanted: str
    fix: str


def find_refusal(config: Any, architecture: str, dtype: str, cpu: bool) -> Refusal | None:
    """Return the first known reason why an engine would not start, or would be wrong; None if there is none. `config` is a config object
    of transformers."""
    text = config.get_text_config(decoder=True)
    checks: list[Callable[[], Refusal | None]] = [
        lambda: _find_unknown_architecture(architecture, text),
        lambda: _find_missing_torchvision(text),
        lambda: _find_norm_before_gate(text),
    ]
    if cpu:
        checks += [
            lambda: _find_sparse_attention(text),
            lambda: _find_mamba_1(text),
            lambda: _find_gated_delta(text, dtype),
            lambda: _find_wrong_head_size(text),
        ]
    return next((refusal for check in checks if (refusal := check()) is not None), None)


def _find_unknown_architecture(architecture: str, text: Any) -> Refusal | None:
    served = _served_architectures()
    if not served or architecture in served or _falls_back(architecture, text):
        return None
    return Refusal(
        "architectures",
        found=f"{architecture}, which the installed vLLM does not serve",
        wanted="an architecture of vLLM's registry, or of transformers with attention that vLLM can replace",
        fix="take another model, or a version of vLLM that knows this one",
    )


def _falls_back(architecture: str, text: Any) -> bool:
    """Return True if vLLM would run transformers' own modules with its attention in them. It cannot if layers are recurrent."""
    if not set(getattr(text, "layer_types", None) or ()) <= ATTENTION:
        return False
    import transformers

    model_class = getattr(transformers, architecture, None)
    recurrent = model_class is not None and getattr(model_class, "_is_stateful", False)
    return model_class is not None and not recurrent and bool(model_class.is_backend_compatible())


def _find_missing_torchvision(text: Any) -> Refusal | None:
    if text.model_type not in WITH_IMAGES or importlib.util.find_spec("torchvision") is not None:
        return None
    return Refusal(
        "model_type",
        found=f"{text.model_type}, whose code in vLLM imports torchvision, which is not installed",
        wanted="torchvision of the same build as torch",
        fix="install it; beside a CPU build of torch the one for CUDA breaks every transformers model",
    )


def _find_norm_before_gate(text: Any) -> Refusal | None:
    if text.model_type != "falcon_h1" or not (text.mamba_rms_norm and text.mamba_norm_before_gate):
        return None
    return Refusal(
        "mamba_norm_before_gate",
        found="a norm before the gate of the Mamba layers, which vLLM computes after it whatever the config says",
        wanted="false, or mamba_rms_norm: false",
        fix="take another model: vLLM would write with other probabilities than this one has",
    )


def _find_mamba_1(text: Any) -> Refusal | None:
    if text.model_type not in MAMBA_1:
        return None
    return Refusal(
        "model_type",
        found=f"{text.model_type}: vLLM's CPU build has no kernel for Mamba-1 layers",
        wanted="an architecture with attention, Mamba-2 or gated delta layers",
        fix="run the rollouts on a GPU: set cluster.rollout_gpus",
    )


def _find_sparse_attention(text: Any) -> Refusal | None:
    if text.model_type not in SPARSE:
        return None
    return Refusal(
        "model_type",
        found=f"{text.model_type}: vLLM's CPU build has no sparse attention",
        wanted="an architecture with attention to all tokens or to a window",
        fix="run the rollouts on a GPU: set cluster.rollout_gpus",
    )


def _find_gated_delta(text: Any, dtype: str) -> Refusal | None:
    if text.model_type not in GATED_DELTA or dtype == "bfloat16":
        return None
    return Refusal(
        "model_type",
        found=f"{text.model_type}, to be served in {dtype}",
        wanted="bfloat16: vLLM's CPU build has no other linear attention for it",
        fix="set rollout.dtype (of teachers in vLLM: teachers.dtype) to bfloat16",
    )


def _find_wrong_head_size(text: Any) -> Refusal | None:
    latent = text.model_type in LATENT
    sizes = _supported_sizes(CPU_LATENT_ATTENTION if latent else CPU_ATTENTION)
    if latent:
        key, size = "kv_lora_rank + qk_rope_head_dim", text.kv_lora_rank + text.qk_rope_head_dim
    else:
        heads = getattr(text, "num_attention_heads", None) or 0
        key, size = "head_dim", getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
    if not sizes or not size or size in sizes:
        return None
    return Refusal(
        key,
        found=f"attention heads of {size}",
        wanted=f"one of {', '.join(map(str, sizes))}, the sizes that vLLM's CPU build has",
        fix="run the rollouts on a GPU (cluster.rollout_gpus), or take a model with such heads",
    )


def find_indivisible_part(config: Any, size: int, key: str) -> Refusal | None:
    """Return the refusal of the first part of a model that `size` processes cannot divide; None if they can divide all. `config` is a
    config object of transformers, `key` the pipeline's key for the number of processes. vLLM itself would refuse such a model only
    later, in these processes."""
    text = config.get_text_config(decoder=True)
    for name in DIVIDED:
        part_size = getattr(text, name, None)
        if isinstance(part_size, int) and part_size % size:
            return _refuse_division(name, part_size, f"a multiple of {key} {size}", key)
    heads = getattr(text, "num_key_value_heads", None)
    # If there are fewer of these heads than processes, several processes hold the same head, so the number may also be a divisor.
    if isinstance(heads, int) and heads and max(heads, size) % min(heads, size):
        return _refuse_division("num_key_value_heads", heads, f"a multiple or a divisor of {key} {size}", key)
    return None


def _refuse_division(name: str, part_size: int, requirement: str, key: str) -> Refusal:
    wanted = f"{requirement}, so that its processes can divide them"
    return Refusal(name, found=str(part_size), wanted=wanted, fix=f"change {key}")


@cache
def _served_architectures() -> frozenset[str]:
    """Return all architectures in the tables of vLLM's registry for models that write text; empty without vLLM."""
    tables = {"_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS"}
    architectures: set[str] = set()
    for node in ast.walk(_parse_vllm_file(REGISTRY)):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Dict):
            continue
        if any(isinstance(target, ast.Name) and target.id in tables for target in node.targets):
            architectures |= {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
    return frozenset(architectures)


@cache
def engine_arguments() -> frozenset[str]:
    """Return the names of all arguments that an engine takes; empty without vLLM."""
    names: set[str] = set()
    for node in ast.walk(_parse_vllm_file(ENGINE_ARGUMENTS)):
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            fields = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
            names |= {field.id for field in fields if isinstance(field, ast.Name) and not field.id.startswith("_")}
    return frozenset(names)


@cache
def _supported_sizes(file: str) -> tuple[int, ...]:
    """Return the sizes of attention heads that a backend's file of vLLM names; empty without vLLM, or if it names none."""
    for node in ast.walk(_parse_vllm_file(file)):
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes":
            answers = [part.value for part in node.body if isinstance(part, ast.Return) and part.value is not None]
            return tuple(ast.literal_eval(answers[0]))
    return ()


def _parse_vllm_file(file: str) -> ast.Module:
    """Return the syntax tree of a file of the installed vLLM; an empty one without vLLM, or if this version has no such file."""
    spec = importlib.util.find_spec("vllm")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    paths = [Path(folder) / file for folder in folders]
    text = next((path.read_text(encoding="utf-8") for path in paths if path.is_file()), "")
    return ast.parse(text)
