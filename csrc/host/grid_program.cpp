// The GPU step's program on the host (csrc/cuda/host_grid.h), for tests: the same phases over the same arguments.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/host_grid.h"
#include "cuda/step_args.h"
#include "cuda/step_program.h"

namespace py = pybind11;

namespace jacobi::host {
namespace {

// Arguments of a step by name; tensors as addresses, absent ones as 0.
class Arguments {
 public:
  explicit Arguments(const py::dict& values) : values_(values) {}

  int64_t integer(const char* name) const { return values_[name].cast<int64_t>(); }
  int32_t small(const char* name) const { return values_[name].cast<int32_t>(); }
  template <class T>
  T* address(const char* name) const {
    return reinterpret_cast<T*>(values_[name].cast<uintptr_t>());
  }

 private:
  const py::dict& values_;
};

cuda::StepArgs step_args(const py::dict& values) {
  const Arguments from(values);
  cuda::StepArgs a{};
  a.descriptor = from.address<int64_t>("descriptor");
  a.descriptor_words = from.integer("descriptor_words");
  a.weights = from.address<void>("weights");
  a.weight_bytes = from.integer("weight_bytes");
  a.k_cache = from.address<void>("k_cache");
  a.v_cache = from.address<void>("v_cache");
  a.cache_type = from.integer("cache_is_float") != 0 ? cuda::DType::f32 : cuda::DType::bf16;
  a.layer_stride = from.integer("layer_stride");
  a.slab_stride = from.integer("slab_stride");
  a.row_stride = from.integer("row_stride");
  a.slabs = from.integer("slabs");
  a.slab_rows = from.integer("slab_rows");
  a.page_table = from.address<int32_t>("page_table");
  a.max_pages = from.integer("max_pages");
  a.cache_seqlens = from.address<int32_t>("cache_seqlens");
  a.tokens = from.address<int32_t>("tokens");
  a.segments = from.address<Segment>("segments");
  a.cu_seqlens_q = from.address<int32_t>("cu_seqlens_q");
  a.cu_segments = from.address<int32_t>("cu_segments");
  a.rows = from.small("rows");
  a.batch = from.small("batch");
  a.num_segments = from.small("num_segments");
  a.text = from.address<int32_t>("text");
  a.text_capacity = from.small("text_capacity");
  a.pool = from.address<int32_t>("pool");
  a.pool_rows = from.small("pool_rows");
  a.pool_width = from.small("pool_width");
  a.state = from.address<int32_t>("state");
  a.stop_tokens = from.address<int32_t>("stop_tokens");
  a.num_stop_tokens = from.small("num_stop_tokens");
  a.block_size = from.small("block_size");
  a.blocks = from.small("blocks");
  a.candidates = from.small("candidates");
  a.spawn_ratio = values["spawn_ratio"].cast<double>();
  a.temperature = from.address<float>("temperature");
  a.top_k = from.address<int32_t>("top_k");
  a.top_p = from.address<float>("top_p");
  a.seeds = from.address<int64_t>("seeds");
  a.workspace = from.address<void>("workspace");
  a.workspace_bytes = from.integer("workspace_bytes");
  return a;
}

template <class T>
int run_as(const cuda::Program& p, int blocks, bool backwards) {
  cuda::HostGrid grid(blocks, cuda::shared_bytes<T>(p), backwards);
  cuda::run_step<T>(grid, p);
  return grid.phases;
}

// What step.cu does, on `blocks` blocks in a loop. Returns the number of phases.
int grid_step(const py::dict& values, int blocks, bool backwards) {
  const cuda::StepArgs args = step_args(values);
  StepModel model;
  cuda::Program p{};
  const char* error = cuda::read_args(args, model);
  if (error == nullptr && args.workspace_bytes < cuda::fill_program(args, model, p)) error = "workspace is too small";
  if (error != nullptr) throw std::runtime_error(std::string("multi_block_step: ") + error);
  memset(p.work.counter, 0, cuda::counter_bytes(p));
  return model.wide() ? run_as<float>(p, blocks, backwards) : run_as<cuda::bfloat16>(p, blocks, backwards);
}

int64_t grid_workspace(uintptr_t descriptor, int64_t words, int64_t rows, int64_t batch, int64_t num_segments) {
  return cuda::workspace_size(reinterpret_cast<const int64_t*>(descriptor), words, rows, batch, num_segments);
}

// Every stage of a product that one block runs: (split, first item, items, row, step of k).
py::list product_stages(int32_t columns, int32_t k, int32_t rows, int32_t pair, bool wide, int32_t block,
                        int32_t blocks) {
  const int32_t splits = pair > 0 ? 1 : cuda::splits_of(columns, k, wide);
  const cuda::ProductShape shape{nullptr, 0, rows, nullptr, k, columns, splits, pair};
  py::list stages;
  const int32_t step = wide ? cuda::kStep<float> : cuda::kStep<cuda::bfloat16>;
  for (cuda::ProductCursor c(shape, step, block, blocks); !c.done(); c.advance())
    stages.append(py::make_tuple(c.split, c.first, c.count, c.row, c.step));
  return stages;
}

}  // namespace

void bind_grid_program(py::module_& m) {
  m.def("grid_step", &grid_step, "One multi_block_step by the GPU's program, interpreted; the number of phases.",
        py::arg("arguments"), py::arg("blocks"), py::arg("backwards") = false);
  m.def("grid_workspace", &grid_workspace, "Bytes of workspace of the GPU's program, or -1.");
  m.def("product_stages", &product_stages,
        "(split, first item, items, row, step) of every stage that one block of a product runs.");
}

}  // namespace jacobi::host
