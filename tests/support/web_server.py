"""A small web server on this machine whose connections break when a test says so."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@dataclass
class Request:
    """What a client asked, and its headers Range, User-Agent and Authorization."""

    method: str
    path: str
    range: str | None
    agent: str
    credentials: str | None


@dataclass
class Answer:
    """What a path gives; whether its length is told (`sized`) and a Range honoured (`ranges`)."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    ranges: bool = True
    sized: bool = True


class WebServer:
    """Answers from `answers` (path → answer) and notes every request in `requests`.

    `cut[path] = n` sends n bytes of the next GET's body and breaks the connection.
    `hold[path] = n` sends n bytes of the next GET's body and waits until `release` is set.
    `refuses(request)` may give another answer than the table's.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.requests: list[Request] = []
        self.cut: dict[str, int] = {}
        self.hold: dict[str, int] = {}
        self.release = threading.Event()
        self.refuses: Callable[[Request], Answer | None] = lambda request: None
        self.url = ""

    def file(self, path: str, body: bytes, **headers: str) -> None:
        self.answers[path] = Answer(
            body, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )

    def json(self, path: str, value: object, **headers: str) -> None:
        self.file(path, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def asked(self, path: str, method: str = "GET") -> list[Request]:
        return [r for r in self.requests if r.path == path and r.method == method]


@contextmanager
def web_server() -> Iterator[WebServer]:
    """Run a server on a free port of 127.0.0.1 for the length of the block."""
    web = WebServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self) -> None:
            path = urlsplit(self.path).path
            agent = self.headers.get("User-Agent", "")
            secret = self.headers.get("Authorization")
            request = Request(self.command, path, self.headers.get("Range"), agent, secret)
            web.requests.append(request)
            answer = web.refuses(request) or web.answers.get(path) or Answer(b"not here", 404)
            body, status, headers = answer.body, answer.status, dict(answer.headers)
            if request.range and answer.ranges and status == 200:
                start = int(request.range.removeprefix("bytes=").partition("-")[0])
                if start >= len(body):
                    body, status = b"", 416
                else:
                    headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
                    body, status = body[start:], 206
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if answer.sized:
                self.send_header("Content-Length", str(len(body)))
            else:
                self.close_connection = True
            self.end_headers()
            if self.command == "HEAD":
                return
            try:
                self._send(path, body)
            except ConnectionError:  # the client has gone
                self.close_connection = True

        def _send(self, path: str, body: bytes) -> None:
            if path in web.cut:
                self.wfile.write(body[: web.cut.pop(path)])
                self.close_connection = True
                return
            if path in web.hold:
                first = web.hold.pop(path)
                self.wfile.write(body[:first])
                self.wfile.flush()
                web.release.wait()
                body = body[first:]
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    web.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield web
    finally:
        web.release.set()
        server.shutdown()
        thread.join()
        server.server_close()
