"""Every bound in the system with its reason. Units are part of the name.

A bound that an operator may want to move is a default in `shared.configuration.loading`; what
stands here holds for all.
"""

PROTOCOL_VERSION = 2
"""Changes when a message changes its meaning or shape. Peers of another version are refused by
name."""

# --- Bus -------------------------------------------------------------------------------------
MESSAGE_BYTES_MAX = 32 * 1024 * 1024
"""Largest frame a socket accepts. A prompt of 1,000,000 token ids packs to about 5 MiB."""

MESSAGE_DEPTH_MAX = 32
"""Deepest nesting of a body. Our messages nest five levels; a deeper one is hostile."""

UNACKED_MESSAGES_MAX = 8_192
"""Messages kept until acknowledged, per peer. Past it `send` raises `LinkFull`: refused, not
dropped."""

UNACKED_BYTES_MAX = 128 * 1024 * 1024
"""Bytes kept until acknowledged, per peer. Bounds memory when a peer stops reading."""

SOCKET_MESSAGES_MAX = 16_384
"""High-water mark of a socket. Above UNACKED_MESSAGES_MAX, so that our own bound is met first."""

ACK_EVERY_MESSAGES = 64
"""A receiver that has nothing to say acknowledges at the latest after so many messages ..."""

ACK_DELAY_S = 0.05
"""... or after this time. Both are far below the resend time."""

RESEND_AFTER_S = 1.0
"""A message not acknowledged for so long is sent again. Over ipc this follows only a stall."""

RESEND_MESSAGES_MAX = 256
"""Messages sent again at once. They are sent from the oldest on, until that one is acknowledged."""

KEEPALIVE_S = 0.5
"""A link that has been silent for so long says that it is there."""

PEER_SILENCE_S = 10.0
"""A peer silent for so long is lost. 20 keep-alives: a busy machine stalls threads for seconds."""

HELLO_INTERVAL_S = 0.1
"""A dialling side repeats its hello so often until it is welcomed."""

GOODBYE_S = 1.0
"""How long `close` waits for the peer to acknowledge everything. ipc loses the tail otherwise."""

IPC_PATH_BYTES_MAX = 100
"""A unix socket's path holds 107 bytes on Linux and 103 on macOS."""

PEERS_MAX = 256
"""Peers one listener knows at once: ranks, gateways, status queries."""

# --- Requests --------------------------------------------------------------------------------

DRAFT_TOKENS_MAX = 16
"""Drafts of one sequence that one step verifies; more are hardly ever accepted."""

STOP_IDS_MAX = 64
"""Token ids that end one sequence. Models name at most about ten."""

TOP_LOGPROBS_MAX = 20
"""Alternatives per token that a client may ask for, as in OpenAI's API."""

LOGIT_BIAS_MAX = 1_024
"""Entries of one request's logit bias. OpenAI allows 300."""

COMPLETION_TOKENS_MAX = 1_000_000
"""Upper bound of `max_tokens` in a message; the model's context bounds it further."""

REQUEST_ID_CHARS_MAX = 128
"""Characters of a request id."""

CACHE_SALT_CHARS_MAX = 256
"""Characters of a cache salt."""

# --- Blocks ----------------------------------------------------------------------------------
BLOCK_TOKENS_MIN = 16
BLOCK_TOKENS_MAX = 1_024
"""Tokens of a whole block: fewer cost more than they save, more lose too long a tail."""

BLOCKS_PER_MESSAGE_MAX = 8_192
"""Blocks that one order or answer names. 1,000,000 tokens have 3,907 blocks of the default size."""

CACHE_BOUNDARIES_MAX = 16
"""Places in a prompt at which a gateway expects later requests to diverge."""

RECORD_FORMAT_VERSION = 1
"""Changes when the bytes of a stored block or their meaning change; part of the namespace."""

# --- World -----------------------------------------------------------------------------------
RANKS_MAX = 64
"""Ranks in one world."""

PLANS_IN_FLIGHT = 2
"""Plans at the ranks whose receipts are not back: the one that runs and the one behind it."""

FORWARD_TOKENS_MAX = 2_048
"""So many tokens of a prompt one forward reads (an eighth more if nothing is left then), and so
many of short prompts that share one. Where attention is not fused its memory grows with their
product with the context. mlx-lm reads as many at a time."""

STEP_DEADLINE_MIN_S = 5.0
"""Least time that a step is given before the world is declared lost."""

STEP_DEADLINE_MAX_S = 60.0
"""Most time that a step is given."""

STEP_DEADLINE_FACTOR = 10.0
"""A step is given so many times the time that its work is predicted to take."""

# --- Exit codes (sysexits.h where one fits) ----------------------------------------------------
EXIT_OK = 0
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""
EXIT_USAGE = 64
EXIT_UNAVAILABLE = 69
EXIT_SOFTWARE = 70
EXIT_WORLD_LOST = 71
EXIT_LIFELINE = 72
EXIT_OUTPUT = 74
EXIT_CONFIG = 78
