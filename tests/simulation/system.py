"""The whole system in one heap: every process, the supervisor that starts them again, clients."""

import dataclasses
from typing import Literal

from msgspec import structs

from services.gateway.http.errors import ApiError
from shared.configuration.loading import config_from_tree
from shared.configuration.settings import Config
from shared.messages import Speculation
from tests.simulation.checks import core_inspection
from tests.simulation.checks.protocol_checker import Ledger
from tests.simulation.environment.disk import draw_disk
from tests.simulation.environment.event_heap import Heap, Violation
from tests.simulation.environment.network import Wire
from tests.simulation.processes.client import Client, draw_wish
from tests.simulation.processes.gateway_process import GatewayProcess
from tests.simulation.processes.process import Process
from tests.simulation.processes.rank_process import RankProcess, Worlds
from tests.simulation.processes.scheduler_process import SchedulerProcess
from tests.simulation.processes.supervisor import Supervisor
from tests.unit.scheduler.reference_rank import BYTES_PER_TOKEN, COPIES, Terms

OVERDUE = 504
"""The status of a request whose own deadline has passed."""

DRAFTS = ("", "", "draft_model", "draft_model", "eagle")
"""What proposes drafts on the ranks of a system without n-grams; "": nothing."""

_WISHES: tuple[Literal["default", "ngram", "off"], ...] = ("default", "default", "ngram", "off")

ABORTED_S = 2.0
"""After a gateway's death what it owned is aborted within this time."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a run's system is like."""

    ranks: int
    gateways: int
    requests: int
    kv_tokens: int
    config: Config


def draw_shape(heap: Heap) -> Shape:
    """Draw a small system: what goes wrong with 3 ranks and 10 requests goes wrong with more."""
    chance = heap.chance("shape")
    ranks = chance.choice([1, 2, 2, 2, 3])
    method = heap.chance("drafts").choice(["off", "ngram"])
    drafts = "" if method == "ngram" else heap.chance("draft models").choice(DRAFTS)
    method = drafts or method
    config = config_from_tree(
        {
            "world": {"size": ranks},
            "paths": {"run_dir": "/simulated"},
            "scheduler": {
                "running_sequences_max": chance.choice([2, 4, 8]),
                "waiting_requests_max": chance.choice([2, 64, 64, 64]),
                "kv_row_growth_tokens": 16,
                "step_tokens_max": chance.choice([32, 256]),
                "plans_in_flight": chance.choice([1, 2, 2]),
                "init_deadline_s": 5.0,
                "load_deadline_s": 10.0,
                "drain_s": 3.0,
                "epochs_failed_max": chance.choice([*[1_000] * 9, 3]),
            },
            "cache": {
                "block_tokens": 16,
                "enabled": chance.random() < 0.8,
                "ssd": chance.random() < 0.7,
                "resident_bytes_max": chance.choice([0, 0, 1_000]),
            },
            "speculation": {"method": method, "draft_model": drafts and "small", "tokens_max": 6},
        }
    )
    return Shape(
        ranks=ranks,
        gateways=chance.choice([1, 1, 2]),
        requests=chance.randrange(4, 15),
        kv_tokens=chance.choice([300, 1_000, 20_000]),
        config=config,
    )


class System:
    """Everything that runs, and what it has promised."""

    def __init__(self, heap: Heap) -> None:
        self.heap = heap
        self.shape = draw_shape(heap)
        self.config = self.shape.config
        chance = heap.chance("system")
        self.wire = Wire(heap, delay_s=chance.choice([0.0001, 0.001, 0.005]))
        budget = BYTES_PER_TOKEN * self.shape.kv_tokens
        resident = self.config.cache.resident_bytes_max or budget // 2
        ranks = range(self.shape.ranks)
        self.worlds = Worlds(
            self.config,
            Terms(budget, min(resident, budget), drafts=self._drafts(), draft_quality=0.7),
            context=512,
            groups={},
            disks={rank: draw_disk(heap.chance(f"disk {rank}")) for rank in ranks},
            load_s=chance.choice([0.05, 0.3]),
            step_s=chance.choice([0.004, 0.015, 0.05]),
        )
        self.scheduler: SchedulerProcess | None = None
        self.ranks: list[RankProcess | None] = [None] * self.shape.ranks
        self.gateways: list[GatewayProcess | None] = [None] * self.shape.gateways
        self.clients: list[Client] = []
        self.ledgers: list[Ledger] = []
        self.has_drained = False
        self.may_lose_world = False
        """Something has struck by which an epoch may end."""
        self._restarts = heap.chance("restarts")
        self._processes = 0
        self._talk = heap.chance("talk")
        self._methods = heap.chance("methods")
        # One that begins a text which repeats itself, so that there is something to draft.
        self._systems = [self._text(18), [COPIES, 7, *self._text(38)]]
        self._conversations: list[list[int]] = []

    # --- processes ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start every process, in some order, and let clients come."""
        for rank in range(self.shape.ranks):
            self.heap.after(self._restarts.random() * 0.2, self._start_rank, rank)
        for number in range(self.shape.gateways):
            self.heap.after(self._restarts.random() * 0.2, self._start_gateway, number)
        self.heap.after(self._restarts.random() * 0.2, self._start_scheduler)
        Supervisor(self).start()
        for _ in range(self.shape.requests):
            self.heap.after(1.0 + 2.5 * self._talk.random(), self._ask)

    @property
    def processes(self) -> list[Process]:
        """Those that live now."""
        known: list[Process | None] = [self.scheduler, *self.ranks, *self.gateways]
        return [process for process in known if process is not None and process.is_alive]

    def _start_scheduler(self) -> None:
        ledger = Ledger(self._expected)
        self.ledgers.append(ledger)
        name = self._name("scheduler")
        self.scheduler = SchedulerProcess(name, self.heap, self.wire, self.config, ledger)
        self._mind(self.scheduler)

    def _start_rank(self, rank: int) -> None:
        name = self._name(f"rank {rank}")
        pid = self._processes
        process = RankProcess(name, self.heap, self.wire, self.worlds, rank, pid)
        self.ranks[rank] = process
        self._mind(process)

    def _start_gateway(self, number: int) -> None:
        name = self._name(f"gateway {number}")
        process = GatewayProcess(name, self.heap, self.wire, self.config)
        self.gateways[number] = process
        self._mind(process)

    def _name(self, kind: str) -> str:
        self._processes += 1
        name = f"{kind} #{self._processes}"
        self.heap.note(name, "starts")
        return name

    def _mind(self, process: Process) -> None:
        process.on_end = self._ended
        process.on_error = self._erred

    def _erred(self, process: Process, error: Exception) -> None:
        if isinstance(error, Violation):
            raise error
        what = str(error) or type(error).__name__
        raise Violation(f"{process.name}: {type(error).__name__}: {what}") from error

    def _ended(self, process: Process) -> None:
        """Whoever ends is started again; whoever belonged to it is gone."""
        delay_s = self._restarts.uniform(0.05, 0.4)
        if isinstance(process, RankProcess):
            for group in self.worlds.groups.values():
                group.leave(process)
            self.heap.after(delay_s, self._start_rank, self.ranks.index(process))
        elif isinstance(process, GatewayProcess):
            for client in self.clients:
                if client.gateway is process:
                    client.lose_gateway()
            self.heap.after(delay_s, self._start_gateway, self.gateways.index(process))
            self._expect_aborts(process)
        else:
            self.heap.after(delay_s, self._start_scheduler)

    def _expect_aborts(self, gateway: GatewayProcess) -> None:
        """What a gateway owned is given up soon after its end, unless something hinders that."""
        scheduler = self.scheduler
        if scheduler is None or gateway.is_hindered or not gateway.sockets:
            return
        peer = gateway.sockets[0].identity

        def look() -> None:
            is_serving = scheduler.is_alive and not core_inspection.is_over(scheduler.core)
            if is_serving and not scheduler.is_hindered:
                left = scheduler.watched.ledger.open_requests(peer)
                if left:
                    raise Violation(f"{gateway.name} is gone, and {left} stay open")

        self.heap.after(ABORTED_S, look)

    # --- clients --------------------------------------------------------------------------------

    def _ask(self) -> None:
        gateways = [one for one in self.gateways if one is not None and one.is_alive]
        if not gateways:
            self.heap.after(0.3, self._ask)
            return
        talk = self._talk
        system = talk.choice(self._systems)
        if self._conversations and talk.random() < 0.5:
            prompt = list(talk.choice(self._conversations))
        else:
            prompt = list(system)
        prompt = (prompt + self._text(talk.choice([1, 5, 20])))[:200]
        system_tokens = len(system) if prompt[: len(system)] == system else 0
        wish = draw_wish(f"request {len(self.clients)}", prompt, system_tokens, talk)
        self._conversations.append(prompt + list(wish.tokens))
        if self._drafts():
            # Some want other drafts than the ranks', or none.
            method = self._methods.choice(_WISHES)
            order = structs.replace(wish.order, speculation=Speculation(method=method))
            wish = dataclasses.replace(wish, order=order)
        self.clients.append(Client(wish, talk.choice(gateways), self.heap))

    def _drafts(self) -> str:
        method = self.config.speculation.method
        return method if method in DRAFTS else ""

    def _text(self, tokens: int) -> list[int]:
        return [self._talk.randrange(1_000) for _ in range(tokens)]

    def _expected(self, name: str) -> tuple[int, ...]:
        return self.clients[int(name.rpartition(" ")[2])].wish.tokens

    # --- judgement ------------------------------------------------------------------------------

    def leftovers(self) -> list[str]:
        """Return what should not be there when nobody asks for anything."""
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
        unready = core_inspection.unready(core)
        if self.ledgers[-1].has_given_up:
            return left
        if unready:
            return [*left, unready]
        for rank in self.ranks:
            if rank is None or rank.reference is None or rank.is_busy:
                left.append("a rank that is not at rest")
            elif not rank.is_wedged:
                left += core_inspection.rank_leftovers(core, rank.name, rank.reference)
        return left

    def _gateways_with_requests(self) -> list[GatewayProcess]:
        return [one for one in self.gateways if one is not None and len(one.requests)]

    def _may_fail(self, error: ApiError | None) -> bool:
        """After SIGTERM what does not finish in time ends, and says so; so when all is given up."""
        if error is None:
            return False
        if self.has_drained and "has stopped before" in error.message:
            return True
        lost_max = self.config.scheduler.epochs_failed_max - 1
        if "epochs in a row have failed" in error.message:
            return any(len(ledger.ended_epochs) >= lost_max for ledger in self.ledgers)
        return any(ledger.has_given_up for ledger in self.ledgers)

    def judge(self) -> None:
        """Everybody who stayed has got everything, and no epoch has ended for nothing."""
        ended = [cause for ledger in self.ledgers for cause in ledger.ended_epochs]
        if ended and not self.may_lose_world:
            raise Violation(f"an epoch ends for nothing: {ended}")
        for client in self.clients:
            if client.outcome == "finished" and client.text != client.wish.text:
                raise Violation(f"{client.name} has {client.text!r} of {client.wish.text!r}")
            error = client.error
            if client.is_overdue and error is not None and error.status == OVERDUE:
                continue
            if client.outcome == "failed" and not self._may_fail(error):
                assert error is not None
                raise Violation(f"the stream of {client.name} is lost: {error.message}")
            if client.outcome == "refused" and error is not None and error.status not in (429, 503):
                raise Violation(f"{client.name} is refused for good: {error.message}")
