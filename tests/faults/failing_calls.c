/* Calls of the C library that fail on purpose: the n-th of a kind below a folder, with an errno of one's choice.
 *
 * Loaded before all others (LD_PRELOAD), so that Python, pyarrow and whatever else writes meet the same faults.
 * Armed from Python by tests/faults/shim.py; until then every call goes through. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum kind { OPEN = 1, WRITE = 2, FSYNC = 4, CLOSE = 8, RENAME = 16, LINK = 32, UNLINK = 64, MKDIR = 128, ALLOC = 256 };
enum how { ONCE, EVER, HALF, KILL };

static struct {
    char root[PATH_MAX];
    size_t length;
    int kinds, error, how;
    long nth, count, met, of_kind[9];
    size_t least_bytes;
} armed;

static char where[PATH_MAX + 64];

void faults_arm(const char *root, int kinds, long nth, int error, int how, size_t least_bytes) {
    armed.kinds = 0;
    strncpy(armed.root, root, sizeof armed.root - 1);
    armed.length = strlen(root);
    armed.nth = nth, armed.error = error, armed.how = how, armed.least_bytes = least_bytes;
    armed.count = armed.met = 0;
    memset(armed.of_kind, 0, sizeof armed.of_kind);
    where[0] = 0;
    __sync_synchronize();
    armed.kinds = kinds;
}
void faults_disarm(void) { armed.kinds = 0; }
long faults_count(void) { return armed.count; }
long faults_count_of(int kind) { return armed.of_kind[__builtin_ctz(kind)]; }
long faults_met(void) { return armed.met; }
const char *faults_where(void) { return where; }

static int below(const char *path) {
    return strncmp(path, armed.root, armed.length) == 0 && (path[armed.length] == '/' || path[armed.length] == 0);
}

static void path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
}

/* Where a path leads to that may be relative to an open folder; only its beginning matters. */
static void resolve(int folder, const char *path, char *full) {
    if (path[0] == '/') {
        snprintf(full, PATH_MAX, "%s", path);
        return;
    }
    char above[PATH_MAX] = "";
    if (folder != AT_FDCWD)
        path_of(folder, above);
    else if (!getcwd(above, sizeof above))
        above[0] = 0;
    snprintf(full, PATH_MAX, "%.2000s/%.2000s", above, path);
}

/* Count a call, and say whether it is one to fail. */
static int meets(int kind, const char *name, const char *path) {
    __sync_add_and_fetch(&armed.of_kind[__builtin_ctz(kind)], 1);
    long count = __sync_add_and_fetch(&armed.count, 1);
    int lasts = armed.how == EVER || armed.how == HALF;
    if (count != armed.nth && !(lasts && count > armed.nth))
        return 0;
    if (__sync_add_and_fetch(&armed.met, 1) == 1)
        snprintf(where, sizeof where, "%s %.4000s", name, path);
    if (armed.how == KILL)
        raise(SIGKILL);
    return 1;
}
static int fails_at(int kind, const char *name, int folder, const char *path) {
    if (!(armed.kinds & kind))
        return 0;
    int before = errno;
    char full[PATH_MAX];
    resolve(folder, path, full);
    int fails = below(full) && meets(kind, name, full);
    errno = fails ? armed.error : before;
    return fails;
}
static int fails_on(int kind, const char *name, int fd) {
    if (!(armed.kinds & kind))
        return 0;
    int before = errno;
    char full[PATH_MAX];
    path_of(fd, full);
    int fails = below(full) && meets(kind, name, full);
    errno = fails ? armed.error : before;
    return fails;
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) \
        real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

/* Opening to write, or to make a file; reading goes through. */
#define MODE(mode, flags) \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
        va_list more; \
        va_start(more, flags); \
        mode = va_arg(more, mode_t); \
        va_end(more); \
    }
#define WRITES(flags) (((flags) & O_ACCMODE) != O_RDONLY || ((flags) & O_CREAT))

#define OPENED(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        MODE(mode, flags) \
        return WRITES(flags) && fails_at(OPEN, #name, AT_FDCWD, path) ? -1 : real(path, flags, mode); \
    }
#define OPENED_AT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        REAL(name); \
        MODE(mode, flags) \
        return WRITES(flags) && fails_at(OPEN, #name, folder, path) ? -1 : real(folder, path, flags, mode); \
    }
OPENED(open)
OPENED(open64)
OPENED_AT(openat)
OPENED_AT(openat64)

FILE *fopen(const char *path, const char *mode) {
    REAL(fopen);
    return mode[0] != 'r' && fails_at(OPEN, "fopen", AT_FDCWD, path) ? NULL : real(path, mode);
}
FILE *fopen64(const char *path, const char *mode) {
    REAL(fopen64);
    return mode[0] != 'r' && fails_at(OPEN, "fopen64", AT_FDCWD, path) ? NULL : real(path, mode);
}

ssize_t write(int fd, const void *bytes, size_t size) {
    REAL(write);
    if (!fails_on(WRITE, "write", fd))
        return real(fd, bytes, size);
    if (armed.how == HALF && armed.met == 1 && size > 1)
        return real(fd, bytes, size / 2);
    return -1;
}
int fsync(int fd) {
    REAL(fsync);
    return fails_on(FSYNC, "fsync", fd) ? -1 : real(fd);
}
int fdatasync(int fd) {
    REAL(fdatasync);
    return fails_on(FSYNC, "fdatasync", fd) ? -1 : real(fd);
}
/* A file that was written to is closed whatever is said of it, as on Linux. */
int close(int fd) {
    REAL(close);
    int fails = armed.kinds & CLOSE && (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY && fails_on(CLOSE, "close", fd);
    int error = errno, closed = real(fd);
    if (fails)
        errno = error;
    return fails ? -1 : closed;
}

int rename(const char *old, const char *new) {
    REAL(rename);
    return fails_at(RENAME, "rename", AT_FDCWD, new) ? -1 : real(old, new);
}
int renameat(int from, const char *old, int to, const char *new) {
    REAL(renameat);
    return fails_at(RENAME, "renameat", to, new) ? -1 : real(from, old, to, new);
}
int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    REAL(renameat2);
    return fails_at(RENAME, "renameat2", to, new) ? -1 : real(from, old, to, new, flags);
}
int link(const char *old, const char *new) {
    REAL(link);
    return fails_at(LINK, "link", AT_FDCWD, new) ? -1 : real(old, new);
}
int linkat(int from, const char *old, int to, const char *new, int flags) {
    REAL(linkat);
    return fails_at(LINK, "linkat", to, new) ? -1 : real(from, old, to, new, flags);
}
int symlink(const char *old, const char *new) {
    REAL(symlink);
    return fails_at(LINK, "symlink", AT_FDCWD, new) ? -1 : real(old, new);
}
int symlinkat(const char *old, int to, const char *new) {
    REAL(symlinkat);
    return fails_at(LINK, "symlinkat", to, new) ? -1 : real(old, to, new);
}
int unlink(const char *path) {
    REAL(unlink);
    return fails_at(UNLINK, "unlink", AT_FDCWD, path) ? -1 : real(path);
}
int unlinkat(int folder, const char *path, int flags) {
    REAL(unlinkat);
    return fails_at(UNLINK, "unlinkat", folder, path) ? -1 : real(folder, path, flags);
}
int rmdir(const char *path) {
    REAL(rmdir);
    return fails_at(UNLINK, "rmdir", AT_FDCWD, path) ? -1 : real(path);
}
int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    return fails_at(MKDIR, "mkdir", AT_FDCWD, path) ? -1 : real(path, mode);
}
int mkdirat(int folder, const char *path, mode_t mode) {
    REAL(mkdirat);
    return fails_at(MKDIR, "mkdirat", folder, path) ? -1 : real(folder, path, mode);
}

/* Memory: of allocations large enough to be an array's or a buffer's. */
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

static int no_memory(const char *name, size_t size) {
    if (!(armed.kinds & ALLOC) || size < armed.least_bytes)
        return 0;
    int fails = meets(ALLOC, name, "");
    if (fails)
        errno = ENOMEM;
    return fails;
}
void *malloc(size_t size) { return no_memory("malloc", size) ? NULL : __libc_malloc(size); }
void *calloc(size_t many, size_t size) {
    return many && no_memory("calloc", many * size) ? NULL : __libc_calloc(many, size);
}
void *realloc(void *old, size_t size) { return no_memory("realloc", size) ? NULL : __libc_realloc(old, size); }
void *aligned_alloc(size_t align, size_t size) {
    return no_memory("aligned_alloc", size) ? NULL : __libc_memalign(align, size);
}
void *memalign(size_t align, size_t size) { return no_memory("memalign", size) ? NULL : __libc_memalign(align, size); }
int posix_memalign(void **place, size_t align, size_t size) {
    if (no_memory("posix_memalign", size))
        return ENOMEM;
    void *made = __libc_memalign(align, size);
    if (!made)
        return ENOMEM;
    *place = made;
    return 0;
}
