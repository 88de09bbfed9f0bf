"""MLX arrays that files are read into. The only file of the stored tier that knows MLX."""

import mlx.core as mx


def allocate(size_bytes: int, skipped: int) -> tuple[memoryview, mx.array]:
    """Return writable memory, and the array uint8 [size_bytes - skipped] that ends with it.

    The array is computed, so whoever uses it waits for nothing, and nobody else has it yet, so
    what is written now is what it holds. `mx.array(bytes)` would copy under the GIL instead: 2 to
    40 ms for 16 MiB, during which no step could be launched.

    Raises:
        RuntimeError: there is no memory.
    """
    # On the CPU's stream: on a GPU's it would wait for the step that runs there.
    whole = mx.empty((size_bytes,), dtype=mx.uint8, stream=mx.cpu)
    rest = mx.split(whole, [skipped], stream=mx.cpu)[1]
    mx.eval(whole, rest)
    return memoryview(whole), rest  # type: ignore[arg-type]
