"""mpi4py.futures with MPIPoolExecutor, started by `-m mpi4py.futures`: rank 0 runs this program, the others work."""

from mpi4py.futures import MPIPoolExecutor


def power(x, exponent=2):
    return x**exponent


def fail(text):
    raise KeyError(text)


def main():
    with MPIPoolExecutor() as pool:
        pool.bootup()
        print("submit", pool.submit(power, 3, exponent=3).result())
        print("map", [*pool.map(power, range(8), chunksize=3)])
        print("starmap", [*pool.starmap(power, [(2, 3), (3, 2)])])
        error = pool.submit(fail, "on purpose").exception()
        print("failed", repr(error))
        print("workers", pool.num_workers)
        with MPIPoolExecutor(max_workers=1) as other:
            print("another pool", [*other.map(power, range(3), unordered=False)])
    try:
        pool.submit(power, 1)
    except RuntimeError as refused:
        print("shut down", type(refused).__name__)


if __name__ == "__main__":
    main()
