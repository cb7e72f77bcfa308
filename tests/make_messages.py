"""Write `tests/messages.txt` anew: `python -m tests.make_messages`. The tests that compare it say what belongs in it."""

from __future__ import annotations

import os
import sys

import pytest

from tests import messages

TESTS = ("tests/unit/test_frictions.py", "tests/unit/test_cli.py", "tests/unit/test_bad_inputs.py")


def main() -> int:
    messages.FILE.unlink(missing_ok=True)
    os.environ[messages.REMAKE] = "1"
    code = int(pytest.main(["-q", *TESTS]))
    print(f"{messages.FILE}: {len(messages.sections())} sections")
    return code


if __name__ == "__main__":
    sys.exit(main())
