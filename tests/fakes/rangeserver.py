"""A server of one folder that counts requests, takes its time, and can misbehave."""

from __future__ import annotations

import math
import re
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Request(NamedTuple):
    """What was asked for."""

    path: str
    begin: int
    end: int
    headers: dict[str, str]

    @property
    def length(self) -> int:
        return self.end - self.begin


class RangeServer(ThreadingHTTPServer):
    """Serves the files of a folder by HTTP, with range requests.

    Attributes
    ----------
    latency : float
        Seconds before each answer.
    requests : list of Request
        All that was asked for.
    etag, modified : str or None
        What it says of the version of its files.
    troubles : list of callables
        Each is called once with the handler instead of a proper answer, then dropped.
    always : callable or None
        The same for all other answers.
    trouble_from : int or None
        How many requests it answers properly before it fails for good.
    ranges : bool
        Whether it knows range requests.
    sent : int
        How many bytes of its files it sent.
    bandwidth : float
        Bytes a second that all answers together may take.
    """

    daemon_threads = True

    def __init__(self, folder: Path, latency: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.latency = latency
        self.requests: list[Request] = []
        self.etag: str | None = '"one"'
        self.modified: str | None = None
        self.troubles: list[Callable[[Handler], None]] = []
        self.always: Callable[[Handler], None] | None = None
        self.trouble_from: int | None = None
        self.ranges = True
        self.bandwidth = math.inf
        self.sent = 0
        self.sockets = 0
        self.wire = threading.Lock()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> RangeServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"

    def note(self, request: Request) -> Callable[[Handler], None] | None:
        with self._lock:
            self.requests.append(request)
            if self.trouble_from is not None and len(self.requests) > self.trouble_from:
                return status(500)
            return self.troubles.pop(0) if self.troubles else self.always

    def count_socket(self, step: int) -> None:
        with self._lock:
            self.sockets += step

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of connections that a client breaks off."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: RangeServer
    place: Path
    part: tuple[int, int, int]

    def setup(self) -> None:
        super().setup()
        self.server.count_socket(1)

    def finish(self) -> None:
        with suppress(OSError):
            super().finish()
        self.server.count_socket(-1)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        self.place = place = self.server.folder / path
        given = re.fullmatch(r"bytes=(\d*)-(\d+)", self.headers.get("Range", ""))
        size = place.stat().st_size if place.is_file() else 0
        begin, end = 0, size
        if given and given[1]:
            begin, end = int(given[1]), min(int(given[2]) + 1, size)
        elif given:  # the last bytes
            begin = max(0, size - int(given[2]))
        self.part = begin, end, size
        headers = {name.lower(): value for name, value in self.headers.items()}
        trouble = self.server.note(Request(self.path, begin, end, headers))
        time.sleep(self.server.latency)
        if trouble is not None:
            trouble(self)
        elif not place.is_file():
            self.answer(404)
        elif not self.server.ranges or not given:
            self.send(200, place, 0, size, size)
        elif begin >= size:
            self.answer(416)
        else:
            self.send(206, place, begin, end, size)

    def do_HEAD(self) -> None:
        place = self.server.folder / unquote(urlsplit(self.path).path).lstrip("/")
        self.server.note(Request(self.path, 0, 0, dict(self.headers.items())))
        time.sleep(self.server.latency)
        self.begin_answer(200, place.stat().st_size)

    def send(self, status: int, place: Path, begin: int, end: int, size: int) -> None:
        self.begin_answer(status, end - begin, partial=status == 206)
        with place.open("rb") as file:
            file.seek(begin)
            while begin < end:
                part = file.read(min(1 << 16, end - begin))
                with self.server.wire:
                    time.sleep(len(part) / self.server.bandwidth)
                    self.server.sent += len(part)
                self.wfile.write(part)
                begin += len(part)

    def begin_answer(self, status: int, length: int, *, partial: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        if self.server.ranges:
            self.send_header("Accept-Ranges", "bytes")
        if partial:
            begin, end, size = self.part
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        if self.server.etag is not None:
            self.send_header("ETag", self.server.etag)
        if self.server.modified is not None:
            self.send_header("Last-Modified", self.server.modified)
        self.end_headers()

    def answer(self, status: int) -> None:
        """Answer with a status and no content."""
        self.begin_answer(status, 0)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def status(code: int) -> Callable[[Handler], None]:
    """Answer with a status."""
    return lambda handler: handler.answer(code)


def break_off(sent: int = 1000) -> Callable[[Handler], None]:
    """Close the connection in the middle of the content."""

    def trouble(handler: Handler) -> None:
        begin, end, _ = handler.part
        handler.begin_answer(206, end - begin, partial=True)
        with handler.place.open("rb") as file:
            file.seek(begin)
            handler.wfile.write(file.read(sent))
        handler.wfile.flush()
        handler.close_connection = True

    return trouble


def send_half(handler: Handler) -> None:
    """Send less than was asked for, and say so."""
    begin, end, size = handler.part
    handler.part = begin, (begin + end) // 2, size
    handler.send(206, handler.place, *handler.part)


def send_all(handler: Handler) -> None:
    """Send the whole file as if it were a part."""
    size = handler.part[2]
    handler.part = 0, size, size
    handler.send(206, handler.place, *handler.part)


def send_unnamed(handler: Handler) -> None:
    """Send a part without saying which."""
    begin, end, _ = handler.part
    handler.begin_answer(206, end - begin)
    handler.wfile.write(bytes(end - begin))


def redirect(url: str) -> Callable[[Handler], None]:
    """Send on to another place."""

    def trouble(handler: Handler) -> None:
        handler.send_response(302)
        handler.send_header("Location", url)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return trouble


def send_nonsense(handler: Handler) -> None:
    """Speak something else than HTTP."""
    handler.wfile.write(b"no HTTP at all\r\n\r\n")
    handler.close_connection = True


def hang_up(handler: Handler) -> None:
    """Close the connection without an answer."""
    handler.close_connection = True


def stall(seconds: float) -> Callable[[Handler], None]:
    """Answer nothing for some time."""

    def trouble(handler: Handler) -> None:
        time.sleep(seconds)
        handler.close_connection = True

    return trouble


def drip(pause: float) -> Callable[[Handler], None]:
    """Send a byte at a time."""

    def trouble(handler: Handler) -> None:
        begin, end, _ = handler.part
        handler.begin_answer(206, end - begin, partial=True)
        with suppress(OSError):
            for _ in range(end - begin):
                handler.wfile.write(b"x")
                handler.wfile.flush()
                time.sleep(pause)
        handler.close_connection = True

    return trouble


def drip_headers(pause: float) -> Callable[[Handler], None]:
    """Send a header at a time, and never the last one."""

    def trouble(handler: Handler) -> None:
        with suppress(OSError):
            handler.wfile.write(b"HTTP/1.1 206 OK\r\n")
            while True:
                handler.wfile.write(b"X-More: 1\r\n")
                handler.wfile.flush()
                time.sleep(pause)
        handler.close_connection = True

    return trouble


def send_more(handler: Handler) -> None:
    """Send far more than was asked for, and than is said to come."""
    handler.begin_answer(206, 1 << 40, partial=True)
    with suppress(OSError):
        while True:
            handler.wfile.write(bytes(1 << 20))
            handler.server.sent += 1 << 20
    handler.close_connection = True
