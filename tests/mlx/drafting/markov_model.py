"""Model whose tokens depend on the last two only, and an EAGLE head that predicts it exactly."""

from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache

from services.rank_worker.speculation.eagle_head import EagleHead
from services.rank_worker.speculation.loaded_drafter import LoadedDrafter

VOCAB = 6
EMBEDDING_DIM = 8
"""Width of a token's embedding; a hidden state is the embeddings of two tokens."""


class SecondOrderLayers(nn.Module):
    """Layers whose hidden state is the embeddings of the last token and of the one before."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embed_tokens = nn.Embedding(VOCAB, 2 * EMBEDDING_DIM)
        table = np.random.default_rng(1).normal(0.0, 1.0, (VOCAB, 2 * EMBEDDING_DIM))
        table[:, EMBEDDING_DIM:] = 0.0
        self.embed_tokens.weight = mx.array(table.astype(np.float32))
        self.layers = [nn.Identity()]

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        """Return hidden states [rows, count, 2 * EMBEDDING_DIM]; the token before comes from the
        keys.
        """
        count = tokens.shape[1]
        new: mx.array = self.embed_tokens(tokens)
        (layer,) = cache if cache is not None else [KVCache()]
        start = mx.array(layer.offset, dtype=mx.int32).reshape(-1, 1)
        keys, _ = layer.update_and_fetch(new[:, None], new[:, None])
        places = start + mx.arange(count, dtype=mx.int32)[None] - 1
        index = mx.broadcast_to(mx.maximum(places, 0), tokens.shape)
        before = mx.take_along_axis(keys[:, 0], index[:, :, None], axis=1)
        before = mx.where((places < 0)[:, :, None], 0.0, before)
        half: mx.array = mx.concatenate(
            [before[:, :, EMBEDDING_DIM:], before[:, :, :EMBEDDING_DIM]], axis=-1
        )
        return new + half


class SecondOrderMarkovModel(nn.Module):
    """Model whose next-token logits depend on the last two tokens only."""

    def __init__(self, seed: int = 8) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = SecondOrderLayers()
        weight = np.random.default_rng(seed).normal(0.0, 0.16, (VOCAB, 2 * EMBEDDING_DIM))
        self.weight = mx.array(weight.astype(np.float32))
        self.layers = self.model.layers

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        """Return logits [rows, count, VOCAB]."""
        return self.model(tokens, cache=cache) @ self.weight.T

    def make_cache(self) -> list[KVCache]:
        """Return one plain cache."""
        return [KVCache()]

    def pairs(self) -> np.ndarray:
        """Return the logits after each pair of tokens, [VOCAB * VOCAB, VOCAB]."""
        tokens = np.array([[a, b] for a in range(VOCAB) for b in range(VOCAB)], dtype=np.int32)
        return np.array(self(mx.array(tokens), cache=self.make_cache())[:, -1])


def exact_head(noise: float = 0.0) -> LoadedDrafter:
    """Return a head whose outputs are the model's next hidden states.

    Args:
        noise: standard deviation of noise on its weights; 0: the outputs are exact.
    """
    width = 2 * EMBEDDING_DIM
    head: Any = EagleHead(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=width,
            num_hidden_layers=1,
            intermediate_size=width,
            num_attention_heads=2,
            rms_norm_eps=1e-6,
            vocab_size=VOCAB,
        ),
        bias=False,
    )
    shift = np.roll(np.eye(width, dtype=np.float32), EMBEDDING_DIM, axis=0)
    # The next token's embedding unchanged, and the last token's part of the last hidden state.
    shift[:EMBEDDING_DIM] = 0.0
    fc = np.concatenate([np.eye(width, dtype=np.float32), shift], axis=1)
    fc += noise * np.random.default_rng(4).normal(0.0, 1.0, fc.shape).astype(np.float32)
    head.fc.weight = mx.array(fc)
    layer = head.layers[0]
    layer.self_attn.o_proj.weight = mx.zeros_like(layer.self_attn.o_proj.weight)
    layer.mlp.down_proj.weight = mx.zeros_like(layer.mlp.down_proj.weight)
    return LoadedDrafter("eagle", head)
