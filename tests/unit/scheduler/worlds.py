"""Makes worlds for a test and looks at them again when it is over."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shared.config import check
from tests.unit.scheduler.harness import Hardware, World


@contextmanager
def worlds() -> Iterator[Callable[..., World]]:
    """Yield a maker of worlds; at the end every accepted request has ended and the state agrees."""
    made: list[World] = []

    def make(
        *,
        ranks: int = 1,
        kv_tokens: int = 100_000,
        context: int = 8_192,
        cache: dict[str, object] | None = None,
        hardware: Hardware | None = None,
        **scheduler: object,
    ) -> World:
        blocks = {"block_tokens": 16, "ssd": False, **(cache or {})}
        config = check({"world": {"size": ranks}, "scheduler": scheduler, "cache": blocks})
        world = World(config, hardware or Hardware(kv_tokens, context))
        made.append(world)
        world.boot()
        return world

    yield make
    for world in made:
        world.core.check_invariants()
        world.compare_blocks()
        assert world.accepted <= set(world.ends), "every accepted request ends"
