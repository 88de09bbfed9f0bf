"""Attacks with large bodies, and with long texts and lists of token ids in them."""

import contextlib

from tests.attacks.attack import (
    BODY_BYTES_MAX,
    LONG_ANSWER,
    NO_END,
    Attack,
    filled,
    finish_together,
    repeat,
)
from tests.attacks.attacker import MODEL, Attacker, completion, head, post


def idle_bodies(attacker: Attacker) -> None:
    """Announce 16 bodies of the largest size, and send nothing of them."""
    with contextlib.ExitStack() as connections:
        for _ in range(16):
            connection = connections.enter_context(attacker.connected())
            connection.sendall(head(BODY_BYTES_MAX))
        attacker.sleep_to_the_end()


def half_bodies(attacker: Attacker) -> None:
    """Send 16 bodies of the largest size up to their last byte, and keep them there."""
    body = filled(b'{"model":"lockstep-demo","prompt":"', b"x", b'"}')
    with contextlib.ExitStack() as connections, contextlib.suppress(OSError):
        for _ in range(16):
            if attacker.is_over:
                return
            connection = connections.enter_context(attacker.connected())
            connection.sendall(head(len(body)) + body[:-1])
        attacker.sleep_to_the_end()


def long_stop_list(attacker: Attacker) -> None:
    """Finish fifteen bodies of 16 MB with millions of stop strings at the same time."""
    finish_together(
        attacker, filled(b'{"model":"lockstep-demo","prompt":"x","stop":["a"', b',"a"', b"]}")
    )


def long_id_lists(attacker: Attacker) -> None:
    """Finish fifteen bodies of 16 MB with millions of token ids at the same time."""
    body = filled(b'{"model":"lockstep-demo","max_tokens":1,"prompt":[[1', b",1", b"]]}")
    finish_together(attacker, body)


def many_objects(attacker: Attacker) -> None:
    """Finish fifteen bodies of 16 MB with millions of empty objects at the same time."""
    body = filled(b'{"model":"lockstep-demo","messages":[{}', b",{}", b"]}")
    finish_together(attacker, body, path="/v1/chat/completions")


def escaped_text(attacker: Attacker) -> None:
    """Send 16 MB of escape sequences as a prompt, again and again."""
    body = filled(b'{"model":"lockstep-demo","max_tokens":1,"prompt":"', b"\\u00e9", b'"}')
    repeat(attacker, post(body))


def many_long_prompts(attacker: Attacker) -> None:
    """Send 24 prompts of 650,000 characters in one request, again and again."""
    prompts = ["word " * 130_000] * 24
    repeat(attacker, post(completion(prompt=prompts, max_tokens=1)))


def longest_prompts(attacker: Attacker) -> None:
    """Send 64 prompts that just fit the context, again and again."""
    prompts = ["word " * 1_500] * 64
    repeat(attacker, post(completion(prompt=prompts, max_tokens=1)))


def deep_arguments(attacker: Attacker) -> None:
    """Send a special token beside tool-call arguments that are nested 500 deep."""
    arguments = '{"a":' + "[" * 500 + "]" * 500 + "}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "<|im_end|> hello"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]
    body = {"model": MODEL, "messages": messages, "max_tokens": 1}
    repeat(attacker, post(body, "/v1/chat/completions"))


def whole_logprobs(attacker: Attacker) -> None:
    """Ask for eight long completions with 20 alternatives per token, in one body."""
    messages = [{"role": "user", "content": "Tell a long story."}]
    body = {
        "model": MODEL,
        "messages": messages,
        "n": 8,
        "max_tokens": LONG_ANSWER,
        "logprobs": True,
        "top_logprobs": 20,
        "logit_bias": NO_END,
    }
    repeat(attacker, post(body, "/v1/chat/completions"))


def long_id_prompts(attacker: Attacker) -> None:
    """Send 64 prompts of 8,100 token ids with two completions each, again and again."""
    ids = [1_000 + index % 1_000 for index in range(8_100)]
    body = completion(prompt=[ids] * 64, n=2, max_tokens=16, stream=True)
    repeat(attacker, post(body))


def detokenize_million(attacker: Attacker) -> None:
    """Ask for the text of a million token ids, again and again."""
    ids = [1_000 + index % 1_000 for index in range(1_000_000)]
    repeat(attacker, post({"tokens": ids}, "/detokenize"))


def tokenize_strings(attacker: Attacker) -> None:
    """Ask for the text of each token of a text, in turn of one that fits and one that does not."""
    bodies = [
        {"prompt": "a " * words, "return_token_strs": True} for words in (4_000, 60_000, 4_000_000)
    ]
    repeat(attacker, *(post(body, "/tokenize") for body in bodies))


ATTACKS = [
    Attack("idle-bodies", idle_bodies),
    Attack("half-bodies", half_bodies),
    Attack("long-stop-list", long_stop_list),
    Attack("long-id-lists", long_id_lists),
    Attack("many-objects", many_objects),
    Attack("escaped-text", escaped_text),
    Attack("many-long-prompts", many_long_prompts),
    Attack("longest-prompts", longest_prompts, must_depart=True),
    Attack("deep-arguments", deep_arguments),
    Attack("whole-logprobs", whole_logprobs, must_depart=True),
    Attack("long-id-prompts", long_id_prompts, must_depart=True),
    Attack("detokenize-million", detokenize_million, status=200),
    Attack("tokenize-strings", tokenize_strings, status=200),
]
