// A libcuda without a GPU: it loads anything, and of every launch it keeps what the driver would be given.
// Built by fake_gpu.py, which also tells it how large each kernel's parameters are.
#include "cuda.h"
#include <string.h>
#include <unistd.h>

#define MOST_FUNCTIONS 1024
#define MOST_PARAMETERS 64
#define MOST_LAUNCHES 4096
#define MOST_BYTES 2048

typedef struct {
  int grid[3], block, shared, ahead, bytes;
  unsigned long long stream, function;
  unsigned char parameters[MOST_BYTES];
} Launch;

static struct {
  int count, sizes[MOST_PARAMETERS];
} functions[MOST_FUNCTIONS];  // by handle
static unsigned long long loaded = 0;
static Launch launches[MOST_LAUNCHES];
static int launched = 0, described = 0, refusing = 0;
static __thread CUcontext context = NULL;  // as in the driver, a thread begins without one

void fake_parameters(unsigned long long function, int count, const int *sizes) {
  functions[function].count = count;
  memcpy(functions[function].sizes, sizes, count * sizeof(int));
}
void fake_refuse(int error) { refusing = error; }
int fake_launches(void) { return launched; }
int fake_described(void) { return described; }
const Launch *fake_launch(int i) { return &launches[i % MOST_LAUNCHES]; }

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  if (refusing || !context)
    return refusing ? refusing : CUDA_ERROR_INVALID_CONTEXT;
  Launch *l = &launches[__atomic_fetch_add(&launched, 1, __ATOMIC_SEQ_CST) % MOST_LAUNCHES];
  unsigned long long handle = (unsigned long long)function;
  *l = (Launch){.grid = {config->gridDimX, config->gridDimY, config->gridDimZ}, .block = config->blockDimX, .shared = config->sharedMemBytes,
                .stream = (unsigned long long)config->hStream, .function = handle};
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
      l->ahead = config->attrs[i].value.programmaticStreamSerializationAllowed;
  for (int p = 0; p < functions[handle].count; ++p) {
    memcpy(l->parameters + l->bytes, parameters[p], functions[handle].sizes[p]);
    l->bytes += functions[handle].sizes[p];
  }
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *extents,
                                const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  unsigned long long *words = (unsigned long long *)map;
  memset(map, 0, sizeof(*map));
  words[0] = (unsigned long long)address;
  words[2] = type, words[3] = rank, words[4] = swizzle, words[5] = fill;  // word 1 is Triton's to mend
  for (cuuint32_t i = 0; i < rank && i < 2; ++i)
    words[6 + i] = extents[i], words[8 + i] = box[i], words[10 + i] = i + 1 < rank ? strides[i] : 0;
  ++described;
  return CUDA_SUCCESS;
}

CUresult cuTensorMapReplaceAddress(CUtensorMap *map, void *address) {
  ((unsigned long long *)map)[0] = (unsigned long long)address;
  return (unsigned long long)map % 64 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  usleep(2000);  // as on a GPU there is time for another thread to come by
  *module = (CUmodule)__atomic_add_fetch(&loaded, 1, __ATOMIC_SEQ_CST);
  return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) { *function = (CUfunction)module; return CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) { *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0; return CUDA_SUCCESS; }
CUresult cuFuncGetParamInfo(CUfunction function, size_t place, size_t *offset, size_t *size) {
  unsigned long long handle = (unsigned long long)function;
  if (place >= functions[handle].count)
    return CUDA_ERROR_INVALID_VALUE;
  *offset = 0;  // which nobody asks for
  *size = functions[handle].sizes[place];
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
  *value = which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9 : which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? 0 : 232448;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *found) { *found = context; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext given) { context = given; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 1 << 20; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 13020; return CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult error, const char **text) { *text = "FAKE"; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "fake"; return CUDA_SUCCESS; }
CUresult cuInit(unsigned int flags) { return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { *status = CU_STREAM_CAPTURE_STATUS_NONE; return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr pointer) { *(CUdeviceptr *)value = pointer; return CUDA_SUCCESS; }
