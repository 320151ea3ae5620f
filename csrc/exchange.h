// Exchanges: collectives in which every rank has a share, cut into chunks of messages.
//
// If contributions are combined, each rank gets those to its own share (a reduce-scatter). Then
// results may be sent to all (an all-gather). A chunk has a part of every rank's share, so that all
// ranks work all the time. If every rank is an agent and shares do not overlap, both stages
// together send 2 (n - 1) / n of the bytes per rank, like a ring, in two steps.
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

// Memory that is not initialized.
struct Block {
  std::unique_ptr<std::uint8_t[]> data;
  std::size_t nbytes = 0;
};

// Blocks that are free; the last one that was used is the first to be used again.
class Scratch {
 public:
  Block take(std::size_t nbytes) {
    for (std::size_t k = free_.size(); k-- > 0;) {
      if (free_[k].nbytes < nbytes) continue;
      Block found = std::move(free_[k]);
      free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(k));
      return found;
    }
    // In place of one that is too small, so that there are no more than were in use at once.
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

// Contributions to one piece of memory, and where they are combined.
struct Piece {
  std::vector<const std::uint8_t*> contributions;
  std::uint8_t* result;
  std::size_t count;
};

// Messages of one tag, then perhaps a reduction of what has arrived, then perhaps more messages.
struct Transfer {
  std::uintptr_t comm;
  int tag;
  std::vector<Message> messages;
  Reduction reduction;
  std::vector<Piece> pieces;
  std::vector<Message> then;  // under the tag behind `tag`

  std::size_t missing = 0;  // messages of this stage under way
  std::size_t ended = 0;    // messages that have ended
  bool last_stage = false;
  bool done = false;

  // Of a chunk of an exchange.
  std::shared_ptr<Exchange> exchange;
  Block scratch;  // what arrives
  std::size_t nbytes = 0;
};

// Consecutive arrays that replace one buffer.
struct Arrays {
  struct Array {
    std::size_t start;  // its first element's number in the buffer
    std::uint8_t* data;
    std::size_t count;
  };
  std::vector<Array> arrays;

  // Calls act(data, count) for each piece of these elements.
  template <class Act>
  void between(std::size_t first, std::size_t last, std::size_t item, Act act) const {
    auto at = std::upper_bound(arrays.begin(), arrays.end(), first,
                               [](std::size_t value, const Array& a) { return value < a.start; });
    if (at != arrays.begin()) --at;
    for (; at != arrays.end() && at->start < last; ++at) {
      const std::size_t from = std::max(first, at->start);
      const std::size_t to = std::min(last, at->start + at->count);
      if (from < to) act(at->data + (from - at->start) * item, to - from);
    }
  }
};

// The elements for which a rank is responsible.
struct Share {
  int owner;
  std::size_t start, stop;
};

struct Window;

// One collective. Ranks agree on shares, tags and the places where arrays are cut.
struct Exchange {
  std::shared_ptr<Window> window;
  std::uintptr_t comm;
  std::vector<int> tags;  // one per chunk; its second stage has the tag after it
  int rank;
  std::vector<int> agents;    // contribute to this rank's share, in this order; it is one of them
  std::vector<Share> shares;  // in the order in which messages start
  Arrays sources;             // this rank's contributions; empty if nothing is combined
  Arrays results;             // one array, if anything is
  bool gathers;               // every rank gets all results
  Reduction reduction;

  std::size_t num_started = 0, num_over = 0;  // chunks
  std::size_t ended = 0;                      // messages
  bool done = false;

  std::size_t first(const Share& share, std::size_t chunk) const {
    return share.start + (share.stop - share.start) * chunk / tags.size();
  }

  std::size_t chunk_bytes(std::size_t chunk) const {
    std::size_t count = 0;
    for (const Share& share : shares) count += first(share, chunk + 1) - first(share, chunk);
    return count * reduction.item;
  }

  // Throw unless the chunks can be sent.
  void check() const {
    if (tags.empty()) throw std::invalid_argument("an exchange has no chunk");
    if (place_of_rank() == agents.size()) {
      throw std::invalid_argument("rank " + std::to_string(rank) + " is no agent");
    }
    if (!sources.arrays.empty() && results.arrays.size() != 1) {
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

  // Count a chunk that is over; whether that was the last one.
  bool end_chunk() { return done = ++num_over == tags.size(); }

  std::shared_ptr<Transfer> next(Scratch& scratch) {
    const std::size_t chunk = num_started++;
    auto made = std::make_shared<Transfer>();
    made->comm = comm;
    made->tag = tags[chunk];
    made->reduction = reduction;
    made->nbytes = chunk_bytes(chunk);
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

 private:
  // The other agents, the next one first: ranks start with different ones.
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

  // Contributions to this rank's own share, and where they are combined.
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

// Which chunks may be under way: those of one communicator, which start in order on every rank.
struct Window {
  std::size_t most_bytes, most_chunks;
  std::size_t bytes = 0, chunks = 0;  // under way
  std::deque<std::shared_ptr<Exchange>> waiting{};

  bool has_room() const {
    if (waiting.empty()) return false;
    const Exchange& next = *waiting.front();
    return chunks == 0 ||
           (chunks < most_chunks && bytes + next.chunk_bytes(next.num_started) <= most_bytes);
  }

  // Count a chunk of the first exchange that waits.
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
