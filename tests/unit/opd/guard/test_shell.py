"""The shell is read as bash reads it: words, expansions, structure, and which programs would run on which files."""

from __future__ import annotations

import base64
import gzip
import subprocess
import time
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest

from opd.guard.facts import ProgramCall, Streams
from opd.guard.guard import Guard
from opd.guard.rules import RuleSet, shipped_rules
from opd.guard.session import GuardSession
from opd.guard.shell.nodes import UnreadableCommand
from opd.guard.shell.parser import parse
from opd.guard.shell.programs import PROGRAMS
from opd.guard.shell.walk import ProgramRun, Walker
from opd.records.environments import ToolCall


def walked(text: str, session: GuardSession | None = None) -> list[ProgramCall]:
    walker = Walker(session or GuardSession(), PROGRAMS)
    walker.walk_text(text)
    return walker.calls


def words(text: str, session: GuardSession | None = None) -> list[str]:
    """Arguments of the last call."""
    return list(walked(text, session)[-1].argv)


def lines(text: str) -> list[str]:
    return [call.call_line() for call in walked(text) if call.program != "function"]


def reads(text: str, session: GuardSession | None = None) -> set[str]:
    return {path for call in walked(text, session) for path in call.reads}


def writes(text: str, session: GuardSession | None = None) -> set[str]:
    return {path for call in walked(text, session) for path in call.writes}


BOMB = base64.b64encode(gzip.compress(b"x" * 40_000_000)).decode()
"""A text of 40 million characters in 50 thousand."""


AS_BASH = [
    "a b  c",
    "'a b' \"c d\" e\\ f",
    'c""at te"st"s x\'y\'z',
    "$'a\\tb' $'\\x63\\141t'",
    'x=5; p "$x" ${x}y "${x}z" $x$x',
    "x='a b'; p $x \"$x\"",
    "p {a,b}c {1..3} x{y}z {a,b}{c,d} '{a,b}'",
    "p ${u-none} ${u:-none} ${u:+some}; x=v; p ${x:+some} ${x:-none}",
    "x=abcabcab; p ${x#*b} ${x##*b} ${x%b*} ${x%%b*} ${x/b*c/_} ${x//?b/_} ${x#?b} ${x%[ab]*[bc]} ${x%%[ab]*[bc]}",
    "p {a,{b,c}d}e {x}{y,z} {{a,b},c {a,b}} {3..1}",
    "x=abcdef; p ${#x} ${x:2} ${x:1:3} ${x#ab} ${x%ef} ${x/cd/XY} ${x//[ae]/_}",
    "x=/a/b/c.tar.gz; p ${x##*/} ${x%%.*} ${x%.*} ${x#*/}",
    "x=Ab; p ${x^^} ${x,,}",
    "y=x; x=deep; p ${!y}",
    'p $(echo one two) "$(echo one two)" `echo three`',
    "p $(printf '%s-%s' a b) $(echo -n x)",
    "p $(echo Y2F0Cg== | base64 -d)",
    "p $(echo abc | rev) $(echo abc | tr a-c x-z) $(echo 6869 | xxd -r -p)",
    "p a # a comment",
    "p a\\\nb",
    "IFS=,; x=a,b; p $x",
    "a=(x y z); p ${a[1]} ${a[@]}",
    'a=(\'x y\' z); p "${a[@]}" "${a[*]}" ${#a[@]} ${a[0]} $a "${a[@]:1}" "${a[@]/z/w}"',
    'a=(x); a+=(y \'z w\'); a[0]=v; p "${a[@]}"; set -- \'q r\' s t; p "${@:2}" "$@" "$*"',
    "p $(printf '%b,%s;' 'a\\tb' 'c\\td' e)",
    "p \"a\\\"b\" 'it'\"'\"'s'",
    'set -- one two; p $1 $2 "$@"',
    'f() { p "$1" x; }; f arg',
    "p '' \"\" a",
    "p ~+ | cat",
    "p $(basename /a/b.txt .txt) $(dirname /a/b.txt)",
    "p 2>&1 x",
]


@pytest.mark.parametrize("text", AS_BASH)
def test_words_are_those_of_bash(text: str, tmp_path: Path) -> None:
    """`p` is a program of ours; bash itself says what its last call gets."""
    if "p " not in text:
        text = f"p {text}"
    show = 'p() { printf "%s\\n" "--" "$@" >&3; }\n'
    done = subprocess.run(
        ["bash", "-c", f"exec 3>{tmp_path}/out\n{show}{text}"],
        cwd=tmp_path,
        timeout=20,
        check=False,
        stdout=subprocess.DEVNULL,
    )
    assert done.returncode == 0
    wanted = (tmp_path / "out").read_text().rpartition("--\n")[2].splitlines()
    called = [call for call in walked(text, GuardSession(cwd=str(tmp_path))) if call.program == "p"]
    assert list(called[-1].argv) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a; b && c || d & e\nf", ["a", "b", "c", "d", "e", "f"]),
        ("a | b |& c", ["a", "b", "c"]),
        ("if a; then b; elif c; then d; else e; fi", ["a", "b", "c", "d", "e"]),
        ("while a; do b; done", ["a", "b"]),
        ("for x in 1 2; do a $x; done", ["a 1", "a 2"]),
        ("for ((i=0;i<3;i++)); do a; done", ["a"]),
        ("case $x in y) a;; z|w) b;; esac", [": …", "a", "b"]),
        ("(a; b) && { c; }", ["a", "b", "c"]),
        ("f() { a; }; f; f", ["a", "a"]),
        ("((x = (1 + 2) * 3)); a", ["a"]),
        ("((a; b) | c)", ["a", "b", "c"]),
        ("for ((i = $((1 + 1)); i < 3; i++)); do a; done", ["a"]),
        ('function g { a "$1"; }; g x', ["a x"]),
        ("! a && time -p b", ["a", "b"]),
        ("bash -c 'a; b x' && sh -c \"c\"", ["bash", "a", "b x", "sh", "c"]),
        ("eval 'a' b", ["eval", "a b"]),
        ("env -i X=1 a b", ["env -i X=1", "a b"]),
        ("sudo -u me timeout -k 5 10 a b", ["sudo -u me", "timeout -k 5 10", "a b"]),
        ("echo x y | xargs -n1 a b", ["echo x y", "xargs", "a b x", "a b y"]),
        ("echo x | xargs -I{} a {} b", ["echo x", "xargs", "a x b"]),
        ("find d -name '*.py' -exec a {} +", ["find d -name *.py -exec a {} +", "a d/**/*.py"]),
        ("bash <<'EOF'\na x\nEOF\nb", ["bash", "a x", "b"]),
        ("bash <<< 'a x'", ["bash", "a x"]),
        ("echo 'a x' | sh", ["echo a x", "sh", "a x"]),
        ("a <(b x)", ["b x", "a /dev/fd/63"]),
        ("trap 'a x' EXIT", ["trap", "a x"]),
        ("a; }", None),
        ("if a; then b", None),
        ("'a", None),
        ("a $(b", None),
        ("a ${x", None),
        ("for", None),
        ("| a", None),
        ("a <", None),
    ],
)
def test_structure(text: str, wanted: list[str] | None) -> None:
    if wanted is None:
        with pytest.raises(UnreadableCommand):
            walked(text)
    else:
        assert lines(text) == wanted


def test_heredocs_expand_unless_they_are_quoted() -> None:
    session = GuardSession()
    walked("x=1\ncat > a.txt <<EOF\n$x $(echo two)\nEOF\ncat > b.txt <<-'EOF'\n\t$x\n\tEOF\n", session)
    assert session.written == {"/workspace/a.txt": "1 two\n", "/workspace/b.txt": "$x\n"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("cat a/../b ./c /d//e", {"/workspace/b", "/workspace/c", "/d/e"}),
        ("cd /x && cat y", {"/x", "/x/y"}),
        ("(cd /x; cat y); cat z", {"/x", "/x/y", "/workspace/z"}),
        ("cat ~/k", {"/root/k"}),
        ("cat < in.txt", {"/workspace/in.txt"}),
        ("while read l; do :; done < /q", {"/q"}),
        ("grep pattern file", {"/workspace/file"}),
        ("grep -e pattern file", {"/workspace/pattern", "/workspace/file"}),
        ("sed -n 1,3p file", {"/workspace/file"}),
        ("ln -s /far near; cat near/x", {"/far", "/far/x"}),
        ("cp /far/a b; cat b", {"/far/a"}),
        ("dd if=/far/a of=/dev/null", {"/far/a"}),
        ("tar -C/far -cf - .", {"/far", "/workspace"}),
        ("docker cp box:/far/a .", {"/far/a", "/workspace/box:/far/a", "/workspace/cp", "/workspace"}),
        ("curl file:///far/a", {"/far/a"}),
        ("cat /proc/self/cwd/a /proc/7/root/far/a", {"/workspace/a", "/far/a"}),
        ("cat /proc/self/cwd/../far/a", {"/far/a"}),
        ("ln -s /far/deep d; cat d/../a", {"/far/deep", "/far/a"}),
        ("ln -s x y; ln -s y x; cat x/a", None),
        ("echo /far/a", set()),
        ("exec 5</far/a", {"/far/a"}),
        ("echo hi > own; cat own", set()),
    ],
)
def test_files_that_are_read(text: str, wanted: set[str] | None) -> None:
    """None: only that it ends."""
    assert reads(text) == wanted or wanted is None


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("echo x > a; echo y >> /b", {"/workspace/a", "/b"}),
        ("echo x | tee a /b", {"/workspace/a", "/b"}),
        ("sed -i s/a/b/ f", {"/workspace/f"}),
        ("cp a b /c", {"/c"}),
        ("mv a b", {"/workspace/a", "/workspace/b"}),
        ("cp -r /far a; rm -rf a", {"/workspace/a"}),
        ("rm -rf d", {"/workspace/d"}),
        ("dd if=a of=/b", {"/b"}),
        ("git rm -q t", {"/workspace/t"}),
        ("find d -name '*.o' -delete", {"/workspace/d/**/*.o"}),
        ("a > /dev/null 2>&1", set()),
        ("{ a; b; } > /c", {"/c"}),
        ("curl -o /c http://h.example/x", {"/c"}),
        ("python3 -c \"open('/c','w').write('x')\"", {"/c"}),
        ("python3 -c \"import shutil; shutil.copy('a', '/c')\"", {"/c"}),
        ("python3 -c \"from pathlib import Path; Path('/c').write_text('x')\"", {"/c"}),
    ],
)
def test_files_that_are_written(text: str, wanted: set[str]) -> None:
    from opd.guard.shell.fields import show_field

    assert {show_field(path) for path in writes(text)} == wanted


@pytest.mark.parametrize(
    "code",
    [
        "open('/far/a')",
        "open('/fa' + 'r/a')",
        "open('/%s/a' % 'far')",
        "open(f'/{\"far\"}/a')",
        "open('/{}/a'.format('far'))",
        "import os; open(os.path.join('/far', 'a'))",
        "import os; open(os.path.join(os.sep, 'far', 'a'))",
        "from pathlib import Path; (Path('/far') / 'a').read_text()",
        "from pathlib import Path as P; P('/far').joinpath('a').read_text()",
        "d = '/far'; open(d + '/a')",
        "open('a/raf/'[::-1])",
        "open(''.join(['/f', 'ar', '/a']))",
        "open(''.join(map(chr, [47, 102, 97, 114, 47, 97])))",
        "open(chr(47) + 'far/a')",
        "open(bytes.fromhex('2f6661722f61').decode())",
        "import base64; open(base64.b64decode('L2Zhci9h').decode())",
        "import codecs; open(codecs.decode('/sne/n', 'rot13'))",
        "exec('open(\"/far/a\")')",
        "import os; os.system('cat /far/a')",
        "import subprocess as s; s.run(['cat', '/far/a'])",
        "from subprocess import check_output as c; c('cat /far/a', shell=True)",
        "getattr(__import__('o' + 's'), 'sys' + 'tem')('cat /far/a')",
        "import importlib; importlib.import_module('os').system('cat /far/a')",
        "import shutil; shutil.copy('/far/a', 'b')",
        "for n in ['x', '/far/a']: open(n)",
        "import pandas; pandas.read_csv('/far/a')",
    ],
)
def test_paths_in_python_code(code: str) -> None:
    walker = Walker(GuardSession(), PROGRAMS)
    walker.walk_text(f"python3 - <<'EOF'\n{code}\nEOF")
    assert "/far/a" in {path for call in walker.calls for path in call.reads}


@pytest.mark.parametrize(
    "text",
    [
        "node -e \"require('fs').readFileSync('/far/a')\"",
        "ruby -e 'puts File.read(\"/far/a\")'",
        "perl -e 'print `cat /far/a`'",
        "perl -e 'system(\"cat /far/a\")'",
        "php -r 'readfile(\"/far/a\");'",
        "awk 'BEGIN{while((getline l < \"/far/a\")>0) print l}'",
        "awk 'BEGIN{system(\"cat /far/a\")}'",
    ],
)
def test_paths_in_code_of_other_languages(text: str) -> None:
    assert "/far/a" in reads(text)


@pytest.mark.parametrize(
    "code",
    [
        "'%99999999999d' % 1",
        "'%*d' % (99999999999, 1)",
        "'{:>99999999999}'.format(1)",
        "'{:{}}'.format(1, 99999999999)",
        "bytes(99999999999999)",
        "('x' * 256 * 200).replace('x', 'x' * 256 * 200)",
        "('x' * 256 * 200).join(map(chr, b'x' * 50000))",
        "; ".join(["a = ['x']", *["a = [a, a]"] * 60, "f'{a}'", "'%s' % (a, )", "str(a)", "'{}'.format(a)"]),
        "x = 'x' * 256 * 200; f'" + "{x}" * 2000 + "'",
        "x = 'x' * 256 * 200; '" + "{0}" * 5000 + "'.format(x)",
        "import codecs, bz2; codecs.decode(b'x', 'bz2')",
    ],
)
def test_no_value_of_code_fills_the_memory(code: str) -> None:
    tracemalloc.start()
    walker = Walker(GuardSession(), PROGRAMS)
    walker.walk_code("python", code, ProgramRun(["python"], Streams()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 26


def test_python_that_does_not_parse_is_unreadable() -> None:
    with pytest.raises(UnreadableCommand, match="Python"):
        walked("python3 -c 'print(('")


def test_hosts_and_urls() -> None:
    (call,) = walked("curl -s https://me@host.example:8443/x?y user.example/z -H 'A: b'")
    assert call.hosts == ("host.example", "user.example")
    assert walked("scp me@box.example:/x .")[-1].hosts == ("box.example",)
    assert walked("exec 3<>/dev/tcp/h.example/80")[-1].hosts == ("h.example",)
    assert walked("echo https://host.example/x")[-1].hosts == ()
    assert walked("git -C d clone https://host.example/x")[-1].git == "clone"


def test_a_glob_is_listed_where_the_files_can_be_seen(tmp_path: Path) -> None:
    (tmp_path / "workspace" / ".eval").mkdir(parents=True)
    (tmp_path / "workspace" / ".eval" / "s.json").touch()
    (tmp_path / "workspace" / "link").symlink_to(".eval")
    session = GuardSession(root=tmp_path)
    assert reads("cat .e*/s*", session) == {"/workspace/.eval/s.json"}
    assert reads("cat link/s.json", session) == {"/workspace/.eval/s.json"}
    for odd in ("a**b/x", "x" * 300 + "*", "'a\0b'*", "["):
        assert len(reads(f"cat {odd}", session)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "(" * 200,
        "$(" * 100,
        "a " * 30000,
        "{" * 500,
        "{a,b}" * 60,
        "${x:-" * 80,
        "`" * 99,
        "eval " * 50 + "a",
        "x=$x$x;" * 200 + "echo $x",
        "x=" + "ab" * 20000 + "; echo ${x##*a*b*c} ${x//*a*b*c/d}",
        "python3 -c 'x" + ".a()" * 400 + "'",
        "python3 -c '" + "x+" * 400 + "x'",
        "python3 -c '" + "(" * 400 + "'",
        "for a in {1..200}; do for b in {1..200}; do for c in {1..200}; do d; done; done; done",
        "cat /" + "*e" * 60 + "/" + "*s" * 60 + "x",
        "find . " + "-name '*a*a*a*a*a*a*b' " * 200,
        "cat " + "./" * 8000 + "x",
        "sed -i '" + "addopts" * 5000 + "' pytest.ini",
        "echo " + "{" * 60000,
        "echo " + "{1..999999} " * 5000,
        "cat " + "{1..256} " * 7000,
        "cat " + " ".join(f"*{i}*e*" for i in range(6000)),
        "x=" + "a" * 250 + "; p='*a*a*a*b'; echo " + "${x/$p/} " * 6000,
        "x=" + "a" * 250 + "; p='*a*a*a*b'; echo " + "${x##$p} " * 6000,
        "x=" + "a" * 50000 + "; echo " + "${x#ab} " * 1000,
        "x=" + "a" * 30000 + "; y=" + "b" * 30000 + "; echo ${x//a/$y}",
        "echo hi > " + "a" * 60 + "; cat *a*a*a*a*a*a*a*a*a*b",
        "for a in {1..16}; do " * 9 + "x=1; " + "done; " * 9,
        "a() { x=1; }; " + "".join(f"{b}() {{ {a}; {a}; {a}; {a}; {a}; }}; " for a, b in pairwise("abcdefghij")) + "j",
        "x='" + ": " + "a" * 50000 + "'; " + 'eval "$x"; ' * 500,
        "x=" + "a/" * 8000 + "; cat " + "$x " * 1000,
        ("cd " + "a/" * 3000 + "; ") * 9 + "cat " + "b " * 100,
        "find " + "a " * 8000 + "-name x " * 4000,
        f"echo {BOMB} | base64 -d > b.gz; " + "gunzip < b.gz > c; " * 100,
        "perl -e '" + "qx{" * 20000 + "'",
        "echo " + "${x:-" * 20 + "'" * 60000 + "}" * 20,
        "python3 -c 'x = \"" + "a*" * 15000 + '"\n' + "x.upper()\n" * 3000 + "'",
    ],
)
def test_nothing_takes_long_or_breaks(text: str) -> None:
    """Check a policy's text in bounded time; most of these are not readable in the end."""
    guard = Guard(RuleSet([shipped_rules()]))
    began = time.process_time()
    guard.check(ToolCall(name="bash", arguments={"command": text}), guard.session())
    assert time.process_time() - began < 5


def test_code_of_a_tool_is_no_longer_than_a_command() -> None:
    guard = Guard(RuleSet([shipped_rules()]))
    call = ToolCall(name="python", arguments={"code": "x = 1\n" * 20000})
    assert guard.check(call, guard.session()).reason.startswith("too long")


def test_a_function_that_calls_itself_ends() -> None:
    assert lines("f() { a; f; }; f") == ["a", "a", "f"], "it is gone through twice, then taken for a program"


def test_a_parsed_script_is_a_value() -> None:
    assert parse("a b") == parse("a   b")
