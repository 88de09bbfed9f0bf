"""Builder of block indexes: blocks of 16 tokens that are kept without ranks."""

from services.scheduler.cache.index.block_index import BlockIndex, Entry, Node
from services.scheduler.cache.index.hashes import (
    Chain,
    block_hash,
    checkpoint_hash,
    root_hash,
)
from services.scheduler.cache.index.prefix_match import Match, find_match
from shared.messages.token_ids import pack

BLOCK_TOKENS = 16
TOKEN_BYTES = 10
"""Bytes of KV per token."""


def hash_chain(tokens: list[int], salt: str = "") -> Chain:
    """Return the hash chain of a text's whole blocks."""
    chain = Chain(root_hash("0" * 64, salt), BLOCK_TOKENS, tokens)
    chain.extend()
    return chain


def keep_blocks(
    index: BlockIndex, tokens: list[int], salt: str = "", *, tail: bool = True, system: int = 0
) -> list[Node]:
    """Make all blocks of a text resident, including a partial last block; return them."""
    chain = hash_chain(tokens, salt)
    at = index.root(chain.root)
    nodes: list[Node] = []
    parts = list(zip(chain.hashes, chain.packed, strict=True))
    rest = pack(tokens[BLOCK_TOKENS * len(parts) :])
    if tail and rest:
        before = chain.hashes[-1] if chain.hashes else chain.root
        parts.append((block_hash(before, rest), rest))
    for name, packed in parts:
        node = index.add(at, name, packed, TOKEN_BYTES * len(packed) // 4)
        assert node is not None
        if node.end <= system:
            index.set_system(node)
        if not node.is_resident:
            index.set_resident(node.block, resident=True)
        nodes.append(node)
        at = node
    index.touch(at)
    return nodes


def keep_checkpoint(index: BlockIndex, node: Node, size_bytes: int = 100) -> Entry:
    """Make the checkpoint at a block's end resident."""
    state = index.checkpoint(node, size_bytes)
    assert state.hash == checkpoint_hash(node.hash)
    index.set_resident(state, resident=True)
    index.touch(node, state)
    return state


def find_prefix(
    index: BlockIndex, tokens: list[int], salt: str = "", *, states: bool = False
) -> Match:
    """Return the prefix match of a text."""
    return find_match(index, hash_chain(tokens, salt), tokens, needs_checkpoints=states)
