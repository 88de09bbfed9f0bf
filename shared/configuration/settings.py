"""Every setting of every role: its type, range, default and meaning, one struct per section.

`shared.configuration.loading` reads them from file, environment and flags. `lockstep.example.toml`
shows every key; a test holds it to this file.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared import limits

Port = Annotated[int, Meta(ge=1, le=65_535)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]
PositiveSeconds = Annotated[float, Meta(gt=0.0, le=86_400.0)]
HostName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9.:-]{1,255}$")]
Origin = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9+.-]*://[A-Za-z0-9.:\[\]-]{1,255}$")]


class PathsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where Lockstep keeps its files."""

    run_dir: str = ""
    """Sockets and locks, mode 0700. "": a folder of this user in the system's temporary folder, per
    port."""
    keys_dir: str = ""
    """Keys for links over tcp, mode 0700; `lockstep keys new` makes them. "": `lockstep/keys` in
    this user's configuration folder."""


class ModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model is served."""

    path: Annotated[str, Meta(min_length=1, max_length=4_096)] = "demo"
    """A local folder, a Hugging Face id, or "demo" for the built-in model."""
    served_name: Annotated[str, Meta(max_length=256)] = ""
    """Name that clients use. "": the name of the folder, or the Hugging Face id."""
    context_tokens_max: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Longest prompt plus completion in tokens. 0: what the model was made for."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Floating-point type of unquantized weights. "auto": the checkpoint's, on the CPU float32."""
    trust_remote_code: bool = False
    """Run Python code that the model's folder brings along. Off: such a model is refused."""


class GatewayConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP side."""

    host: Annotated[str, Meta(min_length=1, max_length=255)] = "127.0.0.1"
    """Address on which the gateway listens. One that others reach needs API keys, and a proxy with
    TLS if others can listen in."""
    port: Port = 8080
    """Port on which the gateway listens."""
    api_keys_file: Annotated[str, Meta(max_length=4_096)] = ""
    """File of API keys that `lockstep api-key new` makes; every request must bring one. "": none
    but those in LOCKSTEP_API_KEYS (`name=key,name=key`)."""
    allowed_hosts: list[HostName] = []
    """Further host names that the Host header may have. Its own address and loopback names are
    always allowed."""
    allowed_origins: list[Origin] = []
    """Origins of web pages that may use this server from a browser, like https://chat.example."""
    body_bytes_max: Annotated[int, Meta(ge=1_024, le=2**30)] = 16 * 1024 * 1024
    """Largest request body; a larger one is a 413."""
    header_timeout_s: PositiveSeconds = 10.0
    """Longest time from the start of a request to the end of its headers."""
    body_timeout_s: PositiveSeconds = 30.0
    """Longest time from the headers to the end of the body."""
    keepalive_s: PositiveSeconds = 5.0
    """A stream that has nothing to say sends an empty event so often."""
    request_timeout_s: PositiveSeconds = 1_800.0
    """A request that has not ended by then ends with an error."""
    choices_max: Annotated[int, Meta(ge=1, le=64)] = 8
    """Largest `n`."""
    stop_strings_max: Annotated[int, Meta(ge=1, le=64)] = 16
    """Largest number of stop strings in one request."""
    default_max_tokens: Positive = 4_096
    """Completion length when the client names none; the context bounds it further."""
    stream_buffer_bytes_max: Annotated[int, Meta(ge=4_096, le=2**26)] = 256 * 1024
    """Unsent bytes of one stream; a client that lets more pile up is cut off."""
    open_requests_max: Annotated[int, Meta(ge=1, le=100_000)] = 1_024
    """Requests open at once in this gateway; one more is a 429."""


class SchedulerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Policy: who runs, and how much at once."""

    gateway_address: str = ""
    """Where gateways connect. "": ipc in run_dir."""
    rank_address: str = ""
    """Where rank workers connect. "": ipc in run_dir."""
    running_sequences_max: Annotated[int, Meta(ge=1, le=1_024)] = 32
    """Slots: sequences that decode together."""
    waiting_requests_max: Annotated[int, Meta(ge=0, le=100_000)] = 512
    """Requests that wait for a slot; one more is rejected with 429."""
    step_tokens_max: Annotated[int, Meta(ge=16, le=65_536)] = 8_192
    """Prompt tokens of one step, all sequences together. A fast device reads several prompts in
    one step then, and interrupts decodes less often; `decode_stall_ms` bounds for how long."""
    decode_stall_ms: Annotated[float, Meta(ge=1.0, le=60_000.0)] = 150.0
    """Longest time that the prompts of a step may hold up running decodes; how much is read of them
    follows from it."""
    plans_in_flight: Annotated[int, Meta(ge=1, le=limits.PLANS_IN_FLIGHT)] = limits.PLANS_IN_FLIGHT
    """Step plans at the ranks at once. 1 is lock-step, for measurements only."""
    kv_row_growth_tokens: Annotated[int, Meta(ge=16, le=65_536)] = 256
    """KV rows grow in multiples of this."""
    queue_deadline_s: PositiveSeconds = 600.0
    """A request that has waited so long for a slot ends with an error that says when to come
    back."""
    drain_s: PositiveSeconds = 30.0
    """After SIGTERM running requests get so long to finish."""
    load_deadline_s: PositiveSeconds = 3_600.0
    """A rank that has not loaded its shard by then ends the epoch."""
    init_deadline_s: PositiveSeconds = 60.0
    """A rank that has not joined the world by then ends the epoch."""
    epochs_failed_max: Annotated[int, Meta(ge=1, le=1_000)] = 5
    """So many epochs that fail within `epochs_failed_window_s` end all trying: requests end with
    an error, and `/readyz` says why."""
    epochs_failed_window_s: PositiveSeconds = 600.0
    """See `epochs_failed_max`."""


class WorldConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ranks and how their collectives run."""

    size: Annotated[int, Meta(ge=1, le=limits.RANKS_MAX)] = 1
    """Number of ranks."""
    backend: Literal["auto", "off", "ring", "nccl", "jaccl"] = "auto"
    """"auto": off for one rank, else ring."""
    sharding: Literal["auto", "tensor", "expert", "pipeline"] = "auto"
    """How the model is split: every matrix, whole experts, or layers. "auto": tensor."""
    enable_pipeline: bool = False
    """Allow `sharding = "pipeline"`: ranks compute one after another, so it saves memory only."""
    hostfile: Annotated[str, Meta(max_length=4_096)] = ""
    """MLX's hostfile or `mlx.distributed_config` output: addresses (ring) or devices (jaccl) of all
    ranks. "": ranks say where they are, which is enough on one machine."""
    canary: bool = True
    """Compute known sums and a long prompt on all ranks before anybody is served."""
    canary_prompt_s: Annotated[float, Meta(ge=0.0, le=3_600.0)] = 0.0
    """How long the next longer of its prompts (64, 256, 1,024 and 4,500 tokens) may be expected to
    take, seconds. 0: 0.5 where ranks compute on CPUs, where a start should be short, else 120."""
    metal_fast_synch: Literal["auto", "on", "off"] = "auto"
    """Metal's fast synchronization with jaccl. "auto": on where the canary has passed with it on
    this build of macOS; `lockstep verify --fast-synch` tries."""
    synchronization: Literal["broadcast", "verify"] = "broadcast"
    """How ranks agree on sampled ids: rank 0's ids, or every rank samples and the receipts prove
    it."""
    receipt_logits: Literal["auto", "on", "off"] = "auto"
    """Receipts hold the bits of each row's top logit. "auto": on where all ranks have the same
    device."""
    data_host: Annotated[str, Meta(max_length=255)] = "127.0.0.1"
    """Address on which this machine's ranks reach each other (ring, nccl)."""
    jaccl_devices: str = ""
    """File with MLX's RDMA device matrix (`MLX_IBV_DEVICES`)."""
    jaccl_fallback: Literal["none", "ring"] = "none"
    """What runs after three starts of jaccl in a row have failed. "ring": slower, but it runs."""
    jaccl_coordinator: str = ""
    """host:port of rank 0's side channel (`MLX_JACCL_COORDINATOR`)."""


class RankWorkerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device."""

    kv_bytes_max: Annotated[int, Meta(ge=0, le=2**50)] = 0
    """Memory for KV rows in bytes. 0: 60 % of what the device has left after loading."""
    kv_bits: Literal[0, 4, 8] = 0
    """Bits per number in which KV is kept, in rows and blocks: 8 or 4 hold twice or almost four
    times as many tokens of a 16-bit model, at some loss of quality and speed. 0: as computed."""
    pin_cores: Literal["auto", "on", "off"] = "auto"
    """Give each rank its own CPU cores (Linux). "auto": on with several ranks here."""
    blas: Literal["auto", "off"] = "auto"
    """Linux CPU: load an OpenBLAS before MLX, about 5 times faster. "off": the wheel's own."""


class CacheConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV blocks that later requests reuse, in memory and on SSD."""

    enabled: bool = True
    """Reuse the KV of prefixes that earlier requests have computed."""
    block_tokens: Annotated[int, Meta(ge=limits.BLOCK_TOKENS_MIN, le=limits.BLOCK_TOKENS_MAX)] = 256
    """Tokens in a block. A change begins a new namespace: what is stored is not found any more."""
    resident_bytes_max: Annotated[int, Meta(ge=0, le=2**50)] = 0
    """Memory per rank for resident blocks in bytes. 0: up to half of the memory for KV, as far as
    running sequences leave it."""
    ssd: bool = True
    """Keep blocks on SSD too, so that they outlive the processes."""
    directory: str = ""
    """Where the cache store of this host keeps them. "": `lockstep/blocks` in this user's cache
    folder."""
    ssd_bytes_max: Annotated[int, Meta(ge=0, le=2**60)] = 0
    """Bytes on SSD, all ranks of this host. 0: a quarter of what is free at start, at most
    100 GiB."""
    store_address: str = ""
    """Where this host's rank workers reach its cache store. "": ipc in run_dir."""
    spill_bytes_max: Annotated[int, Meta(ge=2**20, le=2**40)] = 512 * 1024 * 1024
    """Bytes per rank that wait to be written; past it the oldest are given up. With CUDA so much of
    the host's memory is taken at start, at most 1 GiB."""


class SpeculationConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Drafts: tokens that are guessed cheaply and verified several at once."""

    method: Literal["off", "ngram", "draft_model", "eagle"] = "off"
    """How drafts are proposed unless a request says otherwise. "ngram": what followed the same
    words earlier in prompt or completion; "draft_model": a smaller model with the same tokenizer;
    "eagle": a head over the model's own hidden states."""
    draft_model: Annotated[str, Meta(max_length=4_096)] = ""
    """The draft model, or the head: a local folder or a Hugging Face id. Every rank runs it
    whole."""
    tokens_max: Annotated[int, Meta(ge=1, le=limits.DRAFT_TOKENS_MAX)] = 5
    """Most drafts per sequence and step; fewer are proposed where fewer are accepted."""
    batch_max: Annotated[int, Meta(ge=0, le=1_024)] = 0
    """With more running sequences none gets drafts. 0: as measured, when they make steps slower
    than they save."""
    adaptive: bool = True
    """Propose as many drafts as pay by what is measured. False: always as many as may be, which is
    slower, and makes a check of texts see drafts in every step."""


class LogConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the processes say on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important lines that are written."""
    format: Literal["text", "json"] = "text"
    """Text for people, JSON for machines."""


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything, one section per role."""

    paths: PathsConfig = PathsConfig()
    model: ModelConfig = ModelConfig()
    gateway: GatewayConfig = GatewayConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    world: WorldConfig = WorldConfig()
    rank_worker: RankWorkerConfig = RankWorkerConfig()
    cache: CacheConfig = CacheConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    log: LogConfig = LogConfig()

    @property
    def run_dir(self) -> Path:
        """Folder of sockets and locks; `prepare_run_dir` makes it."""
        if self.paths.run_dir:
            return Path(self.paths.run_dir).expanduser()
        return Path(tempfile.gettempdir()) / f"lockstep-{os.getuid()}-{self.gateway.port}"

    @property
    def keys_dir(self) -> Path:
        """Folder of this host's key pair and of the keys that may speak to it."""
        if self.paths.keys_dir:
            return Path(self.paths.keys_dir).expanduser()
        base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
        return Path(base).expanduser() / "lockstep" / "keys"

    @property
    def gateway_address(self) -> str:
        """Bus address on which the scheduler listens for gateways."""
        return self.scheduler.gateway_address or f"ipc://{self.run_dir}/gateways.sock"

    @property
    def rank_address(self) -> str:
        """Bus address on which the scheduler listens for ranks."""
        return self.scheduler.rank_address or f"ipc://{self.run_dir}/ranks.sock"

    @property
    def store_address(self) -> str:
        """Bus address on which this host's cache store listens for rank workers."""
        return self.cache.store_address or f"ipc://{self.run_dir}/store.sock"

    @property
    def cache_directory(self) -> Path:
        """Folder of stored blocks on this host; the cache store makes it."""
        if self.cache.directory:
            return Path(self.cache.directory).expanduser()
        if sys.platform == "darwin":
            return Path("~/Library/Caches/lockstep/blocks").expanduser()
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(base).expanduser() / "lockstep" / "blocks"

    @property
    def backend(self) -> Literal["off", "ring", "nccl", "jaccl"]:
        """The backend of collectives, "auto" resolved; one rank needs none."""
        if self.world.size == 1:
            return "off"
        return "ring" if self.world.backend == "auto" else self.world.backend

    @property
    def sharding(self) -> Literal["none", "tensor", "expert", "pipeline"]:
        """How the model is split, "auto" resolved."""
        if self.world.size == 1:
            return "none"
        return "tensor" if self.world.sharding == "auto" else self.world.sharding

    @property
    def served_name(self) -> str:
        """The model's name for clients."""
        if self.model.served_name:
            return self.model.served_name
        if self.model.path == "demo":
            return "lockstep-demo"
        folder = Path(self.model.path).expanduser()
        if not folder.is_dir():
            return self.model.path
        # "." and ".." are names of no folder; a link's own name says more than where it leads.
        return folder.name if folder.name not in ("", "..") else folder.resolve().name
