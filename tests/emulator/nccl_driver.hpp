// What the emulated NCCL needs of the emulated driver.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <string>

#include "cuda.h"

namespace nccl {

inline uint64_t setting(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, nullptr, 10) : otherwise;
}

// As `ncclGetVersion` gives it: 22809 is 2.28.9.
inline int library_version() { return (int)setting("EMULATOR_NCCL", 23007); }

// The first version that lets ranks share a GPU if NCCL_MULTI_RANK_GPU_ENABLE says so.
constexpr int SHARES_GPUS = 23000;

// The GPU of a communicator: that of the thread that makes it.
struct Gpu {
    Handle context = nullptr;
    int number = -1;
    // `0000:01:00.0`
    std::string bus;
    // Which one of which host, as NCCL tells them apart; empty if ranks may share it.
    std::string identity;
};

// Functions of the driver. Without it nothing works, and a process has it before it has this library.
class Driver {
  public:
    int (*launch_host_function)(Handle, HostFunction, void *);
    // Not CUDA's: the emulated driver counts what comes after.
    void (*note_collective)();
    // Nor this.
    void (*take)(size_t);

    static const Driver &get() {
        static const Driver *const only = new Driver;
        return *only;
    }

    // That of the calling thread; without a context it has none.
    Gpu current() const {
        Gpu gpu;
        char bus[32] = {};
        if (get_current(&gpu.context) != SUCCESS || !gpu.context || get_device(&gpu.number) != SUCCESS ||
            get_bus(bus, sizeof bus, gpu.number) != SUCCESS) {
            return Gpu();
        }
        gpu.bus = bus;
        const char *host = getenv("NCCL_HOSTID");
        if (library_version() < SHARES_GPUS || setting("NCCL_MULTI_RANK_GPU_ENABLE", 0) != 1) {
            gpu.identity = "CUDA device " + gpu.bus + (host ? " of host " + std::string(host) : "");
        }
        return gpu;
    }

    // True if the calling thread is on it.
    bool is_current(const Gpu &gpu) const {
        Handle context = nullptr;
        return get_current(&context) == SUCCESS && context && context == gpu.context;
    }

    // Makes it the calling thread's.
    void bind(const Gpu &gpu) const { set_current(gpu.context); }

    // Waits for all that is in the streams of the calling thread's GPU.
    void synchronize() const { synchronize_current(); }

  private:
    static constexpr int SUCCESS = 0;

    Driver() {
        void *const library = dlopen("libcuda.so.1", RTLD_NOW);
        find(library, "cuLaunchHostFunc", launch_host_function);
        find(library, "emulatorCollective", note_collective);
        find(library, "emulatorTake", take);
        find(library, "cuCtxGetCurrent", get_current);
        find(library, "cuCtxSetCurrent", set_current);
        find(library, "cuCtxGetDevice", get_device);
        find(library, "cuDeviceGetPCIBusId", get_bus);
        find(library, "cuCtxSynchronize", synchronize_current);
    }

    template <class F> static void find(void *library, const char *name, F &function) {
        void *const address = library ? dlsym(library, name) : nullptr;
        if (!address) {
            fprintf(stderr, "emulated NCCL: the driver has no %s: %s\n", name, dlerror());
            abort();
        }
        function = reinterpret_cast<F>(address);
    }

    int (*get_current)(Handle *);
    int (*set_current)(Handle);
    int (*get_device)(int *);
    int (*get_bus)(char *, int, int);
    int (*synchronize_current)();
};

} // namespace nccl
