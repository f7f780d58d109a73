// A c10d::Backend whose calls are methods of a process group in Python, for callers that torch has in C++.
//
// native.py compiles this file, once for each version of torch and of Python. A caller in C++ holds no GIL while it
// waits: the methods of Python release it.
#include <cxxabi.h>
#include <unistd.h>

#include <c10/core/SafePyObject.h>
#include <pybind11/chrono.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace {

using namespace c10d;
using torch::jit::PythonFutureWrapper;

using Milliseconds = std::chrono::milliseconds;
using Tensor = at::Tensor;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using Splits = std::vector<int64_t>;
using WorkPtr = c10::intrusive_ptr<Work>;

std::atomic<unsigned long> exiting_thread = 0;  // the one that ends the process

[[noreturn]] void wait_for_the_end() {
    for (;;) pause();
}

// Call Python. Once the process has begun to exit only the exiting thread returns. A daemon thread would take the GIL
// again in a destructor of pybind11, and Python before 3.14 unwinds a thread that does so too late: that is a SIGABRT.
py::object call_python(const py::object& callable, const py::tuple& arguments) {
    PyObject* result = nullptr;
    try {
        result = PyObject_Call(callable.ptr(), arguments.ptr(), nullptr);
    } catch (abi::__forced_unwind&) {
        wait_for_the_end();
    }
    if (exiting_thread != 0 && exiting_thread != PyThread_get_thread_ident()) {
        PyEval_SaveThread();
        wait_for_the_end();
    }
    if (result == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
}

// A reference to a Python object. Any thread may drop it, also after the interpreter has ended.
class Reference {
public:
    explicit Reference(py::object object) : object_(object.release().ptr(), getPyInterpreter()) {}

    // These need the GIL.
    py::object attribute(const char* name) const { return py::getattr(object_.ptr(getPyInterpreter()), name); }
    template <typename... Arguments>
    py::object call(const char* name, Arguments&&... arguments) const {
        return call_python(attribute(name), py::make_tuple(std::forward<Arguments>(arguments)...));
    }

private:
    c10::SafePyObject object_;
};

// The error of Python that is set, as an exception that may be thrown more than once.
python_error take_error() {
    python_error error;
    error.persist();
    return error;
}

// A TorchWork of works.py.
class PythonWork final : public Work {
public:
    explicit PythonWork(py::object work) : work_(std::move(work)) {}

    bool wait(Milliseconds timeout) override { return get<bool>("wait", timeout); }
    void synchronize() override { wait(kNoTimeout); }
    bool isCompleted() override { return get<bool>("is_completed"); }
    bool isSuccess() const override { return get<bool>("is_success"); }
    int sourceRank() const override { return get<int>("source_rank"); }
    Tensors result() override { return get<Tensors>("result"); }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
        return get<std::shared_ptr<PythonFutureWrapper>>("get_future")->fut;
    }
    std::exception_ptr exception() const override {
        py::gil_scoped_acquire gil;
        py::object error = work_.call("exception");
        if (error.is_none()) return nullptr;
        PyErr_SetObject(py::type::handle_of(error).ptr(), error.ptr());
        return std::make_exception_ptr(take_error());
    }

private:
    template <typename Result, typename... Arguments>
    Result get(const char* name, const Arguments&... arguments) const {
        py::gil_scoped_acquire gil;
        return work_.call(name, arguments...).template cast<Result>();
    }

    Reference work_;
};

class PythonBackend final : public Backend {
public:
    PythonBackend(py::object group, int rank, int size) : Backend(rank, size), group_(std::move(group)) {}

    const Reference& group() const { return group_; }
    const std::string getBackendName() const override { return "ringcomm"; }

    WorkPtr allreduce(Tensors& x, const AllreduceOptions& o) override { return start("allreduce", x, o); }
    WorkPtr allreduce_sparse(Tensors& x, const AllreduceOptions& o) override { return start("allreduce", x, o); }
    WorkPtr allreduce_coalesced(Tensors& x, const AllreduceCoalescedOptions& o) override {
        return start("allreduce_coalesced", x, o);
    }
    WorkPtr broadcast(Tensors& x, const BroadcastOptions& o) override { return start("broadcast", x, o); }
    WorkPtr reduce(Tensors& x, const ReduceOptions& o) override { return start("reduce", x, o); }
    WorkPtr allgather(Lists& out, Tensors& x, const AllgatherOptions& o) override {
        return start("allgather", out, x, o);
    }
    WorkPtr allgather_coalesced(Lists& out, Tensors& x, const AllgatherOptions& o) override {
        return start("allgather_coalesced", out, x, o);
    }
    WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& x, const AllgatherOptions& o) override {
        return start("all_gather_single_coalesced", out, x, o);
    }
    WorkPtr _allgather_base(Tensor& out, Tensor& x, const AllgatherOptions& o) override {
        return start("all_gather_single", out, x, o);
    }
    WorkPtr gather(Lists& out, Tensors& x, const GatherOptions& o) override { return start("gather", out, x, o); }
    WorkPtr scatter(Tensors& out, Lists& x, const ScatterOptions& o) override { return start("scatter", out, x, o); }
    WorkPtr reduce_scatter(Tensors& out, Lists& x, const ReduceScatterOptions& o) override {
        return start("reduce_scatter", out, x, o);
    }
    WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& x, const ReduceScatterOptions& o) override {
        return start("reduce_scatter_single_coalesced", out, x, o);
    }
    WorkPtr _reduce_scatter_base(Tensor& out, Tensor& x, const ReduceScatterOptions& o) override {
        return start("reduce_scatter_single", out, x, o);
    }
    WorkPtr alltoall(Tensors& out, Tensors& x, const AllToAllOptions& o) override {
        return start("alltoall", out, x, o);
    }
    WorkPtr alltoall_base(Tensor& out, Tensor& x, Splits& received, Splits& sent, const AllToAllOptions& o) override {
        return start("all_to_all_single", out, x, received, sent, o);
    }
    WorkPtr barrier(const BarrierOptions& o) override { return start("barrier", o); }
    WorkPtr send(Tensors& x, int peer, int tag) override { return start("send", x, peer, tag); }
    WorkPtr recv(Tensors& x, int peer, int tag) override { return start("recv", x, peer, tag); }
    WorkPtr recvAnysource(Tensors& x, int tag) override { return start("recv_anysource", x, tag); }

    void startCoalescing() override { call("_start_coalescing"); }
    WorkPtr endCoalescing() override { return start("_end_coalescing"); }

    void setSequenceNumberForGroup() override {}  // that of the first collective is always the same
    uint64_t getSequenceNumberForGroup() override {
        py::gil_scoped_acquire gil;
        return group_.call("_get_sequence_number_for_group").cast<uint64_t>();
    }

    // Virtual since torch 2.6 or later.
    bool supportsTensorAlloc(c10::DeviceIndex index) {
        py::gil_scoped_acquire gil;
        return group_.call("supports_tensor_alloc", c10::Device(c10::kCUDA, index)).cast<bool>();
    }
    Tensor allocateTensor(long size, at::TensorOptions options) {
        py::gil_scoped_acquire gil;
        return group_.call("allocate_tensor", size, options.dtype().toScalarType(), options.device()).cast<Tensor>();
    }
    void setTimeout(Milliseconds timeout) { call("set_timeout", timeout); }
    void abort() { call("abort"); }
    void shutdown() { call("shutdown"); }
    c10::intrusive_ptr<Options> getBackendOptions() {
        py::gil_scoped_acquire gil;
        return group_.attribute("options").cast<c10::intrusive_ptr<Options>>();
    }

private:
    template <typename... Arguments>
    WorkPtr start(const char* name, Arguments&... arguments) {
        py::gil_scoped_acquire gil;
        return c10::make_intrusive<PythonWork>(group_.call(name, arguments...));
    }
    template <typename... Arguments>
    void call(const char* name, const Arguments&... arguments) {
        py::gil_scoped_acquire gil;
        group_.call(name, arguments...);
    }

    Reference group_;
};

// The future of the tensors that `work.result()` returns, or of the error that it raises, once `done` is complete. A
// future that Python makes holds Python objects, in which hooks in C++ find no tensors, and no type of an error.
std::shared_ptr<PythonFutureWrapper> result_after(const PythonFutureWrapper& done, py::object work) {
    auto result = [work = Reference(std::move(work))](c10::ivalue::Future&) -> c10::IValue {
        py::gil_scoped_acquire gil;
        try {
            return work.call("result").cast<Tensors>();
        } catch (py::error_already_set& error) {
            error.restore();
            throw take_error();
        }
    };
    return std::make_shared<PythonFutureWrapper>(done.fut->then(std::move(result), c10::ListType::ofTensors()));
}

}  // namespace

PYBIND11_MODULE(ringcomm_c10d, module) {
    py::class_<PythonBackend, Backend, c10::intrusive_ptr<PythonBackend>>(module, "Backend")
        .def(py::init<py::object, int, int>())
        .def("__getattr__",
             [](const PythonBackend& backend, const char* name) { return backend.group().attribute(name); });
    module.def("result_after", result_after);
    module.def("at_exit", [] { exiting_thread = PyThread_get_thread_ident(); });
}
