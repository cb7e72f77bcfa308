"""Setting mergekit up and running it: a package of our own stands in its place, pip and processes are real."""

from __future__ import annotations

import hashlib
import textwrap
import zipfile
from pathlib import Path

import pytest

from experts.model_dir import inspect_model
from opd.errors import ModelError, RunError
from pipelines.baselines import mergekit
from pipelines.baselines.mergekit import environment_dir, merge_weights, mergekit_environment

RECIPES = {"merged-a": {"merge_method": "linear"}, "merged-b": {"merge_method": "ties"}}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(mergekit, "cache_dir", lambda: tmp_path / "cache" / "opd-merge")


def fake_home(root: Path, program: str) -> Path:
    """A directory whose `mergekit.scripts.multimerge` is this program."""
    package = root / "home" / "mergekit" / "scripts"
    package.mkdir(parents=True)
    for directory in (package, package.parent):
        (directory / "__init__.py").touch()
    (package / "multimerge.py").write_text(textwrap.dedent(program))
    return root / "home"


COPY = """
    import shutil, sys, yaml
    file, out = sys.argv[1], sys.argv[sys.argv.index("--intermediate-dir") + 1]
    assert sys.argv[sys.argv.index("--random-seed") + 1] == "5"
    for recipe in yaml.safe_load_all(open(file)):
        shutil.copytree("MODEL", out + "/" + recipe["name"])
"""


def test_each_recipe_becomes_a_model(tmp_path: Path, tiny_model_dir: Path) -> None:
    home = fake_home(tmp_path, COPY.replace("MODEL", str(tiny_model_dir)))
    (tmp_path / "out" / "left-over").mkdir(parents=True)
    seed = (1 << 32) + 5  # numpy takes none so large
    merge_weights(RECIPES, tmp_path / "out", seed=seed, timeout_s=60, home=home)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["merged-a", "merged-b", "recipes.yaml"]
    assert inspect_model(tmp_path / "out" / "merged-b").architecture == "LlamaForCausalLM"


def test_a_result_that_is_no_safe_model_is_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    spoil = '        import os; os.rename(out + "/" + recipe["name"] + "/model.safetensors", out + "/" + recipe["name"] + "/pytorch_model.bin")\n'
    home = fake_home(tmp_path, COPY.replace("MODEL", str(tiny_model_dir)) + spoil)
    with pytest.raises(ModelError, match="merged-a"):
        merge_weights(RECIPES, tmp_path / "out", seed=5, timeout_s=60, home=home)


def test_a_failure_shows_the_last_lines(tmp_path: Path) -> None:
    home = fake_home(tmp_path, "print('one'); print('two'); print('three'); raise SystemExit('no such tensor')")
    with pytest.raises(RunError, match=r"mergekit failed \(exit code 1\): .*two \| three \| no such tensor|no such"):
        merge_weights(RECIPES, tmp_path / "out", seed=0, timeout_s=60, home=home)


def test_a_merge_has_a_deadline(tmp_path: Path) -> None:
    home = fake_home(tmp_path, "import time; time.sleep(60)")
    with pytest.raises(RunError, match="mergekit took longer than 1 s"):
        merge_weights(RECIPES, tmp_path / "out", seed=0, timeout_s=1, home=home)


def test_it_is_installed_once_and_by_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "wheels" / "onething-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("onething.py", "value = 1\n")
        archive.writestr("onething-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: onething\nVersion: 1.0\n")
        archive.writestr(
            "onething-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("onething-1.0.dist-info/RECORD", "")
    requirements = tmp_path / "requirements.txt"
    monkeypatch.setattr(mergekit, "REQUIREMENTS", requirements)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    lines: list[str] = []

    for unproven in ("onething==1.0\n", f"onething==1.0 --hash=sha256:{'0' * 64}\n"):
        requirements.write_text(unproven)
        with pytest.raises(RunError, match="installation of mergekit failed"):
            mergekit_environment(lines.append)
        assert not environment_dir().exists()

    requirements.write_text(f"onething==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    home = mergekit_environment(lines.append)
    assert (home / "onething.py").is_file()
    assert len(lines) == 3
    wheel.unlink()
    assert mergekit_environment(lines.append) == home
    assert len(lines) == 3, "it was there"


def test_without_an_index_the_message_says_what_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(RunError, match="off_policy, mixed_sft and opd work without it"):
        mergekit_environment(lambda line: None)
    assert [p.name for p in environment_dir().parent.iterdir() if p.suffix != ".lock"] == []
