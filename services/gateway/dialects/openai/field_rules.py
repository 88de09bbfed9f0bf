"""Fields of OpenAI's endpoints that change no answer, and fields that must not be ignored.

docs/reference/ignored-fields.md explains both.
"""

from services.gateway.http.ignored_fields import RefusedField

WITHOUT_EFFECT = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key")
"""Known fields of chat and completions that change no answer. They are reported as ignored, though
the log takes the name of a session from `prompt_cache_key` or `user`."""
CHAT_WITHOUT_EFFECT = (*WITHOUT_EFFECT, "verbosity", "prompt_cache_retention")
"""The same of chat requests."""

_UNCONSTRAINED = RefusedField(
    "it is not supported in this form: use response_format or structured_outputs."
)
_ONLY_TEXT = RefusedField("only text is supported.")


def _other_text(*neutral: object) -> RefusedField:
    """Return the rule of a field that changes the answer unless it has one of these values."""
    remedy = "it would change the answer, and this server does not support it: remove it."
    return RefusedField(remedy, neutral)


REFUSED_FIELDS = {
    "grammar": _UNCONSTRAINED,
    "json_schema": _UNCONSTRAINED,
    "regex": _UNCONSTRAINED,
    "ebnf": _UNCONSTRAINED,
    "structural_tag": _UNCONSTRAINED,
    "functions": RefusedField("it is the older form of tools: use tools."),
    "function_call": RefusedField(
        "it is the older form of tool_choice: use tool_choice.", ("none", "auto")
    ),
    "chat_template": RefusedField("only the model's own chat template is used: remove it."),
    "continue_final_message": _other_text(False),
    "add_generation_prompt": _other_text(True),
    "documents": RefusedField("put the documents into the messages."),
    "mm_processor_kwargs": RefusedField(_ONLY_TEXT.remedy, ({},)),
    "audio": _ONLY_TEXT,
    "web_search_options": RefusedField("this server does not search: remove it."),
    "bad_words": _other_text(),
    "allowed_token_ids": RefusedField("use logit_bias."),
    "stop_token_ids": RefusedField("use stop."),
    "ignore_eos": _other_text(False),
    "min_tokens": _other_text(0),
    "include_stop_str_in_output": _other_text(False),
    "skip_special_tokens": _other_text(True),
    "use_beam_search": _other_text(False),
    "length_penalty": _other_text(1),
    "logits_processors": _other_text(),
    "prompt_logprobs": _other_text(),
    "truncate_prompt_tokens": RefusedField("shorten the prompt."),
    "prompt_embeds": RefusedField("send the prompt as text or token ids."),
    "typical_p": _other_text(1),
    "top_a": _other_text(0),
    "mirostat": _other_text(0),
    "dry_multiplier": _other_text(0),
    "messages.prefix": RefusedField(
        "a message that the model continues is not supported.", (False,)
    ),
    "tools.function.grammar": _UNCONSTRAINED,
}
"""Fields of chat, completions and responses whose neglect would give a wrong answer; remedies."""
