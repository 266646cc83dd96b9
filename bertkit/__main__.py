"""`python -m bertkit`, so that `torchrun -m bertkit …` and `accelerate launch -m bertkit …` work."""

from bertkit.cli import main

if __name__ == "__main__":
    main()
