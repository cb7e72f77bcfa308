"""The state of an episode's shell, as the guard knows it: where it is, what its calls set, linked, wrote and copied."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path

from opd.guard.shell.fields import UNKNOWN, UNSET, glob_regex, has_glob, show_field

MAX_LISTED = 256
MAX_LINKS = 16
MAX_WRITTEN = 1 << 16
"""Characters of a text that grows; of a longer one we say that we do not know it."""
MAX_PATH = 4096
"""Characters of a path that the system takes: no link or file has a longer one."""
STDIN_PATH = "/dev/fd/0"
STDIN_NAMES = frozenset({"/dev/stdin", STDIN_PATH, "/proc/self/fd/0"})
"""Names of the standard input."""
CODE_SUFFIXES = (".js", ".mjs", ".cjs", ".ts", ".rb", ".pl", ".pm", ".php")
"""Ends of names of code that is loaded by name."""
MAX_NAME = 128
SHELL_FIELDS = ("cwd", "previous_cwd", "directory_stack", "variables", "functions", "positional")
"""Fields of a session about the shell; a subshell changes it for itself alone."""
FILE_FIELDS = ("links", "copies", "written", "appended")
"""Fields of a session about files; a subshell changes it for all."""


@dataclass(slots=True, kw_only=True)
class GuardSession:
    """The state of one episode. The guard changes it only by calls that it lets pass."""

    cwd: str = "/workspace"
    """The working directory, an absolute path without links."""
    home: str = "/root"
    keeps_shell: bool = True
    """True if calls share one shell, so that `cd`, variables and functions last; else each call begins anew."""
    root: Path | None = None
    """A directory of this machine that is the `/` of the episode: links and globs are looked up there. None: only the links
    that the episode made are known, and a glob is compared with well-known names."""
    previous_cwd: str = ""
    """The working directory before the last `cd`; that of the beginning if there was none."""
    directory_stack: list[str] = field(default_factory=list)
    """Directories that `pushd` keeps, the last one first."""
    variables: dict[str, str] = field(default_factory=dict)
    functions: dict[str, object] = field(default_factory=dict)
    positional: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)
    """Links that the episode made: path -> target."""
    copies: dict[str, str] = field(default_factory=dict)
    """Copies that it made: path -> what it is a copy of."""
    written: dict[str, str | None] = field(default_factory=dict)
    """Files whose whole text the episode wrote: path -> text, None if we do not know it."""
    appended: dict[str, str | None] = field(default_factory=dict)
    """Texts that it appended to other files: path -> text, None if we do not know it."""
    read_variables: list[str] = field(default_factory=list)
    """Names of variables that the last call used."""
    begins_at: str = ""
    """The directory in which a new shell begins, if calls do not share one; `cwd` if not given."""
    other_states: list[GuardSession] = field(default_factory=list)
    """Other states that the episode may be in, since nobody knows which commands succeeded (`opd.guard.shell.ways`)."""

    def __post_init__(self) -> None:
        self.begins_at = self.begins_at or self.cwd
        self.previous_cwd = self.previous_cwd or self.cwd

    def copy(self) -> GuardSession:
        """Return a session of its own with the same state."""
        new = copy(self)
        new.variables, new.functions = dict(self.variables), dict(self.functions)
        new.links, new.copies = dict(self.links), dict(self.copies)
        new.written, new.appended = dict(self.written), dict(self.appended)
        new.directory_stack, new.positional, new.read_variables = list(self.directory_stack), list(self.positional), []
        new.other_states = [state.copy() for state in self.other_states]
        return new

    def is_similar(self, state: GuardSession) -> bool:
        """Return True if the other state is this one, or so near that only one of them is looked at: both are somewhere in the
        directory where the session begins, or the episode may have written a file in one of them alone."""
        return (
            all(
                getattr(self, name) == getattr(state, name)
                for name in ("variables", "functions", "positional", "links", "copies")
            )
            and self._simplify_directory(self.cwd) == self._simplify_directory(state.cwd)
            and self._simplify_directory(self.previous_cwd) == self._simplify_directory(state.previous_cwd)
            and _agree_where_known(self.written, state.written)
            and _agree_where_known(self.appended, state.appended)
        )

    def _simplify_directory(self, directory: str) -> str:
        inside = directory == self.begins_at or directory.startswith(self.begins_at.rstrip("/") + "/")
        return self.begins_at if inside else directory

    def take_files(self, state: GuardSession) -> None:
        """Add what a similar state knows of files; where both know a file, this one's text stays."""
        self.written = state.written | self.written
        self.appended = state.appended | self.appended

    def state_entries(self) -> set[tuple[str, ...]]:
        """Return the state, piece by piece, to compare it with another state."""
        texts = {
            (name, key, str(value))
            for name in ("variables", "links", "copies", "written", "appended")
            for key, value in getattr(self, name).items()
        }
        functions = {("function", name, str(id(body))) for name, body in self.functions.items()}
        return texts | functions | {("cwd", self._simplify_directory(self.cwd)), ("positional", *self.positional)}

    @property
    def size(self) -> int:
        """The number of entries, which is what a copy costs."""
        tables = (self.variables, self.functions, self.links, self.copies, self.written, self.appended)
        return sum(len(table) for table in tables)

    def take_over(self, state: GuardSession) -> None:
        """Take over the state of a copy: its call is let through."""
        for name in (*SHELL_FIELDS, "read_variables", *FILE_FIELDS, "other_states"):
            setattr(self, name, getattr(state, name))

    def resolve_path(self, path: str, follow_copies: bool = True) -> str:
        """Return the path as the system would find it: from the working directory, without `..` and links.

        With `follow_copies` a copy is what it was copied from: that is what a reader sees, but not what a writer changes.
        """
        if path.startswith("/proc/self/fd/") or path in STDIN_NAMES:
            return STDIN_PATH if path in STDIN_NAMES else "/dev/fd/" + path.rpartition("/")[2]
        parts = posixpath.join(self.cwd, path).split("/")[::-1]
        resolved_parts: list[str] = []
        links = 0
        while parts:
            part = parts.pop()
            if part == "..":
                del resolved_parts[-1:]
            elif part not in ("", "."):
                resolved_parts.append(part)
                # With its slash a component has two characters at least.
                looks = links < MAX_LINKS and len(resolved_parts) <= MAX_PATH // 2
                target = self._resolve_link("/" + "/".join(resolved_parts), bool(parts), follow_copies) if looks else ""
                if target:
                    links += 1
                    resolved_parts = [] if target.startswith("/") else resolved_parts[:-1]
                    parts += target.split("/")[::-1]
        return "/" + "/".join(resolved_parts)

    def _resolve_link(self, path: str, inside: bool, follow_copies: bool) -> str:
        """Return the target of a link; empty if it is none. `inside` is true if the path goes on below it."""
        if path == "/proc/self/cwd":
            return self.cwd
        if inside and path.startswith("/proc/") and path.endswith("/root") and path.count("/") == 3:
            return "/"
        target = (follow_copies and self.copies.get(path)) or self.links.get(path) or self._link_on_disk(path)
        # A link to something below itself would be followed without end.
        return "" if target.startswith(path + "/") else target

    def _link_on_disk(self, path: str) -> str:
        if self.root is None:
            return ""
        try:
            return str((self.root / path.lstrip("/")).readlink())
        except (OSError, ValueError):  # no link, or no name that the system knows
            return ""

    def resolve_argument(self, field: str, follow_copies: bool = True) -> list[str]:
        """Return the absolute paths that an argument may mean: its glob's files where they can be listed, else one pattern."""
        if UNSET in field:  # the variable may be one of the environment, or empty
            return [
                *self.resolve_argument(field.replace(UNSET, UNKNOWN), follow_copies),
                *self.resolve_argument(field.replace(UNSET, ""), follow_copies),
            ]
        path = self.resolve_path(field, follow_copies)
        if self.root is not None and has_glob(path) and UNKNOWN not in path:
            matches = self._list_glob(show_field(path))
            if matches:
                return matches
        if not has_glob(path) or len(path) > MAX_PATH:
            return [path]
        regex = glob_regex(path)
        return [path, *(name for name in self.written if len(name) <= MAX_PATH and regex.fullmatch(name))]

    def _list_glob(self, pattern: str) -> list[str]:
        assert self.root is not None
        try:
            matches = sorted(self.root.glob(pattern.lstrip("/")))[:MAX_LISTED]
        except (OSError, ValueError):  # not a pattern that Python lists
            return []
        return ["/" + str(match.relative_to(self.root)) for match in matches]

    def record_write(self, path: str, text: str | None) -> None:
        """Note that the episode wrote this file. What was a link or a copy of something is now its own."""
        self.links.pop(path, None)
        self.copies.pop(path, None)
        self.appended.pop(path, None)
        self.written[path] = text

    def record_append(self, path: str, text: str | None) -> None:
        """Note that it appended a text."""
        texts = self.written if path in self.written else self.appended
        old_text = texts.get(path, "")
        new_text = old_text + text if old_text is not None and text is not None else None
        texts[path] = None if new_text is None or len(new_text) > MAX_WRITTEN else new_text

    def written_text(self, path: str) -> str | None:
        """Return the text of a file as far as the episode wrote it; None if it did not, or if we do not know it."""
        return self.written.get(path, self.appended.get(path))

    def written_text_of(self, field: str) -> str | None:
        """Return `written_text` of the file that an argument names."""
        return self.written_text(self.resolve_path(field))

    def written_module(self, name: str) -> tuple[str, str] | None:
        """Path and text of a module of Python that the episode wrote, wherever it lies; `a.b.c` may be a name in `a.b` or in `a`."""
        parts = name.split(".")[:4]
        for count in range(len(parts), 0, -1):
            base = "/" + "/".join(parts[:count])
            for path, text in self.written.items():
                if text and path.endswith((f"{base}.py", f"{base}/__init__.py", f"{base}/__main__.py")):
                    return path, text
        return None

    def written_code_file(self, name: str) -> tuple[str, str] | None:
        """Path and text of a file of code that the episode wrote, by a text that may name it, with its end or without."""
        if not self.written or not name or len(name) > MAX_NAME or any(map(str.isspace, name)):
            return None
        base = self.resolve_path(name)
        for path in (base, *(base + end for end in CODE_SUFFIXES)):
            if path.endswith(CODE_SUFFIXES) and (text := self.written.get(path)):
                return path, text
        return None

    def wrote_some(self, path: str) -> bool:
        """Return True if the episode wrote a part of this file."""
        return path in self.written or path in self.appended

    def restore_variables(self, values: Mapping[str, str | None]) -> None:
        """Give variables these values back; None: the variable was not set."""
        for name, value in values.items():
            if value is None:
                self.variables.pop(name, None)
            else:
                self.variables[name] = value

    def next_call(self) -> None:
        """Forget what does not last from one call to the next."""
        self.read_variables = []
        if not self.keeps_shell:
            self.cwd = self.previous_cwd = self.begins_at
            self.variables, self.functions, self.directory_stack, self.positional = {}, {}, [], []
        # Descriptors and process substitutions end with their call.
        for path in [path for path in self.written if path.startswith("/dev/fd/")]:
            del self.written[path]
        for state in self.other_states:
            state.next_call()


def _agree_where_known(texts: Mapping[str, str | None], other_texts: Mapping[str, str | None]) -> bool:
    """Return True if both say the same of what both know."""
    return all(other_texts[name] == text for name, text in texts.items() if name in other_texts)
