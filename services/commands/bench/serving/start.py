"""`lockstep bench start`: the first prompts after a start, beside later ones.

Each repeat starts a whole stack, and sends rounds of prompts that come all at once, with no warm-up
before them. What a device prepares once, such as kernels for a shape, shows in the first rounds.
The case of round 1 has ready_s, the seconds from the start of all processes until the gateway is
ready, to a fifth of a second. On an NVIDIA GPU the first start compiles kernels where
MLX_PTX_CACHE_DIR is an empty folder, and later ones find them there: see the values of each repeat
with --json.
"""

import time

import click

from services.commands.bench.flags import number_option
from services.commands.bench.load.load_processes import LoadClient
from services.commands.bench.load.prompts import PromptGenerator
from services.commands.bench.measuring.noise import add_repeat
from services.commands.bench.measuring.plan import StackPlan
from services.commands.bench.measuring.processes import print_progress
from services.commands.bench.measuring.report import Case, Report
from services.commands.bench.measuring.stack import started_stack
from services.commands.bench.serving.overhead import STACK, check_answer

COLUMNS = ["ready_s", "ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "tokens_per_s"]


class FirstPromptsPlan(StackPlan, frozen=True, kw_only=True):
    """Parameters of one run of `lockstep bench start`, from its command line."""

    clients: int
    """Prompts of each round."""
    prompt_tokens: int
    new_tokens: int
    rounds: int


OPTIONS: list[click.Parameter] = [
    number_option("--clients", "Prompts that come at once", 16),
    number_option("--prompt-tokens", "Tokens of each prompt", 1_024, quick=64),
    number_option("--new-tokens", "Completion length", 64, quick=16),
    number_option("--rounds", "Rounds of prompts after each start", 10, quick=3),
    number_option("--ranks", "World size", 1),
]
"""Options of this benchmark."""


def measure(plan: FirstPromptsPlan, report: Report) -> None:
    """Start stacks one after the other, and measure the rounds of prompts of each.

    Args:
        plan: the parameters of the benchmark.
        report: gets one case per round.

    Raises:
        UnavailableError: when a stack does not start, or does not do exactly the ordered work.
    """
    prompts = PromptGenerator(plan.model)
    report.settings |= {
        "model": plan.model.name,
        "ranks": plan.ranks,
        "clients": plan.clients,
        "prompt_tokens": plan.prompt_tokens,
        "new_tokens": plan.new_tokens,
        "starts": plan.repeats,
        **plan.settings,
    }
    report.cases += [Case(conditions={"round": number + 1}) for number in range(plan.rounds)]
    for start in range(plan.repeats):
        with LoadClient(plan.log_folder) as client:
            _measure_start(plan, report, client, prompts, start)


def _measure_start(
    plan: FirstPromptsPlan, report: Report, client: LoadClient, prompts: PromptGenerator, start: int
) -> None:
    """Start a stack, and add its rounds to the cases."""
    began_s = time.monotonic()
    with started_stack(plan, report) as stack:
        report.cases[0].add(STACK, {"ready_s": time.monotonic() - began_s})

        def measure_round() -> dict[str, dict[str, float]]:
            work = prompts.token_work(plan.clients, 1, plan.prompt_tokens)
            answer = client.complete(stack, work, plan.new_tokens)
            tokens = plan.clients * plan.new_tokens
            return {STACK: check_answer(answer, tokens, plan.prompt_tokens)}

        for case in report.cases:
            print_progress(f"start {start + 1}, round {case.conditions['round']}")
            # A second try would not be the same round.
            add_repeat(case, 1, measure_round)
