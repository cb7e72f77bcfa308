"""The programs that the walker does not only note: they run others, run code, or change the state of the shell.

Each handler notes the call and goes on into what it runs. The walker is given them, so that it does not import them.
"""

from __future__ import annotations

from opd.guard.shell.assigned import read, run_declare, run_mapfile, run_printf, run_unset
from opd.guard.shell.interpreters import (
    make_language_handler,
    run_alias,
    run_awk,
    run_eval,
    run_make,
    run_shell,
    run_source,
    run_trap,
)
from opd.guard.shell.many import run_find, run_parallel, run_xargs
from opd.guard.shell.projects import walk_git, walk_npm, walk_patch
from opd.guard.shell.state import run_cd, run_copy, run_shift, run_tee, set_positional
from opd.guard.shell.walk import Handler
from opd.guard.shell.wrappers import WRAPPERS, run_docker, run_runner, run_script, run_wrapper

PROGRAMS: dict[str, Handler] = {
    **dict.fromkeys(WRAPPERS, run_wrapper),
    **dict.fromkeys(("sh", "bash", "dash", "zsh", "ksh", "ash"), run_shell),
    **{name: make_language_handler("python") for name in ("python", "python2", "python3", "pypy", "pypy3", "ipython")},
    **{f"python3.{minor}": make_language_handler("python") for minor in range(6, 16)},
    **{name: make_language_handler(name) for name in ("perl", "ruby", "node", "php")},
    **dict.fromkeys(("nodejs", "bun", "deno"), make_language_handler("node")),
    **dict.fromkeys(("awk", "gawk", "mawk", "nawk"), run_awk),
    **dict.fromkeys(("cd", "pushd", "popd"), run_cd),
    **dict.fromkeys(("export", "declare", "local", "readonly", "typeset"), run_declare),
    **dict.fromkeys(("mapfile", "readarray"), run_mapfile),
    **dict.fromkeys(("cp", "mv", "ln", "link"), run_copy),
    **dict.fromkeys(("script", "su"), run_script),
    **dict.fromkeys(("docker", "podman"), run_docker),
    **dict.fromkeys(("uv", "poetry", "pipenv"), run_runner),
    **dict.fromkeys(("make", "gmake"), run_make),
    **dict.fromkeys(("npm", "yarn", "pnpm"), walk_npm),
    "git": walk_git,
    "patch": walk_patch,
    "read": read,
    "unset": run_unset,
    "printf": run_printf,
    "alias": run_alias,
    "eval": run_eval,
    "source": run_source,
    ".": run_source,
    "xargs": run_xargs,
    "parallel": run_parallel,
    "find": run_find,
    "set": set_positional,
    "shift": run_shift,
    "tee": run_tee,
    "trap": run_trap,
}
