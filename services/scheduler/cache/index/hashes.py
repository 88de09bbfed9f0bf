"""Names of blocks and checkpoints: chained keyed hashes over all tokens up to a block's end.

The key is a constant, never drawn per process: what is stored must be found again after a restart.
A hash takes the place of its tokens everywhere outside of the scheduler.
"""

import hashlib
import struct
from collections.abc import Sequence

from shared import limits

_KEY = b"lockstep kv blocks"
_HASH_BYTES = 32
TOKEN_BYTES = 4
"""A token id is packed as a little-endian int32."""


def namespace_of(fingerprint: str, layouts: Sequence[str], block_tokens: int) -> str:
    """Return whose blocks can be exchanged, as 64 hexadecimal digits.

    Args:
        fingerprint: the model's, which covers weights, quantization and how they are sharded.
        layouts: `RankReady.kv_layout` of each rank, in rank order.
        block_tokens: tokens in a whole block.
    """
    digest = hashlib.blake2b(key=_KEY, digest_size=_HASH_BYTES)
    parts = (str(limits.RECORD_FORMAT_VERSION), str(block_tokens), fingerprint, *layouts)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()


def root_hash(namespace: str, salt: str) -> bytes:
    """Return the parent of all first blocks of one tenant."""
    # A namespace has a fixed length, so no two pairs are written alike.
    return _hash(namespace.encode() + salt.encode("utf-8", "surrogatepass"))


def block_hash(parent: bytes, tokens: bytes) -> bytes:
    """Return the hash of a block.

    Args:
        parent: hash of the block before it, or a root.
        tokens: its packed token ids.
    """
    return _hash(parent + tokens)


def checkpoint_hash(block: bytes) -> bytes:
    """Return the hash of the checkpoint at the end of a whole block."""
    # Ten bytes are no packed tokens, so no block has this name.
    return _hash(block + b"checkpoint")


def pack(tokens: Sequence[int]) -> bytes:
    """Return token ids as little-endian int32."""
    return struct.pack(f"<{len(tokens)}i", *tokens)


class Chain:
    """The whole blocks of one growing sequence, each hashed once."""

    def __init__(self, root: bytes, block_tokens: int, tokens: list[int]) -> None:
        """Begin with no block.

        Args:
            root: what the first block is chained to.
            block_tokens: tokens in a whole block.
            tokens: the sequence's own list, to which tokens are only appended.
        """
        self.root = root
        self.hashes: list[bytes] = []
        self.packed: list[bytes] = []
        """Per whole block its packed token ids."""
        self.block_tokens = block_tokens
        self._tokens = tokens

    def extend(self) -> int:
        """Hash what has become whole since the last call; return how many blocks are whole."""
        size = self.block_tokens
        for number in range(len(self.hashes), len(self._tokens) // size):
            packed = pack(self._tokens[number * size : (number + 1) * size])
            self.hashes.append(block_hash(self.hash_before(number), packed))
            self.packed.append(packed)
        return len(self.hashes)

    def hash_before(self, number: int) -> bytes:
        """Return the hash that block `number` is chained to."""
        return self.hashes[number - 1] if number else self.root


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, key=_KEY, digest_size=_HASH_BYTES).digest()
