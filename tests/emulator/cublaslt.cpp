// An emulated libcublasLt: products by their definition, in the order of the library's streams.
//
// Sums are f32 and in order; with `COMPUTE_32F_FAST_TF32` factors are rounded to 10 bits of mantissa. The workspace is
// overwritten by every product, so that whoever else keeps something there finds out.
//
// An algorithm is for addresses as aligned as its heuristic was told: matrices by the preference, 256 bytes if it says
// nothing, the bias by the pointer that the operation had then. Less is refused here, where the real library may read
// what is beside.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <vector>

#include "cuda.h"

namespace {

enum Status { OK = 0, INVALID = 7, NOT_SUPPORTED = 15 };
enum Type { F32 = 0, BF16 = 14 };
enum Compute { COMPUTE_F32 = 68, COMPUTE_TF32 = 77 };
enum Epilogue : unsigned { PLAIN = 1, BIAS = 4 };

constexpr size_t WORKSPACE = 1 << 20, WORKSPACE_ALIGNMENT = 256;

struct Operation {
    int compute = COMPUTE_F32;
    int transposed[2] = {0, 0};
    unsigned epilogue = PLAIN;
    void *bias = nullptr;
};

// By columns: element (i, j) at `i + j·stride`.
struct Layout {
    int type;
    uint64_t rows, columns;
    int64_t stride;
};

struct Preference {
    uint64_t workspace = 0;
    uint32_t alignments[4] = {256, 256, 256, 256}; // of A, B, C, D
};

// What the library keeps in it is its own: here, the least alignment of A, B, C, D and the bias.
struct Algorithm {
    uint32_t alignments[6];
    uint64_t reserved[5];
};
static_assert(sizeof(Algorithm) == 64, "cublasLtMatmulAlgo_t");

struct Candidate {
    Algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

float load(const void *matrix, int type, size_t at) {
    if (type == F32) {
        return ((const float *)matrix)[at];
    }
    const uint32_t bits = (uint32_t)((const uint16_t *)matrix)[at] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

void store(void *matrix, int type, size_t at, float value) {
    if (type == F32) {
        ((float *)matrix)[at] = value;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    // To the nearest, ties to even; NaN stays NaN.
    const uint32_t rounded = value != value ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
    ((uint16_t *)matrix)[at] = (uint16_t)(rounded >> 16);
}

float to_tf32(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits = (bits + 0x1000) & ~0x1fffu;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Rows of op(A), or columns of op(B), one after the other, as the sums go over them.
std::vector<float> packed(const void *matrix, const Layout &layout, bool along_rows, bool tf32) {
    const size_t inner = along_rows ? layout.columns : layout.rows, outer = along_rows ? layout.rows : layout.columns;
    std::vector<float> out(inner * outer);
    for (size_t o = 0; o < outer; o++) {
        for (size_t k = 0; k < inner; k++) {
            const size_t at = along_rows ? o + k * layout.stride : k + o * layout.stride;
            const float value = load(matrix, layout.type, at);
            out[o * inner + k] = tf32 ? to_tf32(value) : value;
        }
    }
    return out;
}

// All of one call, copied when it is made.
struct Product {
    Operation operation;
    Layout layouts[4];
    const void *a, *b, *c;
    void *d, *workspace;
    size_t workspace_bytes;
    float alpha, beta;

    float finished(float sum, size_t row, size_t column) const {
        float value = alpha * sum;
        if (beta != 0.0f) {
            value += beta * load(c, layouts[2].type, row + column * layouts[2].stride);
        }
        if (operation.epilogue == BIAS) {
            value += load(operation.bias, layouts[3].type, row);
        }
        return value;
    }

    void run() const {
        memset(workspace, 0xff, workspace_bytes);
        const bool tf32 = operation.compute == COMPUTE_TF32;
        const std::vector<float> left = packed(a, layouts[0], operation.transposed[0] == 0, tf32);
        const std::vector<float> right = packed(b, layouts[1], operation.transposed[1] != 0, tf32);
        const size_t inner = operation.transposed[0] ? layouts[0].rows : layouts[0].columns;
        for (size_t column = 0; column < layouts[3].columns; column++) {
            for (size_t row = 0; row < layouts[3].rows; row++) {
                const float *x = &left[row * inner], *y = &right[column * inner];
                float sum = 0.0f;
                for (size_t k = 0; k < inner; k++) {
                    sum += x[k] * y[k];
                }
                store(d, layouts[3].type, row + column * layouts[3].stride, finished(sum, row, column));
            }
        }
    }
};

bool fits(const Operation &operation, const Layout &a, const Layout &b, const Layout &d) {
    const uint64_t rows = operation.transposed[0] ? a.columns : a.rows, inner = operation.transposed[0] ? a.rows : a.columns;
    const uint64_t columns = operation.transposed[1] ? b.rows : b.columns;
    const uint64_t inner_b = operation.transposed[1] ? b.columns : b.rows;
    const bool strides = a.stride >= (int64_t)a.rows && b.stride >= (int64_t)b.rows && d.stride >= (int64_t)d.rows;
    return strides && inner == inner_b && rows == d.rows && columns == d.columns;
}

int refuse(const char *words) {
    fprintf(stderr, "emulated cuBLASLt: %s\n", words);
    return INVALID;
}

// The greatest power of two up to 256 that divides an address; of none, 256.
uint32_t alignment(const void *at) {
    const auto address = (uintptr_t)at;
    return (uint32_t)std::min<uintptr_t>(address ? address & (~address + 1) : 256, 256);
}

// What is wrong with the epilogue; null: nothing.
const char *problem(const Operation &operation) {
    if (operation.epilogue != PLAIN && operation.epilogue != BIAS) {
        return "an epilogue that is not emulated";
    }
    return operation.epilogue == BIAS && !operation.bias ? "an epilogue with a bias that is nowhere" : nullptr;
}

// Puts a function on a stream of the emulated driver.
int enqueue(Handle stream, HostFunction function, void *argument) {
    using LaunchHostFunc = int (*)(Handle, HostFunction, void *);
    static const auto launch = (LaunchHostFunc)dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuLaunchHostFunc");
    return launch(stream, function, argument);
}

} // namespace

API size_t cublasLtGetVersion() { return 120804; }

API const char *cublasLtGetStatusName(int status) {
    switch (status) {
    case OK:
        return "CUBLAS_STATUS_SUCCESS";
    case INVALID:
        return "CUBLAS_STATUS_INVALID_VALUE";
    default:
        return "CUBLAS_STATUS_NOT_SUPPORTED";
    }
}

API int cublasLtCreate(Handle *context) {
    *context = new char;
    return OK;
}

API int cublasLtMatmulDescCreate(Handle *operation, int compute, int scale_type) {
    if ((compute != COMPUTE_F32 && compute != COMPUTE_TF32) || scale_type != F32) {
        return NOT_SUPPORTED;
    }
    auto *made = new Operation;
    made->compute = compute;
    *operation = made;
    return OK;
}

API int cublasLtMatmulDescSetAttribute(Handle handle, int attribute, const void *value, size_t bytes) {
    auto &operation = *(Operation *)handle;
    const auto take = [&](auto &field) {
        if (bytes != sizeof field) {
            return INVALID;
        }
        memcpy(&field, value, bytes);
        return OK;
    };
    switch (attribute) {
    case 3:
        return take(operation.transposed[0]);
    case 4:
        return take(operation.transposed[1]);
    case 7:
        return take(operation.epilogue);
    case 8:
        return take(operation.bias);
    default:
        return NOT_SUPPORTED;
    }
}

API int cublasLtMatmulDescDestroy(Handle operation) {
    delete (Operation *)operation;
    return OK;
}

API int cublasLtMatrixLayoutCreate(Handle *layout, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    if (type != F32 && type != BF16) {
        return NOT_SUPPORTED;
    }
    *layout = new Layout{type, rows, columns, stride};
    return OK;
}

API int cublasLtMatrixLayoutDestroy(Handle layout) {
    delete (Layout *)layout;
    return OK;
}

API int cublasLtMatmulPreferenceCreate(Handle *preference) {
    *preference = new Preference;
    return OK;
}

API int cublasLtMatmulPreferenceSetAttribute(Handle preference, int attribute, const void *value, size_t bytes) {
    auto &known = *(Preference *)preference;
    if (attribute == 1 && bytes == sizeof known.workspace) {
        memcpy(&known.workspace, value, bytes);
    } else if (attribute >= 5 && attribute <= 8 && bytes == sizeof *known.alignments) {
        memcpy(&known.alignments[attribute - 5], value, bytes);
    } else if (attribute != 3 || bytes != sizeof(uint32_t)) { // 3: how parts of a sum are added, which are none here
        return INVALID;
    }
    return OK;
}

API int cublasLtMatmulPreferenceDestroy(Handle preference) {
    delete (Preference *)preference;
    return OK;
}

API int cublasLtMatmulAlgoGetHeuristic(Handle, Handle operation, Handle a, Handle b, Handle, Handle d,
                                       Handle preference, int wanted, Candidate *found, int *count) {
    *count = 0;
    const auto &known = *(Operation *)operation;
    const auto &preferred = *(Preference *)preference;
    if (wanted < 1 || !fits(known, *(Layout *)a, *(Layout *)b, *(Layout *)d)) {
        return INVALID;
    }
    if (const char *words = problem(known)) {
        return refuse(words);
    }
    Algorithm algorithm = {};
    std::copy(preferred.alignments, preferred.alignments + 4, algorithm.alignments);
    algorithm.alignments[4] = alignment(known.bias);
    if (wanted > 0) {
        found[0] = Candidate{algorithm, std::min<size_t>(WORKSPACE, preferred.workspace), OK, 1.0f, {}};
        *count = 1;
    }
    return OK;
}

API int cublasLtMatmul(Handle, Handle operation, const void *alpha, const void *a, Handle a_layout, const void *b,
                       Handle b_layout, const void *beta, const void *c, Handle c_layout, void *d, Handle d_layout,
                       const Algorithm *algorithm, void *workspace, size_t workspace_bytes, Handle stream) {
    const Layout layouts[4] = {*(Layout *)a_layout, *(Layout *)b_layout, *(Layout *)c_layout, *(Layout *)d_layout};
    const auto &known = *(Operation *)operation;
    if (!fits(known, layouts[0], layouts[1], layouts[3]) || layouts[2].rows != layouts[3].rows) {
        return INVALID;
    }
    if (const char *words = problem(known)) {
        return refuse(words);
    }
    const void *const addresses[5] = {a, b, c, d, known.bias};
    for (int i = 0; i < 5; i++) {
        if (alignment(addresses[i]) < algorithm->alignments[i]) {
            return refuse("an address that is less aligned than the algorithm was chosen for");
        }
    }
    if (alignment(workspace) < WORKSPACE_ALIGNMENT) {
        return refuse("a workspace that does not begin at a multiple of 256 bytes");
    }
    auto *product = new Product{known, {layouts[0], layouts[1], layouts[2], layouts[3]}, a, b, c, d,
                                workspace, workspace_bytes, *(const float *)alpha, *(const float *)beta};
    const int result = enqueue(
        stream,
        [](void *argument) {
            ((Product *)argument)->run();
            delete (Product *)argument;
        },
        product);
    return result == 0 ? OK : 13; // CUBLAS_STATUS_EXECUTION_FAILED
}
