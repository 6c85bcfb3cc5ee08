/* A libcuda.so.1 for tests: device memory is host memory, kernels do nothing, and every call that matters is appended to
 * the file $STUB_LOG as a line of JSON.
 *
 * $STUB_CAPABILITY  "9.0"; the compute capability
 * $STUB_VERSION     "13000"; the driver's version
 * $STUB_LAYOUTS     a file with lines "symbol offset:size offset:size ...": what cuKernelGetParamInfo reports
 * $STUB_FAIL        "cuLaunchKernel=700": that function fails
 * $STUB_LACKS       "cuLibraryLoadData": the library has no such function
 *
 * Contexts are numbers: 0x1000 + device is a primary one, 0x2000 + 0x100 * device + n one with n multiprocessors. So are
 * streams: the context of 0x20040050 is 0x2004, that of 0x50 is the primary one of device 0.
 *
 * stub_exchange_api() makes an exchange API that passes another one's host tensors off as CUDA tensors.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MULTIPROCESSORS 132
#define MAX_PARAMS 64

typedef struct {
  char symbol[256];
  int n_params;
  size_t offset[MAX_PARAMS], size[MAX_PARAMS];
} Function;

static __thread CUcontext current_context;
static __thread CUcontext pushed[16];
static __thread int n_pushed;
static __thread CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
static int initialised_by; /* pid */

static void record(const char* format, ...) {
  const char* path = getenv("STUB_LOG");
  static char line[1 << 16];
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  va_list args;
  if (!path) return;
  pthread_mutex_lock(&lock);
  va_start(args, format);
  int n = vsnprintf(line, sizeof line - 1, format, args);
  va_end(args);
  line[n++] = '\n';
  int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0644);
  if (write(file, line, n) != n) abort();
  close(file);
  pthread_mutex_unlock(&lock);
}

static CUresult failure(const char* function) {
  const char* fail = getenv("STUB_FAIL");
  size_t n = strlen(function);
  if (fail && !strncmp(fail, function, n) && fail[n] == '=') return (CUresult)atoi(fail + n + 1);
  return CUDA_SUCCESS;
}

#define BEGIN(name)                      \
  do {                                   \
    CUresult failed = failure(name);     \
    if (failed != CUDA_SUCCESS) return failed; \
  } while (0)

CUresult cuInit(unsigned int flags) {
  (void)flags;
  BEGIN("cuInit");
  if (initialised_by && initialised_by != getpid()) return CUDA_ERROR_NOT_INITIALIZED;
  initialised_by = getpid();
  record("{\"call\": \"cuInit\", \"pid\": %d}", getpid());
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
  const char* set = getenv("STUB_VERSION");
  *version = set ? atoi(set) : 13000;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = error == CUDA_ERROR_ILLEGAL_ADDRESS         ? "CUDA_ERROR_ILLEGAL_ADDRESS"
          : error == CUDA_ERROR_SYSTEM_DRIVER_MISMATCH ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
                                                       : "CUDA_ERROR_STUB";
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  (void)error;
  *text = "said by the stub driver";
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  *count = 2;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return ordinal < 2 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetName(char* name, int size, CUdevice device) {
  (void)device;
  snprintf(name, size, "Stub GPU");
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  const char* capability = getenv("STUB_CAPABILITY");
  int major = 9, minor = 0;
  (void)device;
  if (capability) sscanf(capability, "%d.%d", &major, &minor);
  *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR   ? major
           : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? minor
           : attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT     ? MULTIPROCESSORS
                                                                       : 0;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = (CUcontext)(size_t)(0x1000 + device);
  record("{\"call\": \"cuDevicePrimaryCtxRetain\"}");
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = current_context;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* device) {
  size_t context = (size_t)current_context;
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  *device = (int)(context >= 0x2000 ? (context - 0x2000) >> 8 : context - 0x1000);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetId(CUcontext context, unsigned long long* id) {
  *id = (size_t)context;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevResource(CUcontext context, CUdevResource* resource, CUdevResourceType type) {
  if (type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_VALUE;
  record("{\"call\": \"cuCtxGetDevResource\", \"context\": %zu}", (size_t)context);
  resource->sm.smCount = (size_t)context >= 0x2000 ? (size_t)context & 0xff : MULTIPROCESSORS;
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
  pushed[n_pushed++] = current_context;
  current_context = context;
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext* context) {
  *context = current_context;
  current_context = pushed[--n_pushed];
  return CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  CUstreamCaptureMode previous = capture_mode;
  capture_mode = *mode;
  *mode = previous;
  return CUDA_SUCCESS;
}

/* A stream whose handle ends in 0xc is under capture. */
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  *status = ((size_t)stream & 15) == 0xc ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

static CUcontext context_of(CUstream stream) {
  size_t handle = (size_t)stream;
  return handle <= 2 ? current_context : (CUcontext)(handle >> 16 ? handle >> 16 : 0x1000);
}

CUresult cuStreamGetCtx(CUstream stream, CUcontext* context) {
  BEGIN("cuStreamGetCtx");
  *context = context_of(stream);
  record("{\"call\": \"cuStreamGetCtx\", \"stream\": %zu}", (size_t)stream);
  return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream* stream, unsigned int flags) {
  *stream = (CUstream)((size_t)current_context << 16 | 0xa0);
  record("{\"call\": \"cuStreamCreate\", \"stream\": %zu, \"flags\": %u, \"relaxed\": %d}", (size_t)*stream, flags,
         capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED);
  return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream) {
  record("{\"call\": \"cuStreamSynchronize\", \"stream\": %zu}", (size_t)stream);
  return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent* event, unsigned int flags) {
  (void)flags;
  CUcontext* made = malloc(sizeof *made);
  *made = current_context;
  *event = (CUevent)made;
  return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent event) {
  free(event);
  return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent event) {
  record("{\"call\": \"cuEventQuery\", \"context\": %zu}", *(size_t*)event);
  return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
  if (*(CUcontext*)event != context_of(stream)) return CUDA_ERROR_INVALID_HANDLE;
  record("{\"call\": \"cuEventRecord\", \"stream\": %zu, \"context\": %zu}", (size_t)stream, (size_t)current_context);
  return CUDA_SUCCESS;
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
  (void)event, (void)flags;
  record("{\"call\": \"cuStreamWaitEvent\", \"stream\": %zu, \"context\": %zu}", (size_t)stream, (size_t)current_context);
  return CUDA_SUCCESS;
}

CUresult cuMemAllocAsync(CUdeviceptr* pointer, size_t n_bytes, CUstream stream) {
  BEGIN("cuMemAllocAsync");
  *pointer = (CUdeviceptr)aligned_alloc(256, (n_bytes + 255) / 256 * 256);
  record("{\"call\": \"cuMemAllocAsync\", \"bytes\": %zu, \"stream\": %zu, \"pointer\": %llu}", n_bytes, (size_t)stream,
         *pointer);
  return CUDA_SUCCESS;
}

CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) {
  record("{\"call\": \"cuMemFreeAsync\", \"stream\": %zu, \"pointer\": %llu, \"context\": %zu}", (size_t)stream, pointer,
         (size_t)current_context);
  free((void*)pointer);
  return CUDA_SUCCESS;
}

CUresult cuMemsetD32Async(CUdeviceptr pointer, unsigned int value, size_t count, CUstream stream) {
  BEGIN("cuMemsetD32Async");
  for (size_t i = 0; i < count; ++i) ((unsigned int*)pointer)[i] = value;
  record("{\"call\": \"cuMemsetD32Async\", \"pointer\": %llu, \"value\": %u, \"count\": %zu, \"stream\": %zu}", pointer, value,
         count, (size_t)stream);
  return CUDA_SUCCESS;
}

CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D* copy, CUstream stream) {
  for (size_t row = 0; row < copy->Height; ++row)
    memcpy((char*)copy->dstHost + row * copy->dstPitch, (char*)copy->srcDevice + row * copy->srcPitch, copy->WidthInBytes);
  record("{\"call\": \"cuMemcpy2DAsync\", \"stream\": %zu}", (size_t)stream);
  return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr target, CUdeviceptr source, size_t n_bytes, CUstream stream) {
  BEGIN("cuMemcpyDtoDAsync");
  memcpy((void*)target, (void*)source, n_bytes);
  record("{\"call\": \"cuMemcpyDtoDAsync\", \"target\": %llu, \"source\": %llu, \"bytes\": %zu, \"stream\": %zu}", target,
         source, n_bytes, (size_t)stream);
  return CUDA_SUCCESS;
}

CUresult cuLibraryLoadData(CUlibrary* library, const void* image, CUjit_option* jit_options, void** jit_values,
                           unsigned int n_jit, CUlibraryOption* options, void** values, unsigned int n) {
  (void)jit_options, (void)jit_values, (void)n_jit, (void)options, (void)values, (void)n;
  BEGIN("cuLibraryLoadData");
  *library = (CUlibrary)image;
  record("{\"call\": \"cuLibraryLoadData\", \"relaxed\": %d}", capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED);
  return CUDA_SUCCESS;
}

CUresult cuLibraryUnload(CUlibrary library) {
  (void)library;
  record("{\"call\": \"cuLibraryUnload\"}");
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* symbol) {
  char line[1 << 12];
  FILE* layouts = fopen(getenv("STUB_LAYOUTS"), "r");
  (void)library;
  *kernel = NULL;
  while (layouts && !*kernel && fgets(line, sizeof line, layouts)) {
    char* rest = line;
    char* word = strsep(&rest, " \n");
    if (strcmp(word, symbol)) continue;
    Function* found = calloc(1, sizeof(Function));
    snprintf(found->symbol, sizeof found->symbol, "%s", symbol);
    while ((word = strsep(&rest, " \n")))
      if (sscanf(word, "%zu:%zu", &found->offset[found->n_params], &found->size[found->n_params]) == 2) found->n_params++;
    *kernel = (CUkernel)found;
  }
  if (layouts) fclose(layouts);
  return *kernel ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t* offset, size_t* size) {
  Function* f = (Function*)kernel;
  if (index >= (size_t)f->n_params) return CUDA_ERROR_INVALID_VALUE;
  *offset = f->offset[index];
  *size = f->size[index];
  return CUDA_SUCCESS;
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device) {
  BEGIN("cuKernelSetAttribute");
  record("{\"call\": \"cuKernelSetAttribute\", \"symbol\": \"%s\", \"attribute\": %d, \"value\": %d, \"device\": %d}",
         ((Function*)kernel)->symbol, attribute, value, device);
  return CUDA_SUCCESS;
}

CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  *function = (CUfunction)kernel;
  return CUDA_SUCCESS;
}

CUresult cuFuncLoad(CUfunction function) {
  record("{\"call\": \"cuFuncLoad\", \"symbol\": \"%s\", \"context\": %zu}", ((Function*)function)->symbol,
         (size_t)current_context);
  return CUDA_SUCCESS;
}

static void record_launch(CUfunction function, unsigned int grid[3], unsigned int block[3], unsigned int smem,
                          CUstream stream, int pdl, unsigned int cluster, void** params) {
  static __thread char bytes[1 << 14];
  Function* f = (Function*)function;
  char* end = bytes;
  if (!getenv("STUB_LOG")) return;
  for (int i = 0; i < f->n_params; ++i) {
    end += sprintf(end, "%s\"", i ? ", " : "");
    for (size_t j = 0; j < f->size[i]; ++j) end += sprintf(end, "%02x", ((unsigned char*)params[i])[j]);
    end += sprintf(end, "\"");
  }
  record("{\"call\": \"launch\", \"symbol\": \"%s\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"smem\": %u, "
         "\"stream\": %zu, \"pdl\": %d, \"cluster\": %u, \"context\": %zu, \"params\": [%s]}",
         f->symbol, grid[0], grid[1], grid[2], block[0], block[1], block[2], smem, (size_t)stream, pdl, cluster,
         (size_t)current_context, bytes);
}

CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                        unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int smem,
                        CUstream stream, void** params, void** extra) {
  (void)extra;
  BEGIN("cuLaunchKernel");
  record_launch(function, (unsigned int[]){grid_x, grid_y, grid_z}, (unsigned int[]){block_x, block_y, block_z}, smem,
                stream, 0, 1, params);
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params, void** extra) {
  int pdl = 0;
  unsigned int cluster = 1;
  (void)extra;
  BEGIN("cuLaunchKernelEx");
  for (unsigned int i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute* attribute = &config->attrs[i];
    if (attribute->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
      pdl = attribute->value.programmaticStreamSerializationAllowed;
    if (attribute->id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
      cluster = attribute->value.clusterDim.x * attribute->value.clusterDim.y * attribute->value.clusterDim.z;
  }
  record_launch(function, (unsigned int[]){config->gridDimX, config->gridDimY, config->gridDimZ},
                (unsigned int[]){config->blockDimX, config->blockDimY, config->blockDimZ}, config->sharedMemBytes,
                config->hStream, pdl, cluster, params);
  return CUDA_SUCCESS;
}

/* The descriptor's bytes are the address and a running number, by which a launch's bytes lead back to the recorded call. */
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType dtype, cuuint32_t rank, void* address,
                                const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  static cuuint64_t count;
  char text[4][256] = {"", "", "", ""};
  BEGIN("cuTensorMapEncodeTiled");
  memset(map, 0, sizeof *map);
  map->opaque[0] = (cuuint64_t)address;
  map->opaque[1] = __sync_add_and_fetch(&count, 1);
  for (cuuint32_t i = 0; i < rank; ++i) {
    const char* comma = i ? ", " : "";
    sprintf(text[0] + strlen(text[0]), "%s%llu", comma, (unsigned long long)dims[i]);
    sprintf(text[1] + strlen(text[1]), "%s%u", comma, box[i]);
    sprintf(text[2] + strlen(text[2]), "%s%u", comma, steps[i]);
    if (i + 1 < rank) sprintf(text[3] + strlen(text[3]), "%s%llu", comma, (unsigned long long)strides[i]);
  }
  record("{\"call\": \"cuTensorMapEncodeTiled\", \"number\": %llu, \"address\": %zu, \"dtype\": %d, \"dims\": [%s], \"box\": "
         "[%s], \"steps\": [%s], \"strides\": [%s], \"interleave\": %d, \"swizzle\": %d, \"promotion\": %d, \"fill\": %d}",
         (unsigned long long)map->opaque[1], (size_t)address, dtype, text[0], text[1], text[2], text[3], interleave, swizzle,
         promotion, fill);
  return CUDA_SUCCESS;
}

CUresult cuGetProcAddress(const char* symbol, void** function, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult* status) {
  static void* self;
  (void)version, (void)flags;
  if (!self) self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  const char* lacks = getenv("STUB_LACKS");
  int lacking = lacks && !strcmp(lacks, symbol);
  *function = lacking ? NULL : dlsym(self, symbol);
  if (!*function && !lacking) {
    char versioned[256];
    snprintf(versioned, sizeof versioned, "%s_v2", symbol);
    *function = dlsym(self, versioned);
  }
  if (status)
    *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* DLPack's exchange API over another one's host tensors ------------------------------------------------------------- */

typedef struct {
  void* data;
  int32_t device_type, device_id, ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} Tensor;

typedef struct Managed {
  uint32_t major, minor;
  void* context;
  void (*deleter)(struct Managed*);
  uint64_t flags;
  Tensor tensor;
} Managed;

typedef struct {
  uint32_t major, minor;
  void* previous;
  int (*allocate)(Tensor*, Managed**, void*, void (*)(void*, const char*, const char*));
  int (*managed_from_object)(void*, Managed**);
  int (*to_object)(Managed*, void**);
  int (*from_object)(void*, Tensor*);
  int (*current_stream)(int32_t, int32_t, void**);
} ExchangeApi;

static ExchangeApi host_api;
static void* exchange_stream;

static int api_allocate(Tensor* prototype, Managed** out, void* context, void (*fail)(void*, const char*, const char*)) {
  Tensor host = *prototype;
  host.device_type = 1;
  host.device_id = 0;
  int result = host_api.allocate(&host, out, context, fail);
  if (result == 0) (*out)->tensor.device_type = 2;
  return result;
}

static int api_to_object(Managed* managed, void** object) {
  managed->tensor.device_type = 1;
  return host_api.to_object(managed, object);
}

static int api_from_object(void* object, Tensor* tensor) {
  int result = host_api.from_object(object, tensor);
  tensor->device_type = 2;
  tensor->device_id = 0;
  return result;
}

static int api_current_stream(int32_t device_type, int32_t device_id, void** stream) {
  (void)device_type, (void)device_id;
  *stream = exchange_stream;
  return 0;
}

void* stub_exchange_api(void* host) {
  static ExchangeApi api;
  host_api = api = *(ExchangeApi*)host;
  api.allocate = api_allocate;
  api.to_object = api_to_object;
  api.from_object = api_from_object;
  api.current_stream = api_current_stream;
  return &api;
}

void stub_set_current_stream(void* stream) { exchange_stream = stream; }
