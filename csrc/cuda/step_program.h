// multi_block_step as one program of a grid: phases with a barrier of the grid behind each.
//
//   plan | embedding | per layer: norm | qkv | heads, append | attention (spans, merge) | attention out | residual,
//   norm | gate, up, silu | down | then norm | head, best token | accept | commit, redraft
//
// Eight barriers per layer (one more per 4096 committed tokens behind the first, for up to 256 rows) and six per step.
// The residual of a product is added by the norm that follows; spans are merged by the block that finishes the last
// one; silu(gate) * up leaves the product's registers. Products, attention and row phases tell their tilings and
// reduction orders themselves.
#pragma once

#include "cuda/attention.h"
#include "cuda/finish.h"
#include "cuda/head.h"
#include "cuda/plan.h"
#include "cuda/product.h"
#include "cuda/rows.h"

namespace jacobi::cuda {

// y = partial sums of operand W^T
template <class T, class Block>
JACOBI_PHASE void partial_product(Block& block, const Program& p, const void* x, int32_t x_pitch, const void* weight,
                                  int32_t k, int32_t columns, int32_t splits) {
  const int32_t rows = p.work.header[kLiveRows];
  const ProductShape shape{x, x_pitch, rows, weight, k, columns, splits, 0};
  product<T>(block, shape, StorePartial{p.work.partial, rows, p.args.rows, columns});
}

// product = silu(gate) * up; gate's and up's panels side by side in one warp.
template <class T, class Block>
JACOBI_PHASE void gate_up(Block& block, const Program& p, const StepLayer& layer) {
  const int32_t rows = p.work.header[kLiveRows];
  const ProductShape shape{p.work.operand, p.hidden_pitch, rows, layer.gate_up.data,
                           p.hidden,       2 * p.ffn,      1,    p.ffn / 16};
  const float* bias = layer.gate_up_bias;
  product<T>(block, shape, [&](const auto& tile, int32_t, int32_t left, int32_t, int32_t row) {
    T* const to = static_cast<T*>(p.work.product) + static_cast<int64_t>(row) * p.ffn_pitch + left;
    tile.each_pair([&](int m, int n, float gate, float up) {
      if (row + n >= rows) return;
      if (bias != nullptr) gate += bias[left + m], up += bias[p.ffn + left + m];
      to[static_cast<int64_t>(n) * p.ffn_pitch + m] = narrow<T>(silu(gate) * up);
    });
  });
}

template <class T, class Grid>
JACOBI_GRID void run_step(Grid& grid, const Program& p) {
  const Workspace& w = p.work;
  grid.phase([&](auto& block) { plan(block, p); });
  grid.phase([&](auto& block) { begin_rows<T>(block, p); });
  for (int32_t i = 0; i < p.layers; ++i) {
    const StepLayer& layer = p.layer[i];
    grid.phase([&](auto& block) {
      const float* bias = i > 0 ? p.layer[i - 1].down_bias : nullptr;
      const SplitSum before = split_sum(p, p.down_splits, p.hidden, bias);
      norm_rows<T>(block, p, i > 0 ? &before : nullptr, layer.attention_norm, nullptr, w.header[kLiveRows]);
    });
    grid.phase([&](auto& block) {
      partial_product<T>(block, p, w.operand, p.hidden_pitch, layer.qkv.data, p.hidden, p.qkv_size, p.qkv_splits);
    });
    grid.phase([&](auto& block) { prepare_heads<T>(block, p, i); });
    for (int32_t wave = 0; wave * p.wave < w.header[kSpans]; ++wave)
      grid.phase([&](auto& block) { attention<T>(block, p, i, wave); });
    grid.phase([&](auto& block) {
      partial_product<T>(block, p, w.operand, p.q_pitch, layer.attention_out.data, p.q_size, p.hidden, p.out_splits);
    });
    grid.phase([&](auto& block) {
      const SplitSum before = split_sum(p, p.out_splits, p.hidden, layer.attention_out_bias);
      norm_rows<T>(block, p, &before, layer.ffn_norm, nullptr, w.header[kLiveRows]);
    });
    grid.phase([&](auto& block) { gate_up<T>(block, p, layer); });
    grid.phase([&](auto& block) {
      partial_product<T>(block, p, w.product, p.ffn_pitch, layer.down.data, p.ffn, p.hidden, p.down_splits);
    });
  }
  grid.phase([&](auto& block) {
    const SplitSum before = split_sum(p, p.down_splits, p.hidden, p.layer[p.layers - 1].down_bias);
    norm_rows<T>(block, p, &before, p.final_norm, w.wanted, w.header[kWantedRows]);
  });
  grid.phase([&](auto& block) { head<T>(block, p); });
  grid.phase([&](auto& block) { accept_all(block, p); });
  grid.phase([&](auto& block) { finish_all<T>(block, p); });
}

template <class T>
int shared_bytes(const Program& p) {
  const int head = kProductShared<T> + 8 * p.args.rows, attention = AttentionShared<T>::bytes(p.dim_pitch);
  const int norm = 4 * (kThreads + 16 + p.hidden), heads = 4 * kThreads / 32 * (128 + 16);
  int most = head > attention ? head : attention;
  most = most > norm ? most : norm;
  return most > heads ? most : heads;
}

}  // namespace jacobi::cuda
