// How the ranks of the emulated NCCL talk: frames over Unix sockets with abstract names, which leave no file behind and
// end with the processes that hold them.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <utility>

namespace nccl {

// `ncclResult_t`
enum Result : int {
    SUCCESS = 0,
    UNHANDLED_CUDA_ERROR = 1,
    SYSTEM_ERROR = 2,
    INTERNAL_ERROR = 3,
    INVALID_ARGUMENT = 4,
    INVALID_USAGE = 5,
    REMOTE_ERROR = 6,
    IN_PROGRESS = 7,
};

// `ncclUniqueId`: the name of the socket at which the ranks of a communicator meet, random in part.
struct Id {
    char name[128];
};

// A rank has two lines to the hub of its communicator: operations of streams go over one; what the host asks for, and
// what it is told without asking, over the other.
enum class Channel : int32_t { data, control };

enum class What : int32_t {
    // On the line for data.
    all_reduce,
    reduce_scatter,
    all_gather,
    broadcast,
    send,
    recv,
    // The messages of a group: what each rank is sent and what is expected of it, in bytes, then what is sent.
    exchange,
    // On the line for control.
    split,
    finalize,
    connect,
    connect_all,
    // From the hub: an answer, or a word that was not asked for.
    answer,
    notice,
};

// What a rank says first on each of its lines.
struct Hello {
    int32_t size, rank;
    Channel channel;
    // Which GPU of which host; empty if ranks may share one.
    char device[64];
};

// What comes before the elements of a request or of an answer.
struct Frame {
    What what;
    // `ncclDataType_t`; of a notice the `ncclResult_t`
    int32_t type;
    int32_t op;
    // The root, or the other rank; of a split the color, and in its answer the new rank.
    int32_t peer;
    // Of a split. In its answer the size of the part.
    int32_t key;
    // Elements as the call counts them.
    uint64_t count;
    // Of the operation, among those of the communicator.
    uint64_t number;
    // This rank's factor, as one element.
    char scalar[8];
    // How many follow.
    uint64_t bytes;
};

// A file descriptor that is closed with its owner.
class Socket {
  public:
    explicit Socket(int number = -1) : number(number) {}
    Socket(Socket &&other) : number(std::exchange(other.number, -1)) {}
    Socket &operator=(Socket &&other) {
        std::swap(number, other.number);
        return *this;
    }
    ~Socket() {
        if (number >= 0) {
            close(number);
        }
    }

    int fd() const { return number; }
    bool is_open() const { return number >= 0; }

    // Ends every wait on it, in whichever thread, now and later.
    void end() const { shutdown(number, SHUT_RDWR); }

    bool send_all(const void *data, size_t bytes) const {
        const char *at = static_cast<const char *>(data);
        while (bytes > 0) {
            const ssize_t sent = ::send(number, at, bytes, MSG_NOSIGNAL);
            if (sent < 0 && errno == EINTR) {
                continue;
            }
            if (sent <= 0) {
                return false;
            }
            at += sent;
            bytes -= (size_t)sent;
        }
        return true;
    }

    // False at the end of the other side.
    bool receive_all(void *data, size_t bytes) const {
        char *at = static_cast<char *>(data);
        while (bytes > 0) {
            const ssize_t got = ::recv(number, at, bytes, 0);
            if (got < 0 && errno == EINTR) {
                continue;
            }
            if (got <= 0) {
                return false;
            }
            at += got;
            bytes -= (size_t)got;
        }
        return true;
    }

  private:
    int number;
};

inline socklen_t address_of(const Id &id, sockaddr_un &address) {
    address = {};
    address.sun_family = AF_UNIX;
    // A zero first: no name of a file.
    const size_t length = strnlen(id.name, sizeof address.sun_path - 1);
    memcpy(address.sun_path + 1, id.name, length);
    return (socklen_t)(offsetof(sockaddr_un, sun_path) + 1 + length);
}

// A new meeting point, which nobody can guess.
inline Socket listen_at(Id &id) {
    uint64_t nonce[2] = {};
    Socket socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket.is_open() || getrandom(nonce, sizeof nonce, 0) != (ssize_t)sizeof nonce) {
        return Socket();
    }
    id = {};
    snprintf(id.name, sizeof id.name, "emulated-nccl-%d-%016llx%016llx", (int)getpid(), (unsigned long long)nonce[0],
             (unsigned long long)nonce[1]);
    sockaddr_un address;
    const socklen_t length = address_of(id, address);
    if (bind(socket.fd(), (const sockaddr *)&address, length) != 0 || listen(socket.fd(), SOMAXCONN) != 0) {
        return Socket();
    }
    return socket;
}

// Not open if nobody listens there any more.
inline Socket connect_to(const Id &id) {
    Socket socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address;
    const socklen_t length = address_of(id, address);
    if (!socket.is_open() || connect(socket.fd(), (const sockaddr *)&address, length) != 0) {
        return Socket();
    }
    return socket;
}

} // namespace nccl
