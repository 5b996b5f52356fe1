// Last node of every graph: commit lengths and pending columns, emit tokens, freeze lanes, write the egress entry
// (compiler/ops/advance.py).
#pragma once
#include <ninferc/base/grid.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/base/warp.cuh>
#include <ninferc/control/words.cuh>

namespace ninferc::control {

struct Tables {
  i32 *len, *prompt_len, *limit, *generated, *frozen, *stops, *queue, *queue_tail, *token_counts;
};

struct Emitted {
  i32 count, token, reason;
};

// One thread: count the token, decide whether the lane ends, queue it as the next input otherwise. A failed exchange may leave
// anything in place of a token: what is outside of the vocabulary goes nowhere.
template <u32 queue_size, u32 max_context, u32 vocab>
NINFERC_DEVICE Emitted emit(const Tables& t, u32 lane, u32 slot, i32 token, i32 length, bool& outside) {
  outside = u32(token) >= vocab;
  if (outside) return Emitted{0, 0, finish_none};
  const i32 generated = ld_global<i32>(t.generated + lane) + 1;
  st_global(t.generated + lane, generated);
  i32* counter = t.token_counts + u64(slot) * vocab + u32(token);
  st_global(counter, ld_global<i32>(counter) + 1);
  i32 reason = finish_none;
  for (u32 i = 0; i < max_stops; ++i) {
    if (ld_global<i32>(t.stops + lane * max_stops + i) == token) reason = finish_stop_token;
  }
  if (reason == finish_none) {
    if (generated >= ld_global<i32>(t.limit + lane)) {
      reason = finish_limit;
    } else if (length >= i32(max_context)) {
      reason = finish_capacity;
    }
  }
  if (reason != finish_none) {
    st_global(t.frozen + lane, i32(1));
  } else {
    const i32 tail = ld_global<i32>(t.queue_tail + lane);
    st_global(t.queue + lane * queue_size + u32(tail) % queue_size, token);
    st_global(t.queue_tail + lane, tail + 1);
  }
  return Emitted{1, token, reason};
}

// One block; thread b serves lane b. `run_*` are the tables of this phase: those of the lanes, or the single chunk of prefill.
template <bool prefill, bool sampling, u32 lanes, u32 all_lanes, u32 width, u32 queue_size, u32 max_context, u32 vocab>
NINFERC_DEVICE void advance(const i32* sampled, const i32* run_ncols, const i32* run_len, const i32* run_slot,
                            const i32* pf_control, i32* step, i32* queue_head, i32* slot_pending, i32* slot_parity,
                            const Tables& t, i32* egress) {
  const i32 number = ld_global<i32>(step + step_number);
  i32* entry = egress + u64(u32(number) % egress_entries) * (egress_header + egress_lane * all_lanes);
  const u32 lane = threadIdx.x;
  bool outside = false;
  if (lane < all_lanes) {
    Emitted out{0, 0, 0};
    if constexpr (prefill) {
      const i32 count = ld_global<i32>(run_ncols);
      if (lane == u32(ld_global<i32>(pf_control + pf_lane)) && count > 0) {
        const u32 slot = u32(ld_global<i32>(run_slot));
        const i32 length = ld_global<i32>(run_len) + count;
        st_global(t.len + lane, length);
        st_global(slot_pending + slot, i32(0));
        if constexpr (sampling) {
          if (ld_global<i32>(pf_control + pf_final) != 0)
            out = emit<queue_size, max_context, vocab>(t, lane, slot, ld_global<i32>(sampled), length, outside);
        }
      }
    } else if (lane < lanes) {
      const i32 count = ld_global<i32>(run_ncols + lane);
      if (count > 0) {
        const u32 slot = u32(ld_global<i32>(run_slot + lane));
        const i32 length = ld_global<i32>(t.len + lane) + count;
        st_global(t.len + lane, length);
        st_global(queue_head + lane, ld_global<i32>(queue_head + lane) + count);
        st_global(slot_pending + slot, count);
        st_global(slot_parity + slot, ld_global<i32>(slot_parity + slot) ^ 1);
        if (length >= ld_global<i32>(t.prompt_len + lane))
          out = emit<queue_size, max_context, vocab>(t, lane, slot, ld_global<i32>(sampled + lane * width + u32(count) - 1),
                                                     length, outside);
      }
    }
    i32* mine = entry + egress_header + egress_lane * lane;
    st_volatile(mine + 0, out.count);
    st_volatile(mine + 1, out.token);
    st_volatile(mine + 2, out.reason);
    st_volatile(mine + 3, ld_global<i32>(t.len + lane));
  }
  const bool any_outside = __syncthreads_or(outside) != 0;
  if (threadIdx.x == 0) {
    i32 found = ld_global<i32>(step + fault);
    if (found == 0 && any_outside) {
      found = fault_token_range;
      st_global(step + fault, found);
    }
    st_volatile(entry + 1, found);
    st_volatile(entry + 2, i32(all_lanes));
    st_volatile(entry + 3, i32(0));
  }
  fence_sys();
  sync_block();
  if (threadIdx.x == 0) {
    st_global(step + step_number, number + 1);  // after the barrier: the other lanes read the old number
    st_volatile(entry, number + 1);             // last: the entry is complete
  }
}

}  // namespace ninferc::control
