"""The lines of docs/python.md, run as they stand there: ten that merge, with an objective and an engine of the user's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.S)
ENGINE = '''
from opd.rollouts.vllm import VLLMRolloutEngine


class Engine(VLLMRolloutEngine):
    """Says which steps it wrote."""

    def generate(self, prompts, *, step, policy_version):
        print("wrote", step)
        return super().generate(prompts, step=step, policy_version=policy_version)
'''


def test_the_lines_of_the_documentation_merge(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    lines, objective = BLOCKS
    assert len(lines.strip().splitlines()) <= 12
    (tmp_path / "mine.py").write_text(objective + ENGINE)
    pipeline["objective"] = {"kind": "mine:GentleConfig", "strength": 0.5}
    pipeline["rollout"]["engine"] = "mine:Engine"
    pipeline["trainer"]["steps"] = 2
    (tmp_path / "quick.yaml").write_text(yaml.safe_dump(pipeline))
    script = tmp_path / "notebook.py"
    body = "".join(f"    {line}\n" for line in lines.replace('"quickstart"', '"quick.yaml"').splitlines())
    script.write_text(f'if __name__ == "__main__":\n{body}')
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert [line for line in said if line.startswith("wrote")] == ["wrote 1", "wrote 2"]
    assert [line.split()[0] for line in said if line[:2] in ("1 ", "2 ")] == ["1", "2"]
    assert any(line.startswith("after ") and "left-domain" in line for line in said)
    assert f"2 steps; the model is in {Path('runs/from-python/model')}" in done.stdout
    assert (tmp_path / "runs" / "from-python" / "model" / "model.safetensors").exists()
    assert "step 2/2" not in done.stderr, "nothing is shown unless it is asked for"
