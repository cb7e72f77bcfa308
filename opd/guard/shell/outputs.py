"""Output of a program, worked out without running it, for the few programs with which text is put together or disguised.

A function `_output_X` gets the arguments of X as plain text, its standard input (None if not known) and the session. It returns what
X prints, or None if that is not known.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import posixpath
import re
import zlib
from collections.abc import Callable

from opd.guard.code.folding import decompress
from opd.guard.session import GuardSession
from opd.guard.shell.fields import UNKNOWN, UNSET, show_field
from opd.guard.shell.reader import unescape

MAX_OUTPUT = 1 << 16
"""The most characters of an output; a longer one counts as not known."""
DECODERS = frozenset((
    "base64", "base32", "xxd", "openssl", "uudecode", "rev", "tr", "gunzip", "zcat", "gzip", "bunzip2", "bzcat", "xz", "xzcat", "perl",
    "od", "hexdump",
))  # fmt: skip
"""Programs that turn one text into another. Code that one of them prints was hidden before, and gets the tag `decoded`."""
HIDERS = frozenset({"base64", "base32", "xxd", "uudecode", "rev", "rot13"})
"""Programs among them that no honest script needs: code that one of them prints gets the tag `encoded`, too."""
_SUBSTITUTE = re.compile(r"s([/|#,:!@])([\w /.:=-]+)\1([\w /.:=-]*)\1(g?)")
"""`s/old/new/` of `sed`, if the old text has no special characters, so that it is no regular expression."""


def predict_output(argv: list[str], stdin: str | None, session: GuardSession) -> str | None:
    """Return what a call prints to the standard output; None if that is not known. `argv` are fields."""
    program = show_field(argv[0]).rpartition("/")[2]
    predict = _PROGRAMS.get(program)
    if predict is None or any(UNKNOWN in arg or arg == UNSET for arg in argv):
        return None
    try:
        text = predict([show_field(arg.replace(UNSET, "")) for arg in argv[1:]], stdin, session)
    except (ValueError, OSError, EOFError, zlib.error):
        return None
    return None if text is None or len(text) > MAX_OUTPUT else text


def _output_echo(args: list[str], stdin: str | None, session: GuardSession) -> str:
    end, escapes = "\n", False
    while args and args[0] in ("-n", "-e", "-ne", "-en", "-E"):
        end = "" if "n" in args[0] else end
        escapes = escapes or "e" in args[0]
        args = args[1:]
    text = " ".join(args)
    return (unescape(text) if escapes else text) + end


def _output_printf(args: list[str], stdin: str | None, session: GuardSession) -> str | None:
    if args[:1] == ["--"]:
        args = args[1:]
    if not args or args[0] == "-v":
        return None
    pattern, values = unescape(args[0]), args[1:]
    pieces = re.split(r"%([sb])", pattern.replace("%%", "\0"))
    pieces, kinds = pieces[::2], pieces[1::2]
    if any("%" in piece for piece in pieces):
        return None
    count = len(kinds)
    # printf begins its pattern again until it has used all arguments. Each time takes `count` of them; the division is rounded up.
    rounds = max(1, -(-len(values) // count)) if count else 1
    values += [""] * (count * rounds - len(values))
    lines = []
    for index in range(rounds):
        round_values = values[index * count : (index + 1) * count]
        plain_values = [
            unescape(value) if kind == "b" else value for kind, value in zip(kinds, round_values, strict=True)
        ]
        lines.append("".join(p + v for p, v in zip(pieces, [*plain_values, ""], strict=True)))
    return "".join(lines).replace("\0", "%")


def _output_cat(args: list[str], stdin: str | None, session: GuardSession) -> str | None:
    if not args or args == ["-"]:
        return stdin
    texts = [session.written_text_of(arg) for arg in args]
    return None if None in texts else "".join(t for t in texts if t is not None)


def _input_text(args: list[str], stdin: str | None, session: GuardSession) -> str | None:
    """Return the text of the last file that is named, else that of the standard input; None if it is not known."""
    files = [arg for arg in args if not arg.startswith("-")]
    return session.written_text_of(files[-1]) if files else stdin


def _output_base64(args: list[str], stdin: str | None, session: GuardSession) -> str | None:
    text = _input_text(args, stdin, session)
    if text is None:
        return None
    if {"-d", "-D", "--decode", "-di", "-id"} & set(args):
        return _decode_bytes(base64.b64decode("".join(text.split()) + "=="))  # more padding than needed does no harm
    return base64.b64encode(text.encode("latin-1", "replace")).decode() + "\n"


def _output_openssl(args: list[str], stdin: str | None, session: GuardSession) -> str | None:
    if {"-d", "-D"} & set(args) and {"base64", "-base64", "-a"} & set(args) and stdin is not None:
        return _decode_bytes(base64.b64decode("".join(stdin.split()) + "=="))
    return None


def _output_xxd(args: list[str], stdin: str | None, session: GuardSession) -> str | None:
    letters = "".join(arg for arg in args if arg.startswith("-"))
    if stdin is None or not ("r" in letters and "p" in letters):
        return None
    return _decode_bytes(binascii.unhexlify("".join(stdin.split())))


def _decode_bytes(data: bytes) -> str:
    """Return bytes as text. If they are no UTF-8 they are read as Latin-1, from which `encode("latin-1")` gives the same bytes back."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _output_gunzip(args: list[str], stdin: str | None, session: GuardSession) -> str | None:
    text = _input_text(args, stdin, session)
    return None if text is None else _decode_bytes(decompress(text.encode("latin-1"), zlib.MAX_WBITS | 16))


def _output_rev(args: list[str], stdin: str | None, session: GuardSession) -> str | None:
    text = _input_text(args, stdin, session)
    return None if text is None else "\n".join(line[::-1] for line in text.split("\n"))


def _output_tr(args: list[str], stdin: str | None, session: GuardSession) -> str | None:
    sets = [_expand_tr_set(unescape(arg)) for arg in args if not arg.startswith("-")]
    if stdin is None or not sets:
        return None
    if "-d" in args:
        return stdin.translate(dict.fromkeys(map(ord, sets[0])))
    if len(sets) != 2 or any(arg.startswith("-") for arg in args) or not sets[1]:
        return None
    longer = sets[1] + sets[1][-1] * (len(sets[0]) - len(sets[1]))
    return stdin.translate({ord(a): b for a, b in zip(sets[0], longer, strict=False)})


def _expand_tr_set(text: str) -> str:
    """Return the characters of a set of `tr`, with ranges such as `a-z` written out. Raises: ValueError if they are too many."""
    characters, index = "", 0
    while index < len(text):
        if text[index + 1 : index + 2] == "-" and index + 2 < len(text):
            characters += "".join(map(chr, range(ord(text[index]), ord(text[index + 2]) + 1)))
            index += 3
        else:
            characters += text[index]
            index += 1
        if len(characters) > MAX_OUTPUT:
            raise ValueError("too many characters")
    return characters


def _output_basename(args: list[str], stdin: str | None, session: GuardSession) -> str | None:
    return posixpath.basename(args[0]).removesuffix("".join(args[1:2])) + "\n" if args else None


def _output_which(args: list[str], stdin: str | None, session: GuardSession) -> str | None:
    names = [arg for arg in args if not arg.startswith("-")]
    return "".join(f"/usr/bin/{name}\n" for name in names) if names else None


def _output_realpath(args: list[str], stdin: str | None, session: GuardSession) -> str | None:
    names = [arg for arg in args if not arg.startswith("-")]
    return "".join(session.resolve_path(name) + "\n" for name in names) if names else None


def _output_seq(args: list[str], stdin: str | None, session: GuardSession) -> str | None:
    if not 1 <= len(args) <= 2 or not all(arg.isdigit() for arg in args):
        return None
    low = int(args[0]) if len(args) == 2 else 1  # of a longer sequence the first 65 numbers
    return "".join(f"{n}\n" for n in range(low, min(int(args[-1]), low + 64) + 1))


def _output_sed(args: list[str], stdin: str | None, session: GuardSession) -> str | None:
    """Return the output of `sed s/old/new/` without regular expressions; None for any other script of `sed`."""
    scripts = [arg for arg in args if not arg.startswith("-")]
    substitution = _SUBSTITUTE.fullmatch(scripts[0]) if len(scripts) == 1 and stdin is not None else None
    if substitution is None or stdin is None:
        return None
    _, old, new, everywhere = substitution.groups()
    return "\n".join(line.replace(old, new, -1 if everywhere else 1) for line in stdin.split("\n"))


_PROGRAMS: dict[str, Callable[[list[str], str | None, GuardSession], str | None]] = {
    **dict.fromkeys(("true", "false", ":", "test", "[", "[["), lambda args, stdin, session: ""),
    "echo": _output_echo,
    "printf": _output_printf,
    "cat": _output_cat,
    "base64": _output_base64,
    "openssl": _output_openssl,
    "xxd": _output_xxd,
    "gunzip": _output_gunzip,
    "zcat": _output_gunzip,
    "rev": _output_rev,
    "tr": _output_tr,
    "rot13": lambda args, stdin, session: None if stdin is None else codecs.encode(stdin, "rot13"),
    "sed": _output_sed,
    "pwd": lambda args, stdin, session: session.cwd + "\n",
    "basename": _output_basename,
    "dirname": lambda args, stdin, session: (posixpath.dirname(args[0]) or ".") + "\n" if args else None,
    "which": _output_which,
    "realpath": _output_realpath,
    "readlink": _output_realpath,
    "seq": _output_seq,
}
