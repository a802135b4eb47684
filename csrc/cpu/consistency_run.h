// Plans one call of consistency_loss or its backward and runs its phases over threads, one after the other: within a
// phase nobody reads what another item writes, so threads cannot change a bit.
//
// A row takes part when it has a target or a teacher, or is a teacher; the others cost nothing. Scratch in floats, with
// E the width rounded up to 16 and N rows that take part, never rows times vocabulary:
//
//   forward   N (E + 16) + 528 N + 256 E + 51 N
//   backward  N (E + 16) + 528 N + 256 E + N (256 + 2 E) + 512 E
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/arena.h"
#include "cpu/consistency_args.h"
#include "cpu/parallel.h"

namespace jacobi::cpu {

struct ConsistencyPlan {
  std::vector<int32_t> rows, targets, teachers;
  std::vector<uint8_t> teaches;
};

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Rows with a loss in their order, then those that are only teachers. targets, teachers: [rows], -1 for none.
inline ConsistencyPlan plan_consistency(ConsistencyArgs& a, const int64_t* targets, const int64_t* teachers,
                                        int64_t rows) {
  ConsistencyPlan plan;
  std::vector<int32_t> place(rows, -1);
  const auto enter = [&](int64_t r) {
    place[r] = static_cast<int32_t>(plan.rows.size());
    plan.rows.push_back(static_cast<int32_t>(r));
  };
  for (int64_t r = 0; r < rows; ++r)
    if (targets[r] >= 0 || teachers[r] >= 0) enter(r);
  a.losses = static_cast<int64_t>(plan.rows.size());
  for (int64_t r = 0; r < rows; ++r)
    if (teachers[r] >= 0 && place[teachers[r]] < 0) enter(teachers[r]);
  a.live = static_cast<int64_t>(plan.rows.size());
  plan.teaches.assign(plan.rows.size(), 0);
  for (const int32_t r : plan.rows) {
    plan.targets.push_back(static_cast<int32_t>(targets[r]));
    plan.teachers.push_back(teachers[r] < 0 ? -1 : place[teachers[r]]);
    if (teachers[r] >= 0) plan.teaches[place[teachers[r]]] = 1;
  }
  a.rows = plan.rows.data(), a.targets = plan.targets.data(), a.teachers = plan.teachers.data();
  a.teaches = plan.teaches.data();
  return plan;
}

// The scratch of a planned call; backward when grad_nll is set. `arena` may only count.
inline void take_consistency_scratch(ConsistencyArgs& a, Arena& arena) {
  a.width_up = round_up(a.width, 16);
  a.x_stride = a.width_up + 16;  // not a power of two, which would crowd a few sets of the cache
  a.x = arena.take<float>(a.live * a.x_stride);
  a.w_columns = arena.take<float>(kLossTile * a.width);
  a.logits = arena.take<float>(a.live * kLossStride);
  a.weights = arena.take<float>(a.live * kLossTile);
  if (a.grad_nll == nullptr) {
    for (float** each : {&a.top, &a.decay, &a.target_logit}) *each = arena.take<float>(a.live);
    for (float** each : {&a.plain, &a.tempered, &a.soft}) *each = arena.take<float>(16 * a.live);
    return;
  }
  if (a.d_hidden != nullptr) {
    a.w_rows = arena.take<float>(kLossTile * a.width_up);
    a.dx = arena.take<float>(a.losses * a.width_up);
  }
  if (a.d_lm_head != nullptr) {
    a.x_panels = arena.take<float>(a.losses * a.width_up);
    a.dw = arena.take<float>(kLossTile * a.width_up);
  }
  if (a.d_lm_head != nullptr || a.d_bias != nullptr) {
    a.transposed_stride = round_up(a.losses, 16) + 16;
    a.transposed = arena.take<float>(kLossTile * a.transposed_stride);
  }
}

inline void run_phase(const ConsistencyArgs& a, ConsistencyPhase phase, int64_t column, int64_t items, int64_t grain) {
  parallel_for((items + grain - 1) / grain, 1, [&](int64_t begin, int64_t end) {
    kernels().consistency(a, phase, column, begin * grain, std::min(end * grain, items));
  });
}

// Planned rows must be zero in nll and consistency where they have no target or no teacher.
inline void run_consistency(const ConsistencyArgs& a) {
  using Phase = ConsistencyPhase;
  std::fill(a.top, a.top + a.live, -__builtin_inff());
  for (float* sums : {a.plain, a.tempered, a.soft}) std::fill(sums, sums + 16 * a.live, 0.0f);
  run_phase(a, Phase::gather, 0, a.live, kLossRowGrain);
  for (int64_t column = 0; column < a.vocab; column += kLossTile) {
    run_phase(a, Phase::pack, column, (a.columns(column) + 15) / 16, 1);
    run_phase(a, Phase::logits, column, a.live, kLossRowGrain);
    run_phase(a, Phase::soft, column, a.losses, kLossRowGrain);
  }
  run_phase(a, Phase::finish, 0, a.live, kLossRowGrain);
}

// Rows without a loss are not written in d_hidden.
inline void run_consistency_backward(const ConsistencyArgs& a) {
  using Phase = ConsistencyPhase;
  run_phase(a, Phase::gather, 0, a.live, kLossRowGrain);
  for (int64_t column = 0; column < a.vocab; column += kLossTile) {
    run_phase(a, Phase::pack, column, (a.columns(column) + 15) / 16, 1);
    run_phase(a, Phase::logits, column, a.live, kLossRowGrain);
    run_phase(a, Phase::gradient, column, a.losses, kLossRowGrain);
    if (a.transposed != nullptr) run_phase(a, Phase::weight, column, a.columns(column), 12);
  }
  if (a.dx != nullptr) run_phase(a, Phase::scatter, 0, a.losses, kLossRowGrain);
}

}  // namespace jacobi::cpu
