// A CUDA toolkit's stub of the driver, as far as this program looks: it has the functions, and does nothing.
#define STUB(name) int name(void) { return 34; }

STUB(cuInit)
STUB(cuDriverGetVersion)
STUB(cuDeviceGetCount)
STUB(cuDeviceGet)
STUB(cuDeviceGetName)
STUB(cuDeviceTotalMem_v2)
STUB(cuDeviceGetAttribute)
STUB(cuDeviceGetPCIBusId)
STUB(cuGetErrorName)
STUB(cuGetErrorString)
