// Attention of the query tokens of a block layout over the committed tokens and their own paths.
//
//   s_j = softcap(scale * q . k_j)      for the keys j that the query sees: its path, or the window at the path's end
//   out = sum_j exp(s_j - max) v_j / sum_j exp(s_j - max),      lse = max + log(sum_j exp(s_j - max))
//
// A key's slot is its logical position on the query's path. Tiles are 64 slots, [64t, 64t + 64); spans are 4 tiles.
// Tiles wholly below L, the committed length, are the same for all queries of the sequence; tiles that reach past L are
// gathered once per segment, whose queries share them. A unit of work is up to 96 rows (query, head of the
// group) of one sequence and one key/value head: each tile is loaded once for all of them.
//
// Reduction order, per query, whatever it runs beside:
//   q . k       q times scale first, then one chain of fma over d = 0, 1, ...
//   tile        max over the tile's visible keys and the span so far; sum and out are rescaled; then sum adds lane-wise
//               (lane = slot mod 16) and out by fma, keys ascending. Unseen keys take no part, not even as 0 * v.
//   span        starts empty; its lanes of sum are reduced by reduce_add at its end
//   spans       merged in ascending order: out = fma(out_span, b, out * a), a and b the rescalings to the common max
// So the spans of a unit may run on several threads (args.splits > 1); the last one to finish merges.
//
// Bytes: keys and values of each unit's tiles once, queries and results once. Operations: 4 * head_dim per row and key
// seen.
#pragma once

#include "cpu/attention_tile.h"

namespace JACOBI_ISA {
namespace attending {

constexpr int kSpan = jacobi::cpu::kAttentionSpan;

// ---- paths ----------------------------------------------------------------------------------------------------------

inline int32_t committed(const AttentionArgs& a, int64_t b) {
  return a.cache_seqlens == nullptr ? 0 : a.cache_seqlens[b];
}

// Slot of the first token of segment s.
inline int32_t first_slot(const AttentionArgs& a, int64_t b, int32_t s) {
  int32_t slot = committed(a, b);
  for (; a.segments[s].parent >= 0; s = a.segments[s].parent) slot += a.segments[s].visible;
  return slot;
}

// Cache rows of slots [begin, end) on the path of segment s, whose first token has slot `from`; the path reaches to
// `end` at least.
inline void path_rows(const AttentionArgs& a, int64_t b, int32_t s, int32_t from, int32_t begin, int32_t end,
                      int32_t* rows) {
  const int32_t length = committed(a, b);
  for (int32_t slot = begin; slot < end && slot < length; ++slot) rows[slot - begin] = slot;
  int32_t to = end;  // slots [from, to) lie in segment s
  while (true) {
    const int32_t row = length + a.segments[s].start - a.cu_seqlens_q[b] - from;
    for (int32_t slot = from > begin ? from : begin; slot < to && slot < end; ++slot) rows[slot - begin] = row + slot;
    if (a.segments[s].parent < 0 || from <= begin) return;
    to = from;
    from -= a.segments[s].visible;
    s = a.segments[s].parent;
  }
}

// Where the `count` rows of one key/value head begin.
template <class T>
inline void row_pointers(const AttentionArgs& a, int64_t b, int64_t head, const int32_t* rows, int count, const T** key,
                         const T** value) {
  int64_t base = head * a.kv_head_stride;
  base += a.cache_seqlens == nullptr ? a.cu_seqlens_q[b] * a.kv_row_stride : b * a.kv_batch_stride;
  const T *k = static_cast<const T*>(a.k), *v = static_cast<const T*>(a.v);
  if (a.page_table == nullptr) {
    for (int j = 0; j < count; ++j) {
      const int64_t at = base + rows[j] * a.kv_row_stride;
      key[j] = k + at, value[j] = v + at;
    }
    return;
  }
  const int32_t* table = a.page_table + b * a.max_pages;
  int64_t page_begin = 0, page_end = 0, page_base = 0;
  for (int j = 0; j < count; ++j) {
    const int64_t row = rows[j];
    if (row < page_begin || row >= page_end) {
      const int64_t page = row / a.page_size;
      page_begin = page * a.page_size, page_end = page_begin + a.page_size;
      page_base = head * a.kv_head_stride + table[page] * a.kv_page_stride;
    }
    const int64_t at = page_base + (row - page_begin) * a.kv_row_stride;
    key[j] = k + at, value[j] = v + at;
  }
}

// ---- one unit -------------------------------------------------------------------------------------------------------

// Calls f(segment, row of the first query, row behind the last query) for every piece of a segment in the unit.
template <class F>
inline void for_each_piece(const AttentionArgs& a, const Work& w, const AttentionUnit& u, const F& f) {
  int32_t s = u.segment, index = u.index;
  for (int64_t query = 0; query < u.queries; ++s, index = 0) {
    int64_t count = a.segments[s].length - index;
    if (count > u.queries - query) count = u.queries - query;
    if (count > 0) f(s, query * w.group, (query + count) * w.group);
    query += count;
  }
}

// Tiles [begin, end) for rows [r0, r1); cache_rows: of the slots from tile `begin` on, on their path.
template <class T>
inline void attend_tiles(const AttentionArgs& a, Work& w, const AttentionUnit& u, const int32_t* cache_rows, int64_t r0,
                         int64_t r1, int32_t begin, int32_t end) {
  const T *key[kTile], *value[kTile];
  for (int32_t tile = begin; tile < end; ++tile) {
    int lo, hi;
    see(a, w, tile, r0, r1, &lo, &hi);
    if (lo >= hi) continue;
    row_pointers(a, u.sequence, u.kv_head, cache_rows + (tile - begin) * kTile + lo, hi - lo, key, value);
    load_tile(w, key, value, lo, hi);
    attend_tile(a, w, r0, r1, lo, hi);
  }
}

// Rows of the unit over one span, from nothing.
template <class T>
inline void attend_span(const AttentionArgs& a, Work& w, const AttentionUnit& u, int32_t span) {
  for (int64_t i = 0; i < w.rows; ++i) w.best[i] = kNone;
  for (int64_t i = 0; i < w.rows; ++i) store(w.sum + i * 16, zero());
  for (int64_t i = 0; i < w.rows * w.padded; i += 16) store(w.out + i, zero());
  const int32_t begin = span * (kSpan / kTile), end = begin + kSpan / kTile;
  int32_t shared = committed(a, u.sequence) / kTile;  // tiles below are the same for all rows
  shared = shared < begin ? begin : shared > end ? end : shared;
  int32_t rows[kSpan];  // cache rows of the span's slots
  for (int32_t i = 0; i < kSpan; ++i) rows[i] = begin * kTile + i;
  attend_tiles<T>(a, w, u, rows, 0, w.rows, begin, shared);
  const int32_t first = shared * kTile;  // slot
  int32_t before = -1, known = 0;        // the piece before; slots below are on its path, and in rows
  for_each_piece(a, w, u, [&](int32_t s, int64_t r0, int64_t r1) {
    const int32_t from = w.position[r0] - (w.query[r0] - a.segments[s].start), reach = w.position[r1 - 1] + 1;
    const int32_t last = reach < end * kTile ? reach : end * kTile;
    // A child of the piece before has its path but for the child's own tokens. Else walk up to the root.
    const bool child = a.segments[s].parent >= 0 && a.segments[s].parent == before && from <= known;
    const int32_t fresh = child && from > first ? from : first;
    if (fresh < last) path_rows(a, u.sequence, s, from, fresh, last, rows + (fresh - begin * kTile));
    before = s, known = reach;
    attend_tiles<T>(a, w, u, rows + (first - begin * kTile), r0, r1, shared, (last + kTile - 1) / kTile);
  });
  for (int64_t i = 0; i < w.rows; ++i) w.sum[i] = reduce_add(load(w.sum + i * 16));  // in place: i <= 16 * i
}

// total = total merged with a span's rows; rows that see nothing of the span stay as they are.
inline void merge_span(Work& w, const float* out, const float* sum, const float* best) {
  float old_weight[16], new_weight[16];
  for (int64_t r = 0; r < w.rows; r += 16) {
    const int n = w.rows - r < 16 ? static_cast<int>(w.rows - r) : 16;
    const vec before = load(w.total_best + r, n), span = load(best + r, n), now = max(before, span);
    store(old_weight, exp(sub(before, now)));
    store(new_weight, exp(sub(span, now)));
    store(w.total_best + r, now, n);
    for (int i = 0; i < n; ++i) {
      if (best[r + i] == kNone) continue;
      const vec x = set1(old_weight[i]), y = set1(new_weight[i]);
      w.total_sum[r + i] = w.total_sum[r + i] * old_weight[i] + sum[r + i] * new_weight[i];
      float* total = w.total + (r + i) * w.padded;
      for (int64_t d = 0; d < w.padded; d += 16)
        store(total + d, fma(load(out + (r + i) * w.padded + d), y, mul(load(total + d), x)));
    }
  }
}

template <class Q>
inline void read_query(const AttentionArgs& a, Work& w, int64_t r, int64_t head) {
  const Q* q = static_cast<const Q*>(a.q) + w.query[r] * a.q_stride + head * a.head_dim;
  for (int64_t d = 0; d < w.dim; d += 16)
    store_up_to(w.q + r * w.dim + d, mul(load_up_to(q + d, w.dim - d), set1(a.scale)), w.dim - d);
}

// Rows, positions and scaled queries of the unit.
inline void begin_unit(const AttentionArgs& a, Work& w, const AttentionUnit& u) {
  w.rows = u.queries * w.group;
  int32_t index = u.index;
  for_each_piece(a, w, u, [&](int32_t s, int64_t r0, int64_t r1) {
    const int32_t slot = first_slot(a, u.sequence, s) + index, row = a.segments[s].start + index;
    for (int64_t r = r0; r < r1; ++r) {
      const int32_t i = static_cast<int32_t>((r - r0) / w.group);
      w.query[r] = row + i, w.position[r] = slot + i;
    }
    index = 0;
  });
  for (int64_t r = 0; r < w.rows; ++r) {
    const int64_t head = u.kv_head * w.group + r % w.group;
    a.q_type == DType::f32 ? read_query<float>(a, w, r, head) : read_query<uint16_t>(a, w, r, head);
  }
}

inline void begin_total(Work& w) {
  for (int64_t r = 0; r < w.rows; ++r) w.total_best[r] = kNone, w.total_sum[r] = 0.0f;
  for (int64_t i = 0; i < w.rows * w.padded; i += 16) store(w.total + i, zero());
}

template <class T>
inline void write_row(const AttentionArgs& a, int64_t row, int64_t head, const float* x, float divisor) {
  T* out = static_cast<T*>(a.out) + row * a.out_stride + head * a.head_dim;
  for (int64_t d = 0; d < a.head_dim; d += 16)
    store_up_to(out + d, x == nullptr ? zero() : div(load(x + d), set1(divisor)), a.head_dim - d);
}

inline void write_out(const AttentionArgs& a, int64_t row, int64_t head, const float* x, float divisor) {
  a.out_type == DType::f32 ? write_row<float>(a, row, head, x, divisor) : write_row<uint16_t>(a, row, head, x, divisor);
}

inline void end_unit(const AttentionArgs& a, const Work& w, const AttentionUnit& u) {
  for (int64_t r = 0; r < w.rows; ++r) {
    const int64_t head = u.kv_head * w.group + r % w.group;
    write_out(a, w.query[r], head, w.total + r * w.padded, w.total_sum[r]);
    if (a.lse == nullptr) continue;
    float log_sum[16];
    store(log_sum, log(set1(w.total_sum[r])));
    a.lse[head * a.rows + w.query[r]] = w.total_best[r] + log_sum[0];
  }
}

// Rows of the sequence that no segment covers, for the heads of one key/value head.
inline void write_holes(const AttentionArgs& a, const Work& w, const AttentionUnit& u) {
  int32_t row = a.cu_seqlens_q[u.sequence];
  for (int32_t s = a.cu_segments[u.sequence]; s <= a.cu_segments[u.sequence + 1]; ++s) {
    const bool live = s < a.cu_segments[u.sequence + 1];
    const int32_t end = live ? a.segments[s].start : a.cu_seqlens_q[u.sequence + 1];
    for (; row < end; ++row)
      for (int64_t head = u.kv_head * w.group; head < (u.kv_head + 1) * w.group; ++head) {
        write_out(a, row, head, nullptr, 1.0f);
        if (a.lse != nullptr) a.lse[head * a.rows + row] = kNone;
      }
    if (live) row = a.segments[s].start + a.segments[s].length;
  }
}

template <class T>
inline void run_unit(const AttentionArgs& a, Work& w, const AttentionUnit& u) {
  begin_unit(a, w, u);
  begin_total(w);
  int32_t end = 0;
  for (int64_t r = 0; r < w.rows; ++r) end = w.position[r] > end ? w.position[r] : end;
  for (int32_t span = u.first_span; span <= end / kSpan; ++span) {
    attend_span<T>(a, w, u, span);
    merge_span(w, w.out, w.sum, w.best);
  }
  end_unit(a, w, u);
}

// Where one span of a unit leaves its results: out, sum, best.
struct Partial {
  float *out, *sum, *best;
};
inline Partial partial_of(const AttentionArgs& a, const Work& w, int64_t unit, int64_t split) {
  float* base = a.partial + (unit * a.splits + split) * a.partial_stride;
  return {base, base + w.rows * w.padded, base + w.rows * (w.padded + 1)};
}

template <class T>
inline void run_split(const AttentionArgs& a, Work& w, int64_t unit, int64_t split) {
  const AttentionUnit& u = a.units[unit];
  begin_unit(a, w, u);
  attend_span<T>(a, w, u, u.first_span + static_cast<int32_t>(split));
  const Partial mine = partial_of(a, w, unit, split);
  __builtin_memcpy(mine.out, w.out, w.rows * w.padded * sizeof(float));
  __builtin_memcpy(mine.sum, w.sum, w.rows * sizeof(float));
  __builtin_memcpy(mine.best, w.best, w.rows * sizeof(float));
  if (__atomic_sub_fetch(&a.pending[unit], 1, __ATOMIC_ACQ_REL) != 0) return;
  begin_total(w);
  for (int64_t i = 0; i < a.splits; ++i) {
    const Partial span = partial_of(a, w, unit, i);
    merge_span(w, span.out, span.sum, span.best);
  }
  end_unit(a, w, u);
}

}  // namespace attending

inline int64_t attention_scratch(const AttentionArgs& a) {
  attending::Work w;
  return attending::carve(a, nullptr, w);
}

// Items are (unit, span) pairs when args.splits > 1, else units; see attention_run.h.
inline void attention(const AttentionArgs& a, void* scratch, int64_t begin, int64_t end) {
  attending::Work w;
  attending::carve(a, static_cast<char*>(scratch), w);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t unit = item / a.splits, split = item % a.splits;
    const jacobi::cpu::AttentionUnit& u = a.units[unit];
    if (u.writes_holes && split == 0) attending::write_holes(a, w, u);
    if (u.queries == 0) continue;
    const bool wide = a.kv_type == jacobi::cpu::DType::f32;
    if (a.splits > 1)
      wide ? attending::run_split<float>(a, w, unit, split) : attending::run_split<uint16_t>(a, w, unit, split);
    else
      wide ? attending::run_unit<float>(a, w, u) : attending::run_unit<uint16_t>(a, w, u);
  }
}

}  // namespace JACOBI_ISA
