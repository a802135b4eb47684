// multi_block_step on a GPU: one cooperative launch of the program in step_program.h.
//
// Idea: a decode step of a small batch reads every weight once and does little else, so its floor is weight bytes over
// memory bandwidth. Launches between its hundreds of small products cost as much again. Here a block per SM stays
// resident and walks all phases; a barrier of the grid costs about a microsecond. Every product streams its weights
// through a cp.async ring that stays full across the panels of a block. docs/notes/gpu_step.md has the time expected.
//
// Blocks of 256 threads, one per SM (shared memory decides). No spills, no locals in the bfloat16 path but those of the
// rules of csrc/common, which one thread runs.
#include <cuda_runtime.h>

#include "cuda/device_grid.cuh"
#include "cuda/step_args.h"
#include "cuda/step_program.h"

namespace jacobi::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(kThreads, 1) step_kernel(const __grid_constant__ Program p) {
  extern __shared__ __align__(256) char shared[];
  DeviceGrid grid(p.work.counter, shared);
  run_step<T>(grid, p);
}

template <class T>
cudaError_t launch_as(Program& p, cudaStream_t stream) {
  const int bytes = shared_bytes<T>(p);
  int device = 0, processors = 0, blocks = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(step_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, step_kernel<T>, kThreads, bytes);
  if (error == cudaSuccess) error = cudaMemsetAsync(p.work.counter, 0, counter_bytes(p), stream);
  if (error != cudaSuccess) return error;
  const int grid = processors * blocks;
  void* arguments[] = {&p};
  return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(step_kernel<T>), dim3(grid), dim3(kThreads),
                                     arguments, bytes, stream);
}

}  // namespace

int64_t workspace_bytes(const int64_t* descriptor, int64_t descriptor_words, int64_t rows, int64_t batch,
                        int64_t num_segments) {
  return workspace_size(descriptor, descriptor_words, rows, batch, num_segments);
}

const char* supported(const StepArgs& args) {
  StepModel model;
  Program p{};
  const char* error = read_args(args, model);
  if (error != nullptr) return error;
  if (args.workspace_bytes < fill_program(args, model, p)) return "workspace is too small: see step_workspace_size";
  return nullptr;
}

const char* launch(const StepArgs& args, void* stream) {
  StepModel model;
  Program p{};
  const char* reason = read_args(args, model);
  if (reason != nullptr) return reason;
  if (args.workspace_bytes < fill_program(args, model, p)) return "workspace is too small: see step_workspace_size";
  const auto on = static_cast<cudaStream_t>(stream);
  const cudaError_t error = model.wide() ? launch_as<float>(p, on) : launch_as<bfloat16>(p, on);
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // or the caller's next kernel, of whatever kind, would be said to have failed
  return cudaGetErrorString(error);
}

}  // namespace jacobi::cuda
