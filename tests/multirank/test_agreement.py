"""Real ring ranks with settings of their own: one sentence in the first epoch, and no other."""

from tests.chaos.parts import Parts, Tree
from tests.chaos.stack import Shape
from tests.multirank.refused_world import ROLES, given_up, running


class Unlike(Parts):
    """A world of two some of whose processes have other settings."""

    def __init__(self, **settings: Tree) -> None:
        """Prepare; `settings` by role, for example `rank_1`: what it has otherwise."""
        self._own = {name.replace("_", " "): tree for name, tree in settings.items()}
        super().__init__(Shape(ranks=2, settings=(("cache.ssd", False),)), roles=ROLES)

    def settings_of(self, name: str) -> Tree:
        """Return what a role has otherwise."""
        return self._own.get(name, {})


def test_ranks_that_differ_say_how() -> None:
    """What decides the collectives of loading is compared before the first of them: who has which
    value of what, by name."""
    other: Tree = {
        "speculation": {"method": "ngram"},
        "rank_worker": {"kv_bits": 8},
        "model": {"context_tokens_max": 4_096},
    }
    with running(Unlike(rank_1=other)) as parts:
        status = given_up(parts)
        starts = parts.starts("rank 0")
    assert (status.failure, status.epoch) == ("configuration", 1)
    assert status.reason == (
        "The ranks are set up differently: model.context_tokens_max is 8192 on rank 0 and 4096 on "
        "rank 1; speculation.method is off on rank 0 and ngram on rank 1; rank_worker.kv_bits is 0 "
        "on rank 0 and 8 on rank 1. Give every rank the same Lockstep, model and settings."
    )
    assert starts <= 2


def test_ranks_that_differ_from_the_scheduler_are_refused() -> None:
    """They agree among themselves: the scheduler says what they have, and what it has."""
    other: Tree = {"speculation": {"method": "ngram"}}
    with running(Unlike(rank_0=other, rank_1=other)) as parts:
        status = given_up(parts)
    assert (status.failure, status.epoch) == ("configuration", 1)
    assert 'speculation.method is "off" for the scheduler and "ngram" on rank 0' in status.reason
