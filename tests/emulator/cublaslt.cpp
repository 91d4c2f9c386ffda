// An emulated libcublasLt: products by their definition, in the order of the library's streams.
//
// Sums are f32 and in order; with `COMPUTE_32F_FAST_TF32` factors are rounded to 10 bits of mantissa. The workspace is
// overwritten by every product, so that whoever else keeps something there finds out.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <vector>

#include "cuda.h"

namespace {

enum Status { OK = 0, INVALID = 7, NOT_SUPPORTED = 15 };
enum Type { F32 = 0, BF16 = 14 };
enum Compute { COMPUTE_F32 = 68, COMPUTE_TF32 = 77 };
enum Epilogue : unsigned { PLAIN = 1, BIAS = 4, GELU = 32, DGELU = 64, AUX = 128 };

constexpr size_t WORKSPACE = 1 << 20;

struct Operation {
    int compute = COMPUTE_F32;
    int transposed[2] = {0, 0};
    unsigned epilogue = PLAIN;
    void *bias = nullptr, *aux = nullptr;
    int64_t aux_stride = 0;
};

// By columns: element (i, j) at `i + j·stride`.
struct Layout {
    int type;
    uint64_t rows, columns;
    int64_t stride;
};

struct Preference {
    uint64_t workspace = 0;
};

struct Algorithm {
    uint64_t data[8];
};

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

constexpr float SQRT_2_OVER_PI = 0.7978845608028654f, CUBIC = 0.044715f;

float gelu(float x) { return 0.5f * x * (1.0f + tanhf(SQRT_2_OVER_PI * (x + CUBIC * x * x * x))); }

float gelu_slope(float x) {
    const float t = tanhf(SQRT_2_OVER_PI * (x + CUBIC * x * x * x));
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * SQRT_2_OVER_PI * (1.0f + 3.0f * CUBIC * x * x);
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
        const size_t aux_at = row + column * operation.aux_stride;
        float value = alpha * sum;
        if (beta != 0.0f) {
            value += beta * load(c, layouts[2].type, row + column * layouts[2].stride);
        }
        if (operation.epilogue & BIAS) {
            value += load(operation.bias, layouts[3].type, row);
        }
        if (operation.epilogue & GELU) {
            store(operation.aux, layouts[3].type, aux_at, value);
            value = gelu(load(operation.aux, layouts[3].type, aux_at));
        }
        if (operation.epilogue & DGELU) {
            value *= gelu_slope(load(operation.aux, layouts[3].type, aux_at));
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
    case 11:
        return take(operation.aux);
    case 12:
        return take(operation.aux_stride);
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
    if (attribute == 1 && bytes == sizeof(uint64_t)) {
        memcpy(&((Preference *)preference)->workspace, value, bytes);
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
    if (wanted < 1 || !fits(*(Operation *)operation, *(Layout *)a, *(Layout *)b, *(Layout *)d)) {
        return INVALID;
    }
    *found = Candidate{{}, std::min<size_t>(WORKSPACE, ((Preference *)preference)->workspace), OK, 1.0f, {}};
    *count = 1;
    return OK;
}

API int cublasLtMatmul(Handle, Handle operation, const void *alpha, const void *a, Handle a_layout, const void *b,
                       Handle b_layout, const void *beta, const void *c, Handle c_layout, void *d, Handle d_layout,
                       const Algorithm *, void *workspace, size_t workspace_bytes, Handle stream) {
    const Layout layouts[4] = {*(Layout *)a_layout, *(Layout *)b_layout, *(Layout *)c_layout, *(Layout *)d_layout};
    if (!fits(*(Operation *)operation, layouts[0], layouts[1], layouts[3]) || layouts[2].rows != layouts[3].rows) {
        return INVALID;
    }
    auto *product = new Product{*(Operation *)operation, {layouts[0], layouts[1], layouts[2], layouts[3]}, a, b, c, d,
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
