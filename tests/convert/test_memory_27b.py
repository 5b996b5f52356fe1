"""Peak memory of whole conversions at the widths of the 27B models, as the operating system counts it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.convert.headers_27b import write_sparse

LAYERS = 4  # three Gated DeltaNet, one attention, and the two matrices of 248,320 rows; more layers only repeat


PEAK = """
import sys
from runtime.cli.main import main
code = main(sys.argv[1:])
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
@pytest.mark.parametrize("weights", ["groupwise-int", "nvfp4", "bf16"])
@pytest.mark.parametrize("threads", [2, 16])
def test_conversion_takes_row_blocks(tmp_path: Path, weights: str, threads: int) -> None:
    """A single matrix of this checkpoint takes 2.5 GB as BF16, 5 GB as float32; the limit for all of it is 4 GiB."""
    directory, out = write_sparse(tmp_path / "m", LAYERS), tmp_path / "x.ninfer"
    command = [sys.executable, "-c", PEAK, "convert", str(directory), "-o", str(out), "--weights", weights, "--threads",
               str(threads), "--vision"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    peak = 1024 * int(done.stdout)
    print(f"{weights}, {threads} threads: {peak / 1e6:.0f} MB for {out.stat().st_size / 1e9:.1f} GB")
    out.unlink()
    assert peak < 1 << 30
