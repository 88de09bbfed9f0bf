"""`lockstep bench accuracy`: errors of log probabilities, and the influence of other rows on them.

A rank without a scheduler continues texts of random words greedily, side by side. The texts have
uneven lengths, and all are read before the first decode; a smaller batch has the first ones of a
larger one, so other texts are compared in it. Contenders are the same model under other
settings, each in a process of its own. Up to COMPARED_TEXTS of each batch, in slots far apart, are
read again by mlx-lm's own code with the same weights as float32, on one rank; then tokens are given
and none is drawn. Quantized weights stay quantized, so the errors are those of the computation, not
of the quantization. `mlx-lm` is its own code in the data type of the first contender, for the
tokens which that one has drawn: each text alone, token by token.

- error_mean, error_max: differences of the log probabilities of drawn tokens from those of float32,
  in nats.
- other_tokens: the part of drawn tokens that are not the likeliest ones with float32.
- other_bits: the part of log probabilities with other bits than those of the same text that the
  contender continues alone; after another token all. 0: the other rows have no influence.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

import click

from services.commands.bench.fake_ranks.rank_processes import RankProcesses
from services.commands.bench.flags import compare_option, numbers_option
from services.commands.bench.flags import number_option as number
from services.commands.bench.load.prompts import PromptGenerator
from services.commands.bench.measuring.processes import last_line, print_progress
from services.commands.bench.measuring.report import Case, Report
from services.commands.bench.measuring.row_lengths import uneven_lengths
from services.commands.bench.parts.worlds import (
    LOCKSTEP,
    WorldsPlan,
    check_settings,
    start_ranks,
    started_worlds,
)
from shared.errors import UnavailableError

COLUMNS = ["error_mean", "error_max", "other_tokens", "other_bits"]
COMPARED_TEXTS = 8
MLX_LM = "mlx-lm"
"""Name of the contender that is mlx-lm's own code."""
_FLOAT32 = {"LOCKSTEP_MODEL_DTYPE": "float32", "MLX_ENABLE_TF32": "0"}
"""On some GPUs MLX multiplies float32 matrices as TF32, with 10 bits of fraction, unless the second
variable is 0."""

Key = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids of a text, and of its continuation."""


class AccuracyPlan(WorldsPlan, frozen=True, kw_only=True):
    """Parameters of one run of `lockstep bench accuracy`, from its command line."""

    batches: list[int]
    """Numbers of texts that are continued side by side."""
    prompt_tokens: int
    """Tokens of the longest text."""
    new_tokens: int
    """Tokens of each continuation."""


OPTIONS: list[click.Parameter] = [
    numbers_option("--batches", "Numbers of texts side by side", "1,16,64", quick="1,4"),
    number("--prompt-tokens", "Tokens of the longest text", 256, quick=64),
    number("--new-tokens", "Tokens of each continuation", 32, quick=8),
    numbers_option("--ranks", "Numbers of ranks that share the model", "1"),
    compare_option("Measure also with these settings, for example rank_worker.kv_bits=8"),
]
"""Options of this benchmark."""


class Reading(NamedTuple):
    """Natural-log probabilities of the tokens of a continuation, and the likeliest tokens there."""

    logprobs: Sequence[float]
    likeliest: Sequence[int]


class Continuation(NamedTuple):
    """Tokens that are drawn after a text; they are the likeliest ones of their contender."""

    text: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    """The natural-log probability of each token."""

    @property
    def key(self) -> Key:
        """Equal for continuations of the same text with the same tokens."""
        return tuple(self.text), tuple(self.tokens)


class _Compared(NamedTuple):
    """The compared continuations of one contender, batch and repeat."""

    case: Case
    contender: str
    continuations: Sequence[Continuation]


def measure(plan: AccuracyPlan, report: Report) -> None:
    """Measure errors of a model's log probabilities by batch, and of all contenders.

    Args:
        plan: the parameters of the benchmark.
        report: gets one case per batch, and a note for each measurement that is not possible.

    Raises:
        ConfigError: a setting is wrong.
        UnavailableError: a rank does not start, or nothing could be measured.
        UsageError: texts are too short to be uneven, or the model has no tokenizer.
    """
    check_settings(plan)
    lengths = uneven_lengths(max(plan.batches), plan.prompt_tokens)
    prompts = PromptGenerator(plan.model)
    found: list[_Compared] = []
    with started_worlds(plan, report) as worlds:
        report.settings |= {"prompt_tokens": plan.prompt_tokens, "new_tokens": plan.new_tokens}
        cases = [Case(conditions={"batch": batch}) for batch in plan.batches]
        report.cases += cases
        for repeat in range(plan.repeats):
            texts = [prompts.token_prompt(length) for length in lengths]
            for name, ranks in worlds.items():
                print_progress(f"repeat {repeat + 1}: {name}")
                found += _continue_texts(plan, report, (name, ranks), cases, texts)
        report.cases = [case for case in cases if case.series]
        kind = worlds[LOCKSTEP].descriptions[0]["kind"]
    if kind == "cpu":
        report.notes.append(
            'On a CPU model.dtype "auto" is float32: --set model.dtype=bfloat16 measures 16 bits.'
        )
    _add_errors(plan, report, found)


def _continue_texts(
    plan: AccuracyPlan,
    report: Report,
    contender: tuple[str, RankProcesses],
    cases: Sequence[Case],
    texts: Sequence[list[int]],
) -> list[_Compared]:
    """Have a contender continue texts in each batch and alone, and add `other_bits`."""
    name, ranks = contender
    found = []
    alone: dict[int, Continuation] = {}
    for case, batch in zip(cases, plan.batches, strict=True):
        places = compared_places(batch)
        try:
            beside = _continue(plan, ranks, texts[:batch])
            for place in places:
                if place not in alone:
                    (alone[place],) = _continue(plan, ranks, [texts[place]])
        except UnavailableError as error:
            note = f"{name} was not measured in batch {batch}: {last_line(error)}"
            report.notes += [] if note in report.notes else [note]
            continue
        other = [other_bits(alone[place], beside[place]) for place in places]
        case.add(name, {"other_bits": sum(other) / len(other)})
        found.append(_Compared(case, name, [beside[place] for place in places]))
    return found


def _continue(
    plan: AccuracyPlan, ranks: RankProcesses, texts: Sequence[list[int]]
) -> list[Continuation]:
    """Return a contender's continuations of texts side by side.

    Raises:
        UnavailableError: they do not fit, or a rank has ended.
    """
    answer = ranks.request({"texts": texts, "new_tokens": plan.new_tokens})[0]
    if "refused" in answer:
        raise UnavailableError(answer["refused"])
    parts = zip(texts, answer["tokens"], answer["logprobs"], strict=True)
    return [Continuation(*part) for part in parts]


def compared_places(batch: int) -> range:
    """Return the slots whose texts are compared: the first and others at equal distances."""
    return range(0, batch, max(1, -(-batch // COMPARED_TEXTS)))


def other_bits(alone: Continuation, beside: Continuation) -> float:
    """Return the part of log probabilities of one continuation that the other one does not have.

    Args:
        alone: a continuation.
        beside: another one of the same text. From its first other token on nothing is equal.
    """
    equal = 0
    for token, other_token, one, other in zip(
        alone.tokens, beside.tokens, alone.logprobs, beside.logprobs, strict=True
    ):
        if token != other_token:
            break
        equal += one == other
    return 1 - equal / len(alone.tokens)


def _add_errors(plan: AccuracyPlan, report: Report, found: Sequence[_Compared]) -> None:
    """Add the errors of all contenders and of mlx-lm's own code to the cases."""
    exact = _read_again(plan, report, "the float32 reference", _FLOAT32, found)
    if not exact:
        report.notes.append("Without it there are no errors: measure a smaller model.")
        return
    own_code = [one for one in found if one.contender == LOCKSTEP]
    own = _read_again(plan, report, MLX_LM, {}, own_code)
    for case, name, continuations in found:
        pairs = [(exact[one.key], Reading(one.logprobs, one.tokens)) for one in continuations]
        case.add(name, _errors(pairs))
    for case, _, continuations in own_code if own else []:
        case.add(MLX_LM, _errors([(exact[one.key], own[one.key]) for one in continuations]))
    for case in report.cases:
        for name in case.series:
            if name != MLX_LM:
                case.add_ratios(name, MLX_LM, "error_mean")


def _errors(pairs: Iterable[tuple[Reading, Reading]]) -> dict[str, float]:
    """Return the metrics of readings, each with the reading of float32 before it."""
    errors: list[float] = []
    others: list[bool] = []
    for exact, found in pairs:
        errors += map(abs, map(operator.sub, exact.logprobs, found.logprobs))
        others += map(operator.ne, exact.likeliest, found.likeliest)
    return {
        "error_mean": sum(errors) / len(errors),
        "error_max": max(errors),
        "other_tokens": sum(others) / len(others),
    }


def _read_again(
    plan: AccuracyPlan,
    report: Report,
    name: str,
    settings: Mapping[str, str],
    found: Sequence[_Compared],
) -> dict[Key, Reading]:
    """Return how mlx-lm's own code reads continuations; {}: it does not start, as a note says."""
    distinct = {one.key: one for each in found for one in each.continuations}
    print_progress(f"{name}: reading {len(distinct)} continuations")
    program = "fake_ranks.reference_model"
    try:
        ranks = start_ranks(plan, name.replace(" ", "-"), 1, {**plan.settings, **settings}, program)
        with closing(ranks):
            answers = [
                ranks.request({"text": one.text, "tokens": one.tokens})[0]
                for one in distinct.values()
            ]
    except UnavailableError as error:
        report.notes.append(f"{name} was not measured: {last_line(error)}")
        return {}
    return {key: Reading(**one) for key, one in zip(distinct, answers, strict=True)}
