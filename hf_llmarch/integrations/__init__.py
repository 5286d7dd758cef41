"""What other tools need to know of our models: PEFT, vLLM, the command line of transformers, quantisers."""
