// Word encodings of the control block; the numbers are those of compiler/control.py (a test compares them).
#pragma once
#include <ninferc/base/types.cuh>

namespace ninferc::control {

enum Step : u32 { step_number = 0, ring_sequence = 1, ring_cursor = 2, fault = 3 };
enum Opcode : u32 { op_write = 0, op_clear_counts = 1, op_wrap = 2 };
enum Finish : i32 { finish_none = 0, finish_stop_token = 1, finish_limit = 2, finish_capacity = 3 };
enum Fault : i32 { fault_record_range = 1, fault_token_range = 2, fault_capacity = 3, fault_exchange = 4 };
enum Sampling : u32 { temperature = 0, top_p = 1, min_p = 2, presence = 3, frequency = 4, top_k = 5, seed_low = 6, seed_high = 7 };

constexpr u32 ring_words = 1u << 16;
constexpr u32 record_header = 4;
constexpr u32 max_payload = 4096;
constexpr u32 max_stops = 16;
constexpr u32 sampling_words = 8;
constexpr u32 egress_entries = 64;
constexpr u32 egress_header = 4;
constexpr u32 egress_lane = 4;
constexpr u32 pf_lane = 0;
constexpr u32 pf_final = 1;

}  // namespace ninferc::control
