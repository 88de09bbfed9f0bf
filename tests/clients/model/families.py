# ruff: noqa: RUF001  # DeepSeek's markers have full-width bars
"""Families of models: tokenizer, chat template and what an answer looks like.

Owns the forms that real models of a family have, small; knows no script.
"""

import json
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from tests.clients.model.script import Call, Step
from tests.gateway import tiny_tokenizer
from tests.unit.gateway.tokenizing import rank_files
from tests.unit.gateway.tokenizing.test_loading import KIMI_PATTERN

HAS_ALL_PAIRS = os.environ.get("LOCKSTEP_CLIENTS") == "all"
"""All clients meet all families, and not each of them some. Set by `make clients`."""
_TEXT = [
    "Read the file, change it, run the command and report what you found in it. You are an agent.",
    '{"type": "function", "function": {"name": "x", "description": "The path of the file."}}',
    '{"parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}',
    "Use this tool when you need to; do not use it for anything else.\n\n- one\n- two\n",
] * 20


class Family(ABC):
    """One family of models."""

    name: str
    """The name of its format of tool calls, and of its template here."""
    model_type: str
    openings: tuple[str, ...]
    """The ends that prompts may have, where the model begins."""
    message_start: str = ""
    """The token at which messages begin, if the model may open several messages in one answer."""
    added: tuple[str, ...]
    """The tokens that are text for its tokenizer and marks for its template."""
    special: tuple[str, ...] = ()
    """The marks of its template that are special tokens."""
    tools_token: str
    """A token of prompts with tools, which no other prompt has."""
    stops: tuple[str, ...] = ("<|im_end|>", "<|endoftext|>")
    """Tokens that end an answer."""

    def write_tokenizer(self, folder: Path, words: list[str]) -> None:
        """Write the tokenizer's files and the chat template.

        Args:
            folder: the model's folder.
            words: further tokens.
        """
        added = [*self.added, *words]
        tokenizer = tiny_tokenizer.train_byte_level(_TEXT, vocab_size=800, added=added)
        tokenizer.add_special_tokens([*self.special, *self.stops])
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.stops[0]}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "chat_template.jinja").write_text(self.template)

    @property
    def template(self) -> str:
        """The text of its chat template."""
        return (Path(__file__).parent / "templates" / f"{self.name}.jinja").read_text()

    @abstractmethod
    def answer(self, step: Step) -> str:
        """Return what the model writes after an opening, with the token that ends it."""


class Hermes(Family):
    """Qwen3: calls are JSON in tags, thoughts come first."""

    name = "hermes"
    model_type = "qwen3"
    openings = ("<|im_start|>assistant\n",)
    tools_token = "<tools>"
    added = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tools>")

    def answer(self, step: Step) -> str:
        thoughts = f"<think>\n{step.reasoning}\n</think>\n\n" if step.reasoning else ""
        call = f"\n<tool_call>\n{self._call(step.call)}\n</tool_call>" if step.call else ""
        return f"{thoughts}{step.text}{call}<|im_end|>"

    @staticmethod
    def _call(call: Call) -> str:
        return _json({"name": call.name, "arguments": call.arguments})


class QwenXml(Family):
    """Qwen3-Coder: calls are tags, values are raw text, no thoughts."""

    name = "qwen_xml"
    model_type = "qwen3_moe"
    openings = ("<|im_start|>assistant\n",)
    tools_token = "<tools>"
    added = ("<tool_call>", "</tool_call>", "<tools>")

    def answer(self, step: Step) -> str:
        if step.call is None:
            return f"{step.text}<|im_end|>"
        values = "".join(
            f"<parameter={name}>\n{_raw(value)}\n</parameter>\n"
            for name, value in step.call.arguments.items()
        )
        call = f"<tool_call>\n<function={step.call.name}>\n{values}</function>\n</tool_call>"
        return f"{step.text}\n\n{call}<|im_end|>"


class Glm(Family):
    """GLM 4.5 to 4.7: keys and values in tags; each role's token also ends an answer."""

    name = "glm"
    model_type = "glm4_moe"
    openings = ("<|assistant|>",)
    tools_token = "<tools>"
    stops = ("<|endoftext|>", "<|user|>", "<|observation|>")
    added = (
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tools>", "[gMASK]", "<sop>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|system|>", "<|assistant|>"),
    )

    def answer(self, step: Step) -> str:
        start = f"\n<think>{step.reasoning}</think>\n{step.text}"
        if step.call is None:
            return f"{start}<|user|>"
        pairs = "".join(
            f"<arg_key>{name}</arg_key>\n<arg_value>{_raw(value)}</arg_value>\n"
            for name, value in step.call.arguments.items()
        )
        return f"{start}\n<tool_call>{step.call.name}\n{pairs}</tool_call><|observation|>"


class KimiK2(Family):
    """Kimi K2: a tiktoken.model, and calls between tokens of their own, with ids."""

    name = "kimi_k2"
    model_type = "kimi_k25"
    openings = ("<|im_assistant|>assistant<|im_middle|>",)
    tools_token = "tool_declare"
    stops = ("<|im_end|>", "[EOS]")
    added = (
        *("<|tool_calls_section_end|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"),
        "tool_declare",
    )

    def __init__(self) -> None:
        self._calls = 0

    def write_tokenizer(self, folder: Path, words: list[str]) -> None:
        rank_files.write_kimi(folder, KIMI_PATTERN)
        (folder / "config.json").unlink()
        config = json.loads((folder / "tokenizer_config.json").read_text())
        first = len(rank_files.ranks(KIMI_PATTERN)) + 20
        for number, word in enumerate([*self.added, *words], first):
            config["added_tokens_decoder"][str(number)] = {"content": word, "special": False}
        del config["auto_map"]
        (folder / "tokenization_kimi.py").unlink()
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "chat_template.jinja").write_text(self.template)

    def answer(self, step: Step) -> str:
        if step.call is None:
            return f"{step.text}<|im_end|>"
        arguments = _json(step.call.arguments)
        call_id = f"functions.{step.call.name}:{self._calls}"
        self._calls += 1
        return (
            f"{step.text}<|tool_calls_section_begin|><|tool_call_begin|>{call_id}"
            f"<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
            "<|tool_calls_section_end|><|im_end|>"
        )


class GptOss(Family):
    """gpt-oss: an answer is several messages in channels, which the model opens itself."""

    name = "harmony"
    model_type = "gpt_oss"
    openings = ("<|start|>assistant",)
    message_start = "<|start|>"
    added = ("namespace functions",)
    special = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>")
    tools_token = "namespace functions"
    stops = ("<|return|>", "<|call|>", "<|endoftext|>")

    def answer(self, step: Step) -> str:
        messages = [f"analysis<|message|>{step.reasoning}<|end|>"] if step.reasoning else []
        if step.call is None:
            messages.append(f"final<|message|>{step.text}<|return|>")
        else:
            header = f"commentary to=functions.{step.call.name} <|constrain|>json"
            messages.append(f"commentary<|message|>{step.text}<|end|>")
            messages.append(f"{header}<|message|>{_json(step.call.arguments)}<|call|>")
        return "<|start|>assistant".join(f"<|channel|>{message}" for message in messages)


class DeepSeekV3(Family):
    """DeepSeek V3.1: after a tool's result the model goes on without a word of the template."""

    name = "deepseek_v3"
    model_type = "deepseek_v3"
    openings = ("<｜Assistant｜></think>", "<｜tool▁output▁end｜>")
    added = (
        *(
            "<think>",
            "</think>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁sep｜>",
        ),
        *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁output▁begin｜>"),
        *("<｜tool▁output▁end｜>", "## Tools that you can call"),
    )
    special = ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
    tools_token = "## Tools that you can call"
    stops = ("<｜end▁of▁sentence｜>",)

    def answer(self, step: Step) -> str:
        if step.call is None:
            return f"{step.text}<｜end▁of▁sentence｜>"
        call = f"{step.call.name}<｜tool▁sep｜>{_json(step.call.arguments)}"
        return (
            f"{step.text}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
        )


class MiniMaxM2(Family):
    """MiniMax M2: the prompt has opened the thoughts; calls are tags with raw values."""

    name = "minimax"
    model_type = "minimax"
    openings = ("]~b]ai\n<think>\n",)
    added = ("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>", "<tools>")
    special = ("]~!b[", "]~b]")
    tools_token = "<tools>"
    stops = ("[e~[",)

    def answer(self, step: Step) -> str:
        start = f"{step.reasoning}\n</think>\n\n{step.text}"
        if step.call is None:
            return f"{start}[e~["
        values = "".join(
            f'<parameter name="{name}">{_raw(value)}</parameter>\n'
            for name, value in step.call.arguments.items()
        )
        call = f'<invoke name="{step.call.name}">\n{values}</invoke>'
        return f"{start}\n<minimax:tool_call>\n{call}\n</minimax:tool_call>[e~["


class Mistral(Family):
    """Mistral Small 4: roles must take turns; a question or a result opens the answer."""

    name = "mistral"
    model_type = "mistral4"
    openings = ("[/INST]", "[/TOOL_RESULTS]")
    added = ()
    special = (
        *("<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
        *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]"),
        *("[THINK]", "[/THINK]"),
    )
    tools_token = "[AVAILABLE_TOOLS]"
    stops = ("</s>",)

    def answer(self, step: Step) -> str:
        thoughts = f"[THINK]{step.reasoning}[/THINK]" if step.reasoning else ""
        call = ""
        if step.call is not None:
            call = f"[TOOL_CALLS]{step.call.name}[ARGS]{_json(step.call.arguments)}"
        return f"{thoughts}{step.text}{call}</s>"


class Llama3(Family):
    """Llama 3: an answer is text or the JSON of one call, which no marker announces."""

    name = "llama3"
    model_type = "llama"
    openings = ("<|start_header_id|>assistant<|end_header_id|>\n\n",)
    added = ("Environment: ipython",)
    special = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
    tools_token = "Environment: ipython"
    stops = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")

    def answer(self, step: Step) -> str:
        if step.call is None:
            return f"{step.text}<|eot_id|>"
        call = _json({"name": step.call.name, "parameters": step.call.arguments})
        return f"{call}<|eot_id|>"


class Gemma4(Family):
    """Gemma 4: calls are no JSON, and results stand within the model's turn."""

    name = "gemma4"
    model_type = "gemma4_text"
    openings = (
        *("<|turn>model\n<|channel>thought\n<channel|>", "<|turn>model\n", "<tool_response|>"),
        # After a text, which the template puts behind the results.
        "<turn|>\n",
    )
    added = ()
    special = (
        *("<bos>", "<|turn>", "<|channel>", "<channel|>", "<|tool>", "<tool|>", "<|tool_call>"),
        *("<tool_call|>", "<tool_response|>", '<|"|>'),
    )
    tools_token = "<|tool>"
    stops = ("<turn|>", "<|tool_response>", "<eos>")

    def answer(self, step: Step) -> str:
        if step.call is None:
            return f"{step.text}<turn|>"
        values = ",".join(
            f"{name}:{self._value(value)}" for name, value in sorted(step.call.arguments.items())
        )
        call = f"call:{step.call.name}{{{values}}}"
        return f"{step.text}<|tool_call>{call}<tool_call|><|tool_response>"

    def _value(self, value: Any) -> str:
        if isinstance(value, str):
            return f'<|"|>{value}<|"|>'
        if isinstance(value, list):
            return f"[{','.join(map(self._value, value))}]"
        return json.dumps(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def families() -> list[Family]:
    """Return one of each format of tool calls that is tried."""
    return [
        *(Hermes(), QwenXml(), Glm(), KimiK2(), GptOss()),
        *(DeepSeekV3(), MiniMaxM2(), Mistral(), Llama3(), Gemma4()),
    ]
