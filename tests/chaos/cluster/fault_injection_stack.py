"""A stack with proxies on its links and ranks that can return wrong results."""

from pathlib import Path

from tests.chaos.cluster.proxy import Proxy
from tests.chaos.cluster.stack import StackOptions
from tests.chaos.cluster.unsupervised_stack import Command, UnsupervisedStack
from tests.support.ports import free_port


class FaultInjectionStack(UnsupervisedStack):
    """Ranks and gateway connect to proxies that forward to the scheduler."""

    def __init__(self, options: StackOptions) -> None:
        self._rank_port, self._gateway_port = free_port(), free_port()
        roles = [*(f"rank {rank}" for rank in range(options.ranks)), "gateway"]
        self._ports = {role: free_port() for role in roles}
        self.proxies: dict[str, Proxy] = {}
        # The folder exists only after this call; the commands use it when a rank is started.
        super().__init__(
            options, {f"rank {rank}": self._command(rank) for rank in range(options.ranks)}
        )
        # Status queries do not pass through a proxy.
        self.config = self.config_of("scheduler")

    def settings_of(self, name: str) -> dict[str, dict[str, object]]:
        """Return the address to connect to, or to bind for the scheduler."""
        rank_port = self._ports[name] if name.startswith("rank") else self._rank_port
        gateway_port = self._ports[name] if name == "gateway" else self._gateway_port
        return {
            "scheduler": {
                "rank_address": f"tcp://127.0.0.1:{rank_port}",
                "gateway_address": f"tcp://127.0.0.1:{gateway_port}",
            }
        }

    def fault_file(self, rank: int) -> Path:
        """Return the file that names the wrong result of a rank's next step."""
        return self.folder / f"fault-{rank}"

    def launch(self) -> None:
        """Open the proxies, then start the roles."""
        for role, port in self._ports.items():
            target = self._gateway_port if role == "gateway" else self._rank_port
            self.proxies[role] = Proxy(port, target)
        super().launch()

    def end(self) -> None:
        """Stop the processes, then the proxies."""
        super().end()
        for proxy in self.proxies.values():
            proxy.close()
        self.proxies.clear()

    def _command(self, rank: int) -> Command:
        return lambda _starts: [
            *(
                "-m",
                "tests.chaos.cluster.faulty_rank",
                str(self.fault_file(rank)),
                "--rank",
                str(rank),
            )
        ]
