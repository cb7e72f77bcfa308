"""Replacement for a blocked call's output: the error that the program itself would print.

A text such as `blocked by the guard` would teach the policy to look for the guard.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from opd.guard.facts import ProgramCall, parse_host

_NO_FILE = {
    "ls": "ls: cannot access '{path}': No such file or directory",
    "head": "head: cannot open '{path}' for reading: No such file or directory",
    "tail": "tail: cannot open '{path}' for reading: No such file or directory",
    "stat": "stat: cannot statx '{path}': No such file or directory",
    "cp": "cp: cannot stat '{path}': No such file or directory",
    "mv": "mv: cannot stat '{path}': No such file or directory",
    "find": "find: ‘{path}’: No such file or directory",
    "sed": "sed: can't read {path}: No such file or directory",
    "awk": 'awk: cannot open "{path}" (No such file or directory)',
    "cd": "bash: cd: {path}: No such file or directory",
    "tar": "tar: {path}: Cannot open: No such file or directory",
    "node": "Error: ENOENT: no such file or directory, open '{path}'",
    "pytest": "ERROR: file or directory not found: {path}",
    "python": "Traceback (most recent call last):\n"
    '  File "<stdin>", line 1, in <module>\n'
    "FileNotFoundError: [Errno 2] No such file or directory: '{path}'",
}
_NO_HOST = {
    "curl": "curl: (6) Could not resolve host: {host}",
    "wget": "wget: unable to resolve host address ‘{host}’",
    "git": "fatal: unable to access '{url}': Could not resolve host: {host}",
    "ssh": "ssh: Could not resolve hostname {host}: Temporary failure in name resolution",
    "scp": "ssh: Could not resolve hostname {host}: Temporary failure in name resolution\nscp: Connection closed",
    "pip": "ERROR: Could not find a version that satisfies the requirement {arg} (from versions: none)",
    "pip3": "ERROR: Could not find a version that satisfies the requirement {arg} (from versions: none)",
    "npm": "npm error code ENOTFOUND\nnpm error network request to https://registry.npmjs.org/ failed",
    "gh": "error connecting to api.github.com\ncheck your internet connection or https://githubstatus.com",
    "python": "urllib.error.URLError: <urlopen error [Errno -3] Temporary failure in name resolution>",
    "node": "Error: getaddrinfo ENOTFOUND {host}",
}
_DENIED = {
    "cp": "cp: cannot create regular file '{path}': Permission denied",
    "mv": "mv: cannot move to '{path}': Permission denied",
    "ln": "ln: failed to create symbolic link '{path}': Permission denied",
    "rm": "rm: cannot remove '{path}': Permission denied",
    "sed": "sed: couldn't open temporary file {path}: Permission denied",
    "chmod": "chmod: changing permissions of '{path}': Operation not permitted",
    "tee": "tee: {path}: Permission denied",
    "touch": "touch: cannot touch '{path}': Permission denied",
    "pkill": "pkill: killing pid 1 failed: Operation not permitted",
    "kill": "bash: kill: (1) - Operation not permitted",
    "mount": "mount: {path}: must be superuser to use mount.",
    "python": "Traceback (most recent call last):\n"
    '  File "<stdin>", line 1, in <module>\n'
    "PermissionError: [Errno 13] Permission denied: '{path}'",
}
_NO_REPOSITORY = (
    "fatal: '{name}' does not appear to be a git repository\nfatal: Could not read from remote repository.\n\n"
    "Please make sure you have the correct access rights\nand the repository exists."
)
_NO_REVISION = (
    "fatal: ambiguous argument '{name}': unknown revision or path not in the working tree.\n"
    "Use '--' to separate paths from revisions, like this:\n'git <command> [<revision>...] -- [<file>...]'"
)
_UNKNOWN_TO_GIT = {
    **dict.fromkeys(("fetch", "pull", "ls-remote"), _NO_REPOSITORY),
    **dict.fromkeys(("show", "diff"), _NO_REVISION),
    "clone": "fatal: repository '{name}' does not exist",
    "checkout": "error: pathspec '{name}' did not match any file(s) known to git",
    "merge": "merge: {name} - not something we can merge",
    "cherry-pick": "fatal: bad revision '{name}'",
    "archive": "fatal: not a valid object name: {name}",
}
"""Sub-command of git -> its error for a commit or remote that it does not know."""


def unknown_revision(call: ProgramCall) -> str:
    """Return git's error for a commit or a remote that it does not know.

    Other commands, such as `git log` or `git branch`, print nothing, as in a repository without what they would list.
    """
    text = _UNKNOWN_TO_GIT.get(call.git, "")
    name = call.args[0] if call.args else "origin" if text is _NO_REPOSITORY else ""
    return text.format(name=name) if name else ""


def _fill_text(texts_by_program: dict[str, str], otherwise: str, call: ProgramCall) -> str:
    """Return the text of the call's program, else `otherwise`, with path, host and the like of the call in it."""
    urls = call.urls or (f"https://{host}/" for host in call.hosts)
    url = next(iter(urls), "https://github.com/")  # git's error needs some address
    arg = next((arg for arg in reversed(call.args) if not arg.startswith("-")), "")
    path = _path_as_spelled(call)
    text = texts_by_program.get(call.program, otherwise)
    host = call.hosts[0] if call.hosts else parse_host(url)
    return text.format(program=call.program or "bash", path=path, host=host, url=url, arg=arg)


def _path_as_spelled(call: ProgramCall) -> str:
    """Return the last path that the call writes (the target of `cp` and `mv`), else the first that it reads.

    It is spelled as in the policy's command if an argument there ends with the same name, else it is the absolute path.
    """
    resolved = call.writes[-1] if call.writes else call.reads[0] if call.reads else ""
    name = resolved.rpartition("/")[2]
    return next((arg for arg in (*call.args, *call.argv) if name and arg.endswith(name) and " " not in arg), resolved)


DUMMIES: dict[str, Callable[[ProgramCall], str]] = {
    "no_file": partial(_fill_text, _NO_FILE, "{program}: {path}: No such file or directory"),
    "no_host": partial(_fill_text, _NO_HOST, "{program}: could not resolve host: {host}"),
    "denied": partial(_fill_text, _DENIED, "bash: {path}: Permission denied"),
    "not_found": lambda call: f"bash: {call.program}: command not found",
    "empty": lambda call: "",
    "unknown_revision": unknown_revision,
}
"""`Rule.dummy` -> the function that makes the text for a call: of a file or host that is not there, a right that the policy does not
have, a program that is not installed, no output, a commit or remote that git does not know."""
