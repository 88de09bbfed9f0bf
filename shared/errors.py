"""Every exception that Lockstep raises on purpose.

LockstepError
├── ConfigError            a setting is wrong: exit 78, named with its remedy
├── UsageError             a command line is wrong: exit 64
├── UnavailableError       a service that a command needs does not answer: exit 69
├── OutputLost             standard output takes nothing, a full disk say: exit 74
├── Refusal                a caller asks for what cannot be done: 4xx or RequestRejected
├── LinkError
│   ├── LinkFull           the peer does not keep up; the message was NOT taken
│   ├── PeerUnknown        no such peer on this link; the message was NOT taken
│   └── FrameRefused       bytes that are no valid message; counted, never executed
├── WorldLost              a rank, a collective or a step is gone: the epoch ends
│   ├── CanaryFailed       the world computes wrong numbers: it never serves
│   └── RanksUnreachable         ranks do not reach each other: named, with what to look at
└── InvariantBroken        our bug: the process ends with the facts in the message
"""


class LockstepError(Exception):
    """Base of all. Its text is one sentence that an operator understands."""

    exit_code = 70


class ConfigError(LockstepError):
    """A setting is unknown, out of range, or contradicts another."""

    exit_code = 78


class UsageError(LockstepError):
    """A command line cannot be understood."""

    exit_code = 64


class UnavailableError(LockstepError):
    """A service that is needed does not answer."""

    exit_code = 69


class OutputLost(LockstepError):
    """What a command found cannot be written to standard output."""

    exit_code = 74


class Refusal(LockstepError):
    """What was asked for cannot be done; the caller is told why, and nobody else notices."""


class LinkError(LockstepError):
    """Something about a link between two processes."""


class LinkFull(LinkError):
    """The peer's unacknowledged messages have reached their bound. The message was not taken."""


class PeerUnknown(LinkError):
    """There is no session with that peer. The message was not taken."""


class FrameRefused(LinkError):
    """Bytes that are not a valid message of this protocol version."""


class WorldLost(LockstepError):
    """The world cannot go on; every rank process of this epoch must end."""

    exit_code = 71


class CanaryFailed(WorldLost):
    """What this world computes together before it serves is not what it must be."""


class RanksUnreachable(WorldLost):
    """Ranks that must meet cannot: an address is wrong, a port is taken, a way is blocked."""


class InvariantBroken(LockstepError):
    """Two facts that must agree do not. Nothing is repaired in place."""
