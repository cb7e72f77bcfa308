"""A model served by the real vLLM through `opd serve`, until Ctrl-C."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.servers import serving

ROOT = Path(__file__).parents[2]


def asked(url: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """The answer; None while nobody listens."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found
    except (urllib.error.URLError, ConnectionError):
        return None


@pytest.mark.slow
def test_a_served_model_answers_on_loopback(make_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    model = make_model_dir(tmp_path / "mine", seed=1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "cli", "serve", str(model), "--port", str(port), "--dtype", "float32"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1"}
    with serving([*command, "--max-model-len", "64", "--", "--enforce-eager"], env, tmp_path / "log") as server:
        deadline, answer = time.monotonic() + 240, None
        body = {"model": "mine", "prompt": "lef abc=", "max_tokens": 4, "temperature": 0}
        while answer is None:
            assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(1)
            answer = asked(f"http://127.0.0.1:{port}/v1/completions", body)
    assert answer["usage"]["completion_tokens"] <= 4 and answer["choices"][0]["text"]
