"""Compile time of a program in a fresh process with an empty cache.

    python -m benchmarks.compile_time [MODEL/WEIGHTS] [--arch sm_90a] [--tp 2] [--jobs 2] [-r 3] [--kernels] [-o FILE.json]

The artifact is a registered identity without weights (a sparse file): compiling reads its directory only. Each repeat is a
Python process of its own that imports, opens, plans, runs NVRTC and writes the folder; wall time is taken outside, and the
processor time of all its processes, which says more where other work shares the cores (``load_average``).
``--kernels`` compiles every kernel once more, alone, and lists the slowest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHILD = """
import json, sys, time
began = time.perf_counter()
import artifacts
from pathlib import Path
from compiler.driver import CompileOptions, compile_program
from compiler.emit.arch import caps
from runtime.open import compile_to
imported = time.perf_counter()
path, folder, arch, tp, jobs, context = sys.argv[1:]
options = CompileOptions(max_context=int(context), tp=int(tp))
times = []
program = compile_to(artifacts.open(Path(path)), Path(folder), caps(arch), options,
                     lambda done, total, entry: times.append(time.perf_counter()), int(jobs))
ended = time.perf_counter()
print(json.dumps({"import": imported - began, "plan": times[0] - imported, "nvrtc": times[-1] - times[0],
                  "write": ended - times[-1], "kernels": len(program.kernels)}))
"""


def artifact(name: str, folder: Path) -> Path:
    """A registered identity without weights."""
    from artifacts.container.directory_v2 import Identity
    from artifacts.tools.synth import synthesize_registered

    model, _, weights = name.partition("/")
    path = folder / "model.ninfer"
    synthesize_registered(Identity(model, weights), path, header_only=True)
    return path


def once(path: Path, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of one fresh process with an empty cache, by part."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", CHILD, str(path), f"{folder}/program", args.arch, str(args.tp), str(args.jobs),
                   str(args.context)]  # fmt: skip
        environment = os.environ | {"NINFERC_CACHE": f"{folder}/cache"}
        began, before = time.perf_counter(), os.times()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True,
                              cwd=Path(__file__).resolve().parents[1])  # fmt: skip
        wall, after = time.perf_counter() - began, os.times()
    cpu = sum(getattr(after, name) - getattr(before, name) for name in ("children_user", "children_system"))
    parts: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return parts | {"wall": wall, "processor time": cpu}


def kernels(path: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of NVRTC of each kernel, alone in this process, slowest first."""
    import artifacts
    from compiler.driver import CompileOptions, compile_program
    from compiler.emit.arch import caps
    from compiler.emit.nvrtc import compile_source
    from compiler.emit.render import kernel_source

    target = caps(args.arch)
    program = compile_program(artifacts.open(path), target, CompileOptions(max_context=args.context, tp=args.tp), images=False)
    out = []
    for entry, image in program.kernels.items():
        began = time.perf_counter()
        compile_source(entry, kernel_source(image.spec, target), target.arch)
        out.append({"kernel": entry, "template": image.spec.template, "seconds": round(time.perf_counter() - began, 3)})
    return sorted(out, key=lambda row: -row["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", default="qwen3.8-27b/nvfp4")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("-r", "--repeats", type=int, default=3)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    from compiler.emit import nvrtc
    from runtime.bench.environment import commit

    with tempfile.TemporaryDirectory() as folder:
        path = artifact(args.name, Path(folder))
        runs = [once(path, args) for _ in range(args.repeats)]
        slow = kernels(path, args) if args.kernels else []
    case = f"{args.name} tp{args.tp} {args.arch} compile, {args.jobs} processes, empty cache"
    rows = [{"case": case, "metric": metric, "value": statistics.median(run[metric] for run in runs),
             "unit": "kernels" if metric == "kernels" else "s",
             "spread": [min(run[metric] for run in runs), max(run[metric] for run in runs)]} for metric in runs[0]]  # fmt: skip
    record = {"command": ["python", "-m", "benchmarks.compile_time", *sys.argv[1:]], "cpu": cpu_name(),
              "cores": os.cpu_count(), "load_average": os.getloadavg()[0], "python": platform.python_version(),
              "nvrtc": nvrtc.version(), "commit": commit(), "rows": rows, "slowest_kernels": slow[:20]}  # fmt: skip
    for row in rows:
        print(f"{row['case']}  {row['metric']:8s} {row['value']:8.2f} {row['unit']}  {row['spread']}")
    total = sum(item["seconds"] for item in slow)
    by_template: dict[str, list[float]] = {}
    for item in slow:
        by_template.setdefault(item["template"], []).append(item["seconds"])
    for name, seconds in sorted(by_template.items(), key=lambda entry: -sum(entry[1])):
        share = sum(seconds) / total
        print(f"{name:32s} {len(seconds):4d} kernels {sum(seconds):8.2f} s {share:6.1%}  at most {max(seconds):.2f} s")
    if args.output:
        args.output.write_text(json.dumps(record, indent=1) + "\n")


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    main()
