"""The model fingerprint, a digest that must be equal on all ranks of a world. No MLX."""

import hashlib
import importlib.metadata
import json
from collections.abc import Iterable
from typing import Any

from shared.model.checkpoint_files import WeightFile

EDGE_BYTES = 64 * 1024
"""Bytes that are hashed at each end of a file's tensors."""


def model_fingerprint(
    config: dict[str, Any],
    files: Iterable[WeightFile],
    *,
    dtype: str,
    world_size: int,
    sharding: str,
) -> str:
    """Return 32 hexadecimal digits, equal on all ranks that hold shards of the same model.

    Covers the config; the name, size, header (names, types, shapes, offsets) and the first and last
    64 KiB of tensors of every weight file; casts and splitting; the versions of mlx and mlx-lm.
    Does not cover the rest of the tensors, because hashing hundreds of gigabytes would take minutes
    at every start. So it detects another revision or quantization, but not a flipped bit.

    Args:
        config: the model's config.json.
        files: the model's weight files, sorted by name.
        dtype: type that unquantized weights are cast to, or "checkpoint".
        world_size: number of ranks.
        sharding: description of the splitting, for example "tensor".

    Raises:
        OSError: when a weight file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    versions = [importlib.metadata.version(name) for name in ("mlx", "mlx-lm")]
    facts = [config, dtype, world_size, sharding, versions]
    digest.update(json.dumps(facts, sort_keys=True, ensure_ascii=True).encode())
    for file in files:
        name = file.path.name.encode()
        digest.update(b"%d:%s:%d:" % (len(name), name, file.size_bytes))
        digest.update(file.header)
        with file.path.open("rb") as stream:
            stream.seek(file.payload_start)
            digest.update(stream.read(EDGE_BYTES))
            stream.seek(max(file.payload_start, file.size_bytes - EDGE_BYTES))
            digest.update(stream.read(EDGE_BYTES))
    return digest.hexdigest()
