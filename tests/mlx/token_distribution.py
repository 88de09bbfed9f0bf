"""Statistics of generated tokens: expected probabilities, and a test of counts against them."""

import math

import mlx.core as mx
import numpy as np

from services.rank_worker.sampling.gumbel_max import truncate
from services.rank_worker.sampling.row_settings import RowSettings
from shared.messages import Sampling


def token_probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return the probability with which each token is drawn.

    Args:
        logits: float32 [rows, vocab].
        sampling: settings of all rows.

    Returns:
        Probabilities [rows, vocab]; each row adds up to 1.
    """
    logits = logits.copy()
    for token, addend in sampling.logit_bias:
        logits[:, token] += addend
    scaled = logits / sampling.temperature
    settings = [RowSettings(sampling, scaled.shape[1])] * len(scaled)
    order = np.argsort(-scaled, axis=-1)
    kept = np.array(truncate(mx.array(np.take_along_axis(scaled, order, -1)), settings))
    shares = np.zeros(scaled.shape)
    for row in range(len(scaled)):
        chosen = order[row][kept[row]]
        shares[row, chosen] = np.exp(scaled[row, chosen])
    probabilities: np.ndarray = shares / shares.sum(axis=1, keepdims=True)
    return probabilities


def fits_distribution(counts: np.ndarray, probabilities: np.ndarray) -> bool:
    """Test counts of tokens against their probabilities at a significance of 0.1 %.

    A chi-square test of all rows together, with the approximation of Wilson and Hilferty.

    Args:
        counts: how often each token was drawn, [rows, vocab].
        probabilities: of each token, [rows, vocab].
    """
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = counts.sum(axis=1, keepdims=True) * probabilities
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = int(possible.sum()) - len(probabilities)
    third = 2 / (9 * freedom)
    return bool(statistic < freedom * (1 - third + 3.0902 * math.sqrt(third)) ** 3)
