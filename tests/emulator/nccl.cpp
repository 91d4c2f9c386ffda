// An emulated NCCL, libnccl.so.2: communicators between processes of one machine, each with an emulated GPU. What it
// has: the functions that this project calls, for elements of u8, i32, f32, f64 and bf16, and sum, max, mean and scaled
// sum. An operation runs when its stream comes to it, and holds up that stream, and nothing else, until all ranks are
// there.
//
// Stricter than the real one, where that shows an error of the host: a communicator that is gone is refused by every
// call, and so are buffers that overlap other than in place and calls of ranks that do not fit together (nccl_hub.hpp),
// and the end of a communicator in a thread that is not on its GPU. A process that aborted one dies of SIGSEGV if it
// runs its exit handlers, unless it has made another one since.
// A communicator that does not block does everything in a thread of its own (nccl_comm.hpp).
//
//     EMULATOR_NCCL=23007        its version. Before 23000 ranks on one GPU are refused unless each has an NCCL_HOSTID
//     EMULATOR_NCCL_DEATH=hang   the end of a rank's process is not noticed, as by NCCL within a node: operations never
//                                end until they are aborted; only while a communicator is made it is an error
//     EMULATOR_NCCL_FAIL=0       which operation that a process issues fails, from 1 on; 0: none
//     EMULATOR_NCCL_DEATH=error  it is reported to the others as ncclRemoteError, as by NCCL between nodes

#include "nccl_comm.hpp"

#include <csignal>

namespace nccl {

namespace {

// `ncclConfig_t`: what is read of it.
struct Config {
    size_t size;
    unsigned magic, version;
    int blocking;
};

constexpr unsigned CONFIG_MAGIC = 0xcafebeef;
constexpr int UNDEFINED = INT32_MIN, NO_COLOR = -1, SCALAR_ON_HOST = 1;

// Communicators that are alive, by the number that the caller takes for an address, and meeting points of this process
// at which none of its communicators is yet. Never destroyed: threads may outlive `main`.
struct World {
    std::mutex mutex;
    std::map<Handle, std::shared_ptr<Comm>> alive;
    std::map<std::string, std::shared_ptr<Hub>> places;
    uintptr_t last = 0;
    std::atomic<bool> has_aborted = false;

    static World &get() {
        static World *const only = new World;
        return *only;
    }

    Handle add(std::shared_ptr<Comm> comm) {
        std::lock_guard lock(mutex);
        const Handle handle = reinterpret_cast<Handle>(++last << 4);
        alive[handle] = std::move(comm);
        return handle;
    }

    std::shared_ptr<Comm> find(const char *call, Handle handle) {
        std::lock_guard lock(mutex);
        const auto found = alive.find(handle);
        if (found == alive.end()) {
            complain("%s of a communicator that is gone, or never was", call);
            return nullptr;
        }
        return found->second;
    }

    // Of two threads one gets it.
    std::shared_ptr<Comm> take(Handle handle) {
        std::lock_guard lock(mutex);
        const auto node = alive.extract(handle);
        return node ? node.mapped() : nullptr;
    }
};

// The real one unloads its kernels when the process exits. A thread that is in an abort then dies: seen with NCCL 2.28.3
// on an H200.
struct AtExit {
    ~AtExit() {
        if (World::get().has_aborted) {
            std::signal(SIGSEGV, SIG_DFL);
            raise(SIGSEGV);
        }
    }
} at_exit;

// False if the configuration is none.
bool read_config(const Config *config, bool otherwise, bool &blocks) {
    if (config && (config->magic != CONFIG_MAGIC || config->size < sizeof(Config))) {
        complain("a configuration that was not initialized");
        return false;
    }
    blocks = config && config->blocking != UNDEFINED ? config->blocking != 0 : otherwise;
    return true;
}

// The communicator that a call is to end. The real one puts the calling thread's device back afterwards: in a thread that
// has none, that is a context on the first GPU, whoever's it is.
std::shared_ptr<Comm> find_to_end(const char *call, Handle handle, Result &result) {
    auto comm = World::get().find(call, handle);
    result = !comm ? INVALID_ARGUMENT : Driver::get().is_current(comm->gpu) ? SUCCESS : UNHANDLED_CUDA_ERROR;
    if (result == UNHANDLED_CUDA_ERROR) {
        complain("%s in a thread that is not on the communicator's GPU", call);
    }
    return result == SUCCESS ? comm : nullptr;
}

// A call of an operation.
struct Call {
    const char *name;
    What what;
    const void *source;
    void *target;
    size_t count;
    int type, op, peer;
    // Bytes that this rank gives and gets, as multiples of the count.
    size_t gives = 0, gets = 0;
    // Where the target lies of an operation in place, as a multiple of the count from the source.
    ptrdiff_t in_place = 0;
};

// The messages of a thread between the begin and the end of a group, by rank.
struct Group {
    int depth = 0;
    Handle comm = nullptr, stream = nullptr;
    int type = 0;
    std::vector<Part> parts;

    static Group &get() {
        thread_local Group only;
        return only;
    }

    // SUCCESS if the message is one more of the group.
    Result add(const Call &call, const Comm &to, Handle handle, Handle on) {
        const bool is_first = parts.empty();
        parts.resize((size_t)to.size);
        Part &part = parts[(size_t)call.peer];
        const size_t bytes = call.count * width_of(call.type);
        const bool sends = call.what == What::send;
        if ((!is_first && (handle != comm || on != stream || call.type != type)) ||
            (call.what != What::recv && !sends) || (sends ? part.sent : part.expected)) {
            complain("%s in a group: of another communicator, stream or type, no message, or the second of its kind",
                     call.name);
            return INVALID_USAGE;
        }
        comm = handle;
        stream = on;
        type = call.type;
        (sends ? part.sent : part.expected) = bytes;
        part.from = sends ? (const char *)call.source : part.from;
        part.to = sends ? part.to : (char *)call.target;
        return SUCCESS;
    }
};

bool overlaps_wrongly(const Call &call, size_t slice) {
    const char *const source = static_cast<const char *>(call.source), *const target = static_cast<char *>(call.target);
    const bool apart = source + call.gives * slice <= target || target + call.gets * slice <= source;
    return !apart && target != source + call.in_place * (ptrdiff_t)slice;
}

// SUCCESS if NCCL would take it. A created reduction becomes SCALED, with its factor.
Result check_call(const Call &call, const Comm &comm, Frame &request) {
    const size_t width = width_of(call.type);
    const bool reduces = call.what == What::all_reduce || call.what == What::reduce_scatter;
    if (width == 0) {
        complain("%s of type %d, which is not emulated", call.name, call.type);
        return INVALID_ARGUMENT;
    }
    if ((call.gives && !call.source) || (call.gets && !call.target)) {
        complain("%s with a null pointer", call.name);
        return INVALID_ARGUMENT;
    }
    const bool is_message = call.what == What::send || call.what == What::recv;
    if (call.peer < 0 || call.peer >= comm.size || (is_message && call.peer == comm.rank && Group::get().depth == 0)) {
        complain("%s: rank %d is none of %d, or this one", call.name, call.peer, comm.size);
        return INVALID_ARGUMENT;
    }
    if (call.gives && call.gets && overlaps_wrongly(call, call.count * width)) {
        complain("%s: source and target overlap, and not as in place", call.name);
        return INVALID_ARGUMENT;
    }
    if (!reduces || call.op == SUM || call.op == MAX || call.op == AVG) {
        return SUCCESS;
    }
    const auto sum = comm.sums.find(call.op);
    if (sum == comm.sums.end() || sum->second.first != call.type) {
        complain("%s with reduction %d, which %s", call.name, call.op,
                 sum == comm.sums.end() ? "this communicator does not have" : "is of another type");
        return INVALID_ARGUMENT;
    }
    request.op = SCALED;
    memcpy(request.scalar, sum->second.second.data(), width);
    return SUCCESS;
}

Result issue(Call call, Handle handle, Handle stream) {
    const auto comm = World::get().find(call.name, handle);
    if (!comm) {
        return INVALID_ARGUMENT;
    }
    const size_t ranks = (size_t)comm->size;
    call.gives = call.what == What::reduce_scatter ? ranks : call.what == What::recv ? 0 : 1;
    call.gets = call.what == What::all_gather ? ranks : call.what == What::send ? 0 : 1;
    call.in_place = call.what == What::reduce_scatter ? comm->rank : call.what == What::all_gather ? -comm->rank : 0;
    if (call.what == What::broadcast && call.peer != comm->rank) {
        call.gives = 0;
    }
    Frame request = {};
    request.what = call.what;
    request.type = call.type;
    request.op = call.op;
    request.peer = call.peer;
    request.count = call.count;
    Result result = comm->check(call.name);
    static std::atomic<uint64_t> issued = 0;
    if (++issued == setting("EMULATOR_NCCL_FAIL", 0)) {
        complain("%s fails, as EMULATOR_NCCL_FAIL asks for", call.name);
        return INTERNAL_ERROR;
    }
    result = result == SUCCESS ? check_call(call, *comm, request) : result;
    if (result != SUCCESS || call.count == 0) {
        return result;
    }
    if (Group::get().depth > 0) {
        return Group::get().add(call, *comm, handle, stream);
    }
    // One element only connects, and is waited for.
    if (call.count > 1) {
        Driver::get().note_collective();
    }
    const size_t slice = call.count * width_of(call.type);
    request.bytes = call.gives * slice;
    return comm->issue(call.name, {nullptr, request, (const char *)call.source, (char *)call.target, call.gets * slice},
                       stream);
}

} // namespace

// The library.

API Result ncclGetVersion(int *version) {
    *version = library_version();
    return SUCCESS;
}

API Result ncclGetUniqueId(Id *id) {
    auto hub = Hub::open(*id);
    if (!hub) {
        complain("ncclGetUniqueId: no socket: %s", strerror(errno));
        return SYSTEM_ERROR;
    }
    World &world = World::get();
    std::lock_guard lock(world.mutex);
    world.places[id->name] = std::move(hub);
    return SUCCESS;
}

API const char *ncclGetErrorString(Result result) {
    switch (result) {
    case SUCCESS:
        return "no error";
    case UNHANDLED_CUDA_ERROR:
        return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case SYSTEM_ERROR:
        return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case INTERNAL_ERROR:
        return "internal error - please report this issue to the NCCL developers";
    case INVALID_ARGUMENT:
        return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case INVALID_USAGE:
        return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case REMOTE_ERROR:
        return "remote process exited or there was a network error";
    case IN_PROGRESS:
        return "NCCL operation in progress";
    }
    return "unknown result code";
}

API const char *ncclGetLastError(Handle) { return LastError::get(); }

// Communicators.

API Result ncclCommInitRankConfig(Handle *made, int size, Id id, int rank, Config *config) {
    bool blocks;
    const Gpu gpu = Driver::get().current();
    if (!made || size < 1 || rank < 0 || rank >= size || !read_config(config, true, blocks)) {
        complain("ncclCommInitRankConfig: rank %d of %d", rank, size);
        return INVALID_ARGUMENT;
    }
    if (!gpu.context) {
        complain("ncclCommInitRankConfig: the calling thread has no CUDA context");
        return UNHANDLED_CUDA_ERROR;
    }
    World &world = World::get();
    std::shared_ptr<Hub> hub;
    {
        std::lock_guard lock(world.mutex);
        if (auto node = world.places.extract(id.name)) {
            hub = std::move(node.mapped());
        }
    }
    const auto comm = std::make_shared<Comm>(rank, size, blocks, gpu, std::move(hub));
    *made = world.add(comm);
    // Whoever makes one has come through the aborts before.
    world.has_aborted = false;
    Driver::get().take(comm->memory = 5 << 20);
    const Result result = comm->start(id, blocks);
    if (result != SUCCESS && result != IN_PROGRESS) {
        world.take(*made);
        comm->end();
        *made = nullptr;
    }
    return result;
}

API Result ncclCommGetAsyncError(Handle handle, Result *state) {
    const auto comm = World::get().find("ncclCommGetAsyncError", handle);
    if (!comm) {
        return INVALID_ARGUMENT;
    }
    *state = comm->ask();
    return SUCCESS;
}

API Result ncclCommSplit(Handle handle, int color, int key, Handle *part, Config *config) {
    const auto comm = World::get().find("ncclCommSplit", handle);
    bool blocks;
    if (!comm || !part || !read_config(config, comm->blocks, blocks)) {
        return INVALID_ARGUMENT;
    }
    if (color < 0 && color != NO_COLOR) {
        complain("ncclCommSplit with color %d", color);
        return INVALID_ARGUMENT;
    }
    const Result result = comm->check("ncclCommSplit");
    if (result != SUCCESS) {
        return result;
    }
    // Written at the last moment, as the real one does where calls do not block.
    *part = nullptr;
    return comm->split(color, key, blocks, [part](std::shared_ptr<Comm> made) {
        const Handle handle = World::get().add(std::move(made));
        __atomic_store_n(part, handle, __ATOMIC_RELEASE);
    });
}

API Result ncclCommFinalize(Handle handle) {
    Result result;
    const auto comm = find_to_end("ncclCommFinalize", handle, result);
    if (!comm) {
        return result;
    }
    result = comm->check("ncclCommFinalize");
    return result == SUCCESS ? comm->finalize(comm->blocks) : result;
}

API Result ncclCommDestroy(Handle handle) {
    Result result;
    const auto comm = find_to_end("ncclCommDestroy", handle, result);
    if (!comm) {
        return result;
    }
    if (!comm->has_left()) {
        result = comm->check("ncclCommDestroy");
        result = result == SUCCESS ? comm->finalize(true) : result;
        if (result != SUCCESS) {
            return result;
        }
    }
    if (World::get().take(handle)) {
        comm->end();
        Driver::get().take(-comm->memory);
    }
    return SUCCESS;
}

API Result ncclCommAbort(Handle handle) {
    Result result;
    const auto comm = find_to_end("ncclCommAbort", handle, result);
    if (!comm || !World::get().take(handle)) {
        return comm ? INVALID_ARGUMENT : result;
    }
    inform(comm->gpu.number, "comm %p rank %d nranks %d - Abort", (void *)comm.get(), comm->rank, comm->size);
    World::get().has_aborted = true;
    comm->end();
    // The real one frees its memory of the device, which waits for everything there: also for operations of the other
    // communicators of the process, whatever they wait for.
    Driver::get().synchronize();
    Driver::get().take(-comm->memory);
    return SUCCESS;
}

// Reductions.

API Result ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, Handle handle) {
    const auto comm = World::get().find("ncclRedOpCreatePreMulSum", handle);
    if (!comm || !op || !scalar || width_of(type) == 0 || residence != SCALAR_ON_HOST) {
        complain("ncclRedOpCreatePreMulSum: type %d, scalar %p, residence %d", type, scalar, residence);
        return INVALID_ARGUMENT;
    }
    const Result result = comm->check("ncclRedOpCreatePreMulSum");
    if (result == SUCCESS) {
        *op = comm->add_sum(type, static_cast<const char *>(scalar));
    }
    return result;
}

API Result ncclRedOpDestroy(int op, Handle handle) {
    const auto comm = World::get().find("ncclRedOpDestroy", handle);
    if (!comm || comm->sums.erase(op) == 0) {
        complain("ncclRedOpDestroy of %d, which is no reduction of the communicator", op);
        return INVALID_ARGUMENT;
    }
    return SUCCESS;
}

// Operations.

API Result ncclGroupStart() {
    Group::get().depth++;
    return SUCCESS;
}

API Result ncclGroupEnd() {
    Group &open = Group::get();
    if (open.depth == 0) {
        complain("ncclGroupEnd without a group");
        return INVALID_USAGE;
    }
    if (--open.depth > 0 || open.parts.empty()) {
        return SUCCESS;
    }
    Group group;
    std::swap(group, open);
    const auto comm = World::get().find("ncclGroupEnd", group.comm);
    if (!comm) {
        return INVALID_ARGUMENT;
    }
    Frame request = {};
    request.what = What::exchange;
    request.type = group.type;
    request.bytes = 2 * group.parts.size() * sizeof(uint64_t);
    for (const Part &part : group.parts) {
        request.bytes += part.sent;
    }
    Driver::get().note_collective();
    return comm->issue("ncclGroupEnd", {nullptr, request, nullptr, nullptr, 0, std::move(group.parts)}, group.stream);
}

API Result ncclAllReduce(const void *source, void *target, size_t count, int type, int op, Handle comm, Handle stream) {
    return issue({"ncclAllReduce", What::all_reduce, source, target, count, type, op, 0}, comm, stream);
}

API Result ncclReduceScatter(const void *source, void *target, size_t count, int type, int op, Handle comm,
                             Handle stream) {
    return issue({"ncclReduceScatter", What::reduce_scatter, source, target, count, type, op, 0}, comm, stream);
}

API Result ncclAllGather(const void *source, void *target, size_t count, int type, Handle comm, Handle stream) {
    return issue({"ncclAllGather", What::all_gather, source, target, count, type, 0, 0}, comm, stream);
}

API Result ncclBroadcast(const void *source, void *target, size_t count, int type, int root, Handle comm,
                         Handle stream) {
    return issue({"ncclBroadcast", What::broadcast, source, target, count, type, 0, root}, comm, stream);
}

API Result ncclSend(const void *source, size_t count, int type, int peer, Handle comm, Handle stream) {
    return issue({"ncclSend", What::send, source, nullptr, count, type, 0, peer}, comm, stream);
}

API Result ncclRecv(void *target, size_t count, int type, int peer, Handle comm, Handle stream) {
    return issue({"ncclRecv", What::recv, nullptr, target, count, type, 0, peer}, comm, stream);
}

} // namespace nccl
