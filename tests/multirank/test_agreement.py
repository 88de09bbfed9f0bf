"""Real ranks with different settings: the world is refused in its first epoch with one sentence."""

import pytest

from tests.chaos.cluster.stack import StackOptions
from tests.chaos.cluster.unsupervised_stack import Tree, UnsupervisedStack
from tests.multirank.worlds.refused_world import ROLES, run_stack, wait_for_failure


class MismatchedStack(UnsupervisedStack):
    """A world of two ranks in which some processes have other settings."""

    def __init__(self, **settings: Tree) -> None:
        """Prepare the stack; `settings` are the other settings of a role, for example `rank_1`."""
        self._settings = {name.replace("_", " "): tree for name, tree in settings.items()}
        super().__init__(StackOptions(ranks=2, settings=(("cache.ssd", False),)), roles=ROLES)

    def settings_of(self, name: str) -> Tree:
        """Return the other settings of a role."""
        return self._settings.get(name, {})


def test_world_is_refused_when_settings_of_ranks_differ() -> None:
    """Before the first collective ranks compare their settings and name each difference."""
    other: Tree = {
        "speculation": {"method": "ngram"},
        "rank_worker": {"kv_bits": 8},
        "model": {"context_tokens_max": 4_096},
    }
    with run_stack(MismatchedStack(rank_1=other)) as stack:
        status = wait_for_failure(stack)
        starts = stack.starts("rank 0")
    assert (status.failure, status.epoch) == ("configuration", 1)
    assert status.reason == (
        "The ranks are set up differently: model.context_tokens_max is 8192 on rank 0 and 4096 on "
        "rank 1; speculation.method is off on rank 0 and ngram on rank 1; rank_worker.kv_bits is 0 "
        "on rank 0 and 8 on rank 1. Give every rank the same Lockstep, model and settings."
    )
    assert starts <= 2


@pytest.mark.proof
def test_world_is_refused_when_rank_and_scheduler_settings_differ() -> None:
    """Settings that differ from the scheduler's are refused, though the ranks agree."""
    other: Tree = {"speculation": {"method": "ngram"}}
    with run_stack(MismatchedStack(rank_0=other, rank_1=other)) as stack:
        status = wait_for_failure(stack)
    assert (status.failure, status.epoch) == ("configuration", 1)
    assert 'speculation.method is "off" for the scheduler and "ngram" on rank 0' in status.reason
