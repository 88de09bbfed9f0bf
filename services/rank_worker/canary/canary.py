"""The canary: before a world serves, it computes what is known, and what must be equal.

Wrong collectives do not fail, they return wrong numbers. So sums whose results are known are
checked here, before anything else is computed with the others, and a long prompt after the warm-up;
the scheduler compares both over all ranks. I3 allows collectives at load.
"""

import mlx.core as mx
import numpy as np
from mlx import nn

from services.rank_worker.canary import long_prompt, sums
from services.rank_worker.collectives import Collectives
from services.rank_worker.execution.executor import Executor
from shared.clock import Clock
from shared.messages import CanaryFinding, JoinWorld

SUMS_DEADLINE_S = 180.0
"""All ranks have loaded when the sums begin; over 1 Gbit/s they take seconds."""

LOAD_SHARE = 0.25
"""No prompt is begun that is expected to take more of the load deadline."""

ROOM_MAX = 2**31 - 1
"""Tokens; the ranks compare int32 numbers."""

_FALLBACK = (4_096, mx.float32)
"""Width and type of activations where a model has no embedding to read them off."""

_DTYPES = (mx.float32, mx.float16, mx.bfloat16)


class Canary:
    """What one rank has found, in order; it finds nothing where there is nobody to compare with."""

    def __init__(self, order: JoinWorld, world: Collectives, clock: Clock) -> None:
        self.is_on = order.canary and order.world_size > 1
        self.findings: list[CanaryFinding] = []
        self._order = order
        self._world = world
        self._clock = clock

    def check_sums(self, model: nn.Module) -> None:
        """Check sums of the sizes and types that this model's steps send.

        Raises:
            CanaryFailed: one is wrong on this rank.
        """
        if not self.is_on:
            return
        # Ranks may lack a part of the model: rank 0 says of what size and how many sums are.
        hidden_size, dtype = activations(model)
        hidden_size, kind, count = self._of_rank_0(
            hidden_size, _DTYPES.index(dtype), sums.count_sums(model)
        )
        dtype = _DTYPES[kind]
        self.findings += sums.check_sums(self._world, hidden_size, dtype, self._clock)
        # And the one by which all get rank 0's ids.
        count += self._order.synchronization == "broadcast"
        self.findings += sums.time_sums(self._world, count, hidden_size, dtype, self._clock)

    def check_prompt(
        self, executor: Executor, context_tokens_max: int, room_tokens: int, *, on_cpu: bool
    ) -> None:
        """Run a long prompt; the executor is fresh, and as fresh again afterwards.

        Args:
            executor: of this rank.
            context_tokens_max: no sequence becomes longer; equal on all ranks.
            room_tokens: a row of so many tokens fits into this rank's memory; the rank with the
                least decides.
            on_cpu: the model runs on the CPU.

        Raises:
            CanaryFailed: the model gives no numbers for it.
        """
        if not self.is_on:
            return
        wanted_s = self._order.canary_prompt_s or long_prompt.default_budget_s(on_cpu=on_cpu)
        least = min(room for (room,) in self._world.gather([min(room_tokens, ROOM_MAX)]))
        finding = long_prompt.check_prompt(
            executor,
            self._world,
            min(context_tokens_max, long_prompt.longest_prompt_within(least) + 1),
            self._clock,
            # Each length may take several times what was expected, and the deadline is for all.
            budget_s=min(wanted_s, LOAD_SHARE * self._order.load_deadline_s),
            bits=self._order.receipt_logits,
        )
        self.findings.append(finding)

    def _of_rank_0(self, *numbers: int) -> list[int]:
        """Return rank 0's numbers on all ranks."""
        own = numbers if self._world.rank == 0 else [0] * len(numbers)
        return [int(one) for one in np.array(self._world.sum_ids(mx.array(own, dtype=mx.int32)))]


def activations(model: nn.Module) -> tuple[int, mx.Dtype]:
    """Return width and type of what an embedding of the model gives; nothing is computed."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
            state = module(mx.zeros((1,), dtype=mx.int32))
            if state.dtype in _DTYPES:
                return int(state.shape[-1]), state.dtype
    return _FALLBACK
