// The C ABI of traces and of the flight record.
#include "abi/handles.h"
#include "core/signature.h"

using namespace ringcomm;

int rc_trace(rc_comm* comm, int fd) {
    return enter(comm, [&](const EntryGuard& entry) {
        if (fd < 0) return entry.group().stop_trace();
        entry.group().start_trace(fd);
    });
}

int rc_group_id(rc_comm* comm, uint64_t* id) {
    return enter(comm, [&](const EntryGuard& entry) {
        check_pointer("id", id);
        *id = entry.group().id();
    });
}

int rc_trace_mark(rc_comm* comm, const char* name) {
    return enter(comm, [&](const EntryGuard& entry) {
        check_pointer("name", name);
        Trace* trace = entry.group().trace();
        if (!trace) return;
        TraceEntry mark{TRACE_MARK, ticks(), 0, {}};
        mark.end = mark.start;
        copy_text(mark.name, sizeof mark.name, name);
        trace->add(mark);
    });
}

int rc_traced(rc_comm* comm, int* traced) {
    return enter(comm, [&](const EntryGuard& entry) {
        check_pointer("traced", traced);
        *traced = entry.group().trace() != nullptr;
    });
}

int rc_trace_parts(rc_comm* comm, int parts) {
    return enter(comm, [&](const EntryGuard& entry) { entry->collectives.trace_parts(parts); });
}

int rc_trace_launch(rc_comm* comm, int collective, int dtype, int root, uint64_t elements, uint64_t begin, uint64_t end,
                    int failed) {
    return enter(comm, [&](const EntryGuard& entry) {
        check_range("collective", collective, 0, RC_COLLECTIVES - 1);
        Trace* trace = entry.group().trace();
        if (!trace) return;
        TraceEntry launch{signature_of(collective, dtype, 0, root, false), begin, end, {}};
        launch.call = {elements, 0, 0, 0, -1, int8_t(failed ? RC_SYSTEM : RC_OK), TRACE_ON_GPU, 0};
        trace->add(launch, true);
    });
}

static int report(rc_comm* comm, int calls, char* text, uint64_t bytes, std::string (RankReport::*line)() const) {
    return enter(comm, [&](const EntryGuard& entry) {
        check_pointer("text", text);
        check_range("calls", calls, 0, FLIGHT_CALLS);
        std::string lines;
        for (int r = 0; r < entry.group().size; ++r) lines += (entry.group().report(r, calls).*line)() + "\n";
        copy_text(text, bytes, lines);
    });
}

int rc_report(rc_comm* comm, int calls, char* text, uint64_t bytes) {
    return report(comm, calls, text, bytes, &RankReport::text);
}

int rc_report_json(rc_comm* comm, int calls, char* text, uint64_t bytes) {
    return report(comm, calls, text, bytes, &RankReport::json);
}
