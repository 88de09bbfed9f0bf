"""All settings: type, range, default and meaning, one struct per section.

`shared.configuration.loading` reads them from file, environment and flags. The texts below are the
comments in `lockstep.example.toml`.
"""

import contextlib
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared import limits
from shared.configuration.rank_settings import RankWorkerConfig, WorldConfig
from shared.errors import ConfigError
from shared.os import user_folders

Port = Annotated[int, Meta(ge=1, le=65_535)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]
PositiveSeconds = Annotated[float, Meta(gt=0.0, le=86_400.0)]
HostName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9.:-]{1,255}$")]
ModelAlias = Annotated[str, Meta(min_length=1, max_length=256)]
ToolFormat = Literal[
    "auto", "off", "harmony", "minimax", "gemma4", "function_gemma", "longcat", "glm", "kimi_k2",
    "deepseek_v32", "deepseek_v4", "deepseek_v3", "seed", "lfm2", "olmo3", "qwen_xml", "mistral",
    "command", "nemotron", "phi4", "granite3", "jamba", "hermes", "llama4", "llama3", "pythonic",
]  # fmt: skip
"""Names of the formats of tool calls, as in `services/gateway/output/families.py`."""
ReasoningFormatName = Literal[
    "auto", "off", "harmony", "gemma4", "mistral", "command", "seed", "longcat", "lfm2", "apriel",
    "think",
]  # fmt: skip
"""Names of the formats of reasoning, as in the same file."""
Origin = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9+.-]*://[A-Za-z0-9.:\[\]-]{1,255}$")]


class PathsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Folders of Lockstep's own files."""

    run_dir: str = ""
    """Folder of sockets and process files, created with mode 0700. An existing one must not be
    accessible to other users. "": a folder named by the gateway port in this user's state
    folder."""
    keys_dir: str = ""
    """Folder of the keys for links over tcp, with mode 0700. `lockstep keys new` creates keys. "":
    `lockstep/keys` in this user's configuration folder."""


class ModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The served model: its place, its name in the API, its context and the type of weights."""

    path: Annotated[str, Meta(min_length=1, max_length=4_096)] = "demo"
    """A local folder, a Hugging Face id, or "demo" for the built-in model."""
    served_name: Annotated[str, Meta(max_length=256)] = ""
    """Name of the model in the API. "": the folder's name, or the Hugging Face id."""
    aliases: Annotated[list[ModelAlias], Meta(max_length=64)] = []
    """Further names of the model in the API, as names or patterns with `*` and `?`, for example
    claude-*. Answers name the model as the request does."""
    context_tokens_max: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Longest prompt plus completion, in tokens. 0: the model's own limit."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Type of unquantized weights. "auto": the checkpoint's type, but float32 on CPUs."""
    tool_format: ToolFormat = "auto"
    """Format in which the model writes tool calls. "auto": found by its chat template and
    configuration. "off": requests with tools are refused."""
    reasoning_format: ReasoningFormatName = "auto"
    """Format in which the model writes its reasoning. "auto": found by its chat template and
    configuration. "off": reasoning is part of the answer."""
    trust_remote_code: bool = False
    """Run Python code from the model's folder. False: a model that needs it is refused."""


class GatewayConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP server: its address, API keys, and limits of requests."""

    host: Annotated[str, Meta(min_length=1, max_length=255)] = "127.0.0.1"
    """Address on which the gateway listens. An address that other machines can reach requires API
    keys, and a proxy with TLS on networks that are not trusted."""
    port: Port = 8080
    """Port on which the gateway listens."""
    api_keys_file: Annotated[str, Meta(max_length=4_096)] = ""
    """File of API keys, created with `lockstep api-key new`. With it every request must carry a
    key. "": only the keys in LOCKSTEP_API_KEYS (`name=key,name=key`), if any."""
    dashboard: Annotated[str, Meta(pattern=r"^(/[A-Za-z0-9._~-]{0,64})?$")] = "/"
    """Path of the page that shows what the cluster does, for a browser. Its data need an API key if
    the gateway has keys. "": no page."""
    dashboard_port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """Port on which alone the page is served, with the API. 0: the gateway's port."""
    public_metrics: bool = False
    """Serve /metrics and /openapi.json without an API key. False: if the gateway has keys, these
    paths need one too."""
    allowed_hosts: list[HostName] = []
    """Additional host names that a request's Host header may contain. The gateway's own address and
    loopback names are always allowed."""
    allowed_origins: list[Origin] = []
    """Origins of web pages that may use this server from a browser, for example
    https://chat.example."""
    body_bytes_max: Annotated[int, Meta(ge=1_024, le=2**30)] = 16 * 1024 * 1024
    """Largest request body. A larger one is answered with 413."""
    header_timeout_s: PositiveSeconds = 10.0
    """Longest time to receive a request's headers."""
    body_timeout_s: PositiveSeconds = 30.0
    """Longest time to receive a request's body after its headers."""
    keepalive_s: PositiveSeconds = 5.0
    """Interval of empty events on a stream without tokens, so that proxies keep it open."""
    request_timeout_s: PositiveSeconds = 1_800.0
    """Longest duration of a request. A longer one ends with an error."""
    choices_max: Annotated[int, Meta(ge=1, le=64)] = 8
    """Largest `n`, the number of completions per request."""
    stop_strings_max: Annotated[int, Meta(ge=1, le=64)] = 16
    """Largest number of stop strings per request."""
    default_max_tokens: Annotated[int, Meta(ge=0, le=2**53)] = 0
    """Completion tokens if the request does not limit them. 0: all that fit the context, in text
    completions (/v1/completions) at most 4,096. The context bounds them further."""
    stream_buffer_bytes_max: Annotated[int, Meta(ge=4_096, le=2**26)] = 256 * 1024
    """Unsent bytes of one stream. A client that reads too slowly to stay below is disconnected."""
    unknown_model: Literal["refuse", "serve"] = "refuse"
    """What happens to requests for a model that is not served and no alias: "refuse" answers 404,
    "serve" answers with the served model."""
    replay_bytes_max: Annotated[int, Meta(ge=0, le=2**36)] = 64 * 1024 * 1024
    """Memory for what the model wrote in the latest turns of conversations. When a client sends a
    turn back in other words of the same meaning, its own tokens take its place, and the cache has
    them. 0: turns are read as clients send them."""
    open_requests_max: Annotated[int, Meta(ge=1, le=100_000)] = 1_024
    """Requests open at once in this gateway. Further ones are answered with 429."""
    otlp_endpoint: Annotated[
        str, Meta(max_length=4_096, pattern=r"\A(https?://[^\s/?#@]+(/[^\s?#]*)?)?\Z")
    ] = ""
    """Base URL of an OpenTelemetry collector that gets a span per request by OTLP over HTTP, for
    example http://localhost:4318. It needs the extra `lockstep[otlp]`. "": none is exported."""


class SchedulerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Admission of requests and the size of steps."""

    gateway_address: str = ""
    """Address on which the scheduler listens for gateways. "": an ipc socket in run_dir."""
    rank_address: str = ""
    """Address on which the scheduler listens for rank workers. "": an ipc socket in run_dir."""
    running_sequences_max: Annotated[int, Meta(ge=1, le=1_024)] = 32
    """Slots: sequences that decode together in one batch."""
    waiting_requests_max: Annotated[int, Meta(ge=0, le=100_000)] = 512
    """Requests waiting for a slot. Further ones are answered with 429."""
    waiting_tokens_max: Annotated[int, Meta(ge=1, le=2**40)] = 16_777_216
    """Tokens of all waiting requests. Further requests are answered with 429; one alone may have
    more."""
    waiting_bytes_max: Annotated[int, Meta(ge=1, le=2**40)] = 256 * 1024 * 1024
    """Memory of all waiting requests in the scheduler. Further requests are answered with 429."""
    step_tokens_max: Annotated[int, Meta(ge=16, le=65_536)] = 8_192
    """Prompt tokens per step over all sequences. More let a fast device read several prompts in one
    step and interrupt decodes less often; `decode_stall_ms` still bounds each interruption."""
    decode_stall_ms: Annotated[float, Meta(ge=1.0, le=60_000.0)] = 150.0
    """Longest time by which the prompts of one step may delay running decodes. It bounds the size
    of prefill chunks while sequences decode."""
    plans_in_flight: Annotated[int, Meta(ge=1, le=limits.PLANS_IN_FLIGHT)] = limits.PLANS_IN_FLIGHT
    """Step plans sent to the ranks at once. 2 hides the scheduling time behind the running step; 1
    is for measurements only."""
    kv_row_growth_tokens: Annotated[int, Meta(ge=16, le=65_536)] = 256
    """KV rows grow in multiples of this. Larger values reallocate less often and use more
    memory."""
    queue_deadline_s: PositiveSeconds = 600.0
    """Longest wait for a slot. After it a request ends with an error that contains a retry time."""
    drain_s: PositiveSeconds = 30.0
    """Time that running requests get to finish after SIGTERM."""
    load_deadline_s: PositiveSeconds = 3_600.0
    """Longest time for a rank to load its shard. A slower rank ends the epoch."""
    init_deadline_s: PositiveSeconds = 60.0
    """Longest time for a rank to join the world. A slower rank ends the epoch."""
    silence_s: Annotated[float, Meta(ge=2.0, le=limits.PEER_SILENCE_MAX_S)] = limits.PEER_SILENCE_S
    """Silence after which scheduler, rank or gateway count as lost to each other; ranks are told
    this value. After half of it a warning is logged. Larger values tolerate busier machines and
    notice a stopped process or a cut cable later."""
    step_deadline_factor: Annotated[float, Meta(ge=2.0, le=1_000.0)] = limits.STEP_DEADLINE_FACTOR
    """A step that takes this many times its predicted time ends the epoch. After half of its
    deadline a warning is logged."""
    step_deadline_min_s: Annotated[float, Meta(ge=1.0, le=600.0)] = limits.STEP_DEADLINE_MIN_S
    """Shortest deadline of a step."""
    step_deadline_max_s: Annotated[float, Meta(ge=10.0, le=3_600.0)] = limits.STEP_DEADLINE_MAX_S
    """Longest deadline of a step, and the deadline of the first step of its kind, in which kernels
    are compiled."""
    profile_every_steps: Annotated[int, Meta(ge=0, le=1_000_000)] = 1_000
    """Of this many steps of a kind (prefill, decode, verify) one is measured part by part, which
    makes it two to four times as long. 0: only those that an operator orders."""
    experts_every_steps: Annotated[int, Meta(ge=0, le=1_000_000)] = 100
    """Of a model with routed experts, ranks count on their devices how many tokens each expert
    gets, and read the counts after this many steps. 0: they count nothing."""
    epochs_failed_max: Annotated[int, Meta(ge=1, le=1_000)] = 5
    """Failed epochs within `epochs_failed_window_s` after which no further start is tried. Requests
    then end with an error, and `/readyz` contains the reason."""
    epochs_failed_window_s: PositiveSeconds = 600.0
    """Time window of `epochs_failed_max`."""


class TenantsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one tenant: one API key or, without keys, one client address."""

    share: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.75
    """Largest part of each shared limit (open requests, memory for bodies, waiting requests and
    tokens) that one tenant may use, so that others always find room. 1: no limit per tenant."""


class CacheConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV blocks that later requests reuse, in memory and on SSD."""

    enabled: bool = True
    """Reuse the KV of prompt prefixes that earlier requests have computed."""
    block_tokens: Annotated[int, Meta(ge=limits.BLOCK_TOKENS_MIN, le=limits.BLOCK_TOKENS_MAX)] = 256
    """Tokens per block. After a change, blocks stored with the previous value are not found."""
    resident_bytes_max: Annotated[int, Meta(ge=0, le=2**50)] = 0
    """Memory per rank for resident blocks. 0: up to half of the memory for KV, as far as running
    sequences do not need it."""
    ssd: bool = True
    """Also store blocks on SSD, so that they survive restarts."""
    directory: str = ""
    """Folder of this host's cache store. "": `lockstep/blocks` in this user's cache folder."""
    ssd_bytes_max: Annotated[int, Meta(ge=0, le=2**60)] = 0
    """SSD space for the blocks of all ranks of this host. 0: a quarter of the free space at start,
    at most 100 GiB."""
    ttl_days: Annotated[float, Meta(ge=0.0, le=3_650.0)] = 0.0
    """Time to live: after that many days without a use, blocks are deleted from memory and SSD, and
    their tokens forgotten. 0: only memory and SSD space bound them."""
    responses_bytes_max: Annotated[int, Meta(ge=0, le=2**50)] = 2**30
    """SSD space for responses that clients store with the Responses API, and for turns of
    conversations (`gateway.replay_bytes_max`). One tenant may use `tenants.share` of it. When
    it is full, the tenant with the most loses its least recently used ones. 0: none are stored."""
    responses_ttl_days: Annotated[float, Meta(ge=0.0, le=3_650.0)] = 30.0
    """Days without a use after which a stored response or turn is deleted. 0: only space bounds
    them."""
    store_address: str = ""
    """Address on which this host's cache store listens for rank workers and gateways. "": an ipc
    socket in run_dir."""
    spill_bytes_max: Annotated[int, Meta(ge=2**20, le=2**40)] = 512 * 1024 * 1024
    """Bytes per rank waiting to be written to SSD. Beyond it the oldest are dropped. With CUDA this
    much host memory, at most 1 GiB, is allocated at start."""

    @property
    def ttl_s(self) -> float:
        """`ttl_days` in seconds; 0: no limit."""
        return self.ttl_days * 86_400.0

    @property
    def responses_ttl_s(self) -> float:
        """`responses_ttl_days` in seconds; 0: no limit."""
        return self.responses_ttl_days * 86_400.0

    @property
    def keeps_documents(self) -> bool:
        """Whether this host's cache store keeps documents: stored responses and turns."""
        return self.enabled and self.ssd and self.responses_bytes_max > 0


class SpeculationConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculative decoding: draft tokens that are cheap to propose and verified several at once."""

    method: Literal["off", "ngram", "draft_model", "eagle"] = "off"
    """Default drafting method of requests. "ngram": tokens that followed the same text earlier in
    prompt or completion. "draft_model": a smaller model with the same tokenizer. "eagle": a head
    over the model's own hidden states."""
    draft_model: Annotated[str, Meta(max_length=4_096)] = ""
    """The draft model or EAGLE head: a local folder or a Hugging Face id. Every rank runs it
    unsplit."""
    tokens_max: Annotated[int, Meta(ge=1, le=limits.DRAFT_TOKENS_MAX)] = 5
    """Most drafts per sequence and step. Fewer are proposed where few are accepted."""
    disable_above_sequences: Annotated[int, Meta(ge=0, le=1_024)] = 0
    """Running sequences above which no drafts are proposed. 0: decided by measurement, when drafts
    slow steps down more than they save."""
    adaptive: bool = True
    """Adapt the number of drafts to their measured benefit. False: always propose `tokens_max`,
    which is slower but makes a comparison of texts use drafts in every step."""


class LogConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Log output of all processes, on standard error or in files."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least important level that is written."""
    format: Literal["text", "json"] = "text"
    """"text" for people, "json" for machines. Files always have JSON lines."""
    directory: str = ""
    """Folder of log files, one per process or one for `lockstep up`; "" for standard error."""
    file_bytes_max: Annotated[int, Meta(ge=65_536, le=2**40)] = 16 * 1024 * 1024
    """Size in bytes at which a log file is renamed and a new one begins."""
    files_max: Annotated[int, Meta(ge=1, le=1_000)] = 8
    """Log files kept per process, the newest one included."""


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings, one section per role."""

    paths: PathsConfig = PathsConfig()
    model: ModelConfig = ModelConfig()
    gateway: GatewayConfig = GatewayConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    tenants: TenantsConfig = TenantsConfig()
    world: WorldConfig = WorldConfig()
    rank_worker: RankWorkerConfig = RankWorkerConfig()
    cache: CacheConfig = CacheConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    log: LogConfig = LogConfig()

    @property
    def run_dir(self) -> Path:
        """Folder of sockets and process files; `prepare_run_dir` creates it.

        Raises:
            ConfigError: when it depends on a home folder and this user has no home folder.
        """
        if self.paths.run_dir:
            return user_folders.expand(self.paths.run_dir, "paths.run_dir")
        return user_folders.run_folders() / str(self.gateway.port)

    @property
    def keys_dir(self) -> Path | None:
        """Folder of this host's key pair and its list of allowed peers; None: no home folder."""
        with contextlib.suppress(ConfigError):
            return self.required_keys_dir
        return None

    @property
    def required_keys_dir(self) -> Path:
        """The same folder, for commands that cannot do without. Raises ConfigError."""
        if self.paths.keys_dir:
            return user_folders.expand(self.paths.keys_dir, "paths.keys_dir")
        return user_folders.config_folder("paths.keys_dir") / "keys"

    @property
    def gateway_address(self) -> str:
        """Address on which the scheduler listens for gateways."""
        return self.scheduler.gateway_address or f"ipc://{self.run_dir}/gateways.sock"

    @property
    def rank_address(self) -> str:
        """Address on which the scheduler listens for rank workers."""
        return self.scheduler.rank_address or f"ipc://{self.run_dir}/ranks.sock"

    @property
    def store_address(self) -> str:
        """Address on which this host's cache store listens for rank workers and gateways."""
        return self.cache.store_address or f"ipc://{self.run_dir}/store.sock"

    @property
    def cache_directory(self) -> Path:
        """Folder of the blocks stored on this host; the cache store creates it.

        Raises:
            ConfigError: as `run_dir`.
        """
        if self.cache.directory:
            return user_folders.expand(self.cache.directory, "cache.directory")
        return user_folders.cache_folder("cache.directory") / "blocks"

    @property
    def log_directory(self) -> Path | None:
        """Folder of the log files, None without one. Raises ConfigError as `run_dir`."""
        if not self.log.directory:
            return None
        return user_folders.expand(self.log.directory, "log.directory")

    @property
    def backend(self) -> Literal["off", "ring", "nccl", "jaccl"]:
        """Backend of collectives with "auto" resolved; "off" for one rank."""
        if self.world.size == 1:
            return "off"
        return "ring" if self.world.backend == "auto" else self.world.backend

    @property
    def sharding(self) -> Literal["none", "tensor", "expert", "tensor+expert", "pipeline"]:
        """How the model is split, with "auto" resolved; "none" for one rank."""
        if self.world.size == 1:
            return "none"
        return "tensor" if self.world.sharding == "auto" else self.world.sharding

    @property
    def vocabulary_split(self) -> Literal["auto", "off", "head", "all"]:
        """What the ranks divide by token ids; "off" where the split leaves every rank the head."""
        if self.rank_worker.batch_invariant and self.world.split_vocabulary == "auto":
            # Some settings of a request have the ranks gather all logits of a step.
            return "off"
        return "off" if self.sharding in ("none", "pipeline") else self.world.split_vocabulary

    @property
    def served_name(self) -> str:
        """Name of the model in the API: model.served_name, or derived from model.path."""
        if self.model.served_name:
            return self.model.served_name
        if self.model.path == "demo":
            return "lockstep-demo"
        folder = user_folders.expand(self.model.path, "model.path")
        if not folder.is_dir():
            return self.model.path
        # "." and ".." are resolved. A symbolic link keeps its own name, which users chose.
        return folder.name if folder.name not in ("", "..") else folder.resolve().name
