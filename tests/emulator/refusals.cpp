// What the emulated libraries refuse, a call a case, each beside one that passes: what a card or a library of NVIDIA
// refuses too, or lets pass to nobody's good. Ends with 1 if an answer is not as expected. Run by
// `cargo test --test it emulated_gpu`, with LD_LIBRARY_PATH as for any program.

#include <atomic>
#include <csetjmp>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <string>
#include <thread>
#include <vector>

#include "cuda.h"

namespace {

constexpr char SOURCE[] = R"(
constexpr unsigned THREADS = 256;
extern "C" __global__ void any(unsigned *x) { x[0] = threadIdx.x; }
extern "C" __global__ void __launch_bounds__(THREADS, 2) bounded(unsigned *x) {
    volatile __shared__ unsigned declared[256];
    declared[threadIdx.x % 256] = 1;
    x[0] = declared[threadIdx.x % 256];
}
extern "C" __global__ void waits(volatile unsigned *x) {
    x[0] = 1;
    while (x[1] == 0) {
    }
}
extern "C" __global__ void wild(unsigned *x) { x[1024] = 1; }
)";

constexpr size_t BYTES = 4096, KIB = 1 << 10;
int cases = 0, wrong = 0;

void expect(const std::string &what, int found, int expected) {
    cases++;
    if (found != expected) {
        wrong++;
        printf("WRONG: %s: %d, expected %d\n", what.c_str(), found, expected);
    }
}

// A function of the libraries. Arguments must have the very types of its parameters.
template <class... A> int call(const char *name, A... arguments) {
    const auto function = (int (*)(A...))dlsym(RTLD_DEFAULT, name);
    if (!function) {
        printf("there is no `%s`\n", name);
        exit(1);
    }
    return function(arguments...);
}

// A call that the other cases build on.
template <class... A> void must(const char *name, A... arguments) {
    if (const int result = call(name, arguments...)) {
        printf("`%s` fails: %d\n", name, result);
        exit(1);
    }
}

Handle module_of(const char *source) {
    Handle program, module;
    const char *const *const none = nullptr;
    must("nvrtcCreateProgram", &program, source, "refusals.cu", 0, none, none);
    must("nvrtcCompileProgram", program, 0, none);
    size_t bytes;
    must("nvrtcGetCUBINSize", program, &bytes);
    std::vector<char> image(bytes);
    must("nvrtcGetCUBIN", program, image.data());
    must("cuModuleLoadData", &module, (const void *)image.data());
    must("nvrtcDestroyProgram", &program);
    return module;
}

Handle function_of(Handle module, const char *name) {
    Handle function;
    must("cuModuleGetFunction", &function, module, name);
    return function;
}

Address memory(size_t bytes) {
    Address address;
    must("cuMemAlloc_v2", &address, bytes);
    must("cuMemsetD8_v2", address, (unsigned char)0, bytes);
    must("cuCtxSynchronize");
    return address;
}

struct Grid {
    unsigned blocks[3] = {1, 1, 1}, threads[3] = {1, 1, 1}, shared = 0;
};

int launch(Handle function, Address at, const Grid &grid = {}, Handle stream = nullptr) {
    void *parameters[] = {&at};
    const auto &[blocks, threads, shared] = grid;
    return call("cuLaunchKernel", function, blocks[0], blocks[1], blocks[2], threads[0], threads[1], threads[2], shared,
                stream, (void **)parameters, (void **)nullptr);
}

void launches(Handle module) {
    const Handle any = function_of(module, "any"), bounded = function_of(module, "bounded");
    const Address x = memory(BYTES);
    expect("as many threads as a block has", launch(any, x, {{1, 1, 1}, {1024, 1, 1}}), SUCCESS);
    expect("more", launch(any, x, {{1, 1, 1}, {1025, 1, 1}}), INVALID_VALUE);
    expect("more along z", launch(any, x, {{1, 1, 1}, {1, 1, 65}}), INVALID_VALUE);
    expect("no threads", launch(any, x, {{1, 1, 1}, {32, 0, 1}}), INVALID_VALUE);
    expect("no blocks", launch(any, x, {{0, 1, 1}}), INVALID_VALUE);
    expect("too many blocks along x", launch(any, x, {{1u << 31, 1, 1}}), INVALID_VALUE);
    expect("along y", launch(any, x, {{1, 65536, 1}}), INVALID_VALUE);
    expect("along z", launch(any, x, {{1, 1, 65536}}), INVALID_VALUE);
    expect("as many threads as it was compiled for", launch(bounded, x, {{1, 1, 1}, {256, 1, 1}}), SUCCESS);
    expect("more threads than that", launch(bounded, x, {{1, 1, 1}, {16, 17, 1}}), OUT_OF_RESOURCES);

    const auto share = [&](unsigned kib) { return launch(bounded, x, {{1, 1, 1}, {1, 1, 1}, kib * (unsigned)KIB}); };
    const auto ask = [&](int kib) { return call("cuFuncSetAttribute", bounded, 8, kib * (int)KIB); };
    expect("48 KiB of shared memory with what is declared", share(47), SUCCESS);
    expect("48 KiB beside it", share(48), INVALID_VALUE);
    expect("asked for", ask(100) || share(100), SUCCESS);
    expect("more than was asked for", share(101), INVALID_VALUE);
    expect("all of a block with what is declared", ask(226), SUCCESS);
    expect("all of a block beside it", ask(227), INVALID_VALUE);
    must("cuCtxSynchronize");
    must("cuMemFree_v2", x);
}

void events() {
    Handle timed[2], untimed, stream;
    must("cuStreamCreateWithPriority", &stream, 1u, 0);
    for (Handle &event : timed) {
        must("cuEventCreate", &event, 0u);
    }
    must("cuEventCreate", &untimed, 2u);
    float ms;
    const auto elapsed = [&](Handle from, Handle to) { return call("cuEventElapsedTime", &ms, from, to); };
    must("cuEventRecord", timed[0], stream);
    must("cuEventRecord", untimed, stream);
    must("cuStreamSynchronize", stream);
    expect("time to an event that was not recorded", elapsed(timed[0], timed[1]), INVALID_HANDLE);
    expect("time to an event without one", elapsed(timed[0], untimed), INVALID_HANDLE);
    expect("time from an event without one", elapsed(untimed, timed[0]), INVALID_HANDLE);
    must("cuEventRecord", timed[1], stream);
    must("cuStreamSynchronize", stream);
    expect("time between two events", elapsed(timed[0], timed[1]), SUCCESS);
    must("cuEventDestroy_v2", timed[1]);
    expect("an event that was destroyed", call("cuEventRecord", timed[1], stream), INVALID_HANDLE);
    expect("a second time", call("cuEventDestroy_v2", timed[1]), INVALID_HANDLE);
    must("cuStreamDestroy_v2", stream);
    expect("a stream that was destroyed", call("cuEventRecord", timed[0], stream), INVALID_HANDLE);
    expect("waiting for it", call("cuStreamSynchronize", stream), INVALID_HANDLE);
    expect("destroying it", call("cuStreamDestroy_v2", stream), INVALID_HANDLE);
}

void copies() {
    const Address x = memory(BYTES);
    void *pinned;
    must("cuMemHostAlloc", &pinned, BYTES, 0u);
    const Handle stream = nullptr;
    const auto up = [&](Address to, const void *from, size_t bytes) {
        return call("cuMemcpyHtoDAsync_v2", to, from, bytes, stream);
    };
    const auto down = [&](void *to, Address from, size_t bytes) {
        return call("cuMemcpyDtoHAsync_v2", to, from, bytes, stream);
    };
    expect("a copy of all", up(x, pinned, BYTES) || down(pinned, x, BYTES), SUCCESS);
    expect("a copy past the end of the device's memory", up(x + 8, pinned, BYTES - 4), INVALID_VALUE);
    expect("a copy past the end of page-locked memory", down((char *)pinned + 8, x, BYTES - 4), INVALID_VALUE);
    expect("a copy from the device's memory as the host's", up(x, (void *)x, 8), INVALID_VALUE);
    expect("a copy to the host's memory as the device's", up((Address)pinned, pinned, 8), INVALID_VALUE);
    expect("a fill past the end", call("cuMemsetD8Async", x, (unsigned char)0, BYTES + 1, stream), INVALID_VALUE);
    must("cuMemsetD8_v2", x, (unsigned char)0, BYTES);
    must("cuCtxSynchronize");
    *(char *)pinned = 1;
    must("cuMemcpyDtoHAsync_v2", pinned, x, BYTES, stream);
    expect("page-locked memory before a copy to it has come", *(volatile char *)pinned == 1, 0);
    must("cuCtxSynchronize");
    expect("and then", *(char *)pinned, 0);
    must("cuMemFree_v2", x);
    expect("memory that was freed", up(x, pinned, 8), INVALID_VALUE);
    expect("freed twice", call("cuMemFree_v2", x), INVALID_VALUE);
    must("cuMemFreeHost", pinned);
}

void modules() {
    const Handle module = module_of(SOURCE), any = function_of(module, "any");
    const Address x = memory(BYTES);
    expect("a kernel of a module", launch(any, x), SUCCESS);
    must("cuCtxSynchronize");
    must("cuModuleUnload", module);
    expect("of one that was unloaded", launch(any, x), INVALID_HANDLE);
    expect("unloaded twice", call("cuModuleUnload", module), INVALID_HANDLE);
    must("cuMemFree_v2", x);
}

void host_functions() {
    static std::atomic<int> answer{-1};
    const HostFunction asks = [](void *) { answer = call("cuStreamQuery", (Handle) nullptr); };
    must("cuLaunchHostFunc", (Handle) nullptr, asks, (void *)nullptr);
    must("cuCtxSynchronize");
    expect("a call from a host function", answer, NOT_PERMITTED);
}

// D = A·B of bf16 matrices of SIDE rows and columns, with a bias.
struct Product {
    static constexpr uint64_t SIDE = 16;
    static constexpr size_t MATRIX = SIDE * SIDE * 2;
    Handle operation, layout, preference;
    struct {
        uint64_t data[8 + 5];
    } candidate;
    Address at[4], bias, workspace;

    template <class T> void set(const char *function, Handle of, int attribute, T value) {
        must(function, of, attribute, (const void *)&value, sizeof value);
    }

    void point() {
        set("cublasLtMatmulDescSetAttribute", operation, 8, bias);
    }

    int find() {
        int count;
        return call("cublasLtMatmulAlgoGetHeuristic", (Handle) nullptr, operation, layout, layout, layout, layout,
                    preference, 1, (void *)&candidate, &count);
    }

    int run() {
        point();
        const float one = 1.0f, zero = 0.0f;
        return call("cublasLtMatmul", (Handle) nullptr, operation, (const void *)&one, (const void *)at[0], layout,
                    (const void *)at[1], layout, (const void *)&zero, (const void *)at[2], layout, (void *)at[3], layout,
                    (const void *)&candidate, (void *)workspace, candidate.data[8], (Handle) nullptr);
    }
};

void products() {
    constexpr int INVALID = 7;
    Product product;
    must("cublasLtMatmulDescCreate", &product.operation, 68, 0);
    must("cublasLtMatrixLayoutCreate", &product.layout, 14, Product::SIDE, Product::SIDE, (int64_t)Product::SIDE);
    must("cublasLtMatmulPreferenceCreate", &product.preference);
    product.set("cublasLtMatmulPreferenceSetAttribute", product.preference, 1, uint64_t{1 << 16});
    for (int matrix = 0; matrix < 4; matrix++) {
        product.at[matrix] = memory(Product::MATRIX + 256);
        product.set("cublasLtMatmulPreferenceSetAttribute", product.preference, 5 + matrix, uint32_t{32});
    }
    product.bias = memory(BYTES);
    product.workspace = memory((1 << 16) + 256);
    product.set("cublasLtMatmulDescSetAttribute", product.operation, 7, unsigned{4});
    product.point();
    expect("a product with a bias", product.find() || product.run(), 0);
    const std::string matrices = "ABCD";
    for (int matrix = 0; matrix < 4; matrix++) {
        Address &at = product.at[matrix];
        at += 32;
        expect(std::string("as aligned as promised: ") + matrices[matrix], product.run(), 0);
        at -= 16;
        expect(std::string("less aligned: ") + matrices[matrix], product.run(), INVALID);
        at -= 16;
    }
    product.bias += 16;
    expect("a bias that is less aligned than at the heuristic", product.run(), INVALID);
    expect("with a heuristic of its own", product.find() || product.run(), 0);
    product.workspace += 128;
    expect("a workspace that begins between two 256 bytes", product.run(), INVALID);
    must("cuCtxSynchronize");
}

thread_local sigjmp_buf before_fault;

// While a kernel runs, another thread faults: that is for the handler that was there before, and the kernel goes on.
void faults(Handle module) {
    static std::atomic<int> handled{0};
    const Address x = memory(BYTES);
    auto *flags = (volatile unsigned *)x;
    expect("a kernel that waits", launch(function_of(module, "waits"), x), SUCCESS);
    std::thread other([&] {
        while (flags[0] == 0) {
            std::this_thread::yield();
        }
        volatile int *volatile nowhere = nullptr;
        if (sigsetjmp(before_fault, 1) == 0) {
            *nowhere = 1;
        } else {
            handled++;
        }
        flags[1] = 1;
    });
    other.join();
    expect("the other thread's own handler", handled, 1);
    expect("the kernel beside it", call("cuCtxSynchronize"), SUCCESS);
    expect("a kernel that writes outside", launch(function_of(module, "wild"), x), SUCCESS);
    expect("when it has run", call("cuCtxSynchronize"), ILLEGAL_ADDRESS);
    expect("everything after that", call("cuCtxSynchronize"), ILLEGAL_ADDRESS);
}

} // namespace

int main() {
    for (const char *library : {"libcuda.so.1", "libnvrtc.so.12", "libcublasLt.so.12"}) {
        if (!dlopen(library, RTLD_NOW | RTLD_GLOBAL)) {
            printf("%s\n", dlerror());
            return 1;
        }
    }
    // Before any kernel's.
    struct sigaction action = {};
    action.sa_handler = [](int) { siglongjmp(before_fault, 1); };
    sigaction(SIGSEGV, &action, nullptr);
    Handle context;
    must("cuInit", 0u);
    must("cuDevicePrimaryCtxRetain", &context, 0);
    must("cuCtxSetCurrent", context);
    const Handle module = module_of(SOURCE);
    launches(module);
    events();
    copies();
    modules();
    host_functions();
    products();
    // The last: a GPU does not work after it.
    faults(module);
    printf("%d calls, %d answers are wrong\n", cases, wrong);
    return wrong == 0 ? 0 : 1;
}
