// First node of every graph: apply ingress records, then lay out the columns that run (compiler/ops/begin.py).
#pragma once
#include <ninferc/attention/worklist.cuh>
#include <ninferc/base/grid.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/base/warp.cuh>
#include <ninferc/control/words.cuh>

namespace ninferc::control {

// All threads of one block. Records are read from page-locked host memory past every cache; the sequence word is written
// last by the host, so a record whose number stands is complete.
template <u32 control_words, u32 slots, u32 vocab>
NINFERC_DEVICE void apply_records(const u32* ring, i32* block, i32* step, i32* token_counts) {
  __shared__ u32 header[record_header];
  __shared__ u32 go;
  while (true) {
    if (threadIdx.x == 0) {
      const u32 at = u32(ld_global<i32>(step + ring_cursor));
      header[0] = ld_volatile<u32>(ring + at);
      const bool due_now = header[0] == u32(ld_global<i32>(step + ring_sequence)) + 1u;
      if (due_now) {
        for (u32 i = 1; i < record_header; ++i) header[i] = ld_volatile<u32>(ring + at + i);
      }
      go = due_now && header[1] <= u32(ld_global<i32>(step + step_number)) ? at + 1 : 0;
    }
    sync_block();
    if (go == 0) break;
    const u32 at = go - 1, opcode = header[2] & 0xffu, destination = header[3];
    u32 count = header[2] >> 8;
    bool bad = false;
    if (opcode == op_write) {
      bad = count > max_payload || destination > control_words || count > control_words - destination ||
            at + record_header + count > ring_words;
      if (!bad) {
        for (u32 i = threadIdx.x; i < count; i += blockDim.x)
          st_global(block + destination + i, ld_volatile<i32>(ring + at + record_header + i));
      }
    } else if (opcode == op_clear_counts && destination < slots) {
      for (u32 i = threadIdx.x; i < vocab; i += blockDim.x) st_global(token_counts + u64(destination) * vocab + i, i32(0));
    } else {
      bad = opcode != op_wrap;
    }
    sync_block();
    if (threadIdx.x == 0) {
      if (bad) {
        st_global(step + fault, i32(fault_record_range));
        if (opcode == op_write) count = 0;
      }
      st_global(step + ring_sequence, i32(header[0]));
      const u32 following = at + record_header + count;
      st_global(step + ring_cursor, i32(opcode == op_wrap || following + record_header > ring_words ? 0 : following));
    }
    sync_block();
  }
}

// Prefill: the host wrote the chunk; check it.
template <u32 chunk, u32 max_context, u32 vocab>
NINFERC_DEVICE void check_chunk(i32* step, i32* ncols, const i32* len, const i32* tokens) {
  const i32 count = ld_global<i32>(ncols);
  const bool fits = count >= 0 && count <= i32(chunk) && ld_global<i32>(len) + count <= i32(max_context);
  bool bad = false;
  if (fits) {
    for (u32 i = threadIdx.x; i < u32(count); i += blockDim.x) bad |= u32(ld_global<i32>(tokens + i)) >= vocab;
  }
  const bool any_bad = __syncthreads_or(bad) != 0;
  if (threadIdx.x == 0 && (!fits || any_bad)) {
    st_global(step + fault, i32(fits ? fault_token_range : fault_capacity));
    st_global(ncols, i32(0));
  }
}

// Decode: one thread per lane decides how many queued tokens run, and lays out ids and positions.
template <u32 lanes, u32 all_lanes, u32 width, u32 queue_size, u32 max_context, u32 vocab>
NINFERC_DEVICE void schedule_lanes(i32* step, i32* ncols, const i32* len, const i32* frozen, const i32* rope_delta,
                                   const i32* queue, const i32* head, const i32* tail, i32* tokens, i32* positions) {
  constexpr u32 columns = lanes * width;
  for (u32 lane = threadIdx.x; lane < all_lanes; lane += blockDim.x) {
    if (lane >= lanes) {
      st_global(ncols + lane, i32(0));
      continue;
    }
    const i32 first = ld_global<i32>(head + lane), length = ld_global<i32>(len + lane);
    const i32 place = length + ld_global<i32>(rope_delta + lane);
    i32 count = min(i32(width), ld_global<i32>(tail + lane) - first);
    if (ld_global<i32>(frozen + lane) != 0) count = 0;
    if (length + count > i32(max_context)) {
      st_global(step + fault, i32(fault_capacity));
      count = 0;
    }
    const i32* mine = queue + lane * queue_size;
    bool bad = false;
    for (i32 t = 0; t < count; ++t) bad |= u32(ld_global<i32>(mine + u32(first + t) % queue_size)) >= vocab;
    if (bad) {
      st_global(step + fault, i32(fault_token_range));
      count = 0;
    }
    st_global(ncols + lane, count);
    for (u32 t = 0; t < width; ++t) {
      const i32 token = i32(t) < count ? ld_global<i32>(mine + u32(first + i32(t)) % queue_size) : 0;
      st_global(tokens + lane * width + t, token);
      for (u32 axis = 0; axis < 3; ++axis) st_global(positions + axis * columns + lane * width + t, place + i32(t));
    }
  }
}

}  // namespace ninferc::control
