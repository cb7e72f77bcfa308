"""Tiny real models for every test: a character-level tokenizer and a Llama that transformers and vLLM both run."""

from __future__ import annotations

import os
import signal
import string
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import setuptools  # noqa: F401  before all tests: once, after others, it found the wrong distutils, and vLLM was not imported

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OPD_EXAM_CACHE"] = "off"  # a test measures what it speaks of, whatever this machine measured before
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background jobs ignore Ctrl-C, and so would every process that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from opd.stream.schema import TargetRow
    from opd.stream.targets import TargetStream


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of more than a minute run when they are asked for, and say so when they are not."""
    if "slow" in config.getoption("-m"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="takes more than a minute: pytest -m slow"))


SPECIALS = ["<pad>", "<bos>", "<eos>", "<unk>"]
CHARACTERS = [*string.ascii_lowercase, *string.ascii_uppercase, *string.digits, " ", *"=,+-.:<>?"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def build_tokenizer(permute_vocab: bool = False, eos: str = "<eos>") -> PreTrainedTokenizerFast:
    """One token a character, nothing added on encode; `permute_vocab` reverses the ids of the characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = CHARACTERS[::-1] if permute_vocab else CHARACTERS
    vocab = {token: i for i, token in enumerate(SPECIALS + characters)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(SPECIALS)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token=eos,
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def put_in_front(tokenizer: Any, token: str = "<bos>", behind: str = "") -> Any:
    """Have the tokenizer put a token in front of every text, as those of Gemma and Llama do, and one `behind`. Returns it."""
    from tokenizers import processors

    added = [(one, tokenizer.convert_tokens_to_ids(one)) for one in (token, behind) if one]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join([token, "$A", behind]).strip(), special_tokens=added
    )
    return tokenizer


def build_model_dir(
    path: Path,
    *,
    seed: int = 0,
    tie: bool = True,
    hidden: int = 64,
    heads: int = 2,
    layers: int = 2,
    permute_vocab: bool = False,
    eos: str = "<eos>",
    tokenizer: Any = None,
    positions: int = 512,
) -> Path:
    """Save a float32 Llama with random weights of `seed`, its tokenizer and generation config; returns `path`.

    vLLM's CPU attention needs heads of 32. Weights are wide (0.1) so that distributions are not nearly uniform. `tokenizer`
    takes the place of the one of single characters.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    assert hidden // heads == 32, "vLLM's CPU attention does not run other small head sizes"
    tokenizer = tokenizer or build_tokenizer(permute_vocab, eos)
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "bos", "eos")}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=positions,
        tie_word_embeddings=tie,
        initializer_range=0.1,
        **ids,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


MIXTURES: dict[str, dict[str, object]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "head_dim": 32,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 64},
    "lfm2": {
        "layer_types": ["conv", "full_attention"],
        "conv_L_cache": 3,
        "conv_dim": 64,
        "conv_dim_out": 64,
        "conv_bias": False,
        "block_dim": 64,
        "block_ff_dim": 64,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "mamba_chunk_size": 32,
        "position_embedding_type": "rope",
    },
}
"""Settings that make a family a mixture or a hybrid, at small sizes that vLLM's CPU build runs."""


def build_mixture_dir(path: Path, family: str, *, seed: int = 0, **sizes: object) -> Path:
    """Save a float32 mixture or hybrid with random weights of `seed`, wide ones, and its tokenizer; returns `path`.

    The router's bias, where a family has one, is random too: it decides which experts a token goes to.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    tokenizer = build_tokenizer()
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "bos", "eos")}
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": len(tokenizer)}
    config = AutoConfig.for_model(family, **shape | MIXTURES[family] | sizes, initializer_range=0.1, **ids)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        attention = "eager" if family == "gpt_oss" else "sdpa"
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
        for buffer in (b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")):
            buffer.copy_(0.2 * torch.randn_like(buffer))
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def build_certificate(root: Path) -> tuple[Path, Path]:
    """A certificate for this machine that signs itself, valid for an hour, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "teachers")])
    now = datetime.now(UTC)
    names = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1")), x509.IPAddress(ip_address("::1"))]
    )
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = root / "cert.pem", root / "key.pem"
    files[0].write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """PEM files of a certificate for localhost and its key."""
    return build_certificate(tmp_path_factory.mktemp("tls"))


def read_rows(targets: TargetStream) -> list[TargetRow]:
    """Every row of a step, once all are scored."""
    from opd import cluster
    from opd.stream.schema import read_stream

    rows: list[TargetRow] = []
    while (part := targets.take_part()) is not None:
        rows += read_stream(memoryview(cluster.fetch_object(part.handle))).rows
    return rows


@pytest.fixture(scope="session")
def rows_of() -> Callable[[TargetStream], list[TargetRow]]:
    """rows_of(targets): every row of a step, once all are scored."""
    return read_rows


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of all tiny models: 4 specials, then letters, digits and signs; 76 tokens."""
    return build_tokenizer()


@pytest.fixture(scope="session")
def make_model_dir() -> Callable[..., Path]:
    """`build_model_dir`: make_model_dir(path, *, seed, tie, hidden, heads, layers, permute_vocab, eos, tokenizer, positions)."""
    return build_model_dir


@pytest.fixture(scope="session")
def make_mixture_dir() -> Callable[..., Path]:
    """`build_mixture_dir`: make_mixture_dir(path, family, *, seed, **sizes)."""
    return build_mixture_dir


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied two-layer model of seed 0, shared by the whole session: read it, never write to it."""
    return build_model_dir(tmp_path_factory.mktemp("models") / "tiny")
