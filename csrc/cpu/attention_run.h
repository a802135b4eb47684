// Plans one call of attention and runs it over threads. Nothing here can change a bit of the result.
//
// A unit is at most kAttentionUnitRows rows (query, head of the group) of one sequence and key/value head. When there
// are too few units for the threads (decoding with a batch of one), each unit becomes one item per span of its keys.
#pragma once

#include "cpu/arena.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace jacobi::cpu {

constexpr int64_t kAttentionPartialBytes = 4 << 20;  // no splitting when the spans' results would need more
constexpr int64_t kAttentionGrain = 1 << 18;         // multiply-adds that are worth a thread

// Units of `queries` live queries of one sequence, per key/value head; one for an empty sequence, whose holes it
// writes.
inline int64_t units_of(const AttentionArgs& a, int64_t queries) {
  const int64_t group = a.heads / a.kv_heads, limit = kAttentionUnitRows > group ? kAttentionUnitRows / group : 1;
  return queries > limit ? (queries + limit - 1) / limit : 1;
}

inline int64_t max_units(const AttentionArgs& a) { return a.kv_heads * (a.batch + units_of(a, a.rows)); }

// Writes the units; adds up what a split needs to know.
struct AttentionPlan {
  int64_t units = 0, live = 0;
  int64_t slots = 0;  // longest path
};

inline AttentionPlan plan_attention(const AttentionArgs& a, AttentionUnit* units) {
  AttentionPlan plan;
  for (int64_t b = 0; b < a.batch; ++b) {
    int64_t queries = 0;
    for (int32_t s = a.cu_segments[b]; s < a.cu_segments[b + 1]; ++s) queries += a.segments[s].length;
    const int64_t committed = a.cache_seqlens == nullptr ? 0 : a.cache_seqlens[b];
    plan.live += queries;
    plan.slots = committed + queries > plan.slots ? committed + queries : plan.slots;
    const int64_t count = units_of(a, queries);
    for (int64_t head = 0; head < a.kv_heads; ++head) {
      int32_t segment = a.cu_segments[b];
      int64_t index = 0, begin = 0;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t end = queries * (i + 1) / count;
        while (end > begin && index >= a.segments[segment].length) index -= a.segments[segment++].length;
        units[plan.units++] = {static_cast<int32_t>(b),     static_cast<int32_t>(head),        segment,
                               static_cast<int32_t>(index), static_cast<int32_t>(end - begin), i == 0};
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

// `workspace`: attention_workspace(args, thread_count()) bytes, free again afterwards. Units and what follows in `args`
// are filled in here.
inline void run_attention(AttentionArgs args, void* workspace) {
  const int64_t threads = thread_count(), scratch_bytes = kernels().attention_scratch(args);
  Arena arena(reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace) + 63) / 64 * 64),
              static_cast<size_t>(attention_workspace(args, threads)) - 64);
  AttentionUnit* units = arena.take<AttentionUnit>(max_units(args));
  args.pending = arena.take<int32_t>(max_units(args));
  char* scratch = arena.take<char>(threads * scratch_bytes);
  args.partial = reinterpret_cast<float*>(arena.take<char>(kAttentionPartialBytes));

  const AttentionPlan plan = plan_attention(args, units);
  args.units = units;
  args.unit_count = plan.units;
  const int64_t seen = args.window >= 0 && args.window + 1 < plan.slots ? args.window + 1 : plan.slots;
  const int64_t work = plan.live * args.heads * seen * args.head_dim * 2;
  const int64_t parts_wanted = work / kAttentionGrain < threads ? work / kAttentionGrain + 1 : threads;
  const int64_t spans = (plan.slots + kAttentionSpan - 1) / kAttentionSpan;
  const int64_t group = args.heads / args.kv_heads;
  const int64_t partial_bytes = (kAttentionUnitRows + group) * ((args.head_dim + 15) / 16 * 16 + 2) * 4;
  const bool split = parts_wanted > 1 && spans > 1 && plan.units < 4 * threads &&
                     plan.units * spans * partial_bytes <= kAttentionPartialBytes;
  args.splits = split ? spans : 1;
  for (int64_t u = 0; u < plan.units; ++u) args.pending[u] = static_cast<int32_t>(args.splits);
  const int64_t items = plan.units * args.splits, parts = parts_wanted < items ? parts_wanted : items;
  parallel_for(parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      kernels().attention(args, scratch + i * scratch_bytes, items * i / parts, items * (i + 1) / parts);
  });
}

}  // namespace jacobi::cpu
