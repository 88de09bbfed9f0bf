"""Join orders. Owns the JoinWorld messages that give processes a rank and environment. Pure."""

from collections.abc import Sequence

from services.scheduler.world.environment import rank_environment
from services.scheduler.world.members import RankProcess
from services.scheduler.world.passed_canary import PassedCanary
from shared.configuration.settings import Config
from shared.errors import ConfigError
from shared.identifiers import Epoch
from shared.messages import JoinWorld
from shared.messages.rank_link import Backend


class JoinOrders:
    """Makes the JoinWorld messages that give rank processes their rank and environment."""

    def __init__(
        self, config: Config, jaccl_devices: str, hostfile: str, passed_canary: PassedCanary
    ) -> None:
        """Remember the configuration.

        Args:
            config: the whole configuration.
            jaccl_devices: content of the device matrix; "" with another backend.
            hostfile: content of MLX's hostfile; "": ranks report their addresses.
            passed_canary: the ranks whose canary needs no prompt.
        """
        self._config = config
        self._jaccl_devices = jaccl_devices
        self._hostfile = hostfile
        self._passed_canary = passed_canary

    def make(
        self,
        epoch: Epoch,
        backend: Backend,
        chosen: Sequence[RankProcess],
        now_s: float,
        kv_budgets: Sequence[int] = (),
    ) -> list[JoinWorld]:
        """Return the JoinWorld message for each process, in rank order.

        Args:
            epoch: the epoch that begins.
            backend: backend of its collectives.
            chosen: the processes, by rank.
            now_s: the monotonic time in seconds.
            kv_budgets: memory for rows on each rank, in bytes; (): each rank measures it.

        Raises:
            ConfigError: when these processes cannot connect with the backend.
        """
        config, size = self._config, len(chosen)
        wanted = config.world.receipt_logits
        alike = len({(m.hello.device, m.hello.mlx_version) for m in chosen}) == 1
        has_passed = self._passed_canary.covers(backend, [one.hello for one in chosen], now_s)
        orders = []
        for rank, member in enumerate(chosen):
            environment: dict[str, str] = {}
            files: dict[str, str] = {}
            if not member.hello.launched:
                environment, files = self._environment(backend, rank, chosen)
            order = JoinWorld(
                epoch=epoch,
                rank=rank,
                world_size=size,
                backend=backend,
                sharding=config.sharding,
                memory_bytes=[one.hello.memory_bytes for one in chosen],
                expert_shares=config.world.expert_shares,
                vocabulary=config.vocabulary_split,
                kv_budget_bytes=kv_budgets[rank] if kv_budgets else 0,
                experts_every_steps=config.scheduler.experts_every_steps,
                canary=config.world.canary,
                canary_prompt=not has_passed,
                canary_prompt_s=config.world.canary_prompt_s,
                environment=environment,
                files=files,
                synchronization=config.world.synchronization,
                receipt_logits=size > 1 and (wanted == "on" or (wanted == "auto" and alike)),
                init_deadline_s=config.scheduler.init_deadline_s,
                load_deadline_s=config.scheduler.load_deadline_s,
                step_deadline_max_s=config.scheduler.step_deadline_max_s,
                silence_s=config.scheduler.silence_s,
            )
            orders.append(order)
        return orders

    def find_ring_obstacle(self, chosen: Sequence[RankProcess]) -> str:
        """Return why these processes cannot use the ring backend; "" if they can.

        Args:
            chosen: the processes, by rank.
        """
        if any(member.hello.launched for member in chosen):
            return "Another launcher started some of the ranks, without the ring backend."
        try:
            self._environment("ring", 0, chosen)
        except ConfigError as error:
            return str(error)
        return ""

    def _environment(
        self, backend: Backend, rank: int, chosen: Sequence[RankProcess]
    ) -> tuple[dict[str, str], dict[str, str]]:
        return rank_environment(
            backend,
            rank,
            len(chosen),
            [member.hello.data_address for member in chosen],
            jaccl_devices_text=self._jaccl_devices,
            jaccl_coordinator=self._config.world.jaccl_coordinator,
            hostfile_text=self._hostfile,
            fast_synch=self._may_synchronize_fast(chosen),
            machines=[member.hello.host for member in chosen],
        )

    def _may_synchronize_fast(self, chosen: Sequence[RankProcess]) -> bool:
        wanted = self._config.world.metal_fast_synch
        proven = all(member.hello.fast_synch == "proven" for member in chosen)
        return wanted == "on" or (wanted == "auto" and proven)
