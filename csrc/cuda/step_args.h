// From the caller's arguments to a Program, on the host: what is supported, the workspace, the shapes of products.
#pragma once

#include <initializer_list>

#include "cuda/product.h"
#include "cuda/program.h"

namespace jacobi::cuda {

constexpr int32_t kMostRows = 4096;
constexpr int32_t kMostHidden = 16384;

// Hands out the workspace in pieces of 256 bytes; from null it only counts.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  void take(T*& to, int64_t count) {
    to = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

inline int64_t attention_units(const Program& p) {
  const int64_t rows = static_cast<int64_t>(p.args.rows) * p.group;
  return (rows / kTileRows + p.args.batch) * p.kv_heads;
}

// Bytes at the start of the workspace that must be 0 before a step.
inline int64_t counter_bytes(const Program& p) { return 4 * (64 + attention_units(p)); }

// Bytes of the workspace; with p.args.workspace its pieces too.
inline int64_t carve(Program& p, bool wide) {
  const int64_t rows = p.args.rows, batch = p.args.batch, segments = p.args.num_segments, size = wide ? 4 : 2;
  Workspace& w = p.work;
  Carver c(p.args.workspace);
  c.take(w.counter, 64 + attention_units(p));
  w.pending = w.counter == nullptr ? nullptr : w.counter + 64;
  c.take(w.best, rows);
  c.take(w.header, kHeaderWords);
  for (int32_t** to : {&w.live_begin, &w.first_unit}) c.take(*to, batch + 1);
  for (int32_t** to : {&w.length, &w.spans, &w.error, &w.num_accepted, &w.fixed_point}) c.take(*to, batch);
  c.take(w.segments, segments);
  for (int32_t** to : {&w.want_begin, &w.want_from, &w.accepted_of_segment}) c.take(*to, segments);
  for (int32_t** to : {&w.slot, &w.token, &w.position, &w.segment, &w.sequence, &w.live_of_slot, &w.want_of_slot,
                       &w.wanted, &w.predictions, &w.accepted_rows})
    c.take(*to, rows);
  c.take(w.cosine, rows * p.rope_dim / 2);
  c.take(w.sine, rows * p.rope_dim / 2);
  c.take(w.x, rows * p.hidden);
  const auto take_operand = [&](void*& to, int64_t elements) {
    char* bytes = nullptr;
    c.take(bytes, elements * size);
    to = bytes;
  };
  take_operand(w.operand, rows * (p.hidden_pitch > p.q_pitch ? p.hidden_pitch : p.q_pitch));
  take_operand(w.product, rows * p.ffn_pitch);
  take_operand(w.q, rows * p.heads * p.dim_pitch);
  int64_t columns = static_cast<int64_t>(p.qkv_splits) * p.qkv_size;
  for (const int32_t splits : {p.out_splits, p.down_splits})
    if (static_cast<int64_t>(splits) * p.hidden > columns) columns = static_cast<int64_t>(splits) * p.hidden;
  c.take(w.partial, rows * columns);
  c.take(w.span_out, p.wave * p.span_rows * static_cast<int64_t>(p.dim_pitch));
  c.take(w.span_sum, p.wave * static_cast<int64_t>(p.span_rows));
  c.take(w.span_best, p.wave * static_cast<int64_t>(p.span_rows));
  c.take(w.total, p.span_rows * static_cast<int64_t>(p.dim_pitch));
  c.take(w.total_sum, p.span_rows);
  c.take(w.total_best, p.span_rows);
  return c.used();
}

// Null, or why a model cannot run here.
inline const char* unsupported_model(const StepModel& m) {
  if (is_grouped(m.weight_type())) return "int8 and int4 weights run on the CPU: pack float32 or bfloat16 for a GPU";
  if (m.layers() > kMostLayers) return "the cooperative step takes at most 128 layers";
  if (m.head_dim() > 128) return "the cooperative step takes head sizes up to 128";
  if (m.ffn() % 16 != 0) return "the cooperative step takes intermediate sizes that are multiples of 16";
  if (m.hidden() > kMostHidden) return "the cooperative step takes hidden sizes up to 16384";
  const int64_t most = int64_t{1} << 24;
  if (m.ffn() > most || m.q_size() > most || m.kv_size() > most) return "the cooperative step takes no such wide model";
  return nullptr;
}

// Sizes, pointers and workspace of a program. args.weights may be null: then pointers mean nothing. Returns its bytes.
inline int64_t fill_program(const StepArgs& args, const StepModel& m, Program& p) {
  const auto size = [](int64_t n) { return static_cast<int32_t>(n); };
  p.args = args;
  p.layers = size(m.layers()), p.hidden = size(m.hidden()), p.heads = size(m.heads()), p.kv_heads = size(m.kv_heads());
  p.group = p.heads / p.kv_heads, p.head_dim = size(m.head_dim()), p.ffn = size(m.ffn()), p.vocab = size(m.vocab());
  p.rope_dim = size(m.rope_dim());
  p.q_size = size(m.q_size()), p.kv_size = size(m.kv_size()), p.qkv_size = size(m.qkv_size());
  p.dim_pitch = round_up(p.head_dim, 16);
  const int32_t step = m.wide() ? kStep<float> : kStep<bfloat16>;
  p.hidden_pitch = round_up(p.hidden, step), p.q_pitch = round_up(p.q_size, step), p.ffn_pitch = round_up(p.ffn, step);
  p.qkv_splits = splits_of(p.qkv_size, p.hidden, m.wide());
  p.out_splits = splits_of(p.hidden, p.q_size, m.wide());
  p.down_splits = splits_of(p.hidden, p.ffn, m.wide());
  p.span_rows = args.rows * p.heads;
  p.wave = args.rows <= 256 ? kMostWave : args.rows >= 2048 ? 2 : 4096 / args.rows;
  const int64_t chunk = m.wide() ? 4 : 8;
  const auto aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; };
  p.chunked_cache = p.head_dim % chunk == 0 && args.layer_stride % chunk == 0 && args.slab_stride % chunk == 0 &&
                    args.row_stride % chunk == 0 && aligned(args.k_cache) && aligned(args.v_cache);
  p.norm_eps = m.norm_eps(), p.softmax_scale = m.softmax_scale(), p.rope_scale = m.rope_scale();
  p.logit_scale = m.logit_scale(), p.logit_softcap = m.logit_softcap();
  p.inv_freq = m.inv_freq(), p.final_norm = m.final_norm(), p.lm_head_bias = m.lm_head_bias();
  p.embedding = m.embedding().data, p.lm_head = m.lm_head().data;
  for (int32_t i = 0; i < p.layers; ++i) p.layer[i] = m.layer(i);
  return carve(p, m.wide());
}

// Null, or why a step with these arguments cannot run here.
inline const char* read_args(const StepArgs& args, StepModel& model) {
  const char* error = model.read(args.descriptor, args.descriptor_words, args.weights, args.weight_bytes);
  if (error != nullptr) return error;
  if ((error = unsupported_model(model)) != nullptr) return error;
  if (args.top_k != nullptr || args.top_p != nullptr)
    return "the cooperative step samples without top-k and top-p: pass none of them";
  if (args.temperature != nullptr && args.seeds == nullptr) return "seeds must be given with temperature";
  if ((args.cache_type == DType::f32) != model.wide()) return "the cooperative step takes caches of the weights' type";
  if (args.rows > kMostRows || args.batch > kMostBatch)
    return "the cooperative step takes at most 4096 query rows of 64 sequences";
  if (reinterpret_cast<uintptr_t>(args.weights) % 16 != 0) return "weights must start at a multiple of 16 bytes";
  if (reinterpret_cast<uintptr_t>(args.workspace) % 256 != 0) return "workspace must start at a multiple of 256 bytes";
  return nullptr;
}

// As workspace_bytes of step.h says.
inline int64_t workspace_size(const int64_t* descriptor, int64_t descriptor_words, int64_t rows, int64_t batch,
                              int64_t num_segments) {
  StepModel model;
  const int64_t blob = descriptor_words > kBlobBytes ? descriptor[kBlobBytes] : 0;
  if (model.read(descriptor, descriptor_words, nullptr, blob) != nullptr || unsupported_model(model) != nullptr)
    return -1;
  if (rows < 0 || rows > kMostRows || batch < 0 || batch > kMostBatch || num_segments < 0 || num_segments > INT32_MAX)
    return -1;
  StepArgs args{};
  args.rows = static_cast<int32_t>(rows);
  args.batch = static_cast<int32_t>(batch);
  args.num_segments = static_cast<int32_t>(num_segments);
  Program p{};
  return fill_program(args, model, p);
}

}  // namespace jacobi::cuda
