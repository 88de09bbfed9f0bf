"""The model fingerprint: only ranks with the same weights and versions form a world. No MLX."""

import hashlib
import importlib.metadata
import json
from collections.abc import Iterable
from typing import Any

from shared.model.checkpoint_files import WeightFile

EDGE_BYTES = 64 * 1024
"""How much of each end of a file's tensors is read."""


def model_fingerprint(
    config: dict[str, Any],
    files: Iterable[WeightFile],
    *,
    dtype: str,
    world_size: int,
    sharding: str,
) -> str:
    """Return 32 hexadecimal digits, equal on all ranks that hold shards of the same model.

    Covered: the config, and of every weight file its name, size, header (names, types, shapes,
    offsets) and the first and last 64 KiB of its tensors; how weights are cast and split; the
    versions of mlx and mlx-lm. NOT covered: the rest of the tensors. Hashing hundreds of gigabytes
    at every start would take minutes; another revision or quantization of a model differs in what
    is covered, a flipped bit in the middle does not.

    Args:
        config: the model's config.json.
        files: its weight files, by name.
        dtype: type that unquantized weights are cast to, or "checkpoint".
        world_size: number of ranks.
        sharding: how the model is split, for example "tensor".
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
