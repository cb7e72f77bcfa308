"""The registry of experts: `ROOT/NAME/manifest.json` describes a registered expert, whose weights stay where they are.

Nothing is written before every check has passed, and a manifest is written whole or not at all.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from experts.adapter import AdapterInfo, adapter_hashes, inspect_adapter, inspect_expert
from experts.model_dir import ModelInfo, inspect_model
from experts.probe import ProbeRecord, measure_probe
from experts.weight_files import Hashes, weight_hashes
from experts.weight_values import check_finite
from opd.errors import ModelError, OpdError, PromptError, RegistryError
from opd.files import atomic_write_text, blake3_file, fsync_dir
from opd.models.lora import ADAPTER_WEIGHTS
from opd.settings.strict import NAME_PATTERN, Name, Strict
from opd.settings.suggestions import did_you_mean
from opd.settings.wording import describe_error

MANIFEST = "manifest.json"
CONFIG = "config.json"
RECORD = "training.json"
"""The file in which `opd experts train` records how it made a model."""
Facts = TypeVar("Facts", ModelInfo, AdapterInfo)


class ExpertManifest(Strict):
    """The facts about one expert at the time of its registration."""

    format_version: Literal[1] = 1
    name: Name
    domain: Name
    """The domain whose responses it scores."""
    model: str
    """Absolute path of the model directory, or of the adapter's."""
    prompts: str | None = None
    """Absolute path of the domain's training prompts."""
    prompts_hash: str | None = None
    """BLAKE3 of the prompts file, or of the names and hashes of the files of a directory."""
    prompts_count: int | None = None
    """Number of prompts."""
    info: ModelInfo
    """The model; for an adapter, its base."""
    config_hash: str | None = None
    """BLAKE3 of config.json, for an adapter that of its base; None if an older release registered the expert."""
    adapter: AdapterInfo | None = None
    """The LoRA adapter; None for a full model."""
    probe: ProbeRecord | None = None
    """Log-probs by which a scoring worker recognises the expert; None if it was registered without torch."""
    training: dict[str, Any] | None = None
    """Record of its making by `opd experts train`: base, method, data and result. None for an expert that was made elsewhere."""
    registered_at: str
    """UTC, ISO 8601."""

    @property
    def architecture(self) -> str:
        """The architecture as shown to people, e.g. `LlamaForCausalLM + LoRA r=16`."""
        return self.info.architecture + (f" + LoRA r={self.adapter.rank}" if self.adapter else "")

    @property
    def parameters(self) -> int:
        """Count of the numbers in its weight files, for an adapter together with its base."""
        return self.info.parameters + (self.adapter.parameters if self.adapter else 0)


def training_record(directory: Path) -> dict[str, Any] | None:
    """Read the training record in a model's directory; None if there is none, or if it cannot be read."""
    try:
        record = json.loads((directory / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def default_root() -> Path:
    """Return `OPD_REGISTRY`, else ./registry."""
    return Path(os.environ.get("OPD_REGISTRY") or "registry")


class Registry:
    """Experts by name, one directory each below `root`, which need not exist yet."""

    def __init__(self, root: Path) -> None:
        """Keep the directory; it may not exist yet. Raises: RegistryError if `root` is something else."""
        if root.exists() and not root.is_dir():
            raise RegistryError.at(
                root,
                found="a file",
                wanted="the registry's directory",
                fix="give another one: --registry or OPD_REGISTRY",
            )
        self._root = root

    def add(
        self, name: str, model: Path, domain: str, prompts: Path | None = None, base: Path | None = None
    ) -> ExpertManifest:
        """Check the model or adapter directory, every weight and the prompts file, run the model once, and write the
        manifest.

        `base` is an adapter's base model; by default the one that the adapter names.

        Raises: RegistryError for a bad or taken name or a bad domain, ModelError for the model, PromptError for the
        prompts.
        """
        _check_name("name", name)
        _check_name("domain", domain)
        if (self._root / name / MANIFEST).exists():
            raise _name_taken_error(name, self._root)
        info, adapter = inspect_expert(model, base)
        check_finite(Path(info.path), list(info.weight_files))
        if adapter is not None:
            check_finite(Path(adapter.path), [ADAPTER_WEIGHTS])
        count, content = (None, None) if prompts is None else _count_prompts(prompts)
        manifest = ExpertManifest(
            name=name,
            domain=domain,
            model=adapter.path if adapter else info.path,
            prompts=None if prompts is None else str(prompts.resolve()),
            prompts_hash=content,
            prompts_count=count,
            info=info,
            config_hash=blake3_file(Path(info.path) / CONFIG),
            adapter=adapter,
            probe=measure_probe(info, adapter),
            training=training_record(model),
            registered_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        self._write(manifest)
        return manifest

    def names(self) -> list[str]:
        """Return the names of the registered experts, sorted."""
        if not self._root.is_dir():
            return []
        return sorted(d.name for d in self._root.iterdir() if _is_name(d.name) and (d / MANIFEST).is_file())

    def get(self, name: str) -> ExpertManifest:
        """Return the manifest of one expert. Raises: RegistryError if the name is unknown or its manifest cannot be read."""
        file = self._file(name)
        try:
            manifest = ExpertManifest.model_validate_json(file.read_bytes())
        except ValidationError as error:
            first_error = error.errors()[0]
            key = ".".join(map(str, first_error["loc"])) or first_error.get("ctx", {}).get("key", "the file")
            raise _broken_manifest_error(file, f"{key}: {describe_error(first_error)}", name) from None
        if manifest.name != name:
            raise _broken_manifest_error(file, f"the manifest of `{manifest.name}`", name)
        return manifest

    def list_manifests(self) -> list[ExpertManifest]:
        """Return every manifest, by name. Raises: RegistryError if one cannot be read."""
        return [self.get(name) for name in self.names()]

    def verify(self, name: str, hash_cache: Hashes | None = None) -> list[str]:
        """Compare the files with the manifest; return one sentence for each difference.

        Pass one dictionary as `hash_cache` to several calls, so that a base that adapters share is read once.
        Raises: RegistryError if the name is unknown or its manifest cannot be read.
        """
        manifest = self.get(name)
        return (
            _weight_problems(manifest, hash_cache)
            + _info_problems(manifest)
            + _config_problems(manifest)
            + _adapter_problems(manifest)
            + _prompt_problems(manifest)
        )

    def list_duplicates(self, manifest: ExpertManifest) -> list[str]:
        """Return the other experts with the same weights, byte for byte. Raises: RegistryError if a manifest cannot be read."""
        return [
            m.name
            for m in self.list_manifests()
            if m.name != manifest.name and _list_weight_hashes(m) == _list_weight_hashes(manifest)
        ]

    def remove(self, name: str) -> None:
        """Remove an expert from the registry, even if its manifest is broken. Its model and files that are not ours stay.

        Raises: RegistryError if the name is unknown.
        """
        file = self._file(name)
        file.unlink()
        if not file.parent.is_symlink() and not any(file.parent.iterdir()):
            file.parent.rmdir()
        fsync_dir(self._root)

    def _file(self, name: str) -> Path:
        names = self.names()
        if name not in names:
            raise RegistryError.at(
                f"expert {name!r} in {self._root}",
                found="no such expert",
                wanted=f"one of: {', '.join(names)}" if names else "a registered expert; there is none yet",
                fix=did_you_mean(name, names, "`opd experts list` shows them all; `opd experts add` registers one"),
            )
        return self._root / name / MANIFEST

    def _write(self, manifest: ExpertManifest) -> None:
        # If this process is killed half-way, the dot keeps the directory out of the list of names.
        staging = self._root / f".{manifest.name}.{os.getpid()}.tmp"
        final = self._root / manifest.name
        staging.mkdir(parents=True, exist_ok=True)
        try:
            atomic_write_text(staging / MANIFEST, manifest.model_dump_json(indent=2) + "\n")
            # A directory cannot be renamed over one that has files, so of two writers at the same time the second one fails.
            staging.rename(final)
        except OSError:
            if (final / MANIFEST).exists():
                raise _name_taken_error(manifest.name, self._root) from None
            if final.exists():
                raise RegistryError.at(
                    final,
                    found="something that is not an expert",
                    wanted="an unused name",
                    fix="move it away or choose another name",
                ) from None
            raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        fsync_dir(self._root)


def _list_weight_hashes(manifest: ExpertManifest) -> tuple[list[str], str | None]:
    """Return the hashes by which two experts are compared: those of the weight files, and of an adapter's weights.

    The adapter's configuration is left out, because it contains the path of the base.
    """
    adapter = manifest.adapter.files[ADAPTER_WEIGHTS] if manifest.adapter else None
    return sorted(manifest.info.weight_files.values()), adapter


def _weight_problems(manifest: ExpertManifest, hash_cache: Hashes | None) -> list[str]:
    directory = Path(manifest.info.path)
    if not directory.is_dir():
        return []  # `_info_problems` reports that
    try:
        actual = weight_hashes(directory, hash_cache)
    except ModelError:
        return []  # `_info_problems` reports that, too
    # Older releases also recorded safetensors files in the directory that are not the model's.
    unused = {name for name in manifest.info.weight_files.keys() - actual.keys() if (directory / name).is_file()}
    expected = {name: digest for name, digest in manifest.info.weight_files.items() if name not in unused}
    return _file_problems(directory, expected, actual)


def _file_problems(directory: Path, expected: Mapping[str, str], actual: Mapping[str, str]) -> list[str]:
    missing = [
        f"{directory / name}: missing weight file, expected {expected[name]}"
        for name in expected.keys() - actual.keys()
    ]
    extra = [
        f"{directory / name}: extra weight file, not there when registered" for name in actual.keys() - expected.keys()
    ]
    changed = [
        f"{directory / name}: changed weight file, expected {expected[name]}, actual {actual[name]}"
        for name in expected.keys() & actual.keys()
        if expected[name] != actual[name]
    ]
    return sorted(missing + extra + changed)


def _info_problems(manifest: ExpertManifest) -> list[str]:
    try:
        current = inspect_model(Path(manifest.info.path), hash_weights=False)
    except ModelError as error:
        return [str(error)]
    return _changed_fields(manifest.info, current, ignored=("path", "weight_files"))


def _config_problems(manifest: ExpertManifest) -> list[str]:
    """Compare the hash of config.json. A forward pass depends on keys that `ModelInfo` lacks, such as the rotary base."""
    file = Path(manifest.info.path) / CONFIG
    if manifest.config_hash is None or not file.is_file():
        return []  # `_info_problems` reports a missing file
    actual = blake3_file(file)
    expected = manifest.config_hash
    return [] if actual == expected else [f"{file}: changed config, expected {expected}, actual {actual}"]


def _adapter_problems(manifest: ExpertManifest) -> list[str]:
    registered = manifest.adapter
    if registered is None:
        return []
    directory = Path(registered.path)
    changed = _file_problems(directory, registered.files, adapter_hashes(directory)) if directory.is_dir() else []
    try:
        current = inspect_adapter(directory, Path(registered.base), hash_files=False)
    except ModelError as error:
        return [*changed, str(error)]
    return changed + _changed_fields(registered, current, ignored=("path", "base", "files"))


def _changed_fields(registered: Facts, current: Facts, ignored: tuple[str, ...]) -> list[str]:
    fields = [field for field in type(registered).model_fields if field not in ignored]
    pairs = [(field, getattr(registered, field), getattr(current, field)) for field in fields]
    return [
        f"{registered.path}: changed {field}, expected {old}, actual {new}" for field, old, new in pairs if old != new
    ]


def _count_prompts(prompts: Path) -> tuple[int, str]:
    """Check every prompt; returns their number and their content hash. Raises: PromptError."""
    from opd.prompts import find_source, open_rows  # imports Arrow, which `opd experts list` does not need

    return len(open_rows(prompts)), find_source(prompts).content_hash()


def _prompt_problems(manifest: ExpertManifest) -> list[str]:
    if manifest.prompts is None:
        return []
    file = Path(manifest.prompts)
    if not file.exists():
        return [f"{file}: missing prompts file, expected {manifest.prompts_hash}"]
    from opd.prompts import find_source

    try:
        actual = find_source(file).content_hash()
    except PromptError as error:
        return [str(error)]
    expected = manifest.prompts_hash
    return [] if actual == expected else [f"{file}: changed prompts, expected {expected}, actual {actual}"]


def _is_name(text: str) -> bool:
    return re.fullmatch(NAME_PATTERN, text) is not None and not text.endswith(".")


def _check_name(field: str, text: str) -> None:
    if not _is_name(text):
        raise RegistryError.at(
            field,
            found=repr(text),
            wanted="1 to 64 of A-Z a-z 0-9 . _ -, first a letter or digit, last not a dot",
            fix="choose another one; a path belongs to the model, not to the name",
        )


def _name_taken_error(name: str, root: Path) -> OpdError:
    return RegistryError.at(
        f"expert `{name}` in {root}",
        found="a name that is taken",
        wanted="a new name",
        fix=f"`opd experts remove {name}` first, or choose another name",
    )


def _broken_manifest_error(file: Path, actual: str, name: str) -> OpdError:
    return RegistryError.at(
        file, found=actual, wanted=f"the manifest of `{name}`", fix=f"`opd experts remove {name}` and add it again"
    )
