"""One sequence's sampling settings, sorted by what they cost."""

import dataclasses

from services.rank_worker.sampling import keys
from shared.messages import Sampling

GREEDY_TEMPERATURE_MAX = 1e-5
"""Below it float32 division loses differences between logits: such rows take the highest."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowSettings:
    """What the sampler asks about a row each step, answered once."""

    sampling: Sampling
    key_state: int
    is_random: bool
    is_cut: bool
    """Some of top_k, top_p, min_p is on, which costs a sort."""
    is_penalized: bool
    bias: list[tuple[int, float]]
    """Addends by token id, ids that the model does not have left out."""
    alternatives: int | None
    """Log probabilities asked for: None, or how many beside the chosen token's."""

    @property
    def is_plain(self) -> bool:
        """Whether the row is nothing but the highest logit."""
        return not (
            self.is_random or self.is_penalized or self.bias or self.alternatives is not None
        )


def read_settings(sampling: Sampling, vocab_size: int) -> RowSettings:
    """Sort a request's settings."""
    is_random = sampling.temperature >= GREEDY_TEMPERATURE_MAX
    return RowSettings(
        sampling=sampling,
        key_state=keys.start(sampling.seed),
        is_random=is_random,
        is_cut=is_random
        and (0 < sampling.top_k < vocab_size or sampling.top_p < 1.0 or sampling.min_p > 0.0),
        is_penalized=sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0,
        bias=[(token, addend) for token, addend in sampling.logit_bias if token < vocab_size],
        alternatives=sampling.top_logprobs,
    )
