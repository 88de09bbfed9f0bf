"""Tensors that every rank holds in full, and tensors that are divided, by split. No MLX.

The rules are those of mlx-lm's `shard` methods and of the rank worker's sharding: matrices of
attention and feed-forward layers are divided, norms and gates are not, embedding and head if
`world.split_vocabulary` says so.
"""

from typing import Literal

from services.commands.planning.model.checkpoint import Checkpoint
from shared.messages.base import Sharding
from shared.messages.rank_link import VocabularySplit
from shared.model.sharding.shares import DIVIDES_EXPERTS, DIVIDES_MATRICES, HEAD_BYTES_MIN

Part = Literal["whole", "tensor", "experts"]

_ROUTED = frozenset({"switch_mlp", "switch_glu", "experts"})
_SHARED = frozenset({"shared_experts", "shared_expert", "share_expert", "shared_mlp"})
_BY_OUTPUT = frozenset(
    {"q_proj", "k_proj", "v_proj", "g_proj", "qkv_proj", "query_key_value"}
    | {"q_b_proj", "kv_b_proj", "embed_q", "unembed_out"}
    | {"gate_proj", "up_proj", "gate_up_proj", "w1", "w3"}
    | {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "in_proj_ba", "in_proj_qkvz", "conv1d"}
)
_BY_INPUT = frozenset({"o_proj", "down_proj", "w2", "out_proj"})
_VECTORS = frozenset({"sinks", "A_log", "dt_bias"})
_OUTPUT_DIVIDED = frozenset({"qwen3_5", "qwen3_5_moe", "muse_spark"})
"""Families whose output matrix mlx-lm divides by vocabulary."""
_HEADS = frozenset({"lm_head", "output", "embed_out"})
_EMBEDDINGS = frozenset({"embed_tokens", "wte", "embeddings", "tok_embeddings", "word_embeddings"})
_PIECES = frozenset({"weight", "scales", "biases", "bias"})


def part_of(name: str, sharding: Sharding) -> Part:
    """Return how ranks share one tensor of a layer, judged by its name.

    "tensor" divides the matrices of attention, feed-forward layers and experts. "expert" divides
    routed experts by number and the matrices of shared experts, but not those of attention;
    "tensor+expert" routed experts by number and all other matrices. Any other sharding divides
    nothing within a layer.

    Args:
        name: the tensor's name within its layer, such as `mlp.experts.3.up_proj.weight`.
        sharding: how ranks divide the model.

    Returns:
        "whole": every rank holds all of it; "tensor": each rank holds a part of the matrix or
        vector; "experts": each rank holds some of the experts.
    """
    path = name.split(".")
    if sharding in DIVIDES_EXPERTS and not _ROUTED.isdisjoint(path):
        return "experts"
    if sharding not in DIVIDES_MATRICES and (sharding != "expert" or _SHARED.isdisjoint(path)):
        return "whole"
    if path[-1] in _VECTORS:
        return "tensor"
    module = path[-2] if path[-1] in _PIECES and len(path) > 1 else path[-1]
    for known in (_BY_OUTPUT, _BY_INPUT):
        if module in known or module.removesuffix("_blocks").removesuffix("_scales") in known:
            # The bias is added once, to the sum of all ranks' products.
            whole = known is _BY_INPUT and path[-1] == "bias"
            return "whole" if whole else "tensor"
    return "whole"


def whole_and_divided(
    checkpoint: Checkpoint, sharding: Sharding, vocabulary: VocabularySplit = "auto"
) -> dict[Part, int]:
    """Add up a model's bytes by the way in which a sharding divides them among ranks.

    Args:
        checkpoint: the model.
        sharding: how ranks divide the model.
        vocabulary: `world.split_vocabulary`.

    Returns:
        Part, as `part_of` names it -> total bytes in memory before they are divided.
    """
    total: dict[Part, int] = {"whole": 0, "tensor": 0, "experts": 0}
    for layer in checkpoint.layers:
        for name, tensor in layer.items():
            total[part_of(name, sharding)] += tensor.bytes
    divided = _divided_by_rows(checkpoint, sharding, vocabulary)
    for name, tensor in checkpoint.outer.items():
        total["tensor" if name in divided else "whole"] += tensor.bytes
    return total


def _divided_by_rows(
    checkpoint: Checkpoint, sharding: Sharding, vocabulary: VocabularySplit
) -> frozenset[str]:
    """Return the names of tensors outside of layers of which each rank holds some rows."""
    heads = _names(checkpoint, _HEADS)
    has_divided_output = checkpoint.config.get("model_type") in _OUTPUT_DIVIDED
    if sharding in DIVIDES_MATRICES and has_divided_output and heads:
        return heads
    if sharding in ("none", "pipeline") or vocabulary == "off":
        return frozenset()
    embeddings = _names(checkpoint, _EMBEDDINGS)
    head = heads or embeddings
    size = sum(checkpoint.outer[name].bytes for name in head)
    if vocabulary == "auto" and size < HEAD_BYTES_MIN:
        return frozenset()
    return head | embeddings if vocabulary == "all" else head


def _names(checkpoint: Checkpoint, modules: frozenset[str]) -> frozenset[str]:
    """Return the names of tensors outside of layers that belong to some modules."""
    return frozenset(one for one in checkpoint.outer if not modules.isdisjoint(one.split(".")))
