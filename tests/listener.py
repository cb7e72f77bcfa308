"""HTTP servers of tests."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Listener(ThreadingHTTPServer):
    """Answers each request in a thread of its own, which may end in a later test."""

    daemon_threads = True
    request_queue_size = 128  # the default of 5 would hold requests back by itself

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that no longer waits is what some tests are about: nothing is printed, which a later test would find."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def answer_posts(answer: Callable[[str, Mapping[str, str], Any], tuple[int, bytes]]) -> Iterator[str]:
    """The address of a server that answers POST requests by path, headers and JSON; a redirection leads to /v1/completions."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, body = answer(self.path, dict(self.headers), request)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if 300 <= status < 400:
                self.send_header("Location", "/v1/completions")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = Listener(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
