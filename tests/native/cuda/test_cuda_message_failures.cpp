// Messages that fail on the emulated device: which rank is named, why, and what stays untouched.
#include "message_world.h"

using namespace gpu;

namespace {

constexpr MessageShape SHAPE{3, 2, 32, 4, 512};
constexpr uint64_t BYTES = 500;

void expect_failure(const MessageWorld& world, int rank, Reason reason, int peer, const std::string& what) {
    const KernelFailure& found = world.control[rank].failure;
    expect(world.control[rank].failed && found.reason == reason && found.peer == peer,
           what + ": rank " + std::to_string(rank) + " has reason " + std::to_string(found.reason) + ", peer " +
               std::to_string(found.peer));
}

void expect_untouched(const Memory& memory, const std::string& what) {
    expect(memory.bytes == memory.before, what + ": memory was written");
}

// Rank 1 stages nothing, or fetches nothing. What rank 0 exchanges with rank 2 in the same launch arrives all the same.
void check_missing_peer(MessageKind kind, bool abort) {
    const std::string what = "kind " + std::to_string(kind) + (abort ? ", aborted" : "");
    MessageWorld world(SHAPE);
    world.seconds = abort ? 60 : 0.2;
    Memory lost(BYTES), sent(BYTES), received(BYTES);
    std::thread peer([&] { world.launch(2, {world.transfer(2, STAGE, 0, sent.data(), BYTES, 7)}); });
    std::thread host([&] {
        peer.join();
        if (abort) store_relaxed(&world.control[0].abort, uint64_t(1));
    });
    MessageTransfer waits = world.transfer(0, kind, 1, lost.data(), BYTES, 8, 0, 5);
    waits.reader = 1;
    world.launch(0, {waits, world.transfer(0, FETCH, 2, received.data(), BYTES, 7)});
    host.join();
    // An abort may come before it has arrived.
    expect(abort || !memcmp(sent.data(), received.data(), BYTES), what + ": the other message");
    expect(!world.control[2].failed, what + ": the other peer");
    expect_failure(world, 0, abort ? ABORTED : kind == STAGE ? NO_SLOT : NO_DATA, 1, what);
    expect(world.control[0].failure.epoch == 8, what + ": the number of the message");
    expect(!world.released(1, 0) && !world.released(2, 0), what + ": a slot was released");
    expect_untouched(lost, what);

    // The next launch finds the rank broken: it moves nothing, and completes.
    world.launch(0, {world.transfer(0, STAGE, 2, sent.data(), BYTES, 9, 1)});
    for (int channel = 0; channel < 2; ++channel)
        expect(!*world.arena(0).staged(world.memory[0], channel, 1), what + ": a broken rank staged a message");
}

// The receiver compares number and length before any data.
void check_mismatch(uint64_t bytes, uint64_t number) {
    const std::string what = "a message that differs";
    MessageWorld world(SHAPE);
    Memory sent(BYTES), received(BYTES);
    world.launch(0, {world.transfer(0, STAGE, 1, sent.data(), BYTES, 2)});
    world.launch(1, {world.transfer(1, FETCH, 0, received.data(), bytes, number)});
    expect_failure(world, 1, MISMATCH, 0, what);
    expect(!world.released(0, 0), what + ": a slot was released");
    expect_untouched(received, what);
}

void check_refusals() {
    MessageWorld world(SHAPE);
    Memory memory(BYTES);
    uint64_t completed = 0;
    const auto refused = [&](const std::function<void(MessageArgs&)>& change) {
        MessageArgs args = world.args(0, {world.transfer(0, STAGE, 1, memory.data(), BYTES, 1)});
        args.completed = &completed;
        expect(!refusal(args, 1), "a good launch was refused");
        change(args);
        expect(refusal(args, 1), "a launch that must be refused");
    };
    refused([](MessageArgs& a) { a.completed = nullptr; });
    refused([](MessageArgs& a) { a.count = 0; });
    refused([](MessageArgs& a) { a.count = TRANSFERS + 1; });
    refused([](MessageArgs& a) { a.launch = MAX_LAUNCHES; });
    refused([](MessageArgs& a) { a.transfers[0].kind = MESSAGE_KINDS; });
    refused([](MessageArgs& a) { a.transfers[0].peer = 3; });
    refused([](MessageArgs& a) { a.transfers[0].slot = 4; });
    refused([](MessageArgs& a) { a.transfers[0].bytes = 513; });
    for (uint32_t MessageShape::* field : {&MessageShape::piece_bytes, &MessageShape::slot_bytes}) {
        MessageShape shape = SHAPE;
        --(shape.*field);
        expect(!valid(shape), "an invalid shape");
    }
}

}  // namespace

int main() {
    for (const MessageKind kind : {STAGE, FETCH})
        for (const bool abort : {false, true}) check_missing_peer(kind, abort);
    check_mismatch(BYTES - 1, 2);
    check_mismatch(0, 2);
    check_mismatch(BYTES, 1);
    check_refusals();
    if (failures) std::printf("%d failures\n", failures);
    return failures != 0;
}
