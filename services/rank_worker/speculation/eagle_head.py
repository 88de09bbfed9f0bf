"""An EAGLE-1 head: predicts a model's next hidden state from the last one and the next token.

Input i is the embedding of token i + 1 concatenated with the model's hidden state of token i (after
the final norm). Output i approximates the hidden state of token i + 1; the model's own output head
maps it to logits. Source: Li, Wei, Zhang, Zhang, "EAGLE: Speculative Sampling Requires Rethinking
Feature Uncertainty" (2024). Names of weights and config keys are those of the authors' published
heads: `fc`, then decoder layers like Llama's, the first without an input norm, and no final norm.
"""

import json
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.base import create_attention_mask

from services.rank_worker.kv_cache.rows.block_layout import BlockPart
from shared.errors import ConfigError
from shared.model.checkpoint_files import WeightFile

SHARED_WEIGHT_PREFIXES = ("embed_tokens.", "lm_head.")
"""Prefixes of weights that some heads include, but that are taken from the model."""


class EagleHead(nn.Module):
    """The network of an EAGLE-1 head: a linear projection `fc`, then Llama decoder layers."""

    def __init__(self, args: llama.ModelArgs, *, bias: bool) -> None:
        """Build a head with random weights.

        Args:
            args: configuration of the layers, in Llama's terms.
            bias: whether `fc` has a bias.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        width = args.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=bias)
        self.layers = [llama.TransformerBlock(args) for _ in range(args.num_hidden_layers)]
        self.layers[0]["input_layernorm"] = nn.Identity()
        self.width = width
        """Width H of the hidden states that it was trained for."""

    def __call__(self, embedded: mx.array, hidden: mx.array, caches: Sequence[Any]) -> mx.array:
        """Return the predicted hidden states.

        B is the number of rows, L the tokens per row.

        Args:
            embedded: [B, L, H], embeddings of the next tokens.
            hidden: [B, L, H], hidden states.
            caches: KV cache of each layer.

        Returns:
            [B, L, H] in the dtype of the inputs.
        """
        state = self.fc(mx.concatenate([embedded, hidden], axis=-1))
        mask = create_attention_mask(state, caches[0])
        for layer, cache in zip(self.layers, caches, strict=True):
            state = layer(state, mask, cache=cache)
        result: mx.array = state
        return result

    def layer_parts(self) -> list[list[BlockPart]]:
        """Return the shapes of each layer's keys and of its values, which are equal."""
        attentions = [layer.self_attn for layer in self.layers]
        dtype = self.fc.weight.dtype
        return [[BlockPart(one.n_kv_heads or 0, one.head_dim, dtype)] * 2 for one in attentions]


def load_head(config: dict[str, Any], files: Sequence[WeightFile]) -> EagleHead:
    """Build a head from its config and weight files. The weights are lazy arrays.

    Args:
        config: the head's config.json.
        files: its weight files, at least one.

    Raises:
        ConfigError: the files do not hold an EAGLE-1 head, or contradict each other.
    """
    weights: dict[str, mx.array] = {}
    for file in files:
        loaded: Any = mx.load(str(file.path))
        weights |= {name.removeprefix("model."): value for name, value in loaded.items()}
    weights = {
        name: value
        for name, value in weights.items()
        if not name.startswith(SHARED_WEIGHT_PREFIXES) and "rotary_emb" not in name
    }
    folder = files[0].path.parent
    if "fc.weight" not in weights:
        raise ConfigError(
            f"speculation.draft_model: {folder} holds no EAGLE head: it has no fc.weight. "
            "Set it to the folder of an EAGLE-1 head."
        )
    head = _build(config, weights, folder=str(folder))
    module: Any = head
    parameters: dict[str, mx.array] = dict(tree_flatten(module.parameters()))
    shapes = {name: value.shape for name, value in parameters.items()}
    for name in sorted(shapes.keys() | weights.keys()):
        if name not in weights or name not in shapes or weights[name].shape != shapes[name]:
            found = list(weights[name].shape) if name in weights else "missing"
            expected = list(shapes[name]) if name in shapes else "no such weight"
            raise ConfigError(
                f"speculation.draft_model: {folder} is not an EAGLE-1 head with this config.json: "
                f"the shape of {name} is {found}, expected {expected}. Choose another head."
            )
    head.load_weights(list(weights.items()))
    return head


def _build(config: dict[str, Any], weights: dict[str, mx.array], *, folder: str) -> EagleHead:
    llama_config = {**config, "model_type": "llama", "layer_types": None, "sliding_window": None}
    try:
        args = llama.ModelArgs.from_dict(llama_config)
        if args.num_hidden_layers < 1:
            raise ValueError("num_hidden_layers is 0")
        head = EagleHead(args, bias="fc.bias" in weights)
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"speculation.draft_model: the config.json in {folder} does not describe an EAGLE head "
            f"({json.dumps(str(error))}). Choose another head."
        ) from None
    # Configs of heads use several keys for biases of projections, so the weights decide.
    for number, layer in enumerate(head.layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            bias = weights.get(f"layers.{number}.self_attn.{name}.bias")
            if bias is not None:
                layer.self_attn[name].bias = mx.zeros(bias.shape)
            else:
                layer.self_attn[name].pop("bias", None)
    return head
