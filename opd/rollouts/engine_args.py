"""Check the arguments of vLLM that a user sets beside our own keys. All arguments that vLLM has are allowed except those refused here.

Arguments are refused that would give the engine another distribution, or another model, than the trainer has, and arguments on which
our own way of running an engine rests. With all others, the probe after every push still compares engine and trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opd.rollouts.served_families import Refusal, engine_arguments
from opd.settings.suggestions import did_you_mean

OURS = {
    "model": "student.model",
    "model_weights": "student.model",
    "seed": "seed",
    "dtype": "rollout.dtype",
    "max_model_len": "rollout.max_model_len",
    "max_num_seqs": "rollout.max_num_seqs",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.gpu_memory_utilization, or on a CPU rollout.kv_cache_gib",
    "kv_cache_dtype": "rollout.kv_cache_dtype",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "enable_sleep_mode": "rollout.sleep",
}
"""Argument -> our own key that decides it."""
OTHER_DISTRIBUTION = (
    "nothing: a token's log-prob has to be that of the distribution it was drawn from, and that the student's own"
)
OTHER_MODEL = "nothing: the engine has to compute what the trainer does, with the weights that a push brings"
TOKENS_ONLY = "nothing: token ids go in and out, and the engine has no tokenizer"
DRAFTED = "rollout.num_speculative_tokens, with the draft that the section `draft` trains"
ONE_NODE = (
    "nothing: an engine is one worker on one machine; rollout.workers and rollout.tensor_parallel_size divide the work"
)
OUTLIVING = "nothing: keys and values outside of the engine would outlive the weights that computed them"
OUR_CODE = "nothing: this is where the engine's process is held to our own way of running it"
CPU_ONLY = {
    "enforce_eager": "nothing: a CPU engine runs eagerly anyway",
    "enable_chunked_prefill": "nothing: vLLM's CPU build dies when it reads a prompt in parts",
    "enable_prefix_caching": "nothing: it is on where vLLM's CPU build computes it right",
    "block_size": "nothing: rollout.n and rollout.share_prefixes decide it on a CPU",
}
"""Argument that is refused on a CPU -> what its error says is wanted."""
REFUSED: dict[str, str] = (
    dict.fromkeys(
        (
            "logprobs_mode", "generation_config", "override_generation_config", "logits_processors", "watermark_config",
            "kv_sharing_fast_prefill",
        ),
        OTHER_DISTRIBUTION,
    )
    | dict.fromkeys(
        (
            "quantization", "quantization_config", "allow_deprecated_quantization", "load_format", "config_format",
            "model_loader_extra_config", "ignore_patterns", "hf_config_path", "hf_overrides", "model_class_overrides",
            "revision", "code_revision", "hf_token", "runner", "convert", "pooler_config", "disable_sliding_window",
            "enable_lora", "default_mm_loras", "diffusion_config", "weight_transfer_config",
        ),
        OTHER_MODEL,
    )
    | dict.fromkeys(
        (
            "tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init", "tokens_only",
            "enable_prompt_embeds",
        ),
        TOKENS_ONLY,
    )
    | dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), DRAFTED)
    | dict.fromkeys(
        (
            "pipeline_parallel_size", "prefill_context_parallel_size", "data_parallel_size", "data_parallel_rank",
            "data_parallel_start_rank", "data_parallel_size_local", "data_parallel_address", "data_parallel_rpc_port",
            "data_parallel_hybrid_lb", "data_parallel_external_lb", "data_parallel_multi_port_external_lb",
            "data_parallel_backend", "enable_elastic_ep", "elastic_ep_max_dp_size", "nnodes", "node_rank", "master_addr",
            "master_port", "device_ids", "distributed_executor_backend",
        ),
        ONE_NODE,
    )
    | dict.fromkeys(
        (
            "kv_transfer_config", "kv_events_config", "ec_transfer_config", "kv_offloading_size", "kv_offloading_backend",
        ),
        OUTLIVING,
    )
    | dict.fromkeys(
        (
            "worker_cls", "worker_extension_cls", "scheduler_cls", "io_processor_plugin", "reasoning_parser_plugin",
            "trust_remote_code", "disable_log_stats", "use_tqdm_on_load", "max_logprobs",
        ),
        OUR_CODE,
    )
)  # fmt: skip
"""Argument that is refused everywhere -> what its error says is wanted, with the reason."""


def find_refused_argument(arguments: Mapping[str, Any], cpu: bool) -> Refusal | None:
    """Return the refusal of the first of these arguments that cannot be given to an engine; None if all can. `cpu`: the engine runs on the
    CPU."""
    vllm_arguments = engine_arguments()
    for name, value in arguments.items():
        if name in OURS:
            requirement, fix = f"{OURS[name]}, which says this", "remove it here"
        elif name in REFUSED:
            requirement, fix = REFUSED[name], "remove it"
        elif cpu and name in CPU_ONLY:
            requirement, fix = CPU_ONLY[name], "remove it, or give the engine a GPU: cluster.rollout_gpus"
        elif vllm_arguments and name not in vllm_arguments:
            requirement, fix = "an argument of vLLM's EngineArgs", did_you_mean(name, vllm_arguments, "remove it")
        else:
            continue
        return Refusal(name, found=str(value), wanted=requirement, fix=fix)
    return None
