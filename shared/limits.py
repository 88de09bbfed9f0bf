"""Fixed bounds of the whole system, each with its reason. Names carry their units.

A bound that an operator may change is a setting (`shared.configuration.settings`) instead.
"""

PROTOCOL_VERSION = 5
"""Raised when a message changes its meaning or its fields. Peers with another version are refused,
and both versions are logged."""

# --- Bus -------------------------------------------------------------------------------------
MESSAGE_BYTES_MAX = 32 * 1024 * 1024
"""Largest frame that a socket accepts. A prompt of 1,000,000 token ids packs to about 5 MiB."""

MESSAGE_DEPTH_MAX = 32
"""Deepest nesting of a message body. Valid messages nest five levels, so a deeper one is
hostile."""

UNACKED_MESSAGES_MAX = 8_192
"""Unacknowledged messages that a sender keeps per peer. Beyond it `send` raises `LinkFull` instead
of dropping a message."""

UNACKED_BYTES_MAX = 128 * 1024 * 1024
"""Unacknowledged bytes that a sender keeps per peer. Bounds memory when a peer stops reading."""

SOCKET_MESSAGES_MAX = 16_384
"""ZeroMQ's high-water mark. Above UNACKED_MESSAGES_MAX, so that the link's own bound is reached
first."""

RECEIVED_BYTES_MAX = 1024 * 1024
"""A socket is read up to the message that exceeds this, so that documents of 15 MB do not keep a
process from everything else."""

ACK_EVERY_MESSAGES = 64
"""A receiver acknowledges after this many messages at the latest, so that resends stay short."""

ACK_DELAY_S = 0.05
"""A receiver acknowledges after this time at the latest. Far below RESEND_AFTER_S."""

RESEND_AFTER_S = 1.0
"""An unacknowledged message is sent again after this time. Over ipc only a stall causes that."""

RESEND_MESSAGES_MAX = 256
"""Messages resent at once, oldest first, so that a slow peer is not flooded with copies."""

KEEPALIVE_S = 0.5
"""A link without other traffic sends a keep-alive after this time."""

PEER_SILENCE_S = 10.0
"""A peer silent for this time is lost unless `scheduler.silence_s` says otherwise. 20 keep-alives,
since a busy machine stalls threads for seconds."""

PEER_SILENCE_MAX_S = 120.0
"""Largest `scheduler.silence_s`, after which ZeroMQ drops a connection too."""

HELLO_INTERVAL_S = 0.1
"""A dialer repeats its hello at this interval until it receives a welcome."""

STEPS_PER_MESSAGE_MAX = 4_096
"""Most steps whose measurements a rank reports at once, 96 KiB. Of more only the last are kept."""

PROFILES_PER_MESSAGE_MAX = 64
"""Most profiles that a rank reports at once, of up to 180 KiB each. Of more only the last are
kept."""

RECORDED_STEPS_MAX = 8_192
RECORDED_REQUESTS_MAX = 4_096
RECORDED_BLOCK_TRANSFERS_MAX = 4_096
"""Most steps, requests and block transfers in one report of the last seconds: a few MB."""

RECORDED_HTTP_REQUESTS_MAX = 2_048
RECORDED_WRITES_MAX = 32_768
"""Most HTTP requests, and writes of all of them, that a gateway reports: about 1 MB. 32 streams of
50 tokens/s write as often in 20 s."""

RECORDED_GATEWAYS_MAX = 16
RECORDED_GATEWAYS_BYTES_MAX = 6 * 1024 * 1024
RECORDED_SPANS_BYTES_MAX = 6 * 1024 * 1024
"""Most gateways, and bytes of their reports and of measured steps, in one report of the last
seconds, so that it fits a message with any number of ranks."""

TRACE_S_MAX = 120.0
"""Longest recording that is ordered at once."""

ACTIVITY_STEPS_MAX = 256
ACTIVITY_REQUESTS_MAX = 512
ACTIVITY_EVENTS_MAX = 64
"""Most steps, requests and events in one report of what the cluster does: about 200 KB."""

SECONDS_MAX = 1e9
COUNT_MAX = 2**62
"""Largest duration and count in a message. Sums of what peers report end there."""

GOODBYE_S = 1.0
"""Longest wait in `close` for the peer's acknowledgements. Without it ipc loses the last
messages."""

IPC_PATH_BYTES_MAX = 100
"""Longest path of a unix socket. The system allows 107 bytes on Linux and 103 on macOS."""

PEERS_MAX = 256
"""Peers with a session at one listener: ranks, gateways and status queries."""

# --- Requests --------------------------------------------------------------------------------

DRAFT_TOKENS_MAX = 16
"""Drafts per sequence and step. More are hardly ever accepted."""

STOP_IDS_MAX = 64
"""Token ids that end one sequence. Models name at most about ten."""

TOP_LOGPROBS_MAX = 20
"""Alternatives per token that a client may request, as in OpenAI's API."""

LOGIT_BIAS_MAX = 1_024
"""Entries in one request's logit bias. OpenAI allows 300."""

GRAMMAR_CHARS_MAX = 262_144
"""Characters of one request's grammar. The schemas of all tools of an agent have about 80,000."""

PLAN_GRAMMAR_CHARS_MAX = 2 * 1024 * 1024
"""Characters of the grammars that one step plan admits: at most 8 MiB of a message."""

GRAMMAR_COMPILE_MAX_S = 30.0
"""Time in which all ranks must have compiled a request's grammar. Most take milliseconds; a schema
with 4,000 properties took 2 s."""

PREDICTION_TOKENS_MAX = 65_536
"""Longest prediction of a completion in tokens: 256 KiB in a message."""
COMPLETION_TOKENS_MAX = 1_000_000
"""Largest `max_tokens` in a message. The model's context bounds it further."""

REQUEST_ID_CHARS_MAX = 128
"""Characters of a request id."""

CACHE_SALT_CHARS_MAX = 256
"""Characters of a cache salt."""

WEIGHT_MIN = 0.01
WEIGHT_MAX = 100.0
"""Bounds of a tenant's weight. With a smaller one it would hardly get any turn."""

# --- Blocks ----------------------------------------------------------------------------------
BLOCK_TOKENS_MIN = 16
BLOCK_TOKENS_MAX = 1_024
"""Bounds of the tokens in a full block. Smaller blocks cost more time than they save; with larger
ones more of a prompt's end cannot be reused."""

BLOCKS_PER_MESSAGE_MAX = 8_192
"""Blocks in one message. 1,000,000 tokens have 3,907 blocks of the default size."""

CACHE_BOUNDARIES_MAX = 16
"""Places in a prompt at which a gateway expects later requests to diverge."""

RECORD_FORMAT_VERSION = 1
"""Raised when the bytes of a stored block or their meaning change. Part of the namespace."""

DOCUMENT_BYTES_MAX = 24 * 1024 * 1024
"""Longest document in a cache store. It must fit a message, and a request body has at most 16 MiB
by default."""

STORE_BYTES_DEFAULT_MAX = 100 * 2**30
"""Most SSD space that a cache store uses unless `cache.ssd_bytes_max` says otherwise."""

# --- World -----------------------------------------------------------------------------------
RANKS_MAX = 64
"""Ranks in one world."""

PLANS_IN_FLIGHT = 2
"""Step plans sent to the ranks without a receipt: one executes, one waits behind it."""

LAYERS_MAX = 512
EXPERTS_MAX = 2_048
"""Layers of a model and routed experts of a layer that messages may count; several times as many as
the largest models have."""

FORWARD_TOKENS_MAX = 2_048
"""Prompt tokens in one forward pass, for one long prompt or several short ones together; an eighth
more if that finishes the prompt. Without fused attention, memory grows with this number times the
context. mlx-lm uses the same number."""

STEP_DEADLINE_MIN_S = 5.0
"""Shortest deadline of a step, after which the world is declared lost, unless the setting of this
name says otherwise."""

STEP_DEADLINE_MAX_S = 60.0
"""Longest deadline of a step."""

STEP_DEADLINE_FACTOR = 10.0
"""A step's deadline is its predicted duration times this factor."""

# --- Exit codes (sysexits.h where one fits) ----------------------------------------------------
EXIT_OK = 0
EXIT_DEADLINE = 1
"""A rank did not join or load in time. Also the code with which `faulthandler` ends a process."""
EXIT_INTERRUPTED = 130
"""128 + SIGINT, the shells' convention."""
EXIT_USAGE = 64
EXIT_UNAVAILABLE = 69
EXIT_SOFTWARE = 70
EXIT_WORLD_LOST = 71
EXIT_LIFELINE = 72
EXIT_OUTPUT = 74
EXIT_CONFIG = 78
