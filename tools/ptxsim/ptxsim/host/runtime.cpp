// Stands before CuTe DSL's runtime library: the functions through which compiled host code reaches a CUDA device. Loading,
// launching and encoding go to the functions that `ptxsim_serve` was given; a launch returns when it has run, so that
// there is nothing to wait for. What is not here, the DSL's own library answers: without a driver, by an error.
// Signatures are those of the calls that host code makes; enumerations are int, handles void*.
#include <cstdint>
#include <string>

namespace {
constexpr int kSuccess = 0, kInvalidValue = 1, kNoKernelImage = 209;

struct Host {
  void* (*load)(const void* image);  // a library; null: its PTX is not known
  int (*launch)(void* library, const char* kernel, const void* configuration, void** arguments);
  int (*encode_tiled)(void* map, int type, uint32_t rank, void* address, const uint64_t* extents, const uint64_t* strides,
                      const uint32_t* box, const uint32_t* element_strides, int interleave, int swizzle, int oob_fill);
  int (*attribute)(int attribute);  // of the device, by cudaDeviceAttr
};
Host host;

// A kernel's handle. Libraries stay loaded to the process's end, and so do these.
struct Kernel {
  void* library;
  std::string name;
};

// cudaLaunchConfig_t
struct Configuration {
  uint32_t grid[3], block[3];
  uint64_t shared_bytes;
  void* stream;
  void* attributes;
  uint32_t attribute_count;
};
}  // namespace

extern "C" {

void ptxsim_serve(const Host* functions) { host = *functions; }

int _cudaLibraryLoadData(void** library, const void* image, void*, void*, unsigned, void*, void*, unsigned) {
  *library = host.load(image);
  return *library ? kSuccess : kNoKernelImage;
}
int _cudaLibraryUnload(void*) { return kSuccess; }
int _cudaLibraryGetKernel(void** kernel, void* library, const char* name) {
  *kernel = new Kernel{library, name};
  return kSuccess;
}

int _cudaLaunchKernelEx(const void* configuration, void* kernel, void** arguments) {
  const Kernel& k = *static_cast<Kernel*>(kernel);
  return host.launch(k.library, k.name.c_str(), configuration, arguments);
}
int _cudaLaunchKernel(void* kernel, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z, uint32_t block_x, uint32_t block_y,
                      uint32_t block_z, void** arguments, uint64_t shared_bytes, void* stream) {
  Configuration c{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, stream, nullptr, 0};
  return _cudaLaunchKernelEx(&c, kernel, arguments);
}

int _cuTensorMapEncodeTiled(void* map, int type, uint32_t rank, void* address, const uint64_t* extents,
                            const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides, int interleave,
                            int swizzle, int /*promotion*/, int oob_fill) {
  return host.encode_tiled(map, type, rank, address, extents, strides, box, element_strides, interleave, swizzle, oob_fill);
}

// Attributes of kernels are promises about resources, which ptxsim takes from the PTX and from the launch.
int _cuKernelGetAttribute(int* value, int, void*, int) {
  *value = 0;
  return kSuccess;
}
int _cudaKernelSetAttributeForDevice(void*, int, int, int) { return kSuccess; }
int _cudaFuncSetAttribute(void*, int, int) { return kSuccess; }

// One device, number 0.
int _cudaGetDeviceCount(int* count) {
  *count = 1;
  return kSuccess;
}
int _cudaGetDevice(int* device) {
  *device = 0;
  return kSuccess;
}
int _cudaSetDevice(int device) { return device == 0 ? kSuccess : kInvalidValue; }
int _cuDeviceGet(int* device, int ordinal) {
  *device = 0;
  return ordinal == 0 ? kSuccess : kInvalidValue;
}
int _cudaDeviceGetAttribute(int* value, int attribute, int) {
  *value = host.attribute(attribute);
  return *value < 0 ? kInvalidValue : kSuccess;
}
int _cudaDeviceSynchronize() { return kSuccess; }
int _cudaStreamSynchronize(void*) { return kSuccess; }

// A library is loaded where it is first used.
int cuda_dialect_init_library_once(void** library, int (*init)(void**), int (*load)(void**, int), void*) {
  if (*library) return kSuccess;
  int error = init(library);
  return error ? error : load(library, 0);
}
void cuda_dialect_unload_library_once(void**, void*) {}
}
