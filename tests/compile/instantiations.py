"""Every kernel that a set of programs needs: which models, which targets, which decode graphs."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import artifacts
from artifacts.container.directory_v2 import Identity
from artifacts.identities.registry import REGISTRY
from artifacts.tools.synth import synthesize_registered
from compiler.driver import CompileOptions, compile_program
from compiler.emit.arch import caps
from compiler.emit.cache import Job, compile_all
from compiler.emit.nvrtc import Cubin
from compiler.emit.render import render
from compiler.kernels.arrange import UNIT_FORMATS, arrange_spec, units_spec
from compiler.kernels.spec import DeviceCaps, KernelSpec
from runtime.bench.device_fill import ToolKernels
from tests.models import EXAMPLE

TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
TINY = "tiny-hybrid"
DENSE = tuple(str(identity) for identity in REGISTRY if identity.model_id.endswith("27b"))
STEP = ((1, 1),)  # one lane, one column
WIDTHS = ((1, 1), (1, 4), (1, 8), (1, 24), (1, 32), (8, 1))  # verification widths, short prompts, a batch
REGISTERS = 65536  # 32-bit registers of a multiprocessor, since sm_70 (CUDA C++ Programming Guide, compute capabilities)
_folder = tempfile.TemporaryDirectory(prefix="ninferc-compile-")


@cache
def artifact(name: str) -> artifacts.Artifact:
    """The committed example, or a registered identity without weights (a sparse file)."""
    if name == TINY:
        return artifacts.open(EXAMPLE)
    path = Path(_folder.name) / f"{name.replace('/', '-')}.ninfer"
    model_id, _, weights_id = name.partition("/")
    synthesize_registered(Identity(model_id, weights_id), path, header_only=True)
    return artifacts.open(path)


@dataclass(frozen=True)
class Kernel:
    """One instantiation; ``decode``: a decode step launches it."""

    spec: KernelSpec
    decode: bool


@cache
def kernels(name: str, arch: str, pairs: tuple[tuple[int, int], ...], tp: int = 1, chunk: int = 1024) -> tuple[Kernel, ...]:
    """The kernels of a model's program for ``arch`` with these (lanes, columns) decode graphs and prefill chunks."""
    return kernels_for(name, caps(arch), pairs, tp, chunk)


@cache
def kernels_for(name: str, target: DeviceCaps, pairs: tuple[tuple[int, int], ...], tp: int = 1,
                chunk: int = 1024) -> tuple[Kernel, ...]:  # fmt: skip
    """The same for given capabilities."""
    context = 2048 if name == TINY else 8192
    options = CompileOptions(max_context=context, max_concurrency=max(lanes for lanes, _ in pairs), pairs=pairs, tp=tp,
                             prefill_chunk=chunk, test_chunks=True)  # fmt: skip
    program = compile_program(artifact(name), target, options, images=False)
    decode = {call.entry for phase in program.phases.values() if phase.phase == "decode" for call in phase.calls}
    return tuple(Kernel(image.spec, entry in decode) for entry, image in program.kernels.items())


def tool_kernels(arch: str) -> tuple[Kernel, ...]:
    """Kernels outside of steps, of measurements and of loading; no limit on their registers matters."""
    bulk = {"read_bulk": "read_bulk.cu.j2"} if caps(arch).bulk_copy else {}
    entries = {**ToolKernels.ENTRIES, **bulk, "exchange_delay": "exchange_delay.cu.j2"}
    specs = [KernelSpec(entry, template, {}, (1, 1, 1), 32, 0, ()) for entry, template in entries.items()]
    specs += [arrange_spec(caps(arch)), *(units_spec(format, caps(arch)) for format in UNIT_FORMATS)]
    return tuple(Kernel(spec, False) for spec in specs)


def compiled(found: tuple[Kernel, ...], arch: str, folder: Path) -> dict[str, Cubin]:
    """Cubins by entry name, with as many processes as this test process has cores to itself."""
    jobs = [Job(k.spec.entry, render(k.spec.template, k.spec.entry, k.spec.params), arch) for k in found]
    share = max((os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), 1)
    return compile_all(jobs, folder, share)


def faults(kernel: Kernel, cubin: Cubin, arch: str) -> list[str]:
    """What forbids this kernel on ``arch``: more memory or registers than a block may have; in a decode step also
    anything that lives in local memory."""
    spec, used, out = kernel.spec, cubin.resources, []
    limit = caps(arch).smem_block
    if used.static_smem + spec.smem > limit:
        out.append(f"{used.static_smem} + {spec.smem} bytes of shared memory, {limit} allowed")
    registers = -(-used.registers // 8) * 8 * spec.block
    if registers > REGISTERS:
        out.append(f"{used.registers} registers × {spec.block} threads, {REGISTERS} in all allowed")
    local = {"stack frame": used.stack, "spill stores": used.spill_stores, "spill loads": used.spill_loads,
             "local memory": used.local}  # fmt: skip
    if kernel.decode:
        out += [f"{nbytes} bytes of {what}" for what, nbytes in local.items() if nbytes]
    return [f"{spec.entry}: {text}" for text in out]
