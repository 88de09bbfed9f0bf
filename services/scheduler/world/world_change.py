"""Change of the world since the last start. Owns the remembered facts, and the sentence. Pure.

The shell keeps the facts in the run folder from one scheduler process to the next.
"""

import math
from collections.abc import Sequence

from msgspec import Struct, structs

from services.scheduler.events import Action, SaveWorldFacts, WriteLog
from shared.configuration.settings import Config
from shared.messages import RankStatus

SHOWN_S = 86_400.0
"""How long status reports tell of a change after the world is ready: until the prompts of a day
have been computed again."""


class WorldFacts(Struct, frozen=True, kw_only=True):
    """Facts about a world on which the use of stored blocks depends."""

    ranks: int
    sharding: str
    """How the model was split; "none" for one rank."""
    hosts: list[str] = []
    """Machine of each rank, by rank; []: not known yet."""
    namespace: str = ""
    """Namespace of its blocks; "": not known yet, or none were kept."""


class WorldChange:
    """Comparison of a scheduler's world with the world of the scheduler before it."""

    def __init__(self, config: Config, before: WorldFacts | None, actions: list[Action]) -> None:
        """Compare the settings with the last start.

        Args:
            config: the whole configuration.
            before: the world of the last start; None: unknown.
            actions: the list to which actions are appended.
        """
        self._before = before
        self._facts = WorldFacts(ranks=config.world.size, sharding=config.sharding)
        self._saved = before
        self._actions = actions
        self._shown_until_s = math.inf
        self._sentence = ""
        self._compare()

    @property
    def namespace(self) -> str:
        """Namespace of the latest world's blocks; "" before the first, or without blocks."""
        return self._facts.namespace

    def note_ready(self, ranks: Sequence[RankStatus], namespace: str, now_s: float) -> None:
        """Compare a world that is ready with the last start, and have its facts saved.

        Args:
            ranks: its ranks, in rank order.
            namespace: namespace of its blocks; "": it keeps none.
            now_s: the monotonic time in seconds.
        """
        if namespace and self._facts.namespace not in ("", namespace):
            fields = {"namespace": namespace}
            self._actions.append(WriteLog("warning", "blocks_of_another_namespace", fields))
        hosts = [one.host for one in ranks]
        self._facts = structs.replace(
            self._facts, hosts=hosts, namespace=namespace or self._facts.namespace
        )
        self._shown_until_s = min(self._shown_until_s, now_s + SHOWN_S)
        self._compare()
        if self._facts != self._saved:
            self._saved = self._facts
            self._actions.append(SaveWorldFacts(structs.asdict(self._facts)))

    def explain(self, now_s: float) -> str:
        """Return a sentence about the change; "" without one, or a day after the start.

        Args:
            now_s: the monotonic time in seconds.
        """
        return self._sentence if now_s < self._shown_until_s else ""

    def _compare(self) -> None:
        sentence = explain_change(self._before, self._facts) if self._before else ""
        if sentence and sentence != self._sentence:
            self._actions.append(WriteLog("warning", "world_changed", {"detail": sentence}))
        self._sentence = sentence


def explain_change(before: WorldFacts, now: WorldFacts) -> str:
    """Return a sentence about the differences of two worlds and their consequence for blocks.

    Args:
        before: the world of the last start.
        now: the world of this start, of which hosts and namespace may be unknown.

    Returns:
        "" without a difference.
    """
    differences = []
    if now.ranks != before.ranks:
        plural = "s" if now.ranks > 1 else ""
        differences.append(f"{now.ranks} rank{plural} instead of {before.ranks}")
    if now.hosts and before.hosts and set(now.hosts) != set(before.hosts):
        counts = len(set(now.hosts)), len(set(before.hosts))
        differences.append(
            f"on {_hosts(counts[0])} instead of {counts[1]}"
            if counts[0] != counts[1]
            else "on other hosts"
        )
    elif now.ranks == before.ranks and now.hosts and now.hosts != before.hosts:
        differences.append("with ranks on each other's hosts")
    if now.sharding != before.sharding and now.ranks > 1 and before.ranks > 1:
        differences.append(f"split by {now.sharding} instead of {before.sharding}")
    is_known = bool(now.namespace and before.namespace)
    if is_known and now.namespace != before.namespace:
        if not differences:
            return (
                "The model, its shares, settings or versions have changed since the last start, so "
                "blocks that were stored before do not serve this world."
            )
        consequence = "Blocks that the last one stored do not serve it."
    elif is_known:
        consequence = "Each rank finds only the blocks that are stored on its host."
    elif before.namespace:
        consequence = "Blocks that the last one stored may not serve it."
    else:
        consequence = ""
    if not differences:
        return ""
    sentence = f"The world has changed since the last start: {', '.join(differences)}."
    return f"{sentence} {consequence}".rstrip()


def _hosts(count: int) -> str:
    return f"{count} host{'s' if count > 1 else ''}"
