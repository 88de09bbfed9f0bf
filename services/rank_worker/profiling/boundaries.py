"""Boundaries between the parts of a model. Owns which module is which part.

While a step is measured, the modules' classes are replaced by subclasses that time their calls.
Nothing else of mlx-lm's code changes, so every family is measured in the same way.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from services.rank_worker.model.forward import EMBEDDING_NAMES, replaced_layers
from services.rank_worker.model.sharding.local_experts import is_expert_layer, is_switch
from services.rank_worker.model.sharding.mlp_split import is_linear, is_mlp
from services.rank_worker.model.sharding.module_paths import LAYER, OTHER_MODEL
from services.rank_worker.peers import collectives
from services.rank_worker.profiling.part_timer import PartTimer
from shared.messages.telemetry.step_profile import NO_LAYER, Part

_EXCHANGES: dict[str, Part] = {"send": "send", "recv": "receive", "recv_like": "receive"}
"""Parts of MLX's functions between two ranks; its others are between all ranks."""
_MLP_NAMES = re.compile(r"mlp|feed_forward|ffn|ff\b|moe")


@dataclasses.dataclass(slots=True)
class _Boundary:
    """A module whose calls are observed."""

    module: nn.Module
    part: Part
    layer: int
    size: int
    """Bytes of weights that each call reads."""
    original: type
    timed: type
    """A subclass of the module's class that observes calls."""


class ModelParts:
    """The modules of a model that are parts of a step, for measuring them."""

    def __init__(self, model: nn.Module, draft_model: nn.Module | None = None) -> None:
        """Find the parts; nothing is changed yet.

        Args:
            model: this rank's shard, as it is called in steps.
            draft_model: the module that proposes drafts, as one part; None: without one.
        """
        self._timer: PartTimer | None = None
        parts = list(_find_parts(model))
        if draft_model is not None:
            parts.append((draft_model, "drafting", NO_LAYER))
        self._boundaries = [self._make_boundary(*one) for one in parts]
        self._boundaries += [
            self._make_expert_layer(layer)
            for module, part, _ in parts
            if part == "experts"
            for layer in module.modules()
            if is_expert_layer(layer)
        ]
        self._by_module = {id(one.module): one for one in self._boundaries}
        self._replaced = replaced_layers(model)
        self._cache_types: dict[type, type] = {}

    @contextlib.contextmanager
    def timed(self, timer: PartTimer) -> Iterator[None]:
        """Time all calls of the model's parts and all collectives within the block."""
        self._timer = timer
        for one in self._boundaries:
            one.original = type(one.module)
            one.module.__class__ = one.timed
        for layers in self._replaced:
            layers.observe = self._observe
        try:
            with collectives.observed(functools.partial(_time_collective, timer)):
                yield
        finally:
            for one in self._boundaries:
                one.module.__class__ = one.original
            for layers in self._replaced:
                layers.observe = None
            self._timer = None

    def _observe(self, module: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
        """Time a call that computes what a module would."""
        one = self._by_module[id(module)]
        return self._time(one.part, one.layer, one.size, function, args, {})

    def _time(
        self,
        part: Part,
        layer: int,
        size: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        timer = self._timer
        assert timer is not None
        timer.add_bytes(part, size)
        with self._timed_writes([*args, *kwargs.values()]):
            return timer.call(part, layer, function, *args, **kwargs)

    def _make_boundary(self, module: nn.Module, part: Part, layer: int) -> _Boundary:
        original: Any = type(module)
        size = _weight_bytes(module)

        def call(one: nn.Module, *args: Any, **kwargs: Any) -> Any:
            bound = functools.partial(original.__call__, one)
            read = 0 if part == "embedding" else size
            return self._time(part, layer, read, bound, args, kwargs)

        def as_linear(one: nn.Module, hidden: Any) -> Any:
            timer = self._timer
            assert timer is not None
            timer.add_bytes("head", size)
            return timer.call("head", NO_LAYER, functools.partial(original.as_linear, one), hidden)

        methods: dict[str, Any] = {"__call__": call}
        if part == "embedding":
            # Where the head has no weights of its own, it is a method of the embedding.
            methods["as_linear"] = as_linear
        timed = type(original.__name__, (original,), methods)
        return _Boundary(module, part, layer, size, original, timed)

    def _make_expert_layer(self, module: nn.Module) -> _Boundary:
        """Count the bytes of the experts of a layer, of which a step reads only the chosen ones."""
        original: Any = type(module)
        switches: list[Any] = [one for one in module.children().values() if is_switch(one)]
        count = int(switches[0].num_experts)
        size = sum(map(_bytes, switches)) // count
        local = getattr(original, "local_experts", None)
        own = local.experts if local is not None else range(count)

        def call(one: Any, x: mx.array, indices: mx.array, *args: Any, **kwargs: Any) -> Any:
            assert self._timer is not None
            self._timer.add_chosen_bytes("experts", size, indices, own)
            return original.__call__(one, x, indices, *args, **kwargs)

        return _Boundary(
            module,
            "experts",
            NO_LAYER,
            0,
            original,
            type(original.__name__, (original,), {"__call__": call}),
        )

    @contextlib.contextmanager
    def _timed_writes(self, values: list[Any]) -> Iterator[None]:
        """Time the writes of new keys and values into the caches among a part's arguments."""
        caches = [(one, type(one)) for one in values if hasattr(type(one), "update_and_fetch")]
        for cache, original in caches:
            if original not in self._cache_types:
                self._cache_types[original] = self._timed_cache(original)
            cache.__class__ = self._cache_types[original]
        try:
            yield
        finally:
            for cache, original in caches:
                cache.__class__ = original

    def _timed_cache(self, original: Any) -> type:
        def update_and_fetch(cache: Any, *args: Any, **kwargs: Any) -> Any:
            timer = self._timer
            assert timer is not None
            write = functools.partial(original.update_and_fetch, cache)
            return timer.call("kv_write", NO_LAYER, write, *args, **kwargs)

        return type(original.__name__, (original,), {"update_and_fetch": update_and_fetch})


def _time_collective(timer: PartTimer, name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    part = _EXCHANGES.get(name, "collective")
    result = timer.call(part, NO_LAYER, function, *args, **kwargs)
    given = next(iter((*args, *kwargs.values())))
    timer.add_bytes(part, (result if part == "receive" else given).nbytes)
    return result


def _find_parts(model: nn.Module) -> Iterator[tuple[nn.Module, Part, int]]:
    """Yield (module, part, number of its layer) for every part; parts do not nest."""
    layers: dict[str, nn.Module] = {}
    by_path = sorted(model.named_modules(), key=lambda item: len(item[0]))
    for path, module in by_path:
        found = LAYER.search(path)
        if found and not OTHER_MODEL.search(path) and not _is_below(path, layers):
            layers[path] = module
            for name, child in _modules(module):
                if (part := _part_of(name, child)) is not None:
                    yield child, part, int(found[1])
    for path, module in by_path:
        name = path.rpartition(".")[2]
        if not path or _is_below(path, layers) or OTHER_MODEL.search(path):
            continue
        if name in EMBEDDING_NAMES and hasattr(type(module), "as_linear"):
            yield module, "embedding", NO_LAYER
        elif is_linear(module):
            yield module, "head", NO_LAYER


def _weight_bytes(module: nn.Module) -> int:
    """Return the bytes of a part's weights, without those of which a step reads only some."""
    return _bytes(module) - sum(map(_bytes, filter(is_switch, module.modules())))


def _bytes(module: nn.Module) -> int:
    parameters: Any = module.parameters()
    arrays: Any = tree_flatten(parameters)
    return sum(array.nbytes for _, array in arrays)


def _is_below(path: str, layers: dict[str, nn.Module]) -> bool:
    return any(path.startswith(f"{one}.") for one in layers)


def _modules(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in layer.children().items():
        for one in child if isinstance(child, list) else [child]:
            if isinstance(one, nn.Module):
                yield name, one


def _part_of(name: str, module: nn.Module) -> Part | None:
    """Return which part of a layer a module is; None: it has no matrices, as norms."""
    inner = list(module.modules())
    if any(map(is_switch, inner)):
        return "experts"
    if is_mlp(module) or _MLP_NAMES.search(name):
        return "mlp"
    if any(is_linear(one) or "Sharded" in type(one).__name__ for one in inner):
        return "attention"
    return None
