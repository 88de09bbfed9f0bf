"""Factory of worlds in memory that checks them when the test ends."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shared.configuration.loading import config_from_tree
from tests.unit.scheduler.support.in_memory_world import InMemoryWorld, RankSetup

MakeWorld = Callable[..., InMemoryWorld]


@contextmanager
def world_factory() -> Iterator[MakeWorld]:
    """Yield a factory of worlds; at the end check their state and that accepted requests have
    ended."""
    made: list[InMemoryWorld] = []

    def make(
        *,
        ranks: int = 1,
        kv_tokens: int = 100_000,
        context: int = 8_192,
        cache: dict[str, object] | None = None,
        hardware: RankSetup | None = None,
        world: dict[str, object] | None = None,
        speculation: dict[str, object] | None = None,
        share: float = 1.0,
        **scheduler: object,
    ) -> InMemoryWorld:
        blocks = {"block_tokens": 16, "ssd": False, **(cache or {})}
        # Tests lose many ranks in a short time; tests of the limit set it themselves.
        policy = {"epochs_failed_max": 1_000, **scheduler}
        config = config_from_tree(
            {
                "world": {"size": ranks, **(world or {})},
                "scheduler": policy,
                "cache": blocks,
                "speculation": speculation or {},
                # Tests of a tenant's share set it themselves.
                "tenants": {"share": share},
            }
        )
        one = InMemoryWorld(config, hardware or RankSetup(kv_tokens, context))
        made.append(one)
        one.boot()
        return one

    yield make
    for one in made:
        one.core.check_invariants()
        one.compare_blocks()
        assert one.accepted <= set(one.ends), "every accepted request ends"
