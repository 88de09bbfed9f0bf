"""Checkpoints of full size that take no disk space: real headers, holes in place of weights."""

import json
import struct
from pathlib import Path
from typing import Any

from services.commands.planning.model.checkpoint import ITEM_BITS, Checkpoint, read_checkpoint
from services.commands.planning.model.kv import model_kv
from services.commands.planning.splits import PlannedModel
from shared.model import checkpoint_files

Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> dtype and shape."""

DENSE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8_192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}
"""config.json of Llama 3.1 70B."""

EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2_048,
    "intermediate_size": 6_144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
}
"""config.json of Qwen3 30B A3B."""


def dense_shapes(config: dict[str, Any] = DENSE, dtype: str = "BF16") -> Shapes:
    """Return the tensors of a dense transformer."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    shapes = _outer(config, dtype)
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        shapes |= _attention(start, config, dtype)
        for name, shape in (
            ("gate", (wide, hidden)),
            ("up", (wide, hidden)),
            ("down", (hidden, wide)),
        ):
            shapes[f"{start}mlp.{name}_proj.weight"] = (dtype, shape)
    return shapes


def expert_shapes(
    config: dict[str, Any] = EXPERTS, dtype: str = "BF16", *, stacked: bool = True
) -> Shapes:
    """Return the tensors of a mixture of experts: stacked as mlx-lm stores them, or separate."""
    hidden, wide, count = (
        config["hidden_size"],
        config["moe_intermediate_size"],
        config["num_experts"],
    )
    shapes = _outer(config, dtype)
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        shapes |= _attention(start, config, dtype)
        shapes[f"{start}mlp.gate.weight"] = (dtype, (count, hidden))
        for name, shape in (
            ("gate", (wide, hidden)),
            ("up", (wide, hidden)),
            ("down", (hidden, wide)),
        ):
            if stacked:
                shapes[f"{start}mlp.switch_mlp.{name}_proj.weight"] = (dtype, (count, *shape))
                continue
            for expert in range(count):
                shapes[f"{start}mlp.experts.{expert}.{name}_proj.weight"] = (dtype, shape)
    return shapes


def write(folder: Path, config: dict[str, Any], shapes: Shapes, files: int = 1) -> Path:
    """Write config.json and weight files of real headers, with holes in place of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(shapes)
    for number in range(files):
        header: dict[str, Any] = {}
        offset = 0
        for name in names[number::files]:
            dtype, shape = shapes[name]
            size = ITEM_BITS[dtype] // 8
            for length in shape:
                size *= length
            header[name] = {
                "dtype": dtype,
                "shape": list(shape),
                "data_offsets": [offset, offset + size],
            }
            offset += size
        text = json.dumps(header).encode()
        with (folder / f"model-{number + 1:05d}-of-{files:05d}.safetensors").open("wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            stream.truncate(8 + len(text) + offset)
    return folder


def read(folder: Path, dtype: str = "auto") -> Checkpoint:
    """Return the folder's checkpoint, read as `lockstep plan` does."""
    config = checkpoint_files.read_config(folder)
    return read_checkpoint(config, checkpoint_files.weight_files(folder), dtype=dtype)


def planned_model(folder: Path) -> PlannedModel:
    """Return the folder's checkpoint with its KV sizes."""
    checkpoint = read(folder)
    return PlannedModel(checkpoint, model_kv(checkpoint))


def _outer(config: dict[str, Any], dtype: str) -> Shapes:
    embedding = (dtype, (config["vocab_size"], config["hidden_size"]))
    return {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding,
        "model.norm.weight": (dtype, (config["hidden_size"],)),
    }


def _attention(start: str, config: dict[str, Any], dtype: str) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    dim = config.get("head_dim", hidden // heads)
    keys = config["num_key_value_heads"] * dim
    return {
        f"{start}input_layernorm.weight": (dtype, (hidden,)),
        f"{start}post_attention_layernorm.weight": (dtype, (hidden,)),
        f"{start}self_attn.q_proj.weight": (dtype, (heads * dim, hidden)),
        f"{start}self_attn.k_proj.weight": (dtype, (keys, hidden)),
        f"{start}self_attn.v_proj.weight": (dtype, (keys, hidden)),
        f"{start}self_attn.o_proj.weight": (dtype, (hidden, heads * dim)),
    }
