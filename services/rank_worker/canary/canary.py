"""Canary of a world: computations with known or equal results before a rank is ready.

Faulty collectives return wrong numbers instead of failing. So each rank checks sums with known
results first and a long prompt after the warm-up; the scheduler compares both over all ranks.
"""

import mlx.core as mx
from mlx import nn

from services.rank_worker.canary import long_prompt, sums
from services.rank_worker.canary.gathers import check_gathers
from services.rank_worker.execution.executor import Executor
from services.rank_worker.peers.collectives import Collectives
from services.rank_worker.sampling.vocabulary import VocabularyPart
from shared.clock import Clock
from shared.messages import CanaryFinding, JoinWorld

SUMS_DEADLINE_S = 180.0
"""Deadline of the sums, which begin when all ranks have loaded. Over 1 Gbit/s they take seconds."""

LOAD_DEADLINE_SHARE = 0.25
"""Largest part of the load deadline that one prompt may be expected to take."""

ROW_TOKENS_MAX = 2**31 - 1
"""The ranks compare row lengths as int32."""

_DEFAULT_ACTIVATIONS = (4_096, mx.float32)
"""Width and dtype of activations for models whose embedding is not found."""

_DTYPES = (mx.float32, mx.float16, mx.bfloat16)


class Canary:
    """Tests of a rank's collectives and model before it is ready, with their findings.

    Does nothing in a world of one rank, or where the order to join turns the canary off.
    """

    def __init__(self, order: JoinWorld, world: Collectives, clock: Clock) -> None:
        self.is_on = order.canary and order.world_size > 1
        self.findings: list[CanaryFinding] = []
        """One entry per check in order: name, digest of the result, bytes sent, microseconds."""
        self._order = order
        self._world = world
        self._clock = clock

    def check_sums(self, model: nn.Module, vocabulary: VocabularyPart | None = None) -> None:
        """Compare sums over all ranks with known results; time the sums that a decode step has.

        Sizes and dtypes are those that this model's steps send. Adds the findings of
        `sums.check_sums` and `sums.time_sums`, and of `gathers.check_gathers` if the head is
        divided.

        Args:
            model: this rank's shard; only its shapes are read.
            vocabulary: the part of it whose logits the model computes; None: it computes all.

        Raises:
            CanaryFailed: a sum or gather differs from its known result on this rank.
        """
        if not self.is_on:
            return
        # Other ranks may lack the embedding, so rank 0 determines sizes and number of the sums.
        hidden_size, dtype = activations(model)
        hidden_size, dtype_index, count = sums.of_rank_0(
            self._world, hidden_size, _DTYPES.index(dtype), sums.count_sums(model)
        )
        dtype = _DTYPES[dtype_index]
        self.findings += sums.check_sums(self._world, hidden_size, dtype, self._clock)
        if vocabulary is not None:
            self.findings += check_gathers(self._world, vocabulary, self._clock)
        # One more sum broadcasts the ids of rank 0.
        count += self._order.synchronization == "broadcast"
        self.findings += sums.time_sums(self._world, count, hidden_size, dtype, self._clock)

    def check_prompt(
        self, executor: Executor, context_tokens_max: int, row_tokens_max: int, *, on_cpu: bool
    ) -> None:
        """Run a long prompt through the model and add a finding with the digest of its result.

        Not done if the order to join says that it has passed lately.

        The scheduler compares the digests of all ranks, which must be equal.

        Args:
            executor: of this rank, without sequences, before and after.
            context_tokens_max: longest sequence in tokens; equal on all ranks.
            row_tokens_max: longest row in tokens that fits into this rank's memory; the smallest of
                all ranks counts.
            on_cpu: whether the model runs on the CPU, where the prompt has less time by default.

        Raises:
            CanaryFailed: the model's logits are not finite.
        """
        if not self.is_on or not self._order.canary_prompt:
            return
        default_s = long_prompt.CPU_BUDGET_S if on_cpu else long_prompt.BUDGET_S
        budget_s = self._order.canary_prompt_s or default_s
        row_tokens = min(
            tokens for (tokens,) in self._world.gather([min(row_tokens_max, ROW_TOKENS_MAX)])
        )
        finding = long_prompt.check_prompt(
            executor,
            self._world,
            min(context_tokens_max, long_prompt.longest_prompt_within(row_tokens) + 1),
            self._clock,
            # A length may take several times the expected time, and all share the deadline.
            budget_s=min(budget_s, LOAD_DEADLINE_SHARE * self._order.load_deadline_s),
            exact=self._order.receipt_logits,
        )
        self.findings.append(finding)


def activations(model: nn.Module) -> tuple[int, mx.Dtype]:
    """Return (width H, dtype) of the model's token embeddings; nothing is computed.

    Without a known embedding layer these are 4,096 and float32.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
            embedded = module(mx.zeros((1,), dtype=mx.int32))
            if embedded.dtype in _DTYPES:
                return int(embedded.shape[-1]), embedded.dtype
    return _DEFAULT_ACTIVATIONS
