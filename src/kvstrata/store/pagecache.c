/* What the page cache has of a block, checked piece by piece while the piece is in a core's own cache: pagecache.py in one
   call, without the interpreter's lock and without a second pass through memory. It never waits for the device and
   decides nothing but what it does not send.

   gcc -O2 -Wall -Wextra -Werror -shared -fPIC -o .venv/lib/kvstrata-pagecache.so src/kvstrata/store/pagecache.c */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/uio.h>

/* zlib-ng's zng_crc32_z. */
typedef uint32_t checksum(uint32_t crc, const unsigned char *data, size_t size);

#define PIECE ((uint64_t)256 << 10)

static uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

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
   before what is not all in the page cache or not right. Returns how many of the `size` bytes were sent, or -errno of
   the socket. */
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
    return (int64_t)done;
}
