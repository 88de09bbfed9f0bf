"""`lockstep bench start`: the first prompts after a start, beside later ones.

Each repeat starts a whole stack, and sends rounds of prompts that come all at once, with no warm-up
before them. What a device prepares once, such as kernels for a shape, shows in the first rounds.
The case of round 1 has ready_s, the seconds from the start of all processes until the gateway is
ready, to a fifth of a second. Contenders are the same model under other settings; their stacks
start in turn.

On an NVIDIA GPU a first start compiles kernels, and later ones find them on disk. With --cold each
start is a first one: it gets an empty folder for kernels, kernels-START-CONTENDER-…, in the folder
of logs.
"""

import os
import tempfile
import time
from collections.abc import Mapping

import click
import msgspec

from services.commands.bench.flags import compare_option, number_option
from services.commands.bench.load.load_processes import LoadClient
from services.commands.bench.load.prompts import PromptGenerator
from services.commands.bench.measuring.noise import add_repeat
from services.commands.bench.measuring.plan import StackPlan
from services.commands.bench.measuring.processes import print_progress
from services.commands.bench.measuring.report import Case, Report
from services.commands.bench.measuring.stack import started_stack
from services.commands.bench.serving.overhead import STACK, check_answer
from services.rank_worker.device.cuda.variables import KERNELS_VARIABLE
from shared.configuration.loading import load_config

COLUMNS = ["ready_s", "ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "tokens_per_s"]
COMPARED = ("ready_s", "ttft_p50_ms", "tokens_per_s")
"""Metrics of the other contenders that are divided by those of STACK."""


class FirstPromptsPlan(StackPlan, frozen=True, kw_only=True):
    """Parameters of one run of `lockstep bench start`, from its command line."""

    clients: int
    """Prompts of each round."""
    prompt_tokens: int
    new_tokens: int
    rounds: int
    compare: dict[str, dict[str, str]]
    """Further contenders: name -> LOCKSTEP_… variables."""
    cold: bool
    """Whether each start compiles all kernels."""


OPTIONS: list[click.Parameter] = [
    number_option("--clients", "Prompts that come at once", 16),
    number_option("--prompt-tokens", "Tokens of each prompt", 1_024, quick=64),
    number_option("--new-tokens", "Completion length", 64, quick=16),
    number_option("--rounds", "Rounds of prompts after each start", 10, quick=3),
    number_option("--ranks", "World size", 1),
    click.Option(
        ["--cold"], is_flag=True, help="Compile all kernels of an NVIDIA GPU in each start."
    ),
    compare_option("Start also with these settings, for example rank_worker.fast_path=off"),
]
"""Options of this benchmark."""


def measure(plan: FirstPromptsPlan, report: Report) -> None:
    """Start stacks one after the other, and measure the rounds of prompts of each.

    Args:
        plan: the parameters of the benchmark.
        report: gets one case per round.

    Raises:
        ConfigError: a setting is wrong.
        UnavailableError: when a stack does not start, or does not do exactly the ordered work.
    """
    contenders: dict[str, Mapping[str, str]] = {STACK: plan.settings}
    contenders |= {name: plan.settings | own for name, own in plan.compare.items()}
    for settings in contenders.values():
        # A mistake is found before minutes are spent on the starts before it.
        load_config(environment={**os.environ, **settings})
    prompts = PromptGenerator(plan.model)
    report.settings |= {
        "model": plan.model.name,
        "ranks": plan.ranks,
        "clients": plan.clients,
        "prompt_tokens": plan.prompt_tokens,
        "new_tokens": plan.new_tokens,
        "starts": plan.repeats,
        "cold": plan.cold,
        **plan.settings,
    }
    report.cases += [Case(conditions={"round": number + 1}) for number in range(plan.rounds)]
    for start in range(plan.repeats):
        for index, (name, settings) in enumerate(contenders.items()):
            print_progress(f"{name}: start {start + 1}")
            variables = dict(settings)
            if plan.cold:
                prefix = f"kernels-{start + 1}-{index + 1}-"
                folder = tempfile.mkdtemp(prefix=prefix, dir=plan.log_folder.resolve())
                variables[KERNELS_VARIABLE] = folder
            whole = msgspec.structs.replace(plan, settings=variables)
            with LoadClient(plan.log_folder) as client:
                _measure_start(whole, report, client, prompts, name)
        for case in report.cases:
            for name in plan.compare:
                case.add_ratios(name, STACK, *COMPARED)
    if plan.cold and not str(report.machine["rank_device"]).startswith("cuda"):
        report.notes.append("No rank used an NVIDIA GPU, so --cold changed nothing.")


def _measure_start(
    plan: FirstPromptsPlan, report: Report, client: LoadClient, prompts: PromptGenerator, name: str
) -> None:
    """Start a contender's stack, and add its rounds to the cases."""
    began_s = time.monotonic()
    with started_stack(plan, report) as stack:
        report.cases[0].add(name, {"ready_s": time.monotonic() - began_s})

        def measure_round() -> dict[str, dict[str, float]]:
            work = prompts.token_work(plan.clients, 1, plan.prompt_tokens)
            answer = client.complete(stack, work, plan.new_tokens)
            tokens = plan.clients * plan.new_tokens
            return {name: check_answer(answer, tokens, plan.prompt_tokens)}

        for case in report.cases:
            # A second try would not be the same round.
            add_repeat(case, 1, measure_round)
