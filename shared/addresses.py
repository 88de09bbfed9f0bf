"""Which bus addresses are allowed: only what no stranger can reach."""

from shared import limits
from shared.errors import ConfigError


def check_address(address: str) -> None:
    """Refuse an address that a stranger could reach, or that no socket can have.

    Raises:
        ConfigError: with the remedy.
    """
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        if len(rest.encode()) > limits.IPC_PATH_BYTES_MAX:
            raise ConfigError(
                f"The socket path {rest} is longer than {limits.IPC_PATH_BYTES_MAX} bytes: "
                "set paths.run_dir to a shorter one."
            )
    elif scheme == "tcp":
        host = rest.rpartition(":")[0].strip("[]")
        if host not in {"localhost", "::1"} and not host.startswith("127."):
            raise ConfigError(
                f"The bus address {address} is not on loopback, and links between hosts need keys, "
                "which this version does not have: use ipc:// or tcp://127.0.0.1."
            )
    else:
        raise ConfigError(f"The bus address {address} is neither ipc:// nor tcp://.")
