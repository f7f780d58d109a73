// The heap of a rank: blocks that threads allocate and free at once keep their contents, peers see them where they lie,
// and what is free goes back to the machine.
#include "memory/heap.h"

#include <sys/stat.h>
#include <sys/wait.h>

#include <cstring>
#include <random>

#include "world.h"

using namespace ringcomm;

namespace {

constexpr size_t HEAP = 1 << 30, MIB = 1 << 20, GRANTED = size_t{1} << 40;
constexpr int RANKS = 2;

struct Memory {
    Memory() {
        fd = create_file();
        file = std::make_shared<File>(fd);
        file->extend_to(RANKS * HEAP);
    }
    ~Memory() { close(fd); }

    size_t allocated() const {
        struct stat status;
        if (fstat(fd, &status)) _exit(1);
        return status.st_blocks * 512;
    }

    int fd;
    std::shared_ptr<File> file;
};

bool holds(const std::byte* block, size_t bytes, int value) {
    for (size_t i = 0; i < bytes; ++i) {
        if (block[i] != std::byte(value)) return false;
    }
    return true;
}

// Each thread fills its blocks, has them read through the mapping of another rank, and frees them in any order.
void allocate_at_once(const Memory& memory) {
    Heaps mine(memory.file, 0, HEAP, 0, RANKS), theirs(memory.file, 0, HEAP, 1, RANKS);
    const auto heap = mine.open();
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
        threads.emplace_back([&, thread] {
            struct Block {
                std::byte* begin;
                size_t bytes;
                int value;
            };
            std::vector<Block> blocks;
            std::mt19937 draw(thread);
            for (int turn = 0; turn < 300; ++turn) {
                const size_t bytes = 1 + draw() % (turn % 10 ? 20'000 : 300'000);
                const bool zeroed = draw() % 2;
                std::byte* begin = heap->allocate(bytes, zeroed, GRANTED);
                CHECK(begin && heap->contains(begin) && heap->contains(begin + bytes - 1));
                if (zeroed) CHECK(holds(begin, bytes, 0));
                blocks.push_back({begin, bytes, int(draw() % 256)});
                memset(begin, blocks.back().value, bytes);
                if (draw() % 4 == 0) {
                    Block& last = blocks.back();
                    last.bytes -= draw() % last.bytes;
                    CHECK(heap->resize(last.begin, last.bytes));
                }
                while (blocks.size() > draw() % 10) {
                    std::swap(blocks[draw() % blocks.size()], blocks.back());
                    const Block block = blocks.back();
                    blocks.pop_back();
                    const uint64_t location = mine.locate(block.begin, block.bytes);
                    CHECK(location == heap->offset(block.begin));
                    CHECK(holds(theirs.resolve(location).get(), block.bytes, block.value));
                    CHECK(holds(block.begin, block.bytes, block.value));
                    heap->free(block.begin);
                }
                if (turn % 50 == 0) heap->give_back();
            }
            for (const Block& block : blocks) heap->free(block.begin);
        });
    }
    for (auto& thread : threads) thread.join();
    heap->give_back();
    CHECK(memory.allocated() <= PAGE);  // the end of the file
}

void take_no_more_than_granted(const Memory& memory) {
    Heap heap(memory.file, HEAP, HEAP);
    CHECK(!heap.allocate(MIB, false));
    std::byte* const first = heap.allocate(MIB, false, MIB + PAGE);
    CHECK(first);
    CHECK(!heap.allocate(MIB, false));
    std::byte* const second = heap.allocate(PAGE, false);
    CHECK(second);
    heap.free(first);
    CHECK(heap.allocate(MIB - 1, true) == first);  // kept
    CHECK(!heap.allocate(HEAP + 1, false, GRANTED));
    CHECK(!heap.allocate(SIZE_MAX, false, GRANTED));
    heap.free(first);
    heap.free(second);
}

void keep_some_of_what_is_freed(const Memory& memory) {
    const size_t before = memory.allocated();
    {
        Heap heap(memory.file, HEAP, HEAP);
        std::vector<std::byte*> blocks;
        for (int i = 0; i < 6; ++i) blocks.push_back(heap.allocate(32 * MIB, false, GRANTED));
        CHECK(memory.allocated() >= before + 192 * MIB - PAGE);
        for (std::byte* block : blocks) heap.free(block);
        CHECK(memory.allocated() <= before + Heap::KEPT);
        std::byte* const whole = heap.allocate(HEAP, false, 0);
        CHECK(!whole);
        std::byte* const joined = heap.allocate(Heap::KEPT, true);  // neighbors are one block
        CHECK(joined && holds(joined, Heap::KEPT, 0));
        heap.free(joined);
        heap.give_back();
        CHECK(memory.allocated() <= before);
        std::byte* const all = heap.allocate(64 * MIB, false, GRANTED);
        CHECK(all);
    }
    CHECK(memory.allocated() <= before);  // the heap is gone
}

void never_reuse_what_is_retired(const Memory& memory) {
    Heap heap(memory.file, 0, HEAP);
    std::byte* const block = heap.allocate(MIB, false, GRANTED);
    heap.retire(block + MIB - 1);
    heap.retire(block + MIB);  // in no block
    CHECK(!heap.resize(block, PAGE));
    heap.free(block);
    std::vector<std::byte*> others;
    for (int i = 0; i < 100; ++i) {
        others.push_back(heap.allocate(MIB, false, GRANTED));
        CHECK(others.back() && others.back() != block);
    }
    for (std::byte* other : others) heap.free(other);
}

void leave_the_parents_blocks_alone(const Memory& memory) {
    Heap heap(memory.file, 0, HEAP);
    std::byte* const block = heap.allocate(MIB, false, GRANTED);
    memset(block, 1, MIB);
    const pid_t child = fork();
    if (child == 0) {
        fork_generation.fetch_add(1);
        CHECK(heap.forked());
        heap.free(block);
        CHECK(!heap.allocate(MIB, false, GRANTED));
        CHECK(!heap.resize(block, PAGE));
        CHECK(heap.bytes(block) == MIB);
        CHECK(holds(block, MIB, 1));
        memset(block, 2, MIB);
        _exit(failures ? 1 : 0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(holds(block, MIB, 2));
    heap.free(block);
}

}  // namespace

int main() {
    const Memory memory;
    allocate_at_once(memory);
    take_no_more_than_granted(memory);
    keep_some_of_what_is_freed(memory);
    never_reuse_what_is_retired(memory);
    leave_the_parents_blocks_alone(memory);
    return failures ? 1 : 0;
}
