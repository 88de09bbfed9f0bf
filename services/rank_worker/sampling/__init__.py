"""How the next token is drawn from logits: a pure function of logits, seed and position."""

from services.rank_worker.sampling.sampler import Drawn, Sampler

__all__ = ["Drawn", "Sampler"]
