// A transfer that the program has started, as a Work.
#pragma once

#include "p2p/engine.h"

namespace ringcomm {

// Owns its request.
class AsyncRequest : public Work, public std::enable_shared_from_this<AsyncRequest> {
public:
    AsyncRequest(PointToPointEngine& engine, const rc_transfer& given)
        : transfer(given), request(transfer), engine_(engine) {
        request.owner = this;
    }
    // Under the engine's lock: its last end may still be under way.
    void open() {
        if (done()) {
            restart();
            request.restart();
        }
        request.async = shared_from_this();
    }
    void wait(PeerGroup&, uint64_t deadline) override { engine_.wait(request, deadline); }
    bool cancel() override { return engine_.cancel(request); }
    void advance() override { engine_.advance(); }
    void detach() override { engine_.detach(); }

    const rc_transfer transfer;
    Request request;

protected:
    PointToPointEngine& engine_;
};

}  // namespace ringcomm
