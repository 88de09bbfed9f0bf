"""A real rank worker with wrong sums or wrong logits.

- sum: each sum of more than 16 elements has one wrong element on this rank;
- prompt: the logits of prompts of more than 40 tokens are slightly wrong on this rank.

    python -m tests.multirank.worlds.faulty_rank KIND --rank R --config FILE
"""

import argparse
import sys
from typing import Any

from services.rank_worker import scheduler_link
from tests.chaos.cluster.patched_rank import run_patched_rank

KINDS = ("sum", "prompt")
SUM_ELEMENTS_MIN, PROMPT_TOKENS_MIN = 17, 41


def patch_results(kind: str) -> None:
    """Replace the function that computes this kind of result."""
    import mlx.core as mx

    from services.rank_worker.model.forward import Forward
    from services.rank_worker.peers.collectives import Collectives

    sum_ids, last_logits = Collectives.sum_ids, Forward.last_logits

    def wrong_sum(self: Any, ids: Any) -> Any:
        total = sum_ids(self, ids)
        if total.size < SUM_ELEMENTS_MIN:
            return total
        return mx.concatenate([total[:7], total[7:8] + 1, total[8:]])

    def wrong_logits(self: Any, tokens: Any, caches: Any) -> Any:
        logits = last_logits(self, tokens, caches)
        return logits * 1.0001 if tokens.shape[1] >= PROMPT_TOKENS_MIN else logits

    if kind == "sum":
        Collectives.sum_ids = wrong_sum  # type: ignore[method-assign]
    else:
        Forward.last_logits = wrong_logits  # type: ignore[method-assign]


def main() -> int:
    """Run a rank worker with wrong results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--config", required=True)
    options = parser.parse_args()
    # The last message of the rank must arrive even if the scheduler is slow.
    scheduler_link.FLUSH_S = 5.0
    return run_patched_rank(lambda: patch_results(options.kind), options.config, options.rank)


if __name__ == "__main__":
    sys.exit(main())
