// An emulated CUDA driver, libcuda.so.1: devices are threads and memory of the process. Kernels are what the emulated
// NVRTC made of CUDA C.
//
//     EMULATOR_GPUS=2           devices, at most 16, before CUDA_VISIBLE_DEVICES
//     EMULATOR_MEMORY_MIB=1024  memory of each, for this process alone
//     EMULATOR_TAKEN_MIB=0      what other processes seem to hold of it
//     EMULATOR_CUDA=12080       version of CUDA that it is for
//     CUDA_DEVICE_MAX_CONNECTIONS=8  queues of a device, which its streams share
//     EMULATOR_DELAY_US=0       longest delay before each piece of a stream's work (stream.hpp)
//     EMULATOR_SEED=1           of the delays, and of the order in which a kernel's threads run
//     EMULATOR_WAITS=0          seed of whether an allocation or a module's load waits for all streams first; 0: none does
//     EMULATOR_STATISTICS=0     1: each stream says at its end how much work it had, and how much of it found it idle;
//                               modules and allocations that come after the first collective are named
//     EMULATOR_FAIL_LAUNCH=0    which launch of a process fails, from 1 on; 0: none
//     EMULATOR_NAME=...         name of each, `Emulated GPU` if it is not set
//     EMULATOR_CAPABILITY=90    compute capability of each, as NVRTC numbers it
//     EMULATOR_SHARED_KIB=227   shared memory that a block can ask for
//
// As the real one it refuses launches beyond the limits of a card and of a kernel's __launch_bounds__, shared memory
// that was not asked for, and times of events that have none. Stricter, where that shows an error of the host: a copy or
// a fill outside of an allocation is refused, memory ends at a page that nobody may touch and holds NaN at first, as
// does page-locked memory until a copy to it has come, freed memory is gone at once, handles are checked, those of what was destroyed too, and a call of the driver from a host
// function of a stream is refused, as CUDA's documentation has it. After a kernel's failure every call fails, as on a
// GPU; what the emulator has to say of it goes to stderr.

#include <algorithm>
#include <cstring>
#include <sys/mman.h>

#include "driver.hpp"

using namespace emulator;

namespace {

constexpr size_t PAGE = 4096, ALIGNMENT = 256;
// What memory holds at first: NaN in every type.
constexpr unsigned char FRESH = 0xff;

const Allocation *allocation_of(const Driver &of, Address address, Address &start) {
    auto after = of.allocations.upper_bound(address);
    if (after == of.allocations.begin()) {
        return nullptr;
    }
    after--;
    start = after->first;
    return &after->second;
}

bool is_inside(const Driver &of, Address from, size_t bytes) {
    Address start;
    const Allocation *found = allocation_of(of, from, start);
    return found && from + bytes <= start + found->bytes;
}

// Memory whose last page nobody may touch. It ends as close to that as its alignment lets it; the rest is known again.
Address allocate(Driver &of, size_t bytes, int device) {
    const size_t length = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    const size_t data = (length + PAGE - 1) / PAGE * PAGE;
    void *pages = mmap(nullptr, data + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) {
        return 0;
    }
    mprotect((char *)pages + data, PAGE, PROT_NONE);
    const Address start = (Address)pages + data - length;
    memset((void *)start, FRESH, length);
    of.allocations[start] = {(char *)pages, data + PAGE, bytes, device};
    if (device >= 0) {
        of.used[device] += bytes;
    }
    return start;
}

Result release(Driver &of, Address start, bool on_device) {
    const auto found = of.allocations.find(start);
    if (found == of.allocations.end() || (found->second.device >= 0) != on_device) {
        return refuse(INVALID_VALUE, "what is freed was never allocated, or is freed twice");
    }
    const Allocation &allocation = found->second;
    const auto *fence = (const unsigned char *)allocation.pages + allocation.mapped - PAGE;
    for (const auto *byte = (const unsigned char *)start + allocation.bytes; byte < fence; byte++) {
        if (*byte != FRESH) {
            say("something wrote behind the end of %zu bytes", allocation.bytes);
            of.failed = ILLEGAL_ADDRESS;
            return of.failed;
        }
    }
    if (on_device) {
        of.used[allocation.device] -= allocation.bytes;
    }
    munmap(allocation.pages, allocation.mapped);
    of.allocations.erase(found);
    return SUCCESS;
}

// Of the calling thread's device.
size_t free_bytes(const Driver &of) {
    const size_t all = setting("EMULATOR_MEMORY_MIB", 1024) << 20;
    const size_t used = of.used[current_device] + (setting("EMULATOR_TAKEN_MIB", 0) << 20);
    return all - std::min(all, used);
}

Result copy(Handle handle, Address to, Address from, size_t bytes, bool to_device, bool from_device) {
    READY(of);
    const auto stream = stream_of(of, handle);
    if (!stream) {
        return INVALID_HANDLE;
    }
    const auto is_fine = [&](Address at, bool on_device) {
        Address start;
        const Allocation *found = allocation_of(of, at, start);
        // Of the host's memory only what was page-locked is known.
        const bool known = found && at < start + found->mapped;
        return on_device || known ? is_inside(of, at, bytes) && (found->device >= 0) == on_device : true;
    };
    if (!is_fine(to, to_device) || !is_fine(from, from_device)) {
        return refuse(INVALID_VALUE, "a copy outside of an allocation, or from the wrong side");
    }
    Address start;
    if (!to_device && allocation_of(of, to, start) && is_inside(of, to, bytes)) {
        // Page-locked memory holds nothing until the copy has come. It is the copy's as soon as the stream comes to it.
        const auto spoil = [=] { memset((void *)to, FRESH, bytes); };
        stream->is_empty() ? spoil() : enqueue(stream, spoil);
    }
    enqueue(stream, [=] { memmove((void *)to, (const void *)from, bytes); });
    return SUCCESS;
}

std::vector<int> visible_devices() {
    std::vector<int> found;
    const int count = (int)std::min<uint64_t>(setting("EMULATOR_GPUS", 2), MAX_DEVICES);
    const char *chosen = getenv("CUDA_VISIBLE_DEVICES");
    if (!chosen) {
        for (int device = 0; device < count; device++) {
            found.push_back(device);
        }
        return found;
    }
    // As in CUDA, the first that is not there ends the list.
    for (const char *at = chosen; *at;) {
        char *end;
        const long device = strtol(at, &end, 10);
        if (end == at || device < 0 || device >= count) {
            break;
        }
        found.push_back((int)device);
        at = *end == ',' ? end + 1 : end;
    }
    return found;
}

struct Words {
    Result result;
    const char *name, *meaning;
};

constexpr Words WORDS[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
};

} // namespace

// Devices.

API Result cuInit(unsigned) {
    if (const uint64_t refusal = setting("EMULATOR_CUINIT", 0)) {
        return (Result)refusal;
    }
    Driver &of = driver();
    std::lock_guard lock(of.mutex);
    of.visible = visible_devices();
    of.started = !of.visible.empty();
    return of.started ? SUCCESS : NO_DEVICE;
}

API Result cuDriverGetVersion(int *version) {
    *version = (int)setting("EMULATOR_CUDA", 12080);
    return SUCCESS;
}

API Result cuGetErrorName(Result result, const char **text) {
    for (const Words &words : WORDS) {
        if (words.result == result) {
            *text = words.name;
            return SUCCESS;
        }
    }
    return INVALID_VALUE;
}

API Result cuGetErrorString(Result result, const char **text) {
    for (const Words &words : WORDS) {
        if (words.result == result) {
            *text = words.meaning;
            return SUCCESS;
        }
    }
    return INVALID_VALUE;
}

API Result cuDeviceGetCount(int *count) {
    READY(of, false);
    *count = (int)of.visible.size();
    return SUCCESS;
}

API Result cuDeviceGet(int *device, int ordinal) {
    READY(of, false);
    if (ordinal < 0 || ordinal >= (int)of.visible.size()) {
        return INVALID_DEVICE;
    }
    *device = of.visible[ordinal];
    return SUCCESS;
}

API Result cuDeviceGetName(char *name, int length, int) {
    const char *given = getenv("EMULATOR_NAME");
    snprintf(name, length, "%s", given ? given : "Emulated GPU");
    return SUCCESS;
}

API Result cuDeviceGetPCIBusId(char *text, int length, int device) {
    snprintf(text, length, "0000:%02x:00.0", device + 1);
    return SUCCESS;
}

API Result cuDeviceGetAttribute(int *value, int attribute, int) {
    switch (attribute) {
    case 16: // multiprocessors
        *value = 4;
        return SUCCESS;
    case 75: // compute capability, major
        *value = (int)setting("EMULATOR_CAPABILITY", 90) / 10;
        return SUCCESS;
    case 76: // and minor
        *value = (int)setting("EMULATOR_CAPABILITY", 90) % 10;
        return SUCCESS;
    case 97: // shared memory of a block, when asked for
        *value = (int)most_shared();
        return SUCCESS;
    default:
        say("attribute %d of a device is not emulated", attribute);
        return INVALID_VALUE;
    }
}

API Result cuDeviceTotalMem_v2(size_t *bytes, int) {
    *bytes = setting("EMULATOR_MEMORY_MIB", 1024) << 20;
    return SUCCESS;
}

API Result cuDevicePrimaryCtxRetain(Handle *context, int device) {
    READY(of, false);
    *context = (Handle)(intptr_t)(device + 1);
    return SUCCESS;
}

API Result cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }

API Result cuCtxSetCurrent(Handle context) {
    READY(of, false);
    current_device = (int)(intptr_t)context - 1;
    return SUCCESS;
}

// Null if the thread has none.
API Result cuCtxGetCurrent(Handle *context) {
    READY(of, false);
    *context = (Handle)(intptr_t)(current_device + 1);
    return SUCCESS;
}

API Result cuCtxGetDevice(int *device) {
    READY(of);
    *device = current_device;
    return SUCCESS;
}

API Result cuCtxSynchronize() {
    {
        READY(of);
    }
    drain_streams();
    std::lock_guard lock(driver().mutex);
    return driver().failed;
}

// For the emulated NCCL: a collective begins.
API void emulatorCollective() {
    Driver &of = driver();
    std::lock_guard lock(of.mutex);
    if (!of.collectives && setting("EMULATOR_STATISTICS", 0) != 0) {
        say("the first collective comes after %llu modules and %llu allocations", (unsigned long long)of.modules_loaded,
            (unsigned long long)of.allocated);
    }
    of.collectives = true;
}

// For the emulated NCCL: a communicator's buffers; what is negative, it gives back.
API void emulatorTake(size_t bytes) {
    std::lock_guard lock(driver().mutex);
    driver().used[current_device] += bytes;
}

// Memory.

API Result cuMemAlloc_v2(Address *address, size_t bytes) {
    may_wait();
    READY(of);
    if (bytes == 0 || bytes > free_bytes(of)) {
        return bytes == 0 ? INVALID_VALUE : OUT_OF_MEMORY;
    }
    count(of, of.allocated, "memory is allocated");
    *address = allocate(of, bytes, current_device);
    return *address ? SUCCESS : OUT_OF_MEMORY;
}

API Result cuMemFree_v2(Address address) {
    READY(of);
    return release(of, address, true);
}

API Result cuMemGetInfo_v2(size_t *free, size_t *total) {
    READY(of);
    *total = setting("EMULATOR_MEMORY_MIB", 1024) << 20;
    *free = free_bytes(of);
    return SUCCESS;
}

API Result cuMemHostAlloc(void **pointer, size_t bytes, unsigned) {
    READY(of);
    *pointer = (void *)allocate(of, bytes, -1);
    return *pointer ? SUCCESS : OUT_OF_MEMORY;
}

API Result cuMemFreeHost(void *pointer) {
    READY(of);
    return release(of, (Address)pointer, false);
}

API Result cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t bytes, Handle stream) {
    return copy(stream, to, (Address)from, bytes, true, false);
}

API Result cuMemcpyDtoHAsync_v2(void *to, Address from, size_t bytes, Handle stream) {
    return copy(stream, (Address)to, from, bytes, false, true);
}

API Result cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, Handle stream) {
    return copy(stream, to, from, bytes, true, true);
}

API Result cuMemsetD8Async(Address to, unsigned char value, size_t bytes, Handle handle) {
    READY(of);
    const auto stream = stream_of(of, handle);
    if (!stream) {
        return INVALID_HANDLE;
    }
    if (!is_inside(of, to, bytes)) {
        return refuse(INVALID_VALUE, "a fill outside of an allocation");
    }
    enqueue(stream, [=] { memset((void *)to, value, bytes); });
    return SUCCESS;
}

// Asynchronous to the host, as on the device.
API Result cuMemsetD8_v2(Address to, unsigned char value, size_t bytes) {
    return cuMemsetD8Async(to, value, bytes, nullptr);
}
