"""Exceptions that Lockstep raises on purpose, with their exit codes.

```
LockstepError                70
├── ConfigError              78  a setting is wrong
├── UsageError               64  a command line is wrong
├── UnavailableError         69  a service does not answer
├── OutputLost               74  standard output cannot be written
├── Refusal                  70  a request cannot be served
├── LinkError                70
│   ├── LinkFull                 a peer does not keep up
│   ├── PeerUnknown              there is no session with a peer
│   └── FrameRefused             received bytes are no valid message
├── WorldLost                71  the epoch cannot continue
│   ├── CanaryFailed             the ranks compute wrong numbers
│   ├── PeerEnded                another rank has ended and knows why
│   └── RanksUnreachable         ranks cannot connect to each other
└── InvariantBroken          70  a bug in Lockstep
```
"""


class LockstepError(Exception):
    """Base of all exceptions. The text is one sentence for operators. Exit code 70."""

    exit_code = 70


class ConfigError(LockstepError):
    """Raised when a setting is unknown, out of range or contradicts another. Exit code 78."""

    exit_code = 78


class UsageError(LockstepError):
    """Raised when a command line is invalid. Exit code 64."""

    exit_code = 64


class UnavailableError(LockstepError):
    """Raised when a required service does not answer. Exit code 69."""

    exit_code = 69


class OutputLost(LockstepError):
    """Raised when standard output cannot be written, for example on a full disk. Exit code 74."""

    exit_code = 74


class Refusal(LockstepError):
    """Raised for a request that cannot be served; answered with a 4xx or RequestRejected."""


class LinkError(LockstepError):
    """Base of errors of a link between two processes."""


class LinkFull(LinkError):
    """Raised when a peer's unacknowledged messages reach their bound. The message was not sent."""


class PeerUnknown(LinkError):
    """Raised when there is no session with the peer. The message was not sent."""


class FrameRefused(LinkError):
    """Raised for bytes that are no valid message of this version. Counted, not executed."""


class WorldLost(LockstepError):
    """Raised when a rank, collective or step fails: all ranks of the epoch end. Exit code 71."""

    exit_code = 71


class CanaryFailed(WorldLost):
    """Raised when the canary's results are wrong: this world must not serve."""


class PeerEnded(WorldLost):
    """Raised when another rank has ended or does not answer: the consequence, not the cause."""


class RanksUnreachable(WorldLost):
    """Raised when ranks cannot connect: a wrong address, a used port or a blocked network."""


class InvariantBroken(LockstepError):
    """Raised when internal state contradicts itself. The process ends; the text has the facts."""
