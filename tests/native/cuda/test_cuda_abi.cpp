// cuda_abi.h says what the CUDA toolkit's cuda.h says: every number, every size and the type of every function.
#define __CUDA_API_VERSION_INTERNAL  // the names that the library exports, instead of macros for them
#include <cuda.h>

#include <type_traits>

#include "cuda/cuda_abi.h"

namespace cu = ringcomm::cu;

// ---- Numbers. Both enumerations convert to their common value.

#define RC_SAME(name) static_assert(static_cast<int>(cu::name) == static_cast<int>(::name));
#define RC_ROW(name, number, text) RC_SAME(name)
RC_CUDA_RESULTS(RC_ROW)
RC_SAME(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
RC_SAME(CU_DEVICE_ATTRIBUTE_WARP_SIZE)
RC_SAME(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
RC_SAME(CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY)
RC_SAME(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)
RC_SAME(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING)
RC_SAME(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
RC_SAME(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
RC_SAME(CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH)
RC_SAME(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
RC_SAME(CU_MEM_LOCATION_TYPE_DEVICE)
RC_SAME(CU_MEM_ALLOCATION_TYPE_PINNED)
RC_SAME(CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
RC_SAME(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
RC_SAME(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
RC_SAME(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
RC_SAME(CU_STREAM_CAPTURE_STATUS_NONE)
RC_SAME(CU_STREAM_CAPTURE_STATUS_ACTIVE)
RC_SAME(CU_STREAM_CAPTURE_STATUS_INVALIDATED)
RC_SAME(CU_STREAM_CAPTURE_MODE_GLOBAL)
RC_SAME(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
RC_SAME(CU_STREAM_CAPTURE_MODE_RELAXED)
RC_SAME(CU_EVENT_BLOCKING_SYNC)
RC_SAME(CU_EVENT_DISABLE_TIMING)
RC_SAME(CU_EVENT_INTERPROCESS)
RC_SAME(CU_STREAM_NON_BLOCKING)
RC_SAME(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
static_assert(cu::HOST_ALLOC_PORTABLE == CU_MEMHOSTALLOC_PORTABLE);
static_assert(cu::HOST_ALLOC_DEVICEMAP == CU_MEMHOSTALLOC_DEVICEMAP);

// ---- Types. Those of the same name differ, so each side is reduced to what a call passes.

template <class T>
struct PassedAs {
    using type = T;
};
template <class T>
    requires std::is_enum_v<T>
struct PassedAs<T> {
    static_assert(sizeof(T) == sizeof(unsigned));
    using type = unsigned;
};
template <class T>
struct PassedAs<T*> {
    using type = typename PassedAs<T>::type*;
};
template <>
struct PassedAs<::CUipcMemHandle> {
    using type = cu::CUipcMemHandle;
};
template <>
struct PassedAs<::CUuuid> {
    using type = cu::CUuuid;
};
template <>
struct PassedAs<const ::CUmemAllocationProp> {
    using type = const cu::CUmemAllocationProp;
};
template <>
struct PassedAs<const ::CUmemAccessDesc> {
    using type = const cu::CUmemAccessDesc;
};
template <class Result, class... Parameters>
struct PassedAs<Result(Parameters...)> {
    using type = typename PassedAs<Result>::type(typename PassedAs<Parameters>::type...);
};

template <class A, class B>
constexpr bool same = std::is_same_v<typename PassedAs<A>::type, typename PassedAs<B>::type>;

#define RC_FUNCTION(name, ...) static_assert(same<cu::type::name, decltype(::name)>, #name);
RC_CUDA_FUNCTIONS(RC_FUNCTION)
static_assert(sizeof(cu::CUuuid) == sizeof(::CUuuid));
static_assert(sizeof(cu::CUipcMemHandle) == sizeof(::CUipcMemHandle));
static_assert(sizeof(cu::CUmemAllocationProp) == sizeof(::CUmemAllocationProp));
static_assert(offsetof(cu::CUmemAllocationProp, location) == offsetof(::CUmemAllocationProp, location));
static_assert(sizeof(cu::CUmemAccessDesc) == sizeof(::CUmemAccessDesc));
static_assert(alignof(cu::CUipcMemHandle) == alignof(::CUipcMemHandle));

int main() {
    const bool handles = cu::STREAM_LEGACY == CU_STREAM_LEGACY && cu::STREAM_PER_THREAD == CU_STREAM_PER_THREAD;
    return handles ? 0 : 1;
}
