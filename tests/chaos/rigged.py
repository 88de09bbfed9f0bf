"""A Lockstep that can be made to fail from inside: proxies on its links, and ranks that can lie."""

from pathlib import Path

from tests.chaos.parts import Command, Parts
from tests.chaos.proxy import Proxy
from tests.chaos.stack import Shape
from tests.ports import free_port


class Rigged(Parts):
    """Ranks and gateway dial their proxy; the scheduler binds where the proxies lead."""

    def __init__(self, shape: Shape) -> None:
        self._rank_port, self._gateway_port = free_port(), free_port()
        roles = [*(f"rank {rank}" for rank in range(shape.ranks)), "gateway"]
        self._ports = {role: free_port() for role in roles}
        self.proxies: dict[str, Proxy] = {}
        # The base class makes the folder; the files are named when a rank is started.
        super().__init__(
            shape, {f"rank {rank}": self._command(rank) for rank in range(shape.ranks)}
        )
        # The harness asks for the status past all proxies.
        self.config = self.config_of("scheduler")

    def settings_of(self, name: str) -> dict[str, dict[str, object]]:
        """Say where a role dials, and the scheduler where it binds."""
        rank_port = self._ports[name] if name.startswith("rank") else self._rank_port
        gateway_port = self._ports[name] if name == "gateway" else self._gateway_port
        return {
            "scheduler": {
                "rank_address": f"tcp://127.0.0.1:{rank_port}",
                "gateway_address": f"tcp://127.0.0.1:{gateway_port}",
            }
        }

    def lie_file(self, rank: int) -> Path:
        """Return the file that names what a rank's next step lies about."""
        return self.folder / f"lie-{rank}"

    def launch(self) -> None:
        """Open the proxies before anybody dials them."""
        for role, port in self._ports.items():
            target = self._gateway_port if role == "gateway" else self._rank_port
            self.proxies[role] = Proxy(port, target)
        super().launch()

    def end(self) -> None:
        """End the processes, then the proxies."""
        super().end()
        for proxy in self.proxies.values():
            proxy.close()
        self.proxies.clear()

    def _command(self, rank: int) -> Command:
        return lambda _starts: [
            *("-m", "tests.chaos.lying_rank", str(self.lie_file(rank)), "--rank", str(rank))
        ]
