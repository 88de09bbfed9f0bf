"""Hashes of blocks and checkpoints: keyed BLAKE2b, chained over all tokens up to a block's end.

The key is a constant, so that stored blocks are found after a restart. Outside of the scheduler a
hash stands for its tokens.
"""

import hashlib
from collections.abc import Sequence

from shared import limits
from shared.messages.token_ids import pack

_KEY = b"lockstep kv blocks"
_HASH_BYTES = 32


def namespace_of(fingerprint: str, layouts: Sequence[str], block_tokens: int) -> str:
    """Return the namespace of a world's blocks, as 64 hexadecimal digits.

    Worlds with the same namespace can use each other's blocks.

    Args:
        fingerprint: the model's, over weights, quantization and sharding.
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
    """Return the hash that stands before the first block of a tenant's sequences.

    Args:
        namespace: as from `namespace_of`.
        salt: the tenant's cache salt; tenants with different salts share no blocks.
    """
    # A namespace has a fixed length, so two different pairs never give the same bytes.
    return _hash(namespace.encode() + salt.encode("utf-8", "surrogatepass"))


def block_hash(parent: bytes, tokens: bytes) -> bytes:
    """Return the hash of a block.

    Args:
        parent: hash of the block before it, or a root hash.
        tokens: packed token ids.
    """
    return _hash(parent + tokens)


def checkpoint_hash(block: bytes) -> bytes:
    """Return the hash of the checkpoint at the end of a whole block."""
    # Ten bytes are not packed tokens, so no block has this hash.
    return _hash(block + b"checkpoint")


class Chain:
    """The hashes of the whole blocks of one growing sequence, each computed once."""

    def __init__(self, root: bytes, block_tokens: int, tokens: Sequence[int]) -> None:
        """Start without blocks.

        Args:
            root: hash before the first block.
            block_tokens: tokens in a whole block.
            tokens: all tokens of the sequence, which only grow.
        """
        self.root = root
        self.hashes: list[bytes] = []
        self.packed: list[bytes] = []
        """The packed token ids of each whole block."""
        self.block_tokens = block_tokens
        self.tokens = tokens
        """All tokens of the sequence."""

    def extend(self) -> int:
        """Hash the blocks completed since the last call; return how many are hashed in all."""
        size = self.block_tokens
        for number in range(len(self.hashes), len(self.tokens) // size):
            packed = pack(self.tokens[number * size : (number + 1) * size])
            before = self.hashes[-1] if self.hashes else self.root
            self.hashes.append(block_hash(before, packed))
            self.packed.append(packed)
        return len(self.hashes)


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, key=_KEY, digest_size=_HASH_BYTES).digest()
