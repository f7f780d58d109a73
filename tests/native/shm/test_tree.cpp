// Small calls of many ranks through the tree of their group: its shape, values, and the cache lines that move.
#include "shm/rank_tree.h"

#include <algorithm>
#include <numeric>

#include "kernels/memory_order.h"
#include "world.h"

namespace {

using ringcomm::Domain;
using ringcomm::RankTree;

// nodes x caches x cores, rank by rank.
std::vector<Domain> domains_of(int nodes, int caches, int cores) {
    std::vector<Domain> domains;
    for (int i = 0; i < nodes * caches * cores; ++i) domains.push_back({i / (caches * cores), i / cores});
    return domains;
}

void is_a_tree(const RankTree& tree, int size) {
    std::vector<int> all = tree.subtree(0);
    CHECK(tree.parent(0) == -1 && int(all.size()) == size);
    std::sort(all.begin(), all.end());
    for (int r = 0; r < size; ++r) {
        CHECK(all[r] == r && (r == 0 || tree.parent(r) < r));
        for (const int child : tree.children(r)) CHECK(tree.parent(child) == r);
    }
}

void shapes() {
    const RankTree sockets(domains_of(2, 4, 8));
    is_a_tree(sockets, 64);
    CHECK(sockets.children(32) == std::vector<int>({33, 34, 35, 36, 37, 38, 39, 40, 48, 56}));
    CHECK(sockets.parent(32) == 0 && sockets.parent(41) == 40 && sockets.subtree(40).size() == 8);
    CHECK(sockets.critical_lines() == 7 + 3 + 1 + 3);
    for (const int size : {2, 16, 64, 65, 128, 1024}) {
        const RankTree tree(std::vector<Domain>(size, Domain{-1, -1}));
        is_a_tree(tree, size);
        for (int r = 0; r < size; ++r) CHECK(tree.children(r).size() <= 7 * 4);
        CHECK(bool(ringcomm::shorter_tree(std::vector<Domain>(size, Domain{-1, -1}))) == (size > 8));
    }
    std::vector<Domain> scattered;  // ranks go to two caches in turn
    for (int i = 0; i < 16; ++i) scattered.push_back({0, i % 2});
    const RankTree tree(scattered);
    is_a_tree(tree, 16);
    CHECK(tree.parent(1) == 0 && tree.parent(2) == 0 && tree.parent(15) == 1);
}

rc_tuning tree_tuning() {
    rc_tuning tuning = small_tuning();
    tuning.tree_wait_ns = 20'000'000;
    return tuning;
}

int path_of(rc_comm* comm) {
    int path;
    uint64_t number;
    DO(rc_last_path(comm, &path, &number));
    return path;
}

// Calls of every kind, until all ranks have gone through the tree in some of them. In one of the first a rank reads all
// records because its call is a started one, so that the others give up, at different times.
void values(int size, const std::vector<Domain>& domains) {
    std::vector<rc_domain> given;
    for (const Domain& each : domains) given.push_back({each.node, each.cache});
    in_world(
        size, tree_tuning(),
        [size](rc_comm* comm, int rank) {
            int in_tree = 0, least = 0;
            for (int call = 0; least < 20 && call < 20000; ++call) {
                const int count = 1 + call % 40;
                std::vector<float> x(count);
                for (int i = 0; i < count; ++i) x[i] = float(rank + 1) / float(i + 3 + call % 7);
                std::vector<float> sum(count);
                for (int i = 0; i < count; ++i) {
                    for (int r = 0; r < size; ++r) sum[i] += float(r + 1) / float(i + 3 + call % 7);  // in rank order
                }
                if (call == 3 && rank == size / 2) {
                    rc_work* work;
                    DO(run(comm, RC_ALL_REDUCE, x.data(), x.data(), count, RC_FLOAT32, RC_SUM, 0, nullptr, &work));
                    DO(finish(work));
                } else {
                    DO(run(comm, RC_ALL_REDUCE, x.data(), x.data(), count, RC_FLOAT32));
                }
                in_tree += path_of(comm) == RC_PATH_TREE;
                CHECK(x == sum);
                std::vector<float> all(size * count);
                DO(run(comm, RC_ALL_GATHER, x.data(), all.data(), count, RC_FLOAT32));
                for (int i = 0; i < size * count; ++i) CHECK(all[i] == sum[i % count]);
                if (call % 3 == 0) DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
                if (call % 5 == 0) DO(run(comm, RC_BROADCAST, x.data(), x.data(), 1, RC_FLOAT32, RC_SUM, call % size));
                if (call % 7 == 0) DO(run(comm, RC_REDUCE, x.data(), rank ? nullptr : sum.data(), 1, RC_FLOAT32));
                if (call % 50 == 0) DO(run(comm, RC_ALL_REDUCE, &in_tree, &least, 1, RC_INT32, RC_MIN));
            }
            CHECK(least >= 20);
        },
        given);
}

#ifdef RC_COUNT_LINES
struct CountedCall {
    int path;
    uint64_t read, written;
};

// The lines of calls of 4 bytes, by call and rank, until `wanted` of them have taken this path on all ranks.
std::vector<std::vector<CountedCall>> count_lines(int size, const rc_tuning& tuning, int path, int wanted) {
    constexpr int MOST = 2000;
    std::vector<std::vector<CountedCall>> calls(MOST, std::vector<CountedCall>(size));
    std::atomic<int> found{0};
    in_world(size, tuning, [&](rc_comm* comm, int rank) {
        ringcomm::CountedLines& lines = ringcomm::counted_lines;
        for (int call = 0, go_on = 1; call < MOST && go_on; ++call) {
            float x = 1;
            const auto read = lines.read, written = lines.written;
            DO(run(comm, RC_ALL_REDUCE, &x, &x, 1, RC_FLOAT32));
            CHECK(x == float(size));
            calls[call][rank] = {path_of(comm), lines.read - read, lines.written - written};
            DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
            const auto fits = [&](const CountedCall& each) { return each.path == path; };
            found += rank == 0 && std::all_of(calls[call].begin(), calls[call].end(), fits);
            go_on = found < wanted;
            DO(run(comm, RC_BROADCAST, &go_on, &go_on, 1));
            DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
        }
    });
    std::erase_if(calls, [&](const auto& call) {
        return std::any_of(call.begin(), call.end(), [&](const CountedCall& each) { return each.path != path; });
    });
    CHECK(int(calls.size()) >= wanted);
    return calls;
}

// n (n - 1) lines are read on the path one-shot; in the tree each rank but the root is read once, and reads once.
void lines() {
    for (const int size : {16, 64, 128}) {
        const RankTree tree(std::vector<Domain>(size, Domain{-1, -1}));
        for (const auto& call : count_lines(size, tree_tuning(), RC_PATH_TREE, 3)) {
            uint64_t all = 0;
            for (int r = 0; r < size; ++r) {
                all += call[r].read + call[r].written;
                CHECK(call[r].read == tree.children(r).size() + (r > 0));
            }
            CHECK(all <= 4 * (uint64_t(size) - 1));
        }
        for (const auto& call : count_lines(size, small_tuning(), RC_PATH_ONE_SHOT, 3)) {
            for (const CountedCall& rank : call) CHECK(rank.read == uint64_t(size) - 1 && rank.written == 1);
        }
    }
}
#endif

}  // namespace

int main() {
    DO(rc_kernels_select("portable"));
    shapes();
    values(16, std::vector<Domain>(16, Domain{-1, -1}));
    values(24, domains_of(2, 2, 6));
#ifdef RC_COUNT_LINES
    lines();
#endif
    printf("test_tree: done\n");
    return failures != 0;
}
