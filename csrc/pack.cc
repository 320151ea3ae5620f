// Python bindings of the kernels: check arguments, keep arrays alive, release the GIL.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "native.h"
#include "pack_table.h"

namespace py = pybind11;

namespace wfbp {

Kernels& chosen_kernels() {
  static Kernels kernels = runnable_kernels().front();
  return kernels;
}

Reduction reduction(const std::string& dtype, const std::string& op, double divisor) {
  const Dtype kind = dtype_of(dtype, chosen_kernels());
  const Reducers& all = kind.reduce;
  Reduce reduce = nullptr;
  if (op == "sum") reduce = all.sum;
  if (op == "min") reduce = all.min;
  if (op == "max") reduce = all.max;
  if (op == "product") reduce = all.product;
  if (reduce == nullptr) {
    throw py::value_error("op '" + op + "' is not one of sum, min, max, product");
  }
  if (divisor != 1.0 && all.average != nullptr) {
    if (op != "sum" || !(divisor >= 1.0 && divisor <= 1e9) || std::floor(divisor) != divisor) {
      throw py::value_error("a " + op + " of " + dtype + " cannot be divided by " +
                            std::to_string(divisor) + ": only a sum can, by a whole number");
    }
    reduce = all.average;
  }
  return {reduce, kind.item, divisor};
}

}  // namespace wfbp

namespace {

using Integers = py::array_t<std::int64_t, py::array::c_style | py::array::forcecast>;

wfbp::Kernels& chosen() { return wfbp::chosen_kernels(); }

void use_instructions(const std::string& name) {
  for (const wfbp::Kernels& kernels : wfbp::runnable_kernels()) {
    if (name == kernels.name) {
      chosen() = kernels;
      return;
    }
  }
  throw py::value_error("instructions '" + name + "' are unknown or this processor lacks them");
}

std::uint8_t* writable_bytes(py::array& array, const char* what) {
  if (!(array.flags() & py::array::c_style) || !array.writeable()) {
    throw py::value_error(std::string(what) + " must be a writable C-contiguous array");
  }
  return static_cast<std::uint8_t*>(array.mutable_data());
}

std::vector<std::int64_t> integers(const Integers& array, const char* what) {
  if (array.ndim() != 1) throw py::value_error(std::string(what) + " must have one dimension");
  return {array.data(), array.data() + array.size()};
}

// A table together with the array that it writes into, which must live as long as the table.
struct Table {
  py::array destination;
  wfbp::PackTable table;
};

std::unique_ptr<Table> make_table(py::array destination, const Integers& offsets,
                                  const Integers& nbytes, const std::string& dtype,
                                  const std::string& tensor_dtype) {
  if (destination.ndim() != 1 || !destination.dtype().equal(py::dtype::of<std::uint8_t>())) {
    throw py::value_error("destination must be a one-dimensional array of uint8");
  }
  std::uint8_t* bytes = writable_bytes(destination, "destination");
  wfbp::PackTable table(bytes, destination.nbytes(), integers(offsets, "offsets"),
                        integers(nbytes, "nbytes"), dtype, tensor_dtype, chosen());
  return std::unique_ptr<Table>(new Table{std::move(destination), std::move(table)});
}

void scale(py::array buffer, const std::string& dtype, double factor) {
  const wfbp::Dtype kind = wfbp::dtype_of(dtype, chosen());
  std::uint8_t* bytes = writable_bytes(buffer, "buffer");
  const auto nbytes = static_cast<std::size_t>(buffer.nbytes());
  if (nbytes % kind.item != 0) {
    throw py::value_error("buffer has " + std::to_string(nbytes) +
                          " bytes: not a whole number of " + dtype + " elements");
  }
  if (factor == 1.0) return;
  if (kind.multiply == nullptr) {
    throw py::value_error("scale is " + std::to_string(factor) + " but " + dtype +
                          " can only be copied: expected 1.0");
  }
  wfbp::without_gil([&] { kind.multiply(bytes, bytes, nbytes / kind.item, factor); });
}

void reduce_shards(const py::object& shards, py::array out, const std::string& dtype,
                   const std::string& op, double divisor) {
  const wfbp::Reduction reduction = wfbp::reduction(dtype, op, divisor);
  const auto item = static_cast<py::ssize_t>(reduction.item);
  const std::string bytes = std::to_string(reduction.item);
  if (out.ndim() != 1 || out.itemsize() != item) {
    throw py::value_error("out must be a one-dimensional array of " + bytes + "-byte elements");
  }
  std::uint8_t* target = writable_bytes(out, "out");
  std::vector<py::array> rows;  // keeps the rows alive while the GIL is released
  std::vector<const std::uint8_t*> pointers;
  for (const py::handle element : shards) {
    if (!py::isinstance<py::array>(element)) throw py::type_error("each shard must be an array");
    auto row = py::reinterpret_borrow<py::array>(element);
    if (row.ndim() != 1 || row.itemsize() != item || row.size() != out.size() ||
        !(row.flags() & py::array::c_style)) {
      throw py::value_error("shard " + std::to_string(rows.size()) +
                            " must be a contiguous one-dimensional array of " +
                            std::to_string(out.size()) + " elements of " + bytes + " bytes");
    }
    pointers.push_back(static_cast<const std::uint8_t*>(row.data()));
    rows.push_back(std::move(row));
  }
  if (pointers.empty()) throw py::value_error("expected at least one shard");
  const auto count = static_cast<std::size_t>(out.size());
  wfbp::without_gil([&] { reduction.run(pointers, target, count); });
}

using Floats = py::array_t<float, py::array::c_style>;

std::size_t wire_of(const wfbp::Codec& codec, const Floats& elements, const py::array& wire) {
  const auto count = static_cast<std::size_t>(elements.size());
  if (static_cast<std::size_t>(wire.nbytes()) != codec.wire_bytes(count)) {
    throw py::value_error(std::to_string(count) + " elements are encoded in " +
                          std::to_string(codec.wire_bytes(count)) + " bytes, found " +
                          std::to_string(wire.nbytes()));
  }
  return count;
}

void encode(const Floats& source, py::array wire, const std::string& codec, py::object error) {
  const wfbp::Codec how = wfbp::codec_of(codec, chosen());
  const std::size_t count = wire_of(how, source, wire);
  std::uint8_t* left = nullptr;
  if (!error.is_none()) {
    auto array = py::cast<py::array>(error);
    left = writable_bytes(array, "error");
    if (array.nbytes() != source.nbytes()) throw py::value_error("error must be as the source is");
  }
  const auto* from = reinterpret_cast<const std::uint8_t*>(source.data());
  std::uint8_t* to = writable_bytes(wire, "wire");
  wfbp::without_gil([&] { how.encode(from, left, to, nullptr, count); });
}

void decode(const py::array& wire, Floats out, const std::string& codec, bool adds) {
  const wfbp::Codec how = wfbp::codec_of(codec, chosen());
  const std::size_t count = wire_of(how, out, wire);
  std::uint8_t* to = writable_bytes(out, "out");
  const auto* from = static_cast<const std::uint8_t*>(wire.data());
  wfbp::without_gil([&] { (adds ? how.add : how.decode)(from, to, count); });
}

void copy(py::array target, const py::array& source) {
  std::uint8_t* to = writable_bytes(target, "target");
  if (!(source.flags() & py::array::c_style) || source.nbytes() != target.nbytes()) {
    throw py::value_error("source must be a C-contiguous array of " +
                          std::to_string(target.nbytes()) + " bytes");
  }
  const auto* from = static_cast<const std::uint8_t*>(source.data());
  const auto nbytes = static_cast<std::size_t>(target.nbytes());
  wfbp::without_gil([&] {
    wfbp::in_parts(nbytes, 1, [&](std::size_t first, std::size_t last) {
      std::memcpy(to + first, from + first, last - first);
    });
  });
}

void use_threads(unsigned number) { wfbp::num_threads() = std::max(1U, number); }

}  // namespace

void wfbp::bind_pack(py::module_& module) {
  module.attr("INSTRUCTIONS") = chosen().name;

  py::class_<Table>(module, "PackTable")
      .def(py::init(&make_table), py::arg("destination").noconvert(), py::arg("offsets"),
           py::arg("nbytes"), py::arg("dtype"), py::arg("tensor_dtype") = "")
      .def_property_readonly(
          "pointers",
          [](py::object self) {
            auto& pointers = self.cast<Table&>().table.pointers;
            // The base is `self`, because the array may outlive every other reference to the table.
            return py::array_t<std::int64_t>(static_cast<py::ssize_t>(pointers.size()),
                                             pointers.data(), self);
          })
      .def("pack", [](const Table& self) { wfbp::without_gil([&] { self.table.pack(); }); })
      .def("unpack", [](const Table& self) { wfbp::without_gil([&] { self.table.unpack(); }); });

  module.def("scale", &scale, py::arg("buffer").noconvert(), py::arg("dtype"), py::arg("factor"));
  module.def("copy", &copy, py::arg("target").noconvert(), py::arg("source").noconvert());
  module.def("encode", &encode, py::arg("source").noconvert(), py::arg("wire").noconvert(),
             py::arg("codec"), py::arg("error") = py::none());
  module.def("decode", &decode, py::arg("wire").noconvert(), py::arg("out").noconvert(),
             py::arg("codec"), py::arg("adds") = false);
  module.def("use_threads", &use_threads, py::arg("number"));
  module.def("use_instructions", &use_instructions, py::arg("name"));
  module.def("reduce_shards", &reduce_shards, py::arg("shards"), py::arg("out").noconvert(),
             py::arg("dtype"), py::arg("op"), py::arg("divisor") = 1.0);
}
