"""EAGLE head for the demo model in PyTorch, and its loss.

The head reads the embedding of a token and the model's last hidden state of the position before
it, and predicts the next hidden state; the model's own output matrix turns that into logits.

Source: Li, Wei, Zhang, Zhang, "EAGLE: Speculative Sampling Requires Rethinking Feature
Uncertainty" (2024), and for training on the head's own output Zhang et al., "Learning Harmonized
Representations for Speculative Sampling" (2024). Parameter names are those of published heads.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from tools.demo_model.network import Layer, Network, NetworkShape
from tools.demo_model.tokenizer import write_json

HEAD_SHAPE = NetworkShape(num_hidden_layers=1, num_attention_heads=6, num_key_value_heads=2)
PASSES = 3
"""The first pass reads the model's hidden states, each later one the output of the pass before."""
NOISE = 0.05
"""Noise on hidden states, as a share of their deviation: in use the head's input is not exact."""


class EagleHead(nn.Module):
    """EAGLE head: predicts the model's next hidden states from hidden states and next tokens."""

    def __init__(self, shape: NetworkShape = HEAD_SHAPE) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.layers = nn.ModuleList(
            Layer(shape, has_attention_norms=False) for _ in range(shape.num_hidden_layers)
        )
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.05)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)  # every layer starts as the identity

    def forward(self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Predict the model's next hidden states: same shape and dtype as `hidden`.

        Args:
            embedded: embeddings of the tokens after the hidden states, float of shape
                (batch, length, hidden_size).
            hidden: the model's hidden states one position earlier, same shape.
            cos: cosines of the positions, float32 of shape (length, head_dim / 2).
            sin: sines, likewise.
        """
        x = self.fc(torch.cat((embedded, hidden), dim=-1))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def head_loss(
    head: nn.Module, network: Network, rows: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss of the head against the model's own hidden states and tokens.

    Args:
        head: the head to train.
        network: the model, whose weights are fixed.
        rows: token ids, int32 of shape (batch, length); bit 15 marks a learned token.
        cos: cosines of all positions, float32 of shape (positions, head_dim / 2).
        sin: sines, likewise.

    Returns:
        The mean loss of all passes, a scalar, and for each pass the share of learned tokens on
        which head and model agree, float of shape (passes,).
    """
    ids, learned = rows & 0x7FFF, (rows >= 0x8000)[:, 2:]
    with torch.no_grad():
        true = network.hidden_states(ids, cos, sin)
        chosen = functional.linear(true[:, 1:-1], network.embed_tokens.weight).argmax(-1)
        embedded = network.embed_tokens(ids[:, 1:-1])
    cos, sin = cos[: embedded.shape[1]], sin[: embedded.shape[1]]
    hidden = true[:, :-2] + NOISE * true.std() * torch.randn_like(true[:, :-2])
    losses, agreed = [], []
    for _ in range(PASSES):
        predicted = head(embedded, hidden, cos, sin)
        logits = functional.linear(predicted, network.embed_tokens.weight).float()
        targets = torch.where(learned, chosen, -100)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        near = functional.smooth_l1_loss(predicted[learned], true[:, 1:-1][learned])
        losses.append(loss + 0.1 * near)
        agreed.append((logits.argmax(-1) == chosen)[learned].float().mean())
        hidden = torch.cat((true[:, :1], predicted[:, :-1]), dim=1)
    return torch.stack(losses).mean(), torch.stack(agreed)


def save_head(head: EagleHead, folder: Path) -> None:
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
    write_json(folder / "config.json", config)
    tensors = {name: value.detach().float().cpu() for name, value in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
