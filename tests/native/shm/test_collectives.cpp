// Every collective on every path, plain and symmetric, blocking and queued, and point-to-point, with sizes around every
// limit of small buffers. Expected values are closed forms. Meant for AddressSanitizer and UndefinedBehaviorSanitizer.
#include <algorithm>

#include "world.h"

namespace {

int value(int rank, uint64_t i) { return int(i % 1013) * (rank + 1) + rank; }

// The sum over all ranks of value(rank, i).
int sum(int n, uint64_t i) { return int(i % 1013) * (n * (n + 1) / 2) + n * (n - 1) / 2; }

bool equal(const int* data, const std::vector<int>& expected) {
    return std::equal(expected.begin(), expected.end(), data);
}

std::vector<int> filled(int rank, uint64_t count, uint64_t first = 0) {
    std::vector<int> data(count);
    for (uint64_t i = 0; i < count; ++i) data[i] = value(rank, first + i);
    return data;
}

void every_collective(rc_comm* comm, int rank, int n, uint64_t count) {
    const int root = int(count % n);
    std::vector<int> source = filled(rank, count), target(count);
    const auto blocks = filled(rank, count * n);

    DO(run(comm, RC_ALL_REDUCE, source.data(), target.data(), count));
    for (uint64_t i = 0; i < count; ++i) CHECK(target[i] == sum(n, i));
    DO(run(comm, RC_ALL_REDUCE, source.data(), source.data(), count));
    CHECK(source == target);

    source = filled(rank, count);
    DO(run(comm, RC_REDUCE, source.data(), rank == root ? source.data() : nullptr, count, RC_INT32, RC_SUM, root));
    for (uint64_t i = 0; i < count; ++i) CHECK(source[i] == (rank == root ? sum(n, i) : value(rank, i)));

    source = filled(rank, count);
    DO(run(comm, RC_BROADCAST, source.data(), source.data(), count, RC_INT32, RC_SUM, root));
    CHECK(source == filled(root, count));

    source = filled(rank, count);
    std::vector<int> all(count * n);
    DO(run(comm, RC_ALL_GATHER, source.data(), all.data(), count));
    for (int p = 0; p < n; ++p) CHECK(equal(all.data() + p * count, filled(p, count)));

    all.assign(count * n, 0);
    DO(run(comm, RC_GATHER, source.data(), rank == root ? all.data() : nullptr, count, RC_INT32, RC_SUM, root));
    for (int p = 0; p < n && rank == root; ++p) {
        CHECK(equal(all.data() + p * count, filled(p, count)));
    }

    DO(run(comm, RC_SCATTER, rank == root ? blocks.data() : nullptr, target.data(), count, RC_INT32, RC_SUM, root));
    CHECK(target == filled(root, count, rank * count));

    DO(run(comm, RC_REDUCE_SCATTER, blocks.data(), target.data(), count));
    for (uint64_t i = 0; i < count; ++i) CHECK(target[i] == sum(n, rank * count + i));

    DO(run(comm, RC_ALL_TO_ALL, blocks.data(), all.data(), count));
    for (int p = 0; p < n; ++p) {
        for (uint64_t i = 0; i < count; ++i) CHECK(all[p * count + i] == value(p, rank * count + i));
    }

    // Rank r sends (r + p) % 3 pieces to rank p.
    const uint64_t piece = count / 2 + 1;
    std::vector<uint64_t> counts;
    uint64_t sent = 0, received = 0;
    for (int p = 0; p < n; ++p) counts.push_back((rank + p) % 3 * piece), sent += counts.back();
    for (int p = 0; p < n; ++p) counts.push_back((p + rank) % 3 * piece), received += counts.back();
    const auto uneven = filled(rank, sent);
    std::vector<int> got(received);
    DO(run(comm, RC_ALL_TO_ALL, uneven.data(), got.data(), 0, RC_INT32, RC_SUM, 0, counts.data()));
    uint64_t at = 0;
    for (int p = 0; p < n; ++p) {
        uint64_t first = 0;
        for (int q = 0; q < rank; ++q) first += (p + q) % 3 * piece;
        for (uint64_t i = 0; i < counts[n + p]; ++i) CHECK(got[at++] == value(p, first + i));
    }
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
}

void queued_calls(rc_comm* comm, int rank, int n) {
    std::vector<std::vector<int>> data;
    std::vector<rc_work*> works(8);
    for (uint64_t k = 0; k < works.size(); ++k) data.push_back(filled(rank, 1 + 700 * k));
    for (uint64_t k = 0; k < works.size(); ++k) {
        DO(run(comm, RC_ALL_REDUCE, data[k].data(), data[k].data(), data[k].size(), RC_INT32, RC_SUM, 0, nullptr,
               &works[k]));
    }
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));  // may not overtake them
    for (uint64_t k = 0; k < works.size(); ++k) {
        CHECK(rc_work_done(works[k]));
        DO(finish(works[k]));
        for (uint64_t i = 0; i < data[k].size(); ++i) CHECK(data[k][i] == sum(n, i));
    }
}

void messages(rc_comm* comm, int rank, int n, uint64_t count) {
    const int right = (rank + 1) % n, left = (rank + n - 1) % n;
    const auto sent = filled(rank, count);
    std::vector<int> received(count);
    int from = -1;
    DO(exchange(comm, transfer_of(RC_SEND, sent.data(), count, RC_INT32, right, 5),
                transfer_of(RC_RECV, received.data(), count, RC_INT32, left, 5), &from));
    CHECK(from == left && received == filled(left, count));

    // Two asynchronous sends, received in reverse order by tag; one receive from any rank.
    rc_work* works[2];
    for (int tag = 0; tag < 2; ++tag)
        DO(start(comm, transfer_of(RC_SEND, sent.data(), count, RC_INT32, right, tag), &works[tag]));
    for (int tag = 1; tag >= 0; --tag) {
        received.assign(count, 0);
        DO(run(comm, transfer_of(RC_RECV, received.data(), count, RC_INT32, tag ? left : -1, tag), &from));
        CHECK(from == left && received == filled(left, count));
    }
    for (rc_work* work : works) DO(finish(work));
    // A mismatch fails on both sides, and later messages still arrive.
    rc_work* refused;
    DO(start(comm, transfer_of(RC_SEND, sent.data(), count, RC_INT32, right, 9), &refused));
    CHECK(run(comm, transfer_of(RC_RECV, received.data(), count, RC_FLOAT32, left, 9)) == RC_MISMATCH);
    const int status = finish(refused);
    CHECK(status == RC_MISMATCH || (status == RC_OK && (n == 1 || count < 50000)));
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
}

void symmetric(rc_comm* comm, int rank, int n, uint64_t count) {
    const SymmetricBuffer buffer(comm, rank, n, 2 * n * count + n);
    int *source = buffer.data + rank, *target = source + n * count;  // at another place on each rank
    const int last = n - 1;
    const auto fill = [&] {
        DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
        const auto data = filled(rank, n * count);
        std::copy(data.begin(), data.end(), source);
        std::fill(target, target + n * count, -1);
    };
    fill();
    DO(run(comm, RC_ALL_REDUCE, source, target, count));
    for (uint64_t i = 0; i < count; ++i) CHECK(target[i] == sum(n, i));
    DO(run(comm, RC_ALL_REDUCE, source, source, count));
    for (uint64_t i = 0; i < count; ++i) CHECK(source[i] == sum(n, i));
    fill();
    DO(run(comm, RC_REDUCE, source, rank == n - 1 ? target : nullptr, count, RC_INT32, RC_SUM, n - 1));
    for (uint64_t i = 0; i < count; ++i) CHECK(target[i] == (rank == n - 1 ? sum(n, i) : -1));
    fill();
    DO(run(comm, RC_REDUCE_SCATTER, source, target, count));
    for (uint64_t i = 0; i < count; ++i) CHECK(target[i] == sum(n, rank * count + i));
    DO(run(comm, RC_ALL_GATHER, source + rank * count, source, count));  // in place: pushed
    for (uint64_t i = 0; i < count * n; ++i) CHECK(source[i] == value(i / count, i));
    fill();
    std::vector<int> own(count * n);
    DO(run(comm, RC_ALL_GATHER, source, own.data(), count));  // only the source is symmetric: pulled
    for (uint64_t i = 0; i < count * n; ++i) CHECK(own[i] == value(i / count, i % count));
    DO(run(comm, RC_ALL_TO_ALL, source, target, count));
    for (uint64_t i = 0; i < count * n; ++i) CHECK(target[i] == value(i / count, rank * count + i % count));
    DO(run(comm, RC_GATHER, source, rank == 0 ? own.data() : nullptr, count));
    for (uint64_t i = 0; i < count * n && rank == 0; ++i) CHECK(own[i] == value(i / count, i % count));
    DO(run(comm, RC_SCATTER, rank == 0 ? source : nullptr, own.data(), count));
    for (uint64_t i = 0; i < count; ++i) CHECK(own[i] == value(0, rank * count + i));
    // In place the root has no copy of its own to make: all ranks share what moves.
    fill();
    if (rank == last) std::copy_n(source, count, target + last * count);
    DO(run(comm, RC_GATHER, rank == last ? target + last * count : source, rank == last ? target : nullptr, count,
           RC_INT32, RC_SUM, last));
    for (uint64_t i = 0; i < count * n; ++i) CHECK(target[i] == (rank == last ? value(i / count, i % count) : -1));
    fill();
    int* const block = rank == last ? source + last * count : target;
    DO(run(comm, RC_SCATTER, rank == last ? source : nullptr, block, count, RC_INT32, RC_SUM, last));
    for (uint64_t i = 0; i < count; ++i) CHECK(block[i] == value(last, rank * count + i));
    fill();
    own = filled(rank, n * count);
    DO(run(comm, RC_ALL_TO_ALL, own.data(), target, count));  // only the target is symmetric: pushed
    for (uint64_t i = 0; i < count * n; ++i) CHECK(target[i] == value(i / count, rank * count + i % count));
    const int left = (rank + last) % n;
    DO(exchange(comm, transfer_of(RC_SEND, source, n * count, RC_INT32, (rank + 1) % n, 0),
                transfer_of(RC_RECV, own.data(), n * count, RC_INT32, left, 0)));
    CHECK(own == filled(left, n * count));
    // Some ranks pass ordinary memory: the staged path.
    int* mixed = rank % 2 ? source : own.data();
    for (uint64_t i = 0; i < count; ++i) mixed[i] = value(rank, i);
    DO(run(comm, RC_ALL_REDUCE, mixed, mixed, count));
    for (uint64_t i = 0; i < count; ++i) CHECK(mixed[i] == sum(n, i));
    fill();
    DO(run(comm, RC_BROADCAST, source, source, count, RC_INT32, RC_SUM, n - 1));
    for (uint64_t i = 0; i < count; ++i) CHECK(source[i] == value(n - 1, i));
}

void sub_group(rc_comm* comm, int rank, int n) {
    uint64_t offset = 0;
    const rc_tuning tuning = small_tuning();
    if (rank == 0) DO(rc_reserve(comm, rc_sub_bytes(n, &tuning), &offset));
    DO(run(comm, RC_BROADCAST, &offset, &offset, 1, RC_UINT64));
    std::vector<int> members;
    for (int r = n - 1; r >= 0; --r) members.push_back(r);  // turned around
    rc_comm* sub;
    DO(rc_sub_open(comm, offset, n - 1 - rank, n, members.data(), &sub));
    every_collective(sub, n - 1 - rank, n, 1500);
    messages(sub, n - 1 - rank, n, 5000);
    rc_free(sub);
}

// The positions of the flags wrap around after 1,000 calls (shm/group.h).
void past_the_wrap(rc_comm* comm, int rank, int n) {
    for (int call = 0; call < 1100; ++call) {
        auto data = filled(rank, 2000);
        DO(run(comm, RC_ALL_REDUCE, data.data(), data.data(), data.size()));
        for (uint64_t i = 0; i < data.size(); ++i) CHECK(data[i] == sum(n, i));
    }
}

void mismatches(rc_comm* comm, int rank, int n) {
    if (n == 1) return;
    std::vector<int> data(5000, 7);
    CHECK(run(comm, rank ? RC_ALL_REDUCE : RC_BROADCAST, data.data(), data.data(), data.size()) == RC_MISMATCH);
    CHECK(run(comm, RC_ALL_REDUCE, data.data(), data.data(), rank == n - 1 ? 10 : 5000) == RC_MISMATCH);
    for (int x : data) CHECK(x == 7);
    DO(run(comm, RC_ALL_REDUCE, data.data(), data.data(), data.size()));
    for (int x : data) CHECK(x == 7 * n);
}

}  // namespace

int main() {
    std::vector<std::pair<int, Access>> worlds{{1, STAGED}};
    for (int n : {2, 3, 4, 7}) {
        for (Access access : {STAGED, DIRECT, CMA}) worlds.push_back({n, access});
    }
    for (const auto& [n, access] : worlds) {
        in_world(n, small_tuning(access), [n](rc_comm* comm, int rank) {
            for (uint64_t count : {0, 1, 7, 8, 9, 100, 127, 129, 1000, 3333, 20000})
                every_collective(comm, rank, n, count);
            queued_calls(comm, rank, n);
            for (uint64_t count : {0, 1, 1000, 1024, 1025, 50000}) messages(comm, rank, n, count);
            for (uint64_t count : {1, 16, 1000, 9999}) symmetric(comm, rank, n, count);
            sub_group(comm, rank, n);
            mismatches(comm, rank, n);
            if (n == 3) past_the_wrap(comm, rank, n);
        });
    }
    printf("test_collectives: %d failures\n", failures.load());
    return failures != 0;
}
