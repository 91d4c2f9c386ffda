// What `ddp-run` asks of a CUDA driver when it looks for GPUs: two of one model, and one process sees one MIG device.
// Devices 0 and 1 are in bus order; the only list of visible devices that means anything begins with `1` or `MIG-1`.
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

static const char *visible(void) {
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    return list ? list : "0,1";
}

int cuGetErrorName(int error, const char **text) { return (void)error, *text = "an error", 0; }
int cuGetErrorString(int error, const char **text) { return (void)error, *text = "of the pretended driver", 0; }
int cuInit(unsigned flags) { return (int)flags; }
int cuDeviceGetCount(int *count) { return *count = strncmp(visible(), "MIG-", 4) ? 2 : 1, 0; }
int cuDeviceGet(int *device, int number) {
    int turned = visible()[0] == '1' || !strncmp(visible(), "MIG-1", 5);
    return *device = turned ? 1 - number : number, 0;
}
int cuDeviceGetPCIBusId(char *text, int size, int device) {
    return strncpy(text, device ? "0000:AF:00.0" : "0000:3B:00.0", (size_t)size), 0;
}
int cuDeviceGetName(char *text, int size, int device) { return (void)device, strncpy(text, "pretended", (size_t)size), 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { return (void)device, *bytes = 1 << 30, 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { return (void)attribute, (void)device, *value = 9, 0; }
