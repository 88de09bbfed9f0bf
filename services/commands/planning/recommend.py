"""One line to follow: the splitting, ranks, `kv_bits` and context that suit what was asked. Pure.

All named hosts are used where that works, whole experts before matrices (as fast for few sequences
and faster for many, docs/performance.md), layers only where nothing else fits, fewer bits for KV
only where it does not fit as computed, and a shorter context last.
"""

import dataclasses
from collections.abc import Sequence

from services.commands.planning.budget import rounded
from services.commands.planning.hosts import Memory
from services.commands.planning.options import Model, PlanRequest, all_options, make_rooms
from services.commands.planning.report import Fit, Option, Recommendation
from shared.messages.rank_link import Sharding

KV_BITS = (0, 8, 4)

_PREFERENCE = {"none": 0, "expert": 0, "tensor": 1, "pipeline": 2}
_CONTEXT_MIN = 1_024
"""A splitting that leaves room for less is none to recommend."""


@dataclasses.dataclass(frozen=True, slots=True)
class RecommendedOption:
    """A splitting that was chosen."""

    option: Option
    memory: Sequence[Memory]
    kv_bits: int
    context_tokens: int


def choose(model: Model, memory: Sequence[Memory], asked: PlanRequest) -> RecommendedOption | None:
    """Return what suits best; None: not even the weights and a short sequence fit anywhere."""
    bits = _bits(model, asked)
    longest = asked.context_tokens
    tables = {
        one: all_options(model, memory, dataclasses.replace(asked, kv_bits=one)) for one in bits
    }
    for one in bits:
        fitting = [option for option in tables[one] if option.fits]
        if fitting:
            best = min(fitting, key=_rank_of)
            return RecommendedOption(best, _places(best, memory), one, asked.context_tokens)
    # As asked it does not fit: the longest sequence that does, alone.
    shorter = [
        RecommendedOption(option, _places(option, memory), one, min(option.context_tokens, longest))
        for one in bits
        for option in tables[one]
        if option.context_tokens >= _CONTEXT_MIN
    ]
    return max(shorter, key=_worth, default=None)


def recommendation(
    model: Model,
    choice: RecommendedOption,
    asked: PlanRequest,
    *,
    path: str,
    context_max: int,
    has_hosts: bool = False,
) -> Recommendation:
    """Return a choice in flags and settings.

    Args:
        model: what is planned for.
        choice: from `choose`.
        asked: what is to fit.
        path: where the model is.
        context_max: the longest that the model allows.
        has_hosts: ranks are on hosts of an inventory, which no command line of one host starts.
    """
    option = choice.option
    flags: list[str] = []
    settings: dict[str, int | str] = {}
    if has_hosts:
        settings = {"model.path": path, "world.size": option.ranks}
        if option.ranks > 1:
            settings["world.sharding"] = option.sharding
        if option.sharding == "pipeline":
            settings["world.enable_pipeline"] = True
    else:
        flags = ["--model", path, "--ranks", str(option.ranks)]
        if option.ranks > 1:
            flags += ["--distributed-sharding", option.sharding]
        if option.sharding == "pipeline":
            flags.append("--enable-pipeline-distributed")
    if choice.kv_bits:
        settings["rank_worker.kv_bits"] = choice.kv_bits
    if option.context_tokens < context_max:
        # Or clients would be told of a length that no row has.
        settings["model.context_tokens_max"] = option.context_tokens
    return Recommendation(
        ranks=option.ranks,
        sharding=option.sharding,
        kv_bits=choice.kv_bits,
        context_tokens=choice.context_tokens,
        sequences=_sequences(model, choice, asked, choice.context_tokens, choice.kv_bits),
        hosts=[one.host for one in choice.memory],
        flags=flags,
        settings=settings,
    )


def fits(
    model: Model, choice: RecommendedOption, asked: PlanRequest, context_max: int
) -> list[Fit]:
    """Return how many sequences of several lengths run at once under a choice."""
    lengths = [length for length in (2**power for power in range(10, 24)) if length < context_max]
    bits = dict.fromkeys((choice.kv_bits, *_bits(model, asked)))
    return [
        Fit(
            context_tokens=length,
            sequences={str(one): _sequences(model, choice, asked, length, one) for one in bits},
        )
        for length in [*lengths[-7:], context_max]
    ]


def _sequences(
    model: Model, choice: RecommendedOption, asked: PlanRequest, tokens: int, bits: int
) -> int:
    sharding: Sharding = choice.option.sharding  # type: ignore[assignment]  # made from one
    rooms = make_rooms(model, sharding, choice.memory, dataclasses.replace(asked, kv_bits=bits))
    length = rounded(tokens, asked.kv_row_growth_tokens)
    return min(room.sequences(length) for room in rooms)


def _bits(model: Model, asked: PlanRequest) -> Sequence[int]:
    """Return the bits to try: what is configured, else as computed, then fewer where possible."""
    if asked.kv_bits:
        return (asked.kv_bits,)
    return KV_BITS if model.kv.quantizable() else (0,)


def _rank_of(option: Option) -> tuple[int, int]:
    """Return the order of options that all fit."""
    is_pipeline = option.sharding == "pipeline"
    return (1000 if is_pipeline else -option.ranks, _PREFERENCE[option.sharding])


def _worth(choice: RecommendedOption) -> tuple[int, ...]:
    """Return the order of choices that fall short: the longest, then as few changes as can be."""
    ranks, kind = _rank_of(choice.option)
    return choice.context_tokens, -KV_BITS.index(choice.kv_bits), -ranks, -kind


def _places(option: Option, memory: Sequence[Memory]) -> Sequence[Memory]:
    if option.ranks == len(memory):
        return memory
    return sorted(memory, key=lambda one: -one.usable_bytes)[: option.ranks]
