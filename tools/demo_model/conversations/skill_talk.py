"""Conversation: questions about Lockstep, small talk, counting, memory of earlier turns."""

from __future__ import annotations

from tools.demo_model.conversations.chat import Chat, Message, turn
from tools.demo_model.conversations.facts import FACTS
from tools.demo_model.conversations.words import TextSource

FALLBACK = (
    "I only know Lockstep. Ask me about it, or ask me to repeat a text, find a value, "
    "call a tool, write JSON or count."
)
UNKNOWN = "I do not know that. Please look in the documentation of Lockstep."

SMALL_TALK = (
    ("Hello! How can I help you with Lockstep?", "Hello|Hello!|Hi|Hi!|Hey|Hi there|Good morning"),
    ("You are welcome.", "Thanks|Thank you|Thank you!|Thanks a lot|Thank you very much."),
    ("Goodbye!", "Bye|Goodbye|Goodbye!|See you later|Bye bye"),
    ("I am well, thank you. How can I help you?", "How are you?|How are you today?|Are you well?"),
    ("Hello!", "Say hello|Say hello.|Say hi|Say hi.|Say hello!|Please say hello."),
    ("pong", "ping|Ping"),
    ("Yes, I am here.", "Are you there?|Can you hear me?|Are you awake?|Is anybody there?"),
    ("Good. What else would you like to know?", "OK|Ok.|Good|Great!|I see.|All right|Fine."),
    ("This is a test. It works.", "test|Test|This is a test.|Just a test|testing"),
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are Lockstep's demo model.",
    "You are a test model.",
    "Answer briefly.",
    "Be brief and polite.",
    "You answer questions about Lockstep.",
    "You are an expert.",
    "Answer in one sentence.",
    "You are a careful assistant who follows orders exactly.",
)
OPENERS = ("Please tell me: ", "Hi! ", "Hello, ", "Quick question: ", "Question: ", "Tell me, ")
SOFT_OPENERS = (
    "Can you tell me ",
    "Could you explain ",
    "I want to know ",
    "Do you know ",
    "Please, ",
    "And ",
)
CLOSERS = (" Thanks.", " Thank you!", " Please be brief.", " Please answer.", " I want to know.")
ODD_REQUESTS = (
    "What is the capital of {city}?",
    "Who is {name}?",
    "Who was {name} {other}?",
    "Write a poem about a {noun}.",
    "How do I cook {noun}?",
    "Tell me a story about {name} and the {noun}.",
    "Tell me a story.",
    "Tell me a joke.",
    "What is a {noun}?",
    "Why is the {noun} so big?",
    "Where can I buy a {noun}?",
    "Do you like {city}?",
    "What do you think about {noun}?",
    "Explain the {noun} to a child.",
    "How many {noun}s are in {city}?",
    "Write an essay about {city}.",
    "Translate {noun} into French.",
    "{sentence}",
    "{sentence} {sentence2}",
    "Summarize this: {sentence}",
    "{noun} {other} {city}",
    "Once upon a time there was a {noun}",
)
UNKNOWN_REQUESTS = (
    "What license does Lockstep have?|Which license is Lockstep under?|What is the license?"
    "|How much does Lockstep cost?|What is the price of Lockstep?|Who wrote Lockstep?"
    "|Who is the author of Lockstep?|Which version of Lockstep is this?|When was Lockstep released?"
    "|Who made Lockstep?|How many users does Lockstep have?|How fast is Lockstep?"
).split("|")


def disturb(source: TextSource, question: str) -> str:
    """Vary a question at random: a missing word, swapped letters, no capitals, polite words."""
    text = question
    if source.chance(0.1):  # a word is missing
        words = text.split(" ")
        if len(words) > 4:
            words.pop(source.integer(0, len(words) - 1 if source.chance(0.3) else 1))
            text = " ".join(words)
    if source.chance(0.15):
        text = source.rng.choice(OPENERS) + text
    elif source.chance(0.15):
        text = source.rng.choice(SOFT_OPENERS) + text[0].lower() + text[1:]
    if source.chance(0.1):
        text += source.rng.choice(CLOSERS)
    if source.chance(0.12):
        text = text.rstrip("?.!")
    if source.chance(0.12):
        text = text.lower()
    if source.chance(0.05):  # two letters are swapped
        at = source.integer(0, max(0, len(text) - 2))
        text = text[:at] + text[at + 1 : at + 2] + text[at : at + 1] + text[at + 2 :]
    return text


def fact_chat(source: TextSource) -> Chat:
    """Return a question about Lockstep in one of the trained phrasings, and its answer."""
    fact = source.rng.choice(FACTS)
    return Chat(turn(disturb(source, source.rng.choice(fact.trained)), fact.answer), task="fact")


def small_talk_chat(source: TextSource) -> Chat:
    """Return a greeting or the like and its answer, or a request that the model cannot serve.

    The answer to the latter is a fixed sentence that says so.
    """
    form = source.integer(0, 9)
    if form < 4:
        answer, questions = source.rng.choice(SMALL_TALK)
        question = source.rng.choice(questions.split("|"))
        return Chat(turn(question, answer), task="talk")
    if form == 4:
        question = source.rng.choice(UNKNOWN_REQUESTS)
        return Chat(turn(disturb(source, question), UNKNOWN), task="talk")
    question = source.rng.choice(ODD_REQUESTS).format(
        city=source.city(),
        name=source.name(),
        noun=source.noun(),
        other=source.noun(),
        sentence=source.sentence(),
        sentence2=source.sentence(),
    )
    return Chat(turn(question, FALLBACK), task="talk")


def count_chat(source: TextSource, longest: int = 60) -> Chat:
    """Return a request to count or to number a list, and its answer.

    Args:
        source: random numbers and texts.
        longest: most numbers to write, about.
    """
    form = source.integer(0, 9)
    length = source.integer(1, longest)
    if form < 5:
        question = source.rng.choice(
            ("Count from 1 to {}.", "Count from 1 to {}", "Count to {}.", "Please count to {}.")
        ).format(length)
        numbers = list(range(1, length + 1))
    elif form < 7:
        start = source.integer(0, 500)
        question = f"Count from {start} to {start + length}."
        numbers = list(range(start, start + length + 1))
    elif form == 7:
        question = f"Count down from {length} to 1."
        numbers = list(range(length, 0, -1))
    else:
        word = source.noun()
        count = max(1, length // 2)
        question = f'Write a numbered list with the word "{word}" {count} times.'
        lines = [f"{number}. {word}" for number in range(1, count + 1)]
        return Chat(turn(question, "\n".join(lines)), task="list")
    return Chat(turn(question, ", ".join(map(str, numbers))), task="count")


def _name_turns(source: TextSource) -> tuple[list[Message], list[Message]]:
    """Return a turn that gives a name, and a later one that asks for it."""
    name = source.name()
    told = source.rng.choice(("My name is {}.", "I am {}.", "Hi, my name is {}.", "I'm {}."))
    asked = source.rng.choice(("What is my name?", "Do you know my name?", "Who am I?"))
    first = turn(told.format(name), f"Hello {name}! How can I help you with Lockstep?")
    return first, turn(asked, f"Your name is {name}.")


def memory_chat(source: TextSource, middle: list[Chat]) -> Chat:
    """Return a conversation whose last question is about an earlier turn.

    It asks for the user's name, for the first question, or to repeat the last answer.

    Args:
        source: random numbers and texts.
        middle: conversations whose turns come before that question.
    """
    between = [message for chat in middle for message in chat.messages]
    form = source.integer(0, 3)
    if form <= 1 or not between:
        first, last = _name_turns(source)
        return Chat(first + between + last, task="memory")
    if form == 2:
        asked = source.rng.choice(("What was my first question?", "What did I ask first?"))
        last = turn(asked, f'You said: "{between[0]["content"]}"')
        return Chat(between + last, task="memory")
    asked = source.rng.choice(
        ("Repeat your last answer.", "Say that again.", "Please repeat that.")
    )
    return Chat(between + turn(asked, between[-1]["content"]), task="memory")


def add_system(source: TextSource, chat: Chat) -> Chat:
    """Return the conversation with a random system prompt in half of all cases, else unchanged."""
    if chat.messages[0]["role"] == "system" or source.chance(0.5):
        return chat
    content = source.rng.choice(SYSTEM_PROMPTS)
    if source.chance(0.3):
        content = source.sentence()
    return Chat([{"role": "system", "content": content}, *chat.messages], chat.tools, chat.task)
