// Messages under way, which are all tested together. The thread that finds messages complete also
// reduces their data and starts the next messages. Only one thread at a time may use this.
//
// Nothing here owns the memory of messages. The caller that begins a transfer must keep it until
// the transfer is done or, after an error, as long as the process lives.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "exchange.h"
#include "mpi_functions.h"

namespace wfbp {

// Counters in shared memory that other processes increase. Reached once all of them, or any one,
// are at least `least`.
struct Watch {
  std::vector<const std::int64_t*> flags;
  std::int64_t least;
  bool any;

  bool reached() const {
    for (const std::int64_t* flag : flags) {
      if ((__atomic_load_n(flag, __ATOMIC_ACQUIRE) >= least) == any) return any;
    }
    return !any;
  }
};

inline bool any_reached(const std::vector<Watch>& watches) {
  return std::any_of(watches.begin(), watches.end(), [](const Watch& w) { return w.reached(); });
}

class Transfers {
 public:
  virtual ~Transfers() = default;

  // Starts a transfer's messages. After an error some of them may remain under way for ever.
  virtual void begin(std::shared_ptr<Transfer> transfer) = 0;

  // Starts an exchange's chunks as its window permits, after those of earlier exchanges.
  virtual void begin(std::shared_ptr<Exchange> exchange) = 0;

  // Adopts a request that was started elsewhere, such as a collective of the library.
  virtual void adopt(std::shared_ptr<Transfer> transfer, std::uintptr_t request) = 0;

  // Tests all messages, continues transfers whose stage has ended, and counts ended messages.
  virtual std::size_t progress() = 0;

  // Sleeps and tests alternately, every `nap_s` seconds, until a transfer is over, a watch is
  // reached or `most_s` seconds have passed. Returns how many messages ended.
  virtual std::size_t rest(double nap_s, double most_s, const std::vector<Watch>& watches) = 0;

  virtual bool idle() const = 0;

  // How many transfers and exchanges have ended so far.
  virtual std::size_t num_over() const = 0;
};

template <class Handle>
class TransfersOf final : public Transfers {
 public:
  explicit TransfersOf(const MpiAddresses& addresses) : mpi_(addresses) {}

  // Leaks transfers under way, because the library may still write to their scratch memory.
  ~TransfersOf() override {
    if (!requests_.empty()) new auto(std::move(owners_));
  }

  void begin(std::shared_ptr<Transfer> transfer) override {
    start(transfer, transfer->messages, transfer->tag);
    if (transfer->missing == 0) go_on(transfer);
  }

  void begin(std::shared_ptr<Exchange> exchange) override {
    const std::shared_ptr<Window> window = exchange->window;
    window->waiting.push_back(std::move(exchange));
    fill(*window);
  }

  void adopt(std::shared_ptr<Transfer> transfer, std::uintptr_t request) override {
    requests_.reserve(requests_.size() + 1);
    owners_.reserve(owners_.size() + 1);
    requests_.push_back(handle_of<Handle>(request));
    ++transfer->missing;
    owners_.push_back(std::move(transfer));
  }

  std::size_t progress() override {
    if (requests_.empty()) return 0;
    const auto ended = static_cast<std::size_t>(mpi_.test(requests_, indices_));
    if (ended == 0) return 0;
    ready_.clear();
    for (std::size_t k = 0; k < ended; ++k) {
      std::shared_ptr<Transfer>& owner = owners_.at(static_cast<std::size_t>(indices_[k]));
      if (!owner) throw std::runtime_error("MPI reports the end of one message twice");
      ++(owner->exchange ? owner->exchange->ended : owner->ended);
      if (--owner->missing == 0) ready_.push_back(owner);
      owner.reset();
    }
    forget_ended();
    for (const std::shared_ptr<Transfer>& transfer : ready_) go_on(transfer);
    ready_.clear();
    return ended;
  }

  std::size_t rest(double nap_s, double most_s, const std::vector<Watch>& watches) override {
    using clock = std::chrono::steady_clock;
    const std::chrono::duration<double> nap(nap_s);
    const clock::time_point end =
        clock::now() +
        std::chrono::duration_cast<clock::duration>(std::chrono::duration<double>(most_s));
    const std::size_t over = num_over_;
    std::size_t ended = 0;
    do {
      std::this_thread::sleep_for(nap);
      ended += progress();
    } while (num_over_ == over && !(requests_.empty() && watches.empty()) &&
             !any_reached(watches) && clock::now() < end);
    return ended;
  }

  bool idle() const override { return requests_.empty(); }

  std::size_t num_over() const override { return num_over_; }

 private:
  void start(const std::shared_ptr<Transfer>& transfer, const std::vector<Message>& messages,
             int tag) {
    // Reserve memory first: once a message is under way, running out of it would lose the request.
    requests_.reserve(requests_.size() + messages.size());
    owners_.reserve(owners_.size() + messages.size());
    const Handle comm = handle_of<Handle>(transfer->comm);
    for (const Message& message : messages) {
      requests_.push_back(
          message.incoming
              ? mpi_.receive(message.data, message.nbytes, message.peer, tag, comm)
              : mpi_.send(message.data, message.nbytes, message.peer, tag, comm));
      owners_.push_back(transfer);
      ++transfer->missing;
    }
  }

  // The transfer's stage has ended: reduce the data that has arrived, and start the next stage.
  void go_on(const std::shared_ptr<Transfer>& transfer) {
    if (!transfer->last_stage) {
      transfer->last_stage = true;
      for (const Piece& piece : transfer->pieces) {
        transfer->reduction.run(piece.contributions, piece.result, piece.count);
      }
      if (transfer->exchange && transfer->exchange->coding) transfer->exchange->combine(*transfer);
      start(transfer, transfer->then, transfer->tag + 1);
    }
    if (transfer->missing != 0) return;
    if (!transfer->then.empty() && transfer->exchange && transfer->exchange->coding) {
      transfer->exchange->decode(*transfer);
    }
    transfer->done = true;
    if (transfer->exchange) {
      end_chunk(*transfer);
    } else {
      ++num_over_;
    }
  }

  void fill(Window& window) {
    while (window.has_room()) {
      const std::shared_ptr<Exchange> exchange = window.waiting.front();
      std::shared_ptr<Transfer> chunk = exchange->next(scratch_);
      chunk->exchange = exchange;
      window.add(*chunk);
      begin(std::move(chunk));  // may end the chunk at once, and then calls fill() again
    }
  }

  void end_chunk(Transfer& chunk) {
    const std::shared_ptr<Exchange> exchange = std::move(chunk.exchange);
    scratch_.give(std::move(chunk.scratch));
    num_over_ += exchange->end_chunk();
    exchange->window->remove(chunk);
    fill(*exchange->window);
  }

  // Removes ended requests and keeps the order of the others, so that older ones are tested first.
  void forget_ended() {
    std::size_t kept = 0;
    for (std::size_t k = 0; k < owners_.size(); ++k) {
      if (!owners_[k]) continue;
      if (kept != k) {
        requests_[kept] = requests_[k];
        owners_[kept] = std::move(owners_[k]);
      }
      ++kept;
    }
    requests_.resize(kept);
    owners_.resize(kept);
  }

  MpiFunctions<Handle> mpi_;
  std::vector<Handle> requests_;
  std::vector<std::shared_ptr<Transfer>> owners_;  // the transfer of each request
  std::vector<std::shared_ptr<Transfer>> ready_;   // transfers whose stage has ended
  std::vector<int> indices_;
  Scratch scratch_;
  std::size_t num_over_ = 0;
};

}  // namespace wfbp
