"""Stored blocks that serve a world, and those that do not. Owns counting them on this host."""

import dataclasses

from services.commands.cache.client import list_folders, opened
from services.commands.checks.text_table import counted, format_bytes
from services.supervisor.status.service_queries import ask_status
from shared.configuration.settings import Config
from shared.errors import LockstepError
from shared.os import process_file


@dataclasses.dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Numbers and bytes of the blocks on this host's SSD, for one namespace and for others."""

    serving: int
    serving_bytes: int
    others: int
    others_bytes: int
    other_namespaces: tuple[str, ...]
    """Namespaces of the others, sorted."""

    def explain(self) -> str:
        """Return sentences: how many blocks serve this world, and how many wait for another."""
        serving = f"{counted(self.serving, 'block')} ({format_bytes(self.serving_bytes)})"
        if not self.others:
            return f"All stored blocks of this host serve this world: {serving}."
        others = f"{counted(self.others, 'block')} ({format_bytes(self.others_bytes)})"
        names = counted(len(self.other_namespaces), "other namespace")
        return (
            f"On this host's SSD {serving} serve this world; {others} of {names} do not, until "
            "their model and split return (`lockstep cache list`)."
        )


def stored_blocks(config: Config, namespace: str) -> StoredBlocks | None:
    """Count the blocks of this host's running cache store.

    Args:
        config: names the store's address.
        namespace: namespace of the world's blocks.

    Returns:
        The numbers; None if the world keeps no blocks, or no store runs here and answers.
    """
    if not namespace or not process_file.find_processes(config.run_dir, "store"):
        return None
    try:
        with opened(config) as store:
            if store is None or not store.is_running:
                return None
            folders = list_folders(store)
    except LockstepError:
        return None
    mine = [one for one in folders if one.namespace == namespace]
    others = [one for one in folders if one.namespace != namespace]
    return StoredBlocks(
        serving=sum(one.records for one in mine),
        serving_bytes=sum(one.size_bytes for one in mine),
        others=sum(one.records for one in others),
        others_bytes=sum(one.size_bytes for one in others),
        other_namespaces=tuple(sorted({one.namespace for one in others})),
    )


def running_namespace(config: Config) -> str:
    """Return the namespace of the blocks of the world that runs; "" if it is unknown here."""
    if not process_file.find_all(config.run_dir):
        return ""
    try:
        return ask_status(config).namespace
    except LockstepError:
        return ""
