"""The variable that Kubernetes sets in place of vLLM's."""

from __future__ import annotations

import pytest

from opd.rollouts.processes import drop_service_port


@pytest.mark.parametrize(("value", "left"), [("tcp://10.0.0.7:8000", None), ("8000", "8000"), (None, None)])
def test_the_address_of_a_service_is_no_port(value: str | None, left: str | None) -> None:
    environ = {"PATH": "/bin"} | ({} if value is None else {"VLLM_PORT": value})
    drop_service_port(environ)
    assert environ.get("VLLM_PORT") == left and environ["PATH"] == "/bin"
