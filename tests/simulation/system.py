"""The simulated system. Owns its processes, restarts and clients; injects no faults."""

import dataclasses
from typing import Literal

from msgspec import structs

from services.gateway.http.errors import ApiError
from shared.configuration.loading import config_from_tree
from shared.configuration.settings import Config
from shared.messages import Speculation
from tests.simulation.checks import core_inspection
from tests.simulation.checks.protocol_checker import ProtocolChecker
from tests.simulation.environment.disk import draw_disk
from tests.simulation.environment.event_heap import EventHeap, Violation
from tests.simulation.environment.network import Network
from tests.simulation.processes.client import Client, draw_request
from tests.simulation.processes.gateway_process import GatewayProcess
from tests.simulation.processes.process import Process
from tests.simulation.processes.rank_process import RankEnvironment, RankProcess
from tests.simulation.processes.scheduler_process import SchedulerProcess
from tests.simulation.processes.supervisor import Supervisor
from tests.unit.scheduler.support.reference_rank import BYTES_PER_TOKEN, REPEAT_MARKER, WorldTraits

DEADLINE_STATUS = 504
"""HTTP status of a request whose own deadline has passed."""

DRAFT_METHODS = ("", "", "draft_model", "draft_model", "eagle")
"""Draft methods of ranks in systems without n-grams; "": none."""

SPARES_SHARE = 0.4
"""Part of the systems whose ranks have spare processes."""

_REQUESTED_METHODS: tuple[Literal["default", "ngram", "off"], ...] = (
    "default",
    "default",
    "ngram",
    "off",
)

ABORT_WITHIN_S = 2.0
"""After a gateway's death its requests are aborted within this time."""


@dataclasses.dataclass(frozen=True)
class SystemPlan:
    """Size and configuration of a run's system."""

    ranks: int
    gateways: int
    requests: int
    kv_tokens: int
    has_spares: bool
    """Each rank has a loaded spare process."""
    config: Config


def draw_system_plan(heap: EventHeap) -> SystemPlan:
    """Draw a small system: bugs of large systems also show with 3 ranks and 10 requests."""
    rng = heap.random_stream("shape")
    ranks = rng.choice([1, 2, 2, 2, 3])
    method = heap.random_stream("drafts").choice(["off", "ngram"])
    drafts = "" if method == "ngram" else heap.random_stream("draft models").choice(DRAFT_METHODS)
    method = drafts or method
    config = config_from_tree(
        {
            "world": {"size": ranks},
            "paths": {"run_dir": "/simulated"},
            "scheduler": {
                "running_sequences_max": rng.choice([2, 4, 8]),
                "waiting_requests_max": rng.choice([2, 64, 64, 64]),
                "kv_row_growth_tokens": 16,
                "step_tokens_max": rng.choice([32, 256]),
                "plans_in_flight": rng.choice([1, 2, 2]),
                "init_deadline_s": 5.0,
                "load_deadline_s": 10.0,
                "drain_s": 3.0,
                "epochs_failed_max": rng.choice([*[1_000] * 9, 3]),
            },
            "cache": {
                "block_tokens": 16,
                "enabled": rng.random() < 0.8,
                "ssd": rng.random() < 0.7,
                "resident_bytes_max": rng.choice([0, 0, 1_000]),
            },
            "speculation": {"method": method, "draft_model": drafts and "small", "tokens_max": 6},
        }
    )
    return SystemPlan(
        ranks=ranks,
        gateways=rng.choice([1, 1, 2]),
        requests=rng.randrange(4, 15),
        kv_tokens=rng.choice([300, 1_000, 20_000]),
        has_spares=heap.random_stream("spares").random() < SPARES_SHARE,
        config=config,
    )


class System:
    """All processes and clients of a run, and the checks of its outcome."""

    def __init__(self, heap: EventHeap) -> None:
        self.heap = heap
        self.plan = draw_system_plan(heap)
        self.config = self.plan.config
        rng = heap.random_stream("system")
        self.network = Network(heap, delay_s=rng.choice([0.0001, 0.001, 0.005]))
        budget = BYTES_PER_TOKEN * self.plan.kv_tokens
        resident = self.config.cache.resident_bytes_max or budget // 2
        ranks = range(self.plan.ranks)
        self.rank_environment = RankEnvironment(
            self.config,
            WorldTraits(
                budget, min(resident, budget), draft_method=self._draft_method(), draft_quality=0.7
            ),
            context=512,
            groups={},
            disks={rank: draw_disk(heap.random_stream(f"disk {rank}")) for rank in ranks},
            load_s=rng.choice([0.05, 0.3]),
            step_s=rng.choice([0.004, 0.015, 0.05]),
        )
        self.scheduler: SchedulerProcess | None = None
        self.ranks: list[RankProcess | None] = [None] * self.plan.ranks
        self.spares: list[RankProcess | None] = [None] * self.plan.ranks
        self.gateways: list[GatewayProcess | None] = [None] * self.plan.gateways
        self.clients: list[Client] = []
        self.checkers: list[ProtocolChecker] = []
        self.has_drained = False
        self.may_end_epoch = False
        """A fault that may end an epoch has been injected."""
        self._restart_rng = heap.random_stream("restarts")
        self._spares_rng = heap.random_stream("starts of spares")
        self._processes = 0
        self._traffic_rng = heap.random_stream("talk")
        self._method_rng = heap.random_stream("methods")
        # The second prompt has a completion that repeats itself, so drafts are accepted.
        self._system_prompts = [self._text(18), [REPEAT_MARKER, 7, *self._text(38)]]
        self._conversations: list[list[int]] = []

    # --- processes --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start every process in a random order, and let clients arrive."""
        for rank in range(self.plan.ranks):
            self.heap.call_after(self._restart_rng.random() * 0.2, self._start_rank, rank)
        if self.plan.has_spares:
            for rank in range(self.plan.ranks):
                self.heap.call_after(0.5 + 0.5 * self._spares_rng.random(), self._start_spare, rank)
        for number in range(self.plan.gateways):
            self.heap.call_after(self._restart_rng.random() * 0.2, self._start_gateway, number)
        self.heap.call_after(self._restart_rng.random() * 0.2, self._start_scheduler)
        Supervisor(self).start()
        for _ in range(self.plan.requests):
            self.heap.call_after(1.0 + 2.5 * self._traffic_rng.random(), self._start_client)

    @property
    def processes(self) -> list[Process]:
        """Processes that are alive."""
        known: list[Process | None] = [self.scheduler, *self.ranks, *self.spares]
        known += self.gateways
        return [process for process in known if process is not None and process.is_alive]

    def _start_scheduler(self) -> None:
        checker = ProtocolChecker(self._expected)
        self.checkers.append(checker)
        name = self._name("scheduler")
        self.scheduler = SchedulerProcess(name, self.heap, self.network, self.config, checker)
        self._observe(self.scheduler)

    def _start_rank(self, rank: int) -> None:
        name = self._name(f"rank {rank}")
        pid = self._processes
        process = RankProcess(name, self.heap, self.network, self.rank_environment, rank, pid)
        self.ranks[rank] = process
        self._observe(process)

    def _start_spare(self, rank: int) -> None:
        name = self._name(f"spare of rank {rank}")
        environment = self.rank_environment
        pid = self._processes
        process = RankProcess(name, self.heap, self.network, environment, rank, pid, spare=True)
        self.spares[rank] = process
        self._observe(process)

    def _start_gateway(self, number: int) -> None:
        name = self._name(f"gateway {number}")
        process = GatewayProcess(name, self.heap, self.network, self.config)
        self.gateways[number] = process
        self._observe(process)

    def _name(self, kind: str) -> str:
        self._processes += 1
        name = f"{kind} #{self._processes}"
        self.heap.record(name, "starts")
        return name

    def _observe(self, process: Process) -> None:
        process.on_end = self._handle_end
        process.on_error = self._handle_error

    def _handle_error(self, process: Process, error: Exception) -> None:
        if isinstance(error, Violation):
            raise error
        what = str(error) or type(error).__name__
        raise Violation(f"{process.name}: {type(error).__name__}: {what}") from error

    def _handle_end(self, process: Process) -> None:
        """Restart a process that has ended, and end all that depended on it."""
        delay_s = self._restart_rng.uniform(0.05, 0.4)
        if isinstance(process, RankProcess):
            for group in self.rank_environment.groups.values():
                group.leave(process)
            self._replace_rank(process, delay_s)
        elif isinstance(process, GatewayProcess):
            for client in self.clients:
                if client.gateway is process:
                    client.lose_gateway()
            self.heap.call_after(delay_s, self._start_gateway, self.gateways.index(process))
            self._expect_aborts(process)
        else:
            self.heap.call_after(delay_s, self._start_scheduler)

    def _replace_rank(self, process: RankProcess, delay_s: float) -> None:
        """Replace a rank that has ended, at once if it has a spare, or the spare itself."""
        if process in self.spares:
            rank = self.spares.index(process)
            self.spares[rank] = None
            self.heap.call_after(delay_s, self._start_spare, rank)
            return
        rank = self.ranks.index(process)
        self.ranks[rank] = None
        if self.spares[rank] is not None:
            delay_s = 0.0
        self.heap.call_after(delay_s, self._start_rank_or_take_spare, rank)

    def _start_rank_or_take_spare(self, rank: int) -> None:
        spare = self.spares[rank]
        if spare is None:
            self._start_rank(rank)
            return
        self.ranks[rank], self.spares[rank] = spare, None
        spare.call_later(0.01 * self._spares_rng.random(), spare.link.take_place)
        self.heap.call_after(0.2 + self._spares_rng.random(), self._start_spare, rank)

    def _expect_aborts(self, gateway: GatewayProcess) -> None:
        """Check that the requests of a dead gateway are aborted soon, unless a fault delays
        that."""
        scheduler = self.scheduler
        if scheduler is None or gateway.is_impaired or not gateway.sockets:
            return
        peer = gateway.sockets[0].identity

        def check() -> None:
            is_serving = scheduler.is_alive and not core_inspection.has_stopped(scheduler.core)
            if is_serving and not scheduler.is_impaired:
                left = scheduler.checked_core.checker.open_requests(peer)
                if left:
                    raise Violation(f"{gateway.name} is gone, and {left} stay open")

        self.heap.call_after(ABORT_WITHIN_S, check)

    # --- clients ----------------------------------------------------------------------------------

    def _start_client(self) -> None:
        gateways = [one for one in self.gateways if one is not None and one.is_alive]
        if not gateways:
            self.heap.call_after(0.3, self._start_client)
            return
        rng = self._traffic_rng
        system = rng.choice(self._system_prompts)
        if self._conversations and rng.random() < 0.5:
            prompt = list(rng.choice(self._conversations))
        else:
            prompt = list(system)
        prompt = (prompt + self._text(rng.choice([1, 5, 20])))[:200]
        system_tokens = len(system) if prompt[: len(system)] == system else 0
        planned = draw_request(f"request {len(self.clients)}", prompt, system_tokens, rng)
        self._conversations.append(prompt + list(planned.tokens))
        if self._draft_method():
            # Some requests ask for another draft method, or for none.
            method = self._method_rng.choice(_REQUESTED_METHODS)
            message = structs.replace(planned.message, speculation=Speculation(method=method))
            planned = dataclasses.replace(planned, message=message)
        self.clients.append(Client(planned, rng.choice(gateways), self.heap))

    def _draft_method(self) -> str:
        method = self.config.speculation.method
        return method if method in DRAFT_METHODS else ""

    def _text(self, tokens: int) -> list[int]:
        return [self._traffic_rng.randrange(1_000) for _ in range(tokens)]

    def _expected(self, name: str) -> tuple[int, ...]:
        return self.clients[int(name.rpartition(" ")[2])].planned.tokens

    # --- checks of the outcome --------------------------------------------------------------------

    def leftovers(self) -> list[str]:
        """Return state that must not exist when no request is open."""
        left: list[str] = []
        scheduler = self.scheduler
        if scheduler is None or not scheduler.is_alive:
            return ["no scheduler"]
        core = scheduler.core
        left += [
            f"{one.name}: {len(one.requests)} requests" for one in self._gateways_with_requests()
        ]
        left += core_inspection.leftovers(core)
        alive = len(self.processes) - 1
        if scheduler.shell.sessions != alive:
            left.append(f"{scheduler.shell.sessions} sessions, {alive} processes")
        unready = core_inspection.unready_reason(core)
        if self.checkers[-1].has_failed:
            return left
        if unready:
            return [*left, unready]
        serving = [
            one for one in [*self.ranks, *self.spares] if one is not None and self._serves(one)
        ]
        if len(serving) != self.plan.ranks:
            left.append(f"{len(serving)} ranks that are idle")
        for rank in serving:
            if rank.reference is not None and not rank.is_hung:
                left += core_inspection.rank_leftovers(core, rank.name, rank.reference)
        return left

    def _serves(self, process: RankProcess) -> bool:
        """Tell whether a process is an idle rank of the current epoch; a spare may be one before
        the supervisor has moved it."""
        assert self.scheduler is not None
        is_current = process.epoch == core_inspection.epoch(self.scheduler.core)
        return is_current and process.reference is not None and not process.is_busy

    def _gateways_with_requests(self) -> list[GatewayProcess]:
        return [one for one in self.gateways if one is not None and len(one.requests)]

    def _may_fail(self, error: ApiError | None) -> bool:
        """Tell whether a request may fail: after a drain that ran out of time, or when the world
        has failed."""
        if error is None:
            return False
        if self.has_drained and "has stopped before" in error.message:
            return True
        lost_max = self.config.scheduler.epochs_failed_max - 1
        if "epochs in a row have failed" in error.message:
            return any(len(checker.ended_epochs) >= lost_max for checker in self.checkers)
        return any(checker.has_failed for checker in self.checkers)

    def check_outcomes(self) -> None:
        """Check that every client got its whole text and that no epoch ended without a fault.

        Raises:
            Violation: a client or an epoch ended wrongly.
        """
        ended = [cause for checker in self.checkers for cause in checker.ended_epochs]
        if ended and not self.may_end_epoch:
            raise Violation(f"an epoch ends without a fault: {ended}")
        for client in self.clients:
            if client.outcome == "finished" and client.text != client.planned.text:
                raise Violation(f"{client.name} has {client.text!r} of {client.planned.text!r}")
            error = client.error
            if client.is_overdue and error is not None and error.status == DEADLINE_STATUS:
                continue
            if client.outcome == "failed" and not self._may_fail(error):
                assert error is not None
                raise Violation(f"the stream of {client.name} is lost: {error.message}")
            if client.outcome == "refused" and error is not None and error.status not in (429, 503):
                raise Violation(f"{client.name} is refused for good: {error.message}")
