"""Asks the demo model through mlx_lm: greedy, in batches, with its own chat template."""

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

from tools.demo_model.chat import Chat, Message, expected_answer


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
        """The token ids before the last answer of the conversation."""
        ids: list[int] = self.tokenizer.apply_chat_template(
            chat.messages[:-1], tools=chat.tools or None, add_generation_prompt=True
        )
        return ids

    def answers_with_shared_prefix(self, chats: list[Chat]) -> list[str]:
        """The answers of conversations that begin alike; what they share is read only once."""
        prompts = [self.prompt(chat) for chat in chats]
        shared = next(at for at, ids in enumerate(zip(*prompts, strict=False)) if len({*ids}) > 1)
        cache = make_prompt_cache(self.model)
        self.model(mx.array([prompts[0][:shared]]), cache=cache)
        return batch_generate(
            self.model,
            self.tokenizer,
            [prompt[shared:] for prompt in prompts],
            prompt_caches=[copy.deepcopy(cache) for _ in prompts],
            max_tokens=40,
        ).texts

    def answers(self, chats: list[Chat], batch: int = 16) -> list[str]:
        """What the model writes instead of the last answer of every conversation.

        It may write eight tokens more than it should, so an answer without an end is wrong.
        """
        texts: list[str] = []
        for at in range(0, len(chats), batch):
            some = chats[at : at + batch]
            limits = [len(self.tokenizer.encode(expected_answer(chat))) + 8 for chat in some]
            prompts = [self.prompt(chat) for chat in some]
            texts += batch_generate(self.model, self.tokenizer, prompts, max_tokens=limits).texts
        return texts


def report_accuracy(name: str, right: list[bool], began: float) -> float:
    """Print and return the rate of right answers."""
    rate = sum(right) / len(right)
    seconds = time.perf_counter() - began
    print(f"{name}: {sum(right)} of {len(right)} right ({rate:.1%}) in {seconds:.1f} s")
    return rate


def split_at_answers(chat: Chat) -> list[Chat]:
    """One conversation for every answer of the assistant: all that was said up to it."""
    messages: list[Message] = chat.messages
    ends = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    return [Chat(messages[: at + 1], chat.tools, chat.task) for at in ends]
