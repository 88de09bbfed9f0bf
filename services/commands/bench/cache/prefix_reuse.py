"""Prefix reuse: one prefix cold, from memory, from SSD, and from SSD after a restart.

The stack's memory for blocks holds 1.2 prefixes, so that filler prompts evict a prefix from memory.
Before blocks are read from SSD, their files are removed from the page cache where the system can do
that, unless `--warm` is given.
"""

import contextlib
from collections.abc import Iterator

from services.commands.bench.cache.testbed import CacheTestbed, restore_rate
from services.commands.bench.load.load_processes import COMPLETIONS, request_body
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
"""Tokens after the shared prefix, different in every request."""
NEW_TOKENS = 4
FILLER_TOKENS = 1_024
RESIDENT_PREFIXES = 1.2
"""Size of the memory for blocks, in prefixes."""
LONG_TOKENS = 8_192
"""Longer prefixes are repeated a third as often."""
FOUND_SHARE = 0.9
"""Smallest share of a prefix that must be found for a hit."""

Metrics = dict[str, float | None]


def measure(testbed: CacheTestbed, report: Report) -> None:
    """Measure the time to first token of one prefix cold, from memory, from SSD, after a restart.

    Args:
        testbed: plan and running processes of the benchmark.
        report: gets one case per prefix length, and notes on prefixes that were not found.

    Raises:
        UnavailableError: when a server does not start or answer.
    """
    for length in testbed.plan.prefixes:
        case = Case(conditions={PART: NAME, "tokens": length})
        with _prefix_stack(testbed, length) as stack:
            for number in range(repeats_for(testbed.plan.repeats, length)):
                print_progress(f"prefix of {length} tokens, repeat {number + 1}")
                found, foreign = noise.measure_with_retries(stack.measure, testbed.plan.tries)
                for contender, metrics in found.items():
                    case.series_of(contender).add(metrics | {noise.FOREIGN_CORES: foreign})
        add_ratios(case)
        report.cases.append(case)
        report.notes += miss_notes(case, length)


def repeats_for(repeats: int, length: int) -> int:
    """Return the number of repeats for a prefix length; long prefixes get a third of them.

    Args:
        repeats: number of repeats that the command line asks for.
        length: tokens of the prefix; above LONG_TOKENS it is long.
    """
    return repeats if length <= LONG_TOKENS else max(1, repeats // 3)


def add_ratios(case: Case) -> None:
    """Add ratios between contenders to a case, one value per repeat.

    They are the time to first token with the prefix cached divided by that without, the same time
    of Lockstep divided by that of mlx_lm.server, and the bytes per second at which Lockstep
    restores blocks from SSD divided by those of plain reads of the block files.

    Args:
        case: the repeats of all contenders; receives the ratios.
    """
    for contender in (MEMORY, SSD, RESTARTED):
        case.add_ratio("ttft_ms", contender, COLD)
    case.add_ratio("ttft_ms", PEER_AGAIN, PEER_COLD)
    for contender, peer in ((COLD, PEER_COLD), (MEMORY, PEER_AGAIN)):
        case.add_ratio("ttft_ms", contender, peer)
    for contender in (SSD, RESTARTED):
        case.add_ratio("read_mb_per_s", contender, PLAIN_READ)


def miss_notes(case: Case, length: int) -> list[str]:
    """Return a note for each contender with repeats that did not find the prefix in its tier.

    A repeat found it when at least FOUND_SHARE of its tokens came from the contender's tier.

    Args:
        case: the repeats of all contenders.
        length: tokens of the prefix.
    """
    notes = []
    for contender, metric in (
        (MEMORY, "memory_tokens"), (SSD, "ssd_tokens"), (RESTARTED, "ssd_tokens"),
        (PEER_AGAIN, "memory_tokens"),
    ):  # fmt: skip
        values = case.series_of(contender).metrics.get(metric, [])
        missed = sum(value < FOUND_SHARE * length for value in values)
        if missed or not values:
            notes.append(
                f"{length} tokens, {contender}: {missed} of {len(values)} did not find "
                f"{FOUND_SHARE:.0%} of the prefix there."
            )
    return notes


class _PrefixStack:
    """A stack whose memory holds little more than one prefix of this length."""

    def __init__(self, testbed: CacheTestbed, length: int) -> None:
        self._testbed = testbed
        self._length = length
        self._blocks = testbed.folder / f"{NAME}-{length}"
        self._blocks.mkdir()
        count = int(RESIDENT_PREFIXES * length / FILLER_TOKENS) + 1
        self._fillers = [testbed.prompts.text_prompt(FILLER_TOKENS) for _ in range(count)]
        self._settings: dict[str, str] = {}
        self._stack: Stack | None = None

    def prepare(self) -> None:
        """Measure the size of blocks, and restart the stack with memory for 1.2 prefixes."""
        self._start()
        self._evict_from_memory()
        stored = disk.wait_until_unchanged(self._blocks)
        if not stored:
            raise UnavailableError("No blocks were stored: this model's KV cannot be kept.")
        tokens = FILLER_TOKENS * len(self._fillers)
        resident = resident_bytes(stored, tokens, self._length, self._testbed.plan.ranks)
        self._settings = {"resident_bytes_max": str(resident)}
        self._restart()

    def measure(self) -> dict[str, Metrics]:
        """Measure a new prefix with every contender."""
        prefix = self._testbed.prompts.text_prompt(self._length)
        found = {COLD: self._request(prefix), MEMORY: self._request(prefix)}
        disk.wait_until_unchanged(self._blocks)
        self._evict_from_memory()
        disk.wait_until_unchanged(self._blocks)
        self._drop_page_cache()
        found[SSD] = self._request_restoring(prefix)
        disk.wait_until_unchanged(self._blocks)
        self._restart()
        self._drop_page_cache()
        found[RESTARTED] = self._request_restoring(prefix)
        self._drop_page_cache()
        found[PLAIN_READ] = {"read_mb_per_s": disk.measure_read_rate(self._blocks) / 1e6}
        peer = self._testbed.peer
        peer.child.resume()
        try:
            found |= {name: self._request_peer(prefix) for name in (PEER_COLD, PEER_AGAIN)}
        finally:
            peer.child.pause()
        return found

    def stop(self) -> None:
        """Stop the stack."""
        if self._stack is not None:
            self._stack.stop()
            self._stack = None

    def _start(self) -> None:
        name = f"{NAME}-{self._length}"
        self._stack = self._testbed.start(name, self._blocks, **self._settings)

    def _restart(self) -> None:
        self.stop()
        self._start()
        # The first request of a process is slower than later ones.
        self._request(self._testbed.prompts.text_prompt(END_TOKENS))

    def _drop_page_cache(self) -> None:
        if not self._testbed.plan.is_warm:
            disk.drop_page_cache(self._blocks)

    def _evict_from_memory(self) -> None:
        for text in self._fillers:
            self._request(text)

    def _request(self, prefix: str) -> Metrics:
        assert self._stack is not None
        return _request_metrics(self._testbed, self._stack.port, self._stack.name, prefix)

    def _request_restoring(self, prefix: str) -> Metrics:
        assert self._stack is not None
        before = self._stack.counters()
        metrics = self._request(prefix)
        rate = restore_rate(before, self._stack.counters())
        return metrics | {"read_mb_per_s": None if rate is None else rate / 1e6}

    def _request_peer(self, prefix: str) -> Metrics:
        peer = self._testbed.peer
        return _request_metrics(self._testbed, peer.port, peer.model, prefix)


def resident_bytes(stored_bytes: int, tokens: int, length: int, ranks: int) -> int:
    """Return the bytes per rank of a memory for blocks that one prefix fills almost alone.

    It holds RESIDENT_PREFIXES prefixes, so that other prompts push the prefix out to SSD.

    Args:
        stored_bytes: measured bytes on SSD of the blocks of `tokens` tokens, over all ranks.
        tokens: number of tokens whose blocks were measured.
        length: tokens of the prefix.
        ranks: world size.
    """
    return int(stored_bytes / tokens / ranks * length * RESIDENT_PREFIXES)


@contextlib.contextmanager
def _prefix_stack(testbed: CacheTestbed, length: int) -> Iterator[_PrefixStack]:
    stack = _PrefixStack(testbed, length)
    try:
        print_progress(f"prefix of {length} tokens, warming up")
        stack.prepare()
        yield stack
    finally:
        stack.stop()


def _request_metrics(testbed: CacheTestbed, port: int, model: str, prefix: str) -> Metrics:
    """Send the prefix with a new end; return the client's metrics."""
    text = prefix + testbed.prompts.text_prompt(END_TOKENS)
    answer = testbed.request(port, COMPLETIONS, [request_body(model, NEW_TOKENS, prompt=text)])
    ttft_ms = answer["metrics"]["ttft_p50_ms"]
    tiers = answer["tiers"]
    # Peers report cached tokens without a tier; they only have memory.
    memory = tiers["memory_tokens"] or answer["metrics"]["cached_tokens"] - tiers["ssd_tokens"]
    return {
        "ttft_ms": ttft_ms,
        "prefill_tokens_per_s": answer["prompt_tokens"][0] / ttft_ms * 1_000,
        "memory_tokens": memory,
        "ssd_tokens": tiers["ssd_tokens"],
    }
