// Attention of one layer over the cache, spans of 256 slots apart, and their ordered merge.
//
//   s_j = q . k_j (q is scaled);   out = sum_j exp(s_j - max) v_j / sum_j exp(s_j - max)
//
// As csrc/cpu/attention.h has it: a key's slot is its logical position on the query's path. Tiles of 64 slots wholly
// below L are shared by all rows; those that reach past L are gathered per piece, the rows of one segment. A unit of
// work is 64 rows (query, head of the group) of one sequence and key/value head over one span. The unit whose span
// arrives last merges all of them; up to 16 spans are in flight between two grid barriers (a wave), so memory is
// bounded.
//
// Tile: scores[slot][row] = K Q^T by warps (16 slots x 32 rows each) into shared memory; softmax there, four threads a
// row; out[d][row] = out * alpha + V^T P^T by warps, 16 d x 32 rows each, accumulators in registers across the span.
// Keys and values come by cp.async, in bfloat16 one tile ahead.
//
// Reduction order of a row: q . k over d in steps of the tile product; max of the tile; sum lane-wise (lane = slot mod
// 16) and folded at the end of the span; out over slots ascending; spans ascending, total = fma(out, b, total * a).
// What a row does not see weighs exactly 0. Weights are rounded to the operand type for the product, not for the sum.
// Bytes: keys and values once per 64 rows. Operations: 4 head_dim per row and slot of its tiles.
#pragma once

#include "cuda/math.h"
#include "cuda/rows.h"

namespace jacobi::cuda {

// Shared memory of a unit.
template <class T>
struct AttentionShared {
  static constexpr int kBuffers = kIsFloat<T> ? 1 : 2;
  static constexpr int kWeightPitch = pitch_of<T>(kTile), kScorePitch = kTile + 1;
  int pitch;
  T *q, *kv, *weights;                 // [rows][pitch], [buffers][2][slots][pitch], [rows][kWeightPitch]
  float *scores, *sum, *best, *alpha;  // [rows][kScorePitch], [rows][16], [rows], [rows]
  int32_t *position, *first, *last;    // [rows]
  int64_t* place;                      // [buffers][slots] of the cache, -1: not on the path

  JACOBI_GRID AttentionShared(char* base, int dim_pitch) : pitch(pitch_of<T>(dim_pitch)) {
    place = reinterpret_cast<int64_t*>(base);
    q = reinterpret_cast<T*>(place + kBuffers * kTile);
    kv = q + kTileRows * pitch;
    weights = kv + kBuffers * 2 * kTile * pitch;
    scores = reinterpret_cast<float*>(weights + kTileRows * kWeightPitch);
    sum = scores + kTileRows * kScorePitch;
    best = sum + kTileRows * 16;
    alpha = best + kTileRows;
    position = reinterpret_cast<int32_t*>(alpha + kTileRows);
    first = position + kTileRows;
    last = first + kTileRows;
  }
  static constexpr int bytes(int dim_pitch) {
    const int row = dim_pitch + kChunk<T>;
    return kBuffers * kTile * 8 +
           static_cast<int>(sizeof(T)) * (row * (kTileRows + kBuffers * 2 * kTile) + kTileRows * (kTile + kChunk<T>)) +
           4 * kTileRows * (kScorePitch + 16 + 5);
  }
  JACOBI_GRID T* keys(int buffer) const { return kv + buffer * 2 * kTile * pitch; }
  JACOBI_GRID T* values(int buffer) const { return keys(buffer) + kTile * pitch; }
};

// 64 rows of one sequence and key/value head.
struct AttentionUnit {
  int32_t sequence, kv_head, first_row, rows;  // first_row: of the sequence's (query, head of the group) rows
  int32_t length, begin;                       // committed tokens, first live row

  JACOBI_GRID AttentionUnit(const Program& p, int32_t id) {
    const Workspace& w = p.work;
    sequence = 0;
    while (w.first_unit[sequence + 1] <= id) ++sequence;
    const int32_t i = id - w.first_unit[sequence];
    kv_head = i % p.kv_heads, first_row = i / p.kv_heads * kTileRows;
    begin = w.live_begin[sequence], length = w.length[sequence];
    const int32_t left = (w.live_begin[sequence + 1] - begin) * p.group - first_row;
    rows = left < kTileRows ? left : kTileRows;
  }
  JACOBI_GRID int32_t query(const Program& p, int32_t r) const { return begin + (first_row + r) / p.group; }
  JACOBI_GRID int32_t head(const Program& p, int32_t r) const { return kv_head * p.group + (first_row + r) % p.group; }
  // Where the row's results lie among those of all rows.
  JACOBI_GRID int32_t place(const Program& p, int32_t r) const { return query(p, r) * p.heads + head(p, r); }
};

// The tiles of a span in order: those that all rows share, then piece by piece the gathered ones.
struct TileCursor {
  int32_t tile, stop, row, row_end, segment;  // rows [row, row_end); segment -1: shared
  int32_t shared, end;

  JACOBI_GRID TileCursor(const Program& p, const AttentionUnit& u, int32_t span, int64_t window,
                         const int32_t* position)
      : row(0), row_end(u.rows), segment(-1) {
    const int32_t begin = span * (kSpan / kTile);
    end = begin + kSpan / kTile;
    shared = u.length / kTile;
    shared = shared < begin ? begin : shared > end ? end : shared;
    tile = begin, stop = shared;
    settle(p, u, window, position);
  }
  JACOBI_GRID bool done() const { return row >= row_end; }
  JACOBI_GRID void advance(const Program& p, const AttentionUnit& u, int64_t window, const int32_t* position) {
    ++tile;
    settle(p, u, window, position);
  }

 private:
  // Moves on to the next tile that a row may see, or to the end.
  JACOBI_GRID void settle(const Program& p, const AttentionUnit& u, int64_t window, const int32_t* position) {
    while (true) {
      if (window >= 0 && tile < stop) {
        int32_t lowest = position[row];
        for (int32_t r = row; r < row_end; ++r) lowest = position[r] < lowest ? position[r] : lowest;
        const int64_t seen = lowest - window;  // slots below are not
        if (seen > 0 && seen / kTile > tile) tile = static_cast<int32_t>(seen / kTile);
      }
      if (tile < stop) return;
      row = segment < 0 ? 0 : row_end;
      if (row >= u.rows) {
        row_end = row;
        return;
      }
      segment = p.work.segment[u.query(p, row)];
      const Segment& s = p.work.segments[segment];
      row_end = (s.start + s.length - u.begin) * p.group - u.first_row;
      row_end = row_end < u.rows ? row_end : u.rows;
      stop = position[row_end - 1] / kTile + 1;
      stop = stop < end ? stop : end;
      tile = shared;
    }
  }
};

// Cache row of a slot on the path of a segment; slots at `reach` and behind are on nobody's.
JACOBI_GRID int32_t path_row(const Program& p, const AttentionUnit& u, int32_t segment, int32_t slot) {
  if (slot < u.length) return slot;
  const Segment* s = p.work.segments + segment;
  int32_t from = p.work.position[s->start];
  while (slot < from) {
    from -= s->visible;
    s = p.work.segments + s->parent;
  }
  return u.length + s->start - u.begin + slot - from;
}

// Starts the copies of a tile's keys and values.
template <class T, class Block>
JACOBI_GRID void load_tile(Block& block, const Program& p, const AttentionUnit& u, const AttentionShared<T>& m,
                           const TileCursor& c, int64_t layer_offset, int buffer) {
  int64_t* const place = m.place + buffer * kTile;
  block.threads([&](int thread) {
    if (thread >= kTile) return;
    const int32_t slot = c.tile * kTile + thread;
    const bool on_path = c.segment < 0 || slot <= m.position[c.row_end - 1];
    place[thread] = -1;
    if (!on_path) return;
    const int32_t row = c.segment < 0 ? slot : path_row(p, u, c.segment, slot);
    place[thread] = layer_offset + cache_row(p.args, u.sequence, row) + static_cast<int64_t>(u.kv_head) * p.head_dim;
  });
  const T* const k = static_cast<const T*>(p.args.k_cache);
  const T* const v = static_cast<const T*>(p.args.v_cache);
  T *const keys = m.keys(buffer), *const values = m.values(buffer);
  block.threads_without_barrier([&](int thread) {
    if (p.chunked_cache) {
      const int chunks = p.dim_pitch / kChunk<T>;
      for (int i = thread; i < kTile * chunks; i += kThreads) {
        const int slot = i / chunks, d = i % chunks * kChunk<T>;
        const bool wanted = place[slot] >= 0 && d < p.head_dim;
        const int64_t from = wanted ? place[slot] + d : 0;
        block.copy16(keys + slot * m.pitch + d, k + from, wanted);
        block.copy16(values + slot * m.pitch + d, v + from, wanted);
      }
      return;
    }
    for (int i = thread; i < kTile * p.dim_pitch; i += kThreads) {
      const int slot = i / p.dim_pitch, d = i % p.dim_pitch;
      const bool wanted = place[slot] >= 0 && d < p.head_dim;
      keys[slot * m.pitch + d] = wanted ? k[place[slot] + d] : narrow<T>(0.0f);
      values[slot * m.pitch + d] = wanted ? v[place[slot] + d] : narrow<T>(0.0f);
    }
  });
}

template <class Block>
using AttentionTiles = typename Block::template PerWarp<typename Block::template Tile<1, 4>, 2>;

// Calls f(tile, first of 16 dimensions, first of 32 rows, units of 8 rows) for a warp's accumulators that hold rows.
template <class Tile, class F>
JACOBI_GRID void for_each_job(const Program& p, int32_t rows, int warp, Tile* tiles, const F& f) {
  const int dims = p.dim_pitch / 16;
  JACOBI_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int job = warp + kWarps * i, row = job / dims * 32;
    if (job >= 2 * dims || row >= rows) continue;
    f(tiles[i], job % dims * 16, row, rows - row >= 32 ? 4 : (rows - row + 7) / 8);
  }
}

// One tile, which has arrived, into the rows of the cursor.
template <class T, class Block>
JACOBI_GRID void attend_tile(Block& block, const Program& p, const AttentionUnit& u, const AttentionShared<T>& m,
                             const TileCursor& c, int64_t window, int buffer, AttentionTiles<Block>& out) {
  constexpr int kScorePitch = AttentionShared<T>::kScorePitch, kWeightPitch = AttentionShared<T>::kWeightPitch;
  const auto touched = [&c](int row) { return row < c.row_end && row + 32 > c.row; };
  block.warps([&](int warp) {
    const int slot = warp % 4 * 16, row = warp / 4 * 32;
    if (!touched(row) || row >= u.rows) return;
    typename Block::template Tile<1, 4> tile;
    tile.clear();
    for (int d = 0; d < p.dim_pitch; d += 16) {
      const Rows<T> a[1] = {{m.keys(buffer) + slot * m.pitch + d, m.pitch}};
      tile.template multiply<16>(a, Rows<T>{m.q + row * m.pitch + d, m.pitch}, 4);
    }
    tile.each([&](int, int s, int r, float value) { m.scores[(row + r) * kScorePitch + slot + s] = value; });
  });
  block.barrier();
  block.threads([&](int r) {
    if (r >= kTileRows) return;
    const int64_t base = static_cast<int64_t>(c.tile) * kTile, at = r < u.rows ? m.position[r] : 0;
    int64_t lo = window < 0 || at - window < base ? 0 : at - window - base, hi = at + 1 - base;
    hi = hi < kTile ? hi : kTile;
    m.alpha[r] = 1.0f;
    m.first[r] = m.last[r] = 0;
    if (r < c.row || r >= c.row_end || lo >= hi) return;
    float best = -kInfinity;
    for (int64_t j = lo; j < hi; ++j) best = larger(best, m.scores[r * kScorePitch + j]);
    const float now = larger(m.best[r], best);
    m.alpha[r] = exp_of(m.best[r] - now);
    m.best[r] = now;
    m.first[r] = static_cast<int32_t>(lo), m.last[r] = static_cast<int32_t>(hi);
  });
  block.threads([&](int thread) {
    const int r = thread / 4, lo = m.first[r], hi = m.last[r];
    for (int lane = thread % 4 * 4; lane < thread % 4 * 4 + 4; ++lane) {
      float sum = 0.0f;
      if (lo < hi) sum = m.sum[r * 16 + lane] * m.alpha[r];
      for (int j = lane; j < kTile; j += 16) {
        const float weight = j >= lo && j < hi ? exp_of(m.scores[r * kScorePitch + j] - m.best[r]) : 0.0f;
        sum += weight;
        m.weights[r * kWeightPitch + j] = narrow<T>(weight);
      }
      if (lo < hi) m.sum[r * 16 + lane] = sum;
    }
  });
  block.warps([&](int warp) {
    for_each_job(p, u.rows, warp, out[warp], [&](auto& tile, int d, int row, int units) {
      if (!touched(row)) return;
      tile.scale(m.alpha + row);
      const Columns<T> a[1] = {{m.values(buffer) + d, m.pitch}};
      tile.template multiply<kTile>(a, Rows<T>{m.weights + row * kWeightPitch, kWeightPitch}, units);
    });
  });
}

// Merges the spans of a wave into the total, and writes the operand rows when there are no more.
template <class T, class Block>
JACOBI_GRID void merge_spans(Block& block, const Program& p, const AttentionUnit& u, const AttentionShared<T>& m,
                             int32_t wave, int32_t spans) {
  const Workspace& w = p.work;
  float *const old_weight = m.scores, *const new_weight = m.scores + kMostWave * kTileRows;  // [spans][rows]
  const bool last = wave == (w.spans[u.sequence] - 1) / p.wave;
  block.threads([&](int r) {
    if (r >= u.rows) return;
    const int32_t at = u.place(p, r);
    float best = wave > 0 ? w.total_best[at] : -kInfinity, sum = wave > 0 ? w.total_sum[at] : 0.0f;
    for (int32_t s = 0; s < spans; ++s) {
      const int64_t from = static_cast<int64_t>(s) * p.span_rows + at;
      const float span = w.span_best[from], now = larger(best, span);
      old_weight[s * kTileRows + r] = exp_of(best - now);
      new_weight[s * kTileRows + r] = -1.0f;  // sees nothing of the span
      if (span == -kInfinity) continue;
      new_weight[s * kTileRows + r] = exp_of(span - now);
      sum = sum * old_weight[s * kTileRows + r] + w.span_sum[from] * new_weight[s * kTileRows + r];
      best = now;
    }
    w.total_best[at] = best;
    w.total_sum[at] = sum;
    m.sum[r] = sum;
  });
  block.threads([&](int thread) {
    for (int32_t i = thread; i < u.rows * p.head_dim; i += kThreads) {
      const int32_t r = i / p.head_dim, d = i % p.head_dim, at = u.place(p, r);
      float* const total_at = w.total + static_cast<int64_t>(at) * p.dim_pitch + d;
      float total = wave > 0 ? *total_at : 0.0f;
      for (int32_t s = 0; s < spans; ++s) {
        const float weight = new_weight[s * kTileRows + r];
        if (weight < 0.0f) continue;
        const float span = w.span_out[(static_cast<int64_t>(s) * p.span_rows + at) * p.dim_pitch + d];
        total = fmaf(span, weight, total * old_weight[s * kTileRows + r]);
      }
      if (!last) {
        *total_at = total;
        continue;
      }
      T* const to = static_cast<T*>(w.operand) + static_cast<int64_t>(u.query(p, r)) * p.q_pitch;
      to[u.head(p, r) * p.head_dim + d] = narrow<T>(total / m.sum[r]);
      if (u.head(p, r) == 0)
        for (int32_t c = p.q_size + d; c < p.q_pitch; c += p.head_dim) to[c] = narrow<T>(0.0f);
    }
  });
}

template <class T, class Block>
JACOBI_PHASE void attention(Block& block, const Program& p, int32_t layer, int32_t wave) {
  const Workspace& w = p.work;
  const AttentionShared<T> m(block.shared, p.dim_pitch);
  const int64_t window = p.layer[layer].window, layer_offset = layer * p.args.layer_stride;
  const int32_t left = w.header[kSpans] - wave * p.wave, spans = left < p.wave ? left : p.wave;
  const int32_t items = w.header[kUnits] * spans;
  for (int32_t item = block.index; item < items; item += block.count) {
    const AttentionUnit u(p, item / spans);
    const int32_t mine = w.spans[u.sequence] - wave * p.wave, parts = mine < p.wave ? mine : p.wave;
    const int32_t part = item % spans, span = wave * p.wave + part;
    if (part >= parts) continue;
    block.threads([&](int thread) {
      for (int i = thread; i < kTileRows * p.dim_pitch; i += kThreads) {
        const int r = i / p.dim_pitch, d = i % p.dim_pitch;
        const bool there = r < u.rows && d < p.head_dim;
        m.q[r * m.pitch + d] =
            there ? static_cast<const T*>(w.q)[static_cast<int64_t>(u.place(p, r)) * p.dim_pitch + d] : narrow<T>(0.0f);
      }
      for (int i = thread; i < kTileRows * 16; i += kThreads) m.sum[i] = 0.0f;
      if (thread >= kTileRows) return;
      m.best[thread] = -kInfinity;
      m.position[thread] = thread < u.rows ? w.position[u.query(p, thread)] : -1;
    });
    AttentionTiles<Block> out;
    block.warps([&](int warp) {
      out[warp][0].clear();
      out[warp][1].clear();
    });

    constexpr int kBuffers = AttentionShared<T>::kBuffers;
    TileCursor now(p, u, span, window, m.position), ahead = now;
    int buffer = 0;
    for (int i = 0; i < kBuffers - 1; ++i) {
      if (!ahead.done()) load_tile<T>(block, p, u, m, ahead, layer_offset, i);
      block.commit();
      if (!ahead.done()) ahead.advance(p, u, window, m.position);
    }
    for (; !now.done(); now.advance(p, u, window, m.position), buffer = (buffer + 1) % kBuffers) {
      block.barrier();  // the buffer that is filled next has been read
      if (!ahead.done()) load_tile<T>(block, p, u, m, ahead, layer_offset, (buffer + kBuffers - 1) % kBuffers);
      block.commit();
      if (!ahead.done()) ahead.advance(p, u, window, m.position);
      block.template wait<kBuffers - 1>();
      attend_tile<T>(block, p, u, m, now, window, buffer, out);
    }

    block.warps([&](int warp) {
      for_each_job(p, u.rows, warp, out[warp], [&](auto& tile, int d, int row, int) {
        tile.each([&](int, int i, int n, float value) {
          if (row + n >= u.rows) return;
          const int64_t at = static_cast<int64_t>(part) * p.span_rows + u.place(p, row + n);
          w.span_out[at * p.dim_pitch + d + i] = value;
        });
      });
    });
    block.threads([&](int r) {
      if (r >= u.rows) return;
      const int64_t at = static_cast<int64_t>(part) * p.span_rows + u.place(p, r);
      w.span_sum[at] = reduce_lanes(m.sum + r * 16);
      w.span_best[at] = m.best[r];
    });
    if (block.last_to_arrive(w.pending + item / spans, static_cast<uint32_t>(parts)))
      merge_spans<T>(block, p, u, m, wave, parts);
    block.barrier();
  }
}

}  // namespace jacobi::cuda
