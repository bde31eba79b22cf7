/* A disk that fails on command: LD_PRELOAD it. KV_FAULTS names a file of two bytes, for reads and for writes of files
   below KV_FAULT_ROOT: '.' works, 'e' EIO, 'n' ENOSPC, 's' stuck until the byte changes. A stuck disk has nothing in the
   page cache, so a read that must not block (RWF_NOWAIT) says EAGAIN. */
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
        int fd = open(getenv("KV_FAULTS"), O_RDONLY | O_CLOEXEC);
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
    return 0;
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
WRAP(pwrite, 1, 0, ssize_t, (int fd, const void *b, size_t n, off_t o), (fd, b, n, o))
WRAP(pwrite64, 1, 0, ssize_t, (int fd, const void *b, size_t n, off64_t o), (fd, b, n, o))
WRAP(pwritev, 1, 0, ssize_t, (int fd, const struct iovec *v, int n, off_t o), (fd, v, n, o))
WRAP(pwritev64, 1, 0, ssize_t, (int fd, const struct iovec *v, int n, off64_t o), (fd, v, n, o))
WRAP(pwritev2, 1, 0, ssize_t, (int fd, const struct iovec *v, int n, off_t o, int f), (fd, v, n, o, f))
WRAP(pwritev64v2, 1, 0, ssize_t, (int fd, const struct iovec *v, int n, off64_t o, int f), (fd, v, n, o, f))
