"""Whether this host's cache store has come so far that it keeps blocks."""

from shared.configuration.settings import Config
from shared.errors import PeerUnknown
from shared.messages import FromStore, QueryStore, StoreReported
from shared.transport.links import Connected, Dialer, Received


class StoreWatch:
    """A link to the cache store that asks each of its processes once how it is."""

    def __init__(self, config: Config) -> None:
        self._link: Dialer[FromStore] = Dialer(
            config.store_address, "cache", FromStore, keys_dir=config.keys_dir, listener="store"
        )

    def has_begun(self) -> bool:
        """Tell whether the store has said since the last call that it is on; waits for nothing."""
        is_on = False
        for event in self._link.poll(0.0):
            match event:
                case Connected():
                    self._ask()
                case Received(message=StoreReported(on=True)):
                    is_on = True
                case _:
                    pass
        return is_on

    def close(self) -> None:
        """Close the link."""
        self._link.close(wait_s=0.0)

    def _ask(self) -> None:
        try:
            self._link.send(QueryStore())
        except PeerUnknown:
            # It has gone again.
            return
