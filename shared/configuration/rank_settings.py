"""Settings of the ranks: how they form a world, and how each uses its device."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared import limits


class WorldConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ranks and their collectives."""

    size: Annotated[int, Meta(ge=1, le=limits.RANKS_MAX)] = 1
    """Number of ranks."""
    backend: Literal["auto", "off", "ring", "nccl", "jaccl"] = "auto"
    """MLX's backend for collectives. "auto": "off" for one rank, else "ring"."""
    sharding: Literal["auto", "tensor", "expert", "tensor+expert", "pipeline"] = "auto"
    """How the model is split: within every matrix ("tensor"), by routed experts ("expert"), by both
    ("tensor+expert": routed experts, and within every other matrix) or by layers ("pipeline").
    "auto": "tensor"."""
    expert_shares: Annotated[
        list[Annotated[int, Meta(ge=1, le=limits.EXPERTS_MAX)]], Meta(max_length=limits.RANKS_MAX)
    ] = []
    """With a `sharding` by experts: relative number of experts of each rank, by rank, for example
    [70, 58] as `lockstep plan --expert-stats` proposes. []: in proportion to memory."""
    split_vocabulary: Literal["auto", "off", "head", "all"] = "auto"
    """Divide matrices with a row per token between the ranks. "head": the one that computes logits,
    which in some models is the token embedding too. "all": the token embedding in any case, which
    adds a sum over ranks to each forward. "auto": the head, if it has at least 64 MiB. "off": none.
    A pipeline divides none."""
    enable_pipeline: bool = False
    """Allow `sharding = "pipeline"`. Its ranks compute one after another, which saves memory but no
    time."""
    hostfile: Annotated[str, Meta(max_length=4_096)] = ""
    """MLX's hostfile, or output of `mlx.distributed_config`: the addresses (ring) or RDMA devices
    (jaccl) of all ranks. "": ranks report their addresses, which suffices on one machine."""
    canary: bool = True
    """Check sums and a long prompt with known results on all ranks before serving."""
    canary_prompt_s: Annotated[float, Meta(ge=0.0, le=3_600.0)] = 0.0
    """Longest predicted time of a canary prompt. Its prompts have 64, 256, 1,024 and 4,500 tokens,
    and one that is predicted to take longer is left out. 0: 0.5 s on CPUs, so that a start stays
    short, else 120 s."""
    metal_fast_synch: Literal["auto", "on", "off"] = "auto"
    """Metal's fast synchronization with jaccl. "auto": on where the canary has passed with it on
    this build of macOS; `lockstep verify --fast-synch` tests that."""
    synchronization: Literal["broadcast", "independent"] = "broadcast"
    """How ranks agree on sampled tokens. "broadcast": all use rank 0's tokens. "independent": every
    rank samples, and receipts are compared."""
    receipt_logits: Literal["auto", "on", "off"] = "auto"
    """Include the bits of each row's highest logit in receipts, to detect different results on
    different ranks. "auto": on if all ranks have the same device."""
    data_host: Annotated[str, Meta(max_length=255)] = "127.0.0.1"
    """Address on which other ranks reach this machine's ranks for collectives (ring, nccl)."""
    jaccl_devices: str = ""
    """File with MLX's RDMA device matrix (`MLX_IBV_DEVICES`). "": the devices in `hostfile`."""
    jaccl_fallback: Literal["none", "ring"] = "none"
    """Backend after three failed starts of jaccl in a row. "ring" is slower but needs no RDMA."""
    jaccl_coordinator: str = ""
    """host:port on which rank 0 waits for the other ranks (`MLX_JACCL_COORDINATOR`). "": from
    `hostfile`."""


class RankWorkerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank's use of its device: memory and precision of KV, CPU cores, matrix library."""

    kv_bytes_max: Annotated[int, Meta(ge=0, le=2**50)] = 0
    """Memory for KV rows. 0: 60 % of the memory that is free after loading, on the device or, on
    CPUs, on the machine and within the limits of its container."""
    memory_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Part of the machine's memory for this rank. Set it where ranks do not see that they share a
    machine, as in containers of their own. 0: equal parts for the ranks known to run on it. With
    CUDA each rank has its own GPU, and this has no effect."""
    kv_bits: Literal[0, 4, 8] = 0
    """Bits per KV number, in rows and blocks. 8 and 4 hold twice and almost four times as many
    tokens of a 16-bit model, at some loss of quality and speed. 0: as computed."""
    fast_path: Literal["auto", "attention", "off"] = "auto"
    """Compute steps in fewer operations, where the rank proves at its start that the results equal
    those of mlx-lm's own code. "auto": decoder layers of a known form as a whole, others as with
    "attention". "attention": on a GPU mlx-lm's layers, in whose decodes kernels attend and matrices
    with one input are one. "off": mlx-lm's code alone."""
    peer_memory: bool = True
    """Have kernels of the fast path sum over ranks in decodes, through GPU memory that the ranks
    share, instead of NCCL. Used where all ranks are NVIDIA GPUs of one host, and a trial at the
    start succeeds. Must be equal on all ranks."""
    prompts_in_place: bool = True
    """On NVIDIA GPUs have kernels of the fast path attend also for prompts: chunks of any lengths
    share a forward, which need not wait for the steps before. MLX attends in steps in which a
    prompt has more than 2,048 new tokens (1,448 if the step needs several forwards), or fewer with
    many before them, or goes beyond its first 8,192; and where experts are split, in long steps.
    The model needs numbers of 16 bits and layers of a known form, with heads of up to 128 numbers
    and no latent attention; kv_bits, batch_invariant and the ring exclude these kernels. Must be
    equal on all ranks."""
    batch_invariant: bool = False
    """Give a request the same numbers, to the last bit, beside any other requests and with any
    content of the cache, unless it is preempted or goes on after a fault. Steps are slower. The
    model needs a fast path and dense layers, speculation must be off, and there may be at most 2
    ranks."""
    pin_cores: Literal["auto", "on", "off"] = "auto"
    """Give each rank its own CPU cores (Linux). "auto": on if several ranks run on this machine."""
    spare: Literal["off", "started", "loaded"] = "started"
    """Keep a spare process of each rank (`lockstep up`) that takes the place of one that ends.
    "started": it has imported MLX and mlx-lm (beside an NVIDIA GPU neither, because they would
    take its memory) and holds no weights. It takes about 160 MB of memory (Linux, CPU).
    "loaded": the spares have also joined a world of their own and loaded the model, so streams
    continue at once; the weights need their memory twice."""
    blas: Literal["auto", "off"] = "auto"
    """Matrix library on Linux CPUs. "auto": OpenBLAS, about 5 times faster. "off": the one in MLX's
    wheel."""

    @property
    def weight_copies(self) -> int:
        """How many processes hold the weights of each rank: 2 with a loaded spare process."""
        return 2 if self.spare == "loaded" else 1
