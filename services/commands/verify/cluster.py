"""The cluster that is verified: its settings, its gateway, its scheduler."""

import secrets

from services.commands.verify.gateway import Gateway, HttpAnswer
from services.supervisor.status.service_queries import ask_status
from shared.configuration.settings import Config
from shared.messages import StatusReported

TEXT_TOKENS = 24
"""Length of the completions that are compared."""


class VerifiedCluster:
    """What all checks share."""

    def __init__(self, config: Config, gateway: Gateway) -> None:
        self.config = config
        self.gateway = gateway
        self._salt = secrets.token_hex(8)
        self._salts = 0

    def status(self) -> StatusReported:
        """Ask the scheduler. Raises UnavailableError."""
        return ask_status(self.config)

    def fresh_salt(self) -> str:
        """Return a salt under which nothing is cached yet."""
        self._salts += 1
        return f"verify-{self._salt}-{self._salts}"

    def complete(self, prompt: str) -> HttpAnswer:
        """Have a text completed greedily, and all of it computed. Raises NoAnswer."""
        return self.gateway.complete(
            prompt=prompt, max_tokens=TEXT_TOKENS, cache_salt=self.fresh_salt()
        )
