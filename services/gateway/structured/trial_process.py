"""Process in which grammars are tried. Owns its computing time; its parent watches the rest.

Its arguments are the descriptor of its connection to the parent, the computing time of a trial, and
the time after which it ends when it has none.
A grammar comes as two messages: the ids of the model's special tokens in JSON, and its text. The
answer is why it cannot be compiled, or nothing.
"""

import functools
import json
import os
import re
import signal
import sys
from multiprocessing.connection import Connection

from llguidance import LLTokenizer, TokenizerWrapper

from services.gateway.structured.byte_tokenizer import ByteTokenizer
from shared.errors import Refusal
from shared.model.grammars import compile_grammar

_NICENESS = 5
"""The steps of ranks on the same machine come first."""
_PLACE = re.compile(r" while processing json-schema:\S+")
"""The library's name of a part behind a reference, which differs from part to part."""
_DETAIL_CHARS_MAX = 1_000


def main() -> None:
    """Try grammars until the parent has ended or sends none for a long time."""
    os.nice(_NICENESS)
    # The parent decides when to stop; its end closes the connection.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    cpu_s_max, idle_s_max = map(float, sys.argv[2:])
    connection.send_bytes(b"ready")
    # The library's last words about a grammar that ends it are noise.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        while connection.poll(idle_s_max):
            tokenizer = _tokenizer(connection.recv_bytes())
            text = connection.recv_bytes().decode(errors="surrogatepass")
            # A signal that ends the process, also where the library computes in C.
            signal.setitimer(signal.ITIMER_PROF, cpu_s_max)
            problem = _find_problem(tokenizer, text)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            connection.send_bytes(problem.encode(errors="replace"))
    except (EOFError, ConnectionError):
        return


@functools.lru_cache(maxsize=1)
def _tokenizer(special_ids: bytes) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(ByteTokenizer(json.loads(special_ids))), slices=[])


def _find_problem(tokenizer: LLTokenizer, text: str) -> str:
    """Compile a grammar and its first mask; return why it cannot be done, or ""."""
    try:
        matcher = compile_grammar(tokenizer, text)
    except Refusal as refusal:
        return str(refusal)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if not matcher.is_error():
        return ""
    problem = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    problem = _PLACE.sub("", problem)
    return problem[:_DETAIL_CHARS_MAX].rstrip(".") or "the cause is unknown"


if __name__ == "__main__":
    main()
