// jacobi::multi_block_step on CPU: argument checks, then csrc/cpu/step.h and the redraft rule.
#include "cpu/step.h"
#include "ops/checks.h"
#include "ops/decode_state.h"
#include "ops/dtype.h"
#include "ops/sampling_checks.h"

namespace jacobi::ops {
namespace {

constexpr const char* kOp = "multi_block_step";

cpu::StepModel checked_model(const Tensor& weights, const Tensor& descriptor) {
  check_dense(weights, kOp, "weights", ScalarType::Byte, "[bytes]", {kAny});
  check_dense(descriptor, kOp, "descriptor", ScalarType::Long, "[words]", {kAny});
  if (reinterpret_cast<uintptr_t>(weights.const_data_ptr()) % 4 != 0)
    fail(kOp, "weights must start at a multiple of 4 bytes (64 for speed): see jacobi_kernels.load_step_weights");
  cpu::StepModel model;
  const char* error = model.read(static_cast<const int64_t*>(descriptor.const_data_ptr()), descriptor.numel(),
                                 weights.const_data_ptr(), weights.numel());
  if (error != nullptr)
    fail(kOp, "descriptor of shape ", shape_string(descriptor), " with weights of shape ", shape_string(weights), " ",
         error);
  return model;
}

void check_cache_pair(const Tensor& k_cache, const Tensor& v_cache) {
  check_cpu(v_cache, kOp, "v_cache");
  check_dtype(v_cache, kOp, "v_cache", k_cache.scalar_type());
  for (int64_t i = 0; i < k_cache.dim(); ++i)
    if (v_cache.dim() != k_cache.dim() || v_cache.size(i) != k_cache.size(i) || v_cache.stride(i) != k_cache.stride(i))
      fail(kOp, "v_cache must have the shape and strides of k_cache ", shape_string(k_cache), ", got ",
           shape_string(v_cache));
}

cpu::StepCache checked_cache(const cpu::StepModel& m, const Tensor& k_cache, const Tensor& v_cache,
                             const Tensor& cache_seqlens, const std::optional<Tensor>& page_table, int64_t batch) {
  check_cpu(k_cache, kOp, "k_cache");
  check_floating(k_cache, kOp, "k_cache");
  const int64_t slabs = page_table.has_value() ? kAny : batch;
  check_shape(k_cache, kOp, "k_cache",
              page_table.has_value() ? "[layers, num_pages, page_size, kv_heads, head_dim]"
                                     : "[layers, batch, capacity, kv_heads, head_dim]",
              {m.layers(), slabs, kAny, m.kv_heads(), m.head_dim()});
  check_dense_rows(k_cache, kOp, "k_cache");
  check_cache_pair(k_cache, v_cache);
  check_separate_rows(k_cache, v_cache, kOp);
  check_int32(cache_seqlens, kOp, "cache_seqlens", "[batch]", {batch});
  cpu::StepCache cache{};
  cache.k = k_cache.mutable_data_ptr();
  cache.v = v_cache.mutable_data_ptr();
  cache.type = kernel_dtype(k_cache);
  cache.layer_stride = k_cache.stride(0);
  cache.slab_stride = k_cache.stride(1);
  cache.row_stride = k_cache.stride(2);
  cache.page_size = k_cache.size(2);
  cache.seqlens = mutable_int32_data(cache_seqlens);
  if (page_table.has_value()) {
    check_int32(*page_table, kOp, "page_table", "[batch, max_pages]", {batch, kAny});
    cache.page_table = int32_data(*page_table);
    cache.max_pages = page_table->size(1);
  }
  return cache;
}

// Every live row must fit behind the committed ones, on pages that exist.
void check_room(const cpu::StepCache& cache, const Layout& layout, int64_t pages) {
  WrittenPages written(cache.page_table == nullptr ? 0 : pages);
  for (int32_t b = 0; b < layout.batch; ++b) {
    int64_t live = 0;
    for (int32_t s = layout.cu_segments[b]; s < layout.cu_segments[b + 1]; ++s) live += layout.segments[s].length;
    const int64_t capacity = cache.page_table == nullptr ? cache.page_size : cache.max_pages * cache.page_size;
    const int64_t used = cache.seqlens[b];
    if (used < 0 || used + live > capacity)
      fail(kOp, "cache_seqlens[", b, "] must leave room for ", live, " query rows within the capacity ", capacity,
           ", got ", used);
    if (cache.page_table == nullptr || used + live == 0) continue;
    for (int64_t i = 0; i <= (used + live - 1) / cache.page_size; ++i) {
      const int32_t page = cache.page_table[b * cache.max_pages + i];
      if (page < 0 || page >= pages)
        fail(kOp, "page_table[", b, ", ", i, "] must be a page of the cache (0..", pages - 1, "), got ", page);
    }
    written.claim(kOp, b, cache.page_table + b * cache.max_pages, used, used + live, cache.page_size);
  }
}

// The query tokens must be tokens of the model, and the layout and state must be as redraft left them.
void check_queries(const cpu::StepModel& m, const Layout& layout, const int32_t* tokens, const DecodeStateView& view,
                   const int32_t* cache_seqlens, int64_t candidates) {
  for (int32_t s = 0; s < layout.num_segments; ++s)
    for (int32_t i = 0; i < layout.segments[s].length; ++i) {
      const int32_t row = layout.segments[s].start + i;
      if (tokens[row] < 0 || tokens[row] >= m.vocab())
        fail(kOp, "tokens[", row, "] must be a token id below ", m.vocab(), ", got ", tokens[row]);
    }
  for (int32_t b = 0; b < layout.batch; ++b) {
    if (layout.cu_segments[b + 1] - layout.cu_segments[b] != 1 + candidates)
      fail(kOp, "cu_segments must give sequence ", b, " 1 + candidates = ", 1 + candidates, " segments, got ",
           layout.cu_segments[b + 1] - layout.cu_segments[b]);
    const int32_t* state = view.state + int64_t{b} * kStateColumns;
    const int32_t length = layout.segments[layout.cu_segments[b]].length;
    if (length > 0 && (state[kNumFinal] < 1 || state[kNumFinal] > length))
      fail(kOp, "state[", b, ", NUM_FINAL] must be within 1..", length, " (the main chain), got ", state[kNumFinal]);
    if (length > 0 && (cache_seqlens[b] < 0 || cache_seqlens[b] + state[kNumFinal] > state[kTextLen]))
      fail(kOp, "cache_seqlens[", b, "] = ", cache_seqlens[b], " does not agree with NUM_FINAL = ", state[kNumFinal],
           " and TEXT_LEN = ", state[kTextLen]);
  }
}

RedraftArgs redraft_args(const cpu::StepResult& result, const DecodeStateView& view, const Layout& layout, int32_t b,
                         int32_t* tokens, int32_t* cache_seqlens, int64_t block_size, int64_t blocks,
                         int64_t candidates, double spawn_ratio) {
  RedraftArgs args{};
  args.sequence = sequence_state(view, layout, b, tokens, cache_seqlens);
  args.predictions = result.predictions;
  args.accepted_rows = result.accepted_rows;
  args.num_accepted = result.num_accepted == nullptr ? 0 : result.num_accepted[b];
  args.fixed_point = result.fixed_point != nullptr && result.fixed_point[b];
  args.block_size = static_cast<int32_t>(block_size);
  args.blocks = static_cast<int32_t>(blocks);
  args.candidates = static_cast<int32_t>(candidates);
  args.spawn_ratio = spawn_ratio;
  return args;
}

void multi_block_step(const Tensor& weights, const Tensor& descriptor, const Tensor& k_cache, const Tensor& v_cache,
                      const Tensor& cache_seqlens, const Tensor& tokens, const Tensor& segments,
                      const Tensor& cu_seqlens_q, const Tensor& cu_segments, const Tensor& text, const Tensor& pool,
                      const Tensor& state, const Tensor& stop_tokens, const Tensor& workspace, int64_t block_size,
                      int64_t blocks, int64_t candidates, double spawn_ratio, std::optional<Tensor> page_table,
                      std::optional<Tensor> temperature, std::optional<Tensor> top_k, std::optional<Tensor> top_p,
                      std::optional<Tensor> seeds, std::optional<Tensor> logits_scratch) {
  const cpu::StepModel model = checked_model(weights, descriptor);
  check_int32(tokens, kOp, "tokens", "[T]", {kAny});
  const Layout layout = checked_layout(kOp, cu_seqlens_q, segments, cu_segments, tokens.numel());
  const int64_t batch = layout.batch;
  const DecodeStateView view = checked_decode_state(kOp, batch, text, pool, state, stop_tokens);
  check_draft_options(kOp, block_size, blocks, candidates, spawn_ratio);

  cpu::StepArgs args{};
  args.layout = layout;
  args.tokens = int32_data(tokens);
  args.num_final = view.state + kNumFinal;
  args.cache = checked_cache(model, k_cache, v_cache, cache_seqlens, page_table, batch);
  check_room(args.cache, layout, k_cache.size(1));
  check_queries(model, layout, args.tokens, view, args.cache.seqlens, candidates);
  args.sampling = checked_sampling(kOp, temperature, top_k, top_p, seeds, logits_scratch, batch, model.vocab());
  if (logits_scratch.has_value()) {
    args.logits_scratch = static_cast<float*>(logits_scratch->mutable_data_ptr());
    args.scratch_rows = logits_scratch->size(0);
  }
  const auto select = [&](const cpu::StepResult& result, int32_t b) {
    return redraft_args(result, view, layout, b, mutable_int32_data(tokens), args.cache.seqlens, block_size, blocks,
                        candidates, spawn_ratio);
  };
  for (int32_t b = 0; b < batch; ++b) {
    const RedraftArgs sequence = select({}, b);
    const RedraftCheck check = check_redraft(sequence);
    if (check.error != RedraftError::kNone) fail_redraft(kOp, b, sequence, check);
  }
  check_dense(workspace, kOp, "workspace", ScalarType::Byte, "[bytes]", {kAny});
  const int64_t needed = static_cast<int64_t>(cpu::evaluation_bytes(model, args)) + 64;
  if (workspace.numel() < needed)
    fail(kOp, "workspace must have at least ", needed, " bytes (step_workspace_size), got ", workspace.numel());

  char* base = static_cast<char*>(workspace.mutable_data_ptr());
  const size_t shift = (64 - reinterpret_cast<uintptr_t>(base) % 64) % 64;
  cpu::StepResult result{};
  cpu::run_team([&](cpu::Team& team) {
    cpu::Arena arena(base + shift, workspace.numel() - shift);
    const cpu::StepResult evaluated = cpu::evaluate(model, args, arena, team);
    if (team.rank() == 0) result = evaluated;
  });
  cpu::PhaseClock clock;
  for (int32_t b = 0; b < batch; ++b) redraft_sequence(select(result, b));
  clock.charge(cpu::kRedraft);
}

// Bytes of workspace that a step over `rows` query rows needs with the threads of now.
int64_t step_workspace_size(const Tensor& descriptor, int64_t rows, int64_t batch, int64_t num_segments) {
  constexpr const char* op = "step_workspace_size";
  check_dense(descriptor, op, "descriptor", ScalarType::Long, "[words]", {kAny});
  check_value(rows >= 0 && rows < INT32_MAX, op, "rows", rows, "at least 0");
  check_value(batch >= 0 && batch < INT32_MAX, op, "batch", batch, "at least 0");
  check_value(num_segments >= 0 && num_segments < INT32_MAX, op, "num_segments", num_segments, "at least 0");
  const int64_t* words = static_cast<const int64_t*>(descriptor.const_data_ptr());
  cpu::StepModel model;
  const char* error =
      model.read(words, descriptor.numel(), nullptr, descriptor.numel() > kBlobBytes ? words[kBlobBytes] : 0);
  if (error != nullptr) fail(op, "descriptor of shape ", shape_string(descriptor), " ", error);
  cpu::StepArgs args{};
  args.layout.rows = static_cast<int32_t>(rows);
  args.layout.batch = static_cast<int32_t>(batch);
  args.layout.num_segments = static_cast<int32_t>(num_segments);
  return static_cast<int64_t>(cpu::evaluation_bytes(model, args)) + 64;
}

// float64 [phases]: seconds of every phase (csrc/cpu/phase_clock.h) since the last call.
Tensor read_phase_seconds() {
  Tensor seconds = torch::stable::empty({cpu::kPhases}, ScalarType::Double);
  double* to = static_cast<double*>(seconds.mutable_data_ptr());
  for (int i = 0; i < cpu::kPhases; ++i) to[i] = cpu::phase_seconds[i], cpu::phase_seconds[i] = 0.0;
  return seconds;
}

STABLE_TORCH_LIBRARY_IMPL(jacobi, CompositeExplicitAutograd, m) {
  m.impl("_phase_seconds", TORCH_BOX(&read_phase_seconds));
}

STABLE_TORCH_LIBRARY_IMPL(jacobi, CPU, m) {
  m.impl("multi_block_step", TORCH_BOX(&multi_block_step));
  m.impl("step_workspace_size", TORCH_BOX(&step_workspace_size));
}

}  // namespace
}  // namespace jacobi::ops
