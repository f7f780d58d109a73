// The C ABI of messages on GPUs.
#include "abi/handles.h"
#include "cuda/messages.h"
#include "p2p/gpu.h"

using namespace ringcomm;

namespace {

cuda::MessageShape checked(const rc_gpu_messages_shape& shape) {
    const auto given = cuda::bits_as<cuda::MessageShape>(shape);
    if (!cuda::valid(given)) reject("the shape of the arena of messages is invalid");
    return given;
}

}  // namespace

int rc_gpu_messages_bytes(const rc_gpu_messages_shape* shape, uint64_t* bytes) {
    return guarded([&] {
        check_pointer("shape", shape);
        check_pointer("bytes", bytes);
        *bytes = cuda::layout_of(checked(*shape)).bytes;
    });
}

int rc_gpu_messages_open(rc_comm* comm, const rc_gpu_messages_setup* setup) {
    static_assert(RC_MAX_LAUNCHES == cuda::MAX_LAUNCHES);
    return enter(comm, [&](const EntryGuard& entry) {
        check_pointer("setup", setup);
        for (const void* given : {setup->arena, setup->control, setup->function}) check_pointer("setup", given);
        check_pointer("setup.completed", setup->completed);
        check_pointer("setup.driver", setup->driver);
        check_pointer("setup.device", setup->device);
        check_range("setup.threads", setup->threads, 1, 1024);
        check_range("setup.shape.ranks", checked(setup->shape).ranks, entry.group().size, entry.group().size);
        entry->p2p.gpu().connect(*setup);
    });
}

int rc_work_wait_launched(rc_work* work, double timeout, void* stream, int* source) {
    return guarded([&] {
        check_pointer("work", work);
        check_seconds("timeout", timeout);
        Work& call = *work->work;
        try {
            const EntryGuard entry(*work->handle);
            reject_in_signal_handler(entry.group());
            call.wait_launched(entry.group(), timeout < 0 ? UINT64_MAX : deadline_of(now_ns(), timeout));
            if (!call.done()) call.order(stream);
        } catch (const Failure& failure) {
            if (work->handle->forked() || failure.error.code != RC_CLOSED) throw;
            call.wait_done();  // close() ends every call
        }
        if (call.done()) call.result();
        if (source) *source = call.message.source;
    });
}

int rc_work_launched(rc_work* work, int* launched) {
    return guarded([&] {
        check_pointer("work", work);
        check_pointer("launched", launched);
        *launched = work->work->launched();
    });
}

int rc_gpu_messages_coalesce(rc_comm* comm, int begins) {
    return enter(comm, [&](const EntryGuard& entry) { entry->p2p.gpu().coalesce(begins); });
}

int rc_gpu_messages_wait(rc_comm* comm) {
    return enter(comm, [&](const EntryGuard& entry) {
        reject_in_signal_handler(entry.group());
        entry->p2p.gpu().wait();
    });
}

int rc_gpu_messages_read(rc_comm* comm, int* all) {
    return enter(comm, [&](const EntryGuard& entry) {
        check_pointer("all", all);
        *all = entry->p2p.gpu().all_read();
    });
}
