"""`lockstep bench speculation --check N`: proof that texts do not depend on drafts.

N requests are sent in waves of 1 to 8 clients, with different lengths and kinds of text, some with
stop strings; decoding is greedy. The same processes run each wave without drafts, with n-grams and
with the chosen method; adaptive speculation is off, so that drafts are always verified. Each wave
runs twice without drafts: differences between these two runs do not come from drafts.
"""

import itertools
from collections.abc import Mapping
from random import Random
from typing import Any

from services.commands.bench.load.load_processes import LoadClient
from services.commands.bench.measuring.processes import print_progress
from services.commands.bench.measuring.report import Case, Report
from services.commands.bench.measuring.stack import Stack, started_stack
from services.commands.bench.speculation.benchmark import NGRAM, OFF, SpeculationPlan, send_work
from services.commands.bench.speculation.request_generator import RequestGenerator

COLUMNS = ["requests", "texts_differing", "counts_differing", "acceptance", "tokens_per_step"]
OFF_AGAIN = "off again"
_CLIENTS_MAX = 8
_ROUNDS_MAX = 3
_STOPS = (" the", "\n", ",", ". ", "a", "7")
"""Stop strings; each ends some texts soon, some late and some not at all."""
_STOPPED_SHARE = 0.4
"""Share of the requests with a stop string."""
_SEED = 5


def measure(plan: SpeculationPlan, report: Report, count: int) -> None:
    """Compare the greedy texts of the same requests without drafts and with each method.

    Args:
        plan: the parameters of the benchmark.
        report: gets one case, and the verdicts as notes.
        count: number of requests.

    Raises:
        UnavailableError: when the stack does not start or answer, or requests fail.
    """
    report.columns = COLUMNS
    report.settings |= {
        "model": plan.model.name,
        **plan.describe(),
        "requests": count,
        **plan.settings,
    }
    case = Case(conditions={"ranks": plan.ranks, "clients": f"1 to {_CLIENTS_MAX}"})
    report.cases.append(case)
    settings = {"LOCKSTEP_SPECULATION_ADAPTIVE": "false", **plan.stack_settings}
    with (
        LoadClient(plan.log_folder) as client,
        started_stack(plan, report, **settings) as stack,
    ):
        _compare_waves(plan, stack, client, count, case)
    report.notes += verdict_notes(case)


def verdict_notes(case: Case) -> list[str]:
    """Return per method the number of differences from the texts without drafts, as a sentence.

    A method without accepted drafts gets a second sentence, because its check proves nothing.

    Args:
        case: the metrics of `compare`, per method one value per wave.
    """
    notes = []
    for name, metrics in case.series.items():
        total = {metric: sum(values) for metric, values in metrics.items()}
        differing = total["texts_differing"] + total["counts_differing"]
        verdict = f"{differing:.0f} differences" if differing else "no difference"
        notes.append(f"{name}: {verdict} in {total['requests']:.0f} requests.")
        if name != OFF_AGAIN and not total["accepted"]:
            notes.append(f"{name}: no draft was accepted, so nothing was checked.")
    return notes


def draw_wave(
    requests: RequestGenerator, random: Random, number: int, left: int, new_tokens: int
) -> list[list[dict[str, Any]]]:
    """Draw the next wave, a set of requests that 1 to 8 clients send at the same time.

    Args:
        requests: generates requests of one kind.
        random: source of lengths and stop strings.
        number: number of the wave, from 0, which determines its number of clients.
        left: number of requests that are still to be made.
        new_tokens: upper limit of `max_tokens`, which is drawn for each request.

    Returns:
        Per client the fields of the bodies that it sends one after the other; `left` in total at
        most.
    """
    clients = 1 + number % _CLIENTS_MAX
    wave: list[list[dict[str, Any]]] = []
    for _ in range(min(clients, left)):
        rounds = max(1, min(random.randint(1, _ROUNDS_MAX), left - clients))
        left -= rounds
        wave.append([_request(requests, random, new_tokens) for _ in range(rounds)])
    return wave


def compare(answer: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, float | None]:
    """Return one method's metrics of a wave.

    Args:
        answer: the load client's answer with the method.
        reference: its answer to the same requests without drafts.

    Returns:
        requests: their number; texts_differing: number of texts that differ from the reference;
        counts_differing: 1 when the wave's total of tokens differs, else 0; accepted: number of
        accepted drafts; acceptance: their share of the verified ones; tokens_per_step: mean of one
        request. None: nothing to divide by.
    """
    accepted, rejected = answer["drafts"]["accepted"], answer["drafts"]["rejected"]
    tokens = answer["metrics"]["tokens"]
    pairs = zip(answer["texts"], reference["texts"], strict=True)
    return {
        "requests": len(answer["texts"]),
        "texts_differing": sum(text != other for text, other in pairs),
        # Usage is summed over the wave; text after a stop string is counted but not returned.
        "counts_differing": float(tokens != reference["metrics"]["tokens"]),
        "accepted": accepted,
        "acceptance": accepted / (accepted + rejected) if accepted + rejected else None,
        "tokens_per_step": tokens / (tokens - accepted) if tokens > accepted else None,
    }


def _compare_waves(
    plan: SpeculationPlan, stack: Stack, client: LoadClient, left: int, case: Case
) -> None:
    random = Random(_SEED)
    kinds = [RequestGenerator(kind, _SEED, is_demo=plan.is_demo) for kind in plan.texts]
    methods = dict.fromkeys([OFF_AGAIN, NGRAM, plan.method])
    for number, requests in enumerate(itertools.cycle(kinds)):
        wave = draw_wave(requests, random, number, left, plan.new_tokens)
        left -= sum(map(len, wave))
        reference = send_work(plan, stack, client, requests.path, wave, OFF)
        for name in methods:
            method = OFF if name == OFF_AGAIN else name
            found = send_work(plan, stack, client, requests.path, wave, method)
            case.add(name, compare(found, reference))
        print_progress(f"{left} requests left")
        if not left:
            return


def _request(requests: RequestGenerator, random: Random, new_tokens: int) -> dict[str, Any]:
    fields = {**requests.next(), "max_tokens": random.randint(1, new_tokens)}
    if random.random() < _STOPPED_SHARE:
        fields["stop"] = [random.choice(_STOPS)]
    return fields
