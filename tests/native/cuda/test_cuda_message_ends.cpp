// A peer that closes while the data of a message to its host memory wait for room: on the emulated driver, which this
// program exports itself.
#include <chrono>
#include <cstring>

#include "abi/handles.h"
#include "bindings/emulated_cuda/functions.h"
#include "p2p/channel.h"
#include "world.h"

using namespace ringcomm::cu;
using namespace ringcomm;

namespace {

constexpr rc_gpu_messages_shape SHAPE{2, 2, 1024, 4, 8192};
constexpr uint64_t BYTES = 8000, FILLER = 2000;  // of the message, and of those before it
constexpr const char* THIS_PROGRAM = "";         // as dlopen takes it

void nap() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

// What Python makes for the messages of a rank.
struct Gpu {
    explicit Gpu(rc_comm* comm) {
        DO(cuInit(0));
        CUdevice device;
        CUcontext context;
        DO(cuDeviceGet(&device, 0));
        DO(cuDevicePrimaryCtxRetain(&context, device));
        DO(cuCtxPushCurrent_v2(context));
        DO(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0));
        CUmodule module;
        CUfunction function;
        DO(cuModuleLoadData(&module, "any"));
        DO(cuModuleGetFunction(&function, module, "ringcomm_messages"));
        uint64_t bytes;
        DO(rc_gpu_messages_bytes(&SHAPE, &bytes));
        DO(cuMemAlloc_v2(&arena, bytes));
        memset(reinterpret_cast<void*>(arena), 0, bytes);
        const rc_gpu_messages_setup setup{SHAPE,      reinterpret_cast<void*>(arena),
                                          &control,   completed,
                                          function,   context,
                                          1,          THIS_PROGRAM,
                                          "emulated", 0,
                                          2};
        DO(rc_gpu_messages_open(comm, &setup));
    }

    CUstream stream;
    CUdeviceptr arena;
    rc_cuda_control control{};
    uint64_t completed[RC_MAX_LAUNCHES]{};
};

// Returns the next packet of a kind, and consumes it and those before.
PacketHeader next_packet(PacketChannel& channel, PacketKind kind) {
    for (;;) {
        const ReceivedPacket packet = channel.next();
        if (!packet.header) {
            nap();
            continue;
        }
        const PacketHeader header = *packet.header;
        channel.consume();
        if (header.kind == kind) return header;
    }
}

// Rank 1 is no engine but a channel, so that it reads nothing more once it has asked for the data.
void check_queued_data() {
    int fd;
    DO(rc_file_create(&fd));
    const rc_tuning tuning = small_tuning();
    const int64_t pids[] = {getpid(), getpid()};
    const int pidfds[] = {-1, -1};
    rc_comm* comms[2];
    for (int r = 0; r < 2; ++r) DO(rc_world_open(fd, r, 2, pids, pidfds, 4711, &NOWHERE, &tuning, &comms[r]));
    close(fd);
    Gpu gpu(comms[0]);
    const auto connected = ringcomm_emulated_pinned_bytes();
    const auto peer = comms[1]->handle->state->group->open_channel(0);

    std::vector<std::byte> data(BYTES);
    rc_work* work;
    rc_transfer sent = transfer_of(RC_SEND, data.data(), BYTES, RC_UINT8, 1, 0);
    sent.on_gpu = 1;
    sent.stream = gpu.stream;
    DO(rc_transfer_start(comms[0], &sent, &work));
    const PacketHeader announced = next_packet(*peer, PACKET_RTS);
    for (int i = 0; i < 20; ++i) DO(run(comms[0], transfer_of(RC_SEND, data.data(), FILLER, RC_UINT8, 1, 1)));
    PacketHeader answer{};
    answer.kind = PACKET_CTS;
    answer.number = announced.number;
    CHECK(peer->try_write(answer, nullptr));
    int all;
    while (ringcomm_emulated_pinned_bytes() == connected) {  // it is copied to the host
        DO(rc_gpu_messages_read(comms[0], &all));
        nap();
    }
    for (int i = 0; i < 50; ++i) {  // and then its packet is queued
        DO(rc_gpu_messages_read(comms[0], &all));
        CHECK(!all);
        nap();
    }
    DO(rc_close(comms[1]));
    for (all = 0; !all;) DO(rc_gpu_messages_read(comms[0], &all));  // its block is free again
    DO(rc_gpu_messages_read(comms[0], &all));                       // and its packet is not queued any more
    DO(finish(work));
    DO(rc_close(comms[0]));
    for (rc_comm* comm : comms) rc_free(comm);
    DO(cuMemFree_v2(gpu.arena));
}

}  // namespace

int main() {
    check_queued_data();
    return failures ? 1 : 0;
}
