// A file of named arrays: char name[32], int64 bytes, then the bytes, until its end. Each array is a heap block of
// exactly its size, so that AddressSanitizer knows where it ends.
#pragma once

#include <cstdint>
#include <fstream>
#include <map>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

struct Block {
  struct Free {
    void operator()(char* data) const { ::operator delete[](data, std::align_val_t{64}); }
  };
  explicit Block(int64_t size) : bytes(size), data(static_cast<char*>(::operator new[](size, std::align_val_t{64}))) {}

  int64_t bytes;
  std::unique_ptr<char, Free> data;
};

class Records {
 public:
  explicit Records(const char* path) {
    std::ifstream file(path, std::ios::binary);
    char name[33] = {};
    int64_t bytes;
    while (file.read(name, 32) && file.read(reinterpret_cast<char*>(&bytes), sizeof bytes)) {
      Block& block = blocks_.emplace(name, bytes).first->second;
      if (!file.read(block.data.get(), bytes)) throw std::runtime_error(std::string(path) + " ends within " + name);
    }
  }

  // Null when there is none of this name.
  template <class T>
  T* data(const char* name) const {
    const auto found = blocks_.find(name);
    return found == blocks_.end() ? nullptr : reinterpret_cast<T*>(found->second.data.get());
  }

  template <class T>
  int64_t count(const char* name) const {
    const auto found = blocks_.find(name);
    return found == blocks_.end() ? 0 : found->second.bytes / static_cast<int64_t>(sizeof(T));
  }

  // An array of one value.
  template <class T>
  T value(const char* name) const {
    if (count<T>(name) != 1) throw std::runtime_error(std::string("the state must hold one value ") + name);
    return *data<T>(name);
  }

 private:
  std::map<std::string, Block> blocks_;
};
