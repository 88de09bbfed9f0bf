"""A status as words: how far loading is, and the sentences that say Lockstep is ready. Pure."""

import json

from shared.messages import RankStatus, StatusReported
from shared.settings import Config

_BAR_WIDTH = 24


def base_url(config: Config) -> str:
    """Return where a client on this machine reaches the gateway."""
    host = config.gateway.host
    return f"http://{f'[{host}]' if ':' in host else host}:{config.gateway.port}"


def is_loaded(status: StatusReported) -> bool:
    """Tell whether the world is complete: every rank has loaded its shard."""
    return bool(status.ranks) and all(rank.state == "ready" for rank in status.ranks)


def loading_line(status: StatusReported, *, with_bar: bool) -> str:
    """Return one line that says how far the ranks are.

    Args:
        status: what the scheduler reported.
        with_bar: for a terminal that redraws the line; otherwise percentages go in tens, so that a
            log gets few lines.
    """
    if not status.ranks:
        return "Waiting for ranks"
    share = sum(_share(rank) for rank in status.ranks) / len(status.ranks)
    ranks = ", ".join(f"rank {rank.rank} {_state(rank, exact=with_bar)}" for rank in status.ranks)
    if not with_bar:
        return f"Loading: {ranks}"
    filled = int(share * _BAR_WIDTH)
    return f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {share:4.0%}  {ranks}"


def ready_line(config: Config, status: StatusReported) -> str:
    """Return the sentence that says what is served where."""
    ranks = f"{status.world_size} rank" + ("s" if status.world_size != 1 else "")
    return (
        f"Lockstep is ready: model {config.served_name} on {base_url(config)} "
        f"({ranks}, {status.backend})"
    )


def curl_line(config: Config) -> str:
    """Return a command to paste into a terminal."""
    body = {
        "model": config.served_name,
        "messages": [{"role": "user", "content": "What is Lockstep?"}],
        "stream": True,
    }
    data = json.dumps(body).replace("'", "'\\''")
    return (
        f"curl -N {base_url(config)}/v1/chat/completions \\\n"
        f"  -H 'Content-Type: application/json' \\\n"
        f"  -d '{data}'"
    )


def _share(rank: RankStatus) -> float:
    return 1.0 if rank.state == "ready" else rank.loaded


def _state(rank: RankStatus, *, exact: bool) -> str:
    if rank.state != "loading":
        return rank.state
    percent = int(rank.loaded * 100)
    return f"{percent if exact else percent // 10 * 10} %"
