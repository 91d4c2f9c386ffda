// The emulated driver, continued: modules, kernels, streams and events.

#include <cerrno>
#include <cstring>
#include <sys/mman.h>

#include "driver.hpp"

using namespace emulator;

namespace {

// `CU_EVENT_DISABLE_TIMING`
constexpr unsigned UNTIMED = 2;

// Kernels take turns: those of a library share what is static there.
std::mutex &kernels_turn() {
    static std::mutex *const only = new std::mutex;
    return *only;
}

struct Shape {
    unsigned grid[3], block[3];
    unsigned shared; // bytes of dynamic shared memory
};

// What a card refuses, whatever the kernel does.
Result check(const Function &function, const Shape &shape) {
    const unsigned(&grid)[3] = shape.grid, (&block)[3] = shape.block;
    const bool none = grid[0] == 0 || grid[1] == 0 || grid[2] == 0;
    if (none || grid[0] > MAX_BLOCKS || grid[1] > MAX_BLOCKS_YZ || grid[2] > MAX_BLOCKS_YZ) {
        say("kernel `%s`: a grid of %u × %u × %u blocks", function.name.c_str(), grid[0], grid[1], grid[2]);
        return INVALID_VALUE;
    }
    const uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
    if (threads == 0 || threads > MAX_THREADS || block[2] > MAX_THREADS_Z) {
        say("kernel `%s`: a block of %u × %u × %u threads", function.name.c_str(), block[0], block[1], block[2]);
        return INVALID_VALUE;
    }
    if (threads > function.threads) {
        say("kernel `%s`: %u threads, compiled for %u", function.name.c_str(), (unsigned)threads, function.threads);
        return OUT_OF_RESOURCES;
    }
    if (shape.shared > function.shared_limit) {
        say("kernel `%s`: %u bytes of shared memory, of %zu that it may have", function.name.c_str(), shape.shared,
            function.shared_limit);
        return INVALID_VALUE;
    }
    return SUCCESS;
}

// Runs a grid; its threads in an order that the seed and the number of the launch choose.
void run_kernel(const Function &function, std::vector<std::vector<uint64_t>> values, const Shape &shape,
                uint64_t number) {
    std::vector<void *> pointers;
    for (std::vector<uint64_t> &value : values) {
        pointers.push_back(value.data());
    }
    if (number + 1 == setting("EMULATOR_FAIL_LAUNCH", 0)) {
        say("kernel `%s` fails, as EMULATOR_FAIL_LAUNCH asks for", function.name.c_str());
        return fail(ILLEGAL_ADDRESS);
    }
    std::lock_guard turn(kernels_turn());
    const unsigned schedule = (unsigned)((setting("EMULATOR_SEED", 1) + number) % 3);
    if (const char *problem = function.launch(pointers.data(), shape.grid, shape.block, shape.shared, schedule)) {
        say("kernel `%s`: %s", function.name.c_str(), problem);
        fail(ILLEGAL_ADDRESS);
    }
}

// The library in an image, loaded from memory; null with words on stderr.
std::shared_ptr<Module> load(const void *image) {
    ImageHeader header;
    memcpy(&header, image, sizeof header);
    if (memcmp(header.magic, IMAGE_MAGIC, sizeof header.magic) != 0) {
        say("an image that is not the emulated NVRTC's");
        return nullptr;
    }
    const int file = memfd_create("kernels", MFD_CLOEXEC);
    const char *bytes = (const char *)image + sizeof header;
    for (uint64_t written = 0; written < header.bytes;) {
        const ssize_t more = write(file, bytes + written, header.bytes - written);
        if (more <= 0) {
            say("no memory for kernels: %s", strerror(errno));
            close(file);
            return nullptr;
        }
        written += more;
    }
    void *library = dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        say("%s", dlerror());
        close(file);
        return nullptr;
    }
    return std::make_shared<Module>(Module{library});
}

} // namespace

// Modules and kernels.

API Result cuModuleLoadData(Handle *module, const void *image) {
    may_wait();
    READY(of);
    auto loaded = load(image);
    if (!loaded) {
        return INVALID_IMAGE;
    }
    count(of, of.modules_loaded, "a module is loaded");
    *module = of.modules.add(std::move(loaded));
    return SUCCESS;
}

// Its functions go with it.
API Result cuModuleUnload(Handle handle) {
    READY(of);
    const auto module = of.modules.find(handle);
    if (!module) {
        return INVALID_HANDLE;
    }
    auto &functions = of.functions.alive;
    for (auto at = functions.begin(); at != functions.end();) {
        at = at->second->module == module ? functions.erase(at) : std::next(at);
    }
    of.modules.alive.erase(handle);
    return SUCCESS;
}

API Result cuModuleGetFunction(Handle *function, Handle handle, const char *name) {
    READY(of);
    const auto module = of.modules.find(handle);
    if (!module) {
        return INVALID_HANDLE;
    }
    const auto symbol = [&](const char *end) { return dlsym(module->library, (std::string(name) + end).c_str()); };
    const auto launch = (Launch)symbol("_launch");
    const auto parameters = (unsigned (*)(unsigned *))symbol("_parameters");
    const auto threads = (unsigned (*)())symbol("_threads"), shared = (unsigned (*)())symbol("_shared");
    if (!launch || !parameters || !threads || !shared) {
        return NOT_FOUND;
    }
    unsigned sizes[MAX_PARAMETERS];
    const unsigned count = parameters(sizes);
    const size_t declared = shared();
    *function = of.functions.add(std::shared_ptr<Function>(
        new Function{module, name, launch, std::vector<unsigned>(sizes, sizes + count), threads(), declared,
                     declared < SHARED_WITHOUT_ASKING ? SHARED_WITHOUT_ASKING - declared : 0}));
    return SUCCESS;
}

API Result cuFuncGetAttribute(int *value, int attribute, Handle handle) {
    READY(of);
    const auto function = of.functions.find(handle);
    if (!function) {
        return INVALID_HANDLE;
    }
    if (attribute != 1) {
        say("attribute %d of a kernel is not emulated", attribute);
        return INVALID_VALUE;
    }
    *value = (int)function->shared;
    return SUCCESS;
}

API Result cuFuncSetAttribute(Handle handle, int attribute, int value) {
    READY(of);
    const auto function = of.functions.find(handle);
    if (!function) {
        return INVALID_HANDLE;
    }
    if (attribute != 8 || value < 0) { // 8: dynamic shared memory
        return INVALID_VALUE;
    }
    if (function->shared + value > most_shared()) {
        return refuse(INVALID_VALUE, "more shared memory than a block can have");
    }
    function->shared_limit = value;
    return SUCCESS;
}

API Result cuLaunchKernel(Handle handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned shared_bytes, Handle stream_handle,
                          void **parameters, void **) {
    READY(of);
    const auto function = of.functions.find(handle);
    const auto stream = stream_of(of, stream_handle);
    if (!function || !stream) {
        return INVALID_HANDLE;
    }
    const Shape shape = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes};
    if (const Result refused = check(*function, shape); refused != SUCCESS) {
        return refused;
    }
    size_t parameter_bytes = 0;
    std::vector<std::vector<uint64_t>> values;
    for (size_t i = 0; i < function->parameters.size(); i++) {
        // A structure takes several words.
        const unsigned bytes = function->parameters[i];
        values.emplace_back((bytes + 7) / 8);
        memcpy(values.back().data(), parameters[i], bytes);
        parameter_bytes += values.back().size() * sizeof(uint64_t);
    }
    if (parameter_bytes > MAX_PARAMETER_BYTES) {
        return refuse(INVALID_VALUE, "more bytes of parameters than every card takes");
    }
    const uint64_t number = of.launches++;
    enqueue(stream, [=] { run_kernel(*function, values, shape, number); });
    if (setting("CUDA_LAUNCH_BLOCKING", 0) == 0) {
        return SUCCESS;
    }
    lock.unlock();
    stream->drain();
    lock.lock();
    return of.failed;
}

// Streams.

API Result cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    READY(of);
    *least = 0;
    *greatest = -5;
    return SUCCESS;
}

API Result cuStreamCreateWithPriority(Handle *stream, unsigned, int) {
    READY(of);
    *stream = of.streams.add(Stream::start(current_device));
    return SUCCESS;
}

API Result cuStreamDestroy_v2(Handle handle) {
    READY(of);
    const auto stream = of.streams.find(handle);
    if (!stream) {
        return INVALID_HANDLE;
    }
    of.streams.alive.erase(handle);
    if (setting("EMULATOR_STATISTICS", 0) != 0) {
        const auto [pushed, found_idle] = stream->counts();
        say("stream ends: %llu pieces of work, %llu found it idle", (unsigned long long)pushed,
            (unsigned long long)found_idle);
    }
    return SUCCESS;
}

API Result cuStreamQuery(Handle handle) {
    READY(of);
    const auto stream = stream_of(of, handle);
    if (!stream) {
        return INVALID_HANDLE;
    }
    return stream->is_empty() ? SUCCESS : NOT_READY;
}

API Result cuStreamSynchronize(Handle handle) {
    std::shared_ptr<Stream> stream;
    {
        READY(of);
        stream = stream_of(of, handle);
    }
    if (!stream) {
        return INVALID_HANDLE;
    }
    stream->drain();
    std::lock_guard lock(driver().mutex);
    return driver().failed;
}

API Result cuLaunchHostFunc(Handle handle, HostFunction function, void *argument) {
    READY(of);
    const auto stream = stream_of(of, handle);
    if (!stream) {
        return INVALID_HANDLE;
    }
    enqueue(stream, [=] {
        in_host_function = true;
        function(argument);
        in_host_function = false;
    });
    return SUCCESS;
}

// Events.

API Result cuEventCreate(Handle *event, unsigned flags) {
    READY(of);
    *event = of.events.add(std::make_shared<Event>(Event{(flags & UNTIMED) == 0, nullptr}));
    return SUCCESS;
}

API Result cuEventDestroy_v2(Handle event) {
    READY(of);
    return of.events.alive.erase(event) ? SUCCESS : INVALID_HANDLE;
}

API Result cuEventRecord(Handle event_handle, Handle stream_handle) {
    READY(of);
    const auto event = of.events.find(event_handle);
    const auto stream = stream_of(of, stream_handle);
    if (!event || !stream) {
        return INVALID_HANDLE;
    }
    event->point = std::make_shared<Point>();
    // Also after a failure, so that nothing waits for ever.
    stream->push([point = event->point] { point->reach(); });
    return SUCCESS;
}

API Result cuEventQuery(Handle handle) {
    READY(of);
    const auto event = of.events.find(handle);
    if (!event) {
        return INVALID_HANDLE;
    }
    return event->is_reached() ? SUCCESS : NOT_READY;
}

API Result cuStreamWaitEvent(Handle stream_handle, Handle event_handle, unsigned) {
    READY(of);
    const auto event = of.events.find(event_handle);
    const auto stream = stream_of(of, stream_handle);
    if (!event || !stream) {
        return INVALID_HANDLE;
    }
    if (event->point) {
        stream->push([point = event->point] { point->wait(); });
    }
    return SUCCESS;
}

API Result cuEventElapsedTime(float *ms, Handle start_handle, Handle end_handle) {
    READY(of);
    const auto start = of.events.find(start_handle), end = of.events.find(end_handle);
    if (!start || !end) {
        return INVALID_HANDLE;
    }
    if (!start->timed || !end->timed || !start->point || !end->point) {
        return refuse(INVALID_HANDLE, "the time between two events, of which one has none or was not recorded");
    }
    if (!start->is_reached() || !end->is_reached()) {
        return NOT_READY;
    }
    *ms = std::chrono::duration<float, std::milli>(end->point->time() - start->point->time()).count();
    return SUCCESS;
}
