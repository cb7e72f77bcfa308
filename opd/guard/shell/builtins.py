"""Sets of programs about which their names alone say something."""

SUCCEED = frozenset({"cd", "pushd", "mkdir", "true", ":", "echo", "pwd", "export"})
"""Programs that we take to succeed. `false` fails, and of all others nobody knows."""
STOPS = frozenset({"exit", "return", "break", "continue"})
"""Programs behind which the rest of a script may be left out."""
BUILTINS = frozenset((
    "cd", "pushd", "popd", "export", "declare", "local", "readonly", "typeset", "read", "mapfile", "readarray", "unset", "set", "shift",
    "printf", "alias", "eval", "source", ".", "trap", "command", "builtin", "exec",
))  # fmt: skip
"""Programs that are part of the shell and may change its state. All others are processes of their own, which do not."""
