"""Part of `lockstep bench overload`: a small tenant beside one that sends many requests at once.

The small tenant sends one request after the other, first alone, then while 200 requests of the
other one run and wait. The promise: the 95th percentile of its time to first token is at most twice
that alone plus one bound of a decode stall (`scheduler.decode_stall_ms`).
"""

from concurrent.futures import ThreadPoolExecutor

from services.commands.bench.load.load_processes import LoadClient
from services.commands.bench.load.prompts import PromptGenerator
from services.commands.bench.measuring.noise import measure_case
from services.commands.bench.measuring.plan import StackPlan
from services.commands.bench.measuring.report import Report
from services.commands.bench.measuring.stack import started_stack
from shared.configuration.loading import API_KEYS_VARIABLE
from shared.configuration.settings import SchedulerConfig

ALONE, BESIDE_FLOOD = "small tenant alone", "beside a flood"
FLOOD_REQUESTS = 200
"""Requests that the flooding tenant sends at once."""
SMALL_REQUESTS = 20
"""Requests that the small tenant sends, one after the other."""
_SMALL_TOKENS = 4
"""Completion length of the small tenant's requests; only their first tokens count."""
_KEYS = {"small": "small-tenant-of-the-benchmark", "flood": "flooding-tenant-of-the-benchmark"}
_STALL_VARIABLE = "LOCKSTEP_SCHEDULER_DECODE_STALL_MS"


def measure_tenants(
    plan: StackPlan,
    report: Report,
    prompts: PromptGenerator,
    slots: int,
    prompt_tokens: int,
    new_tokens: int,
) -> None:
    """Measure the time to first token of a small tenant, alone and beside a flood.

    Args:
        plan: model, ranks and settings of the stack.
        report: gets one case, and a note that says whether the promise was kept.
        prompts: source of the prompts.
        slots: sequences that run at once.
        prompt_tokens: tokens of each prompt.
        new_tokens: completion length of the flooding tenant's requests.

    Raises:
        UnavailableError: when the stack does not start or a request fails.
    """
    settings = {
        "LOCKSTEP_SCHEDULER_RUNNING_SEQUENCES_MAX": str(slots),
        API_KEYS_VARIABLE: ",".join(f"{name}={key}" for name, key in _KEYS.items()),
    }
    with (
        LoadClient(plan.log_folder) as small,
        LoadClient(plan.log_folder) as flooding,
        ThreadPoolExecutor(1) as thread,
        started_stack(plan, report, **settings) as stack,
    ):

        def serve_small() -> dict[str, float]:
            work = prompts.token_work(1, SMALL_REQUESTS, prompt_tokens)
            answer = small.complete(stack, work, _SMALL_TOKENS, api_key=_KEYS["small"])
            metrics = answer["metrics"]
            return {name: metrics[name] for name in ("ttft_p50_ms", "ttft_p95_ms")}

        def flood() -> None:
            work = prompts.token_work(FLOOD_REQUESTS, 1, prompt_tokens)
            flooding.complete(stack, work, new_tokens, api_key=_KEYS["flood"])

        def measure_both() -> dict[str, dict[str, float]]:
            alone = serve_small()
            flooded = thread.submit(flood)
            while stack.world().get("waiting", 0) < FLOOD_REQUESTS // 2 and not flooded.done():
                stack.wait_for_status()
            beside = serve_small()
            is_flooding = not flooded.done()
            flooded.result()
            return {ALONE: alone, BESIDE_FLOOD: beside | {"flooded_to_end": float(is_flooding)}}

        serve_small()
        case = measure_case(plan, report, {"times": f"flood of {FLOOD_REQUESTS}"}, measure_both)
    case.add_ratios(BESIDE_FLOOD, ALONE, "ttft_p50_ms", "ttft_p95_ms")
    stall_ms = float(plan.settings.get(_STALL_VARIABLE, SchedulerConfig().decode_stall_ms))
    alone, beside = (case.values(name, "ttft_p95_ms") for name in (ALONE, BESIDE_FLOOD))
    report.notes.append(judge(alone, beside, stall_ms))


def judge(alone_ms: list[float], beside_ms: list[float], stall_ms: float) -> str:
    """Return a sentence that says in how many repeats the promise was kept.

    Args:
        alone_ms: the small tenant's TTFT p95 alone, per repeat.
        beside_ms: the same beside the flood.
        stall_ms: the bound of a decode stall.
    """
    pairs = list(zip(alone_ms, beside_ms, strict=True))
    kept = sum(beside <= 2 * alone + stall_ms for alone, beside in pairs)
    return (
        "The small tenant's ttft_p95_ms beside the flood was at most 2 x that alone + "
        f"{stall_ms:.0f} ms (decode_stall_ms) in {kept} of {len(pairs)} repeats."
    )
