"""Qwen3 network in PyTorch, with the parameter names of the Hugging Face layout."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class NetworkShape:
    """Sizes of the network, divisible by 2 and 4, so that as many ranks can divide it."""

    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 5
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    rope_theta: float = 500_000.0
    rms_norm_eps: float = 1e-6

    def as_config(self) -> dict[str, Any]:
        """Return the sizes under their names in config.json."""
        return asdict(self)


class Norm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of x, of any shape (..., size)."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


def rotary_tables(length: int, shape: NetworkShape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of rotary position embeddings for positions from 0.

    Args:
        length: number of positions.
        shape: sizes of the network.
        device: device of the results.

    Returns:
        (cosines, sines), each float32 of shape (length, head_dim / 2).
    """
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float64), shape.rope_theta**-half)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embeddings to queries or keys.

    Args:
        x: float of shape (batch, heads, length, head_dim); the result has the same shape. Entries
            i and i + head_dim / 2 are rotated together.
        cos: cosines of the positions, float32 of shape (length, head_dim / 2).
        sin: sines, likewise.
    """
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


class Attention(nn.Module):
    """Causal attention with grouped queries, and optionally a norm on each query and key."""

    def __init__(self, shape: NetworkShape, *, has_norms: bool = True) -> None:
        super().__init__()
        self.shape = shape
        queries = shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)
        self.q_norm, self.k_norm = (
            Norm(shape.head_dim, shape.rms_norm_eps) if has_norms else nn.Identity()
            for _ in range(2)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply causal attention to x.

        Args:
            x: float of shape (batch, length, hidden_size); the result has the same shape.
            cos: cosines of the positions, float32 of shape (length, head_dim / 2).
            sin: sines, likewise.
        """
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.shape.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        repeats = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        joined: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return joined


class FeedForward(nn.Module):
    """Gated feed-forward part of a layer."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to x, float of shape (batch, length, hidden_size); the result has its shape."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Transformer layer: attention and feed-forward, each added to its input.

    Without attention norms the attention reads its input as it is, and has no query and key norms.
    """

    def __init__(self, shape: NetworkShape, *, has_attention_norms: bool = True) -> None:
        super().__init__()
        self.self_attn = Attention(shape, has_norms=has_attention_norms)
        self.mlp = FeedForward(shape)
        norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.input_layernorm = norm if has_attention_norms else nn.Identity()
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply the layer to x.

        Args:
            x: float of shape (batch, length, hidden_size); the result has the same shape.
            cos: cosines of the positions, float32 of shape (length, head_dim / 2).
            sin: sines, likewise.
        """
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Network(nn.Module):
    """Complete language model. The output matrix is the embedding matrix."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02 if "embed" in name else 0.07)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)  # every layer starts as the identity

    def hidden_states(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the last hidden states, which the output matrix turns into logits.

        Args:
            ids: token ids, integers of shape (batch, length).
            cos: cosines of the positions, float32 of shape (length, head_dim / 2).
            sin: sines, likewise.

        Returns:
            Float of shape (batch, length, hidden_size).
        """
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        normed: Tensor = self.norm(x)
        return normed

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return logits (batch, length, vocab_size) for token ids (batch, length)."""
        return functional.linear(self.hidden_states(ids, cos, sin), self.embed_tokens.weight)


def summed_loss(network: nn.Module, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the sum of the losses over the learned tokens, a scalar.

    Args:
        network: the network.
        rows: token ids, int32 of shape (batch, length); bit 15 of an entry marks a learned token.
        cos: cosines of the positions, float32 of shape (length, head_dim / 2).
        sin: sines, likewise.
    """
    ids, learned = rows & 0x7FFF, rows >= 0x8000
    logits = network(ids, cos, sin)[:, :-1].float()
    targets = torch.where(learned, ids, -100)[:, 1:].long()
    return functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        targets.reshape(-1),
        ignore_index=-100,
        reduction="sum",
    )
