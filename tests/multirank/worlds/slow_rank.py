"""A real rank worker that computes correctly, but is late in one part of the model.

- attention: each attention takes some milliseconds longer on this rank;
- collective: this rank begins each sum over ranks some milliseconds later.

    python -m tests.multirank.worlds.slow_rank KIND MILLISECONDS --rank R
"""

import argparse
import os
import sys
import time
from typing import Any

from tests.chaos.cluster.patched_rank import run_patched_rank

KINDS = ("attention", "collective")


def delay(kind: str, seconds: float) -> None:
    """Delay each call of a method."""
    from services.rank_worker.model.fast_path.known_form.decoder_layer import DecoderLayer
    from services.rank_worker.model.fast_path.merged_linear import SummedLinear

    slow: Any = SummedLinear
    name = "__call__"
    if kind == "attention":
        slow, name = DecoderLayer, "attend"
    original = getattr(slow, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return original(self, *args, **kwargs)

    setattr(slow, name, call)


def main() -> int:
    """Run a rank worker that is late."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("milliseconds", type=float)
    parser.add_argument("--rank", type=int, required=True)
    options = parser.parse_args()
    seconds = options.milliseconds / 1e3
    return run_patched_rank(lambda: delay(options.kind, seconds), os.devnull, options.rank)


if __name__ == "__main__":
    sys.exit(main())
