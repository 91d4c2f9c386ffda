// One rank's communicator of the emulated NCCL.
//
// Where calls do not block, each goes on in a thread of the communicator, also those that put an operation into a
// stream: whoever does not wait for it records events too early. EMULATOR_DELAY_US makes that thread late.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <random>
#include <set>

#include "cuda.h"
#include "nccl_driver.hpp"
#include "nccl_hub.hpp"
#include "nccl_words.hpp"

namespace nccl {

class Comm;

// What a rank sends to and receives from another in a group of messages.
struct Part {
    const char *from = nullptr;
    char *to = nullptr;
    size_t sent = 0, expected = 0;
};

// An operation in a stream.
struct Operation {
    std::shared_ptr<Comm> comm;
    Frame request;
    const char *source;
    char *target;
    // Bytes of the answer.
    size_t taken;
    // Of a group of messages, by rank.
    std::vector<Part> parts = {};
};

// See the file.
class Comm : public std::enable_shared_from_this<Comm> {
  public:
    const int rank, size;
    const bool blocks;
    const Gpu gpu;
    // Bytes of the device that it takes.
    size_t memory = 0;
    // Scaled sums that were made: type and factor by number.
    std::map<int, std::pair<int, std::string>> sums;

    using Delivery = std::function<void(std::shared_ptr<Comm>)>;

    Comm(int rank, int size, bool blocks, Gpu gpu, std::shared_ptr<Hub> hub)
        : rank(rank), size(size), blocks(blocks), gpu(gpu), hub(std::move(hub)) {}

    // Begins to meet the others.
    Result start(const Id &id, bool waits) {
        thread = std::thread([self = shared_from_this()] { self->work(); });
        return begin("ncclCommInitRankConfig", [this, id] { return meet(id); }, waits);
    }

    // Begins to put an operation into a stream.
    Result issue(const char *call, Operation operation, Handle stream) {
        const auto launch = [this, operation, stream]() mutable {
            const Result connection = connect(operation.request);
            if (connection != SUCCESS) {
                return connection;
            }
            operation.comm = shared_from_this();
            operation.request.number = issued++;
            auto *argument = new Operation(operation);
            const int status = Driver::get().launch_host_function(stream, run_operation, argument);
            if (status != 0) {
                delete argument;
                complain("cuLaunchHostFunc: error %d of the driver", status);
                return UNHANDLED_CUDA_ERROR;
            }
            return SUCCESS;
        };
        return begin(call, launch, blocks);
    }

    // Begins to make a part, which is given to `deliver`; a rank without a color gets none.
    Result split(int color, int key, bool part_blocks, Delivery deliver) {
        return begin("ncclCommSplit", [=] {
            Frame request = {};
            request.what = What::split;
            request.peer = color;
            request.key = key;
            Id id = {};
            std::shared_ptr<Hub> place = color < 0 ? nullptr : Hub::open(id);
            Frame answer = {};
            const Result result = call_roll(request, id, answer);
            if (result != SUCCESS || color < 0) {
                return result;
            }
            place = answer.peer == 0 ? place : nullptr;
            const auto made = std::make_shared<Comm>(answer.peer, answer.key, part_blocks, gpu, place);
            return wait_for(made, id, deliver);
        }, blocks);
    }

    // A new scaled sum. Its number is none of another communicator.
    int add_sum(int type, const char *scalar) {
        static std::atomic<int> last = SCALED;
        const int number = ++last;
        sums[number] = {type, std::string(scalar, width_of(type))};
        return number;
    }

    // Begins to leave: done when all ranks do so and nothing is left in the streams.
    Result finalize(bool waits) {
        return begin("ncclCommFinalize", [this] {
            {
                std::unique_lock lock(mutex);
                is_leaving = true;
                changed.wait(lock, [&] { return is_aborted || done == issued; });
            }
            Frame request = {}, answer = {};
            request.what = What::finalize;
            Id none = {};
            const Result result = call_roll(request, none, answer);
            if (result == REMOTE_ERROR && !death_is_noticed()) {
                std::unique_lock lock(mutex);
                changed.wait(lock, [&] { return (bool)is_aborted; });
            }
            return result;
        }, waits);
    }

    // SUCCESS, IN_PROGRESS, or the error that it met.
    Result ask() {
        std::unique_lock control_lock(control_use, std::try_to_lock);
        if (control_lock.owns_lock() && !left && !has_failed()) {
            look_for_notice();
        }
        std::lock_guard lock(mutex);
        return state;
    }

    // SUCCESS if something may be asked of it, with a word to whoever must not.
    Result check(const char *call) {
        const Result now = ask();
        if (now == IN_PROGRESS) {
            complain("%s while the last call of this communicator goes on", call);
            return INVALID_ARGUMENT;
        }
        if (now == SUCCESS && is_leaving) {
            complain("%s of a communicator that was finalized", call);
            return INVALID_ARGUMENT;
        }
        return now;
    }

    // It was finalized, and that is through.
    bool has_left() const { return left; }

    // Lets all that waits end, and frees everything. Nobody may use it afterwards but operations that are still in a
    // stream, which do nothing.
    void end() {
        std::shared_ptr<Comm> unfinished;
        {
            std::lock_guard lock(mutex);
            is_aborted = true;
            unfinished = std::move(part);
            data.end();
            control.end();
            changed.notify_all();
        }
        if (unfinished) {
            unfinished->end();
        }
        thread.join();
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return running == 0; });
        data = Socket();
        control = Socket();
        std::shared_ptr<Hub> last = std::move(hub);
        lock.unlock();
    }

  private:
    using Job = std::function<Result()>;

    Result begin(const char *call, Job task, bool waits) {
        std::unique_lock lock(mutex);
        // Of two threads that come at once, one is wrong.
        if (state != SUCCESS || job) {
            complain("%s beside another call of this communicator", call);
            return INVALID_ARGUMENT;
        }
        state = IN_PROGRESS;
        job = std::move(task);
        changed.notify_all();
        if (waits) {
            changed.wait(lock, [&] { return is_aborted || state != IN_PROGRESS; });
        }
        return state;
    }

    void work() {
        Driver::get().bind(gpu);
        const uint64_t longest = setting("EMULATOR_DELAY_US", 0);
        std::mt19937_64 random(setting("EMULATOR_SEED", 1) + (uint64_t)rank);
        std::unique_lock lock(mutex);
        for (;;) {
            changed.wait(lock, [&] { return is_aborted || job; });
            if (is_aborted) {
                job = nullptr;
                return;
            }
            const Job task = std::exchange(job, nullptr);
            lock.unlock();
            if (longest > 0) {
                std::this_thread::sleep_for(std::chrono::microseconds(random() % (longest + 1)));
            }
            const Result result = task();
            lock.lock();
            state = state == IN_PROGRESS ? result : state;
            changed.notify_all();
        }
    }

    bool has_failed() {
        std::lock_guard lock(mutex);
        return state != SUCCESS && state != IN_PROGRESS;
    }

    // From now on an abort ends the socket.
    bool adopt(Socket &place, Socket socket) {
        std::lock_guard lock(mutex);
        if (is_aborted || !socket.is_open()) {
            return false;
        }
        place = std::move(socket);
        return true;
    }

    Result meet(const Id &id) {
        std::lock_guard control_lock(control_use);
        Hello hello = {};
        hello.size = size;
        hello.rank = rank;
        snprintf(hello.device, sizeof hello.device, "%s", gpu.identity.c_str());
        for (const Channel channel : {Channel::data, Channel::control}) {
            hello.channel = channel;
            Socket &line = channel == Channel::data ? data : control;
            if (!adopt(line, connect_to(id)) || !line.send_all(&hello, sizeof hello)) {
                return gone();
            }
        }
        Frame answer = {};
        const Result result = receive(answer, nullptr, 0);
        if (result == SUCCESS) {
            inform(gpu.number, "ncclCommInitRankConfig comm %p rank %d nranks %d cudaDev %d busId %s - Init COMPLETE",
                   (void *)this, rank, size, gpu.number, gpu.bus.c_str());
        }
        return result;
    }

    // Makes a part that this rank belongs to. Until it is delivered, it ends with this communicator.
    Result wait_for(const std::shared_ptr<Comm> &made, const Id &id, const Delivery &deliver) {
        {
            std::lock_guard lock(mutex);
            if (is_aborted) {
                return INTERNAL_ERROR;
            }
            part = made;
            made->start(id, false);
        }
        {
            std::unique_lock lock(made->mutex);
            made->changed.wait(lock, [&] { return made->is_aborted || made->state != IN_PROGRESS; });
        }
        const Result result = made->ask();
        std::unique_lock lock(mutex);
        if (!std::exchange(part, nullptr)) {
            return INTERNAL_ERROR;
        }
        if (result == SUCCESS) {
            deliver(made);
        } else {
            lock.unlock();
            made->end();
        }
        return result;
    }

    // Connects at first use, as NCCL from 2.22 on: to a peer for messages of one direction, or to all ranks for collectives. It
    // waits until they do so too.
    Result connect(const Frame &use) {
        const bool is_message = use.what == What::send || use.what == What::recv;
        const bool sends = use.what == What::send;
        if (!connected.insert({is_message ? use.peer : -1, sends}).second) {
            return SUCCESS;
        }
        Frame request = {}, answer = {};
        request.what = is_message ? What::connect : What::connect_all;
        request.peer = is_message ? use.peer : 0;
        request.key = sends;
        Id none = {};
        return call_roll(request, none, answer);
    }

    // Asks something of all ranks together. `id` goes with the request and comes with the answer.
    Result call_roll(Frame request, Id &id, Frame &answer) {
        std::lock_guard control_lock(control_use);
        request.bytes = sizeof id;
        if (!control.send_all(&request, sizeof request) || !control.send_all(&id, sizeof id)) {
            return gone();
        }
        const Result result = receive(answer, &id, sizeof id);
        left = result == SUCCESS && request.what == What::finalize;
        return result;
    }

    // The answer on the line for control, or the notice that comes instead of it.
    Result receive(Frame &answer, void *body, size_t room) {
        if (!control.receive_all(&answer, sizeof answer)) {
            return gone();
        }
        if (answer.what != What::notice && answer.bytes <= room) {
            return control.receive_all(body, answer.bytes) ? SUCCESS : gone();
        }
        std::string words(answer.bytes, ' ');
        if (!control.receive_all(words.data(), words.size())) {
            return gone();
        }
        LastError::set(words);
        return (Result)answer.type;
    }

    Result gone() {
        LastError::set("the process where the ranks of this communicator meet has gone");
        return REMOTE_ERROR;
    }

    // What was said without being asked for.
    void look_for_notice() {
        char byte;
        const ssize_t got = recv(control.fd(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
        if (got < 0 || (got == 0 && !death_is_noticed())) {
            return;
        }
        Frame notice = {};
        const Result result = receive(notice, nullptr, 0);
        std::lock_guard lock(mutex);
        state = result;
        changed.notify_all();
    }

    static void run_operation(void *argument) {
        const std::unique_ptr<Operation> operation(static_cast<Operation *>(argument));
        operation->comm->run(*operation);
    }

    // In a stream's thread, which waits here until the operation is done or aborted.
    void run(const Operation &operation) {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return is_aborted || done == operation.request.number; });
        if (is_aborted) {
            return spoil(operation);
        }
        running++;
        lock.unlock();
        const bool has_ended = exchange(operation);
        lock.lock();
        if (!has_ended) {
            // As a kernel that waits for another rank.
            changed.wait(lock, [&] { return (bool)is_aborted; });
            spoil(operation);
        }
        running--;
        done++;
        changed.notify_all();
    }

    // An aborted kernel of the real one goes on without what it waits for, and writes what lies in its buffers: numbers, as
    // a rule. Here those of which each byte is 0x3f. It does not write what it only gives: its own part of a gather in
    // place, and all of a broadcast that it is the root of.
    void spoil(const Operation &operation) {
        for (const Part &part : operation.parts) {
            std::fill_n(part.to, part.expected, 0x3f);
        }
        const Frame &request = operation.request;
        const bool gives = request.what == What::all_gather || request.what == What::broadcast;
        const size_t slice = request.what == What::all_gather ? request.bytes : operation.taken;
        for (size_t at = 0; at < operation.taken; at += slice) {
            if (!gives || operation.target + at != operation.source) {
                std::fill_n(operation.target + at, slice, 0x3f);
            }
        }
    }

    // The messages of a group.
    bool exchange_parts(const Operation &operation) {
        std::vector<uint64_t> table;
        for (const Part &part : operation.parts) {
            table.insert(table.end(), {part.sent, part.expected});
        }
        Frame answer = {};
        bool goes_on = data.send_all(&operation.request, sizeof(Frame)) &&
                       data.send_all(table.data(), table.size() * sizeof(uint64_t));
        for (const Part &part : operation.parts) {
            goes_on = goes_on && data.send_all(part.from, part.sent);
        }
        goes_on = goes_on && data.receive_all(&answer, sizeof answer);
        for (const Part &part : operation.parts) {
            goes_on = goes_on && data.receive_all(part.to, part.expected);
        }
        return goes_on;
    }

    bool exchange(const Operation &operation) {
        if (operation.request.what == What::exchange) {
            return exchange_parts(operation);
        }
        Frame answer = {};
        const Frame &request = operation.request;
        if (!data.send_all(&request, sizeof request) || !data.send_all(operation.source, request.bytes) ||
            !data.receive_all(&answer, sizeof answer)) {
            return false;
        }
        if (request.what == What::broadcast && request.peer == rank) {
            memmove(operation.target, operation.source, request.bytes);
        }
        return answer.bytes == 0 ||
               (answer.bytes == operation.taken && data.receive_all(operation.target, answer.bytes));
    }

    std::mutex mutex;
    std::condition_variable changed;
    Result state = SUCCESS;
    std::atomic<bool> is_aborted = false, is_leaving = false, left = false;
    // Operations that were put into streams, that have ended, and that are going on.
    uint64_t issued = 0, done = 0;
    int running = 0;
    // Peers and directions of messages that are connected, and {-1, false} once all ranks are for collectives.
    std::set<std::pair<int, bool>> connected;
    Job job;
    // One that is being made from this one.
    std::shared_ptr<Comm> part;
    std::shared_ptr<Hub> hub;
    Socket data, control;
    // Held by whoever reads from it.
    std::mutex control_use;
    std::thread thread;
};

} // namespace nccl
