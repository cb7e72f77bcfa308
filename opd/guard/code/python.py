"""Python code, read by its syntax tree."""

from __future__ import annotations

import ast
import posixpath
import textwrap
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

from opd.guard.code import Code, Started
from opd.guard.code.folding import UNKNOWABLE, Folder
from opd.guard.shell.fields import UNKNOWN
from opd.guard.shell.nodes import UnreadableCommand

_SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pty.spawn"}
_PROCESSES = {
    "subprocess.run",
    "subprocess.call",
    "subprocess.check_call",
    "subprocess.check_output",
    "subprocess.Popen",
    "asyncio.create_subprocess_shell",
}
_CHANGES = {"write_text", "write_bytes", "unlink", "touch", "rename", "chmod", "symlink_to", "hardlink_to"}
_REMOVERS = {"os.remove", "os.unlink", "os.chmod", "os.rmdir", "os.truncate", "shutil.rmtree", "os.removedirs"}
_TARGETS = {
    "shutil.copy",
    "shutil.copyfile",
    "shutil.copy2",
    "shutil.move",
    "os.rename",
    "os.replace",
    "os.symlink",
    "os.link",
}
_ROUTES = {"get", "post", "put", "delete", "patch", "head", "options", "route", "add_url_rule", "websocket_connect"}
"""Methods of web servers and their clients: a path that comes first is no file's."""
_LOADERS = {"__import__", "importlib.import_module", "runpy.run_path", "runpy.run_module", "importlib.util.find_spec"}
_WHOLE = {"os.environ", "os.environb", "posix.environ"}
_SHOWS = {
    "print",
    "pprint.pprint",
    "pprint.pp",
    "json.dumps",
    "json.dump",
    "sys.stdout.write",
    "builtins.print",
    "rich.print",
}
_ENVIRONMENT = {"os.environ.get", "os.getenv", "os.environ.pop", "os.environ.setdefault"}


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
        reader.code.tags.add("decodes")
    return reader.code


class _PythonReader(ast.NodeVisitor):
    """Goes through a tree in the order of the text and keeps the values of simple variables."""

    def __init__(self) -> None:
        self.code = Code()
        self.fold = Folder()
        self._named: dict[str, str] = {}
        """Variables that hold an open file, and its path."""

    def visit(self, node: ast.AST) -> None:
        """Note what an expression is, then go on inside of it."""
        if isinstance(node, ast.expr):
            value = self.fold.fold_value(node)
            if isinstance(value, bytes) and not isinstance(node, ast.Name):
                # Each byte is a character there, so nothing is lost.
                value = value.decode("latin-1")
            if isinstance(value, str) and not isinstance(node, ast.Name):
                self.code.mention(value, globs="*" in value)
            if isinstance(node, ast.Attribute | ast.Name):
                self.code.uses.append(self.fold.dotted_name(node))
                return self._visit_base(node)
            if isinstance(value, str) and not isinstance(node, ast.Call):
                return None
        super().visit(node)
        return None

    def _visit_base(self, node: ast.AST) -> None:
        """Go on below a dotted name, whose parts are no names of their own."""
        while isinstance(node, ast.Attribute):
            node = node.value
        if not isinstance(node, ast.Name):
            self.visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        """`import a.b as c`."""
        for alias in node.names:
            self.code.uses.append(alias.name)
            self.code.loads.append(alias.name)
            self.fold.aliases[alias.asname or alias.name.partition(".")[0]] = (
                alias.name if alias.asname else alias.name.partition(".")[0]
            )

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
        self._named |= {target.id: self._opened_path(node.value) for target in node.targets if isinstance(target, ast.Name)}

    def visit_For(self, node: ast.For) -> None:
        """Go through the body of a loop over known values once for each."""
        values = self.fold.fold_value(node.iter)
        self.visit(node.iter)
        if self._shows_environment([node.iter]) and any(
            isinstance(child, ast.Call) and self.fold.dotted_name(child.func) in _SHOWS for child in ast.walk(node)
        ):
            self.code.uses.append("shown environment")
        for value in values[:16] if isinstance(values, list) else [UNKNOWABLE]:
            self._assign_targets([node.target], value)
            for statement in [*node.body, *node.orelse]:
                self.visit(statement)

    def visit_ListComp(self, node: ast.ListComp | ast.GeneratorExp) -> None:
        """`[print(k, v) for k, v in os.environ.items()]`."""
        if self._shows_environment([node]) and any(
            isinstance(child, ast.Call) and self.fold.dotted_name(child.func) in _SHOWS for child in ast.walk(node.elt)
        ):
            self.code.uses.append("shown environment")
        self.generic_visit(node)

    visit_GeneratorExp = visit_ListComp

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Note that the mentions of a function count where it is called."""
        start = len(self.code.mentions)
        self.generic_visit(node)
        self.code.later += self.code.mentions[start:]

    visit_AsyncFunctionDef = visit_FunctionDef

    def _assign_targets(self, targets: list[ast.expr], value: Any) -> None:
        for target in targets:
            if isinstance(target, ast.Name):
                self.fold.values[target.id] = value

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """`os.environ["NAME"]` asks for one variable, not for all of them."""
        if self.fold.dotted_name(node.value) == "os.environ":
            self.code.uses.append("os.environ.get")
            self._note_variable(node.slice)
            return
        self.generic_visit(node)

    def _note_variable(self, node: ast.expr) -> None:
        value = self.fold.fold_value(node)
        if isinstance(value, str):
            self.code.env.append(value)

    def visit_Call(self, node: ast.Call) -> None:
        """Read a call: of a shell, of code, of what opens, writes or removes files."""
        called = self.fold.dotted_name(node.func)
        self.code.uses.append(called)
        if (called in _SHOWS or called.endswith(".write")) and self._shows_environment(node.args):
            self.code.uses.append("shown environment")
        named = [word.value for word in node.keywords if word.arg == "args"]
        argument = self.fold.fold_value([*node.args, *named][0]) if node.args or named else UNKNOWABLE
        if called in _LOADERS and isinstance(argument, str):
            self.code.loads.append(argument.removesuffix(".py").replace("/", ".").strip("."))
        if called in _SHELLS or called in _PROCESSES or called.startswith(("os.exec", "os.spawn")):
            self._read_shell_call(node, argument)
        elif called in ("exec", "eval", "compile", "builtins.exec", "builtins.eval"):
            self._read_nested_code(argument)
        elif called in _ENVIRONMENT and node.args:
            self._note_variable(node.args[0])
        elif called in ("os.chdir", "contextlib.chdir") and isinstance(argument, str):
            self.code.changes_to(argument)
        else:
            self._note_writes(node, called, argument)
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("write", "write_text"):
            self._note_written_text(node, argument)
        route = False
        if called.rpartition(".")[2] in _ROUTES and isinstance(argument, str) and argument.startswith("/"):
            route = True
            self.code.texts.append(argument)
        for child in [node.func, *node.args[route:], *(word.value for word in node.keywords)]:
            self.visit(child)

    def visit_Compare(self, node: ast.Compare) -> None:
        """`"NAME" in os.environ` asks for one variable."""
        for operand in [node.left, *node.comparators]:
            if self.fold.dotted_name(operand) != "os.environ":
                self.visit(operand)

    def _shows_environment(self, nodes: Sequence[ast.AST]) -> bool:
        """Return True if the whole environment stands among these, and not only one variable of it."""
        inner = [child for node in nodes for child in ast.walk(node)]
        single_variable_ids = {id(node.value) for node in inner if isinstance(node, ast.Subscript)}
        single_variable_ids |= {id(n.value) for n in inner if isinstance(n, ast.Attribute) and f"os.environ.{n.attr}" in _ENVIRONMENT}
        chosen = (part for node in inner for part in getattr(node, "generators", ()) if part.ifs)
        single_variable_ids |= {id(child) for part in chosen for child in ast.walk(part.iter)}
        single_variable_ids |= {id(operand) for node in inner if isinstance(node, ast.Compare) for operand in node.comparators}
        return any(
            isinstance(node, ast.Attribute | ast.Name) and id(node) not in single_variable_ids and self.fold.dotted_name(node) in _WHOLE
            for node in inner
        )

    def _read_shell_call(self, node: ast.Call, command: Any) -> None:
        directory = next((self.fold.fold_value(word.value) for word in node.keywords if word.arg == "cwd"), "")
        cwd = posixpath.join(self.code.cwd, directory if isinstance(directory, str) else UNKNOWN if directory is UNKNOWABLE else "")
        if isinstance(command, str) or (isinstance(command, list) and all(isinstance(one, str) for one in command) and command):
            self.code.shell.append(Started(command, cwd))
        elif node.args and isinstance(node.args[0], ast.List) and node.args[0].elts:
            known = [self.fold.fold_value(one) for one in node.args[0].elts]
            self.code.shell.append(Started([one if isinstance(one, str) else "…" for one in known], cwd))

    def _read_nested_code(self, source: Any) -> None:
        if isinstance(source, bytes):
            source = source.decode("utf-8", "replace")
        if isinstance(source, str):
            self.code.nested.append(source)
        else:
            self.code.tags.add("unseen")

    def _note_writes(self, node: ast.Call, called: str, argument: Any) -> None:
        """Note what a call opens for writing, changes or removes."""
        method = called.rpartition(".")[2]
        if method == "open":
            self._note_open(node, called, argument)
        elif called in _REMOVERS:
            self._note_written_path(argument)
        elif called in _TARGETS and len(node.args) > 1:
            self._note_written_path(self.fold.fold_value(node.args[1]))
        elif method in _CHANGES and isinstance(node.func, ast.Attribute):
            receiver = self.fold.fold_value(node.func.value)
            if isinstance(receiver, str) or method in ("write_text", "write_bytes"):
                self._note_written_path(receiver)

    def visit_With(self, node: ast.With) -> None:
        """`with open(path, "w") as file` gives the file a name."""
        for item in node.items:
            if isinstance(item.optional_vars, ast.Name) and isinstance(item.context_expr, ast.Call):
                self._named[item.optional_vars.id] = self._opened_path(item.context_expr)
        self.generic_visit(node)

    def _opened_path(self, node: ast.AST) -> str:
        """Return the path that an expression opens, or the path of a file with a name; empty if it is not known."""
        if isinstance(node, ast.Name):
            return self._named.get(node.id, "")
        if isinstance(node, ast.Call) and self.fold.dotted_name(node.func).rpartition(".")[2] == "open":
            candidates = [*node.args[:1], *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
            paths = [value for candidate in candidates if isinstance(value := self.fold.fold_value(candidate), str)]
            return posixpath.join(self.code.cwd, paths[-1]) if paths else ""
        return ""

    def _note_written_text(self, node: ast.Call, text: Any) -> None:
        """Note the text that `open(path, "w").write(text)` or `Path(path).write_text(text)` puts into a file."""
        assert isinstance(node.func, ast.Attribute)
        receiver = (
            self.fold.fold_value(node.func.value)
            if node.func.attr == "write_text"
            else self._opened_path(node.func.value)
        )
        if isinstance(receiver, str) and receiver and isinstance(text, str):
            self.code.files.append((posixpath.join(self.code.cwd, receiver), text))

    def _note_open(self, node: ast.Call, called: str, path: Any) -> None:
        own = called not in ("open", "io.open", "codecs.open", "os.open")  # a method of a path
        modes = [self.fold.fold_value(arg) for arg in node.args[0 if own else 1 :]]
        modes += [self.fold.fold_value(word.value) for word in node.keywords if word.arg == "mode"]
        if any(isinstance(mode, str) and set(mode) & set("wax+") and len(mode) <= 3 for mode in modes):
            self._note_written_path(
                self.fold.fold_value(node.func.value) if own and isinstance(node.func, ast.Attribute) else path
            )

    def _note_written_path(self, path: Any) -> None:
        if isinstance(path, str):
            self.code.writes.append(posixpath.join(self.code.cwd, path))
        else:
            self.code.tags.add("writes_unknown")
