// Argument checks shared by the op files: every failure names the op, the argument, what it is and what was expected.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/layout.h"

namespace jacobi::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kAny = -1;  // in an expected shape: any size

// Throws "<op>: <parts>" as a RuntimeError.
template <class... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << op << ": ";
  ((message << parts), ...);
  throw std::runtime_error(message.str());
}

// "[12, 3, 32]"; kAny prints as *.
template <class Sizes>
std::string shape_string(const Sizes& sizes) {
  std::ostringstream text;
  text << "[";
  bool first = true;
  for (int64_t size : sizes) {
    text << (first ? "" : ", ");
    if (size == kAny)
      text << "*";
    else
      text << size;
    first = false;
  }
  text << "]";
  return text.str();
}

inline std::string shape_string(const Tensor& tensor) { return shape_string(tensor.sizes()); }

inline std::string dtype_string(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Bool:
      return "bool";
    default:
      return torch::headeronly::toString(dtype);
  }
}

inline void check_cpu(const Tensor& tensor, const char* op, const char* name) {
  if (!tensor.is_cpu())
    fail(op, name, " must be on the CPU like the other arguments, got shape ", shape_string(tensor));
}

inline void check_contiguous(const Tensor& tensor, const char* op, const char* name) {
  if (!tensor.is_contiguous())
    fail(op, name, " must be contiguous, got shape ", shape_string(tensor), " with strides ",
         shape_string(tensor.strides()));
}

inline void check_dtype(const Tensor& tensor, const char* op, const char* name, ScalarType dtype) {
  if (tensor.scalar_type() != dtype)
    fail(op, name, " must be ", dtype_string(dtype), ", got ", dtype_string(tensor.scalar_type()), " of shape ",
         shape_string(tensor));
}

// float32 or bfloat16.
inline void check_floating(const Tensor& tensor, const char* op, const char* name) {
  const ScalarType dtype = tensor.scalar_type();
  if (dtype != ScalarType::Float && dtype != ScalarType::BFloat16)
    fail(op, name, " must be float32 or bfloat16, got ", dtype_string(dtype), " of shape ", shape_string(tensor));
}

// `words` names the dimensions, as in "[T, num_kv_heads, head_dim]"; kAny in `expected` allows every size.
inline void check_shape(const Tensor& tensor, const char* op, const char* name, const char* words,
                        std::initializer_list<int64_t> expected) {
  const auto sizes = tensor.sizes();
  bool same = sizes.size() == expected.size();
  size_t i = 0;
  for (int64_t size : expected) {
    same = same && (size == kAny || size == sizes[i]);
    ++i;
  }
  if (!same) fail(op, name, " must have shape ", words, " = ", shape_string(expected), ", got ", shape_string(tensor));
}

// An int32, contiguous CPU tensor of the given shape: every index tensor of the ops.
inline void check_int32(const Tensor& tensor, const char* op, const char* name, const char* words,
                        std::initializer_list<int64_t> expected) {
  check_cpu(tensor, op, name);
  check_dtype(tensor, op, name, ScalarType::Int);
  check_shape(tensor, op, name, words, expected);
  check_contiguous(tensor, op, name);
}

// A dense CPU tensor of dtype `dtype` and the given shape.
inline void check_dense(const Tensor& tensor, const char* op, const char* name, ScalarType dtype, const char* words,
                        std::initializer_list<int64_t> expected) {
  check_cpu(tensor, op, name);
  check_dtype(tensor, op, name, dtype);
  check_shape(tensor, op, name, words, expected);
  check_contiguous(tensor, op, name);
}

// The last two dimensions are dense (a row is one run of memory); the others may have any non-negative strides.
inline void check_dense_rows(const Tensor& tensor, const char* op, const char* name) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  const size_t n = sizes.size();
  bool dense =
      n >= 2 && (sizes[n - 1] <= 1 || strides[n - 1] == 1) && (sizes[n - 2] <= 1 || strides[n - 2] == sizes[n - 1]);
  if (!dense)
    fail(op, name, " must be dense in its last two dimensions, got shape ", shape_string(tensor), " with strides ",
         shape_string(strides));
}

// The caches must not share memory, nor may rows (the last two dimensions, dense) of one of them.
inline void check_separate_rows(const Tensor& k_cache, const Tensor& v_cache, const char* op) {
  if (k_cache.numel() > 0 && k_cache.const_data_ptr() == v_cache.const_data_ptr())
    fail(op, "k_cache and v_cache must not share memory, got the same address for both, of shape ",
         shape_string(k_cache));
  const auto check = [op](const Tensor& cache, const char* name) {
    const auto sizes = cache.sizes();
    const auto strides = cache.strides();
    const size_t outer = sizes.size() - 2;
    std::vector<std::pair<int64_t, int64_t>> steps;  // (stride, size) of the dimensions of rows
    for (size_t i = 0; i < outer; ++i)
      if (sizes[i] > 1) steps.emplace_back(strides[i], sizes[i]);
    std::sort(steps.begin(), steps.end());
    int64_t extent = sizes[outer] * sizes[outer + 1];
    for (const auto& [stride, size] : steps) {
      if (stride < extent)
        fail(op, name, " must not hold rows that share memory, got shape ", shape_string(cache), " with strides ",
             shape_string(strides));
      extent += stride * (size - 1);
    }
  };
  check(k_cache, "k_cache");
  check(v_cache, "v_cache");
}

// The pages of a cache that a call writes: each at most once, for one sequence.
class WrittenPages {
 public:
  explicit WrittenPages(int64_t num_pages) : owner_(static_cast<size_t>(num_pages), -1) {}

  // Sequence b, whose pages `table` names, writes cache rows [begin, end); its page ids have been checked.
  void claim(const char* op, int64_t b, const int32_t* table, int64_t begin, int64_t end, int64_t page_size) {
    for (int64_t i = begin / page_size; begin < end && i * page_size < end; ++i) {
      int32_t& owner = owner_[static_cast<size_t>(table[i])];
      if (owner >= 0)
        fail(op, "page_table[", b, ", ", i, "] must be a page that no other row of this call is written to, got ",
             table[i], " as for sequence ", owner);
      owner = static_cast<int32_t>(b);
    }
  }

 private:
  std::vector<int32_t> owner_;
};

inline void check_value(bool ok, const char* op, const char* name, int64_t value, const char* expected) {
  if (!ok) fail(op, name, " must be ", expected, ", got ", value);
}

// Every value within [low, high]; `expected` says so in words.
inline void check_range(const int32_t* values, int64_t count, int64_t low, int64_t high, const char* op,
                        const char* name, const char* expected) {
  for (int64_t i = 0; i < count; ++i)
    if (values[i] < low || values[i] > high)
      fail(op, name, "[", i, "] must be ", expected, " (", low, "..", high, "), got ", values[i]);
}

inline const int32_t* int32_data(const Tensor& tensor) { return static_cast<const int32_t*>(tensor.const_data_ptr()); }
inline int32_t* mutable_int32_data(const Tensor& tensor) { return static_cast<int32_t*>(tensor.mutable_data_ptr()); }

// A size that the kernels hold in int32.
inline int32_t narrow_size(int64_t size, const char* op, const char* name) {
  if (size < 0 || size > std::numeric_limits<int32_t>::max()) fail(op, name, " must fit into 31 bits, got ", size);
  return static_cast<int32_t>(size);
}

inline const char* layout_rule(LayoutError error) {
  switch (error) {
    case LayoutError::kSequenceRows:
      return "must start at 0, ascend and end at the number of query rows";
    case LayoutError::kSequenceSegments:
      return "must start at 0, ascend and end at the number of segments";
    case LayoutError::kLength:
      return "length must not be negative";
    case LayoutError::kRows:
      return "rows must lie inside the rows of its sequence";
    case LayoutError::kOrder:
      return "rows must begin at or behind the end of the segment before it";
    case LayoutError::kParent:
      return "parent must be -1 or an earlier segment of the same sequence";
    case LayoutError::kVisible:
      return "visible must be within 0..length of the parent, and 0 without a parent";
    default:
      return "";
  }
}

// Checks the three layout tensors against one another and against `rows` query rows; returns the view the kernels take.
inline Layout checked_layout(const char* op, const Tensor& cu_seqlens_q, const Tensor& segments,
                             const Tensor& cu_segments, int64_t rows) {
  check_int32(cu_seqlens_q, op, "cu_seqlens_q", "[batch + 1]", {kAny});
  if (cu_seqlens_q.numel() < 1) fail(op, "cu_seqlens_q must have shape [batch + 1], got [0]");
  check_int32(segments, op, "segments", "[num_segments, 4]", {kAny, 4});
  check_int32(cu_segments, op, "cu_segments", "[batch + 1]", {cu_seqlens_q.numel()});
  Layout layout{int32_data(cu_seqlens_q),
                reinterpret_cast<const Segment*>(segments.const_data_ptr()),
                int32_data(cu_segments),
                narrow_size(cu_seqlens_q.numel() - 1, op, "batch"),
                narrow_size(rows, op, "number of query rows"),
                narrow_size(segments.size(0), op, "number of segments")};
  const LayoutCheck check = check_layout(layout);
  if (check.error == LayoutError::kNone) return layout;
  const int32_t i = check.index;
  if (check.error == LayoutError::kSequenceRows)
    fail(op, "cu_seqlens_q[", i, "] = ", layout.cu_seqlens_q[i], ": ", layout_rule(check.error), " (", rows, ")");
  if (check.error == LayoutError::kSequenceSegments)
    fail(op, "cu_segments[", i, "] = ", layout.cu_segments[i], ": ", layout_rule(check.error), " (",
         layout.num_segments, ")");
  const Segment s = layout.segments[i];
  fail(op, "segments[", i, "] = (start ", s.start, ", length ", s.length, ", parent ", s.parent, ", visible ",
       s.visible, "): ", layout_rule(check.error));
}

}  // namespace jacobi::ops
