"""Parts common to both ends of a link, and waiting for several links. Owns refusals of frames."""

import math
from typing import Any, Generic, TypeVar

import msgspec

from shared import limits
from shared.clock import Clock
from shared.errors import FrameRefused
from shared.identifiers import PeerId
from shared.log import Log
from shared.transport import codec, sockets
from shared.transport.authentication import REFUSAL_LOG_INTERVAL_S
from shared.transport.delivery import Session, new_incarnation
from shared.transport.link_events import LinkCounters, LinkEvent, Quiet
from shared.transport.sockets import LinkSocket

M = TypeVar("M", bound=msgspec.Struct)

_LOG = Log("link")


class LinkEnd(Generic[M]):
    """Parts common to both ends."""

    def __init__(self, socket: LinkSocket, receives: Any, clock: Clock) -> None:
        self.socket = socket
        self.incarnation = new_incarnation()
        self.counters = LinkCounters()
        self.silence_s = limits.PEER_SILENCE_S  # of a peer, after which it is lost
        self._decoder: codec.Decoder[M] = codec.Decoder(receives)
        self._clock = clock
        self._next_warning_s = -math.inf

    def _refuse(self, error: FrameRefused, now_s: float) -> None:
        """Count a refused frame, and log the cause at a limited rate."""
        self.counters.refused += 1
        if now_s >= self._next_warning_s:
            self._next_warning_s = now_s + REFUSAL_LOG_INTERVAL_S
            _LOG.warning("frame_refused", link=self.socket.address, cause=ascii(str(error))[:300])

    def _warn_if_quiet(
        self, peer: PeerId, session: Session, now_s: float, events: list[LinkEvent[M]]
    ) -> None:
        session.silence_s = self.silence_s
        if session.becomes_quiet(now_s):
            half_s, name = self.silence_s / 2.0, peer.decode(errors="replace")
            _LOG.warning("peer_silent", peer=name, seconds=half_s, lost_after_s=self.silence_s)
            events.append(Quiet(peer))

    def wake(self) -> None:
        """Make a waiting `poll` return. The only method that other threads may call."""
        self.socket.wake()


class LinkSet:
    """Waits for events of several links, all of one thread."""

    def __init__(self, *links: LinkEnd[Any]) -> None:
        self._links = {link.socket: link for link in links}
        self._waiter = sockets.SocketPoller(list(self._links))

    def wait(self, timeout_s: float) -> list[LinkEnd[Any]]:
        """Wait up to `timeout_s` seconds; return the links that a frame or `wake` has woken."""
        return [self._links[socket] for socket in self._waiter.wait(timeout_s)]
