"""The licence of a model as its directory states it: in the header of README.md, or in a file such as LICENSE.

Nothing is looked up elsewhere, and nothing is decided: `list_concerns` says what a person should read before the merged model
is given to others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from experts.bound_files import matching_files
from opd.settings.yaml_files import parse_yaml
from opd.text import to_one_line

OTHER = "other"
"""The hub's name for a licence that is none of the known ones; also our name for a text that we do not recognise."""
FILES = ("LICENSE*", "LICENCE*", "COPYING*")
_MOST = 1 << 16
"""Characters of a file that are read."""
_TITLES = {
    "agpl-3.0": r"gnu affero general public license",
    "lgpl-3.0": r"gnu lesser general public license",
    "gpl-3.0": r"gnu general public license version 3",
    "gpl-2.0": r"gnu general public license version 2",
    "apache-2.0": r"apache license,? version 2\.0",
    "mit": r"permission is hereby granted, free of charge, to any person obtaining a copy of this software and",
    "bsd-2-clause": r"redistribution and use in source and binary forms",
    "bsd-3-clause": r"redistribution and use in source and binary forms.*neither the name of",
    "mpl-2.0": r"mozilla public license,? version 2\.0",
    "cc0-1.0": r"cc0 1\.0 universal",
    "cc-by-4.0": r"attribution 4\.0 international",
    "cc-by-sa-4.0": r"attribution-sharealike 4\.0 international",
    "cc-by-nd-4.0": r"attribution-noderivatives 4\.0 international",
    "cc-by-nc-4.0": r"attribution-noncommercial 4\.0 international",
    "cc-by-nc-sa-4.0": r"attribution-noncommercial-sharealike 4\.0 international",
    "cc-by-nc-nd-4.0": r"attribution-noncommercial-noderivatives 4\.0 international",
    "unlicense": r"this is free and unencumbered software",
    "gemma": r"gemma terms of use",
    "llama": r"llama [\d.]+ (version release date|community license)",
}
"""The hub's name of a licence -> regular expression that recognises its text, in small letters and with single spaces."""
_PERMISSIVE = {
    *("afl-3.0", "apache-2.0", "bsd", "bsd-2-clause", "bsd-3-clause", "bsl-1.0", "cc-by-2.0", "cc-by-3.0", "cc-by-4.0"),
    *("cc0-1.0", "cdla-permissive-1.0", "cdla-permissive-2.0", "ecl-2.0", "isc", "mit", "mpl-2.0", "ms-pl", "ncsa"),
    *("postgresql", "unlicense", "wtfpl", "zlib"),
}
_NON_COMMERCIAL = re.compile(r"(^|[-_ ])nc([-_ ]|$)|non-?commercial|research", re.IGNORECASE)
_NO_DERIVATIVES = re.compile(r"(^|[-_ ])nd([-_ ]|$)", re.IGNORECASE)
_SHARE_ALIKE = re.compile(r"(^|[-_ ])sa([-_ ]|$)|gpl|odbl|share-?alike", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Licence:
    """A licence that a directory names."""

    name: str
    """The hub's spelling in small letters, such as `apache-2.0`."""
    file: str
    """The file that names it."""

    def __str__(self) -> str:
        return f"{self.name} ({self.file})"


def find_licences(directory: Path) -> list[Licence]:
    """Return the licences that a model's directory names, each once; if two differ, both hold. Raises: OSError."""
    by_name: dict[str, Licence] = {}
    for licence in (*_read_header_licences(directory / "README.md"), *_read_text_licences(directory)):
        by_name.setdefault(licence.name, licence)
    if len(by_name) > 1 and OTHER in by_name and by_name[OTHER].file != "README.md":
        del by_name[OTHER]  # an unrecognised text is taken for the text of the licence that the header names
    return list(by_name.values())


def list_concerns(licences_by_model: Mapping[str, Sequence[Licence]]) -> list[str]:
    """Return sentences about what to check before a model made from these models is given to others."""
    by_name: dict[str, list[str]] = {}
    for owner, licences in licences_by_model.items():
        for licence in licences:
            by_name.setdefault(licence.name, []).append(owner)
    unlicensed = _list_unlicensed(licences_by_model)
    lines = [f"{', '.join(unlicensed)}: no licence was found"] if unlicensed else []
    for name, owners in by_name.items():
        owner = ", ".join(owners)
        if _NON_COMMERCIAL.search(name):
            lines.append(f"{owner}: {name} does not allow commercial use")
        if _NO_DERIVATIVES.search(name):
            lines.append(f"{owner}: {name} does not allow derivatives, and a merged model may be one")
        elif name not in _PERMISSIVE and not _NON_COMMERCIAL.search(name) and not _SHARE_ALIKE.search(name):
            lines.append(f"{owner}: {name} has terms of its own; read them")
    alike = [name for name in by_name if _SHARE_ALIKE.search(name)]
    if len(alike) > 1:
        lines.append(
            f"{', '.join(alike)}: each asks that what is made from it has its own terms; they contradict each other"
        )
    elif alike:
        lines.append(f"{', '.join(by_name[alike[0]])}: {alike[0]} asks that what is made from it has the same terms")
    return lines


def find_common(licences_by_model: Mapping[str, Sequence[Licence]]) -> str | None:
    """Return the licence that all models have; None if they differ, if one has none, or if the licence is not known."""
    names = {licence.name for licences in licences_by_model.values() for licence in licences}
    licence = next(iter(names)) if len(names) == 1 and not _list_unlicensed(licences_by_model) else OTHER
    return None if licence == OTHER else licence


def _list_unlicensed(licences_by_model: Mapping[str, Sequence[Licence]]) -> list[str]:
    return [owner for owner, licences in licences_by_model.items() if not licences]


def _read_header_licences(readme: Path) -> Iterator[Licence]:
    """Yield the licences under the key `license` of README.md's header, which stands between two lines `---`.

    A header that cannot be read counts as `other`.
    """
    lines = _read_start(readme).splitlines() if readme.is_file() else []
    if not lines or lines[0].strip() != "---" or "---" not in lines[1:]:
        return
    try:
        header = parse_yaml("\n".join(lines[1 : lines.index("---", 1)]))
    except (ValueError, yaml.YAMLError):
        header = {"license": OTHER}
    declared = header.get("license") if isinstance(header, dict) else None
    named = header.get("license_name") if isinstance(header, dict) else None
    for name in declared if isinstance(declared, list) else [declared]:
        text = named if str(name).lower() == OTHER and isinstance(named, str) else name
        if isinstance(text, str) and text.strip():
            yield Licence(to_one_line(text.lower(), 60), readme.name)


def _read_text_licences(directory: Path) -> Iterator[Licence]:
    for file in matching_files(directory, FILES):
        text = " ".join(_read_start(file).lower().split())
        hits = [(hit.start(), -hit.end(), name) for name, title in _TITLES.items() if (hit := re.search(title, text))]
        # The title that comes first is the licence's own; others may be mentioned further down.
        yield Licence(min(hits)[2] if hits else OTHER, file.name)


def _read_start(file: Path) -> str:
    with file.open(encoding="utf-8-sig", errors="replace") as text:
        return text.read(_MOST)
