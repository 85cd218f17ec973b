// What Python sees of the simulated accelerator.
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <unordered_map>

#include "process_group.h"
#include "random.h"
#include "tensors.h"

namespace py = pybind11;

namespace {

// What is kept of a function, and of each instruction in it that was on its way when it was asked for.
struct Function {
  std::string file, name;
  bool shown;
  std::unordered_map<int, std::string> places;
};

// With the interpreter's lock held. Code that was seen once is kept, so that no other comes to lie where it was.
Function& function_of(PyCodeObject* code) {
  static auto& known = *new std::unordered_map<PyCodeObject*, Function>;
  auto [at, fresh] = known.try_emplace(code);
  auto& function = at->second;
  if (fresh) {
    Py_INCREF(code);
    std::string file = py::reinterpret_borrow<py::str>(code->co_filename);
    function.shown = file.find("/torch/") == std::string::npos && file.find("<frozen") == std::string::npos;
    auto own = file.rfind("composable/");
    function.file = own == std::string::npos ? file.substr(file.rfind('/') + 1) : file.substr(own);
    function.name = py::reinterpret_borrow<py::str>(code->co_name);
  }
  return function;
}

// The innermost Python frames that are not torch's.
sim::Place place_in_python() {
  sim::Place place{};
  if (!Py_IsInitialized()) return place;
  py::gil_scoped_acquire gil;
  size_t shown = 0;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame && shown < place.size()) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    auto& function = function_of(code);
    if (function.shown) {
      auto& text = function.places[PyFrame_GetLasti(frame)];
      if (text.empty()) text = function.file + ":" + std::to_string(PyFrame_GetLineNumber(frame)) + " " + function.name;
      place[shown++] = &text;
    }
    Py_DECREF(code);
    PyFrameObject* outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  Py_XDECREF(frame);
  return place;
}

}  // namespace

PYBIND11_MODULE(_sim, m) {
  using namespace sim;
  place = place_in_python;
  m.def("device_count", [] { return kDevices; });
  m.def("current_device", &current_device);
  m.def("set_device", &exchange_device);
  m.def("synchronize", &synchronize, py::call_guard<py::gil_scoped_release>());
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("name_stream", &name_stream);
  m.def("shut_down", &shut_down);
  m.def("raise_failure", &raise_failure);
  m.def("set_lag", [](int of_default, int of_others, double probability, uint64_t seed) {
    settings.lag_of_default = of_default;
    settings.lag_of_others = of_others;
    settings.lag_probability = probability;
    settings.lag_seed = seed;
  });
  m.def("set_detects", [](bool on) { settings.detects = on; });
  m.def("set_poisons", [](bool on) { settings.poisons = on; });
  m.def("set_places", [](bool on) { settings.places = on; });
  m.def("findings", &findings);
  m.def("clear_findings", &clear_findings);
  m.def("host_waits", &host_waits);
  m.def("places_of_host_waits", &places_of_host_waits);
  m.def("clear_host_waits", &clear_host_waits);
  m.def("operators_run_on_host", &operators_run_on_host);
  m.def("launch_count", &launch_count);
  m.def("memory", &memory);
  m.def("reset_peak", &reset_peak);
  m.def("collectives", &collectives);
  m.def("clear_collectives", &clear_collectives);
  m.def("over_gloo", &over_gloo);
  m.def("sleep", [](int us) {  // a kernel that does nothing for a while
    launch(current_stream(current_device()), "sleep", {}, [us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); });
  });
}
