"""Responses whose body is JSON. Owns their content type; knows no dialect."""

import msgspec
from aiohttp import web


def json_response(content: object, status: int = 200) -> web.Response:
    """Return a response with a JSON body.

    Args:
        content: what becomes JSON; bytes are JSON already.
        status: the HTTP status.
    """
    body = content if isinstance(content, bytes) else msgspec.json.encode(content)
    return web.Response(body=body, status=status, content_type="application/json")
