// jacobi::_cooperative_step on CUDA: checks of shapes, types and devices, then one cooperative launch (cuda/step.h) on
// torch's current stream. Values lie on the device and are checked there: the kernel sets the state's ERROR column.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <optional>

#include "common/state.h"
#include "common/step_descriptor.h"
#include "cuda/step.h"
#include "ops/checks.h"

namespace jacobi::ops {
namespace {

constexpr const char* kOp = "multi_block_step";

// Checks of dense tensors on one device.
class OnDevice {
 public:
  explicit OnDevice(int32_t device) : device_(device) {}

  void check(const Tensor& tensor, const char* name) const {
    if (!tensor.is_cuda() || tensor.get_device_index() != device_)
      fail(kOp, name, " must be on cuda:", device_, " like weights, got a tensor of shape ", shape_string(tensor),
           " elsewhere");
  }

  void* dense(const Tensor& tensor, const char* name, ScalarType dtype, const char* words,
              std::initializer_list<int64_t> expected) const {
    check(tensor, name);
    check_dtype(tensor, kOp, name, dtype);
    check_shape(tensor, kOp, name, words, expected);
    check_contiguous(tensor, kOp, name);
    return tensor.mutable_data_ptr();
  }

  int32_t* int32(const Tensor& tensor, const char* name, const char* words,
                 std::initializer_list<int64_t> expected) const {
    return static_cast<int32_t*>(dense(tensor, name, ScalarType::Int, words, expected));
  }

  const void* optional(const std::optional<Tensor>& tensor, const char* name, ScalarType dtype, int64_t batch) const {
    return tensor.has_value() ? dense(*tensor, name, dtype, "[batch]", {batch}) : nullptr;
  }

 private:
  int32_t device_;
};

const int64_t* checked_descriptor(const Tensor& descriptor) {
  check_dense(descriptor, kOp, "descriptor", ScalarType::Long, "[words]", {kAny});
  const int64_t* words = static_cast<const int64_t*>(descriptor.const_data_ptr());
  if (descriptor.numel() < kHeaderFields || words[kMagic] != kStepMagic)
    fail(kOp, "descriptor of shape ", shape_string(descriptor), " is not the descriptor of packed step weights");
  return words;
}

void set_caches(cuda::StepArgs& args, const OnDevice& on, const Tensor& k_cache, const Tensor& v_cache,
                const std::optional<Tensor>& page_table) {
  const int64_t* d = args.descriptor;
  on.check(k_cache, "k_cache");
  check_floating(k_cache, kOp, "k_cache");
  check_shape(k_cache, kOp, "k_cache",
              page_table.has_value() ? "[layers, num_pages, page_size, kv_heads, head_dim]"
                                     : "[layers, batch, capacity, kv_heads, head_dim]",
              {d[kLayers], page_table.has_value() ? kAny : args.batch, kAny, d[kKvHeads], d[kHeadDim]});
  check_dense_rows(k_cache, kOp, "k_cache");
  on.check(v_cache, "v_cache");
  check_dtype(v_cache, kOp, "v_cache", k_cache.scalar_type());
  for (int64_t i = 0; i < k_cache.dim(); ++i)
    if (v_cache.dim() != k_cache.dim() || v_cache.size(i) != k_cache.size(i) || v_cache.stride(i) != k_cache.stride(i))
      fail(kOp, "v_cache must have the shape and strides of k_cache ", shape_string(k_cache), ", got ",
           shape_string(v_cache));
  check_separate_rows(k_cache, v_cache, kOp);
  args.k_cache = k_cache.mutable_data_ptr();
  args.v_cache = v_cache.mutable_data_ptr();
  args.cache_type = k_cache.scalar_type() == ScalarType::Float ? cuda::DType::f32 : cuda::DType::bf16;
  args.layer_stride = k_cache.stride(0);
  args.slab_stride = k_cache.stride(1);
  args.row_stride = k_cache.stride(2);
  args.slabs = k_cache.size(1);
  args.slab_rows = k_cache.size(2);
  if (page_table.has_value()) {
    args.page_table = on.int32(*page_table, "page_table", "[batch, max_pages]", {args.batch, kAny});
    args.max_pages = page_table->size(1);
  }
}

void set_state(cuda::StepArgs& args, const OnDevice& on, const Tensor& text, const Tensor& pool, const Tensor& state,
               const Tensor& stop_tokens) {
  const int64_t batch = args.batch;
  args.text = on.int32(text, "text", "[B, text_capacity]", {batch, kAny});
  args.text_capacity = narrow_size(text.size(1), kOp, "text_capacity");
  args.pool = on.int32(pool, "pool", "[B, pool_rows, 1 + width]", {batch, kAny, kAny});
  if (pool.size(2) < 1) fail(kOp, "pool must have shape [B, pool_rows, 1 + width], got ", shape_string(pool));
  args.pool_rows = narrow_size(pool.size(1), kOp, "pool_rows");
  args.pool_width = narrow_size(pool.size(2) - 1, kOp, "pool width");
  args.state = on.int32(state, "state", "[B, 16]", {batch, kStateColumns});
  args.stop_tokens = on.int32(stop_tokens, "stop_tokens", "[B, stops]", {batch, kAny});
  args.num_stop_tokens = narrow_size(stop_tokens.size(1), kOp, "number of stop tokens");
}

void set_draft_options(cuda::StepArgs& args, int64_t block_size, int64_t blocks, int64_t candidates,
                       double spawn_ratio) {
  constexpr int64_t kMost = 1 << 20;
  check_value(block_size >= 1 && block_size <= kMost, kOp, "block_size", block_size, "within 1..2^20");
  check_value(blocks >= 1 && blocks <= kMost, kOp, "blocks", blocks, "within 1..2^20");
  check_value(candidates >= 0 && candidates <= kMost, kOp, "candidates", candidates, "within 0..2^20");
  if (!(spawn_ratio >= 0.0 && spawn_ratio <= 1.0)) fail(kOp, "spawn_ratio must be within 0..1, got ", spawn_ratio);
  args.block_size = static_cast<int32_t>(block_size);
  args.blocks = static_cast<int32_t>(blocks);
  args.candidates = static_cast<int32_t>(candidates);
  args.spawn_ratio = spawn_ratio;
}

void cooperative_step(const Tensor& weights, const Tensor& descriptor, const Tensor& k_cache, const Tensor& v_cache,
                      const Tensor& cache_seqlens, const Tensor& tokens, const Tensor& segments,
                      const Tensor& cu_seqlens_q, const Tensor& cu_segments, const Tensor& text, const Tensor& pool,
                      const Tensor& state, const Tensor& stop_tokens, const Tensor& workspace, int64_t block_size,
                      int64_t blocks, int64_t candidates, double spawn_ratio, std::optional<Tensor> page_table,
                      std::optional<Tensor> temperature, std::optional<Tensor> top_k, std::optional<Tensor> top_p,
                      std::optional<Tensor> seeds, std::optional<Tensor> logits_scratch) {
  if (!weights.is_cuda()) fail(kOp, "weights must be on a CUDA device, got shape ", shape_string(weights));
  const int32_t device = weights.get_device_index();
  const OnDevice on(device);
  cuda::StepArgs args{};
  args.descriptor = checked_descriptor(descriptor);
  args.descriptor_words = descriptor.numel();
  args.weights = on.dense(weights, "weights", ScalarType::Byte, "[bytes]", {kAny});
  args.weight_bytes = weights.numel();

  args.cu_seqlens_q = on.int32(cu_seqlens_q, "cu_seqlens_q", "[batch + 1]", {kAny});
  if (cu_seqlens_q.numel() < 1) fail(kOp, "cu_seqlens_q must have shape [batch + 1], got [0]");
  args.batch = narrow_size(cu_seqlens_q.numel() - 1, kOp, "batch");
  args.cu_segments = on.int32(cu_segments, "cu_segments", "[batch + 1]", {cu_seqlens_q.numel()});
  args.segments = reinterpret_cast<Segment*>(on.int32(segments, "segments", "[num_segments, 4]", {kAny, 4}));
  args.num_segments = narrow_size(segments.size(0), kOp, "number of segments");
  args.tokens = on.int32(tokens, "tokens", "[T]", {kAny});
  args.rows = narrow_size(tokens.numel(), kOp, "number of query rows");
  args.cache_seqlens = on.int32(cache_seqlens, "cache_seqlens", "[batch]", {args.batch});

  set_caches(args, on, k_cache, v_cache, page_table);
  set_state(args, on, text, pool, state, stop_tokens);
  set_draft_options(args, block_size, blocks, candidates, spawn_ratio);
  args.temperature = static_cast<const float*>(on.optional(temperature, "temperature", ScalarType::Float, args.batch));
  args.top_k = static_cast<const int32_t*>(on.optional(top_k, "top_k", ScalarType::Int, args.batch));
  args.top_p = static_cast<const float*>(on.optional(top_p, "top_p", ScalarType::Float, args.batch));
  args.seeds = static_cast<const int64_t*>(on.optional(seeds, "seeds", ScalarType::Long, args.batch));
  if (args.temperature != nullptr && args.seeds == nullptr) fail(kOp, "seeds must be given with temperature");
  if (logits_scratch.has_value()) on.check(*logits_scratch, "logits_scratch");
  args.workspace = on.dense(workspace, "workspace", ScalarType::Byte, "[bytes]", {kAny});
  args.workspace_bytes = workspace.numel();
  if (args.batch == 0) return;
  if (const char* reason = cuda::supported(args)) fail(kOp, reason);

  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  if (const char* error = cuda::launch(args, stream)) fail(kOp, error);
}

// Bytes of workspace that the cooperative step needs.
int64_t cooperative_workspace_size(const Tensor& descriptor, int64_t rows, int64_t batch, int64_t num_segments) {
  const int64_t* words = checked_descriptor(descriptor);
  const int64_t bytes = cuda::workspace_bytes(words, descriptor.numel(), rows, batch, num_segments);
  if (bytes < 0) fail(kOp, "descriptor of shape ", shape_string(descriptor), " is not sound");
  return bytes;
}

STABLE_TORCH_LIBRARY_IMPL(jacobi, CUDA, m) { m.impl("_cooperative_step", TORCH_BOX(&cooperative_step)); }

// The descriptor lies on the CPU.
STABLE_TORCH_LIBRARY_IMPL(jacobi, CPU, m) {
  m.impl("_cooperative_workspace_size", TORCH_BOX(&cooperative_workspace_size));
}

}  // namespace
}  // namespace jacobi::ops
