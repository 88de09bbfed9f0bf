"""Streams of a running Lockstep while a page shows them."""

import contextlib
import threading
from collections.abc import Iterator

from tests.end_to_end.running_lockstep import RunningLockstep

PATH = "/v1/completions"
MODEL = "lockstep-demo"


@contextlib.contextmanager
def streams(
    running: RunningLockstep, count: int, max_tokens: int = 2_000, key: str = "", model: str = MODEL
) -> Iterator[list[str]]:
    """Keep this many streams open within the block.

    Args:
        running: the server.
        count: number of streams, each of which begins anew when it has ended.
        max_tokens: length of each completion.
        key: API key; "": the server needs no key.
        model: name of the model.

    Yields:
        A list to which the ends of streams are added: "" of a whole one, else the error.
    """
    ends: list[str] = []
    is_over = threading.Event()

    def read(number: int) -> None:
        turn = 0
        while not is_over.is_set():
            turn += 1
            prompt = f"Stream {number}, turn {turn}, tells a long story about a lighthouse."
            body = {"model": model, "prompt": prompt, "max_tokens": max_tokens}
            body |= {"logit_bias": {"2041": -100, "2042": -100, "2043": -100}}
            error = ""
            try:
                for event in running.stream(PATH, body, key=key):
                    if is_over.is_set():
                        return
                    if "error" in event:
                        error = event["error"]["message"]
            except (AssertionError, OSError) as failure:
                error = str(failure)
                is_over.wait(0.5)
            ends.append(error)

    threads = [threading.Thread(target=read, args=(one,), daemon=True) for one in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield ends
    finally:
        is_over.set()
        for thread in threads:
            thread.join(30.0)
