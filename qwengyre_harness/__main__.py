import sys

from qwengyre_harness.main import main

sys.exit(main(sys.argv[1:]))
