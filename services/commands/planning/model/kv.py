"""KV memory of a model per token and per row, from the shapes of its weights. No MLX.

Keys and values are as wide as the matrices that compute them, so shapes are more reliable than the
config, which only fused or compressed matrices need.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from services.commands.planning.model import recurrent
from services.commands.planning.model.checkpoint import Checkpoint, Tensor
from services.commands.planning.model.windows import ALIASES, windows

GROUP_SIZES = (64, 32)
"""Numbers of quantized KV per scale; the first size that divides all widths is used."""

_EXPANDED = frozenset({"deepseek_v2", "minicpm3", "youtu_llm"})
"""Families of mlx-lm that store compressed KV expanded."""
_KEYS = {"k_proj": "v_proj", "c_k": "c_v"}
_FUSED = ("qkv_proj", "query_key_value", "Wqkv", "wqkv", "c_attn", "att_proj")


@dataclasses.dataclass(frozen=True, slots=True)
class KVPart:
    """Array that one layer stores per token: its keys, its values, or compressed KV."""

    heads: int
    """Number of heads of the whole model, before any division."""
    dim: int
    """Numbers per head."""
    divides: bool = True
    """Whether tensor sharding divides the heads over ranks."""

    def numbers(self, ranks: int = 1) -> int:
        """Return how many numbers each rank stores per token.

        If `divides`, each rank stores its share of the heads, rounded up to whole heads; otherwise
        each rank stores all heads.

        Args:
            ranks: number of ranks.
        """
        heads = math.ceil(self.heads / ranks) if self.divides else self.heads
        return heads * self.dim


@dataclasses.dataclass(frozen=True, slots=True)
class LayerKV:
    """Size of the data of one layer: KV per token, and recurrent state per row."""

    members: tuple[KVPart, ...] = ()
    """Arrays stored per token; () for a layer without KV of its own."""
    window: int | None = None
    """Number of last tokens that are stored; None: all tokens."""
    state_bytes: int = 0
    """Bytes of recurrent state per row."""
    plain: bool = True
    """Whether the layer stores only keys and values, which can be quantized."""
    known: bool = True
    """False: the tensors do not show what this layer stores."""


@dataclasses.dataclass(frozen=True, slots=True)
class KVBytes:
    """Bytes of KV and recurrent state that one rank stores."""

    per_token: int
    """Bytes for each token of a row."""
    per_row: int
    """Bytes for each row of any length: windows and recurrent state."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelKV:
    """KV and recurrent state that each layer of a model stores."""

    layers: list[LayerKV]
    """In order of the model's layers."""
    float_bytes: int
    """Bytes of one number of KV that is not quantized."""

    @property
    def known(self) -> bool:
        """Whether the tensors show the KV and state of every layer."""
        return all(layer.known for layer in self.layers)

    def quantizable(self) -> bool:
        """Return whether the KV can be quantized (`rank_worker.kv_bits`), as far as shapes show.

        It can if all layers store only keys and values, of all tokens, of a width that a group of
        GROUP_SIZES divides.
        """
        return all(layer.plain and layer.window is None for layer in self.layers) and bool(
            self._group_size()
        )

    def bytes(self, *, ranks: int = 1, bits: int = 0, first: int = 0, last: int = -1) -> KVBytes:
        """Return the bytes of KV and recurrent state that one rank stores.

        Args:
            ranks: number of ranks over which heads and state are divided; 1: not divided.
            bits: bits of a stored number, 4 or 8; 0: not quantized.
            first: index of this rank's first layer.
            last: index after its last layer; -1: to the end.
        """
        per_token = per_row = 0
        group = self._group_size()
        for layer in self.layers[first : len(self.layers) if last < 0 else last]:
            token = sum(self._member_bytes(one, ranks, bits, group) for one in layer.members)
            if layer.window is None:
                per_token += token
            else:
                per_row += token * layer.window
            per_row += layer.state_bytes // ranks
        return KVBytes(per_token, per_row)

    def _member_bytes(self, member: KVPart, ranks: int, bits: int, group: int) -> int:
        numbers = member.numbers(ranks)
        if not bits:
            return numbers * self.float_bytes
        return numbers * bits // 8 + 2 * (numbers // group) * self.float_bytes

    def _group_size(self) -> int:
        dims = [member.dim for layer in self.layers for member in layer.members]
        return next((g for g in GROUP_SIZES if dims and not any(dim % g for dim in dims)), 0)


def model_kv(checkpoint: Checkpoint) -> ModelKV:
    """Derive the KV and recurrent state of each layer from the shapes of a model's tensors."""
    facts, count = checkpoint.facts, len(checkpoint.layers)
    family = ALIASES.get(checkpoint.model_type, checkpoint.model_type)
    spans = windows(family, facts, count)
    shared = facts.get("num_kv_shared_layers")
    first_shared = count - shared if isinstance(shared, int) else count
    layers = [
        LayerKV()
        if index >= first_shared
        else _layer_kv(layer, facts, family, spans[index], checkpoint.float_bytes)
        for index, layer in enumerate(checkpoint.layers)
    ]
    states = any(layer.state_bytes for layer in layers)
    kept = states or any(layer.members for layer in layers)
    if family in recurrent.UNPLANNED or (states and family not in recurrent.RECURRENT) or not kept:
        layers = [dataclasses.replace(layer, known=False) for layer in layers]
    return ModelKV(layers, checkpoint.float_bytes)


def _layer_kv(
    layer: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    family: str,
    window: int | None,
    float_bytes: int,
) -> LayerKV:
    members = _members(layer, facts, family)
    state = recurrent.state_bytes(layer, facts, float_bytes)
    compressed = any("kv_a_proj_with_mqa" in name for name in layer)
    # An attention layer without keys and values or recurrent state stores something unknown.
    attends = any("attn" in name or "attention." in name for name in layer)
    return LayerKV(
        members=members,
        window=window if members else None,
        state_bytes=state or 0,
        plain=state == 0 and not compressed and "indexer" not in " ".join(layer),
        known=state is not None and not (attends and not members and not state),
    )


def _members(
    layer: Mapping[str, Tensor], facts: Mapping[str, Any], family: str
) -> tuple[KVPart, ...]:
    found: list[KVPart] = []
    for name, tensor in layer.items():
        path = name.split(".")
        # The keys of linear attention are not stored.
        if path[-1] != "weight" or len(path) < 2 or "linear_attn" in path:
            continue
        module, parent = path[-2], ".".join(path[:-2])
        if module in _KEYS:
            heads = _heads(tensor.rows, facts)
            # Gemma 4's wide layers store their keys as values too.
            values = layer.get(f"{parent}.{_KEYS[module]}.weight", tensor)
            found += [KVPart(heads, tensor.rows // heads), KVPart(heads, values.rows // heads)]
        elif module == "kv_a_proj_with_mqa":
            found += _compressed(tensor.rows, facts, family)
        elif module == "wk" and "indexer" in path:
            # Stored twice, as keys and as values.
            found += [KVPart(1, tensor.rows, divides=False)] * 2
        elif module in _FUSED:
            found += _fused(tensor.rows, facts)
    return tuple(found)


def _heads(rows: int, facts: Mapping[str, Any]) -> int:
    """Return the number of heads of keys with `rows` numbers in total."""
    for key in ("num_key_value_heads", "num_global_key_value_heads", "num_attention_heads"):
        heads = facts.get(key)
        if isinstance(heads, int) and heads > 0 and rows % heads == 0:
            return heads
    return 1


def _compressed(rows: int, facts: Mapping[str, Any], family: str) -> list[KVPart]:
    if family not in _EXPANDED:
        rope = int(facts.get("qk_rope_head_dim") or 0)
        return [KVPart(1, rows - rope, divides=False), KVPart(1, rope, divides=False)]
    heads = int(facts["num_attention_heads"])
    keys = int(facts["qk_nope_head_dim"]) + int(facts["qk_rope_head_dim"])
    return [KVPart(heads, keys), KVPart(heads, int(facts.get("v_head_dim") or keys))]


def _fused(rows: int, facts: Mapping[str, Any]) -> list[KVPart]:
    """Return keys and values of a matrix that also computes queries."""
    queries = facts.get("num_attention_heads") or facts.get("n_head")
    if not isinstance(queries, int):
        return []
    heads = facts.get("num_key_value_heads") or (1 if facts.get("multi_query") else queries)
    dim = rows // (queries + 2 * int(heads))
    return [KVPart(int(heads), dim)] * 2
