"""A real rank worker that computes wrongly with others: only tests can start it.

- sum: every sum of more than a few elements has one wrong element on this rank;
- prompt: logits of prompts past 40 tokens are slightly off on this rank.

    python -m tests.multirank.wrong_rank KIND --rank R --config FILE
"""

import argparse
import sys
from typing import Any

from services.rank_worker import main as rank_worker
from services.rank_worker import scheduler_link
from shared.configuration.loading import load_config

KINDS = ("sum", "prompt")
SMALL, SHORT = 16, 40


def plant(kind: str) -> None:
    """Wrap what computes. MLX must not have been imported before the rank has chosen how."""
    import mlx.core as mx

    from services.rank_worker.collectives import Collectives
    from services.rank_worker.model.forward import Forward

    sum_ids, last_logits = Collectives.sum_ids, Forward.last_logits

    def wrong_sum(self: Any, ids: Any) -> Any:
        total = sum_ids(self, ids)
        if total.size <= SMALL:
            return total
        return mx.concatenate([total[:7], total[7:8] + 1, total[8:]])

    def wrong_logits(self: Any, tokens: Any, caches: Any) -> Any:
        logits = last_logits(self, tokens, caches)
        return logits * 1.0001 if tokens.shape[1] > SHORT else logits

    if kind == "sum":
        Collectives.sum_ids = wrong_sum  # type: ignore[method-assign]
    else:
        Forward.last_logits = wrong_logits  # type: ignore[method-assign]


def main() -> int:
    """Be a rank worker that is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--config", required=True)
    options = parser.parse_args()
    # What it finds is to be heard, however long the scheduler is held up.
    scheduler_link.FLUSH_S = 5.0
    look = rank_worker._describe_device

    def look_and_plant() -> Any:
        here = look()
        plant(options.kind)
        return here

    rank_worker._describe_device = look_and_plant
    return rank_worker.run(load_config(options.config), options.rank)


if __name__ == "__main__":
    sys.exit(main())
