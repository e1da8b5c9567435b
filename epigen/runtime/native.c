// The launches of a call in one step: the addresses of its tensors, whether each is aligned as it was, and the driver's launch of every kernel.
// What it takes from Python is made once (native.py); nothing in it changes afterwards, so threads may share it.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <stddef.h>
#include <string.h>

#define ALIGNED_BYTES 16  // as arguments.py has it

typedef unsigned long long Word;

static CUresult (*launch_kernel)(const CUlaunchConfig *, CUfunction, void **, void **);
static CUresult (*get_context)(CUcontext *);
static CUresult (*set_context)(CUcontext);
static CUresult (*name_error)(CUresult, const char **);
static CUresult (*replace_address)(CUtensorMap *, void *);

typedef struct {
  int place;  // of its value among those of a call; negative where it is the same in every call
  Word fixed;
  const char *map;  // a tensor map, into which the value's address is put; else NULL
} Parameter;

typedef struct {
  Word function;
  unsigned blocks, threads, shared_bytes;
  int ahead[2];  // whether it starts before the kernel in front of it has ended: in a stream, and into a graph
  Py_ssize_t count, maps;
  Parameter *parameters;
  PyObject *from;  // owns the maps
} Kernel;

typedef struct {
  int place, other;  // two values of a call, of which the first is written
  Word bytes, other_bytes;
} Apart;

typedef struct {
  PyObject_HEAD
  vectorcallfunc call;
  Word context;
  PyObject *data_ptr, *alignments;
  Py_ssize_t values, count, pairs;
  Kernel *kernels;
  Apart *apart;
} Launches;

static Word word(PyObject *value) { return PyLong_AsUnsignedLongLongMask(value); }

// What a kernel is given for a value. alignment: '=' asks for a tensor that is aligned, '!' for one that is not, and '.' for neither.
// 1; 0 where the tensor is not as it was; -1 with an exception.
static int given(Launches *self, PyObject *value, char alignment, Word *parameter) {
  if (PyFloat_CheckExact(value)) {
    float number = (float)PyFloat_AS_DOUBLE(value);
    *parameter = 0;
    memcpy(parameter, &number, sizeof number);
    return 1;
  }
  if (PyLong_CheckExact(value)) {
    *parameter = word(value);
    return 1;
  }
  PyObject *address = PyObject_CallOneArg(self->data_ptr, value);
  if (!address)
    return -1;
  *parameter = word(address);
  Py_DECREF(address);
  return alignment == '.' || (*parameter % ALIGNED_BYTES == 0) == (alignment == '=');
}

static CUresult launch(const Kernel *kernel, CUstream stream, int captured, Word *values) {
  void *parameters[kernel->count + 1];
  CUtensorMap maps[kernel->maps + 1], *next = maps;
  for (Py_ssize_t i = 0; i < kernel->count; ++i) {
    Parameter *p = &kernel->parameters[i];
    parameters[i] = p->map ? (void *)next : p->place < 0 ? &p->fixed : &values[p->place];
    if (!p->map)
      continue;
    memcpy(next, p->map, sizeof *next);
    CUresult error = replace_address(next++, (void *)(uintptr_t)values[p->place]);
    if (error)
      return error;
  }
  CUlaunchAttribute ahead = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, .value = {.programmaticStreamSerializationAllowed = 1}};
  CUlaunchConfig config = {.gridDimX = kernel->blocks, .gridDimY = 1, .gridDimZ = 1, .blockDimX = kernel->threads, .blockDimY = 1, .blockDimZ = 1,
                           .sharedMemBytes = kernel->shared_bytes, .hStream = stream, .attrs = &ahead, .numAttrs = kernel->ahead[captured]};
  return launch_kernel(&config, (CUfunction)(uintptr_t)kernel->function, parameters, NULL);
}

// A thread that CUDA has not served yet has no context.
static CUresult ensure_context(Word context) {
  CUcontext current = NULL;
  CUresult error = get_context(&current);
  return error || current ? error : set_context((CUcontext)(uintptr_t)context);
}

// Whether the bytes of what is written and those of what else is given are apart. Unsigned, so that of two distances one is a small number.
static int lie_apart(const Launches *self, const Word *values) {
  for (Py_ssize_t i = 0; i < self->pairs; ++i) {
    const Apart *pair = &self->apart[i];
    Word gap = values[pair->other] - values[pair->place];
    if (gap < pair->bytes || -gap < pair->other_bytes)
      return 0;
  }
  return 1;
}

// launches(stream, captured, *values) -> bool: false where a tensor is not aligned as it was or too near to one that is written, and nothing was launched
static PyObject *call(PyObject *object, PyObject *const *arguments, size_t flags, PyObject *names) {
  Launches *self = (Launches *)object;
  if (PyVectorcall_NARGS(flags) != self->values + 2 || (names && PyTuple_GET_SIZE(names)))
    return PyErr_Format(PyExc_TypeError, "a stream, whether it is captured, and %zd values are wanted", self->values);
  CUstream stream = (CUstream)(uintptr_t)word(arguments[0]);
  int captured = PyObject_IsTrue(arguments[1]);
  if (captured < 0 || PyErr_Occurred())
    return NULL;
  Word values[self->values + 1];
  const char *alignments = PyBytes_AS_STRING(self->alignments);
  for (Py_ssize_t i = 0; i < self->values; ++i) {
    int fits = given(self, arguments[2 + i], alignments[i], &values[i]);
    if (fits < 0 || PyErr_Occurred())
      return NULL;
    if (!fits)
      Py_RETURN_FALSE;
  }
  if (!lie_apart(self, values))
    Py_RETURN_FALSE;
  CUresult error;
  Py_BEGIN_ALLOW_THREADS
  error = ensure_context(self->context);
  for (Py_ssize_t i = 0; i < self->count && !error; ++i)
    error = launch(&self->kernels[i], stream, captured, values);
  Py_END_ALLOW_THREADS
  if (!error)
    Py_RETURN_TRUE;
  const char *name = NULL;
  name_error(error, &name);
  return PyErr_Format(PyExc_RuntimeError, "the driver refused a launch: %s (%d)", name ? name : "an unknown error", error);
}

static void release(PyObject *object) {
  Launches *self = (Launches *)object;
  for (Py_ssize_t i = 0; i < self->count; ++i) {
    PyMem_Free(self->kernels[i].parameters);
    Py_XDECREF(self->kernels[i].from);
  }
  PyMem_Free(self->kernels);
  PyMem_Free(self->apart);
  Py_XDECREF(self->data_ptr);
  Py_XDECREF(self->alignments);
  Py_TYPE(object)->tp_free(object);
}

// from: (function, blocks, threads, shared_bytes, ahead, ahead in a graph, ((place, value or tensor map), ...))
static void fill(Kernel *kernel, PyObject *from, Py_ssize_t values) {
  PyObject *parameters, *fixed;
  if (!PyArg_ParseTuple(from, "KIIIppO!", &kernel->function, &kernel->blocks, &kernel->threads, &kernel->shared_bytes, &kernel->ahead[0],
                        &kernel->ahead[1], &PyTuple_Type, &parameters))
    return;
  kernel->from = Py_NewRef(from);
  kernel->count = PyTuple_GET_SIZE(parameters);
  kernel->parameters = PyMem_Calloc(kernel->count + 1, sizeof(Parameter));
  if (!kernel->parameters)
    PyErr_NoMemory();
  for (Py_ssize_t i = 0; i < kernel->count && !PyErr_Occurred(); ++i) {
    Parameter *p = &kernel->parameters[i];
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(parameters, i), "iO", &p->place, &fixed))
      return;
    if (PyBytes_Check(fixed) && PyBytes_GET_SIZE(fixed) == sizeof(CUtensorMap) && p->place >= 0) {
      p->map = PyBytes_AS_STRING(fixed);
      ++kernel->maps;
    } else
      p->fixed = word(fixed);
    if (p->place >= values)
      PyErr_Format(PyExc_ValueError, "a parameter is value %d of %zd", p->place, values);
  }
}

// from: ((place, other, bytes, other bytes), ...)
static void fill_apart(Launches *self, PyObject *from) {
  self->pairs = PyTuple_GET_SIZE(from);
  self->apart = PyMem_Calloc(self->pairs + 1, sizeof(Apart));
  if (!self->apart)
    PyErr_NoMemory();
  for (Py_ssize_t i = 0; i < self->pairs && !PyErr_Occurred(); ++i) {
    Apart *pair = &self->apart[i];
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(from, i), "iiKK", &pair->place, &pair->other, &pair->bytes, &pair->other_bytes))
      return;
    if (pair->place < 0 || pair->other < 0 || pair->place >= self->values || pair->other >= self->values)
      PyErr_Format(PyExc_ValueError, "values %d and %d are to be apart, of %zd", pair->place, pair->other, self->values);
  }
}

// Launches(context, data_ptr, alignments, kernels, apart)
static PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *names) {
  Word context;
  PyObject *data_ptr, *alignments, *kernels, *apart;
  if (!PyArg_ParseTuple(arguments, "KOSO!O!", &context, &data_ptr, &alignments, &PyTuple_Type, &kernels, &PyTuple_Type, &apart))
    return NULL;
  Launches *self = (Launches *)type->tp_alloc(type, 0);
  if (!self)
    return NULL;
  self->call = call;
  self->context = context;
  self->data_ptr = Py_NewRef(data_ptr);
  self->alignments = Py_NewRef(alignments);
  self->values = PyBytes_GET_SIZE(alignments);
  self->kernels = PyMem_Calloc(PyTuple_GET_SIZE(kernels) + 1, sizeof(Kernel));
  if (!self->kernels)
    PyErr_NoMemory();
  while (!PyErr_Occurred() && self->count < PyTuple_GET_SIZE(kernels)) {
    Kernel *kernel = &self->kernels[self->count];
    fill(kernel, PyTuple_GET_ITEM(kernels, self->count++), self->values);
  }
  if (!PyErr_Occurred())
    fill_apart(self, apart);
  if (!PyErr_Occurred())
    return (PyObject *)self;
  Py_DECREF(self);
  return NULL;
}

static PyTypeObject launches = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "epigen_native.Launches",
    .tp_basicsize = sizeof(Launches),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Launches, call),
    .tp_call = PyVectorcall_Call,
    .tp_new = make,
    .tp_dealloc = release,
};

// bind(cuLaunchKernelEx, cuCtxGetCurrent, cuCtxSetCurrent, cuGetErrorName, cuTensorMapReplaceAddress): where the driver has them
static PyObject *bind(PyObject *module, PyObject *arguments) {
  Word addresses[5];
  if (!PyArg_ParseTuple(arguments, "KKKKK", &addresses[0], &addresses[1], &addresses[2], &addresses[3], &addresses[4]))
    return NULL;
  launch_kernel = (void *)(uintptr_t)addresses[0];
  get_context = (void *)(uintptr_t)addresses[1];
  set_context = (void *)(uintptr_t)addresses[2];
  name_error = (void *)(uintptr_t)addresses[3];
  replace_address = (void *)(uintptr_t)addresses[4];
  Py_RETURN_NONE;
}

static PyMethodDef functions[] = {{"bind", bind, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "epigen_native", NULL, -1, functions};

PyMODINIT_FUNC PyInit_epigen_native(void) {
  PyObject *created = PyType_Ready(&launches) ? NULL : PyModule_Create(&module);
  if (created && PyModule_AddObjectRef(created, "Launches", (PyObject *)&launches)) {
    Py_DECREF(created);
    return NULL;
  }
  return created;
}
