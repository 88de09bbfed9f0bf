"""Checkpoints with random weights, which have the size and speed of real ones and never end early.

Speed does not depend on the values of weights, but completions must have their full length. The
rows of the (tied) embedding for end of text, for bytes outside ASCII and for unused ids are zero,
so that their logits are 0 and greedy decoding never picks them.

    python -m services.commands.bench.random_model FOLDER PRESET
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from shared.errors import UsageError
from shared.os import user_folders

FORMAT = 1
"""Version in the folder name of a cached model; changes when this file makes other models."""

TOKENIZER_VOCAB = 4_096
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Quantization(NamedTuple):
    """How the matrices of layers are quantized."""

    bits: int
    group_size: int = 64
    """Numbers that share a scale."""
    mode: str = "affine"
    """As `mx.quantize` names it."""


class Preset(NamedTuple):
    """Dimensions of a Qwen3 model, dense or with experts, or of a dense one with latent attention.

    `dtype` is the name of an MLX dtype.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int = TOKENIZER_VOCAB
    dtype: str = "float32"
    experts: int = 0
    """Routed experts per layer, each with `intermediate` hidden units; 0: a dense model."""
    experts_per_token: int = 0
    latent: int = 0
    """Numbers of a latent, in layers as DeepSeek V3 has them; queries have latents of three times
    as many. 0: Qwen3's layers."""
    quantization: Quantization | None = None
    """Of the matrices of layers; None: they are not quantized."""
    fills_vocab: bool = False
    """The tokenizer has as many tokens as the model, most of them made up."""


_ROTATED = 64
"""Numbers of a head that latent attention rotates, beside `head_dim` others."""
_PARTS = ("weight", "scales", "biases")
"""Names in files of the arrays that `mx.quantize` returns; some modes have no biases."""
_LARGE_VOCAB = 151_936
# Columns: hidden, layers, heads, kv_heads, head_dim, intermediate; then vocab, dtype.
_4B = Preset(2_560, 36, 32, 8, 128, 9_728, _LARGE_VOCAB, "bfloat16")
PRESETS = {
    "tiny": Preset(256, 8, 8, 4, 32, 768),
    # Few heads and layers, so that a CPU can prefill long prompts; 16 KiB of KV per token.
    "long": Preset(512, 4, 2, 2, 256, 2_560),
    # One head and two layers, so that a CPU can prefill sessions of 30,000 tokens repeatedly.
    "thin": Preset(256, 2, 1, 1, 64, 512),
    "0.6b": Preset(1_024, 28, 16, 8, 128, 3_072, _LARGE_VOCAB, "bfloat16"),
    "4b": _4B,
    "4b-4bit": _4B._replace(quantization=Quantization(4)),
    "4b-8bit": _4B._replace(quantization=Quantization(8)),
    "4b-mxfp4": _4B._replace(quantization=Quantization(4, 32, "mxfp4")),
    "8b": Preset(4_096, 36, 32, 8, 128, 12_288, _LARGE_VOCAB, "bfloat16"),
    # Half the layers of Qwen3-32B: 33 GB.
    "32b-half": Preset(5_120, 32, 64, 8, 128, 25_600, _LARGE_VOCAB, "bfloat16"),
    # Little but its head and a tokenizer of full size, for masks over many tokens.
    "tiny-150k": Preset(256, 8, 8, 4, 32, 768, _LARGE_VOCAB, fills_vocab=True),
    "tiny-moe": Preset(256, 4, 8, 4, 32, 128, experts=16, experts_per_token=4),
    "tiny-latent": Preset(256, 4, 8, 8, 32, 768, latent=64),
    "tiny-4bit": Preset(
        *(256, 4, 8, 4, 32, 128),
        experts=16,
        experts_per_token=4,
        quantization=Quantization(4),
    ),
    # Dense layers as DeepSeek V3 has them: 2 GB.
    "latent": Preset(2_048, 16, 32, 32, 128, 6_144, dtype="bfloat16", latent=512),
    # Layers with experts of 4 bits: 2 GB.
    "experts-4bit": Preset(
        *(2_048, 12, 32, 4, 128, 768, TOKENIZER_VOCAB, "bfloat16"),
        experts=64,
        experts_per_token=8,
        quantization=Quantization(4),
    ),
    # Half the layers of Qwen3-30B-A3B: 30 GB.
    "30b-a3b-half": Preset(
        2_048, 24, 32, 4, 128, 768, _LARGE_VOCAB, "bfloat16", experts=128, experts_per_token=8
    ),
}


def preset_folder(preset: str) -> Path:
    """Return the folder of a preset's model in the user's cache; it may not exist yet."""
    return user_folders.cache_folder("XDG_CACHE_HOME") / "bench" / f"random-{preset}-v{FORMAT}"


def make_random_model(folder: Path, preset_name: str) -> None:
    """Write a model with random weights, one shard at a time to limit memory.

    Args:
        folder: the model's folder; must not exist.
        preset_name: one of PRESETS.

    Raises:
        UsageError: when the preset is unknown or the folder exists.
    """
    preset = PRESETS.get(preset_name)
    if preset is None:
        raise UsageError(f"There is no preset {preset_name}: choose one of {', '.join(PRESETS)}.")
    if folder.exists():
        raise UsageError(f"{folder} already exists: remove it or name another folder.")
    unfinished = folder.with_name(f"{folder.name}.unfinished-{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        silent_ids = _write_tokenizer(unfinished, preset)
        _write_config(unfinished, preset)
        _write_weights(unfinished, preset, silent_ids)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_tokenizer(folder: Path, preset: Preset) -> list[int]:
    """Train a small byte-level BPE; return the ids that must never be generated."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_VOCAB,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_lines(Random(2)), trainer)
    if preset.fills_vocab:
        description = json.loads(tokenizer.to_str())
        _add_merges(description["model"], preset.vocab, Random(3))
        tokenizer = Tokenizer.from_str(json.dumps(description))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[0],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 40_960,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    printable = {
        index
        for index in range(len(SPECIAL_TOKENS), tokenizer.get_vocab_size())
        if _is_plain(tokenizer.decode([index], skip_special_tokens=False))
    }
    return [index for index in range(preset.vocab) if index not in printable]


def _add_merges(model: dict[str, Any], size: int, random: Random) -> None:
    """Let a byte-level BPE have this many tokens; the new ones are made of two others each."""
    vocabulary, merges = model["vocab"], model["merges"]
    texts = [text for text in vocabulary if text.isascii() and text not in SPECIAL_TOKENS]
    first_count = len(texts)
    while len(vocabulary) < size:
        # Tokens of real models are short; those with a space (a letter outside ASCII) stay few.
        pair = [random.choice(texts), random.choice(texts[:first_count])]
        text = "".join(pair)
        if len(text) <= 16 and text not in vocabulary:
            vocabulary[text] = len(vocabulary)
            merges.append(pair)
            texts.append(text)


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and text.strip() != ""


def _lines(random: Random) -> Iterator[str]:
    """Yield lines of made-up words, enough different ones to fill the vocabulary."""
    consonants, vowels = "bcdfghjklmnprstvwz", "aeiou"
    syllables = [c + v + end for c in consonants for v in vowels for end in ("", "n", "r")]
    words = ["".join(random.choices(syllables, k=random.randint(2, 3))) for _ in range(6_000)]
    for _ in range(6_000):
        yield " ".join(random.choices(words, k=10)) + "."


def _write_config(folder: Path, preset: Preset) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": preset.hidden,
        "num_hidden_layers": preset.layers,
        "num_attention_heads": preset.heads,
        "num_key_value_heads": preset.kv_heads,
        "head_dim": preset.head_dim,
        "intermediate_size": preset.intermediate,
        "vocab_size": preset.vocab,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": preset.dtype,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    if preset.latent:
        config |= _latent_config(preset)
    if preset.quantization:
        config["quantization"] = preset.quantization._asdict()
    if preset.experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": preset.experts,
            "num_experts_per_tok": preset.experts_per_token,
            "moe_intermediate_size": preset.intermediate,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))


def _latent_config(preset: Preset) -> dict[str, Any]:
    """Return what differs in the config of a dense model with latent attention."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "tie_word_embeddings": False,
        "moe_intermediate_size": preset.intermediate,
        "n_routed_experts": None,
        "n_shared_experts": None,
        "num_experts_per_tok": 1,
        "first_k_dense_replace": preset.layers,
        "moe_layer_freq": 1,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": preset.latent,
        "q_lora_rank": 3 * preset.latent,
        "qk_rope_head_dim": _ROTATED,
        "qk_nope_head_dim": preset.head_dim,
        "v_head_dim": preset.head_dim,
        "rope_scaling": None,
    }


def _write_weights(folder: Path, preset: Preset, silent_ids: list[int]) -> None:
    """Write one shard for the embedding, one per layer, and their index."""
    import mlx.core as mx

    mx.random.seed(2)
    dtype = getattr(mx, preset.dtype)
    count = preset.layers + 1
    where: dict[str, str] = {}
    total_bytes = 0
    for number in range(count):
        name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        shapes = _layer_shapes(preset, number - 1) if number else _outer_shapes(preset)
        arrays: dict[str, Any] = {
            key: mx.ones(shape, dtype)
            if len(shape) == 1
            else (mx.random.normal(shape) * 0.02).astype(dtype)
            for key, shape in shapes.items()
        }
        if number == 0:
            head = arrays.get("lm_head.weight", arrays["model.embed_tokens.weight"])
            head[mx.array(silent_ids)] = 0
        elif preset.quantization:
            arrays = _quantized(arrays, preset.quantization)
        mx.save_safetensors(str(folder / name), arrays, metadata={"format": "mlx"})
        where |= dict.fromkeys(arrays, name)
        total_bytes += sum(array.nbytes for array in arrays.values())
        del arrays
        mx.clear_cache()
    index = {"metadata": {"total_size": total_bytes}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _quantized(arrays: dict[str, Any], quantization: Quantization) -> dict[str, Any]:
    """Quantize the matrices of a layer but for its router."""
    import mlx.core as mx

    found: dict[str, Any] = {}
    for name, array in arrays.items():
        found[name] = array
        if array.ndim > 1 and not name.endswith("mlp.gate.weight"):
            parts = mx.quantize(array, **quantization._asdict())
            prefix = name.removesuffix("weight")
            names = _PARTS[: len(parts)]
            found |= {f"{prefix}{part}": one for part, one in zip(names, parts, strict=True)}
    return found


def _outer_shapes(preset: Preset) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (preset.vocab, preset.hidden),
        "model.norm.weight": (preset.hidden,),
    }
    if preset.latent:
        shapes["lm_head.weight"] = (preset.vocab, preset.hidden)
    return shapes


def _layer_shapes(preset: Preset, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, intermediate = preset.hidden, preset.intermediate
    mlp, experts = ("mlp.switch_mlp", (preset.experts,)) if preset.experts else ("mlp", ())
    attention = _latent_shapes(preset) if preset.latent else _head_shapes(preset)
    shapes: dict[str, tuple[int, ...]] = {
        **{f"self_attn.{key}": shape for key, shape in attention.items()},
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        f"{mlp}.gate_proj": (*experts, intermediate, hidden),
        f"{mlp}.up_proj": (*experts, intermediate, hidden),
        f"{mlp}.down_proj": (*experts, hidden, intermediate),
    }
    if preset.experts:
        shapes["mlp.gate"] = (preset.experts, hidden)
    return {f"model.layers.{layer}.{key}.weight": shape for key, shape in shapes.items()}


def _head_shapes(preset: Preset) -> dict[str, tuple[int, ...]]:
    hidden, head = preset.hidden, preset.head_dim
    queries, keys = preset.heads * head, preset.kv_heads * head
    return {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "q_norm": (head,),
        "k_norm": (head,),
    }


def _latent_shapes(preset: Preset) -> dict[str, tuple[int, ...]]:
    hidden, head, heads, latent = preset.hidden, preset.head_dim, preset.heads, preset.latent
    return {
        "q_a_proj": (3 * latent, hidden),
        "q_a_layernorm": (3 * latent,),
        "q_b_proj": (heads * (head + _ROTATED), 3 * latent),
        "kv_a_proj_with_mqa": (latent + _ROTATED, hidden),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (heads * 2 * head, latent),
        "o_proj": (hidden, heads * head),
    }


if __name__ == "__main__":
    make_random_model(Path(sys.argv[1]), sys.argv[2])
