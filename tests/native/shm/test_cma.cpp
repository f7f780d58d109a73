// CMA reads of mapped and unmapped memory, of the wrong process and of a dead one.
#include "memory/cma.h"

#include <sys/mman.h>
#include <sys/wait.h>

#include <cerrno>
#include <cstring>

#include "world.h"

using namespace ringcomm;

namespace {

// A process that runs `body` and then lives until end().
class Child {
public:
    template <class Body>
    explicit Child(Body body) {
        int ready[2];
        if (pipe(hold_) || pipe(ready)) _exit(1);
        if ((pid = fork()) == 0) {
            close(hold_[1]);
            body();
            close(ready[0]);
            close(ready[1]);
            char end;
            (void)!read(hold_[0], &end, 1);
            _exit(0);
        }
        close(hold_[0]);
        close(ready[1]);
        char end;
        (void)!read(ready[0], &end, 1);  // until its end is closed there
        close(ready[0]);
    }
    void end() {
        close(hold_[1]);
        waitpid(pid, nullptr, 0);
    }

    pid_t pid;

private:
    int hold_[2];
};

}  // namespace

int main() {
    constexpr size_t BYTES = 3 * PAGE;
    int fd;
    DO(rc_file_create(&fd));
    const auto file = std::make_shared<File>(fd);
    const auto arena = std::make_shared<Arena>(file, 0, 3, 64 << 10);
    file->extend_to(arena->layout.arena_bytes(3));
    auto memory =
        static_cast<std::byte*>(mmap(nullptr, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));

    // Rank 1 is another process, with other contents at the same address and the last page unmapped; rank 2 has the pid
    // of another rank.
    const int64_t own = getpid();
    const int64_t no_pids[]{0, 0, 0};
    Cma cma_of_child(arena, no_pids);
    Child child([&] {
        memset(memory, 7, BYTES);
        munmap(memory + BYTES - PAGE, PAGE);
        cma_of_child.publish_secret(arena->rank(1));
    });
    const int64_t pids[]{own, child.pid, own};
    Cma cma(arena, pids);
    cma.publish_secret(arena->rank(0));
    arena->rank(2).secret.store(4711);
    arena->rank(2).secret_address.store(reinterpret_cast<uintptr_t>(memory));

    CHECK(cma.available(0) && cma.same_process(0));
    CHECK(cma.error(1) == 0 && !cma.same_process(1));
    CHECK(cma.error(2) == ESRCH && !cma.same_process(2));

    std::vector<std::byte> found(BYTES);
    CHECK(cma.read(1, found.data(), memory + 5, 2 * PAGE - 5));
    for (size_t i = 0; i < 2 * PAGE - 5; ++i) CHECK(found[i] == std::byte{7});
    CHECK(found[2 * PAGE - 5] == std::byte{0});
    CHECK(cma.read(1, found.data(), memory, 0));
    CHECK(!cma.read(1, found.data(), memory + PAGE, 2 * PAGE) && errno == EFAULT);
    CHECK(cma.read(0, found.data(), memory, BYTES) && found[0] == std::byte{0});

    child.end();
    CHECK(cma.available(1));  // probed while the process lived
    CHECK(!cma.read(1, found.data(), memory, PAGE) && errno == ESRCH);
    printf("test_cma: %d failures\n", failures.load());
    return failures != 0;
}
