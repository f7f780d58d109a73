// SymmetricBuffer and SymmetricBufferTable: symmetric buffers.
#include "memory/symmetric_buffers.h"

namespace ringcomm {

size_t symmetric_part_bytes(size_t bytes) { return round_up(bytes + LINE, PAGE); }

SymmetricBuffer::SymmetricBuffer(std::shared_ptr<File> file, uint64_t offset, size_t bytes, int rank, int size)
    : file_(std::move(file)),
      offset_(offset),
      part_bytes_(symmetric_part_bytes(bytes)),
      rank_(rank),
      size_(size),
      mapping_(file_->map(offset, size * part_bytes_)) {
    try {
        file_->allocate(offset + rank * part_bytes_, part_bytes_);
    } catch (...) {  // the other ranks will release it too
        release();
        count_destroyed();
        throw;
    }
}

SymmetricBuffer::~SymmetricBuffer() { count_destroyed(); }

void SymmetricBuffer::count_destroyed() {
    const uint64_t page = offset_ + part_bytes_ - PAGE;
    if (counters().destroyed.fetch_add(1) + 1 == uint32_t(size_)) file_->discard(page, PAGE);
}

uint64_t SymmetricBuffer::locate(const std::byte* address, size_t bytes) const {
    const std::byte* begin = data();
    if (address < begin || address + bytes > begin + part_bytes_) return 0;
    return offset_ + (address - mapping_->base());
}

std::byte* SymmetricBuffer::resolve(uint64_t location) const {
    if (location < offset_ || location >= offset_ + size_ * part_bytes_) return nullptr;
    return mapping_->base() + (location - offset_);
}

void SymmetricBuffer::release() {
    if (counters().released.fetch_add(1) + 1 != uint32_t(size_)) return;
    // All but the page of the counters, which the last rank to destroy the buffer discards.
    file_->discard(offset_, part_bytes_ - PAGE);
    file_->discard(offset_ + part_bytes_, (size_ - 1) * part_bytes_);
}

void SymmetricBufferTable::sweep() {
    std::erase_if(buffers_, [](const auto& known) { return known->released_by_all(); });
}

void SymmetricBufferTable::release(SymmetricBuffer& buffer) {
    const std::lock_guard lock(mutex_);
    buffer.release();
    sweep();
}

void SymmetricBufferTable::add(std::shared_ptr<SymmetricBuffer> buffer) {
    const std::lock_guard lock(mutex_);
    sweep();
    buffers_.push_back(std::move(buffer));
}

uint64_t SymmetricBufferTable::locate(const std::byte* address, size_t bytes) {
    const std::lock_guard lock(mutex_);
    for (const auto& buffer : buffers_) {
        if (const uint64_t location = buffer->locate(address, bytes)) return location;
    }
    return 0;
}

std::shared_ptr<std::byte> SymmetricBufferTable::resolve(uint64_t location) {
    const std::lock_guard lock(mutex_);
    for (const auto& buffer : buffers_) {
        if (std::byte* address = buffer->resolve(location)) return {buffer, address};
    }
    return nullptr;
}

}  // namespace ringcomm
