"""The base of all messages, and the parts that several of them hold."""

from typing import Annotated

from msgspec import Meta, Struct

from shared import limits

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""A token id; int32 on the device."""

Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Milliseconds = Annotated[float, Meta(ge=0.0, le=1e12)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
ShortText = Annotated[str, Meta(max_length=4_096)]
RequestName = Annotated[str, Meta(min_length=1, max_length=limits.REQUEST_ID_CHARS_MAX)]
Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]
BlockHash = Annotated[bytes, Meta(min_length=32, max_length=32)]
"""Names a block or a checkpoint: keyed hash over a namespace, a salt and all tokens up to its
end."""
Namespace = Annotated[str, Meta(max_length=64, pattern=r"\A[0-9a-f]*\Z")]
"""Whose blocks can be exchanged, in hexadecimal digits: one model, split and laid out one way."""
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Base of every message. Subclasses repeat the options: msgspec does not inherit them all."""


class TokenLogprobs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Natural-log probabilities at one position, before temperature and cut-offs."""

    logprob: float
    """Of the token that was chosen."""
    top_ids: list[TokenId] = []
    """The most likely token ids, likeliest first; as many as the request asked for."""
    top_logprobs: list[float] = []
    """Their log probabilities, same order and length."""


class Sampling(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """How the next token is drawn.

    In this order: bias and penalties, temperature, top_k, top_p, min_p, draw.
    """

    seed: Seed
    """Always set: by the client or drawn by the gateway. The draw is a function of it and the
    position."""
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    """0 means greedy: the token with the highest logit after bias and penalties."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """0 means off."""
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or completion."""
    presence_penalty: Annotated[float, Meta(ge=-100.0, le=100.0)] = 0.0
    """Taken off the logits of tokens that the completion holds."""
    frequency_penalty: Annotated[float, Meta(ge=-100.0, le=100.0)] = 0.0
    """Taken off once for each time that the completion holds the token."""
    logit_bias: Annotated[
        list[tuple[TokenId, Annotated[float, Meta(ge=-1e9, le=1e9)]]],
        Meta(max_length=limits.LOGIT_BIAS_MAX),
    ] = []
    """(token id, addend) pairs, each id at most once."""
    top_logprobs: Annotated[int, Meta(ge=0, le=limits.TOP_LOGPROBS_MAX)] | None = None
    """None: no log probabilities. 0: only the chosen token's. n: with the n most likely."""


class CanaryFinding(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One thing that every rank has computed with every other before it was ready."""

    name: ShortText
    """What it was, for example "sum of 4 KiB"; the same on all ranks, in the same order."""
    digest: Digest
    """Of the result's bytes; equal on all ranks, or the world does not start."""
    bytes: Count
    """Bytes that each rank put in."""
    microseconds: Annotated[float, Meta(ge=0.0)]
    """Median time on this rank."""
