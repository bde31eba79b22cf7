/* What the page cache has of a block, checked piece by piece while the piece is in a core's own cache: pagecache.py in one
   call, without the interpreter's lock and without a second pass through memory. It never waits for the device and
   decides nothing.

   gcc -O2 -Wall -Wextra -Werror -shared -fPIC -o .venv/lib/kvstrata-pagecache.so src/kvstrata/store/pagecache.c */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
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
