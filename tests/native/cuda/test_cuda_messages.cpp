// Point-to-point messages of the CUDA kernels on the emulated device.
#include "message_world.h"

using namespace gpu;

namespace {

template <class T>
T one_of(std::initializer_list<T> values) {
    return values.begin()[random_bits() % values.size()];
}

int below(int n) { return static_cast<int>(random_bits() % n); }

MessageShape random_shape(int ranks) {
    const int channels = one_of({1, 2, 3, 4});
    return {ranks, channels, one_of({16u, 32u, 80u}), 8, one_of({112u, 512u})};
}

struct Message {
    int from, to;
    uint64_t bytes, number;
    Memory source, target;
    int slot = 0;
    uint64_t before = 0;
    std::atomic<bool> staged{false}, fetched{false};  // launched, as hosts know it

    Message(int from, int to, uint64_t bytes, uint64_t number)
        : from(from), to(to), bytes(bytes), number(number), source(bytes), target(bytes) {}

    MessageTransfer sent(MessageWorld& world) {
        return world.transfer(from, STAGE, to, source.data(), bytes, number, slot, before);
    }
    MessageTransfer received(MessageWorld& world) {
        return world.transfer(to, FETCH, from, target.data(), bytes, number, slot);
    }
    void check(const std::string& what) {
        expect(!memcmp(source.data(), target.data(), bytes), what + ": the data of a message");
        expect(target.margins_hold(bytes), what + ": the margin of a message");
    }
};

using MessageList = std::vector<std::unique_ptr<Message>>;

// A stream: launches one after the other, on a thread of its own. Its end waits for them.
class LaunchQueue {
public:
    LaunchQueue(MessageWorld& world, int rank) : world_(world), rank_(rank), thread_([this] { run(); }) {}
    ~LaunchQueue() {
        ended_ = true;
        thread_.join();
    }
    void add(std::vector<MessageTransfer> batch) {
        const std::lock_guard lock(mutex_);
        batches_.push_back(std::move(batch));
    }

private:
    void run() {
        for (;;) {
            const bool last = ended_;
            std::vector<std::vector<MessageTransfer>> taken;
            {
                const std::lock_guard lock(mutex_);
                taken.swap(batches_);
            }
            for (const auto& batch : taken) world_.launch(rank_, batch);
            if (taken.empty() && last) return;
            std::this_thread::yield();
        }
    }

    MessageWorld& world_;
    const int rank_;
    std::mutex mutex_;
    std::vector<std::vector<MessageTransfer>> batches_;
    std::atomic<bool> ended_{false};
    std::thread thread_;
};

// Stages as slots are free: a slot is, once the message in it has been fetched, by a launch that may be still queued.
void send_all(MessageWorld& world, int rank, MessageList& messages, std::mt19937_64 random) {
    LaunchQueue stream(world, rank);
    std::vector<Message*> last(world.shape.slots), members;
    std::vector<MessageTransfer> batch;
    const auto launch = [&] {
        if (!batch.empty()) stream.add(batch);
        for (Message* m : members) m->staged = true;
        batch.clear(), members.clear();
    };
    for (auto& m : messages) {
        if (m->from != rank) continue;
        for (size_t slot = 0;; slot = (slot + 1) % last.size()) {
            if (last[slot] && !last[slot]->fetched) {
                launch();
                std::this_thread::yield();
                continue;
            }
            m->slot = static_cast<int>(slot);
            m->before = last[slot] ? last[slot]->number : 0;
            last[slot] = m.get();
            break;
        }
        batch.push_back(m->sent(world)), members.push_back(m.get());
        if (random() % 2 || batch.size() == TRANSFERS) launch();
    }
    launch();
}

// Fetches what is staged, in any order and batches.
void receive_all(MessageWorld& world, int rank, MessageList& messages, std::mt19937_64 random) {
    LaunchQueue stream(world, rank);
    std::vector<Message*> expected;
    for (auto& m : messages)
        if (m->to == rank) expected.push_back(m.get());
    while (!expected.empty()) {
        std::shuffle(expected.begin(), expected.end(), random);
        std::vector<MessageTransfer> batch;
        std::vector<Message*> members;
        const size_t most = 1 + random() % TRANSFERS;
        std::erase_if(expected, [&](Message* m) {
            if (batch.size() == most || !m->staged) return false;
            batch.push_back(m->received(world)), members.push_back(m);
            return true;
        });
        batch.empty() ? std::this_thread::yield() : stream.add(batch);
        for (Message* m : members) m->fetched = true;
    }
}

void check_all(MessageWorld& world, MessageList& messages, const std::string& what) {
    for (int r = 0; r < world.shape.ranks; ++r)
        expect(!world.control[r].failed, what + ": reason " + std::to_string(world.control[r].failure.reason));
    for (auto& message : messages) message->check(what);
}

void check_unordered(int n, uint64_t seed) {
    MessageWorld world(random_shape(n));
    world.threads = one_of({1, 2, 3});
    world.seed = seed;
    MessageList messages;
    for (uint64_t number = 1; number <= 40; ++number) {
        const uint64_t bytes = one_of<uint64_t>({0, 1, 3, 16, 17, 64, 100, 255, 500});
        messages.push_back(
            std::make_unique<Message>(below(n), below(n), minimum(bytes, world.shape.slot_bytes), number));
    }
    const std::mt19937_64 random = random_bits;
    world.on_all_ranks([&](int r) {
        std::thread sender([&] { send_all(world, r, messages, random); });
        receive_all(world, r, messages, random);
        sender.join();
    });
    check_all(world, messages, "unordered, " + std::to_string(n) + " ranks");
}

// ---- Races: data in one direction only, so that no other flag gives the order that a weakened one has lost.

void check_races() {
    MessageWorld world({2, 1, 64, 1, 512});
    Message message(0, 1, 500, 0);
    world.on_all_ranks([&](int r) {
        for (uint64_t number = 1; number <= 20; ++number) {
            MessageTransfer mine = r ? message.received(world) : message.sent(world);
            mine.number = number;
            mine.before = number - 1;
            world.launch(r, {mine});
        }
    });
    message.check("races");
}

}  // namespace

// test_cuda_messages                everything once
// test_cuda_messages seeds 1 1000   random messages from seeds 1 to 1,000
// test_cuda_messages 4              races only, with publishing store 4 weakened
int main(int count, char** words) {
    if (count == 2) {
#ifdef RC_WEAKEN
        weakened = atoi(words[1]);
#endif
        check_races();
        std::printf("test_cuda_messages: done\n");
        return 0;
    }
    const uint64_t first = count > 3 ? atoi(words[2]) : 1, seeds = count > 3 ? atoi(words[3]) : 40;
    for (uint64_t seed = first; seed < first + seeds; ++seed) {
        const int before = failures;
        random_bits.seed(seed);
        check_unordered(2 + below(4), seed);
        if (failures > before) std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
    }
    check_races();
    if (failures) std::printf("%d failures\n", failures);
    return failures != 0;
}
