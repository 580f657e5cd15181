// Stands between a process and the C library's file functions: counts the calls for files below one folder, and lets
// one of them fail. Preloaded; child processes and calls for other files keep theirs.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

std::string folder;   // of the calls that count
pid_t owner = 0;      // a forked child has other calls
int calls_left = -1;  // before one fails; -1: none does
int error = 0;
std::string failed;  // the call that did, and its path

std::string path_of(int file) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  const ssize_t length = readlink(link, path, sizeof path);
  return std::string(path, length < 0 ? 0 : length);
}

std::string path_of(int at, const char* path) {
  if (path == nullptr || path[0] == '/' || at == AT_FDCWD) return path == nullptr ? "" : path;
  return path_of(at) + "/" + path;
}

// Whether this call is the one that fails.
template <class... Place>
bool fails(const char* name, Place... place) {
  if (calls_left < 0 || getpid() != owner) return false;
  const int before = errno;
  const std::string path = path_of(place...);
  errno = before;
  if (!path.starts_with(folder)) return false;
  if (calls_left-- != 0) return false;
  failed = std::string(name) + " " + path;
  errno = error;
  return true;
}

template <class Function>
Function* real(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

mode_t mode_of(int flags, va_list more) { return (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : 0; }

}  // namespace

#define REAL(name) static const auto call = real(&name, #name)

// A function whose first argument is a path, a descriptor, or a folder's descriptor and a path in it.
#define DEFINE(result, name, parameters, arguments, place)                 \
  EXPORT result name parameters {                                          \
    REAL(name);                                                            \
    return fails(#name, place) ? static_cast<result>(-1) : call arguments; \
  }
#define AT(at, path) at, path

#define DEFINE_OPEN(name)                                                \
  EXPORT int name(const char* path, int flags, ...) {                    \
    REAL(name);                                                          \
    va_list more;                                                        \
    va_start(more, flags);                                               \
    const mode_t mode = mode_of(flags, more);                            \
    va_end(more);                                                        \
    return fails("open", AT_FDCWD, path) ? -1 : call(path, flags, mode); \
  }
#define DEFINE_OPENAT(name)                                            \
  EXPORT int name(int at, const char* path, int flags, ...) {          \
    REAL(name);                                                        \
    va_list more;                                                      \
    va_start(more, flags);                                             \
    const mode_t mode = mode_of(flags, more);                          \
    va_end(more);                                                      \
    return fails("open", at, path) ? -1 : call(at, path, flags, mode); \
  }

DEFINE_OPEN(open)
DEFINE_OPEN(open64)
DEFINE_OPENAT(openat)
DEFINE_OPENAT(openat64)
DEFINE(int, mkdir, (const char* path, mode_t mode), (path, mode), AT(AT_FDCWD, path))
DEFINE(int, chmod, (const char* path, mode_t mode), (path, mode), AT(AT_FDCWD, path))
DEFINE(int, fchmod, (int file, mode_t mode), (file, mode), file)
DEFINE(int, rename, (const char* from, const char* to), (from, to), AT(AT_FDCWD, to))
DEFINE(int, link, (const char* from, const char* to), (from, to), AT(AT_FDCWD, to))
DEFINE(int, symlink, (const char* from, const char* to), (from, to), AT(AT_FDCWD, to))
DEFINE(ssize_t, write, (int file, const void* bytes, size_t count), (file, bytes, count), file)
DEFINE(ssize_t, read, (int file, void* bytes, size_t count), (file, bytes, count), file)

// The descriptor is closed all the same, as on a disk over a network that has lost what was written.
EXPORT int close(int file) {
  REAL(close);
  const bool is_failing = fails("close", file);
  const int before = errno, result = call(file);
  if (is_failing) errno = before;
  return is_failing ? -1 : result;
}

// The call after so many others for files below `below` fails with `number`; negative: none does.
EXPORT void faulty_fail_call(int after, const char* below, int number) {
  if (after >= 0) {
    failed.clear();
    folder = below;
    owner = getpid();
    error = number;
  }
  calls_left = after;
}
EXPORT const char* faulty_failed() { return failed.c_str(); }
