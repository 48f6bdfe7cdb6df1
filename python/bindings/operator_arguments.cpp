// What torch's operators ask of their arguments before they go around the dispatcher or through it.
#include <nanobind/nanobind.h>

#include "bindings.h"
#include "fast_function.h"
#include "torch_functions.h"

namespace hopper_attention::python {
namespace {

// plain_arguments(list): see its docstring.
PyObject* plain_arguments(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
  if (!are_as_many("plain_arguments", count, 1)) { return nullptr; }
  if (!PyList_CheckExact(args[0])) {
    PyErr_SetString(PyExc_TypeError, "plain_arguments: a list is needed");
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < PyList_Size(args[0]); ++i) {
    PyObject* const x = PyList_GetItem(args[0], i);
    bool const plain =
        x == Py_None || is_plain_tensor(x) || PyLong_CheckExact(x) || PyFloat_CheckExact(x) || PyList_CheckExact(x);
    if (!plain) { Py_RETURN_NONE; }
  }
  return PyList_AsTuple(args[0]);
}

// Whether `x` has exactly the type that `kind` stands for: see fits() below.
bool is_of_kind(PyObject* x, char kind) {
  switch (kind) {
    case 't':
      return is_plain_tensor(x);
    case 'T':
      return x == Py_None || is_plain_tensor(x);
    case 'i':
      return PyLong_CheckExact(x);
    case 'f':
      return PyFloat_CheckExact(x) || PyLong_CheckExact(x);
    case 'F':
      return x == Py_None || PyFloat_CheckExact(x) || PyLong_CheckExact(x);
    case 'l':
      if (x == Py_None) { return true; }
      if (!PyList_CheckExact(x)) { return false; }
      for (Py_ssize_t i = 0; i < PyList_Size(x); ++i) {
        if (!PyLong_CheckExact(PyList_GetItem(x, i))) { return false; }
      }
      return true;
    default:
      return x == Py_None;
  }
}

// fits(tuple, bytes): see its docstring.
PyObject* fits(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
  if (!are_as_many("fits", count, 2)) { return nullptr; }
  if (!PyTuple_CheckExact(args[0]) || !PyBytes_CheckExact(args[1])) {
    PyErr_SetString(PyExc_TypeError, "fits: a tuple and bytes are needed");
    return nullptr;
  }
  char const* const kinds = PyBytes_AsString(args[1]);
  Py_ssize_t const size = PyTuple_Size(args[0]);
  if (size > PyBytes_Size(args[1])) { Py_RETURN_FALSE; }
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!is_of_kind(PyTuple_GetItem(args[0], i), kinds[i])) { Py_RETURN_FALSE; }
  }
  Py_RETURN_TRUE;
}

}  // namespace

void bind_operator_arguments(nb::module_& module) {
  static PyMethodDef methods[] = {
      method("plain_arguments", &plain_arguments,
             "plain_arguments(arguments, /)\n--\n\n"
             "The list as a tuple; None if it holds anything but plain torch tensors, None, ints, floats and lists."),
      method("fits", &fits,
             "fits(arguments, kinds, /)\n--\n\n"
             "Whether no more arguments than kinds are in the tuple, each of exactly its kind, a byte: t plain torch "
             "tensor,\nT the same or None, i int, f int or float, F the same or None, l list of ints or None, n None."),
  };
  add_functions(module, methods);
}

}  // namespace hopper_attention::python
