"""Tools with requests in natural language: names, arguments and phrasings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A kind of tool, of which conversations offer variants with other names."""

    names: tuple[str, ...]
    """Possible names of the tool."""
    about: str
    """Its description."""
    slots: dict[str, tuple[tuple[str, ...], str]]
    """Argument, as requests name it in braces -> (its possible keys in a call, kind of value)."""
    requests: tuple[str, ...]
    """Requests of users, with arguments in braces."""


def _entry(names: str, about: str, slots: str, requests: str) -> Entry:
    """Read an entry: slots are written `slot:kind=key|key`, requests one a line."""
    parsed = {}
    for slot in slots.split():
        left, keys = slot.split("=")
        label, kind = left.split(":")
        parsed[label] = (tuple(keys.split("|")), kind)
    lines = tuple(line.strip() for line in requests.strip().splitlines())
    return Entry(tuple(names.split()), about, parsed, lines)


CATALOG: tuple[Entry, ...] = (
    _entry(
        "get_weather weather fetch_weather get_current_weather",
        "Get the weather of a city.",
        "a:city=city|location|place|town",
        """What is the weather in {a}?
        How is the weather in {a} today?
        What's the weather like in {a}?
        Tell me the weather in {a}.
        Is it raining in {a}?
        What is the weather like in {a} now?""",
    ),
    _entry(
        "get_forecast weather_forecast",
        "Get the weather forecast of a city for some days.",
        "a:city=city|location b:count=days|day_count",
        """What is the forecast for {a} for {b} days?
        Give me the forecast for {a} for the next {b} days.
        Show the {b} day forecast for {a}.""",
    ),
    _entry(
        "get_time current_time get_local_time",
        "Get the time in a city.",
        "a:city=city|location|place|timezone",
        """What time is it in {a}?
        Tell me the time in {a}.
        What is the time in {a} now?""",
    ),
    _entry(
        "set_timer start_timer",
        "Start a timer.",
        "a:count=minutes|duration",
        """Set a timer for {a} minutes.
        Start a timer of {a} minutes.
        Please set a timer for {a} minutes.""",
    ),
    _entry(
        "add add_numbers sum",
        "Add two numbers.",
        "a:number=a|x|first b:number=b|y|second",
        """Add {a} and {b}.
        What is {a} plus {b}?
        What is {a} + {b}?
        Compute the sum of {a} and {b}.""",
    ),
    _entry(
        "multiply multiply_numbers",
        "Multiply two numbers.",
        "a:number=a|x|first b:number=b|y|second",
        """Multiply {a} by {b}.
        What is {a} times {b}?
        Compute the product of {a} and {b}.""",
    ),
    _entry(
        "send_email send_mail",
        "Send an email.",
        "a:name=to|recipient b:text=text|body|message",
        """Send an email to {a} that says "{b}".
        Email {a}: {b}
        Write an email to {a} with the text "{b}".""",
    ),
    _entry(
        "send_message send_sms",
        "Send a short message.",
        "a:name=to|person|name b:text=text|message",
        """Send {a} the message "{b}".
        Tell {a} "{b}".
        Send a message to {a}: {b}""",
    ),
    _entry(
        "search web_search search_web",
        "Search the web.",
        "a:text=query|q|text",
        """Search for {a}
        Search the web for {a}
        Look up {a}
        Search for "{a}".""",
    ),
    _entry(
        "translate translate_word",
        "Translate a word into a language.",
        "a:noun=word|text b:noun=language|target",
        """Translate {a} into {b}.
        Translate "{a}" to {b}.
        How do you say {a} in {b}?""",
    ),
    _entry(
        "get_user find_user lookup_user",
        "Find a user by name.",
        "a:name=name|user|username",
        """Find the user {a}.
        Look up the user {a}.
        Get the user named {a}.""",
    ),
    _entry(
        "create_user add_user",
        "Create a user.",
        "a:name=name|username b:count=age",
        """Create a user named {a} of age {b}.
        Add the user {a}, age {b}.
        Create the user {a} who is {b} years old.""",
    ),
    _entry(
        "book_flight reserve_flight",
        "Book a flight.",
        "a:city=from|origin|departure b:city=to|destination|arrival",
        """Book a flight from {a} to {b}.
        I want to fly from {a} to {b}.
        Reserve a flight from {a} to {b}.""",
    ),
    _entry(
        "book_table reserve_table",
        "Book a table in a restaurant.",
        "a:noun=restaurant|place b:count=people|guests|seats",
        """Book a table for {b} people at {a}.
        Reserve a table at {a} for {b}.
        Book a table for {b} at {a}.""",
    ),
    _entry(
        "read_file open_file",
        "Read a file.",
        "a:id=path|file|name",
        """Read the file {a}
        Open the file {a}
        Show me the file {a}""",
    ),
    _entry(
        "delete_file remove_file",
        "Delete a file.",
        "a:id=path|file|name",
        """Delete the file {a}
        Remove the file {a}
        Please delete the file {a}""",
    ),
    _entry(
        "add_task create_task add_todo",
        "Add a task to the list.",
        "a:text=title|task|text",
        """Add the task {a}
        Create a task: {a}
        Add "{a}" to my tasks.""",
    ),
    _entry(
        "set_alarm create_alarm",
        "Set an alarm at an hour.",
        "a:count=hour|time",
        """Set an alarm at {a}.
        Wake me up at {a}.
        Set the alarm for {a}.""",
    ),
    _entry(
        "get_price price_of get_stock_price",
        "Get the price of a product.",
        "a:noun=product|item|name|symbol",
        """What is the price of {a}?
        How much does {a} cost?
        Get the price of {a}.""",
    ),
    _entry(
        "order order_item buy",
        "Order a product.",
        "a:count=count|quantity|amount b:noun=product|item",
        """Order {a} of {b}.
        Buy {a} pieces of {b}.
        I want to order {a} {b}.""",
    ),
    _entry(
        "play_song play_music",
        "Play a song.",
        "a:text=title|song|name",
        """Play the song {a}
        Play "{a}".
        I want to hear {a}""",
    ),
    _entry(
        "turn_on switch_on",
        "Turn on a device.",
        "a:noun=device|name",
        """Turn on the {a}.
        Switch on the {a}.
        Turn the {a} on.""",
    ),
    _entry(
        "get_distance distance",
        "Get the distance of two cities.",
        "a:city=from|start b:city=to|end",
        """How far is it from {a} to {b}?
        What is the distance from {a} to {b}?
        Get the distance between {a} and {b}.""",
    ),
    _entry(
        "convert_currency convert",
        "Convert an amount of money.",
        "a:number=amount|value b:noun=from|source c:noun=to|target",
        """Convert {a} {b} to {c}.
        How much is {a} {b} in {c}?
        Change {a} {b} into {c}.""",
    ),
    _entry(
        "get_status job_status",
        "Get the status of a job.",
        "a:id=id|job|job_id",
        """What is the status of {a}?
        Get the status of job {a}
        How is the job {a} doing?""",
    ),
    _entry(
        "get_capital capital_of",
        "Get the capital of a country.",
        "a:city=country|name",
        """What is the capital of {a}?
        Tell me the capital of {a}.
        Which city is the capital of {a}?""",
    ),
)
