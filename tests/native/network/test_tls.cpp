// TlsStream: its bytes are those of the other end, whatever the socket takes at once; and how it ends.
#include <fcntl.h>

#include <cstring>
#include <random>

#include "tls_streams.h"

using namespace ringcomm;

namespace {

constexpr size_t ALL = 3 << 20;

void do_not_block(const StreamPair& streams) {
    for (const ByteStream* end : {streams.first.get(), streams.second.get()}) fcntl(end->fd, F_SETFL, O_NONBLOCK);
}

// Each write offers what has not been taken, from other memory; what is taken waits for no further write.
void all_bytes_arrive(size_t most, uint64_t key_records) {
    const auto streams = secured(key_records);
    do_not_block(streams);
    const int small = 4096;
    CHECK(setsockopt(streams.first->fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof small) == 0);
    const Bytes data = pattern(ALL, 1);
    Bytes found(ALL);
    std::mt19937 random(most);
    const auto some = [&](size_t left) { return std::min<size_t>(left, random() % most); };
    bool waited = false, held = false;
    for (size_t sent = 0, got = 0; got < ALL;) {
        if (sent < ALL) {
            const size_t head = some(ALL - sent), rest = some(ALL - sent - head);
            Bytes offered(data.begin() + sent, data.begin() + sent + head + rest);
            const iovec parts[]{{offered.data(), head}, {offered.data() + head, rest}};
            const ssize_t taken = streams.first->write(parts);
            CHECK(taken <= ssize_t(head + rest) && (taken >= 0 || errno == EAGAIN));
            waited |= taken < ssize_t(head + rest);
            if (taken > 0) sent += taken;
        }
        const size_t first = some(ALL - got), second = some(ALL - got - first);
        const iovec parts[]{{found.data() + got, first}, {found.data() + got + first, second}};
        const ssize_t read = streams.second->read(parts);
        CHECK(read >= 0 || errno == EAGAIN);
        held |= streams.second->holds_received();
        CHECK(!streams.second->holds_received() || read == ssize_t(first + second));
        if (read > 0) got += read;
        CHECK(got <= sent + 1);
    }
    CHECK(found == data && waited && held);
}

void nothing_readable_is_sent() {
    const auto streams = secured();
    const Bytes data = pattern(10'000, 3);
    const iovec part{const_cast<std::byte*>(data.data()), data.size()};
    CHECK(streams.first->write({&part, 1}) == ssize_t(data.size()));
    Bytes seen(20'000);
    const ssize_t got = recv(streams.second->fd, seen.data(), seen.size(), MSG_PEEK);
    CHECK(got > ssize_t(data.size()));
    CHECK(std::search(seen.begin(), seen.end(), data.begin(), data.begin() + 32) == seen.end());
}

// As soon as something has come.
ssize_t read_into(ByteStream& stream, char* data, size_t bytes) {
    const iovec part{data, bytes};
    ssize_t got;
    do got = stream.read({&part, 1});
    while (got < 0 && errno == EAGAIN);
    return got;
}

void a_closed_connection_ends() {
    auto streams = secured();
    char data[4] = "abc", got[8];
    const iovec part{data, 3};
    CHECK(streams.first->write({&part, 1}) == 3);
    streams.first.reset();
    CHECK(read_into(*streams.second, got, sizeof got) == 3 && read_into(*streams.second, got, sizeof got) == 0);
}

// A record that somebody without the keys has made.
void a_forged_record_is_refused() {
    const auto streams = secured();
    const unsigned char forged[5 + 20]{23, 3, 3, 0, 20};
    CHECK(send(streams.first->fd, forged, sizeof forged, 0) == sizeof forged);
    char got[8];
    for (int i = 0; i < 2; ++i) CHECK(read_into(*streams.second, got, sizeof got) < 0 && errno == EPROTO);
    const auto& failed = static_cast<const TlsStream&>(*streams.second);
    CHECK(failed.failure().starts_with("it sent no valid TLS"));
}

StreamPair secured_streams() { return secured(); }

void a_link_over_tls(size_t bytes, int flows) {
    auto ranks = ranks_of(2, secured_streams);
    add_flows(ranks, flows, secured_streams);
    std::deque<LinkTransfer> transfers(64);
    const Bytes data = pattern(bytes, 1);
    std::deque<Bytes> found(16, Bytes(bytes, UNTOUCHED));
    for (int i = 0; i < 16; ++i) {
        ranks[i % 2].link.send_packet(1 - i % 2, pattern(1 + i * 100, i));
        ranks[i % 2].link.send(1 - i % 2, 1, data.data(), bytes, transfers[2 * i]);
        ranks[1 - i % 2].link.receive(i % 2, 1, found[i].data(), bytes, transfers[2 * i + 1]);
    }
    const auto ended = [](const LinkTransfer& each) { return each.ended(); };
    until(ranks, [&] { return std::all_of(transfers.begin(), transfers.end(), ended) && ranks[0].link.flushed(); });
    for (const Bytes& each : found) CHECK(each == data);
    for (int r = 0; r < 2; ++r) {
        until(ranks, [&] { return ranks[r].packets[1 - r].size() == 8; });
        for (int i = 0; i < 8; ++i)
            CHECK(ranks[r].packets[1 - r][i] == pattern(1 + (2 * i + 1 - r) * 100, 2 * i + 1 - r));
    }
}

// Nothing says that a stream holds more than was read of it; the packets come all the same, without a sleep.
void what_a_stream_holds_wakes(int peers) {
    auto ranks = ranks_of(peers + 1, secured_streams);
    for (int round = 0; round < 20; ++round) {
        for (int i = 0; i < 40; ++i) ranks[1].link.send_packet(0, pattern(8000, i));
        while (ranks[0].packets[1].size() < 40) {
            ranks[1].progress();
            if (!ranks[0].progress() && ranks[1].link.flushed()) ranks[0].link.sleep(20'000'000'000);
        }
        ranks[0].packets[1].clear();
    }
}

void bad_files() {
    const auto fails = [](const std::string& own, const std::string& key, const std::string& authority,
                          const std::string& with) {
        try {
            const TlsIdentity refused(certificate(own), certificate(key), certificate(authority));
            CHECK(false);
        } catch (const Failure& failure) {
            const std::string text = failure.what();
            CHECK(failure.error.code == RC_ARGUMENT && text.find(with) != std::string::npos);
        }
    };
    fails("expired.pem", "expired.key", "authority.pem", "certificate has expired");
    fails("stranger.pem", "stranger.key", "authority.pem", "unable to get local issuer certificate");
    fails("rank.pem", "stranger.key", "authority.pem", "key values mismatch");
    fails("rank.key", "rank.key", "authority.pem", "cannot use the certificate");
    fails("rank.pem", "rank.pem", "authority.pem", "cannot use the key");
    fails("rank.pem", "rank.key", "rank.key", "cannot use the authority");
}

}  // namespace

int main() {
    for (const size_t most : {100, 5'000, 40'000, 200'000}) all_bytes_arrive(most, 5);
    all_bytes_arrive(40'000, TlsStream::KEY_RECORDS);
    nothing_readable_is_sent();
    a_closed_connection_ends();
    a_forged_record_is_refused();
    for (const size_t bytes : {0, 1, 5'000, 40'000, 3 << 20}) {
        for (const int flows : {0, 2}) a_link_over_tls(bytes, flows);
    }
    for (const int peers : {1, 11}) what_a_stream_holds_wakes(peers);
    bad_files();
    printf("test_tls: %d failures\n", failures.load());
    return failures != 0;
}
