"""Asking the scheduler how it is: once for `lockstep status`, again and again for `lockstep up`."""

from shared.clock import Clock, SystemClock
from shared.configuration.settings import Config
from shared.errors import PeerUnknown, UnavailableError
from shared.identifiers import Incarnation
from shared.messages import OrderDrain, QueryStatus, StatusReported, ToGateway
from shared.transport.links import Connected, Dialer, Lost, Received

ANSWER_DEADLINE_S = 3.0


class StatusWatch:
    """A link to the scheduler that asks for its status every `interval_s`."""

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
            config: says where the scheduler listens.
            interval_s: between two questions.
            clock: the time; None: the system's.
            identity: with keys, as what to speak.
            order: is given to every scheduler that answers: another process knows nothing of it.
        """
        self._clock = clock or SystemClock()
        self.schedulers = 0
        """Scheduler processes that have answered so far: each counts epochs anew."""
        self._scheduler: Incarnation | None = None
        self._order = order
        self._interval_s = interval_s
        self._asked_at_s = float("-inf")
        self._link: Dialer[ToGateway] = Dialer(
            config.gateway_address, identity, ToGateway, keys_dir=config.keys_dir
        )

    def poll(self, timeout_s: float) -> StatusReported | None:
        """Wait up to `timeout_s`; return the latest status that arrived, or None."""
        self._ask()
        latest = None
        for event in self._link.poll(timeout_s):
            match event:
                case Connected(incarnation=scheduler):
                    # A link may come back to the process that it was lost to.
                    self.schedulers += scheduler != self._scheduler
                    self._scheduler = scheduler
                    self._asked_at_s = float("-inf")
                    if self._order is not None:
                        self._link.send(self._order)
                    self._ask()
                case Received(message=StatusReported() as status):
                    latest = status
                case Received() | Lost():
                    pass
        return latest

    @property
    def refusal(self) -> str:
        """Why the scheduler refused this host's key; "" if it did not."""
        return self._link.refusal

    def close(self) -> None:
        """Close the link; nothing that was asked matters any more."""
        self._link.close(wait_s=0.0)

    def _ask(self) -> None:
        now_s = self._clock.now()
        if now_s - self._asked_at_s < self._interval_s:
            return
        try:
            self._link.send(QueryStatus())
        except PeerUnknown:
            return
        self._asked_at_s = now_s


def ask_status(config: Config, deadline_s: float = ANSWER_DEADLINE_S) -> StatusReported:
    """Return the scheduler's status.

    Raises:
        UnavailableError: it did not answer within `deadline_s`.
    """
    clock = SystemClock()
    watch = StatusWatch(config, interval_s=deadline_s)
    until_s = clock.now() + deadline_s
    try:
        while (left_s := until_s - clock.now()) > 0.0:
            status = watch.poll(left_s)
            if status is not None:
                return status
    finally:
        watch.close()
    raise no_answer_error(config, watch.refusal)


def no_answer_error(config: Config, refusal: str) -> UnavailableError:
    """Return the error that says why the scheduler does not answer, and what to do.

    Args:
        config: says where the scheduler listens.
        refusal: why it refused this host's key; "" if it did not.
    """
    if refusal:
        return UnavailableError(
            f"The handshake with {config.gateway_address} failed: {refusal}. See "
            "`lockstep keys show` here and on the scheduler's host."
        )
    return UnavailableError(
        f"No scheduler answers at {config.gateway_address}: start Lockstep with `lockstep up`, "
        "or give the --config or --port that it was started with."
    )
