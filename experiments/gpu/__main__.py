"""`.ci/gpu`: takes the steps of a machine with a GPU, as many as the time allows; see docs/gpu.md."""

import sys

from gpipe_bench.experiments.gpu.run import main

if __name__ == "__main__":
    sys.exit(main())
