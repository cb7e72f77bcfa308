"""The programs that the walker does not only note: they run others, run code, or change the state of the shell.

Each handler notes the call and goes on into what it runs. The walker is given them, so that it does not import them.
"""

from __future__ import annotations

from opd.guard.shell.assigned import declare, mapfile, printf, read, unset
from opd.guard.shell.interpreters import alias, awk, evaluate, language, make, shell, source, trap
from opd.guard.shell.many import find, parallel, xargs
from opd.guard.shell.projects import walk_git, walk_npm, walk_patch
from opd.guard.shell.state import cd, copies, set_positional, shift, tee
from opd.guard.shell.walk import Handler
from opd.guard.shell.wrappers import WRAPPERS, docker, runner, script, wrapped

PROGRAMS: dict[str, Handler] = {
    **dict.fromkeys(WRAPPERS, wrapped),
    **dict.fromkeys(("sh", "bash", "dash", "zsh", "ksh", "ash"), shell),
    **{name: language("python") for name in ("python", "python2", "python3", "pypy", "pypy3", "ipython")},
    **{f"python3.{minor}": language("python") for minor in range(6, 16)},
    **{name: language(name) for name in ("perl", "ruby", "node", "php")},
    **dict.fromkeys(("nodejs", "bun", "deno"), language("node")),
    **dict.fromkeys(("awk", "gawk", "mawk", "nawk"), awk),
    **dict.fromkeys(("cd", "pushd", "popd"), cd),
    **dict.fromkeys(("export", "declare", "local", "readonly", "typeset"), declare),
    **dict.fromkeys(("mapfile", "readarray"), mapfile),
    **dict.fromkeys(("cp", "mv", "ln", "link"), copies),
    **dict.fromkeys(("script", "su"), script),
    **dict.fromkeys(("docker", "podman"), docker),
    **dict.fromkeys(("uv", "poetry", "pipenv"), runner),
    **dict.fromkeys(("make", "gmake"), make),
    **dict.fromkeys(("npm", "yarn", "pnpm"), walk_npm),
    "git": walk_git,
    "patch": walk_patch,
    "read": read,
    "unset": unset,
    "printf": printf,
    "alias": alias,
    "eval": evaluate,
    "source": source,
    ".": source,
    "xargs": xargs,
    "parallel": parallel,
    "find": find,
    "set": set_positional,
    "shift": shift,
    "tee": tee,
    "trap": trap,
}
