// Where the ranks of one emulated communicator meet: a thread of one of their processes. It takes what each rank gives
// to an operation, and answers when all have. Calls of ranks that do not fit together, with which the real library
// hangs or ends with wrong numbers, are named on stderr, and every rank's communicator then reports ncclInvalidUsage.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <map>
#include <optional>
#include <poll.h>
#include <sys/eventfd.h>
#include <thread>

#include "nccl_line.hpp"

namespace nccl {

inline bool death_is_noticed() {
    const char *mode = getenv("EMULATOR_NCCL_DEATH");
    return mode && strcmp(mode, "error") == 0;
}

// See the file.
class Hub {
  public:
    // A new meeting point; null if the system refuses one.
    static std::shared_ptr<Hub> open(Id &id) {
        Socket listener = listen_at(id);
        Socket stop(eventfd(0, EFD_CLOEXEC));
        if (!listener.is_open() || !stop.is_open()) {
            return nullptr;
        }
        return std::shared_ptr<Hub>(new Hub(std::move(listener), std::move(stop)));
    }

    // Ends all that goes on.
    ~Hub() {
        const uint64_t one = 1;
        if (write(stop.fd(), &one, sizeof one) != (ssize_t)sizeof one) {
            abort();
        }
        thread.join();
    }

  private:
    Hub(Socket listener, Socket stop) : listener(std::move(listener)), stop(std::move(stop)) {
        thread = std::thread([this] { run(); });
    }

    void run() {
        while (!is_over()) {
            std::vector<pollfd> polled = {{stop.fd(), POLLIN, 0}, {is_complete ? -1 : listener.fd(), POLLIN, 0}};
            for (const auto &line : lines) {
                const short writes = line->has_to_write() ? POLLOUT : 0;
                polled.push_back({line->has_ended ? -1 : line->fd(), (short)(POLLIN | writes), 0});
            }
            if (poll(polled.data(), polled.size(), -1) < 0) {
                continue;
            }
            if (polled[0].revents) {
                break;
            }
            for (size_t i = 2; i < polled.size(); i++) {
                attend(*lines[i - 2], polled[i].revents);
            }
            if (polled[1].revents) {
                welcome();
            }
            if (is_complete && !failure) {
                match();
            }
            miss_who_has_gone();
        }
        for (const auto &line : lines) {
            line->end();
        }
    }

    void welcome() {
        Socket socket(accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC));
        if (socket.is_open()) {
            lines.push_back(std::make_unique<Line>(std::move(socket)));
        }
    }

    void attend(Line &line, short events) {
        if (line.has_ended || !events) {
            return;
        }
        if (events & POLLOUT) {
            line.write();
        }
        if (events & (POLLIN | POLLHUP | POLLERR) && !line.has_ended) {
            line.read();
        }
        if (line.is_known && !line.is_seated && !line.has_ended) {
            seat(line);
        }
    }

    // Gives a rank its place.
    void seat(Line &line) {
        const Hello &hello = line.hello;
        size = size ? size : hello.size;
        const std::string who = "rank " + std::to_string(hello.rank);
        if (hello.size != size) {
            line.end();
            return fail(INVALID_USAGE, who + " comes to " + std::to_string(hello.size) + " ranks, others to " +
                                           std::to_string(size));
        }
        auto &places = hello.channel == Channel::data ? data : control;
        if (!places.emplace(hello.rank, &line).second) {
            line.end();
            return fail(INVALID_USAGE, who + " comes twice");
        }
        line.is_seated = true;
        if (failure) {
            return hello.channel == Channel::control ? line.notice(failure->first, failure->second) : void();
        }
        for (const auto &[rank, other] : control) {
            if (hello.channel == Channel::control && other != &line && hello.device[0] &&
                strcmp(other->hello.device, hello.device) == 0) {
                return fail(INVALID_USAGE, "duplicate GPU detected: rank " + std::to_string(rank) + " and " + who +
                                               " both on " + hello.device);
            }
        }
        if ((int)data.size() == size && (int)control.size() == size) {
            is_complete = true;
            for (const auto &[rank, other] : control) {
                other->answer({});
            }
        }
    }

    void miss_who_has_gone() {
        const auto has_gone = [](const auto &line) { return line->has_ended && line->is_seated && !line->is_missed; };
        for (;;) {
            const auto gone = std::find_if(lines.begin(), lines.end(), has_gone);
            if (gone == lines.end()) {
                return;
            }
            (*gone)->is_missed = true;
            if (!has_finished && (!is_complete || death_is_noticed())) {
                fail(REMOTE_ERROR, "rank " + std::to_string((*gone)->hello.rank) + " has gone");
            }
        }
    }

    // The communicator is of no use any more.
    void fail(Result result, const std::string &words) {
        if (failure) {
            return;
        }
        failure = {result, words};
        if (result != REMOTE_ERROR) {
            fprintf(stderr, "emulated NCCL: %s\n", words.c_str());
        }
        for (const auto &[rank, line] : control) {
            line->notice(result, words);
        }
    }

    // Does all that can be done.
    void match() {
        while (!failure && (do_collective() || do_message() || do_exchange())) {
        }
        if (!failure) {
            call_roll();
        }
        if (!failure) {
            look_for_deadlock();
        }
    }

    static bool is_message(const Line &line) {
        return line.request.what == What::send || line.request.what == What::recv;
    }

    bool do_collective() {
        const Line *first = nullptr;
        int present = 0;
        for (const auto &[rank, line] : data) {
            if (!line->asks || is_message(*line) || line->request.what == What::exchange) {
                continue;
            }
            first = first ? first : line;
            present++;
            const Frame &a = first->request, &b = line->request;
            if (a.what != b.what || a.type != b.type || a.count != b.count || a.op != b.op || a.peer != b.peer) {
                fail(INVALID_USAGE, "calls of ranks differ: " + first->words() + "; " + line->words());
                return false;
            }
        }
        if (present < size) {
            return false;
        }
        combine(first->request);
        return true;
    }

    // All ranks have given their parts.
    void combine(const Frame request) {
        const size_t slice = request.count * width_of(request.type);
        const auto result = std::make_shared<Bytes>();
        const bool scatters = request.what == What::reduce_scatter;
        if (request.what == What::all_reduce || scatters) {
            const size_t count = request.count * (scatters ? (size_t)size : 1);
            std::vector<Contribution> parts;
            for (const auto &[rank, line] : data) {
                parts.push_back({line->payload.data(), line->request.scalar});
            }
            result->resize(count * width_of(request.type));
            reduce(request.type, request.op, parts, count, result->data());
        } else if (request.what == What::all_gather) {
            for (const auto &[rank, line] : data) {
                result->insert(result->end(), line->payload.begin(), line->payload.end());
            }
        } else {
            result->swap(data[request.peer]->payload);
        }
        for (const auto &[rank, line] : data) {
            const bool has_it = request.what == What::broadcast && rank == request.peer;
            const size_t bytes = has_it ? 0 : scatters ? slice : result->size();
            line->answer({}, result, scatters ? (size_t)rank * slice : 0, bytes);
        }
    }

    bool do_message() {
        for (const auto &[rank, from] : data) {
            if (!from->asks || from->request.what != What::send) {
                continue;
            }
            Line *const to = data[from->request.peer];
            if (!to->asks || to->request.what != What::recv || to->request.peer != rank) {
                continue;
            }
            if (from->request.count != to->request.count || from->request.type != to->request.type) {
                fail(INVALID_USAGE, "calls of ranks differ: " + from->words() + "; " + to->words());
                return false;
            }
            const auto elements = std::make_shared<Bytes>(std::move(from->payload));
            to->answer({}, elements, 0, elements->size());
            from->answer({});
            return true;
        }
        return false;
    }

    // Bytes that a rank with a group of messages sends to another, or expects of it.
    static uint64_t part(const Line &line, int other, bool sent) {
        uint64_t bytes;
        memcpy(&bytes, line.payload.data() + (2 * other + !sent) * sizeof bytes, sizeof bytes);
        return bytes;
    }

    // Groups of messages of all ranks that are joined by them.
    bool do_exchange() {
        for (const auto &[rank, line] : data) {
            std::vector<int> joined = {rank};
            const auto waits = [](const Line &other) { return other.asks && other.request.what == What::exchange; };
            bool are_there = waits(*line);
            for (size_t i = 0; are_there && i < joined.size(); i++) {
                are_there = waits(*data[joined[i]]);
                for (int other = 0; are_there && other < size; other++) {
                    const Line &own = *data[joined[i]];
                    const bool is_known = std::find(joined.begin(), joined.end(), other) != joined.end();
                    if (!is_known && (part(own, other, true) || part(own, other, false))) {
                        joined.push_back(other);
                    }
                }
            }
            if (!are_there) {
                continue;
            }
            std::sort(joined.begin(), joined.end());
            std::map<int, std::shared_ptr<Bytes>> received;
            for (const int from : joined) {
                const Line &own = *data[from];
                const char *at = own.payload.data() + 2 * size * sizeof(uint64_t);
                for (const int to : joined) {
                    const uint64_t sent = part(own, to, true), expected = part(*data[to], from, false);
                    if (sent != expected || own.request.type != line->request.type) {
                        fail(INVALID_USAGE, own.words() + " sends " + std::to_string(sent) + " bytes to rank " +
                                                std::to_string(to) + ", which expects " + std::to_string(expected));
                        return false;
                    }
                    auto &body = received[to];
                    body = body ? body : std::make_shared<Bytes>();
                    body->insert(body->end(), at, at + sent);
                    at += sent;
                }
            }
            for (const int to : joined) {
                data[to]->answer({}, received[to], 0, received[to]->size());
            }
            return true;
        }
        return false;
    }

    // What all ranks do together without a stream.
    void call_roll() {
        const Line *first = nullptr;
        // Two ranks that connect to each other, as NCCL does at the first send and receive between them.
        bool connects = false;
        for (const auto &[rank, line] : control) {
            if (!line->asks || line->request.what != What::connect) {
                continue;
            }
            Line *const other = control[line->request.peer];
            if (other->asks && other->request.what == What::connect && other->request.peer == rank &&
                other->request.key != line->request.key) {
                line->answer({});
                other->answer({});
                continue;
            }
            connects = true;
        }
        if (connects) {
            return;
        }
        for (const auto &[rank, line] : control) {
            if (!line->asks) {
                return;
            }
            first = first ? first : line;
            if (line->request.what != first->request.what) {
                return fail(INVALID_USAGE, "calls of ranks differ: " + first->words() + "; " + line->words());
            }
        }
        if (first->request.what == What::split) {
            return divide();
        }
        has_finished = first->request.what != What::connect_all;
        for (const auto &[rank, line] : control) {
            line->answer({});
        }
    }

    // Ranks of a color come together at the meeting point of the first of them, by key and then by rank.
    void divide() {
        std::map<int, std::map<std::pair<int, int>, Line *>> parts;
        std::vector<Line *> others;
        for (const auto &[rank, line] : control) {
            if (line->request.peer < 0) {
                others.push_back(line);
            } else {
                parts[line->request.peer][{line->request.key, rank}] = line;
            }
        }
        for (const auto &[color, members] : parts) {
            const auto place = std::make_shared<Bytes>(members.begin()->second->payload);
            Frame head = {};
            head.key = (int)members.size();
            for (const auto &[key, line] : members) {
                line->answer(head, place, 0, place->size());
                head.peer++;
            }
        }
        for (Line *line : others) {
            line->answer({});
        }
    }

    // Every rank waits, and none for what another one gives.
    void look_for_deadlock() {
        std::string words;
        bool any = false;
        for (int rank = 0; rank < size; rank++) {
            const Line &left = *data[rank], &right = *control[rank];
            const bool leaves = right.asks && right.request.what == What::finalize;
            if (!left.asks && !leaves) {
                return;
            }
            any |= left.asks;
            words += (rank ? "; " : "") + (left.asks ? left : right).words();
        }
        if (any) {
            fail(INVALID_USAGE, "all ranks wait for each other: " + words);
        }
    }

    bool is_over() const {
        bool all_ended = true, all_written = true;
        for (const auto &line : lines) {
            all_ended &= line->has_ended;
            all_written &= !line->has_to_write();
        }
        return (has_finished && all_written) || (is_complete && all_ended);
    }

    Socket listener, stop;
    // A line stays until the end: places refer to it.
    std::vector<std::unique_ptr<Line>> lines;
    std::map<int, Line *> data, control;
    int size = 0;
    bool is_complete = false, has_finished = false;
    std::optional<std::pair<Result, std::string>> failure;
    std::thread thread;
};

} // namespace nccl
