// Plans one call of attention and runs it over threads. Nothing here can change a bit of the result.
//
// A unit is some rows (query, head of the group) of one sequence and key/value head, at most kAttentionUnitRows. When
// there are too few units for the threads (decoding with a small batch), each unit becomes one item per span of its
// keys; where that would need too much memory, units become smaller. Threads take items one by one.
#pragma once

#include <atomic>

#include "cpu/arena.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace jacobi::cpu {

constexpr int64_t kAttentionMinRows = 24;            // a unit is not made smaller to feed more threads
constexpr int64_t kAttentionPartialBytes = 4 << 20;  // no spans apart when their results would need more
constexpr int64_t kAttentionGrain = 1 << 18;         // multiply-adds that are worth a thread

struct AttentionPlan {
  int64_t units = 0;
  int64_t unit_queries = 0;  // most queries of a unit
  int64_t spans = 0;         // most spans of a unit
  int64_t work = 0;          // multiply-adds
};

// Units that `queries` live queries of one sequence make per key/value head; one for none, as somebody writes the
// holes.
inline int64_t count_units(const AttentionArgs& a, int64_t queries, int64_t unit_rows) {
  const int64_t group = a.heads / a.kv_heads, limit = unit_rows > group ? unit_rows / group : 1;
  return queries > limit ? (queries + limit - 1) / limit : 1;
}

inline int64_t max_units(const AttentionArgs& a) {
  return a.kv_heads * (a.batch + count_units(a, a.rows, kAttentionMinRows));
}

inline AttentionPlan plan_attention(const AttentionArgs& a, int64_t unit_rows, AttentionUnit* units) {
  AttentionPlan plan;
  for (int64_t b = 0; b < a.batch; ++b) {
    int64_t queries = 0;
    for (int32_t s = a.cu_segments[b]; s < a.cu_segments[b + 1]; ++s) queries += a.segments[s].length;
    const int64_t committed = a.cache_seqlens == nullptr ? 0 : a.cache_seqlens[b];
    const int64_t first_slot = a.window >= 0 && committed > a.window ? committed - a.window : 0;
    const int64_t first_span = first_slot / kAttentionSpan, slots = committed + queries;
    const int64_t spans = queries > 0 ? (slots - 1) / kAttentionSpan + 1 - first_span : 0;
    const int64_t count = count_units(a, queries, unit_rows), most = (queries + count - 1) / count;
    plan.spans = spans > plan.spans ? spans : plan.spans;
    plan.unit_queries = most > plan.unit_queries ? most : plan.unit_queries;
    plan.work += queries * a.heads * a.head_dim * 2 * (slots - first_slot);
    for (int64_t head = 0; head < a.kv_heads; ++head) {
      int32_t segment = a.cu_segments[b];
      int64_t index = 0, begin = 0;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t end = queries * (i + 1) / count;
        while (end > begin && index >= a.segments[segment].length) index -= a.segments[segment++].length;
        AttentionUnit& unit = units[plan.units++];
        unit.sequence = static_cast<int32_t>(b), unit.kv_head = static_cast<int32_t>(head);
        unit.segment = segment, unit.index = static_cast<int32_t>(index);
        unit.queries = static_cast<int32_t>(end - begin);
        unit.first_span = static_cast<int32_t>(first_span);
        unit.writes_holes = i == 0 && !a.leave_holes;
        index += end - begin;
        begin = end;
      }
    }
  }
  return plan;
}

// Bytes of workspace for any lengths within the sizes of `args`; depends on no pointer and no length.
inline int64_t attention_workspace(const AttentionArgs& args, int64_t threads) {
  Arena arena(nullptr, 0);
  arena.take<AttentionUnit>(max_units(args));
  arena.take<int32_t>(max_units(args));
  arena.take<char>(threads * kernels().attention_scratch(args));
  arena.take<char>(kAttentionPartialBytes);
  return static_cast<int64_t>(arena.used()) + 64;
}

// A planned call: what the threads that take part share.
struct AttentionRun {
  AttentionArgs args;
  char* scratch;
  int64_t scratch_bytes;  // per thread
  int64_t items, parts;   // parts: threads that are worth it
  std::atomic<int64_t> next;
};

// Plans for at most `threads` threads. `workspace`: attention_workspace(args, thread_count()) bytes, free again when
// all have run.
inline void plan_run(AttentionRun& run, AttentionArgs args, int64_t threads, void* workspace) {
  run.scratch_bytes = kernels().attention_scratch(args);
  Arena arena(reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace) + 63) / 64 * 64),
              static_cast<size_t>(attention_workspace(args, threads)) - 64);
  AttentionUnit* units = arena.take<AttentionUnit>(max_units(args));
  args.pending = arena.take<int32_t>(max_units(args));
  run.scratch = arena.take<char>(threads * run.scratch_bytes);
  args.partial = reinterpret_cast<float*>(arena.take<char>(kAttentionPartialBytes));

  const int64_t group = args.heads / args.kv_heads, padded = (args.head_dim + 15) / 16 * 16;
  AttentionPlan plan;
  args.splits = 1;
  for (int64_t rows = kAttentionUnitRows; rows >= kAttentionMinRows; rows /= 2) {
    plan = plan_attention(args, rows, units);
    const int64_t useful = plan.work / kAttentionGrain < threads ? plan.work / kAttentionGrain : threads;
    if (useful <= 1 || plan.units >= 3 * useful) break;
    args.partial_stride = plan.unit_queries * group * (padded + 2);
    if (plan.spans > 1 && plan.units * plan.spans * args.partial_stride * 4 <= kAttentionPartialBytes) {
      args.splits = plan.spans;
      break;
    }
  }
  args.units = units;
  args.unit_count = plan.units;
  for (int64_t u = 0; u < plan.units; ++u) args.pending[u] = static_cast<int32_t>(args.splits);

  const int64_t useful = plan.work / kAttentionGrain + 1;
  run.items = plan.units * args.splits;
  const int64_t most = threads < run.items ? threads : run.items;
  run.parts = useful < most ? useful : most;
  run.args = args;
  run.next.store(0, std::memory_order_relaxed);
}

// What thread `part` does.
inline void run_part(AttentionRun& run, int64_t part) {
  if (part >= run.parts) return;
  for (int64_t item = run.next++; item < run.items; item = run.next++)
    kernels().attention(run.args, run.scratch + part * run.scratch_bytes, item, item + 1);
}

// `units` and all that follows in `args` is filled in here.
inline void run_attention(const AttentionArgs& args, void* workspace) {
  AttentionRun run;
  plan_run(run, args, thread_count(), workspace);
  parallel_for(run.parts, 1, [&](int64_t begin, int64_t) { run_part(run, begin); });
}

}  // namespace jacobi::cpu
