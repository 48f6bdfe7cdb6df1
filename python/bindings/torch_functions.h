// What the bindings know of torch, which Python hands over once it is there: types of plain tensors, and functions.
#pragma once

#include <initializer_list>

#include <nanobind/nanobind.h>

#include "bindings.h"
#include "tensor_argument.h"

namespace hopper_attention::python {

// What use_torch() was given last, with a reference to each. Guarded by the GIL.
struct Torch {
  PyObject* tensor_type = nullptr;  // null: torch was not seen yet
  PyObject* parameter_type = nullptr;
  PyObject* is_grad_enabled = nullptr;
  PyObject* dispatch_modes = nullptr;  // () -> how many
  PyObject* transform = nullptr;       // () -> the innermost, or None
  PyObject* is_tracing = nullptr;      // whether torch.jit.trace records
  PyObject* empty_like = nullptr;
  PyObject* empty_output = nullptr;     // (q, v)
  PyObject* empty_lse = nullptr;        // (q)
  PyObject* empty_workspace = nullptr;  // (bytes, q)
  PyObject* requires_grad = nullptr;    // the attribute's name
  dlpack::ExchangeApi const* api = nullptr;
};
extern constinit Torch torch;

nb::object call(PyObject* function, std::initializer_list<PyObject*> args = {});

// Whether a dispatch mode, a transform or a trace has to see the call.
bool is_watched();

// False for all while torch was not seen.
inline bool is_plain_tensor(PyObject* x) {
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(x));
  return type == torch.tensor_type || type == torch.parameter_type;
}

}  // namespace hopper_attention::python
