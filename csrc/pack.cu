// Packing on the device. One launch copies all tensors of a group to or from their slots in a
// fusion buffer, and can change the type of their elements.
//
// The sizes of tensors differ by a factor of a million. To balance the load, each block therefore
// gets a tile, a piece of a tensor of at most some kilobytes. A table of tiles is made once per
// plan. The tensors' addresses change from step to step. They are passed as arguments of the
// launch, in constant memory, so nothing is uploaded, and each captured graph keeps the addresses
// it was captured with.
//
// A tile is copied in words of 16 bytes if source and target have the same alignment, else in
// narrower ones. Each thread loads several words before it stores the first, to hide latency.
//
// This file includes nothing, because NVRTC compiles it on the machine where the package runs. A
// test compiles it as C++ (WFBP_ON_HOST) and checks every memory access through WFBP_ACCESS.

#ifndef WFBP_ACCESS
#define WFBP_ACCESS(address, bytes, alignment, writes)
#endif

namespace wfbp {

typedef unsigned char Byte;
typedef unsigned long long Address;

constexpr unsigned kThreads = 256;
constexpr unsigned kUnroll = 4;
constexpr unsigned kWord = 16;
constexpr unsigned kCapacity = 504;

struct Tile {
  unsigned long long in_buffer;  // bytes from the start of the fusion buffer
  unsigned long long in_tensor;  // bytes from the start of the tensor
  unsigned slot;                 // index into Arguments::tensors
  unsigned count;                // number of elements
};

struct Arguments {
  const Tile* tiles;  // one per block
  Byte* buffer;
  int packs;           // 1: tensors to buffer; 0: buffer to tensors
  unsigned item;       // bytes per element; only the copy kernel reads it
  Byte* tensors[kCapacity];  // null: zeros are packed, and nothing is unpacked
};

// Every device accepts 4 KB of arguments. wfbp/cuda/pack.py must describe the same layout.
static_assert(sizeof(Tile) == 24 && sizeof(Arguments) == 24 + 8 * kCapacity, "layout");
static_assert(sizeof(Arguments) <= 4096, "a launch takes 4 KB of arguments");

// For each element type: its storage, and its conversion to float and back. Rounding is to nearest,
// ties to even. Nothing flushes subnormal numbers to zero: CuPy makes the compiler do that in
// arithmetic, but this does not affect inline assembly.

struct Float32 {
  typedef float Stored;
  static __device__ float value(float stored) { return stored; }
  static __device__ float stored(float value) { return value; }
};

struct Float16 {
  typedef unsigned short Stored;
#ifdef WFBP_ON_HOST
  static float value(Stored stored) { return float16_to_float(stored); }
  static Stored stored(float value) { return float_to_float16(value); }
#else
  static __device__ float value(Stored stored) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(stored));
    return value;
  }
  static __device__ Stored stored(float value) {
    Stored stored;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(stored) : "f"(value));
    return stored;
  }
#endif
};

struct BFloat16 {
  typedef unsigned short Stored;
  static __device__ float value(Stored stored) {
    return __uint_as_float(static_cast<unsigned>(stored) << 16);
  }
  static __device__ Stored stored(float value) {
    const unsigned bits = __float_as_uint(value);
    // Add half a unit of the last kept bit, minus 1 if that bit is 0, so that ties round to even.
    const unsigned rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const unsigned quiet = (bits >> 16) | 0x0040u;
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return static_cast<Stored>(is_nan ? quiet : rounded);
  }
};

// Elements that a thread loads or stores together, in words of at most 16 bytes.
template <class T, unsigned kLanes>
struct alignas(sizeof(T) * kLanes < kWord ? sizeof(T) * kLanes : kWord) Lanes {
  T at[kLanes];
};

// Access to aligned memory.
struct Whole {
  template <class L>
  static __device__ L load(const Byte* from) {
    WFBP_ACCESS(from, sizeof(L), alignof(L), false);
    return *reinterpret_cast<const L*>(from);
  }
  template <class L>
  static __device__ void store(Byte* to, const L& lanes) {
    WFBP_ACCESS(to, sizeof(L), alignof(L), true);
    *reinterpret_cast<L*>(to) = lanes;
  }
};

// Access to memory at any address.
struct Bytewise {
  template <class L>
  static __device__ L load(const Byte* from) {
    WFBP_ACCESS(from, sizeof(L), 1, false);
    L lanes;
#pragma unroll
    for (unsigned i = 0; i < sizeof(L); ++i) reinterpret_cast<Byte*>(&lanes)[i] = from[i];
    return lanes;
  }
  template <class L>
  static __device__ void store(Byte* to, const L& lanes) {
    WFBP_ACCESS(to, sizeof(L), 1, true);
#pragma unroll
    for (unsigned i = 0; i < sizeof(L); ++i) to[i] = reinterpret_cast<const Byte*>(&lanes)[i];
  }
};

// Operations on lanes between load and store.

template <class L>
struct Same {
  typedef L In;
  typedef L Out;
  __device__ L operator()(const L& in) const { return in; }
};

template <class From, class To, unsigned kLanes>
struct Cast {
  typedef Lanes<typename From::Stored, kLanes> In;
  typedef Lanes<typename To::Stored, kLanes> Out;
  __device__ Out operator()(const In& in) const {
    Out out;
#pragma unroll
    for (unsigned i = 0; i < kLanes; ++i) out.at[i] = To::stored(From::value(in.at[i]));
    return out;
  }
};

__device__ inline unsigned misalignment(const Byte* pointer, unsigned to) {
  return static_cast<unsigned>(reinterpret_cast<Address>(pointer)) & (to - 1);
}

// The threads of a block together convert `steps` consecutive Way::In at `from` to Way::Out at
// `to`. A thread stores only to places that it has loaded before, so both may be the same memory.
template <class Access, class Way>
__device__ void sweep(const Byte* from, Byte* to, unsigned steps, Way way) {
  typedef typename Way::In In;
  typedef typename Way::Out Out;
  for (unsigned first = threadIdx.x; first < steps; first += kThreads * kUnroll) {
    In in[kUnroll];
#pragma unroll
    for (unsigned i = 0; i < kUnroll; ++i) {
      const unsigned step = first + i * kThreads;
      if (step < steps) in[i] = Access::template load<In>(from + step * sizeof(In));
    }
#pragma unroll
    for (unsigned i = 0; i < kUnroll; ++i) {
      const unsigned step = first + i * kThreads;
      if (step < steps) Access::store(to + step * sizeof(Out), way(in[i]));
    }
  }
}

// Copies single bytes up to a multiple of L's size, then whole Ls, then the remaining bytes.
template <class L>
__device__ void copy_by(const Byte* from, Byte* to, unsigned bytes) {
  const unsigned misaligned = misalignment(to, sizeof(L));
  const unsigned before = misaligned == 0 ? 0 : sizeof(L) - misaligned;
  const unsigned head = before < bytes ? before : bytes;
  const unsigned steps = (bytes - head) / sizeof(L);
  const unsigned body = head + steps * sizeof(L);
  sweep<Whole>(from, to, head, Same<Byte>());
  sweep<Whole>(from + head, to + head, steps, Same<L>());
  sweep<Whole>(from + body, to + body, bytes - body, Same<Byte>());
}

__device__ inline void copy(const Byte* from, Byte* to, unsigned bytes) {
  if (from == to) return;
  const Address differ = reinterpret_cast<Address>(from) ^ reinterpret_cast<Address>(to);
  if (differ % 16 == 0) {
    copy_by<Lanes<unsigned, 4>>(from, to, bytes);
  } else if (differ % 8 == 0) {
    copy_by<Lanes<unsigned, 2>>(from, to, bytes);
  } else if (differ % 4 == 0) {
    copy_by<unsigned>(from, to, bytes);
  } else if (differ % 2 == 0) {
    copy_by<unsigned short>(from, to, bytes);
  } else {
    copy_by<Byte>(from, to, bytes);
  }
}

__device__ inline void zero(Byte* to, unsigned bytes) {
  const unsigned misaligned = misalignment(to, kWord);
  const unsigned before = misaligned == 0 ? 0 : kWord - misaligned;
  const unsigned head = before < bytes ? before : bytes;
  const unsigned body = bytes - (bytes - head) % kWord;
  const Lanes<unsigned, 4> zeros = {};
  if (threadIdx.x < head) Whole::store(to + threadIdx.x, Byte(0));
  for (unsigned i = head + threadIdx.x * kWord; i < body; i += kThreads * kWord) {
    Whole::store(to + i, zeros);
  }
  if (threadIdx.x < bytes - body) Whole::store(to + body + threadIdx.x, Byte(0));
}

template <class From, class To>
__device__ void convert(const Byte* from, Byte* to, unsigned count) {
  constexpr unsigned kFrom = sizeof(typename From::Stored);
  constexpr unsigned kTo = sizeof(typename To::Stored);
  constexpr unsigned kNarrow = kFrom < kTo ? kFrom : kTo;
  constexpr unsigned kLanes = kWord / kNarrow;
  const Cast<From, To, 1> one = {};
  const Cast<From, To, kLanes> many = {};
  if (misalignment(from, kFrom) != 0 || misalignment(to, kTo) != 0) {
    sweep<Bytewise>(from, to, count, one);
    return;
  }
  // Align the narrower side, which has fewer elements at which a 16-byte word can begin.
  const unsigned misaligned = misalignment(kFrom < kTo ? from : to, kWord);
  const unsigned before = misaligned == 0 ? 0 : (kWord - misaligned) / kNarrow;
  const unsigned head = before < count ? before : count;
  if (misalignment(from + head * kFrom, kWord) != 0 || misalignment(to + head * kTo, kWord) != 0) {
    sweep<Whole>(from, to, count, one);
    return;
  }
  const unsigned steps = (count - head) / kLanes;
  const unsigned body = head + steps * kLanes;
  sweep<Whole>(from, to, head, one);
  sweep<Whole>(from + head * kFrom, to + head * kTo, steps, many);
  sweep<Whole>(from + body * kFrom, to + body * kTo, count - body, one);
}

struct Ends {
  const Byte* from;  // null: write zeros
  Byte* to;          // null: write nothing
};

__device__ inline Ends ends(const Arguments& arguments, const Tile& tile) {
  Byte* const tensor = arguments.tensors[tile.slot];
  Byte* const in_tensor = tensor == nullptr ? nullptr : tensor + tile.in_tensor;
  Byte* const in_buffer = arguments.buffer + tile.in_buffer;
  return arguments.packs ? Ends{in_tensor, in_buffer} : Ends{in_buffer, in_tensor};
}

}  // namespace wfbp

// One kernel per pair of element types, named wfbp_FROM_TO, and wfbp_copy for copies of any type.
#define WFBP_CONVERSIONS(X)                                                 \
  X(float32_float16, Float32, Float16) X(float16_float32, Float16, Float32) \
  X(float32_bfloat16, Float32, BFloat16) X(bfloat16_float32, BFloat16, Float32)

#define WFBP_KERNEL(name) \
  extern "C" __global__ void __launch_bounds__(wfbp::kThreads) wfbp_##name

#define WFBP_CONVERSION(name, From, To)                                  \
  WFBP_KERNEL(name)(const __grid_constant__ wfbp::Arguments arguments) { \
    const wfbp::Tile tile = arguments.tiles[blockIdx.x];                 \
    const wfbp::Ends ends = wfbp::ends(arguments, tile);                 \
    if (ends.to == nullptr) return;                                      \
    if (ends.from == nullptr) {                                          \
      wfbp::zero(ends.to, tile.count * sizeof(wfbp::To::Stored));        \
    } else {                                                             \
      wfbp::convert<wfbp::From, wfbp::To>(ends.from, ends.to, tile.count); \
    }                                                                    \
  }

WFBP_CONVERSIONS(WFBP_CONVERSION)

WFBP_KERNEL(copy)(const __grid_constant__ wfbp::Arguments arguments) {
  const wfbp::Tile tile = arguments.tiles[blockIdx.x];
  const wfbp::Ends ends = wfbp::ends(arguments, tile);
  if (ends.to == nullptr) return;
  if (ends.from == nullptr) {
    wfbp::zero(ends.to, tile.count * arguments.item);
  } else {
    wfbp::copy(ends.from, ends.to, tile.count * arguments.item);
  }
}
