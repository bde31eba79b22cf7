/* What the page cache has of a block, or gets, checked piece by piece while the piece is in a core's own cache:
   pagecache.py in one call, without the interpreter's lock and without a second pass through memory. It waits for the
   device only where it writes, and decides nothing but what it does not send.

   gcc -O2 -Wall -Wextra -Werror -shared -fPIC -o .venv/lib/kvstrata-pagecache.so src/kvstrata/store/pagecache.c */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

/* zlib-ng's zng_crc32_z. */
typedef uint32_t checksum(uint32_t crc, const unsigned char *data, size_t size);

#define PIECE ((uint64_t)256 << 10)
/* Half of an L2 cache. A piece ends at a multiple of it in the file: the page cache makes one folio of it then, and a
   dozen where it lies a header's page further. */
#define WRITTEN ((uint64_t)512 << 10)
#define PAUSE_US 20

static uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* What kv_open found: st_mode, st_size, bytes read of the first page, whether the byte behind it is in the page cache. */
struct opened {
    int64_t mode, size, read, cached;
};

/* Opens a file and reads `size` bytes of its start into `page`, if it is a regular one. Returns its descriptor, or
   -errno. One call instead of four: each would be another wait for the interpreter's lock. */
int kv_open(const char *path, int flags, unsigned char *page, uint64_t size, struct opened *found) {
    struct stat status;
    int fd;
    do fd = open(path, flags);
    while (fd < 0 && errno == EINTR);
    if (fd < 0) return -errno;
    ssize_t got = fstat(fd, &status);
    if (!got && S_ISREG(status.st_mode)) {
        unsigned char next;
        struct iovec behind = {&next, 1};
        do got = pread(fd, page, size, 0);
        while (got < 0 && errno == EINTR);
        found->cached = !(flags & O_DIRECT) && preadv2(fd, &behind, 1, (off_t)size, RWF_NOWAIT) == 1;
    }
    if (got < 0) {
        int error = errno;
        close(fd);
        return -error;
    }
    found->mode = status.st_mode, found->size = status.st_size, found->read = got;
    return fd;
}

/* Reads `size` bytes of `fd` from `start` on into `target`, as far as no device has to be asked. sums: of each `step`
   bytes of what came; the last may be cut short. Returns how many bytes came, or -errno where the first read failed. */
int64_t kv_read_cached(int fd, unsigned char *target, uint64_t size, uint64_t start, uint64_t step, checksum *crc32,
                       uint32_t *sums) {
    uint64_t done = 0;
    while (done < size) {
        uint64_t inside = done % step;
        struct iovec piece = {target + done, smaller(smaller(PIECE, size - done), step - inside)};
        ssize_t got = preadv2(fd, &piece, 1, (off_t)(start + done), RWF_NOWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && !done) return -errno;
        if (got <= 0) break;
        sums[done / step] = crc32(inside ? sums[done / step] : 0, piece.iov_base, (size_t)got);
        done += (uint64_t)got;
        if ((size_t)got < piece.iov_len) break;
    }
    return (int64_t)done;
}

/* 0, or errno. */
static int send_all(int sock, struct iovec *parts, size_t count) {
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
    while (message.msg_iovlen) {
        ssize_t sent = sendmsg(sock, &message, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0) return errno;
        while (message.msg_iovlen && (size_t)sent >= message.msg_iov->iov_len) {
            sent -= (ssize_t)message.msg_iov->iov_len;
            message.msg_iov++, message.msg_iovlen--;
        }
        if (message.msg_iovlen) {
            message.msg_iov->iov_base = (unsigned char *)message.msg_iov->iov_base + sent;
            message.msg_iov->iov_len -= (size_t)sent;
        }
    }
    return 0;
}

/* Sends `head`, `size` bytes of `fd` from `start` on, and `tail`. Each `step` of them goes through `room`, which has
   room for one, and leaves once its checksum was found to be its one of `sums`; the head leaves with the first. Ends
   before what is not all in the page cache or not right; closes `fd` if all was sent. Returns how many of the `size`
   bytes were sent, or -errno of the socket. */
int64_t kv_send_cached(int fd, int sock, unsigned char *room, uint64_t size, uint64_t start, uint64_t step,
                       checksum *crc32, const uint32_t *sums, char *head, size_t head_size, char *tail,
                       size_t tail_size) {
    uint64_t done = 0;
    while (done < size) {
        struct iovec piece = {room, smaller(step, size - done)};
        ssize_t got = preadv2(fd, &piece, 1, (off_t)(start + done), RWF_NOWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 || (size_t)got != piece.iov_len || crc32(0, room, piece.iov_len) != sums[done / step]) break;
        struct iovec parts[] = {{head, done ? 0 : head_size}, piece, {tail, done + (size_t)got < size ? 0 : tail_size}};
        int error = send_all(sock, parts, 3);
        if (error) return -error;
        done += (uint64_t)got;
    }
    if (done == size) close(fd);
    return (int64_t)done;
}

/* Whose lent memory is: the lender's and nobody touches it, being touched, taken back for good. */
enum { LENT, TOUCHED, TAKEN };

static int became(uint32_t *state, uint32_t from, uint32_t to) {
    return __atomic_compare_exchange_n(state, &from, to, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

/* Returns when a kv_write_checked of this `state` does not touch its source any more, however long it still takes. Waits
   for one piece's checksum at most, never for the device. May be called again. */
void kv_take_back(uint32_t *state) {
    while (!became(state, LENT, TAKEN) && !became(state, TAKEN, TAKEN)) usleep(PAUSE_US);
}

/* Writes `size` bytes of `source` to `fd` from `start` on. sums: of each `step` bytes of it; the last may be cut short.
   `state`: LENT. `source` is touched here while that is TOUCHED; else by the kernel alone, which says EFAULT where it is
   not there any more. 0, or errno; ECANCELED: it was taken back. */
int kv_write_checked(int fd, const unsigned char *source, uint64_t size, uint64_t start, uint64_t step, checksum *crc32,
                     uint32_t *sums, uint32_t *state) {
    for (uint64_t done = 0, summed = 0; done < size;) {
        if (!became(state, LENT, TOUCHED)) return ECANCELED;
        for (uint64_t stop = smaller(size, done + WRITTEN - (start + done) % WRITTEN); summed < stop;) {
            uint64_t inside = summed % step, part = smaller(stop - summed, step - inside);
            sums[summed / step] = crc32(inside ? sums[summed / step] : 0, source + summed, part);
            summed += part;
        }
        __atomic_store_n(state, LENT, __ATOMIC_SEQ_CST);
        ssize_t written = pwrite(fd, source + done, summed - done, (off_t)(start + done));
        if (written < 0 && errno != EINTR) return errno;
        if (!written) return ENOSPC;
        if (written > 0) done += (uint64_t)written;
    }
    return 0;
}
