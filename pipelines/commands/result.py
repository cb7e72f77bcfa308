"""The last line of `opd merge --json`: how the merge ended, whatever happened."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from opd.errors import OpdError
from opd.run_dir import RunPaths

REPORTED = ("name", "steps", "domains", "mean_headroom", "worst_headroom", "wall_s", "response_tokens")
"""Keys of report.json that the line has too."""
REFUSED = "refused"
"""The state of a merge that did not begin."""


class JsonResult:
    """Prints the line at the end of the block, if it is `wanted`. An error goes on its way: it decides the exit code."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._found: dict[str, Any] = {}

    def __enter__(self) -> JsonResult:
        return self

    def finished(self, paths: RunPaths, report: dict[str, Any]) -> None:
        """The merge has ended well, with this report."""
        told = {key: report[key] for key in REPORTED if key in report}
        self._found = told | {"run_dir": str(paths.root), "model": str(paths.model), "report": str(paths.report)}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not self._wanted:
            return
        from opd.live.displays import print_json
        from opd.live.now import FINISHED
        from pipelines.merging.journal import end_of

        if error is None:
            print_json({"event": "result", "state": FINISHED} | self._found)
        else:
            state = REFUSED if isinstance(error, OpdError) else end_of(error)
            print_json({"event": "result", "state": state, "error": str(error) or type(error).__name__})
