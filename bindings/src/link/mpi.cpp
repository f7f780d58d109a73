// The calls of MPI.
#include "link/mpi.h"

#include <time.h>

#include <algorithm>
#include <atomic>

namespace ringcomm {

namespace {

constexpr uint64_t SHORTEST_PAUSE = 10'000, LONGEST_PAUSE = 200'000;  // ns; MPI has nothing to sleep on

// Larger than that of any MPI, whose fields lie in different places.
struct alignas(16) MpiStatus {
    std::byte opaque[128];
};

void pause_for(uint64_t ns) {
    const timespec pause{time_t(ns / 1'000'000'000), long(ns % 1'000'000'000)};
    nanosleep(&pause, nullptr);
}

template <class Handle>
class MpiMessages final : public MessageLibrary {
public:
    explicit MpiMessages(const rc_mpi& mpi) : mpi_(mpi), comm_(Handle(mpi.comm)), byte_(Handle(mpi.byte)) {}

    int send(const std::byte* data, size_t bytes, int peer, uint64_t tag, uint64_t& request) override {
        using Isend = int(const void*, int, Handle, int, int, Handle, Handle*);
        return started(request, [&](Handle* handle) {
            return call<Isend>(mpi_.isend)(data, int(bytes), byte_, peer, mpi_tag(tag), comm_, handle);
        });
    }
    int receive(std::byte* data, size_t bytes, int peer, uint64_t tag, uint64_t& request) override {
        using Irecv = int(void*, int, Handle, int, int, Handle, Handle*);
        return started(request, [&](Handle* handle) {
            return call<Irecv>(mpi_.irecv)(data, int(bytes), byte_, peer, mpi_tag(tag), comm_, handle);
        });
    }
    int test(uint64_t& request, bool& done) override {
        Handle handle = Handle(request);
        int flag = 0;
        MpiStatus status;
        const int result = call<int(Handle*, int*, MpiStatus*)>(mpi_.test)(&handle, &flag, &status);
        request = uint64_t(handle);
        done = flag;
        if (done) pause_ = SHORTEST_PAUSE;
        return result;
    }
    void cancel(uint64_t request) override {
        Handle handle = Handle(request);
        call<int(Handle*)>(mpi_.cancel)(&handle);
    }
    int probe(uint64_t tag, Probed& probed) override {
        Handle handle{};
        int flag = 0, count = 0;
        MpiStatus status;
        using Improbe = int(int, int, Handle, int*, Handle*, MpiStatus*);
        using GetCount = int(const MpiStatus*, Handle, int*);
        int result = call<Improbe>(mpi_.improbe)(mpi_.any_source, mpi_tag(tag), comm_, &flag, &handle, &status);
        if (result == 0 && flag) result = call<GetCount>(mpi_.get_count)(&status, byte_, &count);
        probed.found = flag;
        probed.message = uint64_t(handle);
        probed.bytes = size_t(count);
        return result;
    }
    int receive_probed(std::byte* data, size_t bytes, uint64_t message, uint64_t& request) override {
        Handle probed = Handle(message);
        using Imrecv = int(void*, int, Handle, Handle*, Handle*);
        return started(request, [&](Handle* handle) {
            return call<Imrecv>(mpi_.imrecv)(data, int(bytes), byte_, &probed, handle);
        });
    }
    std::string describe(int status) const override {
        char text[4096] = "";
        int length = 0;
        call<int(int, char*, int*)>(mpi_.error_string)(status, text, &length);
        return std::string("MPI: ") + text;
    }
    bool any_thread() const override { return mpi_.any_thread; }
    void sleep(uint64_t ns) override {
        if (woken_.exchange(false)) return;
        const uint64_t pause = pause_;
        pause_ = std::min(LONGEST_PAUSE, pause + pause / 2);
        pause_for(std::min(ns, pause));
    }
    void wake() override { woken_ = true; }

private:
    template <class Function>
    static Function* call(void* address) {
        return reinterpret_cast<Function*>(address);
    }
    template <class Start>
    static int started(uint64_t& request, Start start) {
        Handle handle{};
        const int status = start(&handle);
        request = uint64_t(handle);
        return status;
    }
    // 0, that of packets, stays 0.
    int mpi_tag(uint64_t tag) const { return tag == 0 ? 0 : int(1 + tag % uint64_t(mpi_.most_tag)); }

    const rc_mpi mpi_;
    const Handle comm_, byte_;
    std::atomic<bool> woken_{false};
    std::atomic<uint64_t> pause_{SHORTEST_PAUSE};  // ns that the next sleep takes
};

}  // namespace

std::unique_ptr<MessageLibrary> mpi_messages(const rc_mpi& mpi) {
    if (mpi.handle_bytes == sizeof(int)) return std::make_unique<MpiMessages<int>>(mpi);
    return std::make_unique<MpiMessages<uintptr_t>>(mpi);
}

}  // namespace ringcomm
