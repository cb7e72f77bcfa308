"""The handlers of all programs of which a walker does more than to note the call: they run other programs or code, or change the
shell's state.

A `Walker` gets this table as an argument, since the modules of the handlers import the walker's.
"""

from __future__ import annotations

from opd.guard.shell.assignments import handle_declare, handle_mapfile, handle_printf, handle_read, handle_unset
from opd.guard.shell.for_each import handle_find, handle_parallel, handle_xargs
from opd.guard.shell.interpreters import (
    handle_alias,
    handle_awk,
    handle_eval,
    handle_make,
    handle_shell,
    handle_source,
    handle_trap,
    make_language_handler,
)
from opd.guard.shell.projects import handle_git, handle_npm, handle_patch
from opd.guard.shell.state_programs import handle_cd, handle_copy, handle_set, handle_shift, handle_tee
from opd.guard.shell.walk import Handler
from opd.guard.shell.wrappers import WRAPPERS, handle_docker, handle_project_runner, handle_script, handle_wrapper

PROGRAMS: dict[str, Handler] = {
    **dict.fromkeys(WRAPPERS, handle_wrapper),
    **dict.fromkeys(("sh", "bash", "dash", "zsh", "ksh", "ash"), handle_shell),
    **{name: make_language_handler("python") for name in ("python", "python2", "python3", "pypy", "pypy3", "ipython")},
    **{f"python3.{minor}": make_language_handler("python") for minor in range(6, 16)},
    **{name: make_language_handler(name) for name in ("perl", "ruby", "node", "php")},
    **dict.fromkeys(("nodejs", "bun", "deno"), make_language_handler("node")),
    **dict.fromkeys(("awk", "gawk", "mawk", "nawk"), handle_awk),
    **dict.fromkeys(("cd", "pushd", "popd"), handle_cd),
    **dict.fromkeys(("export", "declare", "local", "readonly", "typeset"), handle_declare),
    **dict.fromkeys(("mapfile", "readarray"), handle_mapfile),
    **dict.fromkeys(("cp", "mv", "ln", "link"), handle_copy),
    **dict.fromkeys(("script", "su"), handle_script),
    **dict.fromkeys(("docker", "podman"), handle_docker),
    **dict.fromkeys(("uv", "poetry", "pipenv"), handle_project_runner),
    **dict.fromkeys(("make", "gmake"), handle_make),
    **dict.fromkeys(("npm", "yarn", "pnpm"), handle_npm),
    "git": handle_git,
    "patch": handle_patch,
    "read": handle_read,
    "unset": handle_unset,
    "printf": handle_printf,
    "alias": handle_alias,
    "eval": handle_eval,
    "source": handle_source,
    ".": handle_source,
    "xargs": handle_xargs,
    "parallel": handle_parallel,
    "find": handle_find,
    "set": handle_set,
    "shift": handle_shift,
    "tee": handle_tee,
    "trap": handle_trap,
}
"""Name of the program -> its handler."""
