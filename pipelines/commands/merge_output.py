"""Output of `opd merge`: a screen, lines, JSON or nothing while it goes on, and its result at the end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opd.errors import OpdError
from opd.run.paths import RunPaths
from opd.text import quote_for_shell
from pipelines.commands.report import print_report
from pipelines.commands.shell import print_line

if TYPE_CHECKING:
    from pipelines.merging.callbacks import MergeCallbacks

QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show errors and the result, and nothing else.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print a line of JSON for each step, and a last one with the result.")
]
REPORTED = ("name", "steps", "domains", "mean_headroom", "worst_headroom", "wall_s", "response_tokens")
"""Keys of report.json that the last line of `--json` has too."""
ENOUGH = 0.8
"""Recovered share of the headroom from which `opd merge` does not suggest further steps."""
REFUSED = "refused"
"""State of a merge that did not begin, in the last line of `--json`."""


class MergeOutput:
    """Output of one merge: a screen, lines, JSON or nothing.

    With JSON the end of the block prints the outcome, whatever it is. An error passes through, because it decides the exit code.
    """

    def __init__(self, quiet: bool, as_json: bool) -> None:
        self._quiet = quiet
        self._as_json = as_json
        self._result: dict[str, Any] = {}

    @property
    def tell(self) -> Callable[[str], None]:
        """A function that prints a sentence for the user."""
        return (lambda _: None) if self._quiet else print_line

    def show_reading(self) -> AbstractContextManager[None]:
        """Return a context within which a terminal says that models and prompts are being read."""
        from opd.live.waiting import show_waiting

        return nullcontext() if self._quiet else show_waiting("reading models and prompts")

    @property
    def callbacks(self) -> MergeCallbacks:
        """Display, signals and sinks for the merge."""
        from opd.live.displays import CHOICES
        from pipelines.merging.callbacks import MergeCallbacks

        return MergeCallbacks(display=CHOICES[self._quiet, self._as_json])

    def print_result(self, paths: RunPaths, report: dict[str, Any]) -> None:
        """Print the result of a merge that ended well."""
        if self._as_json:
            summary = {key: report[key] for key in REPORTED if key in report}
            self._result = summary | {"run_dir": str(paths.root), "model": str(paths.model)}
            self._result |= {"adapter": str(paths.adapter)} if paths.adapter.is_dir() else {}
            self._result |= {"report": str(paths.report)}
        else:
            print_report(report)
            adapter = f"\nadapter: {paths.adapter}" if paths.adapter.is_dir() else ""
            typer.echo(f"model: {paths.model}{adapter}\nreport: {paths.report_page}")
            self._suggest_next(quote_for_shell(paths.root), report)

    def _suggest_next(self, root: str, report: dict[str, Any]) -> None:
        self.tell(f"next: opd chat {root}, or opd serve {root}")
        gained = report.get("mean_headroom")
        if gained is not None and gained < ENOUGH and "rounds" not in report:
            self.tell(f"much is left to gain; further steps: opd merge --extend {root} --steps {report['steps']}")

    def __enter__(self) -> MergeOutput:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not self._as_json:
            return
        from opd.live.displays import print_json
        from opd.live.live_state import FINISHED
        from pipelines.merging.journal import classify_end

        if error is None:
            print_json({"event": "result", "state": FINISHED} | self._result)
        else:
            state = REFUSED if isinstance(error, OpdError) else classify_end(error)
            print_json({"event": "result", "state": state, "error": str(error) or type(error).__name__})
