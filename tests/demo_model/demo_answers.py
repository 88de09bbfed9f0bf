"""Answers of the demo model through mlx_lm: greedy, in batches, with the model's chat template."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import batch_generate
from mlx_lm.models.cache import make_prompt_cache

from tools.demo_model.conversations.chat import Chat, Message, expected_answer


@dataclass(frozen=True)
class DemoModel:
    """The model and its tokenizer."""

    model: Any
    tokenizer: Any

    @classmethod
    def load(cls, folder: Path) -> DemoModel:
        """Load the checkpoint unchanged."""
        model, tokenizer, *_ = mlx_lm.load(str(folder))
        return cls(model, tokenizer)

    def prompt(self, chat: Chat) -> list[int]:
        """Return the token ids of a conversation before its last answer."""
        ids: list[int] = self.tokenizer.apply_chat_template(
            chat.messages[:-1], tools=chat.tools or None, add_generation_prompt=True
        )
        return ids

    def answers_with_shared_prefix(self, chats: list[Chat]) -> list[str]:
        """Return the answers of conversations with a common beginning, which is prefilled only
        once."""
        prompts = [self.prompt(chat) for chat in chats]
        columns = enumerate(zip(*prompts, strict=False))
        shared_tokens = next(position for position, ids in columns if len({*ids}) > 1)
        cache = make_prompt_cache(self.model)
        self.model(mx.array([prompts[0][:shared_tokens]]), cache=cache)
        return batch_generate(
            self.model,
            self.tokenizer,
            [prompt[shared_tokens:] for prompt in prompts],
            prompt_caches=[copy.deepcopy(cache) for _ in prompts],
            max_tokens=40,
        ).texts

    def answers(self, chats: list[Chat], batch: int = 16) -> list[str]:
        """Return the text that the model generates in place of the last answer of each
        conversation.

        The limit is eight tokens over the expected length, so that an answer without an end token
        differs from the expected one.
        """
        texts: list[str] = []
        for start in range(0, len(chats), batch):
            batch_chats = chats[start : start + batch]
            limits = [len(self.tokenizer.encode(expected_answer(chat))) + 8 for chat in batch_chats]
            prompts = [self.prompt(chat) for chat in batch_chats]
            texts += batch_generate(self.model, self.tokenizer, prompts, max_tokens=limits).texts
        return texts


def report_accuracy(name: str, is_correct: list[bool], started_s: float) -> float:
    """Print and return the share of correct answers.

    Args:
        name: name of the skill.
        is_correct: for each answer whether it is correct.
        started_s: start of the measurement, from `time.perf_counter()`.
    """
    accuracy = sum(is_correct) / len(is_correct)
    seconds = time.perf_counter() - started_s
    print(
        f"{name}: {sum(is_correct)} of {len(is_correct)} right ({accuracy:.1%}) in {seconds:.1f} s"
    )
    return accuracy


def split_at_answers(chat: Chat) -> list[Chat]:
    """Return one conversation for each answer of the assistant, ending with that answer."""
    messages: list[Message] = chat.messages
    answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    return [Chat(messages[: n + 1], chat.tools, chat.task) for n in answers]
