/* A FAKE GPU: the functions of CUDA's runtime and driver, of cuBLAS, NVML and NCCL whose results
   steer the code that calls them. bench/rehearsal.py adds all the others, which do nothing and
   succeed, and puts the library in front of the real ones.

   FAKE_GPUS says how many there are, one by default. Each is an H100 of 85 GB that computes nothing.
   Its memory is memory of the host, and is zero at first. Copies are real. Setting less than 64 MiB
   to a value is real, too; setting more does nothing. Every kernel, every product of cuBLAS and every
   collective of NCCL leaves its outputs as they are. Streams and events are always done. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <driver_types.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* VERSION: the version of CUDA, for example 13000; set by -DVERSION */
#define BYTES 85000000000UL
#define NAME "NVIDIA H100 80GB HBM3"
#define FAILED 2

/* what every handle points to */
static char object[4096];
#define HANDLE(pointer) (*(void **)(pointer) = object, 0)

/* ---- the device */

static __thread int current_device;

static int all_devices(void) {
  const char *count = getenv("FAKE_GPUS");
  return count ? atoi(count) : 1;
}
/* the number of GPUs that CUDA_VISIBLE_DEVICES names, with commas between them */
static int visible_devices(void) {
  const char *names = getenv("CUDA_VISIBLE_DEVICES");
  if (!names) return all_devices();
  int count = *names != 0;
  for (; *names; names++) count += *names == ',';
  return count;
}
int cudaGetDeviceCount(int *count) {
  *count = visible_devices();
  return *count ? 0 : cudaErrorNoDevice;
}
int cudaGetDevice(int *device) { *device = current_device; return 0; }
int cudaSetDevice(int device) { current_device = device; return 0; }
int cudaRuntimeGetVersion(int *version) { *version = VERSION; return 0; }
int cudaDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cudaMemGetInfo(size_t *available, size_t *total) { *available = *total = BYTES; return 0; }
int cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 0; return 0; }
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
  case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
  case cudaDevAttrMultiProcessorCount: *value = 132; break;
  case cudaDevAttrWarpSize: *value = 32; break;
  case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
  case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
  case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
  case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
  /* if this is 0, some sums of torch never end */
  case cudaDevAttrMaxGridDimX: *value = 1 << 30; break;
  default: *value = 0;
  }
  return 0;
}
int cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, NAME);
  properties->totalGlobalMem = BYTES;
  properties->major = 9;
  properties->multiProcessorCount = 132;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = 232448;
  properties->regsPerMultiprocessor = 65536;
  properties->maxGridSize[0] = 1 << 30;
  return 0;
}
const char *cudaGetErrorString(int error) { return "an error of bench/fake_gpu.c"; }
const char *cudaGetErrorName(int error) { return "cudaErrorFake"; }

int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuDeviceGetCount(int *count) { return cudaGetDeviceCount(count); }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  return cudaDeviceGetAttribute(value, attribute, device);
}
int cuCtxGetCurrent(void **context) { return HANDLE(context); }
int cuCtxGetDevice(int *device) { return cudaGetDevice(device); }
int cuDevicePrimaryCtxRetain(void **context, int device) { return HANDLE(context); }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return 0;
}
int cuGetErrorString(int error, const char **text) { *text = cudaGetErrorString(error); return 0; }
int cuGetErrorName(int error, const char **text) { *text = cudaGetErrorName(error); return 0; }
/* finds a function of the driver by its name */
int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags,
                        int *status) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (status) *status = *function ? 0 : 1;
  return 0;
}
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                     unsigned long long flags, int *status) {
  return cuGetProcAddress_v2(name, function, version, flags, status);
}

int nvmlDeviceGetCount_v2(unsigned *count) { *count = all_devices(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { return HANDLE(device); }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) { return HANDLE(device); }
int nvmlDeviceGetIndex(void *device, unsigned *index) { *index = 0; return 0; }
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
  *major = 9;
  *minor = 0;
  return 0;
}
/* memory: total, free, used */
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) {
  memory[0] = memory[1] = BYTES;
  memory[2] = 0;
  return 0;
}
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
  strcpy(uuid, "GPU-00000000-0000-0000-0000-000000000000");
  return 0;
}
int nvmlDeviceGetName(void *device, char *name, unsigned length) { strcpy(name, NAME); return 0; }
const char *nvmlErrorString(int error) { return "an error of bench/fake_gpu.c"; }

/* ---- memory */

int cudaMalloc(void **memory, size_t size) {
  *memory = calloc(size, 1);
  return *memory ? 0 : FAILED;
}
int cudaFree(void *memory) { free(memory); return 0; }
int cudaHostAlloc(void **memory, size_t size, unsigned flags) { return cudaMalloc(memory, size); }
int cudaMallocHost(void **memory, size_t size) { return cudaMalloc(memory, size); }
int cudaFreeHost(void *memory) { return cudaFree(memory); }
int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
  memmove(to, from, size);
  return 0;
}
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
  return cudaMemcpy(to, from, size, kind);
}
int cudaMemset(void *to, int value, size_t size) {
  /* Setting a KV cache of 25 GB would take the host's memory. */
  if (size < 64 << 20) memset(to, value, size);
  return 0;
}
int cudaMemsetAsync(void *to, int value, size_t size, void *stream) {
  return cudaMemset(to, value, size);
}
int cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *memory) {
  memset(attributes, 0, sizeof *attributes);
  attributes->type = cudaMemoryTypeDevice;
  attributes->device = current_device;
  return 0;
}
/* attribute: always the device pointer, which Triton asks for */
int cuPointerGetAttribute(void **value, int attribute, void *memory) {
  *value = memory;
  return 0;
}
/* torch's expandable segments: the memory is there once its addresses are reserved */
int cuMemAddressReserve(void **memory, size_t size, size_t alignment, void *wish,
                        unsigned long long flags) {
  int access = PROT_READ | PROT_WRITE;
  *memory = mmap(0, size, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return *memory == MAP_FAILED ? FAILED : 0;
}
int cuMemAddressFree(void *memory, size_t size) { return munmap(memory, size) ? FAILED : 0; }
int cuMemGetAllocationGranularity(size_t *size, void *properties, int option) {
  *size = 2 << 20;
  return 0;
}

/* ---- streams, events, graphs, kernels */

int cudaStreamCreate(void **stream) { return HANDLE(stream); }
int cudaStreamCreateWithFlags(void **stream, unsigned flags) { return HANDLE(stream); }
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
  return HANDLE(stream);
}
int cudaStreamGetPriority(void *stream, int *priority) { *priority = 0; return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return 0;
}
int cudaEventCreate(void **event) { return HANDLE(event); }
int cudaEventCreateWithFlags(void **event, unsigned flags) { return HANDLE(event); }
int cudaEventElapsedTime(float *milliseconds, void *start, void *end) {
  *milliseconds = 1;
  return 0;
}

static int capturing = cudaStreamCaptureStatusNone;
int cudaStreamBeginCapture(void *stream, int mode) {
  capturing = cudaStreamCaptureStatusActive;
  return 0;
}
int cudaStreamEndCapture(void *stream, void **graph) {
  capturing = cudaStreamCaptureStatusNone;
  return HANDLE(graph);
}
int cudaStreamIsCapturing(void *stream, int *status) { *status = capturing; return 0; }
int cuStreamIsCapturing(void *stream, int *status) { *status = capturing; return 0; }
int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id, void **graph,
                             void **nodes, void **edges, size_t *count) {
  *status = capturing;
  if (id) *id = 1;
  if (graph) *graph = object;
  if (nodes) *nodes = 0;
  if (edges) *edges = 0;
  if (count) *count = 0;
  return 0;
}
int cudaGraphInstantiate(void **executable, void *graph, unsigned long long flags) {
  return HANDLE(executable);
}
int cudaGraphGetNodes(void *graph, void *nodes, size_t *count) { *count = 1; return 0; }

int cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  return 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads,
                                                  size_t memory) {
  *blocks = 1;
  return 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel,
                                                           int threads, size_t memory,
                                                           unsigned flags) {
  *blocks = 1;
  return 0;
}
int cuModuleLoadData(void **module, const void *image) { return HANDLE(module); }
int cuModuleGetFunction(void **kernel, void *module, const char *name) { return HANDLE(kernel); }
int cuFuncGetAttribute(int *value, int attribute, void *kernel) {
  /* attribute 0 is the largest number of threads of a block */
  *value = attribute ? 0 : 1024;
  return 0;
}

/* ---- libraries */

int cublasCreate_v2(void **handle) { return HANDLE(handle); }
int cublasLtCreate(void **handle) { return HANDLE(handle); }
int cublasGetVersion_v2(void *handle, int *version) { *version = 130000; return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d,
                                   void *preference, int wanted, void *results, int *found) {
  *found = 1;
  return 0;
}
int cudnnCreate(void **handle) { return HANDLE(handle); }
int ncclGetVersion(int *version) { *version = 22907; return 0; }
int ncclCommInitRankConfig(void **group) { return HANDLE(group); }
int ncclCommInitRankScalable(void **group) { return HANDLE(group); }
int ncclCommGetAsyncError(void *group, int *error) { *error = 0; return 0; }
const char *ncclGetErrorString(int error) { return "an error of bench/fake_gpu.c"; }
const char *ncclGetLastError(void *group) { return "an error of bench/fake_gpu.c"; }
