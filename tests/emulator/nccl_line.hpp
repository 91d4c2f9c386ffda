// One rank's line to the hub, as the hub sees it: it reads and writes what it can without waiting.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "nccl_reduction.hpp"
#include "nccl_wire.hpp"

namespace nccl {

using Bytes = std::vector<char>;

// See the file.
class Line {
  public:
    explicit Line(Socket socket) : socket(std::move(socket)) {}

    // Valid once it is known.
    Hello hello = {};
    bool is_known = false;
    // It is one of the communicator's.
    bool is_seated = false;
    // Its end was told to those whom it concerns.
    bool is_missed = false;
    // A request is complete, and nobody has answered it.
    bool asks = false;
    // The other side is gone, or broke the rules.
    bool has_ended = false;
    Frame request = {};
    Bytes payload;

    int fd() const { return socket.fd(); }
    bool has_to_write() const { return !answers.empty() && !has_ended; }

    // Takes what has come.
    void read() {
        while (!asks) {
            char *to;
            const size_t missing = next(to);
            const ssize_t got = recv(socket.fd(), to, missing, MSG_DONTWAIT);
            if (got < 0 && errno == EINTR) {
                continue;
            }
            if (got < 0 && errno == EAGAIN) {
                return;
            }
            if (got <= 0) {
                return end();
            }
            taken += (size_t)got;
            settle();
            if (is_known && !is_seated) {
                return;
            }
        }
        // Nothing may come before the answer but the end.
        char byte;
        const ssize_t got = recv(socket.fd(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
        if (got >= 0 || (errno != EAGAIN && errno != EINTR)) {
            end();
        }
    }

    // Gives what can be taken.
    void write() {
        while (has_to_write()) {
            Answer &answer = answers.front();
            const size_t header = sizeof answer.head, all = header + answer.head.bytes;
            const char *from = answer.sent < header ? (const char *)&answer.head + answer.sent
                                                    : answer.body->data() + answer.offset + (answer.sent - header);
            const size_t left = (answer.sent < header ? header : all) - answer.sent;
            const ssize_t sent = ::send(socket.fd(), from, left, MSG_NOSIGNAL | MSG_DONTWAIT);
            if (sent < 0 && errno == EINTR) {
                continue;
            }
            if (sent < 0) {
                return errno == EAGAIN ? void() : end();
            }
            answer.sent += (size_t)sent;
            if (answer.sent == all) {
                answers.pop_front();
            }
        }
    }

    // Answers the request with a part of `body`.
    void answer(Frame head, std::shared_ptr<const Bytes> body = nullptr, size_t offset = 0, size_t bytes = 0) {
        asks = false;
        payload.clear();
        say(head, std::move(body), offset, bytes);
    }

    // Says something that was not asked for.
    void notice(Result result, const std::string &words) {
        Frame head = {};
        head.what = What::notice;
        head.type = result;
        say(head, std::make_shared<Bytes>(words.begin(), words.end()), 0, words.size());
    }

    void end() {
        has_ended = true;
        asks = false;
        answers.clear();
        socket = Socket();
    }

    // The request in words.
    std::string words() const {
        static const char *const names[] = {"all-reduce", "reduce-scatter", "all-gather", "broadcast", "send",
                                            "recv",       "exchange",       "split",          "finalize", "connect", "connect"};
        std::string text = "rank " + std::to_string(hello.rank) + " ";
        text += names[(int)request.what];
        if (hello.channel == Channel::control) {
            return text;
        }
        text += " #" + std::to_string(request.number) + " of " + std::to_string(request.count) + " " +
                name_of(request.type);
        switch (request.what) {
        case What::all_reduce:
        case What::reduce_scatter:
            return text + ", " + name_of_op(request.op);
        case What::broadcast:
        case What::recv:
            return text + " from " + std::to_string(request.peer);
        case What::send:
            return text + " to " + std::to_string(request.peer);
        default:
            return text;
        }
    }

  private:
    struct Answer {
        Frame head;
        std::shared_ptr<const Bytes> body;
        size_t offset, sent;
    };

    void say(Frame head, std::shared_ptr<const Bytes> body, size_t offset, size_t bytes) {
        if (!has_ended) {
            head.bytes = bytes;
            answers.push_back({head, std::move(body), offset, 0});
            write();
        }
    }

    // Where the next bytes go, and how many are missing there.
    size_t next(char *&to) {
        if (!is_known) {
            to = (char *)&hello + taken;
            return sizeof hello - taken;
        }
        if (taken < sizeof request) {
            to = (char *)&request + taken;
            return sizeof request - taken;
        }
        to = payload.data() + (taken - sizeof request);
        return request.bytes - (taken - sizeof request);
    }

    void settle() {
        if (!is_known) {
            is_known = taken == sizeof hello;
            taken = is_known ? 0 : taken;
            return;
        }
        if (taken == sizeof request) {
            payload.resize(request.bytes);
        }
        if (taken >= sizeof request && taken == sizeof request + request.bytes) {
            asks = true;
            taken = 0;
        }
    }

    Socket socket;
    size_t taken = 0;
    std::deque<Answer> answers;
};

} // namespace nccl
