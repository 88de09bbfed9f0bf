"""Model whose answers are those of a script. Ranks load it from the model's folder as `model.py`.

Its weights hold the script. Its keys hold the tokens of the context, a digit per head, so a rank
knows the context only together with the other ranks, and its answer depends on nothing else: it is
the same after a prefix from the cache, after a recovery and under speculation.

A step of the script has a number and a cue, which is one token. The model begins an answer after
the tokens that open an assistant's turn. It gives the answer of the highest step whose cue occurs
before them, without any cue answer 0. Some steps count only in a context with tools.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import BaseModelArgs
from mlx_lm.models.cache import KVCache

HEADS = 4
"""Number of digits of a token in the keys, one per head; the largest world has as many ranks."""
BASE = 16
CERTAIN = 100.0
"""Logit of the script's token; all others are 0."""


@dataclass
class ModelArgs(BaseModelArgs):
    """What the model reads from config.json."""

    model_type: str
    vocab_size: int
    step_count: int
    answer_tokens_max: int
    openings: list[list[int]]
    """The tokens that open an assistant's turn, in several spellings."""
    message_start: int
    """The token at which messages begin, -1: any. An answer may be several messages; the first is
    the one that follows a message of someone else."""
    tools_token: int
    """A token that only prompts with tools have."""


class ScriptReader(nn.Module):
    """Finds the place in the script: hidden states are (step, number of the next token)."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embed_tokens = nn.Embedding(args.vocab_size, HEADS)
        self.steps = mx.zeros((2, args.vocab_size), dtype=mx.int32)
        """Number of the step whose cue a token is, 0 for none: first the steps that need tools,
        then the others."""
        self.layers = [nn.Identity()]
        self._openings = args.openings
        self._message_start = args.message_start
        self._tools_token = args.tools_token
        self._values = [float(BASE**head) for head in range(HEADS)]
        self._group: Any = None

    def shard(self, group: Any) -> None:
        """Keep this rank's heads."""
        count = HEADS // group.size()
        kept = slice(group.rank() * count, (group.rank() + 1) * count)
        self.embed_tokens.weight = self.embed_tokens.weight[:, kept]
        self._values = self._values[kept]
        self._group = group

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        """Return hidden states [rows, count, 2] for tokens [rows, count]."""
        (layer,) = cache if cache is not None else [KVCache()]
        start = mx.array(layer.offset, dtype=mx.int32).reshape(-1, 1)
        places = mx.broadcast_to(
            start + mx.arange(tokens.shape[1], dtype=mx.int32)[None], tokens.shape
        )
        new = self.embed_tokens(tokens).swapaxes(1, 2)[..., None]
        context = self._context(layer.update_and_fetch(new, new)[0])
        at = mx.arange(context.shape[1], dtype=mx.int32)[None]
        turns = mx.cummax(mx.where(self._opens_turn(context, at), at, -1), axis=1)
        with_tools, others = (mx.cummax(mx.take(row, context), axis=1) for row in self.steps)
        has_tools = mx.cummax((context == self._tools_token).astype(mx.int32), axis=1)
        steps = mx.maximum(with_tools * has_tools, others)
        turn = mx.take_along_axis(turns, places, axis=1)
        step = mx.take_along_axis(steps, mx.maximum(turn, 0), axis=1)
        return mx.stack([step, places - turn], axis=-1).astype(mx.float32)

    def _context(self, keys: mx.array) -> mx.array:
        """Return the tokens of the context, int32 [rows, length], from keys of all ranks."""
        digits = mx.array(self._values).reshape(1, -1, 1, 1)
        tokens = (keys.astype(mx.float32) * digits).sum(axis=(1, 3))
        if self._group is not None:
            tokens = mx.distributed.all_sum(tokens, group=self._group)
        # After the end of a shorter row there may be anything.
        return mx.clip(tokens, 0, self.steps.shape[1] - 1).astype(mx.int32)

    def _opens_turn(self, context: mx.array, at: mx.array) -> mx.array:
        """Return where an assistant's turn has just been opened, bool [rows, length].

        Args:
            context: tokens, int32 [rows, length].
            at: their places, int32 [1, length].
        """
        found = _ends(context, self._openings[0])
        for opening in self._openings[1:]:
            found = found | _ends(context, opening)
        if self._message_start < 0:
            return found
        starts = mx.cummax(mx.where(context == self._message_start, at, -1), axis=1)
        earlier = mx.pad(starts, [(0, 0), (1, 0)], constant_values=-1)[:, :-1]
        last = mx.take_along_axis(earlier, mx.maximum(starts, 0), axis=1)
        end = mx.clip(last + len(self._openings[0]) - 1, 0, context.shape[1] - 1)
        goes_on = mx.take_along_axis(found, end, axis=1) & (last >= 0)
        return found & ~goes_on


def _ends(context: mx.array, words: list[int]) -> mx.array:
    """Return where a sequence of tokens ends, bool [rows, length]."""
    found = context == words[-1]
    for distance, token in enumerate(reversed(words[:-1]), 1):
        earlier = mx.pad(context, [(0, 0), (distance, 0)], constant_values=-1)
        found = found & (earlier[:, : context.shape[1]] == token)
    return found


class Model(nn.Module):
    """The script's next token for each position."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.args = args
        self.model_type = args.model_type
        self.model = ScriptReader(args)
        self.answers = mx.zeros((args.step_count, args.answer_tokens_max), dtype=mx.int32)
        """Tokens of each step's answer; after them its end, repeated."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """Return logits [rows, count, vocab_size]."""
        place = self.model(inputs, cache=cache).astype(mx.int32)
        step = mx.clip(place[..., 0], 0, self.args.step_count - 1)
        number = mx.clip(place[..., 1], 0, self.args.answer_tokens_max - 1)
        token = self.answers[step, number]
        is_next = mx.arange(self.args.vocab_size, dtype=mx.int32) == token[..., None]
        return is_next.astype(mx.float32) * CERTAIN

    @property
    def layers(self) -> list[Any]:
        """The only layer."""
        return list(self.model.layers)

    def make_cache(self) -> list[KVCache]:
        """Return one plain cache."""
        return [KVCache()]

    def shard(self, group: Any = None) -> None:
        """Keep this rank's part, as mlx-lm's models do."""
        self.model.shard(group or mx.distributed.init())
