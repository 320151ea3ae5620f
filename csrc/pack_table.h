// The slots of a fusion buffer, and the addresses of the tensors that are packed into them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"

namespace wfbp {

// An element type. Integers have no `multiply`, because fusion buffers only copy them.
struct Dtype {
  std::size_t item;
  Multiply multiply;
  Reducers reduce;
};

inline Dtype dtype_of(const std::string& name, const Kernels& kernels) {
  if (name == "float16") return {2, kernels.float16, kernels.reduce_float16};
  if (name == "bfloat16") return {2, kernels.bfloat16, kernels.reduce_bfloat16};
  if (name == "float32") return {4, kernels.float32, kernels.reduce_float32};
  if (name == "float64") return {8, kernels.float64, kernels.reduce_float64};
  if (name == "int32") return {4, nullptr, kernels.reduce_int32};
  if (name == "int64") return {8, nullptr, kernels.reduce_int64};
  if (name == "uint8") return {1, nullptr, kernels.reduce_uint8};
  throw std::invalid_argument("dtype '" + name + "' is not one of float16, bfloat16, float32, " +
                              "float64, int32, int64, uint8");
}

// The casts for tensors whose type differs from the buffer's; null if the types are equal.
inline Casts casts_of(const std::string& tensor, const std::string& buffer,
                      const Kernels& kernels) {
  if (tensor == buffer) return {nullptr, nullptr};
  if (tensor == "float32" && buffer == "float16") return kernels.float32_float16;
  if (tensor == "float32" && buffer == "bfloat16") return kernels.float32_bfloat16;
  if (tensor == "float64" && buffer == "float16") return kernels.float64_float16;
  if (tensor == "float64" && buffer == "bfloat16") return kernels.float64_bfloat16;
  throw std::invalid_argument("tensors of " + tensor + " cannot be packed as " + buffer +
                              ": only float32 and float64 can, as float16 or bfloat16");
}

inline Codec codec_of(const std::string& name, const Kernels& kernels) {
  if (name == "int8") return kernels.int8;
  if (name == "fp8") return kernels.fp8;
  if (name == "int4") return kernels.int4;
  throw std::invalid_argument("codec '" + name + "': expected int8, fp8 or int4");
}

// Packs a group's tensors into the destination, and back. The table has no lock: the threads that
// write `pointers` and that pack must alternate (the runtime posts a message in between).
class PackTable {
 public:
  PackTable(std::uint8_t* destination, std::int64_t capacity, std::vector<std::int64_t> offsets,
            std::vector<std::int64_t> sizes, const std::string& dtype,
            const std::string& tensor_dtype, const Kernels& kernels)
      : pointers(offsets.size(), 0),
        destination_(destination),
        offsets_(std::move(offsets)),
        sizes_(std::move(sizes)),
        dtype_(dtype_of(dtype, kernels)),
        casts_(casts_of(tensor_dtype.empty() ? dtype : tensor_dtype, dtype, kernels)),
        kernels_(kernels) {
    if (offsets_.size() != sizes_.size()) {
      throw std::invalid_argument(std::to_string(offsets_.size()) + " offsets but " +
                                  std::to_string(sizes_.size()) + " sizes");
    }
    for (std::size_t i = 0; i < offsets_.size(); ++i) {
      const std::int64_t offset = offsets_[i];
      const std::int64_t size = sizes_[i];
      // This avoids offset + size, which could overflow.
      if (offset < 0 || size < 0 || offset > capacity || size > capacity - offset) {
        throw std::invalid_argument("slot " + std::to_string(i) + " (offset " +
                                    std::to_string(offset) + ", " + std::to_string(size) +
                                    " bytes) is not inside the destination of " +
                                    std::to_string(capacity) + " bytes");
      }
      if (size % static_cast<std::int64_t>(dtype_.item) != 0) {
        throw std::invalid_argument("slot " + std::to_string(i) + " has " + std::to_string(size) +
                                    " bytes: not a whole number of " + dtype + " elements");
      }
      total_ += size;
    }
  }

  void pack() const {
    const bool past_caches = total_ >= kStreamFrom;
    for (std::size_t i = 0; i < offsets_.size(); ++i) {
      std::uint8_t* slot = destination_ + offsets_[i];
      const auto* source = address(i);
      const auto size = static_cast<std::size_t>(sizes_[i]);
      if (size == 0) continue;
      if (source == nullptr) {
        std::memset(slot, 0, size);
      } else if (casts_.narrow != nullptr) {
        casts_.narrow(source, slot, size / dtype_.item);
      } else if (source != slot) {
        copy(source, slot, size, past_caches);
      }
    }
    if (past_caches) kernels_.fence();
  }

  void unpack() const {
    const bool past_caches = total_ >= kStreamFrom;
    for (std::size_t i = 0; i < offsets_.size(); ++i) {
      const std::uint8_t* slot = destination_ + offsets_[i];
      auto* target = address(i);
      if (target == nullptr || target == slot || sizes_[i] == 0) continue;
      const auto size = static_cast<std::size_t>(sizes_[i]);
      if (casts_.widen != nullptr) {
        casts_.widen(slot, target, size / dtype_.item);
      } else {
        copy(slot, target, size, past_caches);
      }
    }
    if (past_caches) kernels_.fence();
  }

  std::vector<std::int64_t> pointers;  // never resized, because a Python array refers to it

 private:
  // Tables of at least this size bypass the caches (measured in docs/contributing/packing.md).
  static constexpr std::int64_t kStreamFrom = std::int64_t{32} << 20;
  static constexpr std::size_t kStreamPiece = std::size_t{64} << 10;

  std::uint8_t* address(std::size_t i) const {
    return reinterpret_cast<std::uint8_t*>(static_cast<std::uintptr_t>(pointers[i]));
  }

  void copy(const std::uint8_t* from, std::uint8_t* to, std::size_t size, bool past_caches) const {
    if (past_caches && size >= kStreamPiece) {
      kernels_.stream(from, to, size);
    } else {
      std::memcpy(to, from, size);
    }
  }

  std::uint8_t* destination_;
  std::vector<std::int64_t> offsets_;
  std::vector<std::int64_t> sizes_;
  Dtype dtype_;
  Casts casts_;
  Kernels kernels_;
  std::int64_t total_ = 0;
};

}  // namespace wfbp
