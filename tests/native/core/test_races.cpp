// Drives every publishing store of kernels/memory_order.h, for ThreadSanitizer: enough chunks to reuse every buffer,
// and traffic in one direction, so that no other flag provides the order that a weakened one lost.
#include "kernels/memory_order.h"
#include "world.h"

namespace {

void messages(rc_comm* comm, int rank) {
    std::vector<int> data(20000), all(3 * data.size());
    for (int i = 0; i < 300 && rank < 2; ++i) {  // from rank 0 to rank 1, many times around the rings
        if (rank == 0) DO(run(comm, transfer_of(RC_SEND, data.data(), 100, RC_INT32, 1, 0)));
        if (rank == 1) DO(run(comm, transfer_of(RC_RECV, data.data(), 100, RC_INT32, 0, 0)));
    }
    for (int i = 0; i < 3; ++i) {
        if (rank == 0) DO(run(comm, transfer_of(RC_SEND, all.data(), all.size(), RC_INT32, 2, 1)));
        if (rank == 2) DO(run(comm, transfer_of(RC_RECV, all.data(), all.size(), RC_INT32, 0, 1)));
        all.assign(all.size(), i);  // the sender may write again
    }
}

}  // namespace

int main([[maybe_unused]] int count, [[maybe_unused]] char** words) {
#ifdef RC_WEAKEN
    if (count > 1) ringcomm::weakened = atoi(words[1]);
#endif
    DO(rc_kernels_select("portable"));
    in_world(3, small_tuning(), [](rc_comm* comm, int rank) {
        std::vector<int> data(20000), all(3 * data.size());
        for (int repeat = 0; repeat < 3; ++repeat) {
            DO(run(comm, RC_ALL_REDUCE, data.data(), data.data(), 5));
            DO(run(comm, RC_ALL_REDUCE, data.data(), data.data(), 100));
            DO(run(comm, RC_ALL_REDUCE, data.data(), data.data(), data.size()));
            DO(run(comm, RC_BROADCAST, data.data(), data.data(), data.size()));
            DO(run(comm, RC_ALL_GATHER, data.data(), all.data(), data.size()));
            DO(run(comm, RC_ALL_TO_ALL, all.data(), all.data(), data.size()));
            DO(run(comm, RC_REDUCE, data.data(), rank ? nullptr : data.data(), data.size()));
        }
    });
    rc_tuning in_tree = small_tuning();
    in_tree.tree_wait_ns = 20'000'000;
    in_world(16, in_tree, [](rc_comm* comm, int) {
        std::vector<int> data(40);
        int passed = 0, least = 0;  // through the tree: of all ranks
        for (int i = 0; least < 5 && i < 10000; ++i) {
            DO(run(comm, RC_ALL_REDUCE, data.data(), data.data(), data.size()));
            int path;
            uint64_t number;
            DO(rc_last_path(comm, &path, &number));
            passed += path == RC_PATH_TREE;
            if (i % 20 == 19) DO(run(comm, RC_ALL_REDUCE, &passed, &least, 1, RC_INT32, RC_MIN));
        }
        CHECK(least >= 5);
    });
    for (const Access access : {STAGED, DIRECT}) in_world(3, small_tuning(access), messages);
    printf("test_races: done\n");
    return failures != 0;
}
