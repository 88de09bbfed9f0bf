"""Exact-match rates of the network on the held-out sets.

A greedy answer is right exactly if the most likely next token is right at every position of the
expected answer. So one forward pass scores a conversation.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer

from tools.demo_model.conversations import mixture
from tools.demo_model.conversations.chat import Chat, segments
from tools.demo_model.network import Network, rotary_tables


def held_out_sets(count: int = 200) -> dict[str, list[Chat]]:
    """Return the held-out conversations by skill, whose answers are scored during the training.

    Args:
        count: size of most sets; some have a fixed share of it.
    """
    return {
        "facts": mixture.held_out_facts(),
        "copy": mixture.held_out_copies(count),
        "recall": mixture.held_out_recalls(max(1, count // 4), 4),
        "recall far": mixture.held_out_recalls(max(1, count // 16), 4, size=10_500),
        "tools": mixture.held_out_calls(count),
        "json": mixture.held_out_objects(count),
        "count": mixture.held_out_counts(count // 2),
        "turns": mixture.held_out_turns(count // 2),
    }


def _scored_tokens(tokenizer: Tokenizer, chat: Chat) -> tuple[list[int], list[bool]]:
    """Return the token ids of a conversation, and which of them are scored."""
    pieces = segments(chat)
    last = max(at for at, piece in enumerate(pieces) if piece.is_learned)
    ids: list[int] = []
    scored: list[bool] = []
    for at, piece in enumerate(pieces[: last + 1]):
        encoded = tokenizer.encode(piece.text, add_special_tokens=False).ids
        ids += encoded
        # Every answer of a tool conversation is scored: the call and the report of its result.
        counts = at == last or (piece.is_learned and chat.task.startswith("tool"))
        scored += [counts] * len(encoded)
    return ids, scored


@torch.no_grad()
def exact_matches(network: Network, tokenizer: Tokenizer, chats: list[Chat]) -> list[bool]:
    """Compare the greedy answer to each conversation with the expected one, token by token.

    Args:
        network: the network to score.
        tokenizer: its tokenizer.
        chats: the conversations; their last answer counts, in those with tools every answer.

    Returns:
        Per conversation whether all tokens are equal.
    """
    device = next(network.parameters()).device
    results = []
    for chat in chats:
        ids, scored = _scored_tokens(tokenizer, chat)
        tokens = torch.tensor([ids], device=device)
        cos, sin = rotary_tables(len(ids), network.shape, device)
        best = network(tokens, cos, sin)[0, :-1].argmax(-1)
        right = best == tokens[0, 1:]
        scored_here = torch.tensor(scored[1:], device=device)
        results.append(bool(right[scored_here].all()))
    return results


def match_rates(network: Network, tokenizer: Tokenizer, count: int = 200) -> dict[str, float]:
    """Score a network on all held-out sets.

    Args:
        network: the network to score.
        tokenizer: its tokenizer.
        count: size of most sets, as in `held_out_sets`.

    Returns:
        Name of the set -> share of exactly right answers, 0 to 1.
    """
    scores = {}
    for name, chats in held_out_sets(count).items():
        found = exact_matches(network, tokenizer, chats)
        scores[name] = sum(found) / len(found)
    return scores
