"""An HTTP server of a test."""

from __future__ import annotations

import sys
from http.server import ThreadingHTTPServer
from typing import Any


class Listener(ThreadingHTTPServer):
    """Answers each request in a thread of its own, which may end in a later test."""

    daemon_threads = True
    request_queue_size = 128  # the default of 5 would hold requests back by itself

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that no longer waits is what some tests are about: nothing is printed, which a later test would find."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)
