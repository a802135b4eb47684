// Products of the step: rows of operand times packed panels of 16 columns, weights streamed once.
//
//   y[split][r][c] = sum over the k of the split of x[r][k] w[panel][k][c]
//
// Work: an item is one panel (or a pair of them, gate and up) over one split of k. Each block takes an even run of
// items and works through it in units of up to 8 panels, 64 rows at a time. A unit walks its k in stages of 128 bytes:
// panels and rows go through a ring of shared memory buffers that cp.async fills kStages - 1 ahead, across units too.
// Warp w multiplies panels 2 (w % 4), 2 (w % 4) + 1 with rows 32 (w / 4) .. + 32.
//
// Reduction order: k ascending inside a split, in mma.sync steps of 16 (bfloat16) or one fma each (float32, which is
// never split, so it has the CPU's bits). Splits are summed in ascending order by whoever reads y. Splits depend on the
// weight's shape alone; rows, blocks and where units are cut decide nothing but who computes an element.
//
// Bytes: the weights once per 64 rows (from L2 after the first), the operand rows once per unit: with 6 panels per
// block as many as the weights. Operations: 2 rows n k. Shared: 4 stages of 16 KB weights and 9 KB rows.
#pragma once

#include "cuda/operand.h"
#include "cuda/program.h"

namespace jacobi::cuda {

constexpr int kStages = 4;

template <class T>
constexpr int kPanelStage = kUnitPanels * kStep<T> * 16;  // elements of one stage
template <class T>
constexpr int kRowStage = kPassRows * pitch_of<T>(kStep<T>);
template <class T>
constexpr int kProductShared = kStages * (kPanelStage<T> + kRowStage<T>)*static_cast<int>(sizeof(T));

// How often k is split so that some 132 blocks find about 4 panels each, at least 256 of k long. float32: never.
inline int32_t splits_of(int32_t columns, int32_t k, bool wide) {
  if (wide) return 1;
  const int32_t panels = (columns + 15) / 16, most = k / 256;
  const int32_t splits = (512 + panels / 2) / panels;
  return splits < 1 || most < 1 ? 1 : splits < most ? splits : most;
}

struct ProductShape {
  const void* x;  // [rows, x_pitch]
  int32_t x_pitch, rows;
  const void* w;  // [panels, k, 16]
  int32_t k, columns, splits;
  int32_t pair;  // panels between the two of a pair, or 0: single panels
};

// Position of a block in its work: stage by stage, then 64 rows further, then the next unit.
struct ProductCursor {
  int32_t item, end, items, steps, splits, rows, most;  // items: per split; most: of a unit
  int32_t split, first, count;                          // the unit: items [first, first + count) of a split
  int32_t row, step, last_step;

  JACOBI_GRID ProductCursor(const ProductShape& p, int32_t k_step, int32_t block, int32_t blocks) {
    const int32_t panels = (p.columns + 15) / 16;
    items = p.pair > 0 ? p.pair : panels;
    most = p.pair > 0 ? kUnitPanels / 2 : kUnitPanels;
    steps = (p.k + k_step - 1) / k_step;
    splits = p.splits;
    rows = p.rows;
    const int64_t total = static_cast<int64_t>(items) * splits;
    item = static_cast<int32_t>(total * block / blocks);
    end = rows > 0 ? static_cast<int32_t>(total * (block + 1) / blocks) : item;
    begin_unit();
  }
  JACOBI_GRID bool done() const { return item >= end; }
  JACOBI_GRID bool unit_starts() const { return step == split_begin(split); }
  JACOBI_GRID bool unit_ends() const { return step + 1 == last_step; }
  JACOBI_GRID void advance() {
    if (++step < last_step) return;
    step = split_begin(split);
    if ((row += kPassRows) < rows) return;
    item += count;
    begin_unit();
  }

 private:
  JACOBI_GRID int32_t split_begin(int32_t s) const {
    return static_cast<int32_t>(static_cast<int64_t>(steps) * s / splits);
  }
  JACOBI_GRID void begin_unit() {
    if (done()) return;
    split = item / items, first = item % items, row = 0;
    const int32_t left = end - item < items - first ? end - item : items - first;
    const int32_t units = (left + most - 1) / most;  // of equal size, so that none is a crumb
    count = (left + units - 1) / units;
    step = split_begin(split), last_step = split_begin(split + 1);
  }
};

// Calls sink(tile, split, column, row): a warp's two panels, of which panel i begins at column(i) (negative: not
// there), and the tile's n = 0 is row `row`. Rows at and behind p.rows are to be ignored.
template <class T, class Block, class Sink>
JACOBI_GRID void product(Block& block, const ProductShape& p, const Sink& sink) {
  constexpr int kK = kStep<T>, kPitch = pitch_of<T>(kK);
  T* const panel_ring = reinterpret_cast<T*>(block.shared);
  T* const row_ring = panel_ring + kStages * kPanelStage<T>;
  const T* const x = static_cast<const T*>(p.x);
  const T* const w = static_cast<const T*>(p.w);

  // The j-th panel of a unit: pairs lie side by side.
  const auto panel_of = [&p](const ProductCursor& c, int j) {
    if (p.pair == 0) return j < c.count ? c.first + j : -1;
    return j / 2 < c.count ? c.first + j / 2 + (j % 2) * p.pair : -1;
  };
  const auto load = [&](const ProductCursor& c, int stage) {
    block.threads_without_barrier([&](int thread) {
      constexpr int kPanelChunks = kK * 16 / kChunk<T>, kRowChunks = kK / kChunk<T>;
      const int32_t k0 = c.step * kK;
      JACOBI_UNROLL
      for (int i = thread; i < kUnitPanels * kPanelChunks; i += kThreads) {
        const int j = i / kPanelChunks, at = i % kPanelChunks * kChunk<T>, k = at / 16, column = at % 16;
        const int32_t panel = panel_of(c, j);
        const bool wanted = panel >= 0 && k0 + k < p.k;
        const int64_t from = wanted ? (static_cast<int64_t>(panel) * p.k + k0 + k) * 16 + column : 0;
        block.copy16(panel_ring + stage * kPanelStage<T> + j * kK * 16 + Panel<T>::place(k, column), w + from, wanted);
      }
      JACOBI_UNROLL
      for (int i = thread; i < kPassRows * kRowChunks; i += kThreads) {
        const int r = i / kRowChunks, at = i % kRowChunks * kChunk<T>;
        const bool wanted = c.row + r < p.rows;
        const int64_t from = wanted ? static_cast<int64_t>(c.row + r) * p.x_pitch + k0 + at : 0;
        block.copy16(row_ring + stage * kRowStage<T> + r * kPitch + at, x + from, wanted);
      }
    });
  };

  typename Block::template PerWarp<typename Block::template Tile<2, 4>> tiles;
  ProductCursor ahead(p, kK, block.index, block.count), now = ahead;
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (!ahead.done()) load(ahead, stage), ahead.advance();
    block.commit();
  }
  for (int stage = 0; !now.done(); stage = (stage + 1) % kStages, now.advance()) {
    block.template wait<kStages - 2>();
    if (!ahead.done()) load(ahead, (stage + kStages - 1) % kStages), ahead.advance();
    block.commit();
    block.warps([&](int warp) {
      auto& tile = *tiles[warp];
      const int j = 2 * (warp % 4), row = 32 * (warp / 4);
      if (now.unit_starts()) tile.clear();
      const int32_t left = p.rows - now.row - row;
      const int units = left <= 0 || panel_of(now, j) < 0 ? 0 : left >= 32 ? 4 : (left + 7) / 8;
      if (units == 0) return;
      const T* const panels = panel_ring + stage * kPanelStage<T> + j * kK * 16;
      const Panel<T> a[2] = {{panels}, {panels + kK * 16}};
      tile.template multiply<kK>(a, Rows<T>{row_ring + stage * kRowStage<T> + row * kPitch, kPitch}, units);
      if (!now.unit_ends()) return;
      const int32_t right = panel_of(now, j + 1);
      sink(tile, now.split, panel_of(now, j) * 16, right < 0 ? -1 : right * 16, now.row + row);
    });
  }
  block.template wait<0>();
}

// The sink of products that others sum: y[split][row][column], float32.
struct StorePartial {
  float* y;
  int32_t rows, capacity, columns;  // capacity: rows between two splits

  template <class Tile>
  JACOBI_GRID void operator()(const Tile& tile, int32_t split, int32_t left, int32_t right, int32_t row) const {
    float* const base = y + (static_cast<int64_t>(split) * capacity + row) * columns;
    tile.each([&](int i, int m, int n, float value) {
      const int32_t column = (i == 0 ? left : right) + m;
      if ((i == 0 || right >= 0) && column < columns && row + n < rows)
        base[static_cast<int64_t>(n) * columns + column] = value;
    });
  }
};

}  // namespace jacobi::cuda
