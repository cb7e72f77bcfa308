"""Shapes of models from their `config.json` alone: numbers stored, numbers a token passes, bytes of the cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from experts.json_files import read_json, validate_json
from experts.weight_files import weight_tensors
from opd.errors import ModelError
from pipelines.catalog import PLANS
from pipelines.plan.shapes import attention, feed_forward
from pipelines.plan.shapes.attention import grouped_attention, latent_attention
from pipelines.plan.shapes.config import ShapeConfig
from pipelines.plan.shapes.feed_forward import dense_layers, mixture_layers
from pipelines.plan.shapes.shape import Attention, Shape, ShapePart

KINDS: dict[str, tuple[Callable[[ShapeConfig], Attention], Callable[[ShapeConfig], tuple[ShapePart, ...]]]] = {
    "llama": (grouped_attention, dense_layers),
    "mistral": (grouped_attention, dense_layers),
    "qwen2": (grouped_attention, dense_layers),
    "qwen3": (grouped_attention, dense_layers),
    "smollm3": (grouped_attention, dense_layers),
    "phi3": (attention.fused_attention, feed_forward.fused_layers),
    "mixtral": (grouped_attention, mixture_layers),
    "qwen3_moe": (grouped_attention, mixture_layers),
    "deepseek_v3": (latent_attention, mixture_layers),
    "deepseek_v32": (latent_attention, mixture_layers),
    "glm_moe_dsa": (latent_attention, mixture_layers),
}
"""`model_type` -> attention and feed-forward."""
TOLERANCE = 0.01
"""Share by which the formulas may miss what the weight files hold."""


def shape_of(config: ShapeConfig, source: object) -> Shape:
    """The shape that a config describes. Raises: ModelError for a kind without formulas."""
    if config.model_type not in KINDS:
        raise ModelError.at(
            f"{source}: model_type",
            found=config.model_type,
            wanted=f"one of: {', '.join(KINDS)}",
            fix="a plan needs formulas for the architecture: pipelines/plan/shapes/ has them, and a new kind is a few lines there",
        )
    heads, blocks = KINDS[config.model_type]
    return Shape(
        kind=config.model_type,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        tied=config.tie_word_embeddings,
        context=config.max_position_embeddings,
        attention=heads(config),
        feed_forward=blocks(config),
    )


def locate_file(model_dir: Path, name: str = "config.json") -> Path:
    """A file of a model directory; where the directory is not there, that of the shipped shape of the same relative path."""
    shipped = PLANS / model_dir / name
    return shipped if not model_dir.exists() and not model_dir.is_absolute() and shipped.is_file() else model_dir / name


def read_config(model_dir: Path) -> ShapeConfig:
    """The config of a model directory, or of the shipped shape. Raises: ModelError without a config.json, or for a bad one."""
    file = locate_file(model_dir)
    if not file.is_file():
        raise ModelError.at(
            file,
            found="no such file",
            wanted="the model's configuration: a plan needs nothing else of a model",
            fix="copy config.json from the original model, or make the model first",
        )
    data = read_json(file)
    text = data.get("text_config")
    return validate_json(ShapeConfig, {**text, **data} if isinstance(text, dict) else data, file)


def read_shape(model_dir: Path) -> Shape:
    """The shape of a model directory, checked against its weights where they are there.

    Raises: as `read_config`; ModelError for a kind without formulas, or if the formulas miss what the files hold.
    """
    file = locate_file(model_dir)
    shape = shape_of(read_config(model_dir), file)
    if any(model_dir.glob("*.safetensors")):
        stored = sum(tensor.numel for tensor in weight_tensors(model_dir).values())
        if abs(stored - shape.parameters) > TOLERANCE * stored:
            raise ModelError.at(
                file,
                found=f"{shape.parameters:,} parameters by the formulas of {shape.kind}, {stored:,} in the weight files",
                wanted="numbers that agree within 1 %",
                fix="look for a key of the config that pipelines/plan/shapes/ does not read",
            )
    return shape
