"""`python -m arr_coc` runs the `arr-coc` command."""

from arr_coc.cli import main

if __name__ == "__main__":
    main()
