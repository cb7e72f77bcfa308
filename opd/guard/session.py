"""The state of an episode's shell and files as far as the guard knows it: the working directory, variables, and what the calls of the
episode linked, copied and wrote. The guard never runs a call: it works out from the text of a call how the state changes."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path

from opd.guard.shell.fields import UNKNOWN, UNSET, glob_regex, has_glob, show_field

MAX_LISTED = 256
"""The most files that a glob is listed as."""
MAX_LINKS = 16
"""The most links that are followed for one path."""
MAX_WRITTEN = 1 << 16
"""The most characters of a text to which something is appended; a longer one counts as not known."""
MAX_PATH = 4096
"""The most characters of a path that Linux takes: no link or file has a longer one."""
STDIN_PATH = "/dev/fd/0"
STDIN_NAMES = frozenset({"/dev/stdin", STDIN_PATH, "/proc/self/fd/0"})
"""All paths of the standard input; `STDIN_PATH` is the one under which `GuardSession.written` has its text."""
CODE_SUFFIXES = (".js", ".mjs", ".cjs", ".ts", ".rb", ".pl", ".pm", ".php")
"""Ends of names of code files, other than Python's, which code may load by name without the end."""
MAX_NAME = 128
"""The most characters of a string in code that may be the name of a file to load."""
SHELL_FIELDS = ("cwd", "previous_cwd", "directory_stack", "variables", "functions", "positional")
"""Fields of a session about the shell; what a subshell changes in them ends with the subshell."""
FILE_FIELDS = ("links", "copies", "written", "appended")
"""Fields of a session about files; what a subshell changes in them stays."""


@dataclass(slots=True, kw_only=True)
class GuardSession:
    """The state of one episode. A call changes it only if the guard lets the call run."""

    cwd: str = "/workspace"
    """The working directory, an absolute path without links."""
    home: str = "/root"
    keeps_shell: bool = True
    """True if calls share one shell, so that `cd`, variables and functions last; else each call begins anew."""
    root: Path | None = None
    """A directory of this machine that is the `/` of the episode: links and globs are looked up there. None: only links that the
    episode made are known, and a glob stays a pattern, which the rules compare with well-known paths."""
    previous_cwd: str = ""
    """The working directory before the last `cd`; the first one if there was no `cd`."""
    directory_stack: list[str] = field(default_factory=list)
    """Directories that `pushd` keeps, the last one first."""
    variables: dict[str, str] = field(default_factory=dict)
    """Name of a variable that the episode set -> value, a field (`opd.guard.shell.fields`)."""
    functions: dict[str, object] = field(default_factory=dict)
    """Name of a function of the shell -> its body, a `Command` of `opd.guard.shell.nodes`."""
    positional: list[str] = field(default_factory=list)
    """The positional arguments, `$1` first."""
    links: dict[str, str] = field(default_factory=dict)
    """Path of a link that the episode made -> its target."""
    copies: dict[str, str] = field(default_factory=dict)
    """Path of a copy that the episode made -> path of what it is a copy of."""
    written: dict[str, str | None] = field(default_factory=dict)
    """Path of a file that the episode wrote as a whole -> its text, None if we do not know it."""
    appended: dict[str, str | None] = field(default_factory=dict)
    """Path of another file -> text that the episode appended to it, None if we do not know it."""
    read_variables: list[str] = field(default_factory=list)
    """Names of variables that the last command used though the episode did not set them."""
    begins_at: str = ""
    """The directory in which a new shell begins, if calls do not share one; `cwd` if not given."""
    other_states: list[GuardSession] = field(default_factory=list)
    """Other states that the episode may be in, since nobody knows which commands succeeded (`opd.guard.shell.branches`)."""

    def __post_init__(self) -> None:
        self.begins_at = self.begins_at or self.cwd
        self.previous_cwd = self.previous_cwd or self.cwd

    def copy(self) -> GuardSession:
        """Return another session with the same state, without `read_variables`."""
        new = copy(self)
        new.variables, new.functions = dict(self.variables), dict(self.functions)
        new.links, new.copies = dict(self.links), dict(self.copies)
        new.written, new.appended = dict(self.written), dict(self.appended)
        new.directory_stack, new.positional, new.read_variables = list(self.directory_stack), list(self.positional), []
        new.other_states = [state.copy() for state in self.other_states]
        return new

    def is_similar(self, state: GuardSession) -> bool:
        """Return True if the two states differ so little that it is enough to look at one of them. They may be in different
        directories below the one where the session begins, and files may have been written in one of them alone."""
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
        """Return the directory where the session begins for each one below it, so that these compare as equal."""
        inside = directory == self.begins_at or directory.startswith(self.begins_at.rstrip("/") + "/")
        return self.begins_at if inside else directory

    def take_files(self, state: GuardSession) -> None:
        """Add the files that a similar state knows and this one does not."""
        self.written = state.written | self.written
        self.appended = state.appended | self.appended

    def state_entries(self) -> set[tuple[str, ...]]:
        """Return the state as a set of entries, to count in how many of them it differs from another state."""
        texts = {
            (name, key, str(value))
            for name in ("variables", "links", "copies", "written", "appended")
            for key, value in getattr(self, name).items()
        }
        functions = {("function", name, str(id(body))) for name, body in self.functions.items()}
        return texts | functions | {("cwd", self._simplify_directory(self.cwd)), ("positional", *self.positional)}

    @property
    def size(self) -> int:
        """The number of entries of all tables, to which the time of a copy is proportional."""
        tables = (self.variables, self.functions, self.links, self.copies, self.written, self.appended)
        return sum(len(table) for table in tables)

    def take_over(self, state: GuardSession) -> None:
        """Let this session be in the state of the other one, which is a copy of it that went on and is not used any more."""
        for name in (*SHELL_FIELDS, "read_variables", *FILE_FIELDS, "other_states"):
            setattr(self, name, getattr(state, name))

    def resolve_path(self, path: str, follow_copies: bool = True) -> str:
        """Return the absolute path that the system would find, without `..` and links.

        With `follow_copies` a path of a copy becomes the path that it was copied from. That is right for a call that reads the path, as
        it sees what the other one holds, but not for a call that writes it.
        """
        if path.startswith("/proc/self/fd/") or path in STDIN_NAMES:
            return STDIN_PATH if path in STDIN_NAMES else "/dev/fd/" + path.rpartition("/")[2]
        parts = posixpath.join(self.cwd, path).split("/")[::-1]  # components that are still to come, the next one last
        resolved_parts: list[str] = []
        links = 0
        while parts:
            part = parts.pop()
            if part == "..":
                del resolved_parts[-1:]
            elif part not in ("", "."):
                resolved_parts.append(part)
                # A component with its slash has at least two characters, so beyond this the path is longer than any that exists.
                may_exist = links < MAX_LINKS and len(resolved_parts) <= MAX_PATH // 2
                if may_exist and (target := self._resolve_link(resolved_parts, bool(parts), follow_copies)):
                    links += 1
                    resolved_parts = [] if target.startswith("/") else resolved_parts[:-1]
                    parts += target.split("/")[::-1]
        return "/" + "/".join(resolved_parts)

    def _resolve_link(self, components: list[str], inside: bool, follow_copies: bool) -> str:
        """Return the target of the link at a path or, with `follow_copies`, the original of a copy; empty if the path is neither. `inside`
        is true if the path to resolve goes on below this one."""
        path = "/" + "/".join(components)
        if path == "/proc/self/cwd":
            return self.cwd
        if inside and path.startswith("/proc/") and path.endswith("/root") and path.count("/") == 3:
            return "/"  # `/proc/PID/root` is the root as a process sees it
        target = (follow_copies and self.copies.get(path)) or self.links.get(path) or self._link_on_disk(path)
        # A link to something below itself would be followed without end.
        return "" if target.startswith(path + "/") else target

    def _link_on_disk(self, path: str) -> str:
        """Return the target of a link below `root`; empty if it is none, or if there is no `root`."""
        if self.root is None:
            return ""
        try:
            return str((self.root / path.lstrip("/")).readlink())
        except (OSError, ValueError):  # no link, or no name that the system knows
            return ""

    def resolve_argument(self, field: str, follow_copies: bool = True) -> list[str]:
        """Return the absolute paths that an argument may mean. A glob becomes the files that it fits, if they can be listed; else it stays a
        pattern, and files that the episode wrote come beside it."""
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
        """Return the files below `root` that an absolute glob fits, at most `MAX_LISTED`, as paths of the episode."""
        assert self.root is not None
        try:
            matches = sorted(self.root.glob(pattern.lstrip("/")))[:MAX_LISTED]
        except (OSError, ValueError):  # not a pattern that Python lists
            return []
        return ["/" + str(match.relative_to(self.root)) for match in matches]

    def record_write(self, path: str, text: str | None) -> None:
        """Note that the episode wrote this file as a whole, with this text, None if it is not known. The path is no link or copy of
        something any more."""
        self.links.pop(path, None)
        self.copies.pop(path, None)
        self.appended.pop(path, None)
        self.written[path] = text

    def record_append(self, path: str, text: str | None) -> None:
        """Note that the episode appended a text, None if it is not known."""
        texts = self.written if path in self.written else self.appended
        old_text = texts.get(path, "")
        new_text = old_text + text if old_text is not None and text is not None else None
        texts[path] = None if new_text is None or len(new_text) > MAX_WRITTEN else new_text

    def written_text(self, path: str) -> str | None:
        """Return the text that the episode wrote to the file at an absolute path, or appended to it; None if it did neither, or if we do not
        know the text."""
        return self.written.get(path, self.appended.get(path))

    def written_text_of(self, field: str) -> str | None:
        """Return `written_text` of the file that an argument of a program names."""
        return self.written_text(self.resolve_path(field))

    def written_module(self, name: str) -> tuple[str, str] | None:
        """Return path and text of a Python module that the episode wrote, in whatever directory; None if it wrote none of this name. As
        `a.b.c` may be a name in the module `a.b` or `a`, these are tried after it."""
        parts = name.split(".")[:4]
        for count in range(len(parts), 0, -1):
            base = "/" + "/".join(parts[:count])
            for path, text in self.written.items():
                if text and path.endswith((f"{base}.py", f"{base}/__init__.py", f"{base}/__main__.py")):
                    return path, text
        return None

    def written_code_file(self, name: str) -> tuple[str, str] | None:
        """Return path and text of a code file, not of Python, that the episode wrote; None if `name`, any string of some code, does not
        name one, with one of `CODE_SUFFIXES` or without."""
        if not self.written or not name or len(name) > MAX_NAME or any(map(str.isspace, name)):
            return None
        base = self.resolve_path(name)
        for path in (base, *(base + end for end in CODE_SUFFIXES)):
            if path.endswith(CODE_SUFFIXES) and (text := self.written.get(path)):
                return path, text
        return None

    def wrote_some(self, path: str) -> bool:
        """Return True if the episode wrote this file or appended to it."""
        return path in self.written or path in self.appended

    def restore_variables(self, values: Mapping[str, str | None]) -> None:
        """Give variables their former values back; None for a variable that was not set."""
        for name, value in values.items():
            if value is None:
                self.variables.pop(name, None)
            else:
                self.variables[name] = value

    def next_call(self) -> None:
        """Forget what does not last from one tool call to the next."""
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
    """Return True if there is no file that both know with different texts."""
    return all(other_texts[name] == text for name, text in texts.items() if name in other_texts)
