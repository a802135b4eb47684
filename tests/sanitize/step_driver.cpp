// Decodes one dumped state with the CPU step and nothing of torch, so that sanitizers and a counting malloc see only
// the step:  step_driver STATE TABLE ASKED GRANTED ...  decodes once per table and numbers of threads, and prints a
// line for each:  {"steps": n, "allocations": [per step], "texts": [[token]]}.
#ifdef GUARD_ARENA
#include "guarded_arena.h"
#endif

#include <cstdio>
#include <cstring>
#include <exception>

#include "count_allocations.h"
#include "cpu/step.h"
#include "records.h"
#include "tables.h"
#include "worker_threads.h"

namespace jacobi::cpu {
namespace {

// The arrays have the names that they have in multi_block_step.
class Decoding {
 public:
  explicit Decoding(const Records& from) : from_(from), batch_(from.count<int32_t>("cu_seqlens_q") - 1) {
    const char* error = model_.read(from.data<int64_t>("descriptor"), from.count<int64_t>("descriptor"),
                                    from.data<char>("weights"), from.count<char>("weights"));
    if (error != nullptr) throw std::runtime_error(std::string("descriptor ") + error);
    args_.layout = {from.data<int32_t>("cu_seqlens_q"),
                    from.data<Segment>("segments"),
                    from.data<int32_t>("cu_segments"),
                    static_cast<int32_t>(batch_),
                    static_cast<int32_t>(from.count<int32_t>("tokens")),
                    static_cast<int32_t>(from.count<Segment>("segments"))};
    args_.tokens = from.data<int32_t>("tokens");
    args_.num_final = state(0) + kNumFinal;
    args_.cache = cache();
    args_.sampling = {from.data<float>("temperature"), from.data<int32_t>("top_k"), from.data<float>("top_p"),
                      from.data<int64_t>("seeds")};
    args_.logits_scratch = from.data<float>("logits_scratch");
    args_.scratch_rows = from.count<float>("logits_scratch") / model_.vocab();
  }

  int64_t batch() const { return batch_; }
  int32_t* state(int64_t b) const { return from_.data<int32_t>("state") + b * kStateColumns; }
  int32_t* text(int64_t b) const { return from_.data<int32_t>("text") + b * from_.count<int32_t>("text") / batch_; }

  bool running() const {
    for (int64_t b = 0; b < batch_; ++b)
      if (state(b)[kDone] == kRunning) return true;
    return false;
  }

  int64_t workspace_bytes() const { return static_cast<int64_t>(evaluation_bytes(model_, args_)); }

  void step(const Block& workspace) const {
    StepResult result{};
    std::atomic<bool> overflowed = false;
    run_team([&](Team& team) {
      Arena arena(workspace.data.get(), workspace.bytes);
      const StepResult evaluated = evaluate(model_, args_, arena, team);
      if (team.rank() == 0) result = evaluated;
      if (arena.overflowed()) overflowed = true;
    });
    if (overflowed) throw std::runtime_error("the step needs more workspace than it asked for");
    for (int32_t b = 0; b < batch_; ++b) redraft_sequence(redraft_args(result, b));
  }

 private:
  StepCache cache() const {
    StepCache c{};
    c.k = from_.data<void>("k_cache");
    c.v = from_.data<void>("v_cache");
    c.type = from_.value<int64_t>("cache_is_float32") != 0 ? DType::f32 : DType::bf16;
    c.page_size = from_.value<int64_t>("page_size");
    c.row_stride = model_.kv_size();
    c.slab_stride = c.page_size * c.row_stride;
    c.layer_stride = from_.value<int64_t>("slabs") * c.slab_stride;
    c.page_table = from_.data<int32_t>("page_table");
    c.max_pages = from_.count<int32_t>("page_table") / batch_;
    c.seqlens = from_.data<int32_t>("cache_seqlens");
    return c;
  }

  RedraftArgs redraft_args(const StepResult& result, int32_t b) const {
    RedraftArgs args{};
    SequenceState& q = args.sequence;
    q.tokens = from_.data<int32_t>("tokens");
    q.segments = from_.data<Segment>("segments");
    q.first_segment = args_.layout.cu_segments[b];
    q.row_begin = args_.layout.cu_seqlens_q[b];
    q.row_end = args_.layout.cu_seqlens_q[b + 1];
    q.cache_seqlen = args_.cache.seqlens + b;
    q.text = text(b);
    q.text_capacity = static_cast<int32_t>(from_.count<int32_t>("text") / batch_);
    q.pool_width = static_cast<int32_t>(from_.value<int64_t>("pool_width"));
    q.pool_rows = static_cast<int32_t>(from_.count<int32_t>("pool") / batch_ / (1 + q.pool_width));
    q.pool = from_.data<int32_t>("pool") + int64_t{b} * q.pool_rows * (1 + q.pool_width);
    q.state = state(b);
    q.num_stop_tokens = static_cast<int32_t>(from_.count<int32_t>("stop_tokens") / batch_);
    q.stop_tokens = from_.data<int32_t>("stop_tokens") + b * q.num_stop_tokens;
    args.predictions = result.predictions;
    args.accepted_rows = result.accepted_rows;
    args.num_accepted = result.num_accepted[b];
    args.fixed_point = result.fixed_point[b];
    args.block_size = static_cast<int32_t>(from_.value<int64_t>("block_size"));
    args.blocks = static_cast<int32_t>(from_.value<int64_t>("blocks"));
    args.candidates = static_cast<int32_t>(from_.value<int64_t>("candidates"));
    args.spawn_ratio = from_.value<double>("spawn_ratio");
    return args;
  }

  const Records& from_;
  int64_t batch_;
  StepModel model_;
  StepArgs args_{};
};

template <class Values>
void print(const char* before, const Values& values, int64_t count, const char* after) {
  printf("%s[", before);
  for (int64_t i = 0; i < count; ++i) printf("%s%lld", i == 0 ? "" : ", ", static_cast<long long>(values[i]));
  printf("]%s", after);
}

void run(const char* path, const char* table, int asked, int granted) {
  choose_table(table);
  WorkerThreads workers(asked, granted);
  worker_threads = &workers;
  const Records records(path);
  const Decoding decoding(records);
  const Block workspace(decoding.workspace_bytes());
  const int64_t most = records.value<int64_t>("most_steps");
  std::vector<int64_t> counts(most);
  int64_t steps = 0;
  for (; steps < most && decoding.running(); ++steps) {
#ifdef GUARD_ARENA
    ASAN_UNPOISON_MEMORY_REGION(workspace.data.get(), workspace.bytes);
#endif
    memset(workspace.data.get(), 255, workspace.bytes);
    const int64_t before = allocations;
    decoding.step(workspace);
    counts[steps] = allocations - before;
  }
  printf("{\"steps\": %lld", static_cast<long long>(steps));
  print(", \"allocations\": ", counts, steps, ", \"texts\": [");
  for (int64_t b = 0; b < decoding.batch(); ++b)
    print(b == 0 ? "" : ", ", decoding.text(b), decoding.state(b)[kTextLen], "");
  printf("]}\n");
#ifdef GUARD_ARENA
  ASAN_UNPOISON_MEMORY_REGION(workspace.data.get(), workspace.bytes);
#endif
}

}  // namespace
}  // namespace jacobi::cpu

int main(int argc, char** argv) {
  try {
    if (argc < 5 || argc % 3 != 2) throw std::runtime_error("usage: step_driver STATE TABLE ASKED GRANTED ...");
    if (!count_allocations()) throw std::runtime_error("the sanitizer takes no hook for malloc");
    const int64_t before = allocations;
    const Block one(1);
    if (allocations == before) throw std::runtime_error("allocations are not counted");
    for (int i = 2; i < argc; i += 3)
      jacobi::cpu::run(argv[1], argv[i], std::stoi(argv[i + 1]), std::stoi(argv[i + 2]));
  } catch (const std::exception& error) {
    fprintf(stderr, "step_driver: %s\n", error.what());
    return 1;
  }
  return 0;
}
