/* Sees every file operation below one folder, also SQLite's, torch's and safetensors': preload it (LD_PRELOAD).
 *
 * Its functions `fo_*` are called by scripts/file_operations.py. It can make operations fail, kill the process before
 * one, and record those that change something, with their data. Linux and glibc only; not for production.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

/* The order is that of OPERATIONS in file_operations.py. */
enum { OPEN, CREATE, READ, WRITE, SYNC, RENAME, UNLINK, MKDIR, RMDIR, TRUNCATE, LOCK, LIST, STAT };

#define MAX_FDS 4096
#define MAX_PATH 4096

static struct { char *path; dev_t dev; ino_t ino; } open_files[MAX_FDS];
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER; /* of open_files, for moments only */
static pthread_mutex_t order_lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP; /* changes happen one at a time */
static char root[MAX_PATH];
static size_t root_length;
static int log_fd = -1;
static long num_seen, fail_at;
static int fail_errno, fail_for_ever;
static unsigned fail_mask;

#define REAL(name) ((__typeof__(&name))real_of(#name))

static void *real_of(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (!found) abort();
    return found;
}

/* Control */

void fo_watch(const char *folder) {
    snprintf(root, sizeof root, "%s", folder ? folder : "");
    root_length = strlen(root);
}

void fo_fail(long at, int number, int for_ever, unsigned mask) {
    num_seen = 0;
    fail_errno = number, fail_for_ever = for_ever, fail_mask = mask;
    fail_at = at;
}

void fo_record(int fd) { log_fd = fd; }
long fo_num_seen(void) { return num_seen; }

/* Which file */

static const char *below(const char *path) {
    if (!root_length || !path || strncmp(path, root, root_length)) return NULL;
    if (path[root_length] == '/') return path + root_length + 1;
    return path[root_length] ? NULL : "";
}

/* The path of a descriptor, copied to `buffer`; NULL if it is not below the root. */
static const char *path_of(int fd, char *buffer) {
    struct stat now;
    if (!root_length || fd < 0 || fd >= MAX_FDS) return NULL;
    pthread_mutex_lock(&table_lock);
    const char *known = open_files[fd].path;
    if (known) snprintf(buffer, MAX_PATH, "%s", known);
    dev_t dev = open_files[fd].dev;
    ino_t ino = open_files[fd].ino;
    pthread_mutex_unlock(&table_lock);
    if (!known) return NULL;
    /* Not all ways to close and open a descriptor are seen. */
    if (REAL(fstat)(fd, &now) || now.st_dev != dev || now.st_ino != ino) return NULL;
    return below(buffer) ? buffer : NULL;
}

static const char *path_at(int dir_fd, const char *path, char *buffer) {
    int fd;
    char folder[MAX_PATH];
    if (!path) return NULL;
    if (sscanf(path, "/dev/fd/%d", &fd) == 1) return path_of(fd, buffer);
    if (path[0] == '/' || dir_fd == AT_FDCWD) return below(path) ? path : NULL;
    if (!path_of(dir_fd, folder)) return NULL;
    snprintf(buffer, MAX_PATH, "%.*s/%s", MAX_PATH - 300, folder, path);
    return buffer;
}

static void remember(int fd, const char *path) {
    struct stat status;
    if (fd < 0 || fd >= MAX_FDS) return;
    int known = path && !REAL(fstat)(fd, &status);
    pthread_mutex_lock(&table_lock);
    free(open_files[fd].path);
    open_files[fd].path = known ? strdup(path) : NULL;
    if (known) open_files[fd].dev = status.st_dev, open_files[fd].ino = status.st_ino;
    pthread_mutex_unlock(&table_lock);
}

/* What happens to an operation */

/* The error that it must meet, or 0. Instead of the error 0 the process is killed. */
static int refused(int operation, const char *path) {
    if (!path || !fail_at || !(fail_mask >> operation & 1)) return 0;
    long now = __atomic_add_fetch(&num_seen, 1, __ATOMIC_SEQ_CST);
    if (fail_for_ever ? now < fail_at : now != fail_at) return 0;
    if (!fail_errno) raise(SIGKILL);
    return fail_errno;
}

struct change { uint32_t operation, path_length, path_2_length, reserved; uint64_t ino; int64_t offset; uint64_t length; };

static void put(const void *data, size_t length) {
    ssize_t (*write_)(int, const void *, size_t) = REAL(write);
    while (length) {
        ssize_t written = write_(log_fd, data, length);
        if (written <= 0) abort();
        data = (const char *)data + written, length -= written;
    }
}

/* After a change that succeeded: record it. The caller holds order_lock. */
static void done(int operation, const char *path, const char *path_2, ino_t ino, int64_t offset, const struct iovec *data, int num_data, size_t length) {
    const char *name = path ? below(path) : NULL, *name_2 = path_2 ? below(path_2) : "";
    if (!name || log_fd < 0) return;
    if (!name_2) name_2 = "";
    struct change change = {operation, strlen(name), strlen(name_2), 0, ino, offset, length};
    put(&change, sizeof change);
    put(name, change.path_length);
    put(name_2, change.path_2_length);
    for (int i = 0; data && i < num_data && length; i++) {
        size_t part = data[i].iov_len < length ? data[i].iov_len : length;
        put(data[i].iov_base, part);
        length -= part;
    }
}

/* Opening */

static int open_any(int dir_fd, const char *path, int flags, mode_t mode) {
    char buffer[MAX_PATH];
    const char *full = path_at(dir_fd, path, buffer);
    if (!full) {
        int other = REAL(openat)(dir_fd, path, flags, mode);
        if (other >= 0) remember(other, NULL);
        return other;
    }
    int error = refused(flags & O_CREAT ? CREATE : OPEN, full);
    if (error) return errno = error, -1;
    pthread_mutex_lock(&order_lock);
    struct stat status;
    int fresh = flags & O_CREAT && REAL(lstat)(full, &status);
    int fd = REAL(openat)(dir_fd, path, flags, mode), saved = errno;
    if (fd >= 0) {
        remember(fd, full);
        if (!REAL(fstat)(fd, &status)) {
            if (fresh) done(CREATE, full, NULL, status.st_ino, 0, NULL, 0, 0);
            else if (flags & O_TRUNC) done(TRUNCATE, full, NULL, status.st_ino, 0, NULL, 0, 0);
        }
    }
    pthread_mutex_unlock(&order_lock);
    return errno = saved, fd;
}

#define OPEN_LIKE(name)                                        \
    int name(const char *path, int flags, ...) {               \
        mode_t mode = 0;                                       \
        if (flags & (O_CREAT | __O_TMPFILE)) {                 \
            va_list more;                                      \
            va_start(more, flags);                             \
            mode = va_arg(more, mode_t);                       \
            va_end(more);                                      \
        }                                                      \
        return open_any(AT_FDCWD, path, flags, mode);          \
    }
#define OPENAT_LIKE(name)                                      \
    int name(int dir_fd, const char *path, int flags, ...) {   \
        mode_t mode = 0;                                       \
        if (flags & (O_CREAT | __O_TMPFILE)) {                 \
            va_list more;                                      \
            va_start(more, flags);                             \
            mode = va_arg(more, mode_t);                       \
            va_end(more);                                      \
        }                                                      \
        return open_any(dir_fd, path, flags, mode);            \
    }
OPEN_LIKE(open)
OPEN_LIKE(open64)
OPENAT_LIKE(openat)
OPENAT_LIKE(openat64)

int close(int fd) {
    if (fd >= 0 && fd < MAX_FDS && open_files[fd].path) remember(fd, NULL);
    return REAL(close)(fd);
}

DIR *opendir(const char *path) {
    int error = refused(LIST, below(path) ? path : NULL);
    if (error) return errno = error, NULL;
    return REAL(opendir)(path);
}

DIR *fdopendir(int fd) {
    char buffer[MAX_PATH];
    int error = refused(LIST, path_of(fd, buffer));
    if (error) return errno = error, NULL;
    return REAL(fdopendir)(fd);
}

/* Reading */

#define READ_LIKE(name, arguments, call)                       \
    ssize_t name arguments {                                   \
        char buffer[MAX_PATH];                                 \
        int error = refused(READ, path_of(fd, buffer));        \
        if (error) return errno = error, -1;                   \
        return REAL(name) call;                                \
    }
READ_LIKE(read, (int fd, void *data, size_t length), (fd, data, length))
READ_LIKE(pread, (int fd, void *data, size_t length, off_t offset), (fd, data, length, offset))
READ_LIKE(pread64, (int fd, void *data, size_t length, off64_t offset), (fd, data, length, offset))

#define STAT_LIKE(name, arguments, call, path)                 \
    int name arguments {                                       \
        char buffer[MAX_PATH];                                 \
        (void)buffer;                                          \
        int error = refused(STAT, path);                       \
        if (error) return errno = error, -1;                   \
        return REAL(name) call;                                \
    }
#define BELOW(path) (below(path) ? path : NULL)
STAT_LIKE(stat, (const char *path, struct stat *status), (path, status), BELOW(path))
STAT_LIKE(stat64, (const char *path, struct stat64 *status), (path, status), BELOW(path))
STAT_LIKE(lstat, (const char *path, struct stat *status), (path, status), BELOW(path))
STAT_LIKE(lstat64, (const char *path, struct stat64 *status), (path, status), BELOW(path))
STAT_LIKE(fstat, (int fd, struct stat *status), (fd, status), path_of(fd, buffer))
STAT_LIKE(fstat64, (int fd, struct stat64 *status), (fd, status), path_of(fd, buffer))
STAT_LIKE(fstatat, (int fd, const char *path, struct stat *status, int flags), (fd, path, status, flags), path_at(fd, path, buffer))
STAT_LIKE(fstatat64, (int fd, const char *path, struct stat64 *status, int flags), (fd, path, status, flags), path_at(fd, path, buffer))
STAT_LIKE(statx, (int fd, const char *path, int flags, unsigned mask, struct statx *status), (fd, path, flags, mask, status), path_at(fd, path, buffer))
STAT_LIKE(access, (const char *path, int mode), (path, mode), BELOW(path))

/* Locks */

int flock(int fd, int operation) {
    char buffer[MAX_PATH];
    /* The kernel does not refuse to release. */
    int error = operation & LOCK_UN ? 0 : refused(LOCK, path_of(fd, buffer));
    if (error) return errno = error, -1;
    return REAL(flock)(fd, operation);
}

#define FCNTL_LIKE(name)                                                                                     \
    int name(int fd, int command, ...) {                                                                     \
        va_list more;                                                                                        \
        va_start(more, command);                                                                             \
        void *argument = va_arg(more, void *);                                                               \
        va_end(more);                                                                                        \
        char buffer[MAX_PATH];                                                                               \
        int locks = (command == F_SETLK || command == F_SETLKW) && ((struct flock *)argument)->l_type != F_UNLCK; \
        int error = locks ? refused(LOCK, path_of(fd, buffer)) : 0;                                          \
        if (error) return errno = error, -1;                                                                 \
        return REAL(name)(fd, command, argument);                                                            \
    }
FCNTL_LIKE(fcntl)
FCNTL_LIKE(fcntl64)

/* Changing */

static ssize_t write_any(int fd, const struct iovec *data, int num_data, int64_t offset) {
    char buffer[MAX_PATH];
    const char *path = path_of(fd, buffer);
    ssize_t (*writev_)(int, const struct iovec *, int) = REAL(writev);
    ssize_t (*pwrite_)(int, const void *, size_t, off64_t) = REAL(pwrite64);
    if (!path) return offset < 0 ? writev_(fd, data, num_data) : pwrite_(fd, data[0].iov_base, data[0].iov_len, offset);
    int error = refused(WRITE, path);
    pthread_mutex_lock(&order_lock);
    int64_t start = offset < 0 ? lseek64(fd, 0, fcntl(fd, F_GETFL) & O_APPEND ? SEEK_END : SEEK_CUR) : offset;
    ssize_t written;
    if (error) {
        /* As a disk that fills up, or fails, in the middle of it. */
        ssize_t half = pwrite_(fd, data[0].iov_base, data[0].iov_len / 2, start);
        (void)half;
        written = -1;
    } else {
        written = offset < 0 ? writev_(fd, data, num_data) : pwrite_(fd, data[0].iov_base, data[0].iov_len, offset);
        error = errno;
    }
    struct stat status;
    if (written > 0 && !REAL(fstat)(fd, &status)) done(WRITE, path, NULL, status.st_ino, start, data, num_data, written);
    pthread_mutex_unlock(&order_lock);
    return errno = error, written;
}

ssize_t write(int fd, const void *data, size_t length) {
    struct iovec one = {(void *)data, length};
    return write_any(fd, &one, 1, -1);
}
ssize_t writev(int fd, const struct iovec *data, int num_data) { return write_any(fd, data, num_data, -1); }
ssize_t pwrite(int fd, const void *data, size_t length, off_t offset) {
    struct iovec one = {(void *)data, length};
    return write_any(fd, &one, 1, offset);
}
ssize_t pwrite64(int fd, const void *data, size_t length, off64_t offset) { return pwrite(fd, data, length, offset); }

#define FD_CHANGE(name, operation, arguments, call, offset)                            \
    int name arguments {                                                               \
        char buffer[MAX_PATH];                                                         \
        struct stat status;                                                            \
        const char *path = path_of(fd, buffer);                                        \
        int error = refused(operation, path);                                          \
        if (error) return errno = error, -1;                                           \
        pthread_mutex_lock(&order_lock);                                               \
        int result = REAL(name) call, saved = errno;                                   \
        if (path && !result && !REAL(fstat)(fd, &status))                              \
            done(operation, path, NULL, status.st_ino, offset, NULL, 0, 0);            \
        pthread_mutex_unlock(&order_lock);                                             \
        return errno = saved, result;                                                  \
    }
FD_CHANGE(fsync, SYNC, (int fd), (fd), 0)
FD_CHANGE(fdatasync, SYNC, (int fd), (fd), 0)
FD_CHANGE(ftruncate, TRUNCATE, (int fd, off_t length), (fd, length), length)
FD_CHANGE(ftruncate64, TRUNCATE, (int fd, off64_t length), (fd, length), length)

#define PATH_CHANGE(name, operation, arguments, call, path, path_2)                    \
    int name arguments {                                                               \
        char buffer[MAX_PATH], buffer_2[MAX_PATH];                                     \
        (void)buffer, (void)buffer_2;                                                  \
        const char *full = path, *full_2 = path_2;                                     \
        int error = refused(operation, full);                                          \
        if (error) return errno = error, -1;                                           \
        pthread_mutex_lock(&order_lock);                                               \
        int result = REAL(name) call, saved = errno;                                   \
        if (!result) done(operation, full, full_2, 0, 0, NULL, 0, 0);                  \
        pthread_mutex_unlock(&order_lock);                                             \
        return errno = saved, result;                                                  \
    }
PATH_CHANGE(rename, RENAME, (const char *from, const char *to), (from, to), BELOW(from), to)
PATH_CHANGE(renameat, RENAME, (int from_fd, const char *from, int to_fd, const char *to), (from_fd, from, to_fd, to), path_at(from_fd, from, buffer), path_at(to_fd, to, buffer_2))
PATH_CHANGE(unlink, UNLINK, (const char *path), (path), BELOW(path), NULL)
PATH_CHANGE(unlinkat, flags & AT_REMOVEDIR ? RMDIR : UNLINK, (int fd, const char *path, int flags), (fd, path, flags), path_at(fd, path, buffer), NULL)
PATH_CHANGE(mkdir, MKDIR, (const char *path, mode_t mode), (path, mode), BELOW(path), NULL)
PATH_CHANGE(mkdirat, MKDIR, (int fd, const char *path, mode_t mode), (fd, path, mode), path_at(fd, path, buffer), NULL)
PATH_CHANGE(rmdir, RMDIR, (const char *path), (path), BELOW(path), NULL)
