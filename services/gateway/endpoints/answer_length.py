"""Length of answers: what fits the context, and how many log probabilities a whole answer has."""

from collections.abc import Sequence

from services.gateway.endpoints.request_options import RequestOptions
from services.gateway.http import errors
from services.gateway.http.errors import PromptTooLong, invalid, invalid_field
from services.gateway.links.scheduler_status import StatusBoard
from shared import limits

LOGPROB_ENTRIES_MAX = 1_000_000
"""Log probabilities in an answer that is not streamed. Each takes about 70 bytes of JSON, which is
kept until the answer is complete."""
DEADLINE_GRACE_S = 5.0
"""Time after a request's deadline at which the gateway ends it if the scheduler has not."""


def check_logprobs(options: RequestOptions, tokens_max: int) -> None:
    """Refuse a request whose whole answer would have too many log probabilities.

    A stream may have any number, because its events are not kept.

    Args:
        options: the checked options of the request.
        tokens_max: most tokens of all its completions together.

    Raises:
        ApiError: 400 when it would have more than `LOGPROB_ENTRIES_MAX`.
    """
    if options.sampling.top_logprobs is None or options.is_streamed:
        return
    per_token = 1 + options.sampling.top_logprobs
    if tokens_max * per_token > LOGPROB_ENTRIES_MAX:
        raise invalid_field(
            "logprobs",
            f"the answer could have {tokens_max} tokens with {per_token} log probabilities each, "
            f"which is {tokens_max * per_token}, but an answer that is not streamed may have at "
            f"most {LOGPROB_ENTRIES_MAX}. Lower {options.max_tokens_param}, n or the number of "
            "alternatives, or set stream.",
            "invalid_value",
        )


def completion_tokens_max(
    status: StatusBoard,
    prompt: Sequence[int],
    options: RequestOptions,
    completions: int,
    prompt_param: str,
) -> int:
    """Return the longest completion of one prompt in tokens.

    Args:
        status: knows the model's context.
        prompt: the prompt.
        options: the checked options of the request.
        completions: number of completions of the request, for all its prompts.
        prompt_param: the request field with the prompt, for errors.

    Raises:
        ApiError: 400 when prompt and completion do not fit the context.
    """
    if not prompt:
        raise invalid_field(prompt_param, "the prompt has no tokens.")
    context = status.context_tokens_max
    room = context - len(prompt) if context else limits.COMPLETION_TOKENS_MAX
    if room < 1:
        raise PromptTooLong(f"{len(prompt)} tokens", context, prompt_param, len(prompt))
    if options.clamps_max_tokens:
        return min(options.max_tokens, room, _logprob_tokens_max(options, completions))
    if options.max_tokens > room:
        param = options.max_tokens_param
        raise invalid(
            f"{errors.context_sentence(context)} However, the prompt has {len(prompt)} tokens, and "
            f"{param} asks for {options.max_tokens} more: lower {param}, or leave it out.",
            param,
            "context_length_exceeded",
        )
    return options.max_tokens


def _logprob_tokens_max(options: RequestOptions, completions: int) -> int:
    """Return the most tokens of each of these completions that `check_logprobs` accepts."""
    if options.sampling.top_logprobs is None or options.is_streamed:
        return limits.COMPLETION_TOKENS_MAX
    return LOGPROB_ENTRIES_MAX // (completions * (1 + options.sampling.top_logprobs))
