// The calls of CUDA's driver, with files in place of a GPU's memory: a process opens the file of another.
// FAULT names a call that fails, or is "other_memory": another one than that of the handle is opened; or
// "no_stores": what is opened is a copy, so that stores do not arrive.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef unsigned long long Address;
typedef struct {
  char name[64];
} Handle;

static Address allocated;
static char own[64];
static size_t size_of_own;

static int fails(const char* call) {
  const char* fault = getenv("FAULT");
  return fault && strcmp(fault, call) == 0 ? 2 : 0;
}
static void* map(const char* name, size_t size) {
  char path[4096];
  snprintf(path, sizeof(path), "%s/%s", getenv("MEMORY_FOLDER"), name);
  const int file = open(path, O_RDWR | O_CREAT, 0600);
  struct stat found;
  if (size && ftruncate(file, size)) {
    abort();
  }
  fstat(file, &found);
  return mmap(0, found.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
}
int cuGetErrorName(int code, const char** name) {
  *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : 0;
  return 0;
}
int cuGetErrorString(int code, const char** text) {
  *text = code == 2 ? "out of memory" : 0;
  return 0;
}
int cuInit(unsigned flags) { return fails("cuInit"); }
int cuDeviceGet(int* device, int number) { return *device = number; }
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = &allocated;
  return 0;
}
int cuCtxSetCurrent(void* context) { return context != &allocated; }
int cuCtxSynchronize(void) { return 0; }
int cuMemAlloc_v2(Address* address, size_t size) {
  snprintf(own, sizeof(own), "memory-%d", getpid());
  size_of_own = size;
  allocated = *address = (Address)map(own, size);
  memset((void*)allocated, 7, size);
  return 0;
}
int cuIpcGetMemHandle(Handle* handle, Address address) {
  memset(handle, 0, sizeof(Handle));
  strcpy(handle->name, own);
  return address != allocated;
}
int cuIpcOpenMemHandle_v2(Address* address, Handle handle, unsigned flags) {
  *address = fails("other_memory") ? allocated : (Address)map(handle.name, 0);
  if (fails("no_stores")) {
    *address = (Address)memcpy(malloc(size_of_own), (void*)*address, size_of_own);
  }
  return flags != 1 ? 3 : fails("cuIpcOpenMemHandle_v2");
}
int cuMemcpyHtoD_v2(Address address, const void* data, size_t size) {
  memcpy((void*)address, data, size);
  return 0;
}
int cuMemcpyDtoH_v2(void* data, Address address, size_t size) {
  memcpy(data, (void*)address, size);
  return 0;
}
int cuMemsetD8_v2(Address address, unsigned char value, size_t size) {
  memset((void*)address, value, size);
  return fails("cuMemsetD8_v2");
}
int cuMemHostAlloc(void** address, size_t size, unsigned flags) {
  *address = malloc(size);
  return flags != 1 ? 1 : fails("cuMemHostAlloc");
}
int cuMemFreeHost(void* address) {
  free(address);
  return 0;
}
