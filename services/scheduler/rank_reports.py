"""Reports of ranks beside their receipts: restores, spills, grammars and measurements. Pure."""

from services.scheduler.batch.running_batch import RunningBatch
from services.scheduler.requests.request_table import RequestTable
from services.scheduler.telemetry.telemetry import Telemetry
from services.scheduler.world.world import World
from shared.identifiers import PeerId
from shared.messages import BlocksRestored, BlocksSpilled, GrammarCompiled, StepsMeasured


class RankReports:
    """Hands each report to the part of the batch that it concerns; ends requests that it fails."""

    def __init__(
        self, world: World, batch: RunningBatch, requests: RequestTable, telemetry: Telemetry
    ) -> None:
        self._world = world
        self._batch = batch
        self._requests = requests
        self._telemetry = telemetry

    def handle(
        self,
        peer: PeerId,
        message: BlocksRestored | BlocksSpilled | GrammarCompiled | StepsMeasured,
        now_s: float,
    ) -> None:
        """Handle a report. One of another epoch or of an unknown peer is only counted.

        Args:
            peer: the rank process that sent it.
            message: the report.
            now_s: the monotonic time in seconds.
        """
        member, cache = self._world.find(peer), self._batch.cache
        rank = member.rank if member is not None else None
        if member is None or rank is None or message.epoch != self._world.epoch:
            self._requests.counters["stale_receipts_total"] += 1
        elif isinstance(message, StepsMeasured):
            self._telemetry.add_report(rank, message, self._world.size)
        elif isinstance(message, GrammarCompiled):
            failed = self._batch.grammars.record(rank, message, self._world.size)
            if failed is not None:
                self._batch.remove(failed)
                self._requests.fail(failed, "grammar", message.failure)
        elif cache.state.is_on and isinstance(message, BlocksRestored):
            order = cache.restorer.handle_restored(rank, message)
            if order is not None:
                self._telemetry.block_transfers.add_restore(rank, order, message, now_s)
        elif cache.state.is_on and isinstance(message, BlocksSpilled):
            ordered_at_s = cache.spiller.handle_spilled(rank, member.hello.host, message, now_s)
            if ordered_at_s is not None:
                self._telemetry.block_transfers.add_spill(rank, ordered_at_s, message, now_s)

    def end_late_grammars(self, now_s: float) -> None:
        """End the requests whose grammars some ranks have not compiled in time.

        Args:
            now_s: the monotonic time in seconds.
        """
        for sequence, detail in self._batch.grammars.expired(now_s):
            self._batch.remove(sequence)
            self._requests.fail(sequence, "grammar_deadline", detail)
