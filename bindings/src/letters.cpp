#include "letters.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <utility>

#include "parcel.h"

namespace ringcomm {

namespace {

// The kernel pays for each page that it reads, so only what lies in huge pages is read from another process: with small
// ones, 16 MiB take 2.4 ms, and 1.1 in pieces (Zen 5, both ranks sending).
constexpr size_t FETCHES_FROM = 256 << 10;
constexpr size_t FETCH_BYTES = 4 << 20;  // read at once, and the lock is held meanwhile; 1 MiB costs a tenth more

}  // namespace

Letters::Letters(Comm& comm) : comm_(comm) {
    for (int p = 0; p < comm.size; ++p) {
        if (p == comm.rank) continue;
        pairs_.push_back(
            {p, Outbox(comm.arena(), comm.rank, p, comm.tuning().stream_bytes), Inbox(comm.arena(), p, comm.rank)});
    }
}

void Letters::send(const Message& message) {
    Parcel sent(true, message);
    post({&sent});
    wait(sent);
    sent.result();
}

int Letters::receive(const Message& message) {
    Parcel received(false, message);
    post({&received});
    wait(received);
    received.result();
    return received.source;
}

int Letters::exchange(const Message& outgoing, const Message& incoming) {
    Parcel received(false, incoming), sent(true, outgoing);
    post({&received, &sent});
    wait(sent);
    wait(received);  // also if the send failed: nothing may write to the target after this returns
    sent.result();
    received.result();
    return received.source;
}

std::shared_ptr<Work> Letters::start(bool sends, const Message& message) {
    const auto posted = std::make_shared<Posted>(*this, sends, message);
    post({&posted->parcel}, posted);
    return posted;
}

void Letters::post(std::initializer_list<Parcel*> parcels, const std::shared_ptr<Posted>& posted) {
    comm_.ready();
    for (Parcel* parcel : parcels) {
        const int peer = parcel->message.peer;
        if (parcel->sends && comm_.closed(peer)) comm_.fail(*comm_.gone(peer, parcel->words()));
    }
    const std::lock_guard lock(mutex_);
    if (stopping_) throw Failure(RC_CLOSED, "this communicator is closed", comm_.rank);
    if (posted) {
        // First of all, for it may fail.
        if (!worker_.joinable()) worker_ = named_thread("ringcomm-p2p", [this] { work(); });
        posted->parcel.posted = posted;
        ++background_;
    }
    const uint64_t start = tick_ns();
    for (Parcel* parcel : parcels) {
        parcel->start = start;
        parcel->flight = comm_.flight_start(parcel->signature(), parcel->message.count, 0, start);
    }
    try {
        for (Parcel* parcel : parcels) offer(*parcel);
        progress();
    } catch (const std::exception& error) {  // out of memory: what was half done cannot be undone
        const Failure failure(RC_SYSTEM, error.what(), comm_.rank);
        comm_.store_failure(failure);
        drop_all(failure);
        for (Parcel* parcel : parcels) {
            if (!parcel->is_done()) fail(*parcel, failure);
        }
        throw failure;
    }
    if (background_) worker_wakes_.notify_one();
}

void Letters::offer(Parcel& parcel) {
    const Message& message = parcel.message;
    if (parcel.sends && message.peer == comm_.rank) {
        match(comm_.rank, {LETTER_MESSAGE, uint32_t(message.dtype), message.tag, parcel.bytes, 0, 0}, message.data);
        complete(parcel);
        return;
    }
    if (parcel.sends) {
        Pair& pair = with(message.peer);
        put(pair, {parcel.bytes <= pair.out.message_bytes() ? LETTER_MESSAGE : LETTER_OFFER, &parcel, 0});
        return;
    }
    const auto found = std::find_if(unexpected_.begin(), unexpected_.end(), [&](const Unexpected& arrived) {
        return parcel.takes(arrived.source, arrived.heading);
    });
    if (found == unexpected_.end()) {
        receives_.push_back(&parcel);
        return;
    }
    const Unexpected arrived = std::move(*found);
    unexpected_.erase(found);
    deliver(parcel, arrived.source, arrived.heading, arrived.payload.data());
}

// Moves what can move now, of each large message one piece, for the lock is held.
void Letters::progress() {
    bool moved = false;
    for (Pair& pair : pairs_) {
        moved |= flush(pair);
        moved |= drain(pair);
        moved |= fetch(pair);
    }
    // There may be more to move, which nobody else will ring for: who sleeps, or is about to, shall look again.
    if (std::exchange(completed_, false) || moved) ring_any(comm_.mine().letter_bell);
}

// Whoever has to wait for room waits in line, so letters keep their order and large messages do not starve.
void Letters::put(Pair& pair, Outgoing letter) {
    if (!pair.queue.empty() || !write(pair, letter)) pair.queue.push_back(letter);
}

// One round: of a large message one piece.
bool Letters::flush(Pair& pair) {
    bool written = false;
    for (size_t left = pair.queue.size(); left && write(pair, pair.queue.front()); --left) {
        pair.queue.pop_front();
        written = true;
    }
    return written;
}

// False if there is no room for it yet. What ends with this letter is complete only now: who has been told that it is
// may never call again, and then nobody would write the letter.
bool Letters::write(Pair& pair, Outgoing letter) {
    Parcel* const parcel = letter.parcel;
    Heading heading{letter.kind, 0, 0, 0, letter.number, 0};
    const std::byte* payload = nullptr;
    if (letter.kind == LETTER_PIECE) {
        heading.bytes = std::min(pair.out.piece_bytes(), parcel->bytes - parcel->moved);
        payload = parcel->message.data + parcel->moved;
    } else if (letter.kind == LETTER_MESSAGE || letter.kind == LETTER_OFFER) {
        heading.dtype = parcel->message.dtype;
        heading.tag = parcel->message.tag;
        heading.bytes = parcel->bytes;
        if (letter.kind == LETTER_MESSAGE) {
            payload = parcel->message.data;
        } else {
            heading.number = pair.offers + 1;
            heading.place = readable(pair.peer, *parcel) ? reinterpret_cast<uintptr_t>(parcel->message.data) : 0;
        }
    }
    if (!pair.out.write(heading, payload)) return false;
    ring_any(comm_.header(pair.peer).letter_bell);
    switch (letter.kind) {
        case LETTER_MESSAGE: complete(*parcel); break;
        case LETTER_OFFER:
            parcel->number = ++pair.offers;
            pair.offered.push_back(parcel);
            break;
        case LETTER_PIECE:
            parcel->moved += heading.bytes;
            if (parcel->moved < parcel->bytes) {
                pair.queue.push_back(letter);
            } else {
                std::erase(pair.offered, parcel);
                complete(*parcel);
            }
            break;
        case LETTER_FETCHED:
        case LETTER_REFUSED:
            std::erase(pair.incoming, parcel);
            complete(*parcel);
            break;
        case LETTER_WANTED: break;
    }
    return true;
}

// Until the writer has been told of new room: of a large message one piece.
bool Letters::drain(Pair& pair) {
    bool read = false, told = false;
    for (const Letter* letter; !told && (letter = pair.in.next()); read = true) {
        arrive(pair, letter->heading, pair.in.payload(*letter));
        told = pair.in.take();
    }
    if (told) ring_any(comm_.header(pair.peer).letter_bell);
    return read;
}

void Letters::arrive(Pair& pair, const Heading& heading, const std::byte* payload) {
    if (heading.kind == LETTER_MESSAGE || heading.kind == LETTER_OFFER) return match(pair.peer, heading, payload);
    // What this rank has let go of is not found: the communicator is broken.
    std::vector<Parcel*>& parcels = heading.kind == LETTER_PIECE ? pair.incoming : pair.offered;
    const auto found =
        std::find_if(parcels.begin(), parcels.end(), [&](Parcel* parcel) { return parcel->number == heading.number; });
    if (found == parcels.end()) return;
    Parcel& parcel = **found;
    if (heading.kind == LETTER_WANTED) return put(pair, {LETTER_PIECE, &parcel, heading.number});
    if (heading.kind == LETTER_PIECE) {
        memcpy(parcel.message.data + parcel.moved, payload, heading.bytes);
        parcel.moved += heading.bytes;
        if (parcel.moved < parcel.bytes) return;
    }
    parcels.erase(found);
    if (heading.kind == LETTER_REFUSED) {
        const std::string words = parcel.words();
        Failure mismatch(RC_MISMATCH, format("rank %d expects another size or dtype than ", pair.peer) + words,
                         pair.peer);
        mismatch.error.peer = pair.peer;
        copy_text(mismatch.error.got, sizeof mismatch.error.got, words);
        parcel.failure = std::make_unique<Failure>(mismatch);
    }
    complete(parcel);
}

// A message or an offer of one: whose is it?
void Letters::match(int source, const Heading& heading, const std::byte* payload) {
    const auto found = std::find_if(receives_.begin(), receives_.end(),
                                    [&](const Parcel* parcel) { return parcel->takes(source, heading); });
    if (found == receives_.end()) {
        // The sender's buffer is free already, so a payload must be kept here until somebody asks for it.
        const size_t bytes = heading.kind == LETTER_MESSAGE ? heading.bytes : 0;
        unexpected_.push_back({source, heading, {payload, payload + bytes}});
        return;
    }
    Parcel& parcel = **found;
    receives_.erase(found);
    deliver(parcel, source, heading, payload);
}

void Letters::deliver(Parcel& parcel, int source, const Heading& heading, const std::byte* payload) {
    parcel.source = source;
    parcel.number = heading.number;
    const bool fits = heading.bytes == parcel.bytes && heading.dtype == uint32_t(parcel.message.dtype);
    if (!fits) {
        const std::string sent =
            format("%s x %zu", dtype_name(heading.dtype), size_t(heading.bytes / dtype_bytes(heading.dtype)));
        Failure mismatch(RC_MISMATCH, format("rank %d sent %s, but ", source, sent.c_str()) + parcel.words(), source);
        mismatch.error.peer = source;
        copy_text(mismatch.error.expected, sizeof mismatch.error.expected,
                  format("%s x %" PRIu64, dtype_name(parcel.message.dtype), parcel.message.count));
        copy_text(mismatch.error.got, sizeof mismatch.error.got, sent);
        parcel.failure = std::make_unique<Failure>(mismatch);
    }
    if (heading.kind == LETTER_MESSAGE) {
        if (fits && parcel.bytes) memcpy(parcel.message.data, payload, parcel.bytes);
        complete(parcel);
        return;
    }
    Pair& pair = with(source);
    pair.incoming.push_back(&parcel);
    if (!fits) {
        put(pair, {LETTER_REFUSED, &parcel, heading.number});
    } else if (heading.place && comm_.world->reach.works(comm_.group().members[source])) {
        parcel.address = heading.place;
    } else {
        put(pair, {LETTER_WANTED, &parcel, heading.number});
    }
}

// Whether the peer had better read it from the memory of this rank than ask for it in pieces; the page in the middle
// speaks for all.
bool Letters::readable(int peer, const Parcel& parcel) const {
    Reach& reach = comm_.world->reach;
    const rc_tuning& tuning = comm_.tuning();
    const std::byte* middle = parcel.message.data + parcel.bytes / 2;
    if (parcel.bytes >= tuning.direct_bytes && reach.same_process(comm_.group().members[peer])) return true;
    // Set by the user, reach_bytes holds for all pages.
    if (tuning.reach_bytes == tuning.reach_huge_bytes)
        return parcel.bytes >= tuning.reach_bytes && reach.copies(middle);
    return parcel.bytes >= FETCHES_FROM && reach.huge(middle);
}

// Reads the next part of the first message that lies in the memory of the peer.
bool Letters::fetch(Pair& pair) {
    const auto found =
        std::find_if(pair.incoming.begin(), pair.incoming.end(), [](Parcel* parcel) { return parcel->address != 0; });
    if (found == pair.incoming.end()) return false;
    Parcel& parcel = **found;
    Reach& reach = comm_.world->reach;
    const int member = comm_.group().members[pair.peer];
    const bool same_process = reach.same_process(member);
    const auto address = reinterpret_cast<const std::byte*>(parcel.address) + parcel.moved;
    const size_t length = std::min(FETCH_BYTES, parcel.bytes - parcel.moved);
    const auto read = [&](std::byte* target) {
        if (!same_process) return reach.read(member, target, address, length);
        memcpy(target, address, length);
        return true;
    };
    pair.in.reading(same_process);  // a thread does not let go of its memory while this one reads; a process may
    const bool done = keeps(pair.peer) && read(parcel.message.data + parcel.moved);
    pair.in.reading(false);
    if (!keeps(pair.peer)) return false;  // the next look says why
    parcel.moved += length;
    if (done && parcel.moved < parcel.bytes) return true;
    if (comm_.world->dead(member)) return false;  // another process may have its number, and was read
    parcel.address = 0;
    if (!done) parcel.moved = 0;
    put(pair, {done ? LETTER_FETCHED : LETTER_WANTED, &parcel, parcel.number});
    return true;
}

// False once a sender may have let go of its memory, which then holds something else.
bool Letters::keeps(int peer) const { return !comm_.broken() && !comm_.closed(peer); }

void Letters::complete(Parcel& parcel) {
    comm_.flight_end(parcel.flight, parcel.failure ? parcel.failure->error.code : RC_OK);
    completed_ = true;
    const auto posted = std::move(parcel.posted);
    if (posted) {
        --background_;
        posted->source = parcel.source;
        posted->finish(parcel.failure ? std::optional(*parcel.failure) : std::nullopt);
    }
    parcel.done.store(true, std::memory_order_release);  // last: whoever waits may let go of it at once
}

void Letters::fail(Parcel& parcel, const Failure& failure) {
    parcel.failure = std::make_unique<Failure>(failure);
    complete(parcel);
}

}  // namespace ringcomm
