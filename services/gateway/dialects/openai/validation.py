"""Checks of request fields beyond their types, and the options that follow from them."""

import re
from typing import Any

from services.gateway.dialects.openai import request_types
from services.gateway.endpoints.request_options import (
    RequestOptions,
    checked_stops,
    most_likely,
    random_seed,
)
from services.gateway.http import request_body
from services.gateway.http.errors import invalid_field, unsupported
from shared import limits
from shared.configuration.settings import Config, SpeculationConfig
from shared.messages import Sampling
from shared.messages.gateway_link import Speculation

CHOICES_TOTAL_MAX = 128
"""Most choices of one completions request: prompts times `n`."""

NO_LIMIT = -1
"""Value of `max_tokens` by which llama.cpp's clients say that they set none."""
TEXT_TOKENS_DEFAULT = 4_096
"""Most tokens of a text completion if nothing limits them. Without a chat template many models
never end by themselves."""

ARGUMENT_NAME = "^[A-Za-z][A-Za-z0-9_]{0,63}$"
"""Pattern of the names of a chat template's arguments."""
_RESERVED_ARGUMENTS = frozenset({
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "self", "bos_token",
    "eos_token", "pad_token", "unk_token", "raise_exception", "strftime_now",
})  # fmt: skip
"""Arguments that the gateway or the library sets."""
_SWITCHES = frozenset({"enable_thinking", "thinking"})
_PRIORITIES = {"flex": -1, "priority": 1}
"""Priority of a service tier among the requests of one tenant."""


def allowed_speculation_methods(config: SpeculationConfig) -> list[str]:
    """Return the values of `speculation.method` that a client may choose.

    These are `default`, `off`, `ngram`, which needs no set-up, and the configured method.
    """
    methods = ["default", "off", "ngram"]
    return methods if config.method in methods else [*methods, config.method]


def check_chat(request: request_types.ChatCompletionRequest, config: Config) -> RequestOptions:
    """Return the options of a chat request; refuse unsupported or contradicting fields.

    Types and ranges of single fields were checked before. Here fields are compared with each other,
    for example `top_logprobs` with `logprobs`, and with this server's limits and features.

    Raises:
        ApiError: 400 when a field is not valid or not supported; it names the field.
    """
    check_template_arguments(request.chat_template_kwargs or {}, "chat_template_kwargs")
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid_field("top_logprobs", "it requires logprobs to be true.")
    max_tokens, param = request.max_completion_tokens, "max_completion_tokens"
    if max_tokens is None:
        max_tokens, param = request.max_tokens, "max_tokens"
    elif request.max_tokens not in (None, NO_LIMIT, max_tokens):
        raise invalid_field(
            "max_tokens", "it differs from max_completion_tokens; give one of them."
        )
    top_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return check_generation(request, config, max_tokens, param, top_logprobs)


def check_template_arguments(arguments: dict[str, Any], param: str) -> None:
    """Refuse arguments of the chat template that are not the client's.

    Args:
        arguments: the arguments by name.
        param: name of the request field, for errors.

    Raises:
        ApiError: 400 for a name that is reserved or no name, or a value nested too deeply.
    """
    for name, value in arguments.items():
        full = f"{param}.{name[:100]}"
        if name in _RESERVED_ARGUMENTS or not re.fullmatch(ARGUMENT_NAME, name):
            raise invalid_field(full, "the chat template has no argument of this name.")
        if name in _SWITCHES and not isinstance(value, bool | None):
            raise invalid_field(full, "it must be true or false.")
        request_body.check_depth(value, full)


def check_completion(request: request_types.CompletionRequest, config: Config) -> RequestOptions:
    """Return the options of a completion request; refuse unsupported or contradicting fields.

    Types and ranges of single fields were checked before. Here fields are compared with each other,
    for example `echo` with `logprobs`, and with this server's limits and features.

    Raises:
        ApiError: 400 when a field is not valid or not supported; it names the field.
    """
    _check_best_of(request, config)
    if request.echo and request.logprobs is not None:
        raise unsupported("echo", "log probabilities of the prompt are not supported.")
    return check_generation(
        request,
        config,
        request.max_tokens,
        "max_tokens",
        request.logprobs,
        TEXT_TOKENS_DEFAULT,
    )


def _check_best_of(request: request_types.CompletionRequest, config: Config) -> None:
    count, best_of = request.n or 1, request.best_of
    if best_of is None or best_of == count:
        return
    if best_of < count:
        raise invalid_field("best_of", "it may not be less than n.")
    if best_of > config.gateway.choices_max:
        most = config.gateway.choices_max
        raise invalid_field("best_of", f"at most {most} choices are allowed.")
    if request.stream:
        raise invalid_field("best_of", "the best choices are known at the end: leave stream out.")


def check_generation(
    request: request_types.GenerationFields,
    config: Config,
    max_tokens: int | None,
    max_tokens_param: str,
    top_logprobs: int | None,
    default_max_tokens: int = limits.COMPLETION_TOKENS_MAX,
) -> RequestOptions:
    """Return the options of a request of OpenAI's API; refuse fields outside the server's limits.

    Args:
        request: the request.
        config: the settings, with the limits of this server.
        max_tokens: most tokens of a completion; None: the default.
        max_tokens_param: name of the field that it came from, for errors.
        top_logprobs: number of alternatives per token; None: no log probabilities.
        default_max_tokens: the default of this endpoint, if the operator has set none.

    Raises:
        ApiError: 400 when a field is not valid or not supported; it names the field.
    """
    count = request.n or 1
    choices_max = config.gateway.choices_max
    if count > choices_max:
        raise invalid_field("n", f"at most {choices_max} choices are allowed.")
    max_tokens = None if max_tokens == NO_LIMIT else max_tokens
    if max_tokens == 0:
        raise invalid_field(max_tokens_param, "at least one token must be allowed.")
    default = config.gateway.default_max_tokens or default_max_tokens
    stop = request.stop or []
    stops = [stop] if isinstance(stop, str) else stop
    options = request.stream_options
    return RequestOptions(
        model=request.model,
        count=count,
        stops=checked_stops(stops, "stop", config.gateway),
        max_tokens=default if max_tokens is None else max_tokens,
        max_tokens_param=max_tokens_param,
        clamps_max_tokens=max_tokens is None,
        is_streamed=bool(request.stream),
        includes_usage=bool((options or request_types.StreamOptions()).include_usage),
        sampling=_sampling(request, top_logprobs),
        speculation=_speculation(request.speculation, config.speculation),
        priority=_PRIORITIES.get(request.service_tier or "", 0),
        cache_salt=request.cache_salt,
        session_names=[request.prompt_cache_key, request.user],
    )


def _sampling(request: request_types.GenerationFields, top_logprobs: int | None) -> Sampling:
    top_p, top_k = most_likely(request.top_p, request.top_k)
    return Sampling(
        seed=random_seed() if request.seed is None else request.seed,
        temperature=_or(request.temperature, 1.0),
        top_p=top_p,
        top_k=top_k,
        min_p=request.min_p or 0.0,
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=sorted((request.logit_bias or {}).items()),
        top_logprobs=top_logprobs,
    )


def _speculation(
    requested: str | request_types.SpeculationOptions | None, config: SpeculationConfig
) -> Speculation:
    if requested is None:
        return Speculation()
    if isinstance(requested, str):
        assert requested == "off"
        return Speculation(method="off")
    method = requested.method or "default"
    methods = allowed_speculation_methods(config)
    if method not in methods:
        *others, last = methods
        raise unsupported(
            "speculation.method",
            f"{method} is not supported by this server, only {', '.join(others)} and {last} are.",
        )
    return Speculation(method=method, tokens=requested.tokens or 0)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
