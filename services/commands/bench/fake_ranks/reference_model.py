"""mlx-lm's own code for `lockstep bench accuracy`: log probabilities of given continuations.

    python -m services.commands.bench.fake_ranks.reference_model MODEL BACKEND

BACKEND is "off". The settings are those of the environment (LOCKSTEP_SECTION_KEY), of which
model.dtype counts. The first JSON line on standard output is {}. Each JSON line on standard input
is an order,

    {"texts": [[token ids of a prompt], ...], "tokens": [[ids of its continuation], ...]}

and is answered by {"logprobs": [[natural-log probability of each id], ...]}. A text is read at
once, and then each token of its continuation alone, as in a decode.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any, cast

import msgspec

# Imported before MLX, because it chooses the matrix library.
from services.commands.bench.fake_ranks import standalone_rank

# isort: split
import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from services.commands.bench.measuring.orders import answer_orders, write_answer
from services.rank_worker.device import hardware
from shared.configuration.loading import load_config
from shared.messages.rank_link import Backend
from shared.os import lifeline


def main(path: str, backend: Backend) -> None:
    """Load the model as one rank does, and answer orders.

    Args:
        path: the model's folder.
        backend: "off".
    """
    lifeline.exit_with_parent()
    hardware.wire_memory(hardware.describe_device())
    settings = msgspec.structs.replace(load_config(environment=os.environ).model, path=path)
    model = standalone_rank.load(standalone_rank.join(backend), settings, "none").model

    def answer(
        texts: Sequence[list[int]], tokens: Sequence[list[int]]
    ) -> dict[str, list[list[float]]]:
        pairs = zip(texts, tokens, strict=True)
        return {"logprobs": [log_probabilities(model, *pair) for pair in pairs]}

    write_answer({})
    answer_orders(answer)


def log_probabilities(model: Any, text: list[int], tokens: Sequence[int]) -> list[float]:
    """Return the natural-log probability of each token of a continuation.

    The softmax is computed in float32.

    Args:
        model: a model of mlx-lm.
        text: token ids before the continuation.
        tokens: ids of the continuation.
    """
    cache = make_prompt_cache(model)
    read, found = text, []
    for token in tokens:
        logits = model(mx.array([read]), cache=cache)[0, -1].astype(mx.float32)
        found.append(float((logits[token] - mx.logsumexp(logits)).item()))
        read = [token]
    return found


if __name__ == "__main__":
    main(sys.argv[1], cast(Backend, sys.argv[2]))
