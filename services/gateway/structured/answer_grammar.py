"""Grammar of a whole answer: reasoning first, then text or calls."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence

from services.gateway.conversation.constraint import Constraint
from services.gateway.conversation.conversation import Conversation, Tool, ToolChoice
from services.gateway.http.errors import ApiError, unsupported
from services.gateway.output.completion_parser import ReasoningFormat
from services.gateway.output.families import (
    HARMONY,
    REASONING_FORMATS,
    TOOL_FORMATS,
    OutputFormat,
)
from services.gateway.structured.call_grammars import (
    CallRules,
    has_raw_texts,
    write_calls,
)
from services.gateway.structured.grammar_validator import GrammarValidator
from services.gateway.structured.grammar_writer import GrammarWriter, quote
from services.gateway.structured.schema_choices import Unwritable
from services.gateway.structured.trials import Trials
from shared.messages import Grammar
from shared.model import tokenizer_json
from shared.model.grammars import is_special


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerWishes:
    """What a request demands of the form of its answers."""

    constraint: Constraint | None = None
    """Of the text; None: any text."""
    tools: Sequence[Tool] = ()
    """The tools that the model may call."""
    tool_choice: ToolChoice = dataclasses.field(default_factory=ToolChoice)

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a call."""
        return self.tool_choice.mode in ("required", "named")

    @property
    def must_match(self) -> bool:
        """Whether a request is refused if its answers cannot be held to a grammar.

        The form of a custom tool's text does not count: the tool's description has it too, so a
        model without a grammar knows what to write.
        """
        strict = any(tool.is_strict for tool in self.tools)
        return self.constraint is not None or self.must_call or strict

    @property
    def param(self) -> str:
        """The request field that demands a form, for errors."""
        if self.constraint is not None:
            return self.constraint.param
        return "tool_choice" if self.must_call else "tools"


@dataclasses.dataclass(frozen=True, slots=True)
class _Answer:
    """Grammar of a whole answer, as far as it has one."""

    start: str
    """Its expression."""
    begin_ids: Sequence[int] = ()
    """Ids after which it begins; (): at the first token."""
    barred_ids: Sequence[int] = ()
    """Ids that may not come before."""


def wishes_of(conversation: Conversation) -> AnswerWishes:
    """Return what a conversation demands of the form of its answers."""
    tools = conversation.callable_tools
    return AnswerWishes(conversation.constraint, tools, conversation.tool_choice)


class AnswerGrammars:
    """Makes the grammars of the served model's answers. Thread-safe."""

    def __init__(
        self,
        flagged_tokens: Mapping[str, int],
        added_tokens: Mapping[str, int],
        output_format: OutputFormat,
        end_ids: Sequence[int],
        *,
        can_match: bool = True,
        trials: Trials | None = None,
    ) -> None:
        """Prepare the checks.

        Args:
            flagged_tokens: ids of the added tokens that the tokenizer calls special, by text.
            added_tokens: ids of all tokens that were added to the vocabulary, by text.
            output_format: formats of the model's reasoning and calls.
            end_ids: ids that end the model's completions.
            can_match: the ranks can read the model's tokenizer.
            trials: where unknown grammars are compiled; None: its own.
        """
        self._can_match = can_match
        self._special = {
            text: token
            for text, token in added_tokens.items()
            if is_special(text, is_flagged=text in flagged_tokens)
        }
        self._added = added_tokens
        self._format = output_format
        form = TOOL_FORMATS.get(output_format.tool_format)
        self._has_raw_texts = form is not None and has_raw_texts(form)
        self._end_ids = list(end_ids)
        self._trials = trials or Trials()
        self._validator = GrammarValidator(self._special.values(), self._trials)

    def close(self) -> None:
        """End the processes in which grammars are tried, in the middle of a trial too."""
        self._trials.close()

    def raw(self, constraint: Constraint) -> Grammar:
        """Return the grammar of a completion that is no answer in a conversation.

        Raises:
            ApiError: 400 when the constraint cannot be matched.
        """
        self._validator.check_constraint(constraint)
        writer = GrammarWriter(self._special)
        text = writer.finish(_content(writer, constraint))
        self._validator.check(text, constraint.param)
        return self._grammar(text, constraint.param)

    def may_constrain(self, wishes: AnswerWishes) -> bool:
        """Return whether answers may have a grammar: for a demand, or for a custom tool's text."""
        has_text_form = any(tool.text_form is not None for tool in wishes.tools)
        return wishes.must_match or (has_text_form and self._has_raw_texts)

    def answer(self, wishes: AnswerWishes, prompt_tail: str) -> Grammar | None:
        """Return the grammar of an answer in a conversation; None: any text will do.

        Args:
            wishes: the request's demands.
            prompt_tail: the end of the rendered prompt, in which reasoning may have begun.

        Raises:
            ApiError: 400 that names the field which cannot be honoured; never if the wishes do not
                have to be met (`AnswerWishes.must_match`).
        """
        try:
            for check in self.checks(wishes):
                check()
            tools = [self._usable(tool) for tool in wishes.tools]
            usable = dataclasses.replace(wishes, tools=tools)
            return self._answer(usable, prompt_tail) if self.may_constrain(usable) else None
        except ApiError:
            if wishes.must_match:
                raise
            return None

    def _answer(self, wishes: AnswerWishes, prompt_tail: str) -> Grammar:
        writer = GrammarWriter(self._special)
        if self._format.reasoning_format == HARMONY:
            found = _Answer(self._harmony(writer, wishes))
        else:
            body = self._body(writer, wishes)
            found = self._after_reasoning(writer, body, prompt_tail, self._openings(wishes))
        text = writer.finish(found.start)
        self._validator.check(text, wishes.param)
        return self._grammar(text, wishes.param, found.begin_ids, found.barred_ids)

    def _grammar(
        self, text: str, param: str, begin_ids: Sequence[int] = (), barred_ids: Sequence[int] = ()
    ) -> Grammar:
        if not self._can_match:
            raise unsupported(
                param,
                "the form of answers cannot be enforced with this model, which has no "
                f"{tokenizer_json.FILE}: use a conversion of the model that has one.",
            )
        if not self._end_ids:
            raise unsupported(param, "the model names no token that ends its answers.")
        return Grammar(
            text=text,
            end_ids=self._end_ids,
            begin_ids=list(begin_ids),
            barred_ids=list(barred_ids),
        )

    def _openings(self, wishes: AnswerWishes) -> tuple[str, ...]:
        """Return the markers at which the parser reads calls, also inside reasoning."""
        form = TOOL_FORMATS.get(self._format.tool_format) if wishes.tools else None
        return () if form is None else tuple(form.openings)

    def checks(self, wishes: AnswerWishes) -> list[Callable[[], object]]:
        """Return the checks that `answer` makes first, one for each part of a request.

        Their outcomes are remembered. Where others should have turns between them, they are called
        before `answer`; each raises as it does.
        """
        check = self._validator
        checks: list[Callable[[], object]] = []
        if wishes.constraint is not None:
            checks.append(functools.partial(check.check_constraint, wishes.constraint))
        for tool in wishes.tools:
            if tool.is_strict and tool.parameters is not None:
                checks.append(functools.partial(check.check_schema, tool.parameters, tool.param))
            if tool.text_form is not None:
                checks.append(functools.partial(check.can_match, tool.text_form))
        return checks

    def _usable(self, tool: Tool) -> Tool:
        """Return a tool without a form of its text that cannot be compiled: it is a description."""
        form = tool.text_form
        if form is None or self._validator.can_match(form):
            return tool
        return dataclasses.replace(tool, text_form=None)

    def _body(self, writer: GrammarWriter, wishes: AnswerWishes) -> str:
        """Return the expression of an answer after its reasoning."""
        content = None if wishes.constraint is None else _content(writer, wishes.constraint)
        if wishes.must_call:
            return self._calls_only(writer, self._calls(writer, wishes), wishes)
        if content is None:
            calls = self._calls(writer, wishes)
            if not calls.opening:
                only = self._calls_only(writer, calls, wishes)
                other = rf"/([^\{calls.first}\s](.|\n)*)?/"
                return writer.rule(f"{only} | {other}")
            # A call at any other place than behind this marker would have no grammar.
            plain = _text_without(writer, self._openings(wishes))
            if not wishes.must_match:
                # Nothing else was asked for: text may follow a call, and a quoted marker is text.
                quoted = quote("`")
                one = f"{writer.up_to(calls.opening, plain)} ({calls.rest} | {quoted})"
                return f"{writer.rule(one)}* {plain}"
            first = f"{writer.up_to(calls.opening, plain)} {calls.rest}"
            return writer.rule(f"{plain} | {first} {self._more(writer, calls, wishes)}")
        if wishes.tools and self._format.has_tool_calls:
            calls = self._calls(writer, wishes)
            return writer.rule(f"{content} | {self._calls_only(writer, calls, wishes)}")
        return content

    def _calls(self, writer: GrammarWriter, wishes: AnswerWishes) -> CallRules:
        """Add the rules of the calls that an answer may or must have."""
        tools = list(wishes.tools)
        if wishes.tool_choice.mode == "named":
            tools = [tool for tool in tools if tool.name == wishes.tool_choice.name]
        name = self._format.tool_format
        form = TOOL_FORMATS.get(name)
        several = wishes.tool_choice.may_call_several
        rules, cause = None, ""
        try:
            rules = None if form is None else write_calls(writer, form, tools, several=several)
        except Unwritable as error:
            cause = f" by {error} in a schema"
        if rules is None:
            raise unsupported(
                "tool_choice" if wishes.must_call else "tools",
                f"calls in the format of this model ({name}) cannot be constrained{cause}: use the "
                "tool_choice auto, and tools that are not strict.",
            )
        return rules

    def _calls_only(self, writer: GrammarWriter, calls: CallRules, wishes: AnswerWishes) -> str:
        """Return the expression of one call or section, or of several."""
        first = f"{writer.literal(calls.opening)} {calls.rest}" if calls.opening else calls.rest
        return writer.rule(f"{first} {self._more(writer, calls, wishes)}")

    def _more(self, writer: GrammarWriter, calls: CallRules, wishes: AnswerWishes) -> str:
        if not wishes.tool_choice.may_call_several or not calls.opening:
            return writer.space
        again = writer.rule(f"{writer.space} {writer.literal(calls.opening)} {calls.rest}")
        return f"{again}* {writer.space}"

    def _after_reasoning(
        self, writer: GrammarWriter, body: str, prompt_tail: str, openings: Sequence[str]
    ) -> "_Answer":
        """Return the expression of a whole answer, and where it begins.

        Args:
            writer: gets the rules.
            body: expression of the answer after its reasoning.
            prompt_tail: the end of the rendered prompt.
            openings: markers of calls, which would end the reasoning.
        """
        reasoning = REASONING_FORMATS.get(self._format.reasoning_format)
        if reasoning is None or _is_over(reasoning, prompt_tail):
            return _Answer(body)
        closing = reasoning.closing
        is_open = reasoning.is_open(prompt_tail)
        if is_open and closing in self._added and all(one in self._added for one in openings):
            # Nothing is computed for reasoning in which a few ids alone are not allowed.
            barred_ids = [self._added[one] for one in openings]
            return _Answer(f"{writer.space} {body}", [self._added[closing]], barred_ids)
        thoughts = writer.up_to(closing, _text_without(writer, openings))
        if is_open:
            return _Answer(f"{thoughts} {writer.space} {body}")
        # GLM writes a line end first.
        opening = f"{writer.space} {writer.literal(reasoning.opening)}"
        thought = writer.rule(f"{opening} {thoughts} {writer.space}")
        return _Answer(f"{thought}? {body}")

    def _harmony(self, writer: GrammarWriter, wishes: AnswerWishes) -> str:
        """Return the expression of an answer in Harmony's channels."""
        literal = writer.literal
        analysis = writer.rule(
            f'{literal("<|channel|>")} "analysis" {literal("<|message|>")} {writer.free_text} '
            f'{literal("<|end|>")} {literal("<|start|>")} "assistant"'
        )
        final = f'{literal("<|channel|>")} "final" '
        if wishes.constraint is not None:
            kind = f'(" "? {literal("<|constrain|>")} "json")? {literal("<|message|>")}'
            final += f"{kind} {_content(writer, wishes.constraint)}"
        else:
            final += f"{literal('<|message|>')} {writer.free_text}"
        options = [] if wishes.must_call else [writer.rule(final)]
        if wishes.tools:
            calls = self._calls(writer, wishes)
            options.append(writer.rule(f"{literal(calls.opening)} {calls.rest}"))
        return f"{analysis}* {writer.rule(' | '.join(options))}"


def _is_over(reasoning: ReasoningFormat, prompt_tail: str) -> bool:
    """Return whether a prompt ends behind reasoning, which its template has switched off."""
    return prompt_tail.rstrip().endswith(reasoning.closing.strip())


def _text_without(writer: GrammarWriter, markers: Sequence[str]) -> str:
    """Return the expression of free text in which no marker stands."""
    if not markers:
        return writer.free_text
    return writer.text_without("|".join(map(re.escape, markers)))


def _content(writer: GrammarWriter, constraint: Constraint) -> str:
    match constraint.kind:
        case "json_schema":
            return writer.add_json(constraint.value)
        case "regex":
            return writer.add_regex(constraint.value)
        case "choice":
            return writer.choice(constraint.value)
        case "lark":
            return writer.add_lark(constraint.value)
