"""Queries of the scheduler, the cache store and the gateway for their state, for operator commands.

Owns the links and deadlines; does not format answers.
"""

import contextlib
import dataclasses
import http.client
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from services.supervisor.status.progress_text import base_url
from services.supervisor.status.running import Running
from shared.clock import Clock, SystemClock
from shared.configuration.settings import Config
from shared.errors import ConfigError, PeerUnknown, UnavailableError
from shared.identifiers import Incarnation
from shared.messages import (
    FromStore,
    OrderDrain,
    QueryStatus,
    QueryStore,
    StatusReported,
    StoreReported,
    ToGateway,
)
from shared.transport.links import Connected, Dialer, Received

ANSWER_DEADLINE_S = 3.0
"""Seconds that `lockstep status` waits for the scheduler."""

GATEWAY_DEADLINE_S = 0.5
"""Seconds for one request to the local gateway. The supervisor must return to its children."""


@dataclasses.dataclass(frozen=True, slots=True)
class LockstepSummary:
    """One Lockstep in the list of those that run on this machine."""

    port: int
    model: str
    """Its name in the API."""
    ready: bool
    reason: str
    """Why it is not ready, or why its scheduler did not answer; "" if it is ready."""
    pid: int
    """Process id of `lockstep up`; without one, of another process."""
    run_dir: str
    processes: dict[str, int]
    """Process id of each role that runs on this machine."""
    status: StatusReported | None
    """The scheduler's report, None without an answer."""


class StatusWatch:
    """Link to the scheduler that asks for its status every `interval_s` seconds, within `poll`."""

    def __init__(
        self,
        config: Config,
        interval_s: float,
        clock: Clock | None = None,
        *,
        identity: str = "status",
        order: OrderDrain | None = None,
    ) -> None:
        """Open the link.

        Args:
            config: contains the scheduler's address.
            interval_s: seconds between two queries.
            clock: source of time; None: the system's clock.
            identity: role that this link announces; with keys, this host's key must have it.
            order: sent to every scheduler process that answers, since a new one does not know it.
        """
        self._clock = clock or SystemClock()
        self.schedulers = 0
        """Number of scheduler processes that have answered. Each counts epochs from 1."""
        self._scheduler: Incarnation | None = None
        self._order = order
        self._interval_s = interval_s
        self._queried_at_s = float("-inf")
        self._link: Dialer[ToGateway] = Dialer(
            config.gateway_address, identity, ToGateway, keys_dir=config.keys_dir
        )

    def poll(self, timeout_s: float) -> StatusReported | None:
        """Wait for the link's next events and return the latest status among them.

        First sends a query if `interval_s` seconds have passed since the last query.

        Args:
            timeout_s: longest wait for an event in seconds.

        Returns:
            None if no status was among the events.
        """
        self._query()
        latest = None
        for event in self._link.poll(timeout_s):
            match event:
                case Connected(incarnation=scheduler):
                    # The link may reconnect to the same process.
                    self.schedulers += scheduler != self._scheduler
                    self._scheduler = scheduler
                    self._queried_at_s = float("-inf")
                    if self._order is not None:
                        self._link.send(self._order)
                    self._query()
                case Received(message=StatusReported() as status):
                    latest = status
        return latest

    def wake(self) -> None:
        """Make a waiting `poll` return; may be called from any thread and from signal handlers."""
        self._link.wake()

    @property
    def refusal(self) -> str:
        """Why the last handshake with the scheduler failed; "" if none has."""
        return self._link.refusal

    def close(self) -> None:
        """Close the link without waiting for answers."""
        self._link.close(wait_s=0.0)

    def _query(self) -> None:
        now_s = self._clock.now()
        if now_s - self._queried_at_s < self._interval_s:
            return
        try:
            self._link.send(QueryStatus())
        except PeerUnknown:
            return
        self._queried_at_s = now_s


class StoreWatch:
    """Link to this host's cache store; asks each new store process once for its state."""

    def __init__(self, config: Config) -> None:
        self._link: Dialer[FromStore] = Dialer(
            config.store_address, "cache", FromStore, keys_dir=config.keys_dir, listener="store"
        )

    def has_reported_on(self) -> bool:
        """Return whether the store has reported since the last call that it keeps blocks.

        Never waits. A new store process is asked when the link to it opens.
        """
        is_on = False
        for event in self._link.poll(0.0):
            match event:
                case Connected():
                    # If the link is lost again, the next connection sends the query.
                    with contextlib.suppress(PeerUnknown):
                        self._link.send(QueryStore())
                case Received(message=StoreReported(on=True)):
                    is_on = True
        return is_on

    def close(self) -> None:
        """Close the link."""
        self._link.close(wait_s=0.0)


def gateway_readiness(config: Config) -> int | None:
    """Return the HTTP status of GET /readyz: 200 if ready, None without an answer."""
    address = base_url(config).removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=GATEWAY_DEADLINE_S)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/readyz")
        return connection.getresponse().status
    return None


def gateway_formats(config: Config) -> str:
    """Return the formats that the local gateway reads, as text; "" without an answer."""
    address = base_url(config).removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=GATEWAY_DEADLINE_S)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/readyz")
            answer = json.loads(connection.getresponse().read())
            return f"{answer['tool_format']} tool calls, {answer['reasoning_format']} reasoning"
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
            return ""


def ask_status(config: Config, deadline_s: float = ANSWER_DEADLINE_S) -> StatusReported:
    """Open a link, ask the scheduler for its status, and return the answer.

    Args:
        config: contains the scheduler's address.
        deadline_s: longest wait for the answer in seconds.

    Raises:
        UnavailableError: when it does not answer in time.
    """
    clock = SystemClock()
    until_s = clock.now() + deadline_s
    with contextlib.closing(StatusWatch(config, interval_s=deadline_s)) as watch:
        while (left_s := until_s - clock.now()) > 0.0:
            status = watch.poll(left_s)
            if status is not None:
                return status
    raise no_answer_error(config, watch.refusal)


def ask_all(found: Sequence[Running]) -> list[LockstepSummary]:
    """Ask the schedulers of several Locksteps for their status, in their order."""
    with ThreadPoolExecutor(max_workers=len(found)) as threads:
        return list(threads.map(_summarize, found))


def _summarize(one: Running) -> LockstepSummary:
    status, reason = None, ""
    try:
        status = ask_status(one.config)
        reason = status.reason
    except (UnavailableError, ConfigError) as error:
        reason = str(error)
    return LockstepSummary(
        port=one.config.gateway.port,
        model=one.config.served_name,
        ready=status is not None and status.ready,
        reason=reason,
        pid=one.processes[0].pid,
        run_dir=str(one.folder),
        processes={process.name: process.pid for process in one.processes},
        status=status,
    )


def no_answer_error(config: Config, refusal: str) -> UnavailableError:
    """Return the error for a scheduler that does not answer, with its remedy.

    Args:
        config: contains the scheduler's address.
        refusal: why the handshake failed; "" if it did not.
    """
    if refusal:
        return UnavailableError(
            f"The handshake with {config.gateway_address} failed: {refusal}. See "
            "`lockstep keys show` here and on the scheduler's host."
        )
    return UnavailableError(
        f"No scheduler answers at {config.gateway_address}: start Lockstep with `lockstep up`, "
        "or pass the --config or --port that it was started with."
    )
