// A CUDA runtime without a device, and what torch calls of the libraries around it.
//
// torch's CUDA build links against a dozen libraries. Here they are one: what has to answer something is written
// below, and `stand_in.py` makes a function that returns 0 of every other name. So the allocator, streams, events,
// autograd's threads and ProcessGroupNCCL with its watchdog are torch's own. What is there instead of a device:
//
//   memory    address space of the host; a device has FAKE_GIB of it, and more is refused
//   kernels   do nothing. Each takes FAKE_KERNEL_US of its stream's time (0), a spin kernel as long as it is told
//   streams   have a clock, by which events happen; the host runs ahead of it, up to kQueue operations
//   NCCL      moves nothing, but a message is over when its other end is there, in whichever process: until then
//             all that waits for it waits. Both ends must be of one size.
//
// There are FAKE_GPUS devices (1), fewer where CUDA_VISIBLE_DEVICES says so. What is asked is counted (`fake_count`).
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>
#define API extern "C" __attribute__((visibility("default")))

static const int kMostDevices = 64;
static const int kQueue = 1024;                // operations that a stream takes before the host has to wait
static const double kCyclesPerMs = 2e6;        // of a spin kernel
static const size_t kCopied = 1 << 20;         // longer copies move nothing
static const size_t kPageBytes = 4096;

static double now_ms() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}
static double setting(const char* name, double otherwise) {
  const char* found = getenv(name);
  return found && *found ? atof(found) : otherwise;
}
static size_t total_bytes() {
  static const size_t bytes = (size_t)(setting("FAKE_GIB", 79.0967) * (1ull << 30));  // an H100's
  return bytes;
}
static double kernel_ms() {
  static const double ms = setting("FAKE_KERNEL_US", 0) / 1e3;
  return ms;
}
static const std::vector<int>& visible() {  // the number of each device in the machine
  static const std::vector<int> found = [] {
    int count = std::min((int)setting("FAKE_GPUS", 1), kMostDevices);
    std::vector<int> numbers;
    const char* chosen = getenv("CUDA_VISIBLE_DEVICES");
    if (!chosen)
      for (int i = 0; i < count; i++) numbers.push_back(i);
    for (const char* at = chosen; at && *at; at++) {  // what comes behind a number that is none does not count
      char* end;
      long number = strtol(at, &end, 10);
      if (end == at || number < 0 || number >= count) break;
      numbers.push_back((int)number);
      if (*(at = end) != ',') break;
    }
    return numbers;
  }();
  return found;
}

// What is counted

static const char* const kCounted[] = {"launches", "syncs",  "copies", "pageable", "mallocs",
                                       "frees",    "pinned", "events", "waits",    "connections"};
enum { LAUNCHES, SYNCS, COPIES, PAGEABLE, MALLOCS, FREES, PINNED, EVENTS, WAITS, CONNECTIONS };
static std::atomic<unsigned long long> counts[sizeof kCounted / sizeof *kCounted];
API unsigned long long fake_count(const char* name) {
  for (size_t i = 0; i < sizeof kCounted / sizeof *kCounted; i++)
    if (!strcmp(name, kCounted[i])) return counts[i];
  return ~0ull;
}

static cudaError_t in_use() {  // how many queues the driver makes is settled when a device is first used
  static std::once_flag once;
  std::call_once(once, [] { counts[CONNECTIONS] = (unsigned long long)setting("CUDA_DEVICE_MAX_CONNECTIONS", 8); });
  return cudaSuccess;
}
static std::recursive_mutex mutex;
using Guard = std::lock_guard<std::recursive_mutex>;
static thread_local int current = 0;
static thread_local cudaError_t last = cudaSuccess;
static cudaError_t fail(cudaError_t error) { return last = error; }

// Messages between processes: the counters of a communicator lie in memory that all of its ranks map

static const int kRanks = 64, kSizes = 4096;
static_assert(kSizes > 2 * (kQueue + 1), "each end may be a stream's queue ahead of the message that is looked at");
struct Shared {
  std::atomic<int> joined;
  std::atomic<long> sent[kRanks][kRanks], received[kRanks][kRanks], collected[kRanks];
  size_t sent_bytes[kRanks][kRanks][kSizes], collected_bytes[kRanks][kSizes];
};
struct Communicator {
  Shared* shared;
  int size, rank;
  std::atomic<bool> aborted{false};
};
struct Message {
  enum Kind { SEND, RECEIVE, COLLECTIVE } kind;
  Communicator* of;
  int peer;
  long number;
  size_t bytes;
  long place;           // among all messages of the process
  double over_ms = -1;  // when it was found to be over: the same for all that is behind it
  bool is_over() {
    if (over_ms < 0 && has_met()) over_ms = now_ms();
    return over_ms >= 0;
  }
  void same(size_t other) const {
    if (other == bytes) return;
    fprintf(stderr, "fake NCCL: rank %d has %zu bytes and its peer %zu\n", of->rank, bytes, other);
    abort();
  }
  bool has_met() const {
    if (of->aborted) return true;
    Shared& all = *of->shared;
    int me = of->rank;
    if (kind == SEND) return all.received[me][peer] > number;
    if (kind == RECEIVE) {
      if (all.sent[peer][me] <= number) return false;
      same(all.sent_bytes[peer][me][number % kSizes]);
      return true;
    }
    for (int rank = 0; rank < of->size; rank++) {
      if (all.collected[rank] <= number) return false;
      same(all.collected_bytes[rank][number % kSizes]);
    }
    return true;
  }
};

// Streams and events

struct Behind {
  std::shared_ptr<Message> message;
  double ms;
};
struct Moment {  // when something is over: then, and so long behind each of these messages, in their order
  double at_ms = 0;
  std::vector<Behind> messages;
  bool is_over() {
    auto over = [this](const Behind& each) {
      if (!each.message->is_over()) return false;
      at_ms = std::max(at_ms, each.message->over_ms + each.ms);
      return true;
    };
    messages.erase(std::remove_if(messages.begin(), messages.end(), over), messages.end());
    return messages.empty() && at_ms <= now_ms();
  }
  void wait_for(const Moment& other) {
    at_ms = std::max(at_ms, other.at_ms);
    std::vector<Behind> both;
    auto own = messages.begin();
    for (const Behind& each : other.messages) {
      for (; own != messages.end() && own->message->place < each.message->place; own++) both.push_back(*own);
      double ms = each.ms;
      if (own != messages.end() && own->message == each.message) ms = std::max(ms, (own++)->ms);
      both.push_back({each.message, ms});
    }
    both.insert(both.end(), own, messages.end());
    messages = std::move(both);
  }
  void go_on(double ms) {
    at_ms = std::max(at_ms, now_ms()) + ms;
    for (Behind& each : messages) each.ms += ms;
  }
};
struct Stream {
  int device, priority;
  Moment end;
  int queued = 0;
};
struct Event : Moment {};
static std::vector<Stream*> streams[kMostDevices];

static Stream* new_stream(int device, int priority) {
  in_use();
  Guard guard(mutex);
  streams[device].push_back(new Stream{device, priority});
  return streams[device].back();
}
static Stream& stream_of(cudaStream_t handle) {
  if ((size_t)handle >= 16) return *(Stream*)handle;
  static Stream* legacy[kMostDevices];
  Guard guard(mutex);
  if (!legacy[current]) legacy[current] = new_stream(current, 0);
  return *legacy[current];
}
static void wait(Moment& moment) {
  for (;;) {
    {
      Guard guard(mutex);
      if (moment.is_over()) return;
    }
    usleep(100);
  }
}
static void wait_for_device(int device) {
  std::vector<Stream*> all;
  {
    Guard guard(mutex);
    all = streams[device];
  }
  for (Stream* each : all) wait(each->end);
}
static void enqueue(cudaStream_t handle, double ms) {
  Stream& stream = stream_of(handle);
  {
    Guard guard(mutex);
    stream.queued = stream.end.is_over() ? 0 : stream.queued + 1;
  }
  if (stream.queued > kQueue) wait(stream.end);
  Guard guard(mutex);
  stream.end.go_on(ms);
}
static cudaError_t launch(cudaStream_t stream, double ms) {
  counts[LAUNCHES]++;
  enqueue(stream, ms);
  return cudaSuccess;
}

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int priority) { *s = (cudaStream_t)new_stream(current, priority); return cudaSuccess; }
API cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaError_t cudaStreamGetPriority(cudaStream_t s, int* priority) { *priority = stream_of(s).priority; return cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
API cudaError_t cudaStreamSynchronize(cudaStream_t s) { counts[SYNCS]++; wait(stream_of(s).end); return cudaSuccess; }
API cudaError_t cudaStreamQuery(cudaStream_t s) { Guard guard(mutex); return stream_of(s).end.is_over() ? cudaSuccess : fail(cudaErrorNotReady); }
API cudaError_t cudaDeviceSynchronize() { counts[SYNCS]++; wait_for_device(current); return cudaSuccess; }
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) { *status = cudaStreamCaptureStatusNone; return cudaSuccess; }
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t* count) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (count) *count = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) { return fail(cudaErrorNotSupported); }
API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t call, void* data) { wait(stream_of(s).end); call(data); return cudaSuccess; }
API cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t call, void* data, unsigned) { wait(stream_of(s).end); call(s, cudaSuccess, data); return cudaSuccess; }

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { *e = (cudaEvent_t)new Event; return cudaSuccess; }
API cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t e) { delete (Event*)e; return cudaSuccess; }
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  counts[EVENTS]++;
  enqueue(s, 0);
  Guard guard(mutex);
  *(Moment*)(Event*)e = stream_of(s).end;
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  counts[WAITS]++;
  Guard guard(mutex);
  ((Event*)e)->is_over();
  stream_of(s).end.wait_for(*(Event*)e);
  return cudaSuccess;
}
API cudaError_t cudaEventQuery(cudaEvent_t e) { Guard guard(mutex); return ((Event*)e)->is_over() ? cudaSuccess : fail(cudaErrorNotReady); }
API cudaError_t cudaEventSynchronize(cudaEvent_t e) { counts[SYNCS]++; wait(*(Event*)e); return cudaSuccess; }
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  Guard guard(mutex);
  if (!((Event*)from)->is_over() || !((Event*)to)->is_over()) return fail(cudaErrorNotReady);
  *ms = (float)(((Event*)to)->at_ms - ((Event*)from)->at_ms);
  return cudaSuccess;
}

// Memory

struct Block {
  size_t bytes;
  int device;
  bool is_host;
};
static std::map<char*, Block> blocks;
static size_t used_bytes[kMostDevices], peak_bytes;

static void use(size_t bytes) {  // a file of each process in the folder FAKE_PEAKS has the most bytes of a device
  if ((used_bytes[current] += bytes) <= peak_bytes) return;
  peak_bytes = used_bytes[current];
  static const char* folder = getenv("FAKE_PEAKS");
  static int file = folder ? open((folder + ("/" + std::to_string(getpid()))).c_str(), O_CREAT | O_WRONLY, 0644) : -1;
  if (file >= 0) dprintf(file, "%zu\n", peak_bytes);
}

static cudaError_t take(void** found, size_t bytes, bool is_host) {
  in_use();
  bytes = std::max((bytes + kPageBytes - 1) / kPageBytes, (size_t)1) * kPageBytes;
  Guard guard(mutex);
  *found = nullptr;
  if (!is_host && used_bytes[current] + bytes > total_bytes()) return fail(cudaErrorMemoryAllocation);
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  if (!is_host) use(bytes);
  blocks[(char*)at] = {bytes, current, is_host};
  *found = at;
  return cudaSuccess;
}
static cudaError_t give_back(void* at) {
  Guard guard(mutex);
  auto found = blocks.find((char*)at);
  if (found == blocks.end()) return cudaSuccess;
  if (!found->second.is_host) used_bytes[found->second.device] -= found->second.bytes;
  munmap(at, found->second.bytes);
  blocks.erase(found);
  return cudaSuccess;
}
static const Block* block_of(const void* at) {
  auto found = blocks.upper_bound((char*)at);
  if (found == blocks.begin()) return nullptr;
  --found;
  return (char*)at < found->first + found->second.bytes ? &found->second : nullptr;
}
API cudaError_t cudaMalloc(void** p, size_t n) { counts[MALLOCS]++; return take(p, n, false); }
API cudaError_t cudaFree(void* p) {
  if (!p) return cudaSuccess;
  counts[FREES]++;
  wait_for_device(current);
  return give_back(p);
}
API cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) { counts[PINNED]++; return take(p, n, true); }
API cudaError_t cudaFreeHost(void* p) { return give_back(p); }
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) { *total = total_bytes(); *free = total_bytes() - used_bytes[current]; return cudaSuccess; }
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* p) {
  Guard guard(mutex);
  memset(found, 0, sizeof *found);
  const Block* block = block_of(p);
  found->type = !block ? cudaMemoryTypeUnregistered : block->is_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  found->device = block ? block->device : -1;
  found->devicePointer = found->hostPointer = (void*)p;
  return cudaSuccess;
}
static cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t s) {
  counts[COPIES]++;
  enqueue(s, kernel_ms());
  {
    Guard guard(mutex);
    bool from_host = kind == cudaMemcpyHostToDevice, to_host = kind == cudaMemcpyDeviceToHost;
    if ((from_host && !block_of(from)) || (to_host && !block_of(to))) counts[PAGEABLE]++;
  }
  if (bytes <= kCopied) memcpy(to, from, bytes);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind kind, cudaStream_t s) { return copy(to, from, n, kind, s); }
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n, cudaStream_t s) { return copy(to, from, n, cudaMemcpyDeviceToDevice, s); }
API cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind kind) { copy(to, from, n, kind, nullptr); return cudaStreamSynchronize(nullptr); }
API cudaError_t cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t s) { enqueue(s, kernel_ms()); if (n <= kCopied) memset(p, value, n); return cudaSuccess; }
API cudaError_t cudaMemset(void* p, int value, size_t n) { return cudaMemsetAsync(p, value, n, nullptr); }

// Devices

API cudaError_t cudaGetDeviceCount(int* n) { *n = (int)visible().size(); return *n ? cudaSuccess : fail(cudaErrorNoDevice); }
API cudaError_t cudaGetDevice(int* d) { *d = current; return cudaSuccess; }
API cudaError_t cudaSetDevice(int d) {
  if (d < 0 || d >= (int)visible().size()) return fail(cudaErrorInvalidDevice);
  current = d;
  return in_use();
}
API cudaError_t cudaDriverGetVersion(int* v) { *v = 13000; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* v) { *v = 13000; return cudaSuccess; }
API cudaError_t cudaGetLastError() { cudaError_t error = last; last = cudaSuccess; return error; }
API cudaError_t cudaPeekAtLastError() { return last; }
API const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheStandIn"; }
API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorNotSupported: return "operation not supported (graphs are not, by the runtime without a device)";
    default: return "an error of the runtime without a device";
  }
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  memset(p, 0, sizeof *p);
  int number = visible()[d];
  strcpy(p->name, "No GPU (a runtime without a device)");
  p->uuid.bytes[0] = 7;
  p->uuid.bytes[15] = (char)number;
  p->pciBusID = 1 + number;
  p->totalGlobalMem = total_bytes();
  p->major = 9, p->minor = 0, p->multiProcessorCount = 132, p->warpSize = 32;
  p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448, p->sharedMemPerMultiprocessor = 233472;
  p->reservedSharedMemPerBlock = 1024, p->regsPerBlock = 65536, p->regsPerMultiprocessor = 65536;
  p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048, p->maxBlocksPerMultiProcessor = 32;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536, p->l2CacheSize = 52428800, p->textureAlignment = 512, p->texturePitchAlignment = 32;
  p->memoryBusWidth = 5120, p->asyncEngineCount = 3, p->unifiedAddressing = 1, p->concurrentKernels = 1;
  p->cooperativeLaunch = 1, p->streamPrioritiesSupported = 1, p->canMapHostMemory = 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int d) {
  cudaDeviceProp p;
  cudaGetDeviceProperties(&p, d);
  switch (a) {
    case cudaDevAttrMaxThreadsPerBlock: *v = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxBlockDimX: *v = p.maxThreadsDim[0]; break;
    case cudaDevAttrMaxGridDimX: *v = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *v = p.maxGridSize[1]; break;
    case cudaDevAttrMultiProcessorCount: *v = p.multiProcessorCount; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = (int)p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = (int)p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = (int)p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *v = p.regsPerBlock; break;
    case cudaDevAttrComputeCapabilityMajor: *v = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *v = p.minor; break;
    case cudaDevAttrWarpSize: *v = p.warpSize; break;
    case cudaDevAttrL2CacheSize: *v = p.l2CacheSize; break;
    default: *v = 1;
  }
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* text, int n, int d) { snprintf(text, n, "0000:%02x:00.0", visible()[d] + 1); return cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 1; return cudaSuccess; }
API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) { if (flags) *flags = 0; *active = 1; return 0; }
API int cuCtxGetCurrent(void** context) { *context = (void*)16; return 0; }
API int cuGetErrorString(int, const char** text) { *text = "an error of the driver without a device"; return 0; }
API long fake_zero() { return 0; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** call, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  *call = (void*)fake_zero;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
API int nvmlInit() { return 0; }
API int nvmlInit_v2() { return 0; }
API int nvmlDeviceGetCount_v2(int* n) { *n = (int)setting("FAKE_GPUS", 1); return 0; }  // in the machine, whatever is visible
API int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { *count = 0; return 0; }

// Kernels

static const void* spin_kernel = nullptr;
struct Configuration {
  dim3 grid, block;
  size_t bytes;
  void* stream;
};
static thread_local Configuration configuration;
API void** __cudaRegisterFatBinary(void*) { static void* handle[4]; return handle; }
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) { if (strstr(name, "spin_kernel")) spin_kernel = host; }
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) { *kernel = (cudaKernel_t)host; return cudaSuccess; }
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t bytes, cudaStream_t s) { configuration = {grid, block, bytes, s}; return 0; }
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* bytes, void* s) {
  *grid = configuration.grid, *block = configuration.block, *bytes = configuration.bytes, *(void**)s = configuration.stream;
  return cudaSuccess;
}
static cudaError_t launch_kernel(const void* kernel, void** arguments, cudaStream_t s) {
  return launch(s, kernel == spin_kernel ? *(long long*)arguments[0] / kCyclesPerMs : kernel_ms());
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t, cudaStream_t s) { return launch_kernel(kernel, arguments, s); }
API cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void** arguments, size_t, cudaStream_t s) { return launch_kernel(kernel, arguments, s); }
API cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3, dim3, void** arguments, size_t, cudaStream_t s) { return launch_kernel(kernel, arguments, s); }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* kernel, void** arguments) { return launch_kernel(kernel, arguments, how->stream); }
API cudaError_t cudaGetSymbolAddress(void** p, const void*) { static char room[1 << 16]; *p = room; return cudaSuccess; }
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024, a->numRegs = 32, a->ptxVersion = a->binaryVersion = 90, a->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) { *n = 2; return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) { *n = 2; return cudaSuccess; }

// Libraries

struct Handle {
  cudaStream_t stream = nullptr;
  char more[64] = {};
};
static int new_handle(void** handle) { *handle = new Handle; return 0; }
API int cublasCreate_v2(void** handle) { return new_handle(handle); }
API int cublasSetStream_v2(void* handle, cudaStream_t s) { ((Handle*)handle)->stream = s; return 0; }
API int cublasGetStream_v2(void* handle, cudaStream_t* s) { *s = ((Handle*)handle)->stream; return 0; }
API long fake_cublas(void* handle) { return launch(((Handle*)handle)->stream, kernel_ms()); }  // what computes
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, char* found, int* n) { *n = 1; memset(found, 0, 96); return 0; }
API int cublasLtMatmul(void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, size_t, cudaStream_t s) { return launch(s, kernel_ms()); }
API size_t cublasLtGetVersion() { return 130000; }
API size_t cudnnGetVersion() { return 91900; }
API int cudnnCreate(void** handle) { return new_handle(handle); }
API int cusolverDnCreate(void** handle) { return new_handle(handle); }
API int cusparseCreate(void** handle) { return new_handle(handle); }

// NCCL

struct Id {
  char bytes[128];
};
static size_t type_bytes(int type) { static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; return bytes[type]; }
static int join(void** found, int size, Id id, int rank) {
  char name[64];
  snprintf(name, sizeof name, "/fake-nccl-%.32s", id.bytes);
  int file = shm_open(name, O_CREAT | O_RDWR, 0600);
  if (size > kRanks || file < 0 || ftruncate(file, sizeof(Shared))) return 2;  // ncclSystemError
  void* at = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (at == MAP_FAILED) return 2;
  auto* made = new Communicator{(Shared*)at, size, rank};
  if (made->shared->joined.fetch_add(1) == size - 1) shm_unlink(name);
  while (made->shared->joined < size) usleep(200);  // as the host does, for ever
  *found = made;
  return 0;
}
static int post(Message::Kind kind, size_t bytes, int peer, void* communicator, cudaStream_t s) {
  auto* of = (Communicator*)communicator;
  Shared& all = *of->shared;
  int me = of->rank;
  counts[LAUNCHES]++;
  enqueue(s, 0);
  Guard guard(mutex);
  auto& counter = kind == Message::SEND ? all.sent[me][peer] : kind == Message::RECEIVE ? all.received[peer][me] : all.collected[me];
  long number = counter;
  if (kind == Message::SEND) all.sent_bytes[me][peer][number % kSizes] = bytes;
  if (kind == Message::COLLECTIVE) all.collected_bytes[me][number % kSizes] = bytes;
  static long place = 0;
  stream_of(s).end.messages.push_back({std::make_shared<Message>(Message{kind, of, peer, number, bytes, place++}), 0});
  counter = number + 1;
  return 0;
}
API int ncclGetVersion(int* v) { *v = 22809; return 0; }
API int ncclGetUniqueId(Id* id) {
  unsigned char drawn[16];
  if (getrandom(drawn, sizeof drawn, 0) != sizeof drawn) return 2;
  memset(id, 0, sizeof *id);
  for (int i = 0; i < 16; i++) snprintf(id->bytes + 2 * i, 3, "%02x", drawn[i]);
  return 0;
}
API int ncclCommInitRankConfig(void** c, int size, Id id, int rank, void*) { return join(c, size, id, rank); }
API int ncclCommInitRank(void** c, int size, Id id, int rank) { return join(c, size, id, rank); }
API int ncclCommAbort(void* c) { if (c) ((Communicator*)c)->aborted = true; return 0; }
API int ncclCommGetAsyncError(void*, int* error) { *error = 0; return 0; }
API const char* ncclGetErrorString(int) { return "an error of NCCL without a network"; }
API const char* ncclGetLastError(void*) { return ""; }
API int ncclCommCount(void* c, int* n) { *n = ((Communicator*)c)->size; return 0; }
API int ncclCommUserRank(void* c, int* n) { *n = ((Communicator*)c)->rank; return 0; }
API int ncclSend(const void*, size_t n, int type, int peer, void* c, cudaStream_t s) { return post(Message::SEND, n * type_bytes(type), peer, c, s); }
API int ncclRecv(void*, size_t n, int type, int peer, void* c, cudaStream_t s) { return post(Message::RECEIVE, n * type_bytes(type), peer, c, s); }
API int ncclAllReduce(const void*, void*, size_t n, int type, int, void* c, cudaStream_t s) { return post(Message::COLLECTIVE, n * type_bytes(type), 0, c, s); }
API int ncclReduce(const void*, void*, size_t n, int type, int, int, void* c, cudaStream_t s) { return post(Message::COLLECTIVE, n * type_bytes(type), 0, c, s); }
API int ncclBroadcast(const void*, void*, size_t n, int type, int, void* c, cudaStream_t s) { return post(Message::COLLECTIVE, n * type_bytes(type), 0, c, s); }
API int ncclBcast(void*, size_t n, int type, int, void* c, cudaStream_t s) { return post(Message::COLLECTIVE, n * type_bytes(type), 0, c, s); }
API int ncclAllGather(const void*, void*, size_t n, int type, void* c, cudaStream_t s) { return post(Message::COLLECTIVE, n * type_bytes(type), 0, c, s); }
API int ncclReduceScatter(const void*, void*, size_t n, int type, int, void* c, cudaStream_t s) { return post(Message::COLLECTIVE, n * type_bytes(type), 0, c, s); }
