"""An EAGLE-1 head: it guesses a model's next hidden state from the last one and the next token.

Input i is the embedding of token i + 1 beside the model's hidden state of token i (after the final
norm); output i stands for the hidden state of token i + 1, to which the model's own head is
applied. Source: Li, Wei, Zhang, Zhang, "EAGLE: Speculative Sampling Requires Rethinking Feature
Uncertainty" (2024). Names of weights and config are those of the authors' published heads: `fc`,
then decoder layers like Llama's, the first without its input norm, and no norm behind the last.
"""

import json
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.base import create_attention_mask

from services.rank_worker.kv_cache.rows.shapes import LayerShape
from shared.errors import ConfigError
from shared.model.checkpoint_files import WeightFile

SHARED = ("embed_tokens.", "lm_head.")
"""Weights that some heads bring along; the model's own are used."""


class EagleHead(nn.Module):
    """`fc` and the decoder layers."""

    def __init__(self, args: llama.ModelArgs, *, bias: bool) -> None:
        """Build it with random weights.

        Args:
            args: of the layers, in Llama's words.
            bias: whether `fc` has one.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        width = args.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=bias)
        self.layers = [llama.TransformerBlock(args) for _ in range(args.num_hidden_layers)]
        self.layers[0]["input_layernorm"] = nn.Identity()
        self._width = width

    @property
    def width(self) -> int:
        """Width of the hidden states that it was made for."""
        return self._width

    def __call__(self, embedded: mx.array, hidden: mx.array, caches: Sequence[Any]) -> mx.array:
        """Return the next hidden states, [rows, count, width] as both inputs."""
        state = self.fc(mx.concatenate([embedded, hidden], axis=-1))
        mask = create_attention_mask(state, caches[0])
        for layer, cache in zip(self.layers, caches, strict=True):
            state = layer(state, mask, cache=cache)
        result: mx.array = state
        return result

    def layer_shapes(self) -> list[LayerShape]:
        """Return what each layer keeps of a token."""
        shapes = []
        for layer in self.layers:
            heads, width = layer.self_attn.n_kv_heads or 0, layer.self_attn.head_dim
            shapes.append(LayerShape(heads, width, heads, width, self.fc.weight.dtype))
        return shapes


def read_head(config: dict[str, Any], files: Sequence[WeightFile]) -> EagleHead:
    """Build a head from its folder's config and weights, which are not read yet.

    Raises:
        ConfigError: they are no EAGLE-1 head, or contradict each other.
    """
    weights: dict[str, mx.array] = {}
    for file in files:
        loaded: Any = mx.load(str(file.path))
        weights |= {name.removeprefix("model."): value for name, value in loaded.items()}
    weights = {
        name: value
        for name, value in weights.items()
        if not name.startswith(SHARED) and "rotary_emb" not in name
    }
    folder = files[0].path.parent
    if "fc.weight" not in weights:
        raise ConfigError(
            f"speculation.draft_model: {folder} holds no EAGLE head: its weights have no fc.weight."
        )
    head = _build(config, weights, folder=str(folder))
    due = {name: value.shape for name, value in _named(head).items()}
    for name in sorted(due.keys() | weights.keys()):
        if name not in weights or name not in due or weights[name].shape != due[name]:
            has = list(weights[name].shape) if name in weights else "missing"
            raise ConfigError(
                f"speculation.draft_model: {folder} is no EAGLE-1 head with this config.json: "
                f"{name} is {has}, but {list(due[name]) if name in due else 'has no place'}."
            )
    head.load_weights(list(weights.items()))
    return head


def _build(config: dict[str, Any], weights: dict[str, mx.array], *, folder: str) -> EagleHead:
    facts = {**config, "model_type": "llama", "layer_types": None, "sliding_window": None}
    try:
        args = llama.ModelArgs.from_dict(facts)
        if args.num_hidden_layers < 1:
            raise ValueError("num_hidden_layers is 0")
        head = EagleHead(args, bias="fc.bias" in weights)
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"speculation.draft_model: the config.json in {folder} describes no EAGLE head "
            f"({json.dumps(str(error))})."
        ) from None
    # Which of the layers' projections have a bias, the heads' configs say in several ways.
    for number, layer in enumerate(head.layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            bias = weights.get(f"layers.{number}.self_attn.{name}.bias")
            if bias is not None:
                layer.self_attn[name].bias = mx.zeros(bias.shape)
            else:
                layer.self_attn[name].pop("bias", None)
    return head


def _named(head: EagleHead) -> dict[str, mx.array]:
    module: Any = head
    return dict(tree_flatten(module.parameters()))
