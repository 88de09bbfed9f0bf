"""Cold, found in memory, found on SSD, found on SSD after a restart: one prefix, another end.

The stack may keep a fifth more than one prefix in memory, so that older prompts drive it out.
Before blocks are read from SSD, the system forgets their files where it can, so that the disk is
read; unless asked not to: then plain reads are copies in memory too.
"""

import contextlib
from collections.abc import Iterator

from services.commands.bench.cache.testbed import COMPLETIONS, CacheTestbed, body, restore_rate
from services.commands.bench.measuring import disk, noise
from services.commands.bench.measuring.processes import print_progress
from services.commands.bench.measuring.report import PART, Case, Report
from services.commands.bench.measuring.stack import Stack
from services.commands.bench.serving.peers import MLX_LM
from shared.errors import UnavailableError

NAME = "prefixes"
COLUMNS = ["ttft_ms", "prefill_tokens_per_s", "memory_tokens", "ssd_tokens", "read_mb_per_s"]
COLD, MEMORY, SSD, RESTARTED = "cold", "memory", "ssd", "ssd, restarted"
PLAIN_READ = "plain read"
PEER_COLD, PEER_AGAIN = f"{MLX_LM} cold", f"{MLX_LM} again"

END_TOKENS = 16
"""What differs between two requests that share a prefix."""
NEW_TOKENS = 4
FILLER_TOKENS = 1_024
ROOM = 1.2
"""Blocks in memory, in prefixes."""
LONG_TOKENS = 8_192
"""Longer prefixes are repeated a third as often."""
FOUND_SHARE = 0.9
"""Of a prefix; less is no hit."""

Metrics = dict[str, float | None]


def measure(setup: CacheTestbed, report: Report) -> None:
    """Add a case per length to the report.

    Raises:
        UnavailableError: a server does not start or answer.
    """
    for length in setup.plan.prefixes:
        case = Case(conditions={PART: NAME, "tokens": length})
        with _subject(setup, length) as subject:
            for number in range(repeats_for(setup.plan.repeats, length)):
                print_progress(f"prefix of {length} tokens, repeat {number + 1}")
                found, foreign = noise.measure_with_retries(subject.round, setup.plan.tries)
                for who, metrics in found.items():
                    case.series_of(who).add(metrics | {noise.FOREIGN_CORES: foreign})
        add_ratios(case)
        report.cases.append(case)
        report.notes += miss_notes(case, length)


def repeats_for(repeats: int, length: int) -> int:
    """Return how often a length is measured."""
    return repeats if length <= LONG_TOKENS else max(1, repeats // 3)


def add_ratios(case: Case) -> None:
    """Keep the ratios that this benchmark is about."""
    for who in (MEMORY, SSD, RESTARTED):
        case.add_ratio("ttft_ms", who, COLD)
    case.add_ratio("ttft_ms", PEER_AGAIN, PEER_COLD)
    for who, peer in ((COLD, PEER_COLD), (MEMORY, PEER_AGAIN)):
        case.add_ratio("ttft_ms", who, peer)
    for who in (SSD, RESTARTED):
        case.add_ratio("read_mb_per_s", who, PLAIN_READ)


def miss_notes(case: Case, length: int) -> list[str]:
    """Return a note for each contender that was to find the prefix and did not."""
    notes = []
    for who, metric in (
        (MEMORY, "memory_tokens"), (SSD, "ssd_tokens"), (RESTARTED, "ssd_tokens"),
        (PEER_AGAIN, "memory_tokens"),
    ):  # fmt: skip
        values = case.series_of(who).metrics.get(metric, [])
        missed = sum(value < FOUND_SHARE * length for value in values)
        if missed or not values:
            notes.append(
                f"{length} tokens, {who}: {missed} of {len(values)} did not find "
                f"{FOUND_SHARE:.0%} of the prefix there."
            )
    return notes


class _Subject:
    """A stack whose memory holds one prefix of this length, and the older prompts."""

    def __init__(self, setup: CacheTestbed, length: int) -> None:
        self._setup = setup
        self._length = length
        self._blocks = setup.folder / f"{NAME}-{length}"
        self._blocks.mkdir()
        count = int(ROOM * length / FILLER_TOKENS) + 1
        self._fillers = [setup.prompts.text_prompt(FILLER_TOKENS) for _ in range(count)]
        self._settings: dict[str, str] = {}
        self._stack: Stack | None = None

    def prepare(self) -> None:
        """Learn how large blocks are, with prompts that also warm everything up."""
        self._start()
        self._fill()
        stored = disk.wait_until_unchanged(self._blocks)
        if not stored:
            raise UnavailableError("No blocks were stored: this model's KV cannot be kept.")
        tokens = FILLER_TOKENS * len(self._fillers)
        resident = resident_bytes(stored, tokens, self._length, self._setup.plan.ranks)
        self._settings = {"resident_bytes_max": str(resident)}
        self._restart()

    def round(self) -> dict[str, Metrics]:
        """Measure a new prefix in every way."""
        prefix = self._setup.prompts.text_prompt(self._length)
        found = {COLD: self._ask(prefix), MEMORY: self._ask(prefix)}
        disk.wait_until_unchanged(self._blocks)
        self._fill()
        disk.wait_until_unchanged(self._blocks)
        self._leave_page_cache()
        found[SSD] = self._ask_restoring(prefix)
        disk.wait_until_unchanged(self._blocks)
        self._restart()
        self._leave_page_cache()
        found[RESTARTED] = self._ask_restoring(prefix)
        self._leave_page_cache()
        found[PLAIN_READ] = {"read_mb_per_s": disk.measure_read_rate(self._blocks) / 1e6}
        peer = self._setup.peer
        peer.child.resume()
        try:
            found |= {who: self._ask_peer(prefix) for who in (PEER_COLD, PEER_AGAIN)}
        finally:
            peer.child.pause()
        return found

    def stop(self) -> None:
        """End the stack."""
        if self._stack is not None:
            self._stack.stop()
            self._stack = None

    def _start(self) -> None:
        name = f"{NAME}-{self._length}"
        self._stack = self._setup.start(name, self._blocks, **self._settings)

    def _restart(self) -> None:
        self.stop()
        self._start()
        # The first request of a process pays for more than its prompt.
        self._ask(self._setup.prompts.text_prompt(END_TOKENS))

    def _leave_page_cache(self) -> None:
        if not self._setup.plan.is_warm:
            disk.drop_page_cache(self._blocks)

    def _fill(self) -> None:
        for text in self._fillers:
            self._ask(text)

    def _ask(self, prefix: str) -> Metrics:
        assert self._stack is not None
        return _asked(self._setup, self._stack.port, self._stack.name, prefix)

    def _ask_restoring(self, prefix: str) -> Metrics:
        assert self._stack is not None
        before = self._stack.counters()
        metrics = self._ask(prefix)
        rate = restore_rate(before, self._stack.counters())
        return metrics | {"read_mb_per_s": None if rate is None else rate / 1e6}

    def _ask_peer(self, prefix: str) -> Metrics:
        return _asked(self._setup, self._setup.peer.port, self._setup.peer.model, prefix)


def resident_bytes(stored_bytes: int, tokens: int, length: int, ranks: int) -> int:
    """Return the memory for blocks that holds ROOM prefixes of `length` tokens on each rank.

    Args:
        stored_bytes: what `tokens` tokens take on SSD, all ranks.
        tokens: see there.
        length: of a prefix.
        ranks: world size.
    """
    return int(stored_bytes / tokens / ranks * length * ROOM)


@contextlib.contextmanager
def _subject(setup: CacheTestbed, length: int) -> Iterator[_Subject]:
    subject = _Subject(setup, length)
    try:
        print_progress(f"prefix of {length} tokens, warming up")
        subject.prepare()
        yield subject
    finally:
        subject.stop()


def _asked(setup: CacheTestbed, port: int, model: str, prefix: str) -> Metrics:
    """Send a prefix with an end of its own; return what the client measured."""
    text = prefix + setup.prompts.text_prompt(END_TOKENS)
    answer = setup.request(port, COMPLETIONS, [body(model, NEW_TOKENS, prompt=text)])
    ttft_ms = answer["metrics"]["ttft_p50_ms"]
    tiers = answer["tiers"]
    # Others do not say where they found it; they have memory only.
    memory = tiers["memory_tokens"] or answer["metrics"]["cached_tokens"] - tiers["ssd_tokens"]
    return {
        "ttft_ms": ttft_ms,
        "prefill_tokens_per_s": answer["prompt_tokens"][0] / ttft_ms * 1_000,
        "memory_tokens": memory,
        "ssd_tokens": tiers["ssd_tokens"],
    }
