// Which receive gets which message: random receives, messages and withdrawals, of any source and tag too, against lists
// that are searched from the front.
#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <random>

#include "p2p/matching.h"
#include "world.h"

using namespace ringcomm;

namespace {

constexpr int SOURCES = 4;

struct Receive {
    Receive(int kind, int source, int64_t tag) : transfer(transfer_of(kind, nullptr, 0, RC_UINT8, source, tag)) {}

    const rc_transfer transfer;
    Request request{transfer};
};

// As the engine does; the number of a message tells it from the others.
struct Bins {
    std::optional<uint64_t> receive(Request& request) {
        if (UnexpectedMessage* const found = unexpected.find(request)) return unexpected.remove(*found).header.number;
        posted.add(request);
        return {};
    }
    Request* arrive(int source, const PacketHeader& header) {
        Request* const taken = posted.take(source, header);
        if (!taken) unexpected.add({source, header, {}, nullptr});
        return taken;
    }

    PostedReceives posted;
    UnexpectedMessages unexpected;
};

struct Lists {
    std::optional<uint64_t> receive(Request& request) {
        const auto found = std::ranges::find_if(
            unexpected, [&](const auto& message) { return request.matches(message.first, message.second); });
        if (found == unexpected.end()) return posted.push_back(&request), std::nullopt;
        const uint64_t number = found->second.number;
        unexpected.erase(found);
        return number;
    }
    Request* arrive(int source, const PacketHeader& header) {
        const auto found =
            std::ranges::find_if(posted, [&](const Request* each) { return each->matches(source, header); });
        if (found == posted.end()) return unexpected.emplace_back(source, header), nullptr;
        Request* const taken = *found;
        posted.erase(found);
        return taken;
    }

    std::deque<Request*> posted;
    std::deque<std::pair<int, PacketHeader>> unexpected;
};

// `tags`: with few, receives wait behind each other; with many, one bin has receives of several tags. `percent` of the
// receives take any source, and as many any tag.
void matches_as_lists_do(unsigned seed, int tags, unsigned percent) {
    std::mt19937 random(seed);
    const auto below = [&](unsigned n) { return random() % n; };
    std::vector<std::unique_ptr<Receive>> receives;
    Bins bins;
    Lists lists;
    const auto tag = [&]() -> int64_t { return below(20) == 0 ? RC_OBJECT_TAG : int64_t(below(tags)) - tags / 2; };
    for (uint64_t number = 1; number <= 10'000; ++number) {
        const bool mostly_receives = number / 1'000 % 2 == 0;  // so both kinds pile up
        const unsigned choice = below(100);
        if (choice < 5 && !lists.posted.empty()) {
            Request* const withdrawn = lists.posted[below(lists.posted.size())];
            std::erase(lists.posted, withdrawn);
            CHECK(bins.posted.remove(*withdrawn) && !bins.posted.remove(*withdrawn));
        } else if (choice < (mostly_receives ? 60 : 45)) {
            const int source = below(100) < percent ? -1 : int(below(SOURCES));
            const bool any_tag = below(100) < percent;
            const int kind = source < 0 || any_tag ? RC_RECV_MESSAGE : RC_RECV;
            Receive& receive = *receives.emplace_back(new Receive(kind, source, any_tag ? RC_ANY_TAG : tag()));
            CHECK(bins.receive(receive.request) == lists.receive(receive.request));
        } else {
            const int source = int(below(SOURCES));
            const PacketHeader header{PACKET_EAGER, RC_UINT8, tag(), 0, number, 0};
            CHECK(bins.arrive(source, header) == lists.arrive(source, header));
        }
    }
    CHECK(std::ranges::equal(bins.posted.in_order(), lists.posted));
    CHECK(std::ranges::equal(
        bins.unexpected.in_order(), lists.unexpected, {},
        [](const UnexpectedMessage& message) { return message.header.number; },
        [](const auto& message) { return message.second.number; }));
    bins.posted.clear();
    bins.unexpected.clear();
    Receive last(RC_RECV, 0, 0);
    CHECK(!bins.receive(last.request) && bins.arrive(0, {PACKET_EAGER, RC_UINT8, 0, 0, 0, 0}) == &last.request);
}

}  // namespace

int main() {
    for (unsigned seed = 0; seed < 2; ++seed) {
        for (const int tags : {2, 40, 5'000}) {
            for (const unsigned percent : {0u, 10u, 60u}) matches_as_lists_do(seed, tags, percent);
        }
    }
    printf("test_matching: %d failures\n", failures.load());
    return failures != 0;
}
