"""Asking the gateway whether it is ready, as a client would."""

import http.client

from services.supervisor.status.progress_text import base_url
from shared.configuration.settings import Config

DEADLINE_S = 0.5
"""Between two processes of one machine; the supervisor has others to look after meanwhile."""


def readiness(config: Config) -> int | None:
    """Return the HTTP status of `/readyz`: 200 when it is ready; None when nobody answers."""
    url = base_url(config).removeprefix("http://")
    connection = http.client.HTTPConnection(url, timeout=DEADLINE_S)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
