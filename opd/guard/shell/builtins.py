"""Lists of programs that are known by their names alone."""

SUCCEED = frozenset({"cd", "pushd", "mkdir", "true", ":", "echo", "pwd", "export"})
"""Programs that are taken to succeed. Of others nobody knows, but for `false`."""
STOPS = frozenset({"exit", "return", "break", "continue"})
"""Those behind which the rest of a script may be left out."""
BUILTINS = frozenset((
    "cd", "pushd", "popd", "export", "declare", "local", "readonly", "typeset", "read", "mapfile", "readarray", "unset", "set", "shift",
    "printf", "alias", "eval", "source", ".", "trap", "command", "builtin", "exec",
))  # fmt: skip
"""Programs that are part of the shell. Others are processes of their own, which change nothing of it."""
