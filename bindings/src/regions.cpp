#include "regions.h"

namespace ringcomm {

size_t region_part_bytes(size_t bytes) { return round_up(bytes + LINE, PAGE); }

Region::Region(std::shared_ptr<File> file, uint64_t offset, size_t bytes, int rank, int size)
    : file_(std::move(file)),
      offset_(offset),
      part_bytes_(region_part_bytes(bytes)),
      rank_(rank),
      size_(size),
      mapping_(file_->map(offset, size * part_bytes_)) {
    try {
        file_->back(offset + rank * part_bytes_, part_bytes_);
    } catch (...) {  // the others will let go of it too
        release();
        forget();
        throw;
    }
}

Region::~Region() { forget(); }

void Region::forget() {
    const uint64_t page = offset_ + part_bytes_ - PAGE;
    if (control().forgotten.fetch_add(1) + 1 == uint32_t(size_)) file_->give_back(page, PAGE);
}

uint64_t Region::key(const std::byte* address, size_t bytes) const {
    const std::byte* begin = data();
    if (address < begin || address + bytes > begin + part_bytes_) return 0;
    return offset_ + (address - begin);
}

void Region::release() {
    if (control().released.fetch_add(1) + 1 != uint32_t(size_)) return;
    // All but the page of the counters, which whoever forgets the region last gives back.
    file_->give_back(offset_, part_bytes_ - PAGE);
    file_->give_back(offset_ + part_bytes_, (size_ - 1) * part_bytes_);
}

void RegionTable::sweep() {
    std::erase_if(regions_, [](const auto& known) { return known->released_by_all(); });
}

void RegionTable::release(Region& region) {
    const std::lock_guard lock(mutex_);
    region.release();
    sweep();
}

void RegionTable::add(std::shared_ptr<Region> region) {
    const std::lock_guard lock(mutex_);
    sweep();
    regions_.push_back(std::move(region));
}

uint64_t RegionTable::key(const std::byte* address, size_t bytes) {
    const std::lock_guard lock(mutex_);
    for (const auto& region : regions_) {
        if (const uint64_t key = region->key(address, bytes)) return key;
    }
    return 0;
}

std::shared_ptr<Region> RegionTable::holder(uint64_t key) {
    const std::lock_guard lock(mutex_);
    for (const auto& region : regions_) {
        if (region->holds(key)) return region;
    }
    return nullptr;
}

}  // namespace ringcomm
