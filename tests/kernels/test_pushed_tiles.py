"""Row products that send their tiles to the other rank: what lies in its mail, in y, and which lines say so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from compiler.control import DeviceFault
from compiler.emit.arch import caps
from compiler.emit.render import render
from compiler.ir.types import IRError
from compiler.kernels.exchange import Mail
from compiler.kernels.linear_rows import Tile, linear_rows
from compiler.ops.exchange_begin import number
from tests.emulator.harness import assert_close_to_fp64, decode, encode, poisoned
from tests.kernels.encoded_weights import random_weights
from tests.kernels.test_exchange import HOST, PEER, STAGED, MailBox
from tests.kernels.test_linear_rows import expected, pick, target

Array = np.ndarray[Any, Any]
BASE, ORDINAL = (1 << 32) - 3, 4  # the number wraps
CASES = [
    ("NVFP4", "bf16", 256, 128, 64, 150, 100),  # two by two tiles of which the last is cut, and one that nothing needs
    ("W8G32_F16S", "bf16", 144, 136, 64, 64, 64),  # the second row tile holds 16 values
    ("FP8_E4M3FN_ROW_BF16S", "f32", 80, 208, 64, 70, 66), ("Q5G64_F16S", "f32", 128, 256, 128, 128, 5),
    ("BF16", "bf16", 128, 200, 128, 200, 129), ("Q4G64_F16S", "bf16", 128, 128, 64, 64, 0),
]  # fmt: skip


def send(backend: Any, fmt: str, store: str, n: int, k: int, rows: int, count: int, tile: Tile, device: Any, transport: int,
         tiles: int = 1, fault: int = 0) -> tuple[Array, Array, MailBox, Array, int]:  # fmt: skip
    """y as stored, what FP64 says, the other rank's mail, the lines' indices that got the number, and the number."""
    rng = np.random.default_rng(rows + count)
    weights = random_weights(rng, fmt, n, k)
    spec = linear_rows(fmt, store, n, k, rows, device, tile, push=ORDINAL)
    plain = linear_rows(fmt, store, n, k, rows, device, tile)
    x = poisoned((rows, k + 8))
    x[:count, :k] = encode(rng.standard_normal((count, k)) / np.sqrt(np.mean(weights.values**2) * k), "bf16")
    mail = Mail(16, spec.grid[0] * spec.grid[1] + 1, rows * n * (2 if store == "bf16" else 4) + 32)
    box, outputs = MailBox(mail), []
    for kernel in (plain, spec):
        y = poisoned((rows, n + 16), store)
        named: dict[str, Any] = {
            "x": x, "x_stride": x.shape[1], "y": y, "y_stride": y.shape[1], "rows": np.array([count], np.int32),
            "outbox": box.array, "sequence": np.array([BASE, 0, 0, 0], np.uint32), "step": np.array([0, 0, 0, fault], np.int32),
            "ordinal": ORDINAL, "transport": transport, "slot_words": mail.words, "slot_slices": mail.slices,
            "slot_bytes": mail.nbytes, "tiles": tiles}  # fmt: skip
        named |= zip(("w_codes", "w_high", "w_scales", "w_divisor"), weights.pointers(), strict=True)
        backend.launch(kernel, render(kernel.template, kernel.entry, kernel.params), [named[name] for name in kernel.args])
        assert (y[count:].view(np.uint8) == 0xFF).all() and (y[:, n:].view(np.uint8) == 0xFF).all()
        outputs.append(y[:count, :n].copy())
        if kernel is plain:
            assert not box.array.any()
    assert outputs[0].tobytes() == outputs[1].tobytes(), "a product that sends stores something else"
    multiplied = weights
    if fmt.endswith("_F16S"):  # integer weights are rounded on their way to the matrix cores
        multiplied = replace(weights, values=decode(encode(weights.values, "bf16"), "bf16"))
    sequence = number(BASE, ORDINAL)
    lines = np.flatnonzero(box.lines(sequence) == np.uint64(sequence << 32))
    return outputs[1], expected(x[:count, :k], multiplied, store, None), box, lines, sequence


@pytest.mark.parametrize("transport", [PEER, HOST], ids=["peer", "host"])
@pytest.mark.parametrize("family", ["wgmma", "mma"])
@pytest.mark.parametrize(("fmt", "store", "n", "k", "tokens", "rows", "count"), CASES)
def test_tiles_in_the_mail(kernel_backend: Any, fmt: str, store: str, n: int, k: int, tokens: int, rows: int, count: int,
                           family: str, transport: int) -> None:  # fmt: skip
    """The active rows in the slot of the number's parity, bit for bit what y holds and right against FP64; a line with the
    number for every tile with an active row; not a byte anywhere else."""
    device = target(kernel_backend, family)
    tile = pick(fmt, store, device, tokens)
    y, exact, box, lines, sequence = send(kernel_backend, fmt, store, n, k, rows, count, tile, device, transport)
    want = MailBox(box.mail)
    want.bytes(sequence)[: y.nbytes] = y.view(np.uint8).reshape(-1)
    held = -(-count // tile.tokens) * -(-n // tile.rows)
    want.lines(sequence)[:held] = np.uint64(sequence << 32)
    assert np.array_equal(box.array, want.array)
    assert lines.tolist() == list(range(held))
    if count == 0:
        return
    sent = box.bytes(sequence)[: y.nbytes].view(y.dtype).reshape(y.shape)
    if store == "bf16":
        assert_close_to_fp64(sent, exact, "bf16", factor=1.1, name=f"sent by {family}")
    else:
        assert np.linalg.norm(sent - exact) < 2.0**-20 * np.linalg.norm(exact)


@pytest.mark.parametrize("family", ["wgmma", "mma"])
@pytest.mark.parametrize("case", ["staged", "not over this transport", "lost"])
def test_nothing_is_sent(kernel_backend: Any, case: str, family: str) -> None:
    """Where something else carries the sums, and after the peer was lost."""
    device = target(kernel_backend, family)
    tile = pick("NVFP4", "bf16", device, 64)
    found = send(kernel_backend, "NVFP4", "bf16", 128, 128, 64, 50, tile, device, STAGED if case == "staged" else PEER,
                 int(case == "lost"), DeviceFault.EXCHANGE if case == "lost" else 0)  # fmt: skip
    assert not found[2].array.any()


def test_wide_warpgroup_tiles(kernel_backend: Any) -> None:
    """The tile of a third of a chunk, and its end by products of fewer tokens."""
    device = target(kernel_backend, "wgmma")
    tile = pick("NVFP4", "bf16", device, 352)
    for count in (352 + 20, 352 + 140):
        y, exact, box, lines, sequence = send(kernel_backend, "NVFP4", "bf16", 128, 128, 500, count, tile, device, PEER)
        assert lines.tolist() == [0, 1]
        assert box.bytes(sequence)[: y.nbytes].tobytes() == y.tobytes()
        assert_close_to_fp64(y, exact, "bf16", factor=1.1)


@pytest.mark.parametrize("family", ["wgmma", "mma"])
def test_no_line_before_its_bytes(family: str) -> None:
    """Under any order of threads: when a tile's line is stored, all bytes of the tile are."""
    from tests.emulator import toolchain
    from tests.emulator.emulator import compile_kernel, launch

    if reason := toolchain.missing_reason():
        pytest.skip(reason)
    device = replace(caps("sm_90a"), wgmma=family == "wgmma")
    spec = linear_rows("NVFP4", "bf16", 128, 128, 64, device, pick("NVFP4", "bf16", device, 64), push=0)
    # The line's release is stopped at: what it would publish is compared then and there.
    source = render(spec.template, spec.entry, spec.params).replace(
        "#include <ninferc/gemm", '#include <ninferc/exchange/channel.cuh>\n'
        "namespace ninferc::exchange { inline void watched_publish(const Channel& channel, u32 slice) {\n"
        "  const u8* bytes = channel.sent_bytes();\n  u32 missing = 0;\n"
        "  for (u32 i = 0; i < 64 * 128 * 2; i += 2) missing += bytes[i] == 0xff && bytes[i + 1] == 0xff;\n"
        "  publish_slice(channel, slice); *channel.line(channel.outbox, 1) = missing + 1; } }\n"
        "#define publish_slice watched_publish\n#include <ninferc/gemm", 1)  # fmt: skip
    kernel = compile_kernel(source, name=spec.entry)
    weights = random_weights(np.random.default_rng(10), "NVFP4", 128, 128)
    x = encode(np.random.default_rng(11).standard_normal((64, 128)), "bf16")
    for seed in range(8):
        box = MailBox(Mail(16, 2, 64 * 128 * 2))
        box.array.view(np.uint8)[box.mail.copied_to :] = 0xFF
        named: dict[str, Any] = {
            "x": x, "x_stride": 128, "y": poisoned((64, 128)), "y_stride": 128, "rows": np.array([64], np.int32),
            "outbox": box.array, "sequence": np.array([4, 0, 0, 0], np.uint32), "step": np.zeros(4, np.int32), "ordinal": 0,
            "transport": PEER, "slot_words": 16, "slot_slices": 2, "slot_bytes": box.mail.nbytes, "tiles": 1}  # fmt: skip
        named |= zip(("w_codes", "w_high", "w_scales", "w_divisor"), weights.pointers(), strict=True)
        launch(kernel, spec.grid, spec.block, [named[name] for name in spec.args], spec.smem, seed)
        assert box.lines(4).tolist() == [4 << 32, 1], f"schedule {seed}: {box.lines(4)[1] - 1} values came after their line"


def test_only_partial_sums_are_sent() -> None:
    with pytest.raises(IRError, match="only partial sums"):
        linear_rows("BF16", "residual", 128, 128, 64, caps("sm_90a"), push=0)
