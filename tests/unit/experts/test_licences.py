"""Licences as models' directories state them, and what a merged model has to look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from experts.licences import Licence, find_common, find_licences, list_concerns

APACHE = "                                 Apache License\n                           Version 2.0, January 2004\n"
MIT = "Copyright (c) 2026 A\n\nPermission is hereby granted, free of charge, to any person obtaining a copy\nof this software and so on"
BSD = "Copyright A.\nRedistribution and use in source and binary forms, with or without modification, are permitted."
GPL = "GNU GENERAL PUBLIC LICENSE\n Version 3, 29 June 2007\n ... use the GNU Lesser General Public License instead of this License."


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({}, []),
        ({"README.md": "# A model\nlicense: mit"}, []),
        ({"README.md": "---\nlicense: Apache-2.0\ntags: [a]\n---\n# A model"}, ["apache-2.0 (README.md)"]),
        ({"README.md": "---\nlicense: [mit, apache-2.0]\n---\n"}, ["mit (README.md)", "apache-2.0 (README.md)"]),
        ({"README.md": "---\nlicense: other\nlicense_name: deepseek\n---\n"}, ["deepseek (README.md)"]),
        ({"README.md": "---\nlicense: [\n---\n"}, ["other (README.md)"]),
        ({"README.md": "---\nlicense: !!bool x\n---\n"}, ["other (README.md)"]),
        ({"README.md": "\ufeff---\nlicense: mit\n---\n"}, ["mit (README.md)"]),
        ({"LICENSE": APACHE}, ["apache-2.0 (LICENSE)"]),
        ({"LICENSE.txt": MIT}, ["mit (LICENSE.txt)"]),
        ({"LICENCE": BSD}, ["bsd-2-clause (LICENCE)"]),
        ({"LICENCE": f"{BSD} Neither the name of A nor"}, ["bsd-3-clause (LICENCE)"]),
        ({"COPYING": GPL}, ["gpl-3.0 (COPYING)"]),
        ({"LICENSE": "Attribution-NonCommercial 4.0 International"}, ["cc-by-nc-4.0 (LICENSE)"]),
        ({"LICENSE": "You may do as I say."}, ["other (LICENSE)"]),
        ({"LICENSE": "You may do as I say.", "README.md": "---\nlicense: mine\n---\n"}, ["mine (README.md)"]),
        ({"LICENSE": MIT, "README.md": "---\nlicense: gemma\n---\n"}, ["gemma (README.md)", "mit (LICENSE)"]),
    ],
)  # fmt: skip
def test_a_directory_states_its_licences(files: dict[str, str], names: list[str], tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert list(map(str, find_licences(tmp_path))) == names


def of(**names: str | None) -> dict[str, list[Licence]]:
    return {who: [Licence(name, "README.md")] if name else [] for who, name in names.items()}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (of(a="mit", b="apache-2.0"), []),
        (of(a="mit", b=None, c=None), ["b, c: no licence was found"]),
        (of(a="cc-by-nc-4.0", b="mit"), ["a: cc-by-nc-4.0 does not allow commercial use"]),
        (of(a="other", b="llama3.1"), ["a: other has terms of its own", "b: llama3.1 has terms of its own"]),
        (of(a="cc-by-nd-4.0"), ["a: cc-by-nd-4.0 does not allow derivatives"]),
        (of(a="gpl-3.0", b="mit"), ["a: gpl-3.0 asks that what is made from it has the same terms"]),
        (of(a="gpl-3.0", b="cc-by-sa-4.0"), ["gpl-3.0, cc-by-sa-4.0: each asks"]),
    ],
)
def test_what_to_look_at_before_the_model_is_passed_on(found: dict[str, list[Licence]], words: list[str]) -> None:
    lines = list_concerns(found)
    assert len(lines) == len(words)
    for line, word in zip(lines, words, strict=True):
        assert line.startswith(word)


def test_a_model_has_a_licence_only_if_all_agree() -> None:
    assert find_common(of(a="mit", b="mit")) == "mit"
    for differ in (of(a="mit", b="apache-2.0"), of(a="mit", b=None), of(a="other", b="other")):
        assert find_common(differ) is None
