// The host's share of a launch that no caller can avoid: the driver's, from C, of a kernel that does nothing with as many arguments as a small
// product has. bench/driver.py compiles and calls it, with torch's context the current one.
#include <cuda.h>
#include <dlfcn.h>
#include <time.h>

static const char TEXT[] =
    ".version 7.0\n.target sm_80\n.address_size 64\n"
    ".visible .entry nothing(.param .u64 a, .param .u64 b, .param .u64 bias, .param .u64 out, .param .u32 m, .param .u32 n, .param .u32 k,\n"
    "    .param .u32 stride_a, .param .u32 stride_b, .param .u32 stride_out)\n"
    "{ ret; }\n";

static CUresult (*load)(CUmodule *, const void *);
static CUresult (*find)(CUfunction *, CUmodule, const char *);
static CUresult (*launch)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **);
static CUfunction kernel;

// 0, or the driver's error; -1 where there is no such library
int prepare(const char *library) {
  void *driver = dlopen(library, RTLD_NOW);
  CUmodule module;
  if (!driver || !(load = dlsym(driver, "cuModuleLoadData")) || !(find = dlsym(driver, "cuModuleGetFunction")) ||
      !(launch = dlsym(driver, "cuLaunchKernel")))
    return -1;
  CUresult error = load(&module, TEXT);
  return error ? error : find(&kernel, module, "nothing");
}

// microseconds a launch; negative where one fails
double launches(CUstream stream, int calls) {
  CUdeviceptr address = 0;
  int number = 0;
  void *arguments[] = {&address, &address, &address, &address, &number, &number, &number, &number, &number, &number};
  struct timespec start, end;
  clock_gettime(CLOCK_MONOTONIC, &start);
  for (int i = 0; i < calls; i++)
    if (launch(kernel, 32, 1, 1, 64, 1, 1, 0, stream, arguments, 0))
      return -1;
  clock_gettime(CLOCK_MONOTONIC, &end);
  return ((end.tv_sec - start.tv_sec) * 1e9 + (end.tv_nsec - start.tv_nsec)) / 1e3 / calls;
}
