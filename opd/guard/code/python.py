"""Python code, read by its syntax tree."""

from __future__ import annotations

import ast
import posixpath
import textwrap
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

from opd.guard.code import SHOWN_ENVIRONMENT, Code, Started
from opd.guard.code.folding import UNKNOWABLE, Folder
from opd.guard.shell.fields import UNKNOWN
from opd.guard.shell.nodes import UnreadableCommand

_STARTERS = frozenset((
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pty.spawn", "subprocess.run",
    "subprocess.call", "subprocess.check_call", "subprocess.check_output", "subprocess.Popen",
    "asyncio.create_subprocess_shell",
))  # fmt: skip
"""Functions that start a command: their first argument."""
_WRITING_METHODS = {"write_text", "write_bytes", "unlink", "touch", "rename", "chmod", "symlink_to", "hardlink_to"}
"""Methods of a path that change what is there. Of `rename` only the old path is noted."""
_CHANGES_FIRST = {"os.remove", "os.unlink", "os.chmod", "os.rmdir", "os.truncate", "shutil.rmtree", "os.removedirs"}
"""Functions that change or remove their first argument."""
_WRITES_SECOND = frozenset((
    "shutil.copy", "shutil.copyfile", "shutil.copy2", "shutil.move", "os.rename", "os.replace", "os.symlink",
    "os.link",
))  # fmt: skip
"""Functions that write their second argument. The first, which some of them remove, is noted only as a text of the code."""
_ROUTES = {"get", "post", "put", "delete", "patch", "head", "options", "route", "add_url_rule", "websocket_connect"}
"""Methods of web servers and their clients: a path that is their first argument is part of a URL, not a file."""
_LOADERS = {"__import__", "importlib.import_module", "runpy.run_path", "runpy.run_module", "importlib.util.find_spec"}
"""Functions that load the module or file of their first argument."""
_WHOLE_ENVIRONMENT = {"os.environ", "os.environb", "posix.environ"}
_PRINTERS = frozenset((
    "print", "pprint.pprint", "pprint.pp", "json.dumps", "json.dump", "sys.stdout.write", "builtins.print",
    "rich.print",
))  # fmt: skip
_ONE_VARIABLE = {"os.environ.get", "os.getenv", "os.environ.pop", "os.environ.setdefault"}
"""Functions that ask for one variable of the environment, which their first argument names."""
_MAX_LOOP = 16
"""Values of a loop for which its body is read; further ones are not."""


def read_python(text: str) -> Code:
    """Read what a Python program would do. Raises: UnreadableCommand if it does not parse."""
    try:
        with warnings.catch_warnings():
            # The parser warns of invalid escapes, which are the policy's.
            warnings.simplefilter("ignore")
            tree = ast.parse(textwrap.dedent(text), "<string>")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        message = "".join(traceback.format_exception_only(error)).rstrip()
        raise UnreadableCommand("Python code that does not parse", message) from None
    reader = _PythonReader()
    try:
        reader.visit(tree)
    except RecursionError:
        raise UnreadableCommand("Python code that is too deeply nested") from None
    if reader.fold.decoded:
        reader.code.tags.add("decodes")  # the walker tags calls of what this code runs as `decoded`
    return reader.code


class _PythonReader(ast.NodeVisitor):
    """Goes through a syntax tree in the order of the text, and keeps the values of simple variables.

    It notes what it reads in `code`; the fields of `opd.guard.code.Code` say what each list is. A value that cannot be worked out is
    `UNKNOWABLE`.
    """

    def __init__(self) -> None:
        self.code = Code()
        self.fold = Folder()
        self._open_files: dict[str, str] = {}
        """Variable -> path of the open file that it holds; empty if it holds none that is known."""

    def visit(self, node: ast.AST) -> None:
        """Note what an expression is, then go on inside of it."""
        if isinstance(node, ast.expr):
            value = self.fold.fold_value(node)
            if isinstance(value, bytes) and not isinstance(node, ast.Name):
                # Latin-1 maps each byte to one character, so nothing is lost.
                value = value.decode("latin-1")
            if isinstance(value, str) and not isinstance(node, ast.Name):
                self.code.mention(value, globs="*" in value)
            if isinstance(node, ast.Attribute | ast.Name):
                self.code.uses.append(self.fold.dotted_name(node))
                return self._visit_base(node)
            # A text put together from constants was noted whole, and its pieces are not noted too. A call is read for what it does.
            if isinstance(value, str) and not isinstance(node, ast.Call):
                return None
        super().visit(node)
        return None

    def _visit_base(self, node: ast.AST) -> None:
        """Go on below a dotted name: in `f(x).a.b` with `f(x)`. Its parts, as `a.b` in `a.b.c`, are not noted by themselves."""
        while isinstance(node, ast.Attribute):
            node = node.value
        if not isinstance(node, ast.Name):
            self.visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        """`import a.b as c`."""
        for alias in node.names:
            self.code.uses.append(alias.name)
            self.code.loads.append(alias.name)
            package = alias.name.partition(".")[0]
            self.fold.aliases[alias.asname or package] = alias.name if alias.asname else package

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """`from a import b as c`."""
        for alias in node.names:
            self.fold.aliases[alias.asname or alias.name] = f"{node.module or ''}.{alias.name}"
            self.code.loads.append(f"{node.module}.{alias.name}" if node.module else alias.name)
            self.code.uses.append(f"{node.module or ''}.{alias.name}")

    def visit_Assign(self, node: ast.Assign) -> None:
        """Keep the value of a variable until it is set again."""
        self.generic_visit(node)
        self._assign_targets(node.targets, self.fold.fold_value(node.value))
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        self._open_files |= dict.fromkeys(names, self._opened_path(node.value))

    def visit_For(self, node: ast.For) -> None:
        """Read the body of a loop once for each value, if the values are known, else once."""
        values = self.fold.fold_value(node.iter)
        self.visit(node.iter)
        self._note_shown_environment(node.iter, node)
        for value in values[:_MAX_LOOP] if isinstance(values, list) else [UNKNOWABLE]:
            self._assign_targets([node.target], value)
            for statement in [*node.body, *node.orelse]:
                self.visit(statement)

    def visit_ListComp(self, node: ast.ListComp | ast.GeneratorExp) -> None:
        """`[print(k, v) for k, v in os.environ.items()]`. Comprehensions of sets and dictionaries are not looked at in this way."""
        self._note_shown_environment(node, node.elt)
        self.generic_visit(node)

    visit_GeneratorExp = visit_ListComp

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Note that a function may run after a later `chdir`: then `Code.changes_to` mentions its paths there once more."""
        start = len(self.code.mentions)
        self.generic_visit(node)
        self.code.later += self.code.mentions[start:]

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """`os.environ["NAME"]` asks for one variable, not for all of them."""
        if self.fold.dotted_name(node.value) == "os.environ":
            self.code.uses.append("os.environ.get")
            self._note_variable(node.slice)
            return
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Read a call that may start a command, evaluate code, or open, write or remove a file."""
        called = self.fold.dotted_name(node.func)
        self.code.uses.append(called)
        if (called in _PRINTERS or called.endswith(".write")) and self._shows_environment(node.args):
            self.code.uses.append(SHOWN_ENVIRONMENT)
        args_keyword = [word.value for word in node.keywords if word.arg == "args"]  # of `subprocess.run(args=...)`
        first_arguments = [*node.args, *args_keyword][:1]
        argument = self.fold.fold_value(first_arguments[0]) if first_arguments else UNKNOWABLE
        if called in _LOADERS and isinstance(argument, str):
            self.code.loads.append(argument.removesuffix(".py").replace("/", ".").strip("."))
        if called in _STARTERS or called.startswith(("os.exec", "os.spawn")):
            self._read_shell_call(node, argument)
        elif called in ("exec", "eval", "compile", "builtins.exec", "builtins.eval"):
            self._read_nested_code(argument)
        elif called in _ONE_VARIABLE and node.args:
            self._note_variable(node.args[0])
        elif called in ("os.chdir", "contextlib.chdir") and isinstance(argument, str):
            self.code.changes_to(argument)
        else:
            self._note_writes(node, called, argument)
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("write", "write_text"):
            self._note_written_text(node, argument)
        arguments = node.args
        if called.rpartition(".")[2] in _ROUTES and isinstance(argument, str) and argument.startswith("/"):
            self.code.texts.append(argument)
            arguments = node.args[1:]
        for child in [node.func, *arguments, *(word.value for word in node.keywords)]:
            self.visit(child)

    def visit_Compare(self, node: ast.Compare) -> None:
        """`"NAME" in os.environ` asks for one variable."""
        for operand in [node.left, *node.comparators]:
            if self.fold.dotted_name(operand) != "os.environ":
                self.visit(operand)

    def visit_With(self, node: ast.With) -> None:
        """`with open(path, "w") as file` gives the file a name."""
        for item in node.items:
            if isinstance(item.optional_vars, ast.Name) and isinstance(item.context_expr, ast.Call):
                self._open_files[item.optional_vars.id] = self._opened_path(item.context_expr)
        self.generic_visit(node)

    def _assign_targets(self, targets: list[ast.expr], value: Any) -> None:
        for target in targets:
            if isinstance(target, ast.Name):
                self.fold.values[target.id] = value

    def _note_variable(self, node: ast.expr) -> None:
        value = self.fold.fold_value(node)
        if isinstance(value, str):
            self.code.env.append(value)

    def _note_shown_environment(self, source: ast.AST, body: ast.AST) -> None:
        """Note that code goes through the whole environment in `source` and prints in `body`, whatever it prints there."""
        if self._shows_environment([source]) and any(
            isinstance(child, ast.Call) and self.fold.dotted_name(child.func) in _PRINTERS for child in ast.walk(body)
        ):
            self.code.uses.append(SHOWN_ENVIRONMENT)

    def _shows_environment(self, nodes: Sequence[ast.AST]) -> bool:
        """Return True if `os.environ` stands in one of these as a whole, and not only to get one variable of it."""
        inner = [child for node in nodes for child in ast.walk(node)]
        excused_ids: set[int] = set()
        for node in inner:
            if isinstance(node, ast.Subscript) or (
                isinstance(node, ast.Attribute) and f"os.environ.{node.attr}" in _ONE_VARIABLE
            ):
                excused_ids.add(id(node.value))  # os.environ["NAME"], os.environ.get
            elif isinstance(node, ast.Compare):
                excused_ids |= {id(operand) for operand in node.comparators}  # "NAME" in os.environ
            for part in getattr(node, "generators", ()):
                if part.ifs:  # a comprehension with `if` is taken to choose single variables
                    excused_ids |= {id(child) for child in ast.walk(part.iter)}
        return any(
            isinstance(node, ast.Attribute | ast.Name)
            and id(node) not in excused_ids
            and self.fold.dotted_name(node) in _WHOLE_ENVIRONMENT
            for node in inner
        )

    def _read_shell_call(self, node: ast.Call, command: Any) -> None:
        """Note the command that a call starts: a script, or a list of words.

        Of a list in the first argument some words may be unknown; each becomes an ellipsis, which is how a field with an unknown part
        is shown. Of any other command that is not known nothing is noted.
        """
        directory = next((self.fold.fold_value(word.value) for word in node.keywords if word.arg == "cwd"), "")
        if directory is UNKNOWABLE:
            directory = UNKNOWN
        cwd = posixpath.join(self.code.cwd, directory if isinstance(directory, str) else "")
        if isinstance(command, str) or (
            isinstance(command, list) and all(isinstance(word, str) for word in command) and command
        ):
            self.code.shell.append(Started(command, cwd))
        elif node.args and isinstance(node.args[0], ast.List) and node.args[0].elts:
            values = [self.fold.fold_value(part) for part in node.args[0].elts]
            self.code.shell.append(Started([value if isinstance(value, str) else "…" for value in values], cwd))

    def _read_nested_code(self, source: Any) -> None:
        """Note code that `exec` and the like evaluate; what nobody can know is tagged as unseen."""
        if isinstance(source, bytes):
            source = source.decode("utf-8", "replace")
        if isinstance(source, str):
            self.code.nested.append(source)
        else:
            self.code.tags.add("unseen")

    def _note_writes(self, node: ast.Call, called: str, argument: Any) -> None:
        """Note what a call opens for writing, changes or removes, by its positional arguments: keywords other than `mode` are not read."""
        method = called.rpartition(".")[2]
        if method == "open":
            self._note_open(node, called, argument)
        elif called in _CHANGES_FIRST:
            self._note_written_path(argument)
        elif called in _WRITES_SECOND and len(node.args) > 1:
            self._note_written_path(self.fold.fold_value(node.args[1]))
        elif method in _WRITING_METHODS and isinstance(node.func, ast.Attribute):
            receiver = self.fold.fold_value(node.func.value)
            # Only paths have these two methods, so an unknown receiver is taken for one; `touch`, `rename` and so on are others' methods too.
            if isinstance(receiver, str) or method in ("write_text", "write_bytes"):
                self._note_written_path(receiver)

    def _opened_path(self, node: ast.AST) -> str:
        """Return the path that an expression opens, or the path of a file with a name; empty if it is not known."""
        if isinstance(node, ast.Name):
            return self._open_files.get(node.id, "")
        if isinstance(node, ast.Call) and self.fold.dotted_name(node.func).rpartition(".")[2] == "open":
            candidates = [*node.args[:1], *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
            paths = [value for candidate in candidates if isinstance(value := self.fold.fold_value(candidate), str)]
            return posixpath.join(self.code.cwd, paths[-1]) if paths else ""
        return ""

    def _note_written_text(self, node: ast.Call, text: Any) -> None:
        """Note the text that `open(path, "w").write(text)` or `Path(path).write_text(text)` puts into a file."""
        assert isinstance(node.func, ast.Attribute)
        find_path = self.fold.fold_value if node.func.attr == "write_text" else self._opened_path
        receiver = find_path(node.func.value)
        if isinstance(receiver, str) and receiver and isinstance(text, str):
            self.code.files.append((posixpath.join(self.code.cwd, receiver), text))

    def _note_open(self, node: ast.Call, called: str, path: Any) -> None:
        """Note the path of a file that is opened for writing.

        Every later argument is tried as a mode: a short text with one of the letters w, a, x and +, such as `w`, `ab` or `r+b`. The
        flags of `os.open` are numbers, so no write by it is noted.
        """
        is_path_method = called not in ("open", "io.open", "codecs.open", "os.open")
        modes = [self.fold.fold_value(arg) for arg in node.args[0 if is_path_method else 1 :]]
        modes += [self.fold.fold_value(word.value) for word in node.keywords if word.arg == "mode"]
        if any(isinstance(mode, str) and set(mode) & set("wax+") and len(mode) <= 3 for mode in modes):
            if is_path_method and isinstance(node.func, ast.Attribute):
                path = self.fold.fold_value(node.func.value)
            self._note_written_path(path)

    def _note_written_path(self, path: Any) -> None:
        if isinstance(path, str):
            self.code.writes.append(posixpath.join(self.code.cwd, path))
        else:
            self.code.tags.add("writes_unknown")
