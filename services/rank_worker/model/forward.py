"""Runs the model so that its head is computed only for positions whose logits are needed."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from services.rank_worker.kv_cache.rows.row_layers import RowLayer
from services.rank_worker.model.expert_counter import ExpertCounter
from services.rank_worker.model.sharding.local_experts import device_wait_tokens
from shared.errors import ConfigError

FULL_LOGITS_TOKENS_MAX = 16
"""Without `can_select`: up to this chunk length all logits cost less than a second forward."""

SelectPositions = Callable[[mx.array], mx.array]
"""Hidden states [rows, count, dim] -> those of selected positions, [any, any, dim]."""

Observe = Callable[..., Any]
"""Called as `observe(module, function, *args)`; returns what the function, which computes what the
module would, returns for these arguments."""


class Layers(Protocol):
    """Computes hidden states in place of mlx-lm's code."""

    observe: Observe | None
    """Calls each part of a forward while a step is measured."""

    def __call__(self, tokens: mx.array, caches: list[RowLayer]) -> mx.array:
        """Token ids, int32 [rows, count], and a cache per layer -> [rows, count, dim]."""


_LAYERS = "lockstep_layers"
"""Attribute of the model without its head: what computes its hidden states, of type `Layers`."""

INNER_NAMES = ("model", "transformer", "backbone")
"""Names that mlx-lm's families give to the model without its head."""

EMBEDDING_NAMES = ("embed_tokens", "wte", "embeddings", "tok_embeddings", "word_embeddings")
"""Names that they give to the token embedding."""


class Forward:
    """Builds lazy forwards of a model of any family, with logits only where they are needed.

    Almost every family in mlx-lm computes `head(self.model(tokens, cache))`, where the head turns
    hidden states into logits, each position separately. Reducing the result of `self.model` to the
    needed positions makes the family's own code compute the head (with its scaling and soft caps)
    only for these.

    For families that are built differently, the last token runs in a forward of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        expert_counter: ExpertCounter | None = None,
        *,
        can_select: bool | None = None,
    ) -> None:
        """Detect how the model is built; nothing is computed.

        Args:
            model: the model, or this rank's shard of it.
            expert_counter: counts the assignments of each forward to experts; None: they are not
                counted.
            can_select: whether the whole model's head can be computed for selected positions;
                None: `model` has all layers.

        Raises:
            ConfigError: when this shard's head cannot be computed so, but the whole model's can.
        """
        self.model = model
        self._logits: Callable[..., mx.array] = model
        self._select: SelectPositions | None = None
        """Reduces the hidden states that the head receives; None: the head receives all."""
        self._given: mx.array | None = None
        """Hidden states [rows, count, dim] that replace the output of the layers."""
        self.expert_counter: ExpertCounter | None = None
        """Counts the assignments of each forward; None: they are not counted."""
        self.keeps_hidden = False
        """Whether each forward stores its hidden states in `hidden`."""
        self.hidden: mx.array | None = None
        """[rows, count, dim], hidden states of all positions of the last forward."""
        self.hidden_dim = 0
        """Width of hidden states; 0 when they are not accessible."""
        self.hidden_dtype: mx.Dtype = mx.float32
        found = _modules_without_head(model) if can_select is not False else ()
        self.inner = next(filter(self._try_to_select, found), None)
        """The model without its head; None if it is unknown."""
        self.can_select = self.inner is not None
        """Whether logits can be computed for selected positions, without those of all others."""
        self.device_wait_tokens = device_wait_tokens(model)
        """A prefill of at least this many tokens waits for the device while it is built; None: no
        prefill waits."""
        if can_select and not self.can_select:
            raise ConfigError(
                f"mlx-lm's {type(model).__module__} computes its logits differently with some of "
                "its layers than with all: choose another world.sharding."
            )
        # Not before: the forwards above only find out how the model is built.
        self.expert_counter = expert_counter

    @property
    def can_embed(self) -> bool:
        """Whether the token embedding is found, so that `embed` and `head` can be called."""
        return self._embedding() is not None

    def use_layers(self, layers: Layers | None) -> None:
        """Have hidden states computed by a function; None: by mlx-lm's code again."""
        assert self.inner is not None
        self.inner.__dict__[_LAYERS] = layers

    def plain(self, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
        """Build the hidden states of tokens by mlx-lm's own code, as `inner` has come from it.

        Args:
            tokens: int32 [rows, count].
            caches: one per layer.

        Returns:
            [rows, count, dim].
        """
        assert self.inner is not None
        inner: Any = self.inner
        hidden: mx.array = inner.mlx_lm_call(tokens, cache=caches)
        return hidden

    def embed(self, tokens: mx.array) -> mx.array:
        """Look up the embeddings of tokens, before any scale factor of the model's family.

        Args:
            tokens: int32 [rows, count].

        Returns:
            [rows, count, dim] in the model's dtype.
        """
        embedding: Callable[..., mx.array] | None = self._embedding()
        assert embedding is not None
        return embedding(tokens)

    def head(self, hidden: mx.array) -> mx.array:
        """Compute logits from hidden states, without running the model's layers.

        Args:
            hidden: hidden states [rows, count, dim].

        Returns:
            Logits [rows, count, vocab], as all methods return them: of this rank's part of the
            vocabulary where the head is divided.
        """
        self._given = hidden
        try:
            return self._logits(mx.zeros(hidden.shape[:2], dtype=mx.int32))
        finally:
            self._given = None

    def fill_caches(
        self, tokens: mx.array, caches: list[Any], real: mx.array | None = None
    ) -> None:
        """Build a forward that only writes KV; its logits are never computed.

        Args:
            tokens: int32 [rows, count].
            caches: one per layer, which get the KV of these tokens.
            real: bool [rows, count], false for padding; None: no token is.
        """
        self._run(tokens, caches, real, fills=True)

    def last_logits(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        """Build a forward over a prompt's last chunk, with the logits of its last token only.

        Args:
            tokens: int32 [1, count].
            caches: one per layer.

        Returns:
            Logits [1, vocab] of the last position.
        """
        if self.can_select and tokens.shape[1] > 1:
            return self._selected(tokens, caches, _last)[:, 0]
        return self._run(tokens, caches)[:, -1]

    def row_end_logits(self, tokens: mx.array, caches: list[Any], ends: mx.array) -> mx.array:
        """Build a forward over right-padded rows, with the logits of each row's last real token.

        Args:
            tokens: int32 [rows, count].
            caches: one per layer.
            ends: int32 [rows], position of each row's last real token.

        Returns:
            Logits [rows, vocab] at these positions.
        """
        index = ends[:, None, None]
        real = mx.arange(tokens.shape[1]) <= ends[:, None]
        logits = self._selected(
            tokens, caches, lambda hidden: mx.take_along_axis(hidden, index, axis=1), real
        )
        return logits[:, 0]

    def all_logits(
        self, tokens: mx.array, caches: list[Any], rows: Sequence[int] | None = None
    ) -> mx.array:
        """Build a batched decode with the logits of all positions.

        Args:
            tokens: int32 [rows, count].
            caches: one per layer.
            rows: rows whose results are used; None: all.

        Returns:
            Logits [rows, count, vocab].
        """
        count = tokens.shape[1]
        used = None if rows is None else [row * count + one for row in rows for one in range(count)]
        return self._run(tokens, caches, _mask(tokens, used))

    def selected_logits(
        self, tokens: mx.array, caches: list[Any], wanted: list[int] | None, real: Any = None
    ) -> mx.array:
        """Build a forward of padded rows, with the logits of some positions.

        Args:
            tokens: int32 [rows, count].
            caches: one per layer.
            wanted: positions as flat indices into [rows * count]; None: all positions.
            real: bool [rows, count], false for padding; None: all but `wanted` are.

        Returns:
            Logits [number of positions, vocab].
        """
        if wanted is None or not self.can_select:
            logits = self._run(tokens, caches, _mask(tokens, wanted))
            logits = logits.reshape(-1, logits.shape[-1])
            return logits if wanted is None else logits[mx.array(wanted, dtype=mx.int32)]
        index = mx.array(wanted, dtype=mx.int32)
        return self._selected(
            tokens,
            caches,
            lambda hidden: hidden.reshape(1, -1, hidden.shape[-1])[:, index],
            _mask(tokens, wanted) if real is None else real,
        )[0]

    def splits_last_chunk(self, count: int) -> bool:
        """Tell whether a prompt's last token must be computed in a forward of its own.

        True if the head cannot be computed for one position only, and the chunk has more than
        FULL_LOGITS_TOKENS_MAX tokens.

        Args:
            count: number of tokens in the prompt's last chunk.
        """
        return not self.can_select and count > FULL_LOGITS_TOKENS_MAX

    def _selected(
        self,
        tokens: mx.array,
        caches: list[Any],
        select: SelectPositions,
        real: mx.array | None = None,
    ) -> mx.array:
        """Build a forward as `_run` does, with the logits of the selected positions."""
        self._select = select
        try:
            return self._run(tokens, caches, real)
        finally:
            self._select = None

    def _run(
        self,
        tokens: mx.array,
        caches: list[Any],
        real: mx.array | None = None,
        *,
        fills: bool = False,
    ) -> mx.array:
        """Build a forward, and count its assignments to experts.

        Args:
            tokens: int32 [rows, count].
            caches: one per layer.
            real: bool [rows, count], false for tokens whose results are not used; None: all are.
            fills: its logits are never computed.

        Returns:
            Logits [rows, count, vocab].
        """
        if self.expert_counter is None:
            return self._logits(tokens, cache=caches)
        with self.expert_counter.forward(real, fills=fills):
            return self._logits(tokens, cache=caches)

    def _try_to_select(self, inner: nn.Module) -> bool:
        """Make the result of `inner` reducible; tell whether the model's logits shrink with it.

        Its type becomes a subclass, as Python looks `__call__` up there. Restores it if not.
        """
        original = type(inner)
        outer = self
        # Otherwise another `Forward` of the same model has replaced it already.
        is_mlx_lm = not hasattr(original, "mlx_lm_call")
        signature = inspect.signature(original.__call__)

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if outer._given is not None:
                return outer._given
            layers = module.__dict__.get(_LAYERS) if is_mlx_lm else None
            if layers is not None:
                given = _tokens_and_caches(signature.bind(module, *args, **kwargs))
                if given is not None:
                    return outer._reduce(layers(*given))
            return outer._reduce(original.__call__(module, *args, **kwargs))

        methods = {
            "__call__": call,
            "mlx_lm_call": getattr(original, "mlx_lm_call", original.__call__),
        }
        inner.__class__ = type(original.__name__, (original,), methods)
        tokens = mx.zeros((1, 3), dtype=mx.int32)
        self.keeps_hidden = True
        try:
            narrow = self._selected(tokens, make_prompt_cache(self.model), _last).shape
            full = self._logits(tokens, cache=make_prompt_cache(self.model)).shape
        except (TypeError, ValueError, AttributeError, IndexError):
            narrow = full = ()
        hidden, self.hidden, self.keeps_hidden = self.hidden, None, False
        if len(full) == 3 and full[1] == 3 and narrow == (1, 1, full[2]):
            if hidden is not None:
                self.hidden_dim, self.hidden_dtype = hidden.shape[-1], hidden.dtype
            return True
        inner.__class__ = original
        return False

    def _embedding(self) -> nn.Module | None:
        found = (getattr(self.inner, name, None) for name in EMBEDDING_NAMES)
        return next((one for one in found if isinstance(one, nn.Module)), None)

    def _reduce(self, hidden: Any) -> Any:
        if not isinstance(hidden, mx.array) or hidden.ndim != 3:
            return hidden
        if self.keeps_hidden:
            self.hidden = hidden
        return hidden if self._select is None else self._select(hidden)


def _tokens_and_caches(given: inspect.BoundArguments) -> tuple[mx.array, list[RowLayer]] | None:
    """Return the arguments of a model without its head; None if it is called otherwise."""
    _, tokens, *others = given.arguments.values()
    cache = given.arguments.get("cache")
    is_known = all(one is None for one in others if one is not cache)
    return (tokens, cache) if is_known and cache and isinstance(cache[0], RowLayer) else None


def replaced_layers(model: nn.Module) -> list[Layers]:
    """Return what computes hidden states in place of mlx-lm's code in a model."""
    found = (module.__dict__.get(_LAYERS) for module in model.modules())
    return [one for one in found if one is not None]


def can_select_positions(model: nn.Module) -> bool:
    """Tell whether a model can compute logits of selected positions, without those of all others.

    The model is called to find out, without computing anything, and left unchanged.
    """
    types = [(module, type(module)) for module in model.modules()]
    can_select = Forward(model).can_select
    for module, original in types:
        if type(module) is not original:
            module.__class__ = original
    return can_select


def _modules_without_head(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a model that may compute the hidden states for its head."""
    for owner in (model, getattr(model, "language_model", None)):
        for name in INNER_NAMES:
            inner = getattr(owner, name, None)
            if isinstance(inner, nn.Module):
                yield inner


def _mask(tokens: mx.array, used: Sequence[int] | None) -> mx.array | None:
    """Return bool [rows, count], true at these flat positions; None for None."""
    if used is None:
        return None
    mask = np.zeros(tokens.size, dtype=bool)
    mask[list(used)] = True
    return mx.array(mask).reshape(tokens.shape)


def _last(hidden: mx.array) -> mx.array:
    return hidden[:, -1:]
