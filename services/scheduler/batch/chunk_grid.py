"""Grids of chunk ends. Pure functions: cut prompts where other prompts were cut before."""

_CELLS_PER_CHUNK = 2
"""A chunk has at least this many cells, so rounding takes less than a third off an aligned one."""

FIXED_CELL = 256
"""Tokens of a cell of the fixed grid: long enough for a device, short enough beside decodes."""


def fixed_length(position: int) -> int:
    """Return the tokens of a prompt from a position to the next end of a cell of the fixed grid."""
    return FIXED_CELL - position % FIXED_CELL


def round_down(tokens: int, position: int = 0) -> int:
    """Shorten a prompt's chunk so that it ends on the grid.

    Cells are powers of two: half of the largest one that the chunk could hold. Chunks that start on
    the grid therefore have 2^n or 3 * 2^n tokens. Finer steps would bring more shapes; powers of
    two alone would never let a chunk grow by half.

    Args:
        tokens: most tokens of the chunk, 1 or more.
        position: tokens of the prompt before it, on the grid or not.

    Returns:
        The chunk's tokens, more than half of `tokens`.
    """
    cell = max(1, (1 << (tokens.bit_length() - 1)) // _CELLS_PER_CHUNK)
    return tokens - (position + tokens) % cell
