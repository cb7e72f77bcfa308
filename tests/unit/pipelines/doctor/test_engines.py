"""The doctor names what is broken and how to mend it."""

from __future__ import annotations

import importlib

import pytest

from pipelines.doctor import engines as doctor


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Module -> message of the error that its import raises; the real engines take too long to import here."""
    broken: dict[str, str] = {}

    def fake_import(name: str) -> None:
        if name in broken:
            raise ImportError(broken[name])

    monkeypatch.setattr(importlib, "import_module", fake_import)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    return broken


def test_a_whole_environment_has_no_problems() -> None:
    assert doctor.find_problems() == []


@pytest.mark.parametrize("engine", doctor.ENGINES)
def test_an_engine_that_does_not_import_is_named(engine: str, importable: dict[str, str]) -> None:
    importable[engine] = "libfoo.so.1: cannot open shared object file"
    (problem,) = doctor.find_problems()
    assert f"import {engine} fails: libfoo.so.1" in problem
    assert "install the package again" in problem


def test_torchvision_built_for_cuda_is_to_be_removed(importable: dict[str, str]) -> None:
    importable["transformers.models.llama.modeling_llama"] = "operator torchvision::nms does not exist"
    (problem,) = doctor.find_problems()
    assert "pip uninstall -y torchvision torchaudio torchcodec" in problem
