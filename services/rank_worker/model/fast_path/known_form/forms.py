"""Recognizes decoder layers of a known form by their modules and shapes, never by a family's name.

What a module computes cannot be seen from outside. The proof (`proof`) finds, for example, another
activation or a scaled residual.
"""

import dataclasses
from typing import Any

from mlx import nn

from services.rank_worker.kv_cache.rows.block_layout import BlockPart
from services.rank_worker.model.fast_path.gated_mlp import has_gated_matrices
from services.rank_worker.model.fast_path.known_form.attention.head_attention import read_heads
from services.rank_worker.model.fast_path.known_form.attention.interface import (
    AttentionForm,
    as_rms_norm,
    is_linear_like,
)
from services.rank_worker.model.fast_path.known_form.attention.latent_attention import read_latents
from services.rank_worker.model.fast_path.known_form.rotation import Rotation
from services.rank_worker.model.fast_path.unknown_form import UnknownForm

_BLOCK = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


@dataclasses.dataclass(frozen=True, slots=True)
class LayerForm:
    """The modules of one decoder layer `h = x + attention(norm(x)); h + mlp(norm(h))`."""

    attention: AttentionForm
    mlp: Any
    has_gated_mlp: bool
    """`mlp` has gate_proj, up_proj and down_proj of equal kind; otherwise it is called as it is."""
    input_norm: nn.RMSNorm
    mlp_norm: nn.RMSNorm


@dataclasses.dataclass(frozen=True, slots=True)
class StackForm:
    """The modules of a model without its head."""

    embedding: Any
    layers: list[LayerForm]
    norm: nn.RMSNorm


def read_form(inner: nn.Module, parts: list[list[BlockPart]]) -> StackForm:
    """Recognize a model without its head.

    Args:
        inner: the module that turns token ids into hidden states.
        parts: shapes of each layer's keys and values, as `ModelShape.layers` returns them.

    Raises:
        UnknownForm: it is built differently.
    """
    children = inner.children()
    # MLX counts each list as children, also one of strings.
    names = {name for name, one in children.items() if _has_modules(one)}
    if names != {"embed_tokens", "layers", "norm"}:
        raise UnknownForm(f"the model consists of {', '.join(sorted(names))}")
    blocks: list[Any] = children["layers"]
    if len(blocks) != len(parts) or getattr(inner, "pipeline_size", 1) > 1:
        raise UnknownForm("the model is a part of a pipeline")
    rotations: list[Rotation] = []
    layers = [
        _read_layer(block, kv[0], kv[1], rotations) for block, kv in zip(blocks, parts, strict=True)
    ]
    return StackForm(children["embed_tokens"], layers, as_rms_norm(children["norm"], "norm"))


def _read_layer(
    block: Any, keys: BlockPart, values: BlockPart, rotations: list[Rotation]
) -> LayerForm:
    if set(block.children()) != _BLOCK:
        raise UnknownForm(f"a layer consists of {', '.join(sorted(block.children()))}")
    module, mlp = block.self_attn, block.mlp
    found = (read(module, keys, values, rotations) for read in (read_heads, read_latents))
    attention: AttentionForm | None = next((one for one in found if one is not None), None)
    if attention is None:
        names = sorted(set(module.children()) - {"rope"})
        raise UnknownForm(f"attention consists of {', '.join(names)}")
    return LayerForm(
        attention,
        mlp,
        has_gated_matrices(mlp) and is_linear_like(mlp.down_proj),
        as_rms_norm(block.input_layernorm, "input_layernorm"),
        as_rms_norm(block.post_attention_layernorm, "post_attention_layernorm"),
    )


def _has_modules(child: Any) -> bool:
    return any(
        isinstance(one, nn.Module) for one in (child if isinstance(child, list) else [child])
    )
