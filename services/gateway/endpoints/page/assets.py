"""Files of the page, with the headers that keep it from loading anything else."""

import gzip
import hashlib
from importlib import resources
from importlib.resources.abc import Traversable

from aiohttp import hdrs, web

PREFIX = "/lockstep-page/"
"""Path of all files but the page itself."""

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # The browser asks each time whether its copy is current, so that an update shows at once.
    hdrs.CACHE_CONTROL: "no-cache",
    hdrs.VARY: hdrs.ACCEPT_ENCODING,
}


class Asset:
    """One file of the page, plain and compressed."""

    def __init__(self, name: str, content: bytes) -> None:
        """Keep a file.

        Args:
            name: its name, whose ending says its type.
            content: its bytes.
        """
        self._type = _TYPES[name[name.rindex(".") :]]
        self._content = content
        self._compressed = gzip.compress(content, mtime=0)
        self._tag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'

    @property
    def compressed_bytes(self) -> int:
        """Size of the compressed file."""
        return len(self._compressed)

    def response(self, request: web.Request) -> web.Response:
        """Return the response to a GET of the file: 304 when the browser has it already."""
        headers = {**_HEADERS, hdrs.ETAG: self._tag}
        if request.headers.get(hdrs.IF_NONE_MATCH) == self._tag:
            return web.Response(status=304, headers=headers)
        headers[hdrs.CONTENT_TYPE] = self._type
        if "gzip" in request.headers.get(hdrs.ACCEPT_ENCODING, ""):
            headers[hdrs.CONTENT_ENCODING] = "gzip"
            return web.Response(body=self._compressed, headers=headers)
        return web.Response(body=self._content, headers=headers)


def load_assets(page_path: str) -> dict[str, Asset]:
    """Return all files of the page by the path under which they are served.

    Args:
        page_path: path of the page itself; "": no page is served.
    """
    if not page_path:
        return {}
    folder = resources.files("services.gateway.endpoints.page") / "assets"
    files = {PREFIX + name: Asset(name, one.read_bytes()) for name, one in _files(folder, "")}
    page = files.pop(f"{PREFIX}index.html")
    return {page_path: page, **files}


def _files(folder: Traversable, prefix: str) -> list[tuple[str, Traversable]]:
    found: list[tuple[str, Traversable]] = []
    for one in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if one.is_dir():
            found += _files(one, f"{prefix}{one.name}/")
        else:
            found.append((prefix + one.name, one))
    return found
