"""Compiler of grammars. Owns which grammars are still wanted, and which are compiled ahead."""

import dataclasses
import hashlib
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from llguidance import LLMatcher

from services.rank_worker.sampling.grammar.matcher import CompiledGrammar, Matcher, describe_error
from shared.errors import Refusal
from shared.messages import Grammar
from shared.model import tokenizer_json
from shared.model.grammars import LIBRARY_VERSION, compile_grammar, read_tokenizer
from shared.tenants.tenant_threads import TenantThreads

ReportCompiled = Callable[[int, int, str], object]
"""Takes the step that admitted a sequence, the sequence, and why its grammar cannot be compiled, or
""."""

_THREADS = 4
"""Grammars that are compiled at once, so that a slow one does not hold up all others."""
_NICENESS = 5
"""Of the threads on Linux. Beside steps on one core, a grammar of 2 s then takes about 4 s."""
_KNOWN_MAX = 32
"""Grammars of which there may be a spare; an agent sends the same one with every turn."""
_KNOWN_CHARS_MAX = 4_000_000
"""Characters of their texts; a compiled grammar takes about 100 bytes for each, and at most 48 MiB
and 128 bytes for each."""


@dataclasses.dataclass(slots=True, eq=False)
class _Known:
    """A grammar used lately, and the size of its text."""

    chars: int
    spare: Future[LLMatcher] | None = None
    """Will be a matcher at the start for the next sequence."""


class GrammarCompiler:
    """Compiles grammars in threads of its own, while prompts are computed.

    Each sequence has a matcher that was compiled for it alone. Copies of a matcher share the states
    of its automaton, and their limit: whether one could go on would depend on what the others have
    drawn before, and on which thread came first, so ranks could differ. A grammar that comes again
    is also compiled ahead, for the sequence after that: its spare.

    The library releases Python's interpreter lock meanwhile. Tenants take turns, and a grammar for
    which no sequence waits any more is not begun. The model's tokenizer is read in one of the
    threads first. Without it every grammar fails. All but the threads' work is called by one
    thread.
    """

    def __init__(self, folder: Path, report: ReportCompiled = lambda *_: None) -> None:
        """Start to read the tokenizer.

        Args:
            folder: the model's folder.
            report: called in a thread with the outcome of each `start`, unless its sequence is
                dropped before.
        """
        self._folder = folder
        self._report = report
        self._threads = TenantThreads("grammars", _THREADS, begin_thread=_yield_to_steps)
        self._tokenizer = self._threads.submit("", lambda: read_tokenizer(folder))
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        """By hash of the text, the one used last at the end."""
        self._known_chars = 0

    @property
    def fingerprint(self) -> str:
        """Versions and tokenizer that masks depend on, as text; equal where masks are equal."""
        names = (tokenizer_json.FILE, tokenizer_json.TIKTOKEN_FILE, tokenizer_json.TEKKEN_FILE)
        digest = hashlib.blake2b(digest_size=8)
        for file in (self._folder / name for name in names):
            digest.update(file.read_bytes() if file.is_file() else b"")
        return f"{LIBRARY_VERSION} {digest.hexdigest()}"

    @property
    def queued(self) -> int:
        """How many grammars wait for a thread."""
        return len(self._threads)

    def wait_until_ready(self) -> None:
        """Wait until the tokenizer has been read, or cannot be read."""
        self._tokenizer.exception()

    def start(
        self,
        grammar: Grammar,
        generated: Sequence[int],
        sequence_id: int,
        step_id: int,
        tenant: str = "",
    ) -> Matcher:
        """Return the matcher of an admitted sequence, as `matcher` does; its outcome is reported.

        Args:
            grammar: the sequence's grammar.
            generated: tokens of its completion so far.
            sequence_id: the sequence.
            step_id: the step that admits it.
            tenant: whose sequence it is.
        """
        matcher = self.matcher(grammar, generated, tenant)

        def report(ready: Future[None]) -> None:
            if not ready.cancelled():
                self._report(step_id, sequence_id, matcher.error)

        matcher.ready.add_done_callback(report)
        return matcher

    def matcher(self, grammar: Grammar, generated: Sequence[int], tenant: str = "") -> Matcher:
        """Return the matcher of a sequence; its grammar is compiled meanwhile.

        Args:
            grammar: the sequence's grammar.
            generated: tokens of the completion so far, which the matcher takes before it is ready.
            tenant: whose sequence it is.
        """
        matcher = Matcher(grammar)
        name = hashlib.blake2b(grammar.text.encode(), digest_size=16).digest()
        # Taken out when it is used, so that callbacks keep no compiled grammar alive.
        compiled = [self._take(name, grammar.text, tenant)]

        def begin() -> None:
            if not matcher.ready.set_running_or_notify_cancel():
                return
            # A panic inside the library is no Exception; it must end the request, not the thread.
            try:
                matcher.begin(self._with_facts(compiled.pop().result()), generated)
            except Refusal as refusal:
                matcher.fail(str(refusal))
            except BaseException as error:  # noqa: BLE001
                matcher.fail(f"The grammar cannot be compiled ({type(error).__name__}: {error}).")
            matcher.ready.set_result(None)

        def leave(ready: Future[None]) -> None:
            if ready.cancelled():
                compiled.pop().cancel()
                self._drop_spare(name)

        def go_on(done: Future[LLMatcher]) -> None:
            if not done.cancelled():
                self._threads.submit(tenant, begin, is_first=True)

        matcher.ready.add_done_callback(leave)
        # No thread waits for a spare that another one compiles.
        compiled[0].add_done_callback(go_on)
        return matcher

    def _take(self, name: bytes, text: str, tenant: str) -> Future[LLMatcher]:
        """Return the future matcher of a sequence; of a grammar that comes again make a spare."""

        def compile_one() -> LLMatcher:
            return self._compile(text)

        known = self._known.get(name)
        compiled = None if known is None else known.spare
        if compiled is None or compiled.cancel():
            # A spare that is not begun may wait in the long queue of another tenant.
            compiled = self._threads.submit(tenant, compile_one)
        if known is None:
            self._known[name] = _Known(len(text))
            self._known_chars += len(text)
        else:
            known.spare = self._threads.submit(tenant, compile_one)
        self._known.move_to_end(name)
        while len(self._known) > 1 and (
            len(self._known) > _KNOWN_MAX or self._known_chars > _KNOWN_CHARS_MAX
        ):
            oldest = next(iter(self._known))
            self._drop_spare(oldest)
            self._known_chars -= self._known.pop(oldest).chars
        return compiled

    def _drop_spare(self, name: bytes) -> None:
        """Compile no spare of a grammar if that has not begun."""
        known = self._known.get(name)
        if known is not None and known.spare is not None and known.spare.cancel():
            known.spare = None

    def _compile(self, text: str) -> LLMatcher:
        """Compile a grammar.

        Raises:
            Refusal: there is no tokenizer, or the grammar is refused.
        """
        try:
            matcher = compile_grammar(self._tokenizer.result(), text)
        except Refusal as refusal:
            raise Refusal(f"The grammar cannot be matched: {refusal}.") from None
        if not matcher.is_error():
            # The first mask builds tables, and steps should not wait for them.
            matcher.compute_bitmask()
        if matcher.is_error():
            raise Refusal(f"The grammar cannot be matched: {describe_error(matcher)}")
        return matcher

    def _with_facts(self, matcher: LLMatcher) -> CompiledGrammar:
        """Return a compiled grammar with what its masks look like."""
        tokenizer = self._tokenizer.result()
        return CompiledGrammar(matcher, tokenizer.vocab_size, tokenizer.eos_token)


def _yield_to_steps() -> None:
    """Lower the priority of this thread, which shares the cores with the steps on a CPU."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
