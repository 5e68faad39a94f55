// The functions of the CUDA runtime that torch calls, without a device: its memory is the host's, streams and events do
// nothing, and a kernel that is launched is an error (`kernels.cpp` computes in place of most).
//
// Loaded before libcudart (LD_PRELOAD). `build.py` adds a function that returns 0, "success", for each other one that
// torch's libraries ask for.

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#undef cudaGetDeviceProperties

namespace {

constexpr size_t TOTAL_BYTES = size_t(8) << 30;
std::map<char*, size_t> allocated, pinned;  // start and bytes of each allocation
std::mutex mutex;
size_t used_bytes = 0;

template <typename Handle>
cudaError_t make(Handle* handle) {
  *handle = reinterpret_cast<Handle>(malloc(64));
  return cudaSuccess;
}

int succeed(...) { return 0; }

bool is_in(std::map<char*, size_t>& allocations, const void* address) {
  auto next = allocations.upper_bound(static_cast<char*>(const_cast<void*>(address)));
  return next != allocations.begin() && (--next, address < next->first + next->second);
}

thread_local cudaError_t last_error = cudaSuccess;

}  // namespace

extern "C" {

// ---------------------------------------------------------------------- the device
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorString(cudaError_t) { return "the simulated CUDA device has no kernel for this"; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorSimulated"; }

cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int) {
  strncpy(id, "0000:01:00.0", length);
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int) {
  memset(found, 0, sizeof *found);
  strcpy(found->name, "simulated");
  found->major = 9;  // of an H100, as everything below
  found->multiProcessorCount = 132;
  found->totalGlobalMem = TOTAL_BYTES;
  found->warpSize = 32;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxBlocksPerMultiProcessor = 32;
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerBlockOptin = 232448;
  found->sharedMemPerMultiprocessor = 233472;
  found->regsPerMultiprocessor = found->regsPerBlock = 65536;
  found->l2CacheSize = 50 << 20;
  found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->textureAlignment = 512;
  found->unifiedAddressing = found->concurrentKernels = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  cudaDeviceProp device;
  cudaGetDeviceProperties(&device, 0);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = device.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = device.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = device.multiProcessorCount; break;
    case cudaDevAttrWarpSize: *value = device.warpSize; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = device.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = device.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = device.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = device.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = device.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxGridDimX: *value = device.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *value = device.maxGridSize[1]; break;
    case cudaDevAttrMaxGridDimZ: *value = device.maxGridSize[2]; break;
    default: *value = 1;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(succeed);
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// ---------------------------------------------------------------------- memory
cudaError_t cudaMalloc(void** address, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  *address = nullptr;
  if (used_bytes + bytes > TOTAL_BYTES) return cudaErrorMemoryAllocation;
  void* made = mmap(nullptr, bytes + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) return cudaErrorMemoryAllocation;
  allocated[static_cast<char*>(made)] = bytes;
  used_bytes += bytes;
  *address = made;
  return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = allocated.find(static_cast<char*>(address));
  if (found == allocated.end()) return cudaSuccess;
  used_bytes -= found->second;
  munmap(address, found->second + 4096);
  allocated.erase(found);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  *total_bytes = TOTAL_BYTES;
  *free_bytes = TOTAL_BYTES - used_bytes;
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  *address = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (*address == nullptr) return cudaErrorMemoryAllocation;
  std::lock_guard<std::mutex> lock(mutex);
  pinned[static_cast<char*>(*address)] = bytes;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  pinned.erase(static_cast<char*>(address));
  free(address);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  memset(found, 0, sizeof *found);
  found->type = is_in(allocated, address) ? cudaMemoryTypeDevice
      : is_in(pinned, address)            ? cudaMemoryTypeHost
                                          : cudaMemoryTypeUnregistered;
  found->devicePointer = found->hostPointer = const_cast<void*>(address);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return memmove(to, from, bytes), cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return memmove(to, from, bytes), cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t) {
  return memmove(to, from, bytes), cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) { return memset(to, value, bytes), cudaSuccess; }
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  return memset(to, value, bytes), cudaSuccess;
}

// ---------------------------------------------------------------------- streams, events, kernels
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return make(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return make(stream); }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return make(event); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return make(event); }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  return *milliseconds = 0.01f, cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->binaryVersion = found->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t, unsigned) {
  return *count = 2, cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return last_error = cudaErrorNotSupported;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  return last_error = cudaErrorNotSupported;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
  return last_error = cudaErrorNotSupported;
}
void** __cudaRegisterFatBinary(void*) {
  static void* handle[8];
  return handle;
}
int __cudaGetKernel(void** kernel, const void* function) { return *kernel = const_cast<void*>(function), 0; }

}  // extern "C"
