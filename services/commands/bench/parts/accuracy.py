"""`lockstep bench accuracy`: errors of log probabilities, and the influence of other rows on them.

A rank without a scheduler continues texts of random words greedily, side by side. Contenders are
the same model under other settings, each in a process of its own, and mlx-lm's own code in the
dtype in which the first contender computes. The reference is mlx-lm's code with all weights
as float32, and it reads the tokens that a contender has drawn. mlx-lm's own code reads those of the
first contender, token by token like a decode.

- error_mean, error_max: differences of the log probabilities of drawn tokens from those of the
  reference, in nats, over the first REFERENCE_ROWS texts of a repeat.
- same_bits: the part of these log probabilities which are equal, to the last bit, to those of the
  same texts in the first batch. 1 for all batches means that other rows have no influence.

The reference needs 4 bytes for each weight that is not quantized.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import click

from services.commands.bench.flags import compare_option, numbers_option
from services.commands.bench.flags import number_option as number
from services.commands.bench.load.prompts import PromptGenerator
from services.commands.bench.measuring.processes import print_progress
from services.commands.bench.measuring.report import Case, Report
from services.commands.bench.parts.worlds import (
    LOCKSTEP,
    Worlds,
    WorldsPlan,
    check_settings,
    start_ranks,
    started_worlds,
)
from shared import limits
from shared.errors import UnavailableError, UsageError

COLUMNS = ["error_mean", "error_max", "same_bits"]
REFERENCE_ROWS = 8
MLX_LM = "mlx-lm"
"""Name of the contender that is mlx-lm's own code."""
_FLOAT32 = {"LOCKSTEP_MODEL_DTYPE": "float32", "MLX_ENABLE_TF32": "0"}
"""MLX multiplies float32 matrices with 10 bits of fraction on some GPUs, unless it is told so."""


class AccuracyPlan(WorldsPlan, frozen=True, kw_only=True):
    """Parameters of one run of `lockstep bench accuracy`, from its command line."""

    batches: list[int]
    """Numbers of texts that are continued side by side."""
    prompt_tokens: int
    """Tokens of each text."""
    new_tokens: int
    """Tokens of each continuation."""


OPTIONS: list[click.Parameter] = [
    numbers_option("--batches", "Numbers of texts side by side", "1,16,64", quick="1,4"),
    number("--prompt-tokens", "Tokens of each text", 256, quick=64),
    number("--new-tokens", "Tokens of each continuation", 32, quick=8),
    numbers_option("--ranks", "Numbers of ranks that share the model", "1"),
    compare_option("Measure also with these settings, for example rank_worker.kv_bits=8"),
]
"""Options of this benchmark."""


@dataclasses.dataclass(frozen=True, slots=True)
class Continued:
    """Continuations of one contender, of the texts of one repeat and batch."""

    case: Case
    contender: str
    texts: Sequence[list[int]]
    """Token ids of the first texts."""
    tokens: Sequence[list[int]]
    """Ids of their continuations."""
    logprobs: Sequence[list[float]]
    """Natural-log probability of each."""


def measure(plan: AccuracyPlan, report: Report) -> None:
    """Measure errors of a model's log probabilities by batch, and of all contenders.

    Args:
        plan: the parameters of the benchmark.
        report: gets one case per batch, and a note for each that does not fit.

    Raises:
        ConfigError: a setting is wrong.
        UnavailableError: a rank or the reference does not start, or nothing could be measured.
        UsageError: texts are too long for one step, or the model has no tokenizer.
    """
    check_settings(plan)
    if plan.prompt_tokens > limits.FORWARD_TOKENS_MAX:
        raise UsageError(
            f"--prompt-tokens {plan.prompt_tokens} is too long: a step reads at most "
            f"{limits.FORWARD_TOKENS_MAX} tokens of a text."
        )
    prompts = PromptGenerator(plan.model)
    found: list[Continued] = []
    with started_worlds(plan, report) as worlds:
        report.settings |= {"prompt_tokens": plan.prompt_tokens, "new_tokens": plan.new_tokens}
        report.cases += [Case(conditions={"batch": batch}) for batch in plan.batches]
        for _ in range(plan.repeats):
            texts = [prompts.token_prompt(plan.prompt_tokens) for _ in range(max(plan.batches))]
            for name in worlds:
                found += _continue_texts(plan, report, worlds, name, texts)
    if not found:
        raise UnavailableError(f"Nothing was measured. {' '.join(report.notes)}")
    _add_errors(plan, found)
    names = {one.contender for one in found}
    for case, name in itertools.product(report.cases, sorted(names)):
        case.add_ratios(name, MLX_LM, "error_mean")


def equal_part(one: Continued, other: Continued) -> float:
    """Return the part of the first one's log probabilities that the other one has too.

    After a token that differs none counts as equal.

    Args:
        one: continuations.
        other: those of the same texts and perhaps of more.
    """
    equal = count = 0
    for own, others in zip(_pairs(one), _pairs(other), strict=False):
        count += len(own)
        for (token, value), (other_token, other_value) in zip(own, others, strict=True):
            if token != other_token:
                break
            equal += value == other_value
    return equal / count


def _continue_texts(
    plan: AccuracyPlan, report: Report, worlds: Worlds, name: str, texts: Sequence[list[int]]
) -> list[Continued]:
    """Have a contender continue the texts in each batch, and add `same_bits` to the cases."""
    found: list[Continued] = []
    for case, batch in zip(report.cases, plan.batches, strict=True):
        print_progress(f"{name}: {batch} texts")
        order = {"texts": texts[:batch], "new_tokens": plan.new_tokens}
        answer = worlds[name].request(order)[0]
        if "refused" in answer:
            note = f"{name} was not measured with {batch} texts: {answer['refused']}"
            report.notes += [] if note in report.notes else [note]
            continue
        first = slice(min(batch, REFERENCE_ROWS))
        one = Continued(
            case, name, texts[first], answer["tokens"][first], answer["logprobs"][first]
        )
        found.append(one)
        if one is not found[0]:
            case.add(name, {"same_bits": equal_part(found[0], one)})
    return found


def _pairs(one: Continued) -> list[list[tuple[int, float]]]:
    """Return (id, log probability) of each drawn token, text by text."""
    return [list(zip(*both, strict=True)) for both in zip(one.tokens, one.logprobs, strict=True)]


def _add_errors(plan: AccuracyPlan, found: Sequence[Continued]) -> None:
    """Add the errors of all contenders, and those of mlx-lm's own code, to the cases."""
    plain = [one for one in found if one.contender == LOCKSTEP]
    own = _read_again(plan, MLX_LM, {}, plain)
    reference = _read_again(plan, "float32", _FLOAT32, found)
    expected = {id(one): logprobs for one, logprobs in zip(found, reference, strict=True)}
    pairs = [(one.contender, one, one.logprobs) for one in found]
    pairs += [(MLX_LM, one, logprobs) for one, logprobs in zip(plain, own, strict=True)]
    for name, one, logprobs in pairs:
        errors = [
            abs(value - correct)
            for values, others in zip(logprobs, expected[id(one)], strict=True)
            for value, correct in zip(values, others, strict=True)
        ]
        one.case.add(name, {"error_mean": sum(errors) / len(errors), "error_max": max(errors)})


def _read_again(
    plan: AccuracyPlan, name: str, settings: Mapping[str, str], found: Sequence[Continued]
) -> list[list[list[float]]]:
    """Return the log probabilities that mlx-lm's code gives to continuations."""
    print_progress(f"{name}: loading {plan.model.name}")
    program = "fake_ranks.reference_model"
    with closing(start_ranks(plan, name, 1, {**plan.settings, **settings}, program)) as model:
        answers: list[dict[str, Any]] = [
            model.request({"texts": one.texts, "tokens": one.tokens})[0] for one in found
        ]
    return [one["logprobs"] for one in answers]
