"""``python -m tests.mutants [WORD…]``: plant every fault (or those whose names hold a word) and print who is seen."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.plant import Copy, load


def main() -> int:
    """0 when every fault was seen."""
    faults = [fault for fault in load() if not sys.argv[1:] or any(word in fault.name for word in sys.argv[1:])]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="ninferc-mutants-") as folder:
        copy = Copy(Path(folder))
        code, output = copy.pytest(sorted({fault.test for fault in faults}))
        if code != 0:
            print(output)
            print("the tests fail without any fault")
            return 1
        for fault in faults:
            start = time.monotonic()
            verdict = copy.check(fault)
            word = "seen" if verdict.seen else verdict.invalid or "MISSED"
            missed += not verdict.seen
            print(f"{word:8} {time.monotonic() - start:6.1f} s  {fault.name}  [{fault.test}]", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} faults seen")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
