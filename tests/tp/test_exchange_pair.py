"""Both ranks' exchange kernels at once on the emulator, back to back, drifting apart as the protocol allows: every result is
compared, and what a rank does when the other one falls silent.

One launch holds the blocks of both ranks. Each rank goes through its exchanges at its own pace: between two of them stands
what stands between two kernels, a barrier over the blocks of the rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compiler.control import DeviceFault
from compiler.ir.op import bf16_round
from compiler.kernels.exchange import Mail
from compiler.ops.exchange_begin import number
from tests.emulator import toolchain
from tests.emulator.emulator import compile_kernel, launch
from tests.emulator.harness import to_bf16

pytestmark = pytest.mark.skipif(bool(toolchain.missing_reason()), reason=str(toolchain.missing_reason()))
Array = np.ndarray[Any, Any]
WIDTH, COUNT = 192, 7
SOURCE = """
#include <ninferc/exchange/push.cuh>
#include <ninferc/exchange/residual.cuh>
using namespace ninferc;

template <bool first>
struct Config {
  static constexpr u32 width = %(width)d, parts = %(parts)d;
  static constexpr bool half = %(half)s, first_rank = first, norm = false, pushed = false;
  static constexpr bool host_slices = %(slices)s, peer_slices = %(slices)s, sparing = %(sparing)s, settled = false;
  static constexpr u32 tile_tokens = %(tiles)s ? 2 : 0, tile_rows = %(tiles)s ? 64 : 0;
};

// What the product in front of the exchange sends: its tiles, in another order on every block.
template <class S>
NINFERC_DEVICE void send_tiles(const exchange::TilePush& push, const u8* partial, u32 columns, u32 block, u32 blocks) {
  constexpr u32 across = S::width / 64, bytes = 64 * S::pair_bytes / 2;
  const u32 count = ceil_div(columns, 2u) * across;
  for (u32 i = block; i < count; i += blocks) {
    const exchange::Channel channel = push.open();
    const u32 tile = push.ordinal %% 2 == 0 ? i : count - 1 - i;
    for (u32 left = (tile * 7 + push.ordinal) %% 3; left != 0; --left) nano_sleep(100);
    for (u32 j = threadIdx.x; j < 2 * bytes / 4; j += blockDim.x) {
      const u32 column = tile / across * 2 + j / (bytes / 4);
      const u64 at = u64(column) * S::width / 2 * S::pair_bytes + tile %% across * bytes + j %% (bytes / 4) * 4;
      if (column < columns && !channel.dead) st_global<u32>(channel.sent_bytes() + at, ld_global<u32>(partial + at));
    }
    sync_block();
    if (threadIdx.x == 0 && !channel.dead) exchange::publish_slice(channel, tile);
  }
}

// Until all blocks of a rank are here: the end of a kernel.
NINFERC_DEVICE void between_kernels(u32* arrived, u32 blocks, u32 turn) {
  sync_block();
  if (threadIdx.x == 0) {
    atomic_add_acq_rel_gpu(arrived, 1u);
    while (ld_acquire_gpu<u32>(arrived) < blocks * (turn + 1)) {}
  }
  sync_block();
}

// grid (parts, rows, 2 ranks x roles)
NINFERC_KERNEL(pair, 256, 1)(const u8* partial, const bf16* residual, bf16* y, const u32* sequence, i32* step, u64* mail,
                             u32* hang, u32* arrived, u32 columns, u32 count, u32 silent_after, u32 transport, u32 slot_words,
                             u32 slot_slices, u32 slot_bytes, u32 seed) {
  using S = exchange::ResidualShape<Config<true>>;
  constexpr u32 roles = S::slices || S::tiles ? 2 : 1;
  const u32 rank = blockIdx.z / roles, blocks = gridDim.x * gridDim.y * roles, all = columns * S::width;
  const u64 mail_words = 2 * (u64(slot_words) + u64(slot_slices) * exchange::line_words) + 2 * u64(slot_bytes) / 8;
  const bool first_role = roles == 2 && blockIdx.z %% 2 == 0;
  const exchange::Site site{blockIdx.x, blockIdx.y, gridDim.y, first_role && S::slices, S::tiles};
  for (u32 i = 0; i < count; ++i) {
    if (rank == 1 && i == silent_after) return;
    for (u32 left = (seed * (i + 3) * (rank + 5)) %% 4; left != 0; --left) nano_sleep(100);
    const exchange::Channel channel(mail + (1 - rank) * mail_words, mail + rank * mail_words, hang, step + 4 * rank,
                                    sequence + 4 * rank, i, transport, slot_words, slot_slices, slot_bytes);
    const bf16* old = i == 0 ? residual : y + (u64(rank) * count + i - 1) * all;
    const exchange::Rows rows{partial + (u64(rank) * count + i) * all * S::pair_bytes / 2, old,
                              y + (u64(rank) * count + i) * all, S::width, S::width, S::width, columns};
    u32 gain[S::rounds];
    if (S::tiles && first_role)
      send_tiles<S>({channel.outbox, sequence + 4 * rank, step + 4 * rank, i, transport, slot_words, slot_slices, slot_bytes,
                     1},
                    static_cast<const u8*>(rows.partial), columns, blockIdx.y * gridDim.x + blockIdx.x, gridDim.x * gridDim.y);
    else if (rank == 0) exchange::residual<Config<true>>(channel, rows, exchange::NormRows{}, gain, site, true, nullptr);
    else exchange::residual<Config<false>>(channel, rows, exchange::NormRows{}, gain, site, true, nullptr);
    between_kernels(arrived + rank, blocks, i);
  }
}
"""


def run(columns: int, rows: int, parts: int, wire: str, form: str, transport: int, seed: int, silent_after: int = COUNT,
        base: int = (1 << 32) - 4) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    """Results [rank, exchange, column, value] as bf16 bits, those expected, the steps' fault words, the hang word."""
    text = {"width": WIDTH, "parts": parts, "half": str(wire == "bf16").lower(), "slices": str(form == "slices").lower(),
            "sparing": str(form == "sparing").lower(), "tiles": str(form == "tiles").lower()}  # fmt: skip
    kernel = compile_kernel(SOURCE % text, name="pair")
    rng = np.random.default_rng(seed)
    partial = (rng.standard_normal((2, COUNT, columns, WIDTH)) * 8).astype(np.float32)
    if wire == "bf16":
        partial = bf16_round(partial)
    residual = np.zeros((columns, WIDTH), np.uint16)
    want, total = np.empty((2, COUNT, columns, WIDTH), np.uint16), np.zeros((columns, WIDTH), np.float32)
    for i in range(COUNT):
        total = bf16_round((partial[0, i] + partial[1, i]) + total)
        want[:, i] = to_bf16(total)
    mail = Mail(columns * WIDTH, max(columns * parts, -(-columns // 2) * 3), columns * WIDTH * 4)
    y = np.full_like(want, 0xFFFF)
    sequence, step = np.zeros((2, 4), np.uint32), np.zeros((2, 4), np.int32)
    sequence[:, 0] = base
    hang = np.zeros(1, np.uint32)
    data = to_bf16(partial) if wire == "bf16" else partial
    roles = 2 if form in ("slices", "tiles") else 1
    launch(kernel, (parts, rows, 2 * roles), 256, [
        data.view(np.uint8), residual, y, sequence, step, np.zeros(2 * mail.size // 8, np.uint64), hang, np.zeros(2, np.uint32),
        columns, COUNT, silent_after, transport, mail.words, mail.slices, mail.nbytes, seed], schedule_seed=seed,
        concurrency="grid")  # fmt: skip
    assert number(base, COUNT) == 5  # the numbers wrap
    return y, want, step[:, 3], hang


FORMS = [("words", 0), ("words", 1), ("sparing", 1), ("slices", 0), ("slices", 1), ("tiles", 0), ("tiles", 1)]


@pytest.mark.parametrize(("form", "transport"), FORMS, ids=lambda v: v if isinstance(v, str) else ("peer", "host")[v])
@pytest.mark.parametrize("wire", ["f32", "bf16"])
@pytest.mark.parametrize(("columns", "rows", "parts"), [(1, 1, 1), (3, 2, 1), (2, 2, 2)])
def test_back_to_back(form: str, transport: int, wire: str, columns: int, rows: int, parts: int) -> None:
    for seed in range(3):
        y, want, faults, hang = run(columns, rows, parts, wire, form, transport, seed)
        assert np.array_equal(y, want), seed
        assert not faults.any() and not hang.any()


@pytest.mark.parametrize(("form", "transport"), FORMS, ids=lambda v: v if isinstance(v, str) else ("peer", "host")[v])
def test_a_rank_that_falls_silent(form: str, transport: int) -> None:
    """What came before is right, the rank that waits says so once, and its later exchanges wait for nothing."""
    y, want, faults, hang = run(2, 2, 1, "f32", form, transport, 2, silent_after=3)
    assert np.array_equal(y[:, :3], want[:, :3]) and not np.array_equal(y[0, 3], want[0, 3])
    assert faults.tolist() == [DeviceFault.EXCHANGE, 0] and hang[0] == 1
    assert np.all(y[1, 3:] == 0xFFFF)
