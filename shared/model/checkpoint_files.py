"""Reads and checks a model's config and the headers of its weight files. No MLX.

These checks are cheap and run before loading, so that a damaged or missing file is reported in one
sentence and not by a traceback half an hour later.
"""

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

from shared.errors import ConfigError

WEIGHT_PATTERN = "model*.safetensors"
"""Names of the weight files that mlx-lm loads."""

HEADER_BYTES_MAX = 512 * 1024 * 1024
"""Limit for the header of a weight file. 100,000 tensors take about 15 MB."""


@dataclasses.dataclass(frozen=True, slots=True)
class WeightFile:
    """One safetensors file with weights, of which only the header is read."""

    path: Path
    size_bytes: int
    header: bytes
    """JSON with the names, types, shapes and offsets of the tensors."""

    @property
    def payload_start(self) -> int:
        """Offset of the first tensor in the file, in bytes."""
        return 8 + len(self.header)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the model's config.json.

    Raises:
        ConfigError: when it cannot be read, is not a JSON object or has no model type.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ConfigError(f'{path} has no "model_type", so it is not the config of a model.')
    return config


def weight_files(folder: Path) -> list[WeightFile]:
    """Return the folder's weight files, sorted by name.

    Raises:
        ConfigError: when a file is missing or damaged, or the folder has no weight files.
    """
    paths = sorted(folder.glob(WEIGHT_PATTERN))
    if not paths:
        raise ConfigError(
            f"The folder {folder} has no weight files ({WEIGHT_PATTERN}): convert the model with "
            "mlx_lm.convert, or download it again."
        )
    present = {path.name for path in paths}
    missing = sorted(_indexed_names(folder) - present)
    if missing:
        raise ConfigError(
            f"The folder {folder} lacks {len(missing)} of the weight files that its index lists, "
            f"for example {missing[0]}: download the model again."
        )
    return [_read_weight_file(path) for path in paths]


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the language model, which may be nested in that of a larger model."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def context_tokens_max(config: dict[str, Any], configured: int = 0) -> int:
    """Return the longest prompt plus completion in tokens.

    Args:
        config: the model's config.json.
        configured: model.context_tokens_max; 0: the limit in the model's config.

    Raises:
        ConfigError: when it is 0 and the config has no limit.
    """
    if configured:
        return configured
    facts = text_config(config)
    for key in ("max_position_embeddings", "max_sequence_length", "seq_length", "n_positions"):
        value = facts.get(key)
        if isinstance(value, int) and value > 0:
            return min(value, 2**31 - 1)
    raise ConfigError("The model's config has no context length: set model.context_tokens_max.")


def quantization(config: dict[str, Any]) -> dict[str, Any]:
    """Return quantization settings such as {"group_size": 64, "bits": 4}; {} without them."""
    for facts in (config, text_config(config)):
        for key in ("quantization", "quantization_config"):
            if isinstance(facts.get(key), dict):
                found: dict[str, Any] = facts[key]
                return found
    return {}


def _indexed_names(folder: Path) -> set[str]:
    path = folder / "model.safetensors.index.json"
    if not path.is_file():
        return set()
    try:
        return {str(name) for name in json.loads(path.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{path} is not an index of weight files: download the model again."
        ) from None


def _read_weight_file(path: Path) -> WeightFile:
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(HEADER_BYTES_MAX, size - 8):
                raise ConfigError(f"{path} is not a safetensors file, or its start is missing.")
            header = stream.read(length)
        expected = 8 + length + _payload_bytes(header)
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ConfigError(f"{path} is not a safetensors file: its header is damaged.") from None
    if size < expected:
        raise ConfigError(
            f"{path} is cut off: it has {size:,} of {expected:,} bytes. Download the model again."
        )
    return WeightFile(path, size, header)


def _payload_bytes(header: bytes) -> int:
    tensors = json.loads(header)
    tensors.pop("__metadata__", None)
    return max((int(facts["data_offsets"][1]) for facts in tensors.values()), default=0)
