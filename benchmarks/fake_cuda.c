/* A CUDA runtime and driver that report one GPU of compute capability FAKE_SM (75, 89, 90) and do nothing else: enough for
   torch to choose its kernels and to run autograd over tensors without data. counted_cost.py builds and preloads it. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "driver_types.h"

static int capability(void) { const char *set = getenv("FAKE_SM"); return set ? atoi(set) : 90; }

cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return 0; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return 0; }
cudaError_t cudaSetDevice(int device) { return 0; }
cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
  int sm = capability();
  memset(found, 0, sizeof *found);
  strcpy(found->name, "none");
  found->major = sm / 10;
  found->minor = sm % 10;
  found->multiProcessorCount = sm == 75 ? 40 : sm == 89 ? 128 : 132;
  found->warpSize = 32;
  found->totalGlobalMem = 80ull << 30;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxThreadsPerBlock = 1024;
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerBlockOptin = sm >= 90 ? 232448 : 101376;
  found->sharedMemPerMultiprocessor = 102400;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  return 0;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) { *least = 0; *most = -5; return 0; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) { *status = 0; return 0; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return 0; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return 0; }
cudaError_t cudaDeviceSynchronize(void) { return 0; }
cudaError_t cudaGetLastError(void) { return 0; }
cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) { *unused = 79ull << 30; *total = 80ull << 30; return 0; }
cudaError_t cudaThreadExchangeStreamCaptureMode(void *mode) { return 0; }
cudaError_t cudaMalloc(void **place, size_t size) {
  *place = mmap(0, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return 0;
}
cudaError_t cudaFree(void *place) { return 0; }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) { *pool = 0; return 0; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int one, int other) { *can = 0; return 0; }
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) { *value = 1; return 0; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { *event = 0; return 0; }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return 0; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return 0; }
cudaError_t cudaEventQuery(cudaEvent_t event) { return 0; }

int cuInit(unsigned flags) { return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { if (flags) *flags = 0; *active = 1; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetErrorString(int error, const char **text) { *text = ""; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int number) { *device = 0; return 0; }
