"""vLLM behind `engines.api`: an adapter over AsyncLLM, and what runs inside vLLM's own processes. Needs `make setup-vllm`."""
