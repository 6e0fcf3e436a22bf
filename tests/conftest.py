import model  # noqa: F401 - before torch: it says how OpenMP's threads wait
