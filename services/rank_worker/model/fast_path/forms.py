"""Recognizes decoder layers of a known form by their modules and shapes, never by a family's name.

What a module computes cannot be seen from outside. The proof (`proof`) finds, for example, another
activation or a scaled residual.
"""

import dataclasses
from typing import Any

import mlx.core as mx
from mlx import nn

from services.rank_worker.kv_cache.rows.block_layout import BlockPart
from services.rank_worker.model.fast_path.gated_mlp import has_gated_matrices
from services.rank_worker.model.fast_path.kernels.attention import AttentionShape
from services.rank_worker.model.fast_path.merged_linear import can_merge
from services.rank_worker.model.fast_path.rotation import Rotation, read_rotation
from services.rank_worker.model.sharding.mlp_split import is_linear

_BLOCK = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_ATTENTION = {*_PROJECTIONS, "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}


class UnknownForm(Exception):
    """A model is not of a form that the fast path knows. The text says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerForm:
    """The modules of one decoder layer `h = x + attention(norm(x)); h + mlp(norm(h))`."""

    attention: Any
    """Has q_proj, k_proj, v_proj and o_proj, and where it normalizes heads q_norm and k_norm."""
    shape: AttentionShape
    scale: float
    """Factor of the scores."""
    rotation: Rotation | None
    """Of queries and keys; None: they are not rotated."""
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
    return StackForm(children["embed_tokens"], layers, _rms_norm(children["norm"], "norm"))


def _read_layer(
    block: Any, keys: BlockPart, values: BlockPart, rotations: list[Rotation]
) -> LayerForm:
    if set(block.children()) != _BLOCK:
        raise UnknownForm(f"a layer consists of {', '.join(sorted(block.children()))}")
    attention = block.self_attn
    names = set(attention.children()) - {"rope"}
    normalizes = names == _ATTENTION | _HEAD_NORMS
    if names != _ATTENTION and not normalizes:
        raise UnknownForm(f"attention consists of {', '.join(sorted(names))}")
    if not is_linear_like(attention.o_proj) or not can_merge(
        [attention[name] for name in _PROJECTIONS]
    ):
        raise UnknownForm("queries, keys and values are projected by matrices of several kinds")
    if (keys.heads, keys.dim) != (values.heads, values.dim):
        raise UnknownForm(f"heads of keys and values have {keys.dim} and {values.dim} numbers")
    if normalizes:
        for name in sorted(_HEAD_NORMS):
            if _rms_norm(attention[name], name).weight.shape != (keys.dim,):
                raise UnknownForm(f"{name} does not normalize heads one by one")
    rotation = _read_rotation(attention.get("rope"), keys.dim, rotations)
    shape = AttentionShape(
        query_heads=int(attention.q_proj.weight.shape[0]) // keys.dim,
        kv_heads=keys.heads,
        head_dim=keys.dim,
        rotated=rotation.width if rotation is not None else 0,
        is_traditional=rotation is not None and rotation.is_traditional,
        normalizes=normalizes,
    )
    mlp = block.mlp
    has_gated_mlp = has_gated_matrices(mlp) and is_linear_like(mlp.down_proj)
    return LayerForm(
        attention,
        shape,
        float(attention.scale),
        rotation,
        mlp,
        has_gated_mlp,
        _rms_norm(block.input_layernorm, "input_layernorm"),
        _rms_norm(block.post_attention_layernorm, "post_attention_layernorm"),
    )


def _read_rotation(rope: Any, head_dim: int, known: list[Rotation]) -> Rotation | None:
    """Return a layer's rotation, the known one where it is equal, so that layers share tables."""
    if rope is None:
        return None
    rotation = read_rotation(rope, head_dim)
    if rotation is None:
        raise UnknownForm(f"{type(rope).__name__} is no rotation of pairs")
    for one in known:
        if one.equals(rotation):
            return one
    known.append(rotation)
    return rotation


def _has_modules(child: Any) -> bool:
    return any(
        isinstance(one, nn.Module) for one in (child if isinstance(child, list) else [child])
    )


def is_linear_like(module: Any) -> bool:
    """Tell whether a module is one matrix, whole or divided over ranks."""
    return is_linear(module) or (
        isinstance(module, nn.Module)
        and isinstance(module.get("weight"), mx.array)
        and "Sharded" in type(module).__name__
    )


def _rms_norm(module: Any, name: str) -> nn.RMSNorm:
    if type(module) is not nn.RMSNorm:
        raise UnknownForm(f"{name} is a {type(module).__name__}")
    return module
