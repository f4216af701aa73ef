"""The web page: `python app.py [--host --port --root --auth --hooks --folder --proxy]`, which is `grpo-kit ui`."""

import sys

from kit.cli.app import main

if __name__ == "__main__":
    sys.argv.insert(1, "ui")
    main()
