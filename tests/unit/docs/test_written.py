"""The commands of a page are found where a reader finds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.docs.written import commands

PAGE = """# Title

    opd merge mine.yaml --set trainer.steps=5     a remark --not-an-option

Say `opd check
mine.yaml`, not `opdx`.

```bash
for name in a b; do
    python -m benchmarks.loss --quick \\
        --json $name.json && make test > log
done
```

```yaml
opd: merge
```
"""


def test_commands_of_blocks_and_sentences(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    found = [(command.line, command.words, command.whole) for command in commands(tmp_path / "page.md")]
    assert found == [
        (3, ("opd", "merge", "mine.yaml", "--set", "trainer.steps=5"), True),
        (10, ("python", "-m", "benchmarks.loss", "--quick", "--json", "$name.json"), True),
        (10, ("make", "test"), True),
        (5, ("opd", "check", "mine.yaml"), False),
    ]


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("opd check P [--set KEY=VALUE ...] [--samples N]", "opd check P --set KEY=VALUE --samples N"),
        ("opd baseline P --method ... [--share S]", "opd baseline P --method VALUE --share S"),
        ("opd merge m.yaml --set 'experts.use=[math, code]'", "opd merge m.yaml --set experts.use=[math, code]"),
        ("OMP_NUM_THREADS=1 .venv/bin/opd experts list | head", "opd experts list"),
        ("opd evaluate RUN_DIR|PIPELINE [OPTIONS]", "opd evaluate RUN_DIR_OR_PIPELINE"),
        ("$ opd pipelines show quickstart > mine.yaml", "opd pipelines show quickstart"),
    ],
)
def test_usage_lines_and_shells(written: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(f"    {written}\n")
    assert [" ".join(command.words) for command in commands(tmp_path / "page.md")] == [words]
