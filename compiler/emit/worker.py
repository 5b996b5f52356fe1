"""A compile process: reads jobs as JSON lines, compiles each into the cache, answers one JSON line per job.

A process of its own, because NVRTC compiles one source at a time per process; started with ``python -m``, so that it
never imports the caller's main module.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from compiler.emit import cache
from compiler.emit.nvrtc import CompileError


def main() -> None:
    """Serve until standard input closes."""
    for line in sys.stdin:
        item = json.loads(line)
        try:
            cache.compile_job(Path(item["folder"]), cache.Job(item["entry"], item["source"], item["arch"]), item["key"])
            answer: dict[str, bool | str] = {"ok": True}
        except CompileError as error:
            answer = {"ok": False, "compile": str(error)}
        except cache.CacheError as error:
            answer = {"ok": False, "cache": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
