/* A disk that fails on command: LD_PRELOAD it. KV_FAULTS names a file of two bytes, for reads and for writes of files
   below KV_FAULT_ROOT: '.' works, 'e' EIO, 'n' ENOSPC, 's' stuck until the byte changes. A stuck disk has nothing in the
   page cache, so a read that must not block (RWF_NOWAIT) says EAGAIN. For writes also 'i': every other call is
   interrupted, the rest are cut short; 'm': ENOSPC behind the first MiB, up to which the disk takes what it can. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

static volatile const char *faults(void) {
    static volatile const char *state;
    if (!state) {
        const char *name = getenv("KV_FAULTS");
        if (!name) return "..";  // a child with an environment of its own
        int fd = open(name, O_RDONLY | O_CLOEXEC);
        state = mmap(NULL, 2, PROT_READ, MAP_SHARED, fd, 0);
        close(fd);
    }
    return state;
}

static int concerned(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    const char *root = getenv("KV_FAULT_ROOT");
    return strncmp(path, root, strlen(root)) == 0;
}

/* 0: go on, else the call fails with errno set. */
static int fails(int fd, int which, int nowait) {
    volatile const char *state = faults();
    if (state[which] == '.' || !concerned(fd)) return 0;
    if (state[which] == 's') {
        if (nowait) return errno = EAGAIN;
        while (state[which] == 's') usleep(2000);
    }
    if (state[which] == 'e') return errno = EIO;
    if (state[which] == 'n') return errno = ENOSPC;
    static _Thread_local unsigned calls;
    if (state[which] == 'i' && ++calls % 2) return errno = EINTR;
    return 0;
}

/* A write of `size` bytes in all, of which `data` is the first part: 0 if the disk takes all of them, else what became of
   that part. */
static ssize_t cut_short(int fd, const void *data, size_t part, size_t size, off64_t start) {
    char how = faults()[1];
    size_t room = size;
    if (how == 'i' && size > 6) room = size * 3 / 7;
    if (how == 'm') room = start < 1 << 20 ? (size_t)((1 << 20) - start) : 0;
    if (room >= size || !concerned(fd)) return 0;
    if (!room) return errno = ENOSPC, -1;
    static ssize_t (*real)(int, const void *, size_t, off64_t);
    if (!real) real = dlsym(RTLD_NEXT, "pwrite64");
    return real(fd, data, room < part ? room : part, start);
}

#define WRAP(name, which, nowait, result, parameters, arguments)                                                        \
    result name parameters {                                                                                            \
        static result(*real) parameters;                                                                                \
        if (!real) real = dlsym(RTLD_NEXT, #name);                                                                      \
        return fails(fd, which, nowait) ? -1 : real arguments;                                                          \
    }

WRAP(pread, 0, 0, ssize_t, (int fd, void *b, size_t n, off_t o), (fd, b, n, o))
WRAP(pread64, 0, 0, ssize_t, (int fd, void *b, size_t n, off64_t o), (fd, b, n, o))
WRAP(preadv, 0, 0, ssize_t, (int fd, const struct iovec *v, int n, off_t o), (fd, v, n, o))
WRAP(preadv64, 0, 0, ssize_t, (int fd, const struct iovec *v, int n, off64_t o), (fd, v, n, o))
WRAP(preadv2, 0, f & 8, ssize_t, (int fd, const struct iovec *v, int n, off_t o, int f), (fd, v, n, o, f))
WRAP(preadv64v2, 0, f & 8, ssize_t, (int fd, const struct iovec *v, int n, off64_t o, int f), (fd, v, n, o, f))

#define WRAP_WRITE(name, parameters, arguments, data, part, size)                                                       \
    ssize_t name parameters {                                                                                           \
        static ssize_t(*real) parameters;                                                                               \
        if (!real) real = dlsym(RTLD_NEXT, #name);                                                                      \
        if (fails(fd, 1, 0)) return -1;                                                                                 \
        ssize_t done = cut_short(fd, data, part, size, o);                                                              \
        return done ? done : real arguments;                                                                            \
    }

WRAP_WRITE(pwrite, (int fd, const void *b, size_t n, off_t o), (fd, b, n, o), b, n, n)
WRAP_WRITE(pwrite64, (int fd, const void *b, size_t n, off64_t o), (fd, b, n, o), b, n, n)

static size_t all(const struct iovec *v, int n) {
    size_t size = 0;
    while (n--) size += v++->iov_len;
    return size;
}

#define WRAP_WRITEV(name, parameters, arguments) \
    WRAP_WRITE(name, parameters, arguments, v->iov_base, v->iov_len, all(v, n))

WRAP_WRITEV(pwritev, (int fd, const struct iovec *v, int n, off_t o), (fd, v, n, o))
WRAP_WRITEV(pwritev64, (int fd, const struct iovec *v, int n, off64_t o), (fd, v, n, o))
WRAP_WRITEV(pwritev2, (int fd, const struct iovec *v, int n, off_t o, int f), (fd, v, n, o, f))
WRAP_WRITEV(pwritev64v2, (int fd, const struct iovec *v, int n, off64_t o, int f), (fd, v, n, o, f))
