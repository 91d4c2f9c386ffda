// CUDA C on the CPU, for one kernel at small sizes: a thread of a block is a fiber, a barrier is a switch to the next
// one. What a GPU would let pass is an error here: a barrier that not all threads reach, a warp operation without all
// lanes, accesses that are not aligned (by the compiler's checks), reads of shared memory that nobody wrote (it is
// filled with NaN before each block), accesses behind the shared memory that the launch gives. The order of the threads
// is a parameter: results must not depend on it. Asynchronous copies arrive as late as they may: when their thread waits
// for them, and until then there is NaN.

#include <csetjmp>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <type_traits>
#include <ucontext.h>
#include <unistd.h>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static __attribute__((section("block_shared")))

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};

static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }

static dim3 threadIdx, blockIdx, blockDim, gridDim;

// Shared memory whose size the launch says.
static unsigned char *dynamic_shared;

// Bounds of what is declared __shared__; absent where nothing is.
extern "C" {
extern char __start_block_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_block_shared[] __attribute__((weak, visibility("hidden")));
}

namespace cuda_on_cpu {

constexpr size_t PAGE = 4096, SHARED_ALIGNMENT = 128;
// As much as any card has; behind it is a page that nobody may touch.
constexpr size_t DYNAMIC_BYTES = 57 * PAGE;
// Within this library, whose kernels count addresses from a place in it.
alignas(PAGE) static unsigned char dynamic_pages[DYNAMIC_BYTES + PAGE];
static size_t dynamic_bytes;

// Declared __shared__ by all kernels of this library together.
static unsigned declared_shared() {
    return __start_block_shared ? (unsigned)(__stop_block_shared - __start_block_shared) : 0;
}

// Gives a launch so many bytes, as close to the forbidden page as their alignment lets them; false if there are fewer.
static bool give_shared(size_t bytes) {
    static const int fenced = mprotect(dynamic_pages + DYNAMIC_BYTES, PAGE, PROT_NONE);
    dynamic_bytes = (bytes + SHARED_ALIGNMENT - 1) / SHARED_ALIGNMENT * SHARED_ALIGNMENT;
    dynamic_shared = dynamic_pages + DYNAMIC_BYTES - (dynamic_bytes <= DYNAMIC_BYTES ? dynamic_bytes : 0);
    return fenced == 0 && dynamic_bytes <= DYNAMIC_BYTES;
}

constexpr unsigned LANES = 32;
constexpr unsigned MAX_THREADS = 1024;
constexpr size_t STACK_BYTES = 128 << 10;

enum class State { ready, at_barrier, in_warp, done };
enum class Operation { sync, shuffle_xor, shuffle_up, shuffle_down, shuffle, ballot };

struct Fiber {
    ucontext_t context;
    // Where it goes on; a jump takes no system call, as a switch of contexts does.
    jmp_buf resume;
    bool started = false;
    State state = State::done;
    Operation operation = Operation::sync;
    uint64_t value = 0;
};

static Fiber fibers[MAX_THREADS];
static ucontext_t scheduler;
static jmp_buf back;
static unsigned current;
// What the lanes of each warp put in, when the last one had.
static uint64_t exchanged[MAX_THREADS];
static char message[512];
static void (*entry)(void **);
static void **arguments;

// A copy to shared memory that its thread has not waited for; zeros if it is from nowhere.
struct Copy {
    unsigned char *to;
    const void *from;
    unsigned bytes;
};

// What a kernel may have on its way at once.
constexpr unsigned MAX_COPIES = 128;
static Copy copies[MAX_THREADS][MAX_COPIES];
static unsigned copies_begun[MAX_THREADS];

static void begin_copy(unsigned char *to, const void *from, unsigned bytes) {
    memset(to, 0xff, bytes);
    if (((uintptr_t)to | (uintptr_t)from) % bytes != 0) {
        snprintf(message, sizeof message, "an asynchronous copy of %u bytes that are not aligned to as many", bytes);
        return;
    }
    if (copies_begun[current] == MAX_COPIES) {
        snprintf(message, sizeof message, "more than %u asynchronous copies of a thread without a wait", MAX_COPIES);
        return;
    }
    copies[current][copies_begun[current]++] = {to, from, bytes};
}

static void await_copies() {
    for (unsigned i = 0; i < copies_begun[current]; i++) {
        const Copy &copy = copies[current][i];
        copy.from ? memcpy(copy.to, copy.from, copy.bytes) : memset(copy.to, 0, copy.bytes);
    }
    copies_begun[current] = 0;
}

static unsigned thread_count() { return blockDim.x * blockDim.y * blockDim.z; }

static void to_scheduler(State state) {
    fibers[current].state = state;
    if (_setjmp(fibers[current].resume) == 0) {
        _longjmp(back, 1);
    }
}

static void run_fiber() {
    entry(arguments);
    fibers[current].state = State::done;
    _longjmp(back, 1);
}

static void enter(unsigned thread) {
    current = thread;
    threadIdx.x = thread % blockDim.x;
    threadIdx.y = thread / blockDim.x % blockDim.y;
    threadIdx.z = thread / blockDim.x / blockDim.y;
    Fiber &fiber = fibers[thread];
    if (_setjmp(back) != 0) {
        return;
    }
    if (fiber.started) {
        _longjmp(fiber.resume, 1);
    }
    fiber.started = true;
    swapcontext(&scheduler, &fiber.context);
}

// Waits until all lanes of the warp are here, with what each of them brought in `exchanged`.
static void meet_warp(unsigned mask, Operation operation, uint64_t value) {
    if (mask != 0xffffffffu) {
        snprintf(message, sizeof message, "a warp operation with mask %08x: only whole warps are known", mask);
    }
    fibers[current].operation = operation;
    fibers[current].value = value;
    to_scheduler(State::in_warp);
}

template <class T> static uint64_t bits_of(T value) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}

template <class T> static T from_lane(unsigned lane) {
    T value;
    memcpy(&value, &exchanged[current / LANES * LANES + lane], sizeof value);
    return value;
}

// True if something went on.
static bool release_barrier() {
    const unsigned count = thread_count();
    bool waits = false;
    for (unsigned thread = 0; thread < count; thread++) {
        if (fibers[thread].state != State::at_barrier && fibers[thread].state != State::done) {
            return false;
        }
        waits |= fibers[thread].state == State::at_barrier;
    }
    for (unsigned thread = 0; thread < count; thread++) {
        if (fibers[thread].state == State::at_barrier) {
            fibers[thread].state = State::ready;
        }
    }
    return waits;
}

static bool release_warp(unsigned first) {
    for (unsigned thread = first; thread < first + LANES; thread++) {
        if (thread >= thread_count() || fibers[thread].state != State::in_warp ||
            fibers[thread].operation != fibers[first].operation) {
            return false;
        }
    }
    for (unsigned thread = first; thread < first + LANES; thread++) {
        exchanged[thread] = fibers[thread].value;
        fibers[thread].state = State::ready;
    }
    return true;
}

// One block, its threads in the order `place · step + start`. False with a message if they cannot all end.
static bool run_block(unsigned start, unsigned step) {
    const unsigned count = thread_count();
    if (__start_block_shared) {
        memset(__start_block_shared, 0xff, declared_shared());
    }
    memset(dynamic_shared, 0xff, dynamic_bytes);
    memset(copies_begun, 0, sizeof copies_begun);
    // Pages that no fiber touches are never there.
    static char *const stacks = static_cast<char *>(malloc(MAX_THREADS * STACK_BYTES));
    for (unsigned thread = 0; thread < count; thread++) {
        Fiber &fiber = fibers[thread];
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = &stacks[thread * STACK_BYTES];
        fiber.context.uc_stack.ss_size = STACK_BYTES;
        fiber.context.uc_link = &scheduler;
        fiber.state = State::ready;
        fiber.started = false;
        makecontext(&fiber.context, run_fiber, 0);
    }
    for (;;) {
        bool moved = false;
        unsigned done = 0;
        for (unsigned place = 0; place < count; place++) {
            const unsigned thread = (unsigned)(((uint64_t)place * step + start) % count);
            if (fibers[thread].state == State::ready) {
                enter(thread);
                moved = true;
            }
            if (message[0]) {
                return false;
            }
        }
        for (unsigned thread = 0; thread < count; thread++) {
            done += fibers[thread].state == State::done;
        }
        if (done == count) {
            return true;
        }
        moved |= release_barrier();
        for (unsigned first = 0; first < count; first += LANES) {
            moved |= release_warp(first);
        }
        if (!moved) {
            snprintf(message, sizeof message,
                     "block (%u, %u, %u): its threads wait for each other for ever: a barrier or a warp operation is "
                     "not reached by all",
                     blockIdx.x, blockIdx.y, blockIdx.z);
            return false;
        }
    }
}

// Where a launch goes on after a fault of its kernel, and the thread that the kernel runs on; 0: none does.
static sigjmp_buf fault;
static volatile pid_t runner;
static struct sigaction before_us[NSIG];

static pid_t this_thread() { return (pid_t)syscall(SYS_gettid); }

// A signal that somebody sent, or of another thread, is none of a kernel's: it goes to whoever asked for it before, of
// which there may be as many as there are libraries with kernels.
static void on_fault(int signal, siginfo_t *info, void *context) {
    const bool sent = info->si_code <= 0;
    if (!sent && this_thread() == runner) {
        siglongjmp(fault, signal);
    }
    const struct sigaction &before = before_us[signal];
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(signal, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(signal);
    } else {
        // As if this had not been here: the access is made again, and ends the process.
        sigaction(signal, &before, nullptr);
        if (sent) {
            raise(signal);
        }
    }
}

// Once and for good: libraries that came and went in another order than they began would leave each other's handlers.
static bool catch_faults() {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (const int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) {
        sigaction(signal, &action, &before_us[signal]);
    }
    return true;
}

template <class... P, size_t... I>
static void apply(void (*kernel)(P...), void **values, std::index_sequence<I...>) {
    kernel(*static_cast<typename std::remove_const<P>::type *>(values[I])...);
}

template <class... P> static void call(void (*kernel)(P...), void **values) {
    apply(kernel, values, std::index_sequence_for<P...>());
}

// Sizes of the parameters; returns how many.
template <class... P> static unsigned parameters(void (*)(P...), unsigned *sizes) {
    const unsigned all[] = {(unsigned)sizeof(P)...};
    memcpy(sizes, all, sizeof all);
    return sizeof...(P);
}

static unsigned gcd(unsigned a, unsigned b) { return b == 0 ? a : gcd(b, a % b); }

static void run_blocks(const unsigned *grid, unsigned schedule, unsigned start, unsigned step) {
    const uint64_t blocks = (uint64_t)grid[0] * grid[1] * grid[2];
    for (uint64_t i = 0; i < blocks; i++) {
        const uint64_t at = schedule == 1 ? blocks - 1 - i : i;
        blockIdx = {(unsigned)(at % grid[0]), (unsigned)(at / grid[0] % grid[1]), (unsigned)(at / grid[0] / grid[1])};
        if (!run_block(start, step)) {
            break;
        }
    }
}

// Runs a grid. `schedule` chooses the order of blocks and threads: 0 ascending, 1 descending, others scattered.
// Returns null, or what went wrong.
static const char *launch(void (*trampoline)(void **), void **values, const unsigned *grid, const unsigned *block,
                          unsigned shared_bytes, unsigned schedule) {
    message[0] = 0;
    entry = trampoline;
    arguments = values;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    const unsigned count = thread_count();
    if (count == 0 || count > MAX_THREADS) {
        snprintf(message, sizeof message, "%u threads in a block", count);
        return message;
    }
    if (!give_shared(shared_bytes)) {
        snprintf(message, sizeof message, "%u bytes of shared memory for a block", shared_bytes);
        return message;
    }
    unsigned step = schedule < 2 ? count - schedule : 7 * schedule + 1;
    while (gcd(step, count) != 1) {
        step++;
    }
    const unsigned start = schedule == 0 ? 0 : schedule == 1 ? count - 1 : schedule;
    if (schedule == 0) {
        step = 1;
    }
    static const bool caught = catch_faults();
    (void)caught;
    static char stack[64 << 10];
    stack_t alternate = {}, before = {};
    alternate.ss_sp = stack;
    alternate.ss_size = sizeof stack;
    sigaltstack(&alternate, &before);
    const int signal = sigsetjmp(fault, 1);
    if (signal == 0) {
        runner = this_thread();
        run_blocks(grid, schedule, start, step);
    }
    runner = 0;
    if (signal != 0) {
        snprintf(message, sizeof message,
                 "signal %d in block (%u, %u, %u), thread (%u, %u, %u): an access outside the buffers or the shared "
                 "memory, not aligned, or outside an array",
                 signal, blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z);
    }
    sigaltstack(&before, nullptr);
    return message[0] ? message : nullptr;
}

} // namespace cuda_on_cpu

// Makes a kernel callable from outside: `name_parameters`, `name_shared`, `name_launch`.
#define CUDA_ON_CPU_KERNEL(name)                                                                                       \
    static void name##_trampoline(void **values) { cuda_on_cpu::call(&name, values); }                                 \
    extern "C" unsigned name##_parameters(unsigned *sizes) { return cuda_on_cpu::parameters(&name, sizes); }           \
    extern "C" unsigned name##_shared() { return cuda_on_cpu::declared_shared(); }                                     \
    extern "C" const char *name##_launch(void **values, const unsigned *grid, const unsigned *block,                   \
                                         unsigned shared_bytes, unsigned schedule) {                                   \
        return cuda_on_cpu::launch(name##_trampoline, values, grid, block, shared_bytes, schedule);                    \
    }

static inline void __syncthreads() { cuda_on_cpu::to_scheduler(cuda_on_cpu::State::at_barrier); }

static inline void __syncwarp(unsigned mask = 0xffffffffu) {
    cuda_on_cpu::meet_warp(mask, cuda_on_cpu::Operation::sync, 0);
}

template <class T> static T __shfl_xor_sync(unsigned mask, T value, unsigned distance) {
    using namespace cuda_on_cpu;
    meet_warp(mask, Operation::shuffle_xor, bits_of(value));
    return from_lane<T>(current % LANES ^ distance);
}

template <class T> static T __shfl_down_sync(unsigned mask, T value, unsigned distance) {
    using namespace cuda_on_cpu;
    meet_warp(mask, Operation::shuffle_down, bits_of(value));
    const unsigned lane = current % LANES + distance;
    return lane < LANES ? from_lane<T>(lane) : value;
}

template <class T> static T __shfl_up_sync(unsigned mask, T value, unsigned distance) {
    using namespace cuda_on_cpu;
    meet_warp(mask, Operation::shuffle_up, bits_of(value));
    const unsigned lane = current % LANES;
    return lane >= distance ? from_lane<T>(lane - distance) : value;
}

template <class T> static T __shfl_sync(unsigned mask, T value, unsigned lane) {
    using namespace cuda_on_cpu;
    meet_warp(mask, Operation::shuffle, bits_of(value));
    return from_lane<T>(lane % LANES);
}

static inline unsigned __ballot_sync(unsigned mask, bool value) {
    using namespace cuda_on_cpu;
    meet_warp(mask, Operation::ballot, value ? 1 : 0);
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < LANES; lane++) {
        ballot |= (unsigned)from_lane<uint64_t>(lane) << lane;
    }
    return ballot;
}

// Only one fiber runs at a time, and none is interrupted within this.
static inline unsigned atomicAdd(unsigned *target, unsigned value) {
    const unsigned before = *target;
    *target += value;
    return before;
}

static inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
static inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
// The C library has functions of these names that it does not export.
#define __expf(x) expf(x)
#define __logf(x) logf(x)
static inline float __fdividef(float x, float y) { return x / y; }
// Compiled without contraction: no operation of this file is fused with another.
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __fsub_rn(float x, float y) { return x - y; }
static inline double __dmul_rn(double x, double y) { return x * y; }
static inline double __dadd_rn(double x, double y) { return x + y; }
static inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
