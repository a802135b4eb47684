// Attention of the query tokens of a block layout over the committed tokens and their own paths.
//
//   s_j = softcap(scale * q . k_j)      for the keys j that the query sees: its path, or the window at the path's end
//   out = sum_j exp(s_j - max) v_j / sum_j exp(s_j - max),      lse = max + log(sum_j exp(s_j - max))
//
// A key's slot is its logical position on the query's path. Tiles are 64 slots, [64t, 64t + 64); spans are 4 tiles.
// Tiles wholly below L, the committed length, are the same for all queries of the sequence; tiles that reach past L are
// gathered once per segment, whose queries share them. A unit of work is up to kUnitRows rows (query, head of the
// group) of one sequence and one key/value head: each tile is loaded once for all of them.
//
// Per tile: keys are transposed to [head_dim][64]. Scores: 4 rows x 64 keys in registers, lanes are keys. Softmax: 16
// rows at a time. Values: 4 rows x 64 dimensions in registers, lanes are dimensions.
//
// Reduction order, per query, whatever it runs beside:
//   q . k       q times scale first, then one chain of fma over d = 0, 1, ...
//   tile        max over the tile's visible keys and the span so far; sum and out are rescaled; then sum adds lane-wise
//               (lane = slot mod 16) and out by fma, keys ascending. Unseen keys take no part, not even as 0 * v.
//   span        starts empty; its lanes of sum are reduced by reduce_add at its end
//   spans       merged in ascending order: out = fma(out_span, b, out * a), a and b the rescalings to the common max
// So spans may run on several threads (args.splits > 1), the last one to finish merges.
//
// Bytes: keys and values of each unit's tiles once. Operations: 4 * head_dim per row and key seen.
#pragma once

#include "cpu/kernels.h"

namespace JACOBI_ISA {
namespace attending {

using jacobi::Segment;
using jacobi::cpu::AttentionArgs;
using jacobi::cpu::AttentionUnit;
using jacobi::cpu::DType;

constexpr int kTile = 64, kSpan = jacobi::cpu::kAttentionSpan;
constexpr int kRows = 4;                         // rows of one register block
constexpr int kVecs = kRegisters >= 32 ? 4 : 1;  // vectors of keys or dimensions of one register block
constexpr float kNone = -__builtin_inff();

// Scratch of one thread, and the unit at hand.
struct Work {
  int64_t dim, padded;                    // head_dim, and that rounded up to 16
  int64_t group;                          // query heads per key/value head
  int64_t rows;                           // of the unit: row = query * group + head of the group
  float* q;                               // [rows][dim], times scale
  float *out, *sum, *best;                // of the span: [rows][padded], [rows][16], [rows]
  float *total, *total_sum, *total_best;  // of the spans before: [rows][padded], [rows], [rows]
  float *keys, *values, *scores;          // [padded][64], [64][padded], [16][64]
  const float* value[kTile];              // rows of values, or of the cache itself
  int32_t *query, *position;              // [rows] absolute query row, slot of the query itself
  int32_t *first, *last;                  // [rows] slots of the tile that the row sees: [first, last)
};

inline int64_t carve(const AttentionArgs& a, char* base, Work& w) {
  w.dim = a.head_dim;
  w.padded = (a.head_dim + 15) / 16 * 16;
  w.group = a.heads / a.kv_heads;
  const int64_t capacity = (jacobi::cpu::kAttentionUnitRows + w.group + 31) / 16 * 16;
  int64_t used = 0;
  const auto take = [&](int64_t count) {
    char* block = base + used;
    used += (count * 4 + 63) / 64 * 64;
    return block;
  };
  const auto floats = [&](int64_t count) { return reinterpret_cast<float*>(take(count)); };
  const auto ints = [&](int64_t count) { return reinterpret_cast<int32_t*>(take(count)); };
  w.q = floats(capacity * w.padded);
  w.out = floats(capacity * w.padded), w.sum = floats(capacity * 16), w.best = floats(capacity);
  w.total = floats(capacity * w.padded), w.total_sum = floats(capacity), w.total_best = floats(capacity);
  w.keys = floats(kTile * w.padded), w.values = floats(kTile * w.padded), w.scores = floats(16 * kTile);
  w.query = ints(capacity), w.position = ints(capacity), w.first = ints(capacity), w.last = ints(capacity);
  return used;
}

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

// Cache rows of slots [begin, end) on the path of segment s; the path reaches to `end` at least.
inline void path_rows(const AttentionArgs& a, int64_t b, int32_t s, int32_t begin, int32_t end, int32_t* rows) {
  const int32_t length = committed(a, b);
  for (int32_t slot = begin; slot < end && slot < length; ++slot) rows[slot - begin] = slot;
  int32_t from = first_slot(a, b, s), to = end;  // slots [from, to) lie in segment s
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

// ---- one tile -------------------------------------------------------------------------------------------------------

// Which slots of the tile rows [r0, r1) see; returns their union in [*lo, *hi).
inline void see(const AttentionArgs& a, Work& w, int32_t tile, int64_t r0, int64_t r1, int* lo, int* hi) {
  *lo = kTile, *hi = 0;
  const int64_t base = static_cast<int64_t>(tile) * kTile;
  for (int64_t r = r0; r < r1; ++r) {
    int64_t first = a.window < 0 ? 0 : w.position[r] - a.window - base, last = w.position[r] + 1 - base;
    first = first < 0 ? 0 : first > kTile ? kTile : first;
    last = last < first ? first : last > kTile ? kTile : last;
    w.first[r] = static_cast<int32_t>(first), w.last[r] = static_cast<int32_t>(last);
    if (first == last) continue;
    *lo = first < *lo ? static_cast<int>(first) : *lo;
    *hi = last > *hi ? static_cast<int>(last) : *hi;
  }
}

// Brings slots [lo, hi) of the tile in; key[0] and value[0] belong to slot lo.
template <class T>
inline void load_tile(Work& w, const T* const* key, const T* const* value, int lo, int hi) {
  for (int j = lo / 16 * 16; j < hi; j += 16)
    for (int64_t d = 0; d < w.padded; d += 16) {
      vec x[16];
      if (j >= lo && j + 16 <= hi && d + 16 <= w.dim) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) x[i] = load(key[j - lo + i] + d);
      } else {
        for (int i = 0; i < 16; ++i)
          x[i] = j + i >= lo && j + i < hi ? load_up_to(key[j - lo + i] + d, w.dim - d) : zero();
      }
      transpose(x);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) store(w.keys + (d + i) * kTile + j, x[i]);
    }
  for (int j = lo; j < hi; ++j) {
    if constexpr (sizeof(T) == 4) {
      if (w.dim == w.padded) {
        w.value[j] = value[j - lo];
        continue;
      }
    }
    float* row = w.values + j * w.padded;
    for (int64_t d = 0; d < w.padded; d += 16) store(row + d, load_up_to(value[j - lo] + d, w.dim - d));
    w.value[j] = row;
  }
}

template <int R, int N>
[[gnu::always_inline]] inline void score_vectors(const float* q, int64_t dim, const float* keys, float* scores) {
  vec acc[R][N];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) acc[r][n] = zero();
  for (int64_t d = 0; d < dim; ++d) {
    vec k[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) k[n] = load(keys + d * kTile + 16 * n);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vec x = set1(q[r * dim + d]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[r][n] = fma(x, k[n], acc[r][n]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(scores + r * kTile + 16 * n, acc[r][n]);
}

// Scores of R rows against the vectors of keys that [lo, hi) touches.
template <int R>
inline void score_rows(const Work& w, const float* q, float* scores, int lo, int hi) {
  int j = lo / 16 * 16;
  for (; hi - j > 16 * (kVecs - 1); j += 16 * kVecs) score_vectors<R, kVecs>(q, w.dim, w.keys + j, scores + j);
  for (; j < hi; j += 16) score_vectors<R, 1>(q, w.dim, w.keys + j, scores + j);
}

template <int R, int N>
[[gnu::always_inline]] inline void value_vectors(const float* p, const float* alpha, const float* const* value,
                                                 int64_t d, int lo, int hi, float* out, int64_t stride) {
  vec acc[R][N];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) acc[r][n] = mul(load(out + r * stride + d + 16 * n), set1(alpha[r]));
  for (int j = lo; j < hi; ++j) {
    vec v[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) v[n] = load(value[j] + d + 16 * n);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vec x = set1(p[r * kTile + j]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[r][n] = fma(x, v[n], acc[r][n]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(out + r * stride + d + 16 * n, acc[r][n]);
}

// out = alpha * out + p v over slots [lo, hi) for R rows, all dimensions.
template <int R>
inline void value_rows(const Work& w, const float* p, const float* alpha, int lo, int hi, float* out) {
  int64_t d = 0;
  for (; d + 16 * kVecs <= w.padded; d += 16 * kVecs)
    value_vectors<R, kVecs>(p, alpha, w.value, d, lo, hi, out, w.padded);
  for (; d < w.padded; d += 16) value_vectors<R, 1>(p, alpha, w.value, d, lo, hi, out, w.padded);
}

// The rows' common slots together, those in front and behind row by row.
template <int R>
inline void value_ranges(const Work& w, int64_t r, const float* p, float* alpha) {
  int lo = 0, hi = kTile;
  for (int i = 0; i < R; ++i) {
    lo = w.first[r + i] > lo ? w.first[r + i] : lo;
    hi = w.last[r + i] < hi ? w.last[r + i] : hi;
  }
  if (lo >= hi) lo = hi = kTile;  // nothing in common: all of it in front
  for (int i = 0; i < R; ++i) {
    const int end = w.last[r + i] < lo ? w.last[r + i] : lo;
    if (w.first[r + i] >= end) continue;
    value_rows<1>(w, p + i * kTile, alpha + i, w.first[r + i], end, w.out + (r + i) * w.padded);
    alpha[i] = 1.0f;
  }
  if (lo == hi) return;
  value_rows<R>(w, p, alpha, lo, hi, w.out + r * w.padded);
  const float one = 1.0f;
  for (int i = 0; i < R; ++i)
    if (w.last[r + i] > hi) value_rows<1>(w, p + i * kTile, &one, hi, w.last[r + i], w.out + (r + i) * w.padded);
}

inline mask between(int slot, int lo, int hi) {
  const ivec lane = iota();
  return and_not(negative(add(lane, iset1(slot - hi))), negative(add(lane, iset1(slot - lo))));
}

// Turns the scores of rows [r, r + n), n <= 16, into weights; alpha: what the rows' state so far is worth now.
inline void weigh(const AttentionArgs& a, Work& w, int64_t r, int n, float* alpha) {
  vec best[16];
  const vec none = set1(kNone), cap = set1(a.softcap);
  for (int i = 0; i < 16; ++i) best[i] = none;
  for (int i = 0; i < n; ++i) {
    const int lo = w.first[r + i], hi = w.last[r + i];
    for (int j = lo / 16 * 16; j < hi; j += 16) {
      float* at = w.scores + i * kTile + j;
      vec s = load(at);
      if (a.softcap > 0.0f) s = mul(cap, tanh(div(s, cap)));
      if (j < lo || j + 16 > hi) s = select(between(j, lo, hi), s, none);
      store(at, s);
      best[i] = max(best[i], s);
    }
  }
  transpose(best);
  vec tile_best = best[0];
  for (int i = 1; i < 16; ++i) tile_best = max(tile_best, best[i]);
  const vec before = load(w.best + r, n), now = max(before, tile_best);
  store(w.best + r, now, n);
  store(alpha, exp(sub(before, now)));
  for (int i = 0; i < n; ++i) {
    const int lo = w.first[r + i], hi = w.last[r + i];
    if (lo == hi) continue;
    const vec shift = set1(w.best[r + i]);
    vec sum = mul(load(w.sum + (r + i) * 16), set1(alpha[i]));
    for (int j = lo / 16 * 16; j < hi; j += 16) {
      float* at = w.scores + i * kTile + j;
      vec p = exp(sub(load(at), shift));
      if (j < lo || j + 16 > hi) p = select(between(j, lo, hi), p, zero());
      store(at, p);
      sum = add(sum, p);
    }
    store(w.sum + (r + i) * 16, sum);
  }
}

// Rows [r0, r1) over the loaded tile.
inline void attend_tile(const AttentionArgs& a, Work& w, int64_t r0, int64_t r1, int lo, int hi) {
  float alpha[16];
  for (int64_t r = r0; r < r1; r += 16) {
    const int n = r1 - r < 16 ? static_cast<int>(r1 - r) : 16;
    const float* q = w.q + r * w.dim;
    int i = 0;
    for (; i + kRows <= n; i += kRows) score_rows<kRows>(w, q + i * w.dim, w.scores + i * kTile, lo, hi);
    if (n - i == 3) score_rows<3>(w, q + i * w.dim, w.scores + i * kTile, lo, hi);
    if (n - i == 2) score_rows<2>(w, q + i * w.dim, w.scores + i * kTile, lo, hi);
    if (n - i == 1) score_rows<1>(w, q + i * w.dim, w.scores + i * kTile, lo, hi);
    weigh(a, w, r, n, alpha);
    for (i = 0; i + kRows <= n; i += kRows) value_ranges<kRows>(w, r + i, w.scores + i * kTile, alpha + i);
    if (n - i == 3) value_ranges<3>(w, r + i, w.scores + i * kTile, alpha + i);
    if (n - i == 2) value_ranges<2>(w, r + i, w.scores + i * kTile, alpha + i);
    if (n - i == 1) value_ranges<1>(w, r + i, w.scores + i * kTile, alpha + i);
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

// Tiles [begin, end) of segment s's path for rows [r0, r1).
template <class T>
inline void attend_tiles(const AttentionArgs& a, Work& w, const AttentionUnit& u, int32_t s, int64_t r0, int64_t r1,
                         int32_t begin, int32_t end) {
  int32_t rows[kTile];
  const T *key[kTile], *value[kTile];
  for (int32_t tile = begin; tile < end; ++tile) {
    int lo, hi;
    see(a, w, tile, r0, r1, &lo, &hi);
    if (lo >= hi) continue;
    path_rows(a, u.sequence, s, tile * kTile + lo, tile * kTile + hi, rows);
    row_pointers(a, u.sequence, u.kv_head, rows, hi - lo, key, value);
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
  attend_tiles<T>(a, w, u, u.segment, 0, w.rows, begin, shared);
  for_each_piece(a, w, u, [&](int32_t s, int64_t r0, int64_t r1) {
    const int32_t reach = w.position[r1 - 1] / kTile + 1;
    attend_tiles<T>(a, w, u, s, r0, r1, shared, reach < end ? reach : end);
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

// Floats of one span's rows in args.partial: out, sum, best.
inline int64_t partial_size(const Work& w) { return (jacobi::cpu::kAttentionUnitRows + w.group) * (w.padded + 2); }

template <class T>
inline void run_unit(const AttentionArgs& a, Work& w, const AttentionUnit& u) {
  begin_unit(a, w, u);
  begin_total(w);
  int64_t begin = w.position[0], end = begin;  // slots that the rows see
  for (int64_t r = 0; r < w.rows; ++r) {
    const int64_t first = a.window < 0 ? 0 : w.position[r] - a.window;
    begin = first < begin ? first : begin;
    end = w.position[r] > end ? w.position[r] : end;
  }
  for (int32_t span = begin < 0 ? 0 : static_cast<int32_t>(begin / kSpan); span <= end / kSpan; ++span) {
    attend_span<T>(a, w, u, span);
    merge_span(w, w.out, w.sum, w.best);
  }
  end_unit(a, w, u);
}

template <class T>
inline void run_split(const AttentionArgs& a, Work& w, int64_t unit, int32_t span) {
  const AttentionUnit& u = a.units[unit];
  begin_unit(a, w, u);
  attend_span<T>(a, w, u, span);
  const int64_t size = partial_size(w);
  float* partial = a.partial + unit * a.splits * size;
  float* mine = partial + span * size;
  __builtin_memcpy(mine, w.out, w.rows * w.padded * sizeof(float));
  __builtin_memcpy(mine + w.rows * w.padded, w.sum, w.rows * sizeof(float));
  __builtin_memcpy(mine + w.rows * (w.padded + 1), w.best, w.rows * sizeof(float));
  if (__atomic_sub_fetch(&a.pending[unit], 1, __ATOMIC_ACQ_REL) != 0) return;
  begin_total(w);
  for (int64_t i = 0; i < a.splits; ++i) {
    const float* other = partial + i * size;
    merge_span(w, other, other + w.rows * w.padded, other + w.rows * (w.padded + 1));
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
    const int64_t unit = item / a.splits;
    const int32_t span = static_cast<int32_t>(item % a.splits);
    const jacobi::cpu::AttentionUnit& u = a.units[unit];
    if (u.first && span == 0 && !a.leave_holes) attending::write_holes(a, w, u);
    if (u.queries == 0) continue;
    const bool wide = a.kv_type == jacobi::cpu::DType::f32;
    if (a.splits > 1)
      wide ? attending::run_split<float>(a, w, unit, span) : attending::run_split<uint16_t>(a, w, unit, span);
    else
      wide ? attending::run_unit<float>(a, w, u) : attending::run_unit<uint16_t>(a, w, u);
  }
}

}  // namespace JACOBI_ISA
