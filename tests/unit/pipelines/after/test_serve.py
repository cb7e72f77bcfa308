"""The start of `opd serve`, which becomes the server."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opd.config import load_pipeline
from opd.errors import ConfigError
from opd.machine import orphans
from opd.machine.address import Address
from pipelines.after.models import LocalModel, find_model
from pipelines.after.serve import ServeOptions, check_serving, server_command, server_environment

ROOT = Path(__file__).parents[4]
SERVER = """
import json, os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
sockets = os.environ["VLLM_RPC_BASE_PATH"]
print(json.dumps([os.getpid(), os.stat(sockets).st_mode & 0o777, sockets, *sys.argv[1:]]), flush=True)
time.sleep(60)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def here(**more: Any) -> ServeOptions:
    return ServeOptions(address=Address("127.0.0.1", free_port()), **more)


@pytest.mark.parametrize(("architecture", "served"), [("LlamaForCausalLMEagle3", True), ("SharedKvDraft", False)])
def test_a_draft_beside_the_model_is_served_unless_it_is_switched_off(
    make_model_dir: Any, tmp_path: Path, architecture: str, served: bool
) -> None:
    path = make_model_dir(tmp_path / "model")
    (path / "draft").mkdir()
    (path / "draft" / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    model = find_model(path, print)
    words = server_command(model, here())
    assert ("--speculative-config" in words) == served
    if served:
        settings = json.loads(words[words.index("--speculative-config") + 1])
        assert settings["model"] == str(path / "draft") and settings["draft_sample_method"] == "probabilistic"
        assert words[words.index("--worker-extension-cls") + 1] == "opd.rollouts.served_draft.RepairedWorker"
    assert "--speculative-config" not in server_command(model, here(draft=False))


def test_the_server_has_the_settings_of_the_merge(world: Any, tiny_model_dir: Path) -> None:
    model = find_model(tiny_model_dir, print)
    assert "--dtype" not in server_command(model, here()) and "VLLM_CPU_KVCACHE_SPACE" not in server_environment(model)
    world.data["rollout"] |= {"dtype": "bfloat16", "kv_cache_gib": 2}
    world.data["student"]["chat_template_kwargs"] = {"enable_thinking": False}
    merged = LocalModel(path=tiny_model_dir, info=model.info, config=load_pipeline(world.write()))
    words = server_command(merged, here(vllm_arguments=["--enable-lora"]))
    pairs = dict(itertools.pairwise(words))
    assert (pairs["--model"], pairs["--host"]) == (str(tiny_model_dir), "127.0.0.1")
    assert (pairs["--served-model-name"], pairs["--dtype"], pairs["--max-model-len"]) == ("two", "bfloat16", "32")
    assert pairs["--default-chat-template-kwargs"] == '{"enable_thinking": false}'
    assert words[-1] == "--enable-lora" and server_environment(merged)["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert "--speculative-config" not in words
    own = server_command(merged, here(name="mine", dtype="float32", max_model_len=16))
    assert {"mine", "float32", "16"} < set(own) and "bfloat16" not in own


@pytest.mark.parametrize("cpus", [True, False])
def test_nothing_is_compiled_on_cpus_unless_the_user_says_so(
    cpus: bool, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.after.serve.installed_version", lambda name: "0.32" if cpus else None)
    words = server_command(find_model(tiny_model_dir, print), here(vllm_arguments=["--no-enforce-eager"]))
    assert words[-1] == "--no-enforce-eager" and ("--enforce-eager" in words) is cpus


@pytest.mark.parametrize("cpus", [True, False])
def test_a_latent_attention_is_that_of_a_merge(
    cpus: bool, tmp_path: Path, make_mixture_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On cores with AMX the one that vLLM would choose takes no float32."""
    monkeypatch.setattr("pipelines.after.serve.installed_version", lambda name: "0.32" if cpus else None)
    words = server_command(find_model(make_mixture_dir(tmp_path / "deep", "deepseek_v3"), print), here())
    assert (("--attention-backend", "CPU_MLA") in itertools.pairwise(words)) is cpus


def test_other_machines_need_a_key_and_a_taken_port_is_named() -> None:
    open_to_all = replace(here(), address=Address("0.0.0.0", free_port()))
    with pytest.raises(ConfigError, match="VLLM_API_KEY"):
        check_serving(open_to_all, {})
    check_serving(open_to_all, {"VLLM_API_KEY": "secret"})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="free port"):
            check_serving(replace(here(), address=Address("127.0.0.1", taken.getsockname()[1])), {})


def test_the_process_becomes_the_server(tiny_model_dir: Path, tmp_path: Path) -> None:
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(SERVER)
    for directory in (package, package.parent, package.parent.parent):
        (directory / "__init__.py").touch()
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", "serve", str(tiny_model_dir), "--port", str(free_port()), "--", "--seed", "3"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        pid, mode, sockets, *words = json.loads(process.stdout.readline())
        assert mode == 0o700 and Path(sockets).name.startswith(f"opd-run-{process.pid}-")
        assert pid == process.pid and words[:2] == ["--model", str(tiny_model_dir)] and words[-2:] == ["--seed", "3"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 7, "signals and exit code are the server's"
        assert sockets in orphans.end_orphans()
    finally:
        process.kill()
        process.communicate()
