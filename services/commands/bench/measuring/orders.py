"""Programs that measure on order: one JSON line in per order, one JSON line out per answer."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shared.errors import LockstepError


def write_answer(answer: Mapping[str, Any]) -> None:
    """Write an object as one JSON line to standard output."""
    print(json.dumps(answer), flush=True)


def answer_orders(answer: Callable[..., Mapping[str, Any]]) -> None:
    """Answer every order on standard input, until the input closes.

    Args:
        answer: carries out one order, the object of a JSON line that it gets as keyword arguments,
            and returns the object of the answer's JSON line.
    """
    for line in sys.stdin:
        write_answer(answer(**json.loads(line)))


@contextlib.contextmanager
def refusals_written() -> Iterator[None]:
    """Write {"refused": sentence} in place of a description and exit, if a program cannot start.

    Its parent then shows the sentence, and not the end of a traceback.
    """
    try:
        yield
    except LockstepError as error:
        write_answer({"refused": str(error)})
        sys.exit(1)
