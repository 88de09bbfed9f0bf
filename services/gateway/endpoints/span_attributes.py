"""Attributes of the exported span of a request. Owns their names.

Source: OpenTelemetry's semantic conventions for generative AI (opentelemetry-semantic-conventions
0.66b2). Texts of prompts, answers and stop strings stay out of it, and so do names of users.
"""

from typing import Any

from services.gateway.completion.generation import Generation


def request_attributes(
    generation: Generation, *, model: str, served_name: str, is_chat: bool, is_streamed: bool
) -> dict[str, Any]:
    """Return the attributes that are known when a request is sent to the scheduler.

    Args:
        generation: the request with its choices.
        model: name of the model as the client gave it.
        served_name: name of the served model.
        is_chat: the request is a conversation.
        is_streamed: the response is a stream.
    """
    request = generation.choices[0].submit_request
    sampling = request.sampling
    found: dict[str, Any] = {
        "gen_ai.operation.name": "chat" if is_chat else "text_completion",
        "gen_ai.provider.name": "lockstep",
        "gen_ai.request.model": model,
        "gen_ai.response.model": served_name,
        "gen_ai.response.id": generation.response_id,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.stream": is_streamed,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.usage.input_tokens": generation.prompt_tokens,
    }
    if sampling.top_k:
        found["gen_ai.request.top_k"] = sampling.top_k
    if sampling.presence_penalty:
        found["gen_ai.request.presence_penalty"] = sampling.presence_penalty
    if sampling.frequency_penalty:
        found["gen_ai.request.frequency_penalty"] = sampling.frequency_penalty
    if len(generation.choices) > 1:
        found["gen_ai.request.choice.count"] = len(generation.choices)
    return found


def result_attributes(generation: Generation) -> dict[str, Any]:
    """Return the attributes that are known when a request has ended."""
    choices = generation.choices
    # All choices of a prompt share its cached part, so each prompt counts once.
    per_prompt = max(1, len(choices) // max(1, len(generation.prompts)))
    cached = [one.cached for one in choices[::per_prompt] if one.cached is not None]
    found: dict[str, Any] = {
        "gen_ai.response.finish_reasons": [one.finish_reason or "error" for one in choices],
        "gen_ai.usage.output_tokens": sum(len(one.tokens) for one in choices),
        "gen_ai.usage.cache_read.input_tokens": sum(
            one.memory_tokens + one.stored_tokens for one in cached
        ),
        "lockstep.cache.stored_tokens": sum(one.stored_tokens for one in cached),
        "lockstep.drafts.accepted": sum(one.drafts_accepted for one in choices),
        "lockstep.drafts.rejected": sum(one.drafts_rejected for one in choices),
    }
    if reasoning := sum(one.reasoning_tokens for one in choices):
        found["gen_ai.usage.reasoning.output_tokens"] = reasoning
    traced = generation.traced
    if traced is not None and traced.first_token_s is not None:
        seconds = traced.first_token_s - traced.arrived_s
        found["gen_ai.response.time_to_first_chunk"] = round(seconds, 6)
    return found
