// What the emulated NCCL says: errors always on stderr, as it is there to show them; with NCCL_DEBUG=INFO a few of the
// lines of the real one, which go to the standard output.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <sys/syscall.h>
#include <unistd.h>

namespace nccl {

// What went wrong last, in any communicator, as the real library has it.
class LastError {
  public:
    static void set(const std::string &words) {
        std::lock_guard lock(mutex());
        text() = words;
    }

    // Valid until the thread asks again.
    static const char *get() {
        thread_local std::string copy;
        std::lock_guard lock(mutex());
        copy = text();
        return copy.c_str();
    }

  private:
    // Never destroyed: threads may outlive `main`.
    static std::mutex &mutex() {
        static std::mutex *const only = new std::mutex;
        return *only;
    }
    static std::string &text() {
        static std::string *const only = new std::string;
        return *only;
    }
};

inline std::string format(const char *form, va_list arguments) {
    char text[768];
    vsnprintf(text, sizeof text, form, arguments);
    return text;
}

// An error of the caller.
__attribute__((format(printf, 1, 2))) inline void complain(const char *form, ...) {
    va_list arguments;
    va_start(arguments, form);
    const std::string text = format(form, arguments);
    va_end(arguments);
    LastError::set(text);
    fprintf(stderr, "emulated NCCL: %s\n", text.c_str());
}

__attribute__((format(printf, 2, 3))) inline void inform(int device, const char *form, ...) {
    const char *level = getenv("NCCL_DEBUG");
    if (!level || (strcasecmp(level, "INFO") != 0 && strcasecmp(level, "TRACE") != 0)) {
        return;
    }
    va_list arguments;
    va_start(arguments, form);
    const std::string text = format(form, arguments);
    va_end(arguments);
    char host[64] = {};
    gethostname(host, sizeof host - 1);
    printf("%s:%d:%ld [%d] NCCL INFO %s\n", host, (int)getpid(), (long)syscall(SYS_gettid), device, text.c_str());
    fflush(stdout);
}

} // namespace nccl
