"""`lockstep bench structured`: what grammars cost the requests beside them, and their own.

Plain requests run beside as many others, which have grammars or have none, in turn. The time
between two tokens of the plain ones shows what the masks of the others cost them. Another part runs
requests with grammars with and without drafts: decoding is greedy, so their texts must be equal.
The last part fills masks alone, without a model.
"""

import functools
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from services.commands.bench.flags import number_option
from services.commands.bench.load.load_processes import COMPLETIONS, LoadClient, request_body
from services.commands.bench.load.prompts import PromptGenerator
from services.commands.bench.measuring.noise import Measured, measure_case
from services.commands.bench.measuring.plan import StackPlan
from services.commands.bench.measuring.processes import MeasuredProcess, bench_program
from services.commands.bench.measuring.report import PART, Report
from services.commands.bench.measuring.stack import Stack, started_stack
from services.commands.bench.serving import mask_times
from shared.errors import UnavailableError

COLUMNS = [
    "itl_p50_ms",
    "itl_p95_ms",
    "decode_tokens_per_s",
    "tokens_per_s",
    "ttft_p50_ms",
    "acceptance",
    "texts_differing",
    "fill_ms_p50",
    "fill_ms_p99",
    "compile_ms_p50",
    "compile_ms_most",
    "tokenizer_s",
]
BESIDE_GRAMMARS, BESIDE_PLAIN = "beside grammars", "beside plain"
NO_DRAFTS, NGRAM = "off", "ngram"


class StructuredPlan(StackPlan, frozen=True, kw_only=True):
    """Parameters of one run of `lockstep bench structured`, from its command line."""

    rows: int
    """Requests that are timed, and as many beside them."""
    prompt_tokens: int
    new_tokens: int
    """Completion length of the timed requests."""
    masks: int
    """Masks per row that are filled alone."""


OPTIONS: list[click.Parameter] = [
    number_option("--rows", "Timed requests, and as many beside them", 16),
    number_option("--prompt-tokens", "Prompt length", 32),
    number_option("--new-tokens", "Completion length of the timed requests", 96, quick_max=48),
    number_option("--masks", "Masks per row that are filled alone", 500, quick_max=100),
    number_option("--ranks", "World size", 1),
]
"""Options of this benchmark."""


def measure(plan: StructuredPlan, report: Report) -> None:
    """Measure plain requests beside others with grammars, and drafts and masks of the latter.

    Args:
        plan: the parameters of the benchmark.
        report: gets one case per part, and a note if texts differ with and without drafts.

    Raises:
        UnavailableError: when the stack does not start or a request fails.
    """
    report.settings |= {
        "model": plan.model.name,
        "rows": f"{plan.rows} + {plan.rows}",
        "prompt_tokens": plan.prompt_tokens,
        "new_tokens": plan.new_tokens,
        "repeats": plan.repeats,
        **plan.settings,
    }
    prompts = PromptGenerator(plan.model)
    settings = {"LOCKSTEP_CACHE_ENABLED": "false"}
    with (
        LoadClient(plan.log_folder) as timed,
        LoadClient(plan.log_folder) as others,
        ThreadPoolExecutor(1) as thread,
        started_stack(plan, report, **settings) as stack,
    ):
        load = StructuredLoad(plan, stack, prompts)
        orders = itertools.cycle([(BESIDE_GRAMMARS, BESIDE_PLAIN), (BESIDE_PLAIN, BESIDE_GRAMMARS)])
        run = functools.partial(_measure_neighbours, load, timed, others, thread, orders)
        conditions = {PART: "neighbours", "rows": plan.rows}
        case = measure_case(plan, report, conditions, run, warm_up=run)
        case.add_ratios(
            BESIDE_GRAMMARS, BESIDE_PLAIN, "itl_p50_ms", "itl_p95_ms", "decode_tokens_per_s"
        )
        run_drafts = functools.partial(_measure_drafts, load, timed, itertools.count())
        conditions = {PART: "drafts", "rows": plan.rows}
        case = measure_case(plan, report, conditions, run_drafts, warm_up=run_drafts)
        case.add_ratios(NGRAM, NO_DRAFTS, "tokens_per_s")
        if differing := sum(case.values(NGRAM, "texts_differing")):
            report.notes.append(
                f"{differing:.0f} texts with grammars differ with and without drafts, although "
                "decoding is greedy."
            )
    conditions = {PART: "masks", "rows": plan.rows}
    measure_case(plan, report, conditions, functools.partial(_measure_masks, plan))


class StructuredLoad:
    """Makes the requests of one benchmark."""

    def __init__(self, plan: StructuredPlan, stack: Stack, prompts: PromptGenerator) -> None:
        self.stack = stack
        self._plan = plan
        self._prompts = prompts

    def requests(self, *, with_grammars: bool, longer: int = 1) -> list[list[dict[str, Any]]]:
        """Return one new request per client.

        Args:
            with_grammars: each has a grammar of its own.
            longer: their completions are this many times as long as those of timed requests.
        """
        clients = []
        for number in range(self._plan.rows):
            body = request_body(
                self.stack.model,
                self._plan.new_tokens * longer,
                prompt=self._prompts.token_prompt(self._plan.prompt_tokens),
                speculation={"method": NO_DRAFTS},
            )
            if with_grammars:
                body["guided_json"] = mask_times.schema(number)
            clients.append([body])
        return clients


def _measure_neighbours(
    load: StructuredLoad,
    timed: LoadClient,
    others: LoadClient,
    thread: ThreadPoolExecutor,
    orders: Iterator[tuple[str, ...]],
) -> Measured:
    """Time plain requests beside others of both kinds."""
    found = {}
    for name in next(orders):
        # The others begin at the same time and end later, so that all rows run all the time.
        beside = load.requests(with_grammars=name == BESIDE_GRAMMARS, longer=2)
        running = thread.submit(others.load, load.stack, COMPLETIONS, beside)
        answer = timed.load(load.stack, COMPLETIONS, load.requests(with_grammars=False))
        if running.done():
            raise UnavailableError("The other requests ended before the timed ones.")
        running.result()
        metrics = answer["metrics"]
        names = ("itl_p50_ms", "itl_p95_ms", "decode_tokens_per_s", "ttft_p50_ms")
        found[name] = {metric: metrics[metric] for metric in names}
    return found


def _measure_drafts(load: StructuredLoad, client: LoadClient, rounds: Iterator[int]) -> Measured:
    """Run requests with grammars, with and without drafts."""
    plain = load.requests(with_grammars=True)
    methods = [NO_DRAFTS, NGRAM] if next(rounds) % 2 else [NGRAM, NO_DRAFTS]
    answers = {}
    for method in methods:
        clients = [[{**one, "speculation": {"method": method}} for one in each] for each in plain]
        answers[method] = client.load(load.stack, COMPLETIONS, clients)
    found: dict[str, dict[str, float | None]] = {}
    for method, answer in answers.items():
        accepted, rejected = answer["drafts"]["accepted"], answer["drafts"]["rejected"]
        pairs = zip(answer["texts"], answers[NO_DRAFTS]["texts"], strict=True)
        found[method] = {
            "tokens_per_s": answer["metrics"]["tokens_per_s"],
            "acceptance": accepted / (accepted + rejected) if accepted + rejected else None,
            "texts_differing": sum(text != other for text, other in pairs),
        }
    return found


def _measure_masks(plan: StructuredPlan) -> Measured:
    """Fill masks alone, in a process of its own."""
    arguments = (str(plan.model), str(plan.rows), str(plan.masks))
    command = bench_program("serving.mask_times", *arguments)
    log: Path = plan.log_folder / "masks.log"
    with MeasuredProcess("the filler of masks", command, log, piped=True) as filler:
        return {"masks": filler.receive()}
