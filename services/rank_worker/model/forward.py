"""Running the model: the head is computed for the positions that sample, and for no others."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from services.rank_worker.model.sharding.local_experts import wait_tokens
from shared.errors import ConfigError

FULL_LOGITS_TOKENS_MAX = 16
"""Without a narrow head: up to so many tokens all logits cost less than a second forward."""

Choose = Callable[[mx.array], mx.array]
"""Hidden states [rows, count, dim] -> those of some positions, [any, any, dim]."""

INNER_NAMES = ("model", "transformer", "backbone")
"""What mlx-lm's families call the part of a model that is not its head."""

EMBEDDING_NAMES = ("embed_tokens", "wte", "embeddings", "tok_embeddings", "word_embeddings")
"""What they call their embeddings."""


class Forward:
    """A model as two functions, whatever its family.

    Almost every family in mlx-lm is `head(self.model(tokens, cache))`, where the head works on each
    position by itself. Narrowing what `self.model` returns to the positions that are wanted makes
    the family's own code compute the head (with its scaling and soft caps) for no others.
    Where a family is built otherwise, the last token is run by itself.
    """

    def __init__(self, model: nn.Module, *, narrows: bool | None = None) -> None:
        """Find out how the model is built; nothing is computed.

        Args:
            model: whose forwards these are.
            narrows: whether the head of the whole model can be computed for chosen positions;
                None: `model` has all of its layers.

        Raises:
            ConfigError: the head of this part of the model cannot, that of the whole can.
        """
        self._model = model
        self._choose: Choose | None = None
        """What the head sees of the hidden states; None: all."""
        self._narrows = False
        self._inner: nn.Module | None = None
        self._given: mx.array | None = None
        """Hidden states that stand in place of those of the layers."""
        self.keeps_hidden = False
        """Whether each forward leaves its hidden states in `hidden`."""
        self.hidden: mx.array | None = None
        """[rows, count, dim] of the last forward, of all its positions."""
        self.hidden_dim = 0
        """Width of hidden states; 0: they cannot be seen."""
        self.hidden_dtype: mx.Dtype = mx.float32
        for owner in (model, getattr(model, "language_model", None)):
            for name in INNER_NAMES:
                inner = getattr(owner, name, None)
                if narrows is not False and isinstance(inner, nn.Module) and not self._narrows:
                    self._narrows = self._try_to_narrow(inner)
                    self._inner = inner if self._narrows else None
        self.wait_tokens = wait_tokens(model)
        """A prefill of so many tokens or more waits for the device while it is built; None: none
        does."""
        if narrows and not self._narrows:
            raise ConfigError(
                f"mlx-lm's {type(model).__module__} makes its logits otherwise with a part of its "
                "layers than with all: choose another world.sharding."
            )

    @property
    def narrows(self) -> bool:
        """Whether the head is computed for one position only."""
        return self._narrows

    @property
    def embeds(self) -> bool:
        """Whether `embed` and `head` are there."""
        return self._embedding() is not None

    def embed(self, tokens: mx.array) -> mx.array:
        """Look tokens up, unscaled: int32 [rows, count] -> [rows, count, dim]."""
        embedding = self._embedding()
        assert embedding is not None
        embedded: mx.array = embedding(tokens)
        return embedded

    def head(self, hidden: mx.array) -> mx.array:
        """Compute the model's own head, without its layers, on [rows, count, dim].

        Returns:
            Logits [rows, count, vocab].
        """
        self._given = hidden
        try:
            logits: mx.array = self._model(mx.zeros(hidden.shape[:2], dtype=mx.int32))
        finally:
            self._given = None
        return logits

    def fill(self, tokens: mx.array, caches: list[Any]) -> None:
        """Build a forward that only fills caches; logits that nobody asks for are never computed.

        Args:
            tokens: int32 [1, count].
            caches: one per layer.
        """
        self._model(tokens, cache=caches)

    def last_logits(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        """Build a forward over a chunk that ends a row.

        Args:
            tokens: int32 [1, count].
            caches: one per layer; without a narrow head they are used twice.

        Returns:
            Logits [1, vocab] of the last position.
        """
        count = tokens.shape[1]
        if self._narrows and count > 1:
            return self._narrowed(tokens, caches, _last)[:, 0]
        logits: mx.array = self._model(tokens, cache=caches)
        return logits[:, -1]

    def ends_logits(self, tokens: mx.array, caches: list[Any], ends: mx.array) -> mx.array:
        """Build a forward over right-padded rows.

        Args:
            tokens: int32 [rows, count].
            caches: one per layer.
            ends: int32 [rows], each row's last real position.

        Returns:
            Logits [rows, vocab] of these positions.
        """
        index = ends[:, None, None]
        logits = self._narrowed(
            tokens, caches, lambda hidden: mx.take_along_axis(hidden, index, axis=1)
        )
        return logits[:, 0]

    def all_logits(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        """Build a batched decode: int32 [rows, count] -> logits [rows, count, vocab]."""
        logits: mx.array = self._model(tokens, cache=caches)
        return logits

    def some_logits(
        self, tokens: mx.array, caches: list[Any], wanted: list[int] | None
    ) -> mx.array:
        """Build a batched decode of rows that are padded.

        Args:
            tokens: int32 [rows, count].
            caches: one per layer.
            wanted: positions, counted row by row; None: all of them.

        Returns:
            Logits [wanted, vocab].
        """
        if wanted is None or not self._narrows:
            logits = self.all_logits(tokens, caches)
            logits = logits.reshape(-1, logits.shape[-1])
            return logits if wanted is None else logits[mx.array(wanted, dtype=mx.int32)]
        index = mx.array(wanted, dtype=mx.int32)
        return self._narrowed(
            tokens, caches, lambda hidden: hidden.reshape(1, -1, hidden.shape[-1])[:, index]
        )[0]

    def splits(self, count: int) -> bool:
        """Tell whether a last chunk of `count` tokens runs as all but one, and then that one."""
        return not self._narrows and count > FULL_LOGITS_TOKENS_MAX

    def _narrowed(self, tokens: mx.array, caches: list[Any], choose: Choose) -> mx.array:
        self._choose = choose
        try:
            logits: mx.array = self._model(tokens, cache=caches)
        finally:
            self._choose = None
        return logits

    def _try_to_narrow(self, inner: nn.Module) -> bool:
        """Let `inner` return one position when asked to; tell whether the model's logits follow."""
        original = type(inner)
        outer = self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if outer._given is not None:
                return outer._given
            return outer._narrow(original.__call__(module, *args, **kwargs))

        # A subclass, because Python looks `__call__` up on the type; only this instance is touched.
        inner.__class__ = type(original.__name__, (original,), {"__call__": call})
        tokens = mx.zeros((1, 3), dtype=mx.int32)
        self.keeps_hidden = True
        try:
            narrow = self._narrowed(tokens, make_prompt_cache(self._model), _last).shape
            full = self._model(tokens, cache=make_prompt_cache(self._model)).shape
        except (TypeError, ValueError, AttributeError, IndexError):
            narrow = full = ()
        seen, self.hidden, self.keeps_hidden = self.hidden, None, False
        if len(full) == 3 and full[1] == 3 and narrow == (1, 1, full[2]):
            if seen is not None:
                self.hidden_dim, self.hidden_dtype = seen.shape[-1], seen.dtype
            return True
        inner.__class__ = original
        return False

    def _embedding(self) -> nn.Module | None:
        found = (getattr(self._inner, name, None) for name in EMBEDDING_NAMES)
        return next((one for one in found if isinstance(one, nn.Module)), None)

    def _narrow(self, hidden: Any) -> Any:
        if not isinstance(hidden, mx.array) or hidden.ndim != 3:
            return hidden
        if self.keeps_hidden:
            self.hidden = hidden
        if self._choose is None:
            return hidden
        return self._choose(hidden)


def narrows(model: nn.Module) -> bool:
    """Tell whether a model's head can be computed for chosen positions; it stays as it is."""
    kinds = [(module, type(module)) for module in model.modules()]
    found = Forward(model).narrows
    for module, kind in kinds:
        if type(module) is not kind:
            module.__class__ = kind
    return found


def _last(hidden: mx.array) -> mx.array:
    return hidden[:, -1:]
