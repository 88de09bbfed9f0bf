"""An EAGLE head for the demo model, in PyTorch, and its loss.

The head reads the embedding of a token beside the model's last hidden state of the position before
it, and says what the next hidden state will be; the model's own output matrix turns that into
logits. Source: Li, Wei, Zhang, Zhang, "EAGLE: Speculative Sampling Requires Rethinking Feature
Uncertainty" (2024), and for training on the head's own output Zhang et al., "Learning Harmonized
Representations for Speculative Sampling" (2024). Parameter names are those of published heads.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from tools.demo_model.network import Attention, FeedForward, Network, Norm, Shape

HEAD_SHAPE = Shape(num_hidden_layers=1, num_attention_heads=6, num_key_value_heads=2)
PASSES = 3
"""The first reads the model's hidden states, the others what the pass before has said."""
NOISE = 0.05
"""Share of a hidden state's spread that is added to it, since at work it is not exact."""


class HeadLayer(nn.Module):
    """A layer whose attention reads its input as it is: `fc` has prepared it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape, has_norms=False)
        self.mlp = FeedForward(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply to x, of shape (batch, length, hidden_size)."""
        x = x + self.self_attn(x, cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Head(nn.Module):
    """Next hidden states from embeddings and hidden states."""

    def __init__(self, shape: Shape = HEAD_SHAPE) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.layers = nn.ModuleList(HeadLayer(shape) for _ in range(shape.num_hidden_layers))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.05)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)  # every layer begins as the identity

    def forward(self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the next hidden states.

        Args:
            embedded: of the tokens behind the hidden states, (batch, length, hidden_size).
            hidden: the model's, one position earlier, same shape.
            cos: table of the positions.
            sin: likewise.
        """
        x = self.fc(torch.cat((embedded, hidden), dim=-1))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def hidden_states(network: Network, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return what the model's output matrix reads, (batch, length, hidden_size)."""
    x = network.embed_tokens(ids)
    for layer in network.layers:
        x = layer(x, cos, sin)
    normed: Tensor = network.norm(x)
    return normed


def head_loss(
    head: nn.Module, network: Network, rows: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Compare what the head says with what the model would.

    Args:
        head: to be trained.
        network: the model, not trained.
        rows: int32 (batch, length); bit 15 says that a token is learned.
        cos: table of all positions.
        sin: likewise.

    Returns:
        The mean loss of all passes, and per pass the share of learned tokens that the head and the
        model agree on.
    """
    ids, learned = rows & 0x7FFF, (rows >= 0x8000)[:, 2:]
    with torch.no_grad():
        true = hidden_states(network, ids, cos, sin)
        chosen = functional.linear(true[:, 1:-1], network.embed_tokens.weight).argmax(-1)
        embedded = network.embed_tokens(ids[:, 1:-1])
    cos, sin = cos[: embedded.shape[1]], sin[: embedded.shape[1]]
    hidden = true[:, :-2] + NOISE * true.std() * torch.randn_like(true[:, :-2])
    losses, agreed = [], []
    for _ in range(PASSES):
        said = head(embedded, hidden, cos, sin)
        logits = functional.linear(said, network.embed_tokens.weight).float()
        targets = torch.where(learned, chosen, -100)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        near = functional.smooth_l1_loss(said[learned], true[:, 1:-1][learned])
        losses.append(loss + 0.1 * near)
        agreed.append((logits.argmax(-1) == chosen)[learned].float().mean())
        hidden = torch.cat((true[:, :1], said[:, :-1]), dim=1)
    return torch.stack(losses).mean(), torch.stack(agreed)


def save_head(head: Head, folder: Path) -> None:
    """Write weights (float32) and config.json in the layout of published heads."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **head.shape.as_config(),
        "bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {name: value.detach().float().cpu() for name, value in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
