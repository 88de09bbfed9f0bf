"""Compiler of grammars. Owns the grammars used last, and which are still wanted."""

import dataclasses
import hashlib
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from llguidance import LLMatcher

from services.rank_worker.sampling.grammar.matcher import CompiledGrammar, Matcher, describe_error
from shared.errors import Refusal
from shared.messages import Grammar
from shared.model import tokenizer_json
from shared.model.grammars import LIBRARY_VERSION, compile_grammar, read_tokenizer
from shared.tenants.tenant_threads import TenantThreads

_T = TypeVar("_T")

ReportCompiled = Callable[[int, int, str], object]
"""Takes the step that admitted a sequence, the sequence, and why its grammar cannot be compiled, or
""."""

_THREADS = 4
"""Grammars that are compiled at once, so that a slow one does not hold up all others."""
_NICENESS = 5
"""Of the threads on Linux. Beside steps on one core, a grammar of 2 s then takes about 4 s."""
_KEPT_GRAMMARS_MAX = 64
"""Compiled grammars that are kept; an agent sends the same one with every turn."""
_KEPT_CHARS_MAX = 4_000_000
"""Characters of their texts; a compiled grammar takes about 100 bytes for each."""


@dataclasses.dataclass(slots=True, eq=False)
class _Kept:
    """A grammar used lately, which may still be compiled, and the size of its text."""

    chars: int
    compiled: Future[LLMatcher] = dataclasses.field(default_factory=Future)
    """Will be a matcher at the start, to be copied."""
    waiting: int = 0
    """Sequences that wait for it."""
    queued: dict[str, Future[None]] = dataclasses.field(default_factory=dict)
    """The work of compiling it, by each tenant in whose queue it waits."""
    has_begun: bool = False
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def begin(self) -> bool:
        """Return whether the caller is the first, and so compiles it or keeps others from it."""
        with self.lock:
            is_first, self.has_begun = not self.has_begun, True
        return is_first


class GrammarCompiler:
    """Compiles grammars in threads of its own, while prompts are computed.

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
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        """By hash of the text, the one used last at the end."""
        self._kept_chars = 0

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
        kept = self._find(name, grammar.text, tenant)

        def begin() -> None:
            if not matcher.ready.set_running_or_notify_cancel():
                return
            # A panic inside the library is no Exception; it must end the request, not the thread.
            try:
                matcher.begin(self._copy(kept.compiled.result()), generated)
            except Refusal as refusal:
                matcher.fail(str(refusal))
            except BaseException as error:  # noqa: BLE001
                matcher.fail(f"The grammar cannot be compiled ({type(error).__name__}: {error}).")
            matcher.ready.set_result(None)

        def leave(ready: Future[None]) -> None:
            if ready.cancelled():
                self._leave(name, kept)

        kept.waiting += 1
        matcher.ready.add_done_callback(leave)
        # No thread waits for a grammar that another one compiles.
        kept.compiled.add_done_callback(
            lambda _: self._threads.submit(tenant, begin, is_first=True)
        )
        return matcher

    def _find(self, name: bytes, text: str, tenant: str) -> _Kept:
        """Return a grammar, which this tenant too waits for if no thread has begun it."""
        kept = self._kept.get(name)
        if kept is None:
            kept = self._kept[name] = _Kept(len(text))
            self._kept_chars += kept.chars
        self._kept.move_to_end(name)
        if not kept.has_begun and tenant not in kept.queued:

            def compile_once() -> None:
                if kept.begin():
                    _settle(kept.compiled, lambda: self._compile(text))

            kept.queued[tenant] = self._threads.submit(tenant, compile_once)
        while len(self._kept) > 1 and (
            len(self._kept) > _KEPT_GRAMMARS_MAX or self._kept_chars > _KEPT_CHARS_MAX
        ):
            self._kept_chars -= self._kept.popitem(last=False)[1].chars
        return kept

    def _leave(self, name: bytes, kept: _Kept) -> None:
        """Note that a sequence waits no longer; do not compile what none waits for."""
        kept.waiting -= 1
        if kept.waiting or not kept.begin():
            return
        for work in kept.queued.values():
            work.cancel()
        if self._kept.get(name) is kept:
            del self._kept[name]
            self._kept_chars -= kept.chars

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
            # The first mask builds tables that copies then share.
            matcher.compute_bitmask()
        if matcher.is_error():
            raise Refusal(f"The grammar cannot be matched: {describe_error(matcher)}")
        return matcher

    def _copy(self, matcher: LLMatcher) -> CompiledGrammar:
        """Return a grammar at its start for one sequence."""
        tokenizer = self._tokenizer.result()
        return CompiledGrammar(matcher.deep_copy(), tokenizer.vocab_size, tokenizer.eos_token)


def _settle(future: Future[_T], work: Callable[[], _T]) -> None:
    """Do the work of a future, whose waiters get its result or error."""
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 - a panic inside the library is no Exception
        future.set_exception(error)


def _yield_to_steps() -> None:
    """Lower the priority of this thread, which shares the cores with the steps on a CPU."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
