// The CPU kernels as a table of function pointers, one table per instruction set. No torch here: plain pointers and
// sizes.
//
// Every function works on a range of independent items, so that the caller decides on threads (parallel.h). The bits of
// an item never depend on the range, the number of rows, the tile or the instruction set.
#pragma once
#include <stdint.h>

#include "common/layout.h"
#include "common/packed.h"

namespace jacobi::cpu {

enum class DType : int32_t { f32 = 0, bf16 = 1 };

inline int64_t size_of(DType t) { return t == DType::f32 ? 4 : 2; }

// y = x W^T + bias, or y += x W^T + bias. W is packed (packed.h).
struct LinearArgs {
  const float* x;  // [rows, k], row stride x_stride
  int64_t x_stride;
  int64_t rows, k, n;
  const void* w;
  WeightType w_type;
  const void* bias;  // [n] of bias_type, or null
  DType bias_type;
  void* y;  // [rows, n] of y_type, row stride y_stride
  DType y_type;
  int64_t y_stride;
  bool accumulate;
};

enum class Activation : int32_t { silu, gelu, gelu_tanh, quick_gelu, relu, relu2, sigmoid, tanh };

// How to turn one row of logits into a token.
struct Sampler {
  float temperature = 0.0f;  // 0: greedy
  int32_t top_k = 0;         // 0: off
  float top_p = 1.0f;        // 1: off
  uint64_t seed = 0;
  int32_t position = 0;  // of the predicted token
  bool filtered() const { return temperature > 0.0f && (top_k > 0 || top_p < 1.0f); }
};

struct HeadArgs {
  const float* x;  // [rows, k] contiguous
  int64_t rows, k, vocab;
  const void* w;  // packed
  WeightType w_type;
  const void* bias;  // [vocab] or null
  DType bias_type;
  float scale, softcap;     // logit = softcap(scale * (x.w + bias)); softcap 0: off
  const Sampler* samplers;  // [rows]
};

// Best token of each row over a range of panels: 16 lanes that are merged at the end by (value, lowest id).
struct HeadBest {
  float value[16];
  int32_t id[16];
};

// Attention runs in units: some consecutive live queries of one sequence, for one key/value head (attention_run.h
// plans).
struct AttentionUnit {
  int32_t sequence, kv_head;
  int32_t segment, index;  // first query: token `index` of segment `segment`
  int32_t queries;
  int32_t first_span;  // spans below lie outside every window
  bool writes_holes;   // of its sequence, for its heads
};
constexpr int kAttentionUnitRows = 96;  // (query, head) rows of a unit at most, unless one query's group has more
constexpr int kAttentionSpan = 256;     // slots that reduce by themselves before they are merged

// Attention of one packed batch by block layout. The kernel file (attention.h) tells the tiling and the reduction
// order.
struct AttentionArgs {
  const void* q;  // [rows, heads, head_dim], row stride q_stride, heads dense
  DType q_type;
  int64_t q_stride;
  void* out;  // [rows, heads, head_dim], row stride out_stride
  DType out_type;
  int64_t out_stride;
  float* lse;  // [heads, rows] or null
  // Keys and values: row r of sequence b lies at base + b * batch_stride + r * row_stride elements, or, with a page
  // table, at base + page_table[b][r / page_size] * page_stride + (r % page_size) * row_stride; head h at + h *
  // head_stride. Without cache_seqlens there is no cache: row r of sequence b lies at base + (cu_seqlens_q[b] + r) *
  // row_stride.
  const void* k;
  const void* v;
  DType kv_type;
  int64_t kv_batch_stride, kv_row_stride, kv_head_stride;
  const int32_t* page_table;  // [batch, max_pages] or null
  int64_t max_pages, page_size, kv_page_stride;
  const int32_t* cache_seqlens;  // [batch] committed rows, or null (all 0)
  const int32_t* cu_seqlens_q;   // [batch + 1]
  const Segment* segments;
  const int32_t* cu_segments;  // [batch + 1]
  int64_t batch, heads, kv_heads, head_dim, rows;
  float scale, softcap;
  int64_t window;    // earlier keys seen, -1: all
  bool leave_holes;  // true: rows that no segment covers are not written
  // Filled by plan_run: unit_count units; each is `splits` items, one per span, or a single one when splits is 1.
  const AttentionUnit* units;
  int64_t unit_count, splits;
  float* partial;  // [unit_count, splits, partial_stride] results of the spans when splits > 1
  int64_t partial_stride;
  int32_t* pending;  // [unit_count] spans still to come
};

// The gradients of multi_block_attention; attention_backward.h tells the formula.
struct AttentionBackwardArgs {
  AttentionArgs forward;       // out and lse are read; its strides of k and v are not used
  int64_t k_stride, v_stride;  // row strides; heads dense
  const void* grad_out;        // of out_type, row stride grad_out_stride, heads dense
  int64_t grad_out_stride;
  const float* grad_lse;             // [heads, rows] or null
  void *dq, *dk, *dv;                // [rows, heads or kv_heads, head_dim] of q_type, contiguous
  int64_t max_panels, max_segments;  // of a sequence; a segment of n rows has ceil(n / 16) panels
};

// Phases of consistency_loss and its backward (consistency_loss.h) and what their items are.
enum class ConsistencyPhase : int32_t {
  gather,    // planned rows
  pack,      // panels of 16 tokens of a tile
  logits,    // planned rows
  soft,      // rows with a loss
  finish,    // planned rows
  gradient,  // rows with a loss
  weight,    // tokens of a tile
  scatter,   // rows with a loss
};
struct ConsistencyArgs;  // consistency_args.h

struct Kernels {
  const char* name;
  // panels [begin, end) of y = x W^T + bias
  void (*linear)(const LinearArgs&, int64_t begin, int64_t end);
  // y [k] = column `column` of a packed matrix, as floats
  void (*column)(const void* w, WeightType, int64_t k, int64_t column, float* y);
  // panels [begin, end) of the logits, folded into best[rows] (which the caller initialises with head_init)
  void (*head)(const HeadArgs&, HeadBest* best, int64_t begin, int64_t end);
  // the tokens of best[parts][rows], whose parts are disjoint ranges of panels
  void (*head_finish)(const HeadBest* best, int64_t parts, int64_t rows, int32_t* tokens);
  // one token from one row of final logits [vocab] under a filtered sampler; logits and scratch [vocab] are overwritten
  int32_t (*filtered_sample)(const Sampler&, float* logits, int32_t* scratch, int64_t vocab);
  // logit = softcap(scale * logit) in place
  void (*logit_transform)(float* logits, int64_t n, float scale, float softcap);
  void (*activation)(Activation, const void* x, void* y, DType, int64_t n);
  // y[i] = silu(gate[i]) * up[i]
  void (*silu_mul)(const float* gate, const float* up, float* y, int64_t n);
  void (*add)(const float* x, float* y, int64_t n);  // y += x
  // y = x / sqrt(mean(x^2) + eps) * weight, one row of n; x and y may be the same
  void (*rms_norm)(const float* x, const void* weight, DType weight_type, float eps, float* y, int64_t n);
  void (*widen)(const void* x, DType, float* y, int64_t n);   // to float
  void (*narrow)(const float* x, void* y, DType, int64_t n);  // from float, one rounding
  // bytes of scratch per thread, and items [begin, end) of attention; called by attention_run.h
  int64_t (*attention_scratch)(const AttentionArgs&);
  void (*attention)(const AttentionArgs&, void* scratch, int64_t begin, int64_t end);
  // bytes of scratch per thread, and units [begin, end) of batch * kv_heads
  int64_t (*attention_backward_scratch)(const AttentionBackwardArgs&);
  void (*attention_backward)(const AttentionBackwardArgs&, void* scratch, int64_t begin, int64_t end);
  // items [begin, end) of one phase, of the vocabulary tile that begins at `column`; called by consistency_run.h
  void (*consistency)(const ConsistencyArgs&, ConsistencyPhase, int64_t column, int64_t begin, int64_t end);
};

inline void head_init(HeadBest* best, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r)
    for (int lane = 0; lane < 16; ++lane) best[r].value[lane] = -__builtin_inff(), best[r].id[lane] = INT32_MAX;
}

// The table chosen at load: the best that the CPU has, or the one that JACOBI_CPU_ISA names.
const Kernels& kernels();
// Chooses another table by name; false when it is unknown, not built in, or not supported by this CPU.
bool select_kernels(const char* name);
// Comma-separated names that select_kernels accepts here.
const char* available_kernels();

}  // namespace jacobi::cpu
