"""The prefix match of a sequence against resident and known blocks. Changes nothing."""

import bisect
import dataclasses
from collections.abc import Sequence

from services.scheduler.cache.index.block_index import BlockIndex, Entry, Node, tokens_of
from services.scheduler.cache.index.hashes import Chain
from shared import limits
from shared.messages.token_ids import TOKEN_BYTES, pack

_NEIGHBOURS_MAX = 32
"""Children on each side of the most similar position that are examined."""


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """Result of a prefix match: the resident blocks that a row can copy, and the known prefix."""

    path: list[Node]
    """Resident blocks from the first token on; the last one may be used in part."""
    tokens: int
    """Leading tokens that a row can copy from these blocks."""
    checkpoint: Entry | None
    """The checkpoint at `tokens`, where rows need one."""
    whole_blocks: int
    """Leading whole blocks of the sequence that are resident."""
    shared_tokens: int
    """Leading tokens shared with a known sequence, whether copies exist or not."""
    diverged_at: int | None
    """Position where the most similar known sequence differs; None: it ends there."""


def find_match(
    index: BlockIndex,
    chain: Chain,
    tokens: Sequence[int],
    *,
    needs_checkpoints: bool,
    grid_tokens: int = 1,
) -> Match:
    """Find the longest prefix of a sequence that resident blocks hold; the last token is left out.

    Args:
        index: all known blocks.
        chain: hashes of the sequence's whole blocks.
        tokens: the whole sequence.
        needs_checkpoints: rows can reuse blocks only up to a checkpoint.
        grid_tokens: without checkpoints the prefix is a multiple of this number of tokens.

    Returns:
        That prefix with its blocks, and how far known blocks, resident or not, have the same
        tokens.
    """
    root = index.find_root(chain.root)
    if root is None:
        return Match([], 0, None, 0, 0, None)
    path, known = _walk(index, root, chain)
    whole = len(path)
    shared, diverged_at = _known_prefix(known, tokens, chain.block_tokens)
    if needs_checkpoints:
        checkpoint = _last_checkpoint(path, len(tokens) - 1)
        end = checkpoint.node.end if checkpoint is not None else 0
        usable = [node for node in path if node.end <= end]
        return Match(usable, end, checkpoint, whole, shared, diverged_at)
    last = path[-1] if path else root
    wanted = pack(tokens[last.end : last.end + chain.block_tokens])
    best, part = _most_similar(last, wanted)
    if best is not None:
        path.append(best)
    found = min(last.end + part, len(tokens) - 1)
    found -= found % grid_tokens
    while path and path[-1].start >= found:
        path.pop()
    return Match(path, found if path else 0, None, whole, shared, diverged_at)


def _walk(index: BlockIndex, root: Node, chain: Chain) -> tuple[list[Node], Node]:
    """Return the leading resident whole blocks, and the last known block."""
    path: list[Node] = []
    known, is_resident = root, True
    for block_hash, packed in zip(chain.hashes, chain.packed, strict=True):
        node = index.find(known, block_hash, packed)
        if node is None or not node.is_known:
            break
        is_resident = is_resident and node.is_resident
        if is_resident and len(path) < limits.BLOCKS_PER_MESSAGE_MAX - 1:
            path.append(node)
        known = node
    return path, known


def _known_prefix(known: Node, tokens: Sequence[int], block_tokens: int) -> tuple[int, int | None]:
    """Return the shared tokens, and the position where a known sequence differs."""
    wanted = pack(tokens[known.end : known.end + block_tokens])
    near = _near(known, wanted) if wanted else []
    near = [node for node in near if node.is_known]
    if not near:
        return known.end, None
    most_similar = max(near, key=lambda node: shared_length(node.tokens, wanted))
    part = shared_length(most_similar.tokens, wanted)
    shared = known.end + part
    ends = part * TOKEN_BYTES in (len(most_similar.tokens), len(wanted))
    return shared, None if ends or not shared else shared


def _most_similar(parent: Node, wanted: bytes) -> tuple[Node | None, int]:
    """Return the resident child most similar to `wanted`, and how many tokens they share."""
    best, part = None, 0
    for node in _near(parent, wanted):
        if node.is_resident:
            same = shared_length(node.tokens, wanted)
            if same > part:
                best, part = node, same
    return best, part


def nearest_from(parent: Node, wanted: bytes) -> list[Node]:
    """Return up to 32 children of a block whose tokens sort at or after `wanted`, nearest first.

    Args:
        parent: the block.
        wanted: packed token ids, with which those of the children are compared as bytes.
    """
    place = bisect.bisect_left(parent.children, wanted, key=tokens_of)
    return parent.children[place : place + _NEIGHBOURS_MAX]


def nearest_before(parent: Node, wanted: bytes) -> list[Node]:
    """Return up to 32 children of a block whose tokens sort before `wanted`, nearest first.

    They include the children whose tokens are a prefix of `wanted`.

    Args:
        parent: the block.
        wanted: packed token ids, with which those of the children are compared as bytes.
    """
    place = bisect.bisect_left(parent.children, wanted, key=tokens_of)
    return parent.children[max(0, place - _NEIGHBOURS_MAX) : place][::-1]


def _near(parent: Node, wanted: bytes) -> list[Node]:
    """Return children that include the one that shares most tokens with `wanted`.

    In byte order, that child is next to `wanted`.
    """
    return nearest_from(parent, wanted) + nearest_before(parent, wanted)


def _last_checkpoint(path: list[Node], tokens_max: int) -> Entry | None:
    for node in reversed(path):
        checkpoint = node.checkpoint
        if node.end <= tokens_max and checkpoint is not None and checkpoint.is_resident:
            return checkpoint
    return None


def shared_length(one: bytes, other: bytes) -> int:
    """Return the number of leading token ids that two packed lists share."""
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    if one[: high * TOKEN_BYTES] == other[: high * TOKEN_BYTES]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        part = slice(low * TOKEN_BYTES, middle * TOKEN_BYTES)
        if one[part] == other[part]:
            low = middle
        else:
            high = middle
    return low
