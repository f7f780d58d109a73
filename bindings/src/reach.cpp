#include "reach.h"

#include <sys/random.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>

#include "errors.h"

namespace ringcomm {

namespace {

constexpr int NOT_TRIED = -1;

}  // namespace

Reach::Reach(std::shared_ptr<Arena> arena, const int64_t* pids)
    : arena_(std::move(arena)),
      pids_(pids, pids + arena_->size),
      own_pid_(getpid()),
      obstacles_(new std::atomic<int>[arena_->size]) {
    for (int r = 0; r < arena_->size; ++r) obstacles_[r].store(NOT_TRIED);
    if (getrandom(&secret_, sizeof secret_, 0) != sizeof secret_) throw_system("getrandom");
}

void Reach::show_secret(RankHeader& own) {
    own.secret.store(secret_);
    own.secret_address.store(reinterpret_cast<uintptr_t>(&secret_));
}

int Reach::obstacle(int r) {
    int known = obstacles_[r].load(std::memory_order_relaxed);
    if (known == NOT_TRIED) obstacles_[r].store(known = attempt(r), std::memory_order_relaxed);
    return known;
}

int Reach::attempt(int r) const {
    const RankHeader& theirs = arena_->rank(r);
    uint64_t found;
    if (!read(r, &found, reinterpret_cast<const void*>(theirs.secret_address.load()), sizeof found)) return errno;
    return found == theirs.secret.load() ? 0 : ESRCH;  // the number names another process here
}

bool Reach::read(int r, void* target, const void* address, size_t bytes) const {
    auto to = static_cast<std::byte*>(target);
    auto from = static_cast<const std::byte*>(address);
    while (bytes) {
        const iovec here{to, bytes}, there{const_cast<std::byte*>(from), bytes};
        const ssize_t done = process_vm_readv(static_cast<pid_t>(pids_[r]), &here, 1, &there, 1, 0);
        if (done <= 0) {
            if (done == 0) errno = EFAULT;
            return false;
        }
        to += done;  // less than all: what follows is tried by itself, and says why
        from += done;
        bytes -= done;
    }
    return true;
}

}  // namespace ringcomm
