"""The import law: cli → pipelines → experts, teachers → opd, no cycles, ray in one package, and nothing heavy for `--help`.

Every import counts, also one inside of a function or for type checkers alone, but for cycles: those are looked for among
imports that run, at once or later, and a module that is imported for its type is no dependency of the program. An edge goes
to the module that is named (`from a.b import c` is one to `a.b.c` where that is a module, else to `a.b`); that Python runs
the `__init__.py` of each package on the way is not counted.
"""

from __future__ import annotations

import ast
import resource
import subprocess
import sys

import pytest

from tests.unit.sources import ROOT, Import, files, find_cycle, folder_edges, imports, module_edges, tree

MAY_IMPORT = {
    "cli": {"pipelines", "experts", "teachers", "opd"},
    "pipelines": {"pipelines", "experts", "teachers", "opd"},
    "experts": {"experts", "opd"},
    "teachers": {"teachers", "opd"},
    "opd": {"opd"},
}
HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers", "datasets", "accelerate", "peft")


def test_nothing_points_back() -> None:
    wrong = [
        f"{one.source} imports {one.target}"
        for one in imports()
        if one.package in MAY_IMPORT and one.package not in MAY_IMPORT[one.source.partition(".")[0]]
    ]
    assert wrong == []


def test_the_law_is_about_every_import() -> None:
    """A reader of imports that missed some would let everything pass."""
    known = set(imports())
    assert Import("cli", "pipelines.commands.merge", "start") in known, "a module from its package"
    assert Import("pipelines.commands.merge_options", "pipelines.merging.rounds", "later") in known
    assert Import("pipelines.commands.baselines", "opd.config", "typing") in known
    spelt = sum(isinstance(node, ast.Import | ast.ImportFrom) for name in files() for node in ast.walk(tree(name)))
    assert len({(one.source, one.target, one.when) for one in imports()}) > spelt / 2 and spelt > 500


def test_there_are_no_cycles() -> None:
    assert find_cycle(module_edges()) == []


def test_folders_do_not_import_each_other_in_circles() -> None:
    assert ("rollouts", "records") in folder_edges()
    assert find_cycle(folder_edges()) == []


def test_a_cycle_would_be_found() -> None:
    found = [("opd.loop", "opd.run.metrics"), ("opd.run.metrics", "opd.loop")]
    assert set(find_cycle(found)) == {"opd.loop", "opd.run.metrics"}


def test_ray_is_imported_in_one_package() -> None:
    users = {one.source for one in imports() if one.package == "ray"}
    assert users and {user for user in users if not user.startswith("opd.cluster.")} == set()


def test_ray_is_imported_inside_of_functions_alone() -> None:
    """Ensure that what Ray reads of the environment at its import is set by then: see `opd.cluster.session`."""
    assert {one.source for one in imports() if one.package == "ray" and one.when != "later"} == set()


@pytest.mark.parametrize(
    "code", ["import cli, opd.config", "import sys; sys.argv = ['opd', '--help']; import cli; cli.app()"]
)
def test_the_command_line_starts_without_anything_heavy(code: str) -> None:
    told = "import atexit, sys; atexit.register(lambda: print('loaded:', *sorted(sys.modules)))\n"
    done = subprocess.run([sys.executable, "-c", told + code], cwd=ROOT, check=True, capture_output=True, timeout=60)
    loaded = {name.partition(".")[0] for name in done.stdout.decode().rpartition("loaded:")[2].split()}
    assert "pipelines" in loaded and loaded & set(HEAVY) == set()


def test_help_answers_within_a_second() -> None:
    """Seconds of processor time, the best of five: the machine may be busy."""

    def spent() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "cli", "--help"], cwd=ROOT, check=True, capture_output=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(spent() for _ in range(5)) < 1.0
