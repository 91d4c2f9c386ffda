// The emulated driver, continued: modules, kernels, streams and events.

#include <cerrno>
#include <cstring>
#include <sys/mman.h>

#include "driver.hpp"

using namespace emulator;

namespace {

// Kernels take turns: they catch signals of the process while they run.
std::mutex &kernels_turn() {
    static std::mutex *const only = new std::mutex;
    return *only;
}

// Runs a grid; its threads in an order that the seed and the number of the launch choose.
void run_kernel(const Function &function, std::vector<std::vector<uint64_t>> values, const unsigned *grid,
                const unsigned *block, uint64_t number) {
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
    if (const char *problem = function.launch(pointers.data(), grid, block, schedule)) {
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
    return std::shared_ptr<Module>(new Module{library, file});
}

} // namespace

// Modules and kernels.

API Result cuModuleLoadData(Handle *module, const void *image) {
    READY(of);
    auto loaded = load(image);
    if (!loaded) {
        return INVALID_IMAGE;
    }
    *module = of.modules.add(std::move(loaded));
    return SUCCESS;
}

API Result cuModuleUnload(Handle module) {
    READY(of);
    return of.modules.alive.erase(module) ? SUCCESS : INVALID_HANDLE;
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
    if (!launch || !parameters) {
        return NOT_FOUND;
    }
    unsigned sizes[MAX_PARAMETERS];
    const unsigned count = parameters(sizes);
    *function = of.functions.add(
        std::shared_ptr<Function>(new Function{module, name, launch, std::vector<unsigned>(sizes, sizes + count)}));
    return SUCCESS;
}

API Result cuFuncSetAttribute(Handle handle, int attribute, int value) {
    READY(of);
    const auto function = of.functions.find(handle);
    if (!function) {
        return INVALID_HANDLE;
    }
    if (attribute != 8 || value < 0 || value > SHARED_LIMIT) { // 8: dynamic shared memory
        return INVALID_VALUE;
    }
    function->shared_limit = value;
    return SUCCESS;
}

API Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, Handle function, int, size_t) {
    READY(of);
    *blocks = 2;
    return of.functions.find(function) ? SUCCESS : INVALID_HANDLE;
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
    const uint64_t threads = (uint64_t)block_x * block_y * block_z;
    if (threads == 0 || threads > 1024 || (uint64_t)grid_x * grid_y * grid_z == 0 || grid_y > 65535 ||
        grid_z > 65535 || shared_bytes > function->shared_limit) {
        return INVALID_VALUE;
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
    enqueue(stream, [=] {
        const unsigned grid[3] = {grid_x, grid_y, grid_z}, block[3] = {block_x, block_y, block_z};
        run_kernel(*function, values, grid, block, number);
    });
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
    *stream = of.streams.add(Stream::start());
    return SUCCESS;
}

API Result cuStreamDestroy_v2(Handle handle) {
    READY(of);
    const auto stream = of.streams.find(handle);
    if (!stream) {
        return INVALID_HANDLE;
    }
    of.streams.alive.erase(handle);
    stream->end();
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

API Result cuEventCreate(Handle *event, unsigned) {
    READY(of);
    *event = of.events.add(std::make_shared<Event>());
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
    if (!start->point || !end->point) {
        return INVALID_HANDLE;
    }
    if (!start->is_reached() || !end->is_reached()) {
        return NOT_READY;
    }
    *ms = std::chrono::duration<float, std::milli>(end->point->time() - start->point->time()).count();
    return SUCCESS;
}
