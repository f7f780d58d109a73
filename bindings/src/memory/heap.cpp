// Heap: the memory of shared arrays.
#include "memory/heap.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

namespace ringcomm {

namespace {

#ifndef MADV_POPULATE_WRITE  // Linux 5.14
constexpr int MADV_POPULATE_WRITE = 23;
#endif

// Left out of core dumps: these would take as long as the range is large.
std::shared_ptr<Mapping> map_heap(File& file, uint64_t offset, size_t bytes) {
    auto mapping = file.map(offset, bytes);
    madvise(mapping->base(), bytes, MADV_DONTDUMP);
    madvise(mapping->base(), bytes, MADV_HUGEPAGE);  // where the machine has them for shared memory
    return mapping;
}

}  // namespace

void FreeRanges::insert(Range range) {
    const auto added = by_address_.emplace(range.begin, range.bytes).first;
    try {
        by_size_.emplace(range.bytes, range.begin);
    } catch (...) {  // both have a range, or neither
        by_address_.erase(added);
        throw;
    }
    bytes_ += range.bytes;
}

void FreeRanges::erase(ByAddress::iterator range) {
    bytes_ -= range->second;
    by_size_.erase({range->second, range->first});
    by_address_.erase(range);
}

void FreeRanges::add(Range range) {
    if (range.bytes == 0) return;
    const auto behind = by_address_.lower_bound(range.begin);
    const auto before = behind == by_address_.begin() ? by_address_.end() : std::prev(behind);
    if (behind != by_address_.end() && behind->first == range.begin + range.bytes) {
        range.bytes += behind->second;
        erase(behind);
    }
    if (before != by_address_.end() && before->first + before->second == range.begin) {
        range = {before->first, before->second + range.bytes};
        erase(before);
    }
    insert(range);
}

std::byte* FreeRanges::take(size_t bytes) {
    const auto found = by_size_.lower_bound({bytes, nullptr});
    if (found == by_size_.end()) return nullptr;
    const auto [length, begin] = *found;
    erase(by_address_.find(begin));
    if (length > bytes) insert({begin + bytes, length - bytes});
    return begin;
}

FreeRanges::Range FreeRanges::take_largest(size_t most) {
    const auto [length, begin] = *by_size_.rbegin();
    erase(by_address_.find(begin));
    const size_t left = length - std::min(length, most);
    if (left) insert({begin, left});
    return {begin + left, length - left};
}

Heap::Heap(std::shared_ptr<File> file, uint64_t offset, size_t bytes)
    : file_(std::move(file)), offset_(offset), bytes_(bytes), mapping_(map_heap(*file_, offset, bytes)) {
    empty_.add({mapping_->base(), bytes});
}

Heap::~Heap() {
    if (!forked()) file_->discard(offset_, bytes_);
}

std::byte* Heap::allocate(size_t bytes, bool zeroed, size_t granted) {
    if (bytes > bytes_ || forked()) return nullptr;
    const size_t whole = round_up(bytes, PAGE);
    std::unique_lock lock(mutex_);
    granted_ = std::max(granted_, granted);
    std::byte* block = kept_.take(whole);
    const bool used_before = block;
    if (!block) block = take_pages(whole);
    if (!block) return nullptr;
    blocks_[block] = {whole, false};
    used_ += whole;
    lock.unlock();
    if (zeroed && used_before) memset(block, 0, whole);
    return block;
}

std::byte* Heap::take_pages(size_t bytes) {
    if (granted_ < bytes) return nullptr;
    std::byte* const block = empty_.take(bytes);
    if (!block) return nullptr;
    try {
        file_->allocate(offset(block), bytes);
    } catch (const Failure&) {
        discard({block, bytes});
        return nullptr;
    }
    granted_ -= bytes;
    // One call in place of a fault for each page. Kernels that do not know it leave that to the faults.
    madvise(block, bytes, MADV_POPULATE_WRITE);
    return block;
}

bool Heap::resize(std::byte* block, size_t bytes) {
    if (forked()) return false;
    const size_t whole = round_up(std::max(bytes, size_t{1}), PAGE);
    const std::lock_guard lock(mutex_);
    Block& known = blocks_.find(block)->second;
    if (known.retired || whole > known.bytes) return false;
    kept_.add({block + whole, known.bytes - whole});
    used_ -= known.bytes - whole;
    known.bytes = whole;
    trim();
    return true;
}

void Heap::free(std::byte* block) {
    if (forked()) return;
    const std::lock_guard lock(mutex_);
    const auto known = blocks_.find(block);
    const auto [bytes, retired] = known->second;
    blocks_.erase(known);
    used_ -= bytes;
    if (retired) {
        file_->discard(offset(block), bytes);  // its addresses stay out of use
    } else {
        kept_.add({block, bytes});
    }
    trim();
}

size_t Heap::bytes(const std::byte* block) {
    const std::unique_lock lock = forked() ? std::unique_lock(mutex_, std::try_to_lock) : std::unique_lock(mutex_);
    return lock ? blocks_.at(block).bytes : 0;
}

void Heap::give_back() {
    const std::lock_guard lock(mutex_);
    while (kept_.bytes()) discard(kept_.take_largest(bytes_));
    granted_ = 0;
}

void Heap::retire(const std::byte* address) {
    const std::lock_guard lock(mutex_);
    const auto behind = blocks_.upper_bound(address);
    if (behind == blocks_.begin()) return;
    auto& [begin, block] = *std::prev(behind);
    if (address < begin + block.bytes) block.retired = true;
}

void Heap::discard(FreeRanges::Range range) {
    file_->discard(offset(range.begin), range.bytes);
    empty_.add(range);
}

void Heap::trim() {
    while (kept_.bytes() > used_ + KEPT) discard(kept_.take_largest(kept_.bytes() - used_ - KEPT));
}

Heaps::Heaps(std::shared_ptr<File> file, uint64_t begin, size_t each, int rank, int size)
    : file_(std::move(file)), begin_(begin), each_(each), rank_(rank), mapped_(size) {}

std::shared_ptr<Heap> Heaps::open() {
    if (each_ == 0) return nullptr;
    const std::lock_guard lock(mutex_);
    if (!own_) {
        own_ = std::make_shared<Heap>(file_, begin_ + rank_ * each_, each_);
        opened_.store(own_.get());
    }
    return own_;
}

uint64_t Heaps::locate(const std::byte* address, size_t bytes) const {
    const Heap* const heap = opened_.load(std::memory_order_acquire);
    if (!heap || bytes == 0 || !heap->contains(address) || !heap->contains(address + bytes - 1)) return 0;
    return heap->offset(address);
}

std::shared_ptr<std::byte> Heaps::resolve(uint64_t location) {
    if (location < begin_ || location - begin_ >= mapped_.size() * each_) return nullptr;
    const uint64_t owner = (location - begin_) / each_, at = (location - begin_) % each_;
    const std::lock_guard lock(mutex_);
    std::shared_ptr<Mapping>& heap = mapped_[owner];
    if (!heap) heap = map_heap(*file_, begin_ + owner * each_, each_);
    return {heap, heap->base() + at};
}

void Heaps::retire(const std::byte* address) {
    Heap* const heap = opened_.load(std::memory_order_acquire);
    if (heap && heap->contains(address)) heap->retire(address);
}

}  // namespace ringcomm
