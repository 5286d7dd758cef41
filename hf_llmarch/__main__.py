"""`python -m hf_llmarch`: the same as the command `hf-llmarch`."""

from hf_llmarch.cli import main

if __name__ == "__main__":
    main()
