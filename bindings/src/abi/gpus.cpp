// The C ABI of groups of GPUs.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <utility>

#include "abi/handles.h"
#include "cuda/group.h"

using namespace ringcomm;

struct rc_gpus {
    std::shared_ptr<CommHandle> host;
    GpuGroup group;
};

namespace {

template <class Body>
int enter(rc_gpus* gpus, Body body) {
    return guarded([&] {
        check_pointer("gpus", gpus);
        const EntryGuard entry(*gpus->host);
        body(entry.group());
    });
}

CallRecord checked(PeerGroup& host, int collective, const rc_call* arguments, double timeout) {
    check_pointer("call", arguments);
    check_seconds("timeout", timeout);
    CallRecord call = called(collective, *arguments, timeout < 0 ? host.tuning().timeout : timeout);
    check_call(call, host.rank, host.size, true);
    return call;
}

rc_cuda_plan exported(const LaunchPlan& plan) {
    return {plan.kernel, plan.dtype, plan.op, plan.blocks, plan.with_tables, plan.count};
}

std::string described(const LaunchInfo& launch) {
    std::string text = describe(launch.signature);
    if (launch.norm.output)
        text += format(" with RMSNorm of rows of %" PRIu64 ", epsilon %g", launch.norm.width, launch.norm.epsilon);
    return text;
}

void check_norm(const CallRecord& call, const rc_rms_norm& norm, uint64_t stage_bytes) {
    if (call.op != RC_SUM || (call.dtype != RC_FLOAT16 && call.dtype != RC_BFLOAT16 && call.dtype != RC_FLOAT32))
        reject("call: expected a sum of float16, bfloat16 or float32, got " + describe(signature_of(call, 1)));
    const uint64_t most = stage_bytes / call.item, pack = cuda::PACK / call.item;
    if (!norm.width || norm.width > most || norm.width % pack || call.count % norm.width)
        rejectf("norm.width: expected a multiple of %" PRIu64 " that divides %" PRIu64 " and is at most %" PRIu64
                ", got %" PRIu64,
                pack, call.count, most, norm.width);
    if (!(norm.epsilon >= 0) || !std::isfinite(norm.epsilon))
        rejectf("norm.epsilon: expected a finite number of at least 0, got %g", norm.epsilon);
    const std::pair<const char*, const void*> arrays[] = {{"call.source", call.source},
                                                          {"call.target", call.target},
                                                          {"norm.residual", norm.residual},
                                                          {"norm.weight", norm.weight},
                                                          {"norm.output", norm.output}};
    for (const auto& [name, address] : arrays) {
        check_pointer(name, address);
        if (reinterpret_cast<uint64_t>(address) % cuda::PACK)
            rejectf("%s: expected an address that is a multiple of %d, got %p", name, int(cuda::PACK), address);
    }
}

}  // namespace

int rc_cuda_plan_of(const rc_cuda_shape* shape, const rc_cuda_limits* limits, int collective, const rc_call* arguments,
                    int kernel, rc_cuda_plan* plan) {
    return guarded([&] {
        check_pointer("shape", shape);
        check_pointer("limits", limits);
        check_pointer("call", arguments);
        check_pointer("plan", plan);
        check_collective(collective);
        check_dtype(arguments->dtype);
        check_range("kernel", kernel, -1, cuda::KERNELS - 1);
        const auto given = cuda::bits_as<cuda::Shape>(*shape);
        if (!cuda::valid(given)) reject("the shape of the CUDA arena is invalid");
        CallRecord call = called(collective, *arguments);
        call.item = rc_dtype_bytes(call.dtype);
        *plan = exported(plan_launch(call, given.ranks, given, *limits, kernel));
    });
}

uint64_t rc_gpus_table_bytes(int ranks) { return MAX_LAUNCHES * 2 * (uint64_t(ranks) + 1) * sizeof(uint64_t); }

int rc_gpus_open(rc_comm* host, const rc_gpus_setup* setup, rc_gpus** gpus) {
    return enter(host, [&](const EntryGuard& entry) {
        check_pointer("setup", setup);
        check_pointer("gpus", gpus);
        check_pointer("setup.arena", setup->arena);
        check_pointer("setup.control", setup->control);
        check_pointer("setup.tables", setup->tables);
        check_pointer("setup.driver", setup->driver);
        check_pointer("setup.device", setup->device);
        check_range("setup.threads", setup->threads, 1, 1024);
        check_range("setup.shape.ranks", setup->shape.ranks, entry.group().size, entry.group().size);
        if (!cuda::valid(cuda::bits_as<cuda::Shape>(setup->shape))) reject("the shape of the CUDA arena is invalid");
        *gpus = new rc_gpus{host->handle, {open_driver(setup->driver), *setup, entry.group().rank}};
    });
}

int rc_gpus_end_calls(rc_gpus* gpus, int* captured, int* raised) {
    return enter(gpus, [&](PeerGroup&) {
        check_pointer("captured", captured);
        check_pointer("raised", raised);
        *captured = gpus->group.end_calls();
        *raised = gpus->host->raised.load();
    });
}

int rc_gpus_stop(rc_gpus* gpus) {
    return guarded([&] {
        check_pointer("gpus", gpus);
        if (!gpus->host->forked()) gpus->group.stop();
    });
}

void rc_gpus_free(rc_gpus* gpus) {
    if (gpus && !gpus->host->forked()) delete gpus;
}

int rc_gpus_plan(rc_gpus* gpus, int collective, const rc_call* arguments, int kernel, rc_cuda_plan* plan, int* loaded) {
    return enter(gpus, [&](PeerGroup& host) {
        check_pointer("plan", plan);
        check_pointer("loaded", loaded);
        check_range("kernel", kernel, -1, cuda::KERNELS - 1);
        const LaunchPlan made = gpus->group.plan(checked(host, collective, arguments, 0), host.size, kernel);
        *plan = exported(made);
        *loaded = gpus->group.is_loaded(made);
    });
}

int rc_gpus_load(rc_gpus* gpus, const rc_cuda_plan* plan, void* function) {
    return enter(gpus, [&](PeerGroup&) {
        check_pointer("plan", plan);
        check_pointer("function", function);
        check_range("plan.kernel", plan->kernel, 0, cuda::KERNELS - 1);
        check_dtype(plan->dtype);
        check_range("plan.op", plan->op, 0, RC_OPS - 1);
        gpus->group.load(plan->kernel, plan->dtype, plan->op, function);
    });
}

int rc_gpus_set_buffers(rc_gpus* gpus, const rc_gpu_buffer* buffers, int count) {
    return enter(gpus, [&](PeerGroup&) {
        check_range("count", count, 0, INT32_MAX);
        if (count) check_pointer("buffers", buffers);
        gpus->group.set_buffers({buffers, buffers + count});
    });
}

int rc_gpus_call(rc_gpus* gpus, int collective, const rc_call* arguments, void* stream, double timeout, int mode,
                 uint64_t* number) {
    return enter(gpus, [&](PeerGroup& host) {
        reject_in_signal_handler(host);
        check_range("mode", mode, RC_GPUS_PLAIN, RC_GPUS_ASYNC);
        const CallRecord call = checked(host, collective, arguments, timeout);
        host.ensure_ready();
        const uint64_t made = gpus->group.call(host, call, static_cast<CUstream>(stream), rc_gpus_mode(mode));
        if (number) *number = made;
    });
}

int rc_gpus_rms_norm(rc_gpus* gpus, const rc_call* arguments, const rc_rms_norm* norm, void* stream, double timeout,
                     int mode, uint64_t* number) {
    return enter(gpus, [&](PeerGroup& host) {
        reject_in_signal_handler(host);
        check_range("mode", mode, RC_GPUS_PLAIN, RC_GPUS_ASYNC);
        check_pointer("norm", norm);
        const CallRecord call = checked(host, RC_ALL_REDUCE, arguments, timeout);
        check_norm(call, *norm, gpus->group.shape().stage_bytes);
        host.ensure_ready();
        const cuda::RmsNorm given{static_cast<const cuda::byte*>(norm->residual),
                                  static_cast<const cuda::byte*>(norm->weight), static_cast<cuda::byte*>(norm->output),
                                  norm->width, norm->epsilon};
        const uint64_t made = gpus->group.call(host, call, static_cast<CUstream>(stream), rc_gpus_mode(mode), given);
        if (number) *number = made;
    });
}

int rc_gpus_allow_fast(rc_gpus* gpus, int allowed) {
    return enter(gpus, [&](PeerGroup&) { gpus->group.allow_fast(allowed); });
}

int rc_gpus_order(rc_gpus* gpus, uint64_t number, void* stream) {
    return enter(gpus, [&](PeerGroup& host) {
        reject_in_signal_handler(host);
        gpus->group.order(number, static_cast<CUstream>(stream));
    });
}

int rc_gpus_capturing(rc_gpus* gpus, void* stream, int* capturing) {
    return enter(gpus, [&](PeerGroup&) {
        check_pointer("capturing", capturing);
        *capturing = gpus->group.capturing(static_cast<CUstream>(stream));
    });
}

int rc_gpus_ended(rc_gpus* gpus, uint64_t number) { return !gpus || gpus->group.ended(number); }

uint64_t rc_gpus_launched(rc_gpus* gpus) { return gpus ? gpus->group.launched() : 0; }

void* rc_gpus_stream(rc_gpus* gpus) { return gpus ? gpus->group.own_stream() : nullptr; }

int rc_gpus_wait(rc_gpus* gpus, uint64_t number, double timeout) {
    return enter(gpus, [&](PeerGroup& host) {
        if (gpus->group.ended(number)) return;
        reject_in_signal_handler(host);
        check_seconds("timeout", timeout);
        gpus->group.wait(host, number, timeout);
    });
}

int rc_gpus_describe(rc_gpus* gpus, uint64_t number, char* text, uint64_t bytes, double* timeout,
                     int* by_copy_engines) {
    return guarded([&] {
        check_pointer("gpus", gpus);
        check_pointer("text", text);
        check_pointer("timeout", timeout);
        check_pointer("by_copy_engines", by_copy_engines);
        const LaunchInfo launch = gpus->group.info(number);
        if (!launch.number) reject("number: expected one of the last calls");
        copy_text(text, bytes, described(launch));
        *timeout = launch.timeout;
        *by_copy_engines = launch.by_copy_engines;
    });
}

int rc_gpus_watch(rc_gpus* gpus, int* stopped) {
    return guarded([&] {
        check_pointer("gpus", gpus);
        check_pointer("stopped", stopped);
        gpus->group.begin_watching();
        *stopped = 0;
        for (;; gpus->group.sleep()) {
            if ((*stopped = gpus->group.stopped() || gpus->host->closed.load())) return;
            const EntryGuard entry(*gpus->host);
            if (gpus->group.poll_launches(entry.group())) return;
        }
    });
}

int rc_gpus_notify(rc_gpus* gpus, uint64_t number) {
    return enter(gpus, [&](PeerGroup&) { gpus->group.notify(number); });
}

int rc_gpus_interrupted(rc_gpus* gpus, int* interrupted) {
    return guarded([&] {
        check_pointer("gpus", gpus);
        check_pointer("interrupted", interrupted);
        const std::shared_ptr<CommState> state = gpus->host->state;  // nullptr once the communicator is closed
        *interrupted = state && state->group->interrupted_here();
    });
}

int rc_gpus_resume(rc_gpus* gpus) {
    return enter(gpus, [&](PeerGroup&) { gpus->group.resume(); });
}
