"""Checks of request fields beyond their types. Owns the options that the endpoints use."""

import dataclasses
import secrets

from services.gateway.http import request_body
from services.gateway.http.errors import invalid_field, unsupported
from services.gateway.openai import request_types
from shared import limits
from shared.configuration.settings import Config, SpeculationConfig
from shared.messages import Sampling
from shared.messages.gateway_link import Speculation

SEED_BITS = 63
CHOICES_TOTAL_MAX = 128
"""Most choices of one completions request: prompts times `n`."""


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOptions:
    """Checked options of one request, with defaults in place of fields that were not set."""

    count: int
    """Choices per prompt."""
    stops: list[str]
    """Stop strings without duplicates."""
    max_tokens: int | None
    """Most tokens of a completion; None means the server's default."""
    max_tokens_param: str
    """Name of the field that `max_tokens` came from, for errors."""
    is_streamed: bool
    includes_usage: bool
    """The stream's last chunk has the token counts."""
    seed: int
    top_logprobs: int | None
    """Number of alternatives per token; None: no log probabilities."""
    speculation: Speculation
    fields: request_types.GenerationFields
    """The request itself."""

    def sampling(self, number: int, vocab_size: int) -> Sampling:
        """Return the scheduler's sampling parameters for one choice, which has its own seed.

        Args:
            number: position of the choice among those of its prompt, counted from 0.
            vocab_size: number of the model's token ids.

        Raises:
            ApiError: 400 when `logit_bias` has an unknown token id.
        """
        fields = self.fields
        return Sampling(
            seed=mix_seed(self.seed, number),
            temperature=_or(fields.temperature, 1.0),
            top_p=_or(fields.top_p, 1.0),
            top_k=max(0, fields.top_k or 0),
            min_p=fields.min_p or 0.0,
            repetition_penalty=_or(fields.repetition_penalty, 1.0),
            presence_penalty=fields.presence_penalty or 0.0,
            frequency_penalty=fields.frequency_penalty or 0.0,
            logit_bias=_logit_bias(fields.logit_bias or {}, vocab_size),
            top_logprobs=self.top_logprobs,
        )


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
    _check_tools(request)
    if request.response_format is not None and request.response_format.type != "text":
        raise unsupported("response_format", 'only {"type": "text"} is supported.')
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid_field("top_logprobs", "it requires logprobs to be true.")
    max_tokens, param = request.max_completion_tokens, "max_completion_tokens"
    if max_tokens is None:
        max_tokens, param = request.max_tokens, "max_tokens"
    elif request.max_tokens not in (None, max_tokens):
        raise invalid_field(
            "max_tokens", "it differs from max_completion_tokens; give one of them."
        )
    top_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _check(request, config, max_tokens, param, top_logprobs)


def _check_tools(request: request_types.ChatCompletionRequest) -> None:
    tools = request.tools or []
    if request.tool_choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", "only auto and none are supported.")
    if request.parallel_tool_calls is not None and not tools:
        raise invalid_field("parallel_tool_calls", "it requires tools.")
    if request.parallel_tool_calls is False:
        raise unsupported("parallel_tool_calls", "false is not supported.")
    if tools and request.logprobs:
        raise invalid_field("logprobs", "they are not supported with tools.")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid_field("tools", "two tools have the same name.")
    for index, tool in enumerate(tools):
        param = f"tools[{index}].function.parameters"
        request_body.check_depth(tool.function.parameters, param)


def check_completion(request: request_types.CompletionRequest, config: Config) -> RequestOptions:
    """Return the options of a completion request; refuse unsupported or contradicting fields.

    Types and ranges of single fields were checked before. Here fields are compared with each other,
    for example `echo` with `logprobs`, and with this server's limits and features.

    Raises:
        ApiError: 400 when a field is not valid or not supported; it names the field.
    """
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise unsupported("best_of", "only the value of n is supported.")
    if request.echo and request.logprobs is not None:
        raise unsupported("echo", "log probabilities of the prompt are not supported.")
    return _check(request, config, request.max_tokens, "max_tokens", request.logprobs)


def mix_seed(seed: int, number: int) -> int:
    """Return the sampling seed of one choice, from 0 up to 2**63 - 1.

    Choice 0 gets the low 63 bits of the request's seed. Others get a SplitMix64 hash of them and
    the number. Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014.

    Args:
        seed: the request's seed.
        number: position of the choice among those of its prompt, counted from 0.
    """
    mask = (1 << 64) - 1
    value = seed & ((1 << SEED_BITS) - 1)
    if number == 0:
        return value
    value = (value + number * 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return (value ^ (value >> 31)) >> 1


def _check(
    request: request_types.GenerationFields,
    config: Config,
    max_tokens: int | None,
    max_tokens_param: str,
    top_logprobs: int | None,
) -> RequestOptions:
    if request.store:
        raise unsupported("store", "this server stores nothing.")
    count = request.n or 1
    choices_max, stops_max = config.gateway.choices_max, config.gateway.stop_strings_max
    if count > choices_max:
        raise invalid_field("n", f"at most {choices_max} choices are allowed.")
    stop = request.stop or []
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > stops_max:
        raise invalid_field("stop", f"at most {stops_max} strings are allowed.")
    options = request.stream_options
    if options is not None and not request.stream:
        raise invalid_field("stream_options", "it requires stream to be true.")
    return RequestOptions(
        count=count,
        stops=list(dict.fromkeys(stops)),
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        is_streamed=bool(request.stream),
        includes_usage=bool((options or request_types.StreamOptions()).include_usage),
        seed=secrets.randbits(SEED_BITS) if request.seed is None else request.seed,
        top_logprobs=top_logprobs,
        speculation=_speculation(request.speculation, config.speculation),
        fields=request,
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


def _logit_bias(bias: dict[int, float], vocab_size: int) -> list[tuple[int, float]]:
    assert len(bias) <= limits.LOGIT_BIAS_MAX
    for token in bias:
        if token >= vocab_size:
            raise invalid_field(
                "logit_bias", f"the model has no token {token}, only 0 to {vocab_size - 1}."
            )
    return sorted(bias.items())


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
