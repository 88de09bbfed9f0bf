"""Makes worlds for a test and looks at them again when it is over."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shared.configuration.loading import config_from_tree
from tests.unit.scheduler.in_memory_world import InMemoryWorld, RankSetup

MakeWorld = Callable[..., InMemoryWorld]


@contextmanager
def world_factory() -> Iterator[MakeWorld]:
    """Yield a maker of worlds; at the end every accepted request has ended and the state agrees."""
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
        **scheduler: object,
    ) -> InMemoryWorld:
        blocks = {"block_tokens": 16, "ssd": False, **(cache or {})}
        # Tests lose many ranks in little time; those of giving up say how many are too many.
        policy = {"epochs_failed_max": 1_000, **scheduler}
        config = config_from_tree(
            {
                "world": {"size": ranks, **(world or {})},
                "scheduler": policy,
                "cache": blocks,
                "speculation": speculation or {},
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
