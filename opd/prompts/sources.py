"""Find the files that a pipeline's `prompts` name: one file, a saved data set, a directory of data files, or a hub data set."""

from __future__ import annotations

import gzip
import json
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, cast

import yaml
from blake3 import blake3

from opd.config.prompts import PromptsConfig, as_prompts_config
from opd.errors import PromptError
from opd.files import blake3_file

FORMATS = "a file of prompts (JSONL, CSV, Parquet) or a directory that the library `datasets` saved"
KINDS = {".parquet": "parquet", ".csv": "csv"}
"""Ending of a file's name (without that of gzip) -> kind of the file. Every other file is JSONL."""
GZIP_ENDING, GZIP_START = ".gz", b"\x1f\x8b"
OTHERS = {".bz2": "bunzip2", ".xz": "unxz", ".zip": "unzip", ".zst": "unzstd", ".7z": "7z x"}
"""Ending of a packed file that we do not read -> the command that unpacks it."""
FROM_LIBRARY = {"json": "jsonl", "csv": "csv", "parquet": "parquet"}
"""Reader of `datasets` -> kind of file. The library's other readers are refused, because some of them unpickle."""
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files that `save_to_disk` writes into a directory with one data set, and into one with several splits."""
ENDINGS = (*KINDS, ".jsonl", ".json", GZIP_ENDING)
"""Endings by which a path such as `data/file.csv` means a file, and not a data set of the hub."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Prompts on this machine, not opened yet."""

    label: str
    """Name of the source in messages: the path or name in the pipeline, and the split if the pipeline has one."""
    kind: str
    """`jsonl`, `csv`, `parquet`, or `saved`, which means by `save_to_disk` of `datasets`."""
    files: tuple[Path, ...]
    """All files that are read, in order."""
    directory: Path | None = None
    """For a saved data set, the directory for `load_from_disk`."""
    shown: tuple[str, ...]
    """Name of each file in messages."""

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def content_hash(self) -> str:
        """Return the BLAKE3 hash of one file's bytes, or of the names and hashes of several files. Raises: OSError."""
        if self.directory is None and len(self.files) == 1:
            return blake3_file(self.files[0])
        return blake3(json.dumps([[file.name, blake3_file(file)] for file in self.files]).encode()).hexdigest()

    def file_states(self) -> list[tuple[int, int]]:
        """Return size and time of each file, which change if somebody writes to it. Raises: OSError."""
        return [(state.st_size, state.st_mtime_ns) for state in (file.stat() for file in self.files)]


def find_file_kind(file: Path) -> str:
    """Return the kind of a file, from its name."""
    return KINDS.get(_unpacked_name(file).suffix.lower(), "jsonl")


def _unpacked_name(file: Path) -> Path:
    return file.with_suffix("") if file.suffix.lower() == GZIP_ENDING else file


def open_unpacked(file: Path) -> IO[bytes]:
    """Open a file to read its bytes; if they are packed by gzip, they are unpacked. Raises: OSError."""
    with file.open("rb") as opened:
        packed = opened.read(len(GZIP_START)) == GZIP_START
    return cast(IO[bytes], gzip.open(file)) if packed else file.open("rb")


def is_hub_name(prompts: Path | PromptsConfig) -> bool:
    """Return True for a mapping whose path is `owner/name` and does not exist here. A path without a mapping is local."""
    if not isinstance(prompts, PromptsConfig) or prompts.path.exists():
        return False
    return HUB_NAME.fullmatch(prompts.path.as_posix()) is not None and prompts.path.suffix not in ENDINGS


def is_here(prompts: Path | PromptsConfig) -> bool:
    """Return True if the file or directory can be read without a network."""
    return as_prompts_config(prompts).path.exists()


def find_source(prompts: Path | PromptsConfig) -> Source:
    """Find the files of a source. Raises: PromptError if there are none, or if keys of the pipeline do not fit them."""
    config = as_prompts_config(prompts)
    label = str(config.path) + (f" (split {config.split})" if config.split else "")
    try:
        if is_hub_name(prompts):
            return _data_files(config, label)
        if not config.path.is_dir():
            _refuse_no_file(config.path)
            config.path.open("rb").close()
            return _find_file(config, label)
        if (config.path / SAVED_SPLITS).is_file() or (config.path / SAVED).is_file():
            return _open_saved_dataset(config, label)
        return _data_files(config, label)
    except FileNotFoundError as error:
        raise _make_missing_error(config, error) from None
    except OSError as error:
        raise PromptError.at(
            config.path, found=error.strerror or str(error), wanted=FORMATS, fix="check the path and its rights"
        ) from None


def import_datasets() -> Any:
    """Return the package `datasets`. Its import takes two seconds, and JSONL does not need it.

    Raises: PromptError if it is not installed.
    """
    if find_spec("datasets") is None:
        raise PromptError.at(
            "prompts",
            found="the package `datasets` is not installed",
            wanted="`datasets`, which reads every format but JSONL",
            fix="pip install 'opd-merge[engines]', or convert the prompts to JSONL",
        )
    import datasets

    return datasets


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Make a context in which `datasets` neither logs nor imports torch.

    It would log each error that it also raises, so a user would read it twice. For every stream of rows it would import
    torch, which takes two seconds and 200 MB, to make the stream a data set of torch as well.
    """
    datasets = import_datasets()
    logging, config = datasets.utils.logging, datasets.config
    old_settings = logging.get_verbosity(), config.TORCH_AVAILABLE
    logging.set_verbosity(logging.CRITICAL)
    config.TORCH_AVAILABLE = False
    try:
        yield
    finally:
        logging.set_verbosity(old_settings[0])
        config.TORCH_AVAILABLE = old_settings[1]


def _make_missing_error(config: PromptsConfig, error: FileNotFoundError) -> PromptError:
    if config.path.is_dir():
        return PromptError.at(
            config.path,
            found=f"a directory without data files ({error})",
            wanted=FORMATS,
            fix="give the file itself, or a directory with .parquet, .csv or .jsonl files",
        )
    return PromptError.at(
        config.path,
        found="no such file",
        wanted=FORMATS,
        fix="check the path; it is relative to the current directory. A data set of the hub needs the long form: "
        "prompts: {path: OWNER/NAME}",
    )


def _refuse_no_file(path: Path) -> None:
    """Refuse pipes and devices. Prompts are read more than once, and reading a pipe may block forever.

    Raises: PromptError, OSError.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise PromptError.at(
            path,
            found="a pipe or a device, no file",
            wanted=FORMATS,
            fix=f"write it to a file first: cat {path} > prompts.jsonl",
        )


def _find_file(config: PromptsConfig, label: str) -> Source:
    for key in ("name", "revision"):
        if getattr(config, key) is not None:
            raise _make_key_error(key, f"{config.path}, a file", config)
    if config.split not in (None, "train"):
        raise _make_key_error("split", f"{config.path}, a file, which has no splits", config)
    if unpack := OTHERS.get(config.path.suffix.lower()):
        raise PromptError.at(
            config.path,
            found=f"a file packed as {config.path.suffix}",
            wanted=f"{FORMATS}; JSONL and CSV may be packed by gzip",
            fix=f"unpack it: {unpack} {config.path}",
        )
    return Source(label=label, kind=find_file_kind(config.path), files=(config.path,), shown=(str(config.path),))


def _make_key_error(key: str, problem: str, config: PromptsConfig) -> PromptError:
    return PromptError.at(
        f"prompts.{key}: {getattr(config, key)}",
        found=problem,
        wanted="a directory or a data set of the hub, to which this key belongs",
        fix=f"leave `{key}` out",
    )


def _open_saved_dataset(config: PromptsConfig, label: str) -> Source:
    for key in ("name", "revision"):
        if getattr(config, key) is not None:
            raise _make_key_error(key, f"{config.path}, a saved data set", config)
    directory = config.path
    if (directory / SAVED_SPLITS).is_file():
        splits = _read_json(directory / SAVED_SPLITS, "splits")
        directory /= _choose_split(config, splits, label)
    elif config.split not in (None, "train"):
        raise _make_key_error("split", f"{config.path}, which was saved without splits", config)
    names = [part["filename"] for part in _read_json(directory / SAVED, "_data_files")]
    files = tuple(directory / Path(name).name for name in names)  # `.name`: a name must not lead out of the directory
    for file in (*files, directory / "dataset_info.json"):
        file.stat()
    shown = (str(directory),) * len(files)
    return Source(label=label, kind="saved", files=files, directory=directory, shown=shown)


def _read_json(file: Path, key: str) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))[key]
    except (ValueError, KeyError, TypeError) as error:
        raise PromptError.at(
            file, found=f"{type(error).__name__}: {error}", wanted="what `save_to_disk` wrote", fix="save it again"
        ) from None


def _choose_split(config: PromptsConfig, splits: Sequence[str], label: str) -> str:
    """Return the split asked for, else `train`, else the only one. Raises: PromptError."""
    split = config.split or ("train" if "train" in splits or len(splits) != 1 else splits[0])
    if split not in splits:
        raise PromptError.at(
            label,
            found=f"the splits {', '.join(splits) or '(none)'}",
            wanted=f"a split `{split}`",
            fix="name one of them: prompts: {path: ..., split: NAME}",
        )
    return split


def _data_files(config: PromptsConfig, label: str) -> Source:
    """Return the files of a directory or of a hub repository, whose files are downloaded. `datasets` decides on the splits.

    The library runs no code of a repository. We then read the files like any local file, so that errors name the row.
    """
    datasets = import_datasets()
    is_local = config.path.is_dir()
    try:
        with quiet_datasets():
            # The library resolves links and `..`, and its names of files begin with the resolved path.
            path = str(config.path.resolve()) if is_local else config.path.as_posix()
            builder = _load_builder(path, config)
            by_split: Mapping[str, Sequence[str]] = builder.config.data_files or {}
            kind = FROM_LIBRARY.get(builder.name)
            if kind is None or not by_split:
                raise _make_read_error(label, builder.name)
            names = list(by_split[_choose_split(config, [str(split) for split in by_split], label)])
            _refuse_outside(path if is_local else "hf://datasets/", names, label)
            local = names if is_local else datasets.DownloadManager().download(names)
    except PromptError:
        raise
    except (OSError, ValueError) as error:
        if is_local and isinstance(error, FileNotFoundError):
            raise
        raise _make_hub_error(config, str(error)) from None
    shown = tuple(name if not is_local else str(config.path / Path(name).relative_to(Path(path))) for name in names)
    return Source(label=label, kind=kind, files=tuple(Path(file) for file in local), shown=shown)


def _load_builder(path: str, config: PromptsConfig) -> Any:
    """Return the builder of the data set that `datasets` would load.

    Raises: PromptError if the library cannot read the README's header; other errors of the library as they are.
    """
    try:
        return import_datasets().load_dataset_builder(path, config.name, revision=config.revision)
    # PyYAML raises the other four for values that their tags do not allow.
    except (yaml.YAMLError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise PromptError.at(
            config.path,
            found=f"a README.md whose header `datasets` cannot read ({type(error).__name__}: {error})",
            wanted="a header of plain YAML between two lines `---`",
            fix="correct the header or delete it, or name a file of the directory",
        ) from None


def _refuse_outside(root: str, names: Sequence[str], label: str) -> None:
    """Refuse files outside the data set, since its README could name any file. Raises: PromptError."""
    for name in names:
        if not name.startswith(f"{root.rstrip('/')}/") or ".." in Path(name).parts:
            raise PromptError.at(
                label,
                found=f"a README that names {name}",
                wanted="files of the data set itself",
                fix="put the paths of these files under prompts",
            )


def _make_read_error(label: str, reader: str) -> PromptError:
    return PromptError.at(
        label,
        found=f"data that `datasets` would read with its reader `{reader}`",
        wanted="Parquet, CSV or JSONL files",
        fix="convert it once: datasets.load_dataset(...).to_parquet('prompts.parquet')",
    )


def _make_hub_error(config: PromptsConfig, reason: str) -> PromptError:
    if config.path.is_dir():
        return PromptError.at(config.path, found=reason, wanted=FORMATS, fix="name the files' configuration and split")
    name = config.path.as_posix()
    return PromptError.at(
        f"prompts: {name}",
        found=reason,
        wanted="a data set of the hub that can be reached, or a file or directory here",
        fix=f"where there is a network: `hf download {name} --repo-type dataset --local-dir DIR`, and give `path: DIR`; a "
        "local path is relative to the current directory",
    )
