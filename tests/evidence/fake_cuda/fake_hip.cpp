// A stand-in for libamdhip64.so that checks nothing and remembers the last launch: enough to see
// that the launcher's calls reach HIP's functions with the right arguments.
#include <cstdint>
#include <cstdio>
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

namespace {

struct Record {  // also the layout of Python's structure
  unsigned grid[3], block[3], shared;
  int device;
  void *function, *stream;
  uint64_t values[8];
} last;
int current = 0, sizes[8], parameters = 0;
const void* loaded = nullptr;
char kernel[256], arch[64] = "gfx942";
size_t shared = 64 * 1024;

}  // namespace

API void fake_parameters(const int* bytes, int count) {
  parameters = count;
  std::memcpy(sizes, bytes, count * sizeof(int));
}
API void fake_device(const char* name, size_t bytes) {
  std::snprintf(arch, sizeof arch, "%s", name);
  shared = bytes;
}
API const void* fake_last() { return &last; }
API const char* fake_kernel() { return kernel; }

API int hipInit(unsigned) { return 0; }
API int hipGetDeviceCount(int* count) { return *count = 2, 0; }
API int hipGetDevice(int* device) { return *device = current, 0; }
API int hipSetDevice(int device) { return current = device, 0; }
API int hipDrvGetErrorString(int status, const char** string) {
  return *string = status == 500 ? "named symbol not found" : "stand-in error", 0;
}
API int hipGetDevicePropertiesR0600(void* properties, int device) {
  char* const p = static_cast<char*>(properties);
  if (device < 0 || device > 1) return 101;
  std::strcpy(p, "Stand-in Instinct");                       // hipDeviceProp_tR0600: name at 0,
  std::memcpy(p + 296, &shared, sizeof shared);              // sharedMemPerBlock,
  std::snprintf(p + 1160, 256, "%s:sramecc+:xnack-", arch);  // gcnArchName
  return 0;
}
API int hipModuleLoadData(void** module, const void* image) {
  loaded = image;
  return *module = &loaded, 0;
}
API int hipModuleGetFunction(void** function, void* module, const char* name) {
  if (module != &loaded || std::strstr(name, "missing")) return 500;
  std::snprintf(kernel, sizeof kernel, "%s", name);
  return *function = kernel, 0;
}
API int hipFuncGetAttribute(int* value, int, void*) { return *value = 1024, 0; }
API int hipModuleLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                              unsigned by, unsigned bz, unsigned shared, void* stream,
                              void** arguments, void** extra) {
  last = {{gx, gy, gz}, {bx, by, bz}, shared, current, function, stream, {}};
  for (int i = 0; i < parameters; ++i) std::memcpy(&last.values[i], arguments[i], sizes[i]);
  return extra ? 1 : 0;
}
