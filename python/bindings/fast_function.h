// C functions without names and defaults of their arguments, which nanobind would look for in every call.
#pragma once

#include <cstddef>
#include <span>

#include <nanobind/nanobind.h>

namespace hopper_attention::python {

namespace nb = nanobind;

using FastFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

inline PyMethodDef method(char const* name, FastFunction function, char const* doc) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, doc};
}

// `methods` stay where they are for as long as the module.
inline void add_functions(nb::module_& module, std::span<PyMethodDef> methods) {
  for (PyMethodDef& made : methods) {
    module.attr(made.ml_name) = nb::steal(PyCFunction_NewEx(&made, nullptr, nb::str("hopper_attention._core").ptr()));
  }
}

// Raises TypeError if not.
inline bool are_as_many(char const* function, Py_ssize_t found, std::size_t wanted) {
  if (found == static_cast<Py_ssize_t>(wanted)) { return true; }
  PyErr_Format(PyExc_TypeError, "%s: %zu arguments are needed, found %zd", function, wanted, found);
  return false;
}

}  // namespace hopper_attention::python
