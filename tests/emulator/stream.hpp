// Streams and events of the emulated driver, and the queues of a device, each with a thread, which carry out their work.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "cuda.h"

namespace emulator {

constexpr int MAX_DEVICES = 16;

// `@FILE`: the number that the file holds now.
inline uint64_t setting(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    if (text && *text == '@') {
        uint64_t number = otherwise;
        std::ifstream(text + 1) >> number;
        return number;
    }
    return text && *text ? strtoull(text, nullptr, 10) : otherwise;
}

// A point in a stream.
class Point {
  public:
    void reach() {
        std::lock_guard lock(mutex);
        at = std::chrono::steady_clock::now();
        reached = true;
        changed.notify_all();
    }

    void wait() {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return reached; });
    }

    bool is_reached() {
        std::lock_guard lock(mutex);
        return reached;
    }

    std::chrono::steady_clock::time_point time() {
        std::lock_guard lock(mutex);
        return at;
    }

  private:
    std::mutex mutex;
    std::condition_variable changed;
    bool reached = false;
    std::chrono::steady_clock::time_point at;
};

// The point that it was last recorded at; null: never. Whoever waits for an earlier one goes on waiting for that.
struct Event {
    bool timed;
    std::shared_ptr<Point> point;

    bool is_reached() const { return !point || point->is_reached(); }
};

// A queue of a device: its work runs in the order in which it was pushed, of whatever stream it is.
class HardwareQueue {
  public:
    // The queue of the stream of a device with this number, from 0: CUDA gives streams to CUDA_DEVICE_MAX_CONNECTIONS
    // queues in turn, 8 unless that is set. Streams that share one wait for each other though no event says so.
    static HardwareQueue &of(int device, uint64_t stream) {
        static const uint64_t count = std::clamp<uint64_t>(setting("CUDA_DEVICE_MAX_CONNECTIONS", 8), 1, MOST);
        // Never destroyed: threads outlive `main`.
        static auto *const all = new HardwareQueue[MAX_DEVICES][MOST];
        return all[device][stream % count];
    }

    void push(std::function<void()> work) {
        std::lock_guard lock(mutex);
        if (!started) {
            started = true;
            std::thread([this] { run(); }).detach();
        }
        queue.push_back(std::move(work));
        changed.notify_one();
    }

  private:
    static constexpr uint64_t MOST = 32;

    void run() {
        std::unique_lock lock(mutex);
        for (;;) {
            changed.wait(lock, [&] { return !queue.empty(); });
            std::function<void()> work = std::move(queue.front());
            queue.pop_front();
            lock.unlock();
            work();
            work = nullptr;
            lock.lock();
        }
    }

    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> queue;
    bool started = false;
};

// Work runs in order, one piece after the other, later than the host expects: each piece after a random delay of up to
// EMULATOR_DELAY_US microseconds, and after that of other streams of its queue. Destroying a stream lets what is in it run to its end, as CUDA does.
class Stream : public std::enable_shared_from_this<Stream> {
  public:
    // The delays of the first stream of a device, the second and so on are the same in every run with the seed.
    static std::shared_ptr<Stream> start(int device) {
        static std::atomic<uint64_t> started[MAX_DEVICES];
        return std::make_shared<Stream>(device, started[device]++);
    }

    Stream(int device, uint64_t number)
        : queue(HardwareQueue::of(device, number)), random(setting("EMULATOR_SEED", 1) * 1000 + number + 1) {}

    void push(std::function<void()> work) {
        std::lock_guard lock(mutex);
        pushed++;
        found_idle += waiting == 0;
        waiting++;
        queue.push([stream = shared_from_this(), work = std::move(work)]() mutable {
            stream->delay();
            work();
            work = nullptr;
            std::lock_guard lock(stream->mutex);
            stream->waiting--;
            stream->changed.notify_all();
        });
    }

    bool is_empty() {
        std::lock_guard lock(mutex);
        return waiting == 0;
    }

    void drain() {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return waiting == 0; });
    }

    // Pieces of work so far, and how many of them came when nothing was left to do: a GPU would have stood still.
    std::pair<uint64_t, uint64_t> counts() {
        std::lock_guard lock(mutex);
        return {pushed, found_idle};
    }

  private:
    void delay() {
        static const uint64_t longest = setting("EMULATOR_DELAY_US", 0);
        if (longest > 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(random() % (longest + 1)));
        }
    }

    HardwareQueue &queue;
    std::mt19937_64 random;
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t waiting = 0, pushed = 0, found_idle = 0;
};

} // namespace emulator
