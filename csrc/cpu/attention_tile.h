// One tile of attention: 64 slots of keys and values against some rows (query, head of the group). See attention.h.
//
// Keys are transposed to [head_dim][64]. Scores: kRows rows x 16 * kVecs keys in registers, lanes are keys. Softmax: 16
// rows at a time. Values: kRows rows x 16 * kVecs dimensions in registers, lanes are dimensions. Which block a row
// lands in does not change its order of operations. Operations: 4 * head_dim per row and key. Bytes: 2 * head_dim *
// size per key, once for all rows; transposing costs about as much as the scores of 4 rows.
#pragma once

#include "cpu/kernels.h"

namespace JACOBI_ISA {
namespace attending {

using jacobi::Segment;
using jacobi::cpu::AttentionArgs;
using jacobi::cpu::AttentionUnit;
using jacobi::cpu::DType;

constexpr int kTile = 64;
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

// Rows of one head are short runs of memory far apart, which the hardware does not prefetch.
template <class T>
inline void prefetch(const T* const* row, int count, int64_t dim) {
  for (int j = 0; j < count; ++j)
    for (int64_t d = 0; d < dim; d += 64 / sizeof(T)) __builtin_prefetch(row[j] + d, 0, 2);  // to the second level
}

// Brings slots [lo, hi) of the tile in; key[0] and value[0] belong to slot lo.
template <class T>
inline void load_tile(Work& w, const T* const* key, const T* const* value, int lo, int hi) {
  prefetch(key, hi - lo, w.dim);
  for (int j = lo / 16 * 16; j < hi; j += 16) {
    const int from = j < lo ? lo : j, to = j + 16 < hi ? j + 16 : hi;
    prefetch(value + from - lo, to - from, w.dim);
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

}  // namespace attending
}  // namespace JACOBI_ISA
