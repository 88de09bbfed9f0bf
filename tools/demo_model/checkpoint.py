"""Checkpoint files of the demo model in the Hugging Face layout."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.demo_model.conversations.chat import END_OF_TEXT, TURN_END
from tools.demo_model.network import Network
from tools.demo_model.tokenizer import CONTEXT_TOKENS, load_tokenizer, write_json


def save_checkpoint(network: Network, folder: Path) -> None:
    """Write weights (float32), config.json and generation_config.json beside the tokenizer.

    Args:
        network: the network to save.
        folder: the checkpoint's folder, which already holds the tokenizer.
    """
    tokenizer = load_tokenizer(folder)
    ends = [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **network.shape.as_config(),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": CONTEXT_TOKENS,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": ends,
        "pad_token_id": ends[1],
    }
    write_json(folder / "config.json", config)
    generation = {"do_sample": False, "eos_token_id": ends, "pad_token_id": ends[1]}
    write_json(folder / "generation_config.json", generation)
    tensors: dict[str, Tensor] = {
        f"model.{name}": tensor.detach().float().cpu().contiguous()
        for name, tensor in network.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_weights(network: Network, path: Path) -> None:
    """Replace the weights of the network by those of the file model.safetensors at `path`."""
    tensors = load_file(path)
    network.load_state_dict(
        {name.removeprefix("model."): torch.as_tensor(tensor) for name, tensor in tensors.items()}
    )
