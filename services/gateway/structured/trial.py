"""Trial of a grammar in a process of its own. Owns which grammars need one, and its limits.

Where several patterns must match one text together, llguidance follows all combinations of their
ways at once: 20 patterns take seconds, 40 never end, and nothing in the library counts that. No
thread can be stopped, but a process can.
"""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterable

from llguidance import LLTokenizer, TokenizerWrapper

from services.gateway.structured.byte_tokenizer import ByteTokenizer
from shared.errors import Refusal
from shared.model.grammars import compile_grammar

_JOINED_MAX = 8
"""Patterns that may meet without a trial. Measured: less than 1 ms."""
TRIAL_S_MAX = 5.0
"""Time for a trial; most end within a second."""
_MEMORY_BYTES_MAX = 2 * 1024**3
_JOINS = ('"allOf"', '"anyOf"', '"oneOf"', '"$ref"')
FAILED = (
    f"compiling it takes more than {TRIAL_S_MAX:.0f} s or too much memory: let fewer patterns "
    "match the same text"
)
"""The reason for refusing a grammar whose trial does not succeed."""


def needs_trial(text: str) -> bool:
    """Tell whether a grammar may join many patterns; most grammars do not."""
    has_joins = any(join in text for join in _JOINS)
    return text.count("&") > _JOINED_MAX or (has_joins and text.count('"pattern') > _JOINED_MAX)


def succeeds(text: str, special_ids: Iterable[int]) -> bool:
    """Return whether a grammar can be compiled, or is refused, within the limits; takes up to 5 s.

    Args:
        text: the grammar.
        special_ids: ids of the model's special tokens.
    """
    command = [sys.executable, "-m", "services.gateway.structured.trial"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    content = json.dumps([text, list(special_ids)]).encode()
    try:
        done = subprocess.run(  # noqa: S603 - a module of this program
            command,
            input=content,
            env=environment,
            capture_output=True,
            check=False,
            timeout=TRIAL_S_MAX,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _main() -> None:
    """Compile the grammar on standard input, and its first mask."""
    os.nice(5)
    seconds = int(TRIAL_S_MAX) + 1
    # Ends this process too if the one that waits for it has ended.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES_MAX, _MEMORY_BYTES_MAX))
    text, special_ids = json.load(sys.stdin)
    tokenizer = LLTokenizer(TokenizerWrapper(ByteTokenizer(special_ids)), slices=[])
    try:
        matcher = compile_grammar(tokenizer, text)
    except Refusal:
        return  # the caller finds out why
    if not matcher.is_error():
        matcher.compute_bitmask()


if __name__ == "__main__":
    _main()
