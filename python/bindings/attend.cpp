// attend*: the attention calls of engines, read with the least work. Tensors are plain torch tensors, values have the
// type that they should have, and nothing watches. Every other call, wrong ones included, gives None before anything is
// launched: it goes the long way, by `hopper_attention.gpu`, which converts, watches and says what is wrong.
#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <span>
#include <utility>

#include <nanobind/nanobind.h>

#include "bindings.h"
#include "hopper_attention/append.h"
#include "hopper_attention/forward.h"
#include "tensor_argument.h"

namespace hopper_attention::python {
namespace {

// What use_torch() was given last, with a reference to each. Guarded by the GIL.
struct Torch {
  PyObject* tensor_type = nullptr;  // null: torch was not seen yet
  PyObject* parameter_type = nullptr;
  PyObject* is_grad_enabled = nullptr;
  PyObject* dispatch_modes = nullptr;  // () -> how many
  PyObject* transform = nullptr;       // () -> the innermost, or None
  PyObject* empty_like = nullptr;
  PyObject* empty_output = nullptr;     // (q, v)
  PyObject* empty_lse = nullptr;        // (q)
  PyObject* empty_workspace = nullptr;  // (bytes, q)
  PyObject* requires_grad = nullptr;    // the attribute's name
  dlpack::ExchangeApi const* api = nullptr;
};
constinit Torch torch{};

nb::object call(PyObject* function, std::initializer_list<PyObject*> args = {}) {
  nb::object const kept = nb::borrow(function);  // use_torch() may let go of it meanwhile
  PyObject* const result = PyObject_Vectorcall(function, args.begin(), args.size(), nullptr);
  if (result == nullptr) { throw nb::python_error(); }
  return nb::steal(result);
}

// Whether a dispatch mode or a transform has to see the call.
bool is_watched() { return nb::cast<int>(call(torch.dispatch_modes)) != 0 || !call(torch.transform).is_none(); }

// False for all while torch was not seen.
bool is_plain_tensor(PyObject* x) {
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(x));
  return type == torch.tensor_type || type == torch.parameter_type;
}

// Reads arguments of exact types, and remembers whether any was not.
class Reader {
 public:
  explicit Reader(bool grad) : grad_(grad) {}

  bool all_plain() const { return plain_; }
  void refuse() { plain_ = false; }

  bool flag(PyObject* x) {
    if (x != Py_True && x != Py_False) { refuse(); }
    return x == Py_True;
  }

  std::int64_t integer(PyObject* x) {
    if (!PyLong_CheckExact(x)) {
      refuse();
      return 0;
    }
    int overflow = 0;
    std::int64_t const value = PyLong_AsLongLongAndOverflow(x, &overflow);
    if (overflow != 0) { refuse(); }
    return value;
  }

  // At least 0; `absent` for None.
  std::int64_t length(PyObject* x, std::int64_t absent) {
    if (x == Py_None) { return absent; }
    std::int64_t const value = integer(x);
    if (value < 0) { refuse(); }
    return value;
  }

  double number(PyObject* x) {
    if (PyFloat_CheckExact(x)) { return PyFloat_AsDouble(x); }
    return static_cast<double>(integer(x));
  }

  std::array<std::int64_t, 2> window(PyObject* x) {
    if (x == Py_None) { return {-1, -1}; }
    if (PyTuple_CheckExact(x) && PyTuple_Size(x) == 2) {
      return {integer(PyTuple_GetItem(x, 0)), integer(PyTuple_GetItem(x, 1))};
    }
    if (PyList_CheckExact(x) && PyList_Size(x) == 2) {
      return {integer(PyList_GetItem(x, 0)), integer(PyList_GetItem(x, 1))};
    }
    refuse();
    return {};
  }

  // Into `tensor`, which is not given yet; None leaves it so.
  void read(PyObject* x, Tensor& tensor) {
    if (x == Py_None) { return; }
    if (!is_plain_tensor(x) || (grad_ && requires_grad(x))) {
      refuse();
      return;
    }
    dlpack::DLTensor source;
    if (torch.api->dltensor_from_py_object_no_sync(x, &source) != 0) {
      PyErr_Clear();
      refuse();
      return;
    }
    read_tensor("", source, tensor);
  }

 private:
  static bool requires_grad(PyObject* x) {
    nb::object const found = nb::steal(PyObject_GetAttr(x, torch.requires_grad));
    if (!found.is_valid()) { throw nb::python_error(); }
    return found.ptr() != Py_False;
  }

  bool grad_;
  bool plain_ = true;
};

bool is_contiguous(Tensor const& tensor) {
  std::int64_t expected = 1;
  for (int dim = tensor.rank - 1; dim >= 0; --dim) {
    if (tensor.shape[dim] != 1 && tensor.stride[dim] != expected) { return false; }
    expected *= tensor.shape[dim];
  }
  return true;
}

// Like q with the head dim of v.
nb::object empty_output(PyObject* q, PyObject* v, Tensor const& q_tensor, Tensor const& v_tensor) {
  bool const alike =
      v_tensor.rank > 0 && q_tensor.rank > 0 && v_tensor.shape[v_tensor.rank - 1] == q_tensor.shape[q_tensor.rank - 1];
  return alike && is_contiguous(q_tensor) ? call(torch.empty_like, {q}) : call(torch.empty_output, {q, v});
}

// The arguments that all forms share, by position; those that only one form has follow.
enum Place : std::size_t {
  kQ,
  kK,
  kV,
  kSoftmaxScale,
  kCausal,
  kWindowSize,
  kAttentionChunk,
  kSoftcap,
  kNumSplits,
  kSmMargin,
  kReturnLse,
  kSinks,
  kOut,
  kSoftmaxLse,
  kBatchInvariant,
  kWorkspace,
  kSharedArguments,
};

// Those of sequences, after the shared ones.
enum PlaceOfSequences : std::size_t {
  kCuSeqlensQ = kSharedArguments,
  kSequsedK,
  kPageTable,
  kMaxSeqlenQ,
  kCpWorldSize,
  kCpRank,
  kCpTotSequsedK,
  kSchedulerMetadata,
  kSequenceArguments,
};

enum PlaceOfPacked : std::size_t { kCuSeqlensK = kSequenceArguments, kSequsedQ, kMaxSeqlenK, kPackedArguments };
enum PlaceOfCache : std::size_t { kCacheBatchIdx = kSequenceArguments, kCacheLeftpad, kNew, kCacheArguments };

// In the tuple of what is appended.
enum PlaceOfNew : Py_ssize_t {
  kNewK,
  kNewV,
  kRotaryCos,
  kRotarySin,
  kCuSeqlensKNew,
  kRotarySeqlens,
  kRotaryInterleaved,
  kNewArguments,
};

using Given = std::span<PyObject* const>;

Arguments read_shared(Reader& reader, Given given) {
  Arguments args;
  reader.read(given[kQ], args.q);
  reader.read(given[kK], args.k);
  reader.read(given[kV], args.v);
  reader.read(given[kOut], args.out);
  reader.read(given[kSoftmaxLse], args.softmax_lse);
  reader.read(given[kSinks], args.sinks);
  reader.read(given[kWorkspace], args.workspace);
  if (given[kSoftmaxScale] != Py_None) { args.softmax_scale = reader.number(given[kSoftmaxScale]); }
  args.causal = reader.flag(given[kCausal]);
  auto const [left, right] = reader.window(given[kWindowSize]);
  args.window_left = left;
  args.window_right = right;
  args.attention_chunk = reader.length(given[kAttentionChunk], 0);
  args.softcap = reader.number(given[kSoftcap]);
  args.num_splits = reader.integer(given[kNumSplits]);
  args.sm_margin = reader.integer(given[kSmMargin]);
  args.batch_invariant = reader.flag(given[kBatchInvariant]);
  // On the CPU the reference computes; only it and tracing know tensors that are not given.
  if (!args.q.given() || args.q.device == kCpuDevice || !args.k.given() || !args.v.given()) { reader.refuse(); }
  return args;
}

void read_sequences(Reader& reader, Given given, Arguments& args) {
  reader.read(given[kCuSeqlensQ], args.cu_seqlens_q);
  reader.read(given[kPageTable], args.page_table);
  args.max_seqlen_q = reader.length(given[kMaxSeqlenQ], -1);
  args.cp_world_size = reader.integer(given[kCpWorldSize]);
  args.cp_rank = reader.integer(given[kCpRank]);
  if (args.cp_world_size != 1) { reader.read(given[kCpTotSequsedK], args.cp_tot_seqused_k); }  // one rank has all
  reader.read(given[kSchedulerMetadata], args.scheduler_metadata);
}

Arguments read_packed(Reader& reader, Given given) {
  Arguments args = read_shared(reader, given);
  read_sequences(reader, given, args);
  reader.read(given[kSequsedK], args.seqused_k);
  reader.read(given[kCuSeqlensK], args.cu_seqlens_k);
  reader.read(given[kSequsedQ], args.seqused_q);
  args.max_seqlen_k = reader.length(given[kMaxSeqlenK], -1);
  if (!args.cu_seqlens_q.given() || !(args.cu_seqlens_k.given() || args.page_table.given())) { reader.refuse(); }
  return args;
}

Arguments read_cache(Reader& reader, Given given) {
  Arguments args = read_shared(reader, given);
  read_sequences(reader, given, args);
  if (PyLong_CheckExact(given[kSequsedK])) {
    args.seqused_k_all = std::max<std::int64_t>(0, reader.integer(given[kSequsedK]));
  } else {
    reader.read(given[kSequsedK], args.seqused_k);
    if (args.seqused_k.rank == 0) { reader.refuse(); }  // a number in a tensor
  }
  reader.read(given[kCacheBatchIdx], args.cache_batch_idx);
  reader.read(given[kCacheLeftpad], args.cache_leftpad);
  return args;
}

// What is appended to the cache of `args`, and into `args` what attention has to know of it.
AppendArguments read_new(Reader& reader, PyObject* given, Arguments& args) {
  AppendArguments made;
  auto const item = [given](PlaceOfNew place) { return PyTuple_GetItem(given, place); };
  if (!PyTuple_CheckExact(given) || PyTuple_Size(given) != kNewArguments) {
    reader.refuse();
    return made;
  }
  reader.read(item(kNewK), made.k_new);
  reader.read(item(kNewV), made.v_new);
  made.k_cache = args.k;
  made.v_cache = args.v;
  made.seqused_k = args.seqused_k;
  made.seqused_k_all = args.seqused_k_all;
  reader.read(item(kCuSeqlensKNew), made.cu_seqlens_k_new);
  made.page_table = args.page_table;
  made.cache_batch_idx = args.cache_batch_idx;
  made.rotary_interleaved = reader.flag(item(kRotaryInterleaved));
  reader.read(item(kRotaryCos), made.rotary_cos);
  reader.read(item(kRotarySin), made.rotary_sin);
  if (made.rotary_cos.given()) {
    made.q = args.q;
    made.cu_seqlens_q = args.cu_seqlens_q;
    reader.read(item(kRotarySeqlens), made.rotary_seqlens);
    made.rotate_q_per_position =
        args.causal || args.attention_chunk != 0 || args.window_left != -1 || args.window_right != -1;
  }
  args.cu_seqlens_k_new = made.cu_seqlens_k_new;
  if (!args.cu_seqlens_k_new.given()) {
    if (made.k_new.rank != 4) { reader.refuse(); }
    args.seqlen_k_new = made.k_new.shape[1];
  }
  if (!made.k_new.given() || !made.v_new.given() || made.rotary_cos.given() != made.rotary_sin.given() ||
      !(made.seqused_k.given() || made.seqused_k_all >= 0)) {
    reader.refuse();
  }
  return made;
}

// Allocates what is not given, and launches. Raises before the launch what is wrong with the call.
nb::object launch(Given given, Arguments& args, std::optional<AppendArguments>& appended) {
  bool const with_lse = given[kReturnLse] == Py_True;
  nb::object out = nb::borrow(given[kOut]);
  nb::object lse = nb::borrow(given[kSoftmaxLse]);
  nb::object rotated;
  nb::object workspace;
  Reader reader(false);  // of tensors that this function makes
  if (out.is_none()) {
    out = empty_output(given[kQ], given[kV], args.q, args.v);
    reader.read(out.ptr(), args.out);
  }
  if (lse.is_none() && with_lse) {
    lse = call(torch.empty_lse, {given[kQ]});
    reader.read(lse.ptr(), args.softmax_lse);
  }
  if (appended && appended->q.given()) {
    rotated = empty_output(given[kQ], given[kQ], args.q, args.q);
    reader.read(rotated.ptr(), appended->q_rotated);
  }
  if (!reader.all_plain()) { return nb::none(); }
  auto const allocate = [&](std::int64_t bytes) {
    nb::gil_scoped_acquire const held;
    workspace = call(torch.empty_workspace, {nb::int_(bytes).ptr(), given[kQ]});
    Tensor tensor;
    reader.read(workspace.ptr(), tensor);
    return tensor;
  };
  Stream const stream = current_stream(*torch.api, args.q.device);
  {
    nb::gil_scoped_release const released;
    if (appended) {
      append_and_forward(*appended, args, stream, std::ref(allocate));
    } else {
      hopper_attention::forward(args, stream, std::ref(allocate));
    }
  }
  return with_lse ? nb::object(nb::make_tuple(out, lse)) : out;
}

template <class Read>
PyObject* attend(Given given, Read const& read) {
  try {
    if (torch.tensor_type == nullptr || is_watched()) { Py_RETURN_NONE; }
    Reader reader(call(torch.is_grad_enabled).ptr() == Py_True);
    std::optional<AppendArguments> appended;
    Arguments args = read(reader, appended);
    reader.flag(given[kReturnLse]);
    if (!reader.all_plain()) { Py_RETURN_NONE; }
    return launch(given, args, appended).release().ptr();
  } catch (nb::python_error& error) { error.restore(); } catch (CudaError const& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (Error const&) {
    Py_RETURN_NONE;  // the long way says what is wrong
  } catch (std::exception const& error) { PyErr_SetString(PyExc_RuntimeError, error.what()); }
  return nullptr;
}

bool are_as_many(char const* function, Py_ssize_t found, std::size_t wanted) {
  if (found == static_cast<Py_ssize_t>(wanted)) { return true; }
  PyErr_Format(PyExc_TypeError, "%s: %zu arguments are needed, found %zd", function, wanted, found);
  return false;
}

PyObject* attend_dense(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
  if (!are_as_many("attend_dense", count, kSharedArguments)) { return nullptr; }
  Given const given(args, kSharedArguments);
  return attend(given, [&](Reader& reader, auto& /*appended*/) { return read_shared(reader, given); });
}

PyObject* attend_packed(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
  if (!are_as_many("attend_packed", count, kPackedArguments)) { return nullptr; }
  Given const given(args, kPackedArguments);
  return attend(given, [&](Reader& reader, auto& /*appended*/) { return read_packed(reader, given); });
}

PyObject* attend_cache(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
  if (!are_as_many("attend_cache", count, kCacheArguments)) { return nullptr; }
  Given const given(args, kCacheArguments);
  return attend(given, [&](Reader& reader, std::optional<AppendArguments>& appended) {
    Arguments read = read_cache(reader, given);
    if (given[kNew] != Py_None) { appended = read_new(reader, given[kNew], read); }
    return read;
  });
}

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

void use_torch(nb::object tensor, nb::object parameter, nb::object is_grad_enabled, nb::object dispatch_modes,
               nb::object transform, nb::object empty_like, nb::object empty_output, nb::object empty_lse,
               nb::object empty_workspace) {
  Torch next;
  next.api = exchange_api(tensor);
  if (next.api != nullptr && next.api->dltensor_from_py_object_no_sync != nullptr) {
    next.tensor_type = tensor.release().ptr();
    next.parameter_type = parameter.release().ptr();
    next.is_grad_enabled = is_grad_enabled.release().ptr();
    next.dispatch_modes = dispatch_modes.release().ptr();
    next.transform = transform.release().ptr();
    next.empty_like = empty_like.release().ptr();
    next.empty_output = empty_output.release().ptr();
    next.empty_lse = empty_lse.release().ptr();
    next.empty_workspace = empty_workspace.release().ptr();
    next.requires_grad = nb::str("requires_grad").release().ptr();
  }
  Torch const before = std::exchange(torch, next);
  // A function that is replaced may hold tensors.
  for (PyObject* const held :
       {before.tensor_type, before.parameter_type, before.is_grad_enabled, before.dispatch_modes, before.transform,
        before.empty_like, before.empty_output, before.empty_lse, before.empty_workspace, before.requires_grad}) {
    Py_XDECREF(held);
  }
}

using FastFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

PyMethodDef method(char const* name, FastFunction function, char const* doc) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, doc};
}

}  // namespace

void bind_attend(nb::module_& module) {
  // C functions without names and defaults of their arguments, which nanobind would look for in every call.
  static PyMethodDef methods[] = {
      method("attend_dense", &attend_dense,
             "attend_dense(q, k, v, softmax_scale, causal, window_size, attention_chunk, softcap, num_splits, "
             "sm_margin, return_lse, s_aux, out, softmax_lse, batch_invariant, workspace, /)\n--\n\n"
             "flash_attn_func of plain torch tensors that nothing watches; None, with nothing launched, for all else."),
      method("attend_packed", &attend_packed,
             "attend_packed(q, k, v, softmax_scale, causal, window_size, attention_chunk, softcap, num_splits, "
             "sm_margin, return_lse, s_aux, out, softmax_lse, batch_invariant, workspace, cu_seqlens_q, seqused_k, "
             "page_table, max_seqlen_q, cp_world_size, cp_rank, cp_tot_seqused_k, scheduler_metadata, cu_seqlens_k, "
             "seqused_q, max_seqlen_k, /)\n--\n\n"
             "flash_attn_varlen_func; as attend_dense."),
      method("attend_cache", &attend_cache,
             "attend_cache(q, k_cache, v_cache, softmax_scale, causal, window_size, attention_chunk, softcap, "
             "num_splits, sm_margin, return_lse, s_aux, out, softmax_lse, batch_invariant, workspace, cu_seqlens_q, "
             "cache_seqlens, page_table, max_seqlen_q, cp_world_size, cp_rank, cp_tot_seqused_k, scheduler_metadata, "
             "cache_batch_idx, cache_leftpad, new, /)\n--\n\n"
             "flash_attn_with_kvcache; as attend_dense. new: None, or (k, v, rotary_cos, rotary_sin, "
             "cu_seqlens_k_new, rotary_seqlens, rotary_interleaved)."),
      method("plain_arguments", &plain_arguments,
             "plain_arguments(arguments, /)\n--\n\n"
             "The list as a tuple; None if it holds anything but plain torch tensors, None, ints, floats and lists."),
      method("fits", &fits,
             "fits(arguments, kinds, /)\n--\n\n"
             "Whether no more arguments than kinds are in the tuple, each of exactly its kind, a byte: t plain torch "
             "tensor,\nT the same or None, i int, f int or float, F the same or None, l list of ints or None, n None."),
  };
  for (PyMethodDef& made : methods) {
    module.attr(made.ml_name) = nb::steal(PyCFunction_NewEx(&made, nullptr, nb::str("hopper_attention._core").ptr()));
  }
  module.def("use_torch", &use_torch, nb::arg("tensor"), nb::arg("parameter"), nb::arg("is_grad_enabled"),
             nb::arg("dispatch_modes"), nb::arg("transform"), nb::arg("empty_like"), nb::arg("empty_output"),
             nb::arg("empty_lse"), nb::arg("empty_workspace"),
             "What attend_*() needs of torch: types of plain tensors; whether grad mode is on, how many dispatch modes "
             "and\n"
             "which transform there are; empty_like(x), empty_output(q, v), empty_lse(q), empty_workspace(bytes, q).\n"
             "Without effect if tensors of that type do not come in through the DLPack C exchange API.");
}

}  // namespace hopper_attention::python
