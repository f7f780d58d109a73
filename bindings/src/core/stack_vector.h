// A vector of few items, which allocates none of them: of the requests of one call.
#pragma once

#include <cstddef>
#include <memory_resource>
#include <vector>

namespace ringcomm {

template <class Item>
class StackVector {
public:
    StackVector() { items.reserve(FEW); }
    StackVector(const StackVector&) = delete;

private:
    static constexpr size_t FEW = 16;  // more are allocated
    alignas(Item) std::byte memory_[FEW * sizeof(Item)];
    std::pmr::monotonic_buffer_resource resource_{memory_, sizeof memory_};

public:
    std::pmr::vector<Item> items{&resource_};
};

}  // namespace ringcomm
