"""Checkpoint as its headers describe it: tensors by layer, with their bytes in memory. No MLX.

Tensors that mlx-lm ignores when it loads a language model (towers for images and sound, layers
after the last one, tied output weights) are ignored here too.
"""

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from shared.errors import ConfigError
from shared.model.checkpoint_files import WeightFile, text_config

ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64,
}  # fmt: skip
"""Type of a number, as safetensors names it -> its bits."""

FLOATS = ("F16", "BF16", "F32", "F64")
"""Types that a configured floating-point type replaces."""

DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
"""`model.dtype` -> safetensors' name."""

LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")

_LAYER = re.compile(
    r"(?:^|(?P<prefix>.*?)\.)(?:layers|h|blocks|block)\.(?P<number>\d+)\.(?P<rest>.+)"
)
_FOREIGN = frozenset(
    {"vision_tower", "vision_model", "vision_encoder", "visual", "vision_embed_tokens", "mtp"}
    | {"audio_tower", "audio_model", "multi_modal_projector", "mm_projector", "patch_merger"}
    | {"embed_audio", "embed_vision"}
)
"""Parts of a checkpoint that do not belong to the language model."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """Type, shape and size of one tensor of a checkpoint."""

    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]
    bytes: int
    """In memory, after the casts of loading."""

    @property
    def rows(self) -> int:
        """Length of the first axis; for a matrix, quantized or not, its number of outputs."""
        return self.shape[0] if self.shape else 1


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """Configs of a model and the sizes of its language model's tensors, without their values."""

    config: dict[str, Any]
    """config.json."""
    facts: dict[str, Any]
    """The part of it that describes the language model."""
    layers: list[dict[str, Tensor]]
    """By layer: name within the layer -> tensor."""
    outer: dict[str, Tensor]
    """Tensors outside layers (embedding, last norm, output): name -> tensor."""
    float_bytes: int
    """Bytes of one floating-point number of the model."""

    @property
    def bytes(self) -> int:
        """Bytes of all weights in memory after loading."""
        return sum(tensor.bytes for tensor in self.outer.values()) + sum(
            tensor.bytes for layer in self.layers for tensor in layer.values()
        )

    @property
    def model_type(self) -> str:
        """Family of the language model, as mlx-lm names it."""
        return str(self.facts["model_type"])


def read_checkpoint(
    config: dict[str, Any], files: Iterable[WeightFile], *, dtype: str = "auto"
) -> Checkpoint:
    """Read the types and shapes of a checkpoint's tensors from its headers, and sort them by layer.

    Args:
        config: the content of the model's config.json.
        files: its weight files.
        dtype: type to which unquantized numbers are cast; "auto": no cast.

    Raises:
        ConfigError: when a header has an unknown type or a malformed shape, or no layer is found.
    """
    facts = text_config(config)
    count = _layer_count(facts)
    cast = DTYPES.get(dtype)
    layers: dict[int, dict[str, Tensor]] = {}
    outer: dict[str, Tensor] = {}
    types: Counter[str] = Counter()
    for file in files:
        for name, tensor in _tensors(file, cast).items():
            if not _is_kept(name, facts):
                continue
            if tensor.dtype in FLOATS:
                types[tensor.dtype] += 1
            match = _LAYER.fullmatch(name)
            if match is None:
                outer[name] = tensor
            elif int(match["number"]) < count:
                layers.setdefault(int(match["number"]), {})[match["rest"]] = tensor
    if not layers:
        raise ConfigError(
            f'The weights of this model (of type "{facts["model_type"]}") have no layers whose '
            "names Lockstep knows, so nothing can be planned for it."
        )
    common = cast or (types.most_common(1)[0][0] if types else "BF16")
    in_order = [layers.get(number, {}) for number in range(max(layers) + 1)]
    return Checkpoint(config, facts, in_order, outer, ITEM_BITS[common] // 8)


def _layer_count(facts: Mapping[str, Any]) -> int:
    pattern = facts.get("hybrid_override_pattern")
    if isinstance(pattern, str | list) and pattern:
        # Nemotron-H gives the number of layers only by this pattern.
        return len(pattern)
    return next((facts[key] for key in LAYER_COUNTS if isinstance(facts.get(key), int)), 0)


def _is_kept(name: str, facts: Mapping[str, Any]) -> bool:
    parts = name.split(".")
    if not _FOREIGN.isdisjoint(parts) or name.endswith("rotary_emb.inv_freq"):
        return False
    return not (facts.get("tie_word_embeddings") and "lm_head" in parts)


def _tensors(file: WeightFile, cast: str | None) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    try:
        header = json.loads(file.header)
        header.pop("__metadata__", None)
        scaled = {name for name in header if name.endswith("_scale_inv")}
        for name, entry in header.items():
            if name in scaled:
                # Loading multiplies these scales into the weights, which then have 16 bits.
                continue
            dtype = str(entry["dtype"])
            shape = tuple(int(size) for size in entry["shape"])
            if f"{name}_scale_inv" in scaled:
                dtype = "BF16"
            if cast is not None and dtype in FLOATS:
                dtype = cast
            found[name] = Tensor(dtype, shape, (math.prod(shape) * ITEM_BITS[dtype] + 7) // 8)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ConfigError(
            f"{file.path} has a tensor with an unknown type or a malformed shape."
        ) from None
    return found
