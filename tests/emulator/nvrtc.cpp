// An emulated libnvrtc: CUDA C goes through the system's C++ compiler ($CXX, or c++), with the imitation of CUDA that
// the tests of single kernels have (worker/tests/kernels/cuda_on_cpu/cuda.hpp). What it gives for a CUBIN is an image for the
// emulated driver. All definitions are honoured, the architecture makes no difference.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "cuda.h"

// The text of cuda.hpp.
asm(".section .rodata\n"
    "imitation_of_cuda: .incbin \"" IMITATION "\"\n"
    ".byte 0\n"
    ".text\n");
extern "C" __attribute__((visibility("hidden"))) const char imitation_of_cuda[];

namespace {

enum NvrtcResult { OK = 0, INVALID_PROGRAM = 4, COMPILATION = 6, INTERNAL = 11 };

constexpr int ARCHITECTURES[] = {80, 90, 100};

struct Program {
    std::string name, text, log, image;
    std::map<std::string, std::string> headers;
};

// A text with its `#include "…"` replaced by the headers.
std::string included(const Program &program, const std::string &name, const std::string &text) {
    std::istringstream lines(text);
    std::string out = "\n#line 1 \"" + name + "\"\n", line;
    for (int number = 1; std::getline(lines, line); number++) {
        const std::string start = "#include \"";
        if (line.compare(0, start.size(), start) != 0) {
            out += line + "\n";
            continue;
        }
        const std::string wanted = line.substr(start.size(), line.find('"', start.size()) - start.size());
        const auto header = program.headers.find(wanted);
        out += header == program.headers.end() ? "#error no header " + wanted + "\n"
                                               : included(program, wanted, header->second);
        out += "#line " + std::to_string(number + 1) + " \"" + name + "\"\n";
    }
    return out;
}

// Where the bracket that opens at `at` is closed, and one further.
size_t after_brackets(const std::string &text, size_t at) {
    int depth = 0;
    for (; at < text.size(); at++) {
        depth += text[at] == '(' ? 1 : text[at] == ')' ? -1 : 0;
        if (depth == 0) {
            return at + 1;
        }
    }
    return at;
}

struct Kernel {
    std::string name;
    std::string bounds; // what is in the brackets of __launch_bounds__, if it has any
};

// The kernels in a source: `extern "C" __global__ void __launch_bounds__(…) name(`.
std::vector<Kernel> kernels(const std::string &text) {
    std::vector<Kernel> found;
    const std::string mark = "extern \"C\" __global__", limits = "__launch_bounds__";
    for (size_t at = text.find(mark); at != std::string::npos; at = text.find(mark, at)) {
        at += mark.size();
        Kernel kernel;
        size_t open = text.find('(', at);
        if (text.find(limits, at) < open) {
            const size_t end = after_brackets(text, open);
            kernel.bounds = text.substr(open + 1, end - open - 2);
            open = text.find('(', end);
        }
        size_t end = open;
        while (end > at && isspace((unsigned char)text[end - 1])) {
            end--;
        }
        size_t start = end;
        while (start > at && (isalnum((unsigned char)text[start - 1]) || text[start - 1] == '_')) {
            start--;
        }
        kernel.name = text.substr(start, end - start);
        found.push_back(kernel);
    }
    return found;
}

std::string translation_unit(const Program &program, const std::vector<std::string> &options) {
    std::string text;
    const std::string define = "--define-macro=";
    for (const std::string &option : options) {
        if (option.compare(0, define.size(), define) == 0) {
            std::string macro = option.substr(define.size());
            const size_t equals = macro.find('=');
            text += "#define " + macro.replace(equals, 1, " ") + "\n";
        }
    }
    text += imitation_of_cuda + included(program, program.name, program.text);
    for (const Kernel &kernel : kernels(program.text)) {
        text += "\nCUDA_ON_CPU_KERNEL(" + kernel.name + ")\n";
        // The first of the bounds is of threads. They may be constants of the source.
        const std::string bounds = kernel.bounds.empty() ? "1024" : kernel.bounds;
        text += "extern \"C\" unsigned " + kernel.name + "_threads() {\n    const unsigned bounds[] = {" + bounds +
                "};\n    return bounds[0];\n}\n";
    }
    return text;
}

std::string contents(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
}

// Runs the compiler in a folder of its own, which is gone afterwards.
NvrtcResult compile(Program &program, const std::vector<std::string> &options) {
    const char *temporary = getenv("TMPDIR");
    std::string folder = std::string(temporary ? temporary : "/tmp") + "/emulated-nvrtc-XXXXXX";
    if (!mkdtemp(folder.data())) {
        return INTERNAL;
    }
    const std::string source = folder + "/kernel.cpp", object = folder + "/kernel.so", log = folder + "/log";
    std::ofstream(source) << translation_unit(program, options);
    const char *compiler = getenv("CXX");
    const std::string command = std::string(compiler && *compiler ? compiler : "c++") +
                                " -std=c++17 -O1 -shared -fPIC -ffp-contract=off -w -fsanitize=alignment,bounds"
                                " -fsanitize-undefined-trap-on-error -o '" + object + "' '" + source + "' 2>'" + log + "'";
    const int status = system(command.c_str());
    program.log = contents(log);
    const std::string library = contents(object);
    for (const std::string &file : {source, object, log}) {
        unlink(file.c_str());
    }
    rmdir(folder.c_str());
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        return COMPILATION;
    }
    ImageHeader header{{}, library.size()};
    memcpy(header.magic, IMAGE_MAGIC, sizeof header.magic);
    program.image = std::string((const char *)&header, sizeof header) + library;
    return OK;
}

} // namespace

// A version that is nobody else's: caches go by it.
API int nvrtcVersion(int *major, int *minor) {
    *major = 12;
    *minor = 99;
    return OK;
}

API int nvrtcGetNumSupportedArchs(int *count) {
    *count = sizeof ARCHITECTURES / sizeof *ARCHITECTURES;
    return OK;
}

API int nvrtcGetSupportedArchs(int *architectures) {
    memcpy(architectures, ARCHITECTURES, sizeof ARCHITECTURES);
    return OK;
}

API const char *nvrtcGetErrorString(int result) {
    switch (result) {
    case OK:
        return "NVRTC_SUCCESS";
    case INVALID_PROGRAM:
        return "NVRTC_ERROR_INVALID_PROGRAM";
    case COMPILATION:
        return "NVRTC_ERROR_COMPILATION";
    default:
        return "NVRTC_ERROR_INTERNAL_ERROR";
    }
}

API int nvrtcCreateProgram(Handle *program, const char *text, const char *name, int count, const char *const *headers,
                           const char *const *names) {
    auto *made = new Program{name, text, "", "", {}};
    for (int i = 0; i < count; i++) {
        made->headers[names[i]] = headers[i];
    }
    *program = made;
    return OK;
}

API int nvrtcDestroyProgram(Handle *program) {
    delete (Program *)*program;
    *program = nullptr;
    return OK;
}

API int nvrtcCompileProgram(Handle program, int count, const char *const *options) {
    return compile(*(Program *)program, std::vector<std::string>(options, options + count));
}

API int nvrtcGetProgramLogSize(Handle program, size_t *bytes) {
    *bytes = ((Program *)program)->log.size() + 1;
    return OK;
}

API int nvrtcGetProgramLog(Handle program, char *log) {
    const std::string &text = ((Program *)program)->log;
    memcpy(log, text.c_str(), text.size() + 1);
    return OK;
}

API int nvrtcGetCUBINSize(Handle program, size_t *bytes) {
    *bytes = ((Program *)program)->image.size();
    return *bytes ? OK : INVALID_PROGRAM;
}

API int nvrtcGetCUBIN(Handle program, char *image) {
    const std::string &bytes = ((Program *)program)->image;
    memcpy(image, bytes.data(), bytes.size());
    return OK;
}
