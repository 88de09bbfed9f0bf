"""Shortened chat templates of real models, which keep, rewrite or refuse messages."""

import functools

import transformers

from services.gateway.tokenizing.tokenizer import Tokenizer
from tests.unit.gateway.tokenizing import small_tokenizers

_OPENS = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"

PLAIN_TURNS = (
    "{%- if tools %}{{- '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}" + _OPENS
)
"""ChatML: every turn is rendered unchanged."""

STRIPS_THINKING = (
    "{%- set ns = namespace(last=-1) %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.reasoning_content and loop.index0 > ns.last %}"
    "{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}"
    "{%- endif %}"
    "{{- message.content.split('</think>')[-1] if message.role == 'assistant'"
    " else message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}" + _OPENS
)
"""As Qwen3: reasoning stays during tool calls and is removed after the next user message."""

OPENS_THINKING = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{{- message.content.split('</think>')[-1] if message.role == 'assistant'"
    " else message.content }}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}" + _OPENS + "{%- if add_generation_prompt %}{{- '<think>\\n' }}{%- endif %}"
)
"""As DeepSeek R1: the answer starts with a tag that earlier turns do not have."""

MOVES_TOOLS = (
    "{%- set ns = namespace(last=-1) %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}"
    "{%- if tools and loop.index0 == ns.last %}"
    "{{- '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>' }}"
    "{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}"
    "{%- endfor %}"
)
"""As Mistral: tools come before the last user message, and no tokens open the answer."""

NO_SPECIAL_TOKENS = (
    "{%- for message in messages %}"
    "{{- message.role | upper + ': ' + message.content + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'ASSISTANT:' }}{%- endif %}"
)

TAKES_TURNS = (
    "{%- for message in messages %}"
    "{%- if loop.index0 % 2 != (0 if message.role == 'user' else 1) %}"
    "{{- raise_exception('roles must alternate') }}"
    "{%- endif %}{%- endfor %}" + PLAIN_TURNS
)
"""Refuses conversations that do not start with a user or do not alternate."""

ALL = {
    "plain turns": PLAIN_TURNS,
    "strips thinking": STRIPS_THINKING,
    "opens thinking": OPENS_THINKING,
    "moves tools": MOVES_TOOLS,
    "no special tokens": NO_SPECIAL_TOKENS,
    "takes turns": TAKES_TURNS,
}


@functools.cache
def tokenizer(template: str) -> Tokenizer:
    """Return a byte-level tokenizer with this template."""
    inner = transformers.PreTrainedTokenizerFast(
        tokenizer_object=small_tokenizers.byte_level(), eos_token="<|endoftext|>"
    )
    inner.chat_template = template
    return Tokenizer(inner, {}, {})
