// Streams and events of the emulated driver: a stream is a queue and a thread that takes from it.
#pragma once

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

// Work runs in order, one piece after the other, later than the host expects: each piece after a random delay of up to
// EMULATOR_DELAY_US microseconds. Destroying a stream lets what is in it run to its end, as CUDA does.
class Stream : public std::enable_shared_from_this<Stream> {
  public:
    // The delays of the first stream of a process, the second and so on are the same in every run with the seed.
    static std::shared_ptr<Stream> start() {
        static std::atomic<uint64_t> started = 0;
        auto stream = std::make_shared<Stream>();
        stream->number = ++started;
        std::thread([stream] { stream->run(); }).detach();
        return stream;
    }

    void push(std::function<void()> work) {
        std::lock_guard lock(mutex);
        pushed++;
        found_idle += queue.empty() && !busy;
        queue.push_back(std::move(work));
        changed.notify_all();
    }

    bool is_empty() {
        std::lock_guard lock(mutex);
        return queue.empty() && !busy;
    }

    void drain() {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return queue.empty() && !busy; });
    }

    // Pieces of work so far, and how many of them came when nothing was left to do: a GPU would have stood still.
    std::pair<uint64_t, uint64_t> counts() {
        std::lock_guard lock(mutex);
        return {pushed, found_idle};
    }

    void end() {
        std::lock_guard lock(mutex);
        ended = true;
        changed.notify_all();
    }

  private:
    void run() {
        const uint64_t longest = setting("EMULATOR_DELAY_US", 0);
        std::mt19937_64 random(setting("EMULATOR_SEED", 1) * 1000 + number);
        std::unique_lock lock(mutex);
        for (;;) {
            changed.wait(lock, [&] { return ended || !queue.empty(); });
            if (queue.empty()) {
                return;
            }
            std::function<void()> work = std::move(queue.front());
            queue.pop_front();
            busy = true;
            lock.unlock();
            if (longest > 0) {
                std::this_thread::sleep_for(std::chrono::microseconds(random() % (longest + 1)));
            }
            work();
            work = nullptr;
            lock.lock();
            busy = false;
            changed.notify_all();
        }
    }

    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> queue;
    bool busy = false, ended = false;
    uint64_t number = 0, pushed = 0, found_idle = 0;
};

} // namespace emulator
