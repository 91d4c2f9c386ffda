// What the files of the emulated driver share: its state, its handles, and how work gets into a stream.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <dlfcn.h>
#include <map>
#include <string>
#include <unistd.h>
#include <unordered_map>
#include <vector>

#include "stream.hpp"

namespace emulator {

constexpr int MAX_PARAMETERS = 32;
constexpr size_t MAX_PARAMETER_BYTES = 4096;

// Limits of a launch.
constexpr unsigned MAX_THREADS = 1024, MAX_THREADS_Z = 64, MAX_BLOCKS = 0x7fffffff, MAX_BLOCKS_YZ = 65535;
constexpr size_t SHARED_WITHOUT_ASKING = 48 << 10;

// Shared memory that a block can ask for.
inline size_t most_shared() { return setting("EMULATOR_SHARED_KIB", 227) << 10; }

using Launch = const char *(*)(void **, const unsigned *, const unsigned *, unsigned, unsigned);

// A library with kernels. It stays, as does its file in memory, by whose name the loader knows it: the process's handler
// for faults is within it.
struct Module {
    void *library;
};

struct Function {
    std::shared_ptr<Module> module;
    std::string name;
    Launch launch;
    std::vector<unsigned> parameters;
    unsigned threads; // that it was compiled for at most
    size_t shared;    // that it declares, in bytes
    size_t shared_limit;
};

// Handles that were given out and not yet taken back.
template <class T> struct Registry {
    std::unordered_map<Handle, std::shared_ptr<T>> alive;

    Handle add(std::shared_ptr<T> value) {
        Handle handle = value.get();
        alive[handle] = std::move(value);
        return handle;
    }

    std::shared_ptr<T> find(Handle handle) {
        const auto found = alive.find(handle);
        return found == alive.end() ? nullptr : found->second;
    }
};

// Bytes that were asked for, and behind them up to the fence what nobody may write.
struct Allocation {
    char *pages;
    size_t mapped, bytes;
    int device; // −1: page-locked memory of the host
};

struct Driver {
    std::mutex mutex;
    bool started = false;
    std::vector<int> visible;
    Result failed = SUCCESS;
    uint64_t launches = 0;
    // Modules that were loaded and memory that was allocated: the device may be waited for. `collectives`: NCCL is in use.
    uint64_t modules_loaded = 0, allocated = 0;
    bool collectives = false;
    size_t used[MAX_DEVICES] = {};
    std::map<Address, Allocation> allocations; // by their start
    Registry<Stream> streams;
    Registry<Event> events;
    Registry<Function> functions;
    Registry<Module> modules;
    std::shared_ptr<Stream> default_stream;
};

// Never destroyed: threads of streams may outlive `main`.
inline Driver &driver() {
    static Driver *const only = new Driver;
    return *only;
}

inline thread_local int current_device = -1;
inline thread_local bool in_host_function = false;

__attribute__((format(printf, 1, 2))) inline void say(const char *format, ...) {
    char text[768];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "emulated GPU: %s\n", text);
}

inline Result refuse(Result result, const char *words) {
    say("%s", words);
    return result;
}

// Of a module or an allocation: with EMULATOR_STATISTICS, a word if a rank that waits for it may wait for others for ever.
inline void count(Driver &of, uint64_t &counter, const char *what) {
    counter++;
    if (of.collectives && setting("EMULATOR_STATISTICS", 0) != 0) {
        say("%s after the first collective", what);
    }
}

// What every call asks first.
inline Result ready(Driver &of, bool needs_context = true) {
    if (in_host_function) {
        return refuse(NOT_PERMITTED, "a host function of a stream calls the driver");
    }
    if (!of.started) {
        return NOT_INITIALIZED;
    }
    if (of.failed != SUCCESS) {
        return of.failed;
    }
    return needs_context && current_device < 0 ? INVALID_CONTEXT : SUCCESS;
}

#define READY(of, ...)                                                                                                 \
    Driver &of = driver();                                                                                             \
    std::unique_lock lock(of.mutex);                                                                                   \
    if (const Result problem = ready(of, ##__VA_ARGS__); problem != SUCCESS) {                                         \
        return problem;                                                                                                \
    }

inline std::shared_ptr<Stream> stream_of(Driver &of, Handle handle) {
    if (handle) {
        return of.streams.find(handle);
    }
    if (!of.default_stream) {
        of.default_stream = Stream::start(std::max(current_device, 0));
    }
    return of.default_stream;
}

// Waits for all that is in the streams. Not with the driver's mutex: their work takes it.
inline void drain_streams() {
    std::vector<std::shared_ptr<Stream>> streams;
    {
        std::lock_guard lock(driver().mutex);
        for (const auto &[handle, stream] : driver().streams.alive) {
            streams.push_back(stream);
        }
        if (driver().default_stream) {
            streams.push_back(driver().default_stream);
        }
    }
    for (const auto &stream : streams) {
        stream->drain();
    }
}

// What CUDA lets wait for the device, and often does not: at every second call, by the seed and the device.
inline void may_wait() {
    static const uint64_t seed = setting("EMULATOR_WAITS", 0);
    if (seed == 0 || in_host_function || current_device < 0) {
        return;
    }
    static std::mt19937_64 random(1000 * seed + (uint64_t)current_device);
    bool waits;
    {
        std::lock_guard lock(driver().mutex);
        waits = random() % 2 == 0;
    }
    if (waits) {
        drain_streams();
    }
}

inline void fail(Result result) {
    std::lock_guard lock(driver().mutex);
    driver().failed = driver().failed == SUCCESS ? result : driver().failed;
}

inline bool has_failed() {
    std::lock_guard lock(driver().mutex);
    return driver().failed != SUCCESS;
}

// Work that is skipped once the device has failed.
inline void enqueue(const std::shared_ptr<Stream> &stream, std::function<void()> work) {
    stream->push([work = std::move(work)] {
        if (!has_failed()) {
            work();
        }
    });
}

} // namespace emulator
