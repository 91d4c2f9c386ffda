// What the emulated libraries share of CUDA's headers: types and numbers as the driver's interface has them.
#pragma once

#include <cstddef>
#include <cstdint>

// `CUresult`
enum Result : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    OUT_OF_RESOURCES = 701,
    NOT_PERMITTED = 800,
};

// Streams, events, modules and functions are opaque pointers, as in CUDA.
using Handle = void *;
using Address = uint64_t;
using HostFunction = void (*)(void *);

// An image is this, and then an ELF library of the machine: what the emulated NVRTC gives for a CUBIN.
struct ImageHeader {
    char magic[8];
    uint64_t bytes;
};
constexpr char IMAGE_MAGIC[9] = "EMULATED";

// Exported to the programs that load a library; all else is its own.
#define API extern "C" __attribute__((visibility("default")))
