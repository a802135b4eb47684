// Scratch memory handed out in order from one block that the caller owns. With no block it only counts, so that the
// same code tells how large the block must be.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace jacobi::cpu {

class Arena {
 public:
  Arena(void* base, size_t size) : base_(static_cast<char*>(base)), size_(size) {}

  // `count` uninitialised values, 64-byte aligned when the block is; null while counting or when the block is too
  // small.
  template <class T>
  T* take(int64_t count) {
    const size_t begin = used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return base_ == nullptr || used_ > size_ ? nullptr : reinterpret_cast<T*>(base_ + begin);
  }
  size_t used() const { return used_; }
  bool overflowed() const { return base_ != nullptr && used_ > size_; }

 private:
  char* base_;
  size_t size_, used_ = 0;
};

}  // namespace jacobi::cpu
