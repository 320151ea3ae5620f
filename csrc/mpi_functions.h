// Calls functions of the MPI library that the process has loaded, by their addresses.
//
// MPI libraries differ in their ABI: handles are ints (MPICH) or pointers (Open MPI), and a status
// has its error at different offsets. The caller passes these facts, so no MPI header is needed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace wfbp {

// An error code that the library has returned.
struct MpiError : std::runtime_error {
  explicit MpiError(int code)
      : std::runtime_error("MPI error " + std::to_string(code)), code(code) {}
  int code;
};

struct MpiAddresses {
  std::uintptr_t isend, irecv, testsome;
  std::uintptr_t byte;       // the handle of MPI_BYTE
  std::size_t status_bytes;  // size of an MPI_Status
  std::size_t error_at;      // offset of its error
  int success;               // the value of MPI_SUCCESS
};

template <class Handle>
Handle handle_of(std::uintptr_t value) {
  Handle handle;
  static_assert(sizeof(Handle) <= sizeof value, "a handle is an int or a pointer");
  if constexpr (sizeof(Handle) == sizeof value) {
    std::memcpy(&handle, &value, sizeof handle);
  } else {
    const auto narrow = static_cast<std::uint32_t>(value);
    std::memcpy(&handle, &narrow, sizeof handle);
  }
  return handle;
}

template <class Handle>
class MpiFunctions {
 public:
  explicit MpiFunctions(const MpiAddresses& addresses)
      : addresses_(addresses),
        byte_(handle_of<Handle>(addresses.byte)),
        isend_(reinterpret_cast<Isend>(addresses.isend)),
        irecv_(reinterpret_cast<Irecv>(addresses.irecv)),
        testsome_(reinterpret_cast<Testsome>(addresses.testsome)) {}

  Handle send(const std::uint8_t* data, int nbytes, int peer, int tag, Handle comm) const {
    Handle request;
    check(isend_(data, nbytes, byte_, peer, tag, comm, &request));
    return request;
  }

  Handle receive(std::uint8_t* data, int nbytes, int peer, int tag, Handle comm) const {
    Handle request;
    check(irecv_(data, nbytes, byte_, peer, tag, comm, &request));
    return request;
  }

  // Returns the number of requests that have completed and lists them in `indices`. Throws
  // MpiError.
  int test(std::vector<Handle>& requests, std::vector<int>& indices) {
    const std::size_t size = requests.size();
    indices.resize(size);
    statuses_.assign(size * addresses_.status_bytes, 0);
    int found = 0;
    const int code = testsome_(static_cast<int>(size), requests.data(), &found, indices.data(),
                               statuses_.data());
    if (code != addresses_.success) check(first_error(code, found));
    if (found < 0 || found > static_cast<int>(size)) {
      // MPI_UNDEFINED means that no request is active, although none of these was seen to end.
      throw std::runtime_error("MPI no longer knows " + std::to_string(size) +
                               " messages under way");
    }
    return found;
  }

 private:
  using Isend = int (*)(const void*, int, Handle, int, int, Handle, Handle*);
  using Irecv = int (*)(void*, int, Handle, int, int, Handle, Handle*);
  using Testsome = int (*)(int, Handle*, int*, int*, void*);

  // The first error among the statuses, or the call's error if no status has one.
  int first_error(int code, int found) const {
    const auto end = std::min(statuses_.size(), found * addresses_.status_bytes);
    for (std::size_t at = 0; found > 0 && at < end; at += addresses_.status_bytes) {
      int error = addresses_.success;
      std::memcpy(&error, statuses_.data() + at + addresses_.error_at, sizeof error);
      if (error != addresses_.success) return error;
    }
    return code;
  }

  void check(int code) const {
    if (code != addresses_.success) throw MpiError(code);
  }

  MpiAddresses addresses_;
  Handle byte_;
  Isend isend_;
  Irecv irecv_;
  Testsome testsome_;
  std::vector<std::uint8_t> statuses_;
};

}  // namespace wfbp
