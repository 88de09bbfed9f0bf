"""Programs that measure on order: one JSON line in per order, one JSON line out per answer."""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any


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
