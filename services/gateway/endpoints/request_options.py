"""Checked options of a request, the same for every dialect. Owns seeds and names of sessions."""

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from services.gateway.http.errors import invalid_field
from shared.configuration.settings import GatewayConfig
from shared.messages import Sampling
from shared.messages.gateway_link import Speculation

SESSION_KEY_CHARS_MAX = 128
"""Longest name of a session that is kept; clients send UUIDs."""

_SEED_BITS = 63
_SESSION_HEADERS = ("X-Claude-Code-Session-Id", "x-session-affinity", "x-session-id", "session-id")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Checked options of one request, with defaults in place of fields that were not set."""

    model: str
    """The model's name as the client gave it."""
    sampling: Sampling
    """How tokens are sampled; its seed is the request's, any 64-bit integer."""
    count: int = 1
    """Choices per prompt."""
    stops: list[str] = dataclasses.field(default_factory=list)
    """Stop strings without duplicates."""
    stop_ids: list[int] = dataclasses.field(default_factory=list)
    """Token ids that end a completion, beside those of the model."""
    max_tokens: int
    """Most tokens of a completion."""
    max_tokens_param: str
    """Name of the field that `max_tokens` came from, for errors."""
    clamps_max_tokens: bool = False
    """A completion may have fewer tokens if `max_tokens` do not fit the context, and no error. So
    it is wherever the client did not choose the number."""
    is_streamed: bool
    includes_usage: bool = True
    """The stream's last chunk has the token counts."""
    speculation: Speculation = dataclasses.field(default_factory=Speculation)
    prediction: str = ""
    """Text that the client expects in the completions; drafts are copied from it."""
    priority: int = 0
    """Requests of one tenant with higher values are admitted first."""
    cache_salt: str | None = None
    """Only requests with the same salt share cached prefixes."""
    session_names: list[Any] = dataclasses.field(default_factory=list)
    """Values of fields that may name the client's session, the best one first."""

    def choice_sampling(self, number: int, vocab_size: int) -> Sampling:
        """Return the sampling parameters of one choice, which has its own seed.

        Args:
            number: position of the choice among those of its prompt, counted from 0.
            vocab_size: number of the model's token ids.

        Raises:
            ApiError: 400 when `logit_bias` has an unknown token id.
        """
        for token, _ in self.sampling.logit_bias:
            if token >= vocab_size:
                problem = f"the model has no token {token}, only 0 to {vocab_size - 1}."
                raise invalid_field("logit_bias", problem)
        return msgspec.structs.replace(self.sampling, seed=mix_seed(self.sampling.seed, number))


def checked_stops(stops: Sequence[str], param: str, config: GatewayConfig) -> list[str]:
    """Return the stop strings of a request, without empty ones and duplicates.

    Args:
        stops: the stop strings as the client gave them.
        param: the request field with them, for errors.
        config: the most stop strings of a request.

    Raises:
        ApiError: 400 when there are too many.
    """
    if len(stops) > config.stop_strings_max:
        raise invalid_field(param, f"at most {config.stop_strings_max} strings are allowed.")
    return list(dict.fromkeys(filter(None, stops)))


def most_likely(top_p: float | None, top_k: int | None) -> tuple[float, int]:
    """Return top_p and top_k of `Sampling` for those of a request.

    Args:
        top_p: the least sum of probabilities of the tokens to sample from; 0: the most likely token
            only; None: all tokens.
        top_k: the number of most likely tokens to sample from; None, 0 and less: all tokens.
    """
    return (1.0, 1) if top_p == 0 else (1.0 if top_p is None else top_p, max(0, top_k or 0))


def session_key(request: web.Request, *fields: Any) -> str:
    """Return the client's name of its session, "" if it gives none.

    Args:
        request: the HTTP request, whose headers come first.
        fields: values of request fields that name a session, the best one first.
    """
    named = [request.headers.get(name) for name in _SESSION_HEADERS]
    found = next((key for key in (*named, *fields) if isinstance(key, str) and key), "")
    return found[:SESSION_KEY_CHARS_MAX]


def random_seed() -> int:
    """Return a random sampling seed."""
    return secrets.randbits(_SEED_BITS)


def mix_seed(seed: int, number: int) -> int:
    """Return the sampling seed of one choice, from 0 up to 2**63 - 1.

    Choice 0 gets the low 63 bits of the request's seed. Others get a SplitMix64 hash of them and
    the number. Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014.

    Args:
        seed: the request's seed.
        number: position of the choice among those of its prompt, counted from 0.
    """
    mask = (1 << 64) - 1
    value = seed & ((1 << _SEED_BITS) - 1)
    if number == 0:
        return value
    value = (value + number * 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return (value ^ (value >> 31)) >> 1
