"""Errors of MLX about kernels that do not compile or do not run."""

from collections.abc import Callable, Iterable
from typing import Any


def first_error(run: Callable[[Any], None], cases: Iterable[Any]) -> str:
    """Run kernels for all cases; return the first line of MLX's error, "" without one.

    Args:
        run: starts kernels and waits for their results.
        cases: it is called with each of them.
    """
    try:
        for one in cases:
            run(one)
    except (RuntimeError, ValueError) as error:
        return first_line(error)
    return ""


def first_line(error: Exception) -> str:
    """Return the first line of an error; those of compilers have many."""
    return (str(error).splitlines() or [repr(error)])[0]
