// The wheel for another processor is built with the headers of Python and NumPy of the machine that builds it
// (.ci/wheels). Both describe the C types of that machine: here they must be those of this one.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <numpy/numpyconfig.h>

static_assert(SIZEOF_SHORT == sizeof(short) && SIZEOF_INT == sizeof(int) && SIZEOF_LONG == sizeof(long) &&
              SIZEOF_LONG_LONG == sizeof(long long) && SIZEOF_VOID_P == sizeof(void*) &&
              SIZEOF_SIZE_T == sizeof(size_t) && SIZEOF_WCHAR_T == sizeof(wchar_t) && SIZEOF_FLOAT == sizeof(float) &&
              SIZEOF_DOUBLE == sizeof(double) && SIZEOF_PID_T == sizeof(pid_t) && SIZEOF_TIME_T == sizeof(time_t));
static_assert(NPY_SIZEOF_SHORT == sizeof(short) && NPY_SIZEOF_INT == sizeof(int) && NPY_SIZEOF_LONG == sizeof(long) &&
              NPY_SIZEOF_LONGLONG == sizeof(long long) && NPY_SIZEOF_PY_INTPTR_T == sizeof(Py_ssize_t) &&
              NPY_SIZEOF_LONGDOUBLE == sizeof(long double));
