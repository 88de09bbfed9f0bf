"""mlx-lm's own code for `lockstep bench accuracy`: log probabilities of given continuations.

    python -m services.commands.bench.fake_ranks.reference_model MODEL BACKEND

BACKEND is "off": one process has the whole model. The settings of the model and of the matrix
library are those of the environment (LOCKSTEP_SECTION_KEY). The first JSON line on standard output
is {}, or {"refused": sentence}. Each JSON line on standard input is an order,

    {"text": [token ids], "tokens": [ids of its continuation]}

and is answered by {"logprobs": [natural-log probability of each id], "likeliest": [the likeliest id
in the place of each]}. The text is read at once, and then each token of its continuation alone, as
in a decode of one row.
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

from services.commands.bench.measuring.orders import answer_orders, refusals_written, write_answer
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
    with refusals_written():
        model = standalone_rank.load(standalone_rank.join(backend), settings, "none").model
    write_answer({})
    answer_orders(lambda text, tokens: read_again(model, text, tokens))


def read_again(model: Any, text: list[int], tokens: Sequence[int]) -> dict[str, list[Any]]:
    """Return the probabilities that a model gives to a continuation.

    The softmax is computed in float32.

    Args:
        model: a model of mlx-lm.
        text: token ids before the continuation.
        tokens: ids of the continuation.

    Returns:
        logprobs: the natural-log probability of each token; likeliest: the likeliest token id after
        the text and the tokens before.
    """
    cache = make_prompt_cache(model)
    read, logprobs, likeliest = text, [], []
    for token in tokens:
        logits = model(mx.array([read]), cache=cache)[0, -1].astype(mx.float32)
        logprobs.append(float((logits[token] - mx.logsumexp(logits)).item()))
        likeliest.append(int(logits.argmax().item()))
        read = [token]
    return {"logprobs": logprobs, "likeliest": likeliest}


if __name__ == "__main__":
    main(sys.argv[1], cast(Backend, sys.argv[2]))
