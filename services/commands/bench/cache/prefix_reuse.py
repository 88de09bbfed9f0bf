"""Prefix reuse: one prefix cold, from memory, from SSD, and from SSD after a restart.

The stack's memory for blocks holds 1.2 prefixes, so that filler prompts evict a prefix from memory.
Before blocks are read from SSD, their files are removed from the page cache where the system can do
that, unless `--warm` is given.
"""

from contextlib import closing

from services.commands.bench.cache.testbed import CacheTestbed, restore_rate
from services.commands.bench.measuring import disk
from services.commands.bench.measuring.noise import measure_case
from services.commands.bench.measuring.processes import MeasuredServer, print_progress
from services.commands.bench.measuring.report import PART, Case, Report
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
    plan = testbed.plan
    for length in plan.prefixes:
        print_progress(f"prefix of {length} tokens, warming up")
        with closing(_PrefixStack(testbed, length)) as stack:
            conditions = {PART: NAME, "tokens": length}
            repeats = plan.repeats_for(length, LONG_TOKENS)
            case = measure_case(plan, report, conditions, stack.measure, repeats=repeats)
        add_ratios(case)
        report.notes += miss_notes(case, length)


def add_ratios(case: Case) -> None:
    """Add ratios between contenders to a case, one value per repeat.

    They are the time to first token with the prefix cached divided by that without, the same time
    of Lockstep divided by that of mlx_lm.server, and the bytes per second at which Lockstep
    restores blocks from SSD divided by those of plain reads of the block files.

    Args:
        case: the repeats of all contenders; receives the ratios.
    """
    for contender, reference in (
        (MEMORY, COLD), (SSD, COLD), (RESTARTED, COLD), (PEER_AGAIN, PEER_COLD),
        (COLD, PEER_COLD), (MEMORY, PEER_AGAIN),
    ):  # fmt: skip
        case.add_ratios(contender, reference, "ttft_ms")
    for contender in (SSD, RESTARTED):
        case.add_ratios(contender, PLAIN_READ, "read_mb_per_s")


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
        values = case.values(contender, metric)
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
        """Measure the size of blocks, and restart the stack with memory for 1.2 prefixes."""
        self._testbed = testbed
        self._length = length
        self._name = f"{NAME}-{length}"
        self._blocks = testbed.folder / self._name
        self._blocks.mkdir()
        count = int(RESIDENT_PREFIXES * length / FILLER_TOKENS) + 1
        self._fillers = [testbed.prompts.text_prompt(FILLER_TOKENS) for _ in range(count)]
        self._settings: dict[str, str] = {}
        self._stack = testbed.start(self._name, self._blocks)
        try:
            self._evict_from_memory()
            stored = disk.wait_until_unchanged(self._blocks)
            if not stored:
                raise UnavailableError("No blocks were stored: this model's KV cannot be kept.")
            tokens = FILLER_TOKENS * count
            resident = resident_bytes(stored, tokens, length, testbed.plan.ranks)
            self._settings = {"resident_bytes_max": str(resident)}
            self._restart()
        except BaseException:
            self.close()
            raise

    def measure(self) -> dict[str, Metrics]:
        """Measure a new prefix with every contender."""
        prefix = self._testbed.prompts.text_prompt(self._length)
        cold, again = (self._request(self._stack, prefix) for _ in range(2))
        found = {COLD: cold, MEMORY: again}
        disk.wait_until_unchanged(self._blocks)
        self._evict_from_memory()
        disk.wait_until_unchanged(self._blocks)
        found[SSD] = self._request_restoring(prefix)
        disk.wait_until_unchanged(self._blocks)
        self._restart()
        found[RESTARTED] = self._request_restoring(prefix)
        self._drop_page_cache()
        found[PLAIN_READ] = {"read_mb_per_s": disk.measure_read_rate(self._blocks) / 1e6}
        with self._testbed.running_peer() as peer:
            found |= {name: self._request(peer, prefix) for name in (PEER_COLD, PEER_AGAIN)}
        return found

    def close(self) -> None:
        """Stop the stack."""
        self._stack.stop()

    def _restart(self) -> None:
        self._stack.stop()
        self._stack = self._testbed.start(self._name, self._blocks, **self._settings)
        # The first request of a process is slower than later ones.
        self._request(self._stack, self._testbed.prompts.text_prompt(END_TOKENS))

    def _drop_page_cache(self) -> None:
        if not self._testbed.plan.is_warm:
            disk.drop_page_cache(self._blocks)

    def _evict_from_memory(self) -> None:
        for text in self._fillers:
            self._request(self._stack, text)

    def _request_restoring(self, prefix: str) -> Metrics:
        self._drop_page_cache()
        before = self._stack.counters()
        metrics = self._request(self._stack, prefix)
        rate = restore_rate(before, self._stack.counters())
        return metrics | {"read_mb_per_s": None if rate is None else rate / 1e6}

    def _request(self, server: MeasuredServer, prefix: str) -> Metrics:
        """Send the prefix with a new end; return the client's metrics."""
        text = prefix + self._testbed.prompts.text_prompt(END_TOKENS)
        answer = self._testbed.client.complete(server, [[text]], NEW_TOKENS)
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
