// Python bindings of transfers: check arguments, release the GIL.
#include "transfers.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "native.h"
#include "pack_table.h"

namespace py = pybind11;

namespace {

// Transfers, and the exception type that is raised for error codes of their MPI library.
struct Face {
  std::unique_ptr<wfbp::Transfers> transfers;
  py::object error;
};

// Calls act() without the GIL, and raises that exception if the library returns an error.
template <class Act>
auto freely(const Face& self, Act act) {
  try {
    return wfbp::without_gil(act);
  } catch (const wfbp::MpiError& found) {
    PyErr_SetObject(self.error.ptr(), py::int_(found.code).ptr());
    throw py::error_already_set();
  }
}

// A message that consists of the bytes of a contiguous array.
wfbp::Message message_of(const py::handle array, int peer, bool incoming) {
  if (!py::isinstance<py::array>(array)) throw py::type_error("a message must be an array");
  auto data = py::reinterpret_borrow<py::array>(array);
  if (!(data.flags() & py::array::c_style) || (incoming && !data.writeable())) {
    throw py::value_error("a message must be contiguous, and writeable where it arrives");
  }
  if (data.nbytes() > std::numeric_limits<int>::max()) {
    throw py::value_error("a message of " + std::to_string(data.nbytes()) +
                          " bytes is longer than MPI can count");
  }
  return {static_cast<std::uint8_t*>(const_cast<void*>(data.data())),
          static_cast<int>(data.nbytes()), peer, incoming};
}

std::vector<wfbp::Message> messages_of(const py::sequence& items) {
  std::vector<wfbp::Message> messages;
  messages.reserve(items.size());
  for (const py::handle item : items) {
    const auto message = py::cast<py::tuple>(item);
    if (message.size() != 3) throw py::value_error("a message is (array, peer, incoming)");
    messages.push_back(
        message_of(message[0], py::cast<int>(message[1]), py::cast<bool>(message[2])));
  }
  return messages;
}

// Reads arrays, and the index of each one's first element in the logical buffer.
wfbp::Arrays arrays_of(const py::handle item, std::size_t item_bytes, bool writeable) {
  wfbp::Arrays found;
  if (item.is_none()) return found;
  const auto [starts, arrays] = py::cast<std::pair<std::vector<std::size_t>, py::sequence>>(item);
  if (starts.size() != arrays.size()) throw py::value_error("each array needs a start");
  for (std::size_t k = 0; k < starts.size(); ++k) {
    // Conversion would make a new array, which would be freed while the library uses its memory.
    if (!py::isinstance<py::array>(arrays[k])) throw py::type_error("these must be arrays");
    const py::array array = arrays[k];
    if (!(array.flags() & py::array::c_style) || (writeable && !array.writeable())) {
      throw py::value_error("arrays must be contiguous, and writeable where results arrive");
    }
    found.arrays.push_back({starts[k],
                            static_cast<std::uint8_t*>(const_cast<void*>(array.data())),
                            static_cast<std::size_t>(array.nbytes()) / item_bytes});
  }
  return found;
}

// Makes the description of a coded exchange from `parts`: tuples (start, count, error, error of the sum).
std::shared_ptr<wfbp::Coding> make_coding(const std::string& codec, const py::sequence& parts) {
  auto made = std::make_shared<wfbp::Coding>(
      wfbp::Coding{wfbp::codec_of(codec, wfbp::chosen_kernels()), {}});
  const auto address = [](const py::handle array, std::size_t count) -> std::uint8_t* {
    if (array.is_none()) return nullptr;
    if (!py::isinstance<py::array>(array)) throw py::type_error("an error must be an array");
    auto error = py::reinterpret_borrow<py::array>(array);
    if (!(error.flags() & py::array::c_style) || !error.writeable() ||
        static_cast<std::size_t>(error.nbytes()) != count * sizeof(float)) {
      throw py::value_error("an error must be contiguous and writeable, with a float32 for each of " +
                            std::to_string(count) + " elements");
    }
    return static_cast<std::uint8_t*>(error.mutable_data());
  };
  for (const py::handle each : parts) {
    const auto part = py::cast<py::tuple>(each);
    if (part.size() != 4) throw py::value_error("a part is (start, count, error, sum_error)");
    const auto start = py::cast<std::size_t>(part[0]), count = py::cast<std::size_t>(part[1]);
    if (start % wfbp::kCodecBlock != 0) {
      throw py::value_error("a part starts at " + std::to_string(start) + ", within a block");
    }
    made->parts.push_back({start, count, address(part[2], count), address(part[3], count)});
  }
  return made;
}

wfbp::Piece piece_of(const py::handle item, std::size_t item_bytes) {
  const auto parts = py::cast<py::tuple>(item);
  if (parts.size() != 2) throw py::value_error("a piece is (contributions, result)");
  const wfbp::Message result = message_of(parts[1], 0, true);
  wfbp::Piece piece{{}, result.data, static_cast<std::size_t>(result.nbytes) / item_bytes};
  for (const py::handle part : py::cast<py::sequence>(parts[0])) {
    const wfbp::Message contribution = message_of(part, 0, false);
    if (contribution.nbytes != result.nbytes) {
      throw py::value_error("a contribution has " + std::to_string(contribution.nbytes) +
                            " bytes, its result " + std::to_string(result.nbytes));
    }
    piece.contributions.push_back(contribution.data);
  }
  if (piece.contributions.empty() || result.nbytes % static_cast<int>(item_bytes) != 0) {
    throw py::value_error("a piece needs contributions of whole elements");
  }
  return piece;
}

// Reads watches. Each flag is the first element of a buffer of int64.
std::vector<wfbp::Watch> watches_of(const py::sequence& items) {
  std::vector<wfbp::Watch> watches;
  watches.reserve(items.size());
  for (const py::handle item : items) {
    const auto watch = py::cast<py::tuple>(item);
    if (watch.size() != 3) throw py::value_error("a watch is (flags, least, any)");
    watches.push_back({{}, py::cast<std::int64_t>(watch[1]), py::cast<bool>(watch[2])});
    for (const py::handle flag : py::cast<py::sequence>(watch[0])) {
      const py::buffer_info found = py::cast<py::buffer>(flag).request();
      if (!found.item_type_is_equivalent_to<std::int64_t>() || found.size < 1) {
        throw py::value_error("a flag must be a buffer of int64");
      }
      watches.back().flags.push_back(static_cast<const std::int64_t*>(found.ptr));
    }
  }
  return watches;
}

std::unique_ptr<wfbp::Transfers> make_transfers(std::size_t handle_bytes,
                                                const wfbp::MpiAddresses& mpi) {
  if (mpi.error_at + sizeof(int) > mpi.status_bytes) {
    throw py::value_error("the error must lie within a status");
  }
  if (handle_bytes == sizeof(int)) {
    return std::make_unique<wfbp::TransfersOf<int>>(mpi);
  }
  if (handle_bytes == sizeof(void*)) return std::make_unique<wfbp::TransfersOf<void*>>(mpi);
  throw py::value_error("handles of " + std::to_string(handle_bytes) + " bytes are unknown");
}

std::shared_ptr<wfbp::Transfer> adopt(Face& self, std::uintptr_t request) {
  auto transfer = std::make_shared<wfbp::Transfer>();
  self.transfers->adopt(transfer, request);
  return transfer;
}

std::shared_ptr<wfbp::Transfer> begin(Face& self, std::uintptr_t comm, int tag,
                                      const py::sequence& messages, const std::string& dtype,
                                      const std::string& op, double divisor,
                                      const py::sequence& pieces, const py::sequence& then) {
  auto transfer = std::make_shared<wfbp::Transfer>();
  transfer->reduction = wfbp::reduction(dtype, op, divisor);
  for (const py::handle piece : pieces) {
    transfer->pieces.push_back(piece_of(piece, transfer->reduction.item));
  }
  transfer->comm = comm;
  transfer->tag = tag;
  transfer->messages = messages_of(messages);
  transfer->then = messages_of(then);
  return freely(self, [&] {
    self.transfers->begin(transfer);
    return transfer;
  });
}

std::shared_ptr<wfbp::Exchange> exchange(
    Face& self, std::shared_ptr<wfbp::Window> window, std::uintptr_t comm, std::vector<int> tags,
    int rank, std::vector<int> agents,
    const std::vector<std::tuple<int, std::size_t, std::size_t>>& shares,
    const py::object& sources, const py::object& results, bool gathers, const std::string& dtype,
    const std::string& op, double divisor, std::shared_ptr<wfbp::Coding> coding) {
  const wfbp::Reduction reduction = wfbp::reduction(dtype, op, divisor);
  constexpr std::size_t all = std::numeric_limits<std::size_t>::max();
  if (!window) window = std::make_shared<wfbp::Window>(wfbp::Window{all, all});
  auto made = std::make_shared<wfbp::Exchange>(wfbp::Exchange{
      std::move(window), comm, std::move(tags), rank, std::move(agents), {},
      arrays_of(sources, reduction.item, false), arrays_of(results, reduction.item, true), gathers,
      reduction, std::move(coding)});
  for (const auto& [owner, start, stop] : shares) made->shares.push_back({owner, start, stop});
  made->check();
  return freely(self, [&] {
    self.transfers->begin(made);
    return made;
  });
}

std::size_t progress(Face& self) {
  // If there is nothing to do, keep the GIL: after a release it may take long to get it again.
  if (self.transfers->idle()) return 0;
  return freely(self, [&] { return self.transfers->progress(); });
}

std::size_t rest(Face& self, double nap_s, double most_s, const py::sequence& watches) {
  const std::vector<wfbp::Watch> all = watches_of(watches);
  return freely(self, [&] { return self.transfers->rest(nap_s, most_s, all); });
}

}  // namespace

void wfbp::bind_transfers(py::module_& module) {
  py::class_<Transfer, std::shared_ptr<Transfer>>(module, "Transfer")
      .def_readonly("done", &Transfer::done)
      .def_readonly("ended", &Transfer::ended);

  py::class_<Exchange, std::shared_ptr<Exchange>>(module, "Exchange")
      .def_readonly("done", &Exchange::done)
      .def_readonly("ended", &Exchange::ended);

  py::class_<Window, std::shared_ptr<Window>>(module, "Window")
      .def(py::init([](std::size_t most_bytes, std::size_t most_chunks) {
             return std::make_shared<Window>(Window{most_bytes, most_chunks});
           }),
           py::arg("most_bytes"), py::arg("most_chunks"));

  py::class_<Coding, std::shared_ptr<Coding>>(module, "Coding")
      .def(py::init(&make_coding), py::arg("codec"), py::arg("parts"), py::keep_alive<1, 3>());

  py::class_<Face>(module, "Transfers")
      .def(py::init([](std::size_t handle_bytes, std::uintptr_t isend, std::uintptr_t irecv,
                       std::uintptr_t testsome, std::uintptr_t byte, std::size_t status_bytes,
                       std::size_t error_at, int success, py::object error) {
             const MpiAddresses mpi{isend, irecv, testsome, byte, status_bytes, error_at, success};
             return std::unique_ptr<Face>(
                 new Face{make_transfers(handle_bytes, mpi), std::move(error)});
           }),
           py::kw_only(), py::arg("handle_bytes"), py::arg("isend"), py::arg("irecv"),
           py::arg("testsome"), py::arg("byte"), py::arg("status_bytes"), py::arg("error_at"),
           py::arg("success"), py::arg("error"))
      .def("begin", &begin, py::arg("comm"), py::arg("tag"), py::arg("messages"),
           py::arg("dtype") = "uint8", py::arg("op") = "sum", py::arg("divisor") = 1.0,
           py::arg("pieces") = py::tuple(), py::arg("then") = py::tuple())
      .def("exchange", &exchange, py::arg("window"), py::arg("comm"), py::arg("tags"),
           py::arg("rank"), py::arg("agents"), py::arg("shares"), py::arg("sources"),
           py::arg("results"), py::arg("gathers"), py::arg("dtype"), py::arg("op"),
           py::arg("divisor"), py::arg("coding") = py::none())
      .def("adopt", &adopt, py::arg("request"))
      .def("progress", &progress)
      .def_property_readonly("num_over", [](const Face& self) { return self.transfers->num_over(); })
      .def("rest", &rest, py::arg("nap_s"), py::arg("most_s"), py::arg("watches") = py::tuple());

  module.def(
      "any_reached",
      [](const py::sequence& watches) { return any_reached(watches_of(watches)); },
      py::arg("watches"));
}
