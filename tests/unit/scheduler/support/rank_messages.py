"""Messages of a rank process that tests change with `msgspec.structs.replace`."""

import msgspec

from shared.messages import RankHello, RankReady

HELLO = RankHello(
    rank=-1,
    host="mac",
    pid=1,
    data_address="127.0.0.1:5000",
    launched=False,
    device="cpu",
    mlx_version="1",
    memory_bytes=1,
)
"""The hello of a process without a fixed rank."""

READY = RankReady(
    rank=0,
    model_fingerprint="same",
    kv_bytes_per_token=10,
    kv_bytes_per_row=0,
    kv_budget_bytes=10_000,
    context_tokens_max=100,
    vocab_size=10,
    can_roll_back=True,
    blas="",
)
"""The report of a rank that has loaded a model with 1,000 tokens of KV."""


def rank_hello(rank: int, number: int, **changes: object) -> RankHello:
    """Return the hello of process `number`, which was started as `rank`."""
    fields: dict[str, object] = {
        "rank": rank,
        "pid": 100 + number,
        "data_address": f"10.0.0.{rank + 1}:{7_000 + number}",
        "device": "gpu",
        **changes,
    }
    return msgspec.structs.replace(HELLO, **fields)
