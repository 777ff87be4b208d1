// `Direct`: a callable that runs an op past torch's dispatcher if nothing but the dispatcher's cost is lost by that,
// and otherwise calls the op itself. Written with CPython's own calls, as it is on the path of every op.
#include "host/direct.h"

#include <ATen/dlpack.h>  // torch's, but plain C
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <structmember.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <memory_resource>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "direct_ops.h"

namespace py = pybind11;

namespace specdec::host {
namespace {

using Kind = DirectArgument::Kind;

// What `set_torch` was given, for the life of the process.
struct Torch {
  PyTypeObject* tensor = nullptr;
  const DLPackExchangeAPI* exchange = nullptr;
  PyObject* (*wrap)(const void* tensor) = nullptr;  // at::TensorBase, which an AtenTensorHandle points to
  int32_t (*free)(void* handle) = nullptr;
  std::vector<PyObject*> busy;  // functions without arguments: true if something watches, records or changes calls
  PyObject* grad_enabled = nullptr;
  PyObject* out_of_memory = nullptr;  // the exception
  PyObject* requires_grad = nullptr;  // the name
  PyObject* is_neg = nullptr;
  std::vector<PyObject*> dtypes;  // as DirectTensor::DType numbers them
} torch;

struct Direct {
  PyObject_HEAD vectorcallfunc call;
  PyObject* op;
  const DirectOp* cpu;
  const DirectOp* cuda;
};

// 1, 0, or -1 with a Python error.
int is_true(PyObject* function) {
  PyObject* answer = PyObject_CallNoArgs(function);
  if (answer == nullptr) return -1;
  const int truth = PyObject_IsTrue(answer);
  Py_DECREF(answer);
  return truth;
}

// Whether an answer, which is owned here, is False; false if there is no answer.
bool is_false(PyObject* answer) {
  const bool no = answer == Py_False;
  Py_XDECREF(answer);
  return no;
}

DirectTensor::DType dtype_of(const DLDataType& type) {
  const auto is = [&](DLDataTypeCode code, int bits) {
    return type.code == code && type.bits == bits && type.lanes == 1;
  };
  if (is(kDLFloat, 32)) return DirectTensor::kFloat32;
  if (is(kDLFloat, 64)) return DirectTensor::kFloat64;
  if (is(kDLInt, 64)) return DirectTensor::kInt64;
  if (is(kDLInt, 32)) return DirectTensor::kInt32;
  if (is(kDLBfloat, 16)) return DirectTensor::kBFloat16;
  return is(kDLFloat, 16) ? DirectTensor::kFloat16 : DirectTensor::kOther;
}

// Sees a plain tensor on the CPU or a CUDA device; else false, perhaps with a Python error.
bool see(PyObject* given, DirectTensor& out) {
  DLTensor view;
  if (Py_TYPE(given) != torch.tensor || torch.exchange->dltensor_from_py_object_no_sync(given, &view) != 0)
    return false;
  if (view.strides == nullptr || view.dtype.code == kDLComplex || view.dtype.bits * view.dtype.lanes % 8 != 0)
    return false;
  const bool on_cuda = view.device.device_type == kDLCUDA;
  out = {static_cast<char*>(view.data) + view.byte_offset,
         view.shape,
         view.strides,
         view.ndim,
         dtype_of(view.dtype),
         view.dtype.bits * view.dtype.lanes / 8,
         on_cuda ? view.device.device_id : -1};
  return on_cuda || view.device.device_type == kDLCPU;
}

// One call's arguments, which live no longer than the call and mostly need no memory but this object's own.
class Arguments {
 public:
  // Whether all arguments can be had without the dispatcher.
  bool take_all(PyObject* const* given, const DirectOp& op) {
    const int grad = is_true(torch.grad_enabled);
    if (grad < 0) return false;
    grad_ = grad != 0;
    taken_ = array<DirectArgument>(op.num_arguments);
    for (int32_t i = 0; i < op.num_arguments; ++i)
      if (!take(given[i], op.kinds[i], taken_[i])) return false;
    return first_ != nullptr;
  }

  const DirectArgument* data() const { return taken_; }
  bool on_cuda() const { return first_->cuda_device >= 0; }

 private:
  template <class T>
  T* array(Py_ssize_t size) {
    T* const made = static_cast<T*>(memory_.allocate(size_t(size) * sizeof(T), alignof(T)));
    std::uninitialized_value_construct_n(made, size);
    return made;
  }

  bool take(PyObject* given, Kind kind, DirectArgument& out) {
    if (given == Py_None) return kind == DirectArgument::kTensor || kind == DirectArgument::kTensors;
    switch (kind) {
      case DirectArgument::kTensor:
        return take_tensor(given, out);
      case DirectArgument::kInteger:
        return take_integer(given, out.number) && (out.kind = kind, true);
      default:
        return PyList_CheckExact(given) && take_list(given, kind, out);
    }
  }

  bool take_tensor(PyObject* given, DirectArgument& out) {
    DirectTensor& view = *array<DirectTensor>(1);
    if (first_ == nullptr) first_ = &view;
    if (!see(given, view) || view.cuda_device != first_->cuda_device) return false;
    if (view.dtype != DirectTensor::kInt64 && view.dtype != DirectTensor::kInt32) {
      if (grad_ && !is_false(PyObject_GetAttr(given, torch.requires_grad))) return false;
      if (!is_false(PyObject_CallOneArg(torch.is_neg, given))) return false;  // its memory holds the negated values
    }
    out.kind = DirectArgument::kTensor;
    out.items = &view;
    return true;
  }

  static bool take_integer(PyObject* given, int64_t& out) {
    if (!PyLong_CheckExact(given)) return false;
    out = PyLong_AsLongLong(given);
    return out != -1 || PyErr_Occurred() == nullptr;
  }

  static bool take_number(PyObject* given, double& out) {
    if (PyFloat_CheckExact(given)) {
      out = PyFloat_AS_DOUBLE(given);
      return true;
    }
    if (!PyLong_Check(given)) return false;  // a bool passes
    out = PyLong_AsDouble(given);
    return out != -1 || PyErr_Occurred() == nullptr;
  }

  template <class T, class Take>
  bool take_items(PyObject* given, DirectArgument& out, const Take& take) {
    T* const items = array<T>(out.number);
    out.items = items;
    for (Py_ssize_t i = 0; i < out.number; ++i)
      if (!take(PyList_GET_ITEM(given, i), items[i])) return false;
    return true;
  }

  bool take_list(PyObject* given, Kind kind, DirectArgument& out) {
    out.kind = kind;
    out.number = PyList_GET_SIZE(given);
    if (kind == DirectArgument::kNumbers) return take_items<double>(given, out, take_number);
    if (kind == DirectArgument::kIntegers) return take_items<int64_t>(given, out, take_integer);
    return take_items<DirectArgument>(
        given, out, [this](PyObject* item, DirectArgument& into) { return take(item, DirectArgument::kTensor, into); });
  }

  std::byte own_[3072];
  std::pmr::monotonic_buffer_resource memory_{own_, sizeof(own_)};
  DirectArgument* taken_ = nullptr;
  const DirectTensor* first_ = nullptr;  // the first tensor
  bool grad_ = false;
};

constexpr int32_t kMostResults = 8;

// The number of results in `handles`; 0, perhaps with a Python error, if the dispatcher must be asked; -1 with a Python
// error if the kernel failed.
int32_t attempt(const Direct& self, PyObject* const* given, Py_ssize_t num_given, void** handles) {
  for (PyObject* function : torch.busy)
    if (is_true(function) != 0) return 0;
  const DirectOp& shape = self.cpu != nullptr ? *self.cpu : *self.cuda;
  if (num_given != shape.num_arguments || shape.num_results > kMostResults) return 0;
  Arguments arguments;
  try {
    if (!arguments.take_all(given, shape)) return 0;
  } catch (const std::bad_alloc&) {
    return 0;  // the dispatcher will report it
  }
  const DirectOp* op = arguments.on_cuda() ? self.cuda : self.cpu;
  if (op == nullptr) return 0;
  DirectEnd end;
  DirectWords words;
  Py_BEGIN_ALLOW_THREADS;
  end = op->run(arguments.data(), handles, words);
  Py_END_ALLOW_THREADS;
  if (end == DirectEnd::kFailed) {
    PyErr_SetString(PyExc_RuntimeError, words);
    return -1;
  }
  return end == DirectEnd::kDone ? op->num_results : 0;
}

PyObject* wrap_and_free(void* handle) {
  if (handle == nullptr) return Py_NewRef(Py_None);
  PyObject* tensor = torch.wrap(handle);
  torch.free(handle);
  return tensor;
}

// C++ reports missing memory to Python as a RuntimeError: this turns it into torch's own exception.
void name_out_of_memory() {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  if (type == PyExc_RuntimeError) {
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject* text = PyObject_Str(value);
    const char* said = text == nullptr ? nullptr : PyUnicode_AsUTF8(text);
    for (const char* words : {"out of memory", "can't allocate memory", "not enough memory", "std::bad_alloc"}) {
      if (said == nullptr || std::strstr(said, words) == nullptr) continue;
      PyErr_SetObject(torch.out_of_memory, text);
      Py_XDECREF(text);
      Py_XDECREF(type);
      Py_XDECREF(value);
      Py_XDECREF(trace);
      return;
    }
    Py_XDECREF(text);
    PyErr_Clear();
  }
  PyErr_Restore(type, value, trace);
}

PyObject* call(PyObject* object, PyObject* const* given, size_t count, PyObject* names) {
  const auto& self = *reinterpret_cast<Direct*>(object);
  void* handles[kMostResults];
  const int32_t num_results = names == nullptr ? attempt(self, given, PyVectorcall_NARGS(count), handles) : 0;
  if (num_results < 0) {
    name_out_of_memory();
    return nullptr;
  }
  if (num_results == 0) {
    PyErr_Clear();
    PyObject* results = PyObject_Vectorcall(self.op, given, count, names);
    if (results == nullptr) name_out_of_memory();
    return results;
  }
  if (num_results == 1) return wrap_and_free(handles[0]);
  PyObject* results = PyTuple_New(num_results);
  for (int32_t i = 0; i < num_results; ++i) {
    PyObject* tensor = wrap_and_free(handles[i]);
    if (tensor == nullptr || results == nullptr) {
      Py_CLEAR(results);
      Py_XDECREF(tensor);
    } else {
      PyTuple_SET_ITEM(results, i, tensor);
    }
  }
  return results;
}

void deallocate(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  Py_DECREF(reinterpret_cast<Direct*>(object)->op);
  type->tp_free(object);
  Py_DECREF(type);
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Direct, call), READONLY, nullptr},
    {"op", T_OBJECT, offsetof(Direct, op), READONLY, "What is called where this way cannot be taken."},
    {},
};
PyType_Slot slots[] = {
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
    {Py_tp_members, members},
    {},
};
PyType_Spec spec = {"specdec_kernels._host.Direct", sizeof(Direct), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

PyTypeObject* direct_type() {
  static PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  return reinterpret_cast<PyTypeObject*>(type);
}

// See specdec_kernels/backends/direct.py. An expected tensor is a tuple (argument, value, dtypes, names, shape).
bool fits(const DirectTensor& like, PyObject* expected) {
  PyObject *value = PyTuple_GET_ITEM(expected, 1), *dtypes = PyTuple_GET_ITEM(expected, 2),
           *shape = PyTuple_GET_ITEM(expected, 4);
  DirectTensor x;
  if (!see(value, x) || x.cuda_device != like.cuda_device || x.dim != PyTuple_GET_SIZE(shape)) return false;
  if (x.dim > 0 && x.strides[x.dim - 1] != 1) return false;
  for (int32_t i = 0; i < x.dim; ++i)
    if (x.sizes[i] != PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i))) return false;
  if (x.dtype == DirectTensor::kOther) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dtypes); ++i)
    if (PyTuple_GET_ITEM(dtypes, i) == torch.dtypes[size_t(x.dtype)]) return true;
  return false;
}

PyObject* all_fit(PyObject*, PyObject* const* given, Py_ssize_t count) {
  DirectTensor like;
  bool all = count == 2 && see(given[0], like) && PyList_CheckExact(given[1]);
  for (Py_ssize_t i = 0; all && i < PyList_GET_SIZE(given[1]); ++i) all = fits(like, PyList_GET_ITEM(given[1], i));
  PyErr_Clear();
  return PyBool_FromLong(all);
}

PyMethodDef all_fit_method = {"all_fit", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(all_fit)), METH_FASTCALL,
                              nullptr};

py::object make(const py::object& op, const std::string& name, std::uintptr_t cpu, std::uintptr_t cuda) {
  const auto find = [&](std::uintptr_t table) {
    return table == 0 ? nullptr : reinterpret_cast<decltype(&specdec_direct_op)>(table)(name.c_str());
  };
  const DirectOp *on_cpu = find(cpu), *on_cuda = find(cuda);
  if (torch.exchange == nullptr || (on_cpu == nullptr && on_cuda == nullptr)) return op;
  auto* made = PyObject_New(Direct, direct_type());
  if (made == nullptr) throw py::error_already_set();
  made->call = call;
  made->op = op.inc_ref().ptr();
  made->cpu = on_cpu;
  made->cuda = on_cuda;
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(made));
}

bool set_torch(const py::type& tensor, const py::capsule& exchange, std::uintptr_t wrap, std::uintptr_t free,
               const std::vector<py::object>& busy, const py::object& grad_enabled, const py::object& out_of_memory,
               const std::vector<py::object>& dtypes) {
  const auto* api = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(exchange.ptr(), "dlpack_exchange_api"));
  if (api == nullptr) throw py::error_already_set();
  if (api->header.version.major != DLPACK_MAJOR_VERSION || api->dltensor_from_py_object_no_sync == nullptr)
    return false;
  torch.busy.clear();  // an interrupted import may have got this far
  torch.dtypes.clear();
  torch.tensor = reinterpret_cast<PyTypeObject*>(tensor.inc_ref().ptr());
  torch.exchange = api;
  torch.wrap = reinterpret_cast<PyObject* (*)(const void*)>(wrap);
  torch.free = reinterpret_cast<int32_t (*)(void*)>(free);
  for (const py::object& function : busy) torch.busy.push_back(py::object(function).release().ptr());
  for (const py::object& dtype : dtypes) torch.dtypes.push_back(py::object(dtype).release().ptr());
  torch.out_of_memory = py::object(out_of_memory).release().ptr();
  torch.grad_enabled = py::object(grad_enabled).release().ptr();
  torch.requires_grad = py::str("requires_grad").release().ptr();
  torch.is_neg = tensor.attr("is_neg").cast<py::object>().release().ptr();
  return true;
}

}  // namespace

void bind_direct(py::module_& module) {
  module.def("set_torch", &set_torch, py::arg("tensor"), py::arg("exchange"), py::kw_only(), py::arg("wrap"),
             py::arg("free"), py::arg("busy"), py::arg("grad_enabled"), py::arg("out_of_memory"), py::arg("dtypes"),
             "Hand over what calls need of torch; whether this version of its exchange is known.");
  module.def("direct", &make, py::arg("op"), py::arg("name"), py::kw_only(), py::arg("cpu"), py::arg("cuda"),
             "A callable that runs an op of these libraries and calls `op` where it cannot.");
  module.attr("all_fit") = py::reinterpret_steal<py::object>(PyCFunction_New(&all_fit_method, nullptr));
}

}  // namespace specdec::host
