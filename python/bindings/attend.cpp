// attend*: the attention calls of engines, read with the least work. Tensors are plain torch tensors, values have the
// type that they should have, and nothing watches. Every other call, wrong ones included, gives None before anything is
// launched: it goes the long way, by `hopper_attention.gpu`, which converts, watches and says what is wrong.
#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include <nanobind/nanobind.h>

#include "bindings.h"
#include "fast_function.h"
#include "hopper_attention/append.h"
#include "hopper_attention/errors.h"
#include "hopper_attention/forward.h"
#include "rotated_query.h"
#include "tensor_argument.h"
#include "torch_functions.h"

namespace hopper_attention::python {
namespace {

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
enum PlaceOfCache : std::size_t {
  kCacheBatchIdx = kSequenceArguments,
  kCacheLeftpad,
  kNewK,
  kNewV,
  kCuSeqlensKNew,
  kRotary,
  kCacheArguments,
};

// Beyond 30 arguments Python makes a call by way of a list.
static_assert(kCacheArguments <= 30 && kPackedArguments <= 30);

// In the tuple of rotary embedding.
enum PlaceOfRotary : Py_ssize_t { kRotaryCos, kRotarySin, kRotarySeqlens, kRotaryInterleaved, kRotaryArguments };

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

bool appends(Given given) {
  if (given[kNewK] != Py_None || given[kNewV] != Py_None) { return true; }
  PyObject* const rotary = given[kRotary];
  if (rotary == Py_None) { return false; }
  // Without new keys it is wrong, unless it only says how elements would be paired.
  return !PyTuple_CheckExact(rotary) || PyTuple_Size(rotary) != kRotaryArguments ||
         PyTuple_GetItem(rotary, kRotaryCos) != Py_None || PyTuple_GetItem(rotary, kRotarySin) != Py_None;
}

// Into `made` how what is appended to the cache of `args` is rotated.
void read_rotary(Reader& reader, PyObject* given, Arguments const& args, AppendArguments& made) {
  if (!PyTuple_CheckExact(given) || PyTuple_Size(given) != kRotaryArguments) {
    reader.refuse();
    return;
  }
  auto const item = [given](PlaceOfRotary place) { return PyTuple_GetItem(given, place); };
  made.rotary_interleaved = reader.flag(item(kRotaryInterleaved));
  reader.read(item(kRotaryCos), made.rotary_cos);
  reader.read(item(kRotarySin), made.rotary_sin);
  if (made.rotary_cos.given() != made.rotary_sin.given()) { reader.refuse(); }
  if (!made.rotary_cos.given()) { return; }
  reader.read(item(kRotarySeqlens), made.rotary_seqlens);
  made.rotate_q_per_position =
      args.causal || args.attention_chunk != 0 || args.window_left != -1 || args.window_right != -1;
}

// Into `made` what is appended to the cache of `args`, and into `args` what attention has to know of it.
void read_new(Reader& reader, Given given, Arguments& args, AppendArguments& made) {
  reader.read(given[kNewK], made.k_new);
  reader.read(given[kNewV], made.v_new);
  made.k_cache = args.k;
  made.v_cache = args.v;
  made.seqused_k = args.seqused_k;
  made.seqused_k_all = args.seqused_k_all;
  reader.read(given[kCuSeqlensKNew], made.cu_seqlens_k_new);
  made.page_table = args.page_table;
  made.cache_batch_idx = args.cache_batch_idx;
  made.q = args.q;
  made.cu_seqlens_q = args.cu_seqlens_q;
  if (given[kRotary] != Py_None) { read_rotary(reader, given[kRotary], args, made); }
  args.cu_seqlens_k_new = made.cu_seqlens_k_new;
  if (!args.cu_seqlens_k_new.given()) {
    if (made.k_new.rank != 4) { reader.refuse(); }
    args.seqlen_k_new = made.k_new.shape[1];
  }
  if (!made.k_new.given() || !made.v_new.given() || !(made.seqused_k.given() || made.seqused_k_all >= 0)) {
    reader.refuse();
  }
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
  if (!reader.all_plain()) { return nb::none(); }
  auto const allocate = [&](std::int64_t bytes) {
    nb::gil_scoped_acquire const held;
    workspace = call(torch.empty_workspace, {nb::int_(bytes).ptr(), given[kQ]});
    Tensor tensor;
    reader.read(workspace.ptr(), tensor);
    return tensor;
  };
  Stream const stream = current_stream(*torch.api, args.q.device);
  auto const run = [&] {
    nb::gil_scoped_release const released;
    if (appended) {
      append_and_forward(*appended, args, stream, std::ref(allocate));
    } else {
      hopper_attention::forward(args, stream, std::ref(allocate));
    }
  };
  bool const rotates = appended && appended->rotary_cos.given();
  if (rotates && !take_from_workspace(args, *appended)) {
    rotated = empty_output(given[kQ], given[kQ], args.q, args.q);
    reader.read(rotated.ptr(), appended->q_rotated);
    if (!reader.all_plain()) { return nb::none(); }
  }
  run();
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
    if (appends(given)) { read_new(reader, given, read, appended.emplace()); }
    return read;
  });
}

}  // namespace

void bind_attend(nb::module_& module) {
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
             "cache_batch_idx, cache_leftpad, k, v, cu_seqlens_k_new, rotary, /)\n--\n\n"
             "flash_attn_with_kvcache; as attend_dense. rotary: (rotary_cos, rotary_sin, rotary_seqlens, "
             "rotary_interleaved), or None, which is (None, None, None, True)."),
  };
  add_functions(module, methods);
}

}  // namespace hopper_attention::python
