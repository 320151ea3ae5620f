// Exchanges: collectives over direct messages, cut into chunks, in which each rank owns a share.
//
// An exchange has up to two stages. In a reduce-scatter, each rank receives the contributions to
// its share and combines them. In an all-gather, each rank sends its result to the others. Each
// chunk contains a part of every rank's share, so that all ranks have work all the time. If every
// rank is an agent and shares do not overlap, the two stages send 2 (n - 1) / n of the bytes per
// rank, as a ring does, but in two steps.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"

namespace wfbp {

// Uninitialized memory.
struct Block {
  std::unique_ptr<std::uint8_t[]> data;
  std::size_t nbytes = 0;
};

// Free blocks. The most recently used one is reused first, because caches may still hold it.
class Scratch {
 public:
  Block take(std::size_t nbytes) {
    for (std::size_t k = free_.size(); k-- > 0;) {
      if (free_[k].nbytes < nbytes) continue;
      Block found = std::move(free_[k]);
      free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(k));
      return found;
    }
    // Replace a block that is too small, so that the blocks never outnumber those in use at once.
    if (!free_.empty()) free_.erase(free_.begin());
    return {std::unique_ptr<std::uint8_t[]>(new std::uint8_t[nbytes]), nbytes};
  }

  void give(Block block) {
    if (block.data) free_.push_back(std::move(block));
  }

 private:
  std::vector<Block> free_;
};

struct Exchange;

struct Message {
  std::uint8_t* data;
  int nbytes;
  int peer;
  bool incoming;
};

// The contributions to one result, and the memory for it.
struct Piece {
  std::vector<const std::uint8_t*> contributions;
  std::uint8_t* result;
  std::size_t count;
};

// Messages with one tag. Once they have ended, received data may be reduced, and a second stage of
// messages may follow.
struct Transfer {
  std::uintptr_t comm;
  int tag;
  std::vector<Message> messages;
  Reduction reduction;
  std::vector<Piece> pieces;
  std::vector<Message> then;  // the second stage, with tag + 1

  std::size_t missing = 0;  // messages of this stage that are under way
  std::size_t ended = 0;    // messages that have ended, in both stages
  bool last_stage = false;
  bool done = false;

  // Set if this transfer is a chunk of an exchange.
  std::shared_ptr<Exchange> exchange;
  std::size_t chunk = 0;
  Block scratch;  // holds the other agents' contributions, or all messages if the chunk is coded
  std::size_t nbytes = 0;
};

// Calls act(item, from, to) for each item that overlaps elements `first` to `last`; `from` and `to`
// bound the overlap. The items are in ascending order.
template <class Item, class Act>
void overlapping(const std::vector<Item>& items, std::size_t first, std::size_t last, Act act) {
  auto at = std::upper_bound(items.begin(), items.end(), first,
                             [](std::size_t value, const Item& item) { return value < item.start; });
  if (at != items.begin()) --at;
  for (; at != items.end() && at->start < last; ++at) {
    const std::size_t from = std::max(first, at->start);
    const std::size_t to = std::min(last, at->start + at->count);
    if (from < to) act(*at, from, to);
  }
}

// Arrays that together form one logical buffer, in ascending order of their starts.
struct Arrays {
  struct Array {
    std::size_t start;  // index of its first element in the buffer
    std::uint8_t* data;
    std::size_t count;
  };
  std::vector<Array> arrays;

  // Calls act(data, count) for each contiguous piece of the elements from `first` to `last`.
  template <class Act>
  void between(std::size_t first, std::size_t last, std::size_t item, Act act) const {
    overlapping(arrays, first, last, [&](const Array& array, std::size_t from, std::size_t to) {
      act(array.data + (from - array.start) * item, to - from);
    });
  }

  // The address of an element that is in one of the arrays.
  std::uint8_t* at(std::size_t index, std::size_t item) const {
    std::uint8_t* found = nullptr;
    between(index, index + 1, item, [&](std::uint8_t* data, std::size_t) { found = data; });
    return found;
  }
};

// Consecutive elements of one tensor that a coded exchange encodes, from a multiple of kCodecBlock
// on. Either error may be null.
struct Part {
  std::size_t start, count;
  std::uint8_t* error;      // rounding error of this rank's contribution
  std::uint8_t* sum_error;  // of the sum, if this rank owns it
};

struct Coding {
  Codec codec;
  std::vector<Part> parts;  // in ascending order

  // Calls act(part, offset, count) for each contiguous piece of the elements from `first` to
  // `last`, where the piece begins `offset` elements after its part.
  template <class Act>
  void between(std::size_t first, std::size_t last, Act act) const {
    overlapping(parts, first, last, [&](const Part& part, std::size_t from, std::size_t to) {
      act(part, from - part.start, to - from);
    });
  }

  std::size_t wire_bytes(std::size_t first, std::size_t last) const {
    std::size_t total = 0;
    between(first, last, [&](const Part&, std::size_t, std::size_t count) {
      total += codec.wire_bytes(count);
    });
    return total;
  }
};

// The elements that a rank owns: it combines them, or contributes them to an all-gather.
struct Share {
  int owner;
  std::size_t start, stop;
};

struct Window;

// One collective. Shares, tags and the boundaries of arrays must be equal on all ranks.
struct Exchange {
  std::shared_ptr<Window> window;
  std::uintptr_t comm;
  std::vector<int> tags;  // one per chunk, whose second stage uses tag + 1
  int rank;
  std::vector<int> agents;    // contribute to this rank's share, in this order; includes this rank
  std::vector<Share> shares;  // in the order in which their messages start
  Arrays sources;             // this rank's contributions; empty in a plain all-gather
  Arrays results;             // a single array if contributions are combined as they are
  bool gathers;               // whether the all-gather stage follows
  Reduction reduction;
  std::shared_ptr<const Coding> coding;  // if contributions and sums are sent encoded

  std::size_t num_started = 0, num_over = 0;  // chunks
  std::size_t ended = 0;                      // messages
  bool done = false;

  std::size_t first(const Share& share, std::size_t chunk) const {
    std::size_t offset = (share.stop - share.start) * chunk / tags.size();
    if (coding && chunk < tags.size()) offset -= offset % kCodecBlock;
    return share.start + offset;
  }

  std::size_t chunk_bytes(std::size_t chunk) const {
    std::size_t count = 0;
    if (coding) {
      for (const Share& share : shares) count += wire_bytes(share, chunk);
      return count;
    }
    for (const Share& share : shares) count += first(share, chunk + 1) - first(share, chunk);
    return count * reduction.item;
  }

  // Throws if the arguments do not describe an exchange that MPI can send.
  void check() const {
    if (tags.empty()) throw std::invalid_argument("an exchange has no chunk");
    if (place_of_rank() == agents.size()) {
      throw std::invalid_argument("rank " + std::to_string(rank) + " is no agent");
    }
    if (coding && (sources.arrays.empty() || agents.size() < 2 || reduction.item != 4)) {
      throw std::invalid_argument("what is encoded must be float32, and combined by two agents");
    }
    if (!coding && !sources.arrays.empty() && results.arrays.size() != 1) {
      throw std::invalid_argument("what is combined needs one array of results, found " +
                                  std::to_string(results.arrays.size()));
    }
    for (const Share& share : shares) {
      const std::size_t most = (share.stop - share.start) / tags.size() + 1;
      if (most > std::numeric_limits<int>::max() / reduction.item) {
        throw std::invalid_argument("messages of " + std::to_string(most) +
                                    " elements are longer than MPI can count");
      }
    }
  }

  // Counts a chunk that has ended. Returns whether it was the last one.
  bool end_chunk() { return done = ++num_over == tags.size(); }

  std::shared_ptr<Transfer> next(Scratch& scratch) {
    const std::size_t chunk = num_started++;
    auto made = std::make_shared<Transfer>();
    made->comm = comm;
    made->tag = tags[chunk];
    made->reduction = reduction;
    made->chunk = chunk;
    made->nbytes = chunk_bytes(chunk);
    if (coding) {
      encode(*made, scratch);
      return made;
    }
    if (!sources.arrays.empty()) {
      for (const Share& share : shares) {
        if (share.owner == rank) receive(share, chunk, *made, scratch);
      }
      for (const Share& share : shares) {
        if (share.owner != rank) {
          add(sources, share, chunk, share.owner, false, made->messages);
        }
      }
    }
    if (gathers) {
      std::vector<Message>& messages = sources.arrays.empty() ? made->messages : made->then;
      for (const Share& share : shares) {
        if (share.owner != rank) {
          add(results, share, chunk, share.owner, true, messages);
          continue;
        }
        for (const int agent : others()) add(results, share, chunk, agent, false, messages);
      }
    }
    return made;
  }

  // Called when the contributions to a coded chunk have arrived. Adds them in the agents' order and
  // encodes the sum over the first one that arrived. Every rank, including this one, uses the
  // decoded sum.
  void combine(const Transfer& chunk) const {
    constexpr std::size_t item = sizeof(float);
    const std::size_t own_place = place_of_rank();
    for (const Share& share : shares) {
      if (share.owner != rank) continue;
      const std::size_t nbytes = wire_bytes(share, chunk.chunk);
      std::uint8_t* wire = chunk.scratch.data.get();
      pieces_of(share, chunk.chunk, [&](const Part& part, std::size_t offset, std::size_t count) {
        const std::uint8_t* own = sources.at(part.start + offset, item);
        std::uint8_t* result = results.at(part.start + offset, item);
        std::uint8_t* error = part.sum_error;
        if (error != nullptr) error += offset * item;
        for (std::size_t start = 0; start < count; start += kCodecBlock) {
          const std::size_t length = std::min(kCodecBlock, count - start);
          float sum[kCodecBlock] = {};
          auto* bytes = reinterpret_cast<std::uint8_t*>(sum);
          for (std::size_t place = 0; place < agents.size(); ++place) {
            if (place == own_place) {
              add_plain(own + start * item, sum, length, place == 0);
            } else {
              const std::size_t order = (place + agents.size() - own_place - 1) % agents.size();
              const std::uint8_t* arrived = wire + order * nbytes;
              (place == 0 ? coding->codec.decode : coding->codec.add)(arrived, bytes, length);
            }
          }
          coding->codec.divide(sum, length, reduction.divisor);
          coding->codec.encode(bytes, error == nullptr ? nullptr : error + start * item, wire,
                              result + start * item, length);
          wire += coding->codec.wire_bytes(length);
        }
      });
    }
  }

  // The sums of a coded chunk have arrived.
  void decode(const Transfer& chunk) const {
    const std::uint8_t* wire = chunk.scratch.data.get();
    for (const Share& share : shares) {
      if (share.owner == rank) wire += wire_bytes(share, chunk.chunk) * (agents.size() - 1);
    }
    for (const Share& share : shares) {
      if (share.owner == rank) continue;
      pieces_of(share, chunk.chunk, [&](const Part& part, std::size_t offset, std::size_t count) {
        coding->codec.decode(wire, results.at(part.start + offset, sizeof(float)), count);
        wire += coding->codec.wire_bytes(count);
      });
    }
  }

 private:
  std::size_t wire_bytes(const Share& share, std::size_t chunk) const {
    return coding->wire_bytes(first(share, chunk), first(share, chunk + 1));
  }

  template <class Act>
  void pieces_of(const Share& share, std::size_t chunk, Act act) const {
    coding->between(first(share, chunk), first(share, chunk + 1), act);
  }

  static void add_plain(const std::uint8_t* from, float* sum, std::size_t count, bool is_first) {
    for (std::size_t i = 0; i < count; ++i) {
      float value;
      std::memcpy(&value, from + i * sizeof(float), sizeof(float));
      sum[i] = is_first ? value : sum[i] + value;
    }
  }

  // Encodes this rank's contributions to a chunk and adds the messages. The scratch memory holds,
  // per agent, its contribution to this rank's share, and then what this rank sends to the others,
  // which their sums overwrite.
  void encode(Transfer& made, Scratch& scratch) const {
    std::size_t own = 0, total = 0;
    for (const Share& share : shares) {
      const std::size_t nbytes = wire_bytes(share, made.chunk);
      if (share.owner == rank) own = nbytes;
      total += share.owner == rank ? nbytes * (agents.size() - 1) : nbytes;
    }
    if (total == 0) return;
    made.scratch = scratch.take(total);
    std::uint8_t* wire = made.scratch.data.get();
    if (own != 0) {
      std::uint8_t* sum = wire;
      for (const int agent : others()) {
        made.messages.push_back({wire, static_cast<int>(own), agent, true});
        if (gathers) made.then.push_back({sum, static_cast<int>(own), agent, false});
        wire += own;
      }
    }
    for (const Share& share : shares) {
      if (share.owner == rank) continue;
      std::uint8_t* begin = wire;
      pieces_of(share, made.chunk, [&](const Part& part, std::size_t offset, std::size_t count) {
        constexpr std::size_t item = sizeof(float);
        std::uint8_t* error = part.error;
        if (error != nullptr) error += offset * item;
        coding->codec.encode(sources.at(part.start + offset, item), error, wire, nullptr, count);
        wire += coding->codec.wire_bytes(count);
      });
      const auto nbytes = static_cast<int>(wire - begin);
      if (nbytes == 0) continue;
      made.messages.push_back({begin, nbytes, share.owner, false});
      if (gathers) made.then.push_back({begin, nbytes, share.owner, true});
    }
  }

  // The other agents, from the next one on, so that ranks do not all begin with the same one.
  std::vector<int> others() const {
    const auto own = agents.begin() + static_cast<std::ptrdiff_t>(place_of_rank());
    std::vector<int> found(own + 1, agents.end());
    found.insert(found.end(), agents.begin(), own);
    return found;
  }

  std::size_t place_of_rank() const {
    return static_cast<std::size_t>(std::find(agents.begin(), agents.end(), rank) -
                                    agents.begin());
  }

  void add(const Arrays& arrays, const Share& share, std::size_t chunk, int peer, bool incoming,
           std::vector<Message>& messages) const {
    arrays.between(first(share, chunk), first(share, chunk + 1), reduction.item,
                   [&](std::uint8_t* data, std::size_t count) {
                     const auto nbytes = static_cast<int>(count * reduction.item);
                     messages.push_back({data, nbytes, peer, incoming});
                   });
  }

  // Adds this rank's own share: messages for the contributions of others, and pieces to combine.
  void receive(const Share& share, std::size_t chunk, Transfer& made, Scratch& scratch) const {
    const std::size_t item = reduction.item;
    const std::size_t begin = first(share, chunk), end = first(share, chunk + 1);
    const Arrays::Array& whole = results.arrays.front();
    std::uint8_t* result = whole.data + (begin - whole.start) * item;
    sources.between(begin, end, item, [&](std::uint8_t* data, std::size_t count) {
      made.pieces.push_back({{}, result, count});
      made.pieces.back().contributions.assign(agents.size(), data);
      result += count * item;
    });
    if (made.pieces.empty()) return;
    made.scratch = scratch.take((end - begin) * item * (agents.size() - 1));
    std::uint8_t* arriving = made.scratch.data.get();
    std::size_t place = place_of_rank();
    for (const int agent : others()) {
      place = (place + 1) % agents.size();
      for (Piece& piece : made.pieces) {
        const std::size_t nbytes = piece.count * item;
        piece.contributions[place] = arriving;
        made.messages.push_back({arriving, static_cast<int>(nbytes), agent, true});
        arriving += nbytes;
      }
    }
  }
};

// Limits the chunks under way on one communicator. Chunks start in the same order on every rank.
struct Window {
  std::size_t most_bytes, most_chunks;
  std::size_t bytes = 0, chunks = 0;  // under way now
  std::deque<std::shared_ptr<Exchange>> waiting{};

  bool has_room() const {
    if (waiting.empty()) return false;
    const Exchange& next = *waiting.front();
    return chunks == 0 ||
           (chunks < most_chunks && bytes + next.chunk_bytes(next.num_started) <= most_bytes);
  }

  // Counts a started chunk of the first waiting exchange, which leaves the queue with its last one.
  void add(const Transfer& chunk) {
    bytes += chunk.nbytes;
    ++chunks;
    if (waiting.front()->num_started == waiting.front()->tags.size()) waiting.pop_front();
  }

  void remove(const Transfer& chunk) {
    bytes -= chunk.nbytes;
    --chunks;
  }
};

}  // namespace wfbp
